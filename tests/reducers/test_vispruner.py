"""VisPruner: small examples and comparison with a reference implementation."""

from __future__ import annotations

from math import sqrt

import pytest
import torch
from torch import Tensor

from torino import VisualTokens
from torino.core.errors import BadParameter, MissingSignal, UnmetBudget
from torino.reducers import get, make
from torino.reducers.hired import FasterVLM
from torino.reducers.vispruner import VisPruner
from torino.testing import check_reducer


def image(patches: Tensor, attention: Tensor) -> VisualTokens:
    return VisualTokens(patches, (1, len(patches)), cls_attention=attention.reshape(-1, len(patches)))


def descending(n: int) -> Tensor:
    return torch.arange(n, 0, -1.0) / 1024


def native(tokens: VisualTokens, budget: int, ratio: float = 0.5) -> list[int]:
    return VisPruner(budget, ratio, order="native").plan(tokens).sources.tolist()


def cosine(first: list[float], second: list[float]) -> float:
    length = sqrt(sum(a * a for a in first)) * sqrt(sum(b * b for b in second))
    # rounded, so that exact ties remain ties
    return round(sum(a * b for a, b in zip(first, second, strict=True)) / length, 12) if length else 0.0


def reference(
    patches: Tensor, attention: Tensor, budget: int, ratio: float
) -> tuple[list[int], list[int], dict[int, int]]:
    """Return important and diverse patches, and the odd patch that represents each dropped one, with plain loops."""
    rows, heads = patches.double().tolist(), attention.double().tolist()
    n = len(rows)
    mean = [sum(head[i] for head in heads) / len(heads) for i in range(n)]
    ranked = sorted(range(n), key=lambda i: (-mean[i], i))
    important, residual = ranked[: int(budget * ratio)], ranked[int(budget * ratio) :]
    expected = budget - len(important)
    represented_by: dict[int, int] = {}
    if expected == 0:  # without diverse patches, each dropped one is represented by the most similar important one
        for patch in residual:
            values = [round(cosine(rows[patch], rows[kept]), 7) for kept in sorted(important)]
            represented_by[patch] = sorted(important)[values.index(max(values))]
        return important, [], represented_by
    while len(residual) > expected:
        excess = min(8, len(residual) - expected)
        evens = [residual[p] for p in range(len(residual)) if p % 2 == 0]
        odds = [residual[p] for p in range(len(residual)) if p % 2 == 1]
        best: list[float] = []
        partner: list[int] = []
        for even in evens:
            values = [cosine(rows[even], rows[odd]) for odd in odds]
            best.append(max(values))
            partner.append(odds[values.index(max(values))])
        by_similarity = sorted(range(len(evens)), key=lambda p: (-best[p], p))
        for p in by_similarity[:excess]:
            represented_by[evens[p]] = partner[p]
        residual = [evens[p] for p in by_similarity[excess:]] + odds
    return important, residual, represented_by


# ---------------------------------------------------------------------- small examples


def test_identical_tokens() -> None:
    # important: 0, 1. Others 2..9: evens 2 4 6 8, of which the first four are dropped; odds 3 5 7 9; then
    # evens 3 7, odds 5 9: both evens are dropped
    tokens = image(torch.ones(10, 3), descending(10))
    assert native(tokens, 4) == [0, 1, 5, 9]
    plan = VisPruner(4).plan(tokens)
    assert plan.role == ("primary", "primary", "diverse", "diverse")
    # 2, 4, 6, 8 are represented by 3, the first odd patch; 3 and 7 by 5
    assert plan.assigned.tolist() == [0, 1, 2, 2, 2, 2, 2, 2, 2, 3]


def test_only_duplicates_are_dropped() -> None:
    # others 0..5 by attention: evens 0 2 4, odds 1 3 5; 2 and 3 are equal, all others are orthogonal
    patches = torch.eye(6)
    patches[3] = patches[2]
    plan = VisPruner(5, important_ratio=0, order="native").plan(image(patches, descending(6)))
    assert plan.sources.tolist() == [0, 4, 1, 3, 5]
    assert plan.assigned.tolist() == [0, 2, 3, 3, 1, 4]
    assert set(plan.role) == {"diverse"}


def test_four_orthogonal_clusters() -> None:
    label = torch.tensor([0, 1, 2, 3] * 4)
    kept = VisPruner(4, important_ratio=0).plan(image(torch.eye(4)[label], descending(16)))
    # the even set has clusters 0 and 2, the odd set 1 and 3: no patches are similar, and the first eight are dropped;
    # after that, the odds 1 3 5 7 9 11 13 15: evens 1 5 9 13, odds 3 7 11 15
    assert kept.sources.tolist() == [3, 7, 11, 15]


def test_one_hot_attention() -> None:
    for hot in range(6):
        tokens = image(torch.eye(6), torch.eye(6)[hot])
        assert native(tokens, 2)[0] == hot
        assert native(tokens, 3, 1.0) == [hot, *[i for i in range(6) if i != hot][:2]]


def test_number_of_important_patches_is_rounded_down() -> None:
    tokens = image(torch.randn(30, 4, generator=torch.Generator().manual_seed(0)), descending(30))
    for budget, ratio, important in [(1, 0.5, 0), (2, 0.5, 1), (7, 0.5, 3), (8, 0.75, 6), (9, 0.0, 0), (9, 1.0, 9)]:
        plan = VisPruner(budget, ratio).plan(tokens)
        assert plan.role.count("primary") == important
        assert plan.sources[:important].tolist() == list(range(important))


def test_budgets_of_all_patches_and_of_one() -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = image(torch.randn(9, 5, generator=generator), torch.rand(2, 9, generator=generator))
    for ratio in (0.0, 0.5, 1.0):
        plan = VisPruner(9, ratio).plan(tokens)
        assert plan.sources.tolist() == plan.assigned.tolist() == list(range(9))
        assert len(VisPruner(1, ratio).plan(tokens)) == 1
        assert VisPruner(1, ratio).plan(image(torch.ones(1, 2), torch.ones(1))).sources.tolist() == [0]


def test_ratio_of_one_equals_fastervlm() -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = image(torch.randn(40, 5, generator=generator), torch.rand(2, 40, generator=generator))
    for budget in (1, 7, 40):
        plan, other = VisPruner(budget, 1.0).plan(tokens), FasterVLM(budget).plan(tokens)
        assert torch.equal(plan.sources, other.sources)
        assert torch.equal(plan.score, other.score)
        assert torch.equal(plan.assigned, other.assigned)


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
@pytest.mark.parametrize("ratio", [0.5, 0.75, 0.0, 1.0])
def test_equals_reference(kind: str, ratio: float) -> None:
    for seed, n in enumerate([1, 2, 5, 16, 31, 47]):
        patches, attention = cases(kind, seed, n)
        for budget in sorted({1, 2, n // 3 + 1, n // 2 + 1, n} & set(range(1, n + 1))):
            important, diverse, represented_by = reference(patches, attention, budget, ratio)
            plan = VisPruner(budget, ratio, order="native").plan(image(patches, attention))
            assert plan.sources.tolist() == important + diverse
            assert plan.role == ("primary",) * len(important) + ("diverse",) * len(diverse)
            for patch in range(n):
                representative = patch
                while representative in represented_by:
                    representative = represented_by[representative]
                where = (important + diverse).index(representative) if representative in important + diverse else -1
                assert int(plan.assigned[patch]) == where
            raster = VisPruner(budget, ratio).plan(image(patches, attention))
            assert raster.sources.tolist() == sorted(important + diverse)


def test_odd_number_of_other_patches() -> None:
    """The release fails for 130 of 576 patches, since there are 511 others."""
    generator = torch.Generator().manual_seed(2)
    tokens = image(torch.randn(576, 8, generator=generator), torch.rand(1, 576, generator=generator))
    for budget in (47, 130, 191):
        plan = VisPruner(budget).plan(tokens)
        assert len(set(plan.sources.tolist())) == budget


def test_equals_reference_at_full_size() -> None:
    """Near-ties must be resolved exactly: one swap would change the sets of all later rounds."""
    generator = torch.Generator().manual_seed(4)
    patches, attention = torch.randn(576, 64, generator=generator), torch.rand(4, 576, generator=generator)
    unit = patches.double() / patches.double().norm(dim=1, keepdim=True)
    similar = (unit @ unit.T).tolist()
    ranked = attention.double().sum(0).argsort(descending=True).tolist()
    important, residual = ranked[:96], ranked[96:]
    while len(residual) > 96:
        evens, odds = residual[::2], residual[1::2]
        best = {even: max(similar[even][odd] for odd in odds) for even in evens}
        evens.sort(key=lambda even: -best[even])
        residual = evens[min(8, len(residual) - 96) :] + odds
    assert native(image(patches, attention), 192) == important + residual


# ---------------------------------------------------------------------- permutations


def test_permutation_equivariance_without_attention_ties() -> None:
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        patches, attention = torch.randn(50, 8, generator=generator), torch.rand(3, 50, generator=generator)
        order = torch.randperm(50, generator=generator)
        permuted = native(image(patches[order], attention[:, order]), 21)
        assert [int(order[pick]) for pick in permuted] == native(image(patches, attention), 21)


def test_no_permutation_equivariance_with_attention_ties() -> None:
    generator = torch.Generator().manual_seed(0)
    patches, order = torch.randn(50, 8, generator=generator), torch.randperm(50, generator=generator)
    first, second = (
        native(image(patches, torch.ones(50)), 21, 0.0),
        native(image(patches[order], torch.ones(50)), 21, 0.0),
    )
    assert {int(order[pick]) for pick in second} != set(first)


# ---------------------------------------------------------------------- contract and errors


@pytest.mark.parametrize("order", ["raster", "native"])
@pytest.mark.parametrize("ratio", [0.5, 0.75, 0.0, 1.0])
@pytest.mark.parametrize("budget", [1, 2, 7, 15, 16, 64])
def test_contract(budget: int, ratio: float, order: str) -> None:
    check_reducer(make("vispruner", budget=budget, important_ratio=ratio, order=order))


def test_accepts_other_dtypes_and_gradients() -> None:
    generator = torch.Generator().manual_seed(0)
    patches = torch.randint(-9, 10, (30, 8), generator=generator).float()
    attention = torch.randperm(30, generator=generator) / 64
    expected = native(image(patches, attention), 9)
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        assert native(image(patches.to(dtype), attention.to(dtype)), 9) == expected
    assert native(image(patches.clone().requires_grad_(), attention.clone().requires_grad_()), 9) == expected


def test_errors() -> None:
    for budget in (0, -1, 2.0, True, None):
        with pytest.raises(BadParameter, match="budget must be a whole number of at least 1, got"):
            VisPruner(budget)  # type: ignore[arg-type]
    for ratio in (-0.1, float("nan"), "1", None):
        with pytest.raises(BadParameter, match="important_ratio must be a finite number of at least 0, got"):
            VisPruner(3, ratio)  # type: ignore[arg-type]
    with pytest.raises(BadParameter, match=r"important_ratio must be between 0 and 1, got 1\.5"):
        VisPruner(3, 1.5)
    with pytest.raises(BadParameter, match="order must be one of 'raster', 'native', got 'spiral'"):
        VisPruner(3, order="spiral")  # type: ignore[arg-type]
    with pytest.raises(UnmetBudget, match="vispruner cannot give 5 tokens: the image has only 4 patches"):
        VisPruner(5).plan(image(torch.eye(4), torch.ones(4)))
    with pytest.raises(MissingSignal, match="vispruner needs the signal cls_attention, which these tokens do not have"):
        VisPruner(2).plan(VisualTokens(torch.eye(4), (2, 2)))


def test_class_attributes() -> None:
    assert get("vispruner") is VisPruner
    assert VisPruner(3, 0.75).spec == "vispruner(budget=3, important_ratio=0.75)"
    assert VisPruner.needs == {"cls_attention"}
    assert (VisPruner.merges, VisPruner.adaptive, VisPruner.emits_cls) == (False, False, False)
