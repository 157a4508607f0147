"""What makes two runs the same run: configuration, weights, code, and the machine they ran on."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from sm70lab.config import plain
from sm70lab.config_checks import RANDOM_MODELS
from sm70lab.config_checks_target import OPENAI, REACHING, SERVED, SERVER_HARDWARE, VLLM
from sm70lab.errors import UsageError
from sm70lab.schema import ExperimentConfig, ModelSpec, TargetConfig
from sm70lab.targets.vllm_code import server_code
from sm70lab.tracking.environment import cpu_name, gpus, package_versions

NOT_COUNTED = ("display", "tracking", "force")  # they change what is shown and kept, not what is run
COUNTED_PACKAGES = ("torch", "triton", "numpy", "tokenizers")
MODEL_FILES = ("*.json", "*.safetensors", "*.txt", "*.jinja")
WHOLE_BYTES = 1 << 30  # a larger file is sampled
SAMPLES = 256
SAMPLE_BYTES = 1 << 16


def fingerprint(config: ExperimentConfig, model: str) -> str:
    """SHA-256 over the resolved configuration, ``model_hash``, the code and the hardware.

    The model's path does not count: its hash stands in, so a moved folder is not run again.
    """
    resolved = plain(config)
    for key in NOT_COUNTED:
        del resolved[key]
    del resolved["model"]["path"]
    resolved["target"] = {key: value for key, value in resolved["target"].items() if key not in REACHING}
    versions = package_versions()
    parts = {
        "config": resolved,
        "model": model,
        "code": code_revision(),
        "packages": {name: versions.get(name) for name in COUNTED_PACKAGES},
        "hardware": hardware(config.target),
    }
    if config.target.name == VLLM:
        parts["server"] = server_code(config.target).revision
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def hardware(target: TargetConfig) -> str:
    """The device a run uses, by its name: numbers and speeds differ between devices."""
    if target.name == OPENAI:
        return SERVER_HARDWARE
    device, devices = target.device, gpus()
    if device == "cpu" or (device == "auto" and not devices):
        return cpu_name()
    index = int(device.split(":")[1]) if ":" in device else 0
    if index >= len(devices):
        found = f"{len(devices)} found" if devices else "no CUDA device here"
        raise UsageError(f"target.device={device}: {found}; use target.device=cpu or auto")
    return devices[index].name


def model_hash(model: ModelSpec, target: TargetConfig | None = None) -> str:
    """SHA-256 over a model folder's configuration, tokenizer and weights, or the random model's shape.

    Of a ``served`` model nothing is here to hash: the server's address and the model's name stand in.
    Files over 1 GiB count by size, change time, header and 256 samples, so a 50 GB checkpoint
    takes a second. Raises ``UsageError`` for a missing or unreadable folder.
    """
    digest = hashlib.sha256()
    if model.name == SERVED:
        place = [target.base_url, target.served_model] if target is not None else []
        digest.update(json.dumps(place).encode())
        return digest.hexdigest()
    folder = _model_folder(model)
    if folder is None:
        digest.update(json.dumps([plain(model.shape), model.seed, model.dtype.name], sort_keys=True).encode())
        return digest.hexdigest()
    try:
        for file in _model_files(folder):
            digest.update(f"{file.relative_to(folder).as_posix()}:{file.stat().st_size}:".encode())
            _add_file(digest, file)
    except OSError as error:
        raise UsageError(f"{folder}: cannot be read ({error.strerror})") from error
    return digest.hexdigest()


def code_revision() -> str:
    """SHA-256 over the package's own Python sources, the same in a checkout and in a wheel.

    Finer than a commit: an uncommitted edit counts, a commit that touches only the docs does not.
    """
    package = Path(__file__).resolve().parents[1]
    digest = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        digest.update(f"{file.relative_to(package).as_posix()}:".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _model_folder(model: ModelSpec) -> Path | None:
    if model.name in RANDOM_MODELS:
        return None
    if model.path is not None:
        folder = Path(model.path)
        if not folder.is_dir():
            raise UsageError(f"model.path={folder}: no such folder; give a Hugging Face model folder")
        return folder
    folder = Path(__file__).resolve().parents[1] / "models" / "web"
    if not (folder / "config.json").is_file():
        raise UsageError("model=web: not part of this installation; set model=/a/folder or model=tiny")
    return folder


def _model_files(folder: Path) -> list[Path]:
    """The folder's own files, and weights that its index names in folders below."""
    found = {file for pattern in MODEL_FILES for file in folder.glob(pattern)}
    try:
        index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
        named = {folder / name for name in index["weight_map"].values()}
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        named = set()  # no index, or one that loading will complain of
    return sorted(found | {file for file in named if file.is_file()})


def _add_file(digest: hashlib._Hash, file: Path) -> None:
    status = file.stat()
    with file.open("rb") as handle:
        if status.st_size <= WHOLE_BYTES:
            while block := handle.read(1 << 20):
                digest.update(block)
            return
        digest.update(f"{status.st_mtime_ns}:".encode())
        header = int.from_bytes(handle.read(8), "little")
        digest.update(handle.read(min(header, 1 << 26)))
        for index in range(SAMPLES):
            handle.seek(index * (status.st_size - SAMPLE_BYTES) // (SAMPLES - 1))
            digest.update(handle.read(SAMPLE_BYTES))
