"""The audit over the wire: on ``sm70lab serve`` with a hazard it finds the fault of the in-process run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sm70lab.cli import main
from sm70lab.tracking.arms import read_arm
from sm70lab.tracking.run_folder import RunFolder
from tests.serving.served import ServeProcess

COMMON = (
    "workload.prompts=[{name: page, text: '<!DOCTYPE html><html><head>'}]",
    "workload.max_tokens=150",
    "seed=3",
    "tracking=off",
    "display=quiet",
)
SETTINGS = {
    "none": ("route=split",),
    "no_ssm_rollback": ("route=split",),
    "accepted_plus_one": ("route=split",),
    "stale_metadata": ("route=split",),
    "rollover_drops_rows": ("route=split", "route.state.block_size=32", "route.state.prefix_blocks=8"),
}


def judged(folder: Path, *arguments: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The audit's evidence of one run, and the generation's record."""
    main(["run", *arguments, *COMMON, "name=t", f"tracking.runs_dir={folder}"])
    (run,) = (folder / "t").iterdir()
    result = json.loads((run / "result.json").read_text())
    (audit,) = (e for e in result["verdict"]["evidence"] if e["kind"] == "audit")
    return audit, result["generations"][0]


@pytest.mark.long
@pytest.mark.parametrize("hazard", SETTINGS)
def test_a_hazard_is_found_at_the_token_of_the_in_process_run(hazard: str, tmp_path: Path) -> None:
    settings = (*SETTINGS[hazard], f"hazard={hazard}")
    own, own_record = judged(tmp_path / "engine", *settings)
    server = ServeProcess(*settings, "max_model_len=400")
    try:
        remote = ("target=openai", f"target.base_url={server.url}", "model=web")
        found, record = judged(tmp_path / "served", *remote)
    finally:
        code, _ = server.stop()
    assert code == 0
    assert record["token_ids_sha256"] == own_record["token_ids_sha256"]
    assert found["status"] == own["status"]
    first, own_first = found["details"].get("first_bad"), own["details"].get("first_bad")
    assert (first is None) == (own_first is None) == (hazard == "none")
    own_arm, arm = (
        read_arm(name, [RunFolder(run) for run in (tmp_path / name / "t").iterdir()])
        for name in ("engine", "served")
    )
    assert arm.runs[0].tokens_keyed and own_arm.runs[0].tokens_keyed
    assert arm.runs[0].facts["model_hash"] == own_arm.runs[0].facts["model_hash"]
    ((tokens, seconds),) = (sample.streamed for sample in arm.samples.values() if sample.streamed)
    assert 140 <= tokens < 150 and seconds > 0  # the first chunk has a round's tokens, or one
    if first is not None:
        assert {k: first[k] for k in ("index", "token", "rule")} == {
            k: own_first[k] for k in ("index", "token", "rule")
        }
        assert first["gap"] == pytest.approx(own_first["gap"], abs=1e-4)
