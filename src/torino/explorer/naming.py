"""Rename concepts in ``names.json`` beside the SAE, where all commands read names."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from torino.core.errors import BadFile, BadParameter
from torino.core.io import read_json, write_json
from torino.core.text import printable
from torino.sae import SAE
from torino.sae.formats._common import DIGEST
from torino.sae.formats.native import NAMES, NAMES_FORMAT, NamesFile, read_digest

LONGEST = 80
LOCK_SECONDS = 10


def check_renaming(sae: SAE | None) -> str:
    """Return why concepts cannot be renamed; empty if they can."""
    if sae is None:
        return "There is no SAE, so concepts have no names."
    if sae.folder is None:
        return "The SAE was not loaded from a folder, so there is no place for names."
    if not os.access(sae.folder, os.W_OK):
        return f"{sae.folder.name} is read-only. Copy the SAE to a folder of your own and start with --sae FOLDER."
    return ""


def rename_concept(sae: SAE, latent: int, name: str) -> str:
    """Give a concept another name and save it; an empty name restores the one that was found automatically.

    Other entries of the file, and what it says about this concept, stay as they are. The name that was there before is
    kept in the field ``automatic``.

    Returns
    -------
    str
        The name that is shown now; empty if the concept has none.
    """
    reason = check_renaming(sae)
    if reason:
        raise BadParameter(reason)
    if not 0 <= latent < sae.latents:
        raise BadParameter(f"The SAE has {sae.latents} concepts, numbered from 0, got {latent}.")
    name = " ".join(printable(name).split())
    if len(name) > LONGEST:
        raise BadParameter(f"A name has at most {LONGEST} characters, got {len(name)}.")
    folder = sae.folder
    assert folder is not None
    try:
        with FileLock(folder / f".{NAMES}.lock", timeout=LOCK_SECONDS):
            shown = _write(sae, folder, latent, name)
    except Timeout as error:
        raise BadFile(f"Another process is writing {NAMES}. Try again.") from error
    names = dict(sae.names)
    names.pop(latent, None)
    sae.names = names | ({latent: shown} if shown else {})
    return shown


def _write(sae: SAE, folder: Path, latent: int, name: str) -> str:
    digest = read_digest(folder)
    content = _read(folder, digest, sae)
    entries: dict[str, dict[str, Any]] = content["names"]
    entry = entries.get(str(latent), {})
    automatic = entry.get("automatic", {field: entry[field] for field in ("name", "kind") if field in entry})
    if name:
        entry = {**entry, "name": name, "kind": "thing", "automatic": automatic}
    else:
        entry = {**{field: value for field, value in entry.items() if field not in ("kind", "automatic")}, **automatic}
    if name or automatic:
        entries[str(latent)] = entry
    else:
        entries.pop(str(latent), None)
    content["names"] = {key: entries[key] for key in sorted(entries, key=int)}
    content.pop("checksum", None)
    write_json(folder / NAMES, content, sealed=True)
    if not name and not automatic:
        return ""
    return str(entry["name"]) if entry.get("kind", "thing") == "thing" else f"({entry['name']})"


def _read(folder: Path, digest: str | None, sae: SAE) -> dict[str, Any]:
    """Return the content of the file, or an empty one if there is none or it belongs to other weights."""
    empty: dict[str, Any] = {"format": NAMES_FORMAT, "latents": sae.latents}
    empty |= {} if digest is None else {DIGEST: digest}
    empty |= {"made_from": {}, "names": {}}
    if not (folder / NAMES).is_file():
        return empty
    content = read_json(folder / NAMES, NamesFile, fix="Restore a copy of it, or delete it.")
    return empty if digest is not None and content.get(DIGEST, digest) != digest else content
