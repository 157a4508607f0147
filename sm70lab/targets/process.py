"""A server as a child of this run: started, waited for, and taken down with its whole tree."""

from __future__ import annotations

import json
import os
import re
import select
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from sm70lab.errors import UsageError
from sm70lab.targets.supervisor import KILL_SECONDS, MARK, end_tree, marked

POLL_SECONDS = 0.25
GRACE_SECONDS = 10.0  # between SIGTERM and SIGKILL
TAIL_BYTES = 1 << 16
HEALTH_TIMEOUT_S = 2.0
LONGEST_LINE = 300  # characters of a server's own words
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f]")


@dataclass(frozen=True)
class Pattern:
    """A failure that is known by its words in the log."""

    words: re.Pattern[str]
    line: str  # what to tell; {0}, {1} … are the groups


def _pattern(words: str, line: str) -> Pattern:
    return Pattern(re.compile(words), line)


# The first that is found anywhere in the log wins, so causes stand before what follows from them.
FAILURES: tuple[Pattern, ...] = (
    _pattern(r"error: unrecognized arguments: ([^\n]+)", "unknown argument {0}; see target.arguments"),
    _pattern(
        r"error: argument ([^\n:]+): ([^\n]+)",
        "argument {0}: {1}; see target.arguments, target.dry_run=true shows where it comes from",
    ),
    _pattern(
        r"validation errors? for (\w+)\n(\w+)\n\s+Unexpected keyword argument",
        "{0} of this version has no {1}; leave it out: target.arguments.…{1}=null",
    ),
    _pattern(r"No module named '?(vllm[\w.]*)'?", "no {0} in this environment; set target.python"),
    _pattern(
        r"(?:\[Errno 98\]|OSError: \[Errno \d+\]) ?[^\n]*[Aa]ddress already in use",
        "its port is taken; set target.port=0 for a free one",
    ),
    _pattern(r"[Aa]ddress already in use", "its port is taken; set target.port=0 for a free one"),
    _pattern(
        r"(Free memory on device [^\n]*?less than desired GPU memory utilization(?: \([^)]*\))?)",
        "out of memory: {0}; another process holds the device, or lower "
        "target.arguments.gpu_memory_utilization",
    ),
    _pattern(
        r"(Available memory on node [^\n]*?less than (?:desired|requested) [^\n(]*(?:\([^)]*\))?)",
        "out of memory: {0}; lower target.arguments.gpu_memory_utilization or "
        "target.env.VLLM_CPU_KVCACHE_SPACE",
    ),
    _pattern(
        r"(?:torch\.OutOfMemoryError|torch\.cuda\.OutOfMemoryError|CUDA out of memory)[^\n]*?"
        r"(Tried to allocate [^\n.]*\d+ ?[KMG]iB|CUDA out of memory)",
        "out of memory: {0}; lower target.arguments.gpu_memory_utilization or max_model_len",
    ),
    _pattern(
        r"(No available memory for the cache blocks|[^\n]*larger than the available KV cache memory[^\n.]*)",
        "out of memory: {0}; lower target.arguments.max_model_len or raise gpu_memory_utilization",
    ),
    _pattern(r"(?:DefaultCPUAllocator: can't allocate memory|Cannot allocate memory)", "out of memory"),
    _pattern(
        r"(Bfloat16 is only supported on GPUs [^\n.]*\d\.\d)",
        "unsupported device: {0}; a V100 takes model.dtype=float16",
    ),
    _pattern(
        r"(no kernel image is available for execution on the device"
        r"|[^\n]*Minimum capability: \d+[^\n]*"
        r"|[^\n]*requires? (?:a )?(?:GPU|device)s? with compute capability[^\n]*"
        r"|Failed to infer device type"
        r"|No CUDA GPUs are available)",
        "unsupported device: {0}; is this build of vLLM made for this machine's device?",
    ),
    _pattern(
        r"(Invalid attention backend[^\n]*|[Uu]nknown attention backend[^\n.]*|"
        r"Selected backend [^\n]* is not valid for this configuration[^\n]*)",
        "{0}; see target.arguments.attention_backend",
    ),
    _pattern(
        r"(Model architectures \[[^\n]*\] (?:are not supported|failed to be inspected))",
        "{0}: this version of vLLM does not serve this model",
    ),
    _pattern(r"(Unknown vLLM environment variable detected: \w+)", "{0}; see target.env"),
)
ERROR_LINE = re.compile(
    r"^(?:\([^)]*\) )?(?:ERROR [^\]]*\] )?((?:[\w.]*(?:Error|Exception)|  Value error)\b.*)$", re.M
)


def failure_line(log: str, code: int | None) -> str:
    """What ended a server, in one line: a known failure, else its last error, else how it ended."""
    for pattern in FAILURES[:-1]:
        if (found := pattern.words.search(log)) is not None:
            return pattern.line.format(*(group.strip() for group in found.groups()))
    if code is not None and code < 0:
        killed = " (often the machine's memory: the kernel ends the largest process)" if code == -9 else ""
        return f"ended by signal {-code}{killed}"
    errors: list[str] = [match.strip() for match in ERROR_LINE.findall(log)]
    telling = [line for line in errors if not line.startswith("RuntimeError: Engine core init")]
    if telling:
        return telling[-1][:LONGEST_LINE]
    last = last_line(log)[:LONGEST_LINE]
    return f"ended with exit code {code}" + (f": {last}" if last else "")


def last_line(log: str) -> str:
    """The last line with something in it, without control characters."""
    lines: list[str] = [CONTROL.sub("", line).strip() for line in re.split(r"[\n\r]", log)]
    return next((line for line in reversed(lines) if line), "")


def free_port(host: str) -> int:
    """A port that nobody listens on now. Raises ``UsageError`` for an address that is not this machine's."""
    with _bound(host, 0) as one:
        port: int = one.getsockname()[1]
    return port


def check_port(host: str, port: int) -> None:
    """Raise ``UsageError`` where ``port`` is taken, and say by whom."""
    try:
        _bound(host, port).close()
    except UsageError as error:
        owner = _listener(port)
        raise UsageError(
            f"{error}{f' (by {owner})' if owner else ''}; target.port=0 takes a free one"
        ) from None


def _bound(host: str, port: int) -> socket.socket:
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        one = socket.socket(family, kind)
    except OSError as error:
        raise UsageError(f"target.host={host}: {error.strerror or error}") from error
    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        one.bind(address)
    except OSError as error:
        one.close()
        name, value = ("port", port) if port else ("host", host)
        raise UsageError(f"target.{name}={value}: {(error.strerror or str(error)).lower()}") from error
    return one


def _listener(port: int) -> str:
    """The process that listens on ``port``, where this user may know."""
    with suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
                return f"process {connection.pid}, {psutil.Process(connection.pid).name()}"
    return ""


class ServerProcess:
    """A command that serves HTTP, its log, and the supervisor that takes it down (see ``supervisor``)."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.command, self.log = list(command), log
        self._mark = uuid.uuid4().hex
        self._environment = {**environment, MARK: self._mark}
        self._supervisor: subprocess.Popen[bytes] | None = None
        self._said = b""
        self.pid: int | None = None
        self.exit_code: int | None = None
        self._trouble = ""

    def start(self) -> None:
        """Start it. Raises ``UsageError`` where the program cannot be started at all."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.log.touch()
        here = Path(__file__).with_name("supervisor.py")
        self._supervisor = subprocess.Popen(
            [sys.executable, "-P", str(here)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C reaches the run alone, which then ends its server in order
        )
        assert self._supervisor.stdin is not None
        spec = {
            "command": self.command,
            "environment": self._environment,
            "log": str(self.log),
            "grace_s": GRACE_SECONDS,
        }
        self._supervisor.stdin.write(json.dumps(spec).encode() + b"\n")
        self._supervisor.stdin.flush()

    def text(self, begin: int = 0) -> str:
        """The log from byte ``begin`` on."""
        with self.log.open("rb") as handle:
            handle.seek(begin)
            return handle.read().decode(errors="replace")

    @property
    def running(self) -> bool:
        """Whether the command has not ended, as far as is known now."""
        self._hear()
        return self.exit_code is None and not self._trouble

    def wait_until_healthy(self, url: str, timeout_s: float, say: Callable[[str], None]) -> float:
        """Seconds until ``GET url`` is answered with 200 by this process tree.

        ``say`` gets the log's last line whenever it changes. Raises ``UsageError``, with the tree taken
        down, when the command ends first, does not answer in time, or somebody else answers.
        """
        started = time.monotonic()
        shown = ""
        with httpx.Client(trust_env=False, timeout=HEALTH_TIMEOUT_S) as client:
            while True:
                if not self.running:
                    self.stop()
                    raise UsageError(self._trouble or failure_line(self.text(), self.exit_code))
                if (line := last_line(self._tail())) != shown:
                    say(line)
                    shown = line
                with suppress(httpx.HTTPError):
                    if client.get(url).status_code == httpx.codes.OK:
                        self._check_own(url)
                        return time.monotonic() - started
                if time.monotonic() - started > timeout_s:
                    self.stop()
                    raise UsageError(
                        f"not healthy after target.start_timeout_s={timeout_s:g}; it last said: {shown}"
                    )
                time.sleep(POLL_SECONDS)

    def stop(self) -> None:
        """End the whole tree, and come back when it is gone. A second call does nothing."""
        supervisor, self._supervisor = self._supervisor, None
        if supervisor is None:
            return
        assert supervisor.stdin is not None and supervisor.stdout is not None
        with suppress(BrokenPipeError):
            supervisor.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            supervisor.wait(GRACE_SECONDS + 2 * KILL_SECONDS)
        end_tree(self._mark)  # nothing is left but where the supervisor was killed, or hangs
        supervisor.kill()
        supervisor.wait()
        self._take(supervisor.stdout.read())
        supervisor.stdout.close()
        if self.exit_code is None:
            self.exit_code = -9

    def _check_own(self, url: str) -> None:
        """Somebody else may have taken the port in between, and would be measured in this server's name."""
        port = httpx.URL(url).port
        for one in marked(self._mark):
            with suppress(psutil.Error):
                for connection in one.net_connections("tcp"):
                    if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
                        return
        self.stop()
        raise UsageError(f"{url} is answered by another process than the one started here; use target.port=0")

    def _tail(self) -> str:
        return self.text(max(0, self.log.stat().st_size - TAIL_BYTES))

    def _hear(self) -> None:
        """Read what the supervisor has said, without waiting for it."""
        supervisor = self._supervisor
        if supervisor is None:
            return
        assert supervisor.stdout is not None
        number = supervisor.stdout.fileno()
        while select.select([number], [], [], 0)[0]:
            if not (said := os.read(number, 4096)):
                if self.exit_code is None and not self._trouble:
                    self._trouble = "its supervisor was killed"
                return
            self._take(said)

    def _take(self, said: bytes) -> None:
        *lines, self._said = (self._said + said).split(b"\n")
        for line in lines:
            values = json.loads(line)
            self.pid = values.get("pid", self.pid)
            self.exit_code = values.get("exit", self.exit_code)
            if "error" in values:
                self._trouble = f"cannot be started: {values['error']}"
