"""Route flags to boundaries: which stages of the GDN layer sit behind one opaque operator."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from sm70lab.errors import UsageError
from sm70lab.schema import Route


class Opaque(Enum):
    """What one opaque ``torch.library`` operator holds; the compiler traces the rest of the layer."""

    nothing = "nothing"  # no operator at all: eager routes and the reference
    core = "core"
    layer = "layer"  # input projection, core and output projection together


@dataclass(frozen=True)
class Boundary:
    """How the GDN layer of a route is cut."""

    opaque: Opaque
    contiguous_qkv: bool  # mixed_qkv is copied out of the fused projection before the core sees it


def resolve(route: Route) -> Boundary:
    """The boundary that a route's flags ask for. Raises ``UsageError`` for contradictory flags.

    | flags | input projection | core | output projection |
    |---|---|---|---|
    | (none: split) | traced | opaque | traced |
    | full_forward | one opaque operator | ← | ← |
    | spec_core_003 | traced, mixed_qkv made contiguous | opaque | traced |

    Without ``compile`` nothing is traced, so there is no boundary: the stages are plain calls.
    """
    if route.full_forward and route.spec_core_003:
        raise UsageError(
            "route.full_forward=true and route.spec_core_003=true contradict each other: the first hides the "
            "whole GDN layer behind one operator, the second only its core; set one of them"
        )
    opaque = Opaque.layer if route.full_forward else Opaque.core
    return Boundary(opaque if route.compile else Opaque.nothing, contiguous_qkv=route.spec_core_003)


REFERENCE = Boundary(Opaque.nothing, contiguous_qkv=False)
