"""TORINO-P and TORINO-M, compared with a reference implementation of Algorithms 1 and 2 of the paper."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.support import oracle
from torino import SAE, RawEmbedding, Reduction, VisualTokens, make
from torino.core.concepts import Concepts
from torino.core.errors import BadParameter, BadTokens, UnmetBudget
from torino.core.tokens import Origin

RULES = ("group", "keep", "literal")
MODES = {"P": "torino-p", "M": "torino-m"}
SETTINGS = [(k, delta) for k in range(1, 7) for delta in range(1, k + 1)]
Dense = list[list[float]]


class Planted:
    """A concept encoder that returns the exact top-k of given dense latents; column 0 of a token is its row index."""

    def __init__(self, z: Sequence[Sequence[float]]) -> None:
        self.z = [list(row) for row in z]
        self.ranks: list[str] = []

    def top(self, x: Tensor, k: int, *, rank: str = "activation") -> Concepts:
        self.ranks.append(rank)
        indices, values, peak = oracle.top_k([self.z[int(row)] for row in x[:, 0].tolist()], k)
        return Concepts(torch.tensor(indices), torch.tensor(values), torch.tensor(peak))

    def check_origin(self, origin: Origin, width: int) -> None:
        assert width == 2

    def tokens(self, first: int = 0, last: int | None = None) -> VisualTokens:
        rows = torch.arange(first, len(self.z) if last is None else last)
        return VisualTokens(torch.stack([rows, rows * 0 + 0.5], 1), (1, len(rows)))


def dense(vocabulary: int = 7, max_rows: int = 12, top: int = 3) -> st.SearchStrategy[Dense]:
    """Draw activations with many zeros and ties, all exact in float32."""
    number = st.one_of(st.just(0), st.just(0), st.integers(0, top)).map(float)
    row = st.one_of(
        st.lists(number, min_size=vocabulary, max_size=vocabulary),
        st.just([0.0] * vocabulary),
        st.permutations([float(i) for i in range(vocabulary)]),
    )
    return st.lists(row, min_size=1, max_size=max_rows)


def rows_of(plan: Reduction) -> list[oracle.Row]:
    ends = plan.offsets.tolist()
    sources, weights, anchor = plan.sources.tolist(), plan.weights.tolist(), plan.anchor.tolist()
    return [
        (dict(zip(sources[a:b], weights[a:b], strict=True)), anchor[m], plan.role[m])
        for m, (a, b) in enumerate(pairwise(ends))
    ]


def float32(rows: Sequence[oracle.Row]) -> list[oracle.Row]:
    """Round the float64 weights of the reference to float32."""
    return [
        ({patch: torch.tensor(weight, dtype=torch.float64).float().item() for patch, weight in weights.items()}, *rest)
        for weights, *rest in rows
    ]


def check_labels(plan: Reduction, z: Dense, k: int, delta: int, mode: str, silent: str) -> None:
    """Check concept, score and assigned against the groups of the reference."""
    groups, a = oracle.grouped(z, k, delta, silent), oracle.peaks(z)
    indices, values, _ = oracle.top_k(z, k)
    group_of = {i: g for g, group in enumerate(groups) for i in group}
    assert plan.score.tolist() == [a[i] for i in plan.anchor.tolist()]
    token_of_group: dict[int, int] = {}
    own: dict[int, int] = {}
    for m, (anchor, role) in enumerate(zip(plan.anchor.tolist(), plan.role, strict=True)):
        own[anchor] = m
        if role == "primary":
            token_of_group[group_of[anchor]] = m
            assert int(plan.concept[m]) == oracle.shared_concept(groups[group_of[anchor]], indices, values)
        else:
            assert role == "padding"
            assert int(plan.concept[m]) == indices[anchor][0]
    want = [token_of_group.get(group_of[i], -1) for i in range(len(z))]
    if mode == "P":
        want = [own.get(i, token) for i, token in enumerate(want)]
    assert plan.assigned.tolist() == want


def same(one: Reduction, two: Reduction) -> bool:
    tensors = ("sources", "weights", "offsets", "anchor", "concept", "assigned", "score")
    return all(torch.equal(getattr(one, name), getattr(two, name)) for name in tensors) and (
        (one.role, one.grid, one.by) == (two.role, two.grid, two.by)
    )


# ---------------------------------------------------------------------- Algorithm 1


@pytest.mark.parametrize(("k", "delta"), SETTINGS)
@pytest.mark.parametrize("mode", MODES)
def test_dynamic_plans_equal_algorithm_1(mode: str, k: int, delta: int) -> None:
    @settings(max_examples=20)
    @given(dense(), st.sampled_from(RULES))
    def check(z: Dense, silent: str) -> None:
        sae = Planted(z)
        want = float32(oracle.dynamic(z, k, delta, mode, silent))
        native = make(MODES[mode], sae=sae, k=k, delta=delta, silent=silent, order="native").plan(sae.tokens())
        assert rows_of(native) == want
        raster = make(MODES[mode], sae=sae, k=k, delta=delta, silent=silent).plan(sae.tokens())
        assert rows_of(raster) == oracle.raster(want)
        for plan in (native, raster):
            check_labels(plan, z, k, delta, mode, silent)
            assert set(plan.role) == {"primary"}

    check()


# ---------------------------------------------------------------------- Algorithm 2


@pytest.mark.parametrize(("k", "delta"), SETTINGS)
@pytest.mark.parametrize("mode", MODES)
def test_fixed_budgets_equal_algorithm_2(mode: str, k: int, delta: int) -> None:
    @settings(max_examples=12)
    @given(dense(max_rows=8), st.sampled_from(RULES))
    def check(z: Dense, silent: str) -> None:
        sae = Planted(z)
        groups = len(oracle.grouped(z, k, delta, silent))
        supply = groups + len(z) if mode == "M" else len(z)
        for budget in range(1, supply + 1):
            want = float32(oracle.fixed(z, k, delta, mode, budget, silent))
            assert len(want) == budget
            for order in ("native", "raster"):
                reducer = make(MODES[mode], sae=sae, k=k, delta=delta, silent=silent, budget=budget, order=order)
                plan = reducer.plan(sae.tokens())
                assert len(plan) == budget
                assert rows_of(plan) == (want if order == "native" else oracle.raster(want))
                check_labels(plan, z, k, delta, mode, silent)
        for budget in (supply + 1, supply + 100):
            assert len(oracle.fixed(z, k, delta, mode, budget, silent)) == supply
            with pytest.raises(UnmetBudget, match=rf"cannot give {budget} tokens.*{groups} groups.*{supply} in total"):
                make(MODES[mode], sae=sae, k=k, delta=delta, silent=silent, budget=budget).plan(sae.tokens())

    check()


@pytest.mark.parametrize("mode", MODES)
def test_larger_images_with_a_budget(mode: str) -> None:
    for seed in range(4):
        g = torch.Generator().manual_seed(seed)
        z = (torch.randint(0, 9, (70, 30), generator=g) * (torch.rand(70, 30, generator=g) < 0.2)).float().tolist()
        sae = Planted(z)
        for k, delta, silent in ((2, 2, "group"), (3, 2, "group"), (3, 3, "literal"), (1, 1, "keep")):
            for budget in (1, 5, 20, 40, 70):
                want = oracle.raster(float32(oracle.fixed(z, k, delta, mode, budget, silent)))
                reducer = make(MODES[mode], sae=sae, k=k, delta=delta, silent=silent, budget=budget)
                plan = reducer.plan(sae.tokens())
                assert rows_of(plan) == want
                check_labels(plan, z, k, delta, mode, silent)


def test_truncation_keeps_the_largest_groups() -> None:
    z = [[1.0, 0, 0, 0], [0, 1.0, 0, 0], [0, 0, 1.0, 0], [0, 0, 1.0, 0], [0, 2.0, 0, 0], [0, 0, 0, 9.0]]
    sae = Planted(z)  # groups {0}, {1, 4}, {2, 3}, {5}
    plan = make("torino-p", sae=sae, k=1, delta=1, budget=2).plan(sae.tokens())
    assert plan.anchor.tolist() == [2, 4]
    assert plan.assigned.tolist() == [-1, 1, 0, 0, 1, -1]
    plan = make("torino-p", sae=sae, k=1, delta=1, budget=3).plan(sae.tokens())
    assert plan.anchor.tolist() == [0, 2, 4]
    plan = make("torino-m", sae=sae, k=1, delta=1, budget=1, order="native").plan(sae.tokens())
    assert (plan.anchor.tolist(), plan.sources.tolist()) == ([4], [1, 4])


def test_padding() -> None:
    z = [[3.0], [5.0], [4.0], [5.0]]
    sae = Planted(z)  # one group; its representative is patch 1
    prune = make("torino-p", sae=sae, k=1, delta=1, budget=3, order="native").plan(sae.tokens())
    assert prune.anchor.tolist() == [1, 3, 2]
    assert prune.role == ("primary", "padding", "padding")
    assert prune.assigned.tolist() == [0, 0, 2, 1]
    merge = make("torino-m", sae=sae, k=1, delta=1, budget=3, order="native").plan(sae.tokens())
    assert merge.anchor.tolist() == [1, 1, 3]  # the representative may be a padding token as well
    assert merge.role == ("primary", "padding", "padding")
    assert merge.assigned.tolist() == [0, 0, 0, 0]
    raster = make("torino-m", sae=sae, k=1, delta=1, budget=5).plan(sae.tokens())
    assert raster.anchor.tolist() == [0, 1, 1, 2, 3]
    assert raster.role == ("padding", "primary", "padding", "padding", "padding")
    full = make("torino-p", sae=sae, k=1, delta=1, budget=4).plan(sae.tokens())
    assert full.anchor.tolist() == [0, 1, 2, 3]


def test_budget_equal_to_the_number_of_groups() -> None:
    z = [[1.0, 0], [0, 1.0], [1.0, 0]]
    sae = Planted(z)
    for name in MODES.values():
        fixed = make(name, sae=sae, k=1, delta=1, budget=2).plan(sae.tokens())
        dynamic = make(name, sae=sae, k=1, delta=1).plan(sae.tokens())
        assert rows_of(fixed) == rows_of(dynamic)


def test_error_names_the_image_that_is_too_small() -> None:
    z = [[1.0], [1.0], [1.0], [1.0]]
    sae = Planted(z)
    reducer = make("torino-p", sae=sae, k=1, delta=1, budget=3)
    with pytest.raises(UnmetBudget, match="image 1: it has 1 groups and 0 patches for padding, 1 in total"):
        reducer.plan_batch([sae.tokens(0, 3), sae.tokens(3, 4)])


# ---------------------------------------------------------------------- both modes, batches, orders


@given(dense(), st.integers(1, 4), st.data())
def test_pruning_and_merging_give_the_same_anchors(z: Dense, k: int, data: st.DataObject) -> None:
    sae, delta = Planted(z), data.draw(st.integers(1, k))
    silent = data.draw(st.sampled_from(RULES))
    budget = data.draw(st.one_of(st.none(), st.integers(1, len(z))))
    plans = [
        make(name, sae=sae, k=k, delta=delta, silent=silent, budget=budget).plan(sae.tokens())
        for name in MODES.values()
    ]
    assert len(plans[0]) == len(plans[1])
    primary = [[a for a, role in zip(p.anchor.tolist(), p.role, strict=True) if role == "primary"] for p in plans]
    assert primary[0] == primary[1]


@given(st.lists(dense(vocabulary=5, max_rows=6), min_size=1, max_size=4), st.data())
def test_batch_equals_single_images(images: list[Dense], data: st.DataObject) -> None:
    sae = Planted([row for z in images for row in z])
    ends = [0]
    for z in images:
        ends.append(ends[-1] + len(z))
    tokens = [sae.tokens(a, b) for a, b in pairwise(ends)]
    k = data.draw(st.integers(1, 4))
    parameters = {
        "k": k,
        "delta": data.draw(st.integers(1, k)),
        "budget": data.draw(st.sampled_from([None, 1, 2])),
        "order": data.draw(st.sampled_from(["raster", "native"])),
        "silent": data.draw(st.sampled_from(RULES)),
    }
    name = data.draw(st.sampled_from(list(MODES.values())))
    reducer = make(name, sae=sae, **parameters)
    try:
        single = [reducer.plan(image) for image in tokens]
    except UnmetBudget:
        with pytest.raises(UnmetBudget):
            reducer.plan_batch(tokens)
        return
    batched = reducer.plan_batch(tokens)
    assert len(batched) == len(images)
    assert all(same(first, second) for first, second in zip(batched, single, strict=True))


@pytest.mark.parametrize("kind", ["relu", "jumprelu"])
@pytest.mark.parametrize("normalize", ["none", "layer_norm"])
def test_batch_of_random_images_equals_single_images(kind: Any, normalize: Any) -> None:
    g = torch.Generator().manual_seed(6)
    threshold = torch.rand(500, generator=g) if kind == "jumprelu" else None
    sae = SAE(torch.randn(500, 24, generator=g), kind=kind, threshold=threshold, normalize=normalize)
    centers = torch.randn(12, 24, generator=g)
    images = []
    for rows, columns in ((8, 8), (1, 1), (5, 9), (2, 30), (12, 12)):
        picked = centers[torch.randint(12, (rows * columns,), generator=g)]
        images.append(VisualTokens(picked + 0.2 * torch.randn(picked.shape, generator=g), (rows, columns)))
    for name in MODES.values():
        for parameters in ({}, {"k": 3, "delta": 2, "order": "native"}, {"k": 1, "delta": 1, "budget": 1}):
            reducer = make(name, sae=sae, **parameters)
            batched = reducer.plan_batch(images)
            assert all(same(plan, reducer.plan(image)) for plan, image in zip(batched, images, strict=True))
            values = [image.patches for image in images]
            packed = batched.apply(values)
            for got, plan, value in zip(packed, batched, values, strict=True):
                assert torch.equal(got, plan.apply(value))


def test_empty_batch_raises() -> None:
    with pytest.raises(BadTokens, match="list of images is empty"):
        make("torino-p", sae=RawEmbedding()).plan_batch([])


def test_images_of_different_width_raise() -> None:
    images = [VisualTokens.of(torch.eye(4)), VisualTokens.of(torch.eye(4)[:, :3])]
    with pytest.raises(BadTokens, match=r"same width, got widths \[3, 4\]"):
        make("torino-p", sae=RawEmbedding()).plan_batch(images)


def test_rank_is_passed_to_the_encoder() -> None:
    sae = Planted([[1.0, 2.0]])
    make("torino-p", sae=sae, rank="pre-threshold").plan(sae.tokens())
    make("torino-m", sae=sae).plan(sae.tokens())
    assert sae.ranks == ["pre-threshold", "activation"]


# ---------------------------------------------------------------------- through a real SAE


def hadamard(size: int) -> Tensor:
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix


def planted_sae(**options: Any) -> tuple[SAE, Tensor, Tensor]:
    """Return an SAE of 24 latents of which 8 are recovered exactly and the others are never active."""
    basis, shift = hadamard(8), torch.arange(8.0)
    w = torch.cat([basis / 8, -basis / 8, torch.zeros(8, 8)])
    return SAE(w, b_dec=shift, **options), basis, shift


@given(dense(vocabulary=8, max_rows=10), st.integers(1, 5), st.data())
def test_plans_with_an_sae(z: Dense, k: int, data: st.DataObject) -> None:
    sae, basis, shift = planted_sae()
    delta, silent = data.draw(st.integers(1, k)), data.draw(st.sampled_from(RULES))
    tokens = VisualTokens(torch.tensor(z) @ basis + shift, (len(z), 1))
    full = [row + [0.0] * 16 for row in z]
    assert sae.encode(tokens.patches).tolist() == full  # planted exactly
    for mode, name in MODES.items():
        budget = data.draw(st.one_of(st.none(), st.integers(1, len(z))))
        plan = make(name, sae=sae, k=k, delta=delta, silent=silent, budget=budget, order="native").plan(tokens)
        rows = (
            oracle.dynamic(full, k, delta, mode, silent)
            if budget is None
            else oracle.fixed(full, k, delta, mode, budget, silent)
        )
        assert rows_of(plan) == float32(rows)
        check_labels(plan, full, k, delta, mode, silent)
        values = tokens.patches.double()
        for token, (weights, _, _) in zip(plan.apply(values), rows, strict=True):
            want = sum(weight * values[patch] for patch, weight in weights.items())
            assert torch.allclose(token, torch.as_tensor(want), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {"kind": "topk", "k": 2},
        {"kind": "batchtopk", "threshold": 1.0},
        {"kind": "jumprelu", "threshold": torch.arange(24.0) % 3},
        {"kind": "matryoshka", "threshold": 2.0, "groups": (4, 20)},
    ],
)
def test_plans_with_every_kind_of_sae(options: dict[str, Any]) -> None:
    sae, basis, shift = planted_sae(**options)
    g = torch.Generator().manual_seed(4)
    z = (torch.randint(0, 6, (40, 8), generator=g) * (torch.rand(40, 8, generator=g) < 0.5)).float()
    tokens = VisualTokens(z @ basis + shift, (5, 8))
    gated = sae.encode(tokens.patches).tolist()
    before = torch.cat([z, torch.zeros(40, 16)], 1).tolist()
    assert gated != before
    for rank, full in (("activation", gated), ("pre-threshold", before)):
        for k, delta in ((1, 1), (2, 2), (3, 2), (4, 4)):
            plan = make("torino-m", sae=sae, k=k, delta=delta, rank=rank, order="native").plan(tokens)
            assert rows_of(plan) == float32(oracle.dynamic(full, k, delta, "M"))


def test_raw_embedding_uses_coordinates_as_latents() -> None:
    g = torch.Generator().manual_seed(2)
    x = torch.randint(-3, 4, (25, 6), generator=g).float()
    tokens = VisualTokens.of(x)
    for mode, name in MODES.items():
        for k, delta in ((1, 1), (2, 1), (2, 2), (3, 2), (6, 6)):
            for silent in RULES:  # a coordinate is never silent, not even a negative one
                plan = make(name, sae=RawEmbedding(), k=k, delta=delta, silent=silent, order="native").plan(tokens)
                assert rows_of(plan) == float32(oracle.dynamic(x.tolist(), k, delta, mode, "literal"))
                assert plan.score.tolist() == [max(x[i].tolist()) for i in plan.anchor.tolist()]
    concepts = RawEmbedding().top(torch.tensor([[-1.0, -2.0, -1.0]]), 3)
    assert concepts.indices.tolist() == [[0, 2, 1]]
    assert concepts.peak.tolist() == [-1.0]


@pytest.mark.parametrize("k", [0, 4])
def test_raw_embedding_with_invalid_k(k: int) -> None:
    with pytest.raises(BadParameter, match=f"token width 3, got {k}"):
        RawEmbedding().top(torch.eye(3), k)


def test_k_above_the_number_of_latents_raises() -> None:
    with pytest.raises(BadParameter, match="k must be between 1 and 3, the number of latents; got 4"):
        make("torino-p", sae=SAE(torch.eye(3)), k=4).plan(VisualTokens.of(torch.eye(3)[:1]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_plans_do_not_depend_on_the_dtype(dtype: torch.dtype) -> None:
    sae, basis, shift = planted_sae()
    z = torch.randint(0, 4, (16, 8), generator=torch.Generator().manual_seed(0)).float()
    x = z @ basis + shift
    for name in MODES.values():
        one, other = (make(name, sae=sae).plan(VisualTokens.of(patches)) for patches in (x, x.to(dtype)))
        assert same(one, other)


# ---------------------------------------------------------------------- scales and weights


@pytest.mark.parametrize("scale", ["log", "mean", "sqrt", "sum"])
def test_scales(scale: str) -> None:
    z = [[1.0, 0.0]] * 5 + [[0.0, 1.0]] * 2 + [[1.0, 1.0]]
    sae = Planted(z)
    plan = make("torino-m", sae=sae, k=2, delta=2, scale=scale, order="native").plan(sae.tokens())
    assert rows_of(plan) == float32(oracle.dynamic(z, 2, 2, "M", "group", scale))
    by_hand = {"log": (1 + math.log(5)) / 5, "mean": 0.2, "sqrt": 5**-0.5, "sum": 1.0}[scale]
    assert plan.weights[:5].tolist() == pytest.approx([by_hand] * 5, rel=1e-6)
    assert plan.offsets.tolist() == [0, 5, 7, 8]
    assert plan.weights[7] == 1  # a group of one patch is not scaled


def test_pruned_tokens_equal_patches() -> None:
    x = torch.randn(36, 8, generator=torch.Generator().manual_seed(1))
    plan = make("torino-p", sae=RawEmbedding(), budget=20).plan(VisualTokens.of(x))
    assert plan.is_pruning
    assert torch.equal(plan.apply(x), x[plan.anchor])


def test_output_order_does_not_change_the_set_of_tokens() -> None:
    x = torch.randn(49, 8, generator=torch.Generator().manual_seed(1))
    for name in MODES.values():
        for budget in (None, 10, 40):
            raster = make(name, sae=RawEmbedding(), budget=budget).plan(VisualTokens.of(x))
            native = make(name, sae=RawEmbedding(), budget=budget, order="native").plan(VisualTokens.of(x))
            assert oracle.raster(rows_of(native)) == rows_of(raster)
            assert raster.anchor.tolist() == sorted(raster.anchor.tolist())


# ---------------------------------------------------------------------- hyperparameters


@pytest.mark.parametrize("name", ["k", "delta", "budget"])
@pytest.mark.parametrize("value", [0, -1, 1.5, 2.0, "2", True, [2]])
def test_numbers_out_of_range_raise(name: str, value: Any) -> None:
    with pytest.raises(BadParameter, match=f"{name} must be a whole number of at least 1, got"):
        make("torino-p", sae=RawEmbedding(), **{name: value})


@pytest.mark.parametrize("name", ["k", "delta"])
def test_none_raises(name: str) -> None:
    with pytest.raises(BadParameter, match=f"{name} must be a whole number of at least 1, got None"):
        make("torino-p", sae=RawEmbedding(), **{name: None})


def test_delta_above_k_raises() -> None:
    with pytest.raises(BadParameter, match="delta must be between 1 and k=2, got 3"):
        make("torino-m(k=2, delta=3)", sae=RawEmbedding())


@pytest.mark.parametrize(
    ("name", "value"), [("order", "random"), ("silent", "drop"), ("rank", "norm"), ("scale", "max"), ("order", 3)]
)
def test_unknown_choices_raise(name: str, value: Any) -> None:
    with pytest.raises(BadParameter, match=f"{name} must be one of .*got {value!r}"):
        make("torino-m", sae=RawEmbedding(), **{name: value})


@pytest.mark.parametrize("sae", [None, 3, "an/sae", torch.eye(3), RawEmbedding])
def test_invalid_sae_raises(sae: Any) -> None:
    with pytest.raises(BadParameter, match="sae must be an SAE or RawEmbedding"):
        make("torino-p", sae=sae)


@given(st.data())
def test_spec_rebuilds_the_reducer(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(list(MODES.values())))
    k = data.draw(st.integers(1, 6))
    parameters: dict[str, Any] = {"k": k, "delta": data.draw(st.integers(1, k))}
    choices = {
        "budget": [None, 1, 64],
        "order": ["raster", "native"],
        "silent": list(RULES),
        "rank": ["activation", "pre-threshold"],
        "scale": ["log", "mean", "sqrt", "sum"],
    }
    for key, values in choices.items():
        if key != "scale" or name == "torino-m":
            parameters[key] = data.draw(st.sampled_from(values))
    sae = RawEmbedding()
    reducer = make(name, sae=sae, **parameters)
    assert repr(reducer) == reducer.spec
    assert make(reducer.spec, sae=sae) == reducer
    assert make(f"  {reducer.spec}\n", sae=sae).spec == reducer.spec
    assert f"k={k}" in reducer.spec
    assert "RawEmbedding" not in reducer.spec


def test_plan_is_labeled_with_the_spec() -> None:
    reducer = make("torino-m", sae=RawEmbedding())
    assert reducer.spec == "torino-m(k=2, delta=2)"
    assert reducer.plan(VisualTokens.of(torch.eye(4))).by == reducer.spec
    changed = replace(reducer, k=3, budget=4)  # type: ignore[type-var]
    assert repr(changed) == "torino-m(k=3, delta=2, budget=4)"
    assert make("torino-p", sae=RawEmbedding()).name == "torino-p"


def test_input_is_not_modified() -> None:
    x = torch.randn(16, 5, generator=torch.Generator().manual_seed(0))
    before = x.clone()
    for name in MODES.values():
        make(name, sae=RawEmbedding(), budget=9).plan(VisualTokens.of(x))
    assert torch.equal(x, before)
