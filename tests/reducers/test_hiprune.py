"""HiPrune: small examples and comparison with a reference implementation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from torino import Reduction, VisualTokens, make
from torino.core.errors import BadParameter, BadTokens, MissingSignal, UnmetBudget
from torino.reducers.hiprune import HiPrune
from torino.testing import check_reducer, sample_tokens

FIDELITIES = ("released", "paper")


def image(
    middle: list[float] | Tensor, deep: list[float] | Tensor, grid: tuple[int, int], block: int | str = "9/24"
) -> VisualTokens:
    n = grid[0] * grid[1]
    signals = {
        f"received_attention@{block}": torch.as_tensor(middle, dtype=torch.float32),
        "received_attention": torch.as_tensor(deep, dtype=torch.float32),
    }
    return VisualTokens(torch.arange(2.0 * n).reshape(n, 2), grid, signals=signals)


def spike(n: int, *places: int) -> list[float]:
    """Return attention that is positive on the given patches, in descending order, and 0 elsewhere."""
    values = [0.0] * n
    for rank, place in enumerate(places):
        values[place] = float(len(places) - rank)
    return values


def reference(middle: list[float], deep: list[float], grid: tuple[int, int], budget: int, alpha: float, fidelity: str):
    """Return the role of each selected patch, in order of selection, computed with plain loops."""
    rows, columns = grid
    n = rows * columns
    count = round(budget * alpha / 5)
    while 5 * count > budget:  # deviation: an anchor and its neighbors must fit
        count -= 1
    role: dict[int, str] = {}
    for i in sorted(range(n), key=lambda i: (-middle[i], i))[:count]:
        role[i] = "anchor"
    buffers: set[int] = set()
    for i in list(role):
        if fidelity == "released":
            for j in (i - 1, i + 1, i - columns, i + columns):
                buffers.add(min(max(j, 0), n - 1))
        else:
            row, column = divmod(i, columns)
            for r, c in ((row, column - 1), (row, column + 1), (row - 1, column), (row + 1, column)):
                if 0 <= r < rows and 0 <= c < columns:
                    buffers.add(r * columns + c)
    for i in sorted(buffers):
        role.setdefault(i, "buffer")
    for i in sorted(range(n), key=lambda i: (-deep[i], i)):
        if len(role) < budget and i not in role:
            role[i] = "register"
    return role


def roles(plan: Reduction) -> dict[int, str]:
    return dict(zip(plan.anchor.tolist(), plan.role, strict=True))


# ---------------------------------------------------------------------- small examples


@pytest.mark.parametrize(("budget", "anchors"), [(192, 4), (128, 3), (64, 1), (25, 0), (26, 1), (1, 0)])
def test_number_of_anchors(budget: int, anchors: int) -> None:
    assert HiPrune(budget).num_anchors == anchors


def test_anchors_never_exceed_the_budget() -> None:
    assert HiPrune(4, alpha=1.0).num_anchors == 0
    assert HiPrune(193, alpha=1.0).num_anchors == 38
    for budget in range(1, 600):
        assert HiPrune(budget, alpha=0.5).num_anchors == round(budget * 0.5 / 5)


@pytest.mark.parametrize("fidelity", FIDELITIES)
def test_one_anchor_in_the_middle(fidelity: str) -> None:
    # 4 x 5 grid, anchor at row 1, column 2; the deep block ranks 19, the anchor, 0
    tokens = image(spike(20, 7), spike(20, 19, 7, 0), (4, 5))
    plan = make("hiprune", budget=7, alpha=0.7, fidelity=fidelity).plan(tokens)
    assert plan.anchor.tolist() == [0, 2, 6, 7, 8, 12, 19]
    assert plan.role == ("register", "buffer", "buffer", "anchor", "buffer", "buffer", "register")
    assert plan.score.tolist() == [1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 3.0]
    native = make("hiprune", budget=7, alpha=0.7, fidelity=fidelity, order="native").plan(tokens)
    assert native.anchor.tolist() == [7, 2, 6, 8, 12, 19, 0]


def test_neighbors_wrap_and_clamp_in_the_released_version_only() -> None:
    # 3 x 4 grid, anchor 3 = top right corner. Flat neighbors: 2, 4 (next row), 3 - 4 -> 0, 7. On the grid: 2 and 7.
    tokens = image(spike(12, 3), spike(12, 11, 10, 9, 8), (3, 4))
    released = make("hiprune", budget=6, alpha=0.9).plan(tokens)
    assert roles(released) == {3: "anchor", 0: "buffer", 2: "buffer", 4: "buffer", 7: "buffer", 11: "register"}
    paper = make("hiprune", budget=6, alpha=0.9, fidelity="paper").plan(tokens)
    assert roles(paper) == {
        3: "anchor", 2: "buffer", 7: "buffer", 11: "register", 10: "register", 9: "register"
    }  # fmt: skip
    # the last patch: below it the released code clamps to the patch itself
    last = image(spike(12, 11), spike(12, 0, 1, 2, 3), (3, 4))
    assert roles(make("hiprune", budget=6, alpha=0.9).plan(last)) == {
        11: "anchor", 10: "buffer", 7: "buffer", 0: "register", 1: "register", 2: "register"
    }  # fmt: skip


def test_equal_attention_goes_to_the_lowest_index() -> None:
    tokens = image([0.5] * 16, [0.5] * 16, (4, 4))
    assert make("hiprune", budget=5).plan(tokens).anchor.tolist() == [0, 1, 2, 3, 4]
    # one anchor at 0, its neighbors 1 and 4 (and itself), then registers 2, 3 by index
    plan = make("hiprune", budget=5, alpha=1.0).plan(tokens)
    assert roles(plan) == {0: "anchor", 1: "buffer", 4: "buffer", 2: "register", 3: "register"}


def test_one_hot_attention_is_kept() -> None:
    for place in range(16):
        assert place in make("hiprune", budget=3).plan(image([0.0] * 16, spike(16, place), (4, 4))).anchor.tolist()
        plan = make("hiprune", budget=5, alpha=1.0).plan(image(spike(16, place), [0.0] * 16, (4, 4)))
        assert roles(plan)[place] == "anchor"


def test_budgets_of_all_patches_and_of_one() -> None:
    plan = make("hiprune", budget=12, alpha=1.0).plan(image(spike(12, 5), spike(12, 1), (3, 4)))
    assert plan.anchor.tolist() == list(range(12))
    assert plan.is_pruning
    assert make("hiprune", budget=1, alpha=1.0).plan(image([0.3], [0.2], (1, 1))).anchor.tolist() == [0]
    assert make("hiprune", budget=1).plan(image(spike(12, 5), spike(12, 7), (3, 4))).anchor.tolist() == [7]


# ---------------------------------------------------------------------- reference


@pytest.mark.parametrize("fidelity", FIDELITIES)
@pytest.mark.parametrize("grid", [(6, 7), (1, 9), (9, 1), (24, 24)])
@pytest.mark.parametrize("levels", [3, 1000])
def test_equals_reference(grid: tuple[int, int], fidelity: str, levels: int) -> None:
    n = grid[0] * grid[1]
    generator = torch.Generator().manual_seed(n + levels)
    for alpha in (0.0, 0.1, 0.5, 1.0):
        middle, deep = (torch.randint(levels, (2, n), generator=generator) / levels).tolist()
        for budget in sorted({1, 2, 5, 9, n // 3, n - 1, n}):
            want = reference(middle, deep, grid, budget, alpha, fidelity)
            tokens = image(middle, deep, grid)
            native = make("hiprune", budget=budget, alpha=alpha, fidelity=fidelity, order="native").plan(tokens)
            assert list(roles(native).items()) == list(want.items())
            raster = make("hiprune", budget=budget, alpha=alpha, fidelity=fidelity).plan(tokens)
            assert list(roles(raster).items()) == sorted(want.items())
            score = [deep[i] if want[i] == "register" else middle[i] for i in sorted(want)]
            torch.testing.assert_close(raster.score, torch.tensor(score))


# ---------------------------------------------------------------------- symmetry, contract, errors


def test_permutation_equivariance_only_without_anchors() -> None:
    generator = torch.Generator().manual_seed(3)
    middle, deep = torch.rand(2, 36, generator=generator)
    shuffled = torch.randperm(36, generator=generator)
    for alpha, equivariant in ((0.0, True), (0.8, False)):
        reducer = make("hiprune", budget=12, alpha=alpha)
        plain = reducer.plan(image(middle, deep, (6, 6))).anchor
        moved = reducer.plan(image(middle[shuffled], deep[shuffled], (6, 6))).anchor
        assert (set(shuffled[moved].tolist()) == set(plain.tolist())) == equivariant


def with_signals(block: int | str = "9/24") -> list[VisualTokens]:
    generator = torch.Generator().manual_seed(5)
    return [
        tokens.with_(
            signals={
                "received_attention": torch.rand(len(tokens), generator=generator),
                f"received_attention@{block}": torch.rand(len(tokens), generator=generator),
            }
        )
        for tokens in sample_tokens()
    ]


@pytest.mark.parametrize("fidelity", FIDELITIES)
@pytest.mark.parametrize("order", ["raster", "native"])
@pytest.mark.parametrize("budget", [1, 6, 16])
def test_contract(budget: int, order: str, fidelity: str) -> None:
    check_reducer(make("hiprune", budget=budget, alpha=0.6, order=order, fidelity=fidelity), with_signals())


def test_another_object_block() -> None:
    reducer = HiPrune(6, object_block=3)
    assert reducer.needs == {"received_attention", "received_attention@3"}
    assert HiPrune.needs == {"received_attention", "received_attention@9/24"}
    check_reducer(reducer, with_signals(3))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"budget": 0}, "budget must be a whole number of at least 1, got 0"),
        ({"budget": 2.0}, "budget must be a whole number"),
        ({"alpha": 1.5}, "must be between 0 and 1, got 1.5"),
        ({"alpha": -0.1}, "alpha must be a finite number of at least 0, got -0.1"),
        ({"alpha": float("nan")}, "alpha must be a finite number"),
        ({"object_block": -1}, "object_block must be a whole number of at least 0, got -1"),
        ({"fidelity": "other"}, "fidelity must be one of 'released', 'paper', got 'other'"),
        ({"order": "random"}, "order must be one of"),
    ],
)
def test_invalid_parameters(given: dict[str, object], message: str) -> None:
    with pytest.raises(BadParameter, match=message):
        make("hiprune", **({"budget": 4} | given))


def test_missing_signals_and_unmet_budgets() -> None:
    tokens = image([0.1] * 4, [0.1] * 4, (2, 2))
    with pytest.raises(UnmetBudget, match="hiprune cannot give 5 tokens"):
        make("hiprune", budget=5).plan(tokens)
    with pytest.raises(MissingSignal, match="hiprune needs the signal received_attention@2"):
        make("hiprune", budget=2, object_block=2).plan(tokens)
    with pytest.raises(BadTokens, match="received_attention of shape"):
        make("hiprune", budget=2).plan(tokens.with_(signals={**tokens.signals, "received_attention": torch.ones(3)}))
