"""Explanation: one output token, told in words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isnan
from typing import Any


@dataclass(frozen=True)
class Explanation:
    """What one output token is made of, and why it is there. ``print`` it for a sentence.

    Attributes
    ----------
    token, of : int
        Its number, and how many output tokens there are.
    role : str
        ``"primary"``, ``"padding"``, …
    anchor : int
        The patch whose place it takes, −1 for none.
    grid : (int, int)
        Patch grid of the image.
    sources, weights : tuple
        Patches it is computed from (N is the CLS token) and their weights.
    stands_for : tuple of int
        Patches that it represents, whether or not they have weight in it.
    concept : int or None
        The latent that most of these patches share.
    name : str or None
        A word for that latent, where one is known.
    score : float
        What the method ranked it by; NaN where it has no score.
    """

    token: int
    of: int
    role: str
    anchor: int
    grid: tuple[int, int]
    sources: tuple[int, ...]
    weights: tuple[float, ...]
    stands_for: tuple[int, ...]
    concept: int | None
    name: str | None
    score: float

    def place(self, patch: int) -> tuple[int, int]:
        """Row and column of a patch on the grid."""
        return divmod(patch, self.grid[1])

    def __str__(self) -> str:
        """Tell the story in one or two sentences."""
        parts = [f"Token {self.token} of {self.of} ({self.role})"]
        patches = self.grid[0] * self.grid[1]
        if self.anchor >= 0:
            row, column = self.place(self.anchor)
            parts.append(f"takes the place of patch {self.anchor} (row {row}, column {column})")
        else:
            parts.append("has no place of its own")
        if len(self.sources) == 1 and self.weights[0] == 1:
            parts.append("and is the CLS token" if self.sources[0] == patches else "and is that patch, unchanged")
        elif self.sources:
            what = "tokens" if patches in self.sources else "patches"
            parts.append(f"and sums {len(self.sources)} {what} with weights {_span(self.weights)}")
        text = " ".join(parts) + "."
        if len(self.stands_for) > 1:
            text += f" It stands for {len(self.stands_for)} patches, {len(self.stands_for) / patches:.0%} of the image."
        if self.concept is not None:
            says = "Their most common concept is" if len(self.stands_for) > 1 else "Its concept is"
            text += f" {says} {self.concept}" + (f" ({self.name})." if self.name else ".")
        if not isnan(self.score):
            text += f" Score {self.score:.3g}."
        return text


def names_of(reducer: object) -> Mapping[int, str]:
    """The words that the SAE of a reducer has for its concepts, for :meth:`Reduction.explain` and for pictures.

    None where it reads no SAE or the SAE has no names. Reducers around another one are looked into.
    """
    seen: Any = reducer
    while seen is not None:
        names: Mapping[int, str] | None = getattr(getattr(seen, "sae", None), "names", None)
        if names:
            return names
        seen = getattr(seen, "inner", None)
    return {}


def _span(weights: tuple[float, ...]) -> str:
    low, high = min(weights), max(weights)
    return f"of {low:.3g}" if high - low < 1e-6 * max(abs(high), 1) else f"from {low:.3g} to {high:.3g}"
