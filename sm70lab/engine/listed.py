"""Scores from rows of which only the likeliest tokens are told: a server's ``prompt_logprobs``.

A row lists some tokens with their log-probabilities; of the others it is known that each is at most as
likely as the last one listed, and how likely they are together. That is exactly enough where top-k
leaves no more tokens than are listed, and where top-p or min-p cut within them. A row where it is not
enough is not scored: nothing is guessed. Whether it is enough depends on the row alone and not on the
token that was drawn, so what is left are draws from p' all the same.

Biases, bans and presence and frequency penalties only shift logits, so they are applied to the listed
ones; the best that an unlisted token can become is then a bound that a listed one must reach to count.
A repetition penalty needs the logits themselves: ``why_not`` refuses it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from sm70lab.engine.noise import KeyedNoise
from sm70lab.engine.sampling import LogitsRules
from sm70lab.engine.scoring import RULES, Likeliest, Truncated, candidates, cut, score_likeliest
from sm70lab.schema import Sampling, TokenScores

CHUNK_ROWS = 64
ROUNDING = 1e-6  # of a sum of float32 probabilities
SLACK = 5e-6  # how much of a row's mass may be unknown
UNBOUNDED = 1 << 62  # a vocabulary whose size is not known
NO_MASS = -9000.0  # servers write −9999 for −∞, which JSON does not have


@dataclass(frozen=True)
class ListedRow:
    """What is told of one output position, log-probabilities before any rule and temperature."""

    ids: Sequence[int]  # likeliest first
    logprobs: Sequence[float]
    own: float  # of the token that was delivered
    own_rank: int  # tokens likelier than it; used where it is not listed


def why_not(sampling: Sampling, stop_ids: frozenset[int] | None) -> str | None:
    """Why listed rows cannot be scored under this sampling at all; None where they can."""
    if sampling.repetition_penalty != 1:
        return (
            f"sampling.repetition_penalty={sampling.repetition_penalty} acts on logits, and a server tells "
            "log-probabilities"
        )
    if sampling.min_tokens and stop_ids is None:
        return f"sampling.min_tokens={sampling.min_tokens} bans end tokens, and the server does not tell them"
    return None


def wanted(sampling: Sampling, vocabulary: int | None = None) -> int:
    """How many tokens a row should list so that every row is enough; 0: there is no such number.

    One more than top-k leaves, since the first one cut bounds what rounding can do; and one more for each
    that a rule may take away.
    """
    if sampling.temperature > 0 and sampling.top_k == 0:
        return vocabulary or 0
    kept = candidates(sampling, UNBOUNDED)
    moved = len(sampling.banned_ids) + sum(bias < 0 for bias in sampling.logit_bias.values())
    penalised = sampling.presence_penalty != 0 or sampling.frequency_penalty != 0
    count = kept + 1 + moved + (kept if penalised else 0)
    return min(count, vocabulary) if vocabulary else count


def score(
    rows: Sequence[ListedRow | None],
    prompt_ids: list[int],
    output_ids: list[int],
    sampling: Sampling,
    stop_ids: frozenset[int],
    vocabulary: int | None = None,
    noise: KeyedNoise | None = None,
) -> TokenScores:
    """Score output tokens under their rows; ``rows`` may be shorter, what it lacks is not scored.

    A token that is not scored has NaN in every float: ``TokenScores.known``. ``noise`` as in
    ``reference.score``. Call ``why_not`` before.
    """
    rules = LogitsRules(sampling, prompt_ids, stop_ids)
    parts = []
    for first in range(0, len(output_ids), CHUNK_ROWS):
        tokens = output_ids[first : first + CHUNK_ROWS]
        chunk = [rows[i] if i < len(rows) else None for i in range(first, first + len(tokens))]
        parts.append(_score_chunk(chunk, tokens, rules, first, vocabulary, noise))
        rules.observe(tokens)
    columns = {name: torch.cat([part[name] for part in parts]).numpy() for name in parts[0]}
    columns["cut_rule"] = np.array(RULES)[columns["cut_rule"]]
    return TokenScores(**columns)


def next_token(
    row: ListedRow,
    prompt_ids: list[int],
    output_ids: list[int],
    sampling: Sampling,
    stop_ids: frozenset[int],
    vocabulary: int | None = None,
) -> Truncated | None:
    """p' of the token after ``output_ids``, [1, n], as ``row`` tells it; None where it is not enough."""
    rules = LogitsRules(sampling, prompt_ids, stop_ids)
    rules.observe(output_ids)
    table = _Table.of([replace(row, own=-np.inf)], torch.tensor([-1]))  # whatever was delivered
    table.apply(rules, len(output_ids), [0], vocabulary)
    listed, _, enough = table.likeliest(sampling, vocabulary)
    return cut(listed, sampling) if bool(enough) else None


def _score_chunk(
    rows: Sequence[ListedRow | None],
    tokens: list[int],
    rules: LogitsRules,
    first: int,
    vocabulary: int | None,
    noise: KeyedNoise | None,
) -> dict[str, torch.Tensor]:
    told = torch.tensor([row is not None and len(row.ids) > 0 for row in rows])
    token_ids = torch.tensor(tokens)
    table = _Table.of([row or ListedRow((), (), -np.inf, 0) for row in rows], token_ids)
    table.apply(rules, first, tokens, vocabulary)
    listed, norm, enough = table.likeliest(rules.sampling, vocabulary)
    rank = table.rank()
    columns = score_likeliest(listed, token_ids, table.own, norm, rank, rules.sampling, noise, first)
    return _forget(columns, ~(told & enough))


def _forget(columns: dict[str, torch.Tensor], unknown: torch.Tensor) -> dict[str, torch.Tensor]:
    """Take away what was computed of rows that are not enough for it."""
    for name, values in columns.items():
        blank: float | bool | int = 0
        if values.is_floating_point() and name != "log_bets":  # a bet not placed wins nothing
            blank = torch.nan
        at = unknown if values.dim() == 1 else unknown[:, None]
        columns[name] = values.masked_fill(at, blank)
    return columns


@dataclass
class _Table:
    """R rows side by side: n listed tokens each, −∞ and id −1 where a row has fewer."""

    ids: torch.Tensor  # [R, n], likeliest first
    values: torch.Tensor  # [R, n] log-probabilities, later with the rules' shifts
    tokens: torch.Tensor  # [R] delivered
    own: torch.Tensor  # [R] theirs
    own_rank: torch.Tensor  # [R]
    ceiling: torch.Tensor  # [R] the most that a token that is not listed can have; −∞ where all are listed
    least_likely: torch.Tensor  # [R] log-probability of the last one listed
    mass: torch.Tensor  # [R] what all tokens that are not listed have together
    shifts: tuple[torch.Tensor, torch.Tensor]  # [R] least and largest shift of a token that is not listed

    @classmethod
    def of(cls, rows: Sequence[ListedRow], tokens: torch.Tensor) -> _Table:
        width = max(2, *(len(row.ids) for row in rows)) if rows else 2
        ids = torch.full((len(rows), width), -1)
        values = torch.full((len(rows), width), -torch.inf, dtype=torch.float64)
        for r, row in enumerate(rows):
            ids[r, : len(row.ids)] = torch.tensor(list(row.ids), dtype=torch.int64)
            values[r, : len(row.ids)] = torch.tensor(list(row.logprobs), dtype=torch.float64)
        values = values.masked_fill(values <= NO_MASS, -torch.inf)
        own = torch.tensor([row.own for row in rows], dtype=torch.float64)
        zero = torch.zeros(len(rows), dtype=torch.float64)
        counts = torch.tensor([max(0, len(row.ids) - 1) for row in rows])
        last = values.gather(-1, counts[:, None])[:, 0]
        return cls(
            ids=ids,
            values=values,
            tokens=tokens,
            own=own.masked_fill(own <= NO_MASS, -torch.inf),
            own_rank=torch.tensor([row.own_rank for row in rows]),
            ceiling=last,
            least_likely=last,
            mass=(1 - values.exp().sum(-1)).clamp_min(0),
            shifts=(zero, zero),
        )

    def apply(self, rules: LogitsRules, first: int, tokens: list[int], vocabulary: int | None) -> None:
        """Shift what penalties, bias and bans shift; most likely first again."""
        if vocabulary is not None:
            whole = (self.ids >= 0).sum(-1) >= vocabulary
            self.ceiling = self.ceiling.masked_fill(whole, -torch.inf)
        named = {*rules.sampling.logit_bias, *rules.sampling.banned_ids, *rules.stop_ids, *rules.counts}
        # The last column stands for any token that nothing names.
        size = 2 + max(int(self.ids.max()), *tokens, *named, *rules.prompt_ids)
        zeros = torch.zeros(len(tokens), size, dtype=torch.float64)
        shift = rules.apply(zeros, first, tokens)  # the rules add: what they make of zeros is what they add
        if shift is zeros:
            return
        listed = self.ids.masked_fill(self.ids < 0, size - 1)
        self.values = self.values + shift.gather(-1, listed)
        self.own = self.own + shift.gather(-1, self.tokens[:, None])[:, 0]
        at = torch.zeros_like(shift, dtype=torch.bool).scatter(-1, listed, self.ids >= 0)
        high = shift.masked_fill(at, -torch.inf).amax(-1)
        low = shift.masked_fill(at, torch.inf).amin(-1)
        self.shifts = (low, high)
        self.ceiling = self.ceiling + high
        order = self.values.argsort(stable=True, dim=-1, descending=True)
        self.values, self.ids = self.values.gather(-1, order), self.ids.gather(-1, order)

    def likeliest(
        self, sampling: Sampling, vocabulary: int | None
    ) -> tuple[Likeliest, torch.Tensor, torch.Tensor]:
        """What truncation asks of these rows, the log of each row's sum at the temperature (NaN where
        it is not known), and whether the row is enough."""
        temperature = sampling.temperature or 1.0
        width = candidates(sampling, vocabulary or UNBOUNDED)
        sure = (self.values >= self.ceiling[:, None]) & ~torch.isinf(self.values)  # none that is not listed
        number = sure.sum(-1)  # can stand before these
        low, high = self._rest(sure, temperature)
        total = (self.values / temperature).masked_fill(~sure, -torch.inf).logsumexp(-1).exp()
        norm = torch.where(high - low <= SLACK * (total + low), (total + high).log(), torch.nan)
        by_k = number >= width
        top = torch.arange(self.values.shape[-1]) < width
        if sampling.top_k > 0:  # no more than so many stand behind those that are sure
            spare = (width - number).clamp_min(0) * (self.ceiling / temperature).exp()
            low, high = torch.zeros_like(low), torch.minimum(spare, high)
        within = self._cut_within(sure, total, low, high, sampling)
        enough = by_k | within
        own = ~(sure & (self.ids == self.tokens[:, None])).any(-1) & ~by_k & ~torch.isinf(self.own)
        rest = high - torch.where(own, (self.own / temperature).exp(), 0.0)
        keep = sure & (top | ~by_k[:, None])
        beyond = torch.maximum(self.values.masked_fill(keep, -torch.inf).amax(-1), self.ceiling)
        listed = Likeliest(
            ids=torch.cat([self.ids.masked_fill(~keep, -1), torch.where(own, self.tokens, -1)[:, None]], -1),
            values=torch.cat(
                [
                    self.values.masked_fill(~keep, -torch.inf),
                    torch.where(own, self.own, -torch.inf)[:, None],
                ],
                -1,
            ),
            beyond=beyond,
            log_rest=torch.where(by_k, 0.0, rest.clamp_min(0)).log(),
        )
        return listed, norm, enough

    def _rest(self, sure: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Bounds of Σ exp(logit / temperature) of all tokens that are not sure, [R] each.

        Tokens that together have mass M, each at most c, have Σ p^a ≤ M·c^(a−1) for a > 1. For a < 1
        nothing bounds it: rounding's share of M, spread over a vocabulary, may be any size.
        """
        a = 1 / temperature
        known = (self.values / temperature).masked_fill(sure, -torch.inf).logsumexp(-1).exp()
        low, high = (self.mass - ROUNDING).clamp_min(0), self.mass + ROUNDING
        if a > 1:
            low, high = torch.zeros_like(low), high * ((a - 1) * self.least_likely.clamp_min(-700)).exp()
        elif a < 1:
            low, high = torch.zeros_like(low), torch.full_like(high, torch.inf)
        least, most = ((shift / temperature).exp() for shift in self.shifts)
        whole = torch.isinf(self.ceiling)
        return known + (low * least).masked_fill(whole, 0.0), known + (high * most).masked_fill(whole, 0.0)

    def _cut_within(
        self,
        sure: torch.Tensor,
        total: torch.Tensor,
        low: torch.Tensor,
        high: torch.Tensor,
        sampling: Sampling,
    ) -> torch.Tensor:
        """Whether top-p or min-p cut every token that is not sure, and p of the others is known."""
        known = (high - low) <= SLACK * (total + low)
        by_p = (sampling.top_p < 1) & (total / (total + high) >= sampling.top_p)
        if sampling.min_p > 0:
            gap = (self.values[:, 0] - self.ceiling) / (sampling.temperature or 1.0)
            by_p = by_p | (gap > -float(np.log(sampling.min_p)))
        return known & (by_p | torch.isinf(self.ceiling)) & sure.any(-1)

    def rank(self) -> torch.Tensor:
        """Tokens likelier than the delivered one, [R]: counted where it is listed."""
        before = (self.values > self.own[:, None]).sum(-1)
        at = (self.ids == self.tokens[:, None]).any(-1)
        return torch.where(at, before, torch.maximum(before, self.own_rank))
