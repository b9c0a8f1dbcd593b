"""Content hash of an SAE."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from torino.sae.model import SAE


def hash_sae(sae: SAE) -> str:
    """Return a hash of everything that determines the activations of an SAE."""
    tensors = [sae.W_enc, sae.b_enc, sae.b_dec] + ([] if sae.threshold is None else [sae.threshold])
    settings = f"{sae.kind} {sae.k} {sae.center} {sae.normalize} "
    return hashlib.sha256((settings + hash_content(tensors)).encode()).hexdigest()[:32]


def hash_content(tensors: Sequence[Tensor]) -> str:
    """Return a hash of shapes, types and values."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tuple(tensor.shape)}{tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:32]
