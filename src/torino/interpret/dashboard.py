"""The concept page: one self-contained HTML file to look through the concepts of an SAE. Needs Pillow."""

from __future__ import annotations

import base64
import html
import io
import json
from collections.abc import Mapping, Sequence
from math import isnan
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torino.core.errors import BadParameter
from torino.core.io import write_atomic
from torino.interpret.sheet import Concept, Pictures, shrunk
from torino.interpret.template import PAGE
from torino.interpret.top_activations import Evidence
from torino.sae.model import SAE

LEAD = (
    "Each card is a latent of a sparse autoencoder, with the photos that fire it most, in colour where it fires; point "
    "at a photo to see all of it. Words are those that the texts of these photos use more than those of all photos, "
    "with their lift. The bar under monosemanticity runs from what any two photos score to photos that are all alike."
)
LARGEST = 65_536  # patches of a photo that two bytes can number


def write_page(
    path: str | Path,
    sae: SAE,
    evidence: Evidence,
    shown: Sequence[Concept],
    picture: Pictures,
    *,
    photos: int = 8,
    side: int = 168,
    near: int = 5,
    title: str = "",
    sort: str = "usage",
    texts: Sequence[Sequence[str]] | None = None,
) -> Path:
    """Write the page, whole or not at all.

    Each photo is held once, whatever the number of concepts that it fires.

    Parameters
    ----------
    path : path
        Of an ``.html`` file.
    sae : SAE
        With its decoder, whose rows tell which latents are near each other.
    evidence : Evidence
    shown : sequence of Concept
    picture : callable
        Gives a photo by its number, as the tower saw it.
    photos : int
        Photos a concept.
    side : int
        Of a photo, in pixels.
    near : int
        Neighbours listed with each concept, by the cosine of decoder rows; none where the SAE has no decoder.
    title : str
    sort : {"usage", "monosemanticity", "lift"}
        The order it opens in.
    texts : sequence of sequences of str, optional
        Captions of the photos, shown when one is pointed at.
    """
    if Path(path).suffix.lower() not in (".html", ".htm"):
        raise BadParameter(f"The page must end in .html, got {Path(path).name!r}.")
    if not shown:
        raise BadParameter("No latent fired on these photos, so there is nothing to show. Give more photos.")
    neighbours = neighbours_of(sae, [concept.latent for concept in shown], near)
    names = {concept.latent: concept.title for concept in shown if concept.name} | sae.names
    listed = [_concept(evidence, one, photos, neighbours.get(one.latent, []), names) for one in shown]
    needed = sorted({tile["photo"] for one in listed for tile in one["tiles"]})
    data = {
        "concepts": listed,
        "photos": {photo: _photo(evidence, photo, picture, side, texts) for photo in needed},
        "sort": "ms" if sort == "monosemanticity" else sort,
    }
    filled = PAGE
    for mark, value in {
        "%TITLE%": html.escape(title or "Concepts"),
        "%LEAD%": html.escape(LEAD),
        "%FACTS%": _facts(sae, evidence, len(shown)),
        "%DATA%": json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c"),
    }.items():
        filled = filled.replace(mark, value)

    def write(target: Path) -> None:
        target.write_text(filled, encoding="utf-8")

    return write_atomic(path, write)


def neighbours_of(sae: SAE, latents: Sequence[int], near: int) -> dict[int, list[tuple[int, float]]]:
    """For each of some latents the ones whose decoder rows point most the same way, with the cosine."""
    if sae.W_dec is None or near < 1 or sae.latents < 2:
        return {}
    rows = torch.nn.functional.normalize(sae.W_dec.detach().cpu().double(), dim=1)
    found: dict[int, list[tuple[int, float]]] = {}
    for start in range(0, len(latents), 64):
        part = list(latents[start : start + 64])
        cosines = rows[part] @ rows.T
        cosines[torch.arange(len(part)), torch.tensor(part)] = -torch.inf
        value, index = cosines.sort(dim=1, descending=True, stable=True)
        for row, latent in enumerate(part):
            count = min(near, sae.latents - 1)
            found[latent] = list(zip(index[row, :count].tolist(), value[row, :count].tolist(), strict=True))
    return found


def _concept(
    evidence: Evidence, one: Concept, photos: int, near: Sequence[tuple[int, float]], names: Mapping[int, str]
) -> dict[str, Any]:
    tiles = [
        {"photo": photo, "map": _map(evidence, one, place)}
        for place, (photo, _) in enumerate(evidence.photos_of(one.latent)[:photos])
    ]
    return {
        "latent": one.latent,
        "name": one.name.name if one.name else "",
        "words": [[word, lift] for word, lift in one.name.words] if one.name else [],
        "lift": one.name.lift if one.name else 0.0,
        "usage": round(one.usage, 7),
        "share": round(one.photos, 5),
        "mean": round(one.mean, 4),
        "peak": round(one.peak, 4),
        "ms": None if isnan(one.monosemanticity) else round(one.monosemanticity, 4),
        "above": 0.0 if isnan(one.above) else round(one.above, 4),
        "tiles": tiles,
        "near": [[latent, round(cosine, 3), names.get(latent, "")] for latent, cosine in near],
    }


def _map(evidence: Evidence, one: Concept, place: int) -> str:
    """The patches that fire, three bytes each: the patch, low byte first, then its activation with the peak as 255."""
    patches, values = evidence.map_of(one.latent, place)
    if len(patches) and int(patches.max()) >= LARGEST:
        raise BadParameter(f"The page shows photos of up to {LARGEST:,} patches, and one has more.")
    strength = (values / max(one.peak, 1e-30) * 255).round().clamp(1, 255).numpy().astype(np.uint8)
    number = patches.numpy()
    packed = np.stack([number % 256, number // 256, strength], axis=1).astype(np.uint8)
    return base64.b64encode(packed.tobytes()).decode()


def _photo(
    evidence: Evidence, photo: int, picture: Pictures, side: int, texts: Sequence[Sequence[str]] | None
) -> dict[str, Any]:
    held = io.BytesIO()
    shrunk(picture(photo), side).save(held, "JPEG", quality=80, optimize=True)
    said = texts[photo] if texts is not None else ()
    return {
        "jpeg": base64.b64encode(held.getvalue()).decode(),
        "grid": evidence.grids[photo].tolist(),
        "text": said[0] if said else "",
    }


def _facts(sae: SAE, evidence: Evidence, shown: int) -> str:
    scores = evidence.monosemanticity
    facts = {"SAE": sae.card.name or f"{sae.kind}, {sae.width} wide"}
    facts["Latents"] = f"{evidence.latents:,} ({scores.silent:,} silent here, {shown:,} on this page)"
    facts["Photos"] = f"{evidence.photos:,}" + (f" ({len(evidence.skipped)} unreadable)" if evidence.skipped else "")
    facts["Tower"] = evidence.about.get("tower", "") or str(sae.card.encoder)
    if len(scores.judged):
        facts["Monosemanticity"] = f"{scores.mean:.3f} mean, {scores.median:.3f} median, {scores.chance:.3f} by chance"
        facts["Judge"] = evidence.about.get("judge", "")
    return "".join(
        f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd></div>"
        for name, value in facts.items()
        if value
    )
