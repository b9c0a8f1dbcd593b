"""Style of the figures: fonts, sizes, and colors that color-blind readers can distinguish."""

from __future__ import annotations

import io
import re
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torino.core.errors import BadParameter
from torino.core.extras import optional_import
from torino.core.io import write_atomic

COLUMN_WIDTH, PAGE_WIDTH = 3.4, 7.0
"""Widths in inches: one column of a two-column paper, and both."""
INK, MUTED, GRID = "#1d2126", "#6a7079", "#d9dce0"
BLUE, ORANGE, GREEN, RED = "#0072b2", "#d55e00", "#009e73", "#c2453d"
TORINO_COLORS = {"torino-p": BLUE, "torino-m": ORANGE, "torino-x": RED}
"""Colors of TORINO's variants."""
_OTHER_COLORS = ("#44aa99", "#cc6677", "#9a8c2f", "#8470c8", "#56b4e9", "#aa4499", "#ddaa33", "#4e9a51", "#a0714f")
_MARKERS = ("s", "^", "D", "v", "P", "X", "<", ">", "h")
FORMATS = ("png", "pdf", "svg")


def import_matplotlib() -> Any:
    """Import matplotlib, or raise with instructions to install it."""
    with optional_import("Figures need", "torino[plot]"):
        import matplotlib
    return matplotlib


@contextmanager
def figure_style() -> Generator[None]:
    """Apply the style of the figures within a context."""
    library = import_matplotlib()
    from matplotlib import font_manager

    installed = {font.name for font in font_manager.fontManager.ttflist}
    chinese = [name for name in ("Noto Sans CJK SC", "Noto Serif CJK SC", "WenQuanYi Zen Hei") if name in installed]
    with library.rc_context():
        library.rcdefaults()
        library.rcParams.update(
            {
                "font.family": ["STIXGeneral", "DejaVu Sans", *chinese],
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
    """Create an empty figure, independent of pyplot."""
    import_matplotlib()
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def method_style(method: str, fixed: bool, order: Sequence[str]) -> dict[str, Any]:
    """Return color, marker and line of a method: TORINO prominent, dashed and hollow with a budget; others thinner."""
    if method.startswith("torino-"):
        color = TORINO_COLORS.get(method, BLUE)
        return {
            "color": color,
            "marker": "o",
            "markerfacecolor": "white" if fixed else color,
            "linestyle": (0, (3.5, 1.5)) if fixed else "-",
            "linewidth": 1.7,
            "zorder": 5,
        }
    if method == "random":
        return {"color": "#8b9199", "marker": ".", "linestyle": ":", "linewidth": 1.2, "zorder": 2}
    others = [name for name in order if name != "random" and not name.startswith("torino-")]
    position = others.index(method) if method in others else 0
    marker = _MARKERS[(position + position // len(_OTHER_COLORS)) % len(_MARKERS)]
    color = _OTHER_COLORS[position % len(_OTHER_COLORS)]
    return {"color": color, "marker": marker, "linestyle": "-", "linewidth": 1.0, "zorder": 3}


def escape_math(text: str) -> str:
    """Escape dollar signs, so that matplotlib does not read the text as a formula."""
    return text.replace("$", r"\$")


def wrap_text(text: str, width: int, max_lines: int = 1) -> list[str]:
    """Wrap a text into at most ``max_lines`` lines of ``width`` letters; an ellipsis marks a cut.

    Chinese, Japanese and Korean characters are as wide as two and a half letters of this font, and lines may break
    after any of them.

    Examples
    --------
    >>> wrap_text("What is on the table?", 12, 2)
    ['What is on', 'the table?']
    >>> wrap_text("桌子上有什么东西？", 10, 1)
    ['桌子上 …']
    """
    from rich.cells import cell_len
    from rich.console import Console
    from rich.text import Text

    def wrap(content: str, limit: int) -> list[str]:
        return [line.plain.rstrip() for line in Text(content).wrap(Console(), limit)]

    if cell_len(text) > len(text):  # rich counts wide characters as two letters
        width = max(4, width * 4 // 5)
    lines = wrap(" ".join(text.split()), width)
    if len(lines) > max_lines:
        lines[max_lines - 1 :] = [f"{wrap(lines[max_lines - 1], max(2, width - 2))[0]} …"]
    return lines


def format_label(label: str) -> str:
    """Format a label for matplotlib, with the FB of TORINO_FB as a subscript."""
    text = re.sub(r"TORINO-([PM])_FB", r"TORINO_FB-\1", escape_math(label))
    return text.replace("TORINO_FB", r"TORINO$_\mathrm{FB}$")


def save_figure(figure: Any, folder: str | Path, name: str, formats: Sequence[str] = ("png", "pdf")) -> list[Path]:
    """Write a figure as ``name.png``, ``name.pdf``, … into a folder, each file atomically."""
    for item in formats:
        if item not in FORMATS:
            raise BadParameter(f"The format of a figure must be {', '.join(FORMATS)}, got {item!r}.")
    return [_save(figure, Path(folder) / f"{name}.{item}", item) for item in formats]


def to_svg(figure: Any) -> str:
    """Return a figure as SVG for a web page: transparent, with lines and text in the color of the page's text."""
    buffer = io.StringIO()
    with figure_style():
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    for color, opacity in ((INK, ""), (MUTED, "; opacity: 0.7"), (GRID, "; opacity: 0.22")):
        for attribute in ("stroke", "fill"):
            text = text.replace(f"{attribute}: {color}", f"{attribute}: currentColor{opacity}")
    return text


def _save(figure: Any, path: Path, file_format: str) -> Path:
    metadata = {"png": {"Software": None}, "pdf": {"CreationDate": None, "Creator": "torino"}, "svg": {"Date": None}}

    def write(target: Path) -> None:
        with figure_style():
            figure.savefig(target, format=file_format, dpi=300, metadata=metadata[file_format], facecolor="white")

    return write_atomic(path, write)
