"""Move the merged tokens of a reduction to another position, such as the median of their patches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from torino.core.ragged import offsets_from_lengths
from torino.core.reduction import Reduction, ReductionBatch

Place = Literal["anchor", "median", "first"]


def reorder_tokens(plan: Reduction, order: Tensor) -> Reduction:
    """Return a reduction whose token i is token ``order[i]`` of the given one.

    Examples
    --------
    >>> reorder_tokens(Reduction.of([{0: 1.0}, {2: 1.0}], grid=(1, 3)), torch.tensor([1, 0])).sources.tolist()
    [2, 0]
    """
    lengths = plan.offsets.diff()[order]
    within = torch.arange(int(lengths.sum())) - torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
    entries = torch.repeat_interleave(plan.offsets[order], lengths) + within
    place = torch.cat([order.argsort(), torch.tensor([-1])])  # index -1, the last, stays -1
    return replace(
        plan,
        sources=plan.sources[entries],
        weights=plan.weights[entries],
        offsets=offsets_from_lengths(lengths.tolist()),
        anchor=plan.anchor[order],
        concept=plan.concept[order],
        role=tuple(plan.role[token] for token in order.tolist()),
        assigned=place[plan.assigned],
        score=plan.score[order],
    )


def median_anchors(plan: Reduction, per_axis: bool = False) -> Tensor:
    """Return the median patch of each token, shape (M,).

    The patches of a token are those it represents, or its sources if it represents none. A token that is one patch
    stays there, and a token without a position, such as CLS, has none. Of an even number of patches the lower median is
    taken, so that positions are whole numbers.

    Parameters
    ----------
    plan : Reduction
    per_axis : bool
        Take the medians of frames, of rows and of columns, for models whose positions have these axes, instead of the
        median in raster order.

    Examples
    --------
    >>> plan = Reduction.of([{0: 0.25, 3: 0.25, 7: 0.25, 8: 0.25}, {5: 1.0}], grid=(3, 3))
    >>> median_anchors(plan).tolist(), median_anchors(plan, per_axis=True).tolist()
    ([3, 5], [3, 5])
    """
    anchor, (rows, columns) = plan.anchor.clone(), plan.grid
    for token, patches in _merged_tokens(plan):
        if per_axis:  # torch.median is the lower one
            frame, row, column = plan.locate(patches).median(0).values
            anchor[token] = (frame * rows + row) * columns + column
        else:
            anchor[token] = patches.median()
    return anchor


def first_anchors(plan: Reduction) -> Tensor:
    """Return the place where each token begins, shape (M,): its first frame, and there the median row and column.

    Examples
    --------
    >>> plan = Reduction.of([{2: 0.1, 3: 0.1, 4: 0.1, 7: 0.7}], grid=(2, 3), frames=2)
    >>> plan.anchor.tolist(), first_anchors(plan).tolist()
    ([7], [4])
    """
    anchor, (rows, columns) = plan.anchor.clone(), plan.grid
    for token, patches in _merged_tokens(plan):
        place = plan.locate(patches)
        frame = place[:, 0].min()
        row, column = place[place[:, 0] == frame, 1:].median(0).values
        anchor[token] = (frame * rows + row) * columns + column
    return anchor


def _merged_tokens(plan: Reduction) -> Iterator[tuple[int, Tensor]]:
    """Yield the merged tokens that have a position, and the patches each represents, or its sources if none."""
    merged = (plan.offsets.diff() > 1) & (plan.anchor >= 0) & (plan.anchor < plan.patches)
    by_token = plan.assigned.argsort(stable=True)  # the patches of each token, in raster order
    counts = plan.assigned[plan.assigned >= 0].bincount(minlength=len(plan))
    begin = int((plan.assigned < 0).sum()) + counts.cumsum(0) - counts
    for token in merged.nonzero()[:, 0].tolist():
        first, count = int(begin[token]), int(counts[token])
        patches = by_token[first : first + count]
        if not count:
            patches = plan.sources[int(plan.offsets[token]) : int(plan.offsets[token + 1])]
            patches = patches[patches < plan.patches]
        if len(patches):
            yield token, patches


def place_merged(batch: ReductionBatch, place: Place) -> ReductionBatch:
    """Return the reductions with their merged tokens at another place; tokens in raster order stay in that order.

    Parameters
    ----------
    batch : ReductionBatch
    place : {"anchor", "median", "first"}
        Where they are, the median frame, row and column of their patches, or where they begin (see
        :func:`first_anchors`).
    """
    if place == "anchor":
        return batch
    find = first_anchors if place == "first" else partial(median_anchors, per_axis=True)
    return ReductionBatch.of([_move(plan, find(plan))[0] for plan in batch])


def place_at_median(plan: Reduction, per_axis: bool = False) -> tuple[Reduction, Tensor]:
    """Move every merged token to the median of its patches; return the reduction and the order of its tokens.

    Tokens in raster order are sorted by their new positions; any other order is kept. See :func:`median_anchors`.
    """
    return _move(plan, median_anchors(plan, per_axis))


def _move(plan: Reduction, anchor: Tensor) -> tuple[Reduction, Tensor]:
    moved = replace(plan, anchor=anchor)
    order = torch.arange(len(plan))
    if bool((_sort_key(plan).diff() >= 0).all()):
        order = _sort_key(moved).argsort(stable=True)
    return reorder_tokens(moved, order), order


def _sort_key(plan: Reduction) -> Tensor:
    return torch.where(plan.anchor < 0, plan.patches, plan.anchor)
