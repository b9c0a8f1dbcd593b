"""Repacking prompts, against a slow version in plain lists; no model is needed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from torino import BadParameter, BadTokens
from torino.vlm.insertion import ShortenedPrompt, shorten_prompt

IMAGE, PAD = 9, 0
Image = tuple[int, list[int]]  # its placeholders, and the slots of the tokens it has left
Row = list[int | Image]  # tokens of text, and images


def of(rows: list[Row], side: str, extra: int = 0) -> tuple[dict[str, Tensor], list[int], list[Tensor]]:
    """The inputs of some rows: labels number the positions of the old prompt, from 1000."""
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


def slowly(rows: list[Row], side: str, extra: int) -> tuple[list[list[int]], list[list[int]]]:
    """New tokens of each row without padding, and where each stood."""
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


def an_image(most: int = 5) -> st.SearchStrategy[Image]:
    full = st.integers(1, most)
    return full.flatmap(lambda n: st.tuples(st.just(n), st.lists(st.integers(0, n - 1), min_size=1, max_size=7)))


some_rows = st.lists(st.lists(st.one_of(st.integers(1, 8), an_image()), min_size=1, max_size=6), min_size=1, max_size=4)


@given(some_rows, st.sampled_from(["left", "right"]), st.integers(0, 2), st.sampled_from([None, "left", "right"]))
def test_as_in_plain_lists(rows: list[Row], side: str, extra: int, want: Any) -> None:
    inputs, full, slots = of(rows, side, extra)
    done = shorten_prompt(inputs, IMAGE, full, slots, side=want, pad=7)
    tokens, places = slowly(rows, side, extra)
    assert [row.tolist() for row in done.kept] == places
    width = max(map(len, tokens))
    padding_was_right = side == "right" and bool((inputs["attention_mask"][:, -1] == 0).any())
    assert done.side == (want or ("right" if padding_was_right else "left"))
    for i, (row, place) in enumerate(zip(tokens, places, strict=True)):
        gap = width - len(row)
        for name, values, fill in (
            ("input_ids", row, 7),
            ("attention_mask", [1] * len(row), 0),
            ("labels", [1000 + p for p in place], -100),
        ):
            filled = [fill] * gap + values if done.side == "left" else values + [fill] * gap
            assert done.inputs[name][i].tolist() == filled


@given(some_rows, st.sampled_from(["left", "right"]))
def test_keeping_everything_changes_nothing(rows: list[Row], side: str) -> None:
    whole: list[Row] = [
        [part if isinstance(part, int) else (part[0], list(range(part[0]))) for part in row] for row in rows
    ]
    inputs, full, slots = of(whole, side)
    done = shorten_prompt(inputs, IMAGE, full, slots, side=side)  # type: ignore[arg-type]
    real = inputs["attention_mask"].bool()
    assert torch.equal(done.inputs["input_ids"], inputs["input_ids"])
    assert torch.equal(done.inputs["attention_mask"], inputs["attention_mask"])
    assert torch.equal(done.inputs["labels"], inputs["labels"].masked_fill(~real, -100))


def test_inputs_are_left_alone() -> None:
    inputs, full, slots = of([[1, (4, [0, 2]), 2], [3]], "left")
    before = {name: value.clone() for name, value in inputs.items()}
    shorten_prompt(inputs, IMAGE, full, slots)
    assert all(torch.equal(inputs[name], before[name]) for name in before)


def test_tokens_out_of_order_stay_in_the_order_given() -> None:
    inputs, full, slots = of([[1, (4, [3, 0, 2]), 2, (2, [1, 1, 0]), 3]], "left")
    done = shorten_prompt(inputs, IMAGE, full, slots)
    assert done.kept[0].tolist() == [0, 4, 1, 3, 5, 7, 7, 6, 8]


def test_text_between_the_placeholders_of_one_image_stays_between_its_tokens() -> None:
    ids = torch.tensor([[1, IMAGE, IMAGE, 5, IMAGE, IMAGE, 2]])
    done = shorten_prompt({"input_ids": ids}, IMAGE, [4], [torch.tensor([1, 3])])
    assert done.inputs["input_ids"].tolist() == [[1, IMAGE, 5, IMAGE, 2]]
    assert done.kept[0].tolist() == [0, 2, 3, 5, 6]


def test_without_a_mask_every_token_counts() -> None:
    ids = torch.tensor([[PAD, IMAGE, IMAGE, 4], [3, 3, 3, 3]])
    done = shorten_prompt({"input_ids": ids}, IMAGE, [2], [torch.tensor([1])], pad=7)
    assert done.inputs["input_ids"].tolist() == [[7, PAD, IMAGE, 4], [3, 3, 3, 3]]
    assert done.inputs["attention_mask"].tolist() == [[0, 1, 1, 1], [1, 1, 1, 1]]


def test_masked_tokens_are_dropped_wherever_they_are() -> None:
    ids = torch.tensor([[5, 6, IMAGE, IMAGE, 7, IMAGE]])
    mask = torch.tensor([[True, False, True, True, True, False]])
    done = shorten_prompt({"input_ids": ids, "attention_mask": mask}, IMAGE, [2], [torch.tensor([0])])
    assert done.inputs["input_ids"].tolist() == [[5, IMAGE, 7]]
    assert done.inputs["attention_mask"].dtype == torch.bool


def test_what_runs_along_the_prompt_is_shrunk_and_the_rest_is_left_out() -> None:
    ids = torch.tensor([[IMAGE, IMAGE, 4]])
    kinds = torch.tensor([[1, 1, 0]])
    given = {"input_ids": ids, "token_type_ids": kinds, "mm_token_type_ids": kinds, "labels": None, "other": kinds}
    done = shorten_prompt(given, IMAGE, [2], [torch.tensor([1])])
    assert done.inputs["token_type_ids"].tolist() == done.inputs["mm_token_type_ids"].tolist() == [[1, 0]]
    assert set(done.inputs) == {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"}


def test_spread_pads_the_last_dimension() -> None:
    done = ShortenedPrompt({}, (torch.arange(3), torch.arange(1)), "right")
    spread = done.spread([torch.ones(2, 3), torch.ones(2, 1)], 5)
    assert spread.shape == (2, 2, 3)
    assert spread[1].tolist() == [[1, 5, 5], [1, 5, 5]]


@pytest.mark.parametrize(
    ("rows", "full", "words"),
    [
        ([[1, (3, [0])]], [4], "Row 0 of the prompt has 3 image placeholders, which is not what its images take (4)"),
        ([[(4, [0])], [1, (3, [0])]], [4, 4], "Row 1 of the prompt has 3 .* take (2 x 4).*max_length"),
        ([[(4, [0]), (4, [0])]], [4], "1 image was given (4 placeholders), and row 0 of the prompt has 4 placeholders"),
        ([[(4, [0])], [1]], [4, 4, 4], "3 images were given, and the prompt has places for 1. Give one image for each"),
        ([[1, 2]], [4], "1 image was given, and the prompt has places for 0"),
    ],
)
def test_images_that_do_not_fit_the_prompt(rows: list[Row], full: list[int], words: str) -> None:
    inputs, _, _ = of(rows, "left")
    with pytest.raises(BadTokens, match=words.replace("(", r"\(").replace(")", r"\)")):
        shorten_prompt(inputs, IMAGE, full, [torch.tensor([0])] * len(full))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"attention_mask": torch.ones(1, 1, 3, 3)}, "attention_mask must have the shape of input_ids"),
        ({"labels": torch.ones(1, 2)}, "labels must have the shape of input_ids, .1, 3., got .1, 2."),
        ({"input_ids": torch.tensor([IMAGE, 1])}, "input_ids must have shape .rows, length., got .2,."),
    ],
)
def test_shapes_that_do_not_fit(change: dict[str, Tensor], words: str) -> None:
    with pytest.raises(BadParameter, match=words):
        shorten_prompt({"input_ids": torch.tensor([[IMAGE, 1, 2]])} | change, IMAGE, [1], [torch.tensor([0])])
