"""Draw a Reduction over its image. Needs Pillow (``pip install "torino[vlm]"``)."""

from __future__ import annotations

import colorsys
import unicodedata
from collections.abc import Mapping, Sequence
from math import ceil, sqrt
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from torino.core.errors import BadFile
from torino.core.extras import optional_import
from torino.core.io import write_atomic
from torino.core.reduction import Reduction

with optional_import("Drawing needs", "torino[vlm]"):
    from PIL import Image, ImageDraw, ImageFont

DrawStyle = Literal["groups", "kept", "outlined", "tokens"]

GOLDEN_RATIO = 0.6180339887  # hues at this distance make consecutive tokens easy to tell apart
INK, PAPER, MUTED = (32, 34, 38), (255, 255, 255), (110, 114, 120)
SHADE = (240, 241, 243)
# Replacements for characters that the font of Pillow does not have.
REPLACEMENTS = {"→": "->", "×": "x", "δ": "delta", "ε": "epsilon", "–": "-", "—": "-", "−": "-", "ß": "ss", "æ": "ae"}


def token_color(token: int) -> tuple[int, int, int]:
    """Return the color of an output token; consecutive tokens get clearly different colors."""
    hue, saturation, value = (token * GOLDEN_RATIO) % 1, 0.5 + 0.4 * (token % 3) / 2, 0.7 + 0.25 * (token % 2)
    red, green, blue = colorsys.hsv_to_rgb(hue, saturation, value)
    return round(red * 255), round(green * 255), round(blue * 255)


def draw_reduction(
    plan: Reduction,
    photo: Image.Image | None = None,
    *,
    style: DrawStyle = "groups",
    side: int = 336,
    names: Mapping[int, str] | None = None,
    colors: Mapping[int, tuple[int, int, int]] | None = None,
) -> Image.Image:
    """Draw a reduction over its photo.

    Parameters
    ----------
    plan : Reduction
    photo : PIL image, optional
        Drawn gray if not given.
    style : {"groups", "kept", "outlined", "tokens"}
        ``"groups"``: patches of the same output token share a color and an outline. Patches that are a token of their
        own keep the colors of the photo, and dropped patches are dark. ``"kept"``: patches at the position of an output
        token are shown unchanged, all others faded. ``"outlined"``: like ``"kept"`` with an outline around each group.
        ``"tokens"``: the patches at the positions of the output tokens, side by side in the order of the tokens; a
        token without a position is a plain color.
    side : int
        Length of the longer side in pixels.
    names : mapping of latent to str, optional
        Concept names, for example ``sae.names``. The largest groups are labelled with the name of their concept, each
        name once. Only used by the style ``"groups"``.
    colors : mapping of latent to color, optional
        Colors of concepts for the style ``"groups"``, so that a concept has the same color in several pictures. Groups
        of other concepts have a color for each token.
    """
    rows, columns = plan.grid
    cell = max(2, side // max(rows, columns))
    base = scale_to_grid(photo, plan.grid, cell)
    if style == "tokens":
        block = draw_tokens(plan, photo, cell=cell, gap=min(1, cell // 6))
        canvas = Image.new("RGB", (columns * cell, rows * cell), SHADE)
        canvas.paste(block, ((canvas.width - block.width) // 2, max(0, canvas.height - block.height) // 2), block)
        return canvas
    token = enlarge(plan.assigned.numpy().reshape(rows, columns), cell)
    tokens = max(len(plan), 1)  # a tile may have no tokens; it is drawn dark
    sizes = plan.assigned[plan.assigned >= 0].bincount(minlength=tokens).numpy()
    if style != "groups":
        kept = np.zeros(rows * columns, np.bool_)
        kept[plan.anchor[plan.anchor >= 0].numpy()] = True
        shown = np.where(enlarge(kept.reshape(rows, columns), cell)[..., None], base, 0.18 * base + 0.82 * 255)
        if style == "outlined":
            grouped = (token >= 0) & (sizes[np.maximum(token, 0)] > 1)
            edge = _find_edges(np.where(grouped, token, -1))
            shown[edge] = 0.45 * shown[edge] + 0.55 * np.array(MUTED)  # soft lines, because there may be many
        return Image.fromarray(shown.round().astype(np.uint8))
    concepts = plan.concept.tolist() or [-1]
    tints = [(colors or {}).get(concept, token_color(number)) for number, concept in enumerate(concepts)]
    drawn = paint_groups(base, token, sizes, tints)
    if names:
        _draw_names(drawn, plan, names, cell)
    return drawn


def paint_groups(
    base: NDArray[np.float64],
    token: NDArray[Any],
    sizes: NDArray[Any],
    tints: Sequence[tuple[int, int, int]],
) -> Image.Image:
    """Tint the groups of several patches, and darken dropped patches.

    Parameters
    ----------
    base : array of shape (height, width, 3)
        The photo.
    token : array of shape (height, width)
        The output token of each pixel; −1 for none.
    sizes, tints : arrays of length M
        Patches and color of each output token.
    """
    gray = base.mean(-1, keepdims=True)
    tinted = 0.45 * gray + 0.55 * np.array(tints, np.float64)[np.maximum(token, 0)]
    shown = np.where((sizes[np.maximum(token, 0)] > 1)[..., None], tinted, base)
    shown = np.where((token >= 0)[..., None], shown, 0.25 * base)
    shown[_find_edges(token)] = 255
    return Image.fromarray(shown.round().astype(np.uint8))


def draw_tokens(plan: Reduction, photo: Image.Image | None = None, *, cell: int = 14, gap: int = 1) -> Image.Image:
    """Draw the output tokens as a block of patches in their order, with transparent gaps.

    Each token is shown as the patch at its position; a token without a position is a plain color. The block has the
    aspect ratio of the grid and one patch for each token.
    """
    rows, columns = plan.grid
    base = scale_to_grid(photo, plan.grid, cell).astype(np.uint8)
    across = min(columns, max(1, ceil(sqrt(len(plan) * columns / rows))))
    block = np.zeros((max(1, ceil(len(plan) / across)) * cell, across * cell, 4), np.uint8)
    for number, position in enumerate(plan.anchor.tolist()):
        y, x = number // across * cell, number % across * cell
        tile = block[y : y + cell - gap, x : x + cell - gap]
        tile[..., 3] = 255
        if position < 0:  # for example the mean of all dropped patches
            tile[..., :3] = token_color(number)
            continue
        row, column = position // columns * cell, position % columns * cell
        tile[..., :3] = base[row : row + cell - gap, column : column + cell - gap]
    return Image.fromarray(block)


def draw_sheet(
    rows: Mapping[str, tuple[Image.Image | None, Sequence[tuple[str, Reduction]]]],
    *,
    style: DrawStyle = "groups",
    side: int = 240,
    names: Mapping[int, str] | None = None,
) -> Image.Image:
    """Draw several reductions of several photos, one row per photo: the photo, then each reduction and its token count.

    Parameters
    ----------
    rows : mapping of name to (photo or None, sequence of (heading, Reduction))
    style, side, names
        As for :func:`draw_reduction`.
    """
    gap, label, head = 10, 22, 26
    columns = max(len(plans) for _, plans in rows.values()) + 1
    sheet = Image.new("RGB", (gap + columns * (side + gap), head + len(rows) * (side + label + gap)), PAPER)
    pen, large, small = ImageDraw.Draw(sheet), ImageFont.load_default(15), ImageFont.load_default(13)
    for row, (name, (photo, plans)) in enumerate(rows.items()):
        top = head + row * (side + label + gap)
        cells = [(name, photo, f"{plans[0][1].patches} tokens" if plans else "")]
        cells += [
            (heading, draw_reduction(plan, photo, style=style, side=side, names=names), f"{len(plan)} tokens")
            for heading, plan in plans
        ]
        for column, (heading, picture, caption) in enumerate(cells):
            left = gap + column * (side + gap)
            if row == 0 and column:
                pen.text((left, 6), heading, INK, large)
            if picture is not None:
                sheet.paste(picture.resize((side, side)) if column == 0 else picture, (left, top))
            pen.text((left, top + side + 3), caption if column else f"{name}: {caption}", MUTED, small)
    return sheet


def save_picture(picture: Image.Image, path: str | Path) -> Path:
    """Write a picture atomically as PNG, JPEG or WebP, according to the suffix of ``path``."""
    if Path(path).suffix.lower() not in (".png", ".jpg", ".jpeg", ".webp"):
        raise BadFile(f"Cannot write the picture {path}: its suffix must be .png, .jpg or .webp.")
    return write_atomic(path, lambda target: picture.save(target, quality=88))


def transliterate(text: str) -> str:
    """Return the text in characters that the font of Pillow has, without accents; other characters become ``?``.

    Examples
    --------
    >>> transliterate("Café, 24 × 24 → 3")
    'Cafe, 24 x 24 -> 3'
    """
    text = "".join(REPLACEMENTS.get(character, character) for character in " ".join(text.split()))
    plain = [character for character in unicodedata.normalize("NFKD", text) if not unicodedata.combining(character)]
    return "".join(character if character.isascii() or character in "…·“”‘’" else "?" for character in plain)


def scale_to_grid(photo: Image.Image | None, grid: tuple[int, int], cell: int) -> NDArray[np.float64]:
    """Scale the photo (or plain gray) to ``cell`` pixels per patch."""
    size = (grid[1] * cell, grid[0] * cell)
    return np.asarray((photo or Image.new("RGB", size, (190, 190, 190))).convert("RGB").resize(size), np.float64)


def _draw_names(drawn: Image.Image, plan: Reduction, names: Mapping[int, str], cell: int) -> None:
    """Write the concept names of the largest groups over them, where they do not overlap."""
    sizes: list[int] = plan.assigned[plan.assigned >= 0].bincount(minlength=len(plan)).tolist()
    pen, font = ImageDraw.Draw(drawn), ImageFont.load_default(11)
    boxes: list[tuple[float, float, float, float]] = []
    written = {""}
    for token in sorted(range(len(plan)), key=lambda token: (-sizes[token], token)):
        name = transliterate(names.get(int(plan.concept[token]), ""))
        if sizes[token] < max(3, plan.patches // 100):
            break
        if name in written:
            continue
        rows, columns = np.divmod((plan.assigned == token).nonzero()[:, 0].numpy(), plan.grid[1])
        nearest = int(((rows - rows.mean()) ** 2 + (columns - columns.mean()) ** 2).argmin())
        center = ((columns[nearest] + 0.5) * cell, (rows[nearest] + 0.5) * cell)
        width, height = font.getlength(name) + 8, 16
        left = min(max(center[0] - width / 2, 1), drawn.width - width - 1)
        top = min(max(center[1] - height / 2, 1), drawn.height - height - 1)
        box = (left, top, left + width, top + height)
        if left < 0 or any(box[0] < b[2] and b[0] < box[2] and box[1] < b[3] and b[1] < box[3] for b in boxes):
            continue
        boxes.append(box)
        written.add(name)
        pen.rounded_rectangle(box, 4, fill=INK)
        pen.text((left + 4, top + 8), name, PAPER, font, anchor="lm")


def enlarge(grid: NDArray[Any], cell: int) -> NDArray[Any]:
    """Repeat each value ``cell`` times in both directions."""
    return grid.repeat(cell, 0).repeat(cell, 1)


def _find_edges(token: NDArray[Any]) -> NDArray[np.bool_]:
    """Return a mask of the pixels at the border of two tokens."""
    edge = np.zeros(token.shape, np.bool_)
    edge[1:] |= token[1:] != token[:-1]
    edge[:, 1:] |= token[:, 1:] != token[:, :-1]
    return edge
