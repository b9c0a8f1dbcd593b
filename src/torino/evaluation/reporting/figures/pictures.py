"""Figures with photos: what became of the patches, and what the model answered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.cells import cell_len

from torino.core.errors import BadFile, BadParameter
from torino.core.io import read_json
from torino.core.reduction import Reduction
from torino.evaluation.reporting.figures.style import (
    GREEN,
    INK,
    PAGE,
    RED,
    SOFT,
    lines_of,
    new_figure,
    plain,
    styled,
    typeset,
)

CELLS = "torino-cells/1"
WIDE = 95  # signs that a line below the teaser has room for


@dataclass(frozen=True)
class Shown:
    """One reduction of a photo, what the model answered with it, and whether that is right (None: not told)."""

    heading: str
    reduction: Reduction
    answer: str = ""
    right: bool | None = None


@dataclass(frozen=True)
class Example:
    """A photo (a Pillow image, as the model saw it), the question, the answer with all tokens, and reductions."""

    photo: Any
    question: str
    shown: Sequence[Shown]
    answer: str = ""
    right: bool | None = None


def qualitative(examples: Sequence[Example]) -> Any:
    """A grid: one photo a column; first as it is, then each reduction with its answer.

    Patches whose place an output token takes keep their colours, all others are faded; patches that share a token are
    outlined.
    """
    if not examples or not all(example.shown for example in examples):
        raise BadParameter("Give at least one example, each with at least one reduction.")
    headings = [one.heading for one in examples[0].shown]
    if any([one.heading for one in example.shown] != headings for example in examples):
        raise BadParameter("All examples must show the same methods in the same order, since each has a row.")
    columns, rows = len(examples), len(headings) + 1
    side = min(1.75, (PAGE - 0.3) / columns)
    width = max(16, round(side * 19))
    asked = [[plain(line) for line in lines_of(one.question, width, 3)] for one in examples]
    with styled():
        figure = new_figure(0.3 + side * columns, (side + 0.24) * rows + 0.2 + 0.15 * max(map(len, asked)))
        figure.get_layout_engine().set(w_pad=0.02, h_pad=0.02, wspace=0.02, hspace=0.01)
        grid = figure.subplots(rows, columns, squeeze=False)
        for column, example in enumerate(examples):
            grid[0][column].set_title("\n".join(asked[column]), fontsize=8, pad=4)
            _photo(grid[0][column], example, width)
            for row, shown in enumerate(example.shown, 1):
                _kept(grid[row][column], example.photo, shown, width)
        for row, heading in enumerate(["All tokens", *headings]):
            grid[row][0].set_ylabel(typeset(heading), fontsize=8.5, labelpad=4)
    return figure


def teaser(example: Example) -> Any:
    """One photo on its way: its patches, the groups, the tokens that are left of them, the answer."""
    from torino.viz.draw import draw_reduction

    if not example.shown:
        raise BadParameter("The teaser shows one reduction of its photo, and none is given.")
    plan = example.shown[0].reduction
    kept, patches = len(plan), plan.patches
    with styled():
        figure = new_figure(PAGE, 2.45)
        figure.get_layout_engine().set(w_pad=0.02, h_pad=0.02, wspace=0.09)
        panels = figure.subplots(1, 3)
        rows, columns = plan.grid
        extent = (0, columns, rows, 0)
        panels[0].imshow(_pixels(example.photo), extent=extent)
        for line in range(1, columns):
            panels[0].axvline(line, color="white", linewidth=0.25, alpha=0.7)
        for line in range(1, rows):
            panels[0].axhline(line, color="white", linewidth=0.25, alpha=0.7)
        panels[1].imshow(draw_reduction(plan, example.photo, side=720), extent=extent)
        _tiles(panels[2], example.photo, plan)
        titles = ("Patches", "Groups that share concepts", "What the language model sees")
        below = (
            f"{patches} visual tokens",
            f"{kept} groups",
            f"{kept} visual tokens  (↓{100 * (1 - kept / patches):.0f} %)",
        )
        for axes, title, text in zip(panels, titles, below, strict=True):
            _bare(axes)
            axes.set_title(title, fontsize=9, pad=4)
            axes.set_xlabel(text, fontsize=9, labelpad=3)
        for axes in panels[:2]:
            axes.annotate("", (1.135, 0.5), (1.015, 0.5), xycoords="axes fraction", annotation_clip=False,
                                  arrowprops={"arrowstyle": "-|>", "color": INK, "linewidth": 1.1})  # fmt: skip
        asked, said, full = (
            plain("".join(lines_of(text, most)))
            for text, most in ((example.question, 60), (example.shown[0].answer, 40), (example.answer, 80))
        )
        lines = f"“{asked}”   →   {said}"
        if full and example.answer != example.shown[0].answer:
            lines += ("      " if cell_len(lines + full) < WIDE else "\n\n") + f"(all tokens: {full})"
        figure.supxlabel(f"\n{lines}", fontsize=9.5, color=INK, linespacing=0.6)
    return figure


def read_examples(path: str | Path) -> list[Example]:
    """Read examples from a JSON file that names photos and saved Reductions, both relative to it.

    ``{"format": "torino-cells/1", "examples": [{"photo", "question", "answer", "right", "shown": [{"heading",
    "reduction", "answer", "right"}]}]}``.
    """
    from torino.datasets.images import open_image

    path = Path(path)
    read = read_json(path)
    if read.get("format") != CELLS:
        raise BadFile(f"{path} is of format {read.get('format')!r}, and examples are read from {CELLS!r}.")
    try:
        return [
            Example(
                open_image(path.parent / one["photo"]),
                str(one["question"]),
                [
                    Shown(
                        str(cell["heading"]),
                        Reduction.load(path.parent / cell["reduction"]),
                        str(cell.get("answer", "")),
                        cell.get("right"),
                    )
                    for cell in one["shown"]
                ],
                str(one.get("answer", "")),
                one.get("right"),
            )
            for one in read["examples"]
        ]
    except (KeyError, TypeError) as error:
        raise BadFile(
            f"{path} lacks {error}. See torino.evaluation.reporting.figures.read_examples for what it must hold."
        ) from error


def _photo(axes: Any, example: Example, width: int) -> None:
    axes.imshow(_pixels(example.photo), extent=(0, 1, 1, 0))
    _bare(axes)
    _under(axes, f"{example.shown[0].reduction.patches}", example.answer, example.right, width)


def _kept(axes: Any, photo: Any, shown: Shown, width: int) -> None:
    from matplotlib.collections import LineCollection

    from torino.viz.draw import draw_reduction

    plan = shown.reduction
    rows, columns = plan.grid
    axes.imshow(draw_reduction(plan, photo, style="kept", side=672), extent=(0, columns, rows, 0))
    lines = LineCollection(outlines(plan), colors=[INK], linewidths=0.35, capstyle="round")
    axes.add_collection(lines)
    _bare(axes)
    _under(axes, str(len(plan)), shown.answer, shown.right, width)


def outlines(plan: Reduction) -> list[list[tuple[int, int]]]:
    """Borders of the groups of more than one patch, as lines between corners of patches."""
    rows, columns = plan.grid
    token = plan.assigned.numpy().reshape(rows, columns)
    sizes = np.bincount(token[token >= 0].ravel(), minlength=max(len(plan), 1))
    group = np.where((token >= 0) & (sizes[np.maximum(token, 0)] > 1), token, -1)
    across = np.argwhere(group[1:] != group[:-1])
    along = np.argwhere(group[:, 1:] != group[:, :-1])
    lines = [[(int(c), int(r) + 1), (int(c) + 1, int(r) + 1)] for r, c in across]
    return lines + [[(int(c) + 1, int(r)), (int(c) + 1, int(r) + 1)] for r, c in along]


def _under(axes: Any, tokens: str, answer: str, right: bool | None, width: int) -> None:
    """Tokens and the answer below a picture of so many signs, right or wrong told by sign and colour."""
    axes.annotate(f"{tokens} tokens", (0, 0), (0, -4.5), xycoords="axes fraction", textcoords="offset points", va="top",
                  fontsize=7.5, color=SOFT)  # fmt: skip
    if answer:
        sign = {True: "✓ ", False: "✗ ", None: ""}[right]
        colour = {True: GREEN, False: RED, None: INK}[right]
        room = max(8, width - len(f"{tokens} tokens  "))
        text = sign + plain("".join(lines_of(answer, room)))
        axes.annotate(text, (1, 0), (0, -4.5), xycoords="axes fraction", textcoords="offset points", ha="right",
                      va="top", fontsize=7.5, color=colour)  # fmt: skip


def _tiles(axes: Any, photo: Any, plan: Reduction) -> None:
    """The patches that stand for their groups, laid close together in the order of the tokens."""
    from torino.viz.draw import draw_tokens

    rows, columns = plan.grid
    cell = 32
    block = np.asarray(draw_tokens(plan, _image(photo), cell=cell, gap=4))
    high, wide = block.shape[0] // cell, block.shape[1] // cell
    # as much room around as gives the shape of the photo, so that patches stay square
    most = max(high / rows, wide / columns)
    down, across = most * rows, most * columns
    sheet = np.zeros((round(down * cell), round(across * cell), 4), np.uint8)
    top, left = (sheet.shape[0] - block.shape[0]) // 2 + 2, (sheet.shape[1] - block.shape[1]) // 2 + 2
    part = sheet[top : top + block.shape[0], left : left + block.shape[1]]
    part[:] = block[: part.shape[0], : part.shape[1]]
    axes.imshow(sheet, extent=(0, columns, rows, 0), interpolation="none")


def _bare(axes: Any) -> None:
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_visible(False)


def _image(photo: Any) -> Any:
    return photo.convert("RGB")


def _pixels(photo: Any) -> Any:
    return np.asarray(_image(photo))
