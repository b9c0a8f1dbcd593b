"""What the benchmarks share: paired timing, peak memory, the machine in words, and a page with marked sections."""

from __future__ import annotations

import argparse
import gc
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from datetime import date
from pathlib import Path

import numpy
import scipy
import torch

import torino
from torino.core.io import write_atomic


def time_side_by_side(tasks: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Time all tasks in turn, ``rounds`` times after one warm-up: seconds, one list per task.

    Round by round, so that a slow moment of the machine falls on all of them alike.
    """
    seconds: dict[str, list[float]] = {name: [] for name in tasks}
    for turn in range(rounds + 1):
        for name, task in tasks.items():
            gc.collect()
            begin = time.perf_counter()
            task()
            if turn:
                seconds[name].append(time.perf_counter() - begin)
    return seconds


def time_repeatedly(
    tasks: Mapping[str, Callable[[], object]], rounds: int, least: float = 0.02
) -> dict[str, list[float]]:
    """Time very short tasks, as ``timeit`` does: the mean of as many calls as fit into ``least`` seconds."""
    calls: dict[str, int] = {}
    for name, task in tasks.items():
        begin, calls[name] = time.perf_counter(), 0
        while time.perf_counter() - begin < least:
            task()
            calls[name] += 1

    def several(name: str) -> Callable[[], None]:
        def run() -> None:
            for _ in range(calls[name]):
                tasks[name]()

        return run

    seconds = time_side_by_side({name: several(name) for name in tasks}, rounds)
    return {name: [value / calls[name] for value in values] for name, values in seconds.items()}


def ratio(seconds: list[float], floor: list[float]) -> float:
    """Median over rounds of the ratio of two tasks timed in the same round."""
    return statistics.median(mine / theirs for mine, theirs in zip(seconds, floor, strict=True))


def peak_extra_memory(task: Callable[[], object]) -> float:
    """MiB that the resident memory rises above its level before the task, at its highest (Linux)."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before = _status("VmRSS")
    task()
    return (_status("VmHWM") - before) / 1024


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1])
    raise SystemExit(f"This system does not report {field}; memory can be measured on Linux only.")


def machine() -> str:
    """Processor, cores, versions and date, for the page."""
    model = platform.processor() or "unknown processor"
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    capability = torch.backends.cpu.get_cpu_capability()
    return (
        f"{model}, {os.cpu_count()} cores ({capability}), {torch.get_num_threads()} threads; "
        f"Python {platform.python_version()}, torch {torch.__version__}, numpy {numpy.__version__}, "
        f"scipy {scipy.__version__}, torino {torino.__version__}; {date.today().isoformat()}"
    )


def table(headings: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    line = "| " + " | ".join(headings) + " |"
    rule = "|" + "|".join(" --- " if i == 0 else " ---: " for i in range(len(headings))) + "|"
    return "\n".join([line, rule, *["| " + " | ".join(row) + " |" for row in rows]])


def write_section(page: Path, name: str, text: str) -> None:
    """Replace the section ``name`` of a page, between its marks, and leave the rest alone."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    old = page.read_text(encoding="utf-8") if page.exists() else f"{begin}\n{end}\n"
    if begin not in old or end not in old:
        raise SystemExit(f"{page} has no section between {begin} and {end}. Add these two lines where it belongs.")
    head, rest = old.split(begin, 1)
    tail = rest.split(end, 1)[1]
    new = f"{head}{begin}\n{text.strip()}\n{end}{tail}"

    def write(target: Path) -> None:
        target.write_text(new, encoding="utf-8")

    write_atomic(page, write)


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Arguments every benchmark takes."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--rounds", type=int, default=9, help="timed rounds after a warm-up (default 9)")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--write", type=Path, help="page whose section is rewritten")
    return made
