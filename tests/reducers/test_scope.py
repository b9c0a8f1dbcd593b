"""SCOPE: small examples and comparison with a reference implementation."""

from __future__ import annotations

from fractions import Fraction
from math import sqrt

import pytest
import torch
from torch import Tensor

from torino import VisualTokens
from torino.core.errors import BadParameter, MissingSignal, UnmetBudget
from torino.reducers import get, make
from torino.reducers.scope import Scope
from torino.testing import check_reducer

UNIT = 1 << 24


def image(patches: Tensor, attention: Tensor) -> VisualTokens:
    return VisualTokens(patches, (1, len(patches)), cls_attention=attention.reshape(-1, len(patches)))


def native(tokens: VisualTokens, budget: int, alpha: float = 1.0) -> list[int]:
    return Scope(budget, alpha=alpha, order="native").plan(tokens).sources.tolist()


def reference(
    patches: Tensor, attention: Tensor, budget: int, alpha: float
) -> tuple[list[int], list[float], list[int]]:
    """Select patches with plain loops; every gain is recomputed in every step with exact fractions."""
    rows, heads = patches.double().tolist(), attention.double().tolist()
    n = len(rows)
    norms = [sqrt(sum(value * value for value in row)) for row in rows]
    similar = [[Fraction(0)] * n for _ in range(n)]
    for i in range(n):
        for j in range(n):
            dot = sum(a * b for a, b in zip(rows[i], rows[j], strict=True))
            cosine = dot / (norms[i] * norms[j]) if norms[i] * norms[j] else 0.0
            # coarser than the error of float32, so that exact ties remain ties
            similar[i][j] = Fraction(round(cosine * 1e6), 10**6)
    saliency = [sum(head[j] for head in heads) ** alpha for j in range(n)]
    coverage = [Fraction(0)] * n
    picked: list[int] = []
    scores: list[float] = []
    while len(picked) < budget:
        best, best_score = -1, -1.0
        for j in range(n):
            if j in picked:
                continue
            gain = sum((max(Fraction(0), similar[i][j] - coverage[i]) for i in range(n)), Fraction(0))
            if float(gain) * saliency[j] > best_score:
                best, best_score = j, float(gain) * saliency[j]
        picked.append(best)
        scores.append(best_score)
        for i in range(n):
            coverage[i] = max(coverage[i], similar[i][best])
    assigned = []
    for i in range(n):
        by = max(range(budget), key=lambda m: (picked[m] == i, similar[i][picked[m]]))
        assigned.append(by if picked[by] == i or similar[i][picked[by]] > 0 else -1)
    return picked, scores, assigned


# ---------------------------------------------------------------------- small examples


def test_identical_tokens_are_selected_by_attention_then_index() -> None:
    attention = torch.tensor([0.1, 0.3, 0.2, 0.4])
    tokens = image(torch.ones(4, 3), attention)
    assert native(tokens, 4) == [3, 0, 1, 2]  # one patch covers all, so there is no further gain
    plan = Scope(2, order="native").plan(tokens)
    assert plan.score.tolist() == pytest.approx([1.6, 0])
    assert plan.assigned.tolist() == [1, 0, 0, 0]


def test_orthogonal_clusters_are_selected_by_size() -> None:
    label = [0, 1, 1, 2, 2, 2, 3, 3, 3, 3]
    tokens = image(torch.eye(4)[label], torch.full((10,), 0.1))
    assert native(tokens, 4) == [6, 3, 1, 0]
    plan = Scope(4).plan(tokens)
    assert plan.sources.tolist() == [0, 1, 3, 6]
    assert plan.assigned.tolist() == label
    assert plan.score.tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4])
    few = Scope(2).plan(tokens)
    assert few.assigned.tolist() == [-1, -1, -1, 0, 0, 0, 1, 1, 1, 1]


def test_attention_and_cluster_size_are_multiplied() -> None:
    label = [0, 0, 0, 1]
    attention = torch.tensor([0.1, 0.1, 0.1, 0.4])
    tokens = image(torch.eye(2)[label], attention)
    assert native(tokens, 2) == [3, 0]  # 0.4 against 3 · 0.1
    assert native(tokens, 2, alpha=0.5) == [0, 3]  # 0.63 against 3 · 0.32
    assert native(tokens, 2, alpha=0) == [0, 3]


def test_one_hot_attention() -> None:
    patches = torch.eye(5)
    for hot in range(5):
        tokens = image(patches, torch.eye(5)[hot])
        assert native(tokens, 3) == [hot, *[j for j in range(5) if j != hot][:2]]


def test_heads_are_summed() -> None:
    heads = torch.tensor([[0.9, 0.0, 0.0], [0.0, 0.5, 0.3], [0.0, 0.5, 0.0]])
    assert native(image(torch.eye(3), heads), 3) == [1, 0, 2]


def test_negative_cosines_do_not_cover() -> None:
    patches = torch.tensor([[1.0, 0], [-1, 0], [0, 1], [0, 0]])
    plan = Scope(1).plan(image(patches, torch.full((4,), 0.25)))
    assert plan.sources.tolist() == [0]
    assert plan.assigned.tolist() == [0, -1, -1, -1]
    everything = Scope(4, order="native").plan(image(patches, torch.full((4,), 0.25)))
    assert everything.sources.tolist() == [0, 1, 2, 3]
    assert everything.assigned.tolist() == [0, 1, 2, 3]  # including the zero patch


def test_budgets_of_all_patches_and_of_one() -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = image(torch.randn(9, 5, generator=generator), torch.rand(2, 9, generator=generator))
    assert Scope(9).plan(tokens).sources.tolist() == list(range(9))
    assert Scope(9).plan(tokens).assigned.tolist() == list(range(9))
    assert len(Scope(1).plan(tokens)) == 1
    assert Scope(1).plan(image(torch.ones(1, 2), torch.ones(1))).sources.tolist() == [0]


# ---------------------------------------------------------------------- reference


def cases(kind: str, seed: int, n: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    patches, attention = torch.randn(n, 5, generator=generator), torch.rand(2, n, generator=generator)
    if kind == "tied":  # cosines are -1, 0 or 1, attention a multiple of 1/4
        patches = torch.eye(5)[torch.randint(5, (n,), generator=generator)]
        patches *= 1 - 2 * torch.randint(2, (n, 1), generator=generator)
        attention = torch.randint(3, (2, n), generator=generator) / 4
    if kind == "duplicates":
        patches = patches[torch.randint(min(4, n), (n,), generator=generator)]
    if kind == "degenerate":
        patches *= torch.rand(n, 1, generator=generator) < 0.5
        attention *= torch.rand(n, generator=generator) < 0.5
    return patches, attention


@pytest.mark.parametrize("kind", ["random", "tied", "duplicates", "degenerate"])
@pytest.mark.parametrize("alpha", [1.0, 0.0, 0.5, 2.0])
def test_equals_reference(kind: str, alpha: float) -> None:
    for seed, n in enumerate([1, 2, 7, 14, 20]):
        patches, attention = cases(kind, seed, n)
        for budget in sorted({1, n // 2 + 1, n}):
            expected, scores, assigned = reference(patches, attention, budget, alpha)
            plan = Scope(budget, alpha=alpha, order="native").plan(image(patches, attention))
            assert plan.score.tolist() == pytest.approx(scores, abs=1e-4)
            assert plan.sources.tolist() == expected
            assert plan.assigned.tolist() == assigned
            raster = Scope(budget, alpha=alpha).plan(image(patches, attention))
            assert raster.sources.tolist() == sorted(expected)
            place = [sorted(expected).index(pick) for pick in expected]
            assert raster.assigned.tolist() == [place[token] if token >= 0 else -1 for token in assigned]
            assert raster.score[place].tolist() == plan.score.tolist()


def test_incremental_gains_are_exact() -> None:
    """Incrementally updated gains equal recomputed gains after many steps."""
    generator = torch.Generator().manual_seed(1)
    patches, attention = torch.randn(150, 12, generator=generator), torch.rand(1, 150, generator=generator)
    unit = torch.nn.functional.normalize(patches)
    whole = ((unit @ unit.T).clamp(0, 1) * UNIT).round().long()
    plan = Scope(150, order="native").plan(image(patches, attention))
    coverage = torch.zeros(150, dtype=torch.int64)
    left = torch.ones(150, dtype=torch.bool)
    for pick, score in zip(plan.sources.tolist(), plan.score.tolist(), strict=True):
        value = (whole - coverage).clamp(min=0).sum(1) * attention[0].double() / UNIT
        assert score == pytest.approx(float(value[pick]), rel=1e-4, abs=1e-6)
        assert float(value[pick]) >= float(value[left].max()) - 1e-5
        coverage = torch.maximum(coverage, whole[pick])
        left[pick] = False


def test_permutation_equivariance() -> None:
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        patches, attention = torch.randn(50, 8, generator=generator), torch.rand(3, 50, generator=generator)
        order = torch.randperm(50, generator=generator)
        permuted = native(image(patches[order], attention[:, order]), 20)
        assert [int(order[pick]) for pick in permuted] == native(image(patches, attention), 20)


# ---------------------------------------------------------------------- contract and errors


@pytest.mark.parametrize("order", ["raster", "native"])
@pytest.mark.parametrize("budget", [1, 2, 7, 15, 16, 64])
def test_contract(budget: int, order: str) -> None:
    check_reducer(make("scope", budget=budget, order=order))
    check_reducer(make("scope", budget=budget, alpha=0.5))


def test_attention_is_not_modified() -> None:
    for dtype in (torch.float64, torch.float16, torch.float32):
        attention = torch.full((1, 6), 0.125, dtype=dtype)
        Scope(3).plan(image(torch.eye(6, dtype=dtype), attention))
        assert (attention == 0.125).all()


def test_accepts_tensors_that_require_gradients() -> None:
    tokens = image(torch.eye(6).requires_grad_(), torch.rand(2, 6).requires_grad_())
    assert len(Scope(3).plan(tokens)) == 3


def test_errors() -> None:
    for budget in (0, -1, 2.0, True, None):
        with pytest.raises(BadParameter, match="budget must be a whole number of at least 1, got"):
            Scope(budget)  # type: ignore[arg-type]
    for alpha in (-1, float("nan"), float("inf"), "1", None):
        with pytest.raises(BadParameter, match="alpha must be a finite number of at least 0, got"):
            Scope(3, alpha=alpha)  # type: ignore[arg-type]
    with pytest.raises(BadParameter, match="order must be one of 'raster', 'native', got 'spiral'"):
        Scope(3, order="spiral")  # type: ignore[arg-type]
    with pytest.raises(UnmetBudget, match="scope cannot give 5 tokens: the image has only 4 patches"):
        Scope(5).plan(image(torch.eye(4), torch.ones(4)))
    with pytest.raises(MissingSignal, match="scope needs the signal cls_attention, which these tokens do not have"):
        Scope(2).plan(VisualTokens(torch.eye(4), (2, 2)))


def test_class_attributes() -> None:
    assert get("scope") is Scope
    assert Scope(3, alpha=2.0).spec == "scope(budget=3, alpha=2.0)"
    assert Scope.needs == {"cls_attention"}
    assert (Scope.merges, Scope.adaptive, Scope.emits_cls) == (False, False, False)
