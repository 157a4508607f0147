"""``sm70lab prove``: every route and scheme is exact, and every hazard that can act is found."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

from sm70lab.cli import main, prove
from sm70lab.config import compose, conf_dir
from sm70lab.engine.hazards import HAZARDS, hazard_named
from sm70lab.engine.loading import Source, find
from sm70lab.engine.model import HybridModel
from sm70lab.engine.schemes import SCHEMES
from sm70lab.judge.proof import Proof, Prover
from sm70lab.schema import ExperimentConfig, ModelDtype, ModelSpec
from tests.engine import tiny

ROUTES = sorted(path.stem for path in (Path(conf_dir()) / "route").glob("*.yaml"))
PROMPTS = prove.prompts_of(61)

# Hazard → the settings under which it acts, and the checks that may find it first.
ACTS: dict[str, tuple[list[str], set[str]]] = {
    "stale_metadata": (["route=split", "route.state.scheme=slots"], {"ID", "ST", "NUM"}),
    "padding_slot_0": (["route=split"], {"ID", "ST", "NUM"}),
    "sentinel_as_index": (["route=split"], {"ID", "ST", "NUM"}),
    "accepted_plus_one": (["route=full_forward"], {"ST"}),
    "accepted_minus_one": (["route=full_forward"], {"ST"}),
    "stale_column_0": (["route=spec_core_003"], {"ST", "NUM", "ID"}),
    "no_ssm_rollback": (["route=split"], {"ST"}),
    "no_conv_rollback": (["route=split"], {"ST"}),
    "rollover_drops_rows": (["route=split"], {"ST"}),
    "rollover_mislabels": (["route=split"], {"ST", "NUM", "ID"}),
    "partial_chunk_as_whole": (["route=split"], {"ST", "NUM", "ID"}),
    "optimistic_lengths": (["route=split"], {"ID", "NUM"}),
    "recovered_as_computed": (["route=split"], {"ID", "NUM"}),
    "misreported_drafts": (["route=split", "route.draft_sampling=probabilistic"], {"AUD"}),
    "float16_state": (["route=split"], {"ST"}),
    "float16_overflow": (["route=split"], {"ST", "ID"}),
    "fold_order": (["route=split", "route.state.scheme=fold"], {"ST"}),
    "unseeded_draws": (["route=split"], {"ID"}),
    "missing_draft_tensor": (["route=split"], {"DRAFT"}),
    "hidden_before_norm": (["route=split"], {"DRAFT"}),
    "request_leak": (["route=split"], {"ST", "ID", "NUM"}),
}


@cache
def loaded() -> tuple[Source, HybridModel]:
    config = configured([])
    source = find(config.model)
    return source, source.build(config.model.dtype, tiny.CPU, config.target.kernels)


def configured(overrides: list[str]) -> ExperimentConfig:
    return compose(prove._with_defaults(overrides))


def test_a_captured_round_is_proved_on_a_model_that_it_can_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny float64 hybrid has no kernels on a GPU: there the embedded model stands in for it."""
    monkeypatch.setattr(prove, "gpus", lambda: ["a GPU"])
    assert configured(["route=whole_round"]).model.name == "web"
    assert configured(["route=whole_round", "model=random"]).model.name == "random"
    assert configured(["route=whole_round", "target.device=cpu"]).model.name == "tiny"
    assert configured(["route=split"]).model.name == "tiny"


def prove_on(model: HybridModel, config: ExperimentConfig, tokens: int, audit_tokens: int = 64) -> Proof:
    return Prover(
        config, model, model, PROMPTS, tokens, None, lambda name: None, audit_tokens=audit_tokens
    ).prove()


def proof(overrides: list[str], tokens: int, audit_tokens: int = 64) -> Proof:
    return prove_on(loaded()[1], configured(overrides), tokens, audit_tokens)


# The packed step writes its own state: another scheme is refused (tests/engine/test_routes.py).
MATRIX = [(r, s) for r in ROUTES for s in SCHEMES if r != "packed_recurrent" or s == "slots"]
# Every route once and every scheme once; the rest of the matrix is in the long suite.
SHORT = {("split", s) for s in SCHEMES} | {(r, "slots") for r in ROUTES}


@pytest.mark.parametrize(
    ("route", "scheme"),
    [pytest.param(*pair, marks=[] if pair in SHORT else pytest.mark.long) for pair in MATRIX],
)
def test_every_route_with_every_scheme_is_exact(route: str, scheme: str) -> None:
    found = proof([f"route={route}", f"route.state.scheme={scheme}"], tokens=64)
    assert not found.findings
    assert found.exit_code == 0
    by_name = {run.name: run for run in found.runs}
    assert by_name["greedy"].tokens >= 64 and by_name["greedy"].edges >= 3
    assert by_name["continued"].reused >= 16, "the prefix cache must have been used"
    if configured([f"route={route}"]).route.draft_tokens:
        assert by_name["greedy, again"].accepted > 20, "scripted drafts must have been accepted"
    assert not any(run.worst_state for run in found.runs if not run.reused), "the same bits"


def test_every_hazard_has_a_case() -> None:
    assert set(ACTS) | {"none"} == set(HAZARDS)


@pytest.mark.parametrize("name", ACTS)
def test_every_hazard_is_found(name: str) -> None:
    overrides, checks = ACTS[name]
    found = proof([*overrides, f"hazard={name}"], tokens=64, audit_tokens=2000)
    assert found.cannot_act is None
    assert found.exit_code == 1
    assert checks & {finding.check for finding in found.findings if not finding.tie}, found.findings


@pytest.mark.parametrize("name", list(ACTS))
def test_a_hazard_that_cannot_act_says_why(name: str) -> None:
    """On the no-draft route, one sequence at a time, without prefix cache and greedy."""
    config = configured(["route=no_mtp", "sampling=greedy", "route.state.prefix_blocks=0"])
    reason = hazard_named(name).cannot_act(config.route, config.sampling, 1)
    always = {"float16_state", "float16_overflow", "request_leak"}
    assert (reason is None) == (name in always)


def test_rounding_differences_are_ties() -> None:
    """float16 rows rounded by their number: a difference has the top-2 margin of a tie, and says so."""
    config = configured(
        ["route=split", "model.seed=1", "model.dtype=float16", "route.numerics=fast", "target.kernels=plain"]
    )
    source = find(config.model)
    model = source.build(config.model.dtype, tiny.CPU, config.target.kernels)
    trusted = source.build(ModelDtype.float32, tiny.CPU, config.target.kernels)
    found = Prover(config, model, trusted, PROMPTS, 64, None, lambda name: None, audit_tokens=64).prove()
    assert found.findings, "float16 runs without one tie would test nothing"
    assert all(f.tie for f in found.findings), found.findings
    first = next(f for f in found.findings if f.check == "ID")
    assert "leads by" in first.line and first.line.endswith("tie")
    assert found.exit_code == 3


def test_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit codes and output of the command itself."""
    short = ["route=split", "tokens=16"]
    assert main(["prove", *short]) == 0
    assert "EXACT" in capsys.readouterr().out
    assert main(["prove", *short, "hazard=no_conv_rollback"]) == 1
    shown = capsys.readouterr().out
    assert "HAZARD no_conv_rollback" in shown and "conv window of GDN layer 0" in shown
    assert main(["prove", *short, "hazard=no_conv_rollback", "--json"]) == 1
    record = json.loads(capsys.readouterr().out)
    assert (record["proof"], record["hazard"]) == ("fault", "no_conv_rollback")
    assert main(["prove", "hazard=nonsense"]) == 2
    assert "no such hazard" in capsys.readouterr().err
    assert main(["prove", "tokens=3"]) == 2


@pytest.mark.parametrize("kernels", [pytest.param("plain", marks=pytest.mark.long), "native"])
def test_mixture_of_experts(kernels: str) -> None:
    shape = {**tiny.SHAPE, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    shape |= {"shared_expert_intermediate_size": 16, "model_type": "qwen3_5_moe_text"}
    config = configured(["route=split", f"target.kernels={kernels}"])
    source = find(ModelSpec(name="random", shape=shape))
    model = source.build(ModelDtype.float64, tiny.CPU, config.target.kernels)
    assert not prove_on(model, config, tokens=20, audit_tokens=32).findings
