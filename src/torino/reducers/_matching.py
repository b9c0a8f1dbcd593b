"""Bipartite soft matching, the merging step of ToMe and FOLDER.

A step takes a sequence of T tokens, each with a metric such as its attention key. The tokens are split alternately
into sources (even positions) and targets (odd positions). Every source is matched with its most similar target by
cosine, and the r sources with the highest similarity are merged into their targets; a target may receive several
sources (Bolya et al., Token Merging, ICLR 2023, Sec. 3.1). A CLS token in front of the sequence is a source that is
never merged and never a target. It only shifts the patches by one position, so it need not be part of the input.

A merge is an average weighted by the number of patches of both sides. After any number of steps a token is therefore
the plain mean of its patches, and a chain of steps is stored exactly as the token index of each patch. Cosines are
computed in float64 and rounded to float32, so that equal tokens tie exactly, independent of the summation order of the
matrix product. Ties go to the lowest position.

A plan only stores the weight of each patch in its token; the averaging itself happens in :meth:`Reduction.apply`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torino.core.frames import Layout
from torino.core.reduction import Reduction
from torino.reducers._similarity import unit_vectors
from torino.reducers.base import Order


@dataclass(frozen=True, eq=False)
class Matching:
    """Result of one matching step. All entries are positions in the sequence.

    Attributes
    ----------
    merged, merged_into : Tensor of shape (r,)
        Sources that are merged, by descending similarity, and their targets.
    unmerged : Tensor
        Sources that are not merged, by descending similarity.
    targets : Tensor
        All targets, ascending.
    """

    merged: Tensor
    merged_into: Tensor
    unmerged: Tensor
    targets: Tensor

    def remaining(self, order: Order, cls_first: bool) -> Tensor:
        """Return the remaining positions in the order of the next sequence.

        ``"raster"`` sorts them by position. ``"native"`` is the order of ToMe and FOLDER-full: sources, then targets,
        where the sources are sorted by position if there is a CLS token, which must stay in front, and by rank if
        there is none.
        """
        if order == "raster":
            return torch.cat([self.unmerged, self.targets]).sort().values
        return torch.cat([self.unmerged.sort().values if cls_first else self.unmerged, self.targets])


@dataclass(frozen=True, eq=False)
class MergedSequence:
    """A sequence after some merging steps.

    Attributes
    ----------
    label : Tensor of shape (N,)
        Token that contains each patch.
    anchor : Tensor of shape (T,)
        Patch whose position each token has.
    """

    label: Tensor
    anchor: Tensor


def removals_per_step(patches: int, budget: int, *, cls_first: bool, steps: int | None = None) -> list[int]:
    """Return how many tokens each step removes to get from ``patches`` to ``budget``.

    A step can remove (T − 1)//2 of T tokens, where T includes the CLS token if there is one. Without ``steps`` each
    step removes as many as it can (FOLDER). With ``steps`` the removals are distributed evenly, smaller shares first;
    if a step cannot remove its share, additional steps of maximal size follow. The sum is less than
    ``patches − budget`` only if no number of steps is sufficient: from two tokens to one, without CLS.

    Examples
    --------
    >>> removals_per_step(576, 192, cls_first=False), removals_per_step(576, 64, cls_first=True)
    ([287, 97], [288, 144, 72, 8])
    >>> removals_per_step(576, 192, cls_first=True, steps=23) == [16] * 7 + [17] * 16
    True
    """
    removals: list[int] = []
    length, excess = patches + cls_first, patches - budget
    while excess > 0:
        share = excess if steps is None or len(removals) >= steps else excess // (steps - len(removals))
        r = min((length - 1) // 2, share)
        if r == 0 and share > 0:
            break
        removals.append(r)
        length, excess = length - r, excess - r
    return removals


def match_tokens(metric: Tensor, r: int, *, cls_first: bool, penalty: Tensor | None = None) -> Matching:
    """Find the ``r`` sources to merge and their targets.

    Parameters
    ----------
    metric : Tensor of shape (T, d)
        Vectors to compare, without the CLS token; only their directions matter.
    r : int
        At most (T − 1)//2, or T//2 with a CLS token.
    cls_first : bool
        Whether a CLS token precedes the sequence, so that the first patch is a target.
    penalty : Tensor of shape (T,), optional
        Subtracted from the similarity of a source when the sources are ranked.

    Examples
    --------
    >>> matching = match_tokens(torch.tensor([[1.0, 0], [1, 1], [0, 1], [0, 2]]), 1, cls_first=False)
    >>> matching.merged, matching.merged_into  # the third token into the fourth, which has the same direction
    (tensor([2]), tensor([3]))
    """
    source_start, target_start = int(cls_first), int(not cls_first)
    sources, targets = slice(source_start, None, 2), slice(target_start, None, 2)
    unit = unit_vectors(metric)
    similarity = (unit[sources] @ unit[targets].T).float()
    best = similarity.amax(1)
    if penalty is not None:
        best = (best.double() - penalty[sources]).float()
    rank = best.argsort(descending=True, stable=True)
    merged, unmerged = rank[:r], rank[r:]
    nearest = similarity[merged].argmax(1)  # the first of equals
    return Matching(
        merged=2 * merged + source_start,
        merged_into=2 * nearest + target_start,
        unmerged=2 * unmerged + source_start,
        targets=torch.arange(target_start, len(metric), 2, device=metric.device),
    )


def merge_in_steps(
    metric: Tensor, removals: Sequence[int], *, cls_first: bool, step_order: Order, penalty: Tensor | None = None
) -> MergedSequence:
    """Run several matching steps, each of which removes the given number of tokens.

    ``metric`` (N, d) is merged like the tokens, weighted by size; ``penalty`` (N,) is merged by the plain mean.
    ``step_order`` is the order of the sequence between two steps, which determines the sources of the next step.
    """
    removals = [r for r in removals if r > 0]
    sums = metric.detach().double()  # sums have the same direction as means, and only directions are compared
    label = anchor = torch.arange(len(metric), device=metric.device)
    for number, r in enumerate(removals, start=1):
        matching = match_tokens(sums, r, cls_first=cls_first, penalty=penalty)
        remaining = matching.remaining(step_order, cls_first)
        new_index = torch.empty(len(sums), dtype=torch.int64, device=sums.device)
        new_index[remaining] = torch.arange(len(remaining), device=new_index.device)
        merged_into = new_index[matching.merged_into]
        new_index[matching.merged] = merged_into
        label, anchor = new_index[label], anchor[remaining]
        if number == len(removals):
            break
        # add the metric of each merged source to that of its target; a target may receive several sources
        sums = sums[remaining].index_add_(0, merged_into, sums[matching.merged])
        if penalty is not None:
            penalty = penalty[remaining].index_add_(0, merged_into, penalty[matching.merged]) / new_index.bincount()
    return MergedSequence(label, anchor)


def mean_reduction(
    merged: MergedSequence,
    layout: Layout,
    by: str,
    *,
    order: Order,
    sizes: Tensor | None = None,
    log_size: bool = False,
) -> Reduction:
    """Return the reduction in which each token is the mean of its patches.

    ``sizes`` (N,) weights the mean if the inputs are tokens that already stand for several patches. ``log_size``
    multiplies a token of n patches by 1 + ln n.
    """
    label, anchor = merged.label.cpu(), merged.anchor.cpu()
    if order == "raster":
        rank = anchor.argsort()
        position = torch.empty_like(rank)
        position[rank] = torch.arange(len(rank))
        label, anchor = position[label], anchor[rank]
    size = torch.ones(len(label), dtype=torch.float64) if sizes is None else sizes.detach().cpu().double()
    total = torch.zeros(len(anchor), dtype=torch.float64).index_add_(0, label, size)
    factor = (1 + total.log()) / total if log_size else 1 / total
    sources = label.argsort(stable=True)
    counts = label.bincount(minlength=len(anchor))
    return Reduction(
        sources=sources,
        weights=(size * factor[label])[sources].float(),
        offsets=torch.cat([counts.new_zeros(1), counts.cumsum(0)]),
        anchor=anchor,
        concept=torch.full_like(anchor, -1),
        role=("primary",) * len(anchor),
        by=by,
        assigned=label,
        score=torch.full((len(anchor),), torch.nan),
        **layout,
    )
