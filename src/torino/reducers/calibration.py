"""Calibrate (k, δ) of TORINO, or the threshold of TORINO-X, to an average number of tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from torino.core.checks import check_type, to_integer
from torino.core.concepts import ConceptEncoder, Rank
from torino.core.errors import BadParameter
from torino.core.grouping import Silent, group_by_overlap
from torino.core.tokens import VisualTokens, check_images, ragged_patches
from torino.reducers._checks import check_encoder
from torino.reducers.torino_x import TIE, TorinoX


@dataclass(frozen=True, eq=False)
class Calibration:
    """Setting of (k, δ) whose average number of tokens is nearest to a target.

    Attributes
    ----------
    k, delta : int
        The chosen setting.
    target : float
        Target for the average number of tokens.
    counts : Tensor of shape (images,), int64
        Number of tokens of each image with the chosen setting.
    table : dict of (k, delta) to Tensor
        The same for every setting tried.
    """

    k: int
    delta: int
    target: float
    counts: Tensor
    table: dict[tuple[int, int], Tensor]

    @property
    def mean(self) -> float:
        """Average number of tokens with the chosen setting."""
        return float(self.counts.double().mean())

    def quantiles(self, *shares: float) -> list[float]:
        """Return quantiles of the number of tokens per image."""
        return torch.quantile(self.counts.double(), torch.tensor(shares, dtype=torch.float64)).tolist()

    def __repr__(self) -> str:
        """Return the setting and the distribution of the number of tokens."""
        low, median, high = self.quantiles(0.1, 0.5, 0.9)
        return (
            f"Calibration(k={self.k}, delta={self.delta}: {self.mean:.1f} tokens on average for a target of "
            f"{self.target:g}; 10th, 50th and 90th percentile {low:.0f}, {median:.0f} and {high:.0f}; "
            f"{int(self.counts.min())} to {int(self.counts.max())})"
        )


def calibrate(
    tokens: Sequence[VisualTokens],
    target: float,
    *,
    sae: ConceptEncoder,
    max_k: int = 6,
    silent: Silent = "group",
    rank: Rank = "activation",
    progress: Callable[[int, int], None] | None = None,
) -> Calibration:
    """Find the (k, δ) with which TORINO keeps ``target`` tokens on average over some images.

    The concepts are computed once, with ``max_k``. Every setting with 1 ≤ δ ≤ k ≤ max_k is then tried, which is fast.
    Of two settings equally near, the one with the smaller k is chosen, then the one with the smaller δ.

    Parameters
    ----------
    tokens : sequence of VisualTokens
        Representative images; a few dozen give a stable mean.
    target : float
        Target for the average number of tokens per image.
    sae : ConceptEncoder
        The SAE that will be used.
    max_k : int
        Largest k to try; the number of settings grows with its square.
    silent, rank
        As for ``torino-m``.
    progress : callable, optional
        Called after each setting with the number of settings tried and their total.

    Examples
    --------
    >>> from torino import RawEmbedding
    >>> image = VisualTokens.of(torch.eye(9)[[0, 0, 1, 0, 0, 1, 2, 2, 2]])
    >>> calibration = calibrate([image], target=3, sae=RawEmbedding(), max_k=2)
    >>> calibration.k, calibration.delta, calibration.counts
    (1, 1, tensor([3]))
    """
    target = _check_target(target)
    if (max_k := to_integer("max_k", max_k)) < 1:
        raise BadParameter(f"max_k must be at least 1, got {max_k}.")
    check_encoder(sae)
    tokens = check_images(tokens, "calibrate")
    packed = ragged_patches(tokens)
    for image in tokens:
        sae.check_origin(image.origin, image.width)
    max_k = min(max_k, int(getattr(sae, "latents", packed.values.shape[1])))
    concepts = sae.top(packed.values, max_k, rank=rank)
    table: dict[tuple[int, int], Tensor] = {}
    total = max_k * (max_k + 1) // 2
    for k in range(1, max_k + 1):
        first = concepts.first(k)
        for delta in range(1, k + 1):
            table[k, delta] = group_by_overlap(first, delta, silent=silent, offsets=packed.offsets).counts
            if progress is not None:
                progress(len(table), total)
    k, delta = min(table, key=lambda setting: (abs(float(table[setting].double().mean()) - target), setting))
    return Calibration(k, delta, float(target), table[k, delta], table)


@dataclass(frozen=True, eq=False)
class CoverCalibration:
    """Threshold of TORINO-X whose average number of tokens is nearest to a target.

    Attributes
    ----------
    min_gain : float
        The value for ``TorinoX(min_gain=...)``.
    target : float
        Target for the average number of tokens.
    counts : Tensor of shape (images,), int64
        Number of tokens of each image with this threshold.
    """

    min_gain: float
    target: float
    counts: Tensor

    @property
    def mean(self) -> float:
        """Average number of tokens."""
        return float(self.counts.double().mean())


def calibrate_cover(tokens: Sequence[VisualTokens], target: float, *, reducer: TorinoX) -> CoverCalibration:
    """Find the ``min_gain`` with which TORINO-X keeps ``target`` tokens on average over some images.

    All patches of each image are ranked once; the result of every threshold follows from their gains.

    Parameters
    ----------
    tokens : sequence of VisualTokens
        Representative images; a few dozen give a stable mean.
    target : float
        Target for the average number of tokens per image.
    reducer : TorinoX
        Its ``budget`` and ``min_gain`` are ignored.

    Examples
    --------
    >>> from torino import RawEmbedding
    >>> image = VisualTokens.of(torch.eye(9)[[0, 0, 1, 0, 0, 1, 2, 2, 2]])
    >>> calibrate_cover([image], target=3, reducer=TorinoX(RawEmbedding(), concepts=1)).counts
    tensor([3])
    """
    target = _check_target(target)
    tokens = check_images(tokens, "calibrate_cover")
    check_type("reducer", reducer, TorinoX, "a torino-x reducer; calibrate() is for torino-p and torino-m")
    gains = [torch.from_numpy(values[1:]).double() for values in reducer.gains(tokens)]  # the first is always kept
    descending = torch.cat(gains).sort(descending=True).values
    # candidate thresholds: above all gains, between two consecutive gains, and 0
    steps = descending.unique().flip(0)
    between = (steps[:-1] + steps[1:]) / 2 + TIE  # the selection subtracts the tolerance
    candidates = torch.cat([steps[:1] + 1, between, steps.new_zeros(1)])
    num_kept = torch.searchsorted(-descending, TIE - candidates, right=True)  # gains of at least the threshold
    best = int((len(gains) + num_kept - target * len(gains)).abs().argmin())
    min_gain = float(candidates[best])
    counts = torch.tensor([1 + int((values >= min_gain - TIE).sum()) for values in gains])
    return CoverCalibration(min_gain, float(target), counts)


def _check_target(target: float) -> float:
    check_type("target", target, (int, float, np.number), "a number of tokens")
    if not 1 <= target < float("inf"):
        raise BadParameter(f"target must be at least 1 token per image, got {target}.")
    return float(target)
