"""The process around the application: its socket, its signals, its end."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Iterator

import uvicorn
from fastapi import FastAPI

from sm70lab.errors import UsageError
from sm70lab.serving.job import ABORT
from sm70lab.serving.worker import Worker

AFTERWARDS = 5.0  # seconds for cancelled answers to be sent, beyond the grace time


def bind(host: str, port: int) -> socket.socket:
    """A socket of ``host``, not listening yet. Raises ``UsageError`` where it cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise UsageError(f"host={host}: not an address of this machine ({error.strerror})") from error
    bound = socket.socket(family, kind, protocol)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise UsageError(
            f"port={port}: cannot be used on {host} ({error.strerror}); choose another"
        ) from error
    return bound


def address_of(bound: socket.socket) -> str:
    """http://host:port of a bound socket."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server(uvicorn.Server):
    """uvicorn that ends at SIGTERM and Ctrl-C with exit code 0, within a grace time.

    At the first signal nothing new is taken; what runs may finish within ``grace_s``, then it is
    cancelled and its clients get what there is. A second signal cancels at once.
    """

    def __init__(self, app: FastAPI, worker: Worker, grace_s: float, ready: Callable[[], None]) -> None:
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=int(grace_s + AFTERWARDS),
        )
        super().__init__(config)
        self._worker, self._grace_s, self._ready = worker, grace_s, ready
        self._ending: asyncio.TimerHandle | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say so."""
        await super().startup(sockets)
        self._ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn's own would send the signal to this process once more after the shutdown."""
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGINT, signal.SIGTERM)
        for number in numbers:
            loop.add_signal_handler(number, self._end)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    def _end(self) -> None:
        loop = asyncio.get_running_loop()
        self.should_exit = True
        self._worker.close()
        if self._ending is None:
            self._ending = loop.call_later(self._grace_s, self._worker.cancel_all, ABORT)
        else:
            self._worker.cancel_all(ABORT)


def serve(
    app: FastAPI, worker: Worker, bound: socket.socket, grace_s: float, ready: Callable[[], None]
) -> None:
    """Serve until a signal comes; returns once all is sent. Raises ``UsageError`` where nobody can listen."""
    server = Server(app, worker, grace_s, ready)
    try:
        server.run(sockets=[bound])
    except OSError as error:
        raise UsageError(f"{address_of(bound)}: cannot listen there ({error.strerror})") from error
    worker.close()
    worker.cancel_all(ABORT)
    worker.join(AFTERWARDS)
