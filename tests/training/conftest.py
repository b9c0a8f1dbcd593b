"""Fixtures of the training tests: a tiny CLIP tower and a folder of photos, of which two are broken."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.tiny_towers import write_photos, write_tower
from torino.datasets import Photos, open_photos
from torino.vlm.towers import Tower, load_tower


@pytest.fixture(scope="session")
def clip_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tower(tmp_path_factory.mktemp("towers") / "tiny-clip")


@pytest.fixture(scope="session")
def clip(clip_folder: Path) -> Tower:
    return load_tower(clip_folder, block=1)


@pytest.fixture(scope="session")
def photo_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_photos(tmp_path_factory.mktemp("pictures"))


@pytest.fixture
def photos(photo_folder: Path) -> Photos:
    return open_photos(photo_folder)
