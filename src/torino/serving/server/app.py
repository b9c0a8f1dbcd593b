"""The HTTP interface: OpenAI's chat completions, models, health and metrics."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar, cast

from torino.core.errors import TorinoError
from torino.core.extras import optional_import
from torino.serving.server.engine import ChatEngine, ChatInput
from torino.serving.server.errors import ApiError, from_torino, overloaded
from torino.serving.server.explain import explain_images
from torino.serving.server.gate import CHAT, RequestGate, RequestRecord, ServerState
from torino.serving.server.images import ImageSource
from torino.serving.server.jobs import AnswerEvent, FinishedAnswer
from torino.serving.server.metrics import CONTENT_TYPE, ServerMetrics
from torino.serving.server.options import ServerOptions
from torino.serving.server.schema import ChatRequest, conversation_of, parse_request, sampling_of
from torino.version import __version__

with optional_import("torino serve needs", "torino[serve]"):
    from fastapi import FastAPI, Request
    from fastapi.responses import JSONResponse, Response, StreamingResponse

Result = TypeVar("Result")
BODY = {"requestBody": {"required": True, "content": {"application/json": {"schema": ChatRequest.model_json_schema()}}}}


class _Gone(Exception):
    """The client has closed the connection."""


class ChatServer:
    """Endpoints of a server.

    Parameters
    ----------
    engine : ChatEngine
    options : ServerOptions
    metrics : ServerMetrics
    state : ServerState
    images : ImageSource, optional
    """

    def __init__(
        self,
        engine: ChatEngine,
        options: ServerOptions,
        metrics: ServerMetrics,
        state: ServerState,
        images: ImageSource | None = None,
    ) -> None:
        self.engine, self.options, self.metrics, self.state = engine, options, metrics, state
        self.images = images or ImageSource(options)
        self.created = int(time.time())
        self.admitted = 0

    # ------------------------------------------------------------------ endpoints

    async def chat(self, request: Request) -> Response:
        """Answer a conversation with images."""
        record = cast(RequestRecord, request.state.record)
        try:
            wanted = await asyncio.to_thread(parse_request, await request.body())
        except ApiError as error:
            return self._refuse(error, record)
        if wanted.model not in (None, self.options.name):
            text = f"There is no model {wanted.model!r:.80}; this server has {self.options.name!r}."
            return self._refuse(ApiError(404, text, "model", "model"), record)
        if self.admitted >= self.options.most_requests:
            return self._refuse(overloaded(self.admitted), record)
        self._admit(1)
        answer = _Answer(self, wanted, record)
        streams = False
        try:
            chat = await self._read(wanted)
            events = self.engine.generate(chat)
            first = await _unless_gone(request, anext(events))
            if wanted.stream:
                streams = True
                return StreamingResponse(answer.stream(first, events), media_type="text/event-stream")
            return JSONResponse(await _unless_gone(request, answer.collect(first, events)))
        except _Gone:
            record.refusal = "disconnected"
            return Response(status_code=499)
        except TorinoError as error:
            return self._refuse(from_torino(error), record)
        finally:
            if not streams:
                self._admit(-1)

    async def models(self) -> dict[str, Any]:
        """List the one model of this server."""
        model = {"id": self.options.name, "object": "model", "created": self.created, "owned_by": "torino"}
        return {"object": "list", "data": [model]}

    async def model(self, name: str) -> Response:
        """Describe the model."""
        if name != self.options.name:
            error = ApiError(404, f"There is no model {name!r:.80}; this server has {self.options.name!r}.", "model")
            return _error_response(error)
        return JSONResponse((await self.models())["data"][0])

    async def health(self) -> Response:
        """Return 200 if all parts work and the server is not stopping, otherwise 503."""
        parts = self.engine.health()
        if self.state.draining:
            parts["server"] = "The server is stopping."
        healthy = all(state == "ok" for state in parts.values())
        body = {"status": "ok" if healthy else "unavailable", "parts": parts, "version": __version__}
        return JSONResponse(body, 200 if healthy else 503)

    async def prometheus(self) -> Response:
        """Return the metrics."""
        return Response(self.metrics.text(), media_type=CONTENT_TYPE)

    # ------------------------------------------------------------------ parts of an answer

    async def _read(self, wanted: ChatRequest) -> ChatInput:
        conversation, urls = conversation_of(wanted)
        sampling = sampling_of(wanted, self.options.max_tokens)
        return ChatInput(conversation, await self.images.load(urls), sampling)

    def _refuse(self, error: ApiError, record: RequestRecord) -> Response:
        record.refusal = error.reason
        return _error_response(error)

    def _admit(self, change: int) -> None:
        self.admitted += change
        self.metrics.running.set(self.admitted)

    def release(self) -> None:
        """Count a streamed request as finished."""
        self._admit(-1)

    def count(self, end: FinishedAnswer, record: RequestRecord) -> None:
        """Add a finished answer to the metrics and the log."""
        before, after = (sum(getattr(image, name) for image in end.images) for name in ("before", "after"))
        self.metrics.images.inc(len(end.images))
        self.metrics.tokens_before.inc(before)
        self.metrics.tokens_after.inc(after)
        self.metrics.prompt_tokens.inc(end.prompt_tokens)
        self.metrics.generated_tokens.inc(end.new_tokens)
        self.metrics.kv_bytes.inc(end.kv_bytes)
        record.fields |= {
            "images": len(end.images),
            "cached": sum(image.cached for image in end.images),
            "tokens_before": before,
            "tokens_after": after,
            "prompt_tokens": end.prompt_tokens,
            "new_tokens": end.new_tokens,
            "finish": end.reason,
        }


class _Answer:
    """Write one answer in OpenAI's format, whole or in pieces."""

    def __init__(self, server: ChatServer, wanted: ChatRequest, record: RequestRecord) -> None:
        self.server, self.wanted, self.record = server, wanted, record
        self.head = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time())}
        self.head |= {"model": server.options.name}

    def _first(self) -> None:
        seconds = time.perf_counter() - self.record.begin
        self.record.fields["first_token"] = round(seconds, 4)
        self.server.metrics.first_token.observe(seconds)

    async def collect(self, first: AnswerEvent, events: AsyncGenerator[AnswerEvent, None]) -> dict[str, Any]:
        """Return the whole answer."""
        event = first
        while not isinstance(event, FinishedAnswer):
            event = await anext(events)
        await events.aclose()
        self.server.count(event, self.record)
        message = {"role": "assistant", "content": event.text, "refusal": None}
        choice = {"index": 0, "message": message, "finish_reason": event.reason, "logprobs": None}
        body = {**self.head, "object": "chat.completion", "choices": [choice], "usage": _usage(event)}
        return body | self._explanation(event)

    async def stream(self, first: AnswerEvent, events: AsyncGenerator[AnswerEvent, None]) -> AsyncIterator[bytes]:
        """Yield the answer as server-sent events."""
        self._first()
        try:
            yield self._chunk({"role": "assistant", "content": ""})
            event = first
            while not isinstance(event, FinishedAnswer):
                yield self._chunk({"content": event.text})
                event = await anext(events)
            yield self._chunk({}, event.reason)
            options = self.wanted.stream_options
            extra = self._explanation(event) | ({"usage": _usage(event)} if options and options.include_usage else {})
            if extra:
                yield _event({**self.head, "object": "chat.completion.chunk", "choices": [], **extra})
            self.server.count(event, self.record)
            yield b"data: [DONE]\n\n"
        except TorinoError as error:
            failure = from_torino(error)
            self.record.refusal = failure.reason
            yield _event(failure.to_dict())
        except asyncio.CancelledError:
            self.record.refusal = "disconnected"
            raise
        finally:
            self.server.release()
            with suppress(RuntimeError):
                await events.aclose()

    def _chunk(self, delta: Mapping[str, Any], reason: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": reason, "logprobs": None}
        return _event({**self.head, "object": "chat.completion.chunk", "choices": [choice]})

    def _explanation(self, end: FinishedAnswer) -> dict[str, Any]:
        if not self.wanted.torino.explain:
            return {}
        return {"torino": explain_images(end.images, self.server.engine.names)}


def _usage(end: FinishedAnswer) -> dict[str, int]:
    total = end.prompt_tokens + end.new_tokens
    return {"prompt_tokens": end.prompt_tokens, "completion_tokens": end.new_tokens, "total_tokens": total}


def _event(value: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


async def _unless_gone(request: Request, work: Awaitable[Result]) -> Result:
    """Wait for some work, and cancel it if the client closes the connection."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_wait_until_gone(request))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise _Gone
        return task.result()
    finally:
        for pending in (task, watch):
            pending.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _wait_until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _error_response(error: ApiError) -> Response:
    return JSONResponse(error.to_dict(), error.status, error.headers)


def build_app(
    engine: ChatEngine,
    options: ServerOptions,
    metrics: ServerMetrics,
    state: ServerState | None = None,
    images: ImageSource | None = None,
) -> FastAPI:
    """Build the application of a server.

    Parameters
    ----------
    engine : ChatEngine
        It is started with the application, and closed with it.
    options : ServerOptions
    metrics : ServerMetrics
        The same object as that of the engine.
    state : ServerState, optional
    images : ImageSource, optional
    """
    state = state or ServerState()
    server = ChatServer(engine, options, metrics, state, images)

    @asynccontextmanager
    async def life(_: FastAPI) -> AsyncGenerator[None]:
        try:
            await engine.start()
        except TorinoError as error:
            state.failure = error
            raise
        try:
            yield
        finally:
            await server.images.close()
            await engine.close()

    app = FastAPI(title="torino", version=__version__, lifespan=life, docs_url=None, redoc_url=None)
    app.add_api_route(CHAT, server.chat, methods=["POST"], openapi_extra=BODY)
    app.add_api_route("/v1/models", server.models)
    app.add_api_route("/v1/models/{name:path}", server.model)
    app.add_api_route("/health", server.health)
    app.add_api_route("/metrics", server.prometheus)

    async def refuse_path(request: Request, error: Exception) -> Response:
        status = int(getattr(error, "status_code", 404))
        texts = {404: f"There is no {request.url.path[:100]}.", 405: f"{request.method[:10]} is not allowed here."}
        request.state.record.refusal = "path"
        return _error_response(ApiError(status, texts.get(status, "The request is wrong."), "path"))

    app.add_exception_handler(404, refuse_path)
    app.add_exception_handler(405, refuse_path)
    app.add_middleware(cast(Any, RequestGate), options=options, state=state, metrics=metrics)
    return app
