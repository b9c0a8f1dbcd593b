"""Shorten a prompt so that each image has one placeholder for each of its remaining tokens.

This module is independent of any model. A prompt is ``input_ids`` of shape (rows, length) with its mask. An image is a
run of placeholders, in order of appearance, and each of its tokens takes the place of one of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from torino.core.errors import BadParameter, BadTokens

Side = Literal["left", "right"]
# Other inputs with one value for each token, and their padding values.
FILL = {"attention_mask": 0, "labels": -100, "token_type_ids": 0, "mm_token_type_ids": 0}


@dataclass(frozen=True)
class ShortenedPrompt:
    """A prompt of its final length.

    Attributes
    ----------
    inputs : dict
        ``input_ids``, ``attention_mask`` and the other inputs with one value for each token.
    kept : tuple of Tensor
        For each row, the position in the full prompt of every token of the new one, without padding.
    side : {"left", "right"}
        Side of the padding.
    """

    inputs: dict[str, Tensor]
    kept: tuple[Tensor, ...]
    side: Side

    def spread(self, per_row: Sequence[Tensor], fill: int) -> Tensor:
        """Pad one tensor per row to the length of the new prompt, which is the last dimension, and stack them."""
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
    """Shorten a prompt to the remaining tokens of its images.

    Parameters
    ----------
    inputs : mapping
        ``input_ids`` (rows, length), and optionally ``attention_mask``, ``labels`` and the other inputs of ``FILL``.
    image_token : int
        Id of the placeholder.
    full : sequence of int
        Placeholders of each image in the full prompt, in order of appearance.
    slots : sequence of Tensor
        For each image, the placeholder (0 to full − 1) that each of its tokens replaces, in order. Several tokens may
        replace the same placeholder.
    side : {"left", "right"}, optional
        Side of the padding; by default unchanged, and left if there was no padding.
    pad : int
        Padding value of ``input_ids``; it is masked, so its value does not matter.

    Examples
    --------
    >>> ids = torch.tensor([[7, 9, 9, 9, 9, 5], [0, 0, 0, 0, 8, 5]])
    >>> prompt = shorten_prompt({"input_ids": ids, "attention_mask": (ids > 0).long()}, 9, [4], [torch.tensor([0, 2])])
    >>> prompt.inputs["input_ids"].tolist(), [row.tolist() for row in prompt.kept]
    ([[7, 9, 9, 5], [0, 0, 8, 5]], [[0, 1, 3, 5], [4, 5]])
    """
    ids: Tensor = inputs["input_ids"]
    if ids.ndim != 2:
        raise BadParameter(f"input_ids must have shape (rows, length), got {tuple(ids.shape)}. Pass ids[None].")
    mask = inputs.get("attention_mask")
    if mask is None:
        mask = torch.ones_like(ids)
    if mask.shape != ids.shape:
        raise BadParameter(
            f"attention_mask must have the shape of input_ids, {tuple(ids.shape)}, got {tuple(mask.shape)}. "
            "Masks between pairs of tokens cannot be shortened; omit it, or pass one value for each token."
        )
    per_token: dict[str, Tensor] = {name: inputs[name] for name in FILL if inputs.get(name) is not None}
    for name, value in per_token.items():
        if value.shape != ids.shape:
            raise BadParameter(
                f"{name} must have the shape of input_ids, {tuple(ids.shape)}, got {tuple(value.shape)}. "
                "Pass one value for each token."
            )
    per_token["attention_mask"] = mask
    kept = _kept_positions(ids, mask.bool(), image_token, full, slots)
    layout = ShortenedPrompt({}, kept, side or _padding_side(mask))

    def shorten(value: Tensor, fill: int) -> Tensor:
        rows = [row[positions.to(row.device)] for row, positions in zip(value, kept, strict=True)]
        return layout.spread(rows, fill)

    shortened = {name: shorten(value, FILL[name]) for name, value in per_token.items()}
    shortened["input_ids"] = shorten(ids, pad)
    return ShortenedPrompt(shortened, kept, layout.side)


def _kept_positions(
    ids: Tensor, mask: Tensor, image_token: int, full: Sequence[int], slots: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Return the position in the full prompt of every token of the new one, for each row."""
    # Computed on the CPU: reading a value from a GPU tensor would wait for all queued kernels.
    device, ids, mask = ids.device, ids.cpu(), mask.cpu()
    images = iter(zip(full, slots, strict=True))
    rows: list[Tensor] = []
    used = 0
    for number, (row, is_token) in enumerate(zip(ids, mask, strict=True)):
        is_image = (row == image_token) & is_token
        placeholders = is_image.nonzero()[:, 0]
        left = len(placeholders)
        positions = [(is_token & ~is_image).nonzero()[:, 0]]
        sort_keys = [positions[0]]
        while left:
            count, image_slots = next(images, (0, None))
            if image_slots is None:
                raise BadTokens(
                    f"{len(full)} {_image_word(len(full))} given ({_describe_counts(full)} placeholders), and row "
                    f"{number} of the prompt has {left} more placeholders. Pass one image for each place, in order."
                )
            if count > left:
                raise BadTokens(
                    f"Row {number} of the prompt has {len(placeholders)} image placeholders, which does not match its "
                    f"images ({_describe_counts(full)}). The tokenizer may have truncated the prompt: increase its "
                    "max_length, or disable truncation."
                )
            used += 1
            taken = placeholders[len(placeholders) - left :][:count][image_slots.cpu()]
            positions.append(taken)
            # Sorting by the running maximum keeps tokens that are given out of order in the given order, and tokens
            # in order at their place within the text.
            sort_keys.append(taken.cummax(0).values if len(taken) else taken)
            left -= count
        order = torch.cat(sort_keys).argsort(stable=True)
        rows.append(torch.cat(positions)[order].to(device))
    if used != len(full):
        raise BadTokens(
            f"{len(full)} {_image_word(len(full))} given, and the prompt has placeholders for {used}. Pass one image "
            "for each place."
        )
    return tuple(rows)


def _image_word(count: int) -> str:
    return "image was" if count == 1 else "images were"


def _describe_counts(full: Sequence[int]) -> str:
    """Return the placeholders of each image as text, shortened if all are equal."""
    return f"{len(full)} x {full[0]}" if len(full) > 1 and len(set(full)) == 1 else ", ".join(map(str, full))


def _padding_side(mask: Tensor) -> Side:
    return "right" if bool((mask[:, 0] != 0).all()) and bool((mask[:, -1] == 0).any()) else "left"
