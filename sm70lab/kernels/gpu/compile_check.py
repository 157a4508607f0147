"""Does every kernel, in every configuration it can be launched with, fit a V100? No GPU needed.

  python -m sm70lab.kernels.gpu.compile_check            all kernels of this package
  python -m sm70lab.kernels.gpu.compile_check FILE.py    those of a module with ``compile_cases()``

Each case is compiled for sm_70 by Triton and assembled by ptxas in a child process of its own, since
LLVM can end the process. Exit codes: 0 all fit, 1 some do not, 2 the tools are not here.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import pkgutil
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any

TRITON = "3.6.0"  # of torch 2.10, the last with sm_70 code in its default wheels
CAPABILITY = 70
SHARED_LIMIT = 98_304  # bytes a block can have on sm_70
REGISTER_LIMIT = 65_536  # of a multiprocessor, and so of a block
CHILD_SECONDS = 300
INSTALL = f"pip install triton=={TRITON}"


@dataclass
class Fit:
    """What the compilers say about one case."""

    label: str
    warps: int
    registers: int = 0
    shared: int = 0
    spilled: int = 0
    stack: int = 0
    seconds: float = 0.0
    faults: list[str] = field(default_factory=list)


def faults_of(fit: Fit, ir: str) -> list[str]:
    """What a V100 does not allow. ``ir``: the kernel in Triton's IR."""
    faults = []
    if fit.spilled or fit.stack:
        faults.append(f"spills {fit.spilled} bytes, stack {fit.stack} bytes")
    if fit.shared > SHARED_LIMIT:
        faults.append(f"{fit.shared} bytes of shared memory, over {SHARED_LIMIT}")
    if fit.registers * fit.warps * 32 > REGISTER_LIMIT:
        faults.append(f"{fit.registers} registers · {fit.warps * 32} threads, over {REGISTER_LIMIT}")
    absent = sorted(set(re.findall(r"\b(bf16|f8E\w+)\b", ir)))
    if absent:
        faults.append(f"uses {', '.join(absent)}, which sm_70 does not have")
    return faults


def assembled(ptx: str, fit: Fit) -> None:
    """Run ptxas and read its report into ``fit``. Raises ``RuntimeError`` with its first complaint."""
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx, encoding="utf-8")
        command = [
            knobs.nvidia.ptxas.path,
            "-v",
            f"-arch=sm_{CAPABILITY}",
            str(source),
            "-o",
            f"{source}.cubin",
        ]
        done = subprocess.run(command, capture_output=True, text=True)
    report = done.stdout + done.stderr
    if done.returncode:
        raise RuntimeError(next((line for line in report.splitlines() if "error" in line), report[:200]))
    fit.registers = _greatest(r"Used (\d+) registers", report)
    fit.stack = _greatest(r"(\d+) bytes stack frame", report)
    fit.spilled = _greatest(r"(\d+) bytes spill stores", report) + _greatest(
        r"(\d+) bytes spill loads", report
    )


def _greatest(pattern: str, text: str) -> int:
    """Raises ``RuntimeError`` where the report has no such number: silence must not pass."""
    found = [int(number) for number in re.findall(pattern, text)]
    if not found:
        raise RuntimeError(f"ptxas reported no {pattern!r}")
    return max(found)


def compile_one(case: Any) -> Fit:
    """Compile one ``CompileCase`` for sm_70 in this process."""
    import triton
    from triton.backends.compiler import GPUTarget

    fit = Fit(case.label, case.num_warps)
    began = time.perf_counter()
    try:
        signature = case.full_signature()
        source = triton.compiler.ASTSource(case.kernel, signature, case.constexprs, case.attributes())
        options = {"num_warps": case.num_warps, "num_stages": case.num_stages, **case.options}
        compiled = triton.compile(source, target=GPUTarget("cuda", CAPABILITY, 32), options=options)
        fit.shared = compiled.metadata.shared
        assembled(compiled.asm["ptx"], fit)
        fit.faults = faults_of(fit, compiled.asm["ttir"])
    except Exception as error:  # every compiler stage has its own; any of them is this case's fault
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        fit.faults = [f"{type(error).__name__}: {lines[-1] if lines else 'no message'}"]
    fit.seconds = time.perf_counter() - began
    return fit


# ---------------------------------------------------------------- one child process a case


def load(name: str) -> ModuleType:
    """A module by its dotted name or its file."""
    if not name.endswith(".py"):
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(f"checked_{Path(name).stem}", name)
    if spec is None or spec.loader is None:
        raise ImportError(f"{name}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # a dataclass looks itself up there
    spec.loader.exec_module(module)
    return module


def kernel_modules() -> list[str]:
    """The modules of this package that list cases."""
    package = importlib.import_module(__package__ or "sm70lab.kernels.gpu")
    names = [f"{package.__name__}.{found.name}" for found in pkgutil.iter_modules(package.__path__)]
    own = f"{package.__name__}.compile_check"
    return [name for name in names if name != own and hasattr(load(name), "compile_cases")]


def check(names: Sequence[str], jobs: int) -> list[Fit]:
    """Compile every case of the named modules, each in a forked child, ``jobs`` at a time."""
    cases = [(name, i, case) for name in names for i, case in enumerate(load(name).compile_cases())]
    fits: dict[int, Fit] = {}
    running: dict[int, int] = {}  # process → case
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, i, _) in enumerate(cases):
            if len(running) >= jobs:
                _collect(running, cases, fits, folder)
            running[_fork(name, i, Path(folder, str(number)))] = number
        while running:
            _collect(running, cases, fits, folder)
    return [fits[number] for number in range(len(cases))]


def _fork(name: str, index: int, result: Path) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        signal.alarm(CHILD_SECONDS)  # its default action ends the process
        fit = compile_one(list(load(name).compile_cases())[index])
        result.write_text(json.dumps(asdict(fit)), encoding="utf-8")
        code = 0
    finally:
        os._exit(code)


def _collect(
    running: dict[int, int], cases: list[tuple[str, int, Any]], fits: dict[int, Fit], folder: str
) -> None:
    """Wait for one child and take its result."""
    child, status = os.wait()
    number = running.pop(child)
    result = Path(folder, str(number))
    if status == 0 and result.exists():
        fits[number] = Fit(**json.loads(result.read_text(encoding="utf-8")))
        return
    code = os.waitstatus_to_exitcode(status)
    how = signal.Signals(-code).name if code < 0 else f"exit status {code}"
    case = cases[number][2]
    fits[number] = Fit(case.label, case.num_warps, faults=[f"the compiler's process ended: {how}"])


# ---------------------------------------------------------------- command line


def missing() -> str | None:
    """Why the check cannot run here, in one line."""
    try:
        found = version("triton")
    except PackageNotFoundError:
        return f"Triton is not installed; {INSTALL}"
    if found != TRITON:
        return f"Triton {found} is installed, and a V100 runs {TRITON}; {INSTALL}"
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        return "TRITON_INTERPRET is set: the interpreter compiles nothing; unset it"
    return None


def main(arguments: Sequence[str]) -> int:
    """Check, print a table (or JSON), and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m sm70lab.kernels.gpu.compile_check",
        description="Compile every Triton kernel, in every configuration, for sm_70, and say what it needs.",
        epilog="Exit codes: 0 all fit, 1 some do not, 2 the tools are not here.",
    )
    parser.add_argument("modules", nargs="*", help="dotted names or files with compile_cases(); default: all")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="children at a time")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    options = parser.parse_args(arguments)
    if reason := missing():
        print(f"compile_check: {reason}", file=sys.stderr)
        return 2
    fits = check(options.modules or kernel_modules(), max(1, options.jobs))
    failed = [fit for fit in fits if fit.faults]
    if options.json:
        print(
            json.dumps({"target": f"sm_{CAPABILITY}", "triton": TRITON, "cases": [asdict(f) for f in fits]})
        )
    else:
        show(fits)
    if not fits:
        print("compile_check: no cases", file=sys.stderr)
    return 1 if failed or not fits else 0


def show(fits: Sequence[Fit]) -> None:
    """A line a case, the faults, and one line of summary."""
    width = max((len(fit.label) for fit in fits), default=5)
    print(f"{'case':{width}} {'warps':>5} {'registers':>9} {'shared':>7} {'spills':>6} {'stack':>5} {'s':>5}")
    for fit in fits:
        numbers = f"{fit.registers:9} {fit.shared:7} {fit.spilled:6} {fit.stack:5} {fit.seconds:5.1f}"
        print(
            f"{fit.label:{width}} {fit.warps:5} {numbers}"
            + (f"  {'; '.join(fit.faults)}" if fit.faults else "")
        )
    failed = sum(bool(fit.faults) for fit in fits)
    ending = f"{failed} do not fit" if failed else "all fit"
    print(f"{len(fits)} cases for sm_{CAPABILITY} with Triton {TRITON}: {ending}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
