"""Files that are whole or absent: temporary name, fsync, rename."""

from __future__ import annotations

import errno
import json
import math
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sm70lab.errors import UsageError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)


def write_with(path: Path, write: Callable[[Path], None]) -> None:
    """Let ``write`` fill a temporary file beside ``path``, then put it in place.

    Raises ``UsageError`` where the disk is full or the folder cannot be written.
    """
    temporary: Path | None = None
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
        os.close(handle)
        temporary = Path(name)
        write(temporary)
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(path)
        temporary = None
    except OSError as error:
        raise disk_error(path, error) from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text. A lone surrogate is replaced, so that no output can break its record."""
    data = text.encode("utf-8", errors="replace")

    def write(temporary: Path) -> None:
        with temporary.open("wb") as handle:
            handle.write(data)

    write_with(path, write)


def write_json(path: Path, value: Any) -> None:
    """Write JSON that any parser reads: numbers that are not finite become null."""
    write_text(path, json.dumps(finite(value), ensure_ascii=False, indent=1) + "\n")


def finite(value: Any) -> Any:
    """``value`` as strict JSON: tuples as lists, numpy scalars as numbers, NaN and ±inf as None."""
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if hasattr(value, "tolist"):  # numpy scalar or array
        return finite(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def disk_error(path: Path, error: OSError) -> UsageError:
    """The one line a person needs when a record cannot be written."""
    if error.errno in FULL:
        return UsageError(f"{path.parent}: the disk is full; free space there or set tracking.runs_dir")
    if error.errno in DENIED:
        return UsageError(f"{path.parent}: cannot be written; set tracking.runs_dir to a folder of yours")
    return UsageError(f"{path}: cannot be written ({error.strerror or error}); see tracking.runs_dir")


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
