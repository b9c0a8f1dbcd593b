"""Whole pages of pictures: what settings make of one photo, and what methods answer about it. Needs Pillow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np

from torino.core.reduction import Reduction
from torino.viz.draw import INK, MUTED, PAPER, Image, ImageDraw, ImageFont, Style, draw_reduction, in_letters, scaled

GREEN, LINE = (22, 120, 62), (214, 217, 221)


@dataclass(frozen=True)
class ComparedAnswer:
    """A reduction with what the model said: its method, the answer, and whether all tokens gave the same one."""

    heading: str
    plan: Reduction
    answer: str
    same: bool


def draw_look(
    photo: Image.Image | None,
    plans: Sequence[tuple[str, Reduction]],
    *,
    title: str = "",
    names: Mapping[int, str] | None = None,
    side: int = 336,
) -> Image.Image:
    """Draw what several settings make of one photo, a row each: photo, groups with names, kept patches, what is left.

    Parameters
    ----------
    photo : PIL image, optional
        As the tower saw it.
    plans : sequence of (heading, Reduction)
        Of the same grid.
    title : str
        Stands above all.
    names, side
        As for :func:`draw_reduction`.
    """
    styles: tuple[Style, ...] = ("groups", "kept", "tokens")
    rows, columns = plans[0][1].grid
    cell = max(2, side // max(rows, columns))
    wide, high = columns * cell, rows * cell
    margin, gap, head, label, line = 30, 18, 58 if title else 14, 40, 46
    page = Image.new("RGB", (2 * margin + 4 * wide + 3 * gap, head + len(plans) * (label + high + line)), PAPER)
    pen, huge, large, small = ImageDraw.Draw(page), *(ImageFont.load_default(size) for size in (24, 19, 15))
    _write(pen, (margin, 20), title, INK, huge, page.width - 2 * margin)
    for number, (heading, plan) in enumerate(plans):
        top = head + number * (label + high + line)
        removed = f"{plan.patches} patches -> {len(plan)} tokens, {1 - len(plan) / plan.patches:.1%} removed"
        _write(pen, (margin, top + 12), heading, INK, large, wide)
        _write(pen, (margin + wide + gap, top + 12), removed, INK, large, 3 * wide + 2 * gap)
        pictures = [Image.fromarray(scaled(photo, plan.grid, cell).astype(np.uint8))]
        pictures += [draw_reduction(plan, photo, style=style, side=side, names=names) for style in styles]
        below = ("the photo as the tower sees it", "concept groups", "patches whose places are kept", "what is left")
        for place, (picture, text) in enumerate(zip(pictures, below, strict=True)):
            left = margin + place * (wide + gap)
            page.paste(picture, (left, top + label))
            _write(pen, (left, top + label + high + 7), text, MUTED, small, wide)
    return page


def draw_compare(
    photo: Image.Image | None,
    question: str,
    answer: str,
    told: Sequence[ComparedAnswer],
    *,
    side: int = 240,
    columns: int | None = None,
) -> Image.Image:
    """Draw the answers of many methods to one question: first all tokens, then what each method kept and said.

    Patches that are kept have their colours, the others are faded, and groups are outlined.

    Parameters
    ----------
    photo : PIL image, optional
        As the tower saw it.
    question, answer : str
        The answer is that with all tokens.
    told : sequence of ComparedAnswer
        Of the same grid.
    side : int
        Of each picture.
    columns : int, optional
        Pictures in a row; by default five or six, whichever leaves fewer gaps in the last row.
    """
    rows, across = told[0].plan.grid
    cell = max(2, side // max(rows, across))
    wide, high = across * cell, rows * cell
    columns = min(columns or min((5, 6), key=lambda count: -(len(told) + 1) % count), len(told) + 1)
    margin, gap, head, foot, text = 30, 20, 64, 42, 84
    lines = ceil((len(told) + 1) / columns)
    page = Image.new(
        "RGB", (2 * margin + columns * wide + (columns - 1) * gap, head + lines * (high + text) + foot), PAPER
    )
    pen, huge, large, small = ImageDraw.Draw(page), *(ImageFont.load_default(size) for size in (24, 17, 15))
    _write(pen, (margin, 20), question, INK, huge, page.width - 2 * margin)
    first = Image.fromarray(scaled(photo, (rows, across), cell).astype(np.uint8))
    cells = [("All tokens", first, rows * across, answer, False)]
    cells += [
        (one.heading, draw_reduction(one.plan, photo, style="outlined", side=side), len(one.plan), one.answer, one.same)
        for one in told
    ]
    for number, (heading, picture, tokens, said, same) in enumerate(cells):
        left, top = margin + number % columns * (wide + gap), head + number // columns * (high + text)
        page.paste(picture, (left, top))
        count = f"{tokens} tokens"
        room = wide - pen.textlength(count, small) - 10
        _write(pen, (left, top + high + 7), heading, INK, large, room)
        pen.text((left + wide, top + high + 9), count, MUTED, small, anchor="ra")
        start = left + 20 * same
        for row, words in enumerate(_wrapped(said or "(no answer)", small, wide - 20 * same, 2)):
            pen.text((start, top + high + 31 + 18 * row), words, GREEN if same else INK, small)
        if same:
            _tick(pen, left, top + high + 33)
    low = page.height - foot + 4
    pen.line((margin, low - 6, page.width - margin, low - 6), LINE)
    _tick(pen, margin, low + 8)
    _write(
        pen, (margin + 20, low + 6), "the same answer as with all tokens", MUTED, small, page.width - 2 * margin - 20
    )
    return page


def _write(pen: Any, at: tuple[float, float], text: str, colour: Any, font: Any, width: float) -> None:
    """Write one line, cut where there is no more room."""
    pen.text(at, _fitted(in_letters(text), font, width), colour, font)


def _fitted(text: str, font: Any, width: float) -> str:
    """The text, or as much of its beginning as has room before an ellipsis."""
    if font.getlength(text) <= width:
        return text
    fits, most = 0, len(text)
    while fits < most:
        middle = (fits + most + 1) // 2
        fits, most = (middle, most) if font.getlength(text[:middle] + "…") <= width else (fits, middle - 1)
    return text[:fits].rstrip() + "…"


def _wrapped(text: str, font: Any, width: float, most: int) -> list[str]:
    """The text in at most so many lines; what has no room ends in an ellipsis."""
    words, lines = in_letters(text).split(" "), list[str]()
    while words and len(lines) < most:
        line = words.pop(0)
        while words and font.getlength(f"{line} {words[0]}") <= width:
            line += " " + words.pop(0)
        lines.append(line)
    if words:
        lines[-1] = _fitted(" ".join([lines[-1], *words]), font, width)
    return [_fitted(line, font, width) for line in lines]


def _tick(pen: Any, x: float, y: float) -> None:
    pen.line([(x + 1, y + 7), (x + 5, y + 11), (x + 13, y + 2)], GREEN, 2, joint="curve")
