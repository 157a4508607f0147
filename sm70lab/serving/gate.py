"""What stands before the routes: the API key, the size of a request's body and the time to send it."""

from __future__ import annotations

import asyncio
import hmac

from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sm70lab.serving.errors import ApiError, error_object

BODY_SECONDS = 60.0  # within which a request's body must have come
GUARDED = "/v1/"  # as vLLM: health, version and metrics are open


def refusal(error: ApiError) -> JSONResponse:
    """The answer to a refused request."""
    content = error_object(error.status, error.message, error.param)
    return JSONResponse(content, error.status, headers=error.headers)


class Gate:
    """ASGI middleware: reads each body whole, within its limits, before a route sees the request."""

    def __init__(self, app: ASGIApp, api_key: str | None, max_body: int) -> None:
        self.app, self.max_body = app, max_body
        self._key = api_key.encode() if api_key is not None else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            headers: dict[bytes, bytes] = dict(scope["headers"])
            self._check_key(str(scope["path"]), headers)
            async with asyncio.timeout(BODY_SECONDS):
                body = await self._body(headers, receive)
        except ApiError as error:
            await refusal(error)(scope, receive, send)
        except TimeoutError:
            late = ApiError(408, f"the request's body did not come within {BODY_SECONDS:.0f} s")
            await refusal(late)(scope, receive, send)
        else:
            if body is not None:
                await self.app(scope, _replayed(body, receive), send)

    def _check_key(self, path: str, headers: dict[bytes, bytes]) -> None:
        if self._key is None or not path.startswith(GUARDED):
            return
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        same = hmac.compare_digest(given.strip(), self._key)  # in constant time
        if scheme.lower() != b"bearer" or not same:
            raise ApiError(401, "the API key is missing or wrong; send Authorization: Bearer …")

    async def _body(self, headers: dict[bytes, bytes], receive: Receive) -> bytes | None:
        """The whole body; None where the client went away. Raises ``ApiError`` 413."""
        large = ApiError(413, f"the request's body is over {self.max_body} bytes, this server's max_body")
        declared = headers.get(b"content-length", b"0")
        if declared.isdigit() and int(declared[:18]) > self.max_body:
            raise large
        parts, size = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            part: bytes = message.get("body", b"")
            size += len(part)
            if size > self.max_body:
                raise large
            parts.append(part)
            if not message.get("more_body", False):
                return b"".join(parts)


def _replayed(body: bytes, receive: Receive) -> Receive:
    """The body once, then what comes after it: the client's going away."""
    given = False

    async def again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again
