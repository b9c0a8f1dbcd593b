"""The concept sheet: a picture of what fires the latents of an SAE, one row each. Needs Pillow."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isnan
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from torino.core.errors import BadParameter
from torino.interpret.naming import ConceptName
from torino.interpret.top_activations import Evidence

Rank = Literal["usage", "monosemanticity", "lift"]
Pictures = Callable[[int], Image.Image]
"""Gives a photo of the source as the tower saw it."""

PAPER, INK, MUTED, PALE, LINE = (255, 255, 255), (28, 30, 34), (112, 117, 125), (168, 173, 180), (232, 234, 237)
ACCENT = (20, 110, 190)
FADED = 0.32  # what is left of a patch that does not fire


@dataclass(frozen=True)
class Concept:
    """One latent as pictures tell of it.

    Attributes
    ----------
    latent : int
    name : ConceptName or None
    usage, photos : float
        Share of patches and of photos that fire it.
    mean, peak : float
        Mean activation where it fires, and the largest.
    monosemanticity, above : float
        Its score, and how far that is from chance (0) to 1; NaN where it has none.
    """

    latent: int
    name: ConceptName | None
    usage: float
    photos: float
    mean: float
    peak: float
    monosemanticity: float
    above: float

    @property
    def title(self) -> str:
        """Its name, or its number."""
        return self.name.name if self.name else f"latent {self.latent}"


def concepts(
    evidence: Evidence,
    names: Mapping[int, ConceptName] | None = None,
    *,
    latents: Sequence[int] | None = None,
    top: int | None = None,
    rank: Rank = "usage",
) -> list[Concept]:
    """The latents to draw, most telling first.

    Parameters
    ----------
    evidence : Evidence
    names : mapping of latent to ConceptName, optional
    latents : sequence of int, optional
        Only these; otherwise all that fired.
    top : int, optional
        How many.
    rank : {"usage", "monosemanticity", "lift"}
        ``"usage"`` by the share of patches that fire it, the others by what they are called; latents that have none
        are left out, and of monosemanticity also those that fire on fewer than K photos, where it rests on few pairs.
        Ties to the lowest latent.
    """
    if rank not in get_args(Rank):
        raise BadParameter(f"rank must be 'usage', 'monosemanticity' or 'lift', got {rank!r}.")
    names = names or {}
    if rank == "lift" and not names:
        raise BadParameter("Ranking by lift takes names, and these photos have no captions or labels to make any.")
    wrong = [latent for latent in latents or () if not 0 <= latent < evidence.latents]
    if wrong:
        raise BadParameter(f"There is no latent {wrong[0]}: this SAE has {evidence.latents}, numbered from 0.")
    values: dict[Rank, Tensor] = {"usage": evidence.patch_share, "monosemanticity": evidence.monosemanticity.values}
    values["lift"] = torch.tensor([names[c].lift if c in names else torch.nan for c in range(evidence.latents)])
    by: list[float] = values[rank].tolist()
    fired: list[int] = evidence.fired_photos.tolist()
    if latents is None:
        least = evidence.keep if rank == "monosemanticity" else 1
        chosen = [c for c in range(evidence.latents) if fired[c] >= least and not isnan(by[c])]
    else:
        chosen = list(dict.fromkeys(latents))
    chosen.sort(key=lambda c: (-by[c] if not isnan(by[c]) else torch.inf, c))
    shares = zip(
        evidence.patch_share.tolist(),
        evidence.photo_share.tolist(),
        evidence.mean.tolist(),
        evidence.peak.tolist(),
        evidence.monosemanticity.values.tolist(),
        evidence.monosemanticity.above.tolist(),
        strict=True,
    )
    facts = list(shares)
    return [Concept(c, names.get(c), *facts[c]) for c in chosen[:top]]


def draw_concepts(
    evidence: Evidence,
    shown: Sequence[Concept],
    picture: Pictures,
    *,
    photos: int = 8,
    side: int = 116,
    title: str = "",
) -> Image.Image:
    """Draw one row per concept: its number, name and figures, then its top photos with all dimmed that does not fire.

    Parameters
    ----------
    evidence : Evidence
    shown : sequence of Concept
    picture : callable
        Gives a photo by its number, as the tower saw it.
    photos : int
        Photos a row.
    side : int
        Of a photo, in pixels.
    title : str
    """
    if not shown:
        raise BadParameter("No latent fired on these photos, so there is nothing to draw. Give more photos.")
    photos = min(photos, evidence.keep)
    text, gap, head, margin = 236, 6, 78, 24
    row = side + 14
    width = margin + text + photos * (side + gap) + margin - gap
    sheet = Image.new("RGB", (width, head + len(shown) * row + margin), PAPER)
    pen = ImageDraw.Draw(sheet)
    fonts = {size: ImageFont.load_default(size) for size in (12, 13, 18, 22)}
    pen.text((margin, 18), _fit(title or "Concepts", fonts[22], width - 2 * margin), INK, fonts[22])
    pen.text((margin, 48), _fit(_about(evidence), fonts[13], width - 2 * margin), MUTED, fonts[13])
    seen: dict[int, Image.Image] = {}
    for number, concept in enumerate(shown):
        top = head + number * row
        pen.line([(margin, top), (width - margin, top)], LINE)
        _label(pen, concept, (margin, top + 7), side, text - 16, fonts)
        for place, (photo, _) in enumerate(evidence.photos_of(concept.latent)[:photos]):
            if photo not in seen:
                seen[photo] = shrunk(picture(photo), side)
            patches, values = evidence.map_of(concept.latent, place)
            grid = (int(evidence.grids[photo, 0]), int(evidence.grids[photo, 1]))
            tile = spotlight(seen[photo], grid, patches, values / concept.peak)
            across, down = ((side - size) // 2 for size in tile.size)
            sheet.paste(tile, (margin + text + place * (side + gap) + across, top + 7 + down))
    return sheet


def shrunk(picture: Image.Image, side: int) -> Image.Image:
    """A picture whose longer side is ``side`` pixels."""
    longest = max(picture.size)
    width, height = (max(1, round(size * side / longest)) for size in picture.size)
    return picture.convert("RGB").resize((width, height), Image.Resampling.LANCZOS)


def spotlight(picture: Image.Image, grid: tuple[int, int], patches: Tensor, strength: Tensor) -> Image.Image:
    """A picture in colour where patches fire, the more the stronger, and pale and grey elsewhere.

    ``strength`` is 0 to 1 for each of ``patches``.
    """
    rows, columns = grid
    light = np.zeros(rows * columns)
    light[patches.numpy()] = lit(strength).numpy()
    at = _spread(light.reshape(rows, columns), picture.size)[..., None]
    photo = np.asarray(picture.convert("RGB"), np.float64)
    pale = FADED * photo.mean(-1, keepdims=True) + (1 - FADED) * 255
    return Image.fromarray((pale + (photo - pale) * at).round().astype(np.uint8))


def lit(strength: Tensor) -> Tensor:
    """How much of its colour a patch gets that fires with 0 to 1 of the peak: a little at once, all from half on."""
    return (0.25 + 1.5 * strength.double()).clamp(0, 1)


def _spread(cells: NDArray[Any], size: tuple[int, int]) -> NDArray[Any]:
    """A grid of values, over as many pixels as a picture has."""
    width, height = size
    down = np.arange(height) * cells.shape[0] // height
    return cells[down][:, np.arange(width) * cells.shape[1] // width]


def _label(
    pen: ImageDraw.ImageDraw, concept: Concept, at: tuple[int, int], side: int, width: int, fonts: Mapping[int, Any]
) -> None:
    left, top = at
    pen.text((left, top + 2), f"#{concept.latent}", ACCENT, fonts[13])
    name = concept.name.name if concept.name else "unnamed"
    pen.text((left, top + 20), _fit(name, fonts[18], width), INK if concept.name else PALE, fonts[18])
    lines = [f"{concept.usage:.2%} of patches, {concept.photos:.0%} of photos"]
    scored = "" if isnan(concept.monosemanticity) else f"monosemanticity {concept.monosemanticity:.3f}"
    lines += [scored] if scored else []
    if concept.name:
        lines.append(f"lift {concept.name.lift:.1f}, in {concept.name.count} of its {concept.name.photos} photos")
    for number, line in enumerate(lines):
        pen.text((left, top + 48 + 18 * number), _fit(line, fonts[12], width), MUTED, fonts[12])


def _about(evidence: Evidence) -> str:
    scores = evidence.monosemanticity
    parts = [f"{evidence.photos:,} photos", f"{evidence.latents:,} latents, {scores.silent:,} of them silent"]
    if len(scores.judged):
        parts.append(f"monosemanticity {scores.mean:.3f} on average ({scores.chance:.3f} by chance)")
    return "  ·  ".join(parts)


def _fit(text: str, font: Any, width: int) -> str:
    """Cut a text that is wider than there is room."""
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(text + "…") > width:
        text = text[:-1]
    return text.rstrip() + "…"
