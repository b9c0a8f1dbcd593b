"""PruMerge: cases worked by hand, and the published rule written out in plain loops."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from torino import BadParameter, BadTokens, Reduction, UnmetBudget, VisualTokens, make
from torino.core.errors import MissingSignal
from torino.reducers.prumerge import PruMerge, outliers
from torino.testing import check_reducer, sample_tokens

Row = tuple[dict[int, float], int, str]


def image(attention: Tensor, keys: Tensor, patches: Tensor | None = None, grid: tuple[int, int] | None = None):
    n = len(attention)
    patches = torch.arange(n * 2, dtype=torch.float32).view(n, 2) if patches is None else patches
    signals = {"cls_attention_joint@+1": attention, "keys@+1": keys}
    return VisualTokens(patches, grid or (1, n), signals=signals)


def random_image(n: int, seed: int, kind: str = "random", width: int = 8) -> VisualTokens:
    source = torch.Generator().manual_seed(seed)
    attention = (2 * torch.randn(n + 1, generator=source)).softmax(0)[1:]
    keys = torch.randn(n, width, generator=source)
    if kind == "tied":  # all exact in float32: norms are 2, attention of few values
        keys = torch.randint(0, 2, (n, 4), generator=source) * 2.0 - 1
        attention = 2.0 ** -torch.randint(2, 9, (n,), generator=source)
    if kind == "same":
        keys, attention = torch.ones(n, 4), torch.full((n,), 1 / 1024)
    if kind == "silent":
        keys, attention = torch.zeros(n, 4), torch.zeros(n)
    return image(attention, keys, torch.randn(n, 5, generator=source))


# ---------------------------------------------------------------------- the published rule, slowly


def slow_percentile(values: list[float], share: float) -> float:
    ordered, place = sorted(values), share * (len(values) - 1)
    low = math.floor(place)
    high = min(low + 1, len(values) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def slow_outliers(a: list[float]) -> int:
    q1, q3 = slow_percentile(a, 0.25), slow_percentile(a, 0.75)
    count = 0
    for value in a:
        if value > q3 + 1.5 * (q3 - q1):
            count += 1
    return count


def slow_cosine(one: list[float], two: list[float]) -> float:
    size = math.sqrt(math.fsum(v * v for v in one)) * math.sqrt(math.fsum(v * v for v in two))
    return math.fsum(v * w for v, w in zip(one, two, strict=True)) / size if size else 0.0


def slow_merge(
    a: list[float], keys: list[list[float]], centres: list[int], roles: list[str], count: int, extra: bool
) -> tuple[list[Row], list[int]]:
    """Steps 4 to 6: rows in native order, and the row that stands for each patch."""
    rows: list[Row] = []
    stands: list[tuple[float, int]] = [(-math.inf, -1)] * len(a)
    for token, i in enumerate(centres):
        others = [j for j in range(len(a)) if j != i]
        cosine = {j: slow_cosine(keys[i], keys[j]) for j in others}
        nearest = sorted(others, key=lambda j: (-cosine[j], j))[:count]
        weights = {i: 1.0}
        for j in nearest:
            weights[j] = a[j]
            if cosine[j] > stands[j][0]:
                stands[j] = (cosine[j], token)
        rows.append((weights, i, roles[token]))
    rest = [j for j in range(len(a)) if j not in centres]
    has_extra = extra and bool(rest)
    if has_extra:
        rows.append(({j: a[j] for j in rest}, -1, "extra"))
    assigned = [token if token >= 0 or not has_extra else len(centres) for _, token in stands]
    for token, i in enumerate(centres):
        assigned[i] = token
    return rows, assigned


def in_order(rows: list[Row], assigned: list[int], order: str) -> tuple[list[Row], list[int]]:
    if order == "native":
        return rows, assigned
    place = sorted(range(len(rows)), key=lambda m: rows[m][1] if rows[m][1] >= 0 else math.inf)
    return [rows[m] for m in place], [place.index(m) if m >= 0 else -1 for m in assigned]


def slow_prumerge(tokens: VisualTokens, budget: int | None, extra: bool, count: int) -> tuple[list[Row], list[int]]:
    a: list[float] = tokens.signals["cls_attention_joint@+1"].tolist()
    keys: list[list[float]] = tokens.signals["keys@+1"].tolist()
    k = slow_outliers(a) if budget is None else budget - 1 if extra else budget
    if budget is None and not extra:
        k = max(k, 1)
    centres = sorted(range(len(a)), key=lambda i: (-a[i], i))[:k]
    return slow_merge(a, keys, centres, ["primary"] * k, count, extra)


def rows_of(plan: Reduction) -> list[Row]:
    sources, weights, anchor = plan.sources.tolist(), plan.weights.tolist(), plan.anchor.tolist()
    return [
        (dict(zip(sources[a:b], weights[a:b], strict=True)), anchor[m], plan.role[m])
        for m, (a, b) in enumerate(pairwise(plan.offsets.tolist()))
    ]


@pytest.mark.parametrize("kind", ["random", "tied", "same", "silent"])
@pytest.mark.parametrize("extra", [True, False])
@pytest.mark.parametrize("order", ["raster", "native"])
def test_plans_are_the_published_rule(kind: str, extra: bool, order: Any) -> None:
    for n in (1, 2, 5, 33, 40, 64):
        tokens = random_image(n, seed=n, kind=kind)
        a = tokens.signals["cls_attention_joint@+1"]
        for budget in (None, *sorted({b for b in (1, 2, 7, n - 1, n) if 1 <= b <= n})):
            for count in (32, 3):
                plan = PruMerge(budget, extra, count, order).plan(tokens)
                rows, assigned = in_order(*slow_prumerge(tokens, budget, extra, count), order)
                assert rows_of(plan) == rows
                assert plan.assigned.tolist() == assigned
                score = [float(a[i]) if i >= 0 else math.nan for _, i, _ in rows]
                assert torch.equal(plan.score.nan_to_num(-1), torch.tensor(score).nan_to_num(-1))
                assert plan.concept.tolist() == [-1] * len(rows)


def test_quartiles_interpolate() -> None:
    for seed in range(20):
        a = torch.rand(7 + seed, generator=torch.Generator().manual_seed(seed)) ** 6
        assert outliers(a) == slow_outliers(a.double().tolist())


# ---------------------------------------------------------------------- by hand


@pytest.mark.parametrize("count", [1, 20, 32, 97, 143])
def test_centres_are_the_outliers_of_the_image(count: int) -> None:
    attention = torch.full((576,), 0.001)
    attention[torch.randperm(576, generator=torch.Generator().manual_seed(count))[:count]] = 0.01
    plan = PruMerge().plan(image(attention, torch.eye(576)[:, :8]))
    assert len(plan) == count + 1
    assert plan.role.count("primary") == count
    assert set(plan.anchor.tolist()) == {*attention.gt(0.005).nonzero()[:, 0].tolist(), -1}


def test_never_more_than_a_quarter() -> None:
    attention = torch.full((576,), 0.001)
    attention[:145] = 0.01  # then the upper quartile is one of them
    assert outliers(attention) == 0
    for seed in range(30):
        attention = torch.rand(576, generator=torch.Generator().manual_seed(seed)) ** (1 + seed)
        assert outliers(attention) <= 144


def test_one_hot_attention_keeps_one_patch_unchanged() -> None:
    attention = torch.zeros(64)
    attention[5] = 1.0
    tokens = random_image(64, 0)
    tokens = image(attention, tokens.signals["keys@+1"], tokens.patches, (8, 8))
    plan = PruMerge().plan(tokens)
    assert plan.anchor.tolist() == [5, -1]
    assert plan.role == ("primary", "extra")
    reduced = plan.apply(tokens.patches)
    assert torch.equal(reduced[0], tokens.patches[5])  # its neighbours weigh nothing
    assert torch.equal(reduced[1], torch.zeros(5))


def test_equal_attention_has_no_outliers() -> None:
    patch = torch.tensor([[3.0, -1.0]])
    tokens = image(torch.full((16,), 1 / 32), torch.ones(16, 4), patch.expand(16, 2), (4, 4))
    plan = PruMerge().plan(tokens)
    assert (plan.role, plan.anchor.tolist()) == (("extra",), [-1])
    assert torch.equal(plan.apply(tokens.patches), patch / 2)  # 16 times 1/32
    alone = PruMerge(extra_token=False).plan(tokens)
    assert alone.anchor.tolist() == [0]
    assert torch.equal(alone.apply(tokens.patches), patch * (1 + 15 / 32))


def test_neighbours_come_from_the_cluster_of_the_centre() -> None:
    cluster = torch.arange(64) % 4
    keys = torch.eye(4)[cluster] * torch.linspace(1, 9, 64)[:, None]  # cosine does not see the lengths
    attention = torch.full((64,), 0.001)
    attention[[62, 13, 8, 23]] = torch.tensor([0.4, 0.3, 0.2, 0.1])
    plan = PruMerge(neighbours=15, order="native").plan(image(attention, keys))
    assert plan.anchor.tolist() == [62, 13, 8, 23, -1]
    for token, group in enumerate((2, 1, 0, 3)):
        members = plan.sources[int(plan.offsets[token]) : int(plan.offsets[token + 1])]
        assert members.sort().values.tolist() == (cluster == group).nonzero()[:, 0].tolist()
        assert (plan.assigned[cluster == group] == token).all()
    assert len(plan.sources) == 64 + 60


def test_weights_and_extra_token_by_hand() -> None:
    attention = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    keys = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [0.0, -2.0]])
    tokens = image(attention, keys, torch.tensor([[1.0], [10.0], [100.0], [1000.0]]))
    plan = PruMerge(budget=3, neighbours=1, order="native").plan(tokens)
    # 0 is nearest to 2; 1 is nearest to 2; the extra token holds 2 and 3
    assert plan.apply(tokens.patches).tolist() == [[1 + 12.5], [10 + 12.5], [12.5 + 62.5]]
    # both have cosine 1/√2 with 2: the first one stands for it; 3 is in no cluster
    assert plan.assigned.tolist() == [0, 1, 0, 2]
    # all four as centres, all others as neighbours, centres among them: sums read the patches as they were
    every = PruMerge(budget=4, neighbours=3, extra_token=False).plan(tokens).apply(tokens.patches)
    total = float(attention @ tokens.patches)
    alone = (1 - attention) * tokens.patches[:, 0]
    assert every[:, 0].tolist() == (total + alone).tolist()


def test_budgets_of_one_and_all() -> None:
    tokens = random_image(40, 3)
    a = tokens.signals["cls_attention_joint@+1"]
    alone = PruMerge(budget=1).plan(tokens)
    assert alone.role == ("extra",)
    assert torch.allclose(alone.apply(tokens.patches)[0], a @ tokens.patches)
    assert PruMerge(budget=1, extra_token=False).plan(tokens).anchor.tolist() == [int(a.argmax())]
    every = PruMerge(budget=40, extra_token=False).plan(tokens)
    assert every.anchor.tolist() == list(range(40))
    last = PruMerge(budget=40).plan(tokens)
    assert last.role.count("extra") == 1
    assert last.sources[-1] == a.argmin()
    plain = PruMerge(budget=40, extra_token=False, neighbours=0).plan(tokens)
    assert plain.is_pruning
    assert torch.equal(plain.apply(tokens.patches), tokens.patches)


def test_a_single_patch() -> None:
    tokens = image(torch.tensor([0.5]), torch.ones(1, 3), torch.tensor([[4.0]]))
    assert PruMerge().plan(tokens).apply(tokens.patches).tolist() == [[2.0]]
    assert PruMerge(extra_token=False).plan(tokens).apply(tokens.patches).tolist() == [[4.0]]


def test_does_not_depend_on_the_order_of_patches() -> None:
    tokens = random_image(60, 4)
    shuffle = torch.randperm(60, generator=torch.Generator().manual_seed(1))
    other = tokens.with_(
        patches=tokens.patches[shuffle], signals={name: value[shuffle] for name, value in tokens.signals.items()}
    )
    for budget in (None, 20):
        reducer = PruMerge(budget, order="native")
        one, two = reducer.plan(tokens), reducer.plan(other)
        assert shuffle[two.anchor[:-1]].tolist() == one.anchor[:-1].tolist()
        assert torch.allclose(one.apply(tokens.patches), two.apply(other.patches), atol=1e-6)


def test_huge_and_tiny_keys_do_not_break_it() -> None:
    tokens = random_image(50, 5)
    attention, keys = tokens.signals["cls_attention_joint@+1"], tokens.signals["keys@+1"]
    plan = PruMerge(budget=9).plan(tokens)
    huge = PruMerge(budget=9).plan(image(attention, keys * 2.0**100))  # its squares leave float32
    assert torch.equal(huge.sources, plan.sources)
    assert len(PruMerge(budget=9).plan(image(attention, keys * 1e-30))) == 9


# ---------------------------------------------------------------------- the house


def with_signals(images: list[VisualTokens]) -> list[VisualTokens]:
    return [
        one.with_(signals=random_image(len(one), seed).signals)  # keys of another width than the patches
        for seed, one in enumerate(images)
    ]


@pytest.mark.parametrize(
    "setting",
    [{}, {"extra_token": False}, {"order": "native"}, {"neighbours": 4}, *[{"budget": b} for b in (1, 2, 7, 15, 64)]],
    ids=str,
)
def test_contract(setting: dict[str, Any]) -> None:
    check_reducer(make("prumerge", **setting), with_signals(sample_tokens()))


def test_signals_in_half_precision() -> None:
    tokens = random_image(64, 6)
    half = tokens.with_(signals={name: value.half() for name, value in tokens.signals.items()})
    assert len(PruMerge(budget=12).plan(half)) == 12


def test_sentences() -> None:
    tokens = random_image(6, 0)
    for given, words in (
        ({"budget": 0}, "budget must be a whole number of at least 1, got 0"),
        ({"budget": True}, "budget must be a whole number"),
        ({"neighbours": -1}, "neighbours must be a whole number of at least 0"),
        ({"order": "snake"}, "order must be one of 'raster', 'native', got 'snake'"),
        ({"extra_token": 1}, "extra_token must be True or False, got 1"),
    ):
        with pytest.raises(BadParameter, match=words):
            PruMerge(**given)
    for extra in (True, False):
        with pytest.raises(UnmetBudget, match="prumerge cannot give 7 tokens for an image of 6 patches"):
            PruMerge(budget=7, extra_token=extra).plan(tokens)
    with pytest.raises(MissingSignal, match="prumerge reads cls_attention_joint@"):
        PruMerge().plan(tokens.with_(signals={}))
    signals = dict(tokens.signals)
    with pytest.raises(BadTokens, match=r"cls_attention_joint@\+1 of shape \(6\)"):
        PruMerge().plan(tokens.with_(signals=signals | {"cls_attention_joint@+1": torch.zeros(2, 6)}))
    with pytest.raises(BadTokens, match=r"keys@\+1 of shape \(6 x any\), got \(5, 8\)"):
        PruMerge().plan(tokens.with_(signals=signals | {"keys@+1": torch.zeros(5, 8)}))
    with pytest.raises(BadTokens, match="NaN"):
        PruMerge().plan(tokens.with_(signals=signals | {"keys@+1": torch.full((6, 8), math.nan)}))
