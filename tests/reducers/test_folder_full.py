"""FOLDER (complete form): small examples and comparison with a reference implementation."""

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
from torino import VisualTokens, make
from torino.core.errors import BadParameter, BadTokens, MissingSignal, UnmetBudget
from torino.reducers.folder import Folder
from torino.reducers.folder_full import FolderFull
from torino.testing import check_reducer


def reference(tokens: VisualTokens, budget: int, alpha: float) -> list[Token]:
    attention = tokens.signal("cls_attention", "test").double().mean(0)
    current = sequence(tokens.signal("head_keys", "test"), tokens.patches, True, attention)
    r = len(tokens) - budget
    while r > 0:
        taken = min((len(current) - 1) // 2, r)
        current = step(current, taken, in_place_order=False, penalty=100 * alpha)
        r -= taken
    return drop_cls(current)


@pytest.mark.parametrize("kind", ["random", "tied", "degenerate"])
@pytest.mark.parametrize("alpha", [5.0, 0.02, 0])
def test_equals_reference(kind: str, alpha: float) -> None:
    for seed, grid in enumerate([(4, 5), (3, 3), (1, 7), (6, 4), (2, 1), (1, 1)]):
        tokens = random_tokens(seed, grid, kind)
        n = len(tokens)
        for budget in sorted(
            {1, 2, 3, n // 4, n // 3, n // 2, n // 2 + 1, 2 * n // 3, n - 1, n} & set(range(1, n + 1))
        ):
            expected = reference(tokens, budget, alpha)
            assert_same_tokens(FolderFull(budget, alpha, order="native").plan(tokens), expected, tokens)
            raster = sorted(expected, key=lambda token: token.place)
            assert_same_tokens(FolderFull(budget, alpha).plan(tokens), raster, tokens)


def hand(attention: list[float], keys: torch.Tensor | None = None) -> VisualTokens:
    n = len(attention)
    given = torch.ones(n, 2) if keys is None else keys
    return VisualTokens(
        torch.arange(n * 2.0).view(n, 2), (1, n), cls_attention=torch.tensor([attention]), signals={"head_keys": given}
    )


def test_one_hot_attention_protects_one_patch() -> None:
    # after a CLS token the odd patches are sources; all keys are equal, so only attention ranks them
    tokens = hand([0, 1, 0, 0, 0, 0])
    assert groups(FolderFull(5).plan(tokens)) == {frozenset({0, 3}), *map(frozenset, ({1}, {2}, {4}, {5}))}
    assert groups(FolderFull(4).plan(tokens)) == {frozenset({0, 3, 5}), *map(frozenset, ({1}, {2}, {4}))}
    assert groups(FolderFull(3).plan(tokens)) == {frozenset({0, 1, 3, 5}), frozenset({2}), frozenset({4})}


def test_attention_protects_patches_from_merging() -> None:
    keys = torch.tensor([[1.0, 0], [1, 0], [0, 1], [3, 4]])  # cosines of 1 and 3 with their targets: 1 and 0.8
    assert groups(FolderFull(3).plan(hand([0.1, 0.1, 0.1, 0.1], keys))) == {
        frozenset({0, 1}),
        frozenset({2}),
        frozenset({3}),
    }
    # 1 - 500*0.001 < 0.8 - 500*0.0001
    turned = FolderFull(3).plan(hand([0, 0.001, 0, 0.0001], keys))
    assert groups(turned) == {frozenset({2, 3}), frozenset({0}), frozenset({1})}
    assert groups(FolderFull(3, alpha=0).plan(hand([0, 0.001, 0, 0.0001], keys))) == {
        frozenset({0, 1}),
        frozenset({2}),
        frozenset({3}),
    }


def test_native_order_is_sources_then_targets() -> None:
    plan = FolderFull(5, order="native").plan(hand([0, 1, 0, 0, 0, 0]))
    assert plan.anchor.tolist() == [1, 5, 0, 2, 4]
    assert FolderFull(5).plan(hand([0, 1, 0, 0, 0, 0])).anchor.tolist() == [0, 1, 2, 4, 5]


def test_four_orthogonal_clusters() -> None:
    tokens = VisualTokens(
        torch.eye(4).repeat_interleave(4, 0),
        (4, 4),
        cls_attention=torch.full((2, 16), 1 / 16),
        signals={"head_keys": torch.eye(4).repeat_interleave(4, 0)},
    )
    assert groups(FolderFull(8).plan(tokens)) == {frozenset(group) for group in _halves()}


def _halves() -> list[set[int]]:
    # the second and fourth patch of a cluster are sources, and both are merged into the first
    return [part for c in range(0, 16, 4) for part in ({c, c + 1, c + 3}, {c + 2})]


def test_budget_of_all_patches_and_of_one() -> None:
    tokens = random_tokens(0, (3, 4), "random")
    assert torch.equal(FolderFull(12).plan(tokens).apply(tokens.patches), tokens.patches)
    torch.testing.assert_close(FolderFull(1).plan(tokens).apply(tokens.patches)[0], tokens.patches.mean(0))
    one = random_tokens(0, (1, 1), "random")
    assert torch.equal(FolderFull(1).plan(one).apply(one.patches), one.patches)


def test_one_step_without_attention_equals_folder_on_keys() -> None:
    tokens = random_tokens(4, (4, 6), "random")
    plan = FolderFull(14, alpha=0.0).plan(tokens)
    same = Folder(14, metric="head_keys", class_token=True, log_size_scale="never").plan(tokens)
    assert groups(plan) == groups(same)


def test_no_permutation_equivariance() -> None:
    tokens = random_tokens(2, (4, 4), "random")
    turn = torch.arange(16).roll(1)
    attention, keys = tokens.signal("cls_attention", "test"), tokens.signal("head_keys", "test")
    turned = VisualTokens(
        tokens.patches[turn], (4, 4), cls_attention=attention[:, turn], signals={"head_keys": keys[turn]}
    )
    original = {frozenset(turn[list(group)].tolist()) for group in groups(FolderFull(8).plan(turned))}
    assert original != groups(FolderFull(8).plan(tokens))


@pytest.mark.parametrize("budget", [1, 2, 5, 7, 15, 16])
@pytest.mark.parametrize("changes", [{}, {"alpha": 0.5, "order": "native"}], ids=str)
def test_contract(budget: int, changes: dict[str, Any]) -> None:
    check_reducer(make("folder-full", budget=budget, **changes), contract_images())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"budget": 0}, "budget must be a whole number of at least 1, got 0"),
        ({"alpha": -1}, "alpha must be a finite number of at least 0, got -1"),
        ({"alpha": float("nan")}, "alpha must be a finite number of at least 0, got nan"),
        ({"alpha": "5"}, "alpha must be a finite number"),
        ({"order": "up"}, "order must be one of"),
    ],
)
def test_invalid_parameters(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BadParameter, match=message):
        make("folder-full", **{"budget": 4, **changes})


def test_missing_and_bad_signals() -> None:
    tokens = hand([0.5, 0.5])
    with pytest.raises(MissingSignal, match="folder-full needs the signal head_keys"):
        FolderFull(1).plan(tokens.with_(signals={}))
    with pytest.raises(MissingSignal, match="folder-full needs the signal cls_attention"):
        FolderFull(1).plan(tokens.with_(cls_attention=None))
    with pytest.raises(BadTokens, match="folder-full needs head_keys of shape"):
        FolderFull(1).plan(tokens.with_(signals={"head_keys": torch.zeros(2, 3, 4)}))
    with pytest.raises(UnmetBudget, match="folder-full cannot give 3 tokens: the image has only 2 patches"):
        FolderFull(3).plan(tokens)
