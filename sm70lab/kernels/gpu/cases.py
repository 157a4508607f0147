"""What a kernel can be launched with, so that every such configuration can be compiled without a GPU."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class CompileCase:
    """One configuration of one Triton kernel.

    Pointers are taken to be divisible by 16, as PyTorch allocates them. ``divisible`` names the
    integer arguments for which the launcher promises the same.
    """

    kernel: Any  # triton.JITFunction
    signature: dict[str, str]  # argument → "*fp16", "*fp32", "*i64", "i32", "fp32"; no constexprs
    constexprs: dict[str, Any]
    num_warps: int
    num_stages: int
    label: str
    divisible: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)  # further compile options

    def full_signature(self) -> dict[str, str]:
        """The signature in the kernel's own order of arguments, as ``triton.compiler.ASTSource`` wants it."""
        missing = set(self.kernel.arg_names) - set(self.signature) - set(self.constexprs)
        if missing:
            raise ValueError(f"{self.label}: no type for {', '.join(sorted(missing))}")
        return {name: self.signature.get(name, "constexpr") for name in self.kernel.arg_names}

    def attributes(self) -> dict[tuple[int], list[list[Any]]]:
        """Divisibility by 16 of the pointers and of ``divisible``, as ``ASTSource`` wants it."""
        promised = [
            self.signature.get(name, "").startswith("*") or name in self.divisible
            for name in self.kernel.arg_names
        ]
        return {(i,): [["tt.divisibility", 16]] for i, yes in enumerate(promised) if yes}
