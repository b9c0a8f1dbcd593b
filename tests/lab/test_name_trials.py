"""Trials of concept names."""

from __future__ import annotations

import pytest
import torch
from PIL import Image
from torino_lab import naming
from torino_lab.name_trials import SHOWN, CropJudge, Places, crop_patch, draw_sheet, draw_trials, find_places

from torino import SAE

DOG, GRASS, SKY = 0, 1, 2
NAMES = {DOG: "dog", GRASS: "grass", SKY: "sky"}


class Photos:
    """Photos in which patch 100 is a dog (latent 0), patch 5 grass, and, in some, patch 102 the sky."""

    def __init__(self, count: int) -> None:
        self.states = torch.zeros(count, 197, 3)
        self.states[:, 1 + 100, DOG] = 2.0
        self.states[:, 1 + 99, DOG] = 0.5
        self.states[:, 1 + 5, GRASS] = 2.0
        self.states[: count // 2, 1 + 102, SKY] = 2.0

    def __len__(self) -> int:
        return len(self.states)

    def hidden(self, start: int, stop: int) -> torch.Tensor:
        return self.states[start:stop]

    def images(self, index: int) -> Image.Image:
        return Image.new("RGB", (naming.SIZE, naming.SIZE), (index, 0, 0))


@pytest.fixture
def places() -> Places:
    sae = SAE(torch.eye(3), torch.zeros(3), torch.eye(3), torch.zeros(3), kind="relu")
    return find_places(sae, Photos(20))  # type: ignore[arg-type]


def test_places_are_the_strongest_patch_of_each_photo(places: Places) -> None:
    assert places.by_latent[DOG] == [(photo, 100) for photo in range(20)]
    assert places.by_photo[3] == {DOG: {100}, GRASS: {5}, SKY: {102}}  # 0.5 is below half of the largest activation


def test_wrong_names_fire_elsewhere_in_the_same_photos(places: Places) -> None:
    (trial,) = draw_trials(NAMES, {}, places, [DOG], "same photos", 0)
    assert (trial.right, trial.wrong) == ("dog", "grass")  # the sky is two patches away and may be in the crop
    assert len({photo for photo, _ in trial.places}) == SHOWN
    assert draw_trials(NAMES, {DOG: {"grass"}}, places, [DOG], "same photos", 0) == []


def test_wrong_names_of_other_concepts(places: Places) -> None:
    (trial,) = draw_trials(NAMES, {DOG: {"grass"}}, places, [DOG], "other", 0)
    assert trial.wrong == "sky"
    assert draw_trials(NAMES, {}, places, [DOG, GRASS], "other", 3) == draw_trials(
        NAMES, {}, places, [DOG, GRASS], "other", 3
    )


def test_rare_latents_are_left_out() -> None:
    few = Places({DOG: [(0, 1)] * (SHOWN - 1)}, [])
    assert draw_trials(NAMES, {}, few, [DOG], "other", 0) == []


@pytest.mark.parametrize("patch", [0, 13, 97, 195])
def test_crops_contain_the_patch(patch: int) -> None:
    image = Image.new("RGB", (224, 224))
    row, column = divmod(patch, 14)
    image.paste((255, 0, 0), (column * 16, row * 16, column * 16 + 16, row * 16 + 16))
    crop, box = crop_patch(image, patch)
    assert crop.size == (80, 80)
    assert crop.crop(box).getcolors() == [(256, (255, 0, 0))]


def test_the_judge_can_be_wrong() -> None:
    judge = CropJudge(("dog", "sky"), torch.eye(2), torch.zeros(2), torch.ones(2))
    crops = torch.tensor([[0.9, 0.1], [0.6, 0.5]])
    assert judge.choose(crops, "dog", "sky") is True
    assert judge.choose(crops, "sky", "dog") is False
    assert judge.choose(crops, "sky", "cat") is None


def test_the_sheet_shows_both_names(places: Places) -> None:
    sheet = draw_sheet([(0, places.by_latent[DOG][:SHOWN], ("dog", "grass"))], Photos(20))
    assert sheet.width > sheet.height
    assert len(sheet.getcolors(1 << 16) or ()) > 10
