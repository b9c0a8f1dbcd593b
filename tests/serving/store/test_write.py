"""Write token stores: contents, sources, resumption, parts, refusals and damage."""

from __future__ import annotations

import io
import json
import shutil
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from tests.serving.store.conftest import BROKEN, COUNT, OPTIONS
from tests.support.files import flip_byte
from tests.support.stores import store_bytes
from tests.support.tiny_vlm import photo
from torino import TorinoError
from torino.core.errors import BadFile, BadParameter, UnmetBudget
from torino.datasets import open_sources
from torino.serving.settings import ReductionSettings
from torino.serving.store import StoreOptions, TokenStore, reduce_images
from torino.serving.store import worker as worker_module
from torino.serving.store.worker import ShardWorker, StoreJob
from torino.vlm import load_vlm


def write(home: Path, folder: Path, settings: ReductionSettings, options: StoreOptions = OPTIONS, **others: Any) -> Any:
    sources = others.pop("sources", [home / "photos"])
    return reduce_images(sources, folder, str(home / "llava"), settings, options, **others)


class Interrupted(Exception):
    pass


def interrupt_after(images: int) -> Any:
    def progress(done: int, total: int, skipped: int) -> None:
        if done >= images:
            raise Interrupted

    return progress


# ---------------------------------------------------------------------- contents


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("torino-x", {}),
        ("torino-m", {"budget": 6}),
        ("torino-m", {"sae": "none"}),
        ("divprune", {"keep": 0.25}),
        ("none", {}),
    ],
)
def test_tokens_are_those_that_the_language_model_receives(
    home: Path, tmp_path: Path, method: str, options: dict[str, Any]
) -> None:
    sae = {"sae": str(home / "sae")} if method.startswith("torino") else {}
    settings = ReductionSettings(method, **{**sae, **options})
    summary = write(home, tmp_path / "store", settings)
    store, vlm, reducer = TokenStore(tmp_path / "store"), load_vlm(home / "llava"), settings.build()
    good = [f"{number:02d}.png" for number in range(COUNT) if number not in BROKEN]
    assert store.names == good
    assert (summary.images, summary.tokens, summary.complete) == (len(good), int(store.lengths.sum()), True)
    assert summary.placeholders == 16 * len(good)
    for image in store:
        expected = vlm.reduce(vlm.encode(home / "photos" / image.name, [reducer]), reducer)
        torch.testing.assert_close(image.tokens, expected.embeds[0].features)
        plan = expected.plans[0]
        assert torch.equal(image.anchors, expected.embeds[0].slots)
        assert torch.equal(image.masses, plan.sizes)
        assert torch.equal(image.concepts, plan.concept)
        assert (image.full, image.grid) == (16, (4, 4))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_tokens_are_stored_in_half_precision(
    home: Path, tmp_path: Path, reference: Path, settings: ReductionSettings, dtype: str
) -> None:
    write(home, tmp_path / "store", settings, replace(OPTIONS, dtype=dtype))
    half, exact = TokenStore(tmp_path / "store"), TokenStore(reference)
    assert str(half[3].tokens.dtype) == f"torch.{dtype}"
    for one, other in zip(half, exact, strict=True):
        assert torch.equal(one.tokens, other.tokens.to(half.dtype))
        assert torch.equal(one.anchors, other.anchors)


def test_a_value_beyond_float16_is_refused(
    home: Path, tmp_path: Path, settings: ReductionSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    reduce = ShardWorker._reduce

    def enlarge(self: ShardWorker, images: Any) -> Any:
        return [replace(image, tokens=image.tokens * 1e6) for image in reduce(self, images)]

    monkeypatch.setattr(ShardWorker, "_reduce", enlarge)
    with pytest.raises(TorinoError, match=r"00\.png has a value of .*--store-dtype bfloat16"):
        write(home, tmp_path / "store", settings, replace(OPTIONS, dtype="float16"))
    write(home, tmp_path / "other", settings, replace(OPTIONS, dtype="bfloat16"))


def test_images_that_cannot_be_used_are_recorded(home: Path, reference: Path, tmp_path: Path) -> None:
    lines = (reference / "skipped.txt").read_text().splitlines()
    assert [line.split("\t")[0] for line in lines] == ["05.png", "21.png"]
    assert "not an image in a known format" in lines[0]
    assert str(home) not in "".join(lines) + (reference / "manifest.json").read_text()
    assert [image.name for image in TokenStore(reference).skipped] == ["05.png", "21.png"]


def test_an_image_that_cannot_be_used_can_stop_the_run(home: Path, tmp_path: Path, settings: ReductionSettings) -> None:
    with pytest.raises(TorinoError, match=r"05\.png cannot be used: .*--on-error skip"):
        write(home, tmp_path / "store", settings, replace(OPTIONS, on_error="stop"))
    assert len(list((tmp_path / "store" / "shards").glob("*.safetensors"))) == 1  # before the broken one


def test_an_image_that_the_model_refuses_does_not_affect_the_others(
    home: Path, tmp_path: Path, reference: Path, settings: ReductionSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    reduce = ShardWorker._reduce
    seen: list[int] = []

    def refuse(self: ShardWorker, images: Any) -> Any:
        seen.append(len(images))
        if any(image.size == photo(120, seed=1).size for image in images):
            raise BadFile("This one cannot be encoded.")
        return reduce(self, images)

    monkeypatch.setattr(ShardWorker, "_reduce", refuse)
    write(home, tmp_path / "store", settings)
    store, whole = TokenStore(tmp_path / "store"), TokenStore(reference)
    assert {photo.reason for photo in store.skipped} >= {"This one cannot be encoded."}
    assert len(store) == len(whole) - sum(number % 3 == 1 for number in range(COUNT) if number not in BROKEN)
    for image in store:
        torch.testing.assert_close(image.tokens, whole[whole.find(image.name)].tokens)


def test_wrong_settings_are_reported_before_anything_is_written(home: Path, tmp_path: Path) -> None:
    with pytest.raises(UnmetBudget):
        write(home, tmp_path / "store", ReductionSettings("divprune", budget=17))
    with pytest.raises(BadParameter, match="depend on the other requests"):
        write(home, tmp_path / "store", ReductionSettings("torino-x(pooled=True)", sae=str(home / "sae"), budget=6))
    assert not list((tmp_path / "store").glob("[!.]*.json"))


def test_a_collection_without_any_usable_image_is_refused(
    home: Path, tmp_path: Path, settings: ReductionSettings
) -> None:
    with pytest.raises(TorinoError, match=r"None of the 2 photos could be used. The first, 05\.png: "):
        write(home, tmp_path / "store", settings, sources=[home / "photos" / f"{number:02d}.png" for number in BROKEN])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"dtype": "int8"}, "float16, bfloat16 or float32"),
        ({"batch": 0}, "batch must be"),
        ({"processes": 0}, "processes must be"),
        ({"part": (2, 2)}, "between 0 and 1"),
        ({"on_error": "ignore"}, "on_error must be one of"),
        ({"shard_images": 0}, "shard_images must be"),
    ],
)
def test_wrong_options_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(BadParameter, match=message):
        StoreOptions(**wrong)


# ---------------------------------------------------------------------- sources


def contents(store: Path) -> list[bytes]:
    return [bytes(image.tokens.view(torch.uint8).numpy().data) for image in TokenStore(store)]


def test_parquet_tar_and_several_sources_give_the_same_tokens(
    home: Path, tmp_path: Path, reference: Path, settings: ReductionSettings
) -> None:
    files = sorted((home / "photos").iterdir())
    halves = files[:10], files[10:]
    for number, part in enumerate(halves):
        columns: dict[str, Any] = {"image": [{"bytes": file.read_bytes(), "path": file.name} for file in part]}
        pq.write_table(pa.table(columns), tmp_path / f"part-{number}.parquet")
        with tarfile.open(tmp_path / f"part-{number}.tar", "w") as archive:
            for file in part:
                info = tarfile.TarInfo(file.name)
                info.size = file.stat().st_size
                archive.addfile(info, io.BytesIO(file.read_bytes()))
    cases: dict[str, list[Path]] = {
        "parquet": [tmp_path / "part-0.parquet", tmp_path / "part-1.parquet"],
        "pattern": [tmp_path / "part-*.tar"],
        "files": list(files),
        "mixed": [tmp_path / "part-0.tar", tmp_path / "part-1.parquet"],
    }
    expected = contents(reference)
    for name, sources in cases.items():
        write(home, tmp_path / name, settings, sources=sources)
        assert contents(tmp_path / name) == expected, name
        assert len(TokenStore(tmp_path / name).skipped) == len(BROKEN)


def test_photos_of_several_sources_have_unique_names_and_one_fingerprint(home: Path) -> None:
    twice = open_sources([home / "photos", home / "photos"])
    assert len(twice) == 2 * COUNT
    assert len(set(twice.names())) == 2 * COUNT
    assert twice[COUNT + 3].data == home / "photos" / "03.png"
    first = open_sources([home / "photos", home / "photos"], limit=COUNT + 1)
    assert len(first) == COUNT + 1
    assert first.fingerprint != twice.fingerprint
    with pytest.raises(BadFile, match="No source"):
        open_sources([])
    with pytest.raises(BadParameter, match="limit"):
        open_sources([home / "photos", home / "photos"], limit=0)


def test_a_limit_uses_the_first_images(home: Path, tmp_path: Path, settings: ReductionSettings) -> None:
    write(home, tmp_path / "store", settings, limit=4)
    assert TokenStore(tmp_path / "store").names == ["00.png", "01.png", "02.png", "03.png"]


# ---------------------------------------------------------------------- resumption


@pytest.mark.parametrize("images", [0, 1, 4, 13, COUNT])
def test_an_interrupted_run_continues_to_the_same_bytes(
    home: Path, tmp_path: Path, reference: Path, settings: ReductionSettings, images: int
) -> None:
    with pytest.raises(Interrupted):
        write(home, tmp_path / "store", settings, progress=interrupt_after(images))
    written = len(list((tmp_path / "store" / "shards").glob("*.safetensors")))
    with pytest.raises(BadFile, match=f"not complete: {written} of 6 shards"):
        TokenStore(tmp_path / "store")
    reports: list[tuple[int, int, int]] = []
    write(home, tmp_path / "store", settings, progress=lambda *report: reports.append(report))
    assert reports[0][0] == min(written * OPTIONS.shard_images, COUNT)
    assert store_bytes(tmp_path / "store") == store_bytes(reference)


def test_a_complete_store_is_not_written_again(home: Path, tmp_path: Path, settings: ReductionSettings) -> None:
    write(home, tmp_path / "store", settings)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "store" / "shards").iterdir()}
    assert write(home, tmp_path / "store", settings).new_images == 0
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "store" / "shards").iterdir()} == before


@pytest.mark.parametrize("damage", ["flipped", "truncated", "missing", "other settings"])
def test_a_damaged_shard_is_noticed_and_written_again(
    home: Path, tmp_path: Path, reference: Path, settings: ReductionSettings, damage: str
) -> None:
    shutil.copytree(reference, tmp_path / "store")
    path = tmp_path / "store" / "shards" / "00002.safetensors"
    if damage == "flipped":
        flip_byte(path, path.stat().st_size - 5)
    elif damage == "truncated":
        path.write_bytes(path.read_bytes()[:-8])
    elif damage == "missing":
        path.unlink()
    else:
        write(home, tmp_path / "other", settings, replace(OPTIONS, batch=2))
        shutil.copy(tmp_path / "other" / "shards" / "00002.safetensors", path)
    with pytest.raises(BadFile, match=r"00002\.safetensors"):
        TokenStore(tmp_path / "store").verify()
    if damage == "missing":
        write(home, tmp_path / "store", settings)
    else:
        with pytest.warns(UserWarning, match=r"00002\.safetensors .* It is written again"):
            write(home, tmp_path / "store", settings)
    assert store_bytes(tmp_path / "store") == store_bytes(reference)


def test_a_shard_is_verified_when_it_is_used(tmp_path: Path, reference: Path) -> None:
    shutil.copytree(reference, tmp_path / "store")
    path = tmp_path / "store" / "shards" / "00000.safetensors"
    flip_byte(path, path.stat().st_size - 5)
    store = TokenStore(tmp_path / "store")
    assert len(store[10]) > 0  # of another shard
    with pytest.raises(BadFile, match=r"00000\.safetensors is damaged"):
        store[0]
    assert len(TokenStore(tmp_path / "store", verify=False)[0]) > 0


def test_other_settings_and_other_images_are_refused(
    home: Path, tmp_path: Path, reference: Path, settings: ReductionSettings
) -> None:
    shutil.copytree(reference, tmp_path / "store")
    before = store_bytes(tmp_path / "store")
    cases: list[tuple[str, ReductionSettings, StoreOptions, dict[str, Any]]] = [
        (r"torino-x\(locality.*, got torino-m\(", ReductionSettings("torino-m", sae=str(home / "sae")), OPTIONS, {}),
        ("padding.*crop.*square", replace(settings, padding="square"), OPTIONS, {}),
        ("data type float32, got data type float16", settings, replace(OPTIONS, dtype="float16"), {}),
        ("--batch 3, got --batch 2", settings, replace(OPTIONS, batch=2), {}),
        ("--threads 1, got --threads 2", settings, replace(OPTIONS, threads=2), {}),
        ("--shard-images 4, got --shard-images 5", settings, replace(OPTIONS, shard_images=5), {}),
        ("22 images, got 21 images", settings, OPTIONS, {"limit": 21}),
    ]
    for message, other, options, more in cases:
        with pytest.raises(BadParameter, match=f"{message}.*Use the same settings and images"):
            write(home, tmp_path / "store", other, options, **more)
    assert store_bytes(tmp_path / "store") == before


def test_replaced_images_another_sae_and_another_model_are_refused(
    home: Path, tmp_path: Path, reference: Path, settings: ReductionSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(reference, tmp_path / "store")
    shutil.copytree(home / "photos", tmp_path / "photos")
    first = tmp_path / "photos" / "00.png"
    first.write_bytes(first.read_bytes()[:-1] + b"x")  # same name, same size
    with pytest.raises(BadParameter, match="images whose contents have the hash"):
        write(home, tmp_path / "store", settings, sources=[tmp_path / "photos"])
    first.write_bytes(b"x")
    with pytest.raises(BadParameter, match="images with the fingerprint"):
        write(home, tmp_path / "store", settings, sources=[tmp_path / "photos"])
    monkeypatch.setattr("torino.serving.settings.hash_sae", lambda sae: "another")
    with pytest.raises(BadParameter, match="an SAE or a version of torino"):
        write(home, tmp_path / "store", settings)
    monkeypatch.undo()
    monkeypatch.setattr(worker_module, "hash_vision", lambda vlm: "another")
    with pytest.raises(BadParameter, match="a model whose tower, projector and image processor"):
        write(home, tmp_path / "store", settings)


def test_a_worker_refuses_a_store_of_another_machine_with_other_files(
    home: Path, tmp_path: Path, reference: Path, settings: ReductionSettings
) -> None:
    stored = TokenStore(reference).settings
    job = StoreJob((str(home / "photos"),), str(home / "llava"), settings.to_dict(), str(tmp_path), batch=3)
    worker = ShardWorker(job)
    with pytest.raises(BadParameter, match="Use the same ones on every machine"):
        worker.write(0, replace(stored, hash="another"))
    with pytest.raises(BadParameter, match="Give every machine the same files"):
        worker.write(0, replace(stored, fingerprint="another"))
    worker.write(0, stored)
    name = "shards/00000.safetensors"
    assert (tmp_path / name).read_bytes() == (reference / name).read_bytes()


def test_foreign_folders_and_damaged_manifests_are_refused(
    home: Path, tmp_path: Path, reference: Path, settings: ReductionSettings
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    with pytest.raises(BadFile, match=r"contains other files, such as notes\.txt, and no token store"):
        write(home, tmp_path / "mine", settings)
    shutil.copytree(reference, tmp_path / "store")
    manifest = tmp_path / "store" / "manifest.json"
    text = manifest.read_text()
    manifest.write_text(text.replace('"batch": 3', '"batch": 4'))
    for use in (lambda: write(home, tmp_path / "store", settings), lambda: TokenStore(tmp_path / "store")):
        with pytest.raises(BadFile, match=r"manifest\.json.*checksum"):
            use()
    value = json.loads(text)
    value.pop("checksum")
    manifest.write_text(json.dumps({**value, "dtype": "int8"}))
    with pytest.raises(BadFile, match="not the manifest of a token store"):
        TokenStore(tmp_path / "store")
    manifest.unlink()  # the shards are kept
    assert write(home, tmp_path / "store", settings).new_images == 0
    assert store_bytes(tmp_path / "store") == store_bytes(reference)


# ---------------------------------------------------------------------- parts


def test_parts_give_the_whole_store(home: Path, tmp_path: Path, reference: Path, settings: ReductionSettings) -> None:
    first = write(home, tmp_path / "store", settings, replace(OPTIONS, part=(1, 2)))
    assert (first.complete, first.shards, first.images) == (False, 3, 8)
    with pytest.raises(BadFile, match="not complete: 3 of 6 shards"):
        TokenStore(tmp_path / "store")
    second = write(home, tmp_path / "store", settings, replace(OPTIONS, part=(0, 2)))
    assert (second.complete, second.shards) == (True, 3)
    assert store_bytes(tmp_path / "store") == store_bytes(reference)


def test_parts_of_separate_folders_can_be_copied_together(
    home: Path, tmp_path: Path, reference: Path, settings: ReductionSettings
) -> None:
    for number in range(3):
        write(home, tmp_path / f"machine-{number}", settings, replace(OPTIONS, part=(number, 3)))
    for number in (1, 2):
        shutil.copytree(
            tmp_path / f"machine-{number}" / "shards", tmp_path / "machine-0" / "shards", dirs_exist_ok=True
        )
    assert write(home, tmp_path / "machine-0", settings).new_images == 0
    assert store_bytes(tmp_path / "machine-0") == store_bytes(reference)


def test_more_parts_than_shards_leave_some_empty(home: Path, tmp_path: Path, settings: ReductionSettings) -> None:
    summary = write(home, tmp_path / "store", settings, replace(OPTIONS, part=(8, 9)))
    assert (summary.shards, summary.images, summary.complete) == (0, 0, False)
