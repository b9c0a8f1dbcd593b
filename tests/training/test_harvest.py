"""Harvesting with tiny towers: what the tower itself says, whole shards, and the same bytes however often killed."""

from __future__ import annotations

import errno
import itertools
import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from PIL import Image
from torch import Tensor, nn
from typer.testing import CliRunner

from torino import BadFile, BadParameter, BadTokens, MissingSignal, TorinoError
from torino.cli.activations import harvest as command
from torino.core import io as files_module
from torino.datasets import Photo, Photos, open_photos
from torino.training.activations import cache as harvest_module
from torino.training.activations import shards as shards_module
from torino.training.activations.cache import harvest
from torino.training.activations.extraction import Looker
from torino.training.activations.selection import TokenKind
from torino.training.activations.store import Store
from torino.training.activations.stream import Stream
from torino.training.config import TrainConfig
from torino.training.trainer import train
from torino.vlm.towers import Tower, load_tower

COUNT, PATCHES, SIDE, WIDTH = 11, 16, 56, 32
VISION: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": SIDE,
    "patch_size": 14,
}


def _clip() -> tuple[nn.Module, Any]:
    from transformers import CLIPImageProcessorPil, CLIPVisionConfig, CLIPVisionModel

    processor = CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE})
    return CLIPVisionModel(CLIPVisionConfig(**VISION)), processor


def _dinov2() -> tuple[nn.Module, Any]:
    from transformers import BitImageProcessorPil, Dinov2Config, Dinov2Model

    processor = BitImageProcessorPil(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE})
    return Dinov2Model(Dinov2Config(**VISION)), processor


def _siglip2() -> tuple[nn.Module, Any]:
    """A tower without CLS, whose grid follows the shape of the photo."""
    from transformers import Siglip2ImageProcessorPil, Siglip2VisionConfig, Siglip2VisionModel

    config = Siglip2VisionConfig(**{**VISION, "num_patches": 16})
    return Siglip2VisionModel(config), Siglip2ImageProcessorPil(patch_size=14, max_num_patches=16)


def write_tower(folder: Path, make: Callable[[], tuple[nn.Module, Any]] = _clip, seed: int = 0) -> Path:
    torch.manual_seed(seed)
    model, processor = make()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.2)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def clip_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tower(tmp_path_factory.mktemp("towers") / "tiny-clip")


@pytest.fixture(scope="session")
def clip(clip_folder: Path) -> Tower:
    return load_tower(clip_folder, block=1)


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photos of several shapes, one of them cut off and one that is none at all."""
    top = tmp_path_factory.mktemp("pictures")
    source = np.random.default_rng(0)
    for number in range(COUNT):
        size = (60 + 7 * (number % 3), 80 - 5 * (number % 4), 3)
        Image.fromarray(source.integers(0, 255, size, dtype=np.uint8)).save(top / f"{number:02d}.jpg")
    whole = (top / "04.jpg").read_bytes()
    (top / "04.jpg").write_bytes(whole[: len(whole) // 2])
    (top / "07.jpg").write_bytes(b"this is no photo")
    return top


@pytest.fixture
def photos(pictures: Path) -> Photos:
    return open_photos(pictures)


GOOD = [number for number in range(COUNT) if number not in (4, 7)]
QUICK: dict[str, Any] = {"batch": 3, "shard_rows": 3 * PATCHES}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


# ------------------------------------------------------------------ what is in a store


@pytest.mark.parametrize("make", [_clip, _dinov2])
@pytest.mark.parametrize("padding", ["crop", "square"])
def test_all_patches_are_those_of_the_tower(
    tmp_path: Path, photos: Photos, pictures: Path, make: Any, padding: Any
) -> None:
    tower = load_tower(write_tower(tmp_path / "tiny", make), block=1)
    store = harvest(tower, photos, tmp_path / "store", padding=padding, **QUICK)
    assert store.rows == len(GOOD) * PATCHES
    assert len(store.shards) == 4
    assert store.names == photos.names()
    for number in GOOD:
        (seen,) = tower.look(pictures / f"{number:02d}.jpg", padding=padding)
        torch.testing.assert_close(store.photo_rows(number), seen.patches, atol=2e-3, rtol=2e-3)
        assert store.grid_of(number) == (4, 4)
    assert [each.name for each in store.skipped] == ["04.jpg", "07.jpg"]
    listed = (tmp_path / "store" / "skipped.txt").read_text().splitlines()
    assert listed[1].startswith("07.jpg\t")
    assert "not an image" in listed[1]
    assert str(pictures) not in listed[0] + listed[1]


def test_the_card_tells_what_was_harvested(tmp_path: Path, clip: Tower, photos: Photos) -> None:
    store = harvest(clip, photos, tmp_path / "store", given={"tower": "x"}, **QUICK)
    card = json.loads((tmp_path / "store" / "card.json").read_text())
    wanted = {"encoder": "tiny-clip", "block": 1, "padding": "crop", "tokens": "all", "seed": 0, "dtype": "float16"}
    wanted |= {"photos": COUNT, "rows": store.rows, "skipped": 2, "complete": True, "width": WIDTH}
    assert {name: card[name] for name in wanted} == wanted
    assert card["fingerprint"] == photos.fingerprint
    assert card["data"] == photos.describe
    assert card["given"] == {"tower": "x"}
    whole = store.take(range(store.rows)).double()
    assert card["mean"] == pytest.approx(whole.mean(0).tolist())
    assert card["mean_norm"] == pytest.approx(whole.norm(dim=1).mean().item())
    assert sum(shard["rows"] for shard in card["shards"]) == store.rows
    assert store.facts["encoder"] == clip.origin.encoder


def test_the_cls_token(tmp_path: Path, clip: Tower, photos: Photos, pictures: Path) -> None:
    store = harvest(clip, photos, tmp_path, tokens="cls", dtype="float32", batch=4)
    assert store.rows == len(GOOD)
    (seen,) = clip.look(pictures / "05.jpg")
    assert seen.cls is not None
    torch.testing.assert_close(store.photo_rows(5), seen.cls[None], atol=1e-5, rtol=1e-5)
    assert store.origins([0, 4])[0].tolist() == [0, 5]
    assert store.origins([0])[1].tolist() == [-1]
    assert store.facts["token_kind"] == "cls"


def test_random_patches_hang_on_the_name_alone(tmp_path: Path, clip: Tower, photos: Photos, pictures: Path) -> None:
    stores = {
        size: harvest(clip, photos, tmp_path / str(size), tokens="random:3", seed=5, batch=size, dtype="float32")
        for size in (1, 4, 16)
    }
    one = stores[1]
    assert one.rows == 3 * len(GOOD)
    for other in stores.values():
        assert torch.equal(other.origins(range(one.rows))[1], one.origins(range(one.rows))[1])
        torch.testing.assert_close(other.take(range(one.rows)), one.take(range(one.rows)), atol=1e-5, rtol=1e-5)
    for number in GOOD:
        chosen = one.origins(one.rows_of(number))[1]
        assert len(set(chosen.tolist())) == 3
        (seen,) = clip.look(pictures / f"{number:02d}.jpg")
        torch.testing.assert_close(one.photo_rows(number), seen.patches[chosen], atol=1e-5, rtol=1e-5)
    some = open_photos(pictures / "0[5689].jpg")
    part = harvest(clip, some, tmp_path / "part", tokens="random:3", seed=5, dtype="float32")
    assert torch.equal(part.origins(part.rows_of(0))[1], one.origins(one.rows_of(5))[1])
    other = harvest(clip, photos, tmp_path / "seed", tokens="random:3", seed=6, dtype="float32")
    assert not torch.equal(other.origins(range(one.rows))[1], one.origins(range(one.rows))[1])


def test_random_patches_are_spread_evenly() -> None:
    kind = TokenKind.of("random:4")
    drawn = torch.cat([kind.patches(PATCHES, f"{number}.jpg", 0) for number in range(1000)])
    counts = drawn.bincount(minlength=PATCHES)
    assert abs(counts - 250).max() < 5 * 188**0.5
    assert kind.patches(3, "small.jpg", 0).tolist() == [0, 1, 2]


def test_grids_may_differ_from_photo_to_photo(tmp_path: Path, photos: Photos, pictures: Path) -> None:
    tower = load_tower(write_tower(tmp_path / "siglip", _siglip2), block=1)
    store = harvest(tower, photos, tmp_path / "store", **QUICK)
    grids = {store.grid_of(number) for number in GOOD}
    assert len(grids) > 1
    for number in GOOD:
        (seen,) = tower.look(pictures / f"{number:02d}.jpg")
        assert store.grid_of(number) == seen.grid
        torch.testing.assert_close(store.photo_rows(number), seen.patches, atol=2e-3, rtol=2e-3)
    with pytest.raises(MissingSignal, match="has no CLS token"):
        harvest(tower, photos, tmp_path / "cls", tokens="cls")


def test_photos_from_a_table_give_the_same_rows(tmp_path: Path, clip: Tower, photos: Photos, pictures: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    data = [path.read_bytes() for path in sorted(pictures.iterdir())]
    pq.write_table(pa.table({"file": photos.names(), "image": data}), tmp_path / "p.parquet", row_group_size=4)
    one = harvest(clip, photos, tmp_path / "one", tokens="random:2", **QUICK)
    two = harvest(clip, open_photos(tmp_path / "p.parquet"), tmp_path / "two", tokens="random:2", **QUICK)
    assert torch.equal(one.take(range(one.rows)), two.take(range(two.rows)))


# ------------------------------------------------------------------ stopping and going on


def _dies(after: int) -> None:
    """Have this process killed without warning at one of the next moments at which a file is written or renamed."""
    moments = itertools.count(1)

    def counted(real: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            if next(moments) >= after:
                if real is files_module._save_safetensors:  # in the middle of a shard
                    Path(arguments[1]).write_bytes(b"half of it")
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **options)

        return call

    files_module._save_safetensors = counted(files_module._save_safetensors)
    os.fsync = counted(os.fsync)
    Path.replace = counted(Path.replace)  # type: ignore[method-assign]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_killed_run_goes_on_to_the_same_bytes(tmp_path: Path, clip: Tower, photos: Photos) -> None:
    """Killed at random moments, again and again, with no chance to clean up; half-written files stay behind."""
    options: dict[str, Any] = {"tokens": "random:5", "batch": 2, "shard_rows": 10}
    harvest(clip, photos, tmp_path / "whole", **options)
    draw, killed, left, finished = random.Random(0), tmp_path / "killed", 0, False
    deaths = 0
    while not finished:
        after = draw.randint(1, 12)
        child = os.fork()
        if child == 0:
            try:
                _dies(after)
                harvest(clip, photos, killed, **options)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        _, status = os.waitpid(child, 0)
        finished = not os.WIFSIGNALED(status)
        assert not finished or os.WEXITSTATUS(status) == 0
        deaths += not finished
        left += len([path for path in killed.rglob(".*") if path.name != ".lock"])
        assert deaths < 60
    assert deaths > 3
    assert left > 0
    assert contents(killed) == contents(tmp_path / "whole")


def test_an_interrupted_run_keeps_its_shards(tmp_path: Path, clip: Tower, photos: Photos) -> None:
    whole = harvest(clip, photos, tmp_path / "whole", **QUICK)

    def stop(done: int, skipped: int) -> None:
        if done >= 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        harvest(clip, photos, tmp_path / "store", progress=stop, **QUICK)
    with pytest.raises(BadFile, match="not finished: 3 of 4 shards"):
        Store.open(tmp_path / "store")
    assert Store.open(tmp_path / "store", unfinished=True).rows == 7 * PATCHES  # also what was being written
    told: list[tuple[int, int]] = []
    # another size of shards changes nothing in a store that is begun
    harvest(clip, photos, tmp_path / "store", batch=3, shard_rows=7, progress=lambda *now: told.append(now))
    assert told == [(9, 0), (COUNT, 0)]
    assert contents(tmp_path / "store") == contents(whole.folder)


def test_a_finished_store_is_not_touched(tmp_path: Path, clip: Tower, photos: Photos) -> None:
    harvest(clip, photos, tmp_path, **QUICK)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    told: list[tuple[int, int]] = []
    harvest(clip, photos, tmp_path, progress=lambda *now: told.append(now), **QUICK)
    assert told == [(COUNT, 0)]
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()} == before


def test_other_settings_are_refused(tmp_path: Path, clip: Tower, photos: Photos, pictures: Path) -> None:
    store = tmp_path / "store"
    harvest(clip, photos, store, tokens="random:2", **QUICK)
    before = contents(store)
    others: list[tuple[str, Any]] = [
        ("tokens random:2, and now it is tokens random:3", {"tokens": "random:3"}),
        ("seed 0, and now it is seed 1", {"seed": 1}),
        ("padding crop, and now it is padding square", {"padding": "square"}),
        ("dtype float16, and now it is dtype float32", {"dtype": "float32"}),
    ]
    for said, change in others:
        with pytest.raises(BadParameter, match=said):
            harvest(clip, photos, store, **{"tokens": "random:2", **QUICK, **change})
    with pytest.raises(BadParameter, match="11 photos, and now it is 5 photos"):
        harvest(clip, open_photos(pictures, limit=5), store, tokens="random:2", **QUICK)
    with pytest.raises(BadParameter, match="block 1, and now it is block 0"):
        harvest(Tower(clip.model, clip.processor, 0, encoder="tiny-clip"), photos, store, tokens="random:2", **QUICK)
    twin = load_tower(write_tower(tmp_path / "tiny-clip", seed=1), block=1)
    with pytest.raises(BadParameter, match="weights and processor have the hash"):
        harvest(twin, photos, store, tokens="random:2", **QUICK)
    assert contents(store) == before


def test_two_runs_do_not_share_a_store(tmp_path: Path, clip: Tower, photos: Photos) -> None:
    pytest.importorskip("fcntl")

    def another(done: int, skipped: int) -> None:
        with pytest.raises(BadFile, match="Another run is harvesting"):
            harvest(clip, photos, tmp_path, **QUICK)

    harvest(clip, photos, tmp_path, progress=another, **QUICK)


# ------------------------------------------------------------------ damage


@pytest.mark.parametrize("repair", [False, True])
def test_a_cut_shard_is_told_and_harvested_again(tmp_path: Path, clip: Tower, photos: Photos, repair: bool) -> None:
    store = harvest(clip, photos, tmp_path, **QUICK)
    before = contents(tmp_path)
    path = store.shards[2].path
    path.write_bytes(path.read_bytes()[:700])
    with pytest.raises(BadFile, match=r"00002\.safetensors is cut off"):
        Store.open(tmp_path)
    told: list[tuple[int, int]] = []
    with pytest.warns(UserWarning, match=r"00002\.safetensors is cut off or damaged.* It is harvested again"):
        harvest(clip, photos, tmp_path, repair=repair, progress=lambda *now: told.append(now), **QUICK)
    assert told[0] == (8, 0)  # and none of the others
    assert contents(tmp_path) == before


def test_a_wrong_byte_is_repaired(tmp_path: Path, clip: Tower, photos: Photos) -> None:
    store = harvest(clip, photos, tmp_path, **QUICK)
    before = contents(tmp_path)
    path = store.shards[1].path
    data = bytearray(path.read_bytes())
    data[-5] ^= 64
    path.write_bytes(data)
    with pytest.warns(UserWarning, match="checksum"):
        harvest(clip, photos, tmp_path, repair=True, **QUICK)
    assert contents(tmp_path) == before


def test_a_broken_card_is_written_anew(tmp_path: Path, clip: Tower, photos: Photos) -> None:
    harvest(clip, photos, tmp_path, **QUICK)
    before = contents(tmp_path)
    (tmp_path / "card.json").write_text("{")
    told: list[tuple[int, int]] = []
    with pytest.warns(UserWarning, match="It is written anew"):
        harvest(clip, photos, tmp_path, progress=lambda *now: told.append(now), **QUICK)
    assert told == [(COUNT, 0)]  # the shards are still those
    assert contents(tmp_path) == before


def test_a_full_disk_leaves_a_store_that_goes_on(
    tmp_path: Path, clip: Tower, photos: Photos, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = harvest(clip, photos, tmp_path / "whole", **QUICK)
    real, room = shards_module.write_arrays, [2]

    def write(path: Path, *arguments: Any) -> Any:
        room[0] -= 1
        if room[0] < 0:
            with monkeypatch.context() as full:
                full.setattr("torino.core.io._save_safetensors", _no_space)
                return real(path, *arguments)
        return real(path, *arguments)

    monkeypatch.setattr(shards_module, "write_arrays", write)
    with pytest.raises(BadFile, match=r"No space left on device.* 6 of 11 photos are kept .*run the same again"):
        harvest(clip, photos, tmp_path / "store", **QUICK)
    assert Store.open(tmp_path / "store", unfinished=True).rows == 5 * PATCHES
    room[0] = 99
    harvest(clip, photos, tmp_path / "store", **QUICK)
    assert contents(tmp_path / "store") == contents(whole.folder)


def _no_space(tensors: Any, target: Path, metadata: Any) -> None:
    target.write_bytes(b"half of it")
    raise OSError(errno.ENOSPC, "No space left on device")


def test_photos_that_are_taken_away_stop_the_run(tmp_path: Path, clip: Tower, pictures: Path) -> None:
    """A disk that was pulled out is not a heap of broken photos; back again, the run goes on."""
    shutil.copytree(pictures, tmp_path / "disk")
    whole = harvest(clip, open_photos(tmp_path / "disk"), tmp_path / "whole", **QUICK)

    def unplug(done: int, skipped: int) -> None:
        if done == 3:
            (tmp_path / "disk").rename(tmp_path / "drawer")

    photos = open_photos(tmp_path / "disk")
    with pytest.raises(BadFile, match=r"disk was there .* of 11 photos are kept in .*run the same again"):
        harvest(clip, photos, tmp_path / "store", progress=unplug, **{**QUICK, "batch": 1})
    (tmp_path / "drawer").rename(tmp_path / "disk")
    harvest(clip, photos, tmp_path / "store", **{**QUICK, "batch": 1})
    again = Store.open(tmp_path / "store")
    assert [each.name for each in again.skipped] == [each.name for each in whole.skipped]
    assert again.rows == whole.rows


def test_a_folder_of_other_things_is_left_alone(tmp_path: Path, clip: Tower, photos: Photos) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(BadFile, match=r"holds other things, such as thesis\.tex"):
        harvest(clip, photos, tmp_path, **QUICK)
    (tmp_path / "file").write_text("")
    with pytest.raises(BadFile, match="Cannot write to"):
        harvest(clip, photos, tmp_path / "file", **QUICK)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "thesis.tex"]


def test_values_beyond_half_precision_are_told(tmp_path: Path, photos: Photos) -> None:
    tower = load_tower(write_tower(tmp_path / "tiny"), block=1)
    with torch.no_grad():
        tower.model.get_submodule("encoder.layers.1.mlp.fc2").bias.fill_(70_000)  # type: ignore[union-attr]
    with pytest.raises(BadTokens, match=r"00\.jpg gives a value of 70,0\d\d, and half .*--dtype float32"):
        harvest(tower, photos, tmp_path / "half", **QUICK)
    assert harvest(tower, photos, tmp_path / "full", dtype="float32", **QUICK).mean.max() > 60_000


def test_photos_that_the_tower_refuses_are_skipped_one_by_one(
    tmp_path: Path, clip: Tower, photos: Photos, monkeypatch: pytest.MonkeyPatch
) -> None:
    (seen,) = Looker(clip, photos).look([[5]])
    mark = float(seen[0].rows.sum())  # type: ignore[union-attr]
    real = clip.see

    def see(inputs: Any) -> Any:
        tokens = real(inputs)
        if any(abs(float(each.patches.sum()) - mark) < 1e-3 for each in tokens):
            raise ValueError("a size that it was not made for")
        return tokens

    monkeypatch.setattr(clip, "see", see)
    store = harvest(clip, photos, tmp_path, **QUICK)
    assert [each.name for each in store.skipped] == ["04.jpg", "05.jpg", "07.jpg"]
    assert store.skipped[1].reason == "a size that it was not made for"


@pytest.mark.skipif(os.name == "nt" or sys.platform == "darwin", reason="file names are UTF-8 there")
def test_names_that_are_no_text_are_written_out(tmp_path: Path, clip: Tower, pictures: Path) -> None:
    (tmp_path / "photos").mkdir()
    for name, photo in ((b"caf\xe9.jpg", "00.jpg"), (b"bad\xe9.jpg", "07.jpg"), ("tür\x85.jpg".encode(), "01.jpg")):
        shutil.copy(pictures / photo, os.fsencode(tmp_path / "photos") + b"/" + name)
    store = harvest(clip, open_photos(tmp_path / "photos"), tmp_path / "store", **QUICK)
    assert store.names == ["bad\\udce9.jpg", "caf\\udce9.jpg", "tür\x85.jpg"]
    assert store.rows == 2 * PATCHES
    assert [each.name for each in store.skipped] == ["bad\\udce9.jpg"]
    assert "bad\\udce9.jpg is not an image" in (tmp_path / "store" / "skipped.txt").read_text("utf-8")


def test_when_no_photo_can_be_used(tmp_path: Path, clip: Tower) -> None:
    for name in ("a.jpg", "b.jpg"):
        (tmp_path / name).write_bytes(b"nothing")
    for tokens in ("all", "cls"):
        with pytest.raises(TorinoError, match=r"None of the 2 photos could be used. The first, a\.jpg: "):
            harvest(clip, open_photos(tmp_path), tmp_path / tokens, tokens=tokens)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tokens": "random"}, "random:R"),
        ({"tokens": "random:0"}, "random:R"),
        ({"padding": "none"}, "padding must be"),
        ({"dtype": "bfloat16"}, "dtype must be"),
        ({"batch": 0}, "batch must be"),
        ({"shard_rows": 0}, "shard_rows must be"),
    ],
)
def test_bad_options(tmp_path: Path, clip: Tower, photos: Photos, change: dict[str, Any], said: str) -> None:
    with pytest.raises(BadParameter, match=said):
        harvest(clip, photos, tmp_path / "store", **change)
    assert not (tmp_path / "store").exists()


def test_photos_are_decoded_ahead_but_not_far(clip: Tower, photos: Photos) -> None:
    read: list[int] = []

    class Watched(Photos):
        def _photo(self, index: int) -> Photo:
            read.append(index)
            return photos[index % COUNT]

    many = Watched([str(number) for number in range(200)], "", "")
    looker = Looker(clip, many)
    looker.workers = 2
    going = looker.look([range(start, start + 4) for start in range(0, 200, 4)])
    next(going)
    deadline = time.monotonic() + 10
    while len(read) < 12 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert sorted(read) == list(range(12))  # the batch given out and the two behind it
    going.close()


# ------------------------------------------------------------------ streams


def apart(one: Tensor, other: Tensor) -> Tensor:
    return torch.cdist(one, other, compute_mode="donot_use_mm_for_euclid_dist")


def rows_of(tower: Tower, photos: Photos, **options: Any) -> Callable[..., Tensor]:
    return Stream(tower, photos, seed=3, batch=2, **options).batch


@pytest.mark.parametrize("tokens", ["all", "random:3", "cls"])
def test_a_stream_can_be_asked_for_any_step(clip: Tower, photos: Photos, tokens: str) -> None:
    options: dict[str, Any] = {"tokens": tokens, "buffer": 4}
    forward = rows_of(clip, photos, **options)
    batches = [forward(step, 10) for step in range(20)]
    assert all(batch.shape == (10, WIDTH) and batch.dtype == torch.float32 for batch in batches)
    for step in (13, 2, 19):
        assert torch.equal(rows_of(clip, photos, **options)(step, 10), batches[step])
    assert not torch.equal(Stream(clip, photos, tokens, seed=4, batch=2, buffer=4).batch(0, 10), batches[0])


def test_a_stream_resumed_looks_at_one_buffer_only(
    clip: Tower, photos: Photos, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[int] = []
    real = Looker.look

    def look(self: Looker, batches: Any) -> Any:
        batches = [list(batch) for batch in batches]
        looked.extend(index for batch in batches for index in batch)
        return real(self, batches)

    monkeypatch.setattr(Looker, "look", look)
    stream = Stream(clip, photos, seed=0, buffer=4, batch=2)
    stream.batch(1000, 16)
    assert len(looked) == 4
    for step in range(1001, 1004):
        stream.batch(step, 16)
    assert len(looked) == 4
    looked.clear()
    Stream(clip, photos, seed=0, buffer=4, batch=2).batch(1000, 16, (1, 2))
    assert len(looked) == 2  # the other half is for another process to look at


def test_a_stream_goes_through_all_photos(clip: Tower, photos: Photos, pictures: Path) -> None:
    """In a pass every patch of every photo comes once, but for those that fill in for photos that cannot be read."""
    stream = Stream(clip, photos, seed=1, buffer=4, batch=4)
    size = 16
    seen = torch.cat([stream.batch(step, size) for step in range(COUNT * PATCHES // size)])
    patches = torch.cat([each.patches for each in clip.look([pictures / f"{number:02d}.jpg" for number in GOOD])])
    distance, nearest = apart(seen, patches).min(1)
    assert distance.max() < 1e-3
    # eleven photos in lanes of four: the last lane has begun the next pass
    assert len(nearest.unique()) > 0.8 * len(patches)
    assert {name: each.name for name, each in stream.skipped.items()} == {"04.jpg": "04.jpg", "07.jpg": "07.jpg"}


def test_the_parts_of_a_streamed_batch_are_the_batch(clip: Tower, photos: Photos) -> None:
    for size in (16, 37):
        whole = rows_of(clip, photos, buffer=8)(5, size)
        for world in (2, 3, 5):
            parts = [rows_of(clip, photos, buffer=8)(5, size, (rank, world)) for rank in range(world)]
            torch.testing.assert_close(torch.cat(parts), whole, atol=1e-5, rtol=1e-5)


def test_a_stream_mixes_its_photos(clip: Tower, photos: Photos) -> None:
    stream = Stream(clip, photos, seed=0, buffer=8, batch=2)
    batch = stream.batch(0, 32)
    owners: set[int] = set()
    for number in GOOD:
        (seen,) = Looker(clip, photos).look([[number]])
        rows = seen[0].rows  # type: ignore[union-attr]
        if float(apart(batch, rows).min()) < 1e-3:
            owners.add(number)
    assert len(owners) >= 5


def test_a_lane_of_broken_photos_is_filled_by_another(clip: Tower, tmp_path: Path, pictures: Path) -> None:
    for number in range(6):
        good = number == 3
        (tmp_path / f"{number}.jpg").write_bytes((pictures / "01.jpg").read_bytes() if good else b"broken")
    stream = Stream(clip, open_photos(tmp_path), tokens="all", buffer=6, batch=1)
    (seen,) = clip.look(tmp_path / "3.jpg")
    assert apart(stream.batch(0, 24), seen.patches).min(1).values.max() < 1e-3
    assert len(stream.skipped) == 5
    (tmp_path / "3.jpg").write_bytes(b"broken")
    with pytest.raises(TorinoError, match="None of the"):
        Stream(clip, open_photos(tmp_path), tokens="cls", buffer=6, batch=1).batch(0, 4)


def test_a_stream_says_what_it_is(clip: Tower, photos: Photos) -> None:
    stream = Stream(clip, photos, "random:2")
    assert (stream.rows, stream.width) == (None, WIDTH)
    assert stream.facts["encoder"] == "tiny-clip"
    assert stream.facts["token_kind"] == "2 random tokens per image"
    for bad in ({"buffer": 0}, {"batch": 0}):
        with pytest.raises(BadParameter, match="at least 1"):
            Stream(clip, photos, **bad)  # type: ignore[arg-type]
    with pytest.raises(BadParameter, match="step from 0"):
        stream.batch(-1, 4)


def test_a_run_on_a_stream_goes_on_with_the_same_rows_only(tmp_path: Path, clip: Tower, pictures: Path) -> None:
    """Another buffer, padding or lane is another order; photos and weights of the same name may be others."""

    def begin(folder: Path = pictures, tower: Tower = clip, **changes: Any) -> None:
        options: dict[str, Any] = {"buffer": 4, "batch": 2, **changes}
        recipe = TrainConfig(expansion=1, k=4, steps=2, batch=16)
        train(Stream(tower, open_photos(folder), **options), recipe, tmp_path / "sae")

    begin()
    begin()
    for change, said in (
        ({"buffer": 8}, "buffer was 4, now 8"),
        ({"batch": 3}, "lane was 2, now 3"),
        ({"padding": "square"}, "padding was 'crop', now 'square'"),
    ):
        with pytest.raises(BadParameter, match=said):
            begin(**change)
    others = shutil.copytree(pictures, tmp_path / pictures.name)
    shutil.copy(others / "00.jpg", others / "01.jpg")
    with pytest.raises(BadParameter, match=r"settings: activations\.fingerprint was '\w+', now '\w+'\. Give"):
        begin(others)
    retrained = load_tower(write_tower(tmp_path / "tiny-clip", seed=1), block=1)
    with pytest.raises(BadParameter, match=r"settings: activations\.tower was '\w+', now '\w+'\. Give"):
        begin(tower=retrained)


# ------------------------------------------------------------------ the command

app = typer.Typer()
app.command()(command)


def run(*arguments: str | Path) -> Any:
    """Run the command; an error is the one that the real one would print."""
    found = CliRunner().invoke(app, [str(each) for each in arguments])
    if found.exception is not None and not isinstance(found.exception, SystemExit):
        raise found.exception
    return found


def test_the_command(tmp_path: Path, clip_folder: Path, pictures: Path) -> None:
    store = tmp_path / "store"
    first = run("--tower", clip_folder, "--block", "1", "--images", pictures, "--tokens", "random:2", "-o", store)
    assert "18 rows of width 32: 2 random patches of each of 11 photos" in first.output
    assert "2 photos could not be used" in " ".join(first.output.split())
    before = contents(store)
    assert "checksums right" in run("-o", store, "--check").output
    (store / "shards" / "00000.safetensors").unlink()
    with pytest.raises(BadFile, match=r"is missing.*--repair"):
        run("-o", store, "--check")
    told = json.loads(run("-o", store, "--repair", "--json").output)  # what it was made of stands in the card
    assert (told["rows"], told["skipped"], told["shards"]) == (18, 2, 1)
    assert contents(store) == before
    assert "there already" in run("-o", store).output
    with pytest.raises(BadParameter, match="block 1, and now it is block 0"):
        run("-o", store, "--block", "0")
    with pytest.raises(BadParameter, match="not both"):
        run("-o", store, "--check", "--repair")
    card = store / "card.json"
    card.write_text(card.read_text().replace('"complete": true', '"complete": false'))
    (store / "shards" / "00000.safetensors").unlink()
    with pytest.raises(BadFile, match="not finished: 0 of 1"):
        run("-o", store, "--check")


def test_the_command_asks_for_what_is_missing(tmp_path: Path, clip_folder: Path, pictures: Path) -> None:
    with pytest.raises(BadParameter, match="--tower openai"):
        run("-o", tmp_path / "store", "--images", pictures)
    with pytest.raises(BadParameter, match="--images"):
        run("-o", tmp_path / "store", "--tower", clip_folder)
    with pytest.raises(BadFile, match="holds no store"):
        run("-o", tmp_path / "store", "--check")
    assert not (tmp_path / "store").exists()


def test_the_command_stopped_says_how_to_go_on(
    tmp_path: Path, clip_folder: Path, pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(harvest_module, "_fill", stopped)
    found = run("--tower", clip_folder, "--images", pictures, "--tokens", "cls", "-o", tmp_path / "store")
    assert found.exit_code == 130
    assert "torino harvest -o" in found.output

    def full(*_: Any, **__: Any) -> None:
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(harvest_module, "_fill", full)
    with pytest.raises(TorinoError, match="--batch 4"):
        run("--tower", clip_folder, "--images", pictures, "--tokens", "cls", "-o", tmp_path / "store")


def test_warnings_are_left_as_they_were(tmp_path: Path, clip: Tower, photos: Photos) -> None:
    before = list(warnings.filters)
    harvest(clip, photos, tmp_path, tokens="cls")
    assert list(warnings.filters) == before
