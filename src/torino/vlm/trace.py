"""Trace: what happened to each image while a model was reduced."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import overload

from torino.core.reduction import Reduction

# In the order they run; the stages in brackets are part of the one before them.
STAGES = {"tower": ("signals", "steps"), "question": (), "plan": ("sae", "grouping"), "projector": ()}


@dataclass(frozen=True)
class Look:
    """One call of the model: its images, how many tokens each had and has, and the time it took.

    Attributes
    ----------
    reductions : tuple of Reduction
        One per planned unit: an image, or a tile of one.
    before, after : tuple of int
        Placeholders of each image in the prompt, and what is left of them.
    seconds : dict
        ``tower`` and, within it, ``signals`` and the ``steps`` of a reducer at work there; ``question``, where one is
        read to choose patches by; ``plan``, which is all of any other reducer, and within it ``sae`` and ``grouping``;
        ``projector``, which is reducing and projecting.
    bytes_saved : int
        Key-value cache of the full prompt less that of the reduced one, padding included, for one sequence per row.
    padding : str
        How the images were brought to the tower's shape, where that is known: ``"square"``, ``"crop"`` or ``""``.
    """

    reductions: tuple[Reduction, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]
    seconds: dict[str, float]
    bytes_saved: int = 0
    padding: str = ""


@dataclass
class Trace(Sequence[Reduction]):
    """All calls under one ``with reduced(...)``; ``trace[0]`` is the Reduction of the first image."""

    looks: list[Look] = field(default_factory=list[Look])
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, look: Look) -> None:
        """Note a call; threads may share a trace."""
        with self._lock:
            self.looks.append(look)

    @property
    def reductions(self) -> list[Reduction]:
        """Every reduction, in order."""
        return [reduction for look in self.looks for reduction in look.reductions]

    @overload
    def __getitem__(self, index: int) -> Reduction: ...
    @overload
    def __getitem__(self, index: slice) -> list[Reduction]: ...
    def __getitem__(self, index: int | slice) -> Reduction | list[Reduction]:
        """Return the reduction of an image."""
        return self.reductions[index]

    def __len__(self) -> int:
        """Return the number of reductions."""
        return sum(len(look.reductions) for look in self.looks)

    def __iter__(self) -> Iterator[Reduction]:
        """Go through the reductions."""
        return iter(self.reductions)

    @property
    def before(self) -> int:
        """Image tokens that the prompts had."""
        return sum(sum(look.before) for look in self.looks)

    @property
    def after(self) -> int:
        """Image tokens that the language model got."""
        return sum(sum(look.after) for look in self.looks)

    @property
    def seconds(self) -> dict[str, float]:
        """Time by stage over all calls."""
        total: dict[str, float] = {}
        for look in self.looks:
            for name, value in look.seconds.items():
                total[name] = total.get(name, 0.0) + value
        known = [name for stage, parts in STAGES.items() for name in (stage, *parts)]
        return {name: total[name] for name in known if name in total} | total

    @property
    def bytes_saved(self) -> int:
        """Key-value cache saved over all calls."""
        return sum(look.bytes_saved for look in self.looks)

    def __reduce__(self) -> tuple[type[Trace], tuple[list[Look]]]:
        """Copy and pickle the calls; the lock stays here."""
        return Trace, (list(self.looks),)

    def summary(self) -> str:
        """A table: a line for each call, then the times by stage."""
        if not self.looks:
            return "No image was seen."
        lines = [f"{'call':>4}  {'images':>6}  {'tokens':>15}  {'removed':>7}  {'cache saved':>11}  reducer"]
        for number, look in enumerate(self.looks):
            before, after = sum(look.before), sum(look.after)
            by = look.reductions[0].by if look.reductions else ""
            lines.append(
                f"{number:>4}  {len(look.before):>6}  {f'{before} -> {after}':>15}  "
                f"{1 - after / max(before, 1):>7.1%}  {look.bytes_saved / 2**20:>7.1f} MiB  {by}"
            )
        return "\n".join([*lines, f"time: {self._times()}"])

    def _times(self) -> str:
        seconds = self.seconds
        said: list[str] = []
        for stage, parts in STAGES.items():
            inner = ", ".join(f"{name} {seconds.pop(name) * 1e3:.1f}" for name in parts if name in seconds)
            if stage in seconds:
                said.append(f"{stage} {seconds.pop(stage) * 1e3:.1f} ms" + (f" ({inner})" if inner else ""))
        return ", ".join([*said, *[f"{name} {value * 1e3:.1f} ms" for name, value in seconds.items()]])
