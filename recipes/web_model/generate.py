"""Batched decoding for the evaluation: plain sampling and real speculative sampling.

One decode step is captured in a CUDA graph on a GPU; on a CPU it runs as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .model import Attention, GatedDeltaNet, Layer, WebModel

SEGMENT = 1024


class Decoder:
    """Decode state of `rows` sequences: recurrent states, convolution windows and KV caches."""

    def __init__(self, model: WebModel, rows: int, length: int) -> None:
        cfg = model.cfg
        self.model, self.rows, self.length = model, rows, length
        weight = model.model.embed_tokens.weight
        self.device = weight.device
        cache_type = torch.float16 if weight.is_cuda else torch.float32
        full = sum(cfg.full_attention(i) for i in range(cfg.layers)) + 1
        shape = (full, rows, cfg.kv_heads, length, cfg.head_dim)
        self.keys = torch.zeros(shape, dtype=cache_type, device=self.device)
        self.values = torch.zeros_like(self.keys)
        gdn = cfg.layers + 1 - full
        size = cfg.gdn_dim
        self.states = torch.zeros(gdn, rows, cfg.gdn_heads, size, size, device=self.device)
        self.windows = torch.zeros(gdn, rows, cfg.conv - 1, 3 * cfg.gdn_heads * size, device=self.device)
        self.row = torch.arange(rows, device=self.device)

    def _attend(self, layer: Attention, x: Tensor, slot: int, pos: Tensor, limit: int) -> Tensor:
        q, k, v, gate = layer.project(x[:, None], pos[:, None])
        keys, values = self.keys[slot], self.values[slot]
        keys[self.row, :, pos] = k[:, :, 0].to(keys.dtype)
        values[self.row, :, pos] = v[:, :, 0].to(values.dtype)
        keys, values = keys[:, :, :limit], values[:, :, :limit]
        groups = layer.cfg.heads // layer.cfg.kv_heads
        query = q[:, :, 0].unflatten(1, (-1, groups)).to(keys.dtype)
        scores = (query @ keys.transpose(-1, -2)).float() * layer.cfg.head_dim**-0.5
        hidden = torch.arange(limit, device=self.device) > pos[:, None]
        scores = scores.masked_fill(hidden[:, None, None], float("-inf"))
        out = (scores.softmax(-1).to(values.dtype) @ values).to(x.dtype).flatten(1, 2)
        return layer.finish(out[:, :, None], gate)[:, 0]

    def _recur(self, layer: GatedDeltaNet, x: Tensor, slot: int) -> Tensor:
        cfg = layer.cfg
        window = torch.cat([self.windows[slot], layer.in_proj_qkv(x)[:, None]], dim=1)
        self.windows[slot] = window[:, 1:]
        mixed = (window * layer.conv1d.weight[:, 0].t()).sum(1)
        q, k, v = F.silu(mixed).unflatten(-1, (3, cfg.gdn_heads, cfg.gdn_dim)).unbind(1)
        q = q * torch.rsqrt(q.square().sum(-1, keepdim=True) + 1e-6) * cfg.gdn_dim**-0.5
        k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + 1e-6)
        beta, g = layer.gates(x)
        state = self.states[slot] * g.exp()[..., None, None]
        delta = beta[..., None] * (v - (state * k[..., None]).sum(-2))
        state = state + k[..., None] * delta[..., None, :]
        self.states[slot] = state
        return layer.finish((state * q[..., None]).sum(-2), x)

    def step(self, tokens: Tensor, pos: Tensor, limit: int) -> Tensor:
        """Hidden states [B, C] after the final norm for one token a row at positions `pos` [B]."""
        model = self.model.model
        x = model.embed_tokens(tokens)
        gdn = attention = 0
        for layer in model.layers:
            normed = layer.input_layernorm(x)
            if layer.full:
                x = x + self._attend(layer.self_attn, normed, attention, pos, limit)
                attention += 1
            else:
                x = x + self._recur(layer.linear_attn, normed, gdn)
                gdn += 1
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return model.norm(x)

    def draft(self, tokens: Tensor, hidden: Tensor, pos: Tensor, limit: int) -> Tensor:
        """Hidden states [B, C] of one step of the multi-token-prediction head."""
        mtp = self.model.mtp
        layer: Layer = mtp.layers[0]  # type: ignore[assignment]
        x = mtp.mix(self.model.model.embed_tokens(tokens), hidden)
        normed = layer.input_layernorm(x)
        x = x + self._attend(layer.self_attn, normed, len(self.keys) - 1, pos, limit)
        return mtp.norm(x + layer.mlp(layer.post_attention_layernorm(x)))


def filtered(logits: Tensor, top_k: int = 20, top_p: float = 0.95) -> tuple[Tensor, Tensor]:
    """(probabilities, token ids), both [..., top_k]: top-k, then top-p on the renormalised rest."""
    values, ids = logits.float().topk(top_k, dim=-1)
    probs = values.softmax(-1)
    before = probs.cumsum(-1) - probs
    probs = probs.masked_fill(before >= top_p, 0.0)
    return probs / probs.sum(-1, keepdim=True), ids


def sample(probs: Tensor, ids: Tensor) -> Tensor:
    """One id a row, drawn by the exponential race (no host synchronisation)."""
    race = probs / torch.empty_like(probs).exponential_()
    return ids.gather(-1, race.argmax(-1, keepdim=True)).squeeze(-1)


def captured(run: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """`run` as a CUDA graph (it must use static tensors); unchanged on a CPU."""
    if device.type != "cuda":
        return run
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


@torch.no_grad()
def generate(
    model: WebModel, prompts: list[list[int]], tau: Tensor, count: int, seed: int
) -> list[list[int]]:
    """Plain sampling of `count` tokens a row, cut after the first end token (0 or 2).

    tau [B] divides the logits of each row, so that one call tries several temperatures.
    """
    torch.manual_seed(seed)
    rows, longest = len(prompts), max(map(len, prompts))
    total = longest + count
    decoder = Decoder(model, rows, total)
    device = decoder.device
    history = torch.zeros(total + 1, rows, dtype=torch.long, device=device)
    given = torch.zeros(total + 1, rows, dtype=torch.bool, device=device)
    for row, prompt in enumerate(prompts):
        history[: len(prompt), row] = torch.tensor(prompt, device=device)
        given[: len(prompt), row] = True
    clock = torch.zeros(1, dtype=torch.long, device=device)
    scale = 1.0 / tau.to(device)[:, None]

    def advance(limit: int) -> None:
        tokens = history[clock][0]
        hidden = decoder.step(tokens, clock.expand(rows), limit)
        drawn = sample(*filtered(model.logits(hidden) * scale))
        after = clock + 1
        history[after] = torch.where(given[after], history[after], drawn[None])
        clock.add_(1)

    position = 0
    while position < total:
        limit = min(total, (position // SEGMENT + 1) * SEGMENT)
        saved = decoder.states.clone(), decoder.windows.clone()
        replay = captured(lambda: advance(limit), device)  # noqa: B023
        # The warm-up run moved the state on; capture itself runs nothing.
        decoder.states.copy_(saved[0])
        decoder.windows.copy_(saved[1])
        clock.fill_(position)
        for _ in range(limit - position):
            replay()
        position = limit
    texts = history.t().tolist()
    out: list[list[int]] = []
    for row, prompt in enumerate(prompts):
        ids = texts[row][len(prompt) : len(prompt) + count]
        ends = [i for i, token in enumerate(ids) if token in (0, 2)]
        out.append(ids[: ends[0] + 1] if ends else ids)
    return out


@dataclass
class Acceptance:
    """Counts of speculative rounds: accepted[d] rounds took at least d + 1 drafts."""

    rounds: int
    accepted: list[int]

    @property
    def cumulative(self) -> list[float]:
        return [round(count / max(1, self.rounds), 4) for count in self.accepted]

    @property
    def length(self) -> float:
        """Mean tokens a round: accepted drafts and the one sampled by the target."""
        return round(1 + sum(self.accepted) / max(1, self.rounds), 4)


def dense(probs: Tensor, ids: Tensor, vocab: int) -> Tensor:
    return torch.zeros(*probs.shape[:-1], vocab, device=probs.device).scatter(-1, ids, probs)


@torch.no_grad()
def speculate(
    model: WebModel, prompts: list[list[int]], rounds: int, seed: int, drafts: int = 4
) -> tuple[Acceptance, list[list[int]]]:
    """Lossless speculative sampling with `drafts` drafts a round; (counts, new token ids).

    Every prompt must have the same length. Rejection: accept d with min(1, p/q), else draw from
    the normalised positive part of p - q (Leviathan et al. 2023, Chen et al. 2023). Rounds after
    a row's end token are not counted.
    """
    torch.manual_seed(seed)
    rows, start = len(prompts), len(prompts[0])
    vocab = model.cfg.vocab
    length = start + rounds * (drafts + 1) + drafts + 2
    decoder = Decoder(model, rows, length)
    device, row = decoder.device, decoder.row
    fixed = torch.tensor(prompts, device=device)
    token_in = torch.zeros(rows, dtype=torch.long, device=device)
    pos_in = torch.zeros(rows, dtype=torch.long, device=device)
    hidden_in = torch.zeros(rows, model.cfg.hidden, device=device)
    main_out, draft_out = torch.zeros_like(hidden_in), torch.zeros_like(hidden_in)

    def run_main(limit: int) -> None:
        main_out.copy_(decoder.step(token_in, pos_in, limit))

    def run_draft(limit: int) -> None:
        draft_out.copy_(decoder.draft(token_in, hidden_in, pos_in, limit))

    saved = decoder.states.clone(), decoder.windows.clone()
    main_graph = captured(lambda: run_main(length), device)
    draft_graph = captured(lambda: run_draft(length), device)
    decoder.states.copy_(saved[0])
    decoder.windows.copy_(saved[1])

    def main(tokens: Tensor, pos: Tensor) -> Tensor:
        token_in.copy_(tokens)
        pos_in.copy_(pos)
        main_graph()
        return main_out.clone()

    def mtp(tokens: Tensor, hidden: Tensor, pos: Tensor) -> Tensor:
        token_in.copy_(tokens)
        hidden_in.copy_(hidden)
        pos_in.copy_(pos)
        draft_graph()
        return draft_out.clone()

    pos = torch.zeros(rows, dtype=torch.long, device=device)
    for i in range(start):
        hidden = main(fixed[:, i], pos + i)
        if i + 1 < start:
            mtp(fixed[:, i + 1], hidden, pos + i)
    current = sample(*filtered(model.logits(hidden)))
    pos = pos + start
    out = mtp(current, hidden, pos - 1)
    alive = (current != 0) & (current != 2)
    taken = torch.zeros(drafts, dtype=torch.long, device=device)
    counted = torch.zeros((), dtype=torch.long, device=device)
    written = [current[:, None]]
    for _ in range(rounds):
        proposed, q = [], []
        for depth in range(drafts):
            probs, ids = filtered(model.logits(out))
            proposed.append(sample(probs, ids))
            q.append(dense(probs, ids, vocab))
            if depth + 1 < drafts:
                out = mtp(proposed[-1], out, pos + depth)
        hiddens, states, windows, p = [], [], [], []
        for j, token in enumerate([current, *proposed]):
            hiddens.append(main(token, pos + j))
            states.append(decoder.states.clone())
            windows.append(decoder.windows.clone())
            p.append(dense(*filtered(model.logits(hiddens[-1])), vocab))
        accepted = torch.zeros_like(pos)
        going = torch.ones(rows, dtype=torch.bool, device=device)
        for j, token in enumerate(proposed):
            ratio = p[j][row, token] / q[j][row, token].clamp_min(1e-20)
            going = going & (torch.rand(rows, device=device) < ratio)
            accepted = accepted + going
            taken[j] += (going & alive).sum()
        counted += alive.sum()
        target = torch.stack(p, 1)[row, accepted]
        proposal = torch.stack([*q, torch.zeros_like(q[0])], 1)[row, accepted]
        rest = (target - proposal).clamp_min(0)
        rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, target)
        bonus = sample(rest, torch.arange(vocab, device=device).expand(rows, -1))
        sequence = torch.stack([*proposed, bonus], 1)
        sequence[row, accepted] = bonus
        for j in range(drafts + 1):
            step = mtp(sequence[:, j], hiddens[j], pos + j)
            out = torch.where((accepted == j)[:, None], step, out) if j else step
        decoder.states.copy_(torch.stack(states, 2)[:, row, accepted])
        decoder.windows.copy_(torch.stack(windows, 2)[:, row, accepted])
        beyond = torch.arange(drafts + 1, device=device) > accepted[:, None]
        written.append(sequence.masked_fill(beyond, -1))
        ended = ((sequence == 0) | (sequence == 2)) & ~beyond
        alive = alive & ~ended.any(1)
        current, pos = bonus, pos + accepted + 1
    ids_out = [[t for t in ids if t >= 0] for ids in torch.cat(written, 1).tolist()]
    return Acceptance(int(counted), taken.tolist()), ids_out
