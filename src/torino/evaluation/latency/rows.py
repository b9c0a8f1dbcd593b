"""Rows and sizes of a latency benchmark."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from torino.core.checks import to_integer
from torino.core.errors import BadParameter
from torino.evaluation.protocol import Setting
from torino.reducers import Reducer


@dataclass
class BenchRow:
    """The measurements of one method; times in seconds.

    Attributes
    ----------
    setting : Setting
    reducer : Reducer or None
        None keeps all tokens.
    tokens : list of int
        Visual tokens of each image after reduction.
    module, floor : list of float
        The reducer alone, from the tower's tokens to the reduced ones, and gathering as many tokens.
    first, answer : list of float
        Time to the first token, and to the end of the answer.
    peak : float or None
        Peak increase of memory in MB.
    made : tuple of str
        Signals that were random because the tokens lack them.
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
        """Return everything for JSON."""
        setting = self.setting
        pair = setting.tier.partition(" [")[0]  # with several SAEs, the label already names this one
        label = f"{setting.label} ({pair})" if setting.dynamic and "," in pair else setting.label
        module, floor = spread(self.module), spread(self.floor)
        return {
            "label": label,
            "method": setting.method,
            "spec": setting.spec or "full",
            "sae": setting.sae,
            "tier": setting.tier,
            "budget": setting.budget,
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
    """Return mean, standard deviation and median in milliseconds; None without measurements.

    Examples
    --------
    >>> spread([0.001, 0.003])
    {'mean': 2.0, 'std': 1.4142, 'median': 2.0}
    """
    if not seconds:
        return None
    ms = [1e3 * value for value in seconds]
    std = statistics.stdev(ms) if len(ms) > 1 else 0.0
    summary = {"mean": statistics.fmean(ms), "std": std, "median": statistics.median(ms)}
    return {name: round(value, 4) for name, value in summary.items()}


@dataclass(frozen=True)
class BenchPlan:
    """The size of a benchmark.

    Attributes
    ----------
    images : int
        Images on which the reducer is timed; a smaller source is repeated.
    warmups : int
        Untimed images before that.
    answers : int
        Images on which whole answers are timed, after one untimed answer of each method; 0 for none.
    length : int
        Tokens of each answer. All answers have this length; otherwise shorter answers would look faster.
    seed : int
        Selects the images.
    """

    images: int = 50
    warmups: int = 10
    answers: int = 10
    length: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse sizes that measure nothing."""
        for name, least in (("images", 1), ("warmups", 0), ("answers", 0), ("length", 1)):
            value = to_integer(name, getattr(self, name))
            if value < least:
                raise BadParameter(f"{name} must be at least {least}, got {value}.")
            object.__setattr__(self, name, value)
        object.__setattr__(self, "seed", to_integer("seed", self.seed, -(2**63), 2**63 - 1))

    def pick(self, available: int) -> list[int]:
        """Draw image numbers at random; none repeats before all were used."""
        source = torch.Generator().manual_seed(self.seed)
        picked: list[int] = []
        while len(picked) < self.images:
            picked += torch.randperm(available, generator=source).tolist()
        return picked[: self.images]
