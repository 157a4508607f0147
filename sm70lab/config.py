"""From YAML and overrides to a checked ``ExperimentConfig``.

Hydra composes, OmegaConf checks types, ``check`` checks what types cannot say. Everything here
runs before torch is imported, and every complaint is a one-line ``UsageError``.
"""

from __future__ import annotations

import difflib
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints
from urllib.parse import urlsplit

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from sm70lab.engine.routes import resolve
from sm70lab.errors import UsageError
from sm70lab.schema import ExperimentConfig, PromptSpec, Sampling, Tracking

VERSION_BASE = "1.3"
MAX_DRAFT_TOKENS = 8
MAX_SEED = 2**63 - 1
CONTRACTS = ("html",)
TARGETS = ("engine",)
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
DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")
FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")  # names that become file and folder names
STORE_SCHEMES = ("sqlite", "http", "https", "postgresql", "mysql", "mssql")  # dialect+driver allowed


def conf_dir() -> Path:
    """The folder of YAML groups: inside an installed wheel, else beside the package in a checkout."""
    package = Path(__file__).resolve().parent
    for folder in (package / "conf", package.parent / "conf"):
        if (folder / "config.yaml").is_file():
            return folder
    raise UsageError(f"{package}: its conf/ folder is missing; install sm70lab again")


def register_schema() -> None:
    """Make ``ExperimentConfig`` the typed base node that ``conf/config.yaml`` starts from."""
    ConfigStore.instance().store(name="schema", node=ExperimentConfig)


def compose(overrides: Sequence[str] = ()) -> ExperimentConfig:
    """Compose and check a configuration without running anything.

    Raises ``UsageError`` for anything the user can mend.
    """
    register_schema()
    try:
        with initialize_config_dir(str(conf_dir()), version_base=VERSION_BASE):
            node = hydra_compose("config", list(overrides))
    except Exception as error:  # Hydra and its parsers raise many types; each is the user's input
        raise explain(error) from error
    return to_config(node)


def to_config(node: DictConfig) -> ExperimentConfig:
    """A composed node as a typed, checked object. Raises ``UsageError``."""
    try:
        config = OmegaConf.to_object(node)
    except OmegaConfBaseException as error:
        raise explain(error) from error
    assert isinstance(config, ExperimentConfig)
    for section in (config.model, config.tracking):
        key = "path" if section is config.model else "runs_dir"
        if (value := getattr(section, key)) is not None:
            setattr(section, key, str(Path(value).expanduser().absolute()))
    check(config)
    return config


def check(config: ExperimentConfig) -> None:
    """Check values that types cannot. Raises ``UsageError`` for the first that cannot work."""
    for setting, value, must in _complaints(config):
        raise UsageError(f"{setting}={value}: {must}")
    resolve(config.route)  # contradictory flags


def plain(value: Any) -> Any:
    """A configuration value as JSON and YAML can hold it: enums by name, lists and dicts copied."""
    return OmegaConf.to_container(OmegaConf.structured(value), enum_to_str=True)


def without_password(uri: str) -> str:
    """A store address that may be written down: user and password cut out."""
    return re.sub(r"//[^/@]*@", "//***@", uri)


def explain(error: BaseException) -> UsageError:
    """Any error of Hydra, OmegaConf or the YAML parser as one line."""
    if isinstance(error, UsageError):
        return error
    mark = getattr(error, "problem_mark", None)
    if mark is not None:
        return UsageError(f"{mark.name}:{mark.line + 1}: not YAML ({getattr(error, 'problem', error)})")
    text = str(error)
    cause = error.__cause__
    if isinstance(cause, OmegaConfBaseException) and str(cause).split("\n")[0] not in text:
        text = f"{text}\n{cause}"
    text = text.split("Config search path:")[0]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    key = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("full_key:")), "")
    place = re.search(r"In '([^']*)': \w+ raised while composing config:", text)
    where = f"{place[1]}.yaml: {key}" if place else key
    unknown = re.search(r"Key '([^']*)' not in '\w+'", text)
    if place and unknown:
        return UsageError(f"{where}: no such setting; {near(unknown[1], settings_beside(key))}")
    skipped = ("full_key:", "object_type=", "reference_type=", "In '")
    kept = [line for line in lines if not line.startswith(skipped)] or lines
    message = re.sub(r":;", ":", "; ".join(kept)) or type(error).__name__
    return UsageError(f"{where}: {message}" if where and where not in message else message)


def near(word: str, known: Sequence[str]) -> str:
    """``did you mean …?`` with the choices, or the choices alone."""
    close = difflib.get_close_matches(word, known, n=2)
    choices = f"({', '.join(known)})"
    return f"did you mean {' or '.join(close)}? {choices}" if close else f"choose from {choices}"


def settings_beside(key: str) -> list[str]:
    """Names of the settings in the same section as the dotted ``key``."""
    section: Any = ExperimentConfig
    for part in key.split(".")[:-1]:
        section = get_type_hints(section).get(part)
    return [f.name for f in fields(section)] if is_dataclass(section) else []


def _complaints(config: ExperimentConfig) -> Iterator[tuple[str, Any, str]]:
    """(setting, value, what would be right) for each value out of range."""
    route, target, gate = config.route, config.target, config.gate
    for setting, name in (("name", config.name), ("route.name", route.name)):
        if not FILE_NAME.fullmatch(name):
            yield setting, name, "must be a file name: letters, digits, dots, dashes and underscores"
    if not 0 <= route.draft_tokens <= MAX_DRAFT_TOKENS:
        yield "route.draft_tokens", route.draft_tokens, f"must be 0 to {MAX_DRAFT_TOKENS}"
    if route.state.block_size < 1:
        yield "route.state.block_size", route.state.block_size, "must be at least 1 token"
    if target.name not in TARGETS:
        yield "target.name", target.name, f"must be one of {', '.join(TARGETS)}"
    if not DEVICE.fullmatch(target.device):
        yield "target.device", target.device, "must be auto, cpu, cuda or cuda:N"
    if target.threads is not None and target.threads < 1:
        yield "target.threads", target.threads, "must be at least 1, or null for torch's own choice"
    if not 0 <= config.seed <= MAX_SEED:
        yield "seed", config.seed, f"must be 0 to {MAX_SEED}"
    if config.repeats < 1:
        yield "repeats", config.repeats, "must be at least 1"
    yield from _model_complaints(config)
    yield from _workload_complaints(config)
    yield from _sampling_complaints(config.sampling)
    for key in GATE_COUNTS:
        if getattr(gate, key) < 0:
            yield f"gate.{key}", getattr(gate, key), "must be 0 or more"
    if not 0 < gate.audit_alpha < 1:
        yield "gate.audit_alpha", gate.audit_alpha, "must be between 0 and 1, both excluded"
    if gate.window_tokens < 1:
        yield "gate.window_tokens", gate.window_tokens, "must be at least 1 token"
    yield from _tracking_complaints(config.tracking)


def _model_complaints(config: ExperimentConfig) -> Iterator[tuple[str, Any, str]]:
    model = config.model
    if model.path is not None:
        folder = Path(model.path)
        if not folder.is_dir():
            yield "model.path", model.path, "no such folder; give a Hugging Face model folder"
        elif not (folder / "config.json").is_file():
            yield "model.path", model.path, "no config.json there; give a Hugging Face model folder"
    elif model.name not in ("web", *RANDOM_MODELS):
        yield "model.path", "null", f"model {model.name} needs model.path=/a/folder"
    elif model.name in RANDOM_MODELS and not model.shape:
        yield "model.shape", "{}", "must give the keys of a Hugging Face config.json"


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
        ("temperature", 0 <= s.temperature < math.inf, "must be 0 (greedy) or more"),
        ("top_p", 0 < s.top_p <= 1, "must be above 0 and at most 1 (1 is off)"),
        ("top_k", s.top_k >= 0, "must be 0 (off) or more"),
        ("min_p", 0 <= s.min_p < 1, "must be 0 (off) or more, below 1"),
        ("repetition_penalty", 0 < s.repetition_penalty < math.inf, "must be above 0 (1 is off)"),
        ("presence_penalty", math.isfinite(s.presence_penalty), "must be a finite number"),
        ("frequency_penalty", math.isfinite(s.frequency_penalty), "must be a finite number"),
        ("min_tokens", s.min_tokens >= 0, "must be 0 or more tokens"),
        ("banned_ids", all(i >= 0 for i in s.banned_ids), "token ids must be 0 or more"),
        ("stop_ids", all(i >= 0 for i in s.stop_ids), "token ids must be 0 or more"),
        ("stop_strings", all(s.stop_strings), "must not hold an empty string"),
    ]
    for key, holds, must in rules:
        if not holds:  # NaN fails every comparison, so it lands here too
            yield f"sampling.{key}", getattr(s, key), must


def _tracking_complaints(tracking: Tracking) -> Iterator[tuple[str, Any, str]]:
    if not 0 < tracking.timeout_s < math.inf:
        yield "tracking.timeout_s", tracking.timeout_s, "must be above 0 seconds"
    if tracking.uri is None:
        return
    shown = without_password(tracking.uri)
    parts = urlsplit(tracking.uri)
    scheme = parts.scheme.split("+")[0]
    if scheme in ("http", "https"):
        if not parts.hostname:
            yield "tracking.uri", shown, "must name a host: http://host:5000"
    elif scheme not in STORE_SCHEMES:
        yield "tracking.uri", shown, "must be http(s)://…, sqlite:///… or another database address"
