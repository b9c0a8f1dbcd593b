"""Pages of several reductions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from PIL import ImageFont

from tests.support.pictures import make_numbered_photo
from torino import Reduction
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
    pages = [np.asarray(draw_look(photo, plans[:count], title="numbered", side=40)) for count in (1, 3)]
    assert pages[0].shape[1] == pages[1].shape[1] == 2 * 30 + 4 * 40 + 3 * 18
    assert (pages[1].shape[0] - pages[0].shape[0]) % 2 == 0
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
