"""Algorithms 1 and 2 of the paper, line by line, in slow plain Python: no tensors, no tricks.

``z`` is a list of rows of floats, already encoded (line 2 of Algorithm 1). What the paper leaves open is settled
as follows: arg-top-k and arg-max ties go to the lowest index, argtop_B ties to the group that appears first, the
logarithm is the natural one. A reduction is a list of ``(weights, anchor, role)`` with ``weights`` a dict of patch
to weight, in *native* order: groups by first appearance, then padding by rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import log, sqrt

Row = tuple[dict[int, float], int, str]
SCALES = {"log": lambda n: (1 + log(n)) / n, "mean": lambda n: 1 / n, "sqrt": lambda n: 1 / sqrt(n), "sum": lambda n: 1}


# ---------------------------------------------------------------------- Algorithm 1


def dynamic(
    z: Sequence[Sequence[float]], k: int, delta: int, mode: str, silent: str = "group", scale: str = "log"
) -> list[Row]:
    """Algorithm 1."""
    a = peaks(z)  # lines 1-4
    groups = grouped(z, k, delta, silent)  # lines 5-8
    return [primary(group, a, mode, scale) for group in groups]  # lines 9-15


def peaks(z: Sequence[Sequence[float]]) -> list[float]:
    """a(i) = max_j z_ij."""
    return [max(row) for row in z]


def arg_top(values: Sequence[float], k: int) -> list[int]:
    """The places of the k largest values, ties to the lowest."""
    return sorted(range(len(values)), key=lambda place: (-values[place], place))[:k]


def concept_sets(z: Sequence[Sequence[float]], k: int, silent: str) -> list[list[int]]:
    """A_i; outside the literal rule a latent that is not active is no concept."""
    sets = [arg_top(row, k) for row in z]
    if silent == "literal":
        return sets
    return [[j for j in concepts if row[j] > 0] for concepts, row in zip(sets, z, strict=True)]


def linked(one: Sequence[int], two: Sequence[int], k: int, delta: int, silent: str) -> bool:
    """Whether two patches share an edge: Eq. 8, and the rule for slots that no active latent fills."""
    shared = len(set(one) & set(two))
    if silent == "literal":
        return shared >= delta
    if not one and not two:  # neither has any concept
        return silent == "group"
    both_silent = min(k - len(one), k - len(two))
    return shared >= 1 and shared + both_silent >= delta


def grouped(z: Sequence[Sequence[float]], k: int, delta: int, silent: str) -> list[list[int]]:
    """Lines 5-8: the connected components of the token graph by union-find, in order of appearance."""
    sets = concept_sets(z, k, silent)
    parent = list(range(len(z)))

    def root(i: int) -> int:
        while parent[i] != i:
            i = parent[i]
        return i

    for i in range(len(z)):
        for j in range(i + 1, len(z)):
            if linked(sets[i], sets[j], k, delta, silent):
                parent[root(j)] = root(i)
    groups: dict[int, list[int]] = {}
    for i in range(len(z)):
        groups.setdefault(root(i), []).append(i)
    return list(groups.values())


def primary(group: Sequence[int], a: Sequence[float], mode: str, scale: str = "log") -> Row:
    """The token of one group: Eq. 9 (P) or Eq. 10 (M), in the place of the patch with the highest peak."""
    best = group[0]
    for i in group:
        if a[i] > a[best]:
            best = i
    if mode == "M":
        factor = SCALES[scale](len(group))
        return dict.fromkeys(group, factor), best, "primary"
    return {best: 1.0}, best, "primary"


# ---------------------------------------------------------------------- Algorithm 2


def fixed(
    z: Sequence[Sequence[float]],
    k: int,
    delta: int,
    mode: str,
    budget: int,
    silent: str = "group",
    scale: str = "log",
) -> list[Row]:
    """Algorithm 2. Fewer than ``budget`` rows come back where the pool runs dry."""
    a = peaks(z)  # lines 1-3
    groups = grouped(z, k, delta, silent)  # lines 4-7
    kept = list(range(len(groups)))  # lines 8-12
    if len(groups) > budget:
        kept = arg_top([len(group) for group in groups], budget)
    kept.sort()  # a set in the paper: native order is that of appearance
    tokens = [primary(groups[g], a, mode, scale) for g in kept]  # lines 13-19
    if len(kept) < budget:  # lines 20-26
        pool = sorted(i for g in kept for i in groups[g])
        if mode == "P":
            taken = {anchor for _, anchor, _ in tokens}
            pool = [i for i in pool if i not in taken]
        pool.sort(key=lambda i: (-a[i], i))
        tokens += [({i: 1.0}, i, "padding") for i in pool[: budget - len(kept)]]
    return tokens


def raster(tokens: Sequence[Row]) -> list[Row]:
    """The same tokens by place; of two in one place the primary token comes first."""
    return sorted(tokens, key=lambda token: (token[1], token[2] == "padding"))


# ---------------------------------------------------------------------- grouping once more, and the labels


def pairwise_labels(indices: Sequence[Sequence[int]], delta: int, silent: str) -> list[int]:
    """Labels by first appearance, from top-k rows with -1 in silent slots: all k² N² comparisons, then a flood."""
    n, k = len(indices), len(indices[0])
    rows = [fill(row) for row in indices] if silent == "literal" else [list(row) for row in indices]
    edge = [[False] * n for _ in range(n)]
    for i in range(n):
        for j in range(n):
            same = 0
            for p in range(k):
                for q in range(k):
                    same += rows[i][p] == rows[j][q] != -1
            mute = [sum(c == -1 for c in rows[i]), sum(c == -1 for c in rows[j])]
            edge[i][j] = (same > 0 and same + min(mute) >= delta) or (silent == "group" and mute == [k, k])
    label = [-1] * n
    count = 0
    for i in range(n):
        if label[i] < 0:
            front = [i]
            while front:
                here = front.pop()
                label[here] = count
                front += [j for j in range(n) if edge[here][j] and label[j] < 0]
            count += 1
    return label


def fill(row: Sequence[int]) -> list[int]:
    """Silent slots take the lowest latents that the row does not have: arg-top-k over zeros."""
    unused = (j for j in range(2 * len(row)) if j not in row)
    return [next(unused) if c == -1 else c for c in row]


def shared_concept(group: Sequence[int], indices: Sequence[Sequence[int]], values: Sequence[Sequence[float]]) -> int:
    """The latent most members have; ties to the larger summed activation, then to the lowest latent; else -1."""
    count: Counter[int] = Counter()
    weight: Counter[int] = Counter()
    for i in group:
        for latent, value in zip(indices[i], values[i], strict=True):
            if latent != -1:
                count[latent] += 1
                weight[latent] += value
    return min(count, key=lambda latent: (-count[latent], -weight[latent], latent), default=-1)


def top_k(z: Sequence[Sequence[float]], k: int) -> tuple[list[list[int]], list[list[float]], list[float]]:
    """What a concept encoder returns for dense ``z``: indices (-1 where silent), values, peaks."""
    sets = concept_sets(z, k, "group")
    indices = [concepts + [-1] * (k - len(concepts)) for concepts in sets]
    values = [[row[j] for j in concepts] + [0.0] * (k - len(concepts)) for concepts, row in zip(sets, z, strict=True)]
    return indices, values, peaks(z)
