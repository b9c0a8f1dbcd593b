"""Carry integers beside embeddings: the offset and the size of each token, behind its channels.

vLLM moves one tensor per image from the processor to the worker, and from the tower to the language model. Each integer
becomes two channels of seven bits, which float32, float16 and bfloat16 all represent exactly.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torino.core.errors import BadTokens

BASE = 128
LIMIT = BASE * BASE
"""Integers must be below this."""


def attach(features: Tensor, integers: Tensor) -> Tensor:
    """Append integers of shape (n, k), from 0 to 16,383, to features of shape (n, E); return shape (n, E + 2k).

    Examples
    --------
    >>> embeds = attach(torch.zeros(2, 3), torch.tensor([[5], [300]]))
    >>> embeds.shape, detach(embeds, 3)[1].tolist()
    (torch.Size([2, 5]), [[5], [300]])
    """
    if integers.is_floating_point() or integers.shape[:1] != features.shape[:1] or integers.ndim != 2:
        raise BadTokens(
            f"The integers of {len(features)} tokens must have one row for each, got {integers.dtype} of shape "
            f"{tuple(integers.shape)}."
        )
    if integers.numel() and not 0 <= int(integers.min()) <= int(integers.max()) < LIMIT:
        raise BadTokens(
            f"Offsets and sizes of tokens must be from 0 to {LIMIT - 1}, got {int(integers.min())} to "
            f"{int(integers.max())}."
        )
    digits = torch.stack([integers // BASE, integers % BASE], 2).flatten(1)
    return torch.cat([features, digits.to(features)], 1)


def detach(embeds: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Split what :func:`attach` joined: features of shape (n, width) and integers of shape (n, k)."""
    digits = embeds[:, width:].float().round().long().unflatten(1, (-1, 2))
    return embeds[:, :width], digits[..., 0] * BASE + digits[..., 1]
