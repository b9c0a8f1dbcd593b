"""GTP in one shot at the tap and block by block, against the rule one patch at a time."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from slow_matching import contract_images, cosine, f32, sample

from torino import BadParameter, BadTokens, MissingSignal, Reduction, UnmetBudget, VisualTokens, make
from torino.reducers._matching import cosines
from torino.reducers.gtp import GTP, gtp_step, importance, token_graph
from torino.testing import check_reducer

Matrix = list[list[float]]


def slow_graph(tokens: VisualTokens, kind: str, neighbours: int) -> Matrix:
    n, columns = len(tokens), tokens.grid[1]
    x = tokens.patches.tolist()
    joined = [[0] * n for _ in range(n)]
    for i in range(n):
        if kind in ("semantic", "mixed"):
            similar = {j: cosine(x[i], x[j]) for j in range(n) if j != i}
            ranked = sorted(similar.values(), reverse=True)
            if ranked:
                threshold = ranked[min(neighbours, len(ranked)) - 1]
                for j, value in similar.items():
                    joined[i][j] |= value >= threshold
        if kind in ("spatial", "mixed"):
            for j in range(n):
                apart = abs(i // columns - j // columns), abs(i % columns - j % columns)
                joined[i][j] |= max(apart) == 1
    degree = [sum(row) for row in joined]
    return [
        [joined[i][j] / math.sqrt(degree[i] * degree[j]) if joined[i][j] and degree[j] else 0.0 for j in range(n)]
        for i in range(n)
    ]


def slow_importance(attention: Any) -> list[float]:
    heads, n = attention.tolist(), attention.shape[-1]
    return [
        f32(max(head[i][i] for head in heads) * max(f32(sum(head[query][i] for query in range(n))) for head in heads))
        for i in range(n)
    ]


def slow_step(graph: Matrix, rank: list[float], propagated: int, alpha: float, hops: int) -> tuple[list[int], Matrix]:
    """Kept patches by falling importance, and the weight of every patch in each of them."""
    n = len(rank)
    order = sorted(range(n), key=lambda i: (-rank[i], i))
    kept, gone = order[: n - propagated], order[n - propagated :]
    rows: Matrix = []
    for i in kept:
        weights = [0.0] * n
        weights[i] = 1.0
        front = {j: alpha * graph[i][j] for j in gone}  # walks that end in i, by where they begin
        for _ in range(hops):
            for j, weight in front.items():
                weights[j] += weight
            front = {j: sum(front[q] * alpha * graph[q][j] for q in gone) for j in gone}
        rows.append(weights)
    return kept, rows


def dense(plan: Reduction) -> torch.Tensor:
    matrix = torch.zeros(len(plan), plan.patches)
    matrix[plan.rows, plan.sources] = plan.weights
    return matrix


@pytest.mark.parametrize("kind", ["random", "tied", "degenerate"])
@pytest.mark.parametrize("graph", ["mixed", "spatial", "semantic"])
@pytest.mark.parametrize("hops", [1, 3])
def test_equals_the_rule_one_patch_at_a_time(kind: str, graph: Any, hops: int) -> None:
    for seed, grid in enumerate([(4, 5), (3, 3), (1, 7), (6, 4), (2, 1), (1, 1)]):
        tokens = sample(seed, grid, kind)
        n = len(tokens)
        for neighbours in (3, 8):
            built = slow_graph(tokens, graph, neighbours)
            torch.testing.assert_close(token_graph(tokens.patches, grid, graph, neighbours), torch.tensor(built))
            rank = slow_importance(tokens.signal("attention", "test"))
            for budget in {1, n // 3, n // 2, n - 1, n} & set(range(1, n + 1)):
                kept, rows = slow_step(built, rank, n - budget, 0.3, hops)
                reducer = GTP(budget, 0.3, graph, neighbours, hops=hops, order="native")
                plan = reducer.plan(tokens)
                assert plan.anchor.tolist() == kept
                assert plan.score.tolist() == pytest.approx([rank[i] for i in kept], rel=1e-6)
                torch.testing.assert_close(dense(plan), torch.tensor(rows))
                raster = make(reducer.spec, order="raster").plan(tokens)
                torch.testing.assert_close(dense(raster), torch.tensor(rows)[torch.tensor(kept).argsort()])


@pytest.mark.parametrize("kind", ["random", "tied"])
def test_without_attention(kind: str) -> None:
    tokens = sample(4, (4, 6), kind).with_(signals={})
    x = tokens.patches.double()
    unit = x / x.norm(dim=1, keepdim=True).clamp(min=1e-12)
    rank = [f32(-value) for value in (unit @ unit.T).sum(1).tolist()]
    kept, _ = slow_step(slow_graph(tokens, "mixed", 8), rank, 15, 0.1, 1)
    plan = GTP(9, select="cosine", order="native").plan(tokens)
    assert plan.score.tolist() == pytest.approx([rank[i] for i in kept], abs=1e-6)
    if kind == "random":
        assert plan.anchor.tolist() == kept


def line(attention: torch.Tensor, n: int = 3) -> VisualTokens:
    return VisualTokens(10 * torch.eye(n), (1, n), signals={"attention": attention})


def test_three_in_a_row_by_hand() -> None:
    attention = torch.zeros(2, 3, 3)
    attention[0] = torch.diag(torch.tensor([0.5, 0.1, 0.9]))
    attention[1, :, 0] = 1.0  # received by the first: 3, and it looks at itself with 1
    assert importance(attention).tolist() == pytest.approx([3.0, 0.01, 0.81])
    plan = GTP(2, alpha=0.5, graph="spatial").plan(line(attention))
    root = 0.5 / math.sqrt(2)
    torch.testing.assert_close(dense(plan), torch.tensor([[1, root, 0], [0, root, 1]]))
    assert plan.assigned.tolist() == [0, 0, 1]  # the middle gave as much to both; the first stands for it
    assert GTP(2, alpha=0.5, graph="spatial", order="native").plan(line(attention)).anchor.tolist() == [0, 2]


def test_hops_save_what_has_no_kept_neighbour() -> None:
    attention = torch.zeros(1, 3, 3)
    attention[0, 0, 0] = 1.0  # one-hot: the first is kept, the last touches only the middle
    lost = GTP(1, alpha=0.5, graph="spatial").plan(line(attention))
    assert dense(lost)[0].tolist() == pytest.approx([1, 0.5 / math.sqrt(2), 0])
    assert lost.assigned.tolist() == [0, 0, -1]
    found = GTP(1, alpha=0.5, graph="spatial", hops=2).plan(line(attention))
    assert dense(found)[0].tolist() == pytest.approx([1, 0.5 / math.sqrt(2), 0.25 / 2])
    assert found.assigned.tolist() == [0, 0, 0]


def test_identical_tokens_are_all_neighbours() -> None:
    tokens = VisualTokens(torch.ones(16, 8), (4, 4))
    graph = token_graph(tokens.patches, (4, 4), "semantic", 3)  # all tie with the third
    torch.testing.assert_close(graph, (1 - torch.eye(16)) / 15)
    plan = GTP(4, select="cosine").plan(tokens)
    assert plan.anchor.tolist() == [0, 1, 2, 3]


def test_four_orthogonal_clusters() -> None:
    tokens = VisualTokens(torch.eye(4).repeat_interleave(4, 0), (4, 4))
    graph = token_graph(tokens.patches, (4, 4), "semantic", 3)
    block = (1 - torch.eye(4)) / 3
    torch.testing.assert_close(graph, torch.block_diag(block, block, block, block))
    rank = torch.tensor([4.0, 1, 1, 1]).repeat(4)
    plan = gtp_step(graph, rank, 12, 0.3, order="raster", grid=(4, 4))
    torch.testing.assert_close(plan.apply(tokens.patches), (1 + 0.3) * torch.eye(4))
    assert plan.assigned.tolist() == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4


def test_budget_of_all_patches_and_nothing_passed_on() -> None:
    tokens = sample(0, (3, 4), "random")
    assert torch.equal(GTP(12).plan(tokens).apply(tokens.patches), tokens.patches)
    assert GTP(5, alpha=0.0).plan(tokens).is_pruning
    one = sample(0, (1, 1), "random")
    assert torch.equal(GTP(1).plan(one).apply(one.patches), one.patches)


def test_neighbours_are_exact_where_float32_cannot_tell() -> None:
    source = torch.Generator().manual_seed(0)
    base = torch.randn(6, 256, generator=source)
    near = base[torch.randint(6, (80,), generator=source)] + 1e-6 * torch.randn(80, 256, generator=source)
    for patches in (near, torch.cat([near[:40], torch.randn(40, 256, generator=source)]), near * 1e-20, near * 1e20):
        exact = cosines(patches, patches).fill_diagonal_(-torch.inf)
        joined = exact >= exact.topk(8, dim=1).values[:, -1:]
        assert torch.equal(token_graph(patches, (8, 10), "semantic") > 0, joined)


def test_neighbours_do_not_depend_on_the_precision_torch_is_set_to() -> None:
    patches = torch.randn(100, 64, generator=torch.Generator().manual_seed(0))
    wanted = token_graph(patches, (10, 10))
    before = torch.get_float32_matmul_precision()
    try:
        for precision in ("high", "medium"):
            torch.set_float32_matmul_precision(precision)
            assert torch.equal(token_graph(patches, (10, 10)), wanted)
    finally:
        torch.set_float32_matmul_precision(before)


def test_permutation_equivariance_of_meaning_alone() -> None:
    tokens = sample(2, (4, 4), "random")
    turn = torch.randperm(16, generator=torch.Generator().manual_seed(0))
    attention = tokens.signal("attention", "test")
    turned = VisualTokens(tokens.patches[turn], (4, 4), signals={"attention": attention[:, turn][:, :, turn]})
    for graph, holds in (("semantic", True), ("mixed", False), ("spatial", False)):
        reducer = make("gtp", budget=6, graph=graph, neighbours=3, alpha=0.3, order="native")
        there, here = dense(reducer.plan(turned)), dense(reducer.plan(tokens))[:, turn]
        assert torch.allclose(there, here, atol=1e-6) == holds


@pytest.mark.parametrize("budget", [1, 2, 5, 7, 15, 16])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"select": "cosine"},
        {"graph": "spatial", "order": "native"},
        {"graph": "semantic", "neighbours": 2, "hops": 3, "alpha": 0.3},
    ],
    ids=str,
)
def test_contract(budget: int, changes: dict[str, Any]) -> None:
    check_reducer(make("gtp", budget=budget, **changes), contract_images())


# ---------------------------------------------------------------------- inside a tower


def test_blocks_compose() -> None:
    source = torch.Generator().manual_seed(5)
    tokens = sample(5, (5, 5), "random")
    x, alpha = tokens.patches, 0.2
    graph, scales, done = token_graph(x, (5, 5)), torch.ones(25), Reduction.identity((5, 5))
    slow = slow_graph(tokens, "mixed", 8)
    slow_x, slow_scales, places = x.tolist(), [1.0] * 25, list(range(25))
    states = x
    for p in (3, 0, 6, 5):
        n = len(states)
        attention = torch.randn(2, n, n, generator=source).softmax(-1)
        kept, rows = slow_step(slow, slow_importance(attention), p, alpha, 1)
        slow_x = [[sum(w * v[d] for w, v in zip(row, slow_x, strict=True)) for d in range(6)] for row in rows]
        slow_scales = [sum(w * s for w, s in zip(row, slow_scales, strict=True)) for row in rows]
        slow = [[slow[i][j] for j in kept] for i in kept]
        places = [places[i] for i in kept]

        step = gtp_step(graph, importance(attention), p, alpha)
        states, scales = step.apply(states), step.apply(scales)
        graph, done = graph[step.anchor][:, step.anchor], done.then(step)
        torch.testing.assert_close(states, torch.tensor(slow_x))
        torch.testing.assert_close(scales, torch.tensor(slow_scales))
    assert done.anchor.tolist() == places  # by importance, not by place, as released
    torch.testing.assert_close(done.apply(x), states)


def test_step_refusals() -> None:
    with pytest.raises(BadTokens, match=r"gtp_step takes a graph of shape \(T, T\) .* got \(3, 2\) and \(3,\)"):
        gtp_step(torch.zeros(3, 2), torch.ones(3), 1, 0.1)
    with pytest.raises(BadParameter, match="propagated must be between 0 and T − 1 = 2, got 3"):
        gtp_step(torch.zeros(3, 3), torch.ones(3), 3, 0.1)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"budget": 0}, "budget must be a whole number of at least 1, got 0"),
        ({"alpha": -0.1}, "alpha must be a finite number of at least 0, got -0.1"),
        ({"alpha": float("inf")}, "alpha must be a finite number of at least 0, got inf"),
        ({"graph": "knn"}, "graph must be one of 'mixed', 'spatial', 'semantic', got 'knn'"),
        ({"neighbours": 0}, "neighbours must be a whole number of at least 1, got 0"),
        ({"select": "random"}, "select must be one of 'attention', 'cosine', got 'random'"),
        ({"hops": 0}, "hops must be a whole number of at least 1, got 0"),
        ({"order": "x"}, "order must be one of 'raster', 'native', got 'x'"),
    ],
)
def test_refusals(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(BadParameter, match=sentence):
        make("gtp", **{"budget": 4, **changes})


def test_missing_signals_and_unmet_budgets() -> None:
    bare = VisualTokens(torch.eye(4), (2, 2))
    assert (GTP(2).needs, GTP(2, select="cosine").needs) == (frozenset({"attention"}), frozenset())
    with pytest.raises(MissingSignal, match="gtp reads attention"):
        GTP(2).plan(bare)
    with pytest.raises(BadTokens, match=r"gtp reads attention of shape \(any x 4 x 4\), got \(4, 4\)"):
        GTP(2).plan(bare.with_(signals={"attention": torch.eye(4)}))
    with pytest.raises(BadTokens, match="attention holds NaN"):
        GTP(2).plan(bare.with_(signals={"attention": torch.full((1, 4, 4), torch.nan)}))
    with pytest.raises(UnmetBudget, match="gtp cannot give 5 tokens for this image: its 4 patches make 4 at most"):
        GTP(5, select="cosine").plan(bare)
