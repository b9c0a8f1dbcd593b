"""Pictures: a Reduction over its image. Needs Pillow (``pip install "torino[draw]"``)."""

from __future__ import annotations

import colorsys
import unicodedata
from collections.abc import Mapping, Sequence
from math import ceil, sqrt
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from torino.core.errors import BadFile, TorinoError
from torino.core.io import write_atomic
from torino.core.reduction import Reduction

try:
    from PIL import Image, ImageDraw, ImageFont
except ImportError as error:
    raise TorinoError(
        'Pictures need Pillow, which is not installed. Install it with pip install "torino[draw]".'
    ) from error

Style = Literal["groups", "kept", "outlined", "tokens"]

GOLDEN = 0.6180339887  # hues a golden ratio apart: neighbouring numbers never look alike
INK, PAPER, MUTED = (32, 34, 38), (255, 255, 255), (110, 114, 120)
SHADE = (240, 241, 243)
# What the font that comes with Pillow has no glyphs for, in letters that it has.
LETTERS = {"→": "->", "×": "x", "δ": "delta", "ε": "epsilon", "–": "-", "—": "-", "−": "-", "ß": "ss", "æ": "ae"}


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
    are shown as they are, all others faded; ``"outlined"``: the same, with a line around each group.
    ``"tokens"``: the patches whose places are left, laid close together in the order of the tokens; a token of no
    place is a plain colour. With ``names``, words for latents such as ``sae.names``, the largest groups carry the word
    for their concept, each word once.
    """
    rows, columns = plan.grid
    cell = max(2, side // max(rows, columns))
    base = scaled(photo, plan.grid, cell)
    if style == "tokens":
        block = draw_tokens(plan, photo, cell=cell, gap=min(1, cell // 6))
        sheet = Image.new("RGB", (columns * cell, rows * cell), SHADE)
        sheet.paste(block, ((sheet.width - block.width) // 2, max(0, sheet.height - block.height) // 2), block)
        return sheet
    token = _enlarged(plan.assigned.numpy().reshape(rows, columns), cell)
    tokens = max(len(plan), 1)  # a tile may have none, and then all of it is dark
    sizes = plan.assigned[plan.assigned >= 0].bincount(minlength=tokens).numpy()
    if style != "groups":
        kept = np.zeros(rows * columns, np.bool_)
        kept[plan.anchor[plan.anchor >= 0].numpy()] = True
        shown = np.where(_enlarged(kept.reshape(rows, columns), cell)[..., None], base, 0.18 * base + 0.82 * 255)
        if style == "outlined":
            grouped = (token >= 0) & (sizes[np.maximum(token, 0)] > 1)
            edge = _edges(np.where(grouped, token, -1))
            shown[edge] = 0.45 * shown[edge] + 0.55 * np.array(MUTED)  # many groups are many lines: soft ones
        return Image.fromarray(shown.round().astype(np.uint8))
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


def draw_tokens(plan: Reduction, photo: Image.Image | None = None, *, cell: int = 14, gap: int = 1) -> Image.Image:
    """Draw what is left of an image as a block of patches, one for each token in their order, clear between them.

    Each is the patch whose place the token takes; a token of no place is a plain colour. The block has the shape of
    the grid, and so many patches as there are tokens.
    """
    rows, columns = plan.grid
    base = scaled(photo, plan.grid, cell).astype(np.uint8)
    wide = min(columns, max(1, ceil(sqrt(len(plan) * columns / rows))))
    block = np.zeros((max(1, ceil(len(plan) / wide)) * cell, wide * cell, 4), np.uint8)
    for number, place in enumerate(plan.anchor.tolist()):
        y, x = number // wide * cell, number % wide * cell
        tile = block[y : y + cell - gap, x : x + cell - gap]
        tile[..., 3] = 255
        if place < 0:  # a mean with no place of its own
            tile[..., :3] = token_colour(number)
            continue
        row, column = place // columns * cell, place % columns * cell
        tile[..., :3] = base[row : row + cell - gap, column : column + cell - gap]
    return Image.fromarray(block)


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
    return write_atomic(path, lambda target: picture.save(target, quality=88))


def in_letters(text: str) -> str:
    """The text in letters that the font of Pillow has: accents are left away, and what it cannot write is a ?.

    Examples
    --------
    >>> in_letters("Café, 24 × 24 → 3")
    'Cafe, 24 x 24 -> 3'
    """
    text = unicodedata.normalize("NFKD", "".join(LETTERS.get(letter, letter) for letter in " ".join(text.split())))
    plain = "".join(letter for letter in text if not unicodedata.combining(letter))
    return "".join(letter if letter.isascii() or letter in "…·“”‘’" else "?" for letter in plain)


def _write_names(drawn: Image.Image, plan: Reduction, names: Mapping[int, str], cell: int) -> None:
    """Write the words for the largest groups over them, where there is room and none is written yet."""
    sizes: list[int] = plan.assigned[plan.assigned >= 0].bincount(minlength=len(plan)).tolist()
    pen, font = ImageDraw.Draw(drawn), ImageFont.load_default(11)
    taken: list[tuple[float, float, float, float]] = []
    written = {""}
    for token in sorted(range(len(plan)), key=lambda token: (-sizes[token], token)):
        name = in_letters(names.get(int(plan.concept[token]), ""))
        if sizes[token] < max(3, plan.patches // 100):
            break
        if name in written:
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
        written.add(name)
        pen.rounded_rectangle(box, 4, fill=INK)
        pen.text((left + 4, top + 8), name, PAPER, font, anchor="lm")


def scaled(photo: Image.Image | None, grid: tuple[int, int], cell: int) -> NDArray[np.float64]:
    """The photo (or grey) with so many pixels to a patch."""
    size = (grid[1] * cell, grid[0] * cell)
    return np.asarray((photo or Image.new("RGB", size, (190, 190, 190))).convert("RGB").resize(size), np.float64)


def _enlarged(grid: NDArray[Any], cell: int) -> NDArray[Any]:
    return grid.repeat(cell, 0).repeat(cell, 1)


def _edges(token: NDArray[Any]) -> NDArray[np.bool_]:
    """Pixels at the border of two tokens."""
    edge = np.zeros(token.shape, np.bool_)
    edge[1:] |= token[1:] != token[:-1]
    edge[:, 1:] |= token[:, 1:] != token[:, :-1]
    return edge
