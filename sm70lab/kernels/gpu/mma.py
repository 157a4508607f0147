"""One warp's tensor-core products with 4-bit weights: four ``mma.m16n8k16`` in a row, sm_80 and later.

Written in assembly because the weights' order in memory is the order in which a warp's threads hold an
``mma`` operand: they go from memory to registers to the tensor cores, through no shared memory. An ``mma``
sums over 16 inputs in any order in which both operands agree, so a thread takes sixteen bytes of x in a row
and the weights' order follows from that. Of thread 4·g + q of a warp, four ``mma`` take

- ``words`` int32 [4]: word 2·c + h, nibble 4·e + 2·p + r is the weight of output g + 8·r and input
  32·c + 8·q + 4·h + 2·p + e. An ``mma``'s registers a, b, c, d are the pairs e = 0, 1 of (p, r) = (0, 0),
  (0, 1), (1, 0), (1, 1);
- ``low``, ``high`` int32 [4]: row g of x, inputs 8·q to 8·q + 7 and 32 + 8·q to 32 + 8·q + 7, as float16;
- ``total`` float32 [4]: value 2·r + t is the sum of output g + 8·r and row 2·q + t.

Nibbles become float16 without a conversion: a nibble alone in the lowest bits is the subnormal number
nibble·2⁻²⁴ (r = 0), in the next four nibble·2⁻²⁰ (r = 1): ``unit``.

The assembly counts on row i of a tensor [32·WARPS, 4] lying in thread i, its columns in that thread's
registers. Triton lays it out so where loads of sixteen bytes are aligned; ``check_layout`` reads whether a
compiled kernel has it. The plain twins beside the assembly are what the interpreter runs.
"""

from __future__ import annotations

import re

import triton
import triton.language as tl

LOW_UNIT = tl.constexpr(2.0**-24)
HIGH_UNIT = tl.constexpr(2.0**-20)


def _four(of_step: str, first: int, total: int) -> str:
    """PTX of four steps: ``of_step`` makes a, b, c and d of step {word}; x from operand ``first``."""
    lines = ["{ .reg .b32 a, b, c, d, t;"]
    for step in range(4):
        x = f"{{${first + 2 * step},${first + 2 * step + 1}}}"
        c = ",".join(f"${i + (0 if step else total)}" for i in range(4))
        lines.append(of_step.format(word=f"${4 + step}"))
        lines.append(
            f"mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {{$0,$1,$2,$3}}, {{a,b,c,d}}, {x}, {{{c}}};"
        )
    return " ".join([*lines, "}"])


_PRODUCTS = tl.constexpr(
    _four(
        "and.b32 a, {word}, 0x000F000F; and.b32 b, {word}, 0x00F000F0; shr.u32 t, {word}, 8;"
        " and.b32 c, t, 0x000F000F; and.b32 d, t, 0x00F000F0;",
        first=8,
        total=16,
    )
)
_SUMS = tl.constexpr(
    _four("mov.b32 a, 0x3C003C00; mov.b32 b, a; mov.b32 c, a; mov.b32 d, a;", first=4, total=12)
)
_LOW_HALF = tl.constexpr("{ .reg .b16 low, high; mov.b32 {low, high}, $1; cvt.f32.f16 $0, low; }")
_HIGH_HALF = tl.constexpr("{ .reg .b16 low, high; mov.b32 {low, high}, $1; cvt.f32.f16 $0, high; }")


@triton.jit
def four_products(words, low, high, total, WARPS: tl.constexpr, ASSEMBLY: tl.constexpr):
    """total + unit·Σ q·x over 64 inputs: all int32 or float32 [32·WARPS, 4]."""
    if not ASSEMBLY:
        return _add(total, _matrix(words, WARPS), _rows(low, high, WARPS), WARPS)
    return tl.inline_asm_elementwise(
        _PRODUCTS,
        "=&f,=&f,=&f,=&f,r,r,r,r,r,r,r,r,r,r,r,r,f,f,f,f",
        [words, low, high, total],
        tl.float32,
        is_pure=True,
        pack=4,
    )


@triton.jit
def four_sums(low, high, total, WARPS: tl.constexpr, ASSEMBLY: tl.constexpr):
    """total + Σ x over 64 inputs, the same for every output."""
    if not ASSEMBLY:
        ones = tl.full((WARPS, 16, 64), 1.0, tl.float32)
        return _add(total, ones, _rows(low, high, WARPS), WARPS)
    return tl.inline_asm_elementwise(
        _SUMS,
        "=&f,=&f,=&f,=&f,r,r,r,r,r,r,r,r,f,f,f,f",
        [low, high, total],
        tl.float32,
        is_pure=True,
        pack=4,
    )


@triton.jit
def unit(i):
    """What one is in ``total``'s value ``i``, 0 to 3."""
    return tl.where(i < 2, LOW_UNIT, HIGH_UNIT)


@triton.jit
def low_half(pair, ASSEMBLY: tl.constexpr):
    """The float16 in the low half of a word, as float32."""
    if not ASSEMBLY:
        return (pair & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return tl.inline_asm_elementwise(_LOW_HALF, "=f,r", [pair], tl.float32, is_pure=True, pack=1)


@triton.jit
def high_half(pair, ASSEMBLY: tl.constexpr):
    """The float16 in the high half of a word, as float32."""
    if not ASSEMBLY:
        return (pair >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return tl.inline_asm_elementwise(_HIGH_HALF, "=f,r", [pair], tl.float32, is_pure=True, pack=1)


def check_layout(ttgir: str, warps: int) -> None:
    """Raise ``RuntimeError`` unless a kernel, in Triton's GPU dialect, lays operands out for the assembly.

    Another release of Triton may choose otherwise, and the products would be wrong.
    """
    layouts = dict(re.findall(r"^(#\w+) = #ttg\.blocked<\{(.*)\}>", ttgir, re.MULTILINE))
    wanted = f"sizePerThread = [1, 4], threadsPerWarp = [32, 1], warpsPerCTA = [{warps}, 1], order = [1, 0]"
    products = [line for line in ttgir.splitlines() if "mma.sync" in line]
    operands = {name for line in products for name in re.findall(r"tensor<\d+x4x\w+, (#\w+)>", line)}
    if not operands or any(layouts.get(name) != wanted for name in operands):
        found = ", ".join(sorted(str(layouts.get(name)) for name in operands)) or "none"
        raise RuntimeError(
            f"Triton {triton.__version__} lays out the operands of 4-bit products as {found}; "
            f"they need {wanted}"
        )


# ---------------------------------------------------------------- plain twins


@triton.jit
def _matrix(words, WARPS: tl.constexpr):
    """Nibbles times their unit, float32 [WARPS, 16, 64]."""
    q = (words[:, :, None] >> (4 * tl.arange(0, 8))[None, None, :]) & 15
    q = tl.reshape(q, [WARPS, 8, 4, 2, 2, 2, 2, 2])  # warp, g, q, c, h, e, p, r
    q = tl.permute(q, [0, 7, 1, 3, 2, 4, 6, 5])  # warp, r, g, c, q, h, p, e
    row = tl.arange(0, 16)[None, :, None]
    return tl.reshape(q, [WARPS, 16, 64]).to(tl.float32) * unit(row // 8 * 2)


@triton.jit
def _rows(low, high, WARPS: tl.constexpr):
    """x of eight rows, transposed: float32 [WARPS, 64, 8]."""
    pairs = tl.join(low, high)  # thread, word, c
    x = tl.join(low_half(pairs, False), high_half(pairs, False))  # thread, word, c, e
    x = tl.permute(tl.reshape(x, [WARPS, 8, 4, 4, 2, 2]), [0, 4, 2, 3, 5, 1])  # warp, c, q, word, e, g
    return tl.reshape(x, [WARPS, 64, 8])


@triton.jit
def _add(total, matrix, x, WARPS: tl.constexpr):
    """total + matrix·x, back in the threads' order."""
    c = tl.permute(tl.reshape(total, [WARPS, 8, 4, 2, 2]), [0, 3, 1, 2, 4])  # warp, r, g, q, t
    c = tl.dot(matrix, x, tl.reshape(c, [WARPS, 16, 8]))
    c = tl.permute(tl.reshape(c, [WARPS, 2, 8, 4, 2]), [0, 2, 3, 1, 4])
    return tl.reshape(c, [32 * WARPS, 4])
