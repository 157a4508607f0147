"""Collect real files of many kinds to calibrate the text-shape gates on.

    python -m recipes.calibration.collect --folder FOLDER [--per-kind 300] [--no-download]

Reads files that packages installed (Debian's under /usr, Python's site-packages) and, unless
``--no-download``, some named packages fetched with apt-get, npm and pip into FOLDER/packages, where they
are unpacked and nothing of them runs. Writes FOLDER/files.parquet, one row a file: kind, name, half,
text. A text is the file's first 24,000 characters: about what a model writes in 6,000 tokens. Nothing
is committed.

Which files are taken depends on the machine's packages alone: of each kind those with the smallest
hash of their name, at most 80 from one package's folder. A hash of the text decides the half.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table

from recipes.calibration.kinds import DEBIAN, KINDS, NPM, PYPI

LIMIT = 24_000  # characters of a file that are kept
SHORTEST = 600
PER_PACKAGE = 80
LARGEST = 8_000_000  # bytes; a larger file is not read
ROOTS = ("/usr/share", "/usr/lib", "/usr/include", "/usr/bin", "/etc", "/var/log")
TUNING, HELD_OUT = "tuning", "held-out"
FETCH = {
    "apt": (DEBIAN, ["apt-get", "download"]),
    "npm": (NPM, ["npm", "pack", "--silent"]),
    "pip": (
        PYPI,
        [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"],
    ),
}
Row = tuple[str, str, str, str]  # kind, name, half, text


def download(packages: Path) -> Iterator[str]:
    """Fetch and unpack what is not there yet; yields a line for each package that could not be had."""
    for source, (names, command) in FETCH.items():
        if shutil.which(command[0]) is None:
            yield f"{source}: not on this machine; its packages are left out"
            continue
        for name in names:
            into = packages / source / name
            if (into / "done").exists():
                continue
            into.mkdir(parents=True, exist_ok=True)
            result = subprocess.run([*command, name], cwd=into, capture_output=True, text=True, timeout=300)
            if result.returncode:
                last = (result.stderr.strip().splitlines() or ["no message"])[-1]
                yield f"{name}: {source} could not fetch it: {last}"
                continue
            for archive in sorted(into.iterdir()):
                _unpack(archive, into)
            (into / "done").touch()


def _unpack(archive: Path, into: Path) -> None:
    if archive.suffix == ".deb":
        subprocess.run(["dpkg-deb", "-x", str(archive), str(into)], check=True)
    elif archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            wheel.extractall(into)
    else:
        with tarfile.open(archive) as tar:
            tar.extractall(into, filter="data")
    archive.unlink()


def collect(roots: Sequence[Path], per_kind: int) -> Iterator[Row]:
    """The chosen files, kind by kind."""
    names = sorted(_names(roots), key=lambda entry: hashlib.sha256(entry[1].encode()).digest())
    taken: Counter[str] = Counter()
    from_package: Counter[tuple[str, str]] = Counter()
    texts: set[bytes] = set()
    for path, name in names:
        kinds = [kind for kind in KINDS if kind.may_hold(name) and taken[kind.name] < per_kind]
        package = "/".join(name.split("/")[1:-1][:2])
        if not kinds or all(from_package[kind.name, package] >= PER_PACKAGE for kind in kinds):
            continue
        text = _read(path)
        if text is None:
            continue
        kind = next((kind for kind in KINDS if kind.may_hold(name) and kind.fits(text)), None)
        digest = hashlib.sha256(text.encode()).digest()
        if kind is None or digest in texts or taken[kind.name] >= per_kind:
            continue
        if from_package[kind.name, package] >= PER_PACKAGE:
            continue
        texts.add(digest)
        taken[kind.name] += 1
        from_package[kind.name, package] += 1
        yield kind.name, name, HELD_OUT if digest[0] & 1 else TUNING, text


def _names(roots: Sequence[Path]) -> Iterator[tuple[Path, str]]:
    """Every file with the name it is known by: its root's last part and its place in there."""
    for root in roots:
        for folder, folders, files in os.walk(root):
            folders.sort()
            within = Path(folder).relative_to(root)
            if root.name == "lib" and within.parts[:1] == ("node_modules",):
                within = Path(*within.parts[1:])
            for file in files:
                path = Path(folder) / file
                if not path.is_symlink():
                    yield path, f"{root.name}/{(within / file).as_posix()}"


def _read(path: Path) -> str | None:
    """The beginning of a text file; None for what is no UTF-8 text, too short or unreadable."""
    try:
        size = path.stat().st_size if path.is_file() else 0
        held = 4 * size if path.suffix == ".gz" else size  # about: not worth unpacking to see
        if held < SHORTEST or size > LARGEST:
            return None
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            data = file.read(4 * LIMIT + 4)
    except (OSError, EOFError, gzip.BadGzipFile):
        return None
    if b"\0" in data:
        return None
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        if error.start < len(data) - 4 or len(data) < 4 * LIMIT:  # else only the cut fell inside a character
            return None
        text = data[: error.start].decode("utf-8")
    text = text.removeprefix("\ufeff").replace("\r\n", "\n")[:LIMIT]
    return text if len(text) >= SHORTEST else None


def _print(rows: Sequence[Row], out: Path) -> None:
    table = Table("kind", "files", "tuning", "held out", "characters (median)")
    for kind in dict.fromkeys(kind.name for kind in KINDS):
        mine = [row for row in rows if row[0] == kind]
        lengths = sorted(len(row[3]) for row in mine)
        tuning = sum(row[2] == TUNING for row in mine)
        middle = f"{lengths[len(lengths) // 2]:,}" if lengths else ""
        table.add_row(kind, str(len(mine)), str(tuning), str(len(mine) - tuning), middle)
    Console().print(table)
    print(f"{len(rows):,} files of {len({row[0] for row in rows})} kinds: {out}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True, help="scratch folder outside the checkout")
    parser.add_argument("--per-kind", type=int, default=300)
    parser.add_argument("--no-download", action="store_true", help="only what is installed")
    arguments = parser.parse_args(argv)
    folder: Path = arguments.folder
    packages = folder / "packages"
    packages.mkdir(parents=True, exist_ok=True)
    if not arguments.no_download:
        for line in download(packages):
            print(line, file=sys.stderr)
    fetched = [packages / source for source in FETCH]
    roots = [*map(Path, ROOTS), Path(sysconfig.get_paths()["purelib"]), *fetched]
    rows = list(collect(roots, arguments.per_kind))
    columns = zip(*rows, strict=True) if rows else ((), (), (), ())
    table = pa.table(dict(zip(("kind", "name", "half", "text"), map(list, columns), strict=True)))
    pq.write_table(table, folder / "files.parquet", compression="zstd")
    _print(rows, folder / "files.parquet")
    return 0 if rows else 1


if __name__ == "__main__":
    sys.exit(main())
