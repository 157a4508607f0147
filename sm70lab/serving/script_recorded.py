"""Recorded answers: an output of a run folder, or an event stream kept as a file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from sm70lab.errors import UsageError
from sm70lab.raw_text import load_yaml
from sm70lab.serving.script import RecordedRun
from sm70lab.serving.script_tokens import WEB, FileTokens, Round, Step, Token, Tokens, told


def recorded_output(run: RecordedRun) -> tuple[list[Token], str, list[Round]]:
    """An output of a run folder: tokens, finish reason, rounds (none where it recorded none).

    Each token's text is its tokenizer's; where that is not here or does not give the recorded text,
    the text is spread evenly over the tokens.
    """
    folder = Path(run.folder)
    files = sorted((folder / "generations").glob("*.tokens.json"))
    names = [file.name.removesuffix(".tokens.json") for file in files]
    if not names:
        raise UsageError(f"run.folder: {folder} holds no recorded output")
    name = run.generation or names[0]
    if name not in names:
        raise UsageError(f"run.generation: {folder} has no {name}; it has {', '.join(names)}")
    try:
        record = json.loads(files[names.index(name)].read_text(encoding="utf-8"))
        text = (folder / "generations" / f"{name}.txt").read_text(encoding="utf-8")
        ids, finish = [int(i) for i in record["token_ids"]], str(record["finish_reason"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"run.folder: {folder}: {name} cannot be read ({error})") from error
    return _recorded_tokens(folder, ids, record.get("reasoning") or "", text), finish, _rounds(folder, name)


def _recorded_tokens(folder: Path, ids: list[int], reasoning: str, text: str) -> list[Token]:
    tokens = _own_tokenizer(folder)
    if tokens is not None and not reasoning:
        own = told(tokens, ids)
        if "".join(token.text for token in own) == text:
            return own
    first = round(len(ids) * len(reasoning) / max(1, len(reasoning) + len(text)))
    return [*_spread(ids[:first], reasoning, True), *_spread(ids[first:], text, False)]


def _spread(ids: list[int], text: str, reasoning: bool) -> list[Token]:
    edges = [len(text) * i // max(1, len(ids)) for i in range(len(ids) + 1)]
    return [Token(t, text[a:b], reasoning) for t, a, b in zip(ids, edges, edges[1:], strict=False)]


def _own_tokenizer(folder: Path) -> Tokens | None:
    """The tokenizer of the model that a run was recorded with, where it is still there."""
    try:
        model = load_yaml(folder / "config.yaml")["model"]
        return FileTokens(Path(model["path"]) if model["path"] else WEB)
    except (OSError, KeyError, TypeError, UsageError):
        return None


def _rounds(folder: Path, name: str) -> list[Round]:
    file = folder / "rounds.parquet"
    if not file.is_file():
        return []
    import pyarrow.parquet as pq

    rows = pq.read_table(file, filters=[("generation", "==", name)]).to_pylist()
    prefill = [Round(0, 0, rows[0]["position"])] if rows else []
    return [*prefill, *(Round(r["drafted"], r["accepted"], r["emitted"]) for r in rows)]


def recorded_events(file: Path) -> list[Step]:
    """A recorded event stream, an event a step; token ids and pieces of text in it count as tokens."""
    text = file.read_text(encoding="utf-8").replace("\r\n", "\n")
    return [Step(tuple(_event_tokens(event)), event=event) for event in text.split("\n\n") if event.strip()]


def _event_tokens(event: str) -> Iterator[Token]:
    data = "\n".join(line[5:] for line in event.splitlines() if line.startswith("data:"))
    try:
        choices = json.loads(data)["choices"]
    except (ValueError, KeyError, TypeError):  # [DONE], a comment, usage alone, or damaged on purpose
        return
    for choice in choices:
        ids = choice.get("token_ids")
        piece = choice.get("text") or any((choice.get("delta") or {}).values())
        yield from (Token(token, "") for token in (ids if ids is not None else [0] if piece else []))
