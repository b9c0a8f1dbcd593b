"""Draw words and patches of shared concepts side by side. Needs Pillow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isqrt

import numpy as np

from torino.core.errors import BadParameter
from torino.core.extras import optional_import
from torino.interpret.shared_concepts import SharedConcept
from torino.interpret.sheet import ACCENT, INK, LINE, MUTED, PAPER
from torino.viz.draw import transliterate
from torino.viz.figures import truncate_text

with optional_import("Drawing needs", "torino[vlm]"):
    from PIL import Image, ImageDraw, ImageFont

CELL, GAP, MARGIN, TEXT = 132, 8, 24, 300
Loader = Callable[[int], tuple[Image.Image, int]]
"""Returns a photo as the tower sees it, and the number of its patches."""


def draw_shared_sheet(concepts: Sequence[SharedConcept], load: Loader, *, title: str, photos: int = 6) -> Image.Image:
    """Draw a row for each concept: its words on the left, its photos with the patch it fires on most on the right.

    Parameters
    ----------
    concepts : sequence of SharedConcept
    load : callable
        Returns a photo by its number.
    title : str
    photos : int
        Photos in a row.
    """
    if not concepts:
        raise BadParameter("There are no shared concepts to draw. Use more photos with captions, or another SAE.")
    width = 2 * MARGIN + TEXT + photos * (CELL + GAP)
    page = Image.new("RGB", (width, 2 * MARGIN + 40 + len(concepts) * (CELL + GAP)), PAPER)
    pen = ImageDraw.Draw(page)
    huge, large, small = (ImageFont.load_default(size) for size in (22, 17, 13))
    pen.text((MARGIN, MARGIN), truncate_text(transliterate(title), huge, width - 2 * MARGIN), INK, huge)
    for number, concept in enumerate(concepts):
        top = MARGIN + 40 + number * (CELL + GAP)
        pen.line((MARGIN, top - GAP // 2, width - MARGIN, top - GAP // 2), LINE)
        others = ", ".join(word for word, _ in concept.words if word != concept.word)
        lines = [
            (concept.word, large, ACCENT if concept.same_meaning else INK),
            (f"latent {concept.latent}" + (f"; also {others}" if others else ""), small, MUTED),
            (f"AUC {concept.auc:.2f} (95 % of chance below {concept.chance:.2f})", small, INK),
            (f"{concept.precision:.0%} of its photos hold the word, of all {concept.base:.0%}", small, INK),
        ]
        for line, (text, font, color) in enumerate(lines):
            at = (MARGIN, top + (4 if not line else 14 + 19 * line))
            pen.text(at, truncate_text(transliterate(text), font, TEXT - 2 * GAP), color, font)
        for column, (photo, patch) in enumerate(concept.photos[:photos]):
            picture, patches = load(photo)
            left = MARGIN + TEXT + column * (CELL + GAP)
            page.paste(_outline(picture, patches, patch), (left, top))
    return page


def _outline(picture: Image.Image, patches: int, patch: int) -> Image.Image:
    """Return a square thumbnail with the patch outlined, if patches form a square grid."""
    drawn = picture.convert("RGB").resize((CELL, CELL), Image.Resampling.LANCZOS)
    side = isqrt(patches)
    if side * side == patches:
        row, column = divmod(patch, side)
        corners = np.array([column, row, column + 1, row + 1]) * CELL / side
        pen, (left, top, right, bottom) = ImageDraw.Draw(drawn), corners.round().astype(int).tolist()
        pen.rectangle((left - 2, top - 2, right + 1, bottom + 1), outline=PAPER, width=1)
        pen.rectangle((left - 1, top - 1, right, bottom), outline=(220, 40, 40), width=2)
    return drawn
