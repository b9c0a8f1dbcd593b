"""Several questions about one photo in one sequence, each masked from the others.

The visual tokens come first and are computed once. Every question sees them and itself, and has the position it would
have on its own, so the loss equals that of asking the questions one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

HEAD = "<|im_start|>user\n"
TOKEN_WEIGHT = {"caption": 0.4}


@dataclass(frozen=True)
class Segment:
    """Token ids of one question and its answer, where the answer starts, and the weight of each answer token."""

    ids: list[int]
    answer: int
    weight: float


@dataclass(frozen=True)
class Batch:
    """Ragged questions of several photos.

    Parameters
    ----------
    text : Tensor of shape (B, T)
        Token ids, padded.
    positions : Tensor of shape (B, head + visual + T)
    mask : Tensor of shape (B, 1, head + visual + T, head + visual + T)
        True where attention is allowed.
    rows, columns, targets, weights : Tensor of shape (answers,)
        The places in ``text`` whose next token is learned, that token, and its weight.
    segment : Tensor of shape (answers,)
        Number of the question that each target belongs to, over the whole batch.
    """

    text: Tensor
    positions: Tensor
    mask: Tensor
    rows: Tensor
    columns: Tensor
    targets: Tensor
    weights: Tensor
    segment: Tensor


def encode_question(tokenizer: Any, kind: str, question: str, answer: str) -> Segment:
    """Tokenize a question as the chat template writes it, after the image."""
    asked = f"\n{question}<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer(asked, add_special_tokens=False)["input_ids"]
    said = tokenizer(f"{answer}<|im_end|>", add_special_tokens=False)["input_ids"]
    return Segment([*ids, *said], len(ids), TOKEN_WEIGHT.get(kind, 1.0))


def pack(photos: Sequence[Sequence[Segment]], head: int, visual: int, pad: int, most: int) -> Batch:
    """Lay the questions of each photo after one another; those past ``most`` tokens are left out."""
    kept: list[list[Segment]] = []
    for segments in photos:
        length, row = 0, []
        for segment in segments:
            if length + len(segment.ids) <= most:
                row.append(segment)
                length += len(segment.ids)
        kept.append(row)
    width = max((sum(len(s.ids) for s in row) for row in kept), default=0)
    width += -width % 16  # few different shapes: matrix libraries prepare each shape once
    front = head + visual
    text = torch.full((len(kept), width), pad)
    owner = torch.full((len(kept), width), -1)
    place = torch.zeros(len(kept), width, dtype=torch.int64)
    targets: list[tuple[int, int, int, float, int]] = []
    number = 0
    for b, row in enumerate(kept):
        at = 0
        for segment in row:
            end = at + len(segment.ids)
            text[b, at:end] = torch.tensor(segment.ids)
            owner[b, at:end] = number
            place[b, at:end] = torch.arange(end - at)
            for i in range(segment.answer - 1, len(segment.ids) - 1):
                targets.append((b, at + i, segment.ids[i + 1], segment.weight, number))
            at, number = end, number + 1
    total = front + width
    mask = torch.zeros(len(kept), 1, total, total, dtype=torch.bool)
    mask[:, :, :, :front] = torch.ones(total, front, dtype=torch.bool).tril()
    same = owner[:, :, None] == owner[:, None, :]
    mask[:, 0, front:, front:] = same.tril()
    positions = torch.cat([torch.arange(front).expand(len(kept), -1), front + place], 1)
    columns = list(zip(*targets, strict=True)) if targets else [(), (), (), (), ()]
    rows, cols, wanted, weights, segment = (torch.tensor(values) for values in columns)
    return Batch(text, positions, mask, rows, cols, wanted, weights, segment)
