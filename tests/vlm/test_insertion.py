"""Shortening prompts, compared with a slow version on plain lists; no model is needed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from torino.core.errors import BadParameter, BadTokens
from torino.vlm.insertion import ShortenedPrompt, shorten_prompt

IMAGE, PAD = 9, 0
Image = tuple[int, list[int]]  # its placeholders, and the slots of its remaining tokens
Row = list[int | Image]  # tokens of text, and images


def make_inputs(rows: list[Row], side: str, extra: int = 0) -> tuple[dict[str, Tensor], list[int], list[Tensor]]:
    """Return the inputs of some rows; labels number the positions of the full prompt, from 1000."""
    images = [part for row in rows for part in row if not isinstance(part, int)]
    flat = [[t for part in row for t in ([part] if isinstance(part, int) else [IMAGE] * part[0])] for row in rows]
    length = max(map(len, flat)) + extra
    ids = torch.full((len(rows), length), PAD)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(flat):
        at = slice(length - len(row), length) if side == "left" else slice(0, len(row))
        ids[i, at], mask[i, at] = torch.tensor(row, dtype=torch.int64), 1
    labels = 1000 + torch.arange(length).expand(len(rows), -1)
    slots = [torch.tensor(chosen, dtype=torch.int64) for _, chosen in images]
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}, [full for full, _ in images], slots


def shorten_slowly(rows: list[Row], side: str, extra: int) -> tuple[list[list[int]], list[list[int]]]:
    """Return the new tokens of each row without padding, and their positions in the full prompt."""
    lengths = [sum(1 if isinstance(part, int) else part[0] for part in row) for row in rows]
    tokens, places = [], []
    for row, own in zip(rows, lengths, strict=True):
        at = max(lengths) + extra - own if side == "left" else 0
        new: list[tuple[int, int]] = []
        for part in row:
            if isinstance(part, int):
                new.append((part, at))
                at += 1
            else:
                new += [(IMAGE, at + slot) for slot in part[1]]
                at += part[0]
        tokens.append([token for token, _ in new])
        places.append([place for _, place in new])
    return tokens, places


def images(largest: int = 5) -> st.SearchStrategy[Image]:
    full = st.integers(1, largest)
    return full.flatmap(lambda n: st.tuples(st.just(n), st.lists(st.integers(0, n - 1), min_size=1, max_size=7)))


row_lists = st.lists(st.lists(st.one_of(st.integers(1, 8), images()), min_size=1, max_size=6), min_size=1, max_size=4)


@given(row_lists, st.sampled_from(["left", "right"]), st.integers(0, 2), st.sampled_from([None, "left", "right"]))
def test_equals_the_slow_version(rows: list[Row], side: str, extra: int, new_side: Any) -> None:
    inputs, full, slots = make_inputs(rows, side, extra)
    prompt = shorten_prompt(inputs, IMAGE, full, slots, side=new_side, pad=7)
    tokens, places = shorten_slowly(rows, side, extra)
    assert [row.tolist() for row in prompt.kept] == places
    width = max(map(len, tokens))
    padding_was_right = side == "right" and bool((inputs["attention_mask"][:, -1] == 0).any())
    assert prompt.side == (new_side or ("right" if padding_was_right else "left"))
    for i, (row, place) in enumerate(zip(tokens, places, strict=True)):
        gap = width - len(row)
        for name, values, fill in (
            ("input_ids", row, 7),
            ("attention_mask", [1] * len(row), 0),
            ("labels", [1000 + p for p in place], -100),
        ):
            filled = [fill] * gap + values if prompt.side == "left" else values + [fill] * gap
            assert prompt.inputs[name][i].tolist() == filled


@given(row_lists, st.sampled_from(["left", "right"]))
def test_identity_changes_nothing(rows: list[Row], side: str) -> None:
    full_rows: list[Row] = [
        [part if isinstance(part, int) else (part[0], list(range(part[0]))) for part in row] for row in rows
    ]
    inputs, full, slots = make_inputs(full_rows, side)
    prompt = shorten_prompt(inputs, IMAGE, full, slots, side=side)  # type: ignore[arg-type]
    is_token = inputs["attention_mask"].bool()
    assert torch.equal(prompt.inputs["input_ids"], inputs["input_ids"])
    assert torch.equal(prompt.inputs["attention_mask"], inputs["attention_mask"])
    assert torch.equal(prompt.inputs["labels"], inputs["labels"].masked_fill(~is_token, -100))


def test_inputs_are_not_modified() -> None:
    inputs, full, slots = make_inputs([[1, (4, [0, 2]), 2], [3]], "left")
    before = {name: value.clone() for name, value in inputs.items()}
    shorten_prompt(inputs, IMAGE, full, slots)
    assert all(torch.equal(inputs[name], before[name]) for name in before)


def test_tokens_out_of_order_keep_the_given_order() -> None:
    inputs, full, slots = make_inputs([[1, (4, [3, 0, 2]), 2, (2, [1, 1, 0]), 3]], "left")
    prompt = shorten_prompt(inputs, IMAGE, full, slots)
    assert prompt.kept[0].tolist() == [0, 4, 1, 3, 5, 7, 7, 6, 8]


def test_text_between_placeholders_stays_between_the_tokens() -> None:
    ids = torch.tensor([[1, IMAGE, IMAGE, 5, IMAGE, IMAGE, 2]])
    prompt = shorten_prompt({"input_ids": ids}, IMAGE, [4], [torch.tensor([1, 3])])
    assert prompt.inputs["input_ids"].tolist() == [[1, IMAGE, 5, IMAGE, 2]]
    assert prompt.kept[0].tolist() == [0, 2, 3, 5, 6]


def test_without_a_mask_every_token_is_kept() -> None:
    ids = torch.tensor([[PAD, IMAGE, IMAGE, 4], [3, 3, 3, 3]])
    prompt = shorten_prompt({"input_ids": ids}, IMAGE, [2], [torch.tensor([1])], pad=7)
    assert prompt.inputs["input_ids"].tolist() == [[7, PAD, IMAGE, 4], [3, 3, 3, 3]]
    assert prompt.inputs["attention_mask"].tolist() == [[0, 1, 1, 1], [1, 1, 1, 1]]


def test_masked_tokens_are_dropped_anywhere() -> None:
    ids = torch.tensor([[5, 6, IMAGE, IMAGE, 7, IMAGE]])
    mask = torch.tensor([[True, False, True, True, True, False]])
    prompt = shorten_prompt({"input_ids": ids, "attention_mask": mask}, IMAGE, [2], [torch.tensor([0])])
    assert prompt.inputs["input_ids"].tolist() == [[5, IMAGE, 7]]
    assert prompt.inputs["attention_mask"].dtype == torch.bool


def test_inputs_per_token_are_shortened_and_others_dropped() -> None:
    ids = torch.tensor([[IMAGE, IMAGE, 4]])
    types = torch.tensor([[1, 1, 0]])
    given = {"input_ids": ids, "token_type_ids": types, "mm_token_type_ids": types, "labels": None, "other": types}
    prompt = shorten_prompt(given, IMAGE, [2], [torch.tensor([1])])
    assert prompt.inputs["token_type_ids"].tolist() == prompt.inputs["mm_token_type_ids"].tolist() == [[1, 0]]
    assert set(prompt.inputs) == {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"}


def test_spread_pads_the_last_dimension() -> None:
    prompt = ShortenedPrompt({}, (torch.arange(3), torch.arange(1)), "right")
    spread = prompt.spread([torch.ones(2, 3), torch.ones(2, 1)], 5)
    assert spread.shape == (2, 2, 3)
    assert spread[1].tolist() == [[1, 5, 5], [1, 5, 5]]


@pytest.mark.parametrize(
    ("rows", "full", "message"),
    [
        ([[1, (3, [0])]], [4], "Row 0 of the prompt has 3 image placeholders, which does not match its images (4)"),
        ([[(4, [0])], [1, (3, [0])]], [4, 4], "Row 1 of the prompt has 3 .* its images (2 x 4).*max_length"),
        (
            [[(4, [0]), (4, [0])]],
            [4],
            "1 image was given (4 placeholders), and row 0 of the prompt has 4 more placeholders",
        ),
        (
            [[(4, [0])], [1]],
            [4, 4, 4],
            "3 images were given, and the prompt has placeholders for 1. Pass one image for each",
        ),
        ([[1, 2]], [4], "1 image was given, and the prompt has placeholders for 0"),
    ],
)
def test_images_that_do_not_match_the_prompt_are_refused(rows: list[Row], full: list[int], message: str) -> None:
    inputs, _, _ = make_inputs(rows, "left")
    with pytest.raises(BadTokens, match=message.replace("(", r"\(").replace(")", r"\)")):
        shorten_prompt(inputs, IMAGE, full, [torch.tensor([0])] * len(full))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention_mask": torch.ones(1, 1, 3, 3)}, "attention_mask must have the shape of input_ids"),
        ({"labels": torch.ones(1, 2)}, "labels must have the shape of input_ids, .1, 3., got .1, 2."),
        ({"input_ids": torch.tensor([IMAGE, 1])}, "input_ids must have shape .rows, length., got .2,."),
    ],
)
def test_wrong_shapes_are_refused(change: dict[str, Tensor], message: str) -> None:
    with pytest.raises(BadParameter, match=message):
        shorten_prompt({"input_ids": torch.tensor([[IMAGE, 1, 2]])} | change, IMAGE, [1], [torch.tensor([0])])
