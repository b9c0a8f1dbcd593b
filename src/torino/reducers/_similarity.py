"""Cosine similarities with reproducible ties, shared by the reducers."""

from __future__ import annotations

import torch
from torch import Tensor

TINY = torch.finfo(torch.float64).tiny
CHUNK_COSINES = 1 << 25  # of a video, cosines are computed in chunks of this many
SYMMETRIC_ROWS = 400  # from this many rows, computing three quarters of a symmetric product is faster than all of it


def unit_vectors(vectors: Tensor) -> Tensor:
    """Return the rows scaled to unit length, in float64. Rows of length zero stay zero."""
    wide = vectors.detach().double()
    return wide / wide.norm(dim=1, keepdim=True).clamp(min=TINY)


def cross_cosines(rows: Tensor, columns: Tensor) -> Tensor:
    """Return the cosine of every row with every column, (R, d) and (C, d) to (R, C) float32.

    A vector of length zero has cosine 0 with all others.
    """
    return round_cosines(unit_vectors(rows) @ unit_vectors(columns).T).float()


def most_similar(rows: Tensor, columns: Tensor) -> Tensor:
    """Return for each row the column of largest cosine, the first of equals, shape (R,); computed in chunks."""
    wide, step = unit_vectors(columns).T, max(1, CHUNK_COSINES // max(1, len(columns)))
    parts = [round_cosines(unit_vectors(part) @ wide).float().argmax(1) for part in rows.split(step)]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)


def round_cosines(cosine: Tensor) -> Tensor:
    """Round float64 cosines to multiples of 2^-44, in place, so that ties are the same on every processor.

    A matrix product sums the entries of equal rows in an order that depends on their position and on the machine.
    Without rounding, the cosines of copies differ by a few 2^-53, and an exact 0 may come out as 1e-17.
    """
    return cosine.mul_(2.0**44).round_().div_(2.0**44)


def pairwise_cosines(x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the cosine of every pair of rows, (N, D) to (N, N). A row of length zero has cosine 0 with all others.

    Identical rows have cosine exactly 1 in float64. In float32 this holds on processors whose products have the same
    rounding error for every row position.
    """
    wide = x.detach().to(dtype)
    if x.dtype == torch.float64 or dtype != torch.float64:  # squares could overflow; float32 inputs cannot in float64
        largest = torch.maximum(wide.amax(1, keepdim=True), -wide.amin(1, keepdim=True))
        wide = wide / largest.clamp_(min=torch.finfo(dtype).tiny)
    # quarters of a float32 product may round differently from the full product, which would change selections
    gram = gram_matrix(wide) if dtype == torch.float64 else wide @ wide.T
    square = gram.diagonal()
    square = square.where(square > 0, 1)
    cosine = gram.div_(torch.outer(square, square).sqrt_()).clamp_(-1, 1)
    return round_cosines(cosine) if dtype == torch.float64 else cosine


def gram_matrix(x: Tensor) -> Tensor:
    """Return the inner products of all pairs of rows, (N, D) to (N, N).

    The matrix is symmetric. For many rows one of its four quarters is copied. The other three products have the same
    shape (with an odd number of rows both halves include the middle row), so they sum in nearly the same order.
    """
    n, half = len(x), (len(x) + 1) // 2
    if n < SYMMETRIC_ROWS:
        return x @ x.T
    gram, top, bottom = x.new_empty(n, n), slice(0, half), slice(n - half, n)
    for rows, columns in ((top, top), (bottom, bottom), (top, bottom)):
        torch.mm(x[rows], x[columns].T, out=gram[rows, columns])
    gram[bottom, top] = gram[top, bottom].T
    return gram


def nearest_kept(patches: Tensor, kept: Tensor) -> Tensor:
    """Return the output token that represents each patch of a pruning: that of the most similar kept patch.

    A kept patch represents itself. Ties go to the kept patch of lowest index. The CLS token (index N) represents no
    patch; if nothing else is kept, all entries are -1.

    Parameters
    ----------
    patches : Tensor of shape (N, D)
    kept : Tensor of shape (M,), int64
        Kept patches in output order.
    """
    kept = kept.cpu()
    order = kept.argsort(stable=True)  # so that ties do not depend on the output order
    tokens = order[kept[order] < len(patches)]
    assigned = torch.full((len(patches),), -1)
    if not len(tokens):
        return assigned
    own = kept[tokens]
    dropped = torch.ones(len(patches), dtype=torch.bool).index_fill_(0, own, False).nonzero()[:, 0]
    if len(dropped):
        rows, columns = (patches[index.to(patches.device)] for index in (dropped, own))
        assigned[dropped] = tokens[most_similar(rows, columns).cpu()]
    assigned[own] = tokens
    return assigned


def nearest_in_frame(patches: Tensor, kept: Tensor, frames: int) -> Tensor:
    """Return :func:`nearest_kept` within each frame, so that the cost is linear in their number.

    Patches of a frame without a kept patch are represented by the most similar of all.
    """
    kept, size = kept.cpu(), len(patches) // frames
    assigned = torch.full((len(patches),), -1)
    rest: list[Tensor] = []
    for frame in range(frames):
        here = slice(frame * size, (frame + 1) * size)
        tokens = ((kept >= here.start) & (kept < here.stop)).nonzero()[:, 0]
        if len(tokens):
            assigned[here] = tokens[nearest_kept(patches[here], kept[tokens] - here.start)]
        else:
            rest.append(torch.arange(here.start, here.stop))
    if rest and len(kept):
        missing = torch.cat(rest)
        order = kept.argsort(stable=True)
        rows, columns = (patches[index.to(patches.device)] for index in (missing, kept[order]))
        assigned[missing] = order[most_similar(rows, columns).cpu()]
    return assigned
