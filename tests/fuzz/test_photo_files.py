"""Damaged sources of photos, and damaged images."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.support.fuzzing import FuzzCase, fuzz
from torino import TorinoError
from torino.datasets import open_photos
from torino.datasets.images import open_image, prepare

FORMATS = ("png", "jpeg", "gif", "webp", "bmp", "tiff")


def encode(number: int, image_format: str = "png") -> bytes:
    file = io.BytesIO()
    Image.effect_noise((9, 6), 30 + number).convert("RGB").save(file, image_format)
    return file.getvalue()


def use_photos(source: Path) -> None:
    photos = open_photos(source)
    repr(photos)
    assert len(photos.names()) == len(photos)
    for index in range(len(photos)):
        try:
            photo = photos[index]
            f"{photo.name} {photo.texts}".encode()
            assert all(isinstance(text, str) for text in photo.texts)
            open_image(photo.data)
        except TorinoError as error:  # a photo that cannot be read is skipped
            str(error).encode()


def write_parquet(folder: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    features = {"label": {"names": ["cat", "dog"], "_type": "ClassLabel"}, "image": {"_type": "Image"}}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    images = [{"bytes": encode(number), "path": f"{number}.png"} for number in range(4)]
    table = pa.table({"image": images, "label": [0, 1, 0, 1]}).replace_schema_metadata(metadata)
    pq.write_table(table, folder / "photos.parquet", row_group_size=2)


def write_saved(folder: Path) -> None:
    """Write a folder as ``save_to_disk`` of Hugging Face does."""
    import pyarrow as pa

    images = [{"bytes": encode(number), "path": f"{number}.png"} for number in range(3)]
    table = pa.table({"image": images, "captions": [["a cat", "it"], ["a dog"], []]})
    with pa.OSFile(str(folder / "data.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    (folder / "dataset_info.json").write_text("{}")
    state = {"_data_files": [{"filename": "data.arrow"}], "_fingerprint": "0123", "_split": "train"}
    (folder / "state.json").write_text(json.dumps(state))


def write_splits(folder: Path) -> None:
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))


def write_tar(folder: Path) -> None:
    with tarfile.open(folder / "photos.tar", "w") as file:
        for number in range(3):
            captions = {"json": json.dumps({"captions": ["a", "b"], "label": 3}).encode(), "txt": b"a caption"}
            ending = "json" if number else "txt"
            for name, data in ((f"{number}.png", encode(number)), (f"{number}.{ending}", captions[ending])):
                entry = tarfile.TarInfo(name)
                entry.size = len(data)
                file.addfile(entry, io.BytesIO(data))


def write_folder(folder: Path) -> None:
    for number in range(2):
        (folder / f"{number}.png").write_bytes(encode(number))
        (folder / f"{number}.txt").write_text("a caption\n\nanother one\n")


def write_images(folder: Path) -> None:
    for name in FORMATS:
        (folder / f"photo.{name}").write_bytes(encode(1, name))
    transparent = Image.new("LA", (9, 6), (3, 9))
    transparent.save(folder / "alpha.png")
    Image.new("I;16", (9, 6), 900).save(folder / "gray.tiff")


def read_image(name: str) -> Any:
    def use(folder: Path) -> None:
        for source in (folder / name, (folder / name).read_bytes()):
            image = open_image(source)
            assert image.mode == "RGB"
            prepare(image, "square")
            prepare(image, "crop")

    return use


CASES = [
    FuzzCase("parquet", write_parquet, "photos.parquet", use_photos),
    *(FuzzCase("saved", write_saved, file, use_photos) for file in ("state.json", "dataset_info.json", "data.arrow")),
    FuzzCase("tar", write_tar, "photos.tar", use_photos),
    *(FuzzCase("folder", write_folder, file, use_photos) for file in ("0.png", "0.txt")),
    *(
        FuzzCase("image", write_images, name, read_image(name))
        for name in (*(f"photo.{ending}" for ending in FORMATS), "alpha.png", "gray.tiff")
    ),
]
SPLITS = FuzzCase("splits", write_splits, "dataset_dict.json", use_photos)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_valid_files_are_read(case: FuzzCase) -> None:
    case.run(None)


@pytest.mark.parametrize("case", [*CASES, SPLITS], ids=str)
def test_damaged_files_raise_only_torino_errors(case: FuzzCase) -> None:
    fuzz(case)
