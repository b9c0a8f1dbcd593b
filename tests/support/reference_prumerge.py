"""Reference implementation of PruMerge with plain loops, and tokens to test it on."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor

from torino import Reduction, VisualTokens

Row = tuple[dict[int, float], int, str]


def make_tokens(attention: Tensor, keys: Tensor, patches: Tensor | None = None, grid: tuple[int, int] | None = None):
    n = len(attention)
    patches = torch.arange(n * 2, dtype=torch.float32).view(n, 2) if patches is None else patches
    signals = {"cls_attention_joint@+1": attention, "keys@+1": keys}
    return VisualTokens(patches, grid or (1, n), signals=signals)


def random_tokens(n: int, seed: int, kind: str = "random", width: int = 8) -> VisualTokens:
    generator = torch.Generator().manual_seed(seed)
    attention = (2 * torch.randn(n + 1, generator=generator)).softmax(0)[1:]
    keys = torch.randn(n, width, generator=generator)
    if kind == "tied":  # all exact in float32: norms are 2, attention of few values
        keys = torch.randint(0, 2, (n, 4), generator=generator) * 2.0 - 1
        attention = 2.0 ** -torch.randint(2, 9, (n,), generator=generator)
    if kind == "same":
        keys, attention = torch.ones(n, 4), torch.full((n,), 1 / 1024)
    if kind == "silent":
        keys, attention = torch.zeros(n, 4), torch.zeros(n)
    return make_tokens(attention, keys, torch.randn(n, 5, generator=generator))


def reference_percentile(values: list[float], share: float) -> float:
    ordered, position = sorted(values), share * (len(values) - 1)
    low = math.floor(position)
    high = min(low + 1, len(values) - 1)
    return ordered[low] + (position - low) * (ordered[high] - ordered[low])


def reference_outliers(a: list[float]) -> int:
    q1, q3 = reference_percentile(a, 0.25), reference_percentile(a, 0.75)
    count = 0
    for value in a:
        if value > q3 + 1.5 * (q3 - q1):
            count += 1
    return count


def reference_cosine(first: list[float], second: list[float]) -> float:
    size = math.sqrt(math.fsum(v * v for v in first)) * math.sqrt(math.fsum(v * v for v in second))
    return math.fsum(v * w for v, w in zip(first, second, strict=True)) / size if size else 0.0


def reference_merge(
    a: list[float], keys: list[list[float]], centers: list[int], roles: list[str], count: int, extra: bool
) -> tuple[list[Row], list[int]]:
    """Return rows in native order, and the row each patch is assigned to (steps 4 to 6)."""
    rows: list[Row] = []
    best_center: list[tuple[float, int]] = [(-math.inf, -1)] * len(a)
    for token, i in enumerate(centers):
        others = [j for j in range(len(a)) if j != i]
        cosine = {j: reference_cosine(keys[i], keys[j]) for j in others}
        nearest = sorted(others, key=lambda j: (-cosine[j], j))[:count]
        weights = {i: 1.0}
        for j in nearest:
            weights[j] = a[j]
            if cosine[j] > best_center[j][0]:
                best_center[j] = (cosine[j], token)
        rows.append((weights, i, roles[token]))
    rest = [j for j in range(len(a)) if j not in centers]
    has_extra = extra and bool(rest)
    if has_extra:
        rows.append(({j: a[j] for j in rest}, -1, "extra"))
    assigned = [token if token >= 0 or not has_extra else len(centers) for _, token in best_center]
    for token, i in enumerate(centers):
        assigned[i] = token
    return rows, assigned


def in_output_order(rows: list[Row], assigned: list[int], order: str) -> tuple[list[Row], list[int]]:
    if order == "native":
        return rows, assigned
    row_order = sorted(range(len(rows)), key=lambda m: rows[m][1] if rows[m][1] >= 0 else math.inf)
    return [rows[m] for m in row_order], [row_order.index(m) if m >= 0 else -1 for m in assigned]


def reference_prumerge(
    tokens: VisualTokens, budget: int | None, extra: bool, count: int
) -> tuple[list[Row], list[int]]:
    a: list[float] = tokens.signals["cls_attention_joint@+1"].tolist()
    keys: list[list[float]] = tokens.signals["keys@+1"].tolist()
    k = reference_outliers(a) if budget is None else budget - 1 if extra else budget
    if budget is None and not extra:
        k = max(k, 1)
    centers = sorted(range(len(a)), key=lambda i: (-a[i], i))[:k]
    return reference_merge(a, keys, centers, ["primary"] * k, count, extra)


def plan_rows(plan: Reduction) -> list[Row]:
    sources, weights, anchor = plan.sources.tolist(), plan.weights.tolist(), plan.anchor.tolist()
    return [
        (dict(zip(sources[a:b], weights[a:b], strict=True)), anchor[m], plan.role[m])
        for m, (a, b) in enumerate(pairwise(plan.offsets.tolist()))
    ]


def with_prumerge_signals(images: list[VisualTokens]) -> list[VisualTokens]:
    return [
        image.with_(signals=random_tokens(len(image), seed).signals)  # the width of the keys differs from the patches
        for seed, image in enumerate(images)
    ]
