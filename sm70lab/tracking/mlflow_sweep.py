"""The parent run of a sweep in MLflow. Callers hold the store's lock, so that one parent is made.

A parent is ended in the same breath in which it is made, and again with every child that comes: none
is left RUNNING by a sweep that is killed. A process that dies between the two calls leaves its child
marked as pending, and whoever sends that child ends the parent.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections import Counter
from collections.abc import Sequence
from typing import Any

from sm70lab.tracking.fingerprint import code_revision

AUTO = "auto-"  # how the names begin that a sweep gives itself
SWEEP_TAG, PARENT_TAG = "sm70lab.sweep", "mlflow.parentRunId"
MAX_CHILDREN = 1000


def sweep_name(overrides: Sequence[str]) -> str:
    """The name of a sweep, the same when it is started again: its overrides and the code's revision."""
    content = json.dumps([sorted(overrides), code_revision()])
    return AUTO + hashlib.sha256(content.encode()).hexdigest()[:12]


def parent_run(
    client: Any, experiment: str, name: str, sweep: str, start: int, end: int, command: Sequence[str]
) -> str:
    """The parent's run id: the one that an earlier child made, else a new one called ``name``.

    Of several (made by machines that share a server and no lock) the oldest. ``start`` and ``end`` are
    the child's, in milliseconds.
    """
    found = client.search_runs(
        [experiment], f"tags.`{SWEEP_TAG}` = '{sweep}'", order_by=["attributes.start_time ASC"], max_results=1
    )
    if found:
        parent, ended = str(found[0].info.run_id), found[0].info.end_time or 0
    else:
        tags = {SWEEP_TAG: sweep, "mlflow.source.name": "sm70lab", "mlflow.source.type": "LOCAL"}
        tags["command"] = shlex.join(command)[:8000]
        parent = str(client.create_run(experiment, start_time=start, tags=tags, run_name=name).info.run_id)
        ended = 0
    client.set_terminated(parent, "FINISHED", max(end, ended))
    return parent


def tell_parent(client: Any, experiment: str, parent: str) -> None:
    """Write on the parent how many children it has, with which verdicts, and what each found."""
    children = client.search_runs(
        [experiment],
        f"tags.`{PARENT_TAG}` = '{parent}'",
        order_by=["attributes.start_time ASC"],
        max_results=MAX_CHILDREN,
    )
    ends = [child.data.tags.get("verdict") or child.data.tags.get("status", "?") for child in children]
    counts = ", ".join(f"{count} {end}" for end, count in sorted(Counter(ends).items()))
    lines = [f"{len(children)} runs: {counts}", "", "| run | verdict | reason |", "|---|---|---|"]
    for child, end in zip(children, ends, strict=True):
        reason = child.data.tags.get("reason") or child.data.tags.get("interrupted", "")
        lines.append(f"| {child.info.run_name} | {end} | {reason.replace('|', '/')} |")
    client.set_tag(parent, "runs", str(len(children)))
    client.set_tag(parent, "verdicts", counts)
    client.set_tag(parent, "mlflow.note.content", "\n".join(lines)[:8000])
