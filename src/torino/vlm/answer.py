"""The answer of a model, with its visual tokens and timings."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from torino.core.errors import BadParameter
from torino.core.reduction import Reduction
from torino.core.timing import synchronize
from torino.datasets.images import Padding
from torino.vlm.trace import Trace


@dataclass(frozen=True)
class Answer:
    """The answer of a model, with its visual tokens and timings.

    Attributes
    ----------
    text : str
        The generated text, without special tokens.
    prompt : str
        The text that the model received, with one marker for each image.
    before, after : int
        Image tokens of the full prompt, and those that the language model received.
    new_tokens : int
        Length of the answer.
    seconds : dict
        ``processor`` (pixels and text), ``tower``, ``question`` (where a method reads it), ``plan`` (the reducer;
        ``sae`` and ``grouping`` are parts of it), ``projector``, ``prefill`` (to the first token), ``decode`` (the
        other tokens), ``total``. One run: the first run of a process includes start-up, unless a baseline was asked
        for.
    padding : {"crop", "square"}
    trace : Trace or None
        The reductions; None where all tokens were kept.
    seen : tuple of PIL images
        The images as the tower received them, one for each reduction.
    baseline : Answer or None
        The answer with all tokens, if it was asked for.
    """

    text: str
    prompt: str
    before: int
    after: int
    new_tokens: int
    seconds: dict[str, float]
    padding: Padding
    trace: Trace | None = None
    seen: tuple[Image.Image, ...] = field(default=(), repr=False)
    baseline: Answer | None = None

    def __str__(self) -> str:
        """Return the text."""
        return self.text

    @property
    def reductions(self) -> tuple[Reduction, ...]:
        """The reduction of each image (or tile); empty where all tokens were kept."""
        return () if self.trace is None else tuple(self.trace)

    @property
    def reduction(self) -> Reduction:
        """The reduction of the first image."""
        if not self.reductions:
            raise BadParameter("All tokens were kept, so there is no reduction. Ask with reducer=...")
        return self.reductions[0]

    @property
    def first_token(self) -> float:
        """Seconds to the first token."""
        return self.seconds["total"] - self.seconds["decode"]

    @property
    def speedup(self) -> dict[str, float]:
        """Ratio to the baseline: ``first_token``, and ``total`` (answers may differ in length)."""
        full = self.baseline
        if full is None:
            return {}
        times = {"first_token": (full.first_token, self.first_token)}
        times["total"] = (full.seconds["total"], self.seconds["total"])
        return {name: slow / max(fast, 1e-9) for name, (slow, fast) in times.items()}

    def to_dict(self) -> dict[str, Any]:
        """Return everything that goes into JSON."""
        result: dict[str, Any] = {
            "answer": self.text.strip(),
            "reducer": self.reductions[0].by if self.reductions else None,
            "padding": self.padding,
            "image_tokens": {"before": self.before, "after": self.after},
            "new_tokens": self.new_tokens,
            "seconds": {name: round(value, 6) for name, value in self.seconds.items()},
        }
        if self.baseline is not None:
            result["baseline"] = self.baseline.to_dict()
            result["speedup"] = {name: round(value, 3) for name, value in self.speedup.items()}
        return result


class FirstTokenClock:
    """A stopping criterion that never stops; it records when the first token is generated."""

    def __init__(self) -> None:
        self.first = 0.0

    def __call__(self, input_ids: Tensor, scores: Any, **others: Any) -> Tensor:
        """Record the time of the first call."""
        if not self.first:
            synchronize()
            self.first = time.perf_counter()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
