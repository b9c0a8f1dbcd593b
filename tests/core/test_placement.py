"""Tokens at the median of their patches, against a slow transcription."""

from __future__ import annotations

import random

import torch

from torino import Reduction
from torino.core.placement import median_anchors, place_at_median, reorder_tokens


def random_plan(seed: int) -> Reduction:
    """Return tokens of one to five patches in the order of their first patch, some patches left out."""
    source = random.Random(seed)
    rows, columns = source.randint(1, 6), source.randint(1, 6)
    patches = list(range(rows * columns))
    source.shuffle(patches)
    groups: list[list[int]] = []
    while patches:
        groups.append([patches.pop() for _ in range(min(len(patches), source.randint(1, 5)))])
    groups = groups[: max(1, len(groups) - source.randint(0, 2))]
    plan = Reduction.of([dict.fromkeys(group, 1 / len(group)) for group in groups], (rows, columns))
    return reorder_tokens(plan, plan.anchor.argsort()) if source.random() < 0.7 else plan


def slow_median(plan: Reduction, token: int, per_axis: bool) -> int:
    sources = plan.explain(token).sources
    if len(sources) == 1:
        return int(plan.anchor[token])

    def lower(values: list[int]) -> int:
        return sorted(values)[(len(values) - 1) // 2]

    columns = plan.grid[1]
    if per_axis:
        return lower([p // columns for p in sources]) * columns + lower([p % columns for p in sources])
    return lower(list(sources))


def test_medians_equal_the_slow_transcription() -> None:
    moved = 0
    for seed in range(200):
        plan = random_plan(seed)
        for per_axis in (False, True):
            expected = [slow_median(plan, token, per_axis) for token in range(len(plan))]
            assert median_anchors(plan, per_axis).tolist() == expected
            moved += expected != plan.anchor.tolist()
    assert moved > 100


def test_raster_order_is_kept_and_other_orders_are_not_changed() -> None:
    values = torch.arange(36.0)[:, None]
    for seed in range(100):
        plan = random_plan(seed)
        raster = bool((plan.anchor.diff() >= 0).all())
        placed, order = place_at_median(plan)
        assert sorted(order.tolist()) == list(range(len(plan)))
        assert torch.equal(placed.apply(values[: plan.patches]), plan.apply(values[: plan.patches])[order])
        assert torch.equal(placed.sizes, plan.sizes[order])
        if raster:
            assert bool((placed.anchor.diff() >= 0).all())
        else:
            assert order.tolist() == list(range(len(plan)))


def test_single_patches_and_tokens_without_position_stay() -> None:
    kept = Reduction.pick(
        torch.tensor([0, 4, 9]), (3, 3), "by hand", assigned=torch.tensor([0, 1, 1, 0, 1, 1, 1, 1, 1])
    )
    placed, order = place_at_median(kept)
    assert placed.anchor.tolist() == [0, 4, -1]  # pruned patches, and the CLS token
    assert order.tolist() == [0, 1, 2]
    represents_none = Reduction.of([{0: 1.0, 1: 1.0}, {0: 0.5, 1: 0.5}], (1, 4))
    assert median_anchors(represents_none).tolist() == [0, 0]
