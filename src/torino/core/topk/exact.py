"""Exact top-k latents of every token, computed in chunks; the N × C matrix of activations is never stored.

The score of token i and latent j is *defined* as

    s(i, j) = float32( Σ_d x[i, d]·w[j, d] + b[j] ),  products and sum in float64, in a fixed order,

and the result is sorted by decreasing score, ties by increasing latent index. The definition does not depend on
chunk size, batch size or number of threads (on a CPU, for tokens narrower than 32,768), so the result does not
either: an image gets the same concepts alone and in a batch.

For speed, a float32 matrix product, chunk by chunk into one small buffer, selects a few candidates per token. Only
these are scored by the definition. A bound on the rounding error proves that no other latent can be in the result.
The few tokens without such a proof (near-ties, many identical latents) are searched exhaustively.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROWS = 1024  # tokens per tile; bounds the score buffer for any number of images
COLUMNS = 3072  # latents per chunk
DEPTH = 32  # latents per lane, of which only the maximum is compared at first
SPARE = 4  # candidates beyond k; with this many the proof rarely fails
WORKSPACE = 1 << 18  # float64 elements in memory at once (2 MiB)
PAIR_WORKSPACE = 1 << 16  # the same for pairs, which are read three times and should fit into the CPU cache
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
        indices[rows], values[rows] = _search_tile(x[rows], weight, bias, k, floor, norm, chunk or COLUMNS)
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
    x: Tensor, weight: Tensor, bias: Tensor, k: int, floor: Tensor, norm: float, chunk: int
) -> tuple[Tensor, Tensor]:
    slack = _float32_error(x, bias, norm)
    candidates, rough = _find_candidates(x, weight, bias, min(k + SPARE, len(weight)), floor, slack, chunk)
    # with a floor per latent a candidate with a large score may be silent, so all candidates are scored
    last = k if floor.ndim == 0 else candidates.shape[1]
    scores = _candidate_scores(x, weight, bias, candidates, rough, last, slack)
    scores = scores.masked_fill(scores <= _floor_of(floor, candidates), -torch.inf)
    indices, values = _keep_best(candidates, scores, k)

    # A latent outside the candidates scores at most lowest + slack. It cannot be in the result if that is below the
    # k-th score or below the floor, or if all latents are candidates.
    lowest = rough[:, -1].double()
    limit = lowest + slack
    limit += 2.0**-22 * limit.abs()
    proven = (limit < values[:, -1].double()) | (lowest == -torch.inf)
    if floor.ndim == 0:
        proven |= limit <= floor.double()
    if candidates.shape[1] == len(weight):
        proven.fill_(True)
    proven &= slack.isfinite()
    if not bool(proven.all()):
        for rows, wide in ((~proven & slack.isfinite(), False), (~proven & ~slack.isfinite(), True)):
            if bool(rows.any()):
                indices[rows], values[rows] = _search_all(x[rows], weight, bias, k, floor, slack[rows], norm, wide)
    return indices.masked_fill(values == -torch.inf, SILENT), values.masked_fill(values == -torch.inf, 0.0)


def _float32_error(x: Tensor, bias: Tensor, norm: float) -> Tensor:
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


def _find_candidates(
    x: Tensor, weight: Tensor, bias: Tensor, m: int, floor: Tensor, slack: Tensor, chunk: int
) -> tuple[Tensor, Tensor]:
    """Return ``m`` candidates per token and their float32 scores, decreasing; no other latent scores higher.

    Only scores above a bar, the m-th best so far, are collected. The bar is raised after 1, 2, 4, 8, … chunks: on
    average m entries per token are collected between two updates.
    """
    n, latents = len(x), len(weight)
    chunk = min(chunk, latents)
    buffer = x.new_empty(n * chunk)
    candidates = torch.full((n, m), SILENT, device=x.device)
    rough = x.new_full((n, m), -torch.inf)
    collected: list[tuple[Tensor, Tensor, Tensor]] = []
    for step, start in enumerate(range(0, latents, chunk), start=1):
        stop = min(start + chunk, latents)
        # with latents as rows the matrix product needs less workspace and is slightly faster
        scores = buffer[: n * (stop - start)].view(stop - start, n)
        torch.addmm(bias[start:stop, None], weight[start:stop], x.T, out=scores)
        if floor.ndim == 1:  # the bar cannot check a floor per latent
            scores.masked_fill_(scores + slack.float() * 1.01 <= floor[start:stop, None], -torch.inf)
        token, latent, score = _scores_above(scores, m, rough[:, -1] if start else None)
        collected.append((token, latent + start, score))
        if step & (step - 1) == 0 or stop == latents or len(token) > n * m:
            candidates, rough = merge(candidates, rough, *[torch.cat(part) for part in zip(*collected, strict=True)])
            collected.clear()
    return candidates, rough


def _scores_above(scores: Tensor, m: int, bar: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, latents and values of the scores above the ``bar`` of their token, at least the ``m`` largest.

    The latents are divided into lanes of ``DEPTH`` evenly spaced rows. The maximum over each lane is one pass of vector
    instructions, and after the first chunks few lanes pass the bar. If there is no bar yet, or too many lanes pass it,
    the m largest scores of each token are returned instead.
    """
    height, n = scores.shape
    if bar is not None and height % DEPTH == 0:
        lanes = scores.view(DEPTH, height // DEPTH, n)
        # "not below" instead of "above" keeps NaN, which the exhaustive search handles
        lane, token = (~(lanes.amax(0) <= bar)).nonzero(as_tuple=True)
        if len(token) <= 4 * n * m:
            values = lanes[:, lane, token]
            depth, pair = (~(values <= bar[token])).nonzero(as_tuple=True)
            return token[pair], depth * lanes.shape[1] + lane[pair], values[depth, pair]
    values, latents = _largest_scores(scores, min(m, height))
    return torch.arange(n, device=scores.device).repeat(len(values)), latents.reshape(-1), values.reshape(-1)


def _largest_scores(scores: Tensor, m: int) -> tuple[Tensor, Tensor]:
    """Return the ``m`` largest scores of each token and their latents, from the m lanes with the largest maxima."""
    height, n = scores.shape
    if height % DEPTH or height // DEPTH <= m:
        values, latents = scores.topk(m, dim=0, sorted=False)
        return values, latents
    lanes = scores.view(DEPTH, height // DEPTH, n)
    lane = lanes.amax(0).topk(m, dim=0, sorted=False).indices
    depth = torch.arange(DEPTH, device=scores.device)
    latents = (depth[:, None, None] * lanes.shape[1] + lane).flatten(0, 1)
    values, order = scores.gather(0, latents).topk(m, dim=0, sorted=False)
    return values, latents.gather(0, order)


def _candidate_scores(
    x: Tensor, weight: Tensor, bias: Tensor, candidates: Tensor, rough: Tensor, last: int, slack: Tensor
) -> Tensor:
    """Return scores by the definition, shape (N, m); −inf for candidates that cannot be among the ``last`` best."""
    limit = rough[:, last - 1].double() - 2 * slack
    possible = ~(rough.double() < (limit - 2.0**-22 * limit.abs())[:, None]) & (candidates != SILENT)
    token, slot = possible.nonzero(as_tuple=True)
    scores = torch.full_like(rough, -torch.inf)
    scores[token, slot] = pair_scores(x, weight, bias, token, candidates[token, slot])
    return scores


def pair_scores(x: Tensor, weight: Tensor, bias: Tensor, token: Tensor, latent: Tensor) -> Tensor:
    """Return scores of pairs (token, latent) by the definition: float64 sums in an order that depends only on D."""
    scores = x.new_empty(len(token), dtype=torch.float64)
    step = max(1, PAIR_WORKSPACE // max(1, x.shape[1]))
    product, factor = (x.new_empty(min(step, len(token)), x.shape[1], dtype=torch.float64) for _ in range(2))
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


def _keep_best(latents: Tensor, scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Sort candidates by decreasing score, ties by increasing latent, and keep ``k``."""
    latents, by_latent = latents.sort(dim=1)
    order, values = stable_topk(scores.gather(1, by_latent), k)
    return latents.gather(1, order), values


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
    # sort by token, then by decreasing score, then by increasing latent; the primary key is sorted last
    order = ((_sortable(scores) << 32) | (0xFFFFFFFF - latent.clamp(min=0))).argsort(descending=True)
    order = order[token[order].argsort(stable=True)]
    token, latent, scores = token[order], latent[order], scores[order]
    first = torch.searchsorted(token, torch.arange(n, device=token.device))
    rank = torch.arange(len(token), device=token.device) - first[token]
    kept = rank < k
    return latent[kept].view(n, k), scores[kept].view(n, k)


def _floor_of(floor: Tensor, latents: Tensor) -> Tensor:
    return floor if floor.ndim == 0 else floor[latents]
