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
from sm70lab.engine.noise import KeyedNoise
from sm70lab.engine.sampling import LogitsRules
from sm70lab.engine.scoring import RULES, rounding_rows, score_rows
from sm70lab.engine.state import StateStore
from sm70lab.errors import UsageError
from sm70lab.schema import Rounding, Sampling, TokenScores

CHUNK_ROWS = 256


def score(
    model: HybridModel,
    prompt_ids: list[int],
    output_ids: list[int],
    sampling: Sampling,
    stop_ids: frozenset[int],
    noise: KeyedNoise | None = None,
) -> TokenScores:
    """Score every output token under the reference's truncated distribution. ``output_ids`` not empty.

    ``noise`` is the run's own where its tokens are Gumbel-max draws with it. Raises ``UsageError``
    where the reference itself is not finite.
    """
    parts: list[dict[str, torch.Tensor]] = []
    with torch.inference_mode():
        for first, logits in _ruled_logits(model, prompt_ids, output_ids, sampling, stop_ids):
            if not bool(torch.isfinite(logits.amax(-1)).all()):  # one not-a-number makes the maximum one
                raise UsageError(
                    f"the reference's logits are not finite after output token {first} or soon after: "
                    "the weights do not run in float32, so nothing can be judged"
                )
            tokens = torch.tensor(output_ids[first : first + len(logits)], device=logits.device)
            parts.append(score_rows(logits, tokens, sampling, noise, first))
    columns = {name: torch.cat([part[name] for part in parts]).cpu().numpy() for name in parts[0]}
    columns["cut_rule"] = np.array(RULES)[columns["cut_rule"]]
    return TokenScores(**columns)


def rounding(
    coarse: HybridModel,
    fine: HybridModel,
    prompt_ids: list[int],
    output_ids: list[int],
    sampling: Sampling,
    stop_ids: frozenset[int],
) -> Rounding:
    """How far arithmetic in ``coarse``'s element type moves the numbers of ``fine`` over these tokens."""
    parts: list[dict[str, torch.Tensor]] = []
    with torch.inference_mode():
        pairs = zip(
            *(_ruled_logits(m, prompt_ids, output_ids, sampling, stop_ids) for m in (coarse, fine)),
            strict=True,
        )
        for (_, low), (_, high) in pairs:
            parts.append(rounding_rows(low, high, sampling))
    found = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    return Rounding(
        rows=len(output_ids),
        logit=float(found["logit"].max()),
        logit_rms=float(found["logit"].square().mean().sqrt()),
        mass=float(found["mass"].max()),
        outside=float(found["outside"].mean()),
    )


def next_row(
    model: HybridModel,
    prompt_ids: list[int],
    output_ids: list[int],
    sampling: Sampling,
    stop_ids: frozenset[int],
) -> torch.Tensor:
    """The reference's logits [1, V] for the token after ``output_ids``, after penalties and bans."""
    rules = LogitsRules(sampling, prompt_ids, stop_ids)
    rules.observe(output_ids)
    with torch.inference_mode():
        # All but the next token as the prompt: then one row of logits is made, not one a token.
        ((_, row),) = _logits(model, prompt_ids + output_ids, [0])
        return rules.apply(row, len(output_ids), [])


def prompt_logits(model: HybridModel, ids: list[int]) -> Iterator[torch.Tensor]:
    """Logits [R, V] that predict ids[1], ids[2], …, chunk by chunk, before penalties and cuts."""
    rows = _logits(model, ids[:1], ids[1:]) if len(ids) > 1 else iter(())
    while True:
        with torch.inference_mode():  # entered anew for each chunk: a generator's caller goes on in between
            found = next(rows, None)
        if found is None:
            return
        yield found[1]


def _ruled_logits(
    model: HybridModel,
    prompt_ids: list[int],
    output_ids: list[int],
    sampling: Sampling,
    stop_ids: frozenset[int],
) -> Iterator[tuple[int, torch.Tensor]]:
    """(index of the first output token, logits [R, V] after penalties and bans that predict it and its
    successors), in order."""
    rules = LogitsRules(sampling, prompt_ids, stop_ids)
    for first, logits in _logits(model, prompt_ids, output_ids):
        tokens = output_ids[first : first + len(logits)]
        yield first, rules.apply(logits, first, tokens)
        rules.observe(tokens)


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
