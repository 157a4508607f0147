"""A server as a reference: what its own prefill says of every token of an output.

``POST /v1/completions`` with the prompt's and the output's token ids as the prompt and ``prompt_logprobs=K``
(vLLM's field): each position comes back with its K likeliest tokens and the one that stands there. A
prefill takes no drafts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from sm70lab.engine.listed import ListedRow
from sm70lab.targets.openai_client import Client, in_words, refusal

PROBE = (1, 2)  # token ids that every vocabulary has
FEWER = (1000, 200, 100, 50, 20, 10, 5, 2)  # tokens a position to ask for where more are refused
REFUSED = 400  # HTTP status
NUMBER = re.compile(r"\b\d{1,6}\b")


class AnswerError(Exception):
    """Why a server gave no rows, in one line."""


@dataclass(frozen=True)
class Told:
    """Rows of an output, as far as a server told them."""

    rows: list[ListedRow | None]
    texts: dict[int, str] = field(default_factory=dict)  # of every token that was told
    why: str = ""  # why rows are missing, where some are


class PromptLogprobs:
    """Asks one server for rows. ``longest`` is its limit of tokens a request, where it tells it."""

    def __init__(self, client: Client, model: str, longest: int | None) -> None:
        self._client, self._model, self._longest = client, model, longest
        limits = client.target  # nothing comes back before the last token is scored
        self._timeout = httpx.Timeout(limits.total_timeout_s, connect=limits.connect_timeout_s)
        self.count = 0  # tokens that a position tells

    def probe(self, wanted: int) -> None:
        """Learn how many tokens a position it tells: ``wanted``, or as many as it allows (0: many).

        Raises ``AnswerError`` where it tells none.
        """
        tries, why = [wanted or FEWER[0]], ""
        while tries:
            count = tries.pop(0)
            try:
                rows = self._ask(list(PROBE), count)[0]
            except _RefusedError as refused:
                if not why:  # a server's words name its limit
                    why = str(refused)
                    named = {int(number) for number in NUMBER.findall(why)}
                    tries = sorted((n for n in named | set(FEWER) if 1 < n < count), reverse=True)
                continue
            if not rows or not rows[-1]:
                raise AnswerError("it knows no prompt_logprobs")
            self.count = count
            return
        raise AnswerError(f"it refuses prompt_logprobs: {why}")

    def rows(self, prompt_ids: Sequence[int], output_ids: Sequence[int], chunk: int) -> Told:
        """The rows of ``output_ids``, by one request or with ``chunk`` by growing ones.

        What came before one that failed is kept.
        """
        told: list[ListedRow | None] = []
        texts: dict[int, str] = {}
        whole = [*prompt_ids, *output_ids]
        for end in _ends(len(output_ids), chunk):
            ids = whole[: len(prompt_ids) + end]
            full = (
                self._longest is not None and len(ids) >= self._longest
            )  # no room for the one token it must generate
            try:
                found, generated = self._ask(ids[:-1] if full else ids, self.count, follow=full)
                fresh = [
                    _row(row, ids[i], self.count, texts)
                    for i, row in enumerate(found)
                    if i >= len(prompt_ids) + len(told)
                ]
                told += fresh
                if full:
                    told.append(_followed(generated, ids[-1]))
            except AnswerError as error:
                return Told(told, texts, str(error))
        return Told(told, texts)

    def _ask(
        self, ids: Sequence[int], count: int, follow: bool = False
    ) -> tuple[list[Mapping[str, Any] | None], Mapping[str, Any]]:
        """The rows of a prompt, and with ``follow`` the likeliest tokens behind it."""
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": list(ids),
            "max_tokens": 1,
            "temperature": 0,
            "prompt_logprobs": count,
            "stream": False,
        }
        if follow:
            body |= {"logprobs": count, "return_tokens_as_token_ids": True}
        try:
            url = self._client.url("/completions")
            answer = self._client.sync.post(url, json=body, timeout=self._timeout)
            if not answer.is_success:
                kind = _RefusedError if answer.status_code == REFUSED else AnswerError
                raise kind(refusal(self._client, answer))
            choice = answer.json()["choices"][0]
            rows = choice.get("prompt_logprobs") or []
            behind = (choice.get("logprobs") or {}).get("top_logprobs") or [{}]
            if rows and len(rows) != len(ids):
                raise AnswerError(f"{len(rows)} prompt_logprobs for {len(ids)} tokens")
            return list(rows), behind[0]
        except httpx.HTTPError as error:
            raise AnswerError(in_words(error)) from error
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise AnswerError(f"its answer is not a completion ({type(error).__name__})") from error


class _RefusedError(AnswerError):
    """The server says that this request is wrong."""


def _ends(tokens: int, chunk: int) -> Iterator[int]:
    """How far each request goes."""
    if chunk:
        yield from range(chunk, tokens, chunk)
    yield tokens


def _row(row: Mapping[str, Any] | None, token: int, count: int, texts: dict[int, str]) -> ListedRow | None:
    """One position of an answer; None where it has no numbers."""
    if not row:
        return None
    try:
        entries = sorted(
            (int(entry["rank"]), int(key), float(entry["logprob"])) for key, entry in row.items()
        )
        texts |= {int(key): str(entry.get("decoded_token") or "") for key, entry in row.items()}
    except (KeyError, TypeError, ValueError) as error:
        raise AnswerError(f"prompt_logprobs in another form than vLLM's ({type(error).__name__})") from error
    own = next((entry for entry in entries if entry[1] == token), None)
    if own is None or any(math.isnan(value) for _, _, value in entries):
        return None
    # The delivered token comes on top of the likeliest where it is not one of them. It is left out
    # there even where it is the next one: what a row lists must not depend on what was drawn.
    listed = [entry for entry in entries if entry is not own or own[0] <= len(entries)]
    listed = sorted(listed, key=lambda entry: -entry[2])[:count]  # stable: ties stay in the server's order
    return ListedRow([i for _, i, _ in listed], [value for _, _, value in listed], own[2], own[0] - 1)


def _followed(likeliest: Mapping[str, Any], token: int) -> ListedRow | None:
    """The row behind a prompt, from ``top_logprobs`` with keys ``token_id:N``.

    A token that is not among them is at most as likely as the last: taken as that, it is judged mildly.
    """
    try:
        found = {int(key.removeprefix("token_id:")): float(value) for key, value in likeliest.items()}
    except (TypeError, ValueError) as error:
        raise AnswerError(f"logprobs in another form than vLLM's ({type(error).__name__})") from error
    if not found:
        return None
    order = sorted(found, key=lambda i: -found[i])
    own = found.get(token, found[order[-1]])
    rank = order.index(token) if token in found else len(order)
    return ListedRow(order, [found[i] for i in order], own, rank)
