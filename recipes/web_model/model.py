"""The model in plain torch, with parameter names of the Hugging Face Qwen3.5 text layout.

Formulas follow transformers' `qwen3_5` modelling code (norms with weight 1 + w, output gate,
partial rotary, gated delta net) and the family's published multi-token-prediction head.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .kernels import gated_delta_rule, merged_attention


@dataclass(frozen=True)
class Config:
    """Sizes; the defaults are those of the shipped model."""

    vocab: int = 4096
    hidden: int = 320
    ffn: int = 768
    layers: int = 8
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    gdn_heads: int = 4
    gdn_dim: int = 64
    conv: int = 4
    rotary: int = 32
    theta: float = 1e5
    eps: float = 1e-6
    extra: dict[str, str] = field(default_factory=dict)

    def full_attention(self, layer: int) -> bool:
        return (layer + 1) % 4 == 0

    def to_json(self) -> dict[str, object]:
        return asdict(self)


class Norm(nn.Module):
    """RMSNorm in float32, times (1 + weight)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        weight = 1.0 + self.weight.float()
        return F.rms_norm(x.float(), weight.shape, weight, self.eps).to(x.dtype)


class GatedNorm(nn.Module):
    """RMSNorm in float32, times weight, times SiLU(gate)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        y = F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps)
        return (y * F.silu(gate.float())).to(gate.dtype)


def rotate(x: Tensor, positions: Tensor, cfg: Config) -> Tensor:
    """Rotary embedding of the first `cfg.rotary` channels.

    x [B, H, T, D], positions [T] or [B, T].
    """
    half = cfg.rotary // 2
    inverse = cfg.theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = positions.float()[..., None] * inverse
    if angle.dim() == 3:
        angle = angle[:, None]
    cos, sin = angle.cos(), angle.sin()
    a, b, rest = x.float().split([half, half, x.shape[-1] - cfg.rotary], dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention with q/k norms, partial rotary and a sigmoid output gate."""

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.cfg = cfg
        h, d = cfg.hidden, cfg.head_dim
        self.q_proj = nn.Linear(h, cfg.heads * d * 2, bias=False)
        self.k_proj = nn.Linear(h, cfg.kv_heads * d, bias=False)
        self.v_proj = nn.Linear(h, cfg.kv_heads * d, bias=False)
        self.o_proj = nn.Linear(cfg.heads * d, h, bias=False)
        self.q_norm = Norm(d, cfg.eps)
        self.k_norm = Norm(d, cfg.eps)

    def project(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q [B, H, T, D], k and v [B, KV, T, D], gate [B, T, H D]."""
        cfg = self.cfg
        q, gate = self.q_proj(x).unflatten(-1, (cfg.heads, 2, cfg.head_dim)).unbind(-2)
        q = rotate(self.q_norm(q).transpose(1, 2), positions, cfg)
        k = self.k_norm(self.k_proj(x).unflatten(-1, (cfg.kv_heads, cfg.head_dim)))
        k = rotate(k.transpose(1, 2), positions, cfg)
        v = self.v_proj(x).unflatten(-1, (cfg.kv_heads, cfg.head_dim)).transpose(1, 2)
        return q, k, v, gate.flatten(-2)

    def finish(self, out: Tensor, gate: Tensor) -> Tensor:
        """Gate and output projection; out [B, H, T, D]."""
        return self.o_proj(out.transpose(1, 2).flatten(-2) * torch.sigmoid(gate))

    def widen(self, x: Tensor) -> Tensor:
        """Key or value heads repeated to the number of query heads."""
        return x.repeat_interleave(self.cfg.heads // self.cfg.kv_heads, dim=1)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        q, k, v, gate = self.project(x, positions)
        return self.finish(merged_attention(q, self.widen(k), self.widen(v), None, None), gate)


class GatedDeltaNet(nn.Module):
    """Linear attention layer: causal convolution, gated delta rule, gated norm."""

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.cfg = cfg
        width = cfg.gdn_heads * cfg.gdn_dim
        self.in_proj_qkv = nn.Linear(cfg.hidden, 3 * width, bias=False)
        self.in_proj_z = nn.Linear(cfg.hidden, width, bias=False)
        self.in_proj_b = nn.Linear(cfg.hidden, cfg.gdn_heads, bias=False)
        self.in_proj_a = nn.Linear(cfg.hidden, cfg.gdn_heads, bias=False)
        self.conv1d = nn.Conv1d(3 * width, 3 * width, cfg.conv, groups=3 * width, bias=False)
        self.A_log = nn.Parameter(torch.empty(cfg.gdn_heads).uniform_(1, 16).log())
        step = torch.empty(cfg.gdn_heads).uniform_(-6.9, -2.3).exp()
        self.dt_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))
        self.norm = GatedNorm(cfg.gdn_dim, cfg.eps)
        self.out_proj = nn.Linear(width, cfg.hidden, bias=False)

    def gates(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """beta and g, both [..., H] float32."""
        beta = torch.sigmoid(self.in_proj_b(x).float())
        a = self.in_proj_a(x).float()
        return beta, -self.A_log.float().exp() * F.softplus(a + self.dt_bias.float())

    def finish(self, out: Tensor, x: Tensor) -> Tensor:
        """Gated norm and output projection; out [..., H, D] float32."""
        gate = self.in_proj_z(x).unflatten(-1, (self.cfg.gdn_heads, self.cfg.gdn_dim))
        return self.out_proj(self.norm(out, gate).flatten(-2))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        cfg = self.cfg
        qkv = self.in_proj_qkv(x)
        weight = self.conv1d.weight[:, 0].to(qkv.dtype)
        padded = F.pad(qkv, (0, 0, cfg.conv - 1, 0))
        # Four shifted products beat the depthwise convolution kernel, forward and backward.
        mixed = sum(padded[:, i : i + x.shape[1]] * weight[:, i] for i in range(cfg.conv))
        qkv = F.silu(torch.as_tensor(mixed)).unflatten(-1, (3, cfg.gdn_heads, cfg.gdn_dim))
        beta, g = self.gates(x)
        return self.finish(gated_delta_rule(*qkv.unbind(2), beta, g), x)


class Mlp(nn.Module):
    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(cfg.hidden, cfg.ffn, bias=False)
        self.up_proj = nn.Linear(cfg.hidden, cfg.ffn, bias=False)
        self.down_proj = nn.Linear(cfg.ffn, cfg.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, cfg: Config, full: bool) -> None:
        super().__init__()
        self.input_layernorm = Norm(cfg.hidden, cfg.eps)
        if full:
            self.self_attn = Attention(cfg)
        else:
            self.linear_attn = GatedDeltaNet(cfg)
        self.post_attention_layernorm = Norm(cfg.hidden, cfg.eps)
        self.mlp = Mlp(cfg)
        self.full = full

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        mixer = self.self_attn if self.full else self.linear_attn
        x = x + mixer(self.input_layernorm(x), positions)
        return x + self.mlp(self.post_attention_layernorm(x))


class Mtp(nn.Module):
    """Multi-token-prediction head: one attention layer fed [norm(embedding) | norm(hidden)]."""

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.pre_fc_norm_embedding = Norm(cfg.hidden, cfg.eps)
        self.pre_fc_norm_hidden = Norm(cfg.hidden, cfg.eps)
        self.fc = nn.Linear(2 * cfg.hidden, cfg.hidden, bias=False)
        self.layers = nn.ModuleList([Layer(cfg, full=True)])
        self.norm = Norm(cfg.hidden, cfg.eps)

    def mix(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """Input of the layer from the next token's embedding and the hidden state before it."""
        pair = [self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)]
        return self.fc(torch.cat(pair, dim=-1))

    def unroll(self, embedded: list[Tensor], hidden: Tensor) -> list[Tensor]:
        """Hidden states of each depth, as in decoding; embedded[d] [B, T, C] is token t + d + 1.

        At depth d a query sees the depth-1 keys of all positions up to its own and the deeper
        keys of its own chain; its rotary position is t + d (depths count from 0 here).
        """
        layer: Layer = self.layers[0]  # type: ignore[assignment]
        attention = layer.self_attn
        positions = torch.arange(hidden.shape[1], device=hidden.device)
        outs: list[Tensor] = []
        chain_k: list[Tensor] = []
        chain_v: list[Tensor] = []
        for depth, item in enumerate(embedded):
            x = self.mix(item, hidden)
            q, k, v, gate = attention.project(layer.input_layernorm(x), positions + depth)
            k, v = attention.widen(k), attention.widen(v)
            if depth == 0:
                base_k, base_v = k, v
                out = merged_attention(q, k, v, None, None)
            else:
                chain_k.append(k)
                chain_v.append(v)
                extras = torch.stack(chain_k, dim=3), torch.stack(chain_v, dim=3)
                out = merged_attention(q, base_k, base_v, *extras)
            x = x + attention.finish(out, gate)
            hidden = self.norm(x + layer.mlp(layer.post_attention_layernorm(x)))
            outs.append(hidden)
        return outs


class Backbone(nn.Module):
    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(cfg.vocab, cfg.hidden)
        self.layers = nn.ModuleList(Layer(cfg, cfg.full_attention(i)) for i in range(cfg.layers))
        self.norm = Norm(cfg.hidden, cfg.eps)


class WebModel(nn.Module):
    """Target model and its MTP head; the output head is the embedding (tied)."""

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.cfg = cfg
        self.model = Backbone(cfg)
        self.mtp = Mtp(cfg)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                depth = (2 * cfg.layers) ** -0.5
                down = name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=0.02 * (depth if down else 1.0))

    def hidden(self, tokens: Tensor) -> Tensor:
        """Hidden states after the final norm, [B, T, C], for token ids [B, T]."""
        x = self.model.embed_tokens(tokens)
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        for layer in self.model.layers:
            x = layer(x, positions)
        return self.model.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.model.embed_tokens.weight)
