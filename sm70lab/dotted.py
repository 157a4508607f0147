"""Nested settings as dotted names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def dotted(value: Any, name: str, entry: str = "[{}]") -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of every single value in ``value``, whose own name is ``name``.

    Lists stay whole, but for lists of sections: ``entry`` names one of those by its index. So do empty
    sections.
    """
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from dotted(item, f"{name}.{key}" if name else str(key), entry)
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for index, item in enumerate(value):
            yield from dotted(item, name + entry.format(index), entry)
    else:
        yield name, value
