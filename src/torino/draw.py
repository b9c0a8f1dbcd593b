"""Pictures: a Reduction over its image. Needs Pillow (``pip install "torino[draw]"``)."""

from __future__ import annotations

import colorsys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from torino.errors import BadFile, TorinoError
from torino.files import write_whole
from torino.reduction import Reduction

try:
    from PIL import Image, ImageDraw, ImageFont
except ImportError as error:
    raise TorinoError(
        'Pictures need Pillow, which is not installed. Install it with pip install "torino[draw]".'
    ) from error

Style = Literal["groups", "kept"]
Pixels = NDArray[np.float64]

GOLDEN = 0.6180339887  # hues a golden ratio apart: neighbouring numbers never look alike
INK, PAPER, MUTED = (32, 34, 38), (255, 255, 255), (110, 114, 120)


def token_colour(token: int) -> tuple[int, int, int]:
    """A colour for an output token; numbers that follow each other differ clearly."""
    red, green, blue = colorsys.hsv_to_rgb((token * GOLDEN) % 1, 0.5 + 0.4 * (token % 3) / 2, 0.7 + 0.25 * (token % 2))
    return round(red * 255), round(green * 255), round(blue * 255)


def draw_reduction(
    plan: Reduction,
    photo: Image.Image | None = None,
    *,
    style: Style = "groups",
    side: int = 336,
    names: Mapping[int, str] | None = None,
) -> Image.Image:
    """Draw one reduction over its photo (or over grey), ``side`` pixels on the longer side.

    ``"groups"``: patches that one token stands for share a colour and an outline; patches alone keep the colours of
    the photo, and patches that no token stands for are dark. ``"kept"``: patches whose place an output token takes
    are shown as they are, all others faded. With ``names``, words for latents such as ``sae.names``, the largest
    groups carry the word for their concept.
    """
    rows, columns = plan.grid
    cell = max(2, side // max(rows, columns))
    size = (columns * cell, rows * cell)
    base = np.asarray((photo or Image.new("RGB", size, (190, 190, 190))).convert("RGB").resize(size), np.float64)
    token = _enlarged(plan.assigned.numpy().reshape(rows, columns), cell)
    if style == "kept":
        kept = np.zeros(rows * columns, np.bool_)
        kept[plan.anchor[plan.anchor >= 0].numpy()] = True
        shown = np.where(_enlarged(kept.reshape(rows, columns), cell)[..., None], base, 0.18 * base + 0.82 * 255)
        return Image.fromarray(shown.round().astype(np.uint8))
    tokens = max(len(plan), 1)  # a tile may have none, and then all of it is dark
    sizes = plan.assigned[plan.assigned >= 0].bincount(minlength=tokens).numpy()
    colours = np.array([token_colour(number) for number in range(tokens)], np.float64)
    grey = base.mean(-1, keepdims=True)
    tinted = 0.45 * grey + 0.55 * colours[np.maximum(token, 0)]
    shown = np.where((sizes[np.maximum(token, 0)] > 1)[..., None], tinted, base)
    shown = np.where((token >= 0)[..., None], shown, 0.25 * base)
    shown[_edges(token)] = 255
    drawn = Image.fromarray(shown.round().astype(np.uint8))
    if names:
        _write_names(drawn, plan, names, cell)
    return drawn


def draw_sheet(
    rows: Mapping[str, tuple[Image.Image | None, Sequence[tuple[str, Reduction]]]],
    *,
    style: Style = "groups",
    side: int = 240,
    names: Mapping[int, str] | None = None,
) -> Image.Image:
    """Draw several reductions of several photos: one photo a row, first as it is, then each reduction with its count.

    Parameters
    ----------
    rows : mapping of name to (photo or None, sequence of (heading, Reduction))
    style, side, names
        As for :func:`draw_reduction`.
    """
    gap, label, head = 10, 22, 26
    widest = max(len(plans) for _, plans in rows.values()) + 1
    sheet = Image.new("RGB", (gap + widest * (side + gap), head + len(rows) * (side + label + gap)), PAPER)
    pen, large, small = ImageDraw.Draw(sheet), ImageFont.load_default(15), ImageFont.load_default(13)
    for line, (name, (photo, plans)) in enumerate(rows.items()):
        top = head + line * (side + label + gap)
        cells = [(name, photo, f"{plans[0][1].patches} tokens" if plans else "")]
        cells += [
            (heading, draw_reduction(plan, photo, style=style, side=side, names=names), f"{len(plan)} tokens")
            for heading, plan in plans
        ]
        for place, (heading, picture, caption) in enumerate(cells):
            left = gap + place * (side + gap)
            if line == 0 and place:
                pen.text((left, 6), heading, INK, large)
            if picture is not None:
                sheet.paste(picture.resize((side, side)) if place == 0 else picture, (left, top))
            pen.text((left, top + side + 3), caption if place else f"{name}: {caption}", MUTED, small)
    return sheet


def save_picture(picture: Image.Image, path: str | Path) -> Path:
    """Write a picture as PNG, JPEG or WebP by its ending, whole or not at all."""
    if Path(path).suffix.lower() not in (".png", ".jpg", ".jpeg", ".webp"):
        raise BadFile(f"Cannot write the picture {path}: its ending must be .png, .jpg or .webp.")
    return write_whole(path, lambda target: picture.save(target, quality=88))


def _write_names(drawn: Image.Image, plan: Reduction, names: Mapping[int, str], cell: int) -> None:
    """Write the words for the largest groups over them, where there is room and none is written yet."""
    sizes: list[int] = plan.assigned[plan.assigned >= 0].bincount(minlength=len(plan)).tolist()
    pen, font = ImageDraw.Draw(drawn), ImageFont.load_default(11)
    taken: list[tuple[float, float, float, float]] = []
    for token in sorted(range(len(plan)), key=lambda token: (-sizes[token], token)):
        name = names.get(int(plan.concept[token]))
        if sizes[token] < max(3, plan.patches // 100):
            break
        if name is None:
            continue
        rows, columns = np.divmod((plan.assigned == token).nonzero()[:, 0].numpy(), plan.grid[1])
        nearest = int(((rows - rows.mean()) ** 2 + (columns - columns.mean()) ** 2).argmin())
        middle = ((columns[nearest] + 0.5) * cell, (rows[nearest] + 0.5) * cell)
        wide, high = font.getlength(name) + 8, 16
        left = min(max(middle[0] - wide / 2, 1), drawn.width - wide - 1)
        top = min(max(middle[1] - high / 2, 1), drawn.height - high - 1)
        box = (left, top, left + wide, top + high)
        if left < 0 or any(box[0] < b[2] and b[0] < box[2] and box[1] < b[3] and b[1] < box[3] for b in taken):
            continue
        taken.append(box)
        pen.rounded_rectangle(box, 4, fill=INK)
        pen.text((left + 4, top + 8), name, PAPER, font, anchor="lm")


def _enlarged(grid: NDArray[Any], cell: int) -> NDArray[Any]:
    return grid.repeat(cell, 0).repeat(cell, 1)


def _edges(token: NDArray[Any]) -> NDArray[np.bool_]:
    """Pixels at the border of two tokens."""
    edge = np.zeros(token.shape, np.bool_)
    edge[1:] |= token[1:] != token[:-1]
    edge[:, 1:] |= token[:, 1:] != token[:, :-1]
    return edge
