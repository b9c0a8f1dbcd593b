"""Low-level concepts, recognized by pixels and place."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from torino.core.errors import BadParameter
from torino.interpret.low_level import COLORS, PROPERTIES, LowLevelEvidence, patch_properties

NAMES = [name for name, _ in PROPERTIES]


def has(table: torch.Tensor, patch: int) -> set[str]:
    return {name for name, value in zip(NAMES, table[patch].tolist(), strict=True) if value}


@pytest.mark.parametrize("color", COLORS)
def test_plain_colors_are_flat_and_have_their_name(color: str) -> None:
    table = patch_properties(Image.new("RGB", (64, 64), COLORS[color]), (4, 4))
    assert has(table, 5) == {color, "flat area"}
    assert has(table, 0) == {color, "flat area", "top border", "left border"}
    assert has(table, 15) == {color, "flat area", "bottom border", "right border"}


def test_stripes_have_a_direction() -> None:
    rows = np.zeros((64, 64, 3), np.uint8)
    rows[::4], rows[1::4] = 255, 255
    across, along = (patch_properties(Image.fromarray(image), (4, 4)) for image in (rows, rows.transpose(1, 0, 2)))
    assert "horizontal edges" in has(across, 5)
    assert "vertical edges" in has(along, 5)
    assert not {"vertical edges", "flat area"} & has(across, 5)
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    found = has(patch_properties(Image.fromarray(noise), (4, 4)), 5)
    assert "fine texture" in found
    assert not {"horizontal edges", "vertical edges"} & found


def test_a_property_names_a_latent_only_if_its_patches_share_it_and_others_do_not() -> None:
    image = Image.new("RGB", (80, 80), COLORS["gray"])
    image.paste(COLORS["red"], (0, 0, 20, 20))  # one patch of sixteen
    table = patch_properties(image, (4, 4))
    evidence = LowLevelEvidence(4)
    for _ in range(3):
        patches = torch.tensor([0, 5, 6, 0, 10])
        evidence.add(table, torch.tensor([0, 1, 1, 2, 2]), patches, torch.tensor([2.0, 1.0, 1.0, 1.0, 1.0]))
    name = evidence.name(0)
    assert name is not None
    assert (name.name, name.kind, name.share, name.lift) == ("red", "color", 1.0, 16.0)
    assert evidence.name(1) is None, "gray and flat, but so is nearly everything"
    assert evidence.name(2) is None, "one patch red, one gray"
    assert evidence.name(3) is None, "never active"


def test_images_smaller_than_the_grid_are_refused() -> None:
    with pytest.raises(BadParameter, match="8 x 8 pixels is too small for 8 x 8 patches"):
        patch_properties(Image.new("RGB", (8, 8)), (8, 8))
