"""ToMe on output tokens and as composed steps, compared with a reference implementation."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.reference_matching import (
    Token,
    assert_same_tokens,
    contract_images,
    drop_cls,
    groups,
    random_tokens,
    sequence,
    step,
)
from torino import Reduction, VisualTokens, make
from torino.core.errors import BadParameter, BadTokens, MissingSignal, UnmetBudget
from torino.reducers.folder import Folder
from torino.reducers.tome import ToMe, merged_sizes, tome_step
from torino.testing import check_reducer, same_plan


def reference(tokens: VisualTokens, budget: int, steps: int | None, step_order: str, cls: bool) -> list[Token]:
    current = sequence(tokens.signal("head_keys", "test"), tokens.patches, cls)
    left, number = len(tokens) - budget, 0
    while left > 0:
        remaining = 1 if steps is None else max(1, steps - number)
        r = min((len(current) - 1) // 2, left // remaining)
        if r:
            current = step(current, r, in_place_order=step_order == "raster")
        left, number = left - r, number + 1
    return drop_cls(current)


@pytest.mark.parametrize("kind", ["random", "tied", "degenerate"])
@pytest.mark.parametrize("cls", [True, False])
@pytest.mark.parametrize(("steps", "step_order"), [(23, "native"), (3, "native"), (None, "native"), (4, "raster")])
def test_equals_reference(kind: str, cls: bool, steps: int | None, step_order: Any) -> None:
    for seed, grid in enumerate([(4, 5), (3, 3), (1, 7), (2, 1), (1, 1)]):
        tokens = random_tokens(seed, grid, kind)
        n = len(tokens)
        for budget in sorted({1, 2, n // 3, n // 2, 2 * n // 3, n - 1, n} & set(range(1, n + 1))):
            if budget == 1 and n > 1 and not cls:
                continue
            expected = reference(tokens, budget, steps, step_order, cls)
            made = ToMe(budget, steps, step_order, cls, "native").plan(tokens)
            assert_same_tokens(made, expected, tokens)
            raster = ToMe(budget, steps, step_order, cls).plan(tokens)
            assert_same_tokens(raster, sorted(expected, key=lambda token: token.place), tokens)


def test_identical_tokens_by_hand() -> None:
    tokens = VisualTokens(torch.arange(4.0)[:, None], (2, 2), signals={"head_keys": torch.ones(4, 2)})
    # after CLS: sources 1 and 3, targets 0 and 2. 1 into 0 leaves [3, 0, 2]; then 0, now a source, is merged into 3
    assert groups(ToMe(2, steps=2).plan(tokens)) == {frozenset({0, 1, 3}), frozenset({2})}
    assert ToMe(2, steps=2).plan(tokens).anchor.tolist() == [2, 3]
    assert ToMe(2, steps=2, order="native").plan(tokens).anchor.tolist() == [3, 2]
    # in raster order the sequence is [0, 2, 3], and 2 is merged into 0
    assert groups(ToMe(2, steps=2, step_order="raster").plan(tokens)) == {frozenset({0, 1, 2}), frozenset({3})}
    # in a single step both sources are merged into the first target
    assert groups(ToMe(2, steps=1).plan(tokens)) == {frozenset({0, 1, 3}), frozenset({2})}


def test_merged_tokens_are_means() -> None:
    tokens = random_tokens(0, (4, 4), "random")
    plan = ToMe(5).plan(tokens)
    for row, group in enumerate([(plan.assigned == m).nonzero()[:, 0] for m in range(5)]):
        torch.testing.assert_close(plan.apply(tokens.patches)[row], tokens.patches[group].mean(0))


def test_four_orthogonal_clusters() -> None:
    tokens = VisualTokens(
        torch.eye(4).repeat_interleave(4, 0), (4, 4), signals={"head_keys": torch.eye(4).repeat_interleave(4, 0)}
    )
    plan = Folder(4, metric="head_keys", log_size_scale="never").plan(tokens)
    assert same_parts(ToMe(4, steps=None, step_order="raster", class_token=False).plan(tokens), plan)
    assert groups(plan) == {frozenset(range(c, c + 4)) for c in range(0, 16, 4)}


def same_parts(one: Reduction, other: Reduction) -> bool:
    """Return whether two plans are equal except for their spec."""
    return same_plan(Reduction(**{**vars_of(one), "by": "x"}), Reduction(**{**vars_of(other), "by": "x"}))


def vars_of(plan: Reduction) -> dict[str, Any]:
    return {name: getattr(plan, name) for name in Reduction.__dataclass_fields__}


def test_equals_folder_on_keys_in_raster_order() -> None:
    for seed in range(5):
        tokens = random_tokens(seed, (5, 6), "random")
        for budget in (2, 7, 15, 29):
            folder = Folder(budget, metric="head_keys", log_size_scale="never").plan(tokens)
            assert same_parts(ToMe(budget, steps=None, step_order="raster", class_token=False).plan(tokens), folder)


def test_budget_of_all_patches_and_of_one() -> None:
    tokens = random_tokens(0, (3, 4), "random")
    assert torch.equal(ToMe(12).plan(tokens).apply(tokens.patches), tokens.patches)
    torch.testing.assert_close(ToMe(1).plan(tokens).apply(tokens.patches)[0], tokens.patches.mean(0))
    one = random_tokens(0, (1, 1), "random")
    assert torch.equal(ToMe(1).plan(one).apply(one.patches), one.patches)


def test_no_permutation_equivariance() -> None:
    tokens = random_tokens(2, (4, 4), "random")
    turn = torch.arange(16).roll(1)
    turned = VisualTokens(tokens.patches[turn], (4, 4), signals={"head_keys": tokens.signal("head_keys", "test")[turn]})
    original = {frozenset(turn[list(group)].tolist()) for group in groups(ToMe(8).plan(turned))}
    assert original != groups(ToMe(8).plan(tokens))


@pytest.mark.parametrize("budget", [1, 2, 5, 7, 15, 16])
@pytest.mark.parametrize(
    "changes", [{}, {"steps": None, "step_order": "raster"}, {"class_token": False, "order": "native"}], ids=str
)
def test_contract(budget: int, changes: dict[str, Any]) -> None:
    check_reducer(make("tome", budget=budget, **changes), contract_images())


# ---------------------------------------------------------------------- inside a tower


def test_composed_steps_equal_the_plan() -> None:
    for seed in range(4):
        tokens = random_tokens(seed, (6, 6), "random")
        keys, states = tokens.signal("head_keys", "test"), tokens.patches
        sizes, total = torch.ones(36), Reduction.identity((6, 6))
        for r in (6, 0, 6, 6):
            made = tome_step(keys, sizes, r)
            assert made.patches == len(keys)
            keys, states, sizes = made.apply(keys), made.apply(states), merged_sizes(made, sizes)
            total = total.then(made)
        plan = ToMe(18, steps=3, order="native").plan(tokens)
        assert torch.equal(total.assigned, plan.assigned)
        assert torch.equal(total.anchor, plan.anchor)
        assert torch.equal(total.sources, plan.sources)
        torch.testing.assert_close(total.weights, plan.weights)
        torch.testing.assert_close(states, plan.apply(tokens.patches))
        assert torch.equal(sizes, plan.offsets.diff().float())


@pytest.mark.parametrize("cls", [True, False])
def test_steps_inside_a_tower(cls: bool) -> None:
    """With blocks that change the states, each step equals the reference, and the composition tracks all patches."""
    generator = torch.Generator().manual_seed(1)
    image = random_tokens(1, (5, 5), "random")
    states, sizes, total = image.patches, torch.ones(25), Reduction.identity((5, 5))
    reference_groups = [[patch] for patch in range(25)]
    for r in (4, 3, 12, 2):
        states = states + torch.tanh(states @ torch.randn(6, 6, generator=generator))
        keys = states @ torch.randn(6, 4, generator=generator)
        tokens = sequence(keys, states, cls)
        for token, size in zip(drop_cls(tokens), sizes.tolist(), strict=True):
            token.size = size
        taken = min(r, (len(tokens) - 1) // 2)
        expected = drop_cls(step(tokens, taken, in_place_order=False))
        made = tome_step(keys, sizes, r, class_token=cls)
        sizes, states, total = merged_sizes(made, sizes), made.apply(states), total.then(made)
        assert made.anchor.tolist() == [token.place for token in expected]
        assert sizes.tolist() == [token.size for token in expected]
        torch.testing.assert_close(states, torch.tensor([token.feature for token in expected]))
        reference_groups = [
            sorted(p for member in token.members for p in reference_groups[member]) for token in expected
        ]
    assert [(total.assigned == row).nonzero()[:, 0].tolist() for row in range(len(total))] == reference_groups
    sums = torch.zeros(len(total)).index_add(0, total.rows, total.weights)
    torch.testing.assert_close(sums, torch.ones(len(total)))


def test_step_in_raster_order_and_invalid_arguments() -> None:
    keys = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    assert (tome_step(keys, torch.ones(6), 2, order="raster").anchor.diff() > 0).all()
    assert len(tome_step(keys, torch.ones(6), 99)) == 3
    assert len(tome_step(keys, torch.ones(6), 99, class_token=False)) == 4
    with pytest.raises(BadParameter, match="r must be a whole number of at least 0, got -1"):
        tome_step(keys, torch.ones(6), -1)
    with pytest.raises(BadTokens, match=r"tome_step takes keys of shape \(T, d\) .* got \(6, 4\) and \(5,\)"):
        tome_step(keys, torch.ones(5), 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"budget": -1}, "budget must be a whole number of at least 1, got -1"),
        ({"steps": 0}, "steps must be a whole number of at least 1, got 0"),
        ({"step_order": "released"}, "step_order must be one of 'raster', 'native', got 'released'"),
        ({"class_token": None}, "class_token must be True or False, got None"),
        ({"order": 1}, "order must be one of"),
    ],
)
def test_invalid_parameters(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BadParameter, match=message):
        make("tome", **{"budget": 4, **changes})


def test_missing_signals_and_unmet_budgets() -> None:
    bare = VisualTokens(torch.eye(4), (2, 2))
    with pytest.raises(MissingSignal, match="tome needs the signal head_keys"):
        ToMe(2).plan(bare)
    tokens = bare.with_(signals={"head_keys": torch.eye(4)})
    with pytest.raises(UnmetBudget, match="tome cannot give 5 tokens: the image has only 4 patches"):
        ToMe(5).plan(tokens)
    with pytest.raises(UnmetBudget, match="tome cannot give 1 token"):
        ToMe(1, class_token=False).plan(tokens)
