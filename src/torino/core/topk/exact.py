"""Exact top-k latents of every token, computed in chunks; the N × C matrix of activations is never stored.

The score of token i and latent j is *defined* as

    s(i, j) = float32( Σ_d x[i, d]·w[j, d] + b[j] ),  products and sum in float64, in a fixed order,

and the result is sorted by decreasing score, ties by increasing latent index. The definition does not depend on
chunk size, batch size or number of threads (on a CPU, for tokens narrower than 32,768), so the result does not
either: an image gets the same concepts alone and in a batch.

For speed, a matrix product, chunk by chunk into one small buffer, selects candidates: the latents whose score is not
clearly below the k-th best one, a few more than k per token. It is computed in float32, or in bfloat16 where the
processor multiplies that faster (:class:`HalfEncoder`). Only the candidates are scored by the definition. A bound on
the rounding error proves that no other latent can be in the result. The few tokens without such a proof (many identical
latents, overflow) are searched exhaustively.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torino.core.topk.half import HalfEncoder

ROWS = 1024  # tokens per tile; bounds the score buffer for any number of images
COLUMNS = 3072  # latents per chunk
DEPTH = 32  # latents per lane, of which only the maximum is compared at first
MAX_LANES = 4  # lanes with candidates, as a multiple of k + 4 per token, above which the exhaustive search is used
MAX_PASSES = 8  # up to this k, repeated maxima are faster than torch.topk
WORKSPACE = 1 << 18  # float64 elements in memory at once (2 MiB)
PAIR_WORKSPACE = 1 << 17  # the same for pairs, which are read three times and should fit into the CPU cache
SILENT = -1  # index of a slot without an active latent


@torch.no_grad()
def exact_topk(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    k: int,
    floor: Tensor,
    *,
    largest_norm: float | None = None,
    half: HalfEncoder | None = None,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the ``k`` active latents with the largest scores of each token.

    Parameters
    ----------
    x : Tensor of shape (N, D), float32
        Tokens, centered and normalized as the SAE requires.
    weight : Tensor of shape (C, D), float32
        Encoder rows, one per latent.
    bias : Tensor of shape (C,), float32
    k : int
        From 1 to C.
    floor : Tensor of shape () or (C,), float32
        A latent is active if its score is above its floor.
    largest_norm : float, optional
        The largest Euclidean norm of a row of ``weight``; computed if not given.
    half : HalfEncoder, optional
        The encoder in bfloat16, to select candidates with. Affects speed and memory, never the result.
    chunk : int, optional
        Latents per chunk. Affects speed and memory, never the result.

    Returns
    -------
    indices : Tensor of shape (N, k), int64
        Latents by decreasing score; ``-1`` in silent slots.
    values : Tensor of shape (N, k), float32
        The scores; 0 in silent slots.
    """
    indices = torch.full((len(x), k), SILENT, device=x.device)
    values = torch.zeros(len(x), k, device=x.device)
    norm = largest_row_norm(weight) if largest_norm is None else largest_norm
    for start in range(0, len(x), ROWS):
        rows = slice(start, start + ROWS)
        indices[rows], values[rows] = _search_tile(x[rows], weight, bias, k, floor, norm, half, chunk or COLUMNS)
    return indices, values


def largest_row_norm(weight: Tensor) -> float:
    """Return the largest Euclidean norm of a row, in float64, where squares neither overflow nor underflow."""
    rows = max(1, WORKSPACE // weight.shape[1])
    return max(float(part.double().norm(dim=1).max()) for part in weight.split(rows))


def stable_topk(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Compute ``torch.topk`` over the last dimension of float32 values, with ties to the lowest index.

    Value and index are combined into one integer, so no two entries are equal.

    Examples
    --------
    >>> stable_topk(torch.tensor([[1.0, 3.0, 3.0, 2.0]]), 2)
    (tensor([[1, 2]]), tensor([[3., 3.]]))
    """
    index = torch.arange(values.shape[-1], device=values.device)
    keys = (_sortable(values) << 32) | (0xFFFFFFFF - index)
    order = 0xFFFFFFFF - (keys.topk(k, dim=-1).values & 0xFFFFFFFF)
    return order, values.gather(-1, order)


def _sortable(values: Tensor) -> Tensor:
    """Return integers in the same order as the float32 ``values``; +0 and −0 are equal."""
    bits = (values + 0.0).contiguous().view(torch.int32).to(torch.int64)
    return torch.where(bits >= 0, bits, -(bits & 0x7FFFFFFF))


def _search_tile(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    k: int,
    floor: Tensor,
    norm: float,
    half: HalfEncoder | None,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    exact_slack = float32_error(x, bias, norm)
    product = _Product(x, weight, bias, exact_slack, 2.0**-22) if half is None else _half_product(x, half, exact_slack)
    slack = product.slack
    token, latent, bar = _find_candidates(product, k, floor, chunk)
    scores = pair_scores(x, weight, bias, token, latent)
    active = scores > _floor_of(floor, latent)
    indices, values = _rank(token[active], latent[active], scores[active], len(x), k)

    # A latent outside the candidates scores at most bar + slack. It cannot be in the result if that is below the
    # k-th score or below the floor, or if all latents are candidates.
    lowest = bar.double()
    limit = lowest + slack
    limit += product.unit * limit.abs()
    proven = (limit < values[:, -1].double()) | (lowest == -torch.inf)
    if floor.ndim == 0:
        proven |= limit <= floor.double()
    proven &= slack.isfinite()
    if not bool(proven.all()):
        finite = exact_slack.isfinite()
        for rows, wide in ((~proven & finite, False), (~proven & ~finite, True)):
            if bool(rows.any()):
                bound = exact_slack[rows]
                indices[rows], values[rows] = _search_all(x[rows], weight, bias, k, floor, bound, norm, wide)
    silent = values == -torch.inf
    return indices.masked_fill_(silent, SILENT), values.masked_fill_(silent, 0.0)


def float32_error(x: Tensor, bias: Tensor, norm: float) -> Tensor:
    """Return a bound on the error of float32 scores per token, for any order of summation.

    The bound is infinite where a partial sum may overflow.
    """
    unit = 2.0**-24
    terms = (x.shape[1] + 2) * unit
    gamma = terms / (1 - terms) + input_rounding(x)
    length = x.double().norm(dim=1)
    size = length * norm * (1 + 1e-6) + bias.abs().max().double()
    # processors that flush denormal numbers treat inputs and products below 2^-126 as zero
    slack = gamma * size + x.shape[1] * 2.0**-126 * (1 + length + norm)
    return slack.masked_fill(size >= 2.0**127, torch.inf)


ROUNDING = {
    "none": 0.0,
    "ieee": 0.0,
    "highest": 0.0,
    "tf32": 2.0**-9,
    "high": 2.0**-9,
    "bf16": 2.0**-6,
    "medium": 2.0**-6,
}


def input_rounding(x: Tensor) -> float:
    """Return by how much the backend may round the inputs of a float32 product, relative to their product.

    torch has an old and a new setting for this, and the old one raises an error after the new one was used. An unknown
    value counts as the lowest precision.
    """
    backend = torch.backends.cuda.matmul if x.is_cuda else getattr(torch.backends.mkldnn, "matmul", None)
    precisions = [str(getattr(settings, "fp32_precision", "none")) for settings in (backend, torch.backends)]
    try:
        precisions.append(torch.get_float32_matmul_precision())
        if x.is_cuda and torch.backends.cuda.matmul.allow_tf32:
            precisions.append("tf32")
    except RuntimeError:
        pass
    return max(ROUNDING.get(precision, 2.0**-6) for precision in precisions)


class _Product(NamedTuple):
    """Factors of the product that selects candidates, and the error of its scores."""

    x: Tensor
    weight: Tensor
    bias: Tensor
    slack: Tensor  # (N,) float64: absolute error
    unit: float  # relative error, at least that of rounding the definition to float32


def _half_product(x: Tensor, half: HalfEncoder, exact_slack: Tensor) -> _Product:
    """Round tokens to bfloat16. With x = x₁ + x' and w = w₁ + w', ⟨x, w⟩ = ⟨x₁, w₁⟩ + ⟨x', w⟩ + ⟨x₁, w'⟩."""
    rounded = x.bfloat16()
    exact = rounded.float()
    error, length = ((x - exact).double().norm(dim=1), exact.double().norm(dim=1))
    # products of rounded factors are exact in float32, and their sum has the error of a float32 product
    slack = 1.001 * (error * half.norm + length * half.error + half.bias_error + exact_slack)
    return _Product(rounded, half.weight, half.bias, slack, 2.0**-8)


def _find_candidates(product: _Product, k: int, floor: Tensor, chunk: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens and latents of the candidates, and the bar of each token; no other latent scores above the bar.

    The latents of a chunk are divided into lanes of up to ``DEPTH`` evenly spaced rows. The k-th largest of the lane
    maxima so far is at most the k-th best score. The bar is this value minus twice the rounding error, and never so low
    that only silent latents are above it. The maximum over each lane is one pass of vector instructions, and only lanes
    that reach the bar are looked at again.
    """
    x, weight, bias, slack, unit = product
    n, latents = len(x), len(weight)
    chunk = min(chunk, latents)
    buffer = x.new_empty(n * chunk)
    best = bias.new_full((k, n), -torch.inf, dtype=torch.float32)  # largest lane maxima, decreasing
    margin = slack.float() * 1.01
    lowest = floor - margin - 2.1 * unit * floor.abs() if floor.ndim == 0 else torch.full_like(margin, -torch.inf)
    excluded = ~slack.isfinite()  # tokens that are left to the exhaustive search
    collected: list[tuple[Tensor, Tensor, Tensor]] = []
    bar = lowest
    for start in range(0, latents, chunk):
        stop = min(start + chunk, latents)
        # with latents as rows the matrix product needs less workspace and is slightly faster
        scores = buffer[: n * (stop - start)].view(stop - start, n)
        torch.addmm(bias[start:stop, None], weight[start:stop], x.T, out=scores)
        if floor.ndim == 1:  # the bar cannot check a floor per latent
            scores.masked_fill_(scores + margin + unit * scores.abs() <= floor[start:stop, None], -torch.inf)
        depth = _lane_depth(stop - start, k)
        lanes = scores.view(depth, -1, n)
        maxima = (lanes.amax(0) if depth > 1 else lanes[0]).float()
        best = _largest(maxima if stop - start == latents else torch.cat([best, maxima]), k)
        bar = torch.maximum(best[-1] - 2 * margin - 2.1 * unit * best[-1].abs(), lowest)
        bar = bar.masked_fill_(excluded, torch.inf)
        hits = maxima >= bar
        lane, token = hits.nonzero(as_tuple=True)
        if len(token) > MAX_LANES * n * (k + 4):
            excluded |= hits.sum(0) > MAX_LANES * (k + 4)
            bar = bar.masked_fill_(excluded, torch.inf)
            lane, token = (maxima >= bar).nonzero(as_tuple=True)
        values = scores.view(depth, -1).index_select(1, lane * n + token).float()
        level, pair = (values >= bar[token]).nonzero(as_tuple=True)
        collected.append((token[pair], level * maxima.shape[0] + lane[pair] + start, values[level, pair]))
    token, latent, score = (torch.cat(part) for part in zip(*collected, strict=True))
    if len(collected) > 1:  # earlier chunks had a lower bar
        kept = (score >= bar[token]).nonzero()[:, 0]
        token, latent = token[kept], latent[kept]
    return token, latent, bar


def _lane_depth(height: int, k: int) -> int:
    """Return how many latents share a lane: at most ``DEPTH``, with at least 4 k lanes unless a lane is one latent."""
    depth = DEPTH
    while depth > 1 and (height % depth or height // depth < 4 * k):
        depth //= 2
    return depth


def _largest(values: Tensor, k: int) -> Tensor:
    """Return the ``k`` largest values of each column, decreasing, shape (k, N); for small k, ties count once."""
    if k > MAX_PASSES:
        values = torch.nn.functional.pad(values, (0, 0, 0, max(0, k - len(values))), value=-torch.inf)
        return values.topk(k, dim=0).values
    rows = [values.amax(0)]
    while len(rows) < k:
        values = values.masked_fill(values >= rows[-1], -torch.inf)
        rows.append(values.amax(0))
    return torch.stack(rows)


def pair_scores(x: Tensor, weight: Tensor, bias: Tensor, token: Tensor, latent: Tensor) -> Tensor:
    """Return scores of pairs (token, latent) by the definition: float64 sums in an order that depends only on D."""
    scores, width = x.new_empty(len(token), dtype=torch.float64), x.shape[1]
    step = max(1, PAIR_WORKSPACE // max(1, width))
    rows = min(step, len(token))
    product, factor = (x.new_empty(rows, width, dtype=torch.float64) for _ in range(2))
    x64 = x.double() if len(token) > len(x) and x.numel() <= 4 * WORKSPACE else None
    for start in range(0, len(token), step):
        t, j = token[start : start + step], latent[start : start + step]
        terms, other = product[: len(t)], factor[: len(t)]
        terms.copy_(weight.index_select(0, j))
        if x64 is None:
            other.copy_(x.index_select(0, t))
        else:
            torch.index_select(x64, 0, t, out=other)
        torch.sum(terms.mul_(other), 1, out=scores[start : start + step])
    return (scores + bias[latent]).float()


def _rank(token: Tensor, latent: Tensor, scores: Tensor, n: int, k: int) -> tuple[Tensor, Tensor]:
    """Return the ``k`` best of the scored pairs of each token, shape (n, k); −1 and −inf in slots without a pair."""
    token, latent, scores, rank = _sort_pairs(token, latent, scores, n)
    kept = (rank < k).nonzero()[:, 0]
    place = token[kept] * k + rank[kept]
    indices = torch.full((n * k,), SILENT, device=token.device).index_copy_(0, place, latent[kept])
    values = scores.new_full((n * k,), -torch.inf).index_copy_(0, place, scores[kept])
    return indices.view(n, k), values.view(n, k)


def _sort_pairs(token: Tensor, latent: Tensor, scores: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sort pairs by token, then by decreasing score, then by increasing latent; return them and their rank."""
    order = ((_sortable(scores) << 32) | (0xFFFFFFFF - latent.clamp(min=0))).argsort(descending=True)
    order = order[token[order].argsort(stable=True)]  # the primary key is sorted last
    token, latent, scores = token[order], latent[order], scores[order]
    first = torch.searchsorted(token, torch.arange(n, device=token.device))
    return token, latent, scores, torch.arange(len(token), device=token.device) - first[token]


def _search_all(
    x: Tensor, weight: Tensor, bias: Tensor, k: int, floor: Tensor, slack: Tensor, norm: float, wide: bool
) -> tuple[Tensor, Tensor]:
    """Search all latents exhaustively, for tokens without a proof: slow, with the same definition of scores.

    Another matrix product discards latents that are clearly below the k-th best so far; all others are scored by the
    definition. ``wide`` computes this product in float64, for tokens that overflow float32.
    """
    n = len(x)
    dtype = torch.float64 if wide else torch.float32
    if wide:
        slack = (x.shape[1] + 2) * 2.0**-52 * (x.double().norm(dim=1) * norm + bias.abs().max().double())
    indices = torch.full((n, k), SILENT, device=x.device)
    values = x.new_full((n, k), -torch.inf)
    step = max(1, min(COLUMNS, WORKSPACE // max(n, x.shape[1])))
    for start in range(0, len(weight), step):
        stop = min(start + step, len(weight))
        rough = torch.addmm(bias[start:stop].to(dtype), x.to(dtype), weight[start:stop].to(dtype).T).double()
        rough += slack[:, None] + 2.0**-22 * rough.abs()  # now an upper bound of the score
        lowest = floor.double() if floor.ndim == 0 else floor[start:stop].double()
        possible = (rough >= values[:, -1:].double()) & (rough > lowest)
        token, column = possible.nonzero(as_tuple=True)
        if not len(token):
            continue
        latent = column + start
        scores = pair_scores(x, weight, bias, token, latent)
        keep = scores > _floor_of(floor, latent)
        indices, values = merge(indices, values, token[keep], latent[keep], scores[keep])
    return indices, values


def merge(indices: Tensor, values: Tensor, token: Tensor, latent: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    """Merge scored pairs into the sorted lists (N, k) of their tokens."""
    n, k = indices.shape
    listed = torch.arange(n, device=token.device).repeat_interleave(k)
    token = torch.cat([listed, token])
    latent = torch.cat([indices.reshape(-1), latent])
    scores = torch.cat([values.reshape(-1), scores])
    token, latent, scores, rank = _sort_pairs(token, latent, scores, n)
    kept = rank < k
    return latent[kept].view(n, k), scores[kept].view(n, k)


def _floor_of(floor: Tensor, latents: Tensor) -> Tensor:
    return floor if floor.ndim == 0 else floor[latents]
