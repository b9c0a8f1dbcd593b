"""Bipartite soft matching, the step that ToMe and FOLDER are made of, as pure functions of tensors.

One step takes a sequence of T tokens, each with a metric such as its attention key. They are dealt alternately
into sources (even positions) and targets (odd ones); every source looks for its most similar target by cosine, and
the r sources that found the most similar ones are merged into them, several into one target if it comes so
(Bolya et al., Token Merging, ICLR 2023, Sec. 3.1). A CLS token in front of the sequence is a source that is never
merged and never a target: all it does is to shift the patches by one place, so it need not be there to be counted.

A merge is an average weighted by how many patches each side stands for already, so after any number of steps a
token is the plain mean of its patches. A chain of steps is therefore kept as the token that each patch went into,
and its matrix is exact. Cosines are rounded to float32 from float64: tokens that are alike tie exactly, whatever
the matrix product's order of summation, and a tie goes to the lowest position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from torino.core.reduction import Reduction

Order = Literal["raster", "native"]
TINY = torch.finfo(torch.float64).tiny


@dataclass(frozen=True, eq=False)
class Match:
    """What one step decided; all are positions in the sequence.

    Attributes
    ----------
    merged, into : Tensor of shape (r,)
        Sources that go, by falling similarity, and the target each one goes into.
    left : Tensor
        Sources that stay, by falling similarity.
    targets : Tensor
        All targets, rising.
    """

    merged: Tensor
    into: Tensor
    left: Tensor
    targets: Tensor

    def stay(self, order: Order, cls_first: bool) -> Tensor:
        """What stays, in the order the sequence goes on: by position, or as ToMe and FOLDER-full leave it.

        That is the sources and then the targets; the sources by position when there is a CLS token, which has to
        stay in front, and as they were ranked when there is none.
        """
        if order == "raster":
            return torch.cat([self.left, self.targets]).sort().values
        return torch.cat([self.left.sort().values if cls_first else self.left, self.targets])


@dataclass(frozen=True, eq=False)
class Folded:
    """A sequence after some steps: ``label`` (N,), the token each patch is in; ``leader`` (T,), whose place it has."""

    label: Tensor
    leader: Tensor


def cosines(rows: Tensor, columns: Tensor) -> Tensor:
    """Cosine of every row with every column, (R, d) and (C, d) to (R, C) float32; 0 where one has no length."""
    return settled(directions(rows) @ directions(columns).T).float()


def settled(cosine: Tensor) -> Tensor:
    """Float64 cosines, in place, as multiples of 2^-44: what ties by the rule ties on every processor.

    A matrix product sums the entries of equal rows in orders that differ with their place and with the machine, so
    that copies have cosines a few 2^-53 apart, and what is 0 may come out as 1e-17.
    """
    return cosine.mul_(2.0**44).round_().div_(2.0**44)


def directions(vectors: Tensor) -> Tensor:
    """Vectors of unit length in float64; those of no length stay zero."""
    wide = vectors.detach().double()
    return wide / wide.norm(dim=1, keepdim=True).clamp(min=TINY)


def removals(patches: int, budget: int, *, cls_first: bool, steps: int | None = None) -> list[int]:
    """How many tokens each step takes away, to come from ``patches`` to ``budget``.

    A step can take (T − 1)//2 of T tokens, the CLS token counted if there is one. Without ``steps`` each takes as
    many as it can (FOLDER's fold). With ``steps`` they are spread evenly, the smaller shares first; what is then
    still left, because a step could not take its share, goes in further ones as large as they can be. The sum
    falls short of ``patches − budget`` only where no step can get there: to one token, from two, without CLS.

    Examples
    --------
    >>> removals(576, 192, cls_first=False), removals(576, 64, cls_first=True)
    ([287, 97], [288, 144, 72, 8])
    >>> removals(576, 192, cls_first=True, steps=23) == [16] * 7 + [17] * 16
    True
    """
    taken: list[int] = []
    length, excess = patches + cls_first, patches - budget
    while excess > 0:
        share = excess if steps is None or len(taken) >= steps else excess // (steps - len(taken))
        r = min((length - 1) // 2, share)
        if r == 0 and share > 0:
            break
        taken.append(r)
        length, excess = length - r, excess - r
    return taken


def match(metric: Tensor, r: int, *, cls_first: bool, penalty: Tensor | None = None) -> Match:
    """Find the ``r`` sources to merge and their targets.

    Parameters
    ----------
    metric : Tensor of shape (T, d)
        What tokens are compared by, without the CLS token; only its direction counts.
    r : int
        At most (T − 1)//2, or T//2 with a CLS token.
    cls_first : bool
        Whether a CLS token stands in front, so that the first patch is a target.
    penalty : Tensor of shape (T,), optional
        Taken off the similarity of a source when sources are ranked.

    Examples
    --------
    >>> found = match(torch.tensor([[1.0, 0], [1, 1], [0, 1], [0, 2]]), 1, cls_first=False)
    >>> found.merged, found.into  # the third token into the fourth, which points the same way
    (tensor([2]), tensor([3]))
    """
    a, b = slice(int(cls_first), None, 2), slice(int(not cls_first), None, 2)
    unit = directions(metric)
    similar = (unit[a] @ unit[b].T).float()
    best = similar.amax(1)
    if penalty is not None:
        best = (best.double() - penalty[a]).float()
    rank = best.argsort(descending=True, stable=True)
    gone, left = rank[:r], rank[r:]
    nearest = similar[gone].argmax(1)  # the first of equals
    targets = torch.arange(int(not cls_first), len(metric), 2, device=metric.device)
    return Match(2 * gone + int(cls_first), 2 * nearest + int(not cls_first), 2 * left + int(cls_first), targets)


def fold(
    metric: Tensor, steps: Sequence[int], *, cls_first: bool, between: Order, penalty: Tensor | None = None
) -> Folded:
    """Merge step after step, as many tokens each as ``steps`` says.

    ``metric`` (N, d) is merged as the tokens are, weighted by size; ``penalty`` (N,) by the plain mean of the tokens
    that meet. ``between`` is the order of the sequence from one step to the next, and so decides what is a source.
    """
    steps = [r for r in steps if r > 0]
    sums = metric.detach().double()  # a sum points where the mean does, and only directions are compared
    label = leader = torch.arange(len(metric), device=metric.device)
    for number, r in enumerate(steps, start=1):
        found = match(sums, r, cls_first=cls_first, penalty=penalty)
        stay = found.stay(between, cls_first)
        place = torch.empty(len(sums), dtype=torch.int64, device=sums.device)
        place[stay] = torch.arange(len(stay), device=place.device)
        into = place[found.into]
        place[found.merged] = into
        label, leader = place[label], leader[stay]
        if number == len(steps):
            break
        sums = sums[stay].index_add_(0, into, sums[found.merged])
        if penalty is not None:
            penalty = penalty[stay].index_add_(0, into, penalty[found.merged]) / place.bincount()
    return Folded(label, leader)


def averaged(
    folded: Folded, grid: tuple[int, int], by: str, *, order: Order, sizes: Tensor | None = None, log_size: bool = False
) -> Reduction:
    """The matrix of a folded sequence: each token the mean of what it holds.

    ``sizes`` (N,) proportional_attention the mean where patches are tokens that stand for several already; ``log_size`` multiplies
    a token of n patches by 1 + ln n.
    """
    label, leader = folded.label.cpu(), folded.leader.cpu()
    if order == "raster":
        rank = leader.argsort()
        place = torch.empty_like(rank)
        place[rank] = torch.arange(len(rank))
        label, leader = place[label], leader[rank]
    held = torch.ones(len(label), dtype=torch.float64) if sizes is None else sizes.detach().cpu().double()
    total = torch.zeros(len(leader), dtype=torch.float64).index_add_(0, label, held)
    factor = (1 + total.log()) / total if log_size else 1 / total
    sources = label.argsort(stable=True)
    counts = label.bincount(minlength=len(leader))
    return Reduction(
        sources=sources,
        weights=(held * factor[label])[sources].float(),
        offsets=torch.cat([counts.new_zeros(1), counts.cumsum(0)]),
        anchor=leader,
        concept=torch.full_like(leader, -1),
        role=("primary",) * len(leader),
        grid=grid,
        by=by,
        assigned=label,
        score=torch.full((len(leader),), torch.nan),
    )
