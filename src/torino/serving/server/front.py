"""A front: tower, reducer and projector here, the language model in another process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import replace

from torino.core.explanation import concept_names
from torino.reducers import Reducer
from torino.serving.server.cache import ImageCache
from torino.serving.server.engine import ChatEngine, ChatInput
from torino.serving.server.halves import check_front, keep_vision
from torino.serving.server.jobs import AnswerEvent, BatchWorker, FinishedAnswer, WorkerJob
from torino.serving.server.metrics import ServerMetrics
from torino.serving.server.options import ServerOptions
from torino.serving.server.supervisor import EngineSupervisor
from torino.serving.server.vision import PreparedImage, Vision
from torino.vlm.session import VLM


class VisionJob(WorkerJob[None]):
    """Images of one request to reduce."""

    def __init__(self, images: Sequence[PreparedImage]) -> None:
        super().__init__()
        self.images = images


class FrontEngine(ChatEngine):
    """Reduce images in this process and send them to an engine, which is supervised.

    Parameters
    ----------
    vlm : VLM
        Its language model is not used; its weights are freed.
    reducer : Reducer, optional
    options : ServerOptions
    metrics : ServerMetrics
    supervisor : EngineSupervisor
    salt : str
        Hash of model and settings, for the cache.
    """

    def __init__(
        self,
        vlm: VLM,
        reducer: Reducer | None,
        options: ServerOptions,
        metrics: ServerMetrics,
        supervisor: EngineSupervisor,
        salt: str = "",
    ) -> None:
        check_front(vlm)
        self.names = concept_names(reducer)
        self.metrics, self.supervisor = metrics, supervisor
        self.keeps_all = reducer is None
        self.vlm = keep_vision(vlm)
        self.vision = Vision(vlm, reducer, ImageCache(options.cache_bytes, salt), metrics, options.max_pixels)
        self.worker = BatchWorker[VisionJob](
            "torino-vision", self._process, batch=options.batch, window=options.window, limit=options.most_requests
        )
        self._decoders = ThreadPoolExecutor(1, "torino-images")
        metrics.gauge("engine_up", "Whether the engine answers.", lambda: float(supervisor.client is not None))
        metrics.gauge("engine_restarts", "Starts of the engine after the first.", lambda: float(supervisor.restarts))

    async def start(self) -> None:
        """Start the engine."""
        await self.supervisor.start()

    async def close(self) -> None:
        """End the engine and the threads."""
        await self.supervisor.close()
        self._decoders.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self.worker.close, 10.0)

    def health(self) -> dict[str, str]:
        """Return the state of both halves."""
        vision = "ok" if self.worker.is_alive else "The thread of the vision tower has ended."
        return {"vision": vision, "engine": self.supervisor.state}

    async def generate(self, chat: ChatInput) -> AsyncGenerator[AnswerEvent, None]:
        """Answer a request."""
        self.supervisor.ready()  # before work that would be lost
        images = await self._reduce(chat.images)
        parts = [image.reduced for image in images if image.reduced is not None]
        reports = tuple(image.report(keeps_all=self.keeps_all) for image in images)
        client = self.supervisor.ready()
        async with aclosing(client.generate(chat.conversation, parts, chat.sampling)) as events:
            async for event in events:
                if isinstance(event, FinishedAnswer):
                    size = event.kv_bytes or self.vlm.adapter.cache_bytes(event.prompt_tokens + event.new_tokens)
                    event = replace(event, images=reports, kv_bytes=size)
                yield event

    async def _reduce(self, files: Sequence[bytes]) -> list[PreparedImage]:
        loop = asyncio.get_running_loop()
        images = [await loop.run_in_executor(self._decoders, self.vision.prepare, data) for data in files]
        if any(image.reduced is None for image in images):
            job = VisionJob(images)
            self.worker.submit(job)
            async with aclosing(job.events()) as events:
                async for _ in events:
                    pass
        return images

    def _process(self, jobs: Sequence[VisionJob]) -> None:
        for job in jobs:
            self.metrics.waiting.observe(time.perf_counter() - job.created)
        errors = self.vision.reduce([image for job in jobs for image in job.images])
        where = 0
        for job in jobs:
            own = [errors[where + i] for i in range(len(job.images)) if where + i in errors]
            where += len(job.images)
            if own:
                job.fail(own[0])
            else:
                job.finish()
