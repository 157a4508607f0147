"""A target and a drafter small enough to write out every output's probability, and rounds played with them.

Target and draft logits depend on the last two tokens. The functions that draw, accept and apply rules
are the engine's; ``Player`` plays the decoder's part around them.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import torch

from sm70lab.engine.draft_head import build
from sm70lab.engine.noise import KeyedNoise, Stream
from sm70lab.engine.rejection import Drafts, accept, one_hot
from sm70lab.engine.sampling import Candidates, LogitsRules, concatenate, sample, truncate
from sm70lab.schema import DraftSampling, Proposal, Sampling
from tests.engine.test_sampling import chi_square, truncated

WIDTH, LENGTH, K = 8, 3, 2
STRIDE = 64  # positions of one trial: its noise is its own
PROMPT, STOP = [1, 2], frozenset({3})
SHORTLIST = [2, 0, 1]
SAMPLED = (DraftSampling.probabilistic, DraftSampling.coupled)


@dataclass
class Case:
    """One way to sample; rule None is the no-draft run."""

    rule: DraftSampling | None
    sampling: Sampling
    head: str = "full"
    proposal: Proposal = Proposal.top_k_top_p


class Model:
    """Hidden states of target and draft by the last two tokens, and one head over both."""

    def __init__(self, vocabulary: int, spread: float = 0.6) -> None:
        g = torch.Generator().manual_seed(11)
        self.weight = spread * torch.randn(vocabulary, WIDTH, generator=g)
        self.target = torch.randn(vocabulary, vocabulary, WIDTH, generator=g)
        self.draft = self.target + 0.5 * torch.randn(vocabulary, vocabulary, WIDTH, generator=g)

    def logits(self, output: tuple[int, ...]) -> torch.Tensor:
        """Target logits [1, V] after ``output``."""
        return self.target[(*PROMPT, *output)[-2:]][None] @ self.weight.T


class Player:
    """Rounds of ``case`` for many trials; what depends only on tokens is computed once."""

    def __init__(self, model: Model, case: Case, reported: Player | None = None) -> None:
        self.model, self.case, self.reported = model, case, reported or self
        self.head = build(case.head, model.weight, len(SHORTLIST), SHORTLIST)
        self.proposals: dict[tuple[int, ...], Candidates] = {}
        self.rounds: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[Candidates, Drafts]] = {}

    def q(self, output: tuple[int, ...]) -> Candidates:
        """The distribution of the draft after ``output``."""
        if output not in self.proposals:
            s = self.case.sampling
            logits = self.head.logits(self.model.draft[(*PROMPT, *output)[-2:]][None])
            if self.case.rule in SAMPLED and s.temperature > 0:
                row = truncate(logits, s, top_p=self.case.proposal == Proposal.top_k_top_p)
            else:
                row = one_hot(logits.argmax(-1), logits.dtype)
            self.proposals[output] = Candidates(self.head.ids(row.ids), row.probs)
        return self.proposals[output]

    def verified(self, output: tuple[int, ...], drafts: tuple[int, ...]) -> tuple[Candidates, Drafts]:
        """The target's rows for one round, and the drafts as reported."""
        if (output, drafts) not in self.rounds:
            s = self.case.sampling
            rules = LogitsRules(s, PROMPT, STOP)
            rules.observe(list(output))
            prefixes = [output + drafts[:i] for i in range(len(drafts) + 1)]
            logits = torch.cat([self.model.logits(prefix) for prefix in prefixes])
            target = truncate(rules.apply(logits, len(output), list(drafts)), s)
            tokens = torch.tensor(drafts, dtype=torch.int64)
            q = [self.reported.q(prefix) for prefix in prefixes[:-1]] or [one_hot(tokens, logits.dtype)]
            self.rounds[output, drafts] = target, Drafts(tokens, concatenate(q))
        return self.rounds[output, drafts]

    def round(self, outputs: list[tuple[int, ...]], noise: KeyedNoise, length: int) -> None:
        """One round for every trial whose output is short of ``length``."""
        running = [t for t, output in enumerate(outputs) if len(output) < length]
        drafts: dict[int, tuple[int, ...]] = dict.fromkeys(running, ())
        if self.case.rule is None:
            rows = concatenate([self.verified(outputs[t], ())[0] for t in running])
            at = [t * STRIDE + len(outputs[t]) for t in running]
            for t, token in zip(running, sample(rows, noise, Stream.target, at).tolist(), strict=True):
                outputs[t] += (token,)
            return
        stream = Stream.target if self.case.rule == DraftSampling.coupled else Stream.draft
        for i in range(K):
            if going := [t for t in running if len(outputs[t]) + i < length]:
                q = concatenate([self.q(outputs[t] + drafts[t]) for t in going])
                at = [t * STRIDE + len(outputs[t]) + i for t in going]
                for t, token in zip(going, sample(q, noise, stream, at).tolist(), strict=True):
                    drafts[t] += (token,)
        for t in running:
            target, proposed = self.verified(outputs[t], drafts[t])
            at_t = t * STRIDE + len(outputs[t])
            places = range(at_t, at_t + len(target.ids))
            outputs[t] += tuple(accept(self.case.rule, target, proposed, noise, places))

    def play(self, trials: int, noise: KeyedNoise, length: int = LENGTH) -> np.ndarray:
        """Outputs [trials, length]."""
        outputs: list[tuple[int, ...]] = [()] * trials
        while any(len(output) < length for output in outputs):
            self.round(outputs, noise, length)
        return np.array([output[:length] for output in outputs])


def target_row(model: Model, s: Sampling, output: tuple[int, ...]) -> np.ndarray:
    """The target's distribution [V] after ``output``, written out token by token."""
    logits = model.logits(output)[0].double()
    for token in range(len(logits)):
        if token in (*PROMPT, *output):
            logits[token] *= 1 / s.repetition_penalty if logits[token] > 0 else s.repetition_penalty
        count = output.count(token)
        logits[token] -= s.presence_penalty * (count > 0) + s.frequency_penalty * count
        logits[token] += s.logit_bias.get(token, 0)
        if token in s.banned_ids or (token in STOP and len(output) < s.min_tokens):
            logits[token] = -torch.inf
    if s.temperature == 0:
        return np.eye(len(logits))[int(logits.argmax())]
    return truncated(logits, s)


def joint(model: Model, s: Sampling, length: int = LENGTH) -> np.ndarray:
    """Probability of every output [V] * length."""
    vocabulary = len(model.weight)
    found = np.ones([vocabulary] * length)
    for i in range(length):
        rows = [target_row(model, s, prefix) for prefix in itertools.product(range(vocabulary), repeat=i)]
        found *= np.reshape(rows, [vocabulary] * (i + 1) + [1] * (length - i - 1))
    return found


def p_value(outputs: np.ndarray, probs: np.ndarray) -> float:
    """Chi-square of whole outputs."""
    counts = np.zeros_like(probs)
    np.add.at(counts, tuple(outputs.T), 1)
    return chi_square(counts.ravel(), probs.ravel())


def sampling(**settings: object) -> Sampling:
    """Sampling with nothing cut but by ``settings``."""
    return Sampling(**{"top_p": 1.0, "top_k": 0} | settings)  # type: ignore[arg-type]
