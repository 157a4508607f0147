"""Build the corpus: fetch pinned packages, clean, remove duplicates, split by package, bundle.

    python -m recipes.web_model.corpus fetch --cache CACHE
    python -m recipes.web_model.corpus clean --cache CACHE
    python -m recipes.web_model.corpus build --cache CACHE --out OUT
    python -m recipes.web_model.corpus sample --out OUT

`fetch` downloads archives, `clean` writes one cleaned JSONL a package into the cache, and `build`
writes OUT/train.jsonl, OUT/heldout.jsonl (bundles: {"source", "kind", "chat", "text"}) and
OUT/manifest.tsv. `sample` takes this folder's small heldout.jsonl from the held-out files.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from .clean import clean
from .prompts import chat_prompt
from .sources import BadInputError, Source, fetch, read_files, read_sources

HERE = Path(__file__).parent
SHINGLE = 4
DUPLICATE_SHARE = {"html": 0.65, "css": 0.6}
CLEAN_CAP = {"npm": 8_000_000, "deb": 4_000_000}
SOURCE_CAP = {"npm": 5_000_000, "deb": 1_200_000}
BUNDLE_CHARS = 400_000
CHAT_CHARS = (20_000, 60_000)
CHAT_SHARE = 0.2
# Chat documents are about a tenth as long as raw ones: this many starts give CHAT_SHARE of text.
CHAT_STARTS = CHAT_SHARE * 10 / (CHAT_SHARE * 10 + (1 - CHAT_SHARE))

File = tuple[str, str, str]


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def clean_source(source: Source, cache: Path) -> tuple[str, str, int]:
    """Clean one package into CACHE/clean, once; returns (label, licence, cleaned bytes)."""
    target = cache / "clean" / (Path(source.filename).name + ".jsonl")
    if target.exists():
        licence, done = load_clean(source, cache)
        return source.label, licence, sum(len(text) for _, _, text in done)
    licence, files = read_files(source, cache)
    # Files come in hash order, so that the cap takes a spread of a large package.
    files.sort(key=lambda item: _hash(item[0]))
    seen: set[int] = set()
    kept: list[File] = []
    size = 0
    for path, kind, raw in files:
        key = _hash(raw)
        if key in seen:
            continue
        seen.add(key)
        text = clean(raw, kind)
        if text is None or _hash(text) in seen:
            continue
        seen.add(_hash(text))
        kept.append((path, kind, text))
        size += len(text)
        if size > CLEAN_CAP[source.registry]:
            break
    kept.sort()
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text("".join(json.dumps([licence, *item]) + "\n" for item in kept))
    return source.label, licence, size


class Deduplicator:
    """Drops a text when too many of its 4-line shingles were seen in earlier texts."""

    def __init__(self) -> None:
        self.seen: set[int] = set()

    def is_new(self, text: str, limit: float) -> bool:
        """True, and remember the text, where at most `limit` of its shingles were seen."""
        lines = [line.strip() for line in text.split("\n") if len(line.strip()) > 3]
        shingles = {_hash("\n".join(lines[i : i + SHINGLE])) for i in range(max(1, len(lines) - 3))}
        if sum(1 for s in shingles if s in self.seen) > limit * len(shingles):
            return False
        self.seen |= shingles
        return True


def load_clean(source: Source, cache: Path) -> tuple[str, list[File]]:
    """(licence, files) that the `clean` command wrote for one package."""
    path = cache / "clean" / (Path(source.filename).name + ".jsonl")
    if not path.exists():
        raise BadInputError(f"{path} is missing; run the clean command first")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return (rows[0][0] if rows else ""), [(r[1], r[2], r[3]) for r in rows]


def banner(path: str, kind: str, rng: random.Random) -> str:
    """A comment that names the next file, in one of several styles, or nothing."""
    name = path.rsplit("/", 1)[-1]
    if kind == "html":
        return rng.choice(["", "", f"<!-- {name} -->\n"])
    styles = (
        f"/* {name} */\n",
        f"/* ----- {name} ----- */\n",
        f"/* ========\n   {name}\n   ======== */\n",
        f"/*! {path} */\n",
        f"/**\n * {name}\n */\n",
        "",
    )
    return rng.choice(styles)


def bundles(files: Iterable[tuple[Source, File]], rng: random.Random) -> Iterable[dict[str, object]]:
    """Join files of one kind, package after package, into long documents of raw text or chat.

    Long, because an end token is only learned at a document's end and the model must go on for
    thousands of tokens; chat documents are shorter, so that their prompts are seen often.
    """
    groups: dict[str, list[tuple[Source, File]]] = {"html": [], "css": []}
    for item in files:
        groups[item[1][1]].append(item)
    for kind, items in groups.items():
        parts: list[str] = []
        chat = False
        size, limit, first = 0, BUNDLE_CHARS, ""
        for index, (source, (path, _, text)) in enumerate(items):
            if not parts:
                chat = rng.random() < CHAT_STARTS
                limit = rng.randint(*CHAT_CHARS) if chat else BUNDLE_CHARS
                first = text
            parts.append(banner(path, kind, rng) + text)
            size += len(parts[-1])
            last = index == len(items) - 1
            package_ends = last or items[index + 1][0] != source
            if last or size >= limit * (1 if package_ends or chat else 2):
                prompt = chat_prompt(first, kind, rng) if chat else ""
                joined = "\n".join(parts)
                yield {"source": source.label, "kind": kind, "chat": prompt, "text": joined}
                parts, size = [], 0


def build(sources: list[Source], cache: Path, out: Path, seed: int = 1) -> None:
    """Deduplicate across packages (training packages first), bundle and write the manifest."""
    rng = random.Random(seed)
    dedup = Deduplicator()
    manifest: list[dict[str, object]] = []
    out.mkdir(parents=True, exist_ok=True)
    for split in ("train", "heldout"):
        chosen: list[tuple[Source, File]] = []
        split_sources = [s for s in sources if s.heldout == (split == "heldout")]
        rng.shuffle(split_sources)
        for source in split_sources:
            licence, files = load_clean(source, cache)
            files.sort(key=lambda item: _hash(item[0]))
            kept: list[File] = []
            size: Counter[str] = Counter()
            for item in files:
                if sum(size.values()) >= SOURCE_CAP[source.registry]:
                    break
                if dedup.is_new(item[2], DUPLICATE_SHARE[item[1]]):
                    kept.append(item)
                    size[item[1]] += len(item[2])
            chosen += [(source, item) for item in sorted(kept)]
            if kept:
                manifest.append(
                    {
                        "source": source.label,
                        "licence": licence,
                        "split": split,
                        "files": len(kept),
                        "html_bytes": size["html"],
                        "css_bytes": size["css"],
                    }
                )
        if split == "heldout":
            with (out / "heldout_files.jsonl").open("w") as handle:
                for source, (_, kind, text) in chosen:
                    row = {"source": source.label, "kind": kind, "text": text}
                    handle.write(json.dumps(row) + "\n")
        with (out / f"{split}.jsonl").open("w") as handle:
            for bundle in bundles(chosen, rng):
                handle.write(json.dumps(bundle) + "\n")
        totals = Counter[str]()
        for row in manifest:
            if row["split"] == split:
                totals["packages"] += 1
                totals["html"] += int(str(row["html_bytes"]))
                totals["css"] += int(str(row["css_bytes"]))
        print(split, dict(totals))
    columns = ("source", "licence", "split", "files", "html_bytes", "css_bytes")
    table = sorted("\t".join(str(row[column]) for column in columns) for row in manifest)
    (out / "manifest.tsv").write_text("\n".join(["\t".join(columns), *table]) + "\n")


def sample(out: Path, target: Path, piece: int = 6000, total: int = 280_000) -> None:
    """Write pieces of held-out bundles, spread evenly over sources and kinds."""
    groups: dict[tuple[str, str], list[str]] = {}
    for line in (out / "heldout_files.jsonl").read_text().splitlines():
        row = json.loads(line)
        groups.setdefault((row["kind"], row["source"]), []).append(row["text"][:piece])
    rng = random.Random(1)
    rows: list[dict[str, str]] = []
    size = Counter[str]()
    for texts in groups.values():
        rng.shuffle(texts)
    while any(groups.values()) and sum(size.values()) < total:
        for (kind, source), texts in groups.items():
            if texts and size[kind] < total / 2 and sum(size.values()) < total:
                rows.append({"source": source, "kind": kind, "text": texts.pop()})
                size[kind] += len(rows[-1]["text"])
        if all(size[kind] >= total / 2 or not texts for (kind, _), texts in groups.items()):
            break
    target.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(target, dict(size))


def main() -> int:
    parser = argparse.ArgumentParser(description="Build the HTML and CSS corpus.")
    parser.add_argument("step", choices=("fetch", "clean", "build", "sample"))
    parser.add_argument("--cache", type=Path, default=Path("cache"), help="folder of archives")
    parser.add_argument("--out", type=Path, default=Path("corpus"))
    parser.add_argument("--sources", type=Path, default=HERE / "sources.txt")
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    try:
        sources = read_sources(args.sources)
        if args.step == "fetch":
            for failure in fetch(sources, args.cache):
                print("not fetched:", failure, file=sys.stderr)
        elif args.step == "clean":
            with ProcessPoolExecutor(args.workers) as pool:
                jobs = [pool.submit(clean_source, source, args.cache) for source in sources]
                for job in jobs:
                    print(*job.result(), sep="\t", flush=True)
        elif args.step == "sample":
            sample(args.out, HERE / "heldout.jsonl")
        else:
            build(sources, args.cache, args.out)
    except (BadInputError, OSError) as error:
        print(f"corpus: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
