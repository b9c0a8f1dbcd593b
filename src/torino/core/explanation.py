"""Explanation of one output token in words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isnan
from typing import Any


@dataclass(frozen=True)
class Explanation:
    """Composition and role of one output token. ``print`` it for a readable summary.

    Attributes
    ----------
    token, of : int
        Index of the token, and number of output tokens.
    role : str
        ``"primary"``, ``"padding"``, …
    anchor : int
        Patch whose position the token takes; −1 for none.
    grid : (int, int)
        Patch grid of the image, or of a frame of the video.
    sources, weights : tuple
        Patches that the token is computed from (N is the CLS token), and their weights.
    stands_for : tuple of int
        Patches that the token represents, with or without a weight in it.
    concept : int or None
        The latent that most of these patches share; None if there is none.
    name : str or None
        Name of that latent, if known.
    score : float
        Score that the method ranked the token by; NaN if it has none.
    frames : int
        Number of frames.
    times : tuple of float, optional
        Time of each frame in seconds.
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
    frames: int = 1
    times: tuple[float, ...] | None = None

    def place(self, patch: int) -> tuple[int, int]:
        """Return row and column of a patch on the grid of its frame."""
        return patch // self.grid[1] % self.grid[0], patch % self.grid[1]

    def frame(self, patch: int) -> int:
        """Return the frame of a patch."""
        return patch // (self.grid[0] * self.grid[1])

    def __str__(self) -> str:
        """Return a summary of one or two sentences."""
        parts = [f"Token {self.token} of {self.of} ({self.role})"]
        patches, whole = self.frames * self.grid[0] * self.grid[1], "image" if self.frames == 1 else "video"
        if self.anchor >= 0:
            row, column = self.place(self.anchor)
            time = self._describe_frame(self.frame(self.anchor))
            parts.append(f"takes the place of patch {self.anchor} ({time}row {row}, column {column})")
        else:
            parts.append("has no position on the grid")
        if len(self.sources) == 1 and self.weights[0] == 1:
            parts.append("and is the CLS token" if self.sources[0] == patches else "and is that patch, unchanged")
        elif self.sources:
            unit = "tokens" if patches in self.sources else "patches"
            parts.append(f"and sums {len(self.sources)} {unit} with weights {_format_range(self.weights)}")
        text = " ".join(parts) + "."
        if len(self.stands_for) > 1:
            text += (
                f" It stands for {len(self.stands_for)} patches, {len(self.stands_for) / patches:.0%} of the {whole}."
            )
            frames = {self.frame(patch) for patch in self.stands_for}
            text = text if len(frames) == 1 else f"{text[:-1]}, in {len(frames)} of {self.frames} frames."
        if self.concept is not None:
            subject = "Their most common concept is" if len(self.stands_for) > 1 else "Its concept is"
            text += f" {subject} {self.concept}" + (f" ({self.name})." if self.name else ".")
        if not isnan(self.score):
            text += f" Score {self.score:.3g}."
        return text

    def _describe_frame(self, frame: int) -> str:
        if self.frames == 1:
            return ""
        return f"frame {frame}, " if self.times is None else f"frame {frame} at {self.times[frame]:.4g} s, "


def concept_names(reducer: object) -> Mapping[int, str]:
    """Return the concept names of a reducer's SAE, for :meth:`Reduction.explain` and for figures.

    The mapping is empty if the reducer has no SAE or the SAE has no names. Wrapped reducers (``inner``) are searched.
    """
    current: Any = reducer
    while current is not None:
        names: Mapping[int, str] | None = getattr(getattr(current, "sae", None), "names", None)
        if names:
            return names
        current = getattr(current, "inner", None)
    return {}


def _format_range(weights: tuple[float, ...]) -> str:
    low, high = min(weights), max(weights)
    return f"of {low:.3g}" if high - low < 1e-6 * max(abs(high), 1) else f"from {low:.3g} to {high:.3g}"


def format_removed(before: float, after: float) -> str:
    """Format the share of tokens that a reduction removed; a budget can also ask for more tokens than there were.

    Examples
    --------
    >>> format_removed(576, 127), format_removed(576, 576), format_removed(576, 600)
    ('78.0%', 'none', '4.2% added')
    """
    share = 1 - after / max(before, 1)
    return "none" if share == 0 else f"{share:.1%}" if share > 0 else f"{-share:.1%} added"


def describe_change(before: float, after: float) -> str:
    """Say how many tokens a reduction removed or added.

    Examples
    --------
    >>> describe_change(576, 127), describe_change(576, 577)
    ('78.0% removed', '0.2% added')
    """
    text = format_removed(before, after)
    return text if text.endswith("added") else f"{text} removed"
