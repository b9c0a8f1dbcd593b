"""Draw figures with images: reduced patches and the model's answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import numpy as np
from rich.cells import cell_len

from torino.core.errors import BadFile, BadParameter
from torino.core.io import read_json
from torino.core.reduction import Reduction
from torino.core.safety import is_inside
from torino.evaluation.reporting.figures.style import (
    GREEN,
    INK,
    MUTED,
    PAGE_WIDTH,
    RED,
    escape_math,
    figure_style,
    format_label,
    new_figure,
    wrap_text,
)

FORMAT = "torino-cells/1"
TEASER_CHARS = 95  # characters that fit into a line below the teaser


@dataclass(frozen=True)
class Panel:
    """One reduction of an image, the model's answer with it, and whether the answer is correct (None: unknown)."""

    heading: str
    reduction: Reduction
    answer: str = ""
    correct: bool | None = None


@dataclass(frozen=True)
class FigureExample:
    """An image (Pillow, as the model saw it), the question, reductions, and the answer with all tokens."""

    image: Any
    question: str
    panels: Sequence[Panel]
    answer: str = ""
    correct: bool | None = None


class PanelEntry(TypedDict):
    """A reduction in a file of examples."""

    heading: str
    reduction: str
    answer: NotRequired[str]
    right: NotRequired[bool | None]


class ExampleEntry(TypedDict):
    """An image in a file of examples."""

    photo: str
    question: str
    answer: NotRequired[str]
    right: NotRequired[bool | None]
    shown: list[PanelEntry]


class ExamplesFile(TypedDict):
    """A file of examples."""

    examples: list[ExampleEntry]


def plot_qualitative(examples: Sequence[FigureExample]) -> Any:
    """Draw a grid with one image per column: the image, then each reduction with its answer.

    Patches that stay in the output keep their colors, all others are faded; patches that share a token are outlined.
    """
    if not examples or not all(example.panels for example in examples):
        raise BadParameter("Give at least one example, each with at least one reduction.")
    headings = [panel.heading for panel in examples[0].panels]
    if any([panel.heading for panel in example.panels] != headings for example in examples):
        raise BadParameter("All examples must show the same methods in the same order, because each method is a row.")
    columns, rows = len(examples), len(headings) + 1
    side = min(1.75, (PAGE_WIDTH - 0.3) / columns)
    width = max(16, round(side * 19))
    questions = [[escape_math(line) for line in wrap_text(example.question, width, 3)] for example in examples]
    with figure_style():
        figure = new_figure(0.3 + side * columns, (side + 0.24) * rows + 0.2 + 0.15 * max(map(len, questions)))
        figure.get_layout_engine().set(w_pad=0.02, h_pad=0.02, wspace=0.02, hspace=0.01)
        grid = figure.subplots(rows, columns, squeeze=False)
        for column, example in enumerate(examples):
            grid[0][column].set_title("\n".join(questions[column]), fontsize=8, pad=4)
            _draw_image(grid[0][column], example, width)
            for row, panel in enumerate(example.panels, 1):
                _draw_panel(grid[row][column], example.image, panel, width)
        for row, heading in enumerate(["All tokens", *headings]):
            grid[row][0].set_ylabel(format_label(heading), fontsize=8.5, labelpad=4)
    return figure


def plot_teaser(example: FigureExample) -> Any:
    """Draw the stages of one image: patches, groups, remaining tokens, answer."""
    from torino.viz.draw import draw_reduction

    if not example.panels:
        raise BadParameter("The teaser needs an example with a reduction.")
    reduction = example.panels[0].reduction
    kept, patches = len(reduction), reduction.patches
    with figure_style():
        figure = new_figure(PAGE_WIDTH, 2.45)
        figure.get_layout_engine().set(w_pad=0.02, h_pad=0.02, wspace=0.09)
        panels = figure.subplots(1, 3)
        rows, columns = reduction.grid
        extent = (0, columns, rows, 0)
        panels[0].imshow(_pixels(example.image), extent=extent)
        for line in range(1, columns):
            panels[0].axvline(line, color="white", linewidth=0.25, alpha=0.7)
        for line in range(1, rows):
            panels[0].axhline(line, color="white", linewidth=0.25, alpha=0.7)
        panels[1].imshow(draw_reduction(reduction, example.image, side=720), extent=extent)
        _draw_tokens(panels[2], example.image, reduction)
        titles = ("Patches", "Groups that share concepts", "Input of the language model")
        captions = (
            f"{patches} visual tokens",
            f"{kept} groups",
            f"{kept} visual tokens  (↓{100 * (1 - kept / patches):.0f} %)",
        )
        for axes, title, text in zip(panels, titles, captions, strict=True):
            _hide_axes(axes)
            axes.set_title(title, fontsize=9, pad=4)
            axes.set_xlabel(text, fontsize=9, labelpad=3)
        for axes in panels[:2]:
            axes.annotate("", (1.135, 0.5), (1.015, 0.5), xycoords="axes fraction", annotation_clip=False,
                                  arrowprops={"arrowstyle": "-|>", "color": INK, "linewidth": 1.1})  # fmt: skip
        question, answer, full_answer = (
            escape_math("".join(wrap_text(text, width)))
            for text, width in ((example.question, 60), (example.panels[0].answer, 40), (example.answer, 80))
        )
        lines = f"“{question}”   →   {answer}"
        if full_answer and example.answer != example.panels[0].answer:
            separator = "      " if cell_len(lines + full_answer) < TEASER_CHARS else "\n\n"
            lines += f"{separator}(all tokens: {full_answer})"
        figure.supxlabel(f"\n{lines}", fontsize=9.5, color=INK, linespacing=0.6)
    return figure


def read_examples(path: str | Path, *, allow_outside: bool = False) -> list[FigureExample]:
    """Read examples from a JSON file with the paths of images and saved reductions, relative to the file.

    Paths outside the folder of the file are refused unless ``allow_outside``.

    ``{"format": "torino-cells/1", "examples": [{"photo", "question", "answer", "right", "shown": [{"heading",
    "reduction", "answer", "right"}]}]}``.
    """
    from torino.datasets.images import open_image

    path = Path(path)
    fix = "See torino.evaluation.reporting.figures.read_examples for the expected fields."
    content = read_json(path, ExamplesFile, version=FORMAT, fix=fix)

    def locate(name: str) -> Path:
        if not allow_outside and not is_inside(path.parent / name, path.parent):
            raise BadFile(
                f"{path} names the file {name}, which is outside its folder. Copy the file there, or allow other "
                "folders with --allow-outside (allow_outside=True)."
            )
        return path.parent / name

    return [
        FigureExample(
            open_image(locate(entry["photo"])),
            entry["question"],
            [
                Panel(
                    item["heading"],
                    Reduction.load(locate(item["reduction"])),
                    item.get("answer", ""),
                    item.get("right"),
                )
                for item in entry["shown"]
            ],
            entry.get("answer", ""),
            entry.get("right"),
        )
        for entry in content["examples"]
    ]


def _draw_image(axes: Any, example: FigureExample, width: int) -> None:
    axes.imshow(_pixels(example.image), extent=(0, 1, 1, 0))
    _hide_axes(axes)
    _annotate(axes, f"{example.panels[0].reduction.patches}", example.answer, example.correct, width)


def _draw_panel(axes: Any, image: Any, panel: Panel, width: int) -> None:
    from matplotlib.collections import LineCollection

    from torino.viz.draw import draw_reduction

    reduction = panel.reduction
    rows, columns = reduction.grid
    axes.imshow(draw_reduction(reduction, image, style="kept", side=672), extent=(0, columns, rows, 0))
    axes.add_collection(LineCollection(group_outlines(reduction), colors=[INK], linewidths=0.35, capstyle="round"))
    _hide_axes(axes)
    _annotate(axes, str(len(reduction)), panel.answer, panel.correct, width)


def group_outlines(reduction: Reduction) -> list[list[tuple[int, int]]]:
    """Return the outlines of groups of more than one patch, as lines between corners of patches."""
    rows, columns = reduction.grid
    token = reduction.assigned.numpy().reshape(rows, columns)
    sizes = np.bincount(token[token >= 0].ravel(), minlength=max(len(reduction), 1))
    group = np.where((token >= 0) & (sizes[np.maximum(token, 0)] > 1), token, -1)
    horizontal = np.argwhere(group[1:] != group[:-1])
    vertical = np.argwhere(group[:, 1:] != group[:, :-1])
    lines = [[(int(c), int(r) + 1), (int(c) + 1, int(r) + 1)] for r, c in horizontal]
    return lines + [[(int(c) + 1, int(r)), (int(c) + 1, int(r) + 1)] for r, c in vertical]


def _annotate(axes: Any, tokens: str, answer: str, correct: bool | None, width: int) -> None:
    """Write the number of tokens and the answer, marked as right or wrong, below an image of ``width`` characters."""
    axes.annotate(f"{tokens} tokens", (0, 0), (0, -4.5), xycoords="axes fraction", textcoords="offset points", va="top",
                  fontsize=7.5, color=MUTED)  # fmt: skip
    if answer:
        mark = {True: "✓ ", False: "✗ ", None: ""}[correct]
        color = {True: GREEN, False: RED, None: INK}[correct]
        available = max(8, width - len(f"{tokens} tokens  "))
        text = mark + escape_math("".join(wrap_text(answer, available)))
        axes.annotate(text, (1, 0), (0, -4.5), xycoords="axes fraction", textcoords="offset points", ha="right",
                      va="top", fontsize=7.5, color=color)  # fmt: skip


def _draw_tokens(axes: Any, image: Any, reduction: Reduction) -> None:
    """Draw the patches that represent their groups next to each other, in token order."""
    from torino.viz.draw import draw_tokens

    rows, columns = reduction.grid
    cell = 32
    block = np.asarray(draw_tokens(reduction, image.convert("RGB"), cell=cell, gap=4))
    block_rows, block_columns = block.shape[0] // cell, block.shape[1] // cell
    # pad to the aspect ratio of the image, so that patches stay square
    scale = max(block_rows / rows, block_columns / columns)
    sheet = np.zeros((round(scale * rows * cell), round(scale * columns * cell), 4), np.uint8)
    top, left = (sheet.shape[0] - block.shape[0]) // 2 + 2, (sheet.shape[1] - block.shape[1]) // 2 + 2
    target = sheet[top : top + block.shape[0], left : left + block.shape[1]]
    target[:] = block[: target.shape[0], : target.shape[1]]
    axes.imshow(sheet, extent=(0, columns, rows, 0), interpolation="none")


def _hide_axes(axes: Any) -> None:
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_visible(False)


def _pixels(image: Any) -> Any:
    return np.asarray(image.convert("RGB"))
