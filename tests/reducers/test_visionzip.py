"""VisionZip: splits, small examples, comparison with a reference implementation."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from tests.support.reference_matching import contract_images, cosine, f32, random_tokens
from torino import VisualTokens, make
from torino.core.errors import BadParameter, BadTokens, MissingSignal, UnmetBudget
from torino.reducers.visionzip import VisionZip
from torino.testing import check_reducer


def reference(tokens: VisualTokens, dominant: int, contextual: int, plain_mean: bool = False) -> list[dict[int, float]]:
    """Return rows in the released order. Inside, index 0 is the CLS token, as in the tower; in the result it is N."""
    n = len(tokens)
    keys = [[0.0], *tokens.signal("head_keys", "test").tolist()]
    heads = tokens.signal("cls_attention", "test").tolist()
    attention = [f32(sum(head[i] for head in heads)) for i in range(n)]
    top = sorted(range(n), key=lambda i: (-attention[i], i))[: dominant - 1]
    is_dominant = [True] + [i in top for i in range(n)]  # the CLS token is always among them
    rows = [{i: 1.0} for i in range(n + 1) if is_dominant[i]]
    remaining = [i for i in range(n + 1) if not is_dominant[i]]
    step = max(1, len(remaining) // contextual)
    targets = [remaining[p] for p in range(0, len(remaining), step)][:contextual]
    assigned: dict[int, list[int]] = {t: [] for t in targets}
    for i in remaining:
        if i in targets:
            continue
        best, chosen = -2.0, -1
        for t in targets:
            similarity = cosine(keys[i], keys[t])
            if similarity > best:
                best, chosen = similarity, t
        assigned[chosen].append(i)
    for t in targets:
        others = assigned[t]
        row = {t: 1.0 if not plain_mean else 1 / (1 + len(others))}
        row |= {i: 1 / (len(others) + plain_mean) for i in others}
        rows.append(row)
    return [{(n if i == 0 else i - 1): weight for i, weight in row.items()} for row in rows]


def rows_of(plan: Any) -> list[dict[int, float]]:
    return [
        dict(zip(plan.sources[a:b].tolist(), plan.weights[a:b].tolist(), strict=True))
        for a, b in pairwise(plan.offsets.tolist())
    ]


@pytest.mark.parametrize(
    ("budget", "split"),
    [(192, (162, 30)), (128, (108, 20)), (64, (54, 10)), (32, (27, 5)), (577, (487, 90)), (10, (8, 2)), (3, (2, 1))],
)
def test_splits(budget: int, split: tuple[int, int]) -> None:
    assert VisionZip(budget).split == split
    assert sum(VisionZip(budget).split) == budget
    assert VisionZip(budget, contextual=1).split == (budget - 1, 1)


@pytest.mark.parametrize("kind", ["random", "tied", "degenerate"])
def test_equals_reference(kind: str) -> None:
    for seed, grid in enumerate([(4, 5), (3, 3), (1, 7), (6, 4), (2, 1)]):
        tokens = random_tokens(seed, grid, kind)
        n = len(tokens)
        for budget in sorted({3, 4, n // 2, n - 1, n, n + 1} & set(range(3, n + 2))):
            for contextual in sorted({1, 2, budget // 3, budget - 2} & set(range(1, budget - 1))):
                for fidelity in ("released", "paper"):
                    expected = reference(tokens, budget - contextual, contextual, fidelity == "paper")
                    plan = make(
                        "visionzip", budget=budget, contextual=contextual, fidelity=fidelity, order="native"
                    ).plan(tokens)
                    got = rows_of(plan)
                    assert [sorted(row) for row in got] == [sorted(row) for row in expected]
                    assert all(got[m] == pytest.approx(expected[m]) for m in range(budget))
                    raster = make("visionzip", budget=budget, contextual=contextual, fidelity=fidelity).plan(tokens)
                    place = {id_: m for m, id_ in enumerate(plan.anchor.tolist())}
                    assert all(rows_of(raster)[m] == got[place[a]] for m, a in enumerate(raster.anchor.tolist()))


def hand(attention: list[float], keys: torch.Tensor) -> VisualTokens:
    n = len(attention)
    return VisualTokens(
        torch.arange(1.0, n + 1)[:, None],
        (1, n),
        cls=torch.tensor([100.0]),
        cls_attention=torch.tensor([attention, [0.0] * n]),
        signals={"head_keys": keys},
    )


def test_small_example() -> None:
    # patch 4 is dominant; of 0 1 2 3 5, every second is a target: 0 and 2
    keys = torch.tensor([[1.0, 0], [1, 2], [0, 1], [5, 1], [0, 0], [2, 0]])
    tokens = hand([0.1, 0, 0, 0, 0.9, 0], keys)
    plan = VisionZip(4, contextual=2, order="native").plan(tokens)
    assert rows_of(plan) == [{6: 1}, {4: 1}, {0: 1, 3: 0.5, 5: 0.5}, {2: 1, 1: 1}]
    assert plan.role == ("cls", "primary", "context", "context")
    assert plan.apply(tokens.patches, tokens.cls)[:, 0].tolist() == [100, 5, 1 + 5, 3 + 2]
    assert plan.assigned.tolist() == [2, 3, 3, 2, 1, 2]
    assert plan.anchor.tolist() == [-1, 4, 0, 2]
    raster = VisionZip(4, contextual=2).plan(tokens)
    assert raster.anchor.tolist() == [0, 2, 4, -1]
    assert raster.role == ("context", "context", "primary", "cls")
    assert raster.assigned.tolist() == [0, 1, 1, 0, 2, 0]
    mean = VisionZip(4, contextual=2, fidelity="paper").plan(tokens).apply(tokens.patches, tokens.cls)
    assert mean[:, 0].tolist() == pytest.approx([(1 + 4 + 6) / 3, (3 + 2) / 2, 5, 100])


def test_contextual_rows_sum_to_two() -> None:
    tokens = random_tokens(0, (24, 24), "random", width=8)
    plan = VisionZip(192).plan(tokens)
    sums = torch.zeros(192).index_add(0, plan.rows, plan.weights)
    context = torch.tensor([role == "context" for role in plan.role])
    single = plan.offsets.diff() == 1
    assert plan.role.count("context") == 30
    assert plan.role.count("cls") == 1
    torch.testing.assert_close(sums[context & ~single], torch.full(((context & ~single).sum(),), 2.0))
    assert (sums[~context] == 1).all()
    paper = VisionZip(192, fidelity="paper").plan(tokens)
    torch.testing.assert_close(torch.zeros(192).index_add(0, paper.rows, paper.weights), torch.ones(192))


def test_identical_tokens_are_merged_into_the_first() -> None:
    plan = VisionZip(5, contextual=2, order="native").plan(hand([0.1] * 8, torch.ones(8, 3)))
    assert plan.anchor.tolist() == [-1, 0, 1, 2, 5]  # ties to the lowest; of 2..7 every third is a target
    assert rows_of(plan)[3:] == [{2: 1, 3: 0.25, 4: 0.25, 6: 0.25, 7: 0.25}, {5: 1}]


def test_four_orthogonal_clusters() -> None:
    # the first four patches are dominant; the rest are ordered by cluster, so that each has one target
    tokens = hand([1.0] * 4 + [0.0] * 16, torch.cat([torch.eye(4), torch.eye(4).repeat_interleave(4, 0)]))
    plan = VisionZip(9, contextual=4, order="native").plan(tokens)
    assert plan.anchor.tolist() == [-1, 0, 1, 2, 3, 4, 8, 12, 16]
    assert [sorted(row) for row in rows_of(plan)[5:]] == [list(range(c, c + 4)) for c in (4, 8, 12, 16)]


def test_budget_of_all_tokens_is_the_identity() -> None:
    tokens = random_tokens(0, (3, 4), "random")
    plan = VisionZip(13).plan(tokens)
    assert plan.is_pruning
    everything = torch.cat([tokens.patches, tokens.signal("cls", "test")[None]])
    assert torch.equal(plan.apply(tokens.patches, tokens.cls), everything)


def test_no_permutation_equivariance() -> None:
    tokens = random_tokens(2, (4, 4), "random")
    order = torch.arange(16).roll(3)
    permuted_tokens = VisualTokens(
        tokens.patches[order],
        (4, 4),
        cls=tokens.cls,
        cls_attention=tokens.signal("cls_attention", "test")[:, order],
        signals={"head_keys": tokens.signal("head_keys", "test")[order]},
    )
    reducer = VisionZip(6, contextual=3, order="native")
    original, permuted = reducer.plan(tokens), reducer.plan(permuted_tokens)
    assert set(order[permuted.anchor[1:3]].tolist()) == set(
        original.anchor[1:3].tolist()
    )  # the dominant patches are the same
    assert set(order[permuted.anchor[3:]].tolist()) != set(original.anchor[3:].tolist())  # the targets are not


@pytest.mark.parametrize("budget", [3, 5, 7, 15, 16])
@pytest.mark.parametrize("changes", [{}, {"fidelity": "paper", "order": "native"}, {"contextual": 1}], ids=str)
def test_contract(budget: int, changes: dict[str, Any]) -> None:
    check_reducer(make("visionzip", budget=budget, **changes), contract_images())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"budget": 2}, "budget must be a whole number of at least 3, got 2"),
        ({"budget": 1}, "budget must be a whole number of at least 3, got 1"),
        ({"contextual": 0}, "contextual must be a whole number of at least 1, got 0"),
        ({"contextual": 7}, "contextual must be between 1 and budget − 2 = 6, got 7"),
        ({"fidelity": "exact"}, "fidelity must be one of 'released', 'paper', got 'exact'"),
        ({"order": "x"}, "order must be one of 'raster', 'native', got 'x'"),
    ],
)
def test_invalid_parameters(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BadParameter, match=message):
        make("visionzip", **{"budget": 8, **changes})


def test_missing_signals_and_unmet_budgets() -> None:
    tokens = hand([0.25] * 4, torch.eye(4))
    assert VisionZip.emits_cls
    for name, without in (
        ("cls", tokens.with_(cls=None)),
        ("cls_attention", tokens.with_(cls_attention=None)),
        ("head_keys", tokens.with_(signals={})),
    ):
        with pytest.raises(MissingSignal, match=f"visionzip needs the signal {name},"):
            VisionZip(3).plan(without)
    with pytest.raises(BadTokens, match="visionzip needs head_keys of shape"):
        VisionZip(3).plan(tokens.with_(signals={"head_keys": torch.zeros(5, 2)}))
    with pytest.raises(UnmetBudget, match="the image has only 5 tokens"):
        VisionZip(6).plan(tokens)
    with pytest.raises(UnmetBudget, match="the image has only 2 tokens"):
        VisionZip(3).plan(hand([1.0], torch.ones(1, 2)))
