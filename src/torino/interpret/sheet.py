"""Draw the concept sheet: a picture with one row per latent and its top activating photos. Needs Pillow."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isnan
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torino.core.errors import BadParameter
from torino.core.extras import optional_import
from torino.interpret.naming import ConceptName
from torino.interpret.top_activations import TopActivations
from torino.viz.figures import truncate_text

with optional_import("Drawing needs", "torino[vlm]"):
    from PIL import Image, ImageDraw, ImageFont

Rank = Literal["usage", "monosemanticity", "lift"]
PhotoLoader = Callable[[int], Image.Image]
"""Returns a photo of the source by its number, as the tower sees it."""

PAPER, INK, MUTED, PALE, LINE = (255, 255, 255), (28, 30, 34), (112, 117, 125), (168, 173, 180), (232, 234, 237)
ACCENT = (20, 110, 190)
FADED = 0.32  # contrast of patches on which the latent is not active


@dataclass(frozen=True)
class ConceptSummary:
    """Statistics of one latent, for drawing.

    Attributes
    ----------
    latent : int
    name : ConceptName or None
    patch_share, photo_share : float
        Share of patches and of photos on which the latent is active.
    mean_activation, max_activation : float
        Mean of the nonzero activations, and the largest.
    monosemanticity, chance_adjusted : float
        Score, and score rescaled so that chance is 0; NaN if undefined.
    """

    latent: int
    name: ConceptName | None
    patch_share: float
    photo_share: float
    mean_activation: float
    max_activation: float
    monosemanticity: float
    chance_adjusted: float

    @property
    def title(self) -> str:
        """Name, or number if it has no name."""
        return self.name.name if self.name else f"latent {self.latent}"


def select_concepts(
    activations: TopActivations,
    names: Mapping[int, ConceptName] | None = None,
    *,
    latents: Sequence[int] | None = None,
    top: int | None = None,
    rank: Rank = "usage",
) -> list[ConceptSummary]:
    """Select and rank the latents to draw.

    Parameters
    ----------
    activations : TopActivations
    names : mapping of latent to ConceptName, optional
    latents : sequence of int, optional
        Only these; by default all that were active.
    top : int, optional
        Maximum number.
    rank : {"usage", "monosemanticity", "lift"}
        ``"usage"`` ranks by the share of active patches. The others rank by the value of that name and omit latents
        without one. ``"monosemanticity"`` also omits latents that are active on fewer than K photos, because their
        score depends on few pairs. Ties are broken by the latent number.
    """
    if rank not in get_args(Rank):
        raise BadParameter(f"rank must be 'usage', 'monosemanticity' or 'lift', got {rank!r}.")
    names = names or {}
    if rank == "lift" and not names:
        raise BadParameter("Ranking by lift needs names, and these photos have no captions or labels to name by.")
    invalid = [latent for latent in latents or () if not 0 <= latent < activations.latents]
    if invalid:
        raise BadParameter(f"Latent {invalid[0]} does not exist: this SAE has {activations.latents}, numbered from 0.")
    scores = activations.monosemanticity
    values: dict[Rank, Tensor] = {"usage": activations.patch_share, "monosemanticity": scores.values}
    values["lift"] = torch.tensor([names[c].lift if c in names else torch.nan for c in range(activations.latents)])
    by: list[float] = values[rank].tolist()
    active: list[int] = activations.active_photos.tolist()
    if latents is None:
        min_photos = activations.keep if rank == "monosemanticity" else 1
        selected = [c for c in range(activations.latents) if active[c] >= min_photos and not isnan(by[c])]
    else:
        selected = list(dict.fromkeys(latents))
    selected.sort(key=lambda c: (-by[c] if not isnan(by[c]) else torch.inf, c))
    columns = (
        activations.patch_share,
        activations.photo_share,
        activations.mean_activation,
        activations.max_activation,
        scores.values,
        scores.chance_adjusted,
    )
    statistics = list(zip(*(column.tolist() for column in columns), strict=True))
    return [ConceptSummary(c, names.get(c), *statistics[c]) for c in selected[:top]]


def draw_concept_sheet(
    activations: TopActivations,
    concepts: Sequence[ConceptSummary],
    load_photo: PhotoLoader,
    *,
    photos: int = 8,
    side: int = 116,
    title: str = "",
) -> Image.Image:
    """Draw one row per concept: number, name and statistics, then its top photos with the active patches highlighted.

    Parameters
    ----------
    activations : TopActivations
    concepts : sequence of ConceptSummary
    load_photo : callable
        Returns a photo by its number, as the tower sees it.
    photos : int
        Photos per row.
    side : int
        Longer side of a photo in pixels.
    title : str
    """
    if not concepts:
        raise BadParameter("No latent is active on these photos, so there is nothing to draw. Give more photos.")
    photos = min(photos, activations.keep)
    text, gap, head, margin = 236, 6, 78, 24
    row = side + 14
    width = margin + text + photos * (side + gap) + margin - gap
    sheet = Image.new("RGB", (width, head + len(concepts) * row + margin), PAPER)
    pen = ImageDraw.Draw(sheet)
    fonts = {size: ImageFont.load_default(size) for size in (12, 13, 18, 22)}
    pen.text((margin, 18), truncate_text(title or "Concepts", fonts[22], width - 2 * margin), INK, fonts[22])
    subtitle = truncate_text(_summarize(activations), fonts[13], width - 2 * margin)
    pen.text((margin, 48), subtitle, MUTED, fonts[13])
    thumbnails: dict[int, Image.Image] = {}
    for number, concept in enumerate(concepts):
        top = head + number * row
        pen.line([(margin, top), (width - margin, top)], LINE)
        _draw_label(pen, concept, (margin, top + 7), text - 16, fonts)
        for position, (photo, _) in enumerate(activations.get_photos(concept.latent)[:photos]):
            if photo not in thumbnails:
                thumbnails[photo] = resize_longest_side(load_photo(photo), side)
            patches, values = activations.get_map(concept.latent, position)
            grid = (int(activations.grids[photo, 0]), int(activations.grids[photo, 1]))
            tile = highlight_patches(thumbnails[photo], grid, patches, values / concept.max_activation)
            x, y = ((side - size) // 2 for size in tile.size)
            sheet.paste(tile, (margin + text + position * (side + gap) + x, top + 7 + y))
    return sheet


def resize_longest_side(picture: Image.Image, side: int) -> Image.Image:
    """Resize a picture so that its longer side has ``side`` pixels."""
    longest = max(picture.size)
    width, height = (max(1, round(size * side / longest)) for size in picture.size)
    return picture.convert("RGB").resize((width, height), Image.Resampling.LANCZOS)


def highlight_patches(picture: Image.Image, grid: tuple[int, int], patches: Tensor, strength: Tensor) -> Image.Image:
    """Show the given patches in color, the others gray and faded.

    ``strength`` is 0 to 1 for each of ``patches``. A quarter of the color is shown at 0, all of it from 0.5 on.
    """
    rows, columns = grid
    visibility = np.zeros(rows * columns)
    visibility[patches.numpy()] = (0.25 + 1.5 * strength.double()).clamp(0, 1).numpy()
    mask = _resize_nearest(visibility.reshape(rows, columns), picture.size)[..., None]
    photo = np.asarray(picture.convert("RGB"), np.float64)
    faded = FADED * photo.mean(-1, keepdims=True) + (1 - FADED) * 255
    return Image.fromarray((faded + (photo - faded) * mask).round().astype(np.uint8))


def _resize_nearest(cells: NDArray[Any], size: tuple[int, int]) -> NDArray[Any]:
    """Resize a grid of values to the size of a picture, without interpolation."""
    width, height = size
    rows = np.arange(height) * cells.shape[0] // height
    return cells[rows][:, np.arange(width) * cells.shape[1] // width]


def _draw_label(
    pen: ImageDraw.ImageDraw, concept: ConceptSummary, at: tuple[int, int], width: int, fonts: Mapping[int, Any]
) -> None:
    left, top = at
    pen.text((left, top + 2), f"#{concept.latent}", ACCENT, fonts[13])
    name = concept.name.name if concept.name else "unnamed"
    pen.text((left, top + 20), truncate_text(name, fonts[18], width), INK if concept.name else PALE, fonts[18])
    lines = [f"{concept.patch_share:.2%} of patches, {concept.photo_share:.0%} of photos"]
    if not isnan(concept.monosemanticity):
        lines.append(f"monosemanticity {concept.monosemanticity:.3f}")
    if concept.name:
        lines.append(f"lift {concept.name.lift:.1f}, in {concept.name.count} of {concept.name.photos} top photos")
    for number, line in enumerate(lines):
        pen.text((left, top + 48 + 18 * number), truncate_text(line, fonts[12], width), MUTED, fonts[12])


def _summarize(activations: TopActivations) -> str:
    scores = activations.monosemanticity
    parts = [f"{activations.photo_count:,} photos", f"{activations.latents:,} latents, {scores.dead:,} never active"]
    if len(scores.defined):
        parts.append(f"mean monosemanticity {scores.mean:.3f} (chance {scores.chance:.3f})")
    return "  ·  ".join(parts)
