"""Selection of the tokens of a photo."""

from __future__ import annotations

import torch

from torino.training.activations.selection import TokenSelection

COUNT = 16  # patches of a photo


def test_random_patches_are_uniform() -> None:
    selection = TokenSelection.parse("random:4")
    patches = torch.cat([selection.select_patches(COUNT, f"{number}.jpg", 0) for number in range(1000)])
    counts = patches.bincount(minlength=COUNT)
    assert abs(counts - 250).max() < 5 * 188**0.5
    assert selection.select_patches(3, "small.jpg", 0).tolist() == [0, 1, 2]
