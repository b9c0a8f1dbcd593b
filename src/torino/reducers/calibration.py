"""Choosing (k, δ), or the threshold of TORINO-X, for a wanted average number of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torino.core.concepts import ConceptEncoder, Rank
from torino.core.errors import BadParameter
from torino.core.grouping import Silent, group_by_overlap
from torino.core.tokens import VisualTokens, ragged_patches
from torino.reducers.torino_x import TIE, TorinoX


@dataclass(frozen=True, eq=False)
class Calibration:
    """The setting of (k, δ) whose average length is nearest to a target, and the lengths it gives.

    Attributes
    ----------
    k, delta : int
        The chosen setting.
    target : float
        The average number of tokens that was wanted.
    counts : Tensor of shape (images,), int64
        Tokens each image retains with the chosen setting.
    table : dict of (k, delta) to Tensor
        The same for every setting that was tried.
    """

    k: int
    delta: int
    target: float
    counts: Tensor
    table: dict[tuple[int, int], Tensor]

    @property
    def mean(self) -> float:
        """Average number of tokens of the chosen setting."""
        return float(self.counts.double().mean())

    def quantiles(self, *shares: float) -> list[float]:
        """Quantiles of the tokens an image retains."""
        return torch.quantile(self.counts.double(), torch.tensor(shares, dtype=torch.float64)).tolist()

    def __repr__(self) -> str:
        """Tell the setting and the spread it gives."""
        low, middle, high = self.quantiles(0.1, 0.5, 0.9)
        return (
            f"Calibration(k={self.k}, delta={self.delta}: {self.mean:.1f} tokens on average for a target of "
            f"{self.target:g}; 10th, 50th and 90th percentile {low:.0f}, {middle:.0f} and {high:.0f}; "
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
) -> Calibration:
    """Find the (k, δ) whose dynamic reduction retains ``target`` tokens on average over some images.

    The concepts are computed once, at ``max_k``; every setting with 1 ≤ δ ≤ k ≤ max_k is then tried, which is
    cheap. Of two settings equally near the one with the smaller k is taken, then the one with the smaller δ.

    Parameters
    ----------
    tokens : sequence of VisualTokens
        A few images that are like those to come; some dozens give a steady mean.
    target : float
        Wanted average number of tokens per image.
    sae : ConceptEncoder
        The SAE that will be used.
    max_k : int
        Largest k to try.

    Examples
    --------
    >>> from torino import RawEmbedding
    >>> image = VisualTokens.of(torch.eye(9)[[0, 0, 1, 0, 0, 1, 2, 2, 2]])
    >>> found = calibrate([image], target=3, sae=RawEmbedding(), max_k=2)
    >>> found.k, found.delta, found.counts
    (1, 1, tensor([3]))
    """
    _check_target(target)
    if max_k < 1:
        raise BadParameter(f"max_k must be at least 1, got {max_k}.")
    packed = ragged_patches(tokens)
    for image in tokens:
        sae.check_origin(image.origin, image.width)
    max_k = min(max_k, int(getattr(sae, "latents", packed.values.shape[1])))  # no more than there are
    concepts = sae.top(packed.values, max_k, rank=rank)
    table = {
        (k, delta): group_by_overlap(concepts.first(k), delta, silent=silent, offsets=packed.offsets).counts
        for k in range(1, max_k + 1)
        for delta in range(1, k + 1)
    }
    k, delta = min(table, key=lambda setting: (abs(float(table[setting].double().mean()) - target), setting))
    return Calibration(k, delta, float(target), table[k, delta], table)


@dataclass(frozen=True, eq=False)
class CoverCalibration:
    """The threshold of TORINO-X that gives an average length, and the lengths it gives.

    Attributes
    ----------
    least : float
        For ``TorinoX(least=...)``.
    target : float
        The average number of tokens that was wanted.
    counts : Tensor of shape (images,), int64
        Tokens each image keeps with it.
    """

    least: float
    target: float
    counts: Tensor

    @property
    def mean(self) -> float:
        """Average number of tokens."""
        return float(self.counts.double().mean())


def calibrate_cover(tokens: Sequence[VisualTokens], target: float, *, reducer: TorinoX) -> CoverCalibration:
    """Find the ``least`` with which TORINO-X keeps ``target`` tokens on average over some images.

    Each image is walked to its end once; all thresholds follow from the gains.

    Parameters
    ----------
    tokens : sequence of VisualTokens
        A few images that are like those to come; some dozens give a steady mean.
    target : float
        Wanted average number of tokens per image.
    reducer : TorinoX
        All but its ``budget`` and ``least`` count.

    Examples
    --------
    >>> from torino import RawEmbedding
    >>> image = VisualTokens.of(torch.eye(9)[[0, 0, 1, 0, 0, 1, 2, 2, 2]])
    >>> found = calibrate_cover([image], target=3, reducer=TorinoX(RawEmbedding(), concepts=1))
    >>> found.counts
    tensor([3])
    """
    _check_target(target)
    gains = [torch.from_numpy(one[1:]).double() for one in reducer.gains(tokens)]  # the first token is always kept
    falling = torch.cat(gains).sort(descending=True).values
    # below the gain of each token there is a threshold to try; one above all of them, and none
    steps = falling.unique().flip(0)
    middle = (steps[:-1] + steps[1:]) / 2 + TIE  # which the walk allows for
    tries = torch.cat([steps[:1] + 1, middle, steps.new_zeros(1)])
    kept = torch.searchsorted(-falling, TIE - tries, right=True)  # gains of at least that
    best = int((len(gains) + kept - target * len(gains)).abs().argmin())
    least = float(tries[best])
    counts = torch.tensor([1 + int((one >= least - TIE).sum()) for one in gains])
    return CoverCalibration(least, float(target), counts)


def _check_target(target: float) -> None:
    if not 1 <= target < float("inf"):
        raise BadParameter(f"target must be at least 1 token per image, got {target}.")
