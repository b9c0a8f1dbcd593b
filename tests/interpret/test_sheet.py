"""Concepts are ranked and drawn on a sheet with their top activating patches."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from tests.support import colored_squares as squares
from torino.core.errors import BadParameter
from torino.interpret import TopActivations, collect_top_activations, name_concepts
from torino.interpret.photos import PhotoReader
from torino.interpret.sheet import draw_concept_sheet, highlight_patches, resize_longest_side, select_concepts


@pytest.fixture(scope="module")
def reader() -> PhotoReader:
    return PhotoReader(squares.make_photos(), squares.make_tower(), squares.make_tower(block=0))


@pytest.fixture(scope="module")
def activations(reader: PhotoReader) -> TopActivations:
    return collect_top_activations(squares.make_sae(), reader, keep=6)


def test_concepts_are_ranked(activations: TopActivations, reader: PhotoReader) -> None:
    names = name_concepts(activations, reader.get_texts())
    assert [concept.latent for concept in select_concepts(activations)] == [4, 3, 2, 0]
    titles = [concept.title for concept in select_concepts(activations, names, top=3)]
    assert titles == ["latent 4", "blue", "green"]
    assert [concept.latent for concept in select_concepts(activations, names, rank="lift")] == [0, 2, 3]
    scores = activations.monosemanticity.values
    ranked = [concept.latent for concept in select_concepts(activations, rank="monosemanticity")]
    assert ranked == sorted((c for c in range(5) if not scores[c].isnan()), key=lambda c: -float(scores[c]))
    few = replace(activations, active_photos=torch.tensor([8, 0, 5, 8, 24]))
    assert [concept.latent for concept in select_concepts(few, rank="monosemanticity")] == [c for c in ranked if c != 2]
    selected = select_concepts(activations, latents=[2, 1, 2])
    assert [(concept.latent, concept.patch_share) for concept in selected] == [(2, 16 / 384), (1, 0.0)]
    assert (selected[0].photo_share, selected[0].max_activation) == (1 / 3, pytest.approx(1.0))
    adjusted = (scores[2] - activations.monosemanticity.chance) / (1 - activations.monosemanticity.chance)
    assert selected[0].chance_adjusted == pytest.approx(float(adjusted))


def test_invalid_options_are_refused(activations: TopActivations) -> None:
    with pytest.raises(BadParameter, match="rank must be 'usage', 'monosemanticity' or 'lift', got 'beauty'"):
        select_concepts(activations, rank="beauty")  # type: ignore[arg-type]
    with pytest.raises(BadParameter, match="no captions or labels"):
        select_concepts(activations, rank="lift")
    with pytest.raises(BadParameter, match="Latent 5 does not exist: this SAE has 5"):
        select_concepts(activations, latents=[5])
    with pytest.raises(BadParameter, match="nothing to draw"):
        draw_concept_sheet(activations, [], lambda photo: Image.new("RGB", (8, 8)))


def test_active_patches_are_highlighted() -> None:
    picture = Image.new("RGB", (40, 20), (200, 100, 0))
    shown = np.asarray(highlight_patches(picture, (2, 4), torch.tensor([1, 6]), torch.tensor([1.0, 0.0])))
    faded = round(0.32 * 100 + 0.68 * 255)
    assert (shown[:10, 10:20] == (200, 100, 0)).all()
    assert (shown[:, :10] == faded).all()
    weak = [round(faded + 0.25 * (value - faded)) for value in (200, 100, 0)]
    assert np.abs(shown[10:, 20:30].astype(int) - weak).max() <= 1
    assert resize_longest_side(picture, 10).size == (10, 5)


def test_sheet_shows_the_squares(activations: TopActivations, reader: PhotoReader) -> None:
    names = name_concepts(activations, reader.get_texts())
    selected = select_concepts(activations, names, latents=[0, 3])
    drawn = draw_concept_sheet(activations, selected, reader.get_picture, photos=4, side=56, title="Squares")
    sheet = np.asarray(drawn)
    colors = {tuple(color) for color in sheet.reshape(-1, 3).tolist()}
    assert {(255, 0, 0), (0, 0, 255)} <= colors
    assert (0, 255, 0) not in colors, "no photo of these concepts contains green"
    blue, red = (np.argwhere((sheet == color).all(-1)) for color in ((0, 0, 255), (255, 0, 0)))
    assert blue[:, 0].max() < red[:, 0].min(), "the most used concept comes first"
    assert len(red) == 4 * 14 * 14
    assert len(blue) == 4 * 3 * 14 * 14


def test_sheet_keeps_the_aspect_ratio(activations: TopActivations) -> None:
    selected = select_concepts(activations, latents=[0])
    drawn = draw_concept_sheet(activations, selected, lambda photo: Image.new("RGB", (40, 20), (255, 0, 0)), side=56)
    reds = np.argwhere((np.asarray(drawn) == (255, 0, 0)).all(-1))
    assert len(reds) == 6 * 14 * 7
