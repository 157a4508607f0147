"""The part of ``sm70lab doctor`` that loads torch: run by it in a process of its own.

Prints one JSON object as its last line. What cannot be loaded is reported with the reason.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import warnings
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from sm70lab.config import compose, conf_dir
from sm70lab.errors import UsageError

PTX = ".version 6.0\n.target sm_{0}\n.address_size 64\n.visible .entry nothing() {{ ret; }}\n"


def main(overrides: list[str], config_dir: Path | None) -> None:
    """Try torch, each GPU, Triton and every route; print what was found."""
    found: dict[str, Any] = {"torch": _torch()}
    if not found["torch"]["reason"]:
        found["triton"] = _triton({70} | {device["code_wanted"] for device in found["torch"]["devices"]})
        kept = [override for override in overrides if override.partition("=")[0] != "route"]
        folders = [conf_dir(), *([config_dir] if config_dir else [])]
        names = sorted({path.stem for folder in folders for path in (folder / "route").glob("*.yaml")})
        devices = found["torch"]["devices"]
        found["route"] = _route(overrides, config_dir, devices)
        found["routes"] = [_route([*kept, f"route={name}"], config_dir, devices) for name in names]
    print(json.dumps(found))


def first_line(error: BaseException) -> str:
    """An error in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def carries(architectures: list[str], capability: tuple[int, int]) -> str | None:
    """Which of a build's architectures ('sm_80', 'compute_90') a device of this capability can run.

    Machine code runs on later cards of the same major number; PTX (compute_) on every later card.
    """
    wanted = capability[0] * 10 + capability[1]
    best = None
    for name in architectures:
        kind, _, number = name.partition("_")
        if not number.isdecimal() or int(number) > wanted:
            continue  # sm_90a and the like run on that very card alone
        if kind == "compute" or int(number) // 10 == capability[0]:
            best = name
    return best


def _torch() -> dict[str, Any]:
    nothing: dict[str, Any] = {
        "version": None,
        "cuda": None,
        "architectures": [],
        "devices": [],
        "no_gpu": None,
    }
    try:
        installed = version("torch")
    except PackageNotFoundError:
        return nothing | {"reason": "torch is not installed; pip install 'torch>=2.10'"}
    try:
        import torch
    except Exception as error:  # a damaged installation raises whatever its first broken part raises
        return nothing | {
            "version": installed,
            "reason": f"torch {installed} cannot be imported ({first_line(error)})",
        }
    flags = getattr(torch._C, "_cuda_getArchFlags", None)  # get_arch_list() is empty without a device
    architectures = (flags() or "").split() if flags else []
    found = nothing | {"version": torch.__version__, "cuda": torch.version.cuda, "reason": None}
    found |= {"architectures": architectures, "no_gpu": _no_gpu(torch)}
    if not found["no_gpu"]:
        found["devices"] = [_device(torch, i, architectures) for i in range(torch.cuda.device_count())]
    return found


def _no_gpu(torch: Any) -> str | None:
    """Why torch uses no GPU here; None where it can."""
    if torch.version.cuda is None:
        return "a build without CUDA"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            torch.cuda.init()
        except Exception as error:
            return first_line(error)
    return None if torch.cuda.is_available() else "it sees no GPU"


def _device(torch: Any, index: int, architectures: list[str]) -> dict[str, Any]:
    capability = torch.cuda.get_device_capability(index)
    code = carries(architectures, capability)
    number = capability[0] * 10 + capability[1]
    reason = None if code else f"this torch has no code for sm_{number}: see the line for a V100"
    if code:
        try:
            if float((torch.ones(2, device=f"cuda:{index}") + 1).sum()) != 4:
                reason = "1 + 1 is not 2 on it"
        except Exception as error:
            reason = first_line(error)
    name = torch.cuda.get_device_name(index)
    return {"index": index, "name": name, "code": code, "code_wanted": number, "reason": reason}


def _triton(numbers: set[int]) -> dict[str, Any]:
    """Triton's version, and whether its ptxas makes code for these architectures."""
    nothing: dict[str, Any] = {"version": None, "ptxas": None, "assembles": {}}
    try:
        found = version("triton")
    except PackageNotFoundError:
        return nothing | {"reason": "Triton is not installed; the GPU kernels need it"}
    try:
        from triton import knobs

        ptxas = knobs.nvidia.ptxas
        able = {f"sm_{number}": _assembles(ptxas.path, number) for number in sorted(numbers)}
        return {"version": found, "ptxas": ptxas.version, "assembles": able, "reason": None}
    except Exception as error:
        return nothing | {"version": found, "reason": f"Triton {found} does not work ({first_line(error)})"}


def _assembles(ptxas: str, number: int) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "nothing.ptx")
        source.write_text(PTX.format(number), encoding="utf-8")
        command = [ptxas, f"-arch=sm_{number}", str(source), "-o", f"{source}.cubin"]
        return subprocess.run(command, capture_output=True, timeout=60).returncode == 0


def _route(overrides: list[str], config_dir: Path | None, devices: list[dict[str, Any]]) -> dict[str, Any]:
    """Whether the engine accepts a configuration here, by asking it."""
    named = next((o.partition("=")[2] for o in reversed(overrides) if o.startswith("route=")), None)
    try:
        config = compose(overrides, config_dir)
        named = config.route.name
        from sm70lab.targets.engine import EngineTarget

        device = EngineTarget(config).device
        broken = {f"cuda:{d['index']}": d["reason"] for d in devices if d["reason"]}
        place = f"cuda:{device.index or 0}" if device.type == "cuda" else device.type
        reason = f"{place}: {broken[place]}; use target.device=cpu" if place in broken else None
        return {"name": named, "device": place, "reason": reason}
    except UsageError as error:
        return {"name": named, "device": None, "reason": " ".join(str(error).split())}
    except Exception as error:
        return {"name": named, "device": None, "reason": first_line(error)}


if __name__ == "__main__":
    settings, folder = json.loads(sys.argv[1])
    main(settings, Path(folder) if folder else None)
