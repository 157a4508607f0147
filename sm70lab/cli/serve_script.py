"""``sm70lab serve --script FILE``: the scripted server, until Ctrl-C or SIGTERM."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from sm70lab.config import near
from sm70lab.errors import UsageError

if TYPE_CHECKING:  # --help and a mistake need not wait for the server
    from sm70lab.serving.script_site import Site

OPTION = "--script"
LIST = "list"
DEFAULTS = {"host": "127.0.0.1", "port": "0", "tls_cert": "", "tls_key": ""}

HELP = f"""sm70lab serve {OPTION} FILE [port=0] [host=127.0.0.1] [tls_cert=FILE tls_key=FILE] [--json]
sm70lab serve {OPTION} {LIST}

A server that plays a script: recorded or made-up answers, with the faults that servers and networks
have. FILE is a YAML file, the name of a script that comes with sm70lab ({OPTION} {LIST} shows them), or a
folder: then each of its scripts is served under /NAME. port=0 takes a free port, which the line
"listening on http://…" names. GET …/script tells what was asked. Ctrl-C ends it.

The file's keys: docs/servers.md.
"""


@dataclass
class _Options:
    script: str = ""
    as_json: bool = False
    settings: dict[str, str] = field(default_factory=lambda: dict(DEFAULTS))


def main(arguments: list[str]) -> int:
    """Serve until interrupted, then 0. Raises ``UsageError`` for an unusable script or address."""
    if "--help" in arguments or "-h" in arguments:
        print(HELP, end="")
        return 0
    options = _parse(arguments)
    from sm70lab.serving import script_file

    if options.script == LIST:
        return _list(options.as_json)
    from sm70lab.serving.script_site import Site

    found = script_file.find(options.script)
    sites = [Site(prefix, script_file.load(path)) for prefix, path in found.items()]
    return asyncio.run(_serve(sites, options))


def _parse(arguments: list[str]) -> _Options:
    options, rest = _Options(), list(arguments)
    while rest:
        argument = rest.pop(0)
        key, equals, value = argument.partition("=")
        if argument == "--json":
            options.as_json = True
        elif key == OPTION:
            if not equals and (not rest or rest[0].startswith("-")):
                raise UsageError(
                    f"{OPTION}: needs a file, a folder or a name; {OPTION} {LIST} shows the names"
                )
            options.script = value if equals else rest.pop(0)
        elif key in options.settings and equals:
            options.settings[key] = value
        elif argument.startswith("-"):
            raise UsageError(f"{argument}: no such option; this command has {OPTION}, --json and --help")
        else:
            raise UsageError(f"{argument}: no setting of a scripted server; {near(key, list(DEFAULTS))}")
    if not options.script:
        raise UsageError(f"{OPTION}: needs a file, a folder or a name; {OPTION} {LIST} shows the names")
    return options


def _list(as_json: bool) -> int:
    from sm70lab.serving import script_file

    about = {name: script_file.load(path).about for name, path in script_file.bundled().items()}
    if as_json:
        print(json.dumps(about))
    else:
        width = max(map(len, about))
        print("\n".join(f"{name:<{width}}  {line}" for name, line in about.items()))
    return 0


async def _serve(sites: list[Site], options: _Options) -> int:
    from sm70lab.serving.scripted import ScriptedServer

    host, port = options.settings["host"], _port(options.settings["port"])
    tls = _tls(options.settings["tls_cert"], options.settings["tls_key"])
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    server = ScriptedServer(sites)
    try:
        port = await server.start(host, port, tls)
    except socket.gaierror as error:
        raise UsageError(f"host={host}: not an address of this machine ({error.strerror})") from error
    except OSError as error:  # asyncio puts the address into its text, so the number tells the reason
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise UsageError(f"port={port}: cannot be used on {host} ({reason}); choose another") from error
    address = f"{'http' if tls is None else 'https'}://{f'[{host}]' if ':' in host else host}:{port}"
    addresses = {site.prefix.removeprefix("/"): f"{address}{site.prefix}/v1" for site in sites}
    if options.as_json:
        print(json.dumps({"url": address, "pid": os.getpid(), "scripts": addresses}), flush=True)
    else:
        print(f"listening on {address}", flush=True)
    await stop.wait()
    await server.close()
    return 0


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise UsageError(f"port={text}: must be 0 (a free one) to 65535")
    return int(text)


def _tls(certificate: str, key: str) -> ssl.SSLContext | None:
    if not certificate and not key:
        return None
    for setting, path in (("tls_cert", certificate), ("tls_key", key)):
        if not Path(path).is_file():
            raise UsageError(f"{setting}={path}: no such file; https needs tls_cert and tls_key, in PEM")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise UsageError(f"tls_cert={certificate} tls_key={key}: cannot be used ({error})") from error
    return context
