"""Orders without memory, and stores: rows by step, by photo and by number; damage is found."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from torino import BadFile, BadParameter
from torino.training.activations.selection import Skipped
from torino.training.activations.shards import CacheSettings, Shard, open_shards, write_shard
from torino.training.activations.store import Store
from torino.training.sampler import Order, endless, key_of

WIDTH = 6
SETTINGS = CacheSettings("tiny/clip", 3, WIDTH, "0123", "all", "crop", 0, "float16", "9 photos of a test", "abcd", 9, 4)


# ------------------------------------------------------------------ orders


@given(st.integers(1, 700), st.integers(0, 2**64 - 1), st.integers(1, 60), st.integers(1, 300))
def test_an_order_has_everything_once(count: int, key: int, block: int, window: int) -> None:
    order = Order(count, key, block=block, window=window)
    assert np.sort(order.at(np.arange(count))).tolist() == list(range(count))


def test_places_can_be_asked_for_one_by_one() -> None:
    order = Order(1000, key_of(5))
    whole = order.at(np.arange(1000))
    assert [int(order.at(np.array([place]))[0]) for place in (0, 17, 999)] == whole[[0, 17, 999]].tolist()


def test_a_large_order_is_worked_out_at_once() -> None:
    count = 10**12
    found = Order(count, key_of(0)).at(np.arange(count - 5000, count))
    assert len(set(found.tolist())) == 5000
    assert found.min() >= 0
    assert found.max() < count


def test_orders_are_as_if_drawn() -> None:
    """Where each thing lands, over many keys: a chi-square within four deviations of what chance gives."""
    count, draws = 20, 1500
    landed = np.zeros((count, count))
    for number in range(draws):
        landed[np.arange(count), Order(count, key_of(number)).at(np.arange(count))] += 1
    expected, freedom = draws / count, (count - 1) ** 2
    assert abs(((landed - expected) ** 2 / expected).sum() - freedom) < 4 * (2 * freedom) ** 0.5


def test_a_local_order_reads_few_blocks_at_a_time() -> None:
    order = Order(10_000, key_of(1), block=50, window=500)
    found = order.at(np.arange(10_000))
    first = found[:500]
    assert len(set((first // 50).tolist())) == 10
    assert len(set((found[500:1000] // 50).tolist())) == 10
    assert (np.diff(first) == 1).mean() < 0.05  # and they are mixed
    assert np.unique(first // 50).max() > 40  # from all over


def test_a_sequence_without_end_has_everything_once_in_each_pass_and_anew() -> None:
    found = endless(np.arange(30), 10, seed=3)
    passes = [found[start : start + 10].tolist() for start in (0, 10, 20)]
    assert all(sorted(each) == list(range(10)) for each in passes)
    assert len(set(map(tuple, passes))) == 3
    assert endless(np.arange(7, 23), 10, seed=3).tolist() == found[7:23].tolist()
    assert endless(np.arange(30), 10, seed=4).tolist() != found.tolist()


# ------------------------------------------------------------------ stores


def fill(folder: Path, settings: CacheSettings = SETTINGS) -> list[Tensor]:
    """A store of rows that say where they are from; photo 2 was skipped, and grids differ."""
    source = torch.Generator().manual_seed(0)
    photos: list[Tensor] = []
    for number in range(settings.shards):
        rows: list[Tensor] = []
        patches: list[Tensor] = []
        here = settings.range_of(number)
        counts = [0 if index == 2 else 2 + index % 3 for index in here]
        for index, count in zip(here, counts, strict=True):
            one = torch.randn(count, WIDTH, generator=source)
            one[:, 0] = index
            photos.append(one.to(torch.float16).float())
            rows.append(one.to({"float16": torch.float16, "float32": torch.float32}[settings.dtype]))
            patches.append(torch.arange(count, dtype=torch.int32) * 3 + index)
        write_shard(
            settings.file_of(folder, number),
            settings.digest,
            torch.cat(rows),
            torch.tensor(counts, dtype=torch.int32),
            torch.tensor([(1, count) if count else (0, 0) for count in counts], dtype=torch.int32),
            torch.cat(patches) if settings.tokens.startswith("random") else None,
            [Skipped(2, "photo 2", "It is broken.")] if 2 in here else [],
        )
    names = "".join(json.dumps(f"photo {index}\n") + "\n" for index in range(settings.photos))
    (folder / "photos.jsonl").write_text(names)
    (folder / "card.json").write_text(json.dumps({"complete": True, **asdict(settings)}))
    return photos


def test_rows_by_photo_and_by_number(tmp_path: Path) -> None:
    photos = fill(tmp_path)
    store = Store.open(tmp_path)
    whole = torch.cat(photos)
    assert (store.rows, store.width) == whole.shape
    assert store.names[3] == "photo 3\n"
    for index, rows in enumerate(photos):
        assert torch.equal(store.photo_rows(index), rows)
        assert torch.equal(whole[list(store.rows_of(index))], rows)
        assert store.grid_of(index) == ((1, len(rows)) if len(rows) else (0, 0))
    wanted = [7, 0, 0, store.rows - 1, 12]
    assert torch.equal(store.take(wanted), whole[wanted])
    assert store.take(wanted).dtype == torch.float32
    found, patches = store.origins(range(store.rows))
    assert found.tolist() == whole[:, 0].long().tolist()
    assert patches.tolist() == [patch for rows in photos for patch in range(len(rows))]
    assert [(each.name, each.reason) for each in store.skipped] == [("photo 2", "It is broken.")]
    for bad in ([-1], [store.rows]):
        with pytest.raises(BadParameter, match="numbered from 0"):
            store.take(bad)
    with pytest.raises(BadParameter, match="numbered from 0 to 8"):
        store.rows_of(9)


def test_random_patches_are_known_by_number(tmp_path: Path) -> None:
    photos = fill(tmp_path, replace(SETTINGS, tokens="random:3"))
    found, patches = Store.open(tmp_path).origins(range(5, 15))
    said = [(index, 3 * place + index) for index, rows in enumerate(photos) for place in range(len(rows))][5:15]
    assert list(zip(found.tolist(), patches.tolist(), strict=True)) == said


def test_mean_and_norms(tmp_path: Path) -> None:
    whole = torch.cat(fill(tmp_path)).double()
    store = Store.open(tmp_path)
    torch.testing.assert_close(store.mean, whole.mean(0).float())
    assert store.mean_norm == pytest.approx(whole.norm(dim=1).mean().item())
    assert store.rms_norm == pytest.approx(whole.square().sum(1).mean().sqrt().item())
    assert store.variance == pytest.approx((whole - whole.mean(0)).square().sum(1).mean().item())


@pytest.mark.parametrize("local", [1, 4])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_batches_are_pure_in_seed_and_step(tmp_path: Path, local: int, dtype: str) -> None:
    whole = torch.cat(fill(tmp_path, replace(SETTINGS, dtype=dtype)))
    store, size = Store.open(tmp_path, seed=1, local=local), 5
    rows = store.rows
    batches = [store.batch(step, size) for step in range(2 * rows // size + 1)]
    assert all(batch.shape == (size, WIDTH) and batch.dtype == torch.float32 for batch in batches)
    seen = torch.cat(batches)
    for passed in (seen[:rows], seen[rows : 2 * rows]):  # each row once in each pass
        assert sorted(passed.half().float().tolist()) == sorted(whole.tolist())
    assert not torch.equal(seen[:rows], seen[rows : 2 * rows])
    again = Store.open(tmp_path, seed=1, local=local)
    assert all(torch.equal(again.batch(step, size), batches[step]) for step in (4, 0, 3))
    assert not torch.equal(Store.open(tmp_path, seed=2, local=local).batch(0, size), batches[0])
    for world in (2, 3, 7):
        parts = [store.batch(3, size, (rank, world)) for rank in range(world)]
        assert torch.equal(torch.cat(parts), batches[3])
    with pytest.raises(BadParameter, match="size of at least 1"):
        store.batch(0, 0)


def test_facts_are_those_of_a_card(tmp_path: Path) -> None:
    fill(tmp_path)
    facts = Store.open(tmp_path).facts
    assert facts["encoder"] == "tiny/clip"
    assert facts["block"] == 3
    assert facts["token_kind"] == "patch"
    assert facts["data"] == "9 photos of a test"


# ------------------------------------------------------------------ damage


def damaged(path: Path, how: str) -> str:
    """Damage a shard; what is said of it then."""
    data = bytearray(path.read_bytes())
    if how == "cut":
        path.write_bytes(data[: len(data) // 2])
    elif how == "cut in the header":
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
    return "cut off or damaged"


@pytest.mark.parametrize("how", ["cut", "cut in the header", "empty", "header", "grown", "missing"])
def test_a_damaged_shard_is_told_and_the_others_can_be_used(tmp_path: Path, how: str) -> None:
    photos = fill(tmp_path)
    said = damaged(SETTINGS.file_of(tmp_path, 1), how)
    with pytest.raises(BadFile, match=rf"00001\.safetensors .*{said}.*torino harvest -o .*; the other 2 shards"):
        Store.open(tmp_path)
    store = Store.open(tmp_path, unfinished=True)
    assert store.rows == sum(map(len, photos)) - sum(map(len, photos[4:8]))
    assert list(store.rows_of(5)) == []
    assert torch.equal(store.photo_rows(8), photos[8])


def test_a_wrong_byte_is_found_by_the_checksum(tmp_path: Path) -> None:
    fill(tmp_path)
    path = SETTINGS.file_of(tmp_path, 2)
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    assert open_shards(tmp_path, SETTINGS)[1] == {}
    faults = open_shards(tmp_path, SETTINGS, thorough=True)[1]
    assert list(faults) == [2]
    assert "checksum" in faults[2]


def test_a_shard_of_other_settings_is_not_taken(tmp_path: Path) -> None:
    fill(tmp_path)
    with pytest.raises(BadFile, match="other settings"):
        Shard.open(SETTINGS.file_of(tmp_path, 0), replace(SETTINGS, seed=1).digest)
    assert replace(SETTINGS, data="other words").digest == SETTINGS.digest


def test_what_is_no_store_or_not_finished(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match="holds no store"):
        Store.open(tmp_path)
    fill(tmp_path)
    card = json.loads((tmp_path / "card.json").read_text())
    (tmp_path / "card.json").write_text(json.dumps(card | {"complete": False}))
    SETTINGS.file_of(tmp_path, 0).unlink()
    with pytest.raises(BadFile, match="not finished: 2 of 3 shards"):
        Store.open(tmp_path)
    del card["width"]
    (tmp_path / "card.json").write_text(json.dumps(card))
    with pytest.raises(BadFile, match="lacks 'width'"):
        Store.open(tmp_path)


def test_more_shards_than_a_process_may_have_open_files(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    settings = replace(SETTINGS, photos=40, photos_per_shard=1)
    photos = fill(tmp_path, settings)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(list(Path("/dev/fd").iterdir())) + 10, limits[1]))
    try:
        store = Store.open(tmp_path)
        assert torch.equal(store.take(range(store.rows)), torch.cat(photos))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
