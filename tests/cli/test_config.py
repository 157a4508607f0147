"""Composition: every YAML in conf/, the short forms, and one's own folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from lab import Lab
from omegaconf import OmegaConf

from sm70lab.cli import main
from sm70lab.cli.overrides import expand_model_path, find_groups
from sm70lab.config import compose, conf_dir, explain, from_plain, plain
from sm70lab.errors import UsageError
from sm70lab.schema import ExperimentConfig
from sm70lab.tracking.published import matrix

GROUPS = find_groups([conf_dir()])
AUDIT_ROWS = {row.id for row in matrix()[1]}  # tests/tracking/test_ledger.py has them
CHOICES = [
    (group, choice)
    for group, choices in GROUPS.items()
    for choice in choices
    if not (group == "experiment" and choice in AUDIT_ROWS)
]


@pytest.mark.parametrize(("group", "choice"), CHOICES, ids=[f"{g}={c}" for g, c in CHOICES])
def test_every_choice_composes(group: str, choice: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    folder = (
        ["model=checkpoint", f"model.path={tmp_path}"] if choice in ("checkpoint", "fixed_quality4") else []
    )
    needed = {("target", "openai"): ["target.base_url=http://127.0.0.1:9/v1"]}
    on_disk = ["model=checkpoint", f"model.path={tmp_path}"]
    needed["target", "vllm"] = on_disk
    needed["serving", "v100_tp2_27b_awq"] = ["target=vllm", *on_disk]
    if (group, choice) == ("model", "served"):
        needed[group, choice] = ["target=openai", "target.base_url=http://127.0.0.1:9/v1"]
    config = compose([f"{group}={choice}", *folder, *needed.get((group, choice), [])])
    assert isinstance(config, ExperimentConfig)
    if group in ("route", "workload", "model", "target", "gate"):
        assert getattr(config, group).name == choice


def test_presets_say_how_they_are_run() -> None:
    for preset in GROUPS["experiment"]:
        lines = (conf_dir() / "experiment" / f"{preset}.yaml").read_text(encoding="utf-8").splitlines()
        header = [line for line in lines if line.startswith("#")]
        assert header[0] == "# @package _global_"
        assert any(f"experiment={preset}" in line and "sm70lab" in line for line in header)


def test_defaults() -> None:
    config = compose()
    assert (config.route.name, config.target.name, config.model.name) == ("spec_core_003", "engine", "web")
    assert (config.workload.name, config.gate.name) == ("web", "strict")
    assert (config.sampling.temperature, config.sampling.top_p, config.sampling.top_k) == (1.0, 0.95, 20)
    assert (config.seed, config.repeats) == (20260620, 1)
    assert config.route.spec_core_003
    assert not config.route.full_forward
    assert config.model.path is None
    assert [p.max_tokens or config.workload.max_tokens for p in config.workload.prompts] == [3000, 3000]
    assert Path(config.tracking.runs_dir).is_absolute()


def test_the_fields_four_prompts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    workload = compose(["experiment=fixed_quality4", f"model.path={tmp_path}"]).workload
    assert workload.prompts[0].user == "帮我用html做一个macos,功能要尽可能全,要尽可能还"
    assert workload.prompts[0].contract == "html"
    assert [p.max_tokens or workload.max_tokens for p in workload.prompts] == [6000, 2048, 2048, 2048]


def test_a_preset_leaves_the_route_to_the_command_line() -> None:
    assert compose(["experiment=tiny", "route=no_mtp"]).route.draft_tokens == 0


@pytest.mark.parametrize(
    ("given", "multirun", "expanded"),
    [
        ("model=/a/b", False, ["model=checkpoint", "model.path='/a/b'"]),
        ("model=/a b/it's,1", False, ["model=checkpoint", "model.path='/a b/it\\'s,1'"]),
        ("model=/a,/b", True, ["model=checkpoint", "model.path='/a','/b'"]),
        ("model=~/m", False, ["model=checkpoint", f"model.path='{Path.home()}/m'"]),
        ("model=./m", False, ["model=checkpoint", f"model.path='{Path.cwd()}/m'"]),
        ("model=tiny", False, ["model=tiny"]),
        ("tracking.uri=http://x/y", False, ["tracking.uri=http://x/y"]),
    ],
)
def test_model_folder_is_short_for_checkpoint(given: str, multirun: bool, expanded: list[str]) -> None:
    assert expand_model_path([given], multirun) == expanded


def test_a_folder_with_blanks_and_quotes_arrives_whole(tmp_path: Path) -> None:
    folder = tmp_path / "it's a (model)=1, really"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    config = compose(expand_model_path([f"model={folder}"], multirun=False))
    assert config.model.path == str(folder)


def test_a_route_is_a_yaml_of_two_lines_in_ones_own_folder(lab: Lab) -> None:
    (lab.folder / "mine" / "route").mkdir(parents=True)
    (lab.folder / "mine" / "route" / "quick3.yaml").write_text("name: quick3\ndraft_tokens: 3\n")
    done = lab.run("--config-dir", "mine", "route=quick3", "--cfg", "job", "--package", "route", engine=True)
    assert done.returncode == 0
    assert OmegaConf.create(done.stdout).draft_tokens == 3


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of group files: a route of its own, and one by a shipped route's name."""
    folder = tmp_path / "mine, it's"
    (folder / "route").mkdir(parents=True)
    (folder / "route" / "quick3.yaml").write_text("name: quick3\ndraft_tokens: 3\n")
    (folder / "route" / "split.yaml").write_text("name: split\ndraft_tokens: 2\n")
    monkeypatch.chdir(tmp_path)
    return folder


def test_ones_own_folder_is_searched_first(mine: Path, lab: Lab) -> None:
    assert compose(["route=split"], mine).route.draft_tokens == 2
    assert compose(["route=no_mtp"], mine).route.draft_tokens == 0
    done = lab.run("-cd", mine.name, "route=split", "--cfg", "job", "--package", "route", engine=True)
    assert OmegaConf.create(done.stdout).draft_tokens == 2
    done = lab.run("--help", f"--config-dir={mine}", engine=True)
    assert "full_forward" in done.stdout
    assert "quick3" in done.stdout


def test_a_record_shows_the_folder_as_it_was_typed(mine: Path, lab: Lab) -> None:
    done = lab.run("-cd", mine.name, "experiment=tiny", "name=t", "route=quick3", "tracking=off")
    assert done.returncode == 0
    (folder,) = lab.folders()
    command = json.loads((folder / "environment.json").read_text())["command"]
    assert command[1:3] == ["--config-dir", str(mine)]
    assert not any(word.startswith("--config-dir=") for word in command)


COMMANDS = [
    ["run"],
    ["prove"],
    ["compare", "quick3", "split", "--no-run"],
    ["ledger"],
    ["note", "RUN", "a text"],
    ["pin", "RUN"],
    ["report", "RUN"],
    ["ui"],
    ["sync"],
    ["doctor"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=[c[0] for c in COMMANDS])
def test_every_command_takes_ones_own_folder(
    mine: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (mine / "local").mkdir()
    (mine / "local" / "default.yaml").write_text("# @package _global_\nseed: -5\n")
    given = [f"--config-dir={mine}"] if command[0] == "note" else ["-cd", str(mine)]
    assert main([*command, *given]) == 2
    assert "seed=-5: must be 0 to" in capsys.readouterr().err


def test_compare_knows_the_routes_of_ones_own_folder(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "quick3", "split", "--no-run", "--config-dir", mine.name]) == 2
    assert "quick3: no finished run with these settings" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--config-dir"], "--config-dir: needs a value"),
        (["-cd", "nowhere"], "--config-dir nowhere: no such folder"),
        (["--config_dir", "."], "did you mean --config-dir?"),
    ],
)
def test_a_folder_that_cannot_be_searched(
    given: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in (["run"], ["ledger"]):
        assert main([*command, *given]) == 2
        assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "audit"),
    [("audit: false", False), ("audit: off", False), ("audit: 2", None), ("audit: 0", None)],
)
def test_a_number_is_no_truth_value_in_yaml(line: str, audit: bool | None, mine: Path) -> None:
    (mine / "experiment").mkdir()
    (mine / "experiment" / "other.yaml").write_text(f"# @package _global_\n{line}\n")
    recorded = plain(compose()) | {"audit": yaml.safe_load(line)["audit"]}
    if audit is not None:
        assert compose(["experiment=other"], mine).audit is from_plain(recorded).audit is audit
        return
    for read in (lambda: compose(["experiment=other"], mine), lambda: from_plain(recorded)):
        with pytest.raises(UsageError, match=r"audit: Value '[20]' of type 'int' is incompatible"):
            read()


def test_every_message_is_one_line() -> None:
    assert "\n" not in str(explain(ValueError("a\nb\n  c")))
    with pytest.raises(UsageError, match="no such folder"):
        compose(["model=checkpoint", "model.path=/no/such"])
