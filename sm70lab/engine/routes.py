"""Route flags to boundaries: which stages of the GDN layer sit behind opaque operators."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from itertools import combinations

from sm70lab.errors import UsageError
from sm70lab.kernels.arithmetic import Arithmetic
from sm70lab.schema import GraphMode, Numerics, Route


class Opaque(Enum):
    """What the opaque ``torch.library`` operators hold; the compiler traces the rest of the layer."""

    nothing = "nothing"  # no operator at all: eager routes and the reference
    core = "core"
    input_and_core = "input_projection+core"  # two operators
    core_and_output = "core+output_projection"  # two operators
    input_core = "input_core"  # input projection and core in one operator
    layer = "layer"  # input projection, core and output projection in one operator


@dataclass(frozen=True)
class Boundary:
    """How the GDN layer of a route is cut."""

    opaque: Opaque
    contiguous_qkv: bool  # mixed_qkv is copied out of the fused projection before the core sees it
    arithmetic: Arithmetic = Arithmetic.plain  # of rounds; prefills run plain
    in_context: bool = False  # the core looks its state up in the forward context by layer number
    packed: bool = False  # rounds of one row run ``gdn.packed_step``
    recorded: bool = False  # rounds are played back: native calls on a CPU, CUDA graphs on a GPU


@dataclass(frozen=True)
class _Cut:
    """What one flag asks for."""

    opaque: Opaque
    in_context: bool
    what: str


SPLIT = _Cut(Opaque.core, False, "")
CUTS = {
    "full_forward": _Cut(Opaque.layer, False, "hides the whole layer behind one operator"),
    "input_core": _Cut(Opaque.input_core, False, "hides input projection and core behind one operator"),
    "input_projection": _Cut(
        Opaque.input_and_core, False, "hides input projection and core behind two operators"
    ),
    "output_projection": _Cut(
        Opaque.core_and_output, False, "hides core and output projection behind two operators"
    ),
    "context_core": _Cut(Opaque.core, True, "hides only the core, with its state in the forward context"),
    "spec_core_003": _Cut(Opaque.core, True, "hides only the core, with its state in the forward context"),
}


def arithmetic(route: Route, native: bool, captures: bool = False) -> Arithmetic:
    """How a round's products are computed; the native kernels are exact by construction."""
    if native:
        return Arithmetic.native
    if captures and route.graph is GraphMode.full:
        return Arithmetic.captured
    return Arithmetic.by_row if route.numerics is Numerics.exact else Arithmetic.plain


def resolve(route: Route, native: bool = False, captures: bool = False) -> Boundary:
    """The boundary that a route's flags ask for. Raises ``UsageError`` for contradictory flags.

    ``native``: rounds run the C++ kernels. ``captures``: the device has CUDA graphs.

    | flag | input projection | core | output projection | state and metadata |
    |---|---|---|---|---|
    | (none: split) | traced | opaque | traced | explicit tensors |
    | context_core | traced | opaque | traced | forward context, by layer number |
    | input_projection | opaque | opaque | traced | explicit |
    | output_projection | traced | opaque | opaque | explicit |
    | input_core | one opaque operator | ← | traced | explicit |
    | full_forward | one opaque operator | ← | ← | explicit |
    | spec_core_003 | traced, mixed_qkv made contiguous | opaque | traced | forward context |

    Without ``compile`` nothing is traced, so the stages are plain calls; a context route looks its
    state up in the forward context all the same.
    """
    asked = check_flags(route)
    _check_packed(route)
    _check_graph(route)
    cut = CUTS[asked[0]] if asked else SPLIT
    return Boundary(
        cut.opaque if route.compile else Opaque.nothing,
        contiguous_qkv=route.spec_core_003,
        arithmetic=arithmetic(route, native, captures),
        in_context=cut.in_context,
        packed=route.packed_recurrent,
        recorded=route.graph is GraphMode.full,
    )


def check_flags(route: Route) -> list[str]:
    """The boundary flags that are set. Raises ``UsageError`` where two of them contradict each other."""
    asked = [name for name in CUTS if getattr(route, name)]
    for first, second in combinations(asked, 2):
        one, other = CUTS[first], CUTS[second]
        if (one.opaque, one.in_context) != (other.opaque, other.in_context):
            raise UsageError(
                f"route.{first}=true and route.{second}=true contradict each other: the first {one.what}, "
                f"the second {other.what}; set one of them"
            )
    return asked


def _check_packed(route: Route) -> None:
    if not route.packed_recurrent:
        return
    if route.draft_tokens:
        raise UsageError(
            f"route.packed_recurrent=true and route.draft_tokens={route.draft_tokens} contradict each other: "
            f"the packed step takes rounds of one row, and these have {route.draft_tokens + 1}; "
            "use route.draft_tokens=0"
        )
    if route.state.scheme != "slots":
        raise UsageError(
            f"route.packed_recurrent=true and route.state.scheme={route.state.scheme} contradict each other: "
            "the packed step writes the new state itself, and this scheme settles it later; "
            "use route.state.scheme=slots"
        )


def _check_graph(route: Route) -> None:
    asked = f"route.graph={route.graph.value}"
    if route.graph is GraphMode.full_and_piecewise:
        raise UsageError(
            f"{asked}: prefills are not compiled, so there is nothing to cut there; use full or piecewise"
        )
    if route.graph is GraphMode.piecewise and not route.compile:
        raise UsageError(
            f"{asked} and route.compile=false contradict each other: pieces are what the compiler traced "
            "between opaque operators; set route.compile=true"
        )


def graph_is_whole(route: Route) -> bool:
    """Whether the route asks for a graph of the whole round, with nothing cut, looked up or traced in it."""
    return route.graph is GraphMode.full and not _cut_or_traced(route)


def _cut_or_traced(route: Route) -> list[str]:
    return [name for name in (*CUTS, "packed_recurrent", "compile") if getattr(route, name)]


def check_graph(route: Route, device: str) -> None:
    """Raises ``UsageError`` where this type of device has no such graph."""
    asked = f"route.graph={route.graph.value}"
    if device == "cuda":
        if route.graph is GraphMode.full and not graph_is_whole(route) and route.numerics is Numerics.exact:
            raise UsageError(
                f"{asked} and route.numerics=exact contradict each other in a route that is cut or traced: "
                "its products take all rows at once; use route=whole_round, or numerics=fast"
            )
        return
    if route.graph is GraphMode.piecewise:
        raise UsageError(f"{asked}: CUDA graphs are captured on a GPU, not on a {device}; use none")
    rivals = _cut_or_traced(route)
    if route.graph is GraphMode.full and rivals:
        raise UsageError(
            f"{asked} and route.{rivals[0]}=true contradict each other: on a CPU the whole round is one "
            "recorded list of native calls, with nothing left to cut, look up or trace; set one of them"
        )


REFERENCE = Boundary(Opaque.nothing, contiguous_qkv=False)
