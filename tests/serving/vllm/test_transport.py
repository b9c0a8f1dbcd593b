"""Integers behind embeddings, and positions of a reduced prompt; without vLLM."""

from __future__ import annotations

import pytest
import torch

from torino.core.errors import BadParameter, BadTokens
from torino.serving.vision import ServedImage
from torino.serving.vllm.marks import LIMIT, attach, detach
from torino.serving.vllm.positions import check_length, full_positions
from torino.vlm.insertion import shorten_prompt


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_all_integers_survive_in_every_type(dtype: torch.dtype) -> None:
    integers = torch.stack([torch.arange(LIMIT), torch.arange(LIMIT).flip(0)], 1)
    features = torch.randn(LIMIT, 3).to(dtype)
    embeds = attach(features, integers)
    assert embeds.dtype == dtype
    back, found = detach(embeds, 3)
    assert torch.equal(back, features)
    assert torch.equal(found, integers)


@pytest.mark.parametrize(
    "integers",
    [torch.tensor([[-1]]), torch.tensor([[LIMIT]]), torch.tensor([[0.5]]), torch.tensor([0]), torch.zeros(2, 1).long()],
)
def test_integers_that_do_not_fit_are_refused(integers: torch.Tensor) -> None:
    with pytest.raises(BadTokens):
        attach(torch.zeros(1, 4), integers)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"features": torch.zeros(0, 4)}, "at least one token"),
        ({"features": torch.full((2, 4), torch.nan)}, "not finite"),
        ({"features": torch.full((2, 4), torch.inf)}, "not finite"),
        ({"slots": torch.tensor([0, 16])}, "slots must be from 0 to 15"),
        ({"slots": torch.tensor([-1, 3])}, "slots must be from 0 to 15"),
        ({"slots": torch.tensor([0.0, 1.0])}, "slots must be 2 integers"),
        ({"sizes": torch.tensor([1, 0])}, "sizes must be from 1 to 16"),
        ({"sizes": torch.tensor([17, 1])}, "sizes must be from 1 to 16"),
        ({"sizes": torch.tensor([1])}, "sizes must be 2 integers"),
    ],
)
def test_tokens_are_checked_before_they_leave(changes: dict[str, torch.Tensor], message: str) -> None:
    good = {"features": torch.zeros(2, 4), "slots": torch.tensor([0, 15]), "sizes": torch.tensor([1, 16])}
    ServedImage(**good, full=16)
    with pytest.raises(BadTokens, match=message):
        ServedImage(**{**good, **changes}, full=16)


def test_positions_are_those_of_the_full_prompt() -> None:
    """Compare with the positions that transformers gets: those of the kept tokens of the full prompt."""
    image, full = 9, [5, 7]
    slots = [torch.tensor([1, 4]), torch.tensor([0, 2, 6])]
    ids = torch.tensor([[1, 2, *[image] * 5, 3, *[image] * 7, 4, 5]])
    kept = shorten_prompt({"input_ids": ids}, image, full, slots).kept[0]
    positions, delta = full_positions(10, [(2, 2), (5, 3)], full)
    positions[2:4] += slots[0]
    positions[5:8] += slots[1]
    assert positions.tolist() == kept.tolist()
    assert 10 + delta == ids.shape[1]  # the first generated token


def test_positions_without_images_count() -> None:
    positions, delta = full_positions(4, [], [])
    assert positions.tolist() == [0, 1, 2, 3]
    assert delta == 0
    with pytest.raises(BadParameter, match="follow each other"):
        full_positions(9, [(4, 2), (3, 2)], [9, 9])


def test_prompts_that_exceed_the_positions_of_the_model_are_refused() -> None:
    check_length(40, [10, 10], [576, 576], 1173)  # 20 of text and 1152 of images: positions 0 to 1171, and one more
    with pytest.raises(BadParameter, match=r"ends at position 1,171 .*has 1,172 positions"):
        check_length(40, [10, 10], [576, 576], 1172)
    check_length(10**6, [1], [576], None)
