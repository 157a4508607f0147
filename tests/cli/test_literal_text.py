"""Prompts and stop strings are the model's input: ``${…}`` in them is text, never a setting."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from lab import Lab

from sm70lab.config import compose, plain
from sm70lab.raw_text import escape, raw_override, unescape

LITERALS = [
    "${name}",
    "a ${x + y} b",
    "${oc.env:HOME}",
    "`${items.map(i => `<li>${i}</li>`)}` \\${kept} \\\\${two}",
    "${seed}",
    "${",
]


@pytest.mark.parametrize("text", LITERALS)
def test_from_the_command_line(text: str) -> None:
    quoted = "'" + text + "'"
    config = compose(
        [
            "experiment=tiny",
            f"workload.prompts=[{{name: a, text: {quoted}}}, {{name: b, user: {quoted}}}]",
            f"sampling.stop_strings=[{quoted}]",
        ]
    )
    assert [config.workload.prompts[0].text, config.workload.prompts[1].user] == [text, text]
    assert config.sampling.stop_strings == [text]
    assert plain(config)["workload"]["prompts"][0]["text"] == text


@pytest.mark.parametrize("text", LITERALS)
def test_from_a_yaml_and_into_the_record(lab: Lab, text: str) -> None:
    for group in ("workload", "sampling"):
        (lab.folder / "mine" / group).mkdir(parents=True)
    prompts = [
        {"name": "a", "text": text},
        {"name": "b", "user": text, "max_tokens": "${workload.max_tokens}"},
    ]
    workload = {"name": "w", "max_tokens": 90, "prompts": prompts}
    (lab.folder / "mine" / "workload" / "w.yaml").write_text(yaml.safe_dump(workload))
    (lab.folder / "mine" / "sampling" / "s.yaml").write_text(yaml.safe_dump({"stop_strings": [text]}))
    done = lab.run("--config-dir", "mine", "experiment=tiny", "name=t", "workload=w", "sampling=s")
    assert done.returncode in (0, 3), done.stderr
    (folder,) = (f for f in lab.folders() if f.is_dir())
    record = yaml.safe_load((folder / "config.yaml").read_text())
    assert [record["workload"]["prompts"][0]["text"], record["workload"]["prompts"][1]["user"]] == [text] * 2
    assert record["workload"]["prompts"][1]["max_tokens"] == 90
    assert record["sampling"]["stop_strings"] == [text]
    assert not (folder / "MLFLOW_PENDING").exists(), done.stderr


def test_a_sweep_and_the_recorded_command(lab: Lab) -> None:
    prompts = "workload.prompts=[{name: a, text: '${x + y}'}]"
    done = lab.run("-m", "experiment=tiny", "name=t", "tracking=off", "seed=1,2", prompts)
    assert done.returncode in (0, 3), done.stderr
    assert "text:'${x + y}'" in done.stdout
    folder = lab.folders()[0]
    assert (
        yaml.safe_load((folder / "config.yaml").read_text())["workload"]["prompts"][0]["text"] == "${x + y}"
    )
    assert f'"{prompts}"' in (folder / "environment.json").read_text()


def test_other_settings_still_refer_to_each_other(tmp_path: Path) -> None:
    config = compose(["experiment=tiny", "seed=7", "model.seed=${seed}"])
    assert config.model.seed == 7


@given(st.text(alphabet="\\${}ab ", max_size=12))
def test_escaping_is_reversible(text: str) -> None:
    assert unescape(escape(text)) == text


def test_only_text_settings_are_raw() -> None:
    assert raw_override("seed=${repeats}") == "seed=${repeats}"
    assert raw_override("sampling.stop_strings=['${a}']") == "sampling.stop_strings=['\\${a}']"
