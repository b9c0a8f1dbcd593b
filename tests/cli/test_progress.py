"""Progress display: plain lines if the output is piped, bars on a terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from torino.cli import _progress
from torino.cli._progress import progress


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(_progress, "time", clock)
    return clock


def piped() -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, force_terminal=False, width=40), file


def test_lines_are_printed_at_most_every_ten_seconds(clock: Clock) -> None:
    console, file = piped()
    with progress(console, {"training": 5000}) as update:
        for step in range(121):
            update("training", step)
            clock.now += 0.25
    assert file.getvalue().splitlines() == [
        "training 40/5000, 21 min left, 4.0/s",
        "training 80/5000, 20 min left, 4.0/s",
        "training 120/5000, 20 min left, 4.0/s",
    ]


def test_rate_ignores_earlier_runs_and_notes_are_kept(clock: Clock) -> None:
    console, file = piped()
    with progress(console) as update:
        update("photos", 900, 1000, note="2 skipped")
        clock.now += 20
        update("photos", 920, 1000)
    assert file.getvalue() == "photos 920/1000, 1 min left, 1.0/s, 2 skipped\n"  # not wrapped at 40 columns


def test_short_work_prints_nothing(clock: Clock) -> None:
    console, file = piped()
    with progress(console, {"photos": 2}) as update:
        update("photos", 0)
        update("photos", 2)
    assert file.getvalue() == ""


def test_terminal_shows_a_bar_per_phase() -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=100)
    with progress(console, {"x1": 4, "x2": 4}) as update:
        update("x1", 4, note="FVU 0.1")
        update("x2", 1)
    assert "x1" in file.getvalue()
    assert "4/4" in file.getvalue()
    assert "FVU 0.1" in file.getvalue()
    assert "1/4" in file.getvalue()
