"""From a Hugging Face checkpoint to GGUF, with llama.cpp's own converter."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from sm70lab.errors import UsageError

from .llama_build import FOLDER
from .processes import run

CONVERTER = "convert_hf_to_gguf.py"


def find_source(server: Path, given: Path | None) -> Path:
    """llama.cpp's source folder (it holds the converter): ``given``, or near the server."""
    ups = server.resolve().parents
    near = [given] if given else [p for up in ups for p in (up / FOLDER / "llama.cpp", up)]
    for folder in near:
        if (folder / CONVERTER).is_file():
            return folder
    where = f"--source={given}" if given else f"--server={server}"
    raise UsageError(f"{where}: no {CONVERTER} there; give llama.cpp's source folder with --source")


def convert(source: Path, model: Path, folder: Path, kind: str, log: Path) -> Path:
    """Write ``model.gguf`` of element type ``kind`` into ``folder`` and return its path."""
    out, wide = folder / "model.gguf", folder / "float32"
    _widen(model, wide)
    child = Path(__file__).with_name("gguf_child.py")
    command: list[str | Path] = [sys.executable, child, source, wide]
    command += ["--outtype", kind, "--outfile", out]
    run(command, log, "the conversion to GGUF")
    shutil.rmtree(wide)
    return out


def _widen(model: Path, out: Path) -> None:
    """A float32 copy of the checkpoint.

    The converter computes 1 + w of the norms and exp(A_log) in the checkpoint's own type: in
    float16 that leaves a small norm weight three digits or fewer.
    """
    out.mkdir()
    try:
        for path in model.iterdir():
            if path.suffix == ".safetensors":
                tensors = {name: t.float().contiguous() for name, t in load_file(path).items()}
                save_file(tensors, out / path.name, metadata={"format": "pt"})
            elif path.is_file() and path.name != "config.json":
                shutil.copyfile(path, out / path.name)
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
        for part in (config, config.get("text_config", {})):
            part.pop("torch_dtype", None)
            part["dtype"] = "float32"
        (out / "config.json").write_text(json.dumps(config), encoding="utf-8")
    except (OSError, ValueError, SafetensorError) as error:
        raise UsageError(f"--model={model}: cannot be copied as float32 ({error})") from error
