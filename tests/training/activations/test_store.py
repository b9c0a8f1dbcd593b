"""Activation stores: rows by step, by photo and by number, and damaged shards."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.support.files import flip_byte, read_only
from torino.core import verified
from torino.core.checksum import verify_safetensors
from torino.core.errors import BadFile, BadParameter
from torino.core.io import read_arrays
from torino.training.activations.selection import SkippedPhoto
from torino.training.activations.shards import CacheSettings, Shard, open_shards, write_shard
from torino.training.activations.store import Store

WIDTH = 6
SETTINGS = CacheSettings("tiny/clip", 3, WIDTH, "0123", "all", "crop", 0, "float16", "9 photos of a test", "abcd", 9, 4)


def write_store(folder: Path, settings: CacheSettings = SETTINGS) -> list[Tensor]:
    """Write a store whose rows contain their photo index; photo 2 was skipped, and grids differ."""
    generator = torch.Generator().manual_seed(0)
    photos: list[Tensor] = []
    for number in range(settings.shards):
        rows: list[Tensor] = []
        patches: list[Tensor] = []
        indices = settings.photo_range(number)
        counts = [0 if index == 2 else 2 + index % 3 for index in indices]
        for index, count in zip(indices, counts, strict=True):
            values = torch.randn(count, WIDTH, generator=generator)
            values[:, 0] = index
            photos.append(values.to(torch.float16).float())
            rows.append(values.to({"float16": torch.float16, "float32": torch.float32}[settings.dtype]))
            patches.append(torch.arange(count, dtype=torch.int32) * 3 + index)
        write_shard(
            settings.shard_path(folder, number),
            settings.digest,
            torch.cat(rows),
            torch.tensor(counts, dtype=torch.int32),
            torch.tensor([(1, count) if count else (0, 0) for count in counts], dtype=torch.int32),
            torch.cat(patches) if settings.tokens.startswith("random") else None,
            [SkippedPhoto(2, "photo 2", "It is broken.")] if 2 in indices else [],
        )
    names = "".join(json.dumps(f"photo {index}\n") + "\n" for index in range(settings.photos))
    (folder / "photos.jsonl").write_text(names)
    (folder / "card.json").write_text(json.dumps({"complete": True, **asdict(settings)}))
    return photos


def test_rows_by_photo_and_by_number(tmp_path: Path) -> None:
    photos = write_store(tmp_path)
    store = Store.open(tmp_path)
    expected = torch.cat(photos)
    assert (store.rows, store.width) == expected.shape
    assert store.names[3] == "photo 3\n"
    for index, rows in enumerate(photos):
        assert torch.equal(store.photo_rows(index), rows)
        assert torch.equal(expected[list(store.row_range(index))], rows)
        assert store.photo_grid(index) == ((1, len(rows)) if len(rows) else (0, 0))
    wanted = [7, 0, 0, store.rows - 1, 12]
    assert torch.equal(store.get_rows(wanted), expected[wanted])
    assert store.get_rows(wanted).dtype == torch.float32
    indices, patches = store.locate_rows(range(store.rows))
    assert indices.tolist() == expected[:, 0].long().tolist()
    assert patches.tolist() == [patch for rows in photos for patch in range(len(rows))]
    assert [(photo.name, photo.reason) for photo in store.skipped] == [("photo 2", "It is broken.")]
    for bad in ([-1], [store.rows]):
        with pytest.raises(BadParameter, match="rows must be from 0"):
            store.get_rows(bad)
    with pytest.raises(BadParameter, match="photo must be from 0 to 8"):
        store.row_range(9)


def test_rows_of_random_patches_are_located(tmp_path: Path) -> None:
    photos = write_store(tmp_path, replace(SETTINGS, tokens="random:3"))
    indices, patches = Store.open(tmp_path).locate_rows(range(5, 15))
    expected = [(index, 3 * place + index) for index, rows in enumerate(photos) for place in range(len(rows))][5:15]
    assert list(zip(indices.tolist(), patches.tolist(), strict=True)) == expected


def test_mean_and_norms(tmp_path: Path) -> None:
    expected = torch.cat(write_store(tmp_path)).double()
    store = Store.open(tmp_path)
    torch.testing.assert_close(store.mean, expected.mean(0).float())
    assert store.mean_norm == pytest.approx(expected.norm(dim=1).mean().item())
    assert store.rms_norm == pytest.approx(expected.square().sum(1).mean().sqrt().item())
    assert store.variance == pytest.approx((expected - expected.mean(0)).square().sum(1).mean().item())


@pytest.mark.parametrize("read_block", [1, 4])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_batches_depend_only_on_seed_and_step(tmp_path: Path, read_block: int, dtype: str) -> None:
    expected = torch.cat(write_store(tmp_path, replace(SETTINGS, dtype=dtype)))
    store, size = Store.open(tmp_path, seed=1, read_block=read_block), 5
    rows = store.rows
    batches = [store.batch(step, size) for step in range(2 * rows // size + 1)]
    assert all(batch.shape == (size, WIDTH) and batch.dtype == torch.float32 for batch in batches)
    epochs = torch.cat(batches)
    for epoch in (epochs[:rows], epochs[rows : 2 * rows]):  # each row once in each epoch
        assert sorted(epoch.half().float().tolist()) == sorted(expected.tolist())
    assert not torch.equal(epochs[:rows], epochs[rows : 2 * rows])
    again = Store.open(tmp_path, seed=1, read_block=read_block)
    assert all(torch.equal(again.batch(step, size), batches[step]) for step in (4, 0, 3))
    assert not torch.equal(Store.open(tmp_path, seed=2, read_block=read_block).batch(0, size), batches[0])
    for processes in (2, 3, 7):
        parts = [store.batch(3, size, (rank, processes)) for rank in range(processes)]
        assert torch.equal(torch.cat(parts), batches[3])
    with pytest.raises(BadParameter, match="size must be at least 1"):
        store.batch(0, 0)


def test_metadata(tmp_path: Path) -> None:
    write_store(tmp_path)
    metadata = Store.open(tmp_path).metadata
    assert metadata["encoder"] == "tiny/clip"
    assert metadata["block"] == 3
    assert metadata["token_kind"] == "patch"
    assert metadata["data"] == "9 photos of a test"


# ------------------------------------------------------------------ damaged stores


def damage(path: Path, how: str) -> str:
    """Damage a shard and return the expected message."""
    data = bytearray(path.read_bytes())
    if how == "truncated":
        path.write_bytes(data[: len(data) // 2])
    elif how == "truncated header":
        path.write_bytes(data[:20])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "header":
        data[9:12] = b"!!!"
        path.write_bytes(data)
    elif how == "grown":
        path.write_bytes(bytes(data) + b"more")
    elif how == "missing":
        path.unlink()
        return "is missing"
    return "truncated or damaged"


@pytest.mark.parametrize("how", ["truncated", "truncated header", "empty", "header", "grown", "missing"])
def test_damaged_shard_is_reported_and_the_others_can_be_used(tmp_path: Path, how: str) -> None:
    photos = write_store(tmp_path)
    message = damage(SETTINGS.shard_path(tmp_path, 1), how)
    with pytest.raises(BadFile, match=rf"00001\.safetensors .*{message}.*torino activations -o .*; the other 2 shards"):
        Store.open(tmp_path)
    store = Store.open(tmp_path, allow_incomplete=True)
    assert store.rows == sum(map(len, photos)) - sum(map(len, photos[4:8]))
    assert list(store.row_range(5)) == []
    assert torch.equal(store.photo_rows(8), photos[8])


def test_wrong_byte_is_found_by_the_checksum(tmp_path: Path) -> None:
    write_store(tmp_path)
    path = SETTINGS.shard_path(tmp_path, 2)
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    faults = open_shards(tmp_path, SETTINGS)[1]
    assert list(faults) == [2]
    with pytest.raises(
        BadFile, match=r"00002\.safetensors is damaged: .* checksum\. Run torino activations -o .* again"
    ):
        Store.open(tmp_path)


def test_shards_are_verified_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORINO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(verified, "SETTLED", 0.0)
    monkeypatch.setattr(verified, "MIN_BYTES", 1)
    (tmp_path / "store").mkdir()
    write_store(tmp_path / "store")
    time.sleep(0.05)
    reads: list[Path] = []
    monkeypatch.setattr(Shard, "verify", lambda shard: reads.append(shard.path))
    for _ in range(3):
        Store.open(tmp_path / "store")
    assert len(reads) == 3
    open_shards(tmp_path / "store", SETTINGS, verify_again=True)
    assert len(reads) == 6


def test_a_shard_of_an_earlier_version_is_verified(tmp_path: Path) -> None:
    """Earlier versions wrote the checksum of the tensors, but none of the file."""
    photos = write_store(tmp_path)
    path = SETTINGS.shard_path(tmp_path, 0)
    save_file(*read_arrays(path)[:1], path, read_arrays(path)[1])
    assert verify_safetensors(path) is None
    assert torch.equal(Store.open(tmp_path).photo_rows(1), photos[1])
    flip_byte(path, -3)
    with pytest.raises(BadFile, match=r"00000\.safetensors is damaged"):
        Store.open(tmp_path)


def test_a_store_is_read_from_a_read_only_folder(tmp_path: Path) -> None:
    photos = write_store(tmp_path)
    with read_only(tmp_path):
        assert torch.equal(Store.open(tmp_path).get_rows(range(4)), torch.cat(photos)[:4])


def test_shard_with_other_settings_is_rejected(tmp_path: Path) -> None:
    write_store(tmp_path)
    with pytest.raises(BadFile, match="other settings"):
        Shard.open(SETTINGS.shard_path(tmp_path, 0), replace(SETTINGS, seed=1).digest)
    assert replace(SETTINGS, data="another description").digest == SETTINGS.digest


def test_missing_or_incomplete_store(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match="is not an activation store"):
        Store.open(tmp_path)
    write_store(tmp_path)
    card = json.loads((tmp_path / "card.json").read_text())
    (tmp_path / "card.json").write_text(json.dumps(card | {"complete": False}))
    SETTINGS.shard_path(tmp_path, 0).unlink()
    with pytest.raises(BadFile, match="not complete: 2 of 3 shards"):
        Store.open(tmp_path)
    del card["width"]
    (tmp_path / "card.json").write_text(json.dumps(card))
    with pytest.raises(BadFile, match="'width' is missing"):
        Store.open(tmp_path)


def test_more_shards_than_open_files_are_allowed(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    settings = replace(SETTINGS, photos=40, photos_per_shard=1)
    photos = write_store(tmp_path, settings)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(list(Path("/dev/fd").iterdir())) + 10, limits[1]))
    try:
        store = Store.open(tmp_path)
        assert torch.equal(store.get_rows(range(store.rows)), torch.cat(photos))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
