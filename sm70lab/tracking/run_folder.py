"""One run's folder: claimed before the model loads, filled as the run goes on, ``DONE`` last."""

from __future__ import annotations

import json
import platform
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from sm70lab.config import plain, without_password
from sm70lab.errors import UsageError
from sm70lab.schema import ExperimentConfig, Generation, TokenScores
from sm70lab.tracking import environment, tables
from sm70lab.tracking.atomic import disk_error, write_json, write_text

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


class RunFolder:
    """The files of one run. Every write is whole or absent and raises ``UsageError`` where it fails."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        try:
            return str(self.path.relative_to(Path.cwd()))
        except ValueError:
            return str(self.path)

    # ------------------------------------------------------------------ life

    @staticmethod
    def claim(config: ExperimentConfig, fingerprint: str) -> RunFolder:
        """Make a new folder for this run, with ``RUNNING``, the configuration and the environment.

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
            raise UsageError(f"{parent}: a file is in the way; set tracking.runs_dir or name") from error
        except OSError as error:
            raise disk_error(parent / "run", error) from error
        try:
            write_json(staging / RUNNING, _this_process())
            write_text(staging / CONFIG, _config_yaml(config))
            identity = {"uid": uuid.uuid4().hex, "started": _now()}
            write_json(staging / ENVIRONMENT, {**identity, **environment.describe()})
            for name in (GENERATIONS, FIGURES):
                (staging / name).mkdir()
            return RunFolder(_rename_to_free(staging, parent, folder_name(config, fingerprint)))
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise

    def finish(self) -> None:
        """The record is whole: ``RUNNING`` goes, ``DONE`` comes."""
        self._marker(RUNNING).unlink(missing_ok=True)
        write_text(self._marker(DONE), _now() + "\n")

    def interrupt(self, what: str, traceback: str | None = None) -> None:
        """The run ended early: say by what and when, keep what is there."""
        if traceback is not None:
            write_text(self.path / "error.txt", traceback)
        write_json(self._marker(INTERRUPTED), {"what": what, "when": _now()})
        self._marker(RUNNING).unlink(missing_ok=True)

    def discard(self) -> None:
        """Remove a folder in which nothing was generated."""
        shutil.rmtree(self.path, ignore_errors=True)

    def interruption(self) -> dict[str, str]:
        """What ended the run early, and when; empty for a run that was not."""
        try:
            value: dict[str, str] = json.loads(self._marker(INTERRUPTED).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return value

    @property
    def done(self) -> bool:
        return self._marker(DONE).exists()

    def owner(self) -> dict[str, Any] | None:
        """The live process that writes here, or None. One on another machine counts as live."""
        try:
            process: dict[str, Any] = json.loads(self._marker(RUNNING).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return process if process.get("host") != platform.node() or _alive(process) else None

    def close_dead(self) -> bool:
        """Close a run whose process is gone. True where there was one.

        A whole result makes it a finished run (it died while MLflow was told), else an interrupted one.
        """
        if not self._marker(RUNNING).exists() or self.owner() is not None:
            return False
        if (self.result() or {}).get("status") == "finished":
            self.finish()
        else:
            self.interrupt("killed: its process is gone")
        return True

    # --------------------------------------------------------------- contents

    def save_generation(self, generation: Generation) -> None:
        """The text as it is, and the token ids with their end and seed."""
        base = self.path / GENERATIONS / generation.key
        write_text(base.with_name(base.name + ".txt"), generation.text)
        record = {
            "prompt": generation.prompt.name,
            "repeat": generation.repeat,
            "seed": generation.seed,
            "finish_reason": generation.finish_reason,
            "prompt_token_ids": list(generation.prompt.token_ids),
            "token_ids": list(generation.token_ids),
            "note": generation.note,
        }
        write_text(base.with_name(base.name + ".tokens.json"), json.dumps(record, ensure_ascii=False) + "\n")

    def save_tables(self, generations: Sequence[Generation], scores: dict[str, TokenScores]) -> None:
        """``rounds.parquet`` (one row a round), and with scores ``audit.parquet`` (one row a token)."""
        tables.write_rounds(self.path / tables.ROUNDS, generations)
        if scores:
            tables.write_audit(self.path / tables.AUDIT, generations, scores)

    def save_result(self, result: dict[str, Any], summary: str) -> None:
        """``summary.md``, then ``result.json``: once it is there, the record is whole."""
        write_text(self.path / SUMMARY, summary)
        write_json(self.path / RESULT, result)

    def result(self) -> dict[str, Any] | None:
        """The recorded result, or None where there is none that can be read."""
        try:
            value = json.loads((self.path / RESULT).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return value if isinstance(value, dict) else None

    def token_ids(self) -> dict[str, list[int]]:
        """Generation key → token ids. Raises ``UsageError`` for a damaged file."""
        found = {}
        for file in sorted((self.path / GENERATIONS).glob("*.tokens.json")):
            key = file.name.removesuffix(".tokens.json")
            try:
                found[key] = json.loads(file.read_text(encoding="utf-8"))["token_ids"]
            except (OSError, ValueError, KeyError) as error:
                raise UsageError(f"{file}: damaged ({error}); move this run's folder away") from error
        return found

    # ----------------------------------------------------------------- MLflow

    @property
    def pending(self) -> bool:
        """Whether MLflow has yet to get this run."""
        return self._marker(MLFLOW_PENDING).exists()

    def set_pending(self, reason: str) -> None:
        """Leave word that MLflow has yet to get this run."""
        write_json(self._marker(MLFLOW_PENDING), {"reason": reason, "since": _now()})

    def clear_pending(self) -> None:
        """MLflow has this run."""
        self._marker(MLFLOW_PENDING).unlink(missing_ok=True)

    def _marker(self, name: str) -> Path:
        return self.path / name


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
        if folder.done and (folder.result() or {}).get("fingerprint") == fingerprint:
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


def _config_yaml(config: ExperimentConfig) -> str:
    resolved = plain(config)
    if resolved["tracking"]["uri"]:
        resolved["tracking"]["uri"] = without_password(resolved["tracking"]["uri"])
    return OmegaConf.to_yaml(OmegaConf.create(resolved))


def _this_process() -> dict[str, Any]:
    import psutil

    process = psutil.Process()
    return {
        "pid": process.pid,
        "host": platform.node(),
        "created": process.create_time(),
        "started": _now(),
    }


def _alive(process: dict[str, Any]) -> bool:
    """Whether the same process still runs: a pid alone may have been given to another."""
    import psutil

    try:
        found = psutil.Process(int(process["pid"]))
        same = abs(found.create_time() - float(process["created"])) < 1
        return same and bool(found.status() != psutil.STATUS_ZOMBIE)
    except (psutil.Error, KeyError, ValueError, TypeError):
        return False


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
