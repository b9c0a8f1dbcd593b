"""FOLDER (simplified form): step sequences, small examples, comparison with a reference implementation."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch

from tests.support.reference_matching import (
    assert_same_tokens,
    contract_images,
    drop_cls,
    groups,
    random_tokens,
    sequence,
    step,
)
from torino import VisualTokens, make
from torino.core.errors import BadParameter, BadTokens, MissingSignal, UnmetBudget
from torino.core.reduction import Reduction
from torino.reducers._matching import removals_per_step
from torino.reducers._similarity import cross_cosines
from torino.reducers.folder import Folder
from torino.testing import check_reducer


def rows(plan: Reduction) -> list[dict[int, float]]:
    bounds = plan.offsets.tolist()
    return [dict(zip(plan.sources[a:b].tolist(), plan.weights[a:b].tolist(), strict=True)) for a, b in pairwise(bounds)]


def reference(
    tokens: VisualTokens, budget: int, *, metric: str = "patches", cls: bool = False
) -> tuple[list[Any], bool]:
    """Run the published loop; also return whether it multiplies by 1 + ln(size)."""
    compared = tokens.patches if metric == "patches" else tokens.signal(metric, "test")
    current = sequence(compared, tokens.patches, cls)
    r, steps = len(tokens) - budget, 0
    if r <= (len(current) - 1) // 2:  # one step
        scales = r < (len(current) - r) // 2
        if r > 0:
            current = step(current, r, in_place_order=True)
        return drop_cls(current), scales
    while r > 0:
        taken = min((len(current) - 1) // 2, r)
        current = step(current, taken, in_place_order=True)
        r, steps = r - taken, steps + 1
    assert steps > 1
    return drop_cls(current), r < len(current) // 2


@pytest.mark.parametrize(
    ("budget", "cls", "steps"),
    [
        (192, False, [287, 97]),
        (128, False, [287, 144, 17]),
        (64, False, [287, 144, 72, 9]),
        (192, True, [288, 96]),
        (128, True, [288, 144, 16]),
        (64, True, [288, 144, 72, 8]),
        (575, False, [1]),
        (289, False, [287]),
        (288, False, [287, 1]),
        (288, True, [288]),
        (576, False, []),
        (1, True, [288, 144, 72, 36, 18, 9, 4, 2, 1, 1]),
    ],
)
def test_step_sequences(budget: int, cls: bool, steps: list[int]) -> None:
    assert removals_per_step(576, budget, cls_first=cls) == steps


def test_even_schedules() -> None:
    assert removals_per_step(576, 192, cls_first=True, steps=23) == [16] * 7 + [17] * 16
    assert removals_per_step(576, 64, cls_first=True, steps=23) == [22] * 17 + [23] * 6
    assert removals_per_step(6, 4, cls_first=True, steps=4) == [0, 0, 1, 1]
    assert removals_per_step(8, 1, cls_first=True, steps=1) == [4, 2, 1]  # one step is not enough, so more follow
    assert sum(removals_per_step(2, 1, cls_first=False)) == 0


@pytest.mark.parametrize("kind", ["random", "tied", "degenerate"])
@pytest.mark.parametrize("cls", [False, True])
@pytest.mark.parametrize("metric", ["patches", "head_keys"])
def test_equals_reference(kind: str, cls: bool, metric: Any) -> None:
    for seed, grid in enumerate([(4, 5), (3, 3), (1, 7), (6, 4), (2, 1), (1, 1)]):
        tokens = random_tokens(seed, grid, kind)
        n = len(tokens)
        for budget in sorted(
            {1, 2, 3, n // 4, n // 3, n // 2, n // 2 + 1, 2 * n // 3, n - 1, n} & set(range(1, n + 1))
        ):
            if budget == 1 and n > 1 and not cls:
                continue
            expected, scales = reference(tokens, budget, metric=metric, cls=cls)
            plan = Folder(budget, metric=metric, class_token=cls).plan(tokens)
            assert_same_tokens(plan, expected, tokens, scales)
            never = Folder(budget, metric=metric, class_token=cls, log_size_scale="never").plan(tokens)
            assert_same_tokens(never, expected, tokens)
            always = Folder(budget, metric=metric, class_token=cls, log_size_scale="always").plan(tokens)
            assert_same_tokens(always, expected, tokens, scale=True)


def test_identical_tokens_by_hand() -> None:
    tokens = VisualTokens(torch.tensor([[3.0, 4.0]]).repeat(4, 1), (2, 2))
    # 0 is merged into 1; then the sequence is 1 2 3, and 1 is merged into 2
    third = (1 + math.log(3)) / 3
    assert rows(Folder(2).plan(tokens)) == [
        {0: pytest.approx(third), 1: pytest.approx(third), 2: pytest.approx(third)},
        {3: 1},
    ]
    torch.testing.assert_close(
        Folder(2).plan(tokens).apply(tokens.patches)[0], (1 + math.log(3)) * torch.tensor([3.0, 4.0])
    )
    assert rows(Folder(2, log_size_scale="never").plan(tokens))[0] == {p: pytest.approx(1 / 3) for p in range(3)}


def test_four_orthogonal_clusters() -> None:
    clusters = torch.arange(16) // 4  # one row of the grid each
    tokens = VisualTokens(torch.eye(4)[clusters], (4, 4))
    plan = Folder(4, log_size_scale="never").plan(tokens)
    assert groups(plan) == {frozenset(range(4 * c, 4 * c + 4)) for c in range(4)}
    assert torch.equal(plan.apply(tokens.patches), torch.eye(4))


def test_released_rescaling_depends_on_the_budget() -> None:
    tokens = VisualTokens(torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), (2, 3))
    scaled = {
        b: any(w > 0.5 + 1e-6 for row in rows(Folder(b).plan(tokens)) if len(row) == 2 for w in row.values())
        for b in (5, 4)
    }
    assert scaled == {5: True, 4: False}  # r = 1 < 5//2, but r = 2 is not below 4//2
    sums = [sum(row.values()) for row in rows(Folder(3).plan(tokens)) if len(row) > 1]  # two steps: always
    assert sums
    assert all(total > 1.5 for total in sums)


def test_budget_of_all_patches_is_the_identity() -> None:
    tokens = random_tokens(0, (3, 4), "random")
    plan = Folder(12).plan(tokens)
    assert plan.is_pruning
    assert torch.equal(plan.apply(tokens.patches), tokens.patches)


def test_one_patch_and_one_token() -> None:
    one = random_tokens(0, (1, 1), "random")
    assert rows(Folder(1).plan(one)) == [{0: 1.0}]
    with pytest.raises(UnmetBudget, match=r"folder cannot give 1 token: .*class_token=True"):
        Folder(1).plan(random_tokens(0, (1, 2), "random"))
    tokens = random_tokens(0, (3, 3), "random")
    plan = Folder(1, class_token=True, log_size_scale="never").plan(tokens)
    torch.testing.assert_close(plan.apply(tokens.patches)[0], tokens.patches.mean(0))


@pytest.mark.parametrize("budget", [192, 128, 64])
def test_full_size(budget: int) -> None:
    tokens = random_tokens(1, (24, 24), "random", width=32)
    plan = Folder(budget).plan(tokens)
    assert len(plan) == budget
    assert int(plan.offsets.diff().sum()) == 576
    assert sorted(plan.sources.tolist()) == list(range(576))
    counts = plan.offsets.diff().double()
    sums = torch.zeros(budget, dtype=torch.float64).index_add(0, plan.rows, plan.weights.double())
    torch.testing.assert_close(sums, 1 + counts.log(), rtol=1e-5, atol=1e-5)


def test_no_permutation_equivariance() -> None:
    tokens = random_tokens(2, (4, 4), "random")
    turn = torch.arange(16).roll(1)
    turned = tokens.with_(patches=tokens.patches[turn], cls_attention=None, keys=None, signals={})
    original = {frozenset(turn[list(group)].tolist()) for group in groups(Folder(8).plan(turned))}
    assert original != groups(Folder(8).plan(tokens))


def test_metric_is_scale_invariant_and_parallel_tokens_tie() -> None:
    tokens = random_tokens(5, (4, 4), "random")
    stretched = tokens.with_(patches=tokens.patches * torch.arange(1, 17)[:, None])
    one_step = Folder(9, log_size_scale="never")
    assert groups(one_step.plan(stretched)) == groups(one_step.plan(tokens))
    same = torch.randn(1, 1024, generator=torch.Generator().manual_seed(0)).repeat(50, 1) * torch.arange(1, 51)[:, None]
    assert cross_cosines(same, same).unique().tolist() == [1.0]


@pytest.mark.parametrize("budget", [1, 2, 5, 7, 15, 16])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"metric": "projected"},
        {"metric": "keys", "class_token": True},
        {"log_size_scale": "always", "order": "native"},
    ],
    ids=str,
)
def test_contract(budget: int, changes: dict[str, Any]) -> None:
    check_reducer(make("folder", budget=budget, **changes), contract_images())


def test_needs_depend_on_the_metric() -> None:
    assert Folder(4).needs == frozenset()
    assert Folder(4, metric="head_keys").needs == {"head_keys"}
    assert (Folder.emits_cls, Folder.merges) == (False, True)
    bare = VisualTokens(torch.eye(4), (2, 2))
    with pytest.raises(MissingSignal, match="folder needs the signal projected"):
        Folder(2, metric="projected").plan(bare)
    with pytest.raises(BadTokens, match=r"folder needs projected of shape \(4 x any\), got \(3, 2\)"):
        Folder(2, metric="projected").plan(bare.with_(signals={"projected": torch.zeros(3, 2)}))
    with pytest.raises(BadTokens, match="projected holds NaN"):
        Folder(2, metric="projected").plan(bare.with_(signals={"projected": torch.full((4, 2), torch.nan)}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"budget": 0}, "budget must be a whole number of at least 1, got 0"),
        ({"budget": 2.0}, "budget must be a whole number"),
        ({"budget": True}, "budget must be a whole number"),
        ({"metric": "values"}, "metric must be one of 'patches', 'keys', 'head_keys', 'projected', got 'values'"),
        ({"class_token": 1}, "class_token must be True or False, got 1"),
        ({"log_size_scale": True}, "log_size_scale must be one of 'released', 'always', 'never', got True"),
        ({"order": "spiral"}, "order must be one of 'raster', 'native', got 'spiral'"),
    ],
)
def test_invalid_parameters(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BadParameter, match=message):
        make("folder", **{"budget": 4, **changes})


def test_budget_above_the_number_of_patches() -> None:
    with pytest.raises(UnmetBudget, match="folder cannot give 5 tokens: the image has only 4 patches"):
        Folder(5).plan(VisualTokens(torch.eye(4), (2, 2)))
