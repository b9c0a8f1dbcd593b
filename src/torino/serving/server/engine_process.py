"""The engine behind a front: the language model in a process of its own, on loopback, with a secret.

``python -m torino.serving.server.engine_process`` reads one line of JSON with its settings from standard input, and
prints one line of JSON with its port when it is ready. It ends when standard input is closed, so it never outlives the
front. Only the front knows the secret; the settings are not on the command line, where others could read it.
"""

from __future__ import annotations

import hmac
import json
import os
import sys
import threading
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import asdict
from typing import Any

from torino.core.errors import TorinoError
from torino.core.extras import optional_import
from torino.serving.server.engine import ChatInput
from torino.serving.server.errors import ApiError, from_torino
from torino.serving.server.gate import ServerState
from torino.serving.server.halves import keep_language
from torino.serving.server.http import open_socket, run_app
from torino.serving.server.jobs import AnswerEvent
from torino.serving.server.local import LocalEngine
from torino.serving.server.logs import log, set_up_logs
from torino.serving.server.metrics import ServerMetrics
from torino.serving.server.options import ServerOptions
from torino.serving.server.transport import pack_event, unpack_request
from torino.serving.server.vision import PreparedImage
from torino.serving.settings import ReductionSettings, open_vlm
from torino.vlm.loading import quiet_loading

with optional_import("torino serve needs", "torino[serve]"):
    from fastapi import FastAPI, Request
    from fastapi.responses import JSONResponse, Response, StreamingResponse

LOOPBACK = "127.0.0.1"
MAX_BODY = 1 << 30


def build_engine_app(engine: LocalEngine, secret: str) -> FastAPI:
    """Build the application of the engine: ``/generate`` and ``/health``, both with the secret."""
    vlm = engine.language.vlm
    width = int(vlm.adapter.config.get_text_config().hidden_size)

    @asynccontextmanager
    async def life(_: FastAPI) -> AsyncGenerator[None]:
        yield
        await engine.close()

    app = FastAPI(lifespan=life, docs_url=None, redoc_url=None, openapi_url=None)

    def refuse(request: Request) -> Response | None:
        given = request.headers.get("authorization", "").encode()
        if hmac.compare_digest(given, f"Bearer {secret}".encode()):
            return None
        return Response(status_code=401)

    async def generate(request: Request) -> Response:
        refused = refuse(request)
        if refused is not None:
            return refused
        try:
            body = bytearray()
            async for chunk in request.stream():
                body += chunk
                if len(body) > MAX_BODY:
                    raise ApiError(413, f"The request has more than {MAX_BODY:,} bytes.", "bytes")
            conversation, parts, sampling = unpack_request(bytes(body), width, vlm.device)
            images = [PreparedImage("", part) for part in parts]
            events = engine.answer(ChatInput(conversation, (), sampling), images)
            first = await anext(events)
        except TorinoError as error:
            return JSONResponse(_error(error), from_torino(error).status)
        return StreamingResponse(_lines(first, events), media_type="application/x-ndjson")

    async def health(request: Request) -> Response:
        parts = engine.health()
        return refuse(request) or JSONResponse(parts, 200 if set(parts.values()) == {"ok"} else 503)

    app.add_api_route("/generate", generate, methods=["POST"])
    app.add_api_route("/health", health)
    return app


async def _lines(first: AnswerEvent, events: AsyncGenerator[AnswerEvent, None]) -> AsyncIterator[bytes]:
    async with aclosing(events):
        try:
            yield pack_event(first)
            async for event in events:
                yield pack_event(event)
        except TorinoError as error:
            yield json.dumps(_error(error)).encode() + b"\n"


def _error(error: TorinoError) -> dict[str, Any]:
    told = from_torino(error)
    fields = {"status": told.status, "message": str(told), "reason": told.reason, "param": told.param}
    return {"error": {**fields, "retry_after": told.retry_after}}


def engine_settings(
    model: str, settings: ReductionSettings, options: ServerOptions, secret: str, **load: Any
) -> dict[str, Any]:
    """Return the settings of an engine, as its first line of input takes them."""
    limits = {**asdict(options), "api_keys": [], "allowed_hosts": []}
    return {"model": model, "settings": settings.to_dict(), "options": limits, "secret": secret, **load}


def main() -> int:
    """Run the engine until its standard input is closed or a signal arrives."""
    given: dict[str, Any] = json.loads(sys.stdin.readline())
    set_up_logs(given.get("log_format", "json"), "engine")
    port_line = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints goes to the log
    try:
        settings = ReductionSettings.from_dict(given["settings"])
        with quiet_loading():
            vlm = keep_language(open_vlm(given["model"], settings, given.get("device", "cpu"), given.get("dtype")))
            limits: dict[str, Any] = {**given["options"], "api_keys": (), "allowed_hosts": ()}
            options = ServerOptions(**limits)
            engine = LocalEngine(vlm, None, options, ServerMetrics())
            app = build_engine_app(engine, given["secret"])
            listener = open_socket(LOOPBACK, 0)
            port_line.write(json.dumps({"port": listener.getsockname()[1]}) + "\n")
            port_line.flush()
            threading.Thread(target=_end_with_input, daemon=True).start()
            run_app(app, listener, options, ServerState())
    except TorinoError as error:
        log(f"engine failed: {error}", 40)
        return 2
    return 0


def _end_with_input() -> None:
    while sys.stdin.read(1):
        pass
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
