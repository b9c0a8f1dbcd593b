"""Reading and writing SAEs in the layouts of torino, dictionary_learning, SAELens and sparsify.

A layout is recognised by the names of its tensors, not by file names:

=====================  ==============================================================  ===================
layout                 tensors, with C latents and width D                             settings
=====================  ==============================================================  ===================
torino                 W_enc (C, D), b_enc, W_dec (C, D), b_dec[, threshold]           ``card.json``
dictionary_learning    encoder.weight (C, D), encoder.bias, decoder.weight (D, C),     ``config.json``, may
                       and b_dec, bias or decoder.bias; or W_enc (D, C), b_enc,        be missing
                       W_dec (C, D), b_dec, threshold, k, group_sizes
SAELens                W_enc (D, C), b_enc, W_dec (C, D), b_dec[, threshold]           ``cfg.json``
sparsify               encoder.weight (C, D), encoder.bias, W_dec (C, D), b_dec        ``cfg.json``
=====================  ==============================================================  ===================
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import get_args

import torch

from torino.core.errors import BadFile, BadParameter, unknown_name
from torino.sae.formats import dictionary_learning, saelens, sparsify
from torino.sae.formats import native as own
from torino.sae.formats._common import ACCEPTED, GATED, Parts, Stored
from torino.sae.formats.locate import locate
from torino.sae.model import SAE, Kind

__all__ = ["LAYOUTS", "read_sae", "write_sae"]

LAYOUTS = ("torino", "dictionary_learning", "saelens")
"""The layouts that :func:`write_sae` writes; sparsify is read only."""


def read_sae(source: str | Path, *, kind: Kind | None = None, decoder: bool = True) -> SAE:
    """Read an SAE from a folder, a file or a hub repository; see :meth:`SAE.load`."""
    if kind is not None and kind not in get_args(Kind):
        raise BadParameter(f"kind must be one of {', '.join(map(repr, get_args(Kind)))}, got {kind!r}.")
    stored = Stored(locate(source))
    sae = _reader(stored)(stored, decoder).build(stored.path, kind)
    sae.names = own.read_names(stored, sae.latents)
    sae.home = stored.path.parent
    return sae


def write_sae(sae: SAE, folder: str | Path, layout: str, dtype: torch.dtype = torch.float32) -> Path:
    """Write an SAE into ``folder`` in one of :data:`LAYOUTS`, and return the folder.

    What a layout cannot express is folded into the weights where that leaves all latents as they were, up to
    rounding, and refused otherwise. ``dtype`` is that of the two matrices, for torino's own layout only.
    """
    if layout not in LAYOUTS:
        raise unknown_name("SAE layout", layout, LAYOUTS)
    if sae.W_dec is None:
        raise BadParameter(
            "This SAE has no decoder in memory, and a written one holds both halves. "
            "Load it with decoder=True, then write it."
        )
    folder = Path(folder)
    if layout == "torino":
        return own.write(sae, folder, dtype)
    if dtype != torch.float32:
        raise BadParameter(f"The {layout} layout is written in torch.float32, got {dtype}. Leave dtype out.")
    return (dictionary_learning.write if layout == "dictionary_learning" else saelens.write)(sae, folder)


def _reader(stored: Stored) -> Callable[[Stored, bool], Parts]:
    """Choose the reader of a layout by its keys."""
    keys = stored.keys
    if own.claims(stored):
        return own.read
    if keys & GATED:
        raise BadFile(f"{stored.path} holds a gated SAE, which torino does not read. Accepted: {ACCEPTED}.")
    if "encoder.weight" in keys:
        bare = "decoder.weight" not in keys and stored.has("cfg.json")  # a sparsify file may leave its decoder out
        return sparsify.read if "W_dec" in keys or bare else dictionary_learning.read
    if "W_enc" in keys:
        return dictionary_learning.read if dictionary_learning.claims(stored) else saelens.read
    found = ", ".join(sorted(keys)[:12]) or "no tensors"
    raise BadFile(f"{stored.path} is in no layout that torino knows: it holds {found}. Accepted: {ACCEPTED}.")
