"""The k exact_topk latents of every token, exactly, without ever holding the N × C matrix of activations.

The score of token i and latent j is *defined* as

    s(i, j) = float32( Σ_d x[i, d]·w[j, d] + b[j] ),  products and sum in float64, in a fixed order,

and the answer is ordered by falling score, ties by rising latent index. That definition knows nothing of
chunk sizes, batch sizes or threads (on a CPU, for tokens narrower than 32,768), so neither does the answer: an
image gets the same concepts alone and in a batch. Speed comes from a screen in front of it. A float32 matrix
product, chunk by chunk into one small buffer, finds a few candidates a token; only these are scored as above; and a
rounding-error bound proves that no latent outside the candidates can belong to the answer. The rare token without
such a proof (near-ties, many identical latents) is searched exhaustively.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROWS = 1024  # tokens a tile; keeps the score buffer small however many images are packed
COLUMNS = 3072  # latents a chunk
DEPTH = 32  # latents that share a lane in the first, cheap maximum
SPARE = 4  # candidates beyond k: with gaps between this many scores the proof hardly ever fails
WORKSPACE = 1 << 18  # float64 elements that may be held at once (2 MiB)
PAIRS = 1 << 16  # and of pairs, which are gone over three times and so should stay in the cache
SILENT = -1  # the index of a slot that holds no active latent


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
    """Return the ``k`` exact_topk active latents of each token.

    Parameters
    ----------
    x : Tensor of shape (N, D), float32
        Tokens, already centred and normalised as the SAE wants them.
    weight : Tensor of shape (C, D), float32
        Encoder rows, one per latent.
    bias : Tensor of shape (C,), float32
    k : int
        From 1 to C.
    floor : Tensor of shape () or (C,), float32
        A latent is active when its score is above its floor.
    largest_norm : float, optional
        The largest Euclidean norm of a row of ``weight``; computed when it is not given.
    chunk : int, optional
        Latents scored at a time. Changes speed and memory, never the answer.

    Returns
    -------
    indices : Tensor of shape (N, k), int64
        By falling score; ``-1`` in slots that no active latent fills.
    values : Tensor of shape (N, k), float32
        The scores; 0 in silent slots.
    """
    indices = torch.full((len(x), k), SILENT, device=x.device)
    values = torch.zeros(len(x), k, device=x.device)
    norm = largest_row_norm(weight) if largest_norm is None else largest_norm
    for start in range(0, len(x), ROWS):
        rows = slice(start, start + ROWS)
        indices[rows], values[rows] = _tile(x[rows], weight, bias, k, floor, norm, chunk or COLUMNS)
    return indices, values


def largest_row_norm(weight: Tensor) -> float:
    """The largest Euclidean norm of a row, in float64: squares of tiny or huge weights leave float32."""
    rows = max(1, WORKSPACE // weight.shape[1])
    return max(float(part.double().norm(dim=1).max()) for part in weight.split(rows))


def stable_topk(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """``torch.topk`` over the last dimension of float32 values, with ties settled for the lowest index.

    Each value and its index are folded into one integer, so no two entries are ever equal.

    Examples
    --------
    >>> stable_topk(torch.tensor([[1.0, 3.0, 3.0, 2.0]]), 2)
    (tensor([[1, 2]]), tensor([[3., 3.]]))
    """
    place = torch.arange(values.shape[-1], device=values.device)
    keys = (_ordered(values) << 32) | (0xFFFFFFFF - place)
    order = 0xFFFFFFFF - (keys.topk(k, dim=-1).values & 0xFFFFFFFF)
    return order, values.gather(-1, order)


def _ordered(values: Tensor) -> Tensor:
    """Integers in the same order as the float32 ``values`` (+0 and −0 alike)."""
    bits = (values + 0.0).contiguous().view(torch.int32).to(torch.int64)
    return torch.where(bits >= 0, bits, -(bits & 0x7FFFFFFF))


def _tile(
    x: Tensor, weight: Tensor, bias: Tensor, k: int, floor: Tensor, norm: float, chunk: int
) -> tuple[Tensor, Tensor]:
    slack = _screen_error(x, bias, norm)
    candidates, rough = _screen(x, weight, bias, min(k + SPARE, len(weight)), floor, slack, chunk)
    # with a floor per latent a strong candidate may be silent, so none can be left out for being weaker
    last = k if floor.ndim == 0 else candidates.shape[1]
    scores = _candidate_scores(x, weight, bias, candidates, rough, last, slack)
    scores = scores.masked_fill(scores <= _of(floor, candidates), -torch.inf)
    indices, values = _best(candidates, scores, k)

    # A latent outside the candidates scores at most edge + slack. It cannot matter if that is below the
    # k-th score found, or below the floor, or if no latent was left outside at all.
    edge = rough[:, -1].double()
    reach = edge + slack
    reach += 2.0**-22 * reach.abs()
    proven = (reach < values[:, -1].double()) | (edge == -torch.inf)
    if floor.ndim == 0:
        proven |= reach <= floor.double()
    if candidates.shape[1] == len(weight):
        proven.fill_(True)
    proven &= slack.isfinite()
    if not bool(proven.all()):
        for rows, wide in ((~proven & slack.isfinite(), False), (~proven & ~slack.isfinite(), True)):
            if bool(rows.any()):
                indices[rows], values[rows] = _search(x[rows], weight, bias, k, floor, slack[rows], norm, wide)
    return indices.masked_fill(values == -torch.inf, SILENT), values.masked_fill(values == -torch.inf, 0.0)


def _screen_error(x: Tensor, bias: Tensor, norm: float) -> Tensor:
    """How far a float32 product may lie from the true score, per token, whatever the order of summation.

    Infinite where a partial sum might leave float32.
    """
    unit = 2.0**-24
    terms = (x.shape[1] + 2) * unit
    gamma = terms / (1 - terms) + input_rounding(x)
    length = x.double().norm(dim=1)
    size = length * norm * (1 + 1e-6) + bias.abs().max().double()
    # where the processor flushes denormal numbers, inputs and products below 2^-126 count as nothing
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
    """By how much the backend may round the inputs of a float32 product, relative to their product.

    torch has an old and a new way to allow it, and the old one raises an error where the new one was used; an answer
    that is not known here counts as the loosest.
    """
    backend = torch.backends.cuda.matmul if x.is_cuda else getattr(torch.backends.mkldnn, "matmul", None)
    told = [str(getattr(place, "fp32_precision", "none")) for place in (backend, torch.backends)]
    try:
        told.append(torch.get_float32_matmul_precision())
        if x.is_cuda and torch.backends.cuda.matmul.allow_tf32:
            told.append("tf32")
    except RuntimeError:
        pass
    return max(ROUNDING.get(word, 2.0**-6) for word in told)


def _screen(
    x: Tensor, weight: Tensor, bias: Tensor, m: int, floor: Tensor, slack: Tensor, chunk: int
) -> tuple[Tensor, Tensor]:
    """Find ``m`` candidates a token and their float32 scores, falling; no latent outside them scores higher.

    Only scores above the bar, the m-th best so far, are looked at. They gather in a pool, and the bar is raised
    after 1, 2, 4, 8 … chunks: on average m entries a token join the pool between two of these.
    """
    n, latents = len(x), len(weight)
    chunk = min(chunk, latents)
    buffer = x.new_empty(n * chunk)
    found = torch.full((n, m), SILENT, device=x.device)
    rough = x.new_full((n, m), -torch.inf)
    pool: list[tuple[Tensor, Tensor, Tensor]] = []
    for turn, start in enumerate(range(0, latents, chunk), start=1):
        stop = min(start + chunk, latents)
        # latents down, tokens across: the math library then needs a small workspace, and is a little faster
        scores = buffer[: n * (stop - start)].view(stop - start, n)
        torch.addmm(bias[start:stop, None], weight[start:stop], x.T, out=scores)
        if floor.ndim == 1:  # a floor per latent cannot be checked on the bar alone, so silence it here
            scores.masked_fill_(scores + slack.float() * 1.01 <= floor[start:stop, None], -torch.inf)
        token, latent, score = _above(scores, m, rough[:, -1] if start else None)
        pool.append((token, latent + start, score))
        if turn & (turn - 1) == 0 or stop == latents or len(token) > n * m:
            found, rough = merge(found, rough, *[torch.cat(part) for part in zip(*pool, strict=True)])
            pool.clear()
    return found, rough


def _above(scores: Tensor, m: int, bar: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """The scores above the ``bar`` of their token, of which at least the ``m`` largest: tokens, latents, scores.

    The latents are cut into lanes, each of ``DEPTH`` rows that lie evenly apart: a maximum over lanes is one pass
    of vector instructions, and after the first chunks hardly any lane passes the bar. Where there is no bar yet, or
    too many pass it, the m largest of each token are taken instead.
    """
    height, n = scores.shape
    if bar is not None and height % DEPTH == 0:
        lanes = scores.view(DEPTH, height // DEPTH, n)
        # "not below" instead of "above" lets NaN through, for the exhaustive search to settle
        lane, token = (~(lanes.amax(0) <= bar)).nonzero(as_tuple=True)
        if len(token) <= 4 * n * m:
            values = lanes[:, lane, token]
            depth, pair = (~(values <= bar[token])).nonzero(as_tuple=True)
            return token[pair], depth * lanes.shape[1] + lane[pair], values[depth, pair]
    values, latents = _leaders(scores, min(m, height))
    return torch.arange(n, device=scores.device).repeat(len(values)), latents.reshape(-1), values.reshape(-1)


def _leaders(scores: Tensor, m: int) -> tuple[Tensor, Tensor]:
    """The ``m`` largest scores of each token and their latents: they lie in the m lanes with the largest maxima."""
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
    """The defining scores of the candidates, shape (N, m); −inf for those that cannot be among the ``last`` best."""
    least = rough[:, last - 1].double() - 2 * slack
    open_ = ~(rough.double() < (least - 2.0**-22 * least.abs())[:, None]) & (candidates != SILENT)
    token, slot = open_.nonzero(as_tuple=True)
    scores = torch.full_like(rough, -torch.inf)
    scores[token, slot] = pair_scores(x, weight, bias, token, candidates[token, slot])
    return scores


def pair_scores(x: Tensor, weight: Tensor, bias: Tensor, token: Tensor, latent: Tensor) -> Tensor:
    """The defining scores of pairs (token, latent): a float64 sum in an order that depends on D alone."""
    scores = x.new_empty(len(token), dtype=torch.float64)
    step = max(1, PAIRS // max(1, x.shape[1]))
    product, factor = (x.new_empty(min(step, len(token)), x.shape[1], dtype=torch.float64) for _ in range(2))
    wide = x.double() if len(token) > len(x) and x.numel() <= 4 * WORKSPACE else None
    for start in range(0, len(token), step):
        t, j = token[start : start + step], latent[start : start + step]
        terms, other = product[: len(t)], factor[: len(t)]
        terms.copy_(weight.index_select(0, j))
        if wide is None:
            other.copy_(x.index_select(0, t))
        else:
            torch.index_select(wide, 0, t, out=other)
        torch.sum(terms.mul_(other), 1, out=scores[start : start + step])
    return (scores + bias[latent]).float()


def _best(columns: Tensor, scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Order candidates by falling score, ties by rising latent, and keep ``k``."""
    columns, rising = columns.sort(dim=1)
    order, values = stable_topk(scores.gather(1, rising), k)
    return columns.gather(1, order), values


def _search(
    x: Tensor, weight: Tensor, bias: Tensor, k: int, floor: Tensor, slack: Tensor, norm: float, wide: bool
) -> tuple[Tensor, Tensor]:
    """Search every latent for tokens the screen could not settle: slow, exhaustive, same definition.

    Another product discards all latents that are clearly below the k-th best so far; the others, however many,
    are scored by the definition and merged in. ``wide`` does it in float64, for tokens that overflow float32.
    """
    n = len(x)
    kind = torch.float64 if wide else torch.float32
    if wide:
        slack = (x.shape[1] + 2) * 2.0**-52 * (x.double().norm(dim=1) * norm + bias.abs().max().double())
    indices = torch.full((n, k), SILENT, device=x.device)
    values = x.new_full((n, k), -torch.inf)
    step = max(1, min(COLUMNS, WORKSPACE // max(n, x.shape[1])))
    for start in range(0, len(weight), step):
        stop = min(start + step, len(weight))
        rough = torch.addmm(bias[start:stop].to(kind), x.to(kind), weight[start:stop].to(kind).T).double()
        rough += slack[:, None] + 2.0**-22 * rough.abs()  # never below the defining score
        least = floor.double() if floor.ndim == 0 else floor[start:stop].double()
        open_ = (rough >= values[:, -1:].double()) & (rough > least)
        token, column = open_.nonzero(as_tuple=True)
        if not len(token):
            continue
        latent = column + start
        scores = pair_scores(x, weight, bias, token, latent)
        keep = scores > _of(floor, latent)
        indices, values = merge(indices, values, token[keep], latent[keep], scores[keep])
    return indices, values


def merge(indices: Tensor, values: Tensor, token: Tensor, latent: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    """Merge scored pairs into the ordered lists (N, k) of the tokens they belong to."""
    n, k = indices.shape
    held = torch.arange(n, device=token.device).repeat_interleave(k)
    token = torch.cat([held, token])
    latent = torch.cat([indices.reshape(-1), latent])
    scores = torch.cat([values.reshape(-1), scores])
    # sorted by token, then by falling score, then by rising latent: stable sorts, the leading key last
    order = ((_ordered(scores) << 32) | (0xFFFFFFFF - latent.clamp(min=0))).argsort(descending=True)
    order = order[token[order].argsort(stable=True)]
    token, latent, scores = token[order], latent[order], scores[order]
    first = torch.searchsorted(token, torch.arange(n, device=token.device))
    rank = torch.arange(len(token), device=token.device) - first[token]
    kept = rank < k
    return latent[kept].view(n, k), scores[kept].view(n, k)


def _of(floor: Tensor, latents: Tensor) -> Tensor:
    return floor if floor.ndim == 0 else floor[latents]
