"""Settings of what is measured: whose they are, and what contradicts what."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from sm70lab.schema import ExperimentConfig, MetricsSource, Route, TargetConfig

ENGINE, OPENAI, VLLM = "engine", "openai", "vllm"
TARGETS = (ENGINE, OPENAI, VLLM)
SERVED = "served"  # the model of a server
SERVER_HARDWARE = "the server's"  # the hardware of a run on one, which does not tell it
AS_SERVED = "as_served"  # and its route
KEYED_DRAWS = "keyed"  # of a server: every token is the reference's own with the request's noise
MAX_RETRIES = 100

# Which targets a setting acts on; one that is not here acts on all.
OWNERS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("device", "threads", "kernels"), (ENGINE,)),
    **dict.fromkeys(("base_url", "metrics_url"), (OPENAI,)),
    **dict.fromkeys(
        ("endpoint", "served_model", "api_key_env", "headers", "extra_body", "metrics", "retries"),
        (OPENAI, VLLM),
    ),
    **dict.fromkeys(("tls_verify", "tls_ca", "tls_cert", "tls_key"), (OPENAI,)),
    **dict.fromkeys(("connect_timeout_s", "read_timeout_s", "total_timeout_s"), (OPENAI, VLLM)),
    **dict.fromkeys(
        ("reference", "reference_url", "reference_model", "reference_api_key_env", "reference_chunk"),
        (OPENAI, VLLM),
    ),
    **dict.fromkeys(
        ("python", "pythonpath", "command", "env", "arguments", "host", "port", "start_timeout_s", "dry_run"),
        (VLLM,),
    ),
}
# How to reach a server and how long to wait for it: not what is run.
REACHING = (
    *("api_key_env", "tls_verify", "tls_ca", "tls_cert", "tls_key"),
    *("connect_timeout_s", "read_timeout_s", "total_timeout_s", "retries", "reference_api_key_env"),
    *("host", "port", "start_timeout_s", "dry_run"),
)
ARGUMENTS_ELSEWHERE = {  # of a vLLM server
    "host": "target.host",
    "port": "target.port",
    "max_num_seqs": "target.max_num_seqs",
    "api_key": "target.api_key_env and that variable",
}
ENV = "env:"  # before the name of a variable, as the value of a header
ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")  # RFC 9110
WRITTEN_HEADERS = (  # by the client, from what it sends
    *("host", "content-length", "content-type", "transfer-encoding"),
    *("connection", "keep-alive", "upgrade", "expect", "te", "trailer", "accept-encoding"),
)
SECRET_HEADER = re.compile(r"auth|key|token|secret|cookie|password|credential", re.IGNORECASE)
SECRET_FIELD = re.compile(r"(^|_)(api_?key|password|secret|authorization)$", re.IGNORECASE)
OWN_FIELDS = ("model", "messages", "prompt", "stream", "stream_options", "n")  # written by the target itself
SET_ELSEWHERE = {
    "max_tokens": "workload.max_tokens",
    "max_completion_tokens": "workload.max_tokens",
    "seed": "seed",
    "stop": "sampling.stop_strings",
    "stop_token_ids": "sampling.stop_ids",
    "temperature": "sampling.temperature",
    "top_p": "sampling.top_p",
    "top_k": "sampling.top_k",
    "min_p": "sampling.min_p",
    "repetition_penalty": "sampling.repetition_penalty",
    "repeat_penalty": "sampling.repetition_penalty",
    "presence_penalty": "sampling.presence_penalty",
    "frequency_penalty": "sampling.frequency_penalty",
    "logit_bias": "sampling.logit_bias",
    "min_tokens": "sampling.min_tokens",
}


def foreign_settings(target: str) -> frozenset[str]:
    """Settings under ``target.`` that do not act on this target: they always have their default."""
    return frozenset(key for key, owners in OWNERS.items() if target not in owners)


def own_settings(values: dict[str, Any]) -> dict[str, Any]:
    """A plain configuration without the settings of other targets.

    The one place that drops them: fingerprint, variant, pin and record all come here.
    """
    target = values.get("target")
    if not isinstance(target, dict):
        return values
    foreign = foreign_settings(str(target.get("name", ENGINE)))
    return values | {"target": {key: value for key, value in target.items() if key not in foreign}}


def target_complaints(config: ExperimentConfig) -> Iterator[tuple[str, Any, str]]:
    """(setting, value, what would be right) for each setting of the target that cannot act or work."""
    target = config.target
    if target.name not in TARGETS:
        return
    yield from _foreign(target)
    if target.name == ENGINE:
        if config.model.name == SERVED:
            yield (
                "model",
                SERVED,
                "is what a server has; the engine needs weights: model=web or model=/a/folder",
            )
        return
    if config.hazard != "none":
        must = "faults are put into the engine alone; start a server with one: sm70lab serve hazard=…"
        yield "hazard", config.hazard, must
    if target.name == OPENAI and config.route.name == AS_SERVED:
        yield from _route_complaints(config.route, Route(name=AS_SERVED, draft_tokens=0), "route")
    yield from _address_complaints(target)
    yield from _secret_complaints(target)
    yield from _body_complaints(target)
    yield from _limit_complaints(target)
    if target.name == VLLM:
        yield from _start_complaints(config)


def _foreign(target: TargetConfig) -> Iterator[tuple[str, Any, str]]:
    for f in fields(TargetConfig):
        default = f.default_factory() if f.default_factory is not MISSING else f.default
        value = getattr(target, f.name)
        if target.name not in OWNERS.get(f.name, TARGETS) and value != default:
            whose = " and ".join(f"target={name}" for name in OWNERS[f.name])
            shown = value.value if isinstance(value, Enum) else value
            yield (
                f"target.{f.name}",
                shown,
                f"is a setting of {whose}, not of target={target.name}; leave it out",
            )


def _route_complaints(route: Any, nothing_said: Any, where: str) -> Iterator[tuple[str, Any, str]]:
    """Settings of a route that nobody named: the server's is as it is."""
    for f in fields(route):
        value, default = getattr(route, f.name), getattr(nothing_said, f.name)
        if is_dataclass(value):
            yield from _route_complaints(value, default, f"{where}.{f.name}")
        elif value != default:
            shown = value.value if isinstance(value, Enum) else value
            yield f"{where}.{f.name}", shown, "the server's route is its own; leave it out"


def _address_complaints(target: TargetConfig) -> Iterator[tuple[str, Any, str]]:
    if target.name == OPENAI and target.base_url is None:
        yield "target.base_url", "null", "must name the server: http://host:8000/v1"
    for key in ("base_url", "metrics_url", "reference_url"):
        url = getattr(target, key)
        if url is not None and (wrong := _wrong_url(url)) is not None:
            yield f"target.{key}", _bare(url), wrong
    if target.metrics is MetricsSource.off and target.metrics_url is not None:
        must = "target.metrics=off reads none; leave out one of them"
        yield "target.metrics_url", target.metrics_url, must
    secure = (target.base_url or "").startswith("https://") or (target.metrics_url or "").startswith(
        "https://"
    )
    for key in ("tls_ca", "tls_cert", "tls_key"):
        file = getattr(target, key)
        if file is None:
            continue
        if not secure:
            yield f"target.{key}", file, "acts on https:// alone, and target.base_url is not"
        elif not Path(file).expanduser().is_file():
            yield f"target.{key}", file, "no such file; give a PEM file"
    if not target.tls_verify and not secure:
        yield "target.tls_verify", "false", "acts on https:// alone, and target.base_url is not"
    if not target.tls_verify and target.tls_ca is not None:
        yield "target.tls_ca", target.tls_ca, "target.tls_verify=false asks nobody; leave out one of them"
    if target.tls_key is not None and target.tls_cert is None:
        yield "target.tls_key", target.tls_key, "needs target.tls_cert, the certificate it belongs to"


def _wrong_url(url: str) -> str | None:
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        return "cannot be read; must be http://host:8000/v1"
    if parts.scheme not in ("http", "https") or not parts.hostname or re.search(r"\s", url):
        return "must be http(s)://host:port/…, such as http://127.0.0.1:8000/v1"
    if parts.username is not None or parts.password is not None:
        return (
            "must hold no user or password: it is recorded; name the variable of a key in target.api_key_env"
        )
    if parts.query or parts.fragment:
        return "must have no ?… or #…: it is recorded, and paths are put behind it"
    return None


def _bare(url: str) -> str:
    """The address without what may be secret in it."""
    return re.sub(r"[?#].*", "", re.sub(r"//[^/]*@", "//***@", url))


def _secret_complaints(target: TargetConfig) -> Iterator[tuple[str, Any, str]]:
    names = [("target.api_key_env", target.api_key_env)] if target.api_key_env is not None else []
    for header, value in target.headers.items():
        setting = f"target.headers.{header}"
        if not HEADER_NAME.fullmatch(header):
            yield "target.headers", header, "no name of a header: letters, digits and dashes"
        elif header.lower() in WRITTEN_HEADERS:
            yield setting, "…", "is written by the client itself; leave it out"
        elif value.startswith(ENV):
            names.append((setting, value.removeprefix(ENV)))
        elif SECRET_HEADER.search(header):
            must = f"must be {ENV}NAME, a variable of the environment: headers are recorded"
            yield setting, "***", must
        elif not value.isascii() or not value.isprintable() or value != value.strip():
            yield setting, ascii(value), "must be printable ASCII, without a blank at its ends"
        if header.lower() == "authorization" and target.api_key_env is not None:
            yield setting, "***", "and target.api_key_env both set it; leave out one of them"
    for setting, name in names:
        if not ENV_NAME.fullmatch(name or ""):
            yield setting, "***", "must be the name of an environment variable, not its content"
        elif not os.environ.get(name or ""):
            yield setting, name, "this environment variable is not set, or empty"


def _body_complaints(target: TargetConfig) -> Iterator[tuple[str, Any, str]]:
    for name in target.extra_body:
        setting = f"target.extra_body.{name}"
        if name in OWN_FIELDS:
            yield setting, "…", "is written by the target itself; leave it out"
        elif name in SET_ELSEWHERE:
            yield setting, target.extra_body[name], f"set {SET_ELSEWHERE[name]} instead: it is recorded there"
        elif SECRET_FIELD.search(str(name)):
            yield setting, "***", "secrets are recorded here; use target.api_key_env or a header env:NAME"


def _limit_complaints(target: TargetConfig) -> Iterator[tuple[str, Any, str]]:
    for key in ("connect_timeout_s", "read_timeout_s", "total_timeout_s"):
        if not 0 < getattr(target, key) < float("inf"):
            yield f"target.{key}", getattr(target, key), "must be above 0 seconds"
    if not 0 <= target.retries <= MAX_RETRIES:
        yield "target.retries", target.retries, f"must be 0 to {MAX_RETRIES}"


def _start_complaints(config: ExperimentConfig) -> Iterator[tuple[str, Any, str]]:
    """Of a server that the run starts itself; ``targets.vllm_flags`` finds what contradicts the route."""
    target = config.target
    if target.command and target.python is not None:
        must = "target.command names the whole program; leave out one of them"
        yield "target.python", target.python, must
    for key in ("python", "pythonpath"):
        value = getattr(target, key)
        if value is not None and not value.strip():
            yield f"target.{key}", "''", "must name a file" if key == "python" else "must name a folder"
    if target.pythonpath is not None and not Path(target.pythonpath).expanduser().is_dir():
        yield "target.pythonpath", target.pythonpath, "no such folder; give the tree that holds vllm/"
    if not all(word.strip() for word in target.command):
        yield "target.command", target.command, "must hold no empty word"
    for name in target.env:
        if not ENV_NAME.fullmatch(str(name)):
            yield "target.env", name, "no name of a variable: letters, digits and underscores"
        elif SECRET_FIELD.search(str(name)):
            yield f"target.env.{name}", "***", "secrets are recorded here; use target.api_key_env"
    for name in target.arguments:
        if not ENV_NAME.fullmatch(str(name)):
            yield "target.arguments", name, "must be an argument's name, such as max_model_len"
        elif name in ARGUMENTS_ELSEWHERE:
            yield f"target.arguments.{name}", "…", f"set {ARGUMENTS_ELSEWHERE[name]} instead"
    if not 0 <= target.port <= 65535:
        yield "target.port", target.port, "must be 0 (a free one) to 65535"
    if not target.host.strip():
        yield "target.host", "''", "must be an address of this machine, such as 127.0.0.1"
    if not 0 < target.start_timeout_s < float("inf"):
        yield "target.start_timeout_s", target.start_timeout_s, "must be above 0 seconds"
