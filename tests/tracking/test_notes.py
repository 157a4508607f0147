"""``ledger.jsonl`` under several processes, kills and full disks."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sm70lab.errors import UsageError
from sm70lab.tracking import notes
from sm70lab.tracking.notes import NOTES, Note, append, read

WRITER = """
import sys
from pathlib import Path
from sm70lab.tracking.notes import Note, append
folder, who, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
for number in range(count):
    append(folder, Note("v1", None, f"{who} {number} " + "x" * 500, None, None, "note"))
"""


def note(text: str = "text", state: str | None = None) -> Note:
    return Note("v1234567", "t/run", text, state, None, "note")


def start(folder: Path, who: str, count: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", WRITER, str(folder), who, str(count)])


def test_what_is_written_is_read(tmp_path: Path) -> None:
    written = [append(tmp_path, note("a\tb\x1b[31m\n c", "rejected")), append(tmp_path, note("d"))]
    found, unreadable = read(tmp_path)
    assert (found, unreadable) == (written, 0)
    assert found[0].text == "a b [31m c"
    assert found[0].when


def test_several_processes_at_once_lose_nothing(tmp_path: Path) -> None:
    processes = [start(tmp_path, who, 25) for who in "abcd"]
    assert [process.wait(timeout=60) for process in processes] == [0] * 4
    found, unreadable = read(tmp_path)
    assert unreadable == 0
    for who in "abcd":
        numbers = [int(n.text.split()[1]) for n in found if n.text.startswith(who)]
        assert numbers == list(range(25))


def test_a_kill_in_the_middle_leaves_a_readable_ledger(tmp_path: Path) -> None:
    for who in "abc":
        writer = start(tmp_path, who, 100_000)
        deadline = time.monotonic() + 30
        while not any(n.text.startswith(who) for n in read(tmp_path)[0]) and time.monotonic() < deadline:
            time.sleep(0.01)
        writer.kill()
        writer.wait()
        before, _ = read(tmp_path)
        after = append(tmp_path, note(f"after {who}"))  # the dead process's lock is free
        assert read(tmp_path)[0] == [*before, after]
    assert {n.text.split()[0] for n in read(tmp_path)[0]} == {"a", "b", "c", "after"}


def test_a_half_written_line_spoils_no_other(tmp_path: Path) -> None:
    path = tmp_path / NOTES
    append(tmp_path, note("first"))
    whole = path.read_bytes()
    append(tmp_path, note("lost"))
    line = path.read_bytes().removeprefix(whole)
    for cut in range(1, len(line) - 1):
        path.write_bytes(whole + line[:cut])
        append(tmp_path, note("next"))
        found, unreadable = read(tmp_path)
        assert [n.text for n in found] == ["first", "next"]
        assert unreadable == 1


@pytest.mark.parametrize(
    "line",
    [
        "{}",
        "[]",
        "null",
        "\x00\xff",
        json.dumps(vars(note()) | {"state": "maybe"}),
        json.dumps(vars(note()) | {"text": 3}),
        json.dumps(vars(note()) | {"more": ""}),
    ],
)
def test_strange_lines_are_counted_and_left_out(line: str, tmp_path: Path) -> None:
    (tmp_path / NOTES).write_bytes(line.encode("latin-1") + b"\n")
    append(tmp_path, note("sound"))
    found, unreadable = read(tmp_path)
    assert ([n.text for n in found], unreadable) == (["sound"], 1)


def test_a_full_disk_is_one_line_and_leaves_no_half(tmp_path: Path) -> None:
    append(tmp_path, note("first"))
    size = (tmp_path / NOTES).stat().st_size

    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 40, size + 40))

    code = f"import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n{WRITER}"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), "a", "1"],
        capture_output=True,
        text=True,
        preexec_fn=small_files,
        timeout=60,
    )
    assert "UsageError" in done.stderr.splitlines()[-1] and "the disk is full" in done.stderr
    assert (tmp_path / NOTES).stat().st_size == size
    assert [n.text for n in read(tmp_path)[0]] == ["first"]


@pytest.mark.parametrize("text", ["", " \n\t", "\x1b", "x" * (notes.LONGEST_TEXT + 1)])
def test_a_text_must_say_something(text: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the text"):
        append(tmp_path, note(text))
    assert not (tmp_path / NOTES).exists()


def test_nothing_noted(tmp_path: Path) -> None:
    assert read(tmp_path) == ([], 0)
    assert read(tmp_path / "nowhere") == ([], 0)
