"""Streams of activations: any step can be read, and parts form the batch."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.files import flip_byte
from tests.support.tiny_towers import COUNT, GOOD, PATCHES, WIDTH, write_tower
from torino import TorinoError
from torino.core.errors import BadParameter
from torino.datasets import Photos, open_photos
from torino.training.activations.extraction import RowExtractor
from torino.training.activations.stream import Stream
from torino.training.config import TrainConfig
from torino.training.trainer import train
from torino.vlm.towers import Tower, load_tower


def distances(first: Tensor, second: Tensor) -> Tensor:
    return torch.cdist(first, second, compute_mode="donot_use_mm_for_euclid_dist")


def batch_function(tower: Tower, photos: Photos, **options: Any) -> Callable[..., Tensor]:
    return Stream(tower, photos, seed=3, batch=2, **options).batch


@pytest.mark.parametrize("tokens", ["all", "random:3", "cls"])
def test_any_step_can_be_read(clip: Tower, photos: Photos, tokens: str) -> None:
    options: dict[str, Any] = {"tokens": tokens, "buffer": 4}
    read = batch_function(clip, photos, **options)
    batches = [read(step, 10) for step in range(20)]
    assert all(batch.shape == (10, WIDTH) and batch.dtype == torch.float32 for batch in batches)
    for step in (13, 2, 19):
        assert torch.equal(batch_function(clip, photos, **options)(step, 10), batches[step])
    assert not torch.equal(Stream(clip, photos, tokens, seed=4, batch=2, buffer=4).batch(0, 10), batches[0])


def test_resumed_stream_processes_one_buffer_only(clip: Tower, photos: Photos, monkeypatch: pytest.MonkeyPatch) -> None:
    processed: list[int] = []
    extract = RowExtractor.extract

    def record(self: RowExtractor, batches: Any) -> Any:
        batches = [list(batch) for batch in batches]
        processed.extend(index for batch in batches for index in batch)
        return extract(self, batches)

    monkeypatch.setattr(RowExtractor, "extract", record)
    stream = Stream(clip, photos, seed=0, buffer=4, batch=2)
    stream.batch(1000, 16)
    assert len(processed) == 4
    for step in range(1001, 1004):
        stream.batch(step, 16)
    assert len(processed) == 4
    processed.clear()
    Stream(clip, photos, seed=0, buffer=4, batch=2).batch(1000, 16, (1, 2))
    assert len(processed) == 2  # the other process handles the other half


def test_epoch_contains_all_photos(clip: Tower, photos: Photos, photo_folder: Path) -> None:
    """An epoch contains every patch once, except for those that replace unreadable photos."""
    stream = Stream(clip, photos, seed=1, buffer=4, batch=4)
    size = 16
    rows = torch.cat([stream.batch(step, size) for step in range(COUNT * PATCHES // size)])
    patches = torch.cat(
        [image.patches for image in clip.encode([photo_folder / f"{number:02d}.jpg" for number in GOOD])]
    )
    distance, nearest = distances(rows, patches).min(1)
    assert distance.max() < 1e-3
    # eleven photos in lanes of four: the last lane contains photos of the next epoch
    assert len(nearest.unique()) > 0.8 * len(patches)
    assert {name: photo.name for name, photo in stream.skipped.items()} == {"04.jpg": "04.jpg", "07.jpg": "07.jpg"}


def test_parts_form_the_batch(clip: Tower, photos: Photos) -> None:
    for size in (16, 37):
        full = batch_function(clip, photos, buffer=8)(5, size)
        for processes in (2, 3, 5):
            parts = [batch_function(clip, photos, buffer=8)(5, size, (rank, processes)) for rank in range(processes)]
            torch.testing.assert_close(torch.cat(parts), full, atol=1e-5, rtol=1e-5)


def test_photos_are_mixed(clip: Tower, photos: Photos) -> None:
    stream = Stream(clip, photos, seed=0, buffer=8, batch=2)
    batch = stream.batch(0, 32)
    sources: set[int] = set()
    for number in GOOD:
        (results,) = RowExtractor(clip, photos).extract([[number]])
        rows = results[0].rows  # type: ignore[union-attr]
        if float(distances(batch, rows).min()) < 1e-3:
            sources.add(number)
    assert len(sources) >= 5


def test_lane_of_broken_photos_is_replaced(clip: Tower, tmp_path: Path, photo_folder: Path) -> None:
    for number in range(6):
        good = number == 3
        (tmp_path / f"{number}.jpg").write_bytes((photo_folder / "01.jpg").read_bytes() if good else b"broken")
    stream = Stream(clip, open_photos(tmp_path), tokens="all", buffer=6, batch=1)
    (expected,) = clip.encode(tmp_path / "3.jpg")
    assert distances(stream.batch(0, 24), expected.patches).min(1).values.max() < 1e-3
    assert len(stream.skipped) == 5
    (tmp_path / "3.jpg").write_bytes(b"broken")
    with pytest.raises(TorinoError, match="None of the"):
        Stream(clip, open_photos(tmp_path), tokens="cls", buffer=6, batch=1).batch(0, 4)


def test_metadata_and_checks(clip: Tower, photos: Photos) -> None:
    stream = Stream(clip, photos, "random:2")
    assert (stream.rows, stream.width) == (None, WIDTH)
    assert stream.metadata["encoder"] == "tiny-clip"
    assert stream.metadata["token_kind"] == "2 random tokens per image"
    for bad in ({"buffer": 0}, {"batch": 0}):
        with pytest.raises(BadParameter, match="at least 1"):
            Stream(clip, photos, **bad)  # type: ignore[arg-type]
    with pytest.raises(BadParameter, match="step at least 0"):
        stream.batch(-1, 4)


def test_run_resumes_with_the_same_stream_only(tmp_path: Path, clip: Tower, photo_folder: Path) -> None:
    """Buffer, padding, lane, photos and weights must not change, even if the names are the same."""

    def start(folder: Path = photo_folder, tower: Tower = clip, **changes: Any) -> None:
        options: dict[str, Any] = {"buffer": 4, "batch": 2, **changes}
        config = TrainConfig(expansion=1, k=4, steps=2, batch=16)
        train(Stream(tower, open_photos(folder), **options), config, tmp_path / "sae")

    start()
    start()
    for change, message in (
        ({"buffer": 8}, "buffer was 4, now 8"),
        ({"batch": 3}, "lane was 2, now 3"),
        ({"padding": "square"}, "padding was 'crop', now 'square'"),
    ):
        with pytest.raises(BadParameter, match=message):
            start(**change)
    others = shutil.copytree(photo_folder, tmp_path / photo_folder.name)
    shutil.copy(others / "00.jpg", others / "01.jpg")
    with pytest.raises(BadParameter, match=r"settings: activations\.fingerprint was '\w+', now '\w+'"):
        start(others)
    same_sizes = shutil.copytree(photo_folder, tmp_path / "copy" / photo_folder.name)
    flip_byte(same_sizes / "00.jpg", -100)
    with pytest.raises(BadParameter, match=r"settings: activations\.sample was '\w+', now '\w+'\. Use"):
        start(same_sizes)
    retrained = load_tower(write_tower(tmp_path / "tiny-clip", seed=1), block=1)
    with pytest.raises(BadParameter, match=r"settings: activations\.tower was '\w+', now '\w+'\. Use"):
        start(tower=retrained)
