"""The reference that judges: a generation's own tokens, teacher-forced through the no-draft model.

Plain PyTorch in float32 (or float64), eager, no drafts, no rollback: the prompt and the output
run as one prefill. What is recorded a token is in ``schema.TokenScores``.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from sm70lab.engine.kv_cache import KVCache
from sm70lab.engine.model import HybridModel
from sm70lab.engine.sampling import LogitsRules, truncate
from sm70lab.engine.state import StateStore
from sm70lab.schema import Sampling, TokenScores

CHUNK_ROWS = 256
CLEAR_LOGIT_GAP = 0.05  # beyond rounding in any dtype: then the top-k cut itself is the violation


def score(
    model: HybridModel,
    prompt_ids: list[int],
    output_ids: list[int],
    sampling: Sampling,
    stop_ids: frozenset[int],
) -> TokenScores:
    """Score every output token under the reference's truncated distribution. ``output_ids`` not empty."""
    rules = LogitsRules(sampling, prompt_ids, stop_ids)
    parts: list[dict[str, torch.Tensor]] = []
    with torch.inference_mode():
        for first, logits in _logits(model, prompt_ids, output_ids):
            tokens = output_ids[first : first + len(logits)]
            logits = rules.apply(logits, first, tokens)
            parts.append(_score_rows(logits, torch.tensor(tokens, device=logits.device), sampling))
            rules.observe(tokens)
    columns = {name: torch.cat([part[name] for part in parts]).cpu().numpy() for name in parts[0]}
    columns["cut_rule"] = np.array(["", "top_k", "top_p", "min_p", "banned"])[columns["cut_rule"]]
    return TokenScores(**columns)


def _logits(
    model: HybridModel, prompt_ids: list[int], output_ids: list[int]
) -> Iterator[tuple[int, torch.Tensor]]:
    """(index of the first output token, logits [R, V] that predict it and its successors), in order."""
    ids = torch.tensor([prompt_ids + output_ids[:-1]], device=model.device)
    total, skip = ids.shape[1], len(prompt_ids) - 1
    wide = torch.promote_types(model.dtype, torch.float32)
    store = StateStore(model.arch, "slots", wide, model.dtype, model.device)
    kv = KVCache(model.arch, model.arch.layer_types.count("full_attention"), total, model.dtype, model.device)
    for begin in range(0, total, CHUNK_ROWS):
        chunk = ids[:, begin : begin + CHUNK_ROWS]
        hidden = model.run(chunk, store, kv, prefill=True)
        store.commit([chunk.shape[1]])
        first = max(begin, skip)
        if first < begin + chunk.shape[1]:
            yield first - skip, model.logits(hidden[0, first - begin :])


def _score_rows(logits: torch.Tensor, tokens: torch.Tensor, sampling: Sampling) -> dict[str, torch.Tensor]:
    """Score R tokens under logits [R, V]; every entry of the result is [R]."""
    chosen = logits.gather(-1, tokens[:, None])[:, 0]
    top2 = logits.topk(2, dim=-1).values
    candidates = truncate(logits, sampling)
    probs, order = candidates.probs.double().sort(dim=-1, descending=True, stable=True)
    ids = candidates.ids.gather(-1, order)
    at = ids == tokens[:, None]
    prob = (probs * at).sum(-1)
    above = (probs.cumsum(-1) - probs) * at  # probability of the candidates before the token
    log_probs = torch.where(probs > 0, probs.log(), 0.0)
    entropy = -(probs * log_probs).sum(-1)
    gap, rule = _cut(logits, tokens, chosen, sampling)
    inside = prob > 0
    low = above.sum(-1)
    temperature = sampling.temperature or 1.0
    return {
        "logprob": prob.log(),
        "raw_logprob": (logits.double() / temperature).log_softmax(-1).gather(-1, tokens[:, None])[:, 0],
        "entropy": entropy,
        "variance": (probs * log_probs**2).sum(-1) - entropy**2,
        "rank": (logits > chosen[:, None]).sum(-1),
        "in_support": inside,
        "cut_gap": torch.where(inside, 0.0, gap),
        "cut_rule": torch.where(inside, 0, rule),
        "argmax": logits.argmax(-1),
        "top2_margin": (top2[:, 0] - top2[:, 1]).double(),
        "cdf_low": low,
        "cdf_high": low + prob,
    }


def _cut(
    logits: torch.Tensor, tokens: torch.Tensor, chosen: torch.Tensor, sampling: Sampling
) -> tuple[torch.Tensor, torch.Tensor]:
    """How far each token is beyond the cut it violates, and which: 1 top_k, 2 top_p, 3 min_p, 4 banned.

    The gap is in logits for top-k and min-p, in probability mass for top-p. A token outside the
    top k counts against the nucleus as if it stood in the place of the last candidate: with a
    hair's breadth in logits it may be in the top k, but still be far outside the nucleus.
    """
    gap = torch.zeros_like(chosen, dtype=torch.float64)
    rule = torch.zeros_like(tokens)
    greedy = sampling.temperature == 0
    width = 1 if greedy else sampling.top_k if 0 < sampling.top_k < logits.shape[-1] else logits.shape[-1]
    values, ids = logits.double().topk(width, dim=-1)
    by_k = (values[:, -1] - chosen.double()).clamp_min(0)
    is_candidate = (ids == tokens[:, None]).any(-1)
    if not greedy:
        scaled = values / sampling.temperature
        probs = scaled.softmax(-1)
        before = probs.cumsum(-1) - probs
        place = torch.where(is_candidate, (ids == tokens[:, None]).long().argmax(-1), width - 1)
        by_p = before.gather(-1, place[:, None])[:, 0] - sampling.top_p
        if sampling.min_p > 0:
            by_min = scaled[:, 0] + float(np.log(sampling.min_p)) - chosen.double() / sampling.temperature
            gap, rule = torch.where(by_min > 0, by_min, gap), torch.where(by_min > 0, 3, rule)
        gap, rule = torch.where(by_p >= 0, by_p, gap), torch.where(by_p >= 0, 2, rule)
        clear = ~is_candidate & ((rule == 0) | (by_k > CLEAR_LOGIT_GAP))
    else:
        clear = ~is_candidate
    gap, rule = torch.where(clear, by_k, gap), torch.where(clear, 1, rule)
    banned = torch.isinf(chosen)
    return torch.where(banned, torch.inf, gap), torch.where(banned, 4, rule)
