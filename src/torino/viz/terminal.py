"""Draw the groups of an image in the terminal with colored half blocks."""

from __future__ import annotations

import colorsys
from collections.abc import Mapping, Sequence

from rich.color import Color
from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.style import Style
from rich.text import Text

from torino.core.reduction import Reduction

GOLDEN_RATIO = 0.6180339887  # hues at this distance make consecutive tokens easy to tell apart
MAX_NAMES = 12


def draw_groups(
    plans: Sequence[tuple[str, Reduction]], width: int = 100, names: Mapping[int, str] | None = None
) -> RenderableType:
    """Draw the groups of several images side by side, two rows of patches per line.

    Patches of the same output token share a color. A patch that is a token of its own is gray, a dropped patch dark.

    Parameters
    ----------
    plans : sequence of (name, Reduction)
    width : int
        Width of the terminal in characters.
    names : mapping of latent to str, optional
        Concept names, for example ``sae.names``. Those of the largest groups are listed below in their colors.
    """
    columns = max(max(plan.grid[1], len(_title(name, plan))) for name, plan in plans)
    return Columns([_draw(name, plan, names or {}) for name, plan in plans], padding=(0, 2), width=min(width, columns))


def _title(name: str, plan: Reduction) -> str:
    return f"{name}: {plan.patches} → {len(plan)}"


def _draw(name: str, plan: Reduction, names: Mapping[int, str]) -> RenderableType:
    rows, columns = plan.grid
    sizes: list[int] = plan.assigned[plan.assigned >= 0].bincount(minlength=len(plan)).tolist()
    colors = [_color(token, sizes[token] if token >= 0 else 0) for token in plan.assigned.tolist()]
    text = Text()
    for top in range(0, rows, 2):
        for column in range(columns):
            upper = colors[top * columns + column]
            lower = colors[(top + 1) * columns + column] if top + 1 < rows else None
            text.append("▀", Style(color=upper, bgcolor=lower))
        text.append("\n")
    available = max(columns, len(_title(name, plan)))
    for token in sorted(range(len(plan)), key=lambda token: (-sizes[token], token))[:MAX_NAMES]:
        word = names.get(int(plan.concept[token]), "")
        if sizes[token] > 1 and word and len(word) < available:
            text.append(word + " ", Style(color=_color(token, sizes[token])))
            available -= len(word) + 1
    return Group(Text(_title(name, plan), "bold"), text)


def _color(token: int, size: int) -> Color:
    if token < 0:
        return Color.from_rgb(25, 25, 25)
    if size == 1:
        return Color.from_rgb(150, 150, 150)
    hue, saturation, value = (token * GOLDEN_RATIO) % 1, 0.55 + 0.35 * (token % 3) / 2, 0.65 + 0.3 * (token % 2)
    red, green, blue = colorsys.hsv_to_rgb(hue, saturation, value)
    return Color.from_rgb(red * 255, green * 255, blue * 255)
