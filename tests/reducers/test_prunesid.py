"""PruneSID: small examples and comparison with a reference implementation."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import normalize

from torino import Reduction, VisualTokens, make
from torino.core.errors import BadParameter, BadTokens, MissingSignal, UnmetBudget
from torino.reducers.prunesid import (
    PruneSID,
    allocate,
    calibrate_information,
    redundancy,
    suppress,
    threshold,
)
from torino.testing import check_reducer, sample_tokens

FIDELITIES = ("released", "paper")


def tokens_of(patches: Tensor, attention: Tensor | None = None, grid: tuple[int, int] | None = None) -> VisualTokens:
    n = len(patches)
    attention = torch.ones(1, n) if attention is None else attention
    return VisualTokens(patches, grid or (1, n), cls=torch.zeros(patches.shape[1]), cls_attention=attention)


# ---------------------------------------------------------------------- reference


def reference_allocation(kept: list[int], sizes: list[int], budget: int, patches: int) -> list[int]:
    """Compute the allocation one group at a time with exact fractions."""
    groups = range(len(sizes))
    lower = [min(1, sizes[g]) for g in groups]
    upper = [min(5 * math.ceil(budget / 64), sizes[g], kept[g]) for g in groups]
    while sum(upper) < budget and sum(upper) < sum(sizes):
        upper = [min(upper[g] + 1, sizes[g]) for g in groups]
    rest = max(0, patches - sum(lower))
    before, running, n = 0, 0, [0] * len(sizes)
    for g in groups:
        running += kept[g]
        edge = round(rest * Fraction(running, sum(kept)))  # halves to even, like torch.round
        n[g] = min(lower[g] + edge - before, upper[g])
        before = edge
    for g in sorted(groups, key=lambda g: (-kept[g], g)):
        while sum(n) < patches and n[g] < upper[g]:
            n[g] += 1
    return n


def reference(tokens: VisualTokens, budget: int, fidelity: str) -> list[int]:
    """Return the selected patches (and N for CLS) in native order, computed with plain loops."""
    released = fidelity == "released"
    x = tokens.patches.double().tolist()
    n, width = len(x), len(x[0])

    z = [[1 / (1 + math.exp(-value)) for value in row] for row in x]
    size = math.sqrt(sum(value * value for row in z for value in row))
    if released:
        z = [[value - sum(row) / width for value in row] for row in z]
    else:
        mean = [sum(row[d] for row in z) / n for d in range(width)]
        z = [[row[d] - mean[d] for d in range(width)] for row in z]
    components = min(max(1, budget // 4), n, width)
    _, sigma, rows = np.linalg.svd(np.array(z).T, full_matrices=False)  # channels are samples, patches are variables
    real = [j for j in range(components) if sigma[j] > max(1e-6 * sigma[0], 1e-10 * size)]
    weight = [[round(abs(rows[j][i]), 9) for j in real] or [0.0] for i in range(n)]
    group = [row.index(max(row)) for row in weight]
    if released:
        attention = tokens.cls_attention
        assert attention is not None
        score = [sum(head[i] for head in attention.tolist()) for i in range(n)]
    else:
        score = [max(row) for row in weight]

    length = [math.sqrt(sum(value * value for value in row)) for row in x]
    cosine = [
        [sum(a * b for a, b in zip(x[i], x[j], strict=True)) / ((length[i] * length[j]) or 1) for j in range(n)]
        for i in range(n)
    ]
    pairs = [cosine[i][j] for i in range(n) for j in range(i + 1, n)]
    tau = budget / 32 * (sum(pairs) / len(pairs) if pairs else 0.0)

    groups = range(max(group) + 1 if real else 1)
    rank, kept = list(score), [0] * len(groups)
    live = [True] * n
    counter = 0
    while any(live):
        for g in groups:
            members = [i for i in range(n) if live[i] and group[i] == g]
            if members:
                best = max(members, key=lambda i: (score[i], -i))
                rank[best] = 1000 - counter
                kept[g] += 1
                for i in members:
                    if i == best or cosine[best][i] > tau:
                        live[i] = False
        counter += 1
    sizes = [group.count(g) for g in groups]
    n_g = reference_allocation(kept, sizes, budget, budget - released) if budget > released else [0] * len(groups)
    chosen = [n] if released else []
    for g in groups:
        chosen += sorted((i for i in range(n) if group[i] == g), key=lambda i: (-rank[i], i))[: n_g[g]]
    return chosen


def native(tokens: VisualTokens, budget: int, **given: Any) -> list[int]:
    return make("prunesid", budget=budget, order="native", **given).plan(tokens).sources.tolist()


def mixture(seed: int, n: int = 30, width: int = 12, kinds: int = 6, noise: float = 0.4, shift: float = 0.5) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    centers = torch.randn(kinds, width, generator=generator) + shift * torch.randn(width, generator=generator)
    return centers[torch.randint(kinds, (n,), generator=generator)] + noise * torch.randn(n, width, generator=generator)


@pytest.mark.parametrize("fidelity", FIDELITIES)
@pytest.mark.parametrize("kind", ["random", "clustered", "tied", "few", "identical", "zero"])
def test_equals_reference(kind: str, fidelity: str) -> None:
    for seed in range(2):
        generator = torch.Generator().manual_seed(100 + seed)
        patches = {
            "random": lambda seed=seed: mixture(seed, kinds=30, shift=0.0),
            "clustered": lambda seed=seed: mixture(seed, shift=1.0),
            "tied": lambda seed=seed: mixture(seed, n=15).repeat(2, 1),
            "few": lambda seed=seed: mixture(seed, n=3, kinds=20).repeat(10, 1),
            "identical": lambda seed=seed: mixture(seed, n=1).repeat(30, 1),
            "zero": lambda: torch.zeros(30, 12),
        }[kind]()
        levels = (
            torch.randint(4, (2, 30), generator=generator) / 4
            if kind in ("tied", "few")
            else torch.rand(2, 30, generator=generator)
        )
        tokens = tokens_of(patches, levels, (5, 6))
        for budget in (1, 2, 3, 4, 7, 8, 12, 16, 21, 30, 31):
            if budget == 31 and fidelity == "paper":
                continue
            expected = reference(tokens, budget, fidelity)
            assert len(expected) == len(set(expected)) == budget
            assert native(tokens, budget, fidelity=fidelity) == expected, (seed, budget)
            raster = make("prunesid", budget=budget, fidelity=fidelity).plan(tokens)
            assert raster.sources.tolist() == sorted(expected)
            assert raster.role == tuple("cls" if i == 30 else "primary" for i in sorted(expected))


def test_equals_reference_at_larger_budgets() -> None:
    tokens = tokens_of(
        mixture(7, n=144, width=40, kinds=12), torch.rand(3, 144, generator=torch.Generator().manual_seed(1))
    )
    for fidelity in FIDELITIES:
        for budget in (48, 72):
            assert native(tokens, budget, fidelity=fidelity) == reference(tokens, budget, fidelity)


@st.composite
def group_sizes(draw: st.DrawFn) -> tuple[list[int], list[int], int, int]:
    sizes = draw(st.lists(st.integers(0, 12), min_size=1, max_size=8).filter(any))
    kept = [draw(st.integers(1, size)) if size else 0 for size in sizes]
    least, extra = sum(map(bool, sizes)), draw(st.integers(0, 1))
    patches = draw(st.integers(least, sum(sizes)))
    return kept, sizes, patches + extra, patches


@given(group_sizes())
def test_allocation_equals_reference(case: tuple[list[int], list[int], int, int]) -> None:
    kept, sizes, budget, patches = case
    given_ = allocate(np.array(kept), np.array(sizes), budget, patches).tolist()
    assert given_ == reference_allocation(kept, sizes, budget, patches)
    assert sum(given_) == patches
    assert all(0 <= count <= size for count, size in zip(given_, sizes, strict=True))


# ---------------------------------------------------------------------- small examples


def test_thresholds() -> None:
    assert [threshold(budget, 0.125) for budget in (192, 128, 64)] == [6 * 0.125, 4 * 0.125, 2 * 0.125]


@pytest.mark.parametrize(
    ("kept", "sizes", "budget", "expected"),
    [
        # ceilings 3 1 4; 7 - 3 = 4 to share: edges 1.5, 2, 4 -> 2, 2, 4
        ([3, 1, 4], [4, 1, 5], 8, [3, 1, 3]),
        # ceilings 1 1, raised to 4 2; 3 to share: edges 1.5 -> 2, 3
        ([1, 1], [6, 2], 6, [3, 2]),
        # ceilings 5 5 5, raised to 5 5 6; shares 4 4 7 -> 4 4 6; group 0 gives the missing one, since 2 is full
        ([5, 5, 10], [5, 5, 20], 16, [5, 4, 6]),
        # an empty group gives no tokens
        ([2, 0, 2], [3, 0, 3], 5, [2, 0, 2]),
        # a budget of 65 doubles the ceiling to 10 a group: 80 in eight, no need to raise; halves of edges go to even
        ([20] * 8, [20] * 8, 65, [8] * 8),
    ],
)
def test_allocation_by_hand(kept: list[int], sizes: list[int], budget: int, expected: list[int]) -> None:
    assert allocate(np.array(kept), np.array(sizes), budget, budget - 1).tolist() == expected


@pytest.mark.parametrize(("budget", "ceiling"), [(64, 5), (65, 10)])
def test_ceiling_of_a_large_group(budget: int, ceiling: int) -> None:
    # 20 of 80 kept patches are in the first group, whose share would be 13; the other fifteen have 4 patches each
    sizes = [20] + [4] * 15
    given_ = allocate(np.array(sizes), np.array(sizes), budget, budget - 1).tolist()
    assert given_[0] == ceiling
    assert given_ == reference_allocation(sizes, sizes, budget, budget - 1)


def test_suppression_by_hand() -> None:
    # unit vectors at 0°, 20°, 40°, 60°: with τ = cos 30° the first suppresses the second, so the third is kept and
    # suppresses the fourth; in two groups, 0° and 40° against 20° and 60°, nothing is suppressed
    angle = torch.tensor([0.0, 20.0, 40.0, 60.0]).deg2rad()
    unit = torch.stack([angle.cos(), angle.sin()], 1)
    tau = math.cos(math.radians(30))
    one = np.zeros(4, np.int64)
    assert suppress(unit, tau, np.arange(4), one).tolist() == [True, False, True, False]
    assert suppress(unit, tau, np.array([1, 0, 2, 3]), one).tolist() == [True, False, False, True]
    assert suppress(unit, tau, np.array([0, 2, 1, 3]), np.array([0, 1, 0, 1])).tolist() == [True] * 4
    assert suppress(unit, 1.0, np.arange(4), one).tolist() == [True] * 4
    assert suppress(unit, -1.0, np.arange(4), one).tolist() == [True, False, False, False]


def test_redundancy_by_hand() -> None:
    assert redundancy(torch.ones(1, 3)) == 0
    assert redundancy(normalize(torch.ones(5, 3), dim=1)) == pytest.approx(1, abs=1e-6)
    assert redundancy(torch.eye(4)) == 0
    unit = normalize(mixture(0), dim=1)
    rows, columns = torch.triu_indices(30, 30, 1)
    assert redundancy(unit) == pytest.approx(float((unit @ unit.T)[rows, columns].mean()), abs=1e-6)


def test_identical_patches_are_selected_by_attention() -> None:
    attention = torch.tensor([[0.1, 0.3, 0.2, 0.9, 0.5, 0.5, 0.0, 0.4]])
    tokens = tokens_of(torch.ones(8, 4), attention)
    assert native(tokens, 5) == [8, 3, 4, 5, 7]
    plan = make("prunesid", budget=5).plan(tokens)
    assert plan.sources.tolist() == [3, 4, 5, 7, 8]
    assert plan.anchor.tolist() == [3, 4, 5, 7, -1]
    assert plan.role == ("primary",) * 4 + ("cls",)
    torch.testing.assert_close(plan.score, torch.tensor([0.9, 0.5, 0.5, 0.4, torch.nan]), equal_nan=True)
    assert native(tokens, 5, fidelity="paper") == [0, 1, 2, 3, 4]  # without any direction, by index


def test_orthogonal_clusters_are_all_represented() -> None:
    cluster = torch.tensor([0] * 9 + [1] * 7 + [2] * 5 + [3] * 3)
    patches = 8 * torch.eye(4).repeat_interleave(8, 1)[cluster]  # 32 channels, eight a cluster
    attention = torch.linspace(0, 1, 24)[None]
    tokens = tokens_of(patches, attention)
    assert redundancy(normalize(patches, dim=1)) == pytest.approx((36 + 21 + 10 + 3) / (12 * 23))
    # τ = 17/32·70/276 < 1: one patch a group survives, the last of each cluster
    plan = native(tokens, 17)
    assert plan[0] == 24
    group_of = {i: int(cluster[i]) for i in plan[1:]}
    assert set(group_of.values()) == {0, 1, 2, 3}
    for g, best in enumerate((8, 15, 20, 23)):
        members = [i for i in plan if i != 24 and group_of[i] == g]
        assert members == list(range(best, best - len(members), -1))


def test_patch_of_one_hot_attention_is_kept() -> None:
    patches = mixture(3)
    for place in (0, 13, 29):
        attention = torch.zeros(2, 30)
        attention[1, place] = 1
        plan = make("prunesid", budget=10).plan(tokens_of(patches, attention))
        assert place in plan.anchor.tolist()


@pytest.mark.parametrize("decomposition", ["exact", "randomized"])
def test_budgets_of_all_patches_and_of_one(decomposition: str) -> None:
    tokens = tokens_of(mixture(1), grid=(5, 6))
    assert make("prunesid", budget=31, decomposition=decomposition).plan(tokens).sources.tolist() == list(range(31))
    paper = make("prunesid", budget=30, fidelity="paper", decomposition=decomposition).plan(tokens)
    assert paper.sources.tolist() == list(range(30))
    assert native(tokens, 1, decomposition=decomposition) == [30]
    single = tokens_of(torch.ones(1, 3))
    assert native(single, 2, decomposition=decomposition) == [1, 0]
    assert native(single, 1, fidelity="paper", decomposition=decomposition) == [0]


def test_paper_budget_of_one_is_the_patch_of_highest_loading() -> None:
    patches = mixture(2)
    z = patches.double().sigmoid()
    v = torch.linalg.svd((z - z.mean(0)).T, full_matrices=False).Vh[0].abs()
    assert native(tokens_of(patches), 1, fidelity="paper") == [int(v.argmax())]


# ---------------------------------------------------------------------- decompositions


@pytest.mark.parametrize("fidelity", FIDELITIES)
def test_randomized_directions_are_close_to_exact_ones(fidelity: str) -> None:
    tokens = tokens_of(mixture(5, n=196, width=64, kinds=7, noise=0.02))
    count = 7 if fidelity == "released" else 6  # as many directions as stand out; one goes with the mean of the patches
    exact = PruneSID(40, fidelity=fidelity)._loading(tokens.patches, count)
    near = PruneSID(40, fidelity=fidelity, decomposition="randomized")._loading(tokens.patches, count)
    assert exact.shape == near.shape == (196, count)
    np.testing.assert_allclose((exact * exact).sum(0), 1, atol=1e-6)
    np.testing.assert_allclose(near, exact, atol=1e-3)


def test_seeds() -> None:
    tokens = tokens_of(mixture(6, n=100, width=40, kinds=100), grid=(10, 10))
    plans = [native(tokens, 40, decomposition="randomized", seed=seed) for seed in (0, 0, 1, 2)]
    assert plans[0] == plans[1]
    assert plans[1] != plans[2] or plans[1] != plans[3]
    exact = [native(tokens, 40, seed=seed) for seed in (0, 1)]
    assert exact[0] == exact[1]


# ---------------------------------------------------------------------- dynamic budget


def test_dynamic_budget_follows_information() -> None:
    images = [tokens_of(mixture(i, shift=shift)) for i, shift in enumerate((0.0, 0.5, 1.0, 3.0))]
    phi = [1 - redundancy(normalize(image.patches, dim=1)) for image in images]
    mean = calibrate_information(images)
    assert mean == pytest.approx(sum(phi) / 4)
    for fidelity in FIDELITIES:
        reducer = make("prunesid", dynamic=True, mean_budget=12, mean_information=mean, fidelity=fidelity)
        lengths = [len(reducer.plan(image)) for image in images]
        assert lengths == [max(4, round(12 * value / mean)) for value in phi]
        assert len(set(lengths)) > 1
        for image, length in zip(images, lengths, strict=True):
            fixed = make("prunesid", budget=length, fidelity=fidelity).plan(image)
            assert fixed.sources.tolist() == reducer.plan(image).sources.tolist()


def test_dynamic_budget_is_clipped() -> None:
    orthogonal, same = tokens_of(torch.eye(9)), tokens_of(torch.ones(9, 9))
    reducer = make("prunesid", dynamic=True, mean_budget=8, mean_information=0.5)
    assert len(reducer.plan(orthogonal)) == 10  # 16 are expected, nine patches and CLS there are
    assert len(reducer.plan(same)) == 4
    assert len(reducer.plan(tokens_of(torch.ones(1, 4)))) == 2


# ---------------------------------------------------------------------- symmetry, contract, errors


@pytest.mark.parametrize("fidelity", FIDELITIES)
def test_permutation_equivariance_of_the_exact_one(fidelity: str) -> None:
    patches, generator = mixture(8, kinds=20), torch.Generator().manual_seed(9)
    attention, shuffled = torch.rand(2, 30, generator=generator), torch.randperm(30, generator=generator)
    back = torch.cat([shuffled, torch.tensor([30])])
    for budget in (6, 13, 20):
        plain = native(tokens_of(patches, attention), budget, fidelity=fidelity)
        moved = native(tokens_of(patches[shuffled], attention[:, shuffled]), budget, fidelity=fidelity)
        assert back[moved].tolist() == plain


def test_no_permutation_equivariance_of_the_randomized_decomposition() -> None:
    patches, generator = mixture(8, n=100, width=40, kinds=100), torch.Generator().manual_seed(9)
    attention, shuffled = torch.rand(2, 100, generator=generator), torch.randperm(100, generator=generator)
    back = torch.cat([shuffled, torch.tensor([100])])
    plain = native(tokens_of(patches, attention), 40, decomposition="randomized")
    moved = native(tokens_of(patches[shuffled], attention[:, shuffled]), 40, decomposition="randomized")
    assert set(back[moved].tolist()) != set(plain)


@pytest.mark.parametrize("order", ["raster", "native"])
@pytest.mark.parametrize("decomposition", ["exact", "randomized"])
@pytest.mark.parametrize("fidelity", FIDELITIES)
@pytest.mark.parametrize("budget", [1, 4, 9, 16])
def test_contract(budget: int, fidelity: str, decomposition: str, order: str) -> None:
    given = {"fidelity": fidelity, "decomposition": decomposition, "order": order}
    check_reducer(make("prunesid", budget=budget, **given), sample_tokens())


@pytest.mark.parametrize("fidelity", FIDELITIES)
def test_contract_of_the_dynamic_budget(fidelity: str) -> None:
    images = sample_tokens()
    mean = calibrate_information(images)
    check_reducer(make("prunesid", dynamic=True, mean_budget=12, mean_information=mean, fidelity=fidelity), images)


def test_paper_needs_patches_only() -> None:
    bare = VisualTokens(mixture(0), (5, 6))
    reducer = PruneSID(8, fidelity="paper")
    assert (reducer.needs, reducer.emits_cls) == (frozenset(), False)
    assert (PruneSID.needs, PruneSID.emits_cls) == ({"cls", "cls_attention"}, True)
    plan = reducer.plan(bare)
    assert isinstance(plan, Reduction)
    assert plan.is_pruning
    for missing in ("cls", "cls_attention"):
        with pytest.raises(MissingSignal, match=f"prunesid needs the signal {missing},"):
            make("prunesid", budget=8).plan(tokens_of(mixture(0)).with_(**{missing: None}))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "prunesid needs budget, the exact number of tokens"),
        ({"budget": 0}, "budget must be a whole number of at least 1, got 0"),
        ({"budget": 8.0}, "budget must be a whole number"),
        ({"budget": 8, "fidelity": "code"}, "fidelity must be one of 'released', 'paper', got 'code'"),
        ({"budget": 8, "decomposition": "svd"}, "decomposition must be one of 'exact', 'randomized'"),
        ({"budget": 8, "order": "group"}, "order must be one of"),
        ({"budget": 8, "seed": 0.5}, "seed must be a whole number, got 0.5"),
        ({"budget": 8, "dynamic": 1}, "dynamic must be True or False"),
        ({"budget": 8, "mean_budget": 8}, "require dynamic=True"),
        ({"budget": 8, "dynamic": True}, "Give mean_budget=8 instead"),
        ({"dynamic": True, "mean_budget": 8}, "needs mean_budget.* and mean_information"),
        ({"dynamic": True, "mean_budget": 0, "mean_information": 0.5}, "mean_budget must be a whole number"),
        ({"dynamic": True, "mean_budget": 8, "mean_information": 0.0}, "mean_information must be above 0"),
        ({"dynamic": True, "mean_budget": 8, "mean_information": float("nan")}, "mean_information must be"),
    ],
)
def test_invalid_parameters(given: dict[str, Any], message: str) -> None:
    with pytest.raises(BadParameter, match=message):
        make("prunesid", **given)


def test_budget_above_the_number_of_tokens() -> None:
    tokens = tokens_of(mixture(0))
    with pytest.raises(UnmetBudget, match=r"prunesid cannot give 32 tokens: the image has only 31 tokens"):
        make("prunesid", budget=32).plan(tokens)
    with pytest.raises(UnmetBudget, match="has only 30 patches"):
        make("prunesid", budget=31, fidelity="paper").plan(tokens)
    with pytest.raises(BadTokens, match="needs at least one image, got none"):
        calibrate_information([])
