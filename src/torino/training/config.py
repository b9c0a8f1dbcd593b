"""TrainConfig: everything that decides what a training run computes, in one record."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypeVar, get_args

from torino.core.errors import BadParameter

ObjectiveName = Literal["matryoshka", "batchtopk", "topk", "relu"]
Bias = Literal["median", "mean", "zero"]
Precision = Literal["float32", "bfloat16", "float16"]
T = TypeVar("T")

PAPER: dict[str, Any] = {"kind": "matryoshka", "k": 20, "steps": 110_000, "batch": 4096, "aux": 0.03}
"""What Pach et al. (2025) changed of the defaults below, for SAEs on CLIP's CLS tokens."""


@dataclass(frozen=True)
class TrainConfig:
    """How an SAE is trained. Values left ``None`` follow from the others, see :meth:`settled`.

    Attributes
    ----------
    kind : {"matryoshka", "batchtopk", "topk", "relu"}
        The objective; see ``docs/training.md`` for the formulas.
    expansion, latents : float, int or None
        Number of latents C: ``expansion`` times the width, unless ``latents`` gives it.
    k, k_start, anneal : int
        Active latents a row, on average over the batch (``topk``: in every row). With ``k_start`` there are that many
        at first, falling evenly to ``k`` during the first ``anneal`` steps [a fifth of all].
    fractions, weights : tuple of float
        Shares of the Matryoshka groups, from coarse to fine, and the weight of each level's error [all alike].
    l1 : float
        Weight λ of the penalty of ``relu``; it rises from 0 during the warm-up.
    steps, batch : int
        Steps, and rows of a step, over all processes together.
    lr, warmup, decay_from : float, int, int
        Peak learning rate [16 / (125 √C), as Pach et al.], steps over which it rises [a twentieth of all, at most
        1000], and step from which it falls evenly to 0 [four fifths].
    clip : float
        Largest norm of the gradient.
    aux, aux_k, dead_after : float, int, int
        Weight α of the auxiliary loss, dead latents a row that take part in it [half the width], and rows without
        firing after which a latent counts as dead [a tenth of the run, at most 10 million].
    threshold_from, threshold_beta : int, float
        Step from which the smallest kept activation is averaged, and how slowly [over a twentieth of the run, at
        most 1000 steps].
    bias : {"median", "mean", "zero"}
        What the decoder bias starts from: geometric median or mean of the first rows.
    scale, centre : bool
        Divide rows so that their mean square norm is 1, and subtract their mean first. Both are folded back.
    precision : {"float32", "bfloat16", "float16"}
        Of the one dense product; all else is float32.
    seed : int
        Of the starting weights.
    """

    kind: ObjectiveName = "matryoshka"
    expansion: float = 16
    latents: int | None = None
    k: int = 20
    k_start: int | None = None
    anneal: int | None = None
    fractions: tuple[float, ...] = (0.0625, 0.125, 0.25, 0.5625)
    weights: tuple[float, ...] | None = None
    l1: float = 0.03
    steps: int = 5_000
    batch: int = 2048
    lr: float | None = None
    warmup: int | None = None
    decay_from: int | None = None
    clip: float = 1.0
    aux: float = 1 / 32
    aux_k: int | None = None
    dead_after: int | None = None
    threshold_from: int | None = None
    threshold_beta: float | None = None
    bias: Bias = "median"
    scale: bool = True
    centre: bool = False
    precision: Precision = "float32"
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what no width can make right."""
        choices = (("kind", ObjectiveName), ("bias", Bias), ("precision", Precision))
        for name, known in choices:
            if getattr(self, name) not in get_args(known):
                raise BadParameter(f"{name} must be one of {', '.join(get_args(known))}, got {getattr(self, name)!r}.")
        whole = ("latents", "k", "k_start", "anneal", "steps", "batch", "aux_k", "dead_after")
        for name in whole:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise BadParameter(f"{name} must be at least 1, got {value}.")
        for name in ("expansion", "lr", "clip"):
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise BadParameter(f"{name} must be a positive number, got {value}.")
        for name in ("l1", "aux", "warmup", "decay_from", "threshold_from"):
            value = getattr(self, name)
            if value is not None and not (value >= 0 and math.isfinite(value)):
                raise BadParameter(f"{name} must be 0 or more, got {value}.")
        if self.threshold_beta is not None and not 0 <= self.threshold_beta < 1:
            raise BadParameter(f"threshold_beta must be at least 0 and below 1, got {self.threshold_beta}.")
        if self.kind == "matryoshka":
            self._check_levels()
        if self.decay_from is not None and self.decay_from > self.steps:
            raise BadParameter(f"decay_from must be a step up to the last, {self.steps}, got {self.decay_from}.")
        if self.k_start is not None and self.k_start < self.k:
            raise BadParameter(f"k_start must be at least k={self.k}, from which k falls, got {self.k_start}.")
        if not -(2**63) <= self.seed < 2**63:
            raise BadParameter(f"seed must be a whole number of at most 63 bits, got {self.seed}.")

    def _check_levels(self) -> None:
        total = sum(self.fractions)
        if not all(fraction > 0 for fraction in self.fractions) or not abs(total - 1) <= 1e-6:
            raise BadParameter(f"fractions must be positive and add up to 1, got {self.fractions}, sum {total:g}.")
        if self.weights is None:
            return
        if len(self.weights) != len(self.fractions):
            raise BadParameter(f"weights must be {len(self.fractions)} numbers, one a level, got {self.weights}.")
        if not all(0 <= weight < math.inf for weight in self.weights) or not sum(self.weights) > 0:
            raise BadParameter(f"weights must be numbers of 0 or more and not all 0, got {self.weights}.")

    def settled(self, width: int) -> TrainConfig:
        """Fill in what was left open, for rows of that width: the record that a run is saved and resumed with.

        Examples
        --------
        >>> TrainConfig(steps=10_000).settled(1024).lr
        0.001
        """
        latents = self.latents or round(self.expansion * width)
        if latents < 1:
            raise BadParameter(f"expansion {self.expansion:g} of a width of {width} is no latent at all. Raise it.")
        most = max(self.k, self.k_start or 0)
        if self.kind != "relu" and latents < most:
            raise BadParameter(
                f"{most} of {latents} latents cannot be active: the dictionary is smaller than k. "
                "Lower k, or give more latents (a larger expansion)."
            )
        levels = len(self.fractions) if self.kind == "matryoshka" else 1
        weights = self.weights if self.kind == "matryoshka" and self.weights else (1 / levels,) * levels
        warmup = _or(self.warmup, min(1000, self.steps // 20))
        window = max(1, min(1000, self.steps // 20))
        done = replace(
            self,
            expansion=latents / width,
            latents=latents,
            anneal=_or(self.anneal, max(1, self.steps // 5)) if self.k_start else None,
            weights=tuple(weight / sum(weights) for weight in weights),
            lr=_or(self.lr, 16 / (125 * math.sqrt(latents))),
            warmup=warmup,
            decay_from=_or(self.decay_from, max(min(warmup, self.steps), self.steps * 4 // 5)),
            aux_k=_or(self.aux_k, max(1, width // 2)),
            dead_after=_or(self.dead_after, max(1, min(10_000_000, self.steps * self.batch // 10))),
            threshold_from=_or(self.threshold_from, min(1000, self.steps // 2)),
            threshold_beta=_or(self.threshold_beta, 1 - 1 / window),
        )
        done.groups()
        return done

    def groups(self) -> tuple[int, ...]:
        """Sizes of the nested groups, which add up to the latents. Only of a settled recipe."""
        assert self.latents is not None
        if self.kind != "matryoshka":
            return (self.latents,)
        sizes = [int(fraction * self.latents) for fraction in self.fractions[:-1]]
        sizes.append(self.latents - sum(sizes))
        if min(sizes) < 1:
            raise BadParameter(
                f"{self.latents} latents are too few for the groups {self.fractions}: one of them would be empty. "
                "Give more latents, or larger fractions."
            )
        return tuple(sizes)

    def lr_at(self, step: int) -> float:
        """Learning rate of a step, counted from 0. Only of a settled recipe.

        Examples
        --------
        >>> recipe = TrainConfig(steps=100, lr=1.0, warmup=4, decay_from=80).settled(64)
        >>> [recipe.lr_at(step) for step in (0, 3, 50, 90, 99)]
        [0.25, 1.0, 1.0, 0.5, 0.05]
        """
        assert self.lr is not None
        assert self.warmup is not None
        assert self.decay_from is not None
        rise = min(1.0, (step + 1) / self.warmup) if self.warmup else 1.0
        fall = (self.steps - step) / (self.steps - self.decay_from) if step >= self.decay_from else 1.0
        return self.lr * rise * min(1.0, fall)

    def k_at(self, step: int) -> float:
        """Active latents a row at a step. Only of a settled recipe."""
        if not self.k_start or not self.anneal or step >= self.anneal:
            return self.k
        return self.k_start + (self.k - self.k_start) * step / self.anneal

    def l1_at(self, step: int) -> float:
        """Weight of the L1 penalty at a step: 0 unless the objective is ``relu``. Only of a settled recipe."""
        if self.kind != "relu":
            return 0.0
        return self.l1 * (min(1.0, (step + 1) / self.warmup) if self.warmup else 1.0)

    def facts(self) -> dict[str, Any]:
        """The record as JSON has it."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def _or(value: T | None, default: T) -> T:
    return default if value is None else value
