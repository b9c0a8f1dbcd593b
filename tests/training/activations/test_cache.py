"""Caching activations with tiny towers: rows, interrupted runs and damaged stores."""

from __future__ import annotations

import errno
import itertools
import json
import os
import random
import shutil
import signal
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from tests.support.files import read_folder
from tests.support.tiny_towers import COUNT, GOOD, PATCHES, WIDTH, make_clip, make_dinov2, make_siglip2, write_tower
from torino import TorinoError
from torino.core import io as io_module
from torino.core.errors import BadFile, BadParameter, BadTokens, MissingSignal
from torino.datasets import Photos, open_photos
from torino.training.activations import shards as shards_module
from torino.training.activations.cache import cache_activations
from torino.training.activations.extraction import RowExtractor
from torino.training.activations.store import Store
from torino.vlm.towers import Tower, load_tower

SMALL_SHARDS: dict[str, Any] = {"batch": 3, "shard_rows": 3 * PATCHES}


# ------------------------------------------------------------------ contents of a store


@pytest.mark.parametrize("make", [make_clip, make_dinov2])
@pytest.mark.parametrize("padding", ["crop", "square"])
def test_all_patches_match_the_tower(
    tmp_path: Path, photos: Photos, photo_folder: Path, make: Any, padding: Any
) -> None:
    tower = load_tower(write_tower(tmp_path / "tiny", make), block=1)
    store = cache_activations(tower, photos, tmp_path / "store", padding=padding, **SMALL_SHARDS)
    assert store.rows == len(GOOD) * PATCHES
    assert len(store.shards) == 4
    assert store.names == photos.names()
    for number in GOOD:
        (expected,) = tower.encode(photo_folder / f"{number:02d}.jpg", padding=padding)
        torch.testing.assert_close(store.photo_rows(number), expected.patches, atol=2e-3, rtol=2e-3)
        assert store.photo_grid(number) == (4, 4)
    assert [photo.name for photo in store.skipped] == ["04.jpg", "07.jpg"]
    listed = (tmp_path / "store" / "skipped.txt").read_text().splitlines()
    assert listed[1].startswith("07.jpg\t")
    assert "not an image" in listed[1]
    assert str(photo_folder) not in listed[0] + listed[1]


def test_card_contents(tmp_path: Path, clip: Tower, photos: Photos) -> None:
    store = cache_activations(clip, photos, tmp_path / "store", source={"tower": "x"}, **SMALL_SHARDS)
    card = json.loads((tmp_path / "store" / "card.json").read_text())
    wanted = {"encoder": "tiny-clip", "block": 1, "padding": "crop", "tokens": "all", "seed": 0, "dtype": "float16"}
    wanted |= {"photos": COUNT, "rows": store.rows, "skipped": 2, "complete": True, "width": WIDTH}
    assert {name: card[name] for name in wanted} == wanted
    assert card["fingerprint"] == photos.fingerprint
    assert card["data"] == photos.describe
    assert card["given"] == {"tower": "x"}
    rows = store.get_rows(range(store.rows)).double()
    assert card["mean"] == pytest.approx(rows.mean(0).tolist())
    assert card["mean_norm"] == pytest.approx(rows.norm(dim=1).mean().item())
    assert sum(shard["rows"] for shard in card["shards"]) == store.rows
    assert store.metadata["encoder"] == clip.origin.encoder


def test_cls_token(tmp_path: Path, clip: Tower, photos: Photos, photo_folder: Path) -> None:
    store = cache_activations(clip, photos, tmp_path, tokens="cls", dtype="float32", batch=4)
    assert store.rows == len(GOOD)
    (expected,) = clip.encode(photo_folder / "05.jpg")
    assert expected.cls is not None
    torch.testing.assert_close(store.photo_rows(5), expected.cls[None], atol=1e-5, rtol=1e-5)
    assert store.locate_rows([0, 4])[0].tolist() == [0, 5]
    assert store.locate_rows([0])[1].tolist() == [-1]
    assert store.metadata["token_kind"] == "cls"


def test_random_patches_depend_only_on_the_name(
    tmp_path: Path, clip: Tower, photos: Photos, photo_folder: Path
) -> None:
    stores = {
        size: cache_activations(
            clip, photos, tmp_path / str(size), tokens="random:3", seed=5, batch=size, dtype="float32"
        )
        for size in (1, 4, 16)
    }
    reference = stores[1]
    assert reference.rows == 3 * len(GOOD)
    for other in stores.values():
        assert torch.equal(other.locate_rows(range(reference.rows))[1], reference.locate_rows(range(reference.rows))[1])
        torch.testing.assert_close(
            other.get_rows(range(reference.rows)), reference.get_rows(range(reference.rows)), atol=1e-5, rtol=1e-5
        )
    for number in GOOD:
        chosen = reference.locate_rows(reference.row_range(number))[1]
        assert len(set(chosen.tolist())) == 3
        (expected,) = clip.encode(photo_folder / f"{number:02d}.jpg")
        torch.testing.assert_close(reference.photo_rows(number), expected.patches[chosen], atol=1e-5, rtol=1e-5)
    subset = open_photos(photo_folder / "0[5689].jpg")
    part = cache_activations(clip, subset, tmp_path / "part", tokens="random:3", seed=5, dtype="float32")
    assert torch.equal(part.locate_rows(part.row_range(0))[1], reference.locate_rows(reference.row_range(5))[1])
    other = cache_activations(clip, photos, tmp_path / "seed", tokens="random:3", seed=6, dtype="float32")
    assert not torch.equal(other.locate_rows(range(reference.rows))[1], reference.locate_rows(range(reference.rows))[1])


def test_grids_may_differ_between_photos(tmp_path: Path, photos: Photos, photo_folder: Path) -> None:
    tower = load_tower(write_tower(tmp_path / "siglip", make_siglip2), block=1)
    store = cache_activations(tower, photos, tmp_path / "store", **SMALL_SHARDS)
    grids = {store.photo_grid(number) for number in GOOD}
    assert len(grids) > 1
    for number in GOOD:
        (expected,) = tower.encode(photo_folder / f"{number:02d}.jpg")
        assert store.photo_grid(number) == expected.grid
        torch.testing.assert_close(store.photo_rows(number), expected.patches, atol=2e-3, rtol=2e-3)
    with pytest.raises(MissingSignal, match="has no CLS token"):
        cache_activations(tower, photos, tmp_path / "cls", tokens="cls")


def test_photos_from_parquet_give_the_same_rows(
    tmp_path: Path, clip: Tower, photos: Photos, photo_folder: Path
) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    data = [path.read_bytes() for path in sorted(photo_folder.iterdir())]
    pq.write_table(pa.table({"file": photos.names(), "image": data}), tmp_path / "p.parquet", row_group_size=4)
    from_folder = cache_activations(clip, photos, tmp_path / "folder", tokens="random:2", **SMALL_SHARDS)
    from_table = cache_activations(
        clip, open_photos(tmp_path / "p.parquet"), tmp_path / "table", tokens="random:2", **SMALL_SHARDS
    )
    assert torch.equal(from_folder.get_rows(range(from_folder.rows)), from_table.get_rows(range(from_table.rows)))


# ------------------------------------------------------------------ interrupted runs


def _kill_self(after: int) -> None:
    """Kill this process without warning at the ``after``-th time that a file is written or renamed."""
    calls = itertools.count(1)

    def count(original: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            if next(calls) >= after:
                if original is io_module._save_safetensors:  # in the middle of a shard
                    Path(arguments[1]).write_bytes(b"partial")
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments, **options)

        return call

    io_module._save_safetensors = count(io_module._save_safetensors)
    os.fsync = count(os.fsync)
    Path.replace = count(Path.replace)  # type: ignore[method-assign]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed_run_continues_to_the_same_bytes(tmp_path: Path, clip: Tower, photos: Photos) -> None:
    """Kill the run repeatedly at random moments, without any cleanup, so that partial files are left."""
    options: dict[str, Any] = {"tokens": "random:5", "batch": 2, "shard_rows": 10}
    cache_activations(clip, photos, tmp_path / "complete", **options)
    rng, killed, partial_files, finished = random.Random(0), tmp_path / "killed", 0, False
    deaths = 0
    while not finished:
        after = rng.randint(1, 12)
        child = os.fork()
        if child == 0:
            try:
                _kill_self(after)
                cache_activations(clip, photos, killed, **options)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        _, status = os.waitpid(child, 0)
        finished = not os.WIFSIGNALED(status)
        assert not finished or os.WEXITSTATUS(status) == 0
        deaths += not finished
        partial_files += len([path for path in killed.rglob(".*") if path.name != ".lock"])
        assert deaths < 60
    assert deaths > 3
    assert partial_files > 0
    assert read_folder(killed) == read_folder(tmp_path / "complete")


def test_interrupted_run_keeps_its_shards(tmp_path: Path, clip: Tower, photos: Photos) -> None:
    complete = cache_activations(clip, photos, tmp_path / "complete", **SMALL_SHARDS)

    def stop(done: int, skipped: int) -> None:
        if done >= 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cache_activations(clip, photos, tmp_path / "store", progress=stop, **SMALL_SHARDS)
    with pytest.raises(BadFile, match="not complete: 3 of 4 shards"):
        Store.open(tmp_path / "store")
    assert (
        Store.open(tmp_path / "store", allow_incomplete=True).rows == 7 * PATCHES
    )  # includes the shard that was being written
    reports: list[tuple[int, int]] = []
    # another shard size has no effect on an existing store
    cache_activations(
        clip, photos, tmp_path / "store", batch=3, shard_rows=7, progress=lambda *counts: reports.append(counts)
    )
    assert reports == [(9, 0), (COUNT, 0)]
    assert read_folder(tmp_path / "store") == read_folder(complete.folder)


def test_complete_store_is_not_changed(tmp_path: Path, clip: Tower, photos: Photos) -> None:
    cache_activations(clip, photos, tmp_path, **SMALL_SHARDS)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    reports: list[tuple[int, int]] = []
    cache_activations(clip, photos, tmp_path, progress=lambda *counts: reports.append(counts), **SMALL_SHARDS)
    assert reports == [(COUNT, 0)]
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()} == before


def test_other_settings_are_rejected(tmp_path: Path, clip: Tower, photos: Photos, photo_folder: Path) -> None:
    store = tmp_path / "store"
    cache_activations(clip, photos, store, tokens="random:2", **SMALL_SHARDS)
    before = read_folder(store)
    others: list[tuple[str, Any]] = [
        ("tokens random:2, got tokens random:3", {"tokens": "random:3"}),
        ("seed 0, got seed 1", {"seed": 1}),
        ("padding crop, got padding square", {"padding": "square"}),
        ("dtype float16, got dtype float32", {"dtype": "float32"}),
    ]
    for message, change in others:
        with pytest.raises(BadParameter, match=message):
            cache_activations(clip, photos, store, **{"tokens": "random:2", **SMALL_SHARDS, **change})
    with pytest.raises(BadParameter, match="11 photos, got 5 photos"):
        cache_activations(clip, open_photos(photo_folder, limit=5), store, tokens="random:2", **SMALL_SHARDS)
    with pytest.raises(BadParameter, match="block 1, got block 0"):
        cache_activations(
            Tower(clip.model, clip.processor, 0, encoder="tiny-clip"), photos, store, tokens="random:2", **SMALL_SHARDS
        )
    other_weights = load_tower(write_tower(tmp_path / "tiny-clip", seed=1), block=1)
    with pytest.raises(BadParameter, match="weights and processor have the hash"):
        cache_activations(other_weights, photos, store, tokens="random:2", **SMALL_SHARDS)
    assert read_folder(store) == before


def test_other_photos_of_the_same_names_and_sizes_are_rejected(tmp_path: Path, clip: Tower) -> None:
    for name, first in (("one", 0), ("two", 100)):
        (tmp_path / name / "photos").mkdir(parents=True)
        for number in range(4):
            Image.new("RGB", (40, 40), (first + number, 9, 9)).save(tmp_path / name / "photos" / f"{number}.bmp")
    one, two = (open_photos(tmp_path / name / "photos") for name in ("one", "two"))
    assert one.fingerprint == two.fingerprint

    def stop(done: int, skipped: int) -> None:
        if done >= 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cache_activations(clip, one, tmp_path / "store", progress=stop, **SMALL_SHARDS)
    with pytest.raises(BadParameter, match=r"started with other photos of the same names and sizes\. Use the same"):
        cache_activations(clip, two, tmp_path / "store", **SMALL_SHARDS)
    cache_activations(clip, one, tmp_path / "store", **SMALL_SHARDS)


def test_two_runs_cannot_share_a_store(tmp_path: Path, clip: Tower, photos: Photos) -> None:
    def start_second_run(done: int, skipped: int) -> None:
        with pytest.raises(BadFile, match="Another run is caching activations"):
            cache_activations(clip, photos, tmp_path, **SMALL_SHARDS)

    cache_activations(clip, photos, tmp_path, progress=start_second_run, **SMALL_SHARDS)


# ------------------------------------------------------------------ damaged stores


@pytest.mark.parametrize("repair", [False, True])
def test_truncated_shard_is_written_again(tmp_path: Path, clip: Tower, photos: Photos, repair: bool) -> None:
    store = cache_activations(clip, photos, tmp_path, **SMALL_SHARDS)
    before = read_folder(tmp_path)
    path = store.shards[2].path
    path.write_bytes(path.read_bytes()[:700])
    with pytest.raises(BadFile, match=r"00002\.safetensors is truncated"):
        Store.open(tmp_path)
    reports: list[tuple[int, int]] = []
    with pytest.warns(UserWarning, match=r"00002\.safetensors is truncated or damaged.* It is written again"):
        cache_activations(
            clip, photos, tmp_path, repair=repair, progress=lambda *counts: reports.append(counts), **SMALL_SHARDS
        )
    assert reports[0] == (8, 0)  # the other shards are kept
    assert read_folder(tmp_path) == before


@pytest.mark.parametrize("repair", [False, True])
def test_wrong_byte_is_repaired(tmp_path: Path, clip: Tower, photos: Photos, repair: bool) -> None:
    store = cache_activations(clip, photos, tmp_path, **SMALL_SHARDS)
    before = read_folder(tmp_path)
    path = store.shards[1].path
    data = bytearray(path.read_bytes())
    data[-5] ^= 64
    path.write_bytes(data)
    with pytest.raises(BadFile, match=r"00001\.safetensors is damaged: .* checksum\. Run torino activations -o"):
        Store.open(tmp_path)
    with pytest.warns(UserWarning, match="checksum"):
        cache_activations(clip, photos, tmp_path, repair=repair, **SMALL_SHARDS)
    assert read_folder(tmp_path) == before


def test_damaged_card_is_written_again(tmp_path: Path, clip: Tower, photos: Photos) -> None:
    cache_activations(clip, photos, tmp_path, **SMALL_SHARDS)
    before = read_folder(tmp_path)
    (tmp_path / "card.json").write_text("{")
    reports: list[tuple[int, int]] = []
    with pytest.warns(UserWarning, match="The card is written again"):
        cache_activations(clip, photos, tmp_path, progress=lambda *counts: reports.append(counts), **SMALL_SHARDS)
    assert reports == [(COUNT, 0)]  # the shards are kept
    assert read_folder(tmp_path) == before


def test_run_continues_after_a_full_disk(
    tmp_path: Path, clip: Tower, photos: Photos, monkeypatch: pytest.MonkeyPatch
) -> None:
    complete = cache_activations(clip, photos, tmp_path / "complete", **SMALL_SHARDS)
    write_arrays, room = shards_module.write_arrays, [2]

    def write(path: Path, *arguments: Any) -> Any:
        room[0] -= 1
        if room[0] < 0:
            with monkeypatch.context() as full:
                full.setattr("torino.core.io._save_safetensors", _no_space)
                return write_arrays(path, *arguments)
        return write_arrays(path, *arguments)

    monkeypatch.setattr(shards_module, "write_arrays", write)
    with pytest.raises(
        BadFile, match=r"No space left on device.* 6 of 11 photos are saved .*run the same command again"
    ):
        cache_activations(clip, photos, tmp_path / "store", **SMALL_SHARDS)
    assert Store.open(tmp_path / "store", allow_incomplete=True).rows == 5 * PATCHES
    room[0] = 99
    cache_activations(clip, photos, tmp_path / "store", **SMALL_SHARDS)
    assert read_folder(tmp_path / "store") == read_folder(complete.folder)


def _no_space(tensors: Any, target: Path, metadata: Any) -> None:
    target.write_bytes(b"partial")
    raise OSError(errno.ENOSPC, "No space left on device")


def test_disconnected_disk_stops_the_run(tmp_path: Path, clip: Tower, photo_folder: Path) -> None:
    """A disconnected disk is not reported as broken photos; after reconnecting, the run continues."""
    shutil.copytree(photo_folder, tmp_path / "disk")
    complete = cache_activations(clip, open_photos(tmp_path / "disk"), tmp_path / "complete", **SMALL_SHARDS)

    def unplug(done: int, skipped: int) -> None:
        if done == 3:
            (tmp_path / "disk").rename(tmp_path / "elsewhere")

    photos = open_photos(tmp_path / "disk")
    with pytest.raises(BadFile, match=r"disk existed .* of 11 photos are saved in .*run the same command again"):
        cache_activations(clip, photos, tmp_path / "store", progress=unplug, **{**SMALL_SHARDS, "batch": 1})
    (tmp_path / "elsewhere").rename(tmp_path / "disk")
    cache_activations(clip, photos, tmp_path / "store", **{**SMALL_SHARDS, "batch": 1})
    again = Store.open(tmp_path / "store")
    assert [photo.name for photo in again.skipped] == [photo.name for photo in complete.skipped]
    assert again.rows == complete.rows


def test_folder_with_other_files_is_not_changed(tmp_path: Path, clip: Tower, photos: Photos) -> None:
    (tmp_path / "thesis.tex").write_text("text")
    with pytest.raises(BadFile, match=r"contains other files, such as thesis\.tex"):
        cache_activations(clip, photos, tmp_path, **SMALL_SHARDS)
    (tmp_path / "file").write_text("")
    with pytest.raises(BadFile, match="Cannot write to"):
        cache_activations(clip, photos, tmp_path / "file", **SMALL_SHARDS)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "thesis.tex"]


def test_values_too_large_for_half_precision_are_reported(tmp_path: Path, photos: Photos) -> None:
    tower = load_tower(write_tower(tmp_path / "tiny"), block=1)
    with torch.no_grad():
        tower.model.get_submodule("encoder.layers.1.mlp.fc2").bias.fill_(70_000)  # type: ignore[union-attr]
    with pytest.raises(BadTokens, match=r"00\.jpg has an activation of 70,0\d\d, and float16 .*--dtype float32"):
        cache_activations(tower, photos, tmp_path / "half", **SMALL_SHARDS)
    assert cache_activations(tower, photos, tmp_path / "full", dtype="float32", **SMALL_SHARDS).mean.max() > 60_000


def test_photos_rejected_by_the_tower_are_skipped_individually(
    tmp_path: Path, clip: Tower, photos: Photos, monkeypatch: pytest.MonkeyPatch
) -> None:
    (results,) = RowExtractor(clip, photos).extract([[5]])
    total = float(results[0].rows.sum())  # type: ignore[union-attr]
    visual_tokens = clip.visual_tokens

    def reject_one(inputs: Any) -> Any:
        tokens = visual_tokens(inputs)
        if any(abs(float(image.patches.sum()) - total) < 1e-3 for image in tokens):
            raise ValueError("unsupported size")
        return tokens

    monkeypatch.setattr(clip, "visual_tokens", reject_one)
    store = cache_activations(clip, photos, tmp_path, **SMALL_SHARDS)
    assert [photo.name for photo in store.skipped] == ["04.jpg", "05.jpg", "07.jpg"]
    assert store.skipped[1].reason == "unsupported size"


@pytest.mark.skipif(os.name == "nt" or sys.platform == "darwin", reason="file names are UTF-8 there")
def test_names_that_are_not_utf8_are_escaped(tmp_path: Path, clip: Tower, photo_folder: Path) -> None:
    (tmp_path / "photos").mkdir()
    for name, photo in ((b"caf\xe9.jpg", "00.jpg"), (b"bad\xe9.jpg", "07.jpg"), ("tür\x85.jpg".encode(), "01.jpg")):
        shutil.copy(photo_folder / photo, os.fsencode(tmp_path / "photos") + b"/" + name)
    store = cache_activations(clip, open_photos(tmp_path / "photos"), tmp_path / "store", **SMALL_SHARDS)
    assert store.names == ["bad\\udce9.jpg", "caf\\udce9.jpg", "tür\x85.jpg"]
    assert store.rows == 2 * PATCHES
    assert [photo.name for photo in store.skipped] == ["bad\\udce9.jpg"]
    assert "bad\\udce9.jpg is not an image" in (tmp_path / "store" / "skipped.txt").read_text("utf-8")


def test_no_usable_photo(tmp_path: Path, clip: Tower) -> None:
    for name in ("a.jpg", "b.jpg"):
        (tmp_path / name).write_bytes(b"nothing")
    for tokens in ("all", "cls"):
        with pytest.raises(TorinoError, match=r"None of the 2 photos could be used. The first, a\.jpg: "):
            cache_activations(clip, open_photos(tmp_path), tmp_path / tokens, tokens=tokens)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": "random"}, "random:R"),
        ({"tokens": "random:0"}, "random:R"),
        ({"padding": "none"}, "padding must be"),
        ({"dtype": "bfloat16"}, "dtype must be"),
        ({"batch": 0}, "batch must be"),
        ({"shard_rows": 0}, "shard_rows must be"),
    ],
)
def test_invalid_options(tmp_path: Path, clip: Tower, photos: Photos, change: dict[str, Any], message: str) -> None:
    with pytest.raises(BadParameter, match=message):
        cache_activations(clip, photos, tmp_path / "store", **change)
    assert not (tmp_path / "store").exists()


def test_warning_filters_are_restored(tmp_path: Path, clip: Tower, photos: Photos) -> None:
    before = list(warnings.filters)
    cache_activations(clip, photos, tmp_path, tokens="cls")
    assert list(warnings.filters) == before
