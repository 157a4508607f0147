"""Draw a recorded run's verdict panel: ``python docs/panel.py RUN_FOLDER docs/panel.svg``."""

from __future__ import annotations

import io
import sys
from pathlib import Path

from rich.console import Console

from sm70lab.cli.display import verdict_panel
from sm70lab.experiment import Outcome
from sm70lab.tracking.result import exit_code
from sm70lab.tracking.run_folder import RunFolder


def main(run: str, picture: str) -> None:
    """Write the panel of a finished run as SVG."""
    folder = RunFolder(Path(run))
    result = folder.result()
    if result is None or not folder.done:
        raise SystemExit(f"{run}: not a finished run")
    console = Console(record=True, width=100, file=io.StringIO())
    console.print(verdict_panel(Outcome(result, folder.path, exit_code(result))))
    console.save_svg(picture, title="sm70lab")


if __name__ == "__main__":
    main(*sys.argv[1:])
