"""Addresses of MLflow stores: what may be written down of them, and whom they reach."""

from __future__ import annotations

import re
from urllib.parse import SplitResult, urlsplit

SECRET = re.compile(
    r"([?&;][^=&;\s]*(?:pass|pwd|token|secret|key|auth|cred)[^=&;\s]*)=[^&\s]*", re.IGNORECASE
)
# as far as the last @, since a password may hold / and @ itself; not in the path of a file or of sqlite
USER = re.compile(r"(?<!sqlite:)(?<!/)//(?!/)\S*@")
STORE_SCHEMES = ("sqlite", "http", "https", "postgresql", "mysql", "mssql")  # dialect+driver allowed


def without_password(text: str) -> str:
    """``text`` with users, passwords and tokens cut out of the addresses in it."""
    return USER.sub("//***@", SECRET.sub(r"\1=***", text))


def split_address(uri: str) -> SplitResult:
    """Scheme, host and port of a store. Raises ``ValueError`` where it cannot be read.

    A database driver takes a password with ``/``, ``?`` or ``@`` in it, which a URL's rules do not.
    """
    parts = urlsplit(uri)
    if parts.scheme not in ("http", "https", "sqlite", "") and "@" in uri:
        parts = urlsplit(f"{parts.scheme}://{SECRET.sub('', uri).rpartition('@')[2]}")
    _ = parts.port  # raises where it is no number
    return parts


def complaint(uri: str) -> str | None:
    """What is wrong with a store's address, or None."""
    if re.search(r"\s", uri):
        return "must not hold blanks; write %20 for one"
    try:
        parts = split_address(uri)
    except ValueError as error:
        return "a port must be a number" if "port" in str(error).lower() else f"cannot be read ({error})"
    scheme = parts.scheme.split("+")[0]
    if scheme in ("http", "https"):
        return None if parts.hostname else "must name a host: http://host:5000"
    if scheme not in STORE_SCHEMES:
        return "must be http(s)://…, sqlite:///… or another database address"
    return None
