"""The torino layout: ``sae.safetensors``, ``card.json`` and, if concepts have names, ``names.json``."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NotRequired, TypedDict, cast

import torch
from torch import Tensor

from torino.core.errors import BadFile, BadParameter, TorinoError
from torino.core.io import hash_tensors, read_json, write_arrays, write_json
from torino.core.schema import check_schema
from torino.sae.formats._common import (
    DIGEST,
    THRESHOLDED,
    CheckpointFile,
    SAEParts,
    TensorNames,
    check_flag,
    check_integers,
    check_k,
    check_size,
    make_card,
)
from torino.sae.joint import MODALITIES, JointSAE, JointStatistics
from torino.sae.model import SAE

FORMAT = "torino-sae/1"
JOINT_FORMAT = "torino-sae/joint/1"  # with a center and a scale for each modality, which other readers would drop
FAMILY = "torino-sae/"
WEIGHTS, CARD = "sae.safetensors", "card.json"
NAMES, NAMES_FORMAT = "names.json", "torino-names/1"


class NameEntry(TypedDict):
    """The name of a latent; its other fields are statistics."""

    name: str
    kind: NotRequired[str]


class NamesFile(TypedDict):
    """Fields of ``names.json`` that are read again."""

    names: dict[str, NameEntry]


def matches(file: CheckpointFile) -> bool:
    """Return whether a file has the torino layout, by its header or, if another tool removed that, by its card."""
    if file.header.get("format", "").startswith(FAMILY):
        return True
    if file.path.name != WEIGHTS or "W_enc" not in file.keys or not file.has(CARD):
        return False
    return str(read_json(file.path.parent / CARD).get("format")).startswith(FAMILY)


def read(file: CheckpointFile, decoder: bool) -> SAEParts:
    """Read the tensors and the settings in the card."""
    path = file.path.parent / CARD
    card = file.json(CARD)
    if card is None:
        raise BadFile(
            f"There is no {CARD} next to {file.path}. It defines the kind of the SAE. "
            f"Save the SAE again, or copy its {CARD} into the same folder."
        )
    version = str(card.get("format"))
    if version not in (FORMAT, JOINT_FORMAT):
        advice = "Update torino to read it." if version.startswith(FAMILY) else "Download the card again."
        raise BadFile(f"{path} has the format {version!r}, but this version of torino reads {FORMAT!r}. {advice}")
    if DIGEST in card and DIGEST in file.header and card[DIGEST] != file.header[DIGEST]:
        raise BadFile(
            f"{path} belongs to other weights than {file.path}: saving one of them was interrupted. Save the SAE again."
        )
    decoder = decoder and card.get("decoder") is not False  # the card says so if the file has no decoder
    parts = file.parts(TensorNames(), card.get("kind", ""), decoder)
    latents, width = parts.W_enc.shape
    check_size(card.get("latents"), latents, "latents", path)
    check_size(card.get("width"), width, "width", path)
    parts.k = check_k(card.get("k"), latents, path)
    if card.get("groups") is not None:
        parts.groups = check_integers(card["groups"], "groups", path)
    parts.threshold = file.threshold(latents)
    parts.center, parts.normalize = check_flag(card, "center", True, path), card.get("normalize", "none")
    parts.card = make_card(card)
    if version == JOINT_FORMAT:
        parts.joint = _read_statistics(file, card, path)
    return parts


def _read_statistics(file: CheckpointFile, card: Mapping[str, Any], path: Path) -> JointStatistics:
    """Read center and scale of each modality; a joint SAE without them is refused."""
    joint = card.get("joint")
    if not isinstance(joint, dict) or not {f"{name}_center" for name in MODALITIES} <= file.keys:
        raise BadFile(f"{path} is of a joint SAE, but center or scale of a modality is missing. Save the SAE again.")
    try:
        values = dict(cast(dict[str, Any], joint))
        values |= {f"{name}_center": file.tensor(f"{name}_center") for name in MODALITIES}
        return JointStatistics(**values)
    except (TypeError, TorinoError) as error:
        raise BadFile(f"{path} has wrong statistics of its modalities ({error}). Save the SAE again.") from error


def write(sae: SAE, folder: Path, dtype: torch.dtype) -> Path:
    """Write the weights, then the card, so that a folder with a matching card is complete."""
    tensors = _tensors(SAEParts.of(sae), dtype)
    version = FORMAT
    if isinstance(sae, JointSAE):
        version = JOINT_FORMAT
        tensors |= {f"{name}_center": getattr(sae, f"{name}_center").cpu() for name in MODALITIES}
    digest = hash_tensors(tensors)
    write_arrays(folder / WEIGHTS, tensors, {"format": version, DIGEST: digest})
    write_json(folder / CARD, {"format": version, **sae.facts(), DIGEST: digest}, sealed=True)
    (folder / NAMES).unlink(missing_ok=True)  # names of the previous weights
    if sae.names:
        write_names(folder, {latent: {"name": name} for latent, name in sae.names.items()}, sae.latents, digest=digest)
    return folder


def read_names(file: CheckpointFile, latents: int) -> dict[int, str]:
    """Read ``names.json`` next to weights of any layout; warn and return no names if the file does not fit."""
    path = file.path.parent / NAMES
    try:
        content = file.json(NAMES)
        if content is None or not str(content.get("format", "")).startswith("torino-names/"):
            return {}
        other_size = content.get("latents", latents) != latents
        if other_size or (DIGEST in content and DIGEST in file.header and content[DIGEST] != file.header[DIGEST]):
            raise BadFile(f"{path} belongs to other weights.")
        check_schema(content, NamesFile)
        names = {int(latent): _shown_name(entry) for latent, entry in content["names"].items()}
        if any(not 0 <= latent < latents for latent in names):
            raise BadFile(f"{path} contains names of latents that this SAE does not have.")
        return names
    except BadFile as error:
        reason = str(error)
    except ValueError as error:
        reason = f"{path} cannot be used: {error}."
    warnings.warn(f"{reason} The names are ignored. Create them again with torino concepts.", stacklevel=2)
    return {}


def _shown_name(entry: Mapping[str, Any]) -> str:
    """Return the name of a concept; low-level concepts, such as colors and edges, are put in brackets."""
    name = str(entry["name"])
    return name if entry.get("kind", "thing") == "thing" else f"({name})"


def write_names(
    folder: Path, names: Mapping[int, Mapping[str, Any]], latents: int, *, digest: str | None = None, **made_from: Any
) -> Path:
    """Write ``names.json`` into the folder of an SAE; ``digest`` identifies weights in the torino layout."""
    content: dict[str, Any] = {"format": NAMES_FORMAT, "latents": latents}
    if digest is not None:
        content[DIGEST] = digest
    content["made_from"] = made_from
    content["names"] = {str(latent): dict(names[latent]) for latent in sorted(names)}
    return write_json(folder / NAMES, content, sealed=True)


def count_names(folder: Path, digest: str | None) -> int:
    """Return the number of names in ``names.json``; 0 if it is damaged or belongs to other weights than ``digest``."""
    try:
        content = read_json(folder / NAMES, NamesFile)
    except BadFile:
        return 0
    others = digest is not None and content.get(DIGEST, digest) != digest
    return 0 if others else len(content["names"])


def read_digest(folder: Path) -> str | None:
    """Return the digest of the weights in a folder; None unless they have the torino layout."""
    return CheckpointFile(folder / WEIGHTS).header.get(DIGEST) if (folder / WEIGHTS).is_file() else None


def _tensors(parts: SAEParts, dtype: torch.dtype) -> dict[str, Tensor]:
    if not isinstance(dtype, torch.dtype) or dtype not in (torch.float32, torch.float16, torch.bfloat16):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise BadParameter(f"dtype must be torch.float32, torch.float16 or torch.bfloat16, got {dtype!r:.60}.")
    assert parts.W_dec is not None
    tensors = {"W_enc": parts.W_enc.to(dtype), "W_dec": parts.W_dec.to(dtype)}
    for name, value in tensors.items():
        if not bool(torch.isfinite(value).all()):
            raise BadParameter(f"{name} is too large for {dtype}. Save it in torch.bfloat16 or torch.float32.")
    tensors |= {"b_enc": parts.b_enc, "b_dec": parts.b_dec}
    if parts.kind in THRESHOLDED:
        tensors["threshold"] = torch.as_tensor(-1.0 if parts.threshold is None else parts.threshold)
    return tensors
