"""HiRED on one tile and on many, and FasterVLM: cases by hand, and the published rules transcribed."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

from torino import BadParameter, BadTokens, UnmetBudget, VisualTokens
from torino.core.errors import MissingSignal
from torino.reducers import get, make
from torino.reducers.hired import FasterVLM, HiRED, plan_tiles, tile_budgets
from torino.testing import check_reducer

NAMES = ["hired", "fastervlm"]


def image(attention: Tensor, grid: tuple[int, int] | None = None, **others: Any) -> VisualTokens:
    heads = attention.reshape(-1, attention.shape[-1])
    n = heads.shape[1]
    return VisualTokens(torch.arange(2.0 * n).reshape(n, 2), grid or (1, n), cls_attention=heads, **others)


def slow(attention: Tensor, budget: int) -> list[int]:
    """The rule with lists and loops: sum the heads, take the highest again and again."""
    heads = attention.double().tolist()
    summed = [sum(head[i] for head in heads) for i in range(len(heads[0]))]
    kept: list[int] = []
    while len(kept) < budget:
        best = -1
        for i in range(len(summed)):
            if i not in kept and (best < 0 or summed[i] > summed[best]):
                best = i
        kept.append(best)
    return kept


# ---------------------------------------------------------------------- one tile


@pytest.mark.parametrize("name", NAMES)
def test_by_hand(name: str) -> None:
    tokens = image(torch.tensor([[0.1, 0.4, 0.0, 0.2], [0.3, 0.1, 0.5, 0.1]]), (2, 2))
    assert make(name, budget=2).plan(tokens).sources.tolist() == [1, 2]
    assert make(name, budget=3, order="native").plan(tokens).sources.tolist() == [1, 2, 0]
    assert make(name, budget=2).plan(tokens).score.tolist() == pytest.approx([0.5, 0.5])
    assert make(name, budget=4).plan(tokens).sources.tolist() == [0, 1, 2, 3]
    assert make(name, budget=2).plan(tokens).assigned.tolist() == [-1, 0, 1, -1]
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
def test_equals_the_transcription(name: str, kind: str) -> None:
    for seed, n in enumerate([1, 2, 9, 30, 77]):
        source = torch.Generator().manual_seed(seed)
        attention = {
            "random": torch.rand(4, n, generator=source).softmax(1),
            "tied": torch.randint(3, (4, n), generator=source) / 8,
            "zero": torch.zeros(4, n),
        }[kind]
        for budget in sorted({1, n // 3 + 1, n}):
            plan = make(name, budget=budget, order="native").plan(image(attention))
            assert plan.sources.tolist() == slow(attention, budget)
            assert make(name, budget=budget).plan(image(attention)).sources.tolist() == sorted(slow(attention, budget))


def test_permuted_patches_are_kept_alike() -> None:
    source = torch.Generator().manual_seed(0)
    attention, order = torch.rand(4, 40, generator=source), torch.randperm(40, generator=source)
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
    with pytest.raises(UnmetBudget, match=f"{name} cannot give 5 tokens for this image: its patches make 4 at most"):
        make(name, budget=5).plan(image(torch.ones(4)))
    with pytest.raises(MissingSignal, match=f"{name} reads cls_attention, and these tokens do not carry it"):
        make(name, budget=2).plan(VisualTokens(torch.eye(4), (2, 2)))


def test_says_what_it_is() -> None:
    assert get("hired") is HiRED
    assert get("fastervlm") is FasterVLM
    assert (HiRED(3).spec, FasterVLM(3).spec) == ("hired(budget=3)", "fastervlm(budget=3)")
    assert HiRED.needs == FasterVLM.needs == {"cls_attention"}
    assert (HiRED.original_licence, FasterVLM.original_licence) == ("MIT", "Apache-2.0")
    assert (HiRED.merges, HiRED.adaptive, HiRED.emits_cls) == (False, False, False)


# ---------------------------------------------------------------------- shares of tiles


def at(grid: tuple[int, int], *places: tuple[int, int]) -> Tensor:
    """Attention that is high at some places, falling from one to the next, and nought elsewhere."""
    attention = torch.zeros(grid)
    for rank, place in enumerate(places):
        attention[place] = 1 - rank / 1000
    return attention.flatten()


def slow_shares(
    attention: Tensor, grid: tuple[int, int], tiles: tuple[int, int], budget: int, alpha: float, fidelity: str
) -> tuple[list[int], list[int]]:
    """Content of each tile and the released shares, with lists and loops; every view has as many patches."""
    (rows, columns), (down, across) = grid, tiles
    n = rows * columns
    content = sorted(slow(attention.reshape(-1, n), int(n * (1 - alpha))))
    count = [[0] * across for _ in range(down)]
    for patch in content:
        if fidelity == "released":  # the place of a flat index in an array of shape (down, across, rest)
            rest = n // (down * across)
            count[patch // (across * rest)][patch // rest % across] += 1
        else:
            row, column = divmod(patch, columns)
            high, left = Fraction(2 * row + 1, 2 * rows), Fraction(2 * column + 1, 2 * columns)
            count[int(high * down)][int(left * across)] += 1
    found = [value for row in count for value in row]
    full = min(int(budget * alpha), n)
    rest_of_budget = min(budget - full, len(found) * n)
    weights = found if sum(found) else [1] * len(found)
    return found, [full, *[min(int(Fraction(w, sum(weights)) * rest_of_budget), n) for w in weights]]


def test_the_released_reshape_slices_bands() -> None:
    """A 4x4 map and 2x2 tiles: the release's tiles are the four rows."""
    left = [(row, 0) for row in range(4)] + [(row, 1) for row in range(4)]  # content in the left half
    attention = at((4, 4), *left)
    assert tile_budgets(attention, (4, 4), (2, 2), 32, exact=False) == [16, 4, 4, 4, 4]
    assert tile_budgets(attention, (4, 4), (2, 2), 32, exact=False, fidelity="paper") == [16, 8, 0, 8, 0]
    top = [(0, column) for column in range(4)] + [(1, column) for column in range(4)]
    attention = at((4, 4), *top)
    assert tile_budgets(attention, (4, 4), (2, 2), 32, exact=False) == [16, 8, 8, 0, 0]
    assert tile_budgets(attention, (4, 4), (2, 2), 32, exact=False, fidelity="paper") == [16, 8, 8, 0, 0]
    # one column of tiles: bands are what the tiles are
    assert tile_budgets(attention, (4, 4), (2, 1), 32) == tile_budgets(attention, (4, 4), (2, 1), 32, fidelity="paper")


def test_llava_next_at_a_fifth() -> None:
    """Five views of 576, rate 0.2: 576 tokens, 288 for the base view, the others by content."""
    attention = torch.rand(16, 576, generator=torch.Generator().manual_seed(0))
    for fidelity in ("released", "paper"):
        found, released = slow_shares(attention, (24, 24), (2, 2), 576, 0.5, fidelity)
        assert sum(found) == 288
        assert released[1:] == found  # 288 tokens for 288 patches of content
        assert tile_budgets(attention, (24, 24), (2, 2), 576, fidelity=fidelity) == [288, *found]


@pytest.mark.parametrize("fidelity", ["released", "paper"])
@pytest.mark.parametrize("tiles", [(1, 2), (2, 1), (2, 2), (1, 3), (3, 1), (2, 3), (1, 1)])
def test_shares_equal_the_transcription(tiles: tuple[int, int], fidelity: Any) -> None:
    n, count = 72, tiles[0] * tiles[1]
    for seed, grid in enumerate([(6, 12), (12, 6), (9, 8)]):
        source = torch.Generator().manual_seed(seed)
        for attention in (torch.rand(3, n, generator=source), torch.randint(3, (1, n), generator=source) / 4):
            for alpha in (0.5, 0.0, 1.0, 0.9):
                for budget in (7, 50, n * (count + 1)):
                    given = {"alpha": alpha, "fidelity": fidelity}
                    _, expected = slow_shares(attention, grid, tiles, budget, alpha, fidelity)
                    assert tile_budgets(attention, grid, tiles, budget, exact=False, **given) == expected
                    shares = tile_budgets(attention, grid, tiles, budget, **given)
                    assert sum(shares) == budget
                    assert all(0 <= share <= n for share in shares)
                    assert all(mine >= least for mine, least in zip(shares, expected, strict=True))
                    if max(expected[1:]) < n:  # nothing was cut: each gets its share or one more
                        assert all(mine - least <= 1 for mine, least in zip(shares, expected, strict=True))


def test_remainders_and_full_tiles() -> None:
    # content 3, 2, 1 of six; 6 of 12 tokens go to the tiles
    attention = at((3, 4), (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0))
    assert tile_budgets(attention, (3, 4), (3, 1), 12) == [6, 3, 2, 1]
    # 7 tokens: 3.5, 2.33, 1.17; the first has the largest remainder
    assert tile_budgets(attention, (3, 4), (3, 1), 14) == [7, 4, 2, 1]
    assert tile_budgets(attention, (3, 4), (3, 1), 14, exact=False) == [7, 3, 2, 1]
    # the first tile takes one only: what is left of 6 goes 2 to 1 to the others, and then to the base view
    assert tile_budgets(attention, (3, 4), (3, 1), 12, room=[12, 1, 12, 12]) == [6, 1, 3, 2]
    assert tile_budgets(attention, (3, 4), (3, 1), 12, room=[12, 1, 1, 1]) == [9, 1, 1, 1]
    assert tile_budgets(attention, (3, 4), (3, 1), 12, room=[12, 1, 1, 1], exact=False) == [6, 1, 1, 0]  # of 3
    assert tile_budgets(attention, (3, 4), (3, 1), 12, room=[2, 12, 12, 12]) == [2, 5, 3, 2]
    assert tile_budgets(attention, (3, 4), (3, 1), 12, room=[2, 5, 0, 5]) == [2, 5, 0, 5]


def test_content_of_no_tile() -> None:
    assert tile_budgets(torch.ones(4), (2, 2), (1, 2), 8, alpha=1.0) == [4, 2, 2]
    assert tile_budgets(torch.ones(4), (2, 2), (1, 2), 8, alpha=0.0) == [0, 4, 4]
    assert tile_budgets(torch.ones(1), (1, 1), (1, 1), 2) == [1, 1]
    # tiles without content get something only when the others are full
    assert tile_budgets(at((2, 2), (0, 0), (0, 1)), (2, 2), (2, 1), 6) == [3, 3, 0]
    assert tile_budgets(at((2, 2), (0, 0), (0, 1)), (2, 2), (2, 1), 11) == [4, 4, 3]


def test_tiles_that_do_not_part_the_grid() -> None:
    with pytest.raises(BadParameter, match=r"cuts 49 patches into 4 equal runs, which leaves 1 over.*fidelity='paper'"):
        tile_budgets(torch.ones(49), (7, 7), (2, 2), 20)
    # by centres: rows 0 to 2 are up, rows 3 (its centre is the middle) to 6 are down
    assert tile_budgets(at((7, 7), *[(3, c) for c in range(7)]), (7, 7), (2, 1), 20, alpha=0.85, fidelity="paper") == [
        17,
        0,
        3,
    ]


def test_errors_of_shares() -> None:
    with pytest.raises(BadTokens, match=r"attention must have shape \(H, 16\) or \(16,\) on a 4x4 grid, got \(2, 15\)"):
        tile_budgets(torch.ones(2, 15), (4, 4), (2, 2), 8)
    for alpha in (-0.5, float("nan")):
        with pytest.raises(BadParameter, match="alpha must be a finite number of at least 0"):
            tile_budgets(torch.ones(16), (4, 4), (2, 2), 8, alpha=alpha)
    with pytest.raises(BadParameter, match=r"alpha must be between 0 and 1, got 1\.5"):
        tile_budgets(torch.ones(16), (4, 4), (2, 2), 8, alpha=1.5)
    with pytest.raises(BadParameter, match="fidelity must be one of 'released', 'paper', got 'mine'"):
        tile_budgets(torch.ones(16), (4, 4), (2, 2), 8, fidelity="mine")  # type: ignore[arg-type]
    with pytest.raises(BadParameter, match="budget must be a whole number of at least 1, got 0"):
        tile_budgets(torch.ones(16), (4, 4), (2, 2), 0)
    with pytest.raises(BadParameter, match="tiles must be a whole number of at least 1, got 0"):
        tile_budgets(torch.ones(16), (4, 4), (0, 2), 8)
    with pytest.raises(BadParameter, match="room must say how many patches the base view and each of the 4 tiles have"):
        tile_budgets(torch.ones(16), (4, 4), (2, 2), 8, room=[16, 16])
    with pytest.raises(UnmetBudget, match=r"hired cannot give 81 tokens.*base view and tiles make 80 at most"):
        tile_budgets(torch.ones(16), (4, 4), (2, 2), 81)


# ---------------------------------------------------------------------- tiles planned together


def views(seed: int = 0) -> tuple[VisualTokens, list[VisualTokens]]:
    source = torch.Generator().manual_seed(seed)
    first = torch.rand(2, 16, generator=source)
    base = image(torch.rand(2, 16, generator=source), (4, 4), signals={"cls_attention@0": first})
    return base, [image(torch.rand(2, 16, generator=source), (4, 4)) for _ in range(4)]


@pytest.mark.parametrize("order", ["raster", "native"])
@pytest.mark.parametrize("fidelity", ["released", "paper"])
@pytest.mark.parametrize("exact", [True, False])
def test_tiles_are_planned_under_one_budget(order: Any, fidelity: Any, exact: bool) -> None:
    base, tiles = views()
    for budget in (1, 17, 40, 80):
        plans = plan_tiles(base, tiles, budget, layout=(2, 2), fidelity=fidelity, exact=exact, order=order)
        shares = tile_budgets(base.signals["cls_attention@0"], (4, 4), (2, 2), budget, fidelity=fidelity, exact=exact)
        assert plans.lengths.tolist() == shares
        if exact:
            assert sum(shares) == budget
        for view, plan, share in zip([base, *tiles], plans, shares, strict=True):
            assert view.cls_attention is not None
            kept = slow(view.cls_attention, share)
            assert plan.sources.tolist() == (sorted(kept) if order == "raster" else kept)
            assert plan.by == f"hired(budget={share})"
        packed = plans.apply([view.patches for view in (base, *tiles)])
        assert packed.lengths.tolist() == shares


def test_a_tile_may_get_nothing() -> None:
    base, tiles = views()
    base = base.with_(
        signals={"cls_attention@0": at((4, 4), *[(0, c) for c in range(4)], *[(1, c) for c in range(4)])[None]}
    )
    plans = plan_tiles(base, tiles, 20, layout=(2, 2), fidelity="paper")
    assert plans.lengths.tolist() == [10, 5, 5, 0, 0]
    assert plans[3].apply(tiles[2].patches).shape == (0, 2)


def test_tiles_of_other_sizes() -> None:
    """A tile that was cut to what the model shows has fewer patches, and gets no more than these."""
    base, tiles = views()
    tiles[0] = image(torch.rand(2, 3, generator=torch.Generator().manual_seed(5)), (1, 3))
    plans = plan_tiles(base, tiles, 67, layout=(2, 2))
    assert plans.lengths.tolist() == [16, 3, 16, 16, 16]


def test_errors_of_tiles() -> None:
    base, tiles = views()
    with pytest.raises(BadParameter, match="layout 2x2 holds 4 tiles, got 3"):
        plan_tiles(base, tiles[:3], 20, layout=(2, 2))
    with pytest.raises(MissingSignal, match="hired reads cls_attention@0, and these tokens do not carry it"):
        plan_tiles(base.with_(signals={}), tiles, 20, layout=(2, 2))
    with pytest.raises(BadTokens, match=r"hired reads cls_attention@0 of shape \(any x 16\), got \(16,\)"):
        plan_tiles(base.with_(signals={"cls_attention@0": torch.ones(16)}), tiles, 20, layout=(2, 2))
    with pytest.raises(MissingSignal, match="hired reads cls_attention, and these tokens do not carry it"):
        plan_tiles(base, [tiles[0], *[tile.with_(cls_attention=None) for tile in tiles[1:]]], 20, layout=(2, 2))
    with pytest.raises(BadParameter, match="order must be one of"):
        plan_tiles(base, tiles, 20, layout=(2, 2), order="spiral")  # type: ignore[arg-type]
    with pytest.raises(UnmetBudget, match="hired cannot give 81 tokens"):
        plan_tiles(base, tiles, 81, layout=(2, 2))
