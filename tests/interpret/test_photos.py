"""Photos are read and encoded by a tower; those that cannot be read are skipped and listed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import colored_squares as squares
from torino.core.errors import BadParameter, BadTokens
from torino.datasets import SourceUnavailable
from torino.interpret import collect_top_activations, name_concepts
from torino.interpret.photos import PhotoReader
from torino.interpret.top_activations import FILE


def test_planted_squares_are_found_at_their_positions() -> None:
    reader = PhotoReader(squares.make_photos(), squares.make_tower(), squares.make_tower(block=0))
    result = collect_top_activations(squares.make_sae(), reader, keep=4, batch=7)
    assert result.active_photos.tolist() == [8, 0, 8, 8, 24]
    assert result.active_patches[:4].tolist() == [8, 0, 16, 24]
    assert result.monosemanticity.dead == 1
    for number, latent in enumerate(squares.LATENTS.values()):
        assert [photo for photo, _ in result.get_photos(latent)] == [number, number + 3, number + 6, number + 9]
        for rank, (photo, value) in enumerate(result.get_photos(latent)):
            assert value == pytest.approx(1.0)
            assert result.get_map(latent, rank)[0].tolist() == sorted((photo + i) % 16 for i in range(number + 1))
    assert result.metadata["embedding"] == "CLS token of tiny-colors, block 0"


def test_unreadable_photos_are_skipped_and_listed() -> None:
    photos = squares.make_photos()
    photos.photos[3] = squares.MemoryPhoto("broken", b"no image")
    result = collect_top_activations(squares.make_sae(), PhotoReader(photos, squares.make_tower()), keep=4)
    assert list(result.skipped) == [3]
    assert "not an image" in result.skipped[3]
    assert result.photo_count == 23
    assert [photo for photo, _ in result.get_photos(0)] == [0, 6, 9, 12]
    assert result.grids[3].tolist() == [0, 0]
    names = name_concepts(result, PhotoReader(photos, squares.make_tower()).get_texts())
    assert names[0].name == "red"
    photos.photos = [squares.MemoryPhoto("broken", b"no image")] * 24
    with pytest.raises(BadTokens, match=r"Fewer than two of the 24 photos could be read\. First error: .*not an image"):
        collect_top_activations(squares.make_sae(), PhotoReader(photos, squares.make_tower()), keep=4)
    with pytest.raises(BadParameter, match="no photos to read"):
        PhotoReader(squares.MemoryPhotos([]), squares.make_tower())


def test_photo_refused_by_the_tower_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    photos, tower = squares.make_photos(), squares.make_tower()
    refused = PhotoReader(photos, tower)._prepare(3).tobytes()
    process = tower.process

    def refuse_one(pictures: Any) -> Any:
        if any(picture.tobytes() == refused for picture in pictures):
            raise ValueError("a size that it was not made for")
        return process(pictures)

    monkeypatch.setattr(tower, "process", refuse_one)
    result = collect_top_activations(squares.make_sae(), PhotoReader(photos, tower), keep=4, batch=7)
    assert list(result.skipped) == [3]
    assert "refused an image: a size that it was not made for" in result.skipped[3]
    assert result.photo_count == 23


def test_unavailable_source_stops_the_run(tmp_path: Path) -> None:
    """A disconnected disk is not a series of broken photos, and no result is saved."""

    class DisconnectedPhotos(squares.MemoryPhotos):
        def __getitem__(self, index: int) -> Any:
            if index >= 10:
                raise SourceUnavailable(Path("disk"))
            return super().__getitem__(index)

    reader = PhotoReader(DisconnectedPhotos(squares.make_photos().photos), squares.make_tower())
    with pytest.raises(SourceUnavailable, match="disk existed"):
        collect_top_activations(squares.make_sae(), reader, keep=4, batch=5, output=tmp_path)
    assert not (tmp_path / FILE).exists()
    with pytest.raises(SourceUnavailable):
        reader.get_texts()


def test_unreadable_caption_does_not_stop_the_others() -> None:
    class MissingCaption(squares.MemoryPhotos):
        def __getitem__(self, index: int) -> Any:
            if index == 3:
                raise FileNotFoundError(2, "No such file or directory", "3.txt")
            return super().__getitem__(index)

    reader = PhotoReader(MissingCaption(squares.make_photos().photos), squares.make_tower())
    result = collect_top_activations(squares.make_sae(), reader, keep=4)
    assert result.skipped == {3: "Photo 3 cannot be read: No such file or directory."}
    assert [number for number, texts in enumerate(reader.get_texts()) if not texts] == [3]


def test_result_of_another_tower_with_the_same_name_is_not_reused(tmp_path: Path) -> None:
    photos = squares.make_photos()
    before = collect_top_activations(
        squares.make_sae(), PhotoReader(photos, squares.make_tower()), keep=4, output=tmp_path
    )
    tower = squares.make_tower()
    with torch.no_grad():
        tower.model.get_parameter("embeddings.patch_embeddings.projection.weight").mul_(0.5)
    after = collect_top_activations(squares.make_sae(), PhotoReader(photos, tower), keep=4, output=tmp_path)
    assert before.metadata["tower"] == after.metadata["tower"]
    assert before.metadata["weights"] != after.metadata["weights"]
    assert not torch.equal(before.activation_sum, after.activation_sum)


def test_result_of_other_photos_of_the_same_names_and_sizes_is_not_reused(tmp_path: Path) -> None:
    photos, others = squares.make_photos(), squares.make_photos()
    others.photos.reverse()  # the fingerprint of both is "squares"
    results = [
        collect_top_activations(squares.make_sae(), PhotoReader(each, squares.make_tower()), keep=4, output=tmp_path)
        for each in (photos, others)
    ]
    assert [photo for photo, _ in results[0].get_photos(0)] == [0, 3, 6, 9]
    assert [photo for photo, _ in results[1].get_photos(0)] == [2, 5, 8, 11]
