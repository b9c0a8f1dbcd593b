"""A thread that processes queued jobs in batches, and the events that it sends back."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from torino.core.reduction import Reduction
from torino.serving.server.errors import ApiError, internal_error, overloaded, unavailable
from torino.serving.server.logs import log

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class ImageReport:
    """What became of one image.

    Attributes
    ----------
    before, after : int
        Its tokens in the full and in the reduced prompt.
    plans : tuple of Reduction
        One, or one for each tile; empty if all tokens were kept.
    cached : bool
        Whether it was reduced for an earlier request.
    """

    before: int
    after: int
    plans: tuple[Reduction, ...] = ()
    cached: bool = False


@dataclass(frozen=True)
class TextPiece:
    """Text that was generated since the last piece."""

    text: str


@dataclass(frozen=True)
class FinishedAnswer:
    """The end of an answer.

    Attributes
    ----------
    text : str
        The whole answer.
    reason : {"stop", "length"}
    prompt_tokens, new_tokens : int
    kv_bytes : int
        Key-value cache of the prompt and the answer.
    images : tuple of ImageReport
    """

    text: str
    reason: FinishReason
    prompt_tokens: int
    new_tokens: int
    kv_bytes: int = 0
    images: tuple[ImageReport, ...] = ()


AnswerEvent = TextPiece | FinishedAnswer
EventType = TypeVar("EventType")


class WorkerJob(Generic[EventType]):
    """A job of a worker; its events are read by the event loop that created it."""

    def __init__(self) -> None:
        self.created = time.perf_counter()
        self.cancelled = False
        self.done = False
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[EventType | Exception | None] = asyncio.Queue()

    # ------------------------------------------------------------------ for the worker

    def send(self, event: EventType) -> None:
        """Send an event to the event loop."""
        self._put(event)

    def finish(self) -> None:
        """End the events."""
        if not self.done:
            self.done = True
            self._put(None)

    def fail(self, error: Exception) -> None:
        """End the events with an error."""
        if not self.done:
            self.done = True
            self._put(error)

    def _put(self, event: EventType | Exception | None) -> None:
        with suppress(RuntimeError):  # the event loop has ended
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    # ------------------------------------------------------------------ for the event loop

    async def events(self) -> AsyncGenerator[EventType, None]:
        """Yield the events; the job is cancelled if the reader leaves early."""
        try:
            while True:
                event = await self._events.get()
                if event is None:
                    return
                if isinstance(event, Exception):
                    raise event
                yield event
        finally:
            self.cancelled = True


JobType = TypeVar("JobType", bound=WorkerJob[Any])


class BatchWorker(Generic[JobType]):
    """One thread that takes queued jobs, several at a time, and processes them.

    Parameters
    ----------
    name : str
        Name of the thread.
    process : callable
        Called with the jobs of a batch. An exception ends the jobs that it has not ended itself; the thread goes on.
    batch : int
        Most jobs of a batch.
    window : float
        Seconds to wait for more jobs after the first one, if none was queued.
    limit : int
        Most queued jobs.
    """

    def __init__(
        self, name: str, process: Callable[[Sequence[JobType]], None], *, batch: int, window: float, limit: int
    ) -> None:
        self.process, self.batch, self.window = process, batch, window
        self._queue: queue.Queue[JobType | None] = queue.Queue(limit)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._closing = False
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Number of queued jobs."""
        return self._queue.qsize()

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def submit(self, job: JobType) -> None:
        """Queue a job."""
        if self._closing or not self.is_alive:
            raise unavailable("The server is stopping.")
        try:
            self._queue.put_nowait(job)
        except queue.Full:
            raise overloaded(self.waiting) from None

    def close(self, timeout: float | None = None) -> None:
        """End the thread after the running batch; queued jobs are refused."""
        self._closing = True
        with suppress(queue.Full):
            self._queue.put_nowait(None)
        self._thread.join(timeout)

    def _run(self) -> None:
        while not self._closing:
            jobs = [job for job in self._take() if not job.cancelled]
            if not jobs:
                continue
            try:
                self.process(jobs)
            except Exception as error:  # whatever one batch raises, the next ones are processed
                log("batch failed", 40, failed=error)
                for job in jobs:
                    job.fail(error if isinstance(error, ApiError) else internal_error())
            for job in jobs:
                job.finish()
        while not self._queue.empty():
            job = self._queue.get_nowait()
            if job is not None:
                job.fail(unavailable("The server is stopping."))

    def _take(self) -> list[JobType]:
        """Wait for a job, and return it with those that are queued or, if none was, arrive within the window."""
        window = self.window if self._queue.empty() else 0.0
        first = self._queue.get()
        jobs = [] if first is None else [first]
        end = time.perf_counter() + window
        while jobs and len(jobs) < self.batch:
            left = end - time.perf_counter()
            try:
                job = self._queue.get(timeout=left) if left > 0 else self._queue.get_nowait()
            except queue.Empty:
                break
            if job is None:
                break
            jobs.append(job)
        return jobs
