"""Application of a sparse reduction matrix to values."""

from __future__ import annotations

import torch
from torch import Tensor

from torino.core.checks import check_tensor
from torino.core.errors import BadTokens


def input_rows(values: Tensor, cls: Tensor | None, sources: Tensor, patches: int) -> Tensor:
    """Return the input rows of a matrix: the patches, or one more row, the CLS token, if ``sources`` refer to it."""
    if check_tensor("apply: values", values).ndim < 1:
        raise BadTokens("apply needs values of shape (N, ...), got a single number.")
    if not values.is_floating_point():
        raise BadTokens(f"apply needs floating-point values, got {values.dtype}. Convert them with .float().")
    reads_cls = bool((sources == patches).any())
    if len(values) == patches and cls is not None and reads_cls:
        if check_tensor("cls", cls).shape != values.shape[1:]:
            raise BadTokens(f"cls must have the shape of one patch, {tuple(values.shape[1:])}, got {tuple(cls.shape)}.")
        values = torch.cat([values, cls.to(values)[None]])
    accepted = (patches + 1,) if reads_cls else (patches, patches + 1)
    if len(values) not in accepted:
        extra = " and a CLS token (give cls=...)" if reads_cls else ""
        raise BadTokens(f"This reduction reads {patches} patches{extra}, but {len(values)} rows of values were given.")
    return values


def apply_matrix(sources: Tensor, weights: Tensor, offsets: Tensor, values: Tensor, pruning: bool) -> Tensor:
    """Multiply a matrix, given as in :class:`~torino.core.reduction.Reduction`, by the rows of ``values``."""
    sources = sources.to(values.device)
    if pruning:
        return values.index_select(0, sources)
    wide = values if values.dtype in (torch.float32, torch.float64) else values.float()
    table = wide.flatten(1) if wide.ndim > 1 else wide[:, None]
    # embedding_bag sums in a fixed order on every device, unlike index_add
    sums = torch.nn.functional.embedding_bag(
        sources,
        table,
        offsets.to(values.device),
        mode="sum",
        per_sample_weights=weights.to(table),
        include_last_offset=True,
    )
    return sums.reshape(-1, *values.shape[1:]).to(values.dtype)
