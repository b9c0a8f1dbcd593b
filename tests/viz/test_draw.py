"""Drawings of one reduction."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import ImageFont
from rich.console import Console

from tests.support.pictures import make_numbered_photo
from torino import Reduction
from torino.viz.draw import SHADE, draw_reduction, draw_sheet, draw_tokens, transliterate
from torino.viz.terminal import draw_groups


def test_tokens_are_drawn_side_by_side_in_their_order() -> None:
    plan = Reduction.pick(torch.tensor([7, 0, 12, 5, 11]), (3, 4), "by hand")  # 12 is the CLS token: no position
    block = np.asarray(draw_tokens(plan, make_numbered_photo(), cell=10, gap=2))
    assert block.shape == (20, 30, 4), "three across and two down, like the 4 x 3 grid"
    centers = [block[row * 10 + 4, column * 10 + 4] for row in range(2) for column in range(3)]
    assert [tuple(pixel[:3]) for pixel in (centers[0], centers[1], centers[3], centers[4])] == [
        (140, 0, 100),
        (0, 0, 100),
        (100, 0, 100),
        (220, 0, 100),
    ]
    assert tuple(centers[2][:3]) not in [(20 * patch, 0, 100) for patch in range(12)]
    assert [int(pixel[3]) for pixel in centers] == [255] * 5 + [0], "there are five tokens"
    assert not block[8:10, :, 3].any(), "gaps are transparent"
    framed = np.asarray(draw_reduction(plan, make_numbered_photo(), style="tokens", side=40))
    assert framed.shape == (30, 40, 3)
    assert (framed[:, :5] == SHADE).all()
    assert tuple(framed[5 + 4, 5 + 4]) == (140, 0, 100), "the same block, centered"


@pytest.mark.parametrize("count", [1, 2, 11, 12, 30])
@pytest.mark.parametrize("grid", [(3, 4), (12, 1), (1, 12)])
def test_any_number_of_tokens_can_be_drawn(count: int, grid: tuple[int, int]) -> None:
    plan = Reduction.of([{number % 12: 1.0} for number in range(count)], grid)
    block = draw_tokens(plan, cell=6)
    assert int((np.asarray(block)[2::6, 2::6, 3] > 0).sum()) == count
    assert block.width <= grid[1] * 6
    assert draw_reduction(plan, style="tokens", side=60).size == draw_reduction(plan, side=60).size


def test_only_groups_are_outlined() -> None:
    plan = replace(Reduction.of([{0: 1.0}, {3: 1.0}], (2, 2)), assigned=torch.tensor([0, 0, -1, 1]))
    kept = np.asarray(draw_reduction(plan, style="kept", side=40)).astype(int)
    outlined = np.asarray(draw_reduction(plan, style="outlined", side=40)).astype(int)
    differs = (kept != outlined).any(-1)
    assert differs[20].all(), "below the group of two"
    assert not differs[:20].any()
    assert not differs[21:].any(), "a single patch has no outline"


def test_largest_groups_are_labelled() -> None:
    plan = Reduction.of([{i: 1.0} for i in (0, 10)], (4, 4))
    groups = Reduction(
        **{**vars(plan), "concept": torch.tensor([3, 5]), "assigned": torch.tensor([0] * 8 + [1] * 8)}  # type: ignore[arg-type]
    )
    plain = np.asarray(draw_reduction(groups, side=96))
    assert (np.asarray(draw_reduction(groups, side=96, names={})) == plain).all()
    labelled = np.asarray(draw_reduction(groups, side=96, names={3: "sky"}))
    assert (labelled[48:] == plain[48:]).all(), "the second group has no name"
    assert (labelled[:48] != plain[:48]).any()
    console = Console(width=80, color_system="truecolor", force_terminal=True, file=io.StringIO())
    console.print(draw_groups([("photo", groups)], 80, {3: "sky", 5: "sea"}))
    assert re.search(r"38;2;[0-9;]+msky .*38;2;[0-9;]+msea ", console.file.getvalue())  # type: ignore[attr-defined]
    rows = {"photo": (None, [("by hand", groups)])}
    both = np.asarray(draw_sheet(rows, side=96, names={3: "sky", 5: "sea"}))
    assert (both != np.asarray(draw_sheet(rows, side=96))).any()


def test_transliterated_text_has_glyphs() -> None:
    font = ImageFont.load_default(15)
    missing = bytes(font.getmask("\uffff"))
    for letter in transliterate("Wieviele Äpfel? 24 × 24 → δ – 猫 “so”…"):
        assert letter in "? " or bytes(font.getmask(letter)) != missing, f"the font has no {letter!r}"
