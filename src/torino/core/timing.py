"""Stages: how long each part of a piece of work took, told only to those who ask."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_recorder: ContextVar[dict[str, float] | None] = ContextVar("torino_stages", default=None)


@contextmanager
def recording() -> Generator[dict[str, float]]:
    """Record the seconds of every :func:`stage` inside the block; each thread records for itself.

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
    """Add the time of the block to the stage ``name``; costs nothing where nobody records."""
    seconds = _recorder.get()
    if seconds is None:
        yield
        return
    _settle()
    begin = time.perf_counter()
    try:
        yield
    finally:
        _settle()
        seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - begin


def _settle() -> None:
    """Wait for the GPU, if one is in use: its work is queued, and a clock would only see the queueing."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
