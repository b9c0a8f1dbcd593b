"""Limits of ``torino serve`` around vLLM's own server, as middleware that vLLM loads by name.

Requests pass the same gate as those of torino's own server. Images are read here, so that vLLM fetches nothing: an
image of an allowed host is replaced by its content.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, cast

from torino.core.errors import BadParameter, TorinoError
from torino.serving.server.errors import ApiError, bad_request, from_torino, overloaded
from torino.serving.server.gate import Application, Message, Receive, RequestGate, Scope, Send, ServerState
from torino.serving.server.images import ImageSource, check_pixels, write_data_url
from torino.serving.server.logs import LogFormat, set_up_logs
from torino.serving.server.options import ServerOptions
from torino.serving.server.schema import EMBEDS
from torino.serving.vllm.monitor import server_metrics

VARIABLE = "TORINO_VLLM_LIMITS"
"""Environment variable with the options and the form of the log as JSON."""
MIDDLEWARE = "torino.serving.vllm.limits.LimitedServer"
OPEN = ("/health", "/ping", "/version", "/metrics", "/load")
"""Paths without a key."""
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize")
"""The endpoints that accept requests; vLLM has more, whose images would pass unchecked."""
LENGTHS = ("max_tokens", "max_completion_tokens")
EXPLAIN = "vLLM's own server does not explain images. Start torino serve with --placement front for that."

Part = dict[str, Any]


def write_limits(options: ServerOptions, log_format: LogFormat) -> str:
    """Return the value of the environment variable."""
    return json.dumps({"options": asdict(options), "log_format": log_format})


def read_limits(text: str) -> tuple[ServerOptions, LogFormat]:
    """Read what :func:`write_limits` returned."""
    try:
        given = json.loads(text)
        options: dict[str, Any] = given["options"]
        for name in ("api_keys", "allowed_hosts"):
            options[name] = tuple(options[name])
        return ServerOptions(**options), given["log_format"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadParameter(f"{VARIABLE} is set by torino serve and cannot be read: {error!r}. Unset it.") from error


class LimitedServer(RequestGate):
    """Middleware with the limits of ``torino serve``; vLLM creates it around its application.

    Parameters
    ----------
    app : ASGI application
    """

    def __init__(self, app: Application) -> None:
        options, log_format = read_limits(os.environ.get(VARIABLE, ""))
        set_up_logs(log_format)
        state, metrics = ServerState(), server_metrics()
        metrics.running.set_function(lambda: float(state.running))
        super().__init__(RequestCheck(app, options, state), options=options, state=state, metrics=metrics)

    def covers(self, path: str) -> bool:
        """Return whether requests of a path are limited: all but those of monitors."""
        return path not in OPEN


class RequestCheck:
    """Check the bodies of requests before vLLM reads them.

    Parameters
    ----------
    app : ASGI application
    options : ServerOptions
    state : ServerState
    images : ImageSource, optional
    """

    def __init__(
        self, app: Application, options: ServerOptions, state: ServerState, images: ImageSource | None = None
    ) -> None:
        self.app, self.options, self.state = app, options, state
        self.images = images or ImageSource(options)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request; refuse websockets, whose messages would pass unchecked."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": "torino serve has no websockets."})
            return
        if scope["type"] != "http" or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        if scope["path"] not in ENDPOINTS:
            raise ApiError(404, f"torino serve has no POST {scope['path']!r:.60}.", "path")
        if self.state.running > self.options.most_requests:
            raise overloaded(self.state.running - 1)
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            if not message.get("more_body", False):
                break
        try:
            checked = await self._check(bytes(body))
        except TorinoError as error:
            raise from_torino(error) from error
        headers = [(name, value) for name, value in scope["headers"] if name.lower() != b"content-length"]
        headers.append((b"content-length", str(len(checked)).encode()))
        await self.app({**scope, "headers": headers}, _Replay(checked, receive), send)

    async def _check(self, body: bytes) -> bytes:
        """Return the body with all images as ``data:`` URLs; refuse what exceeds the limits."""
        try:
            given = await asyncio.to_thread(json.loads, body)
        except (ValueError, RecursionError) as error:
            raise bad_request("The body is not valid JSON.") from error
        if not isinstance(given, dict):
            raise bad_request("The body must be a JSON object.")
        request = cast(dict[str, Any], given)
        for name in LENGTHS:
            wanted, most = request.get(name), self.options.max_tokens
            if isinstance(wanted, int) and wanted > most:
                raise bad_request(f"{name} must be at most {most} on this server, got {wanted}.", name)
        if request.get("torino"):
            raise bad_request(EXPLAIN, "torino")
        parts = list(_parts(request.get("messages")))
        urls = [_url_of(part) for part in parts]
        files = await self.images.load(urls)
        for file in files:
            await asyncio.to_thread(check_pixels, file, self.options.max_pixels)
        fetched = [index for index, url in enumerate(urls) if url[:5].lower() != "data:"]
        for index in fetched:
            parts[index]["image_url"] = {"url": write_data_url(files[index])}
        return json.dumps(request).encode() if fetched else body


def _parts(messages: Any) -> Iterator[Part]:
    """Yield the image parts of a conversation; refuse other kinds than text and images."""
    for message in cast(list[Any], messages) if isinstance(messages, list) else []:
        content = cast(dict[str, Any], message).get("content") if isinstance(message, dict) else None
        for item in cast(list[Any], content) if isinstance(content, list) else []:
            if not isinstance(item, dict):
                continue  # a text, or an error that vLLM reports
            part = cast(Part, item)
            kind = part.get("type", "image_url" if "image_url" in part else "text")
            others = [name for name in part if name.endswith(("_embeds", "_url", "_pil")) and name != "image_url"]
            if str(kind).endswith("_embeds") or any(name.endswith("_embeds") for name in others):
                raise bad_request(EMBEDS, "messages")
            if kind not in ("text", "image_url", "refusal") or others:
                got = others[0] if others else kind
                raise bad_request(f"A part must be text or image_url, got {got!r:.60}.", "messages")
            if kind == "image_url" or "image_url" in part:
                yield part


def _url_of(part: Part) -> str:
    location = part.get("image_url")
    url: Any = cast(dict[str, Any], location).get("url") if isinstance(location, dict) else location
    if not isinstance(url, str):
        raise bad_request("image_url must hold a url.", "messages")
    return url


class _Replay:
    """The ``receive`` of a request whose body was read before."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self._body: bytes | None = body
        self._receive = receive

    async def __call__(self) -> Message:
        if self._body is None:
            return await self._receive()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}
