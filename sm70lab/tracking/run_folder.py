"""One run's folder: claimed before the model loads, filled as the run goes on, ``DONE`` last."""

from __future__ import annotations

import json
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sm70lab.addresses import without_password
from sm70lab.config import plain
from sm70lab.errors import UsageError
from sm70lab.raw_text import dump_yaml
from sm70lab.schema import ExperimentConfig, Generation, Speculation, TokenScores
from sm70lab.tracking import environment, tables
from sm70lab.tracking.atomic import disk_error, write_json, write_text
from sm70lab.tracking.fingerprint import code_revision
from sm70lab.tracking.marker import live_owner, now, this_process
from sm70lab.tracking.result import incomplete, token_hash

DONE = "DONE"
RUNNING = "RUNNING"
INTERRUPTED = "INTERRUPTED"
MLFLOW_PENDING = "MLFLOW_PENDING"
RESULT = "result.json"
SUMMARY = "summary.md"
CONFIG = "config.yaml"
ENVIRONMENT = "environment.json"
GENERATIONS = "generations"
FIGURES = "figures"
SERVER_LOG = "server.log"  # of a server that the run started


class RunFolder:
    """The files of one run. Every write is whole or absent and raises ``UsageError`` where it fails."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        try:
            return str(self.path.relative_to(Path.cwd()))
        except ValueError:
            return str(self.path)

    @property
    def full_name(self) -> str:
        """``experiment/folder``."""
        return f"{self.path.parent.name}/{self.path.name}"

    # ------------------------------------------------------------------ life

    @staticmethod
    def claim(config: ExperimentConfig, fingerprint: str, weights: str = "") -> RunFolder:
        """Make a new folder for this run, with ``RUNNING``, the configuration and the environment.

        ``weights`` is the model's hash.

        The folder appears under its name with ``RUNNING`` already in it, so two processes cannot
        take the same one. Raises ``UsageError`` where it cannot be written.
        """
        parent = experiment_folder(config)
        staging: Path | None = None
        try:
            parent.mkdir(parents=True, exist_ok=True)
            staging = Path(tempfile.mkdtemp(prefix=".new-", dir=parent))
            staging.chmod(0o755)
        except FileExistsError as error:
            raise _in_the_way(parent) from error
        except OSError as error:
            raise disk_error(parent / "run", error) from error
        try:
            write_json(staging / RUNNING, this_process())
            write_text(staging / CONFIG, _config_yaml(config))
            identity = {"uid": uuid.uuid4().hex, "started": now()}
            identity |= {"code_revision": code_revision(), "model_hash": weights}
            write_json(staging / ENVIRONMENT, {**identity, **environment.describe()})
            for name in (GENERATIONS, FIGURES):
                (staging / name).mkdir()
            return RunFolder(_rename_to_free(staging, parent, folder_name(config, fingerprint)))
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise

    def finish(self) -> None:
        """The record is whole: ``DONE`` comes, then ``RUNNING`` goes, so one of them is always there."""
        if not self.done:
            write_text(self._marker(DONE), now() + "\n")
        self._marker(RUNNING).unlink(missing_ok=True)

    def interrupt(self, what: str, traceback: str | None = None) -> None:
        """The run ended early: say by what and when, keep what is there."""
        if traceback is not None:
            write_text(self.path / "error.txt", without_password(traceback))
        write_json(self._marker(INTERRUPTED), {"what": without_password(what), "when": now()})
        self._marker(RUNNING).unlink(missing_ok=True)

    def discard(self) -> None:
        """Remove a folder in which nothing was generated, and the folders above it that it alone was in."""
        shutil.rmtree(self.path, ignore_errors=True)
        with suppress(OSError):  # not empty, or not ours to remove
            self.path.parent.rmdir()
            self.path.parent.parent.rmdir()

    def interruption(self) -> dict[str, str]:
        """What ended the run early, and when; empty for a run that was not."""
        try:
            value: dict[str, str] = json.loads(self._marker(INTERRUPTED).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return value

    @property
    def running(self) -> Path:
        """The marker of a process at work."""
        return self._marker(RUNNING)

    @property
    def done(self) -> bool:
        return self._marker(DONE).exists()

    def owner(self) -> dict[str, Any] | None:
        """The live process that writes here, or None; see ``marker.live_owner``."""
        return live_owner(self.running)

    def close_dead(self) -> bool:
        """Close a run whose process is gone. True where there was one.

        A whole result makes it a finished run (it died while MLflow was told), else an interrupted one.
        """
        if not self.running.exists() or self.owner() is not None:
            return False
        if self.done or (self.result() or {}).get("status") == "finished":
            self.finish()
        else:
            self.interrupt("killed: its process is gone")
        return True

    # --------------------------------------------------------------- contents

    def save_generation(self, generation: Generation) -> None:
        """The text as it is (a server's reasoning between think markers), and the token ids with their end
        and seed; of a server's also what was sent, and what came of it."""
        base = self.path / GENERATIONS / generation.key
        write_text(base.with_name(base.name + ".txt"), generation.full_text)
        record = {
            "prompt": generation.prompt.name,
            "repeat": generation.repeat,
            "seed": generation.seed,
            "finish_reason": generation.finish_reason,
            "prompt_token_ids": list(generation.prompt.token_ids),
            "token_ids": list(generation.token_ids),
            "note": generation.note,
        }
        if generation.request:
            record |= {"reasoning": generation.reasoning, "counted_tokens": generation.counted_tokens}
            record |= {"request": generation.request, "speculation": _plain(generation.speculation)}
        write_text(base.with_name(base.name + ".tokens.json"), json.dumps(record, ensure_ascii=False) + "\n")

    def save_texts(self, files: dict[str, str]) -> None:
        """Text files of the target's own: name → content."""
        for name, text in files.items():
            write_text(self._marker(name), text)

    def save_tables(self, generations: Sequence[Generation], scores: dict[str, TokenScores]) -> None:
        """``rounds.parquet`` (one row a round), of a server's run ``arrivals.parquet`` (one row a chunk), and
        with scores ``audit.parquet`` (one row a token)."""
        tables.write_rounds(self.path / tables.ROUNDS, generations)
        if any(generation.arrivals for generation in generations):
            tables.write_arrivals(self.path / tables.ARRIVALS, generations)
        if scores:
            tables.write_audit(self.path / tables.AUDIT, generations, scores)

    def save_result(self, result: dict[str, Any], summary: str) -> None:
        """``summary.md``, then ``result.json``: once it is there, the record is whole."""
        write_text(self.path / SUMMARY, summary)
        write_json(self.path / RESULT, result)

    def result(self) -> dict[str, Any] | None:
        """The recorded result, or None where there is none that is whole."""
        try:
            value = json.loads((self.path / RESULT).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return None
        return value if incomplete(value) is None else None

    def token_ids(self) -> dict[str, list[int]]:
        """Generation key → token ids. Raises ``UsageError`` for files that do not fit the result."""
        found: dict[str, list[int]] = {}
        for file in sorted((self.path / GENERATIONS).glob("*.tokens.json")):
            key = file.name.removesuffix(".tokens.json")
            try:
                found[key] = [int(i) for i in json.loads(file.read_text(encoding="utf-8"))["token_ids"]]
            except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
                raise UsageError(f"{file}: damaged ({error})") from error
        for generation in (self.result() or {}).get("generations", []):
            key, recorded = generation["key"], generation["token_ids_sha256"]
            if key not in found or token_hash(found[key]) != recorded:
                what = "damaged (not the tokens of result.json)" if key in found else "missing"
                raise UsageError(f"{self.path / GENERATIONS / key}.tokens.json: {what}")
        return found

    def texts(self) -> dict[str, str]:
        """Generation key → its text as recorded."""
        files = sorted((self.path / GENERATIONS).glob("*.txt"))
        return {f.name.removesuffix(".txt"): f.read_text(encoding="utf-8", errors="replace") for f in files}

    # ----------------------------------------------------------------- MLflow

    @property
    def pending(self) -> bool:
        """Whether MLflow has yet to get this run."""
        return self._marker(MLFLOW_PENDING).exists()

    def set_pending(self, reason: str) -> None:
        """Leave word that MLflow has yet to get this run."""
        write_json(self._marker(MLFLOW_PENDING), {"reason": without_password(reason), "since": now()})

    def clear_pending(self) -> None:
        """MLflow has this run."""
        self._marker(MLFLOW_PENDING).unlink(missing_ok=True)

    def _marker(self, name: str) -> Path:
        return self.path / name


def _plain(speculation: Speculation | None) -> dict[str, Any] | None:
    return None if speculation is None else asdict(speculation)


def experiment_folder(config: ExperimentConfig) -> Path:
    """``runs_dir/<experiment>``."""
    return Path(config.tracking.runs_dir) / config.name


def folder_name(config: ExperimentConfig, fingerprint: str) -> str:
    """``<route>-s<seed>-<fingerprint8>``."""
    return f"{config.route.name}-s{config.seed}-{fingerprint[:8]}"


def same_runs(config: ExperimentConfig, fingerprint: str) -> list[RunFolder]:
    """Folders that carry this fingerprint's name, oldest number first."""
    name = folder_name(config, fingerprint)
    parent = experiment_folder(config)
    numbered = {1: parent / name} | {
        int(path.name.removeprefix(f"{name}-")): path
        for path in parent.glob(f"{name}-*")
        if path.name.removeprefix(f"{name}-").isdigit()
    }
    return [RunFolder(path) for _, path in sorted(numbered.items()) if path.is_dir()]


def finished_run(config: ExperimentConfig, fingerprint: str) -> RunFolder | None:
    """The earliest finished run of exactly this fingerprint."""
    for folder in same_runs(config, fingerprint):
        result = folder.result() or {}
        if folder.done and result.get("fingerprint") == fingerprint and result.get("verdict"):
            return folder
    return None


def dead_runs(runs_dir: Path) -> list[RunFolder]:
    """Runs under ``runs_dir`` whose process is gone, closed by this call."""
    folders = [RunFolder(path.parent) for path in sorted(runs_dir.glob(f"*/*/{RUNNING}"))]
    return [folder for folder in folders if not folder.path.name.startswith(".") and folder.close_dead()]


def all_runs(runs_dir: Path) -> Iterator[RunFolder]:
    """Every run folder under ``runs_dir``, in order of name."""
    for path in sorted(runs_dir.glob(f"*/*/{CONFIG}")):
        if not path.parent.name.startswith("."):
            yield RunFolder(path.parent)


def _rename_to_free(staging: Path, parent: Path, name: str) -> Path:
    number = 1
    while True:
        path = parent / (name if number == 1 else f"{name}-{number}")
        if not path.exists():  # a rename onto a claimed folder fails too: it is not empty
            try:
                return staging.rename(path)
            except OSError as error:
                if not path.exists():
                    raise disk_error(path, error) from error
        number += 1


def _in_the_way(folder: Path) -> UsageError:
    """What stands where ``folder`` or a folder above it should be."""
    found = next(path for path in (folder, *folder.parents) if path.is_symlink() or path.exists())
    if found.is_symlink() and not found.exists():
        target = found.readlink()
        return UsageError(
            f"{found}: a link to {target}, which is not there; make it, or set tracking.runs_dir"
        )
    return UsageError(f"{found}: a file is in the way; set tracking.runs_dir or name")


def _config_yaml(config: ExperimentConfig) -> str:
    resolved = plain(config)
    if resolved["tracking"]["uri"]:
        resolved["tracking"]["uri"] = without_password(resolved["tracking"]["uri"])
    return dump_yaml(resolved)
