"""PruMerge: small examples and comparison with a reference implementation."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.support.reference_prumerge import (
    in_output_order,
    make_tokens,
    plan_rows,
    random_tokens,
    reference_outliers,
    reference_prumerge,
    with_prumerge_signals,
)
from torino import make
from torino.core.errors import BadParameter, BadTokens, MissingSignal, UnmetBudget
from torino.reducers.prumerge import PruMerge, count_outliers
from torino.testing import check_reducer, sample_tokens

# ---------------------------------------------------------------------- reference


@pytest.mark.parametrize("kind", ["random", "tied", "same", "silent"])
@pytest.mark.parametrize("extra", [True, False])
@pytest.mark.parametrize("order", ["raster", "native"])
def test_equals_reference(kind: str, extra: bool, order: Any) -> None:
    for n in (1, 2, 5, 33, 40, 64):
        tokens = random_tokens(n, seed=n, kind=kind)
        a = tokens.signals["cls_attention_joint@+1"]
        for budget in (None, *sorted({b for b in (1, 2, 7, n - 1, n) if 1 <= b <= n})):
            for count in (32, 3):
                plan = PruMerge(budget, extra, count, order).plan(tokens)
                rows, assigned = in_output_order(*reference_prumerge(tokens, budget, extra, count), order)
                assert plan_rows(plan) == rows
                assert plan.assigned.tolist() == assigned
                score = [float(a[i]) if i >= 0 else math.nan for _, i, _ in rows]
                assert torch.equal(plan.score.nan_to_num(-1), torch.tensor(score).nan_to_num(-1))
                assert plan.concept.tolist() == [-1] * len(rows)


def test_quartiles_interpolate() -> None:
    for seed in range(20):
        a = torch.rand(7 + seed, generator=torch.Generator().manual_seed(seed)) ** 6
        assert count_outliers(a) == reference_outliers(a.double().tolist())


# ---------------------------------------------------------------------- small examples


@pytest.mark.parametrize("count", [1, 20, 32, 97, 143])
def test_centres_are_the_outliers_of_the_image(count: int) -> None:
    attention = torch.full((576,), 0.001)
    attention[torch.randperm(576, generator=torch.Generator().manual_seed(count))[:count]] = 0.01
    plan = PruMerge().plan(make_tokens(attention, torch.eye(576)[:, :8]))
    assert len(plan) == count + 1
    assert plan.role.count("primary") == count
    assert set(plan.anchor.tolist()) == {*attention.gt(0.005).nonzero()[:, 0].tolist(), -1}


def test_at_most_a_quarter_are_outliers() -> None:
    attention = torch.full((576,), 0.001)
    attention[:145] = 0.01  # then the upper quartile is one of these values
    assert count_outliers(attention) == 0
    for seed in range(30):
        attention = torch.rand(576, generator=torch.Generator().manual_seed(seed)) ** (1 + seed)
        assert count_outliers(attention) <= 144


def test_one_hot_attention_keeps_one_patch_unchanged() -> None:
    attention = torch.zeros(64)
    attention[5] = 1.0
    tokens = random_tokens(64, 0)
    tokens = make_tokens(attention, tokens.signals["keys@+1"], tokens.patches, (8, 8))
    plan = PruMerge().plan(tokens)
    assert plan.anchor.tolist() == [5, -1]
    assert plan.role == ("primary", "extra")
    reduced = plan.apply(tokens.patches)
    assert torch.equal(reduced[0], tokens.patches[5])  # the weights of its neighbors are 0
    assert torch.equal(reduced[1], torch.zeros(5))


def test_equal_attention_has_no_outliers() -> None:
    patch = torch.tensor([[3.0, -1.0]])
    tokens = make_tokens(torch.full((16,), 1 / 32), torch.ones(16, 4), patch.expand(16, 2), (4, 4))
    plan = PruMerge().plan(tokens)
    assert (plan.role, plan.anchor.tolist()) == (("extra",), [-1])
    assert torch.equal(plan.apply(tokens.patches), patch / 2)  # 16 times 1/32
    single = PruMerge(extra_token=False).plan(tokens)
    assert single.anchor.tolist() == [0]
    assert torch.equal(single.apply(tokens.patches), patch * (1 + 15 / 32))


def test_neighbors_come_from_the_cluster_of_the_centre() -> None:
    cluster = torch.arange(64) % 4
    keys = torch.eye(4)[cluster] * torch.linspace(1, 9, 64)[:, None]  # cosines do not depend on the lengths
    attention = torch.full((64,), 0.001)
    attention[[62, 13, 8, 23]] = torch.tensor([0.4, 0.3, 0.2, 0.1])
    plan = PruMerge(neighbors=15, order="native").plan(make_tokens(attention, keys))
    assert plan.anchor.tolist() == [62, 13, 8, 23, -1]
    for token, group in enumerate((2, 1, 0, 3)):
        members = plan.sources[int(plan.offsets[token]) : int(plan.offsets[token + 1])]
        assert members.sort().values.tolist() == (cluster == group).nonzero()[:, 0].tolist()
        assert (plan.assigned[cluster == group] == token).all()
    assert len(plan.sources) == 64 + 60


def test_weights_and_extra_token_by_hand() -> None:
    attention = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    keys = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [0.0, -2.0]])
    tokens = make_tokens(attention, keys, torch.tensor([[1.0], [10.0], [100.0], [1000.0]]))
    plan = PruMerge(budget=3, neighbors=1, order="native").plan(tokens)
    # 0 is nearest to 2; 1 is nearest to 2; the extra token holds 2 and 3
    assert plan.apply(tokens.patches).tolist() == [[1 + 12.5], [10 + 12.5], [12.5 + 62.5]]
    # both have cosine 1/√2 with 2, which is assigned to the first one; 3 is in no cluster
    assert plan.assigned.tolist() == [0, 1, 0, 2]
    # all four are centers and neighbors of each other; all sums use the original patches
    every = PruMerge(budget=4, neighbors=3, extra_token=False).plan(tokens).apply(tokens.patches)
    total = float(attention @ tokens.patches)
    own = (1 - attention) * tokens.patches[:, 0]
    assert every[:, 0].tolist() == (total + own).tolist()


def test_budgets_of_one_and_all() -> None:
    tokens = random_tokens(40, 3)
    a = tokens.signals["cls_attention_joint@+1"]
    single = PruMerge(budget=1).plan(tokens)
    assert single.role == ("extra",)
    assert torch.allclose(single.apply(tokens.patches)[0], a @ tokens.patches)
    assert PruMerge(budget=1, extra_token=False).plan(tokens).anchor.tolist() == [int(a.argmax())]
    every = PruMerge(budget=40, extra_token=False).plan(tokens)
    assert every.anchor.tolist() == list(range(40))
    last = PruMerge(budget=40).plan(tokens)
    assert last.role.count("extra") == 1
    assert last.sources[-1] == a.argmin()
    plain = PruMerge(budget=40, extra_token=False, neighbors=0).plan(tokens)
    assert plain.is_pruning
    assert torch.equal(plain.apply(tokens.patches), tokens.patches)


def test_a_single_patch() -> None:
    tokens = make_tokens(torch.tensor([0.5]), torch.ones(1, 3), torch.tensor([[4.0]]))
    assert PruMerge().plan(tokens).apply(tokens.patches).tolist() == [[2.0]]
    assert PruMerge(extra_token=False).plan(tokens).apply(tokens.patches).tolist() == [[4.0]]


def test_permutation_equivariance() -> None:
    tokens = random_tokens(60, 4)
    shuffle = torch.randperm(60, generator=torch.Generator().manual_seed(1))
    other = tokens.with_(
        patches=tokens.patches[shuffle], signals={name: value[shuffle] for name, value in tokens.signals.items()}
    )
    for budget in (None, 20):
        reducer = PruMerge(budget, order="native")
        first, second = reducer.plan(tokens), reducer.plan(other)
        assert shuffle[second.anchor[:-1]].tolist() == first.anchor[:-1].tolist()
        assert torch.allclose(first.apply(tokens.patches), second.apply(other.patches), atol=1e-6)


def test_very_large_and_small_keys() -> None:
    tokens = random_tokens(50, 5)
    attention, keys = tokens.signals["cls_attention_joint@+1"], tokens.signals["keys@+1"]
    plan = PruMerge(budget=9).plan(tokens)
    huge = PruMerge(budget=9).plan(make_tokens(attention, keys * 2.0**100))  # the squares overflow float32
    assert torch.equal(huge.sources, plan.sources)
    assert len(PruMerge(budget=9).plan(make_tokens(attention, keys * 1e-30))) == 9


# ---------------------------------------------------------------------- contract and errors


@pytest.mark.parametrize(
    "setting",
    [{}, {"extra_token": False}, {"order": "native"}, {"neighbors": 4}, *[{"budget": b} for b in (1, 2, 7, 15, 64)]],
    ids=str,
)
def test_contract(setting: dict[str, Any]) -> None:
    check_reducer(make("prumerge", **setting), with_prumerge_signals(sample_tokens()))


def test_signals_in_half_precision() -> None:
    tokens = random_tokens(64, 6)
    half = tokens.with_(signals={name: value.half() for name, value in tokens.signals.items()})
    assert len(PruMerge(budget=12).plan(half)) == 12


def test_errors() -> None:
    tokens = random_tokens(6, 0)
    for given, words in (
        ({"budget": 0}, "budget must be a whole number of at least 1, got 0"),
        ({"budget": True}, "budget must be a whole number"),
        ({"neighbors": -1}, "neighbors must be a whole number of at least 0"),
        ({"order": "snake"}, "order must be one of 'raster', 'native', got 'snake'"),
        ({"extra_token": 1}, "extra_token must be True or False, got 1"),
    ):
        with pytest.raises(BadParameter, match=words):
            PruMerge(**given)
    for extra in (True, False):
        with pytest.raises(UnmetBudget, match="prumerge cannot give 7 tokens: the image has only 6 patches"):
            PruMerge(budget=7, extra_token=extra).plan(tokens)
    with pytest.raises(MissingSignal, match="prumerge needs the signal cls_attention_joint@"):
        PruMerge().plan(tokens.with_(signals={}))
    signals = dict(tokens.signals)
    with pytest.raises(BadTokens, match=r"cls_attention_joint@\+1 of shape \(6\)"):
        PruMerge().plan(tokens.with_(signals=signals | {"cls_attention_joint@+1": torch.zeros(2, 6)}))
    with pytest.raises(BadTokens, match=r"keys@\+1 of shape \(6 x any\), got \(5, 8\)"):
        PruMerge().plan(tokens.with_(signals=signals | {"keys@+1": torch.zeros(5, 8)}))
    with pytest.raises(BadTokens, match="NaN"):
        PruMerge().plan(tokens.with_(signals=signals | {"keys@+1": torch.full((6, 8), math.nan)}))
