"""Small SAEs of every kind with integer weights, for which float32 is exact."""

from __future__ import annotations

from typing import Any

from topk_cases import random_integers
from torch import Tensor

from torino import SAE

KINDS = ("relu", "topk", "batchtopk", "matryoshka", "jumprelu")
C, D = 24, 4


def sae_tensors(seed: int = 0) -> dict[str, Tensor]:
    return {
        "W_enc": random_integers(-2, 2, C, D, seed=seed),
        "b_enc": random_integers(-2, 2, C, seed=seed + 1),
        "W_dec": random_integers(-2, 2, C, D, seed=seed + 2),
        "b_dec": random_integers(-1, 1, D, seed=seed + 3),
    }


def sae_options(kind: str) -> dict[str, Any]:
    return {
        "relu": {},
        "topk": {"k": 5},
        "batchtopk": {"threshold": 2.0},
        "matryoshka": {"threshold": 3.0, "groups": (4, 8, 12)},
        "jumprelu": {"threshold": random_integers(-1, 4, C, seed=9)},
    }[kind]


def make_sae(kind: str, seed: int = 0, **changes: Any) -> SAE:
    arguments = {**sae_tensors(seed), **sae_options(kind), **changes}
    tensors = [arguments.pop(name) for name in ("W_enc", "b_enc", "W_dec", "b_dec")]
    return SAE(*tensors, kind=kind, **arguments)  # type: ignore[arg-type]
