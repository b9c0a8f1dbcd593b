"""PruMerge+: PruMerge with additional centers at regular intervals.

LLaVA-PruMerge: Adaptive Token Reduction for Efficient Large Multimodal Models (Shang et al., ICCV 2025).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torino.reducers.base import register
from torino.reducers.prumerge import PruMerge, count_outliers


@register("prumerge-plus")
@dataclass(frozen=True)
class PruMergePlus(PruMerge):
    """Add evenly spaced patches to the centers of PruMerge, then merge likewise (PruMerge+).

    Given the k attention centers of PruMerge, the patches 0, s, 2s, … below N - 1 that are not centers yet become
    centers too, about three per attention center, with s = ⌊⌊N / k⌋ / 3⌋ and at least 1. The last patch is never
    sampled. For 576 patches s is 1 from k = 97 on, so all patches but the last are kept. Merging and the extra token
    follow as in ``prumerge``, over all centers.

    A fixed budget leaves T places for centers, and the rule above gives only few values of T exactly. The method
    therefore takes the largest k whose centers and samples fit into T, keeps its samples, and adds centers by
    descending attention until there are T. If not even k = 1 fits, there are T attention centers and no samples.

    Differences from the release, besides those of ``prumerge``: without outliers there is one attention center (the
    release divides by zero). The other rule of the release, a doubling of k used in training, is left out. Samples have
    the role ``"spatial"``, attention centers ``"primary"``. The result depends on the positions of the patches.

    Parameters
    ----------
    budget : int, optional
        Exact number of tokens, at most N: centers, samples and the extra token. By default it depends on the image.
    extra_token, neighbors
        As for ``prumerge``.
    order : {"raster", "native"}
        By position with the extra token last; or attention centers by descending attention, samples by position, extra
        token.
    """

    def choose_centers(self, attention: Tensor, ranked: Tensor) -> tuple[Tensor, list[str]]:
        """Return the centers in native order and their roles, given the patches by descending attention."""
        n = len(ranked)
        rank = torch.empty_like(ranked).scatter_(0, ranked, torch.arange(n))
        if self.budget is None:
            k = max(count_outliers(attention), 1)
            samples = _sample_positions(n, _stride(n, k))
        else:
            k, samples = _fit_budget(rank, self.budget - self.extra_token)
        samples = samples[rank[samples] >= k]
        return torch.cat([ranked[:k], samples]), ["primary"] * k + ["spatial"] * len(samples)


def _stride(n: int, k: int) -> int:
    """Return the distance between samples for k attention centers."""
    return max(n // k // 3, 1)


def _sample_positions(n: int, stride: int) -> Tensor:
    return torch.arange(0, n - 1, stride)


def _fit_budget(rank: Tensor, num_centers: int) -> tuple[int, Tensor]:
    """Return the number of attention centers and the candidate samples that make exactly ``num_centers`` centers.

    ``rank`` (N,) is the attention rank of each patch.
    """
    n = len(rank)
    min_stride = max(-(-(n - 1) // max(num_centers, 1)), 1)  # a smaller stride has too many samples
    max_k = n if min_stride == 1 else n // (3 * min_stride)
    while num_centers and max_k:
        stride = _stride(n, max_k)  # the same for k from n // (3 * stride + 3) + 1 to max_k
        samples = _sample_positions(n, stride)
        # number of centers for k = 0 … n: the k attention centers and the samples that are not among them
        size = torch.arange(n + 1) + len(samples) - torch.bincount(rank[samples] + 1, minlength=n + 1).cumsum(0)
        k = int((size[: max_k + 1] <= num_centers).sum()) - 1  # size never decreases with k
        if k > 0 and _stride(n, k) == stride:
            return k + int((size[k:] == num_centers).int().argmax()), samples
        max_k = n // (3 * (stride + 1))
    return num_centers, rank[:0]
