"""What a request can be refused for: one exception, answered with OpenAI's error object."""

from __future__ import annotations

TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    413: "RequestTooLargeError",
    429: "RateLimitError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}


class ApiError(Exception):
    """A refused request: its status, what would be right, and the field at fault."""

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param = status, message, param

    @property
    def headers(self) -> dict[str, str]:
        """Headers that go with the status."""
        return {429: {"Retry-After": "1"}, 401: {"WWW-Authenticate": "Bearer"}}.get(self.status, {})


def error_object(status: int, message: str, param: str | None = None) -> dict[str, object]:
    """OpenAI's error object, with the status as its code as vLLM has it."""
    kind = TYPES.get(status, "APIError")
    message = message.encode("utf-8", "replace").decode()  # it may quote what UTF-8 cannot hold
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}
