"""Reference implementation of GTP with plain loops."""

from __future__ import annotations

import math
from typing import Any

from tests.support.reference_matching import cosine, f32
from torino import VisualTokens

Matrix = list[list[float]]


def reference_graph(tokens: VisualTokens, kind: str, neighbors: int) -> Matrix:
    n, columns = len(tokens), tokens.grid[1]
    x = tokens.patches.tolist()
    adjacent = [[0] * n for _ in range(n)]
    for i in range(n):
        if kind in ("semantic", "mixed"):
            similar = {j: cosine(x[i], x[j]) for j in range(n) if j != i}
            ranked = sorted(similar.values(), reverse=True)
            if ranked:
                threshold = ranked[min(neighbors, len(ranked)) - 1]
                for j, value in similar.items():
                    adjacent[i][j] |= value >= threshold
        if kind in ("spatial", "mixed"):
            for j in range(n):
                distance = abs(i // columns - j // columns), abs(i % columns - j % columns)
                adjacent[i][j] |= max(distance) == 1
    degree = [sum(row) for row in adjacent]
    return [
        [adjacent[i][j] / math.sqrt(degree[i] * degree[j]) if adjacent[i][j] and degree[j] else 0.0 for j in range(n)]
        for i in range(n)
    ]


def reference_importance(attention: Any) -> list[float]:
    heads, n = attention.tolist(), attention.shape[-1]
    return [
        f32(max(head[i][i] for head in heads) * max(f32(sum(head[query][i] for query in range(n))) for head in heads))
        for i in range(n)
    ]


def reference_step(
    graph: Matrix, rank: list[float], propagated: int, alpha: float, hops: int
) -> tuple[list[int], Matrix]:
    """Return kept patches by descending importance, and the weight of every patch in each of them."""
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
