"""Reference implementation of CDPruner with plain loops."""

from __future__ import annotations

import math

Rows = list[list[float]]


def cosine(a: list[float], b: list[float]) -> float:
    lengths = math.sqrt(sum(x * x for x in a)) * math.sqrt(sum(x * x for x in b))
    return sum(x * y for x, y in zip(a, b, strict=True)) / lengths if lengths else 0.0


def reference_relevance(joint: Rows, text: Rows, negate: bool = True, theta: float | None = None) -> list[float]:
    """Return the published relevance: negated mean cosine with the text, min-max scaling, optionally exp."""
    r = [sum(cosine(patch, word) for word in text) / len(text) for patch in joint]
    r = [-value for value in r] if negate else r
    low, high = min(r), max(r)
    r = [(value - low + 1e-6) / (high - low) if high - low > 1e-6 else 1.0 for value in r]
    return r if theta is None else [math.exp(theta / (2 * (1 - theta)) * value) for value in r]


def reference_gains(features: Rows, r: list[float], chosen: list[int]) -> list[float]:
    """Return det K of the chosen and each other patch divided by det K of the chosen, by Gaussian elimination."""
    n = len(features)
    kernel = [[r[i] * cosine(features[i], features[j]) * r[j] for j in range(n)] for i in range(n)]
    for pivot in chosen:
        top = kernel[pivot][pivot]
        row = list(kernel[pivot])
        for i in range(n):
            factor = kernel[i][pivot] / top
            for j in range(n):
                kernel[i][j] -= factor * row[j]
    return [0.0 if i in chosen else kernel[i][i] for i in range(n)]
