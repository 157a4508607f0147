"""``sm70lab serve``: the built-in engine behind an OpenAI-compatible API, or the scripted server."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from sm70lab.cli.overrides import is_sweep
from sm70lab.cli.simple import SimpleOptions, parse
from sm70lab.config import near
from sm70lab.config_checks_target import ENGINE
from sm70lab.errors import UsageError
from sm70lab.schema import Display, DraftSampling, ExperimentConfig

if TYPE_CHECKING:  # a mistake need not wait for torch
    from sm70lab.serving.protocol import Version
    from sm70lab.targets.engine import EngineTarget

LOOPBACK = ("127.0.0.1", "::1", "localhost")
GROUPS = ("route", "target", "model", "sampling", "hazard", "display", "experiment", "local")
LEAST_POSITIONS = 16
WHOLE = {  # setting: default, least, most
    "port": (8000, 0, 65_535),
    "queue": (64, 0, 100_000),
    "max_body": (8 << 20, 1024, 1 << 30),
    "max_model_len": (0, LEAST_POSITIONS, 1 << 24),
    "max_logprobs": (20, -1, 1 << 24),
}
SECONDS = {"request_timeout_s": 3600.0, "grace_s": 10.0}
OTHERS = ("host", "served_model_name", "api_key_env", "repetition_stop")
OWN = (*WHOLE, *SECONDS, *OTHERS)
MOST_SECONDS = 1e6
ENGINE_ALONE = "serve runs the built-in engine; leave target out"

HELP = """sm70lab serve [route=… model=… hazard=… sampling.…=… target.max_num_seqs=…] [setting=…] [--json]
sm70lab serve --script FILE      (the scripted server: sm70lab serve --script --help)

Serve the built-in engine behind an OpenAI-compatible API until Ctrl-C or SIGTERM. sampling.… are the
defaults of requests that leave a field out. A request with seed S has the tokens of an in-process run of
one prompt with seed=S. The API, field by field: docs/serve.md.

  port=8000               0 takes a free one; the line "listening on http://…" names it
  host=127.0.0.1          this machine alone; 0.0.0.0 is every address
  max_model_len=…         tokens of prompt and output; default: the model's own, or what fits in memory
  served_model_name=…     default: the model's name, or that of its folder
  queue=64                requests that may wait beyond target.max_num_seqs; one more gets 429
  max_body=8388608        bytes of a request; a larger one gets 413
  max_logprobs=20         most of logprobs and prompt_logprobs; -1: the whole vocabulary
  request_timeout_s=3600  then an answer ends with finish_reason timeout
  grace_s=10              what running answers have after SIGTERM or Ctrl-C before they are cut
  api_key_env=NAME        the environment variable that holds the key which /v1 asks for
  repetition_stop=false   end an output that has looped for 180 tokens, with finish_reason repetition
  --json                  say where it listens as one JSON object
"""


@dataclass(frozen=True)
class Settings:
    """The command's own settings, checked."""

    port: int
    queue: int
    max_body: int
    max_model_len: int  # 0: the default
    max_logprobs: int
    request_timeout_s: float
    grace_s: float
    host: str
    served_model_name: str
    api_key: str | None
    repetition_stop: bool


def main(arguments: list[str]) -> int:
    """Serve until interrupted, then 0."""
    if any(argument.partition("=")[0] == "--script" for argument in arguments):
        from sm70lab.cli import serve_script

        return serve_script.main(arguments)
    options = parse(arguments, HELP, own=OWN, check=_check_given)
    if options is None:
        return 0
    if (name := options.config.target.name) != ENGINE:  # of an experiment
        raise UsageError(f"target={name}: {ENGINE_ALONE}")
    return _serve(options.config, _settings(options))


def _check_given(overrides: Sequence[str]) -> None:
    """Refuse settings that do nothing in a server (workload, gate, seed and the like), and several values."""
    of_a_run = {*(f.name for f in fields(ExperimentConfig)), "workload", "gate", "serving", "tracking"}
    for given in overrides:
        key, _, value = given.lstrip("+~").partition("=")
        key = key.partition("@")[0]
        group = key.split(".")[0]
        if group not in GROUPS and ("=" in given or group in of_a_run):
            what = "does nothing in a server" if group in of_a_run else "no such setting of serve"
            raise UsageError(f"{given}: {what}; {near(key, [*GROUPS[:5], *OWN])}")
        if key == "target" and value != ENGINE:
            raise UsageError(f"{given}: {ENGINE_ALONE}")
        if os.sep not in value and is_sweep(given):
            raise UsageError(f"{given}: one server serves one {key}; start one for each value")


def _settings(options: SimpleOptions) -> Settings:
    own = options.own
    key_name = own.get("api_key_env")
    api_key = os.environ.get(key_name) if key_name is not None else None
    if key_name is not None and not api_key:
        raise UsageError(f"api_key_env={key_name}: this environment variable is not set, or empty")
    stop = own.get("repetition_stop", "false")
    if stop not in ("true", "false"):
        raise UsageError(f"repetition_stop={stop}: must be true or false")
    folder = options.config.model.path
    default_name = options.config.model.name if folder is None else Path(folder).name
    if not (name := own.get("served_model_name", default_name)):
        raise UsageError("served_model_name=: must not be empty")
    return Settings(
        port=_whole(own, "port"),
        queue=_whole(own, "queue"),
        max_body=_whole(own, "max_body"),
        max_model_len=_whole(own, "max_model_len"),
        max_logprobs=_whole(own, "max_logprobs"),
        request_timeout_s=_seconds(own, "request_timeout_s"),
        grace_s=_seconds(own, "grace_s"),
        host=own.get("host", LOOPBACK[0]),
        served_model_name=name,
        api_key=api_key,
        repetition_stop=stop == "true",
    )


def _whole(own: dict[str, str], setting: str) -> int:
    default, least, most = WHOLE[setting]
    text = own.get(setting)
    if text is None:
        return default
    if not text.removeprefix("-").isdecimal() or len(text) > 12 or not least <= int(text) <= most:
        raise UsageError(f"{setting}={text}: must be {least} to {most}")
    return int(text)


def _seconds(own: dict[str, str], setting: str) -> float:
    text = own.get(setting)
    if text is None:
        return SECONDS[setting]
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= MOST_SECONDS or (value == 0 and setting != "grace_s"):
        least = "0 seconds or more" if setting == "grace_s" else "above 0 seconds"
        raise UsageError(f"{setting}={text}: must be {least}, and at most {MOST_SECONDS:.0f}")
    return value


def _serve(config: ExperimentConfig, settings: Settings) -> int:
    from sm70lab.serving import server

    bound = server.bind(settings.host, settings.port)
    with bound:
        from sm70lab.serving.app import Served, build
        from sm70lab.serving.intake import Intake, Limits
        from sm70lab.serving.metrics import Metrics
        from sm70lab.serving.worker import Worker
        from sm70lab.targets.engine import EngineTarget

        target = EngineTarget(config)
        positions = _positions(target, settings.max_model_len)
        name = settings.served_model_name
        worker = Worker(target, positions, settings.queue, Metrics(name, config.route.draft_tokens))
        worker.start()
        worker.ready.result()
        limits = Limits(
            positions, settings.max_logprobs, settings.request_timeout_s, settings.repetition_stop
        )
        served = Served(
            worker, Intake(target, name, limits), _version(config), settings.api_key, settings.max_body
        )
        _warn(target, settings)
        address = server.address_of(bound)
        server.serve(
            build(served),
            worker,
            bound,
            settings.grace_s,
            ready=lambda: _announce(address, name, positions, config.display),
        )
    return 0


def _positions(target: EngineTarget, asked: int) -> int:
    """Tokens of prompt and output: what was asked for, else the model's own or what fits in memory."""
    from sm70lab.engine.architecture import expected_tensors
    from sm70lab.targets.memory import free_bytes

    arch = target.source.arch
    parameters = sum(math.prod(shape) for shape in expected_tensors(arch).values())
    item = {"float64": 8, "float32": 4}.get(target.config.model.dtype.value, 2)
    free = free_bytes(target.device) - parameters * item
    positions = asked or arch.max_position_embeddings
    needed = target.cache_bytes(positions)
    if asked and needed > free:
        raise UsageError(
            f"max_model_len={asked}: its KV caches need {needed / 2**30:.1f} GiB beside the weights, and "
            f"{max(free, 0) / 2**30:.1f} GiB are free; ask for less"
        )
    if not asked and needed > free / 2:  # the rest: a reference copy, and prompts in the making
        positions = int(positions * max(free, 0) / 2 / needed)
    if positions < LEAST_POSITIONS:
        raise UsageError(
            f"target.max_num_seqs={target.config.target.max_num_seqs}: the memory that is free holds KV "
            f"caches of {positions} tokens each; take fewer sequences or a smaller model"
        )
    return positions


def _version(config: ExperimentConfig) -> Version:
    from sm70lab import __version__
    from sm70lab.config import plain
    from sm70lab.serving.protocol import Version
    from sm70lab.tracking.fingerprint import model_hash

    route = config.route
    matching = route.draft_sampling in (DraftSampling.coupled, DraftSampling.token_matching)
    return Version(
        version=__version__,
        model_hash=model_hash(config.model),
        route=plain(route),
        dtype=config.model.dtype.value,
        draws="keyed" if matching or not route.draft_tokens else "other",
        hazard=config.hazard,
    )


def _warn(target: EngineTarget, settings: Settings) -> None:
    if settings.host not in LOOPBACK and settings.api_key is None:
        print(
            f"sm70lab: host={settings.host}: other machines may reach this server, and it has no API key; "
            "set api_key_env=NAME",
            file=sys.stderr,
        )
    if idle := target.describe()["hazard_cannot_act"]:
        print(f"sm70lab: hazard={target.config.hazard}: cannot act here: {idle}", file=sys.stderr)


def _announce(address: str, model: str, positions: int, display: Display) -> None:
    if display == Display.json:
        said = {"url": address, "pid": os.getpid(), "model": model, "max_model_len": positions}
        print(json.dumps(said), flush=True)
    else:
        print(f"listening on {address}  (model {model}, {positions} tokens; Ctrl-C ends it)", flush=True)
