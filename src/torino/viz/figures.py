"""Draw pages of several reductions: settings of one photo, or answers of several methods. Needs Pillow."""

from __future__ import annotations

from collections import Counter
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
    Image,
    ImageDraw,
    ImageFont,
    draw_reduction,
    scale_to_grid,
    token_color,
    transliterate,
)

GREEN, LINE = (22, 120, 62), (214, 217, 221)
RED = (176, 32, 32)
LOOK_COLUMNS = 3  # reductions in one line of draw_look
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
    """Draw several reductions of one photo: the photo once, and for each reduction its groups and its output tokens.

    A concept has the same color in all pictures. The largest concepts are listed below the photo.

    Parameters
    ----------
    photo : PIL image, optional
        As the tower sees it.
    plans : sequence of (heading, Reduction)
        All with the same grid; three of them share a line.
    title : str
        Title of the page.
    names, side
        As for :func:`draw_reduction`.
    """
    rows, columns = plans[0][1].grid
    cell = max(2, side // max(rows, columns))
    width, height = columns * cell, rows * cell
    across = min(LOOK_COLUMNS, len(plans))
    lines = ceil(len(plans) / across)
    margin, gap, head, label, foot = 30, 18, 58 if title else 14, 40, 30
    line = label + 2 * height + 2 * foot
    page = Image.new("RGB", (2 * margin + (across + 1) * width + across * gap, head + lines * line), PAPER)
    pen, huge, large, small = ImageDraw.Draw(page), *(ImageFont.load_default(size) for size in (24, 19, 15))
    draw_text(pen, (margin, 20), title, INK, huge, page.width - 2 * margin)
    draw_text(pen, (margin, head + 12), f"{plans[0][1].patches} patches", INK, large, width)
    page.paste(Image.fromarray(scale_to_grid(photo, (rows, columns), cell).astype(np.uint8)), (margin, head + label))
    draw_text(pen, (margin, head + label + height + 7), "the photo as the tower sees it", MUTED, small, width)
    sizes = concept_sizes([plan for _, plan in plans])
    colors = {concept: token_color(number) for number, concept in enumerate(sizes)}
    _draw_legend(page, (margin, head + label + height + foot + 8, width, height), list(sizes), colors, names or {})
    for number, (heading, plan) in enumerate(plans):
        left = margin + (number % across + 1) * (width + gap)
        top = head + number // across * line
        draw_text(pen, (left, top + 12), f"{heading}: {len(plan)} tokens", INK, large, width)
        page.paste(draw_reduction(plan, photo, side=side, names=names, colors=colors), (left, top + label))
        draw_text(pen, (left, top + label + height + 7), "groups of patches that become one token", MUTED, small, width)
        second = top + label + height + foot
        page.paste(draw_reduction(plan, photo, style="tokens", side=side), (left, second))
        remain = f"the tokens that remain ({describe_change(plan.patches, len(plan))})"
        draw_text(pen, (left, second + height + 7), remain, MUTED, small, width)
    return page


def concept_sizes(plans: Sequence[Reduction]) -> dict[int, int]:
    """Return the concepts of all groups of several patches, and how many patches they have, largest first."""
    sizes: Counter[int] = Counter()
    for plan in plans:
        members = plan.assigned[plan.assigned >= 0].bincount(minlength=len(plan)).tolist()
        for concept, size in zip(plan.concept.tolist(), members, strict=True):
            if concept >= 0 and size > 1:
                sizes[concept] += size
    return dict(sizes.most_common())


def _draw_legend(
    page: Image.Image,
    box: tuple[int, int, int, int],
    concepts: Sequence[int],
    colors: Mapping[int, tuple[int, int, int]],
    names: Mapping[int, str],
) -> None:
    """List the largest concepts with their colors inside a box: left, top, width, height."""
    left, top, width, height = box
    pen, font, step = ImageDraw.Draw(page), ImageFont.load_default(15), 24
    first = {names[concept]: concept for concept in reversed(concepts) if concept in names}  # each name once
    named = [concept for concept in concepts if first.get(names.get(concept, "")) == concept]
    for number, concept in enumerate(named[: max(0, height // step)]):
        y = top + number * step
        gray = 0.45 * 200
        tint = tuple(round(gray + 0.55 * value) for value in colors[concept])
        pen.rounded_rectangle((left, y, left + 16, y + 16), 3, fill=tint)
        draw_text(pen, (left + 26, y), transliterate(names[concept]), INK, font, width - 26)


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
    draw_text(pen, (margin, 20), question, INK, huge, page.width - 2 * margin)
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
        draw_text(pen, (left, top + height + 7), heading, INK, large, width - pen.textlength(count, small) - 10)
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
        draw_text(pen, (left + 20, bottom + 6), legend, MUTED, small, page.width - margin - left - 20)
        left += 40 + pen.textlength(legend, small)
    return page


def draw_text(pen: Any, at: tuple[float, float], text: str, color: Any, font: Any, width: float) -> None:
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
