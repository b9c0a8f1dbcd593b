"""Read and write SAEs in the layouts of torino and of other libraries.

A layout is recognized by the names of its tensors, not by file names:

=====================  ==============================================================  ===================
layout                 tensors, with C latents and width D                             settings
=====================  ==============================================================  ===================
torino                 W_enc (C, D), b_enc, W_dec (C, D), b_dec[, threshold]           ``card.json``
dictionary_learning    encoder.weight (C, D), encoder.bias, decoder.weight (D, C),     ``config.json``, may
                       and b_dec, bias or decoder.bias; or W_enc (D, C), b_enc,        be missing
                       W_dec (C, D), b_dec, threshold, k, group_sizes
SAELens                W_enc (D, C), b_enc, W_dec (C, D), b_dec[, threshold]           ``cfg.json``
sparsify               encoder.weight (C, D), encoder.bias, W_dec (C, D), b_dec        ``cfg.json``
saev                   W_enc (D, C), b_enc, W_dec (C, D), b_dec[,                      first line of the
                       activation.threshold]                                           file
Prisma                 W_enc (D, C), b_enc, W_dec (C, D), b_dec[, b_dec_out]           ``config.json``
overcomplete           dictionary._weights (C, D) or dictionary.W and C, and           none
                       encoder.final_block.0 or encoder.weight (C, D)
Qwen-Scope             W_enc (C, D), b_enc, W_dec (D, C), b_dec                        name of the folder
=====================  ==============================================================  ===================
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from torino.core.checks import check_choice, check_type, to_path
from torino.core.errors import BadFile, BadParameter, unknown_name
from torino.sae.formats import dictionary_learning, native, overcomplete, prisma, qwen_scope, saelens, saev, sparsify
from torino.sae.formats._common import ACCEPTED, GATED, MAX_FLOAT, CheckpointFile, SAEParts
from torino.sae.formats.locate import locate
from torino.sae.joint import JointSAE
from torino.sae.model import SAE, Kind

__all__ = ["LAYOUTS", "READ_ONLY", "read_sae", "write_sae"]

LAYOUTS = ("torino", "dictionary_learning", "saelens")
"""Layouts that :func:`write_sae` can write."""
READ_ONLY = ("sparsify", "saev", "prisma", "overcomplete", "qwen-scope")
"""Layouts that can only be read."""


def read_sae(
    source: str | Path,
    *,
    kind: Kind | None = None,
    k: int | None = None,
    threshold: float | None = None,
    decoder: bool = True,
) -> SAE:
    """Read an SAE from a folder, a file or a hub repository; see :meth:`SAE.load`."""
    if kind is not None:
        check_choice("kind", kind, Kind)
    _check_threshold(threshold)
    file = CheckpointFile(locate(source))
    file.verify()
    sae = _select_reader(file)(file, decoder).build(file.path, kind, k, threshold)
    sae.names = native.read_names(file, sae.latents)
    sae.folder = file.path.parent
    return sae


def write_sae(sae: SAE, folder: str | Path, layout: str, dtype: torch.dtype = torch.float32) -> Path:
    """Write an SAE into ``folder`` in one of :data:`LAYOUTS`, and return the folder.

    Settings that a layout does not support are folded into the weights if this changes no latent, up to rounding;
    otherwise an error is raised. ``dtype`` is the type of the two matrices, for the torino layout only.
    """
    if not isinstance(layout, str) or layout not in LAYOUTS:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise unknown_name("SAE layout", layout, LAYOUTS, "torino list layouts")
    check_type("sae", sae, SAE, "an SAE")
    if sae.W_dec is None:
        raise BadParameter(
            "This SAE has no decoder, but a file needs encoder and decoder. "
            "Load it with decoder=True, or choose an SAE that has one."
        )
    folder = to_path(folder, "The folder")
    if layout == "torino":
        return native.write(sae, folder, dtype)
    if dtype != torch.float32:
        raise BadParameter(f"dtype must be torch.float32 for the {layout} layout, got {dtype}.")
    if isinstance(sae, JointSAE):
        raise BadParameter(
            f"This SAE normalizes images and text by statistics of their own, which the {layout} layout cannot hold. "
            "Export it for one modality: sae.modality('image').export(...)."
        )
    return (dictionary_learning.write if layout == "dictionary_learning" else saelens.write)(sae, folder)


def _check_threshold(value: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < MAX_FLOAT:
        raise BadParameter(f"threshold must be a finite number, got {value!r}.")


def _select_reader(file: CheckpointFile) -> Callable[[CheckpointFile, bool], SAEParts]:
    """Select the reader of a layout by the names of the tensors."""
    keys = file.keys
    if native.matches(file):
        return native.read
    if file.json_header is not None:
        return saev.read
    if overcomplete.matches(file):
        return overcomplete.read
    if keys & GATED:
        raise BadFile(f"{file.path} contains a gated SAE, which is not supported. Accepted: {ACCEPTED}.")
    if "encoder.weight" in keys:
        encoder_only = "decoder.weight" not in keys and file.has("cfg.json")  # sparsify may omit the decoder
        return sparsify.read if "W_dec" in keys or encoder_only else dictionary_learning.read
    if "W_enc" in keys:
        for layout in (prisma, qwen_scope, dictionary_learning):
            if layout.matches(file):
                return layout.read
        return saelens.read
    names = ", ".join(sorted(keys)[:12]) or "no tensors"
    raise BadFile(f"{file.path} has an unknown layout: it contains {names}. Accepted: {ACCEPTED}.")
