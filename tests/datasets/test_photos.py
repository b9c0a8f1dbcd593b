"""Every kind of source gives the same photos, names and texts; sources without photos are refused."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from torino import TorinoError
from torino.core.errors import BadFile, BadParameter
from torino.datasets import Photos, SourceUnavailable, open_photos
from torino.datasets import parquet as parquet_module
from torino.datasets.images import open_image

COLORS = [(250, 0, 0), (0, 250, 0), (0, 0, 250), (250, 250, 0), (0, 250, 250), (10, 20, 30), (90, 90, 90)]
CAPTIONS = [[f"a picture of {color}", "a picture"] for color in COLORS]
NAMES = [f"photo{number}" for number in range(len(COLORS))]


def encode_color(color: tuple[int, int, int], size: tuple[int, int] = (12, 8)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, color).save(file, "PNG")
    return file.getvalue()


def get_colors(photos: Photos) -> list[Any]:
    return [open_image(photo.data).getpixel((0, 0)) for photo in photos]


def write_image_folder(top: Path) -> Path:
    for number, (name, color) in enumerate(zip(NAMES, COLORS, strict=True)):
        path = top / ("a" if number < 3 else "b/deep") / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encode_color(color))
    (top / "a" / "photo0.txt").write_text("a caption\n\nanother one\n")
    (top / "notes.csv").write_text("nothing to see")
    (top / ".hidden.png").write_bytes(b"")
    return top


def write_parquet(path: Path, columns: dict[str, Any], rows_per_group: int = 2, **schema: Any) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table(columns)
    pq.write_table(table.replace_schema_metadata(schema or None), path, row_group_size=rows_per_group)
    return path


def write_tar(path: Path, members: dict[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as file:
        for name, data in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            file.addfile(entry, io.BytesIO(data))
    return path


# ------------------------------------------------------------------ folders


def test_folder_is_sorted_and_read_recursively(tmp_path: Path) -> None:
    photos = open_photos(write_image_folder(tmp_path))
    assert photos.names() == [f"a/{name}.png" for name in NAMES[:3]] + [f"b/deep/{name}.png" for name in NAMES[3:]]
    assert get_colors(photos) == COLORS
    assert photos[0].texts == ("a caption", "another one")
    assert photos[1].texts == ()
    assert photos.describe == f"7 photos of {tmp_path.name}"
    assert photos[-1].name == photos[6].name
    with pytest.raises(IndexError):
        photos[7]


def test_folders_of_one_level_are_labels(tmp_path: Path) -> None:
    for name in ("cat/1.jpg", "cat/2.jpg", "dog/1.jpg"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    assert [photo.texts for photo in open_photos(tmp_path)] == [("cat",), ("cat",), ("dog",)]
    (tmp_path / "loose.jpg").write_bytes(b"")
    assert {photo.texts for photo in open_photos(tmp_path)} == {()}


def test_fingerprint_depends_on_names_and_sizes_but_not_on_the_location(tmp_path: Path) -> None:
    first, second = write_image_folder(tmp_path / "first"), write_image_folder(tmp_path / "second")
    fingerprint = open_photos(first).fingerprint
    assert fingerprint == open_photos(second).fingerprint
    assert fingerprint != open_photos(first, limit=3).fingerprint
    (second / "a" / "photo1.png").write_bytes(b"longer or shorter")
    assert fingerprint != open_photos(second).fingerprint


def test_links_are_followed_without_cycles(tmp_path: Path) -> None:
    write_image_folder(tmp_path / "real")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "again").symlink_to(tmp_path / "real", target_is_directory=True)
    (tmp_path / "real" / "back").symlink_to(tmp_path / "linked", target_is_directory=True)
    (tmp_path / "linked" / "void.png").symlink_to(tmp_path / "nowhere.png")
    assert get_colors(open_photos(tmp_path / "linked")) == COLORS


def test_single_image_and_pattern(tmp_path: Path) -> None:
    write_image_folder(tmp_path)
    assert get_colors(open_photos(tmp_path / "a" / "photo1.png")) == [COLORS[1]]
    assert get_colors(open_photos(tmp_path / "a" / "*.png")) == COLORS[:3]


# ------------------------------------------------------------------ parquet


@pytest.fixture
def parquet(tmp_path: Path) -> Path:
    columns = {"file": NAMES, "image": list(map(encode_color, COLORS)), "captions": CAPTIONS}
    return write_parquet(tmp_path / "photos.parquet", columns)


def test_parquet_with_bytes_and_captions(parquet: Path) -> None:
    photos = open_photos(parquet)
    assert photos.names() == NAMES
    assert get_colors(photos) == COLORS
    assert photos[2].texts == tuple(CAPTIONS[2])
    assert photos.locality[0] == 2
    assert photos.locality[1] >= 7


def test_parquet_as_hugging_face_writes_it(tmp_path: Path) -> None:
    metadata = {"info": {"features": {"label": {"names": ["cat", "dog"], "_type": "ClassLabel"}}}}
    images = [{"bytes": encode_color(color), "path": f"{name}.png"} for name, color in zip(NAMES, COLORS, strict=True)]
    (tmp_path / "lone.png").write_bytes(encode_color(COLORS[1]))
    images[1] = {"bytes": None, "path": "lone.png"}
    path = write_parquet(
        tmp_path / "hf.parquet", {"image": images, "label": [0, 1, 0, 1, 1, 5, 0]}, huggingface=json.dumps(metadata)
    )
    photos = open_photos(path)
    assert photos.names() == ["photo0.png", "lone.png", *(f"{name}.png" for name in NAMES[2:])]
    assert get_colors(photos) == COLORS
    assert [photo.texts for photo in photos][:3] == [("cat",), ("dog",), ("cat",)]
    assert photos[5].texts == ("5",)


def test_several_parquet_files_and_rows_with_no_name(tmp_path: Path) -> None:
    for number in range(2):
        columns = {
            "image": list(map(encode_color, COLORS[number * 4 : number * 4 + 4])),
            "text": ["x", "", None, "y"][: 4 - number],
        }
        write_parquet(tmp_path / "data" / f"part-{number}.parquet", columns)
    for source in (tmp_path, tmp_path / "data" / "part-*.parquet"):
        photos = open_photos(source)
        assert get_colors(photos) == COLORS
        assert photos.names()[3:5] == ["part-0#3", "part-1#0"]
        assert [photo.texts for photo in photos] == [("x",), (), (), ("y",), ("x",), (), ()]
    assert get_colors(open_photos(tmp_path, limit=5)) == COLORS[:5]
    assert open_photos(tmp_path, limit=5).describe == "the first 5 photos of part-0.parquet to part-1.parquet"
    assert open_photos(tmp_path, limit=3).fingerprint != open_photos(tmp_path, limit=4).fingerprint


def test_repeated_names_are_numbered(tmp_path: Path) -> None:
    names = ["a", "b", "a", "a#2", "a", None, "c"]
    photos = open_photos(
        write_parquet(tmp_path / "p.parquet", {"name": names, "image": list(map(encode_color, COLORS))})
    )
    assert photos.names() == ["a", "b", "a#3", "a#2", "a#4", "p#5", "c"]


def test_parquet_caches_few_row_groups_and_is_thread_safe(parquet: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_module, "CACHE_BYTES", 1)
    photos = open_photos(parquet)
    with ThreadPoolExecutor(4) as pool:
        colors = list(pool.map(lambda index: open_image(photos[index].data).getpixel((0, 0)), [*range(7)] * 8))
    assert colors == COLORS * 8
    assert len(photos._cache) == 2  # type: ignore[attr-defined]


@pytest.mark.parametrize("column", ["image", "picture"])
def test_parquet_without_photos_is_refused(tmp_path: Path, column: str) -> None:
    path = write_parquet(tmp_path / "p.parquet", {column: [1, 2, 3], "file": ["a", "b", "c"]})
    with pytest.raises(BadFile, match=r"has type int64|has no image column"):
        open_photos(path)


def test_broken_and_empty_parquet_is_refused(parquet: Path, tmp_path: Path) -> None:
    (tmp_path / "cut.parquet").write_bytes(parquet.read_bytes()[:-20])
    with pytest.raises(BadFile, match="not a readable parquet file"):
        open_photos(tmp_path / "cut.parquet")
    with pytest.raises(BadFile, match="empty"):
        open_photos(
            write_parquet(tmp_path / "none.parquet", {"image": list[bytes](), "file": list[str]()} | _empty_columns())
        )


def _empty_columns() -> dict[str, Any]:
    import pyarrow as pa

    return {"image": pa.array([], pa.binary()), "file": pa.array([], pa.string())}


# ------------------------------------------------------------------ webdataset


def test_tar_samples(tmp_path: Path) -> None:
    for number, indices in enumerate((range(4), range(4, 7))):
        members: dict[str, bytes] = {}
        for index in indices:
            members[f"./set/{NAMES[index]}.seg.png"] = encode_color((1, 1, 1))
            members[f"./set/{NAMES[index]}.PNG"] = encode_color(COLORS[index])
            members[f"./set/{NAMES[index]}.json"] = json.dumps({"caption": f"caption {index}"}).encode()
        members["./set/readme.txt"] = b"no image of this key"
        members["./set/photo6.txt" if 6 in indices else "./set/other.cls"] = b"from the text\n"
        write_tar(tmp_path / f"set-{number}.tar", members)
    photos = open_photos(tmp_path / "set-*.tar")
    assert photos.names() == [f"./set/{name}" for name in NAMES]
    assert get_colors(photos) == COLORS
    assert photos[3].texts == ("caption 3",)
    assert photos[6].texts == ("from the text",)
    assert get_colors(open_photos(tmp_path, limit=2)) == COLORS[:2]


def test_bad_tars_are_refused(tmp_path: Path) -> None:
    good = write_tar(tmp_path / "good.tar", {"a.png": encode_color(COLORS[0]), "b.png": encode_color(COLORS[1])})
    (tmp_path / "cut.tar").write_bytes(good.read_bytes()[: 512 + 300])
    with pytest.raises(BadFile, match="cut off"):
        open_photos(tmp_path / "cut.tar")
    with pytest.raises(BadFile, match=r"no images in none\.tar"):
        open_photos(write_tar(tmp_path / "none.tar", {"a.txt": b"words"}))
    with tarfile.open(tmp_path / "small.tar.gz", "w:gz") as file:
        file.add(good, "good.tar")
    with pytest.raises(BadFile, match="compressed"):
        open_photos(tmp_path / "small.tar.gz")


# ------------------------------------------------------------------ datasets of Hugging Face


def write_saved_dataset(folder: Path) -> Path:
    """A folder as ``save_to_disk`` writes it: Arrow streams and JSON metadata."""
    import pyarrow as pa

    info = {"features": {"image": {"_type": "Image"}, "label": {"names": ["cat", "dog"], "_type": "ClassLabel"}}}
    folder.mkdir(parents=True)
    files = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    for name, rows in zip(files, (slice(0, 3), slice(3, 7)), strict=True):
        images = [{"bytes": encode_color(color), "path": None} for color in COLORS[rows]]
        kind = pa.struct({"bytes": pa.binary(), "path": pa.string()})
        table = pa.table({"image": pa.array(images, kind), "label": [1] * len(images)})
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": info})})
        with pa.OSFile(str(folder / name), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    state = {"_data_files": [{"filename": name} for name in files], "_fingerprint": "abc"}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text(json.dumps(info))
    return folder


def test_saved_dataset(tmp_path: Path) -> None:
    photos = open_photos(write_saved_dataset(tmp_path / "beans"))
    assert photos.names() == [f"beans#{number}" for number in range(7)]
    assert get_colors(photos) == COLORS
    assert photos[0].texts == ("dog",)
    assert len(open_photos(tmp_path / "beans", limit=2)) == 2


def test_saved_dataset_with_splits_is_refused(tmp_path: Path) -> None:
    write_saved_dataset(tmp_path / "all" / "train")
    (tmp_path / "all" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(BadFile, match=r"several splits \(train, test\)"):
        open_photos(tmp_path / "all")
    (tmp_path / "all" / "train" / "data-00000-of-00002.arrow").write_bytes(b"short")
    with pytest.raises(BadFile, match="not a readable dataset"):
        open_photos(tmp_path / "all" / "train")


@pytest.mark.parametrize("name", ["hf:", "hf:beans", "hf:beans:", "hf:a:b:c:d"])
def test_hub_dataset_needs_a_split(name: str) -> None:
    with pytest.raises(BadParameter, match="hf:owner/name:split"):
        open_photos(name)


@pytest.mark.skipif(importlib.util.find_spec("datasets") is not None, reason="the package datasets is installed")
def test_missing_package_datasets_is_reported() -> None:
    with pytest.raises(TorinoError, match="pip install datasets"):
        open_photos("hf:beans:train")


@pytest.mark.skipif(importlib.util.find_spec("datasets") is None, reason="needs the package datasets")
def test_datasets_of_the_package_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])})
    pictures = [Image.new("RGB", (9, 9), color) for color in COLORS]
    made = datasets.Dataset.from_dict({"image": pictures, "label": [0, 1] * 3 + [1]}, features=features)
    made.save_to_disk(str(tmp_path / "saved"))
    (tmp_path / "repo").mkdir()
    made.to_parquet(str(tmp_path / "repo" / "train.parquet"))
    for source in (tmp_path / "saved", tmp_path / "repo", f"hf:{tmp_path / 'repo'}:train"):
        photos = open_photos(source)
        assert get_colors(photos) == COLORS
        assert [photo.texts for photo in photos][:2] == [("cat",), ("dog",)]
    assert len(open_photos(f"hf:{tmp_path / 'repo'}:train", limit=3)) == 3
    with pytest.raises(TorinoError, match="Cannot open"):
        open_photos(f"hf:{tmp_path / 'repo'}:nothing")


# ------------------------------------------------------------------ crafted files


@pytest.fixture
def one_megabyte(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORINO_MAX_BYTES", str(2**20))


@pytest.mark.usefixtures("one_megabyte")
def test_compressed_parquet_that_expands_is_refused(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(
        pa.table({"image": [bytes(10**7)] * 2}), tmp_path / "p.parquet", compression="zstd", use_dictionary=False
    )
    photos = open_photos(tmp_path / "p.parquet")
    with pytest.raises(BadFile, match=r"A row group of .* takes [\d,]+ bytes on disk and 20,000,\d+ in memory"):
        photos[0]


@pytest.mark.usefixtures("one_megabyte")
@pytest.mark.parametrize("nested", [False, True])
def test_repeated_images_and_names_take_their_memory_once(tmp_path: Path, nested: bool) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    count, image, name = 20_000, os.urandom(100_000), "n" * 100_000
    indices = pa.array([0] * count, pa.int32())
    images = pa.DictionaryArray.from_arrays(indices, pa.array([image]))
    names = pa.DictionaryArray.from_arrays(indices, pa.array([name]))
    columns = (
        {"image": pa.StructArray.from_arrays([images, names], ["bytes", "path"])}
        if nested
        else {"image": images, "name": names}
    )
    pq.write_table(pa.table(columns), tmp_path / "p.parquet", store_schema=False)
    before = pa.total_allocated_bytes()
    photos = open_photos(tmp_path / "p.parquet")
    assert photos[17].data == photos[19_999].data == image
    assert pa.total_allocated_bytes() - before < 5e6  # all rows together have 4 GB
    assert sum(map(len, photos.names())) < 520 * count


@pytest.mark.usefixtures("one_megabyte")
def test_parquet_with_shared_prefixes_is_bounded(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    prefix = os.urandom(100_000)
    options = {"use_dictionary": False, "column_encoding": {"image": "DELTA_BYTE_ARRAY"}}
    for name, count in (("few", 3), ("many", 200)):
        table = pa.table({"image": [prefix + bytes([row]) for row in range(count)]})
        pq.write_table(table, tmp_path / f"{name}.parquet", **options)
    assert open_photos(tmp_path / "few.parquet")[2].data == prefix + b"\2"
    with pytest.raises(BadFile, match=r"A row group of .*many\.parquet takes .* in memory"):
        open_photos(tmp_path / "many.parquet")[0]


def test_parquet_with_more_photos_than_bytes_is_refused(tmp_path: Path) -> None:
    import pyarrow as pa

    path = write_parquet(tmp_path / "p.parquet", {"image": pa.nulls(10**6, pa.binary())}, 10**6)
    assert path.stat().st_size < 10_000
    with pytest.raises(BadFile, match="declares 1,000,000 photos, more than it has bytes"):
        open_photos(path)


def test_compressed_arrow_files_are_refused(tmp_path: Path) -> None:
    import pyarrow as pa

    folder = write_saved_dataset(tmp_path / "beans")
    path = folder / "data-00001-of-00002.arrow"
    with pa.ipc.open_stream(path.read_bytes()) as reader:
        table = reader.read_all()
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema, options=options) as writer:
        writer.write_table(table)
    with pytest.raises(BadFile, match=r"data-00001-of-00002\.arrow is compressed"):
        open_photos(folder)


@pytest.mark.usefixtures("one_megabyte")
def test_large_members_and_sparse_files_of_a_tar_are_refused(tmp_path: Path) -> None:
    photos = open_photos(
        write_tar(tmp_path / "large.tar", {"a.png": bytes(2**20 + 1), "b.png": encode_color((1, 2, 3))})
    )
    with pytest.raises(BadFile, match=r"a\.png in .*large\.tar has 1,048,577 bytes; torino accepts up to 1,048,576"):
        photos[0]
    assert open_image(photos[1].data).size == (12, 8)
    member = tarfile.TarInfo("c.png")
    member.type = tarfile.GNUTYPE_SPARSE
    header = bytearray(member.tobuf(tarfile.GNU_FORMAT))
    header[386:398] = b"00000000000\0"  # offset and size of the first part
    header[398:410] = b"00000000000\0"
    header[483:495] = b"77777777777\0"  # size of the unpacked file
    header[148:156] = b" " * 8
    header[148:156] = f"{sum(header):06o}\0 ".encode()
    (tmp_path / "sparse.tar").write_bytes(bytes(header) + bytes(1024))
    with pytest.raises(BadFile, match=r"c\.png is stored as a sparse file"):
        open_photos(tmp_path / "sparse.tar")


@pytest.mark.parametrize("kind", ["absolute", "parent", "link"])
@pytest.mark.parametrize("container", ["parquet", "arrow"])
def test_paths_outside_the_folder_of_a_table_need_a_flag(tmp_path: Path, kind: str, container: str) -> None:
    import pyarrow as pa

    (tmp_path / "data").mkdir()
    (tmp_path / "secret.png").write_bytes(encode_color((9, 9, 9)))
    (tmp_path / "data" / "link.png").symlink_to(tmp_path / "secret.png")
    name = {"absolute": str(tmp_path / "secret.png"), "parent": "../secret.png", "link": "link.png"}[kind]
    struct = pa.array([{"bytes": None, "path": name}], pa.struct({"bytes": pa.binary(), "path": pa.string()}))
    source = tmp_path / "data" / "p.parquet"
    if container == "parquet":
        write_parquet(source, {"image": struct})
    else:
        source = tmp_path / "data"
        with pa.OSFile(str(source / "a.arrow"), "wb") as sink:
            table = pa.table({"image": struct})
            with pa.ipc.new_stream(sink, table.schema) as writer:
                writer.write_table(table)
        (source / "state.json").write_text(json.dumps({"_data_files": [{"filename": "a.arrow"}]}))
        (source / "dataset_info.json").write_text("{}")
    with pytest.raises(BadFile, match=r"which is outside the folder of its table.*--allow-outside"):
        open_photos(source)[0]
    assert get_colors(open_photos(source, allow_outside=True)) == [(9, 9, 9)]


def test_saved_dataset_may_not_name_files_elsewhere(tmp_path: Path) -> None:
    folder = write_saved_dataset(tmp_path / "beans")
    (folder / "data-00000-of-00002.arrow").rename(tmp_path / "a.arrow")
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "../a.arrow"}]}))
    with pytest.raises(BadFile, match=r"state\.json in .* refers to .*outside this folder"):
        open_photos(folder)


# ------------------------------------------------------------------ errors


def test_sources_without_photos_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.md").write_text("words")
    with pytest.raises(BadFile, match="There are no images in"):
        open_photos(tmp_path / "empty")
    with pytest.raises(BadFile, match="There are no photos at"):
        open_photos(tmp_path / "nowhere")
    with pytest.raises(BadFile, match="does not contain photos"):
        open_photos(tmp_path / "text.md")
    with pytest.raises(BadParameter, match="at least 1"):
        open_photos(tmp_path, limit=0)


def test_removed_source_is_reported(tmp_path: Path) -> None:
    write_image_folder(tmp_path / "folder")
    write_tar(tmp_path / "p.tar", {"a.png": encode_color(COLORS[0])})
    for source in (tmp_path / "folder", tmp_path / "p.tar"):
        photos = open_photos(source)
        source.rename(tmp_path / "elsewhere")
        with pytest.raises(SourceUnavailable, match="Is the disk still connected"):
            photos[0]
        (tmp_path / "elsewhere").rename(source)
        assert photos[0].data


def test_folder_without_permission_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_image_folder(tmp_path)
    closed, real = tmp_path / "b", os.scandir
    closed.chmod(0)
    if os.geteuid() == 0:  # root may read everything

        def scandir(path: Any) -> Any:
            if Path(path) == closed:
                raise PermissionError(13, "Permission denied", str(path))
            return real(path)

        monkeypatch.setattr(os, "scandir", scandir)
    try:
        with pytest.raises(BadFile, match=r"Cannot read .*b: Permission denied"):
            open_photos(tmp_path)
    finally:
        closed.chmod(0o755)
