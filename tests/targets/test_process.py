"""A server's process tree: started, waited for, always taken down, and nothing else with it.

The server is a program with children; processes, signals and sockets are real.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from sm70lab.errors import UsageError
from sm70lab.targets.process import ServerProcess, check_port, failure_line, free_port, last_line
from sm70lab.targets.supervisor import MARK

PROGRAM = str(Path(__file__).with_name("program.py"))
HOST = "127.0.0.1"
GONE_SECONDS = 15.0


def quiet(line: str) -> None:
    """Nobody watches."""


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def pids(file: Path, count: int) -> list[int]:
    """The tree's pids, once all have reported."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        found = [int(line) for line in file.read_text().split()] if file.exists() else []
        if len(found) >= count:
            return found
        time.sleep(0.02)
    raise AssertionError(f"{file}: fewer than {count} processes")


def wait_gone(found: list[int]) -> list[int]:
    """Those that still live after a while."""
    deadline = time.monotonic() + GONE_SECONDS
    while (left := [pid for pid in found if alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


class Site:
    """Servers of one test."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port(HOST)
        self.children = folder / "pids"
        self.servers: list[ServerProcess] = []

    def server(self, *words: str, program: str = PROGRAM, tree: bool = False) -> ServerProcess:
        extra = [f"children={self.children}"] if tree else []
        command = [sys.executable, program, *words, *extra, "--host", HOST, "--port", str(self.port)]
        server = ServerProcess(command, dict(os.environ), self.folder / f"{len(self.servers)}.log")
        self.servers.append(server)
        server.start()
        return server

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}/health"


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    yield site
    for server in site.servers:
        server.stop()


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    """Somebody else's server: the same program, not started by us."""
    command = [sys.executable, PROGRAM, "--host", HOST, "--port", str(free_port(HOST))]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
    yield process
    process.kill()
    process.wait()


def test_a_healthy_server_goes_with_its_whole_tree(site: Site, bystander: subprocess.Popen[bytes]) -> None:
    server = site.server(tree=True)
    heard: list[str] = []
    assert 0 < server.wait_until_healthy(site.url, 30, heard.append) < 30
    assert heard[-1:] == ["loading the weights"]
    tree = pids(site.children, 4)
    assert all(alive(pid) for pid in tree)
    server.stop()
    assert [pid for pid in tree if alive(pid)] == []
    assert bystander.poll() is None
    assert server.exit_code == -signal.SIGTERM
    server.stop()  # a second time: nothing to do


def test_one_that_is_deaf_to_sigterm_is_killed(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sm70lab.targets.process.GRACE_SECONDS", 0.5)
    server = site.server("deaf=1", tree=True)
    server.wait_until_healthy(site.url, 30, quiet)
    tree = pids(site.children, 4)
    server.stop()
    assert [pid for pid in tree if alive(pid)] == []
    assert server.exit_code == -signal.SIGKILL


def test_children_of_a_server_that_died_by_itself_go_too(site: Site) -> None:
    server = site.server("exit=7", "say=ValueError: no", tree=True)
    with pytest.raises(UsageError, match=r"^ValueError: no$"):
        server.wait_until_healthy(site.url, 30, quiet)
    assert [pid for pid in pids(site.children, 1) if alive(pid)] == []
    assert server.exit_code == 7


KILLED_RUN = """
import os, sys, time
from pathlib import Path
from sm70lab.targets.process import ServerProcess
server = ServerProcess(sys.argv[2:], dict(os.environ), Path(sys.argv[1]))
server.start()
server.wait_until_healthy(os.environ["URL"], 30, lambda line: None)
print("up", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_a_run_that_is_killed_takes_its_server_along(site: Site, number: int) -> None:
    command = [sys.executable, PROGRAM, f"children={site.children}", "--host", HOST, "--port", str(site.port)]
    run = subprocess.Popen(
        [sys.executable, "-c", KILLED_RUN, str(site.folder / "log"), *command],
        env={**os.environ, "URL": site.url},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert run.stdout is not None and run.stdout.readline() == b"up\n"
    supervisors = [child.pid for child in psutil.Process(run.pid).children()]
    tree = [*supervisors, *pids(site.children, 4)]
    run.send_signal(number)
    run.wait()
    run.stdout.close()
    assert wait_gone(tree) == []


def test_a_killed_supervisor_leaves_nothing(site: Site) -> None:
    server = site.server(tree=True)
    server.wait_until_healthy(site.url, 30, quiet)
    tree = pids(site.children, 4)
    marked = [pid for pid in tree if MARK in psutil.Process(pid).environ()]
    (unmarked,) = set(tree) - set(marked)  # it has an empty environment, and no parent but the supervisor
    assert server.pid is not None
    supervisor = psutil.Process(server.pid).parent()
    assert supervisor is not None
    supervisor.kill()
    deadline = time.monotonic() + 10
    while server.running and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not server.running
    server.stop()
    os.kill(unmarked, signal.SIGKILL)  # the one limit: nothing tells it from a stranger's
    assert [pid for pid in marked if alive(pid)] == []


def test_a_start_that_takes_too_long(site: Site) -> None:
    server = site.server("never=1", tree=True)
    tree = pids(site.children, 4)
    with pytest.raises(UsageError, match=r"not healthy after target.start_timeout_s=1; .* the weights"):
        server.wait_until_healthy(site.url, 1, quiet)
    assert [pid for pid in tree if alive(pid)] == []


def test_somebody_elses_answer_is_not_health(site: Site) -> None:
    first = site.server()
    first.wait_until_healthy(site.url, 30, quiet)
    second = site.server("never=1")
    with pytest.raises(UsageError, match="answered by another process"):
        second.wait_until_healthy(site.url, 30, quiet)
    assert first.running


def test_a_program_that_is_not_there(site: Site, tmp_path: Path) -> None:
    server = ServerProcess([str(tmp_path / "nowhere")], dict(os.environ), tmp_path / "log")
    server.start()
    with pytest.raises(UsageError, match=r"cannot be started: No such file or directory: .*nowhere"):
        server.wait_until_healthy(site.url, 30, quiet)


def test_a_taken_port_is_told_with_its_owner() -> None:
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        owner = rf"by process {os.getpid()}, "
        with pytest.raises(UsageError, match=rf"target\.port={port}: address already in use \({owner}"):
            check_port(HOST, port)
    check_port(HOST, port)
    with pytest.raises(UsageError, match=r"target\.host=203\.0\.113\.9: cannot assign"):
        free_port("203.0.113.9")


@pytest.mark.parametrize(
    ("log", "code", "line"),
    [
        ("", -9, "ended by signal 9 (often the machine's memory: the kernel ends the largest process)"),
        ("all is well\n", 3, "ended with exit code 3: all is well"),
        ("\x1b[31mred\x1b[0m\n\n", 1, "ended with exit code 1: red"),
        ("", 1, "ended with exit code 1"),
    ],
)
def test_an_end_without_known_words(log: str, code: int, line: str) -> None:
    assert failure_line(log, code) == line


def test_the_last_line_is_one_line() -> None:
    assert last_line("a\n 10% |#\r 20% |##\r\x1b[2K\n") == "20% |##"
