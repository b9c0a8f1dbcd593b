"""Draw pages of several reductions: settings of one photo, or answers of several methods. Needs Pillow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np

from torino.core.explanation import describe_change
from torino.core.reduction import Reduction
from torino.viz.draw import (
    INK,
    MUTED,
    PAPER,
    DrawStyle,
    Image,
    ImageDraw,
    ImageFont,
    draw_reduction,
    scale_to_grid,
    transliterate,
)

GREEN, LINE = (22, 120, 62), (214, 217, 221)
RED = (176, 32, 32)
MARK_COLORS = {"same": GREEN, "right": GREEN, "wrong": RED}


@dataclass(frozen=True)
class ComparedAnswer:
    """A reduction and the answer of the model with it.

    Attributes
    ----------
    heading : str
        Name of the method.
    plan : Reduction
    answer : str
    same : bool
        Whether the answer equals the one with all tokens.
    correct : bool, optional
        Whether the answer is right, if the right answer is known.
    """

    heading: str
    plan: Reduction
    answer: str
    same: bool
    correct: bool | None = None


def draw_look(
    photo: Image.Image | None,
    plans: Sequence[tuple[str, Reduction]],
    *,
    title: str = "",
    names: Mapping[int, str] | None = None,
    side: int = 336,
) -> Image.Image:
    """Draw several reductions of one photo, one row each: photo, groups, kept patches, output tokens.

    Parameters
    ----------
    photo : PIL image, optional
        As the tower sees it.
    plans : sequence of (heading, Reduction)
        All with the same grid.
    title : str
        Title of the page.
    names, side
        As for :func:`draw_reduction`.
    """
    styles: tuple[DrawStyle, ...] = ("groups", "kept", "tokens")
    captions = ("the photo as the tower sees it", "groups: one color per token", "kept patches", "output tokens")
    rows, columns = plans[0][1].grid
    cell = max(2, side // max(rows, columns))
    width, height = columns * cell, rows * cell
    margin, gap, head, label, foot = 30, 18, 58 if title else 14, 40, 46
    page = Image.new("RGB", (2 * margin + 4 * width + 3 * gap, head + len(plans) * (label + height + foot)), PAPER)
    pen, huge, large, small = ImageDraw.Draw(page), *(ImageFont.load_default(size) for size in (24, 19, 15))
    _draw_text(pen, (margin, 20), title, INK, huge, page.width - 2 * margin)
    for number, (heading, plan) in enumerate(plans):
        top = head + number * (label + height + foot)
        removed = f"{plan.patches} patches -> {len(plan)} tokens, {describe_change(plan.patches, len(plan))}"
        _draw_text(pen, (margin, top + 12), heading, INK, large, width)
        _draw_text(pen, (margin + width + gap, top + 12), removed, INK, large, 3 * width + 2 * gap)
        pictures = [Image.fromarray(scale_to_grid(photo, plan.grid, cell).astype(np.uint8))]
        pictures += [draw_reduction(plan, photo, style=style, side=side, names=names) for style in styles]
        for column, (picture, caption) in enumerate(zip(pictures, captions, strict=True)):
            left = margin + column * (width + gap)
            page.paste(picture, (left, top + label))
            _draw_text(pen, (left, top + label + height + 7), caption, MUTED, small, width)
    return page


def draw_compare(
    photo: Image.Image | None,
    question: str,
    answer: str,
    answers: Sequence[ComparedAnswer],
    *,
    side: int = 240,
    columns: int | None = None,
    correct: bool | None = None,
) -> Image.Image:
    """Draw the answers of several methods to one question: first with all tokens, then the kept patches of each method.

    Kept patches have their colors, the others are faded, and groups are outlined.

    Parameters
    ----------
    photo : PIL image, optional
        As the tower sees it.
    question : str
    answer : str
        The answer with all tokens.
    answers : sequence of ComparedAnswer
        All with the same grid.
    side : int
        Length of the longer side of each picture in pixels.
    columns : int, optional
        Pictures per row; by default five or six, whichever leaves fewer gaps in the last row.
    correct : bool, optional
        Whether the answer with all tokens is right. If it is known, answers are marked right or wrong; otherwise those
        equal to the one with all tokens are marked.
    """
    rows, across = answers[0].plan.grid
    cell = max(2, side // max(rows, across))
    width, height = across * cell, rows * cell
    columns = min(columns or min((5, 6), key=lambda count: -(len(answers) + 1) % count), len(answers) + 1)
    margin, gap, head, foot, text = 30, 20, 64, 42, 84
    lines = ceil((len(answers) + 1) / columns)
    page = Image.new(
        "RGB", (2 * margin + columns * width + (columns - 1) * gap, head + lines * (height + text) + foot), PAPER
    )
    pen, huge, large, small = ImageDraw.Draw(page), *(ImageFont.load_default(size) for size in (24, 17, 15))
    _draw_text(pen, (margin, 20), question, INK, huge, page.width - 2 * margin)
    full = Image.fromarray(scale_to_grid(photo, (rows, across), cell).astype(np.uint8))
    marks = [mark for mark in ("right", "wrong") if correct is not None] or ["same"]
    cells = [("All tokens", full, rows * across, answer, "" if correct is None else marks[not correct])]
    for row in answers:
        mark = ("same" if row.same else "") if correct is None else marks[not row.correct]
        picture = draw_reduction(row.plan, photo, style="outlined", side=side)
        cells.append((row.heading, picture, len(row.plan), row.answer, mark))
    for number, (heading, picture, tokens, reply, mark) in enumerate(cells):
        left, top = margin + number % columns * (width + gap), head + number // columns * (height + text)
        page.paste(picture, (left, top))
        count = f"{tokens} tokens"
        _draw_text(pen, (left, top + height + 7), heading, INK, large, width - pen.textlength(count, small) - 10)
        pen.text((left + width, top + height + 9), count, MUTED, small, anchor="ra")
        indent = 20 * bool(mark)
        for row, line in enumerate(_wrap_text(reply or "(no answer)", small, width - indent, 2)):
            pen.text((left + indent, top + height + 31 + 18 * row), line, MARK_COLORS.get(mark, INK), small)
        _draw_mark(pen, left, top + height + 33, mark)
    bottom = page.height - foot + 4
    pen.line((margin, bottom - 6, page.width - margin, bottom - 6), LINE)
    left = float(margin)
    for mark in marks:
        legend = {"same": "same answer as with all tokens", "right": "right answer", "wrong": "wrong answer"}[mark]
        _draw_mark(pen, left, bottom + 8, mark)
        _draw_text(pen, (left + 20, bottom + 6), legend, MUTED, small, page.width - margin - left - 20)
        left += 40 + pen.textlength(legend, small)
    return page


def _draw_text(pen: Any, at: tuple[float, float], text: str, color: Any, font: Any, width: float) -> None:
    """Draw one line of text, truncated to ``width``."""
    pen.text(at, truncate_text(transliterate(text), font, width), color, font)


def truncate_text(text: str, font: Any, width: float) -> str:
    """Return the text, or the longest beginning of it that fits into ``width`` pixels with an ellipsis."""
    if font.getlength(text) <= width:
        return text
    low, high = 0, len(text)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if font.getlength(text[:middle] + "…") <= width else (low, middle - 1)
    return text[:low].rstrip() + "…"


def _wrap_text(text: str, font: Any, width: float, max_lines: int) -> list[str]:
    """Split the text into at most ``max_lines`` lines; the rest is replaced by an ellipsis."""
    words, lines = transliterate(text).split(" "), list[str]()
    while words and len(lines) < max_lines:
        line = words.pop(0)
        while words and font.getlength(f"{line} {words[0]}") <= width:
            line += " " + words.pop(0)
        lines.append(line)
    if words:
        lines[-1] = truncate_text(" ".join([lines[-1], *words]), font, width)
    return [truncate_text(line, font, width) for line in lines]


def _draw_mark(pen: Any, x: float, y: float, mark: str) -> None:
    """Draw a check mark (right), a cross (wrong) or an equals sign (same)."""
    if mark == "right":
        pen.line([(x + 1, y + 7), (x + 5, y + 11), (x + 13, y + 2)], GREEN, 2, joint="curve")
    elif mark == "wrong":
        pen.line([(x + 2, y + 2), (x + 11, y + 11)], RED, 2)
        pen.line([(x + 2, y + 11), (x + 11, y + 2)], RED, 2)
    elif mark == "same":
        pen.line([(x + 1, y + 5), (x + 12, y + 5)], GREEN, 2)
        pen.line([(x + 1, y + 9), (x + 12, y + 9)], GREEN, 2)
