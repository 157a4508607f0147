"""llama-server as a peer: started on a free local port, asked for greedy ids, ended."""

from __future__ import annotations

import re
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from sm70lab.errors import UsageError

from .processes import last_line, tree

START_SECONDS = 120.0
ROUND_LINE = re.compile(r"accepted +(\d+)/ *(\d+) draft tokens")


@dataclass(frozen=True)
class Drafted:
    """One verify round: output tokens before it, drafts put to the test, drafts accepted."""

    position: int
    drafted: int
    accepted: int


@dataclass
class Answer:
    """One completion. Log-probabilities and margins are by output position (see ``_scored``)."""

    ids: list[int]
    logprobs: dict[int, float] = field(default_factory=dict)
    margins: dict[int, float] = field(default_factory=dict)  # between the two most likely tokens
    drafted: int = 0  # the server's own totals
    accepted: int = 0
    tokens_per_second: float = 0.0  # of the decoding alone
    rounds: list[Drafted] | None = None  # None: the log does not account for the totals


@dataclass(frozen=True)
class Settings:
    """How the server is started."""

    binary: Path
    gguf: Path
    context: int
    threads: int
    timeout: float  # seconds for one completion


def command(settings: Settings, port: int, drafts: int) -> list[str]:
    """The command line: one slot, float32 cache, every draft verified (no probability threshold)."""
    given: dict[str, object] = {
        "--model": settings.gguf,
        "--host": "127.0.0.1",
        "--port": port,
        "--ctx-size": settings.context,
        "--parallel": 1,
        "--threads": settings.threads,
        "--threads-batch": settings.threads,
        "--flash-attn": "off",
        "--cache-type-k": "f32",
        "--cache-type-v": "f32",
    }
    if drafts:
        given |= {
            "--spec-type": "draft-mtp",
            "--spec-draft-n-max": drafts,
            "--spec-draft-n-min": 0,
            "--spec-draft-p-min": 0,
            "--spec-draft-sampling": "greedy",
            "--spec-draft-type-k": "f32",
            "--spec-draft-type-v": "f32",
        }
    flat = [str(part) for pair in given.items() for part in pair]
    return [str(settings.binary), *flat, "--no-warmup", "--offline"]


def complete(settings: Settings, prompt: list[int], tokens: int, drafts: int, log: Path) -> Answer:
    """Greedy ids of one prompt from a fresh server; with drafts, the rounds from its log."""
    log.write_bytes(b"")
    with _serving(settings, drafts, log) as url:
        answer = _ask(url, prompt, tokens, 0 if drafts else 2, settings.timeout, log)
    if drafts:
        answer.rounds = _rounds(log.read_text(errors="replace"), answer)
    return answer


@contextmanager
def _serving(settings: Settings, drafts: int, log: Path) -> Iterator[str]:
    port = _free_port()
    # LLAMA_TRACE makes the server log every verify round.
    with tree(command(settings, port, drafts), log, {"LLAMA_TRACE": "1"}) as process:
        url = f"http://127.0.0.1:{port}"
        _wait(url, process, log)
        yield url


def _wait(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        try:
            if httpx.get(f"{url}/health", timeout=5, trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.05)
    state = "did not answer" if process.poll() is None else f"ended with exit code {process.returncode}"
    raise UsageError(f"llama-server {state} at the start: {last_line(log)}")


def _ask(url: str, prompt: list[int], tokens: int, top: int, timeout: float, log: Path) -> Answer:
    body = {
        "prompt": prompt,
        "n_predict": tokens,
        "temperature": 0,
        "n_probs": top,
        "return_tokens": True,
        "cache_prompt": False,
    }
    try:
        reply = httpx.post(f"{url}/completion", json=body, timeout=timeout, trust_env=False)
        reply.raise_for_status()
        data: dict[str, Any] = reply.json()
        ids = [int(i) for i in data["tokens"]]
        timings = data.get("timings", {})
        answer = Answer(ids, *_scored(ids, data.get("completion_probabilities") or []))
        answer.drafted = int(timings.get("draft_n", 0))
        answer.accepted = int(timings.get("draft_n_accepted", 0))
        answer.tokens_per_second = float(timings.get("predicted_per_second", 0))
    except httpx.TimeoutException as error:
        raise UsageError(f"llama-server gave no answer in {timeout:g} s; raise --timeout") from error
    except httpx.HTTPStatusError as error:
        raise UsageError(
            f"llama-server answered {error.response.status_code}: {error.response.text[:200]}"
        ) from error
    except httpx.TransportError as error:
        raise UsageError(f"llama-server went away: {last_line(log)}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"llama-server's answer is not in the expected form ({error!r})") from error
    if data.get("truncated") or not ids:
        raise UsageError(f"llama-server cut the output at {len(ids)} tokens; the context is too small")
    return answer


def _scored(ids: list[int], entries: list[dict[str, Any]]) -> tuple[dict[int, float], dict[int, float]]:
    """Log-probability and top-2 margin by position.

    The server gives no entry for a token that ends inside a character. An entry counts where
    matching from the front and from the back agree on its position.
    """
    listed = [int(entry["id"]) for entry in entries]
    ahead = _match(ids, listed)
    behind = [len(ids) - 1 - at for at in reversed(_match(ids[::-1], listed[::-1]))]
    logprobs, margins = {}, {}
    for at, other, entry in zip(ahead, behind, entries, strict=True):
        if at == other:
            first, second = entry["top_logprobs"][:2]
            logprobs[at] = float(entry["logprob"])
            margins[at] = float(first["logprob"]) - float(second["logprob"])
    return logprobs, margins


def _match(ids: list[int], listed: list[int]) -> list[int]:
    """Positions in ``ids`` of ``listed``, a subsequence of it, each as early as possible."""
    positions: list[int] = []
    for token in listed:
        positions.append(ids.index(token, positions[-1] + 1 if positions else 0))
    return positions


def _rounds(log: str, answer: Answer) -> list[Drafted] | None:
    rounds, position = [], 1  # the first token comes from the prompt
    for accepted, drafted in ROUND_LINE.findall(log):
        rounds.append(Drafted(position, int(drafted), int(accepted)))
        position += int(accepted) + 1
    totals = sum(r.drafted for r in rounds), sum(r.accepted for r in rounds)
    return rounds if totals == (answer.drafted, answer.accepted) else None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
