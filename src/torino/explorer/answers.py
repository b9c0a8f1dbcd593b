"""Stream answers to the page: one JSON object per line, while the model generates in a thread."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torino.core.errors import TorinoError
from torino.core.extras import optional_import
from torino.core.reduction import Reduction
from torino.explorer.model import ALL_TOKENS, ExplorerModel, InspectedPhoto
from torino.explorer.views import view_reduction
from torino.serving.server.errors import from_torino, internal_error
from torino.serving.server.logs import log

with optional_import("torino explore needs", "torino[serve]"):
    from pydantic import BaseModel, ConfigDict, Field

THREADS = 4  # one generates, the others wait or end


class AnswerRequest(BaseModel):
    """A question about a photo, answered with the tokens of one or several methods."""

    model_config = ConfigDict(extra="forbid")

    question: str = Field(min_length=1, max_length=2000)
    methods: list[str] = Field(default=[ALL_TOKENS], min_length=1, max_length=12)
    ablate: list[int] = Field(default=[], max_length=32)
    max_tokens: int = Field(default=48, ge=1)


class AnswerStreams:
    """Answer requests in a few threads.

    Parameters
    ----------
    model : ExplorerModel
    max_tokens : int
        Longest answer.
    """

    def __init__(self, model: ExplorerModel, max_tokens: int) -> None:
        self.model, self.max_tokens = model, max_tokens
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="answers")

    def close(self) -> None:
        """Let running threads end."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def stream(self, photo: InspectedPhoto, wanted: AnswerRequest) -> AsyncGenerator[bytes]:
        """Yield the events of all methods: ``plan``, ``text`` and ``done`` or ``error``, each with its ``method``.

        If the visitor leaves, generation stops at the next token.
        """
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[dict[str, Any] | None]()
        left = threading.Event()

        def send(event: dict[str, Any] | None) -> None:
            if not left.is_set():
                loop.call_soon_threadsafe(queue.put_nowait, event)

        def work() -> None:
            try:
                self._answer_all(photo, wanted, send, left)
            finally:
                send(None)

        self._pool.submit(work)
        try:
            while (event := await queue.get()) is not None:
                yield json.dumps(event).encode() + b"\n"
        finally:
            left.set()

    def _answer_all(self, photo: InspectedPhoto, wanted: AnswerRequest, send: Any, left: threading.Event) -> None:
        for number, spec in enumerate(wanted.methods):
            if left.is_set():
                return
            try:
                self._answer(photo, wanted, number, spec, send, left)
            except TorinoError as error:
                send({"method": number, "event": "error", "message": _sentence(from_torino(error))})
            except Exception as error:  # other methods may still answer
                log("answer failed", logging.ERROR, failed=error)
                send({"method": number, "event": "error", "message": _sentence(internal_error())})

    def _answer(
        self, photo: InspectedPhoto, wanted: AnswerRequest, number: int, spec: str, send: Any, left: threading.Event
    ) -> None:
        begin = time.perf_counter()

        def on_plan(reduction: Reduction, seconds: float) -> None:
            send({"method": number, "event": "plan", "reduction": view_reduction(reduction, spec, seconds)})

        def on_text(text: str) -> None:
            send({"method": number, "event": "text", "text": text})

        answer = self.model.answer(
            photo,
            wanted.question,
            spec,
            ablate=_unique(wanted.ablate),
            max_tokens=min(wanted.max_tokens, self.max_tokens),
            on_plan=on_plan,
            on_text=on_text,
            cancelled=left.is_set,
        )
        send(
            {
                "method": number,
                "event": "done",
                "answer": answer.text,
                "tokens": answer.tokens,
                "before": answer.before,
                "new_tokens": answer.new_tokens,
                "seconds": {name: round(value, 4) for name, value in answer.seconds.items()},
                "total": round(time.perf_counter() - begin, 4),
            }
        )


def _unique(latents: Sequence[int]) -> list[int]:
    return list(dict.fromkeys(latents))


def _sentence(error: Any) -> str:
    return str(error.to_dict()["error"]["message"])
