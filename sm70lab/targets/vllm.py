"""A vLLM server of one's own as a target: started, asked over its API, and taken down again."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx

from sm70lab.config_checks_target import SERVED
from sm70lab.errors import UsageError
from sm70lab.schema import (
    CounterWindow,
    ExperimentConfig,
    Explanation,
    Generation,
    ModelSpec,
    Prompt,
    ReferenceKind,
    Rounding,
    TokenScores,
)
from sm70lab.targets.base import JudgedBy, OnProgress
from sm70lab.targets.kept import kept
from sm70lab.targets.openai import OpenAITarget
from sm70lab.targets.process import HEALTH_TIMEOUT_S, ServerProcess, check_port, free_port
from sm70lab.targets.vllm_code import environment, inherited, server_code
from sm70lab.targets.vllm_flags import DISABLE_FULL_FORWARD, Launch, launch

SERVER_LOG = "server.log"  # of a run's folder
LOGS = ".servers"  # folder under tracking.runs_dir; the log of a start that failed stays there
API_KEY = "VLLM_API_KEY"  # vLLM's own variable: a key on a command line is seen by everyone
UNKNOWN = re.compile(r"Unknown vLLM environment variable detected: (\w+)")
DEVICE = re.compile(r"device_config=(\w+)")  # of the engine's own account at its start
Say = Callable[[str], None]


@dataclass
class Running:
    """A server at work."""

    launch: Launch
    key: tuple[str, str | None]  # code revision, name of the API key's variable
    process: ServerProcess
    url: str  # http://host:port
    startup_seconds: float
    startup_bytes: int  # of the log
    runs: int = 0  # that it has served

    def stop(self) -> None:
        """End it; its log is in the folders of its runs."""
        self.process.stop()
        self.process.log.unlink(missing_ok=True)

    @property
    def healthy(self) -> bool:
        """Whether it still answers: an engine that died in an earlier run does not."""
        if not self.process.running:
            return False
        try:
            return httpx.get(f"{self.url}/health", timeout=HEALTH_TIMEOUT_S, trust_env=False).is_success
        except httpx.HTTPError:
            return False


class VllmTarget:
    """Starts ``vllm_flags.launch``'s server and measures it as ``targets.openai`` does any other."""

    def __init__(self, config: ExperimentConfig) -> None:
        self.config = config
        self._launch = launch(config)
        self._code = server_code(config.target)
        self._server: Running | None = None
        self._asked: OpenAITarget | None = None
        self._log_begin = 0
        self._unknown: list[str] = []
        self._say: Say = _silent
        self._note: Say = _silent

    def watch(self, say: Say, note: Say) -> None:
        """Where to tell how the start goes, and what is worth keeping on the screen."""
        self._say, self._note = say, note

    def load(self) -> None:
        """Start the server, or take over a kept one that is the same. Raises ``UsageError``."""
        place = kept()
        found = place.server if place is not None else None
        if isinstance(found, Running) and self._same(found):
            self._server = found
        else:
            if place is not None:
                place.stop()
            self._server = self._start()
            if place is not None:
                place.server = self._server
        server = self._server
        server.runs += 1
        self._log_begin = 0 if server.runs == 1 else server.process.log.stat().st_size
        self._unknown = self._refuse_unknown(server)
        self._asked = OpenAITarget(self._as_openai(server.url))
        self._asked.load()

    def _as_openai(self, url: str) -> ExperimentConfig:
        """The same run, on a server that is there.

        A checkpoint that the engine cannot read (quantised, another architecture) is the server's alone:
        no tokenizer and no reference here.
        """
        from sm70lab.engine.loading import find  # brings torch, which a start that fails need not wait for

        config = deepcopy(self.config)
        config.target.base_url = f"{url}/v1"
        try:
            find(config.model)
        except UsageError as error:
            if config.target.reference is ReferenceKind.engine:
                raise
            self._note(f"the engine cannot read this checkpoint, so it does not judge: {error}")
            config.model = ModelSpec(SERVED, dtype=config.model.dtype)
        return config

    def _same(self, server: Running) -> bool:
        return server.launch == self._launch and server.key == self._key and server.healthy

    @property
    def _key(self) -> tuple[str, str | None]:
        return self._code.revision, self.config.target.api_key_env

    def _start(self) -> Running:
        target = self.config.target
        port = target.port or free_port(target.host)
        check_port(target.host, port)
        variables = environment(target) | self._launch.environment
        if target.api_key_env is not None:
            variables[API_KEY] = os.environ[target.api_key_env]
        _, held = inherited()
        if held := [
            name for name in held if name.startswith("VLLM_") and name not in self._launch.environment
        ]:
            self._note(f"set here, and not passed on to the server: {', '.join(held)}; use target.env")
        started = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
        log = Path(self.config.tracking.runs_dir) / LOGS / f"{started}-{os.getpid()}-{port}.log"
        process = ServerProcess(self._launch.command(target.host, port), variables, log)
        reached = "127.0.0.1" if target.host in ("0.0.0.0", "::", "") else target.host
        url = f"http://{f'[{reached}]' if ':' in reached else reached}:{port}"
        try:
            process.start()
            seconds = process.wait_until_healthy(f"{url}/health", target.start_timeout_s, self._say)
        except UsageError as error:
            process.stop()
            raise UsageError(f"target=vllm: the server did not start: {error}; log: {log}") from error
        except BaseException:  # Ctrl-C
            process.stop()
            raise
        return Running(self._launch, self._key, process, url, seconds, log.stat().st_size)

    def _refuse_unknown(self, server: Running) -> list[str]:
        """Variables that this vLLM says it does not know. Raises for one that the route depends on."""
        unknown = sorted(set(UNKNOWN.findall(server.process.text()[: server.startup_bytes])))
        for entry in self._launch.variables:
            needed = entry.source.startswith("route.") and str(entry.value) != "0"
            if entry.name in unknown and needed and entry.name != DISABLE_FULL_FORWARD:
                raise UsageError(
                    f"{entry.source}: this vLLM ({self._code.place}) does not know {entry.name}, so the "
                    "route would be another; set target.python and target.pythonpath to the fork, or "
                    "route=as_served"
                )
        own = [name for name in unknown if name in self.config.target.env]
        if own:
            self._note(f"this vLLM does not list {', '.join(own)} among its variables; recorded as unknown")
        return unknown

    def describe(self) -> dict[str, str | int | float]:
        """Facts of the server, of its start, and of what it was told."""
        assert self._asked is not None and self._server is not None
        versions = " ".join(f"{name} {version}" for name, version in self._code.versions.items())
        host, port = self.config.target.host, httpx.URL(self._server.url).port or 0
        device = DEVICE.search(self._server.process.text()[: self._server.startup_bytes])
        return {
            **self._asked.describe(),
            **({"device": device[1]} if device else {}),
            "server_code": self._code.revision,
            "server_place": self._code.place,
            "server_packages": versions,
            "server_command": self._launch.shell(host, port),
            "startup_seconds": self._server.startup_seconds,
            "runs_of_this_server": self._server.runs,
            "not_applied": "; ".join(self._launch.not_applied),
            "unknown_variables": " ".join(self._unknown),
        }

    def artifacts(self) -> dict[str, str]:
        """The server's log: of its start, and of this run."""
        if self._server is None:
            return {}
        process, startup = self._server.process, self._server.startup_bytes
        if self._log_begin <= startup:
            return {SERVER_LOG: process.text()}
        rest = process.text(self._log_begin)
        return {SERVER_LOG: f"{process.text()[:startup]}\n[… earlier runs of this server …]\n{rest}"}

    def close(self) -> None:
        """Let go of the server: it stays for the next run where one may follow, and else ends."""
        if self._asked is not None:
            self._asked.close()
        if self._server is not None and kept() is None:
            self._server.stop()

    def prompts(self) -> list[Prompt]:
        """See ``targets.base.Target``; so the rest."""
        return self._inner.prompts()

    def generate(self, prompts: list[Prompt], repeat: int, on_progress: OnProgress) -> Iterator[Generation]:
        return self._inner.generate(prompts, repeat, on_progress)

    def score(self, generation: Generation) -> TokenScores | None:
        return self._inner.score(generation)

    def rounding(self, generation: Generation) -> Rounding | None:
        return self._inner.rounding(generation)

    def explain(self, generation: Generation, index: int) -> Explanation | None:
        return self._inner.explain(generation, index)

    def counters(self) -> list[CounterWindow]:
        return self._inner.counters()

    def readings(self) -> dict[str, Any]:
        return self._inner.readings() if self._asked is not None else {}

    def judged_by(self) -> JudgedBy:
        return self._inner.judged_by()

    @property
    def _inner(self) -> OpenAITarget:
        assert self._asked is not None, "load() comes first"
        return self._asked


def _silent(line: str) -> None:
    """Nobody watches."""
