"""The engine in the server's own process: one thread runs the whole model with transformers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing

from torino.core.explanation import concept_names
from torino.reducers import Reducer
from torino.serving.server.cache import ImageCache
from torino.serving.server.engine import ChatEngine, ChatInput
from torino.serving.server.errors import ApiError
from torino.serving.server.jobs import AnswerEvent, BatchWorker
from torino.serving.server.language import AnswerJob, LanguageModel
from torino.serving.server.metrics import ServerMetrics
from torino.serving.server.options import ServerOptions
from torino.serving.server.vision import PreparedImage, Vision
from torino.vlm.session import VLM


class LocalEngine(ChatEngine):
    """Tower, reducer and language model in one thread, which answers several requests together.

    Images are decoded in another thread, so that a large one does not delay the model.

    Parameters
    ----------
    vlm : VLM
    reducer : Reducer, optional
        None keeps all tokens.
    options : ServerOptions
    metrics : ServerMetrics
    salt : str
        Hash of model and settings, for the cache.
    """

    def __init__(
        self, vlm: VLM, reducer: Reducer | None, options: ServerOptions, metrics: ServerMetrics, salt: str = ""
    ) -> None:
        self.names = concept_names(reducer)
        self.metrics = metrics
        self.vision = Vision(vlm, reducer, ImageCache(options.cache_bytes, salt), metrics, options.max_pixels)
        self.language = LanguageModel(vlm, reducer, metrics)
        self.worker = BatchWorker[AnswerJob](
            "torino-model",
            self._process,
            batch=options.batch,
            window=options.window,
            limit=options.most_requests,
        )
        self._decoders = ThreadPoolExecutor(1, "torino-images")

    async def close(self) -> None:
        """End the threads."""
        self._decoders.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self.worker.close, 10.0)

    def health(self) -> dict[str, str]:
        """Return the state of the model's thread."""
        return {"model": "ok" if self.worker.is_alive else "The thread of the model has ended."}

    async def generate(self, chat: ChatInput) -> AsyncGenerator[AnswerEvent, None]:
        """Answer a request."""
        async with aclosing(self.answer(chat, await self.prepare(chat.images))) as events:
            async for event in events:
                yield event

    async def prepare(self, files: Sequence[bytes]) -> list[PreparedImage]:
        """Decode the images of a request."""
        loop = asyncio.get_running_loop()
        return [await loop.run_in_executor(self._decoders, self.vision.prepare, data) for data in files]

    async def answer(self, chat: ChatInput, images: Sequence[PreparedImage]) -> AsyncGenerator[AnswerEvent, None]:
        """Answer a request whose images are decoded."""
        job = AnswerJob(chat.conversation, images, chat.sampling)
        self.worker.submit(job)
        async with aclosing(job.events()) as events:
            async for event in events:
                yield event

    def _process(self, jobs: Sequence[AnswerJob]) -> None:
        for job in jobs:
            self.metrics.waiting.observe(time.perf_counter() - job.created)
        ready = list(jobs)
        if self.vision.separate:
            images = [image for job in jobs for image in job.images]
            errors = self.vision.reduce(images)
            refused: dict[int, ApiError] = {}
            where = 0
            for number, job in enumerate(jobs):
                for _ in job.images:
                    if where in errors:
                        refused.setdefault(number, errors[where])
                    where += 1
            for number, error in refused.items():
                jobs[number].fail(error)
            ready = [job for number, job in enumerate(jobs) if number not in refused and not job.cancelled]
        if ready:
            self.language.answer(ready)
