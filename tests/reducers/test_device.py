"""Planning with torch: the same plans as with numpy and as the reference, without host synchronization."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.support import oracle
from tests.support.no_sync import HostSynchronizationError, NoHostSync
from torino import SAE, RawEmbedding, Reduction, VisualTokens, make
from torino.core.concepts import Concepts
from torino.core.device_grouping import device_groups, device_shared_concepts
from torino.core.errors import BadParameter, BadTokens, UnmetBudget
from torino.core.planner import plans_with_torch, use_planner
from torino.core.tokens import Origin
from torino.core.topk.device import device_topk
from torino.core.topk.exact import exact_topk, largest_row_norm
from torino.datasets.bundled import example_sae, example_tokens
from torino.reducers._device_coverage import coverage_plan
from torino.reducers.device import DevicePlanner, group_plan

CPU = torch.device("cpu")
RULES = ("group", "keep", "literal")


class DenseLatents:
    """An encoder that returns the top-k of given dense latents; column 0 of a token is its row."""

    def __init__(self, z: Sequence[Sequence[float]]) -> None:
        self.z = torch.tensor(z)
        self.latents = self.z.shape[1]

    def top(self, x: Tensor, k: int, *, rank: str = "activation") -> Concepts:
        indices, values, peak = oracle.top_k([self.z[int(row)].tolist() for row in x[:, 0].tolist()], k)
        return Concepts(torch.tensor(indices), torch.tensor(values), torch.tensor(peak))

    def check_origin(self, origin: Origin, width: int) -> None:
        assert width == 2

    def tokens(self, first: int, last: int) -> VisualTokens:
        rows = torch.arange(first, last)
        return VisualTokens(torch.stack([rows, rows * 0 + 0.5], 1), (1, len(rows)))


def dense(rows: int, vocabulary: int = 8) -> st.SearchStrategy[list[list[float]]]:
    """Draw activations with many zeros and ties, and silent rows."""
    number = st.one_of(st.just(0), st.just(0), st.integers(0, 3)).map(float)
    row = st.one_of(st.lists(number, min_size=vocabulary, max_size=vocabulary), st.just([0.0] * vocabulary))
    return st.lists(row, min_size=rows, max_size=rows)


def check_equal(one: Reduction, two: Reduction, exact: bool = True) -> None:
    """Check that groups, anchors and roles are equal, and values up to float32 rounding."""
    assert (one.role, one.grid, one.by) == (two.role, two.grid, two.by)
    for name in ("sources", "offsets", "anchor", "concept", "assigned"):
        assert torch.equal(getattr(one, name), getattr(two, name)), name
    for name in ("weights", "score"):
        if exact:
            assert torch.equal(getattr(one, name), getattr(two, name)), name
        else:
            torch.testing.assert_close(getattr(one, name), getattr(two, name), rtol=1e-4, atol=2e-4)


def rows_of(plan: Reduction) -> list[oracle.Row]:
    ends = plan.offsets.tolist()
    sources, weights = plan.sources.tolist(), plan.weights.tolist()
    return [
        (dict(zip(sources[a:b], weights[a:b], strict=True)), anchor, role)
        for a, b, anchor, role in zip(ends, ends[1:], plan.anchor.tolist(), plan.role, strict=False)
    ]


# ---------------------------------------------------------------------- torino-p and torino-m


@settings(max_examples=150)
@given(st.data())
def test_groups_and_budgets_equal_numpy_and_reference(data: st.DataObject) -> None:
    n, images = data.draw(st.integers(1, 10)), data.draw(st.integers(1, 3))
    z = data.draw(dense(n * images))
    sae = DenseLatents(z)
    k = data.draw(st.integers(1, 6))
    mode = data.draw(st.sampled_from("PM"))
    silent = data.draw(st.sampled_from(RULES))
    parameters: dict[str, Any] = {
        "k": k,
        "delta": data.draw(st.integers(1, k)),
        "silent": silent,
        "order": data.draw(st.sampled_from(["raster", "native"])),
        "budget": data.draw(st.one_of(st.none(), st.integers(1, n))),
    }
    reducer: Any = make(f"torino-{mode.lower()}", sae=sae, **parameters)
    tokens = [sae.tokens(i * n, (i + 1) * n) for i in range(images)]
    expected = reducer.plan_batch(tokens)
    planner = DevicePlanner(reducer, (1, n), 2, CPU)
    plan = planner.plan(torch.stack([image.patches for image in tokens]))
    for i, (got, want) in enumerate(zip(plan.to_batch((1, n), reducer.spec), expected, strict=True)):
        check_equal(got, want)
        rows = z[i * n : (i + 1) * n]
        settings_ = (rows, k, parameters["delta"], mode)
        budget = parameters["budget"]
        reference = oracle.dynamic(*settings_, silent) if budget is None else oracle.fixed(*settings_, budget, silent)
        if parameters["order"] == "raster":
            reference = oracle.raster(reference)
        shown = [(list(weights), anchor, role) for weights, anchor, role in reference]
        assert [(list(weights), anchor, role) for weights, anchor, role in rows_of(got)] == shown
    with use_planner("torch"):
        for got, want in zip(reducer.plan_batch(tokens), expected, strict=True):
            check_equal(got, want)


@given(st.data())
def test_labels_equal_all_pairs(data: st.DataObject) -> None:
    """Chains, stars and many subsets, more than are hashed."""
    k = data.draw(st.sampled_from([1, 2, 3, 9]))
    delta, n = data.draw(st.integers(1, k)), data.draw(st.integers(1, 14))
    vocabulary = k + data.draw(st.integers(0, 6))
    row = st.permutations(range(vocabulary)).map(lambda order: list(order[:k]))
    rows = data.draw(st.lists(row, min_size=n, max_size=n))
    cut = data.draw(st.lists(st.integers(0, k), min_size=n, max_size=n))
    rows = [row[:keep] + [-1] * (k - keep) for row, keep in zip(rows, cut, strict=True)]
    for silent in ("group", "keep"):
        got = device_groups(torch.tensor(rows)[None], delta, vocabulary, silent)  # type: ignore[arg-type]
        assert got[0].tolist() == oracle.pairwise_labels(rows, delta, silent)


@pytest.mark.parametrize("n", [2, 3, 17, 576, 1025])
def test_long_chains_are_connected(n: int) -> None:
    """Each patch shares a concept only with the next; in natural, reversed, random and bit-reversed order."""
    chain = torch.stack([torch.arange(n), torch.arange(1, n + 1)], 1)
    random = torch.randperm(n, generator=torch.Generator().manual_seed(n))
    zigzag = torch.tensor(sorted(range(n), key=lambda i: int(f"{i:012b}"[::-1], 2)))
    for order in (torch.arange(n), torch.arange(n - 1, -1, -1), random, zigzag):
        assert device_groups(chain[order][None], 1, n + 1, "group").unique().tolist() == [0]
        apart = device_groups(chain[order][None], 2, n + 1, "group")
        assert apart[0].tolist() == list(range(n))


def test_more_than_the_number_of_patches_is_planned_with_numpy() -> None:
    image = VisualTokens.of(torch.eye(4))
    merge = make("torino-m", sae=RawEmbedding(), k=1, delta=1, budget=6)
    with use_planner("torch"):
        assert len(merge.plan(image)) == 6
        with pytest.raises(UnmetBudget, match="cannot give 5 tokens"):
            make("torino-p", sae=RawEmbedding(), k=1, delta=1, budget=5).plan(image)
    with pytest.raises(BadParameter, match="cannot be planned on a device for a grid of 2x2"):
        DevicePlanner(merge, (2, 2), 4, CPU)  # type: ignore[arg-type]


# ---------------------------------------------------------------------- torino-x


@settings(max_examples=60)
@given(st.data())
def test_coverage_equals_numpy(data: st.DataObject) -> None:
    rows, columns = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    n = rows * columns
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 10_000)))
    patches = torch.randn(n, 12, generator=generator)
    if data.draw(st.booleans()):  # ties: repeated patches
        patches = patches.round()[torch.randint(n, (n,), generator=generator)]
    sae = SAE(
        torch.randn(20, 12, generator=generator), kind="batchtopk", threshold=data.draw(st.sampled_from([1.0, 9]))
    )
    reducer: Any = make(
        "torino-x",
        sae=data.draw(st.sampled_from([sae, RawEmbedding()])),
        budget=data.draw(st.one_of(st.none(), st.integers(1, n))),
        min_gain=data.draw(st.sampled_from([0.0, 0.5, 2.0])),
        locality=data.draw(st.sampled_from([None, 0.2, 1.0])),
        mode=data.draw(st.sampled_from(["merge", "prune"])),
        order=data.draw(st.sampled_from(["raster", "native"])),
    )
    image = VisualTokens(patches, (rows, columns))
    plan = DevicePlanner(reducer, image.grid, 12, CPU).plan(patches[None])
    check_equal(plan.to_batch(image.grid, reducer.spec)[0], reducer.plan(image), exact=False)


def test_pooled_budgets_are_planned_with_numpy() -> None:
    images = example_tokens()[:2]
    reducer = make("torino-x", sae=example_sae(), budget=20, pooled=True)
    expected = reducer.plan_batch(images)
    with use_planner("torch"):
        for got, want in zip(reducer.plan_batch(images), expected, strict=True):
            check_equal(got, want)


# ---------------------------------------------------------------------- concepts


@pytest.mark.parametrize("kind", ["relu", "topk", "batchtopk", "matryoshka", "jumprelu"])
@pytest.mark.parametrize("normalize", ["none", "layer_norm", "constant_norm"])
def test_concepts_of_every_kind(kind: str, normalize: str) -> None:
    g = torch.Generator().manual_seed(5)
    threshold = {"jumprelu": 4 * torch.rand(6000, generator=g), "batchtopk": 5.0, "matryoshka": 5.0}.get(kind)
    weight, bias = torch.randn(6000, 24, generator=g), torch.randn(6000, generator=g)
    sae = SAE(weight, bias, kind=kind, k=3, threshold=threshold, normalize=normalize)  # type: ignore[arg-type]
    x = torch.randn(90, 24, generator=g)
    for k, rank in ((1, "activation"), (5, "activation"), (5, "pre-threshold")):
        search = sae.device_search(k, rank=rank)  # type: ignore[arg-type]
        with NoHostSync():
            indices, values, proven = search(x)
        want = sae.top(x, k, rank=rank)  # type: ignore[arg-type]
        assert bool(proven.all())
        assert torch.equal(indices, want.indices)
        assert torch.equal(values, want.values)


def test_unproven_concepts_are_reported_and_planned_again() -> None:
    g = torch.Generator().manual_seed(2)
    weight = torch.randn(1, 8, generator=g).expand(500, 8).contiguous()  # identical latents
    x = torch.randn(16, 8, generator=g)
    norm = largest_row_norm(weight)
    _, values, proven = device_topk(x, weight, torch.zeros(500), 3, torch.tensor(0.0), norm)
    exact = exact_topk(x, weight, torch.zeros(500), 3, torch.tensor(0.0))
    assert torch.equal(proven, exact[1][:, 0] == 0)  # only tokens without an active latent are proven
    assert torch.equal(values, exact[1])
    sae, image = SAE(weight), VisualTokens(x, (4, 4))
    reducer: Any = make("torino-m", sae=sae, k=3, delta=2)
    assert not bool(DevicePlanner(reducer, (4, 4), 8, CPU).plan(x[None]).exact.all())
    expected = reducer.plan(image)
    with use_planner("torch"):
        check_equal(reducer.plan(image), expected)


# ---------------------------------------------------------------------- no synchronization


@pytest.mark.parametrize(
    "spec",
    [
        "torino-p(budget=64)",
        "torino-p(k=3, delta=2, silent='literal')",
        "torino-m(budget=128, order='native')",
        "torino-m(k=6, delta=3)",
        "torino-m(k=9, delta=4, budget=20)",
        "torino-x(budget=12)",
        "torino-x(budget=8, mode='prune', order='native')",
    ],
)
def test_planning_does_not_synchronize(spec: str) -> None:
    images = example_tokens()[:2]
    reducer: Any = make(spec, sae=example_sae())
    planner = DevicePlanner(reducer, images[0].grid, images[0].width, CPU)
    stacked = torch.stack([image.patches for image in images])
    with NoHostSync():
        plan = planner.plan(stacked)
        reduced = plan.apply(stacked)
    batch = plan.to_batch(images[0].grid, reducer.spec)
    exact = not spec.startswith("torino-x")
    for i, (got, image) in enumerate(zip(batch, images, strict=True)):
        want = reducer.plan(image)
        check_equal(got, want, exact)
        torch.testing.assert_close(reduced[i, : len(want)], want.apply(image.patches), rtol=1e-3, atol=1e-3)


def test_shapes_do_not_depend_on_values() -> None:
    """Tensors without values: anything that reads one, such as .item(), .cpu() or .numpy(), raises."""
    meta = torch.device("meta")
    x, weight, bias = (torch.empty(shape, device=meta) for shape in ((20, 16), (300, 16), (300,)))
    indices, values, proven = device_topk(x, weight, bias, 3, torch.empty((), device=meta), 1.0)
    indices, values, exact = indices.view(2, 10, 3), values.view(2, 10, 3), proven.view(2, 10).all(1)
    for delta in (1, 2, 3):
        label = device_groups(indices, delta, 300, "group")
        shared = device_shared_concepts(indices, values, label, 300)
        for budget in (None, 4):
            for table in (None, torch.empty(11, device=meta)):
                plan = group_plan(indices, values, exact, label, shared, table, budget, "raster")
                assert plan.apply(x.view(2, 10, 16)).shape == (2, budget or 10, 16)
    plan = coverage_plan(
        x.view(2, 10, 16),
        indices,
        values,
        exact,
        locality=None,
        latents=300,
        tokens=4,
        min_gain=0.0,
        tie=1e-4,
        merge=True,
        raster=True,
    )
    assert plan.apply(x.view(2, 10, 16)).shape == (2, 4, 16)


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: x.sum().item(),
        lambda x: bool(x.any()),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x.unique(),
        lambda x: x.masked_select(x > 0),
        lambda x: x.index_put_((x > 0,), torch.zeros(())),
    ],
)
def test_the_mode_refuses_synchronization(operation: Any) -> None:
    with NoHostSync(), pytest.raises(HostSynchronizationError):
        operation(torch.ones(3))


def test_values_of_another_shape_are_refused() -> None:
    planner = DevicePlanner(make("torino-p", sae=RawEmbedding(), budget=2), (2, 2), 4, CPU)  # type: ignore[arg-type]
    plan = planner.plan(torch.eye(4)[None])
    assert plan.apply(torch.eye(4)[None].bfloat16()).dtype == torch.bfloat16
    with pytest.raises(BadTokens, match=r"values of shape \(1, 4, D\), got \(4, 4\)"):
        plan.apply(torch.eye(4))


def test_choice_of_the_planner() -> None:
    assert not plans_with_torch(CPU)
    assert plans_with_torch(torch.device("cuda"))
    with use_planner("numpy"):
        assert not plans_with_torch(torch.device("cuda"))
    with (
        pytest.raises(BadParameter, match="planner must be one of 'auto', 'numpy', 'torch', got 'jax'"),
        use_planner("jax"),
    ):  # type: ignore[arg-type]
        pass
