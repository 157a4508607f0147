"""What the types of a configuration cannot say: ranges, contradictions, names of files."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sm70lab import addresses
from sm70lab.config_checks_reference import reference_complaints
from sm70lab.config_checks_target import SERVED, TARGETS, target_complaints
from sm70lab.schema import (
    AUTO_REPEATS,
    ExperimentConfig,
    Gate,
    GraphMode,
    KernelSet,
    ModelDtype,
    ModelSpec,
    PromptSpec,
    Sampling,
    ShapeGate,
    Sprt,
    StrictGate,
    Tracking,
)

MAX_DRAFT_TOKENS = 8
MAX_NUM_SEQS = 256
MAX_SEED = 2**63 - 1
MAX_REPEAT = 1_000_000
CONTRACTS = ("html",)
RANDOM_MODELS = ("random", "tiny")  # drawn from model.shape; every other model has a folder
GATE_COUNTS = (
    "min_tokens",
    "max_same_token_run",
    "max_digit_run",
    "max_same_char_run",
    "repeat20",
    "repeat50",
    "repeat100",
    "max_same_line_run",
)
STRICT_LEAST = {  # below these sound text of any kind would fail
    "loop_tokens": 40,
    "ended_loop_tokens": 40,
    "counter_periods": 3,
    "stale_tokens": 40,
    "blanks": 1,
    "replacements": 0,
    "packed_per_mille": 0,
    "digits": 80,
    "salad_letters": 10,
    "thinking_tokens": 0,
    "echo_characters": 10,
}
STATE_SCHEMES = ("slots", "snapshot", "fold", "replay")  # of ``engine.schemes``, which would bring torch
DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")
FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")  # names that become file and folder names
NO_SQLITE = re.compile(r"\?|%[0-9A-Fa-f]{2}")  # SQLAlchemy's versions differ in what they decode
PENALTY = 1e12  # far above any logit, and finite after arithmetic in float32
BIAS = "must be -1e12 to 1e12; to forbid a token use sampling.banned_ids"
TEMPERATURE = "must be 0 (greedy) or 0.0001 to 10000"


def complaints(config: ExperimentConfig) -> Iterator[tuple[str, Any, str]]:
    """(setting, value, what would be right) for each value out of range."""
    route, target, gate = config.route, config.target, config.gate
    for setting, name in (("name", config.name), ("route.name", route.name)):
        if not FILE_NAME.fullmatch(name):
            yield setting, name, "must be a file name: letters, digits, dots, dashes and underscores"
    if not 0 <= route.draft_tokens <= MAX_DRAFT_TOKENS:
        yield "route.draft_tokens", route.draft_tokens, f"must be 0 to {MAX_DRAFT_TOKENS}"
    if route.state.block_size < 1:
        yield "route.state.block_size", route.state.block_size, "must be at least 1 token"
    if route.state.scheme not in STATE_SCHEMES:
        must = f"no such scheme; known: {', '.join(STATE_SCHEMES)}"
        yield "route.state.scheme", route.state.scheme, must
    if target.name not in TARGETS:
        yield "target.name", target.name, f"must be one of {', '.join(TARGETS)}"
    if not DEVICE.fullmatch(target.device):
        yield "target.device", target.device, "must be auto, cpu, cuda or cuda:N"
    if target.threads is not None and target.threads < 1:
        yield "target.threads", target.threads, "must be at least 1, or null for torch's own choice"
    yield from target_complaints(config)
    yield from reference_complaints(config)
    if not 0 <= config.seed <= MAX_SEED:
        yield "seed", config.seed, f"must be 0 to {MAX_SEED}"
    yield from _repeat_complaints(config)
    yield from _route_complaints(config)
    yield from _model_complaints(config.model)
    yield from _workload_complaints(config)
    yield from _sampling_complaints(config.sampling)
    yield from _gate_complaints(gate)
    yield from _tracking_complaints(config.tracking)


def _repeat_complaints(config: ExperimentConfig) -> Iterator[tuple[str, Any, str]]:
    repeats, sprt = config.repeats, config.sprt
    if repeats != AUTO_REPEATS and (isinstance(repeats, str) or repeats < 1):
        yield "repeats", repeats, "must be at least 1, or auto"
    if not 0 <= config.first_repeat <= MAX_REPEAT:
        yield "first_repeat", config.first_repeat, f"must be 0 to {MAX_REPEAT}"
    for key in ("p0", "p1", "alpha", "beta"):
        if not 0 < getattr(sprt, key) < 1:
            yield f"sprt.{key}", getattr(sprt, key), "must be between 0 and 1, both excluded"
    if sprt.p1 >= sprt.p0:
        yield "sprt.p1", sprt.p1, f"must be below sprt.p0={sprt.p0}"
    if sprt.alpha + sprt.beta >= 1:
        yield "sprt.beta", sprt.beta, f"must sum to less than 1 with sprt.alpha={sprt.alpha}"
    if sprt.max_repeats < 1:
        yield "sprt.max_repeats", sprt.max_repeats, "must be at least 1"
    if repeats != AUTO_REPEATS and sprt != Sprt():
        yield "repeats", repeats, "the settings sprt.… are those of repeats=auto; set that, or leave them"


def _gate_complaints(gate: Gate) -> Iterator[tuple[str, Any, str]]:
    for key in GATE_COUNTS:
        value = getattr(gate, key)
        if value < 0:
            yield f"gate.{key}", value, "must be 0 or more"
        elif gate.shape is ShapeGate.strict and key != "min_tokens" and value != getattr(Gate, key):
            yield f"gate.{key}", value, "decides nothing with gate.shape=strict; set gate=fixed_quality"
    for key, least in STRICT_LEAST.items():
        value = getattr(gate.strict, key)
        if value < least:
            yield f"gate.strict.{key}", value, f"must be {least} or more"
        elif gate.shape is not ShapeGate.strict and value != getattr(StrictGate, key):
            yield f"gate.strict.{key}", value, "decides nothing without gate.shape=strict; set gate=strict"
    if "" in gate.bad_markers:
        yield "gate.bad_markers", gate.bad_markers, "an empty marker is in every text; leave it out"
    if not 0 < gate.audit_alpha < 1:
        yield "gate.audit_alpha", gate.audit_alpha, "must be between 0 and 1, both excluded"
    if gate.window_tokens < 1:
        yield "gate.window_tokens", gate.window_tokens, "must be at least 1 token"


def _route_complaints(config: ExperimentConfig) -> Iterator[tuple[str, Any, str]]:
    route, state, target = config.route, config.route.state, config.target
    if route.shortlist_size < 1:
        yield "route.shortlist_size", route.shortlist_size, "must be at least 1 id"
    for key in ("prefill_chunk", "prefix_blocks"):
        if getattr(state, key) < 0:
            yield f"route.state.{key}", getattr(state, key), "must be 0 (off) or more"
    if state.prefix_blocks and state.block_size <= route.draft_tokens:
        must = (
            f"must be above route.draft_tokens={route.draft_tokens}: a round may cross one block edge alone"
        )
        yield "route.state.block_size", state.block_size, must
    if not 1 <= target.max_num_seqs <= MAX_NUM_SEQS:
        yield "target.max_num_seqs", target.max_num_seqs, f"must be 1 to {MAX_NUM_SEQS}"
    # Where the device is not named, the target finds out what it is.
    if route.graph is GraphMode.full and target.name == "engine" and target.device == "cpu":
        if target.kernels is KernelSet.plain:
            yield "target.kernels", "plain", "route.graph=full records native calls; use route.graph=none"
        if config.model.dtype not in (ModelDtype.float32, ModelDtype.float64):
            must = "route.graph=full records native calls, which compute in float32 and float64"
            yield "model.dtype", config.model.dtype.value, must


def _model_complaints(model: ModelSpec) -> Iterator[tuple[str, Any, str]]:
    yield from _model_contradictions(model)
    if model.path is not None:
        folder = Path(model.path)
        if not folder.is_dir():
            yield "model.path", model.path, "no such folder; give a Hugging Face model folder"
        elif not (folder / "config.json").is_file():
            yield "model.path", model.path, "no config.json there; give a Hugging Face model folder"
    elif model.name not in ("web", SERVED, *RANDOM_MODELS):
        yield "model.path", "null", f"model {model.name} needs model.path=/a/folder"
    elif model.name in RANDOM_MODELS and not model.shape:
        yield "model.shape", "{}", "must give the keys of a Hugging Face config.json"


def _model_contradictions(model: ModelSpec) -> Iterator[tuple[str, Any, str]]:
    """Settings that would be ignored: a drawn model has no folder, a folder's weights are not drawn."""
    drawn = model.name in RANDOM_MODELS
    ignored: list[tuple[str, bool, Any, str]] = [
        ("model.path", drawn and model.path is not None, model.path, "for a folder set model=/a/folder"),
        ("model.path", model.name == "web" and bool(model.path), model.path, "set model=/a/folder alone"),
        ("model.path", model.name == SERVED and bool(model.path), model.path, "set model=/a/folder alone"),
        ("model.shape", not drawn and bool(model.shape), "{…}", "for random weights set model=random"),
        ("model.seed", not drawn and model.seed != 0, model.seed, "for random weights set model=random"),
    ]
    for setting, found, value, instead in ignored:
        if found:
            yield setting, value, f"{setting} and model={model.name} contradict each other; {instead}"


def _workload_complaints(config: ExperimentConfig) -> Iterator[tuple[str, Any, str]]:
    workload = config.workload
    if workload.max_tokens < 1:
        yield "workload.max_tokens", workload.max_tokens, "must be at least 1 token"
    if not workload.prompts:
        yield "workload.prompts", "[]", "must hold at least one prompt"
    for index, prompt in enumerate(workload.prompts):
        for key, value, must in _prompt_complaints(prompt):
            yield f"workload.prompts[{index}].{key}", value, must
    for name, count in Counter(prompt.name for prompt in workload.prompts).items():
        if count > 1:
            yield "workload.prompts", name, f"{count} prompts have this name; names must differ"


def _prompt_complaints(prompt: PromptSpec) -> Iterator[tuple[str, Any, str]]:
    if not FILE_NAME.fullmatch(prompt.name):
        yield "name", prompt.name, "must be a file name: letters, digits, dots, dashes and underscores"
    if (prompt.text is None) == (prompt.user is None):
        found = "neither" if prompt.text is None else "both"
        yield "text", found, f"prompt {prompt.name} must have one of text and user, it has {found}"
    if (prompt.text or prompt.user) == "":
        yield "text", "''", f"prompt {prompt.name} is empty"
    if prompt.max_tokens is not None and prompt.max_tokens < 1:
        yield "max_tokens", prompt.max_tokens, "must be at least 1 token, or null for the workload's"
    if prompt.contract is not None and prompt.contract not in CONTRACTS:
        yield "contract", prompt.contract, f"no such contract; known: {', '.join(CONTRACTS)}"


def _sampling_complaints(sampling: Sampling) -> Iterator[tuple[str, Any, str]]:
    s = sampling
    rules: list[tuple[str, bool, str]] = [
        ("temperature", s.temperature == 0 or 1e-4 <= s.temperature <= 1e4, TEMPERATURE),
        ("top_p", 1e-6 <= s.top_p <= 1, "must be 0.000001 to 1 (1 is off)"),
        ("top_k", s.top_k >= 0, "must be 0 (off) or more"),
        ("min_p", 0 <= s.min_p < 1, "must be 0 (off) or more, below 1"),
        ("repetition_penalty", 0.01 <= s.repetition_penalty <= 100, "must be 0.01 to 100 (1 is off)"),
        ("presence_penalty", abs(s.presence_penalty) <= PENALTY, "must be -1e12 to 1e12 (0 is off)"),
        ("frequency_penalty", abs(s.frequency_penalty) <= PENALTY, "must be -1e12 to 1e12 (0 is off)"),
        ("logit_bias", all(_is_id(i) for i in s.logit_bias), "token ids must be whole numbers, 0 or more"),
        ("logit_bias", all(abs(b) <= PENALTY for b in s.logit_bias.values()), BIAS),
        ("min_tokens", s.min_tokens >= 0, "must be 0 or more tokens"),
        ("banned_ids", all(i >= 0 for i in s.banned_ids), "token ids must be 0 or more"),
        ("stop_ids", all(i >= 0 for i in s.stop_ids), "token ids must be 0 or more"),
        ("stop_strings", all(s.stop_strings), "must not hold an empty string"),
    ]
    for key, holds, must in rules:
        if not holds:  # NaN fails every comparison, so it lands here too
            yield f"sampling.{key}", getattr(s, key), must


def _is_id(key: int) -> bool:
    return not isinstance(key, bool) and key >= 0  # YAML's true passes OmegaConf as a key


def _tracking_complaints(tracking: Tracking) -> Iterator[tuple[str, Any, str]]:
    if not 0 < tracking.timeout_s < float("inf"):
        yield "tracking.timeout_s", tracking.timeout_s, "must be above 0 seconds"
    if tracking.sweep is not None and not FILE_NAME.fullmatch(tracking.sweep):
        yield "tracking.sweep", tracking.sweep, "must be letters, digits, dots, dashes and underscores"
    if tracking.uri is None:
        if tracking.mlflow and NO_SQLITE.search(tracking.runs_dir):
            must = "an sqlite address takes no ? or %20; choose another folder or set tracking.uri"
            yield "tracking.runs_dir", tracking.runs_dir, must
        return
    if (wrong := addresses.complaint(tracking.uri)) is not None:
        yield "tracking.uri", addresses.without_password(tracking.uri), wrong
