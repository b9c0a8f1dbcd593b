"""PruMerge+: spatial samples and exact budgets, compared with a reference implementation."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.reference_prumerge import (
    Row,
    in_output_order,
    make_tokens,
    plan_rows,
    random_tokens,
    reference_merge,
    reference_outliers,
    with_prumerge_signals,
)
from torino import VisualTokens, make
from torino.core.errors import UnmetBudget
from torino.reducers.prumerge import PruMerge
from torino.reducers.prumerge_plus import PruMergePlus
from torino.testing import check_reducer, sample_tokens


def reference_samples(n: int, k: int) -> list[int]:
    """Return the samples of the released rule; the stride is a third of the inverse ratio, without the last patch."""
    ratio = k / n
    step = int(
        1 / ratio + 1e-9
    )  # the release truncates 1 / ratio; for n other than 576 a float may be slightly too small
    stride = max(int(step / 3), 1)
    samples, index = [], 0
    while index < n - 1:
        samples.append(index)
        index += stride
    return samples


def reference_plus(tokens: VisualTokens, budget: int | None, extra: bool, count: int) -> tuple[list[Row], list[int]]:
    a: list[float] = tokens.signals["cls_attention_joint@+1"].tolist()
    n = len(a)
    ranked = sorted(range(n), key=lambda i: (-a[i], i))
    if budget is None:
        k = max(reference_outliers(a), 1)
        samples = reference_samples(n, k)
    else:
        places = budget - 1 if extra else budget
        fitting = [k for k in range(1, n + 1) if len({*ranked[:k], *reference_samples(n, k)}) <= places]
        k, samples = (max(fitting), reference_samples(n, max(fitting))) if fitting else (0, [])
        while len({*ranked[:k], *samples}) < places:
            k += 1
    centers = ranked[:k] + [i for i in samples if i not in ranked[:k]]
    roles = ["primary"] * k + ["spatial"] * (len(centers) - k)
    return reference_merge(a, tokens.signals["keys@+1"].tolist(), centers, roles, count, extra)


@pytest.mark.parametrize("kind", ["random", "tied", "same", "silent"])
@pytest.mark.parametrize("extra", [True, False])
@pytest.mark.parametrize("order", ["raster", "native"])
def test_equals_reference(kind: str, extra: bool, order: Any) -> None:
    for n in (1, 2, 3, 33, 64):
        tokens = random_tokens(n, seed=n + 1, kind=kind)
        for budget in (None, *sorted({b for b in (1, 2, 5, 20, n - 1, n) if 1 <= b <= n})):
            plan = PruMergePlus(budget, extra, order=order).plan(tokens)
            rows, assigned = in_output_order(*reference_plus(tokens, budget, extra, 32), order)
            assert plan_rows(plan) == rows
            assert plan.assigned.tolist() == assigned


@pytest.mark.parametrize(
    ("k", "stride", "samples"), [(20, 9, 64), (32, 6, 96), (50, 3, 192), (70, 2, 288), (97, 1, 575)]
)
def test_strides_for_576_patches(k: int, stride: int, samples: int) -> None:
    """Numbers of the released rule; the outliers are odd patches, so many of them are not samples."""
    ratio = k / 576
    assert int(1 / ratio) == 576 // k
    assert int(int(1 / ratio) / 3) == stride
    assert reference_samples(576, k) == list(range(0, 575, stride))
    assert len(reference_samples(576, k)) == samples
    attention = torch.full((576,), 0.001)
    attention[1 : 2 * k : 2] = 0.01
    plan = PruMergePlus(order="native").plan(make_tokens(attention, torch.ones(576, 1)))
    outliers = set(range(1, 2 * k, 2))
    assert plan.role.count("primary") == k
    assert plan.anchor[k:-1].tolist() == [i for i in range(0, 575, stride) if i not in outliers]
    assert set(plan.role[k:-1]) == {"spatial"}
    assert plan.role[-1] == "extra"
    if stride == 1:
        assert len(plan) == 576  # all patches but the last, which the extra token holds
        assert plan.sources[-1] == 575


def test_no_extra_token_if_all_patches_are_kept() -> None:
    attention = torch.full((576,), 0.001)
    attention[-100:] = 0.01
    plan = PruMergePlus().plan(make_tokens(attention, torch.ones(576, 1)))
    assert plan.anchor.tolist() == list(range(576))
    assert "extra" not in plan.role


def test_without_outliers_there_is_one_attention_centre() -> None:
    plan = PruMergePlus(order="native").plan(make_tokens(torch.full((576,), 0.001), torch.ones(576, 1)))
    assert plan.anchor.tolist() == [0, 192, 384, -1]
    assert plan.role == ("primary", "spatial", "spatial", "extra")


@pytest.mark.parametrize("budget", [192, 128, 64, 1, 2, 3, 4, 5, 300, 574, 575, 576])
def test_budgets_are_exact(budget: int) -> None:
    for seed in range(3):
        tokens = random_tokens(576, seed, width=4)
        for extra in (True, False):
            plan = PruMergePlus(budget, extra, neighbors=4, order="native").plan(tokens)
            assert len(plan) == budget
            k = plan.role.count("primary")
            spatial = plan.anchor[k : k + plan.role.count("spatial")]
            assert plan.role == ("primary",) * k + ("spatial",) * len(spatial) + ("extra",) * extra
            ranked = tokens.signals["cls_attention_joint@+1"].sort(descending=True, stable=True).indices
            assert torch.equal(plan.anchor[:k], ranked[:k])
            if 64 <= budget <= 192:  # between the two strides around it, about three samples a center
                assert 2 <= len(spatial) / k <= 3.2


def test_one_hot_attention() -> None:
    attention = torch.zeros(64)
    attention[7] = 1.0
    tokens = make_tokens(attention, torch.randn(64, 3, generator=torch.Generator().manual_seed(0)), grid=(8, 8))
    plan = PruMergePlus(order="native").plan(tokens)
    assert plan.anchor.tolist() == [7, 0, 21, 42, -1]  # stride 64 / 3 = 21; 63, the last patch, is never sampled
    raster = PruMergePlus().plan(tokens)
    assert raster.anchor.tolist() == [0, 7, 21, 42, -1]
    assert raster.role == ("spatial", "primary", "spatial", "spatial", "extra")


def test_no_permutation_equivariance() -> None:
    tokens = random_tokens(60, 4)
    shuffle = torch.randperm(60, generator=torch.Generator().manual_seed(1))
    other = tokens.with_(
        patches=tokens.patches[shuffle], signals={name: value[shuffle] for name, value in tokens.signals.items()}
    )
    first, second = (PruMergePlus(budget=20).plan(t) for t in (tokens, other))
    assert sorted(shuffle[second.anchor[:-1]].tolist()) != first.anchor[:-1].tolist()


def test_equals_prumerge_if_no_samples_fit() -> None:
    tokens = random_tokens(64, 2)
    for budget in (1, 2, 3):
        first, second = PruMergePlus(budget).plan(tokens), PruMerge(budget).plan(tokens)
        assert plan_rows(first) == plan_rows(second)


@pytest.mark.parametrize(
    "setting",
    [{}, {"extra_token": False}, {"order": "native"}, {"neighbors": 4}, *[{"budget": b} for b in (1, 2, 7, 15, 64)]],
    ids=str,
)
def test_contract(setting: dict[str, Any]) -> None:
    check_reducer(make("prumerge-plus", **setting), with_prumerge_signals(sample_tokens()))


def test_errors() -> None:
    with pytest.raises(UnmetBudget, match="prumerge-plus cannot give 7 tokens: the image has only 6 patches"):
        PruMergePlus(budget=7).plan(random_tokens(6, 0))
