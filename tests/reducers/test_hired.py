"""HiRED on one and several tiles, and FasterVLM: small examples and comparison with a reference implementation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.reference_hired import reference_shares, reference_top_attention
from torino import VisualTokens
from torino.core.errors import BadParameter, BadTokens, MissingSignal, UnmetBudget
from torino.reducers import get, make
from torino.reducers.hired import FasterVLM, HiRED, plan_tiles, tile_budgets
from torino.testing import check_reducer

NAMES = ["hired", "fastervlm"]


def image(attention: Tensor, grid: tuple[int, int] | None = None, **others: Any) -> VisualTokens:
    heads = attention.reshape(-1, attention.shape[-1])
    n = heads.shape[1]
    return VisualTokens(torch.arange(2.0 * n).reshape(n, 2), grid or (1, n), cls_attention=heads, **others)


# ---------------------------------------------------------------------- single tile


@pytest.mark.parametrize("name", NAMES)
def test_small_example(name: str) -> None:
    tokens = image(torch.tensor([[0.1, 0.4, 0.0, 0.2], [0.3, 0.1, 0.5, 0.1]]), (2, 2))
    assert make(name, budget=2).plan(tokens).sources.tolist() == [1, 2]
    assert make(name, budget=3, order="native").plan(tokens).sources.tolist() == [1, 2, 0]
    assert make(name, budget=2).plan(tokens).score.tolist() == pytest.approx([0.5, 0.5])
    assert make(name, budget=4).plan(tokens).sources.tolist() == [0, 1, 2, 3]
    assert make(name, budget=2).plan(tokens).assigned.tolist() == [0, 0, 1, 1]  # dropped patches, to the most similar
    assert make(name, budget=1).plan(image(torch.ones(1))).sources.tolist() == [0]


@pytest.mark.parametrize("name", NAMES)
def test_flat_and_one_hot_attention(name: str) -> None:
    for n in (1, 5, 33, 100):
        for budget in {1, n // 2 + 1, n}:
            assert make(name, budget=budget).plan(image(torch.full((16, n), 1 / 577))).sources.tolist() == list(
                range(budget)
            )
    for hot in range(6):
        plan = make(name, budget=3, order="native").plan(image(torch.eye(6)[hot]))
        assert plan.sources.tolist() == [hot, *[i for i in range(6) if i != hot][:2]]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["random", "tied", "zero"])
def test_equals_reference(name: str, kind: str) -> None:
    for seed, n in enumerate([1, 2, 9, 30, 77]):
        generator = torch.Generator().manual_seed(seed)
        attention = {
            "random": torch.rand(4, n, generator=generator).softmax(1),
            "tied": torch.randint(3, (4, n), generator=generator) / 8,
            "zero": torch.zeros(4, n),
        }[kind]
        for budget in sorted({1, n // 3 + 1, n}):
            plan = make(name, budget=budget, order="native").plan(image(attention))
            assert plan.sources.tolist() == reference_top_attention(attention, budget)
            raster = make(name, budget=budget).plan(image(attention))
            assert raster.sources.tolist() == sorted(reference_top_attention(attention, budget))


def test_permutation_equivariance() -> None:
    generator = torch.Generator().manual_seed(0)
    attention, order = torch.rand(4, 40, generator=generator), torch.randperm(40, generator=generator)
    permuted = HiRED(13, order="native").plan(image(attention[:, order])).sources
    assert order[permuted].tolist() == HiRED(13, order="native").plan(image(attention)).sources.tolist()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("order", ["raster", "native"])
@pytest.mark.parametrize("budget", [1, 2, 7, 15, 16, 64])
def test_contract(name: str, budget: int, order: str) -> None:
    check_reducer(make(name, budget=budget, order=order))


@pytest.mark.parametrize("name", NAMES)
def test_errors(name: str) -> None:
    for budget in (0, -1, 2.0, True, None):
        with pytest.raises(BadParameter, match="budget must be a whole number of at least 1, got"):
            make(name, budget=budget)
    with pytest.raises(BadParameter, match="order must be one of 'raster', 'native', got 'spiral'"):
        make(name, budget=3, order="spiral")
    with pytest.raises(UnmetBudget, match=f"{name} cannot give 5 tokens: the image has only 4 patches"):
        make(name, budget=5).plan(image(torch.ones(4)))
    with pytest.raises(MissingSignal, match=f"{name} needs the signal cls_attention, which these tokens do not have"):
        make(name, budget=2).plan(VisualTokens(torch.eye(4), (2, 2)))


def test_class_attributes() -> None:
    assert get("hired") is HiRED
    assert get("fastervlm") is FasterVLM
    assert (HiRED(3).spec, FasterVLM(3).spec) == ("hired(budget=3)", "fastervlm(budget=3)")
    assert HiRED.needs == FasterVLM.needs == {"cls_attention"}
    assert (HiRED.original_license, FasterVLM.original_license) == ("MIT", "Apache-2.0")
    assert (HiRED.merges, HiRED.adaptive, HiRED.emits_cls) == (False, False, False)


# ---------------------------------------------------------------------- budgets of tiles


def at(grid: tuple[int, int], *places: tuple[int, int]) -> Tensor:
    """Return attention that is high at some positions, in descending order, and 0 elsewhere."""
    attention = torch.zeros(grid)
    for rank, place in enumerate(places):
        attention[place] = 1 - rank / 1000
    return attention.flatten()


def test_released_tiles_are_horizontal_bands() -> None:
    """For a 4x4 map and 2x2 tiles, the tiles of the release are the four rows."""
    left = [(row, 0) for row in range(4)] + [(row, 1) for row in range(4)]  # content in the left half
    attention = at((4, 4), *left)
    assert tile_budgets(attention, (4, 4), (2, 2), 32, exact=False) == [16, 4, 4, 4, 4]
    assert tile_budgets(attention, (4, 4), (2, 2), 32, exact=False, fidelity="paper") == [16, 8, 0, 8, 0]
    top = [(0, column) for column in range(4)] + [(1, column) for column in range(4)]
    attention = at((4, 4), *top)
    assert tile_budgets(attention, (4, 4), (2, 2), 32, exact=False) == [16, 8, 8, 0, 0]
    assert tile_budgets(attention, (4, 4), (2, 2), 32, exact=False, fidelity="paper") == [16, 8, 8, 0, 0]
    # with one column of tiles the bands are the tiles
    assert tile_budgets(attention, (4, 4), (2, 1), 32) == tile_budgets(attention, (4, 4), (2, 1), 32, fidelity="paper")


def test_llava_next_with_a_fifth_of_the_tokens() -> None:
    """Five views of 576 patches and a rate of 0.2 give 576 tokens, 288 of them for the base view."""
    attention = torch.rand(16, 576, generator=torch.Generator().manual_seed(0))
    for fidelity in ("released", "paper"):
        content, released = reference_shares(attention, (24, 24), (2, 2), 576, 0.5, fidelity)
        assert sum(content) == 288
        assert released[1:] == content  # 288 tokens for 288 patches of content
        assert tile_budgets(attention, (24, 24), (2, 2), 576, fidelity=fidelity) == [288, *content]


@pytest.mark.parametrize("fidelity", ["released", "paper"])
@pytest.mark.parametrize("tiles", [(1, 2), (2, 1), (2, 2), (1, 3), (3, 1), (2, 3), (1, 1)])
def test_shares_equal_reference(tiles: tuple[int, int], fidelity: Any) -> None:
    n, count = 72, tiles[0] * tiles[1]
    for seed, grid in enumerate([(6, 12), (12, 6), (9, 8)]):
        generator = torch.Generator().manual_seed(seed)
        for attention in (torch.rand(3, n, generator=generator), torch.randint(3, (1, n), generator=generator) / 4):
            for alpha in (0.5, 0.0, 1.0, 0.9):
                for budget in (7, 50, n * (count + 1)):
                    given = {"alpha": alpha, "fidelity": fidelity}
                    _, expected = reference_shares(attention, grid, tiles, budget, alpha, fidelity)
                    assert tile_budgets(attention, grid, tiles, budget, exact=False, **given) == expected
                    shares = tile_budgets(attention, grid, tiles, budget, **given)
                    assert sum(shares) == budget
                    assert all(0 <= share <= n for share in shares)
                    assert all(share >= minimum for share, minimum in zip(shares, expected, strict=True))
                    if max(expected[1:]) < n:  # nothing was truncated: each tile gets its share or one more
                        assert all(share - minimum <= 1 for share, minimum in zip(shares, expected, strict=True))


def test_remainders_and_full_tiles() -> None:
    # content 3, 2, 1 of six; 6 of 12 tokens go to the tiles
    attention = at((3, 4), (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0))
    assert tile_budgets(attention, (3, 4), (3, 1), 12) == [6, 3, 2, 1]
    # 7 tokens are divided as 3.5, 2.33, 1.17; the first has the largest remainder
    assert tile_budgets(attention, (3, 4), (3, 1), 14) == [7, 4, 2, 1]
    assert tile_budgets(attention, (3, 4), (3, 1), 14, exact=False) == [7, 3, 2, 1]
    # the first tile can take only one; the other 5 are divided 2 to 1 among the others, then go to the base view
    assert tile_budgets(attention, (3, 4), (3, 1), 12, capacity=[12, 1, 12, 12]) == [6, 1, 3, 2]
    assert tile_budgets(attention, (3, 4), (3, 1), 12, capacity=[12, 1, 1, 1]) == [9, 1, 1, 1]
    assert tile_budgets(attention, (3, 4), (3, 1), 12, capacity=[12, 1, 1, 1], exact=False) == [6, 1, 1, 0]  # of 3
    assert tile_budgets(attention, (3, 4), (3, 1), 12, capacity=[2, 12, 12, 12]) == [2, 5, 3, 2]
    assert tile_budgets(attention, (3, 4), (3, 1), 12, capacity=[2, 5, 0, 5]) == [2, 5, 0, 5]


def test_tiles_without_content() -> None:
    assert tile_budgets(torch.ones(4), (2, 2), (1, 2), 8, alpha=1.0) == [4, 2, 2]
    assert tile_budgets(torch.ones(4), (2, 2), (1, 2), 8, alpha=0.0) == [0, 4, 4]
    assert tile_budgets(torch.ones(1), (1, 1), (1, 1), 2) == [1, 1]
    # tiles without content get tokens only if the others are full
    assert tile_budgets(at((2, 2), (0, 0), (0, 1)), (2, 2), (2, 1), 6) == [3, 3, 0]
    assert tile_budgets(at((2, 2), (0, 0), (0, 1)), (2, 2), (2, 1), 11) == [4, 4, 3]


def test_tiles_that_do_not_divide_the_grid() -> None:
    message = r"cuts the 49 patches of the base view into 4 equal runs, which leaves 1 over.*fidelity='paper'"
    with pytest.raises(BadParameter, match=message):
        tile_budgets(torch.ones(49), (7, 7), (2, 2), 20)
    # by centers: rows 0 to 2 are in the upper tile, rows 3 (centered in the middle) to 6 in the lower one
    assert tile_budgets(at((7, 7), *[(3, c) for c in range(7)]), (7, 7), (2, 1), 20, alpha=0.85, fidelity="paper") == [
        17,
        0,
        3,
    ]


def test_invalid_arguments_of_tile_budgets() -> None:
    with pytest.raises(BadTokens, match=r"attention must have shape \(H, 16\) or \(16,\) on a 4x4 grid, got \(2, 15\)"):
        tile_budgets(torch.ones(2, 15), (4, 4), (2, 2), 8)
    for alpha in (-0.5, float("nan")):
        with pytest.raises(BadParameter, match="alpha must be a finite number of at least 0"):
            tile_budgets(torch.ones(16), (4, 4), (2, 2), 8, alpha=alpha)
    with pytest.raises(BadParameter, match=r"alpha must be between 0 and 1, got 1\.5"):
        tile_budgets(torch.ones(16), (4, 4), (2, 2), 8, alpha=1.5)
    with pytest.raises(BadParameter, match="fidelity must be one of 'released', 'paper', got 'other'"):
        tile_budgets(torch.ones(16), (4, 4), (2, 2), 8, fidelity="other")  # type: ignore[arg-type]
    with pytest.raises(BadParameter, match="budget must be a whole number of at least 1, got 0"):
        tile_budgets(torch.ones(16), (4, 4), (2, 2), 0)
    with pytest.raises(BadParameter, match="tiles must be a whole number of at least 1, got 0"):
        tile_budgets(torch.ones(16), (4, 4), (0, 2), 8)
    with pytest.raises(BadParameter, match="capacity must have one entry for the base view and one for each"):
        tile_budgets(torch.ones(16), (4, 4), (2, 2), 8, capacity=[16, 16])
    with pytest.raises(UnmetBudget, match=r"hired cannot give 81 tokens.*only 80 patches in its base view and tiles"):
        tile_budgets(torch.ones(16), (4, 4), (2, 2), 81)


# ---------------------------------------------------------------------- plans of tiles


def views(seed: int = 0) -> tuple[VisualTokens, list[VisualTokens]]:
    generator = torch.Generator().manual_seed(seed)
    first = torch.rand(2, 16, generator=generator)
    base = image(torch.rand(2, 16, generator=generator), (4, 4), signals={"cls_attention@0": first})
    return base, [image(torch.rand(2, 16, generator=generator), (4, 4)) for _ in range(4)]


@pytest.mark.parametrize("order", ["raster", "native"])
@pytest.mark.parametrize("fidelity", ["released", "paper"])
@pytest.mark.parametrize("exact", [True, False])
def test_tiles_share_one_budget(order: Any, fidelity: Any, exact: bool) -> None:
    base, tiles = views()
    for budget in (1, 17, 40, 80):
        plans = plan_tiles(base, tiles, budget, layout=(2, 2), fidelity=fidelity, exact=exact, order=order)
        shares = tile_budgets(base.signals["cls_attention@0"], (4, 4), (2, 2), budget, fidelity=fidelity, exact=exact)
        assert plans.lengths.tolist() == shares
        if exact:
            assert sum(shares) == budget
        for view, plan, share in zip([base, *tiles], plans, shares, strict=True):
            assert view.cls_attention is not None
            kept = reference_top_attention(view.cls_attention, share)
            assert plan.sources.tolist() == (sorted(kept) if order == "raster" else kept)
            assert plan.by == f"hired(budget={share})"
        packed = plans.apply([view.patches for view in (base, *tiles)])
        assert packed.lengths.tolist() == shares


def test_a_tile_can_get_no_tokens() -> None:
    base, tiles = views()
    base = base.with_(
        signals={"cls_attention@0": at((4, 4), *[(0, c) for c in range(4)], *[(1, c) for c in range(4)])[None]}
    )
    plans = plan_tiles(base, tiles, 20, layout=(2, 2), fidelity="paper")
    assert plans.lengths.tolist() == [10, 5, 5, 0, 0]
    assert plans[3].apply(tiles[2].patches).shape == (0, 2)


def test_tiles_of_other_sizes() -> None:
    """A cropped tile has fewer patches and gets at most that many tokens."""
    base, tiles = views()
    tiles[0] = image(torch.rand(2, 3, generator=torch.Generator().manual_seed(5)), (1, 3))
    plans = plan_tiles(base, tiles, 67, layout=(2, 2))
    assert plans.lengths.tolist() == [16, 3, 16, 16, 16]


def test_invalid_arguments_of_plan_tiles() -> None:
    base, tiles = views()
    with pytest.raises(BadParameter, match="layout 2x2 has 4 tiles, got 3"):
        plan_tiles(base, tiles[:3], 20, layout=(2, 2))
    with pytest.raises(MissingSignal, match="hired needs the signal cls_attention@0, which these tokens do not have"):
        plan_tiles(base.with_(signals={}), tiles, 20, layout=(2, 2))
    with pytest.raises(BadTokens, match=r"hired needs cls_attention@0 of shape \(any x 16\), got \(16,\)"):
        plan_tiles(base.with_(signals={"cls_attention@0": torch.ones(16)}), tiles, 20, layout=(2, 2))
    with pytest.raises(MissingSignal, match="hired needs the signal cls_attention, which these tokens do not have"):
        plan_tiles(base, [tiles[0], *[tile.with_(cls_attention=None) for tile in tiles[1:]]], 20, layout=(2, 2))
    with pytest.raises(BadParameter, match="order must be one of"):
        plan_tiles(base, tiles, 20, layout=(2, 2), order="spiral")  # type: ignore[arg-type]
    with pytest.raises(UnmetBudget, match="hired cannot give 81 tokens"):
        plan_tiles(base, tiles, 81, layout=(2, 2))
