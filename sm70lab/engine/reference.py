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
from sm70lab.engine.sampling import LogitsRules
from sm70lab.engine.state import StateStore
from sm70lab.errors import UsageError
from sm70lab.schema import Sampling, TokenScores

CHUNK_ROWS = 256
RULES = ("", "top_k", "top_p", "min_p", "banned")
CLEAR_LOGIT_GAP = 0.05  # beyond rounding in any dtype: then the top-k cut itself is the violation


def score(
    model: HybridModel,
    prompt_ids: list[int],
    output_ids: list[int],
    sampling: Sampling,
    stop_ids: frozenset[int],
) -> TokenScores:
    """Score every output token under the reference's truncated distribution. ``output_ids`` not empty.

    Raises ``UsageError`` where the reference itself is not finite.
    """
    rules = LogitsRules(sampling, prompt_ids, stop_ids)
    parts: list[dict[str, torch.Tensor]] = []
    with torch.inference_mode():
        for first, logits in _logits(model, prompt_ids, output_ids):
            tokens = output_ids[first : first + len(logits)]
            logits = rules.apply(logits, first, tokens)
            if bool(torch.isnan(logits).any()) or bool(torch.isinf(logits.amax(-1)).any()):
                raise UsageError(
                    f"the reference's logits are not finite after output token {first} or soon after: "
                    "the weights do not run in float32, so nothing can be judged"
                )
            parts.append(_score_rows(logits, torch.tensor(tokens, device=logits.device), sampling))
            rules.observe(tokens)
    columns = {name: torch.cat([part[name] for part in parts]).cpu().numpy() for name in parts[0]}
    columns["cut_rule"] = np.array(RULES)[columns["cut_rule"]]
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
        hidden = model.run(chunk, [0], store, kv, prefill=True)
        store.commit([chunk.shape[1]])
        first = max(begin, skip)
        if first < begin + chunk.shape[1]:
            yield first - skip, model.logits(hidden[0, first - begin :])


def _score_rows(logits: torch.Tensor, tokens: torch.Tensor, sampling: Sampling) -> dict[str, torch.Tensor]:
    """Score R tokens under logits [R, V]; every entry of the result is [R].

    The truncation is written out here once more, in float64 and in log-probabilities: the judge
    shares no code with the sampler it judges, and nothing underflows to a false zero.
    """
    logits = logits.double()
    chosen = logits.gather(-1, tokens[:, None])[:, 0]
    vocabulary = logits.shape[-1]
    greedy = sampling.temperature == 0
    width = 1 if greedy else sampling.top_k if 0 < sampling.top_k < vocabulary else vocabulary
    temperature = sampling.temperature or 1.0
    values, ids = logits.topk(width, dim=-1)
    log_p = (values / temperature).log_softmax(-1)
    before = log_p.exp().cumsum(-1) - log_p.exp()  # mass of the likelier candidates
    least = log_p[:, :1] + (float(np.log(sampling.min_p)) if sampling.min_p > 0 else -torch.inf)
    nucleus = sampling.top_p if sampling.top_p < 1 else torch.inf  # 1 is off: rounding must not cut
    keep = (before < nucleus) & (log_p >= least) & ~torch.isinf(values)
    keep[:, 0] = True
    log_kept = log_p.masked_fill(~keep, -torch.inf)
    log_kept = log_kept - log_kept.logsumexp(-1, keepdim=True)  # log p', −inf where cut
    p = log_kept.exp()
    finite = log_kept.masked_fill(~keep, 0.0)
    entropy = -(p * finite).sum(-1)
    at = ids == tokens[:, None]
    inside = (at & keep).any(-1)
    log_prob = log_kept.masked_fill(~at, -torch.inf).amax(-1)
    low = ((p.cumsum(-1) - p) * at).sum(-1)
    candidate = at.any(-1)
    place = torch.where(candidate, at.long().argmax(-1), width - 1)
    cuts = {  # how far beyond each cut; negative is inside
        "top_k": values[:, -1] - chosen,
        "top_p": before.gather(-1, place[:, None])[:, 0] - nucleus,
        "min_p": least[:, 0] - (chosen - values[:, 0]) / temperature - log_p[:, 0],
    }
    gap, rule = _violation(cuts, candidate, torch.isinf(chosen), greedy)
    top2 = logits.topk(2, dim=-1).values
    return {
        "logprob": log_prob,
        "raw_logprob": (logits / temperature).log_softmax(-1).gather(-1, tokens[:, None])[:, 0],
        "entropy": entropy,
        "variance": ((p * finite**2).sum(-1) - entropy**2).clamp_min(0),
        "rank": (logits > chosen[:, None]).sum(-1),
        "in_support": inside,
        "cut_gap": torch.where(inside, 0.0, gap),
        "cut_rule": torch.where(inside, 0, rule),
        "argmax": logits.argmax(-1),
        "top2_margin": top2[:, 0] - top2[:, 1],
        "cdf_low": low,
        "cdf_high": low + log_prob.exp(),
    }


def _violation(
    cuts: dict[str, torch.Tensor], candidate: torch.Tensor, banned: torch.Tensor, greedy: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """How far each token is beyond the cut it violates, and the index of that cut in ``RULES``.

    The gap is in logits for top-k and min-p, in probability mass for top-p. A token outside the
    top k counts against the nucleus as if it stood in the place of the last candidate: with a
    hair's breadth in logits it may be in the top k, but still be far outside the nucleus.
    """
    gap = torch.full_like(cuts["top_k"], torch.inf)  # what no cut explains has no excuse
    rule = torch.zeros_like(candidate, dtype=torch.int64)
    if not greedy:
        for name, reached in (("min_p", cuts["min_p"] > 0), ("top_p", cuts["top_p"] >= 0)):
            gap = torch.where(reached, cuts[name], gap)
            rule = torch.where(reached, RULES.index(name), rule)
    by_k = ~candidate & ((rule == 0) | (cuts["top_k"] > CLEAR_LOGIT_GAP))
    gap, rule = torch.where(by_k, cuts["top_k"], gap), torch.where(by_k, RULES.index("top_k"), rule)
    return torch.where(banned, torch.inf, gap), torch.where(banned, RULES.index("banned"), rule)
