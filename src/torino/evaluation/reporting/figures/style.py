"""How figures look: type, sizes, and colours that colour-blind readers can tell apart."""

from __future__ import annotations

import io
import re
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torino.core.errors import BadParameter, TorinoError
from torino.core.io import write_atomic

COLUMN, PAGE = 3.4, 7.0
"""Widths in inches: one column of a two-column paper, and both."""
INK, SOFT, GRID = "#1d2126", "#6a7079", "#d9dce0"
BLUE, ORANGE, GREEN, RED = "#0072b2", "#d55e00", "#009e73", "#c2453d"
OWN = {"torino-p": BLUE, "torino-m": ORANGE, "torino-x": RED}
"""Colours of TORINO's own variants."""
_RIVALS = ("#44aa99", "#cc6677", "#9a8c2f", "#8470c8", "#56b4e9", "#aa4499", "#ddaa33", "#4e9a51", "#a0714f")
_MARKS = ("s", "^", "D", "v", "P", "X", "<", ">", "h")
FORMATS = ("png", "pdf", "svg")


def matplotlib() -> Any:
    """The library, or a sentence where it is missing."""
    try:
        import matplotlib as library
    except ImportError as error:
        raise TorinoError(
            'Figures need matplotlib, which is not installed. Install it with pip install "torino[plot]".'
        ) from error
    return library


@contextmanager
def styled() -> Generator[None]:
    """Draw in the style of these figures; nothing of it stays behind."""
    library = matplotlib()
    from matplotlib import font_manager

    there = {font.name for font in font_manager.fontManager.ttflist}
    wide = [name for name in ("Noto Sans CJK SC", "Noto Serif CJK SC", "WenQuanYi Zen Hei") if name in there]
    with library.rc_context():
        library.rcdefaults()
        library.rcParams.update(
            {
                "font.family": ["STIXGeneral", "DejaVu Sans", *wide],
                "mathtext.fontset": "stix",
                "font.size": 8.5,
                "axes.titlesize": 9,
                "axes.labelsize": 8.5,
                "xtick.labelsize": 7.5,
                "ytick.labelsize": 7.5,
                "legend.fontsize": 7.5,
                "legend.frameon": False,
                "legend.handlelength": 1.8,
                "text.color": INK,
                "axes.edgecolor": INK,
                "axes.labelcolor": INK,
                "xtick.color": INK,
                "ytick.color": INK,
                "axes.linewidth": 0.6,
                "axes.spines.top": False,
                "axes.spines.right": False,
                "axes.axisbelow": True,
                "xtick.major.width": 0.6,
                "ytick.major.width": 0.6,
                "xtick.major.size": 2.5,
                "ytick.major.size": 2.5,
                "xtick.minor.size": 0,
                "grid.color": GRID,
                "grid.linewidth": 0.5,
                "lines.linewidth": 1.3,
                "lines.markersize": 4,
                "pdf.fonttype": 42,
                "svg.fonttype": "path",
                "svg.hashsalt": "torino",
                "savefig.bbox": "tight",
                "savefig.pad_inches": 0.03,
            }
        )
        yield


def new_figure(width: float, height: float) -> Any:
    """An empty figure that belongs to nobody else."""
    matplotlib()
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def look(method: str, fixed: bool, order: Sequence[str]) -> dict[str, Any]:
    """Colour, marker and line of a method: TORINO strong, with a budget dashed and hollow, rivals quieter."""
    if method.startswith("torino-"):
        colour = OWN.get(method, BLUE)
        face = "white" if fixed else colour
        line = (0, (3.5, 1.5)) if fixed else "-"
        return {
            "color": colour,
            "marker": "o",
            "markerfacecolor": face,
            "linestyle": line,
            "linewidth": 1.7,
            "zorder": 5,
        }
    if method == "random":
        return {"color": "#8b9199", "marker": ".", "linestyle": ":", "linewidth": 1.2, "zorder": 2}
    rivals = [one for one in order if one != "random" and not one.startswith("torino-")]
    place = rivals.index(method) if method in rivals else 0
    marker = _MARKS[(place + place // len(_RIVALS)) % len(_MARKS)]
    return {"color": _RIVALS[place % len(_RIVALS)], "marker": marker, "linestyle": "-", "linewidth": 1.0, "zorder": 3}


def plain(text: str) -> str:
    """A text that is no formula, whatever dollar signs it has."""
    return text.replace("$", r"\$")


def lines_of(text: str, width: int, most: int = 1) -> list[str]:
    """A text in at most so many lines, each as wide as that many letters; an ellipsis tells where more was said.

    Signs of Chinese, Japanese and Korean are as wide as two and a half letters of this type, and lines may end after
    any of them.

    Examples
    --------
    >>> lines_of("What is on the table?", 12, 2)
    ['What is on', 'the table?']
    >>> lines_of("桌子上有什么东西？", 10, 1)
    ['桌子上 …']
    """
    from rich.cells import cell_len
    from rich.console import Console
    from rich.text import Text

    def cut(what: str, room: int) -> list[str]:
        return [line.plain.rstrip() for line in Text(what).wrap(Console(), room)]

    if cell_len(text) > len(text):  # a terminal's letters, which rich counts, are half as wide as such signs
        width = max(4, width * 4 // 5)
    lines = cut(" ".join(text.split()), width)
    if len(lines) > most:
        lines[most - 1 :] = [f"{cut(lines[most - 1], max(2, width - 2))[0]} …"]
    return lines


def typeset(label: str) -> str:
    """A label with the index of TORINO_FB set low."""
    named = re.sub(r"TORINO-([PM])_FB", r"TORINO_FB-\1", plain(label))
    return named.replace("TORINO_FB", r"TORINO$_\mathrm{FB}$")


def save_figure(figure: Any, folder: str | Path, name: str, formats: Sequence[str] = ("png", "pdf")) -> list[Path]:
    """Write a figure as ``name.png``, ``name.pdf``, … into a folder, each whole or not at all."""
    for one in formats:
        if one not in FORMATS:
            raise BadParameter(f"A figure is written as {', '.join(FORMATS)}, got {one!r}.")
    return [_save(figure, Path(folder) / f"{name}.{one}", one) for one in formats]


def svg_text(figure: Any) -> str:
    """A figure as SVG for a page: without background, its ink in the colour of the text around it."""
    buffer = io.StringIO()
    with styled():
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    for colour, opacity in ((INK, ""), (SOFT, "; opacity: 0.7"), (GRID, "; opacity: 0.22")):
        for use in ("stroke", "fill"):
            text = text.replace(f"{use}: {colour}", f"{use}: currentColor{opacity}")
    return text


def _save(figure: Any, path: Path, kind: str) -> Path:
    metadata = {"png": {"Software": None}, "pdf": {"CreationDate": None, "Creator": "torino"}, "svg": {"Date": None}}

    def write(target: Path) -> None:
        with styled():
            figure.savefig(target, format=kind, dpi=300, metadata=metadata[kind], facecolor="white")

    return write_atomic(path, write)
