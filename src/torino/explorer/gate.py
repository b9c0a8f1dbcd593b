"""What every request passes first: where it comes from, how large it is, and the headers of the response."""

from __future__ import annotations

import ipaddress
import json
import logging
from typing import Any

from torino.core.errors import TorinoError
from torino.explorer.options import ExplorerOptions
from torino.serving.server.errors import ApiError, from_torino, internal_error, unavailable
from torino.serving.server.gate import Application, Message, Receive, Scope, Send, ServerState
from torino.serving.server.logs import log

API = "/api/"
UPLOAD = "/api/photos"
MAX_JSON = 1 << 16
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "font-src 'self'; manifest-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
}


class ExplorerGate:
    """ASGI middleware around the explorer.

    A page of another site must not reach an explorer on this machine. The name of the host is checked, because a name
    server can give a foreign name this machine's address, and so is the origin of requests that change something.

    Parameters
    ----------
    app : ASGI application
    options : ExplorerOptions
    state : ServerState
    """

    def __init__(self, app: Application, *, options: ExplorerOptions, state: ServerState) -> None:
        self.app, self.options, self.state = app, options, state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request; other kinds of connections are passed on."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        reply = _HeaderReply(send)
        self.state.running += 1
        try:
            limit = self._check(scope)
            await self.app(scope, _Limited(receive, limit), reply)
        except TorinoError as error:
            await reply.fail(from_torino(error))
        except Exception as error:
            log("request failed", logging.ERROR, failed=error, path=str(scope["path"])[:100])
            await reply.fail(internal_error())
        finally:
            self.state.running -= 1

    def _check(self, scope: Scope) -> int:
        """Refuse a request of another site; return the most bytes that its body may have."""
        if self.state.draining:
            raise unavailable("The explorer is stopping. Start it again.")
        headers = {name.lower().decode("latin-1"): value.decode("latin-1") for name, value in scope.get("headers", ())}
        host = headers.get("host", "")
        if not is_own_host(host, self.options.host):
            raise ApiError(403, f"The explorer does not answer to the name {host[:80]!r}. Use localhost.", "host")
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2] != host:
            raise ApiError(403, "The explorer answers only to its own page.", "origin")
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin") and scope["path"].startswith(API):
            raise ApiError(403, "The explorer answers only to its own page.", "origin")
        limit = self.options.max_bytes if scope["path"] == UPLOAD else MAX_JSON
        length = headers.get("content-length", "0")
        if length.isdigit() and len(length) < 20 and int(length) > limit:
            raise _too_large(limit)
        return limit


def is_own_host(host: str, own: str) -> bool:
    """Return whether a ``Host`` header names this server: an address, ``localhost``, or the name it listens on.

    Examples
    --------
    >>> [is_own_host(host, "127.0.0.1") for host in ("localhost:80", "127.0.0.1:8090", "[::1]:80", "evil.example", "")]
    [True, True, True, False, False]
    """
    name = host[1 : host.find("]")] if host.startswith("[") else host.partition(":")[0]
    if name.lower() in ("localhost", own.lower()) and name:
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class _Limited:
    """The ``receive`` of a request, which refuses a body that is too long."""

    def __init__(self, receive: Receive, limit: int) -> None:
        self._receive, self._limit, self._size = receive, limit, 0

    async def __call__(self) -> Message:
        message = await self._receive()
        self._size += len(message.get("body", b""))
        if self._size > self._limit:
            raise _too_large(self._limit)
        return message


class _HeaderReply:
    """The ``send`` of a request, which adds headers."""

    def __init__(self, send: Send) -> None:
        self._send, self.started = send, False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            given: list[Any] = list(message.get("headers", ()))
            names = {name.lower() for name, _ in given}
            added = [(name.encode(), value.encode()) for name, value in HEADERS.items() if name.encode() not in names]
            if b"cache-control" not in names:
                added.append((b"cache-control", b"no-store"))
            message = {**message, "headers": [*given, *added]}
        await self._send(message)

    async def fail(self, error: ApiError) -> None:
        """Answer with an error; a response that has begun is cut off."""
        if self.started:
            return
        body = json.dumps(error.to_dict()).encode()
        names = {"content-type": "application/json", "content-length": str(len(body)), **error.headers}
        names |= {"connection": "close"} if error.status in (413, 429, 503) else {}
        headers = [(name.lower().encode(), value.encode()) for name, value in names.items()]
        await self({"type": "http.response.start", "status": error.status, "headers": headers})
        await self({"type": "http.response.body", "body": body})


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"The request has more than {limit:,} bytes. Choose a smaller photo.", "bytes")
