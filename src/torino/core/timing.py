"""Opt-in timing of pipeline stages."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_recorder: ContextVar[dict[str, float] | None] = ContextVar("torino_stages", default=None)


@contextmanager
def recording() -> Generator[dict[str, float]]:
    """Record the seconds of every :func:`stage` inside the block, separately for each thread.

    Examples
    --------
    >>> with recording() as seconds:
    ...     with stage("sae"):
    ...         pass
    >>> list(seconds)
    ['sae']
    """
    seconds: dict[str, float] = {}
    token = _recorder.set(seconds)
    try:
        yield seconds
    finally:
        _recorder.reset(token)


@contextmanager
def stage(name: str) -> Generator[None]:
    """Add the time of the block to the stage ``name``; do nothing unless :func:`recording` is active."""
    seconds = _recorder.get()
    if seconds is None:
        yield
        return
    synchronize()
    begin = time.perf_counter()
    try:
        yield
    finally:
        synchronize()
        seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - begin


def synchronize() -> None:
    """Wait for queued GPU work, so that the measured time includes it."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
