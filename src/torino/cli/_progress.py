"""Progress display: bars on a terminal, and plain lines if the output is piped to a file or another program."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

LINE_INTERVAL = 10.0  # minimum number of seconds between two lines


class ProgressUpdate(Protocol):
    """Function that reports the progress of a phase."""

    def __call__(self, phase: str, done: int, total: int | None = None, note: str = "") -> None:
        """Report that ``done`` of ``total`` items of a phase are done; ``note`` is shown until the next note."""
        ...


@contextmanager
def progress(
    console: Console, phases: Mapping[str, int] | None = None, *, interval: float = LINE_INTERVAL
) -> Generator[ProgressUpdate]:
    """Show the progress of some phases, and yield the function that reports it.

    Parameters
    ----------
    console : Console
        On a terminal, each phase gets a bar when it starts, and the bars are removed at the end. Otherwise lines such
        as ``training 120/5000, 2 min left, 3.4/s`` are printed.
    phases : mapping, optional
        Number of items of each phase; others are given when progress is reported.
    interval : float
        Minimum number of seconds between two lines.
    """
    totals = dict(phases or {})
    notes: dict[str, str] = {}
    show = _show_bars(console) if console.is_terminal else _print_lines(console, interval)
    with show as update:

        def report(phase: str, done: int, total: int | None = None, note: str = "") -> None:
            if total is not None:
                totals[phase] = total
            notes[phase] = note or notes.get(phase, "")
            update(phase, done, totals[phase], notes[phase])

        yield report


@contextmanager
def _show_bars(console: Console) -> Generator[Callable[[str, int, int, str], None]]:
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        _RateColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}", markup=False),
    )
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=console, transient=True) as bars:

        def update(phase: str, done: int, total: int, note: str) -> None:
            if phase not in tasks:
                tasks[phase] = bars.add_task(phase, total=total, completed=done, note=note)
            bars.update(tasks[phase], completed=done, total=total, note=note)

        yield update


class _RateColumn(TextColumn):
    """Items per second."""

    def __init__(self) -> None:
        super().__init__("")

    def render(self, task: Task) -> Text:
        return Text(f"{task.speed:.1f}/s" if task.speed else "")


@contextmanager
def _print_lines(console: Console, interval: float) -> Generator[Callable[[str, int, int, str], None]]:
    starts: dict[str, tuple[int, float]] = {}
    last_line = time.monotonic()

    def update(phase: str, done: int, total: int, note: str) -> None:
        nonlocal last_line
        now = time.monotonic()
        first_done, first_time = starts.setdefault(phase, (done, now))
        if now - last_line < interval:
            return
        last_line = now
        parts = [f"{phase} {done}/{total}"]
        rate = (done - first_done) / (now - first_time) if now > first_time else 0.0
        if rate:
            parts += [f"{format_duration((total - done) / rate)} left", f"{rate:.1f}/s"]
        parts += [note] if note else []
        console.print(", ".join(parts), highlight=False, soft_wrap=True, markup=False)

    yield update


def format_duration(seconds: float) -> str:
    """Format a duration in its largest unit.

    Examples
    --------
    >>> format_duration(12.3), format_duration(130), format_duration(9000)
    ('12 s', '2 min', '2.5 h')
    """
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 3600 else f"{seconds / 3600:.1f} h"
