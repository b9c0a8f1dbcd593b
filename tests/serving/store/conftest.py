"""A tiny LLaVA with an SAE, a folder of photos of which two are broken, and a store of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.tiny_vlm import photo, write_files
from torino.serving.settings import ReductionSettings
from torino.serving.store import StoreOptions, reduce_images

COUNT = 22
BROKEN = (5, 21)
OPTIONS = StoreOptions(dtype="float32", batch=3, shard_images=4)


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_files(tmp_path_factory.mktemp("tokens"))
    (folder / "photos").mkdir()
    for number in range(COUNT):
        photo(96 + 24 * (number % 3), seed=number).save(folder / "photos" / f"{number:02d}.png")
    (folder / "photos" / "05.png").write_bytes(b"not a picture")
    whole = (folder / "photos" / "21.png").read_bytes()
    (folder / "photos" / "21.png").write_bytes(whole[: len(whole) // 2])
    return folder


@pytest.fixture(scope="session")
def settings(home: Path) -> ReductionSettings:
    """A method with dynamic lengths, original positions and proportional attention."""
    return ReductionSettings("torino-x", sae=str(home / "sae"))


@pytest.fixture(scope="session")
def reference(home: Path, settings: ReductionSettings) -> Path:
    """Return the store that one process writes without interruption."""
    folder = home / "reference"
    reduce_images([home / "photos"], folder, str(home / "llava"), settings, OPTIONS)
    return folder
