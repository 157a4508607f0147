"""For tests, yours and this project's own: has the accepted route drifted from what was pinned?

from sm70lab.testing import assert_accepted

def test_the_accepted_route() -> None:
    assert_accepted("spec_core_003")
"""

from __future__ import annotations

import warnings
from pathlib import Path

from sm70lab import pinned
from sm70lab.config import compose
from sm70lab.errors import UsageError
from sm70lab.schema import Route
from sm70lab.tracking import accepted as accepted_file


def assert_accepted(route: str | Route, accepted: str | Path | None = None, *, outputs: bool = True) -> None:
    """Fail where ``route`` is no longer the pinned one, in its flags or in its greedy outputs.

    ``route``: a name from ``conf/route`` or a ``Route``. ``accepted``: the file of ``sm70lab pin``; by
    default ``accepted.yaml`` of the working folder, else ``conf/accepted.yaml``. ``outputs=False`` compares
    flags alone and loads no model. On other hardware or another torch, a first difference at which the
    reference's two best tokens are closer than rounding is a warning. Speed is not compared: that is for
    benchmarks. Raises ``AssertionError`` with one line a difference, ``UsageError`` where nothing is pinned.
    """
    __tracebackhide__ = True
    found = accepted_file.find(None if accepted is None else str(accepted))
    if found is None:
        raise UsageError(f"{Path.cwd()}: no accepted.yaml here; pin a run: sm70lab pin RUN")
    given = compose([f"route={route}"]).route if isinstance(route, str) else route
    drifts = pinned.config_drift(found, given)
    if outputs and not drifts:  # another configuration may well give other outputs
        drifts = pinned.output_drift(found, given)
    for drift in drifts:
        if drift.tie:
            warnings.warn(f"{found.path}: {drift.line}", stacklevel=2)
    lines = [drift.line for drift in drifts if not drift.tie]
    assert not lines, f"not the route of {found.path}:\n  " + "\n  ".join(lines)
