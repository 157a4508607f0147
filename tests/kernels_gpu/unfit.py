"""Kernels that a V100 cannot have, one a reason, and one that it can: input of ``test_compile_check``."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass

import triton
import triton.language as tl

from sm70lab.kernels.gpu.cases import CompileCase


@triton.jit
def _copy(x, y, N: tl.constexpr):
    place = tl.arange(0, N)
    tl.store(y + place, tl.load(x + place))


@triton.jit
def _centre(x, y, N: tl.constexpr):
    """Every element waits in a register for the sum of all."""
    place = tl.arange(0, N)
    values = tl.load(x + place)
    tl.store(y + place, values - tl.sum(values, axis=0))


@triton.jit
def _gather(x, y, N: tl.constexpr):
    """The source of a gather lies in shared memory."""
    place = tl.arange(0, N)
    index = (tl.load(y + place) * 0).to(tl.int32)
    tl.store(y + place, tl.gather(tl.load(x + place), index, axis=0))


@dataclass(frozen=True)
class EndsTheProcess(CompileCase):
    """Stands for LLVM, which aborts on what it cannot lower."""

    by: int = signal.SIGABRT

    def full_signature(self) -> dict[str, str]:
        os.kill(os.getpid(), self.by)
        return super().full_signature()


def case(label: str, kernel: object, kind: str, n: int, warps: int = 4) -> CompileCase:
    return CompileCase(kernel, {"x": kind, "y": kind}, {"N": n}, warps, 1, label)


def compile_cases() -> Iterator[CompileCase]:
    yield case("fits", _copy, "*fp32", 1024)
    yield case("spills", _centre, "*fp32", 8192, warps=1)
    yield case("shared memory", _gather, "*fp32", 32_768, warps=32)
    yield case("bfloat16", _copy, "*bf16", 1024)
    yield EndsTheProcess(_copy, {"x": "*fp32", "y": "*fp32"}, {"N": 64}, 4, 1, "aborts")
    yield CompileCase(_copy, {"x": "*fp32"}, {"N": 64}, 4, 1, "no type for y")
