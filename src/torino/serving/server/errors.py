"""Errors that a client sees, in the format of OpenAI."""

from __future__ import annotations

from typing import Any

from torino.core.errors import TorinoError
from torino.core.text import printable

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "service_unavailable",
    504: "timeout_error",
}
LONGEST = 400


class ApiError(TorinoError):
    """A refused or failed request.

    Parameters
    ----------
    status : int
        HTTP status.
    message : str
        One sentence for the client.
    reason : str
        Label of the refusal in the metrics: one of a few words.
    param : str, optional
        Field of the request that is wrong.
    retry_after : int, optional
        Seconds after which the client may try again.
    """

    def __init__(
        self, status: int, message: str, reason: str, param: str | None = None, retry_after: int | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.reason, self.param, self.retry_after = status, reason, param, retry_after

    def to_dict(self) -> dict[str, Any]:
        """Return the body of the response."""
        text = " ".join(printable(str(self)).split())
        if len(text) > LONGEST:
            text = text[: LONGEST - 1] + "…"
        kind = TYPES.get(self.status, "server_error")
        return {"error": {"message": text, "type": kind, "param": self.param, "code": self.status}}

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the response."""
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        return headers | ({"WWW-Authenticate": "Bearer"} if self.status == 401 else {})


def bad_request(message: str, param: str | None = None, reason: str = "invalid") -> ApiError:
    """Build the error of a malformed or unsupported request."""
    return ApiError(400, message, reason, param)


def from_torino(error: TorinoError) -> ApiError:
    """Return the error for a client: what it sent cannot be processed."""
    return error if isinstance(error, ApiError) else bad_request(str(error))


def overloaded(waiting: int) -> ApiError:
    """Build the error of a full queue."""
    return ApiError(429, f"The server is busy: {waiting} requests are waiting. Try again later.", "queue", None, 1)


def unavailable(message: str, retry_after: int = 2) -> ApiError:
    """Build the error of a server or engine that cannot answer now."""
    return ApiError(503, message, "unavailable", None, retry_after)


def internal_error() -> ApiError:
    """Build the error of a failure that is the server's own; the log has the details."""
    return ApiError(500, "The server failed to answer this request; its log says why.", "failure")
