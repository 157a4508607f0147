"""The sampling kernels against the engine's own functions: the same ids, the same tokens."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from sm70lab.engine import rejection
from sm70lab.engine.noise import KeyedNoise, Stream
from sm70lab.engine.sampling import Candidates, sample, truncate
from sm70lab.kernels.gpu import sampling
from sm70lab.schema import DraftSampling, Sampling
from tests.engine.assertions import assert_close

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
TRIALS = 2 if INTERPRETED else 40
VOCABULARY = 5000  # two blocks, the second one not full
WIDE = 6 if INTERPRETED else 30  # top-k of some tests: a candidate costs the interpreter a millisecond

SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.0),
    Sampling(temperature=0.7, top_p=0.8, top_k=64),
    Sampling(temperature=1.4, top_p=1.0, top_k=33),
    Sampling(temperature=1.0, top_p=1.0, top_k=5, min_p=0.1),
    Sampling(temperature=1.0, top_p=0.9, top_k=1),
]


def device(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(DEVICE)


def settings(*of: Sampling) -> torch.Tensor:
    rows = [[s.temperature, s.top_k, s.top_p, s.min_p] for s in of]
    return torch.tensor(rows, dtype=torch.float32, device=DEVICE)


def on_device(
    logits: torch.Tensor,
    samplings: list[Sampling],
    noises: list[KeyedNoise],
    positions: list[int],
    stream: Stream,
    names: torch.Tensor | None = None,
    offset: int = 0,
) -> sampling.Rows:
    """Truncate and draw; logits [B·T, V]. Memory starts full of what must not be read."""
    width = sampling.width_for(max(s.top_k for s in samplings))
    space = sampling.lists(len(logits), width, logits.shape[1], torch.device(DEVICE))
    out = sampling.rows(len(logits), width, torch.device(DEVICE))
    for memory in (*space, out.ids, out.drawn, out.finite):
        memory.fill_(-7)
    out.probs.fill_(torch.nan)
    keys = device(np.stack([noise.words() for noise in noises]))
    where = torch.tensor(positions, device=DEVICE)
    return sampling.truncate_and_draw(
        logits.to(DEVICE), settings(*samplings), keys, where, stream, space, out, offset, names
    )


def candidates(rows: sampling.Rows) -> Candidates:
    return Candidates(rows.ids.cpu(), rows.probs.cpu())


@triton.jit
def _uniform(keys, stream, begin, out, N: tl.constexpr):
    place = tl.arange(0, N)
    tl.store(out + place, sampling._unit(sampling._mix(sampling._hash(keys, 0, stream, begin + place))))


@pytest.mark.parametrize("stream", list(Stream))
def test_uniform_noise_is_the_engines_to_the_bit(stream: Stream) -> None:
    noise = KeyedNoise(20260620, 3, 1)
    out = torch.full((64,), torch.nan, dtype=torch.float64, device=DEVICE)
    begin = torch.tensor(1 << 17)
    _uniform[(1,)](device(noise.words()), int(stream), int(begin), out, N=64)
    assert np.array_equal(out.cpu().numpy(), noise.uniform(stream, range(1 << 17, (1 << 17) + 64)))


@pytest.mark.parametrize("s", SAMPLINGS)
def test_candidates_and_draws_are_the_engines(s: Sampling) -> None:
    g = torch.Generator().manual_seed(11)
    for trial in range(TRIALS):
        logits = torch.randn(2, VOCABULARY, generator=g) * (1 + trial % 4)
        logits[:, 17] = -torch.inf  # a ban
        noise, wanted = KeyedNoise(trial, 0, 2), truncate(logits, s)
        found = on_device(logits, [s], [noise], [100 + trial], Stream.target)
        count = wanted.ids.shape[1]
        held = wanted.probs > 0
        assert torch.equal(found.ids[:, :count].cpu()[held], wanted.ids[held])
        assert_close(found.probs[:, :count].cpu(), wanted.probs, 1e-6)
        assert not found.probs[:, count:].any() and found.finite.all()
        drawn = sample(wanted, noise, Stream.target, range(100 + trial, 102 + trial))
        assert found.drawn.tolist() == drawn.tolist()


def test_of_equal_logits_the_lower_id_comes_first() -> None:
    """As the native kernel has it. Half-precision logits tie often."""
    logits = (torch.randn(4, VOCABULARY, generator=torch.Generator().manual_seed(5)) * 3).half()
    logits[0, 4990], logits[0, 40] = 20.0, 20.0
    logits[1, :] = 0.0
    logits[1, 4:9] = -0.0
    found = on_device(logits, [Sampling(top_p=1.0)], [KeyedNoise(1, 2, 3)], [0], Stream.target)
    values, ids = logits.float().sort(dim=-1, descending=True, stable=True)
    assert torch.equal(found.ids[:, :20].cpu(), ids[:, :20])
    assert_close(found.probs[:, :20].cpu(), values[:, :20].softmax(-1), 1e-6)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_logits_that_are_not_finite_are_reported(bad: float) -> None:
    logits = torch.zeros(3, VOCABULARY)
    logits[1, 4999] = bad
    found = on_device(logits, [Sampling()], [KeyedNoise(0, 0, 0)], [0], Stream.target)
    assert found.finite.tolist() == [1, 0, 1]


def test_few_columns_and_a_shortlist() -> None:
    """Noise is keyed by the vocabulary id that a column stands for."""
    g = torch.Generator().manual_seed(8)
    names = torch.randperm(200_000, generator=g)[:40]
    s, noise = Sampling(top_k=64), KeyedNoise(4, 5, 6)
    for trial in range(TRIALS):
        logits = torch.randn(1, 40, generator=g)
        q = truncate(logits, s)
        wanted = Candidates(names[q.ids], q.probs)
        found = on_device(logits, [s], [noise], [9], Stream.draft, names.to(DEVICE), offset=trial)
        held = wanted.probs > 0
        assert torch.equal(found.ids[:, :40].cpu()[held], wanted.ids[held])
        drawn = sample(wanted, noise, Stream.draft, range(9 + trial, 10 + trial))
        assert found.drawn.tolist() == drawn.tolist()


@pytest.mark.parametrize("rule", list(DraftSampling))
@pytest.mark.parametrize("k", [3] if INTERPRETED else [1, 4, 8])
def test_rounds_deliver_the_engines_tokens(rule: DraftSampling, k: int) -> None:
    """Two sequences with settings of their own; drafts drawn on the device from logits near the target's."""
    g = torch.Generator().manual_seed(k)
    cold = Sampling(temperature=0.0 if rule == DraftSampling.greedy else 0.6, top_k=WIDE)
    samplings = [Sampling(top_k=WIDE - 1), cold]
    match = rule in (DraftSampling.token_matching, DraftSampling.coupled)
    stream = Stream.draft if rule == DraftSampling.probabilistic else Stream.target
    greedy = rule in (DraftSampling.greedy, DraftSampling.token_matching)
    lengths = set()
    for trial in range(TRIALS):
        target_logits = torch.randn(2, k + 1, VOCABULARY, generator=g) * 3
        draft_logits = target_logits[:, :k] + 0.5 * torch.randn(2, k, VOCABULARY, generator=g)
        noises, positions = [KeyedNoise(7, b, trial) for b in range(2)], [50 + trial, 9]
        keys = device(np.stack([noise.words() for noise in noises]))
        where = torch.tensor(positions, device=DEVICE)
        drafting = [Sampling(temperature=0.0)] * 2 if greedy else samplings
        q = on_device(draft_logits.flatten(0, 1), drafting, noises, positions, stream)
        p = on_device(target_logits.flatten(0, 1), samplings, noises, positions, Stream.target)
        drafts = q.drawn.view(2, k)
        out = torch.full((2, k + 1), -7, device=DEVICE)
        counts = torch.full((2,), -7, device=DEVICE)
        sampling.accept(match, p, drafts, q, keys, where, out, counts)
        for b, s in enumerate(samplings):
            target = truncate(target_logits[b], s)
            own = truncate(draft_logits[b], drafting[b])
            proposed = rejection.Drafts(drafts[b].cpu(), own)
            span = range(positions[b], positions[b] + k + 1)
            wanted = rejection.accept(rule, target, proposed, noises[b], span)
            found = out[b].tolist()
            assert found[: int(counts[b])] == wanted, (trial, b)
            assert found[int(counts[b]) :] == [wanted[-1]] * (k + 1 - len(wanted))
            lengths.add(len(wanted))
    assert len(lengths) > 1, "every round had one length: nothing was told apart"


def test_a_draft_with_the_targets_distribution_always_passes() -> None:
    """p = q leaves no residual."""
    logits = torch.randn(5, VOCABULARY, generator=torch.Generator().manual_seed(2)) * 4
    noise = [KeyedNoise(3, 3, 3)]
    q = on_device(logits[:4], [Sampling()], noise, [0], Stream.draft)
    p = on_device(logits, [Sampling()], noise, [0], Stream.target)
    out, counts = (
        torch.zeros(1, 5, dtype=torch.int64, device=DEVICE),
        torch.zeros(1, dtype=torch.int64, device=DEVICE),
    )
    where = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    sampling.accept(False, p, q.drawn[None], q, device(noise[0].words()[None]), where, out, counts)
    assert counts.item() == 5 and out[0, :4].tolist() == q.drawn.tolist() and out[0, 4] == p.drawn[4]


def test_what_has_no_kernel_is_refused() -> None:
    for top_k in (0, 65):
        with pytest.raises(ValueError, match="top_k"):
            sampling.width_for(top_k)
    with pytest.raises(ValueError, match="vocabulary"):
        sampling.lists(1, 32, 300_000, torch.device(DEVICE))
