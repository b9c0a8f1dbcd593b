"""Write the concept dashboard: one self-contained HTML file for browsing the concepts of an SAE.

Needs Pillow. Template, style and script are in ``assets``.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from math import isnan
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torino.core.errors import BadParameter
from torino.core.io import write_atomic
from torino.interpret.sheet import ConceptSummary, PhotoLoader, Rank, resize_longest_side
from torino.interpret.top_activations import TopActivations
from torino.sae.model import SAE

MAX_PATCHES = 65_536  # patch numbers are stored in two bytes


def write_dashboard(
    path: str | Path,
    sae: SAE,
    activations: TopActivations,
    concepts: Sequence[ConceptSummary],
    load_photo: PhotoLoader,
    *,
    photos: int = 8,
    side: int = 168,
    neighbors: int = 5,
    title: str = "",
    sort: Rank = "usage",
    texts: Sequence[Sequence[str]] | None = None,
) -> Path:
    """Write the dashboard atomically.

    Each photo is stored once, even if it is a top photo of several concepts.

    Parameters
    ----------
    path : path
        Of an ``.html`` file.
    sae : SAE
        With its decoder, which defines the similarity of latents.
    activations : TopActivations
    concepts : sequence of ConceptSummary
        See :func:`torino.interpret.sheet.select_concepts`.
    load_photo : callable
        Returns a photo by its number, as the tower sees it.
    photos : int
        Photos per concept.
    side : int
        Longer side of a photo in pixels.
    neighbors : int
        Similar latents listed for each concept, by the cosine of decoder rows; none if the SAE has no decoder.
    title : str
    sort : {"usage", "monosemanticity", "lift"}
        Initial order.
    texts : sequence of sequences of str, optional
        Captions of the photos, shown as tooltips.
    """
    if Path(path).suffix.lower() not in (".html", ".htm"):
        raise BadParameter(f"The dashboard must end in .html, got {Path(path).name!r}.")
    if not concepts:
        raise BadParameter("No latent is active on these photos, so there is nothing to show. Give more photos.")
    similar = nearest_latents(sae, [concept.latent for concept in concepts], neighbors)
    names = {concept.latent: concept.title for concept in concepts if concept.name} | sae.names
    entries = [
        _concept_entry(activations, concept, photos, similar.get(concept.latent, []), names) for concept in concepts
    ]
    needed = sorted({tile["photo"] for entry in entries for tile in entry["tiles"]})
    page = _template().render(
        title=title or "Concepts",
        facts=_facts(sae, activations, len(concepts)),
        css=_read_asset("dashboard.css"),
        script=_read_asset("dashboard.js"),
        data={
            "concepts": entries,
            "photos": {photo: _photo_entry(activations, photo, load_photo, side, texts) for photo in needed},
            "sort": sort,
        },
    )

    def write(target: Path) -> None:
        target.write_text(page, encoding="utf-8")

    return write_atomic(path, write)


def nearest_latents(sae: SAE, latents: Sequence[int], count: int) -> dict[int, list[tuple[int, float]]]:
    """Return, for each given latent, the latents with the most similar decoder rows and their cosines."""
    if sae.W_dec is None or count < 1 or sae.latents < 2:
        return {}
    count = min(count, sae.latents - 1)
    rows = torch.nn.functional.normalize(sae.W_dec.detach().cpu().double(), dim=1)
    nearest: dict[int, list[tuple[int, float]]] = {}
    for start in range(0, len(latents), 64):
        chunk = list(latents[start : start + 64])
        cosines = rows[chunk] @ rows.T
        cosines[torch.arange(len(chunk)), torch.tensor(chunk)] = -torch.inf
        value, index = cosines.sort(dim=1, descending=True, stable=True)
        for row, latent in enumerate(chunk):
            nearest[latent] = list(zip(index[row, :count].tolist(), value[row, :count].tolist(), strict=True))
    return nearest


@cache
def _template() -> Any:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("torino.interpret", "assets"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # tojson escapes <, > and &, so that no caption can end the script element
    environment.policies["json.dumps_kwargs"] = {
        "allow_nan": False,
        "ensure_ascii": False,
        "separators": (",", ":"),
    }
    return environment.get_template("dashboard.html.j2")


def _read_asset(name: str) -> Any:
    """Return a style or script as markup, which the template does not escape."""
    from markupsafe import Markup

    return Markup((files("torino.interpret") / "assets" / name).read_text(encoding="utf-8"))


def _concept_entry(
    activations: TopActivations,
    concept: ConceptSummary,
    photos: int,
    neighbors: Sequence[tuple[int, float]],
    names: Mapping[int, str],
) -> dict[str, Any]:
    name = concept.name
    return {
        "latent": concept.latent,
        "name": name.name if name else "",
        "words": [[word, lift] for word, lift in name.words] if name else [],
        "lift": name.lift if name else 0.0,
        "usage": round(concept.patch_share, 7),
        "photo_share": round(concept.photo_share, 5),
        "mean": round(concept.mean_activation, 4),
        "max": round(concept.max_activation, 4),
        "monosemanticity": None if isnan(concept.monosemanticity) else round(concept.monosemanticity, 4),
        "chance_adjusted": 0.0 if isnan(concept.chance_adjusted) else round(concept.chance_adjusted, 4),
        "tiles": [
            {"photo": photo, "map": _encode_map(activations, concept, rank)}
            for rank, (photo, _) in enumerate(activations.get_photos(concept.latent)[:photos])
        ],
        "neighbors": [[latent, round(cosine, 3), names.get(latent, "")] for latent, cosine in neighbors],
    }


def _encode_map(activations: TopActivations, concept: ConceptSummary, rank: int) -> str:
    """Encode an activation map in base64, three bytes per active patch.

    The first two bytes are the patch number, low byte first. The third byte is the activation, where 255 is the largest
    activation of the latent.
    """
    patches, values = activations.get_map(concept.latent, rank)
    if len(patches) and int(patches.max()) >= MAX_PATCHES:
        raise BadParameter(f"The dashboard supports photos of up to {MAX_PATCHES:,} patches, and one has more.")
    strength = (values / max(concept.max_activation, 1e-30) * 255).round().clamp(1, 255).numpy().astype(np.uint8)
    number = patches.numpy()
    packed = np.stack([number % 256, number // 256, strength], axis=1).astype(np.uint8)
    return base64.b64encode(packed.tobytes()).decode()


def _photo_entry(
    activations: TopActivations,
    photo: int,
    load_photo: PhotoLoader,
    side: int,
    texts: Sequence[Sequence[str]] | None,
) -> dict[str, Any]:
    buffer = io.BytesIO()
    resize_longest_side(load_photo(photo), side).save(buffer, "JPEG", quality=80, optimize=True)
    captions = texts[photo] if texts is not None else ()
    return {
        "jpeg": base64.b64encode(buffer.getvalue()).decode(),
        "grid": activations.grids[photo].tolist(),
        "text": captions[0] if captions else "",
    }


def _facts(sae: SAE, activations: TopActivations, shown: int) -> dict[str, str]:
    scores, skipped = activations.monosemanticity, len(activations.skipped)
    facts = {
        "SAE": sae.card.name or f"{sae.kind}, width {sae.width}",
        "Latents": f"{activations.latents:,} ({scores.dead:,} never active, {shown:,} on this page)",
        "Photos": f"{activations.photo_count:,}" + (f" ({skipped} could not be read)" if skipped else ""),
        "Tower": activations.metadata.get("tower", "") or str(sae.card.encoder),
    }
    if len(scores.defined):
        facts["Monosemanticity"] = f"mean {scores.mean:.3f}, median {scores.median:.3f}, chance {scores.chance:.3f}"
        facts["Similarity"] = activations.metadata.get("embedding", "")
    return {name: value for name, value in facts.items() if value}
