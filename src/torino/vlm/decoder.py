"""Attention of single tokens in the decoder layers of a stock language model, like those of Llama and Qwen."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn


def is_supported(layer: nn.Module) -> bool:
    """Return whether a decoder layer has the parts that :func:`attention_row` reads."""
    for path in ("input_layernorm", "self_attn.q_proj", "self_attn.k_proj"):
        try:
            layer.get_submodule(path)
        except AttributeError:
            return False
    return _rotary_function(cast(Any, layer).self_attn) is not None


def attention_row(
    layer: Any, hidden: Tensor, given: Mapping[str, Any], line: int, query: int, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the attention of one token to all tokens of its row, and the keys of the row, in float32.

    Parameters
    ----------
    layer : a decoder layer
    hidden : Tensor of shape (rows, tokens, E)
        Its input.
    given : mapping
        Its other arguments: ``position_embeddings`` and ``attention_mask``.
    line, query : int
        Row and place of the token.
    bias : Tensor of shape (tokens,), optional
        What is added to the logits.

    Returns
    -------
    attention : Tensor of shape (heads, tokens)
    keys : Tensor of shape (tokens, width)
        With rotary embedding.
    """
    attention = layer.self_attn
    states, weight = hidden[line : line + 1], next(layer.input_layernorm.parameters(), hidden)
    states = layer.input_layernorm(states if weight.is_meta else states.to(weight.device))  # meta: offloaded
    cosine, sine = (_line(part, line).to(states.device) for part in given["position_embeddings"])
    last = slice(query, query + 1)
    keys = _heads(attention, "k", states, cosine, sine)
    queries = _heads(attention, "q", states[:, last], cosine[:, last], sine[:, last])
    queries = queries.unflatten(0, (len(keys), -1))  # the queries that share a key
    with torch.autocast(keys.device.type, enabled=False):
        logits = (queries @ keys[:, None].transpose(2, 3) * attention.scaling).flatten(0, 2)
    mask: Tensor | None = given.get("attention_mask")
    if mask is None:  # causal
        logits[:, query + 1 :] = -torch.inf
    else:
        visible = _line(mask, line)[0, 0, query].to(logits.device)
        is_bool = visible.dtype is torch.bool
        logits = logits.masked_fill(~visible, -torch.inf) if is_bool else logits + visible.float()
    if bias is not None:
        logits = logits + bias.to(logits)
    return logits.softmax(-1), keys.transpose(0, 1).flatten(1)


def _heads(attention: Any, kind: str, states: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Return the queries or keys of one row as the attention of a layer uses them, shape (heads, tokens, width)."""
    projected: Tensor = getattr(attention, f"{kind}_proj")(states).unflatten(2, (-1, attention.head_dim))
    norm = getattr(attention, f"{kind}_norm", None)
    projected = (projected if norm is None else norm(projected)).transpose(1, 2)
    rotate = _rotary_function(attention)
    return cast(Tensor, rotate(projected, projected, cosine, sine)[0])[0].float()


def _rotary_function(attention: nn.Module) -> Any:
    """Return the function of transformers that rotates the queries and keys of an attention module, or None."""
    return getattr(sys.modules[type(attention).__module__], "apply_rotary_pos_emb", None)


def _line(values: Tensor, line: int) -> Tensor:
    """Return one row of values that may be shared by all rows."""
    return values[line : line + 1] if len(values) > 1 else values


def take_tokens(values: Tensor, index: Tensor, dimension: int) -> Tensor:
    """Take tokens of each row; ``index`` has shape (rows, tokens), and ``values`` may be shared by all rows.

    The dimension of the tokens is −1 or −2; that of the rows precedes it.
    """
    rows = list(values.shape)
    rows[dimension - 1] = len(index)
    values = values.expand(rows)
    if dimension == -1:
        return values.gather(-1, index.expand(*values.shape[:-1], -1))
    wide = index[..., None].expand(*values.shape[:-2], -1, values.shape[-1])
    return values.gather(-2, wide)
