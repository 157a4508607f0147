"""Reading packages: which files are taken, and which licences are accepted."""

from __future__ import annotations

import io
import json
import re
import subprocess
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PERMISSIVE = re.compile(
    r"^(0bsd|mit(-0)?|mit license|bsd(-[234]-clause.*|-style)?|bsl-1\.0|apache([- ]2(\.0)?)?"
    r"|apache-2\.0 with llvm-exception|apache license,? (version )?2\.0|isc|cc0-1\.0|unlicense"
    r"|wtfpl|zlib|psf(-2\.0)?|postgresql|python-2\.0|public[- ]domain|ofl-1\.1|blueoak-1\.0\.0"
    r"|expat|curl|x11|afl-2\.1)$"
)
SKIPPED_PATH = re.compile(r"(^|/)(node_modules|bower_components|_sources|coverage)/|[.-]rtl\.|\.map$", re.I)
MINIFIED = re.compile(r"[.-]min\.", re.I)
KINDS = {"css": "css", "html": "html", "htm": "html"}
MIN_BYTES, MAX_BYTES = 600, 400_000


@dataclass(frozen=True)
class Source:
    """One pinned package: `registry` is `npm` or `deb`; `licence` is declared for `deb` only."""

    registry: str
    name: str
    version: str
    licence: str
    heldout: bool

    @property
    def label(self) -> str:
        return f"{self.registry}:{self.name}@{self.version}"

    @property
    def filename(self) -> str:
        """Name of the package's archive in the cache folder."""
        stem = f"{self.name}@{self.version}".lstrip("@").replace("/", "+")
        return f"{self.registry}/{stem}.{'tgz' if self.registry == 'npm' else 'deb'}"


class BadInputError(ValueError):
    """Input that the command reports in one line."""


def read_sources(path: Path) -> list[Source]:
    """Sources of a list file: `npm NAME@VERSION` or `deb NAME=VERSION LICENCE`, `heldout` last."""
    sources: list[Source] = []
    for number, raw in enumerate(path.read_text().splitlines(), 1):
        words = raw.split("#")[0].split()
        if not words:
            continue
        heldout = words[-1] == "heldout"
        words = words[:-1] if heldout else words
        if words[0] == "npm" and len(words) == 2 and "@" in words[1][1:]:
            name, _, version = words[1].rpartition("@")
            sources.append(Source("npm", name, version, "", heldout))
        elif words[0] == "deb" and len(words) == 3 and "=" in words[1]:
            name, _, version = words[1].partition("=")
            sources.append(Source("deb", name, version, words[2], heldout))
        else:
            raise BadInputError(f"{path}:{number}: not a source: {raw!r}")
    return sources


def npm_licence(manifest: dict[str, object]) -> str:
    """The licence text of a package.json: new style, old object style or old list style."""
    value = manifest.get("license") or manifest.get("licenses") or ""
    items = value if isinstance(value, list) else [value]
    names = [str(item.get("type", "")) if isinstance(item, dict) else str(item) for item in items]
    return " OR ".join(name for name in names if name)


def is_permissive(licence: str) -> bool:
    """True where one alternative of the expression is a permissive licence on its own."""
    text = licence.strip().strip("()").lower()
    if not text:
        return False
    alternatives = re.split(r"\s+or\s+|,\s*|/", text)
    return any(
        all(PERMISSIVE.match(part.strip(" ()")) for part in re.split(r"\s+and\s+", option))
        for option in alternatives
    )


def _twins(path: str) -> set[str]:
    """Paths at which the readable form of a minified file may lie."""
    plain = MINIFIED.sub(".", path)
    return {plain, plain.replace("/min/", "/"), plain.replace(".css", ".pack.css")}


def _archive(path: Path) -> tarfile.TarFile:
    """The files of an npm tarball or a Debian package as one tar stream."""
    if path.suffix != ".deb":
        return tarfile.open(path)
    data = subprocess.run(["dpkg-deb", "--fsys-tarfile", str(path)], check=True, capture_output=True).stdout
    return tarfile.open(fileobj=io.BytesIO(data))


def read_files(source: Source, cache: Path) -> tuple[str, list[tuple[str, str, str]]]:
    """(licence, [(path, kind, raw text)]) of one package; no files where it is not permissive."""
    archive = cache / source.filename
    if not archive.exists():
        raise BadInputError(f"{archive} is missing; run the fetch command first")
    files: list[tuple[str, str, str]] = []
    licence = source.licence
    with _archive(archive) as tar:
        for member in tar:
            if not member.isfile():
                continue
            top = member.name.split("/", 1)[-1]
            if source.registry == "npm" and top == "package.json":
                handle = tar.extractfile(member)
                licence = npm_licence(json.loads(handle.read())) if handle else ""
            kind = KINDS.get(member.name.rsplit(".", 1)[-1].lower())
            if kind is None or SKIPPED_PATH.search(member.name):
                continue
            if MIN_BYTES <= member.size <= MAX_BYTES:
                handle = tar.extractfile(member)
                if handle:
                    text = handle.read().decode("utf-8", "replace")
                    files.append((member.name.removeprefix("package/"), kind, text))
    if not is_permissive(licence):
        return licence, []
    # A minified file counts only where its package ships no readable twin.
    names = {path for path, _, _ in files}
    return licence, [f for f in files if not MINIFIED.search(f[0]) or not _twins(f[0]) & names]


def fetch(sources: list[Source], cache: Path) -> Iterator[str]:
    """Download what the cache lacks with the registries' ordinary clients; yields failures."""
    for source in sources:
        target = cache / source.filename
        if target.exists():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        work = target.parent / "incoming"
        work.mkdir(exist_ok=True)
        if source.registry == "npm":
            command = ["npm", "pack", "--silent", "--ignore-scripts"]
            command.append(f"{source.name}@{source.version}")
        else:
            command = ["apt-get", "download", "-q", f"{source.name}={source.version}"]
        done = subprocess.run(command, cwd=work, capture_output=True, text=True)
        got = sorted(work.glob("*.tgz")) + sorted(work.glob("*.deb"))
        if done.returncode or not got:
            yield f"{source.label}: {done.stderr.strip().splitlines()[-1:]}"
            continue
        got[0].rename(target)
