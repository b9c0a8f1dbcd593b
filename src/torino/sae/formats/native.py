"""torino's own layout: ``sae.safetensors``, ``card.json``, and ``names.json`` where concepts have names."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from torino.core.errors import BadFile, BadParameter
from torino.core.io import read_json, write_arrays, write_json
from torino.sae.formats._common import THRESHOLDED, Names, Parts, Stored, card_of, integers, whole
from torino.sae.model import SAE

FORMAT = "torino-sae/1"
FAMILY = "torino-sae/"
WEIGHTS, CARD = "sae.safetensors", "card.json"
NAMES, NAMES_FORMAT = "names.json", "torino-names/1"
SEAL = "weights_sha256"


def claims(stored: Stored) -> bool:
    """Tell whether a file is torino's: by its header, or by the card next to it if another tool dropped that."""
    if stored.header.get("format", "").startswith(FAMILY):
        return True
    if stored.path.name != WEIGHTS or "W_enc" not in stored.keys or not stored.has(CARD):
        return False
    return str(read_json(stored.path.parent / CARD).get("format")).startswith(FAMILY)


def read(stored: Stored, decoder: bool) -> Parts:
    """Read the tensors and what the card says of them."""
    path = stored.path.parent / CARD
    card = stored.json(CARD)
    if card is None:
        raise BadFile(
            f"{stored.path} has no {CARD} next to it, which says what kind of SAE it is. The writing was interrupted, "
            f"or the card left behind: save the SAE again, or copy its {CARD} here."
        )
    form = str(card.get("format"))
    if form != FORMAT:
        advice = "Update torino to read it." if form.startswith(FAMILY) else "Fetch the card anew."
        raise BadFile(f"{path} is of format {form!r}; this torino reads {FORMAT!r}. {advice}")
    if SEAL in card and SEAL in stored.header and card[SEAL] != stored.header[SEAL]:
        raise BadFile(
            f"{path} belongs to other weights than {stored.path}: the writing of one of them was interrupted. "
            "Save the SAE again."
        )
    parts = stored.parts(Names(), card.get("kind", ""), decoder)
    for name, size in (("latents", parts.W_enc.shape[0]), ("width", parts.W_enc.shape[1])):
        if card.get(name, size) != size:
            raise BadFile(f"{path} says {name} = {card[name]!r}, but the weights have {size}. Save the SAE again.")
    parts.k, parts.groups = whole(card.get("k")), integers(card.get("groups"))
    if parts.groups is None and card.get("groups") is not None:
        raise BadFile(f"{path} says groups = {card['groups']!r}. Accepted: a list of whole numbers.")
    parts.threshold = stored.threshold(parts.W_enc.shape[0])
    parts.center, parts.normalize = bool(card.get("center", True)), card.get("normalize", "none")
    parts.card = card_of(card)
    return parts


def write(sae: SAE, folder: Path, dtype: torch.dtype) -> Path:
    """Write the weights, then the card: a folder whose card fits its weights is complete."""
    tensors = _tensors(Parts.of(sae), dtype)
    seal = _digest(tensors)
    write_arrays(folder / WEIGHTS, tensors, {"format": FORMAT, SEAL: seal})
    write_json(folder / CARD, {"format": FORMAT, **sae.facts(), SEAL: seal})
    (folder / NAMES).unlink(missing_ok=True)  # of the weights that were here before
    if sae.names:
        write_names(folder, {latent: {"name": name} for latent, name in sae.names.items()}, sae.latents, seal=seal)
    return folder


def read_names(stored: Stored, latents: int) -> dict[int, str]:
    """Read the names of concepts next to the weights, of whatever layout; names that do not fit are left, and told."""
    path = stored.path.parent / NAMES
    try:
        held = stored.json(NAMES)
        if held is None or not str(held.get("format", "")).startswith("torino-names/"):
            return {}
        strange = held.get("latents", latents) != latents
        if strange or (SEAL in held and SEAL in stored.header and held[SEAL] != stored.header[SEAL]):
            raise BadFile(f"{path} names the concepts of other weights.")
        named = cast(dict[str, dict[str, Any]], held["names"])
        names = {int(latent): str(one["name"]) for latent, one in named.items()}
        if any(not 0 <= latent < latents for latent in names):
            raise BadFile(f"{path} names concepts that this SAE does not have.")
        return names
    except BadFile as error:
        reason = str(error)
    except (KeyError, TypeError, ValueError, AttributeError):
        reason = f"{path} does not hold a name for each concept in it."
    warnings.warn(f"{reason} The names are left out: make them again with torino concepts.", stacklevel=2)
    return {}


def write_names(
    folder: Path, names: Mapping[int, Mapping[str, Any]], latents: int, *, seal: str | None = None, **about: Any
) -> Path:
    """Write the names of concepts next to an SAE; ``seal`` ties them to weights in torino's layout."""
    tied = {} if seal is None else {SEAL: seal}
    listed = {str(latent): dict(names[latent]) for latent in sorted(names)}
    return write_json(
        folder / NAMES, {"format": NAMES_FORMAT, "latents": latents, **tied, "made_from": about, "names": listed}
    )


def seal_of(folder: Path) -> str | None:
    """The seal of the weights in a folder, if they are in torino's layout."""
    return Stored(folder / WEIGHTS).header.get(SEAL) if (folder / WEIGHTS).is_file() else None


def _tensors(parts: Parts, dtype: torch.dtype) -> dict[str, Tensor]:
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise BadParameter(f"dtype must be torch.float32, torch.float16 or torch.bfloat16, got {dtype}.")
    assert parts.W_dec is not None
    tensors = {"W_enc": parts.W_enc.to(dtype), "W_dec": parts.W_dec.to(dtype)}
    for name, value in tensors.items():
        if not bool(torch.isfinite(value).all()):
            raise BadParameter(f"{name} is too large for {dtype}. Save it in torch.bfloat16 or torch.float32.")
    tensors |= {"b_enc": parts.b_enc, "b_dec": parts.b_dec}
    if parts.kind in THRESHOLDED:
        tensors["threshold"] = torch.as_tensor(-1.0 if parts.threshold is None else parts.threshold)
    return tensors


def _digest(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(f"{name}{tuple(tensors[name].shape)}{tensors[name].dtype}".encode())
        digest.update(tensors[name].contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
