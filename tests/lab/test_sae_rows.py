"""Rows for SAEs from cached features, and views of photos."""

from __future__ import annotations

import io
from collections import Counter
from pathlib import Path
from random import Random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from torino_lab.training.features import Features
from torino_lab.training.generated import american, write_generated
from torino_lab.training.rows import FeatureRows
from torino_lab.training.views import crop, write_views

from tests.support.lab_photos import PHOTOS


@pytest.fixture
def sources(tmp_path: Path) -> list[Features]:
    made: list[Features] = []
    for number, count in enumerate((3, 5)):
        table = {"image": [photo[1] for photo in PHOTOS[:count]]}
        pq.write_table(pa.table(table), tmp_path / f"s{number}.parquet")
        features = Features(tmp_path / "f", tmp_path / f"s{number}.parquet", (5, 2), "toy")
        for row in range(count):
            features.values[row] = [[100 * number + row, token] for token in range(5)]
        made.append(features)
    return made


@pytest.mark.parametrize(("kind", "count"), [("all", 32), ("random2", 16), ("cls", 8)])
def test_an_epoch_has_each_row_once(sources: list[Features], kind: str, count: int) -> None:
    rows = FeatureRows(sources, kind, 0, {})  # type: ignore[arg-type]
    assert (rows.rows, rows.width) == (count, 2)
    epoch = torch.cat([rows.batch(step, 8) for step in range(count // 8)])
    seen = Counter(tuple(row) for row in epoch.tolist())
    assert len(seen) == count
    tokens = {int(token) for _, token in seen}
    assert tokens == {0} if kind == "cls" else 0 not in tokens
    per_photo = Counter(photo for photo, _ in seen)
    assert set(per_photo.values()) == {count // 8}
    parts = torch.cat([rows.batch(1, 8, (rank, 2)) for rank in (0, 1)])
    assert torch.equal(parts, rows.batch(1, 8))
    assert not torch.equal(rows.batch(0, 8), FeatureRows(sources, kind, 1, {}).batch(0, 8))  # type: ignore[arg-type]


def test_views_are_crops_and_flips(tmp_path: Path) -> None:
    photo = Image.new("RGB", (40, 20))
    photo.putdata([(x * 6, y * 12, 0) for y in range(20) for x in range(40)])
    views = [crop(photo, Random(seed)) for seed in range(40)]
    assert all(view.width * view.height >= 0.2 * 800 for view in views)
    flipped = [view.getpixel((0, 0))[0] > view.getpixel((view.width - 1, 0))[0] for view in views]
    assert 8 < sum(flipped) < 32
    pq.write_table(pa.table({"image": [data for _, data, _ in PHOTOS]}), tmp_path / "photos.parquet")
    write_views([tmp_path / "photos.parquet"], tmp_path / "views.parquet", 0, 10)
    table = pq.read_table(tmp_path / "views.parquet")
    assert table.num_rows == len(set(table.column("file").to_pylist())) == 10
    Image.open(io.BytesIO(table.column("image")[0].as_py())).verify()


def test_generated_images_have_questions_in_the_style_of_vqa(tmp_path: Path) -> None:
    write_generated(PHOTOS, tmp_path / "generated.parquet", 0, scale=0.004)
    rows = pq.read_table(tmp_path / "generated.parquet").to_pylist()
    kinds = Counter(row["file"].split("/")[1].split("-")[0] for row in rows)
    assert set(kinds) == {"collage", "small", "sign", "shapes"}
    for row in rows:
        assert 0 < len(row["questions"]) == len(row["answers"]) == len(row["sources"]) <= 12
        assert not any("colour" in text or "\nA." in text for text in row["questions"])
    assert american("nine") == "9"
