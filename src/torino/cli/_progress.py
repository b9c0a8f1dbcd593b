"""Progress bars, alike in all commands that ask or measure: what is done, of how many, and how long it still takes."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


def phase_bars(console: Console, *, transient: bool = False) -> tuple[Progress, Callable[[str, int, int], None]]:
    """Bars for work in phases, and what to call with a phase, how much of it is done and how much there is.

    A phase gets its bar when it is first told of. ``transient`` takes the bars away at the end.
    """
    bars = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=transient,
    )
    shown: dict[str, TaskID] = {}

    def progress(phase: str, done: int, total: int) -> None:
        if phase not in shown:
            shown[phase] = bars.add_task(phase, total=total)
        bars.update(shown[phase], completed=done, total=total)

    return bars, progress
