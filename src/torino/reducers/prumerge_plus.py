"""PruMerge+: PruMerge with centres spread evenly over the image beside those of high attention.

LLaVA-PruMerge: Adaptive Token Reduction for Efficient Large Multimodal Models (Shang et al., ICCV 2025).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torino.reducers.base import register
from torino.reducers.prumerge import PruMerge, outliers


@register("prumerge-plus")
@dataclass(frozen=True)
class PruMergePlus(PruMerge):
    """Add evenly spaced patches to the centres of PruMerge, about three for each, then merge alike (PruMerge+).

    With k attention centres chosen as PruMerge does, the patches 0, s, 2s, … below N - 1 that are no centres yet become
    centres too, with s = ⌊⌊N / k⌋ / 3⌋ and at least 1. The last patch is never sampled, and for 576 patches s is 1,
    so all but it is kept, from k = 97 on. Merging and the extra token follow as in ``prumerge``, over all centres.

    A fixed budget leaves T places for centres, and the rule above meets few numbers T exactly. So: take the largest k
    whose centres and samples fit into T, keep its samples, and go on adding centres by falling attention until there
    are T. Where not even k = 1 fits, there are no samples and T attention centres.

    As released, with the differences of ``prumerge``, and these. Without outliers there is one attention centre,
    where the release divides by zero. Its other rule, a doubling of k used in training, is left out. Samples have the
    role ``"spatial"``, attention centres ``"primary"``. The method depends on the places of the patches.

    Parameters
    ----------
    budget : int, optional
        Exactly this many tokens, at most N: centres, samples, and the extra token. By default the image decides.
    extra_token, neighbours
        As for ``prumerge``.
    order : {"raster", "native"}
        By place with the extra token last; or attention centres by falling attention, samples by place, extra token.
    """

    def choose(self, attention: Tensor, ranked: Tensor) -> tuple[Tensor, list[str]]:
        """Return the centres in native order and a role for each, given patches ``ranked`` by falling attention."""
        n = len(ranked)
        rank = torch.empty_like(ranked).scatter_(0, ranked, torch.arange(n))
        if self.budget is None:
            k = max(outliers(attention), 1)
            samples = _samples(n, _stride(n, k))
        else:
            k, samples = _fill(rank, self.budget - self.extra_token)
        samples = samples[rank[samples] >= k]
        return torch.cat([ranked[:k], samples]), ["primary"] * k + ["spatial"] * len(samples)


def _stride(n: int, k: int) -> int:
    """Distance of the samples that go with k attention centres."""
    return max(n // k // 3, 1)


def _samples(n: int, stride: int) -> Tensor:
    return torch.arange(0, n - 1, stride)


def _fill(rank: Tensor, places: int) -> tuple[int, Tensor]:
    """Attention centres and candidate samples that make exactly ``places`` centres; ``rank`` is that of each patch."""
    n = len(rank)
    finest = max(-(-(n - 1) // max(places, 1)), 1)  # a finer stride has more samples than there are places
    most = n if finest == 1 else n // (3 * finest)
    while places and most:
        stride = _stride(n, most)  # shared by k from n // (3 * stride + 3) + 1 to most
        samples = _samples(n, stride)
        # centres and samples together for k = 0 … n: k itself, and the samples that k centres leave over
        size = torch.arange(n + 1) + len(samples) - torch.bincount(rank[samples] + 1, minlength=n + 1).cumsum(0)
        k = int((size[: most + 1] <= places).sum()) - 1  # size never falls as k grows
        if k > 0 and _stride(n, k) == stride:
            return k + int((size[k:] == places).int().argmax()), samples
        most = n // (3 * (stride + 1))
    return places, rank[:0]
