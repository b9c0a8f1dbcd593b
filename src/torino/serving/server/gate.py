"""What every request passes before it is read: keys, limits of size and time, the log, and an orderly end."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torino.core.errors import TorinoError
from torino.serving.server.errors import ApiError, internal_error, unavailable
from torino.serving.server.logs import log
from torino.serving.server.metrics import ServerMetrics
from torino.serving.server.options import ServerOptions

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

API = "/v1/"
CHAT = "/v1/chat/completions"


@dataclass
class ServerState:
    """What the application and the process that runs it share.

    Attributes
    ----------
    running : int
        Requests that are being answered.
    draining : bool
        Whether the server is stopping: running requests are finished, new ones refused.
    failure : TorinoError, optional
        Why the engine did not start.
    """

    running: int = 0
    draining: bool = False
    failure: TorinoError | None = None


@dataclass
class RequestRecord:
    """What the log says about one request; the application adds to ``fields``."""

    identifier: str
    begin: float = field(default_factory=time.perf_counter)
    status: int = 0
    refusal: str | None = None
    fields: dict[str, Any] = field(default_factory=dict[str, Any])


class RequestGate:
    """ASGI middleware around the application.

    Parameters
    ----------
    app : ASGI application
    options : ServerOptions
    state : ServerState
    metrics : ServerMetrics
    """

    def __init__(self, app: Application, *, options: ServerOptions, state: ServerState, metrics: ServerMetrics) -> None:
        self.app, self.options, self.state, self.metrics = app, options, state, metrics
        self._keys = [_digest(key) for key in options.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request; other kinds of connections are passed on."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        record = RequestRecord(f"req-{secrets.token_hex(12)}")
        scope.setdefault("state", {})["record"] = record
        path = str(scope["path"])
        counts = self.covers(path)
        self.state.running += counts
        reply = _Reply(send, record, self.state)
        try:
            if counts:
                self._check(scope)
                receive = _LimitedBody(receive, self.options)
            async with asyncio.timeout(self.options.timeout if counts else None):
                await self.app(scope, receive, reply)
        except TimeoutError:
            limit = self.options.timeout
            await reply.fail(ApiError(504, f"The request took more than {limit:g} seconds and was given up.", "time"))
        except ApiError as error:
            await reply.fail(error)
        except Exception as error:
            log("request failed", logging.ERROR, failed=error, id=record.identifier)
            await reply.fail(internal_error())
        finally:
            self.state.running -= counts
            self._finish(path, record, scope)

    def covers(self, path: str) -> bool:
        """Return whether requests of a path need a key, are limited and count as running."""
        return path.startswith(API)

    def _check(self, scope: Scope) -> None:
        if self.state.draining:
            raise unavailable("The server is stopping. Try again later.")
        headers = {name.lower(): value for name, value in _headers(scope)}
        if self._keys:
            word, _, key = headers.get(b"authorization", b"").partition(b" ")
            given = _digest(key.strip().decode("latin-1")) if word.lower() == b"bearer" else b""
            matches = [hmac.compare_digest(given, known) for known in self._keys]
            if not any(matches):
                raise ApiError(401, "The API key is missing or wrong. Send it as Authorization: Bearer KEY.", "key")
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and len(length) < 20 and int(length) > self.options.max_bytes:
            raise _too_large(self.options.max_bytes)

    def _finish(self, path: str, record: RequestRecord, scope: Scope) -> None:
        seconds = time.perf_counter() - record.begin
        if path == CHAT:
            self.metrics.requests.labels(str(record.status)).inc()
            self.metrics.duration.observe(seconds)
        if record.refusal is not None:
            self.metrics.refusals.labels(record.refusal).inc()
        if path in ("/health", "/metrics"):
            return
        client = scope.get("client")
        optional = {"client": client[0] if client else None, "refusal": record.refusal}
        log(
            "request",
            id=record.identifier,
            method=str(scope["method"])[:10],
            path=path[:100],
            status=record.status,
            seconds=round(seconds, 4),
            **{name: value for name, value in optional.items() if value is not None},
            **record.fields,
        )


class _Reply:
    """The ``send`` of a request: notes the status and adds headers."""

    def __init__(self, send: Send, record: RequestRecord, state: ServerState) -> None:
        self._send, self._record, self._state = send, record, state
        self.started = self.ended = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            self._record.status = int(message["status"])
            headers = [*message.get("headers", ()), (b"x-request-id", self._record.identifier.encode())]
            if self._state.draining:
                headers.append((b"connection", b"close"))
            message = {**message, "headers": headers}
        elif message["type"] == "http.response.body":
            self.ended = not message.get("more_body", False)
        await self._send(message)

    async def fail(self, error: ApiError) -> None:
        """Answer with an error; a response that has begun is cut off, so that nobody takes it for a whole one."""
        self._record.refusal = error.reason
        if self.ended:
            return
        if self.started:
            self._record.status = error.status
            return
        body = json.dumps(error.to_dict()).encode()
        names = {"content-type": "application/json", "content-length": str(len(body)), **error.headers}
        # the rest of a body that is not read would be taken for the next request
        names |= {"connection": "close"} if error.status in (401, 413, 429, 503, 504) or error.reason == "body" else {}
        headers = [(name.lower().encode(), value.encode()) for name, value in names.items()]
        await self({"type": "http.response.start", "status": error.status, "headers": headers})
        await self({"type": "http.response.body", "body": body})


class _LimitedBody:
    """The ``receive`` of a request: refuses a body that is too long or comes too slowly."""

    def __init__(self, receive: Receive, options: ServerOptions) -> None:
        self._receive, self._limit, self._seconds = receive, options.max_bytes, options.read_timeout
        self._deadline = time.perf_counter() + options.read_timeout
        self._size, self._complete = 0, False

    async def __call__(self) -> Message:
        if self._complete:
            return await self._receive()
        try:
            async with asyncio.timeout(max(self._deadline - time.perf_counter(), 0.0)):
                message = await self._receive()
        except TimeoutError as error:
            text = f"The body of the request did not arrive within {self._seconds:g} seconds."
            raise ApiError(408, text, "body") from error
        self._size += len(message.get("body", b""))
        self._complete = not message.get("more_body", False)
        if self._size > self._limit:
            raise _too_large(self._limit)
        return message


def _headers(scope: Scope) -> Sequence[tuple[bytes, bytes]]:
    return scope.get("headers", ())


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"The request has more than {limit:,} bytes. Send fewer or smaller images.", "bytes")
