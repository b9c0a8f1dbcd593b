"""Training configuration: all settings that determine the result of a run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import Field, dataclass, fields, replace
from numbers import Integral, Real
from typing import Any, Literal, TypeVar, cast, get_args

from torino.core.errors import BadParameter

ObjectiveName = Literal["matryoshka", "batchtopk", "topk", "relu"]
BiasInit = Literal["median", "mean", "zero"]
Precision = Literal["float32", "bfloat16", "float16"]
T = TypeVar("T")

PAPER_SETTINGS: dict[str, Any] = {"kind": "matryoshka", "k": 20, "steps": 110_000, "batch": 4096, "aux": 0.03}
"""Settings of Pach et al. (2025), who trained SAEs on CLS tokens of CLIP, where they differ from the defaults."""

_EXPECTED = {"int": "a whole number", "float": "a number", "tuple": "a list of numbers", "bool": "True or False"}


@dataclass(frozen=True)
class TrainConfig:
    """Configuration of an SAE training run.

    Values that are ``None`` are derived from the others, see :meth:`resolve`; the rule is given in brackets.

    Attributes
    ----------
    kind : {"matryoshka", "batchtopk", "topk", "relu"}
        The objective; see ``docs/guides/train-an-sae.md`` for the formulas.
    expansion, latents : float, int or None
        Number of latents C: ``expansion`` times the width, unless ``latents`` is given.
    k, k_start, anneal : int
        Active latents per row, on average over the batch (``topk``: in every row). With ``k_start``, training starts
        with that many and decreases linearly to ``k`` over the first ``anneal`` steps [a fifth of all steps].
    fractions, weights : tuple of float
        Sizes of the Matryoshka groups as fractions of C, from coarse to fine, and the weight of each level's
        reconstruction error [equal].
    l1 : float
        Weight λ of the L1 penalty of ``relu``; it increases from 0 during the warm-up.
    steps, batch : int
        Number of steps, and rows per step over all processes.
    lr, warmup, decay_from : float, int, int
        Peak learning rate [16 / (125 √C), as Pach et al.], warm-up steps [a twentieth of all steps, at most 1000], and
        the step from which it decays linearly to 0 [four fifths].
    clip : float
        Maximum norm of the gradient.
    aux, aux_k, dead_after : float, int, int
        Weight α of the auxiliary loss, number of dead latents per row that it uses [half the width], and number of rows
        without an activation after which a latent is dead [a tenth of the run, at most 10 million].
    threshold_from, threshold_beta : int, float
        Step from which the smallest kept activation is averaged [half of the run, at most 1000], and the decay of this
        moving average [its window is a twentieth of the run, at most 1000 steps].
    bias : {"median", "mean", "zero"}
        Initial decoder bias: geometric median or mean of the first rows, or 0.
    scale, center : bool
        Divide rows so that their mean squared norm is 1, and subtract their mean first. Both are folded into the
        weights of the saved SAE.
    precision : {"float32", "bfloat16", "float16"}
        Precision of the one dense product; everything else is float32.
    seed : int
        Seed of the initial weights.
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
    bias: BiasInit = "median"
    scale: bool = True
    center: bool = False
    precision: Precision = "float32"
    seed: int = 0

    def __post_init__(self) -> None:
        """Check everything that does not depend on the width."""
        for item in fields(self):
            object.__setattr__(self, item.name, _convert(item, getattr(self, item.name)))
        for name, choices in (("kind", ObjectiveName), ("bias", BiasInit), ("precision", Precision)):
            if getattr(self, name) not in get_args(choices):
                raise BadParameter(
                    f"{name} must be one of {', '.join(get_args(choices))}, got {getattr(self, name)!r}."
                )
        for name in ("latents", "k", "k_start", "anneal", "steps", "batch", "aux_k", "dead_after"):
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
            raise BadParameter(f"decay_from must be at most the number of steps, {self.steps}, got {self.decay_from}.")
        if self.k_start is not None and self.k_start < self.k:
            raise BadParameter(f"k_start must be at least k={self.k}, got {self.k_start}.")
        if not -(2**63) <= self.seed < 2**63:
            raise BadParameter(f"seed must be an integer that fits into 64 bits, got {self.seed}.")

    def _check_levels(self) -> None:
        total = sum(self.fractions)
        if not all(fraction > 0 for fraction in self.fractions) or not abs(total - 1) <= 1e-6:
            raise BadParameter(f"fractions must be positive and sum to 1, got {self.fractions} with sum {total:g}.")
        if self.weights is None:
            return
        if len(self.weights) != len(self.fractions):
            raise BadParameter(f"weights must be {len(self.fractions)} numbers, one per level, got {self.weights}.")
        if not all(0 <= weight < math.inf for weight in self.weights) or not sum(self.weights) > 0:
            raise BadParameter(f"weights must be finite, 0 or more, and not all 0, got {self.weights}.")

    def resolve(self, width: int) -> TrainConfig:
        """Return a copy with all derived values filled in, for rows of the given width.

        A run is saved and resumed with the resolved configuration.

        Examples
        --------
        >>> TrainConfig(steps=10_000).resolve(1024).lr
        0.001
        """
        latents = self.latents or round(self.expansion * width)
        if latents < 1:
            raise BadParameter(
                f"expansion {self.expansion:g} times a width of {width} gives no latents. Increase expansion."
            )
        max_k = max(self.k, self.k_start or 0)
        if self.kind != "relu" and latents < max_k:
            raise BadParameter(
                f"k must be at most the number of latents, {latents}, got {max_k}. "
                "Decrease k, or increase latents or expansion."
            )
        levels = len(self.fractions) if self.kind == "matryoshka" else 1
        weights = self.weights if self.kind == "matryoshka" and self.weights else (1 / levels,) * levels
        warmup = _or_default(self.warmup, min(1000, self.steps // 20))
        window = max(1, min(1000, self.steps // 20))
        resolved = replace(
            self,
            expansion=latents / width,
            latents=latents,
            anneal=_or_default(self.anneal, max(1, self.steps // 5)) if self.k_start else None,
            weights=tuple(weight / sum(weights) for weight in weights),
            lr=_or_default(self.lr, 16 / (125 * math.sqrt(latents))),
            warmup=warmup,
            decay_from=_or_default(self.decay_from, max(min(warmup, self.steps), self.steps * 4 // 5)),
            aux_k=_or_default(self.aux_k, max(1, width // 2)),
            dead_after=_or_default(self.dead_after, max(1, min(10_000_000, self.steps * self.batch // 10))),
            threshold_from=_or_default(self.threshold_from, min(1000, self.steps // 2)),
            threshold_beta=_or_default(self.threshold_beta, 1 - 1 / window),
        )
        resolved.group_sizes()  # raises if a group would be empty
        return resolved

    def group_sizes(self) -> tuple[int, ...]:
        """Return the sizes of the nested groups, which sum to the number of latents. Needs a resolved config."""
        assert self.latents is not None
        if self.kind != "matryoshka":
            return (self.latents,)
        sizes = [int(fraction * self.latents) for fraction in self.fractions[:-1]]
        sizes.append(self.latents - sum(sizes))
        if min(sizes) < 1:
            raise BadParameter(
                f"{self.latents} latents are too few for the groups {self.fractions}: a group would be empty. "
                "Use more latents or larger fractions."
            )
        return tuple(sizes)

    def lr_at(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0. Needs a resolved config.

        Examples
        --------
        >>> config = TrainConfig(steps=100, lr=1.0, warmup=4, decay_from=80).resolve(64)
        >>> [config.lr_at(step) for step in (0, 3, 50, 90, 99)]
        [0.25, 1.0, 1.0, 0.5, 0.05]
        """
        assert self.lr is not None
        assert self.decay_from is not None
        decay = (self.steps - step) / (self.steps - self.decay_from) if step >= self.decay_from else 1.0
        return self.lr * self._warmup_factor(step) * min(1.0, decay)

    def k_at(self, step: int) -> float:
        """Return the number of active latents per row at a step. Needs a resolved config."""
        if not self.k_start or not self.anneal or step >= self.anneal:
            return self.k
        return self.k_start + (self.k - self.k_start) * step / self.anneal

    def l1_at(self, step: int) -> float:
        """Return the weight of the L1 penalty at a step; 0 unless ``kind`` is ``relu``. Needs a resolved config."""
        return self.l1 * self._warmup_factor(step) if self.kind == "relu" else 0.0

    def _warmup_factor(self, step: int) -> float:
        return min(1.0, (step + 1) / self.warmup) if self.warmup else 1.0

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as JSON values, under the names that ``run.json`` uses (``centre`` for ``center``)."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {
            "centre" if name == "center" else name: list(value) if isinstance(value, tuple) else value
            for name, value in values.items()
        }


def _convert(item: Field[Any], value: object) -> object:
    """Return the value of a field as its Python type, also if it is of numpy; raise BadParameter for another type."""
    kind = str(item.type)
    if not kind.startswith(tuple(_EXPECTED)) or (value is None and kind.endswith("| None")):
        return value  # a choice is checked later
    if kind == "bool" and isinstance(value, bool):
        return value
    if kind.startswith("int") and _is_number(value, Integral):
        return int(cast(int, value))
    if kind.startswith("float") and _is_number(value, Real):
        return float(cast(float, value))
    if kind.startswith("tuple") and isinstance(value, tuple | list):
        numbers = cast(Sequence[Any], value)
        if all(_is_number(number, Real) for number in numbers):
            return tuple(float(number) for number in numbers)
    expected = next(text for name, text in _EXPECTED.items() if kind.startswith(name))
    raise BadParameter(f"{item.name} must be {expected}, got {value!r:.60}.")


def _is_number(value: object, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _or_default(value: T | None, default: T) -> T:
    return default if value is None else value
