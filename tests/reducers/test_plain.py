"""Plain baselines: uniform grid and average pooling; and what a dropped patch is assigned to."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import adaptive_avg_pool2d

from torino import VisualTokens, make
from torino.core.errors import UnmetBudget
from torino.reducers._cells import grid_cells
from torino.reducers._similarity import nearest_kept
from torino.testing import sample_tokens


@pytest.mark.parametrize("grid", [(1, 1), (1, 7), (7, 1), (3, 5), (14, 14), (24, 24), (9, 16)])
def test_cells_are_rectangles_of_similar_size(grid: tuple[int, int]) -> None:
    patches = grid[0] * grid[1]
    counts = (1, 2, 3, patches // 3, patches // 2, patches - 1, patches)
    for count in {min(number, patches) for number in counts if number}:
        cell, center = grid_cells(grid, count)
        plane = cell.reshape(grid)
        assert sorted(set(cell.tolist())) == list(range(count))
        assert [int(cell[patch]) for patch in center] == list(range(count))
        for number in range(count):
            rows, columns = (plane == number).nonzero(as_tuple=True)
            height, width = int(rows.max() - rows.min()) + 1, int(columns.max() - columns.min()) + 1
            assert height * width == len(rows)
        sizes = cell.bincount()
        assert sizes.max() <= 4 * sizes.min()


@pytest.mark.parametrize(
    ("grid", "cells"), [((24, 24), (8, 8)), ((24, 24), (12, 12)), ((14, 14), (7, 7)), ((6, 9), (2, 3))]
)
def test_pool_is_adaptive_average_pooling_where_the_grid_divides(grid: tuple[int, int], cells: tuple[int, int]) -> None:
    patches = torch.randn(grid[0] * grid[1], 5, generator=torch.Generator().manual_seed(0))
    plan = make("pool", budget=cells[0] * cells[1]).plan(VisualTokens(patches, grid))
    expected = adaptive_avg_pool2d(patches.T.reshape(1, 5, *grid), cells).reshape(5, -1).T
    assert torch.allclose(plan.apply(patches), expected, atol=1e-6)


def test_pool_keeps_the_norm() -> None:
    patches = torch.tensor([[3.0, 0.0], [0.0, 4.0], [1.0, 0.0], [-1.0, 0.0]])
    tokens = VisualTokens(patches, (1, 4))
    token, cancelled = make("pool", budget=2, keep_norm=True).plan(tokens).apply(patches)
    assert token.norm() == pytest.approx(3.5)
    assert torch.allclose(token / token.norm(), torch.tensor([0.6, 0.8]))
    assert cancelled.tolist() == [0.0, 0.0]


def test_uniform_keeps_centers() -> None:
    tokens = VisualTokens(torch.randn(36, 3, generator=torch.Generator().manual_seed(0)), (6, 6))
    plan = make("uniform", budget=4).plan(tokens)
    assert plan.sources.tolist() == [7, 10, 25, 28]
    assert plan.sizes.tolist() == [9, 9, 9, 9]


@pytest.mark.parametrize("name", ["uniform", "pool"])
def test_all_patches_and_too_many(name: str) -> None:
    for tokens in sample_tokens():
        plan = make(name, budget=len(tokens)).plan(tokens)
        assert torch.allclose(plan.apply(tokens.patches), tokens.patches)
        with pytest.raises(UnmetBudget):
            make(name, budget=len(tokens) + 1).plan(tokens)


# ---------------------------------------------------------------------- dropped patches


def test_dropped_patches_belong_to_the_most_similar_kept_one() -> None:
    patches = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.9, 0.1], [0.1, 5.0], [1.0, 1.0]])
    assert nearest_kept(patches, torch.tensor([0, 1])).tolist() == [0, 1, 0, 1, 0]  # the last is a tie
    assert nearest_kept(patches, torch.tensor([1, 0])).tolist() == [1, 0, 1, 0, 1]
    assert nearest_kept(patches, torch.tensor([5, 3])).tolist() == [1, 1, 1, 1, 1]  # 5 is the CLS token
    assert nearest_kept(patches, torch.tensor([5])).tolist() == [-1] * 5


def test_equal_patches_that_are_kept_belong_to_themselves() -> None:
    assert nearest_kept(torch.ones(3, 2), torch.tensor([0, 2])).tolist() == [0, 0, 1]


@pytest.mark.parametrize(
    "name", ["random", "divprune", "fastervlm", "hired", "hiprune", "holov", "cdpruner", "prunesid"]
)
def test_pruners_represent_all_patches(name: str) -> None:
    reducer = make(name, budget=5)
    for tokens in sample_tokens(needs=reducer.needs):
        if len(tokens) >= 6:
            plan = reducer.plan(tokens)
            assert plan.is_pruning
            assert int(plan.assigned.min()) >= 0
            patches = plan.sources < len(tokens)  # without the CLS token
            assert int(plan.sizes[patches].sum()) == len(tokens)
            kept = plan.sources[patches]
            assert torch.equal(plan.assigned[kept], patches.nonzero()[:, 0])
