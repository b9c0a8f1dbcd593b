"""Decode photos in threads while the model works on earlier ones."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")


def decoding_threads(device: str) -> int:
    """Return how many threads decode photos for a model on a device.

    A model on the CPU uses its cores, so more decoding threads would only slow it down.
    """
    return 1 if device == "cpu" else min(16, os.cpu_count() or 1)


def prefetch(
    batches: Iterable[Sequence[int]], prepare: Callable[[int], Result], workers: int
) -> Generator[list[Result]]:
    """Yield the prepared photos of batches in order; threads prepare the next batches in the meantime.

    Parameters
    ----------
    batches : iterable of sequences of int
        Indices of the photos of each batch.
    prepare : callable
        Prepares the photo of an index; called in threads.
    workers : int
        Number of threads.
    """
    remaining = iter(batches)
    waiting: deque[list[Future[Result]]] = deque()
    pool = ThreadPoolExecutor(workers, "photos")
    try:
        while True:
            # prepare two batches ahead, or more if that is needed to keep every thread busy
            while len(waiting) < 3 or sum(map(len, waiting)) < 2 * workers:
                batch = next(remaining, None)
                if batch is None:
                    break
                waiting.append([pool.submit(prepare, index) for index in batch])
            if not waiting:
                return
            yield [future.result() for future in waiting.popleft()]
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
