"""Settings of the reference that contradict each other are refused before anything is asked."""

from __future__ import annotations

from typing import Any

import pytest

from sm70lab.config import check, defaults_beside
from sm70lab.config_checks_reference import SECOND
from sm70lab.config_checks_target import own_settings
from sm70lab.errors import UsageError
from sm70lab.schema import (
    ExperimentConfig,
    ModelSpec,
    PromptSpec,
    ReferenceKind,
    Route,
    TargetConfig,
    Workload,
)

URL = "http://127.0.0.1:1"


def config(audit: bool = True, model: str = "served", **target: Any) -> ExperimentConfig:
    return ExperimentConfig(
        route=Route(name="as_served", draft_tokens=0),
        target=TargetConfig(name="openai", base_url=URL, **target),
        model=ModelSpec(name=model),
        workload=Workload(prompts=[PromptSpec(text="a")]),
        audit=audit,
    )


@pytest.mark.parametrize(
    ("made", "line"),
    [
        ({"reference": ReferenceKind.engine}, "target.reference=engine: needs the server's checkpoint"),
        ({"reference_chunk": -1}, "target.reference_chunk=-1: must be 0"),
        ({"reference": ReferenceKind.none, "reference_chunk": 5}, "target.reference_chunk=5: asks a server"),
        (
            {"reference": ReferenceKind.engine, "model": "web", "reference_url": URL},
            "target.reference_url=http://127.0.0.1:1: asks a server, and target.reference=engine",
        ),
        ({"reference_model": "m"}, "target.reference_model=m: is of a second server"),
        ({"reference_url": "x"}, "target.reference_url=x: must be http"),
        ({"reference_url": URL, "reference_api_key_env": "sk 1"}, "reference_api_key_env=\\*\\*\\*: must be"),
        ({"reference_url": URL, "reference_api_key_env": "NO_SUCH_KEY"}, "NO_SUCH_KEY: this environment"),
        ({"reference": ReferenceKind.server, "audit": False}, "target.reference=server: judges nothing"),
    ],
)
def test_contradictions(made: dict[str, Any], line: str) -> None:
    with pytest.raises(UsageError, match=line):
        check(config(**made))


def test_what_fits_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECOND_KEY", "k")
    for made in (
        {},
        {"reference": ReferenceKind.engine, "model": "web"},
        {"reference_url": URL, "reference_model": "m", "reference_api_key_env": "SECOND_KEY"},
        {"reference": ReferenceKind.server, "reference_chunk": 500},
        {"reference": ReferenceKind.none},
        {"audit": False},
    ):
        check(config(**made))


def test_they_are_settings_of_servers_alone() -> None:
    with pytest.raises(UsageError, match=r"target\.reference=none: is a setting of target=openai"):
        check(
            ExperimentConfig(
                target=TargetConfig(reference=ReferenceKind.none),
                workload=Workload(prompts=[PromptSpec(text="a")]),
            )
        )
    assert not {"reference", "reference_chunk", *SECOND} & set(defaults_beside({})["target"])
    kept = own_settings({"target": {"name": "openai", "reference": "server"}})
    assert kept["target"]["reference"] == "server"
