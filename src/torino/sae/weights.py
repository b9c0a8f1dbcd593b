"""Check the weights of an SAE."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torino.core.checks import check_tensor, to_integer
from torino.core.errors import BadFile, BadParameter
from torino.core.tokens import check_matrix


def freeze(value: Tensor) -> Tensor:
    """Return the weights as detached, contiguous float32."""
    return value.detach().float().contiguous()


def to_vector(name: str, value: Tensor | None, size: int, like: Tensor) -> Tensor:
    """Return a bias as float32, zeros if it is None; raise an error unless it is finite and has this size."""
    if value is None:
        return torch.zeros(size, device=like.device)
    if check_tensor(name, value, BadParameter).shape != (size,) or value.is_complex():
        raise BadParameter(f"{name} must have shape ({size},), got {tuple(value.shape)}.")
    if not bool(torch.isfinite(value).all()):
        raise BadFile(f"{name} contains NaN or infinite values: the checkpoint is damaged.")
    return freeze(value)


def validate_k(k: Any, latents: int) -> int | None:
    """Return ``k``; raise :class:`BadParameter` unless it is None or an integer from 1 to the number of latents."""
    return None if k is None else to_integer("k", k, 1, latents, ", the number of latents")


def check_weights(name: str, value: Tensor) -> None:
    """Raise an error unless the weights are a finite matrix."""
    check_matrix(
        value,
        name,
        shape="(latents, width)",
        wrong_shape="Give one row per latent.",
        not_finite="The checkpoint is damaged: download or train the SAE again.",
    )
