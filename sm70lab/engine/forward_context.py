"""The forward context: state and metadata that the core looks up by its layer's number.

This is the published design: vLLM's GDN layers are operators that take their layer's name and fetch
state and metadata from a context set around the forward pass. What it hides from the compiler: that
the operator reads the layer's pool and that a new state comes out of it. The compiler sees a pure
function of mixed_qkv, b, a and weights; it may not move, merge or repeat what it cannot see, yet
nothing tells it so. A graph captured around it replays whatever the context held at the capture.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch

from sm70lab.engine import gdn
from sm70lab.engine.gdn import CoreWeights, How, Place
from sm70lab.engine.state import LayerState, Metadata


@dataclass
class ForwardContext:
    """What one forward pass may look up, and the new pool rows that it leaves, by GDN layer number."""

    layers: list[LayerState]
    metadata: Metadata
    scheme: str
    prefill_room: int
    new_rows: dict[int, LayerState] = field(default_factory=dict)

    def place(self, layer: int) -> Place:
        """Where the core of ``layer`` finds its state."""
        m = self.metadata
        where = (m.slots, m.conv_accepted, m.ssm_accepted)
        return Place(self.layers[layer], *where, self.scheme, self.prefill_room)

    def taken(self) -> list[LayerState]:
        """The new pool rows of every layer, for ``StateStore.advance``."""
        return [self.new_rows[layer] for layer in range(len(self.layers))]


_current: ContextVar[ForwardContext] = ContextVar("sm70lab_forward_context")


@contextmanager
def entered(context: ForwardContext) -> Iterator[ForwardContext]:
    """Make ``context`` the one that cores look into."""
    token = _current.set(context)
    try:
        yield context
    finally:
        _current.reset(token)


def core(
    mixed_qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, weights: CoreWeights, layer: int, how: How
) -> torch.Tensor:
    """``gdn.core`` of GDN layer ``layer``; the new pool rows stay in the context. Returns o."""
    try:
        context = _current.get()
    except LookupError:
        raise RuntimeError(f"GDN layer {layer} ran outside a forward context") from None
    o, *context.new_rows[layer] = gdn.core(mixed_qkv, b, a, weights, context.place(layer), how)
    return o
