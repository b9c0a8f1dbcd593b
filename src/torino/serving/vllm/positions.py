"""Positions of a reduced prompt: those that its tokens have in the full prompt.

vLLM counts tokens of the reduced prompt. With original positions, text keeps the position it has beside all visual
tokens, and a visual token has the position of its image plus its own offset, which is added in the worker.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torino.core.errors import BadParameter


def full_positions(length: int, images: Sequence[tuple[int, int]], occupied: Sequence[int]) -> tuple[Tensor, int]:
    """Return the position of every token of a reduced prompt; tokens of an image have that of its first placeholder.

    Parameters
    ----------
    length : int
        Tokens of the reduced prompt.
    images : sequence of (int, int)
        First token and number of tokens of each image in the reduced prompt, in order.
    occupied : sequence of int
        Positions that each image takes in the full prompt.

    Returns
    -------
    positions : Tensor of shape (length,), int64
    delta : int
        What to add to the number of tokens so far for the position of a generated token.

    Examples
    --------
    >>> positions, delta = full_positions(6, [(1, 2)], [16])
    >>> positions.tolist(), delta
    ([0, 1, 1, 17, 18, 19], 14)
    """
    parts: list[Tensor] = []
    token, position = 0, 0
    for (start, count), taken in zip(images, occupied, strict=True):
        if start < token:
            raise BadParameter(f"Image placeholders must follow each other, got one at {start} after {token}.")
        parts += [torch.arange(position, position + start - token), torch.full((count,), position + start - token)]
        token, position = start + count, position + start - token + taken
    parts.append(torch.arange(position, position + length - token))
    return torch.cat(parts), position - token


def check_length(length: int, counts: Sequence[int], occupied: Sequence[int], limit: int | None) -> None:
    """Refuse a prompt whose positions in the full prompt exceed what the language model can represent.

    Parameters
    ----------
    length : int
        Tokens of the reduced prompt.
    counts : sequence of int
        Tokens of each image in the reduced prompt.
    occupied : sequence of int
        Positions that each image takes in the full prompt.
    limit : int, optional
        Positions of the language model (``max_position_embeddings``).
    """
    full = length - sum(counts) + sum(occupied)
    if limit is not None and full >= limit:
        raise BadParameter(
            f"With original positions this prompt ends at position {full - 1:,} ({length - sum(counts):,} tokens of "
            f"text and {sum(occupied):,} positions of {len(counts)} images), and the model has {limit:,} positions, of "
            "which the answer needs at least one. Send fewer images, or serve with positions='compact'."
        )
