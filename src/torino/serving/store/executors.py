"""Run the shard function in this process or in several processes of this machine."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context, parent_process
from typing import Any, Protocol

from torino.core.errors import TorinoError
from torino.serving.store.format import StoreSettings
from torino.serving.store.worker import OnError, ShardWorker, StoreFacts, StoreJob
from torino.vlm.loading import quiet_loading

POLL_SECONDS = 0.5  # between two reports of progress
SLOTS = 4096  # shards that are handed to the processes at once, each with a counter of its images
MAX_DEATHS = 3  # times that processes may die without a new shard in between

Report = Callable[[int], None]
"""Function that receives the number of images that are done in this run."""


class Executor(Protocol):
    """Runs the shard function; the shards have the same bytes whichever executor runs it."""

    def inspect(self) -> StoreFacts:
        """Return the description of model and images, by the first worker."""
        ...

    def run(
        self, shards: Sequence[int], settings: StoreSettings, on_error: OnError, report: Report
    ) -> Generator[tuple[int, int]]:
        """Write shards; yield the number of each finished one and how many of its images were skipped."""
        ...

    def close(self) -> None:
        """Stop the workers."""
        ...


class LocalExecutor:
    """Write shards one after the other in this process."""

    def __init__(self, job: StoreJob) -> None:
        with quiet_loading():
            self._worker = ShardWorker(job)

    def inspect(self) -> StoreFacts:
        """Return the description of model and images."""
        return self._worker.inspect()

    def run(
        self, shards: Sequence[int], settings: StoreSettings, on_error: OnError, report: Report
    ) -> Generator[tuple[int, int]]:
        """Write shards; yield the number of each finished one and how many of its images were skipped."""
        done = 0

        def count(images: int) -> None:
            nonlocal done
            done += images
            report(done)

        for number in shards:
            yield number, self._worker.write(number, settings, on_error, count)

    def close(self) -> None:
        """Do nothing: there are no other processes."""


class ProcessExecutor:
    """Write shards in several processes of this machine.

    A process that dies, for example because it was killed, is replaced, and its shard is written again. If the main
    process dies, the others end too.

    Parameters
    ----------
    job : StoreJob
    processes : int
    """

    def __init__(self, job: StoreJob, processes: int) -> None:
        self._job, self._processes = job, processes
        # processes start from scratch: a copy of this process, with the threads of torch, could hang
        self._context = get_context("spawn")
        # memory without locks: a process that is killed while it holds a lock would stop all others
        self._counts: Any = self._context.RawArray("q", SLOTS)
        self._stop: Any = self._context.RawValue("b", 0)
        self._pool = self._new_pool()

    def _new_pool(self) -> ProcessPoolExecutor:
        shared = (self._job, self._counts, self._stop)
        return ProcessPoolExecutor(self._processes, self._context, _start_worker, shared)

    def inspect(self) -> StoreFacts:
        """Return the description of model and images, by one of the processes."""
        try:
            return self._pool.submit(_inspect).result()
        except BrokenProcessPool as error:
            raise TorinoError(
                "A process died while it loaded the model. The memory may be too small for it: choose a smaller model "
                "or --dtype bfloat16."
            ) from error

    def run(
        self, shards: Sequence[int], settings: StoreSettings, on_error: OnError, report: Report
    ) -> Generator[tuple[int, int]]:
        """Write shards; yield the number of each finished one and how many of its images were skipped."""
        missing, deaths, finished = list(shards), 0, 0
        while missing:
            try:
                for number, skipped in self._run_pool(missing[:SLOTS], settings, on_error, finished, report):
                    missing.remove(number)
                    finished, deaths = finished + len(settings.photo_range(number)), 0
                    yield number, skipped
            except BrokenProcessPool as error:
                deaths += 1
                if deaths == MAX_DEATHS:
                    raise TorinoError(
                        f"Processes died {MAX_DEATHS} times without finishing another shard. The memory may be too "
                        "small: use fewer --processes or a smaller --batch. Finished shards are kept."
                    ) from error
                self._pool.shutdown(wait=True, cancel_futures=True)
                self._pool = self._new_pool()

    def _run_pool(
        self, shards: Sequence[int], settings: StoreSettings, on_error: OnError, finished: int, report: Report
    ) -> Generator[tuple[int, int]]:
        """Write shards until they are finished or a process dies."""
        waiting: dict[Future[int], int] = {}
        for slot, number in enumerate(shards):
            self._counts[slot] = 0
            waiting[self._pool.submit(_write, slot, number, settings, on_error)] = number
        while waiting:
            done, _ = wait(waiting, POLL_SECONDS, FIRST_COMPLETED)
            report(finished + sum(self._counts[: len(shards)]))
            broken: BrokenProcessPool | None = None
            for future in sorted(done, key=waiting.__getitem__):
                number = waiting.pop(future)
                try:
                    yield number, future.result()
                except BrokenProcessPool as error:  # other shards may have been finished before
                    broken = error
            if broken is not None:
                raise broken

    def close(self) -> None:
        """Stop the processes after their current batch."""
        self._stop.value = 1
        self._pool.shutdown(wait=True, cancel_futures=True)


# ---------------------------------------------------------------------- in the other processes


class _StopWork(Exception):
    """Ends the work on a shard because the run ends."""


class _State:
    """What a process of the pool uses for all its shards."""

    job: StoreJob
    counts: Any
    stop: Any
    worker: ShardWorker | None = None


def _start_worker(job: StoreJob, counts: Any, stop: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all processes; the main one ends the others
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _State.job, _State.counts, _State.stop = job, counts, stop


def _end_with_parent() -> None:
    """End this process when the main process dies; shards are written atomically, so this is safe at any time."""
    parent = parent_process()
    assert parent is not None  # this runs in a process of the pool
    parent.join()
    os._exit(1)


def _worker() -> ShardWorker:
    if _State.worker is None:  # not in the initializer, whose errors cannot be passed on
        with quiet_loading():
            _State.worker = ShardWorker(_State.job)
    return _State.worker


def _inspect() -> StoreFacts:
    return _worker().inspect()


def _write(slot: int, number: int, settings: StoreSettings, on_error: OnError) -> int:
    def count(images: int) -> None:
        _State.counts[slot] += images
        if _State.stop.value:
            raise _StopWork

    return _worker().write(number, settings, on_error, count)
