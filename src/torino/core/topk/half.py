"""The encoder in bfloat16, whose product selects candidates faster on processors with bfloat16 instructions."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

MIN_TOKENS = 64  # with fewer tokens the float32 product is as fast
MAX_WEIGHTS = 1 << 24  # a larger encoder would need more than 32 MiB of extra memory; the int8 prefilter needs less
WORKSPACE = 1 << 18  # float64 elements in memory at once (2 MiB)


class HalfEncoder(NamedTuple):
    """A rounded encoder and what is needed to bound the error of its scores.

    Attributes
    ----------
    weight : Tensor of shape (C, D), bfloat16
    bias : Tensor of shape (C,), bfloat16
    norm : float
        Largest Euclidean norm of a row before rounding.
    error : float
        Largest Euclidean norm of the rounding error of a row.
    bias_error : float
        Largest rounding error of a bias.
    """

    weight: Tensor
    bias: Tensor
    norm: float
    error: float
    bias_error: float


@torch.no_grad()
def round_encoder(weight: Tensor, bias: Tensor, norm: float) -> HalfEncoder:
    """Round an encoder to bfloat16; ``norm`` is the largest Euclidean norm of a row."""
    rounded, rounded_bias = weight.bfloat16(), bias.bfloat16()
    rows = max(1, WORKSPACE // weight.shape[1])
    parts = zip(weight.split(rows), rounded.split(rows), strict=True)
    error = max(float((part.double() - other.double()).norm(dim=1).max()) for part, other in parts)
    return HalfEncoder(rounded, rounded_bias, norm, error, float((bias.double() - rounded_bias.double()).abs().max()))


def use_half(weight: Tensor, tokens: int) -> bool:
    """Return whether candidates are found faster by the bfloat16 product of this encoder."""
    cpu = cast(Any, torch.cpu)
    instructions = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return (
        tokens >= MIN_TOKENS
        and weight.numel() <= MAX_WEIGHTS
        and can_use_half(weight)
        and any(bool(getattr(cpu, name, bool)()) for name in instructions)
    )


def can_use_half(weight: Tensor) -> bool:
    """Return whether the bfloat16 product of this encoder is summed in float32, as the bound requires."""
    return weight.device.type == "cpu" and _sums_in_float32()


@lru_cache(1)
def _sums_in_float32() -> bool:
    ones = torch.ones(64, 4096, dtype=torch.bfloat16)
    return bool((torch.mm(ones, ones.T) == 4096).all())  # a sum of ones in bfloat16 ends at 256
