"""Pictures made of text: the groups of an image, drawn with coloured half blocks."""

from __future__ import annotations

import colorsys
from collections.abc import Mapping, Sequence

from rich.color import Color
from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.style import Style
from rich.text import Text

from torino.core.reduction import Reduction

GOLDEN = 0.6180339887  # steps of the golden ratio keep neighbouring hues apart


def draw_groups(
    plans: Sequence[tuple[str, Reduction]], width: int = 100, names: Mapping[int, str] | None = None
) -> RenderableType:
    """Draw the groups of some images side by side, two patch rows to a line.

    Patches of one output token share a colour; a patch on its own is grey; one that no token stands for is dark.
    With ``names``, words for latents such as ``sae.names``, those of the largest groups stand below, in their colours.
    """
    drawn = [_drawn(name, plan, names or {}) for name, plan in plans]
    return Columns(drawn, padding=(0, 2), width=min(width, _wide(plans)))


def _wide(plans: Sequence[tuple[str, Reduction]]) -> int:
    return max(max(plan.grid[1], len(_title(name, plan))) for name, plan in plans)


def _title(name: str, plan: Reduction) -> str:
    return f"{name}: {plan.patches} → {len(plan)}"


def _drawn(name: str, plan: Reduction, names: Mapping[int, str]) -> RenderableType:
    rows, columns = plan.grid
    sizes: list[int] = plan.assigned[plan.assigned >= 0].bincount(minlength=len(plan)).tolist()
    colours = [_colour(token, sizes[token] if token >= 0 else 0) for token in plan.assigned.tolist()]
    text = Text()
    for top in range(0, rows, 2):
        for column in range(columns):
            upper = colours[top * columns + column]
            lower = colours[(top + 1) * columns + column] if top + 1 < rows else None
            text.append("▀", Style(color=upper, bgcolor=lower))
        text.append("\n")
    room = max(columns, len(_title(name, plan)))
    for token in sorted(range(len(plan)), key=lambda token: (-sizes[token], token))[:12]:
        word = names.get(int(plan.concept[token]), "")
        if sizes[token] > 1 and word and len(word) < room:
            text.append(word + " ", Style(color=_colour(token, sizes[token])))
            room -= len(word) + 1
    return Group(Text(_title(name, plan), "bold"), text)


def _colour(token: int, size: int) -> Color:
    if token < 0:
        return Color.from_rgb(25, 25, 25)
    if size == 1:
        return Color.from_rgb(150, 150, 150)
    red, green, blue = colorsys.hsv_to_rgb(
        (token * GOLDEN) % 1, 0.55 + 0.35 * (token % 3) / 2, 0.65 + 0.3 * (token % 2)
    )
    return Color.from_rgb(red * 255, green * 255, blue * 255)
