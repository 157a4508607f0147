"""Settings of the reference that judges a server's run: ``target.reference…``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from sm70lab.config_checks_target import ENGINE, ENV_NAME, SERVED
from sm70lab.schema import ExperimentConfig, ReferenceKind

SECOND = ("reference_url", "reference_model", "reference_api_key_env")  # of a second server


def reference_complaints(config: ExperimentConfig) -> Iterator[tuple[str, Any, str]]:
    """(setting, value, what would be right) for each setting that cannot act or contradicts another."""
    target, kind = config.target, config.target.reference
    if target.name == ENGINE:
        return
    if target.reference_chunk < 0:
        yield "target.reference_chunk", target.reference_chunk, "must be 0 (all at once) or more tokens"
    if kind is ReferenceKind.engine and config.model.name == SERVED:
        yield "target.reference", kind.value, "needs the server's checkpoint on this disk: model=/a/folder"
    if not config.audit and kind is not ReferenceKind.auto:
        yield "target.reference", kind.value, "judges nothing with audit=false; leave out one of them"
    for key in (*SECOND, "reference_chunk"):
        value = getattr(target, key)
        if value and kind in (ReferenceKind.engine, ReferenceKind.none):
            must = f"asks a server, and target.reference={kind.value} asks none; leave out one of them"
            yield f"target.{key}", value, must
    for key in SECOND[1:]:
        if getattr(target, key) is not None and target.reference_url is None:
            must = "is of a second server: set target.reference_url, or leave it out"
            yield f"target.{key}", getattr(target, key), must
    name = target.reference_api_key_env
    if name is not None and not ENV_NAME.fullmatch(name):
        must = "must be the name of an environment variable, not its content"
        yield "target.reference_api_key_env", "***", must
    elif name is not None and not os.environ.get(name):
        yield "target.reference_api_key_env", name, "this environment variable is not set, or empty"
