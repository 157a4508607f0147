"""Every mistake costs one line, exit code 2, no run folder and little time."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from lab import Lab

from sm70lab.cli import main

# arguments, and words the one line must hold
MISTAKES = [
    ("route=ful_forward", "no such route; did you mean full_forward? (as_served, context_core, full_forward"),
    ("experiment=nope", "no such experiment; choose from"),
    ("tracking=of", "did you mean off?"),
    ("route=null", "route=null: choose from"),
    ("rote=split", "no such setting; did you mean route?"),
    ("route.draft_tokenz=3", "did you mean route.draft_tokens?"),
    ("seed.x=3", "seed is a single value"),
    ("+extra=1", "+extra=1: no such setting"),
    ("~seed", "cannot be deleted"),
    ("seed=abc", "seed=abc: must be a whole number"),
    ("seed=-1", "seed=-1: must be 0 to"),
    ("audit=2", "audit=2: must be true or false"),
    ("audit=0", "audit=0: must be true or false"),
    ("force=yes", "force=yes: must be true or false"),
    ("route.compile=1", "route.compile=1: must be true or false"),
    ("tracking.mlflow=2", "tracking.mlflow=2: must be true or false"),
    ("seed=1,2", "add -m"),
    ("seed=(1", "cannot be read"),
    ("display=loud", "one of rich, quiet, json"),
    ("route.state.dtype=int8", "one of auto, float16, float32, float64"),
    ("route.draft_tokens=9", "must be 0 to 8"),
    ("route.draft_tokens=-1", "must be 0 to 8"),
    ("route.state.block_size=0", "at least 1 token"),
    ("route=full_forward route.spec_core_003=true", "route.full_forward=true and route.spec_core_003=true"),
    ("route=input_core route.context_core=true", "route.input_core=true and route.context_core=true"),
    ("route=packed_recurrent route.draft_tokens=2", "rounds of one row, and these have 3"),
    ("route=packed_recurrent route.state.scheme=fold", "use route.state.scheme=slots"),
    ("route.graph=full", "route.graph=full and route.spec_core_003=true contradict each other"),
    (
        "route=whole_round target.kernels=plain target.device=cpu",
        "target.kernels=plain: route.graph=full records native calls",
    ),
    (
        "route=whole_round model.dtype=float16",
        "full records native calls: native kernels compute in float32 and float64, not in float16",
    ),
    ("route.shortlist_size=0", "must be at least 1 id"),
    ("route.state.prefix_blocks=-1", "must be 0 (off) or more"),
    ("route.state.prefix_blocks=4 route.state.block_size=3", "must be above route.draft_tokens=4"),
    ("target.max_num_seqs=0", "must be 1 to 256"),
    ("route.graph=piecewise", "set route.compile=true"),
    ("route.graph=piecewise route.compile=true", "CUDA graphs are captured on a GPU, not on a cpu"),
    ("route.graph=half", "one of none, piecewise, full, full_and_piecewise"),
    ("sampling.temperature=-0.1", "must be 0 (greedy) or 0.0001 to 10000"),
    ("sampling.temperature=nan", "must be 0 (greedy) or 0.0001 to 10000"),
    ("sampling.temperature=1e-5", "must be 0 (greedy) or 0.0001 to 10000"),
    ("sampling.temperature=1e5", "must be 0 (greedy) or 0.0001 to 10000"),
    ("sampling.temperature=inf", "must be 0 (greedy) or 0.0001 to 10000"),
    ("sampling.top_p=0", "must be 0.000001 to 1"),
    ("sampling.top_p=1e-7", "must be 0.000001 to 1"),
    ("sampling.top_p=1.1", "must be 0.000001 to 1"),
    ("sampling.repetition_penalty=0.001", "must be 0.01 to 100"),
    ("sampling.repetition_penalty=101", "must be 0.01 to 100"),
    ("sampling.presence_penalty=1e13", "must be -1e12 to 1e12"),
    ("sampling.frequency_penalty=-1e13", "must be -1e12 to 1e12"),
    ("sampling.frequency_penalty=nan", "must be -1e12 to 1e12"),
    ("sampling.top_k=-1", "must be 0 (off) or more"),
    ("workload.max_tokens=-5", "must be at least 1 token"),
    ("workload.prompts=[]", "at least one prompt"),
    ("workload.prompts=[{name: a}]", "it has neither"),
    ("workload.prompts=[{name: a,text: x,user: y}]", "it has both"),
    ("workload.prompts=[{name: a,text: x,contract: xml}]", "no such contract; known: html"),
    ("workload.prompts=[{name: a,text: x},{name: a,text: y}]", "names must differ"),
    ("workload.prompts=[{name: ../a,text: x}]", "must be a file name"),
    ("name=a/b", "must be a file name"),
    ("repeats=0", "must be at least 1, or auto"),
    ("repeats=sometimes", "must be at least 1, or auto"),
    ("repeats=1.5", "must be a whole number, or auto"),
    ("first_repeat=-1", "must be 0 to 1000000"),
    ("gate.bad_markers=['']", "an empty marker is in every text"),
    ("sprt.p0=0.9", "are those of repeats=auto"),
    ("repeats=auto sprt.p0=1", "sprt.p0=1.0: must be between 0 and 1"),
    ("repeats=auto sprt.p1=0.95", "must be below sprt.p0=0.95"),
    ("repeats=auto sprt.alpha=0.5 sprt.beta=0.5", "must sum to less than 1"),
    ("repeats=auto sprt.max_repeats=0", "must be at least 1"),
    ("model=/no/such/folder", "no such folder"),
    ("model=./", "no config.json there"),
    ("model=checkpoint", "needs model.path"),
    ("model=checkpoint model.path=nowhere", "no such folder"),
    ("model=checkpoint model.path=", "model.path=: must name a folder"),
    ("model.path=./", "model.path and model=tiny contradict each other"),
    ("model=random model.path=./", "model.path and model=random contradict each other"),
    ("model=web +model.shape.hidden_size=8", "model.shape and model=web contradict each other"),
    ("model=web model.seed=3", "model.seed and model=web contradict each other"),
    ("model=web model.path=./", "model.path and model=web contradict each other"),
    ("model=./ model.seed=3", "model.seed and model=checkpoint contradict each other"),
    ("target.device=tpu", "must be auto, cpu, cuda or cuda:N"),
    ("target.device=cuda:99", "target.device=cuda:99"),
    ("target.threads=0", "must be at least 1, or null"),
    ("tracking.uri=file:///x", "must be http(s)"),
    ("tracking.uri='postgresql://h:x/db'", "a port must be a number"),
    ("tracking.uri='http://[::1/x'", "cannot be read"),
    ("tracking.uri='http://a\tb/x'", "must not hold blanks"),
    ("tracking.timeout_s=0", "above 0 seconds"),
    ('tracking.sweep="it\'s"', "letters, digits"),
    ("tracking.runs_dir='~nobody-of-this-name/x'", "no such user's folder"),
    ("tracking.runs_dir=", "tracking.runs_dir=: must name a folder"),
    ("tracking.runs_dir='\t'", "must name a folder"),
    ("gate.audit_alpha=2", "between 0 and 1"),
    ("--jsn", "did you mean --json?"),
    ("--cfg nothing", "choose (job, hydra, all)"),
    ("--config-dir nowhere", "no such folder"),
    ("--config-name nothing", "Cannot find primary config"),
    ("hydra/launcher=nothing", "hydra/launcher"),
    ("hydra.run.dir=here", "tracking.runs_dir"),
    ("rum", "no such command; did you mean run?"),
    ("ui port=99999", "must be 1 to 65535"),
    ("ui", "no MLflow store there"),
    ("sync --all", "no such option"),
]
HEAVY = ("torch", "mlflow", "scipy", "matplotlib", "pyarrow", "transformers")


def given(arguments: str) -> list[str]:
    split = arguments.split(" ") if "workload" not in arguments else [arguments]
    return split if split[0] in ("ui", "sync", "rum") else ["experiment=tiny", *split]


@pytest.mark.parametrize(("arguments", "words"), MISTAKES, ids=[m[0] for m in MISTAKES])
def test_one_line_and_exit_code_2(
    arguments: str,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(given(arguments)) == 2
    out, err = capsys.readouterr()
    assert err.count("\n") == 1
    assert words in err
    assert "Traceback" not in err
    assert out == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments", [m[0] for m in MISTAKES[::2]])
def test_the_same_from_a_shell(lab: Lab, arguments: str) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = lab.run(*given(arguments), engine=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert list(lab.folder.iterdir()) == []
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 3


def test_json_mode_says_it_in_json(lab: Lab) -> None:
    done = lab.run("experiment=tiny", "seed=abc", "--json", engine=True)
    assert json.loads(done.stdout) == {"exit_code": 2, "error": "seed=abc: must be a whole number"}


@pytest.mark.parametrize(
    ("yaml", "words"),
    [
        ("nam: x\n", "route/mine.yaml: route.nam: no such setting; did you mean name?"),
        ("name: [x\n", "mine.yaml:2: not YAML"),
        ("draft_tokens: many\n", "route/mine.yaml: route.draft_tokens"),
        ("draft_tokens: 12\n", "route.draft_tokens=12: must be 0 to 8"),
    ],
)
def test_mistakes_in_a_yaml_of_ones_own(lab: Lab, yaml: str, words: str) -> None:
    (lab.folder / "mine" / "route").mkdir(parents=True)
    (lab.folder / "mine" / "route" / "mine.yaml").write_text(yaml)
    done = lab.run("--config-dir", "mine", "experiment=tiny", "route=mine", engine=True)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1, done.stderr
    assert words in done.stderr


@pytest.mark.parametrize(
    "arguments", [["--help"], ["experiment=tiny", "route.draft_tokens=9"], ["--cfg", "job"]]
)
def test_nothing_heavy_is_imported(tmp_path: Path, arguments: list[str]) -> None:
    code = (
        "import sys; from sm70lab.cli import main; main(sys.argv[1:]);"
        f"print([m for m in {HEAVY!r} if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.stderr.splitlines()[-1] == "[]"


def test_starts_fast() -> None:
    """The best of three: a busy machine's CPU seconds are longer, too."""

    def cpu_seconds(*command: str) -> float:
        return min(once(*command) for _ in range(3))

    def once(*command: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *command], capture_output=True, check=True, timeout=60)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert cpu_seconds("-c", "import sm70lab") < 0.3
    assert (
        cpu_seconds("-m", "sm70lab", "--help") < 2.5
    )  # Hydra copies all settings once a group, to list them
