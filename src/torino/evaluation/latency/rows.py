"""What is measured of each method, how much of it, and how it is told."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from torino.core.errors import BadParameter
from torino.evaluation.protocol import Setting
from torino.reducers import Reducer


@dataclass
class BenchRow:
    """One method and what was measured of it; times in seconds.

    Attributes
    ----------
    setting : Setting
    reducer : Reducer or None
        None keeps all tokens.
    tokens : list of int
        Visual tokens left of each image.
    module, floor : list of float
        The reducer alone, from the tower's tokens to the reduced ones, and a gather of as many tokens.
    first, answer : list of float
        Until the first token of the answer, and until its end.
    peak : float or None
        MB that memory rose by, at its highest.
    made : tuple of str
        Signals that were made up for it, because the tokens did not carry them.
    """

    setting: Setting
    reducer: Reducer | None
    tokens: list[int] = field(default_factory=list[int])
    module: list[float] = field(default_factory=list[float])
    floor: list[float] = field(default_factory=list[float])
    first: list[float] = field(default_factory=list[float])
    answer: list[float] = field(default_factory=list[float])
    peak: float | None = None
    made: tuple[str, ...] = ()

    def facts(self) -> dict[str, Any]:
        """Everything, for JSON."""
        one = self.setting
        pair = one.tier.partition(" [")[0]  # where there are several SAEs, the label has this one already
        label = f"{one.label} ({pair})" if one.dynamic and "," in pair else one.label
        module, floor = spread(self.module), spread(self.floor)
        return {
            "label": label,
            "method": one.method,
            "spec": one.spec or "full",
            "sae": one.sae,
            "tier": one.tier,
            "budget": one.budget,
            "tokens": round(statistics.fmean(self.tokens), 2) if self.tokens else None,
            "tokens_range": [min(self.tokens), max(self.tokens)] if self.tokens else None,
            "module_ms": module,
            "floor_ms": floor,
            "above_floor_ms": None if module is None or floor is None else round(module["mean"] - floor["mean"], 4),
            "first_token_ms": spread(self.first),
            "answer_ms": spread(self.answer),
            "peak_mb": None if self.peak is None else round(self.peak, 2),
            "images": len(self.module),
            "answers": len(self.answer),
            "made_up_signals": list(self.made),
        }


def spread(seconds: Sequence[float]) -> dict[str, float] | None:
    """Mean, standard deviation and median in milliseconds; None for no measurement.

    Examples
    --------
    >>> spread([0.001, 0.003])
    {'mean': 2.0, 'std': 1.4142, 'median': 2.0}
    """
    if not seconds:
        return None
    ms = [1e3 * value for value in seconds]
    std = statistics.stdev(ms) if len(ms) > 1 else 0.0
    told = {"mean": statistics.fmean(ms), "std": std, "median": statistics.median(ms)}
    return {name: round(value, 4) for name, value in told.items()}


@dataclass(frozen=True)
class BenchPlan:
    """How much is measured.

    Attributes
    ----------
    images : int
        Images that the module is timed on; a source of fewer goes round.
    warmups : int
        Images that all methods run on before, untimed.
    answers : int
        Images that whole answers are timed on, after one untimed answer of each method; 0 for none.
    length : int
        Tokens of each answer. All answers are made this long, or a method that talks less would look faster.
    seed : int
        Chooses the images out of more.
    """

    images: int = 50
    warmups: int = 10
    answers: int = 10
    length: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what measures nothing."""
        for name, least in (("images", 1), ("warmups", 0), ("answers", 0), ("length", 1)):
            if getattr(self, name) < least:
                raise BadParameter(f"{name} must be at least {least}, got {getattr(self, name)}.")

    def pick(self, available: int) -> list[int]:
        """Numbers of the images, drawn at random without repeating one before all were used."""
        source = torch.Generator().manual_seed(self.seed)
        picked: list[int] = []
        while len(picked) < self.images:
            picked += torch.randperm(available, generator=source).tolist()
        return picked[: self.images]
