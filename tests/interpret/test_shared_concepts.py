"""Shared concepts: a planted dictionary whose latents fire for a word and for its patches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support import tiny_vlm
from tests.training.test_train_command import run_command
from torino import SAE
from torino.core.errors import BadParameter
from torino.datasets import Photos
from torino.datasets.base import Photo
from torino.interpret.shared_concepts import SharedConcepts, find_shared_concepts
from torino.interpret.shared_sheet import draw_shared_sheet
from torino.sae.joint import JointSAE, JointStatistics

NAMES = ("dog", "car", "boat", "tree")
WIDTH = 8


class PlantedPhotos(Photos):
    """Photos of one thing each, of which the caption tells."""

    def __init__(self, things: list[int], captions: list[str]) -> None:
        super().__init__([f"{n}.png" for n in range(len(things))], "0", "planted")
        self.things, self.captions = things, captions

    def _photo(self, index: int) -> Photo:
        return Photo(self._names[index], str(index), (self.captions[index],))


class PlantedSpace:
    """One direction for each thing, shared by patches and words; text is shifted and ten times as long."""

    name = "projected"

    def __init__(self, photos: PlantedPhotos) -> None:
        self.photos = photos

    def image_rows(self, image: Any) -> Tensor:
        rows = torch.zeros(9, WIDTH)
        rows[:, WIDTH - 1] = 1.0  # background
        rows[int(image) % 9] = torch.eye(WIDTH)[self.photos.things[int(image)]]
        return rows

    def text_rows(self, text: str) -> tuple[Tensor, tuple[str, ...]]:
        words = tuple(text.split())
        rows = [torch.eye(WIDTH)[NAMES.index(word) if word in NAMES else 5] for word in words]
        return 10 * torch.stack(rows) + 3, words


def planted(matching: bool, seed: int = 0) -> tuple[JointSAE, PlantedSpace, PlantedPhotos]:
    source = np.random.default_rng(seed)
    things = [n % 4 for n in range(60)]
    told = things if matching else source.permutation(things).tolist()
    where = ("here", "there", "outside")
    photos = PlantedPhotos(things, [f"the {NAMES[thing]} {where[n % 3]}" for n, thing in enumerate(told)])
    plain = SAE(torch.eye(WIDTH), torch.full((WIDTH,), -0.1), torch.eye(WIDTH))
    statistics = JointStatistics("projected", torch.zeros(WIDTH), torch.full((WIDTH,), 3.0), 1.0, 10.0)
    return JointSAE.of(plain, statistics), PlantedSpace(photos), photos


def find(matching: bool, **options: Any) -> SharedConcepts:
    sae, space, photos = planted(matching)
    return find_shared_concepts(sae, space, photos, **options)  # type: ignore[arg-type]


def test_planted_concepts_are_found() -> None:
    found = find(True)
    assert (found.both, found.image_only, found.text_only, found.silent) == (4, 1, 1, 2)
    assert (found.photos, found.texts) == (60, 12)
    assert [(concept.latent, concept.word) for concept in found.concepts] == list(enumerate(NAMES))
    for concept in found.concepts:
        assert (concept.auc, concept.precision, concept.base) == (1.0, 1.0, 0.25)
        assert concept.chance < 0.8
        assert concept.p == pytest.approx(1 / 201)
        assert all(photo % 4 == concept.latent and patch == photo % 9 for photo, patch in concept.photos)
    assert found.same_meaning == 4
    assert found.mean_auc == 1.0
    assert found.mean_chance == pytest.approx(0.5, abs=0.03)
    assert found.p == pytest.approx(1 / 201)
    assert "4 fire for the same meaning in both (0.2 by chance)" in found.summary()
    json.dumps(found.to_dict(), allow_nan=False)


def test_unrelated_captions_are_at_chance() -> None:
    found = find(False)
    assert len(found.concepts) == 4
    assert found.mean_auc == pytest.approx(0.5, abs=0.15)
    assert found.p > 0.02
    assert found.same_meaning <= 1


def test_auc_equals_counting_pairs() -> None:
    sae, space, photos = planted(False, seed=3)
    found = find_shared_concepts(sae, space, photos)  # type: ignore[arg-type]
    for concept in found.concepts:
        values = [float(sae.encode(space.image_rows(n)).amax(0)[concept.latent]) for n in range(60)]
        holds = [concept.word in caption for caption in photos.captions]
        pairs = [
            (a, b) for a, x in zip(values, holds, strict=True) if x for b, y in zip(values, holds, strict=True) if not y
        ]
        wins = sum(1.0 if a > b else 0.5 if a == b else 0.0 for a, b in pairs)
        assert concept.auc == pytest.approx(wins / len(pairs))


def test_the_sheet_shows_words_and_patches() -> None:
    from PIL import Image

    found = find(True)
    sheet = draw_shared_sheet(
        found.concepts, lambda number: (Image.new("RGB", (60, 60), (number, 90, 90)), 9), title="S"
    )
    pixels = np.asarray(sheet).reshape(-1, 3)
    assert (pixels == (220, 40, 40)).all(1).any(), "the outline of a patch"
    with pytest.raises(BadParameter, match="no shared concepts to draw"):
        draw_shared_sheet((), lambda number: (Image.new("RGB", (1, 1)), 1), title="S")


def test_wrong_input_is_refused() -> None:
    sae, space, photos = planted(True)
    space.name = "block:1"
    with pytest.raises(BadParameter, match="reads the space projected, got rows of the space block:1"):
        find_shared_concepts(sae, space, photos)  # type: ignore[arg-type]
    few = PlantedPhotos([0, 1], ["dog", "car"])
    with pytest.raises(BadParameter, match="At least 6 photos with captions are needed, got 2"):
        find_shared_concepts(sae, PlantedSpace(few), few)  # type: ignore[arg-type]


def test_the_command(tmp_path: Path) -> None:
    import typer
    from typer.testing import CliRunner

    from torino.cli.concepts import concepts

    tiny_vlm.build_llava(tmp_path / "llava")
    (tmp_path / "photos").mkdir()
    for seed in range(8):
        tiny_vlm.photo(seed=seed).save(tmp_path / "photos" / f"{seed}.png")
        (tmp_path / "photos" / f"{seed}.txt").write_text(f"this is word{seed % 2}")
    source = ["--model", str(tmp_path / "llava"), "--images", str(tmp_path / "photos")]
    sizes = ["--latents", "16", "--k", "4", "--steps", "10", "--batch", "16"]
    run_command("train", "--joint", "projected", *source, *sizes, "-o", str(tmp_path / "sae"))
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(concepts)
    words = [str(tmp_path / "sae"), "--images", str(tmp_path / "photos"), "--tower", str(tmp_path / "llava")]
    result = CliRunner().invoke(app, [*words, "-o", str(tmp_path / "report")])
    assert result.exception is None, result.exception
    assert "Of 16 latents" in result.output
    report = json.loads((tmp_path / "report" / "shared-concepts.json").read_text())
    assert report["both"] + report["image_only"] + report["text_only"] + report["silent"] == 16
