"""The layout of overcomplete (read only): the state dict of an SAE, ``torch.save(sae.state_dict(), ...)``.

The library has no save function of its own. A state dict does not contain the class of the SAE, nor ``top_k`` and
``running_threshold``; only JumpReLU is recognized, by its ``thresholds``. There is no decoder bias and no centering.

==================================  ===============================================================
tensors                             meaning
==================================  ===============================================================
encoder.final_block.0               Linear, the first of the encoders ``linear`` and ``mlp_bn_1``
encoder.final_block.1               BatchNorm of ``mlp_bn_1``, folded into the weights
encoder.weight[, encoder.bias]      encoder of ``untied()``
encoder.tied_to.*                   encoder of ``tied()``: the dictionary
dictionary._weights, multiplier     dictionary; the library normalizes its rows
dictionary.W, C, Relax, multiplier  relaxed archetypal dictionary
==================================  ===============================================================
"""

from __future__ import annotations

import re

import torch
from torch import Tensor

from torino.core.errors import BadFile
from torino.sae.formats._common import ACCEPTED, CheckpointFile, SAEParts, shorten

LINEAR = "encoder.final_block.0."
NORM = "encoder.final_block.1."
EPSILON = 1e-5  # of torch.nn.BatchNorm1d
ADVICE = (
    "State dicts of overcomplete contain neither the kind nor k: give SAE.load(..., kind='relu'), kind='topk' with k=, "
    "or kind='batchtopk' with threshold= (its running_threshold). 'torino export FILE FOLDER --kind topk --k 32' "
    "converts it."
)

_ENCODER = re.compile(r"encoder\.(final_block\.[01]\.\w+|weight|bias|tied_to\..+)")


def matches(file: CheckpointFile) -> bool:
    """Return whether a file has a dictionary of overcomplete."""
    return "dictionary._weights" in file.keys or {"dictionary.W", "dictionary.C"} <= file.keys


def read(file: CheckpointFile, decoder: bool) -> SAEParts:
    """Read an SAE whose encoder is linear."""
    _check_supported(file)
    tied = any(name.startswith("encoder.tied_to.") for name in file.keys)
    dictionary = _dictionary(file) if decoder or tied else None
    if tied and dictionary is not None:
        W_enc, b_enc = dictionary, _bias(file, "encoder.bias", dictionary)
    elif "encoder.weight" in file.keys:
        W_enc = _matrix(file, "encoder.weight")
        b_enc = _bias(file, "encoder.bias", W_enc)
    else:
        W_enc = _matrix(file, f"{LINEAR}weight")
        b_enc = _bias(file, f"{LINEAR}bias", W_enc)
        W_enc, b_enc = _fold_batch_norm(file, W_enc, b_enc)
    if dictionary is not None and dictionary.shape != W_enc.shape:
        raise BadFile(
            f"The dictionary in {file.path} has shape {tuple(dictionary.shape)}, but the encoder has shape "
            f"{tuple(W_enc.shape)}. The file is damaged: download it again."
        )
    parts = SAEParts(W_enc, b_enc, dictionary if decoder else None, W_enc.new_zeros(W_enc.shape[1]), None)
    parts.center, parts.advice, parts.inclusive = False, ADVICE, True
    if "thresholds" in file.keys:
        parts.kind = "jumprelu"
        parts.threshold = file.tensor_of_shape("thresholds", (len(W_enc),), "encoder").exp()
    return parts


def _check_supported(file: CheckpointFile) -> None:
    """Raise :class:`BadFile` for encoders that are not one linear map and a threshold or top-k."""
    reason = None
    unknown = sorted(name for name in file.keys if name.startswith("encoder.") and not _ENCODER.fullmatch(name))
    if "Q" in file.keys:
        reason = "quantized latents (QSAE)"
    elif not any(name.startswith("encoder.") for name in file.keys):
        reason = "matching pursuit (MpSAE or OMPSAE), which encodes in several steps"
    elif unknown:
        reason = f"an encoder that is not one linear layer ({shorten(unknown[0])})"
    elif f"{NORM}weight" in file.keys and f"{NORM}running_mean" not in file.keys:
        reason = "LayerNorm over the latents, which is not linear"
    if reason is not None:
        raise BadFile(
            f"{file.path} is an SAE of overcomplete with {reason}. Accepted: {ACCEPTED}, with one linear layer."
        )


def _fold_batch_norm(file: CheckpointFile, W_enc: Tensor, b_enc: Tensor) -> tuple[Tensor, Tensor]:
    if f"{NORM}running_mean" not in file.keys:
        return W_enc, b_enc
    names = ("weight", "bias", "running_mean", "running_var")
    gain, shift, mean, variance = (file.tensor_of_shape(f"{NORM}{name}", (len(W_enc),), "encoder") for name in names)
    if bool((variance < 0).any()):
        raise file.error(f"{NORM}running_var", "contains negative values.")
    factor = gain / (variance + EPSILON).sqrt()
    return W_enc * factor[:, None], (b_enc - mean) * factor + shift


def _dictionary(file: CheckpointFile) -> Tensor:
    """Return the dictionary as it is in evaluation mode."""
    multiplier = file.number("dictionary.multiplier") or 0.0
    if "dictionary._weights" in file.keys:
        rows = _matrix(file, "dictionary._weights")
        norms = rows.norm(dim=1, keepdim=True)
        if torch.allclose(norms, torch.ones_like(norms), atol=0.05):  # normalized, except by the last training step
            rows = rows / (norms + 1e-8)
    else:
        weights, points = _matrix(file, "dictionary.W").relu(), _matrix(file, "dictionary.C")
        if weights.shape[1] != len(points):
            raise file.error("dictionary.W", f"has shape {tuple(weights.shape)}, but there are {len(points)} points.")
        rows = (weights @ points) / (weights.sum(dim=1, keepdim=True) + 1e-8)
        rows = rows + file.tensor_of_shape("dictionary.Relax", tuple(rows.shape), "dictionary.C")
    return rows * torch.tensor(multiplier).exp()


def _matrix(file: CheckpointFile, name: str) -> Tensor:
    value = file.tensor(name)
    if value.ndim != 2 or 0 in value.shape:
        raise file.error(name, f"has shape {tuple(value.shape)}, not that of a matrix.")
    return value


def _bias(file: CheckpointFile, name: str, matrix: Tensor) -> Tensor:
    if name not in file.keys:
        return matrix.new_zeros(len(matrix))
    return file.tensor_of_shape(name, (len(matrix),), "encoder")
