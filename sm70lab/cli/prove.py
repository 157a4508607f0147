"""``sm70lab prove``: is a route exact? Tokens and states against the no-draft run's, round by round."""

from __future__ import annotations

import json
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sm70lab.cli import simple
from sm70lab.errors import UsageError
from sm70lab.schema import ExperimentConfig, KernelSet
from sm70lab.tracking.environment import gpus

HELP = """\
sm70lab prove: is a route exact?

  sm70lab prove route=split                      on the tiny float64 hybrid, under a minute
  sm70lab prove route=spec_core_003 model=web    on the embedded model, 6,000 tokens
  sm70lab prove route=split hazard=no_conv_rollback   a fault put in on purpose: must be found

Greedy and at temperature 1 with coupled drafts, alone and in a batch of unequal lengths, twice in one
process, with a canary before and after, every token must be the no-draft run's (ID) and every layer's
conv window and SSM state a one-row replay's (ST); with exact arithmetic to the last bit (NUM).

Settings: every setting of run, and
  tokens=2000             output tokens of the solo runs (6000 with model=web)
Without model=: model=tiny route.state.block_size=8 route.state.prefill_chunk=5, and model=web for
route=whole_round on a GPU, whose kernels have no float64.
Always, unless given: route.state.prefix_blocks=64 target.max_num_seqs=4 (not for route=whole_round on a GPU,
which has neither) and route.numerics=exact.

Hazards (hazard=name):
{hazards}

  --config-dir DIR (group files of yours, searched first), --json, --help

Exit codes: 0 exact, 1 fault, 2 usage or set-up, 3 only ties.
"""
TINY = {"model": "tiny", "route.state.block_size": "8", "route.state.prefill_chunk": "5"}
ALWAYS = {"route.state.prefix_blocks": "64", "target.max_num_seqs": "4", "route.numerics": "exact"}
NOT_CAPTURED = ("route.state.prefix_blocks", "target.max_num_seqs")  # what a whole round on a GPU has not
TOKENS = {"tiny": 2000, "random": 2000}
WORDS = {
    0: ("EXACT", "bold white on green"),
    1: ("FAULT", "bold white on red"),
    3: ("TIES", "bold black on yellow"),
}


def main(arguments: list[str]) -> int:
    """Prove one route and return the exit code."""
    options = simple.parse(_with_defaults(arguments), _help(arguments), own=("tokens",))
    if options is None:
        return 0
    config = options.config
    tokens = _tokens(options.own.get("tokens"), config)
    as_json = config.display.value == "json"
    console = Console(stderr=True, highlight=False)
    with console.status("loading") as status:
        proof = _prove(config, tokens, lambda name: None if as_json else status.update(f"proving: {name}"))
    if as_json:
        print(json.dumps(_record(config, proof)))
    else:
        _show(config, proof)
    code: int = proof.exit_code
    return code


def _with_defaults(arguments: list[str]) -> list[str]:
    given = {argument.partition("=")[0] for argument in arguments}
    chosen = dict(argument.partition("=")[::2] for argument in arguments if "=" in argument)
    captured = chosen.get("route") == "whole_round" and on_gpu(chosen.get("target.device", "auto"))
    model = chosen.get("model", "web" if captured else "tiny")
    defaults = ALWAYS | (TINY if model == "tiny" else {"model": model})
    if captured:
        defaults = {key: defaults[key] for key in defaults if key not in NOT_CAPTURED}
    small_blocks = "route.state.block_size" in defaults
    if small_blocks and chosen.get("route.draft_tokens") == "8":  # a round must not cross two block edges
        defaults["route.state.block_size"] = "9"
    return [*(f"{key}={value}" for key, value in defaults.items() if key not in given), *arguments]


def on_gpu(device: str) -> bool:
    """Whether ``target.device`` means a GPU here."""
    return device.startswith("cuda") or (device == "auto" and bool(gpus()))


def _help(arguments: list[str]) -> str:
    if not {"--help", "-h"} & set(arguments):
        return ""
    from sm70lab.engine.hazards import HAZARDS

    lines = [f"  {name:24}{(kind.__doc__ or '').strip().splitlines()[0]}" for name, kind in HAZARDS.items()]
    return HELP.format(hazards="\n".join(lines))


def _tokens(text: str | None, config: ExperimentConfig) -> int:
    if text is None:
        return TOKENS.get(config.model.name, 6000)
    if not text.isdecimal() or int(text) < 16:
        raise UsageError(f"tokens={text}: must be a whole number, 16 or more")
    return int(text)


def _prove(config: ExperimentConfig, tokens: int, observe: Any) -> Any:
    import torch

    from sm70lab.judge.proof import Prover
    from sm70lab.schema import GraphMode, ModelDtype
    from sm70lab.targets.engine import EngineTarget

    target = EngineTarget(config)
    torch.set_num_threads(config.target.threads or torch.get_num_threads())
    source, device = target.source, target.device
    model = source.build(config.model.dtype, device, config.target.kernels)
    if config.route.compile:
        model.compile_rounds(pieces=config.route.graph is GraphMode.piecewise)
    wide = config.model.dtype in (ModelDtype.float32, ModelDtype.float64)
    trusted = model if wide else source.build(ModelDtype.float32, device, KernelSet.plain)
    prompts = _prompts(config, target)
    stop_ids = target.stop_ids
    return Prover(config, model, trusted, prompts, tokens, source.frequent, observe, stop_ids).prove()


def _prompts(config: ExperimentConfig, target: Any) -> list[list[int]]:
    """Four prompts of unequal lengths: made up for a random model, else the workload's and parts of them."""
    if config.model.name in TOKENS:
        return prompts_of(min(61, target.source.arch.vocab_size))
    ids = [list(prompt.token_ids) for prompt in target.prompts()]
    first, last = ids[0], ids[-1]
    return [first, last, first[: len(first) // 2 + 1], last[: 2 * len(last) // 3 + 1]]


def prompts_of(ids: int) -> list[list[int]]:
    """Four prompts of unequal lengths that share no beginning, over the first ``ids`` token ids."""
    return [[(7 * i + first) % ids for i in range(n)] for n, first in ((13, 3), (10, 20), (14, 31), (18, 44))]


def _record(config: ExperimentConfig, proof: Any) -> dict[str, Any]:
    return {
        "exit_code": proof.exit_code,
        "proof": WORDS[proof.exit_code][0].lower(),
        "route": config.route.name,
        "scheme": config.route.state.scheme,
        "model": config.model.name,
        "hazard": proof.hazard,
        "hazard_cannot_act": proof.cannot_act,
        "seconds": round(proof.seconds, 2),
        "runs": [
            {k: v for k, v in vars(run).items() if k not in ("outputs", "findings")} for run in proof.runs
        ],
        "left_out": proof.skipped,
        "findings": [vars(finding) for finding in proof.findings],
    }


def _show(config: ExperimentConfig, proof: Any) -> None:
    route = config.route
    title = (
        f"{route.name}, scheme {route.state.scheme}, {route.draft_tokens} drafts, model {config.model.name}"
    )
    table = Table("run", title=title, title_justify="left", box=SIMPLE_HEAD)
    for heading in ("tokens", "a round", "edges", "cached", "states", "off by", "found"):
        table.add_column(heading, justify="left" if heading == "found" else "right")
    for run in proof.runs:
        found = " ".join(f.check + (" tie" if f.tie else "") for f in run.findings) or "exact"
        style = "red" if run.faulty else "yellow" if run.findings else "green"
        table.add_row(
            run.name,
            f"{run.tokens:,}",
            f"{run.tokens / max(run.rounds, 1):.2f}",
            str(run.edges),
            str(run.reused),
            f"{run.states:,}",
            "0" if not run.worst_state else f"{run.worst_state:.1e}",
            Text(found, style=style),
        )
    console = Console(highlight=False)
    if proof.hazard != "none":
        console.print(
            Text(f" HAZARD {proof.hazard}: a fault put in on purpose ", style="bold white on magenta")
        )
    console.print(table)
    for finding in proof.findings:
        console.print(f"{finding.check}, {finding.run}: {finding.line}", markup=False, soft_wrap=True)
    if proof.skipped:
        console.print(f"left out after the fault: {', '.join(proof.skipped)}", markup=False, soft_wrap=True)
    if proof.cannot_act:
        console.print(
            f"hazard {proof.hazard} cannot act here: {proof.cannot_act}", markup=False, soft_wrap=True
        )
    word, style = WORDS[proof.exit_code]
    console.print(Text(f" {word} ", style=style), f"{proof.seconds:.1f} s")
