"""``sm70lab sync``: send the runs that MLflow has yet to get."""

from __future__ import annotations

import json
from typing import Any

from sm70lab.addresses import without_password
from sm70lab.cli.simple import parse
from sm70lab.schema import EXIT_USAGE, Display

HELP = """sm70lab sync [tracking.uri=http://…] [tracking.runs_dir=runs] [-cd DIR] [--json]

Send every run under tracking.runs_dir that is marked MLFLOW_PENDING to tracking.uri (sqlite under
runs_dir where none is given). Sending a run twice changes nothing.
Exit codes: 0 all sent (or nothing to send), 2 some could not be sent.
"""


def main(arguments: list[str]) -> int:
    """Send pending runs; one line each, or one JSON object."""
    options = parse(arguments, HELP)
    if options is None:
        return 0
    from sm70lab.tracking import mlflow_store

    config = options.config
    rows: list[dict[str, Any]] = []
    for folder, reason in mlflow_store.send_pending(config.tracking):
        rows.append({"folder": str(folder.path), "sent": reason is None, "reason": reason})
        if config.display != Display.json:
            print(f"{folder}: {'sent' if reason is None else f'stays pending: {reason}'}")
    failed = sum(not row["sent"] for row in rows)
    code = EXIT_USAGE if failed else 0
    uri = without_password(mlflow_store.store_uri(config.tracking))
    if config.display == Display.json:
        print(json.dumps({"exit_code": code, "uri": uri, "runs": rows}, allow_nan=False))
    elif rows:
        print(f"{len(rows) - failed} sent to {uri}" + (f", {failed} pending" if failed else ""))
    else:
        print("nothing is pending")
    return code
