"""DivPrune: small examples and comparison with a reference implementation."""

from __future__ import annotations

from math import sqrt

import pytest
import torch
from torch import Tensor

from torino import VisualTokens
from torino.core.errors import BadParameter, BadTokens, MissingSignal, UnmetBudget
from torino.reducers import get, make
from torino.reducers._similarity import pairwise_cosines
from torino.reducers.divprune import DivPrune
from torino.testing import check_reducer, sample_tokens


def tokens_of(rows: Tensor | list[list[float]], grid: tuple[int, int] | None = None) -> VisualTokens:
    patches = torch.as_tensor(rows, dtype=torch.float32)
    return VisualTokens(patches, grid or (1, len(patches)))


def picks(tokens: VisualTokens, budget: int) -> list[int]:
    return DivPrune(budget, order="native").plan(tokens).sources.tolist()


def reference(patches: Tensor, budget: int) -> tuple[list[int], list[float]]:
    """Select patches with plain loops: a distance matrix, and in each step a search through all selected patches."""
    rows = patches.double().tolist()
    n = len(rows)
    norms = [sqrt(sum(value * value for value in row)) for row in rows]
    distance = [[0.0] * n for _ in range(n)]
    for i in range(n):
        for j in range(n):
            dot = sum(a * b for a, b in zip(rows[i], rows[j], strict=True))
            length = norms[i] * norms[j]
            # rounded like float32, so that the same values tie
            distance[i][j] = 0.0 if i == j else round(1 - (dot / length if length else 0.0), 6)
    picked: list[int] = []
    scores: list[float] = []
    while len(picked) < budget:
        best, best_value = -1, float("-inf")
        for i in range(n):
            if i in picked:
                continue
            if not picked:
                column = sorted([distance[i][j] for j in range(n)])
                value = column[1] if n > 1 else 0.0  # the first is itself
            else:
                value = min(distance[i][j] for j in picked)
            if value > best_value:
                best, best_value = i, value
        picked.append(best)
        scores.append(best_value)
    return picked, scores


# ---------------------------------------------------------------------- small examples


def test_identical_tokens_are_selected_by_index() -> None:
    for value in (1.0, 0.3, -7.1):
        tokens = tokens_of(torch.full((13, 7), value))
        for budget in (1, 4, 13):
            assert picks(tokens, budget) == list(range(budget))


def test_one_patch_of_each_cluster_is_selected_first() -> None:
    label = [0, 0, 1, 1, 2, 2, 3, 3, 0, 1, 2, 3]
    tokens = tokens_of(torch.eye(4)[label] * torch.arange(1.0, 13)[:, None])
    assert picks(tokens, 4) == [0, 2, 4, 6]  # all are duplicates, so the first patch is selected first
    assert picks(tokens, 6) == [0, 2, 4, 6, 1, 3]
    plan = DivPrune(6, order="native").plan(tokens)
    assert plan.score.tolist() == [0, 1, 1, 1, 0, 0]


def test_first_patch_is_the_most_isolated() -> None:
    # on a circle at 0, 10, 20 and 80 degrees: the last one is 60 degrees from its nearest neighbor
    angle = torch.tensor([0.0, 10, 20, 80]).deg2rad()
    tokens = tokens_of(torch.stack([angle.cos(), angle.sin()], 1))
    assert picks(tokens, 4) == [3, 0, 2, 1]
    plan = DivPrune(3, order="native").plan(tokens)
    expected = 1 - torch.tensor([60.0, 80, 20]).deg2rad().cos()
    assert torch.allclose(plan.score, expected, atol=1e-6)
    raster = DivPrune(3).plan(tokens)
    assert raster.sources.tolist() == [0, 2, 3]
    assert torch.allclose(raster.score, expected[[1, 2, 0]], atol=1e-6)


def test_budgets_of_all_patches_and_of_one() -> None:
    tokens = tokens_of(torch.randn(9, 5, generator=torch.Generator().manual_seed(0)), (3, 3))
    assert DivPrune(9).plan(tokens).sources.tolist() == list(range(9))
    assert sorted(picks(tokens, 9)) == list(range(9))
    assert len(picks(tokens, 1)) == 1
    single = DivPrune(1).plan(tokens_of([[1.0, 2.0]]))
    assert single.sources.tolist() == [0]
    assert single.score.isnan().all()


def test_opposite_and_zero_tokens() -> None:
    assert picks(tokens_of([[1.0, 0], [1, 0.1], [-1, 0], [0, 0]]), 3) == [2, 0, 3]
    assert picks(tokens_of(torch.zeros(4, 3)), 4) == [0, 1, 2, 3]


def test_result_does_not_depend_on_vector_length() -> None:
    patches = torch.randn(20, 6, generator=torch.Generator().manual_seed(5))
    powers = 2.0 ** torch.arange(-10, 10)[:, None]
    assert picks(tokens_of(patches * powers), 20) == picks(tokens_of(patches), 20)
    for factor in (2.0**100, 2.0**-100):  # squares of these leave float32
        assert picks(tokens_of(patches * factor), 20) == picks(tokens_of(patches), 20)


# ---------------------------------------------------------------------- reference


@pytest.mark.parametrize("n", [2, 3, 8, 25, 40])
def test_equals_reference_on_random_tokens(n: int) -> None:
    for seed in range(3):
        patches = torch.randn(n, 6, generator=torch.Generator().manual_seed(seed))
        for budget in sorted({1, 2, n // 3 + 1, n - 1, n}):
            expected, scores = reference(patches, budget)
            plan = DivPrune(budget, order="native").plan(tokens_of(patches))
            assert plan.sources.tolist() == expected
            assert plan.score.tolist() == pytest.approx(scores, abs=2e-6)


@pytest.mark.parametrize("kind", ["ternary", "duplicates", "two", "zeros"])
def test_equals_reference_on_tied_tokens(kind: str) -> None:
    for seed in range(6):
        generator = torch.Generator().manual_seed(seed)
        few = torch.randn(5, 4, generator=generator)
        patches = {
            # one entry each: every cosine is -1, 0 or 1 to the last bit
            "ternary": torch.eye(4)[torch.randint(4, (18,), generator=generator)]
            * (1 - 2 * torch.randint(2, (18, 1), generator=generator)),
            "duplicates": few[torch.randint(5, (18,), generator=generator)],
            "two": few[torch.randint(2, (18,), generator=generator)],
            "zeros": torch.randn(18, 4, generator=generator) * (torch.rand(18, 1, generator=generator) < 0.5),
        }[kind]
        for budget in (1, 5, 11, 18):
            assert picks(tokens_of(patches), budget) == reference(patches, budget)[0]


def test_permutation_equivariance() -> None:
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        patches, order = torch.randn(50, 8, generator=generator), torch.randperm(50, generator=generator)
        permuted = picks(tokens_of(patches[order]), 20)
        assert [int(order[pick]) for pick in permuted] == picks(tokens_of(patches), 20)


# ---------------------------------------------------------------------- before or after the projector


def test_projected_space() -> None:
    generator = torch.Generator().manual_seed(3)
    tokens = tokens_of(torch.randn(30, 8, generator=generator))
    projected = torch.randn(30, 12, generator=generator)
    both = tokens.with_(signals={"projected": projected})
    reducer = DivPrune(10, space="projected", order="native")
    assert reducer.plan(both).sources.tolist() == picks(tokens_of(projected), 10)
    assert reducer.plan(both).sources.tolist() != picks(tokens, 10)
    assert DivPrune(10, space="features", order="native").plan(both).sources.tolist() == picks(tokens, 10)
    auto = DivPrune(10, order="native")
    assert auto.plan(both).sources.tolist() == reducer.plan(both).sources.tolist()
    assert auto.plan(tokens).sources.tolist() == picks(tokens, 10)
    assert (auto.needs, auto.optional) == (frozenset(), {"projected"})
    assert reducer.needs == {"projected"}
    assert DivPrune(10).needs == DivPrune.needs == frozenset()
    assert make(reducer.spec).needs == {"projected"}
    with pytest.raises(MissingSignal, match="divprune needs the signal projected, which these tokens do not have"):
        reducer.plan(tokens)
    with pytest.raises(BadTokens, match=r"divprune needs projected of shape \(30 x any\), got \(29, 12\)"):
        reducer.plan(tokens.with_(signals={"projected": projected[1:]}))
    with pytest.raises(BadTokens, match="projected holds NaN or infinite values"):
        reducer.plan(tokens.with_(signals={"projected": projected.masked_fill(projected > 2, torch.inf)}))
    for row, value in [(0, torch.nan), (29, torch.nan), (7, torch.inf), (7, -torch.inf)]:
        broken = projected.clone()
        broken[row, 3] = value
        with pytest.raises(BadTokens, match="projected holds NaN or infinite values"):
            reducer.plan(tokens.with_(signals={"projected": broken}))


# ---------------------------------------------------------------------- contract and errors


@pytest.mark.parametrize("order", ["raster", "native"])
@pytest.mark.parametrize("space", ["features", "projected"])
@pytest.mark.parametrize("budget", [1, 2, 7, 15, 16, 64])
def test_contract(budget: int, space: str, order: str) -> None:
    images = [image.with_(signals={"projected": image.patches @ torch.ones(16, 3) + 1}) for image in sample_tokens()]
    check_reducer(make("divprune", budget=budget, space=space, order=order), images)


def test_cosines() -> None:
    rows = torch.tensor([[3.0, 4], [4, 3], [0, 0], [-3, -4]])
    expected = torch.tensor([[1, 0.96, 0, -1], [0.96, 1, 0, -0.96], [0, 0, 0, 0], [-1, -0.96, 0, 1]])
    assert torch.allclose(pairwise_cosines(rows), expected)
    assert torch.allclose(pairwise_cosines(rows.half()), expected)
    generator = torch.Generator().manual_seed(0)
    for width in (1, 3, 100, 1024):
        copies = torch.randn(5, width, generator=generator)[torch.arange(23) % 5]
        assert (pairwise_cosines(copies)[torch.arange(23)[:, None] % 5 == torch.arange(23) % 5] == 1).all()


def test_accepts_other_dtypes_and_gradients() -> None:
    patches = torch.randint(-9, 10, (30, 8), generator=torch.Generator().manual_seed(0)).float()
    expected = picks(tokens_of(patches), 9)
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        assert picks(VisualTokens(patches.to(dtype), (1, 30)), 9) == expected
    assert picks(tokens_of(patches.clone().requires_grad_()), 9) == expected


def test_errors() -> None:
    for budget in (0, -1, 2.0, True, None):
        with pytest.raises(BadParameter, match="budget must be a whole number of at least 1, got"):
            DivPrune(budget)  # type: ignore[arg-type]
    with pytest.raises(BadParameter, match="order must be one of 'raster', 'native', got 'spiral'"):
        DivPrune(3, order="spiral")  # type: ignore[arg-type]
    with pytest.raises(BadParameter, match="space must be one of 'auto', 'features', 'projected', got 'hidden'"):
        DivPrune(3, space="hidden")  # type: ignore[arg-type]
    with pytest.raises(UnmetBudget, match="divprune cannot give 5 tokens: the image has only 4 patches"):
        DivPrune(5).plan(tokens_of(torch.eye(4)))


def test_class_attributes() -> None:
    assert get("divprune") is DivPrune
    assert DivPrune(3, space="projected").spec == "divprune(budget=3, space='projected')"
    assert (DivPrune.merges, DivPrune.adaptive, DivPrune.emits_cls) == (False, False, False)
