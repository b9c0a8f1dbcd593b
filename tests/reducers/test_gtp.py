"""GTP on output tokens and as composed steps, compared with a reference implementation."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.support.reference_gtp import reference_graph, reference_importance, reference_step
from tests.support.reference_matching import contract_images, f32, random_tokens
from torino import Reduction, VisualTokens, make
from torino.core.errors import BadParameter, BadTokens, MissingSignal, UnmetBudget
from torino.reducers._similarity import cross_cosines
from torino.reducers.gtp import GTP, build_graph, gtp_step, mixed_attention_importance
from torino.testing import check_reducer


def dense(plan: Reduction) -> torch.Tensor:
    matrix = torch.zeros(len(plan), plan.patches)
    matrix[plan.rows, plan.sources] = plan.weights
    return matrix


@pytest.mark.parametrize("kind", ["random", "tied", "degenerate"])
@pytest.mark.parametrize("graph", ["mixed", "spatial", "semantic"])
@pytest.mark.parametrize("hops", [1, 3])
def test_equals_reference(kind: str, graph: Any, hops: int) -> None:
    for seed, grid in enumerate([(4, 5), (3, 3), (1, 7), (6, 4), (2, 1), (1, 1)]):
        tokens = random_tokens(seed, grid, kind)
        n = len(tokens)
        for neighbors in (3, 8):
            built = reference_graph(tokens, graph, neighbors)
            torch.testing.assert_close(build_graph(tokens.patches, grid, graph, neighbors), torch.tensor(built))
            rank = reference_importance(tokens.signal("attention", "test"))
            for budget in {1, n // 3, n // 2, n - 1, n} & set(range(1, n + 1)):
                kept, rows = reference_step(built, rank, n - budget, 0.3, hops)
                reducer = GTP(budget, 0.3, graph, neighbors, hops=hops, order="native")
                plan = reducer.plan(tokens)
                assert plan.anchor.tolist() == kept
                assert plan.score.tolist() == pytest.approx([rank[i] for i in kept], rel=1e-6)
                torch.testing.assert_close(dense(plan), torch.tensor(rows))
                raster = make(reducer.spec, order="raster").plan(tokens)
                torch.testing.assert_close(dense(raster), torch.tensor(rows)[torch.tensor(kept).argsort()])


@pytest.mark.parametrize("kind", ["random", "tied"])
def test_without_attention(kind: str) -> None:
    tokens = random_tokens(4, (4, 6), kind).with_(signals={})
    x = tokens.patches.double()
    unit = x / x.norm(dim=1, keepdim=True).clamp(min=1e-12)
    rank = [f32(-value) for value in (unit @ unit.T).sum(1).tolist()]
    kept, _ = reference_step(reference_graph(tokens, "mixed", 8), rank, 15, 0.1, 1)
    plan = GTP(9, select="cosine", order="native").plan(tokens)
    assert plan.score.tolist() == pytest.approx([rank[i] for i in kept], abs=1e-6)
    if kind == "random":
        assert plan.anchor.tolist() == kept


def line(attention: torch.Tensor, n: int = 3) -> VisualTokens:
    return VisualTokens(10 * torch.eye(n), (1, n), signals={"attention": attention})


def test_example_of_three_patches() -> None:
    attention = torch.zeros(2, 3, 3)
    attention[0] = torch.diag(torch.tensor([0.5, 0.1, 0.9]))
    attention[1, :, 0] = 1.0  # the first receives 3, and 1 from itself
    assert mixed_attention_importance(attention).tolist() == pytest.approx([3.0, 0.01, 0.81])
    plan = GTP(2, alpha=0.5, graph="spatial").plan(line(attention))
    root = 0.5 / math.sqrt(2)
    torch.testing.assert_close(dense(plan), torch.tensor([[1, root, 0], [0, root, 1]]))
    assert plan.assigned.tolist() == [0, 0, 1]  # both receive the same from the middle; it is assigned to the first
    assert GTP(2, alpha=0.5, graph="spatial", order="native").plan(line(attention)).anchor.tolist() == [0, 2]


def test_hops_reach_patches_without_a_kept_neighbor() -> None:
    attention = torch.zeros(1, 3, 3)
    attention[0, 0, 0] = 1.0  # one-hot: the first is kept, the last is adjacent only to the middle
    lost = GTP(1, alpha=0.5, graph="spatial").plan(line(attention))
    assert dense(lost)[0].tolist() == pytest.approx([1, 0.5 / math.sqrt(2), 0])
    assert lost.assigned.tolist() == [0, 0, -1]
    reached = GTP(1, alpha=0.5, graph="spatial", hops=2).plan(line(attention))
    assert dense(reached)[0].tolist() == pytest.approx([1, 0.5 / math.sqrt(2), 0.25 / 2])
    assert reached.assigned.tolist() == [0, 0, 0]


def test_identical_tokens_are_all_neighbors() -> None:
    tokens = VisualTokens(torch.ones(16, 8), (4, 4))
    graph = build_graph(tokens.patches, (4, 4), "semantic", 3)  # all tie with the third
    torch.testing.assert_close(graph, (1 - torch.eye(16)) / 15)
    plan = GTP(4, select="cosine").plan(tokens)
    assert plan.anchor.tolist() == [0, 1, 2, 3]


def test_four_orthogonal_clusters() -> None:
    tokens = VisualTokens(torch.eye(4).repeat_interleave(4, 0), (4, 4))
    graph = build_graph(tokens.patches, (4, 4), "semantic", 3)
    block = (1 - torch.eye(4)) / 3
    torch.testing.assert_close(graph, torch.block_diag(block, block, block, block))
    rank = torch.tensor([4.0, 1, 1, 1]).repeat(4)
    plan = gtp_step(graph, rank, 12, 0.3, order="raster", grid=(4, 4))
    torch.testing.assert_close(plan.apply(tokens.patches), (1 + 0.3) * torch.eye(4))
    assert plan.assigned.tolist() == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4


def test_budget_of_all_patches_and_alpha_zero() -> None:
    tokens = random_tokens(0, (3, 4), "random")
    assert torch.equal(GTP(12).plan(tokens).apply(tokens.patches), tokens.patches)
    assert GTP(5, alpha=0.0).plan(tokens).is_pruning
    one = random_tokens(0, (1, 1), "random")
    assert torch.equal(GTP(1).plan(one).apply(one.patches), one.patches)


def test_neighbors_are_exact_beyond_float32_precision() -> None:
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(6, 256, generator=generator)
    near = base[torch.randint(6, (80,), generator=generator)] + 1e-6 * torch.randn(80, 256, generator=generator)
    for patches in (near, torch.cat([near[:40], torch.randn(40, 256, generator=generator)]), near * 1e-20, near * 1e20):
        exact = cross_cosines(patches, patches).fill_diagonal_(-torch.inf)
        joined = exact >= exact.topk(8, dim=1).values[:, -1:]
        assert torch.equal(build_graph(patches, (8, 10), "semantic") > 0, joined)


def test_neighbors_do_not_depend_on_matmul_precision() -> None:
    patches = torch.randn(100, 64, generator=torch.Generator().manual_seed(0))
    expected = build_graph(patches, (10, 10))
    before = torch.get_float32_matmul_precision()
    try:
        for precision in ("high", "medium"):
            torch.set_float32_matmul_precision(precision)
            assert torch.equal(build_graph(patches, (10, 10)), expected)
    finally:
        torch.set_float32_matmul_precision(before)


def test_permutation_equivariance_of_the_semantic_graph() -> None:
    tokens = random_tokens(2, (4, 4), "random")
    order = torch.randperm(16, generator=torch.Generator().manual_seed(0))
    attention = tokens.signal("attention", "test")
    permuted_tokens = VisualTokens(
        tokens.patches[order], (4, 4), signals={"attention": attention[:, order][:, :, order]}
    )
    for graph, holds in (("semantic", True), ("mixed", False), ("spatial", False)):
        reducer = make("gtp", budget=6, graph=graph, neighbors=3, alpha=0.3, order="native")
        permuted, original = dense(reducer.plan(permuted_tokens)), dense(reducer.plan(tokens))[:, order]
        assert torch.allclose(permuted, original, atol=1e-6) == holds


@pytest.mark.parametrize("budget", [1, 2, 5, 7, 15, 16])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"select": "cosine"},
        {"graph": "spatial", "order": "native"},
        {"graph": "semantic", "neighbors": 2, "hops": 3, "alpha": 0.3},
    ],
    ids=str,
)
def test_contract(budget: int, changes: dict[str, Any]) -> None:
    check_reducer(make("gtp", budget=budget, **changes), contract_images())


# ---------------------------------------------------------------------- inside a tower


def test_blocks_compose() -> None:
    generator = torch.Generator().manual_seed(5)
    tokens = random_tokens(5, (5, 5), "random")
    x, alpha = tokens.patches, 0.2
    graph, scales, done = build_graph(x, (5, 5)), torch.ones(25), Reduction.identity((5, 5))
    matrix = reference_graph(tokens, "mixed", 8)
    reference_x, reference_scales, places = x.tolist(), [1.0] * 25, list(range(25))
    states = x
    for p in (3, 0, 6, 5):
        n = len(states)
        attention = torch.randn(2, n, n, generator=generator).softmax(-1)
        kept, rows = reference_step(matrix, reference_importance(attention), p, alpha, 1)
        reference_x = [[sum(w * v[d] for w, v in zip(row, reference_x, strict=True)) for d in range(6)] for row in rows]
        reference_scales = [sum(w * s for w, s in zip(row, reference_scales, strict=True)) for row in rows]
        matrix = [[matrix[i][j] for j in kept] for i in kept]
        places = [places[i] for i in kept]

        step = gtp_step(graph, mixed_attention_importance(attention), p, alpha)
        states, scales = step.apply(states), step.apply(scales)
        graph, done = graph[step.anchor][:, step.anchor], done.then(step)
        torch.testing.assert_close(states, torch.tensor(reference_x))
        torch.testing.assert_close(scales, torch.tensor(reference_scales))
    assert done.anchor.tolist() == places  # by importance, not by position, as released
    torch.testing.assert_close(done.apply(x), states)


def test_invalid_arguments_of_a_step() -> None:
    with pytest.raises(BadTokens, match=r"gtp_step takes a graph of shape \(T, T\) .* got \(3, 2\) and \(3,\)"):
        gtp_step(torch.zeros(3, 2), torch.ones(3), 1, 0.1)
    with pytest.raises(BadParameter, match="propagated must be between 0 and T − 1 = 2, got 3"):
        gtp_step(torch.zeros(3, 3), torch.ones(3), 3, 0.1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"budget": 0}, "budget must be a whole number of at least 1, got 0"),
        ({"alpha": -0.1}, "alpha must be a finite number of at least 0, got -0.1"),
        ({"alpha": float("inf")}, "alpha must be a finite number of at least 0, got inf"),
        ({"graph": "knn"}, "graph must be one of 'mixed', 'spatial', 'semantic', got 'knn'"),
        ({"neighbors": 0}, "neighbors must be a whole number of at least 1, got 0"),
        ({"select": "random"}, "select must be one of 'attention', 'cosine', got 'random'"),
        ({"hops": 0}, "hops must be a whole number of at least 1, got 0"),
        ({"order": "x"}, "order must be one of 'raster', 'native', got 'x'"),
    ],
)
def test_invalid_parameters(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BadParameter, match=message):
        make("gtp", **{"budget": 4, **changes})


def test_missing_signals_and_unmet_budgets() -> None:
    bare = VisualTokens(torch.eye(4), (2, 2))
    assert (GTP(2).needs, GTP(2, select="cosine").needs) == (frozenset({"attention"}), frozenset())
    with pytest.raises(MissingSignal, match="gtp needs the signal attention"):
        GTP(2).plan(bare)
    with pytest.raises(BadTokens, match=r"gtp needs attention of shape \(any x 4 x 4\), got \(4, 4\)"):
        GTP(2).plan(bare.with_(signals={"attention": torch.eye(4)}))
    with pytest.raises(BadTokens, match="attention holds NaN"):
        GTP(2).plan(bare.with_(signals={"attention": torch.full((1, 4, 4), torch.nan)}))
    with pytest.raises(UnmetBudget, match="gtp cannot give 5 tokens: the image has only 4 patches"):
        GTP(5, select="cosine").plan(bare)
