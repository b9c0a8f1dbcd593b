"""Reference implementation of HiRED with plain loops."""

from __future__ import annotations

from fractions import Fraction

from torch import Tensor


def reference_top_attention(attention: Tensor, budget: int) -> list[int]:
    """Return the patches of highest summed attention, in descending order."""
    heads = attention.double().tolist()
    summed = [sum(head[i] for head in heads) for i in range(len(heads[0]))]
    kept: list[int] = []
    while len(kept) < budget:
        best = -1
        for i in range(len(summed)):
            if i not in kept and (best < 0 or summed[i] > summed[best]):
                best = i
        kept.append(best)
    return kept


def reference_shares(
    attention: Tensor, grid: tuple[int, int], tiles: tuple[int, int], budget: int, alpha: float, fidelity: str
) -> tuple[list[int], list[int]]:
    """Return the content of each tile and the released shares; all views have the same number of patches."""
    (rows, columns), (down, across) = grid, tiles
    n = rows * columns
    content = sorted(reference_top_attention(attention.reshape(-1, n), int(n * (1 - alpha))))
    count = [[0] * across for _ in range(down)]
    for patch in content:
        if fidelity == "released":  # index of a flat position in an array of shape (down, across, rest)
            rest = n // (down * across)
            count[patch // (across * rest)][patch // rest % across] += 1
        else:
            row, column = divmod(patch, columns)
            high, left = Fraction(2 * row + 1, 2 * rows), Fraction(2 * column + 1, 2 * columns)
            count[int(high * down)][int(left * across)] += 1
    per_tile = [value for row in count for value in row]
    full = min(int(budget * alpha), n)
    rest_of_budget = min(budget - full, len(per_tile) * n)
    weights = per_tile if sum(per_tile) else [1] * len(per_tile)
    return per_tile, [full, *[min(int(Fraction(w, sum(weights)) * rest_of_budget), n) for w in weights]]
