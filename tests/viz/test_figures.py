"""Pages of several reductions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from PIL import Image, ImageFont

from tests.support.pictures import make_numbered_photo
from torino import Reduction
from torino.viz.draw import token_color
from torino.viz.figures import GREEN, RED, ComparedAnswer, _wrap_text, draw_compare, draw_look, truncate_text


def test_text_fits_into_its_width() -> None:
    font = ImageFont.load_default(15)
    text = "a brown dog runs over the wet grass after a red ball that someone threw far, Donaudampfschifffahrtsgesell"
    for width in range(30, 800, 29):
        assert font.getlength(truncate_text(text, font, width)) <= width
        for max_lines in (1, 2, 3):
            lines = _wrap_text(text, font, width, max_lines)
            assert len(lines) <= max_lines
            assert all(font.getlength(line) <= width for line in lines)
            joined = " ".join(lines)
            assert joined == text or joined.endswith("…") or "…" in joined
    assert _wrap_text("short", font, 200, 2) == ["short"]


def test_pages_show_every_setting_and_mark_equal_answers() -> None:
    plans = [("k = 1, δ = 1", Reduction.of([{0: 1.0}, {5: 1.0}], (3, 4)))] * 3
    photo = make_numbered_photo()
    pages = [np.asarray(draw_look(photo, (plans * 2)[:count], title="numbered", side=40)) for count in (1, 3, 4)]
    assert [page.shape[1] for page in pages] == [2 * 30 + n * 40 + (n - 1) * 18 for n in (2, 4, 4)]
    assert pages[0].shape[0] == pages[1].shape[0]
    assert pages[2].shape[0] - 58 == 2 * (pages[1].shape[0] - 58), "four settings take two lines"
    same = [ComparedAnswer("random", plans[0][1], "a cat", same=True)] * 6
    different = [replace(answer, same=False) for answer in same]
    equal, differing = (
        np.asarray(draw_compare(photo, "What is it?", "a cat", answers)) for answers in (same, different)
    )
    assert equal.shape == differing.shape
    legend = equal.shape[0] - 42
    assert (equal[:legend] == GREEN).all(-1).any()
    assert not (differing[:legend] == GREEN).all(-1).any()
    margins = np.concatenate([equal[:, :28].ravel(), equal[:, -28:].ravel(), equal[-6:].ravel()])
    assert (margins == 255).all(), "nothing is drawn on the margins"


def test_a_concept_has_one_color_in_all_pictures_and_is_listed_once() -> None:
    photo = Image.new("RGB", (60, 40), (200, 200, 200))

    def plan(*groups: tuple[int, set[int]]) -> Reduction:
        tokens = [dict.fromkeys(sorted(patches), 1 / len(patches)) for _, patches in groups]
        return replace(Reduction.of(tokens, (2, 3)), concept=torch.tensor([concept for concept, _ in groups]))

    plans = [("a", plan((7, {0, 1, 2}), (9, {3, 4}), (7, {5}))), ("b", plan((9, {3, 4}), (7, {0, 1}), (3, {2, 5})))]
    side = 120
    page = np.asarray(draw_look(photo, plans, side=side, names={7: "sky", 9: "sea", 3: "sky"})).astype(int)
    top, cell = 14 + 40, side // 3
    first, second = (page[top : top + 80, left : left + side] for left in (30 + 138, 30 + 2 * 138))
    sky, sea = first[cell // 2, cell // 2 * 3], first[3 * cell // 2, cell // 3]
    assert (second[3 * cell // 2, cell // 3] == sea).all()
    assert (sky != sea).any()
    legend = page[top + 80 + 30 :, 30:46]
    swatches = {tuple(color) for color in legend.reshape(-1, 3).tolist()} - {(255, 255, 255)}
    named = [np.array([round(0.45 * 200 + 0.55 * c) for c in token_color(n)]) for n in range(3)]
    assert tuple(named[0].tolist()) in swatches
    assert tuple(named[1].tolist()) in swatches
    assert tuple(named[2].tolist()) not in swatches, "the third concept has a name that is listed already"


def test_the_picture_marks_right_and_wrong_answers_if_the_truth_is_known() -> None:
    plan = Reduction.of([{0: 1.0}, {5: 1.0}], (3, 4))
    photo = make_numbered_photo()

    def marks(correct: bool | None, full: bool | None) -> tuple[bool, bool]:
        """Return whether a right and a wrong mark are drawn above the legend."""
        answer = ComparedAnswer("random", plan, "a cat", same=True, correct=correct)
        page = np.asarray(draw_compare(photo, "What is it?", "a cat", [answer], correct=full))[:-42]
        return bool((page == GREEN).all(-1).any()), bool((page == RED).all(-1).any())

    assert marks(True, True) == (True, False)
    assert marks(False, False) == (False, True), "the same answer as with all tokens is not marked as right"
    assert marks(False, True) == (True, True)
    assert marks(None, None) == (True, False), "without the truth, the sign of the same answer"
