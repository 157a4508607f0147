"""What is changed in each case, and under which settings it acts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from sm70lab.engine.decoder import Decoder
from sm70lab.engine.model import HybridModel
from sm70lab.engine.sampling import Candidates
from sm70lab.engine.sequence import Sequence, Step
from sm70lab.kernels.arithmetic import Arithmetic
from sm70lab.schema import Sampling

BASE = ["route=whole_round", "workload=web", "target.device=cpu", "audit=false"]
PROBABILISTIC = "route.draft_sampling=probabilistic"
BATCH = ["workload=arrivals", "target.max_num_seqs=2"]
PREFIX = ["route.state.block_size=16", "route.state.prefix_blocks=256"]
INT4_GROUP = 32

Truncate = Callable[..., Candidates]
Rule = Callable[[Truncate], Truncate]


@dataclass(frozen=True)
class Case:
    """One way to run: its settings, and what no setting can say."""

    group: str  # lossless, hazard, or harmless: a change that looks like one
    settings: list[str]
    weights: Callable[[HybridModel], None] | None = None  # changes them in place
    decoder: type[Decoder] = Decoder
    truncate: Rule | None = None  # another rule for the target's distribution, made from the plain one
    judged_as: list[str] = field(default_factory=list)  # settings of the reference, where they differ


def _hazard(name: str, *settings: str) -> Case:
    return Case("hazard", ["route=split", *settings, f"hazard={name}"])


def round_weights(bits: int, group: int | None) -> Callable[[HybridModel], None]:
    """Every matrix of the layers to ``bits``, symmetric, one scale a row (or a group of its inputs)."""
    most = 2 ** (bits - 1) - 1

    def change(model: HybridModel) -> None:
        with torch.inference_mode():
            for name, weight in model.named_buffers():
                if not name.startswith("layers.") or weight.dim() != 2 or "conv" in name:
                    continue
                parts = weight.view(len(weight), -1, group or weight.shape[1])
                scale = parts.abs().amax(-1, keepdim=True).clamp_min(1e-12) / most
                parts.copy_((parts / scale).round() * scale)

    return change


class RoundedKV(Decoder):
    """Keys and values are kept in float8 (e4m3): each round's rows are rounded when it ends."""

    def round(self, sequences: list[Sequence], draft: bool = True) -> list[Step]:
        begins = [(s.slot, len(s.prompt_ids) + len(s.output) - 1) for s in sequences]
        steps = super().round(sequences, draft)
        for slot, begin in begins:
            for layer in self.kv.layers:
                for kept in layer:
                    rows = kept[slot, :, begin : begin + self.k + 1]
                    rows.copy_(rows.to(torch.float8_e4m3fn).to(rows.dtype))
        return steps


def nucleus_before_top_k(plain: Truncate) -> Truncate:
    """top-p on the whole distribution, not on what top-k left: some servers' order."""

    def truncate(
        logits: torch.Tensor,
        sampling: Sampling,
        top_p: bool = True,
        arithmetic: Arithmetic = Arithmetic.plain,
    ) -> Candidates:
        found = plain(logits, sampling, False, arithmetic)
        if not top_p or sampling.temperature == 0:
            return found
        whole = (logits / sampling.temperature).softmax(-1).gather(-1, found.ids)
        probs = found.probs * (whole.cumsum(-1) - whole < sampling.top_p)
        return Candidates(found.ids, probs / probs.sum(-1, keepdim=True))

    return truncate


CASES: dict[str, Case] = {
    "lossless": Case("lossless", []),
    "lossless, probabilistic": Case("lossless", [PROBABILISTIC]),
    "lossless, batch": Case("lossless", [*BATCH, "route.state.scheme=slots"]),
    "stale_metadata": _hazard("stale_metadata", "route.state.scheme=slots"),
    "padding_slot_0": _hazard("padding_slot_0", *BATCH),
    "sentinel_as_index": _hazard("sentinel_as_index", *BATCH),
    "accepted_plus_one": _hazard("accepted_plus_one"),
    "accepted_minus_one": _hazard("accepted_minus_one"),
    "stale_column_0": _hazard("stale_column_0", *BATCH, "route.state.scheme=slots"),
    "no_ssm_rollback": _hazard("no_ssm_rollback"),
    "no_conv_rollback": _hazard("no_conv_rollback"),
    "rollover_drops_rows": _hazard("rollover_drops_rows", *PREFIX),
    "partial_chunk_as_whole": _hazard(
        "partial_chunk_as_whole", *BATCH, *PREFIX, "route.state.prefill_chunk=10"
    ),
    "optimistic_lengths": _hazard("optimistic_lengths"),
    "recovered_as_computed": _hazard("recovered_as_computed"),
    "misreported_drafts": _hazard("misreported_drafts", PROBABILISTIC),
    "float16_state": _hazard("float16_state"),
    "float16_overflow": _hazard("float16_overflow"),
    "fold_order": _hazard("fold_order", "route.state.scheme=fold"),
    "unseeded_draws": _hazard("unseeded_draws"),
    "missing_draft_tensor": _hazard("missing_draft_tensor"),
    "hidden_before_norm": _hazard("hidden_before_norm"),
    "request_leak": _hazard("request_leak", *BATCH),
    "int8 weights": Case("harmless", [], weights=round_weights(8, None)),
    "int4 weights": Case("harmless", [], weights=round_weights(4, INT4_GROUP)),
    "float16 state": Case("harmless", ["route=split", "route.state.dtype=float16"]),
    "float8 keys and values": Case("harmless", [], decoder=RoundedKV),
    "temperature 1.05": Case("harmless", ["sampling.temperature=1.05"], judged_as=["sampling.temperature=1"]),
    "top_k 21": Case("harmless", ["sampling.top_k=21"], judged_as=["sampling.top_k=20"]),
    "top_p before top_k": Case("harmless", ["route=split"], truncate=nucleus_before_top_k),
}
