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

from torino.errors import BadParameter, BadTokens

Side = Literal["left", "right"]
# What else runs along the prompt, and what stands in its padding.
FILL = {"attention_mask": 0, "labels": -100, "token_type_ids": 0, "mm_token_type_ids": 0}


@dataclass(frozen=True)
class Repacked:
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


def repack(
    inputs: Mapping[str, Any],
    image_token: int,
    full: Sequence[int],
    slots: Sequence[Tensor],
    *,
    side: Side | None = None,
    pad: int = 0,
) -> Repacked:
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
    >>> done = repack({"input_ids": ids, "attention_mask": (ids > 0).long()}, 9, [4], [torch.tensor([0, 2])])
    >>> done.inputs["input_ids"].tolist(), [row.tolist() for row in done.kept]
    ([[7, 9, 9, 5], [0, 0, 8, 5]], [[0, 1, 3, 5], [4, 5]])
    """
    ids: Tensor = inputs["input_ids"]
    mask = inputs.get("attention_mask")
    if mask is None:
        mask = torch.ones_like(ids)
    if mask.shape != ids.shape:
        raise BadParameter(
            f"attention_mask must have the shape of input_ids, {tuple(ids.shape)}, got {tuple(mask.shape)}. "
            "Masks of attention between tokens cannot be shrunk; leave it out or give one mark per token."
        )
    kept = _kept_positions(ids, mask.bool(), image_token, full, slots)
    done = Repacked({}, kept, side or _side(mask))
    along = {name: value for name, value in inputs.items() if name in FILL and value is not None}
    along["attention_mask"] = mask
    packed = {
        name: done.spread([row[at] for row, at in zip(value, kept, strict=True)], FILL[name])
        for name, value in along.items()
    }
    packed["input_ids"] = done.spread([row[at] for row, at in zip(ids, kept, strict=True)], pad)
    return Repacked(packed, kept, done.side)


def _kept_positions(
    ids: Tensor, real: Tensor, image_token: int, full: Sequence[int], slots: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    images = iter(zip(full, slots, strict=True))
    rows: list[Tensor] = []
    used = 0
    for number, (row, is_real) in enumerate(zip(ids, real, strict=True)):
        is_image = (row == image_token) & is_real
        places = is_image.nonzero()[:, 0]
        left = len(places)
        # every token keeps its place in the queue: text its own position, an image's tokens those of its first slot
        position = [(is_real & ~is_image).nonzero()[:, 0]]
        order = [position[0]]
        while left:
            count, chosen = next(images, (0, None))
            used += 1
            if chosen is None or count > left:
                raise BadTokens(
                    f"Row {number} of the prompt has {len(places)} image placeholders, which is not what its images take "
                    f"({', '.join(map(str, full))}). The prompt may have been cut by the tokenizer: raise its max_length, "
                    "or turn truncation off."
                )
            mine = places[len(places) - left :][:count]
            position.append(mine[chosen.to(mine.device)])
            order.append(mine[:1].expand(len(chosen)))
            left -= count
        at = torch.cat(order).argsort(stable=True)
        rows.append(torch.cat(position)[at])
    if used != len(full):
        raise BadTokens(
            f"{len(full)} images were given, and the prompt has places for {used}. Give one image for each."
        )
    return tuple(rows)


def _side(mask: Tensor) -> Side:
    return "right" if bool((mask[:, 0] != 0).all()) and bool((mask[:, -1] == 0).any()) else "left"
