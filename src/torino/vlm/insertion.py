"""Repacking a prompt: where an image had many placeholders it keeps as many as it has tokens left.

Nothing here knows a model. A prompt is ``input_ids`` of shape (rows, length) with its mask; an image is a run of
placeholders, in order of appearance; its tokens say which placeholder's place each of them takes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from torino.core.errors import BadParameter, BadTokens

Side = Literal["left", "right"]
# What else runs along the prompt, and what stands in its padding.
FILL = {"attention_mask": 0, "labels": -100, "token_type_ids": 0, "mm_token_type_ids": 0}


@dataclass(frozen=True)
class ShortenedPrompt:
    """A prompt of its final length.

    Attributes
    ----------
    inputs : dict
        ``input_ids``, ``attention_mask`` and whatever else ran along the prompt.
    kept : tuple of Tensor
        For each row, the position in the old prompt of every position in the new one, padding left out.
    side : {"left", "right"}
        Where the padding stands.
    """

    inputs: dict[str, Tensor]
    kept: tuple[Tensor, ...]
    side: Side

    def spread(self, per_row: Sequence[Tensor], fill: int) -> Tensor:
        """Pad one tensor per row, laid out like the new prompt (the last dimension is the prompt)."""
        length = max(len(positions) for positions in self.kept)
        rows: list[Tensor] = []
        for row in per_row:
            gap = row.new_full((*row.shape[:-1], length - row.shape[-1]), fill)
            rows.append(torch.cat([gap, row] if self.side == "left" else [row, gap], -1))
        return torch.stack(rows)


def shorten_prompt(
    inputs: Mapping[str, Any],
    image_token: int,
    full: Sequence[int],
    slots: Sequence[Tensor],
    *,
    side: Side | None = None,
    pad: int = 0,
) -> ShortenedPrompt:
    """Shrink a prompt to the tokens that its images have left.

    Parameters
    ----------
    inputs : mapping
        ``input_ids`` (rows, length), and optionally ``attention_mask``, ``labels`` and the like.
    image_token : int
        The placeholder.
    full : sequence of int
        Placeholders of each image in the old prompt, images in order of appearance.
    slots : sequence of Tensor
        For each image, the placeholder (0 to full - 1) whose place each of its tokens takes, in order. One
        placeholder may be named more than once.
    side : {"left", "right"}, optional
        Where padding goes; by default where it was, and left where there was none.
    pad : int
        Token that fills ``input_ids``; it is masked, so any will do.

    Examples
    --------
    >>> ids = torch.tensor([[7, 9, 9, 9, 9, 5], [0, 0, 0, 0, 8, 5]])
    >>> done = shorten_prompt({"input_ids": ids, "attention_mask": (ids > 0).long()}, 9, [4], [torch.tensor([0, 2])])
    >>> done.inputs["input_ids"].tolist(), [row.tolist() for row in done.kept]
    ([[7, 9, 9, 5], [0, 0, 8, 5]], [[0, 1, 3, 5], [4, 5]])
    """
    ids: Tensor = inputs["input_ids"]
    if ids.ndim != 2:
        raise BadParameter(f"input_ids must have shape (rows, length), got {tuple(ids.shape)}. Give it as ids[None].")
    mask = inputs.get("attention_mask")
    if mask is None:
        mask = torch.ones_like(ids)
    if mask.shape != ids.shape:
        raise BadParameter(
            f"attention_mask must have the shape of input_ids, {tuple(ids.shape)}, got {tuple(mask.shape)}. "
            "Masks of attention between tokens cannot be shrunk; leave it out or give one mark per token."
        )
    along: dict[str, Tensor] = {name: inputs[name] for name in FILL if inputs.get(name) is not None}
    for name, value in along.items():
        if value.shape != ids.shape:
            raise BadParameter(
                f"{name} must have the shape of input_ids, {tuple(ids.shape)}, got {tuple(value.shape)}. "
                "It runs along the prompt and is shrunk with it."
            )
    along["attention_mask"] = mask
    kept = _kept_positions(ids, mask.bool(), image_token, full, slots)
    done = ShortenedPrompt({}, kept, side or _side(mask))

    def shrunk(value: Tensor, fill: int) -> Tensor:
        return done.spread([row[at.to(row.device)] for row, at in zip(value, kept, strict=True)], fill)

    packed = {name: shrunk(value, FILL[name]) for name, value in along.items()}
    packed["input_ids"] = shrunk(ids, pad)
    return ShortenedPrompt(packed, kept, done.side)


def _kept_positions(
    ids: Tensor, real: Tensor, image_token: int, full: Sequence[int], slots: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    # worked out on the CPU, where a question to a tensor does not wait for a queue
    device, ids, real = ids.device, ids.cpu(), real.cpu()
    images = iter(zip(full, slots, strict=True))
    rows: list[Tensor] = []
    used = 0
    for number, (row, is_real) in enumerate(zip(ids, real, strict=True)):
        is_image = (row == image_token) & is_real
        places = is_image.nonzero()[:, 0]
        left = len(places)
        position = [(is_real & ~is_image).nonzero()[:, 0]]
        order = [position[0]]
        while left:
            count, chosen = next(images, (0, None))
            if chosen is None:
                raise BadTokens(
                    f"{len(full)} {_images(len(full))} given ({_counts(full)} placeholders), and row {number} of the "
                    f"prompt has {left} placeholders more. Give one image for each place, in order."
                )
            if count > left:
                raise BadTokens(
                    f"Row {number} of the prompt has {len(places)} image placeholders, which is not what its images "
                    f"take ({_counts(full)}). The prompt may have been cut by the tokenizer: raise its max_length, "
                    "or turn truncation off."
                )
            used += 1
            mine = places[len(places) - left :][:count]
            taken = mine[chosen.cpu()]
            position.append(taken)
            # Text keeps its place in the queue, and so does a token that stands in one of its own; tokens given
            # out of order stay in the order they were given.
            order.append(taken.cummax(0).values if len(taken) else taken)
            left -= count
        at = torch.cat(order).argsort(stable=True)
        rows.append(torch.cat(position)[at].to(device))
    if used != len(full):
        raise BadTokens(
            f"{len(full)} {_images(len(full))} given, and the prompt has places for {used}. Give one image for each."
        )
    return tuple(rows)


def _images(count: int) -> str:
    return "image was" if count == 1 else "images were"


def _counts(full: Sequence[int]) -> str:
    """The placeholders of each image; a run of equal ones is said once."""
    return f"{len(full)} x {full[0]}" if len(full) > 1 and len(set(full)) == 1 else ", ".join(map(str, full))


def _side(mask: Tensor) -> Side:
    return "right" if bool((mask[:, 0] != 0).all()) and bool((mask[:, -1] == 0).any()) else "left"
