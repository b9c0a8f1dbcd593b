"""Checkpoints of SAEs in every layout, and reference computations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from torino.sae import SAE, SAECard

D, C, K = 8, 24, 3
GROUPS = (4, 8, 12)
THRESHOLD = 0.4


def random_tensor(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


X = random_tensor(40, D, seed=99) * 2 + 0.5


def linear_weights(**extra: Tensor) -> dict[str, Tensor]:
    """Weights as stored by nn.Linear: encoder.weight (C, D) and decoder.weight (D, C)."""
    decoder = torch.nn.functional.normalize(random_tensor(D, C, seed=2), dim=0)
    return {
        "encoder.weight": random_tensor(C, D, seed=1),
        "encoder.bias": random_tensor(C, seed=3),
        "decoder.weight": decoder,
        **extra,
    }


def parameter_weights(**extra: Tensor) -> dict[str, Tensor]:
    """Weights as stored by plain parameters: W_enc (D, C) and W_dec (C, D)."""
    return {
        "W_enc": random_tensor(D, C, seed=1),
        "b_enc": random_tensor(C, seed=3),
        "W_dec": random_tensor(C, D, seed=2),
        "b_dec": random_tensor(D, seed=4),
        **extra,
    }


def k_and_threshold(threshold: float = THRESHOLD) -> dict[str, Tensor]:
    return {"k": torch.tensor(K, dtype=torch.int), "threshold": torch.tensor(threshold)}


def write_files(folder: Path, name: str, tensors: dict[str, Tensor], **jsons: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    if name.endswith(".safetensors"):
        save_file({key: value.contiguous() for key, value in tensors.items()}, folder / name)
    else:
        torch.save(tensors, folder / name)
    for file, value in jsons.items():
        (folder / f"{file}.json").write_text(json.dumps(value))
    return folder


def top_k(z: Tensor, k: int = K) -> Tensor:
    values, index = z.topk(k, dim=-1)
    return torch.zeros_like(z).scatter(-1, index, values)


def gate(z: Tensor, threshold: Tensor | float) -> Tensor:
    return z * (z > threshold)


def check_sae(sae: SAE, z: Tensor, x_hat: Tensor) -> None:
    """Compare latents and reconstruction with those of the library; some latents must be active."""
    assert 0 < int((z > 0).sum()) < z.numel()
    torch.testing.assert_close(sae.encode(X), z, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(sae.reconstruct(X), x_hat, rtol=1e-4, atol=1e-4)


def make_full_sae(kind: str, **changes: Any) -> SAE:
    """Create an SAE with normalized decoder rows and a complete card."""
    options: dict[str, Any] = {"kind": kind, "k": K, "groups": GROUPS if kind == "matryoshka" else None}
    if kind in ("batchtopk", "matryoshka"):
        options["threshold"] = THRESHOLD
    if kind == "jumprelu":
        options |= {"threshold": random_tensor(C, seed=7).abs(), "k": None}
    if kind == "relu":
        options["k"] = None
    card = SAECard("a name", "openai/clip-vit-large-patch14-336", 22, "patch", "ImageNet", "mit", "a note")
    W_dec = torch.nn.functional.normalize(random_tensor(C, D, seed=2), dim=1)
    return SAE(
        random_tensor(C, D, seed=1),
        random_tensor(C, seed=3),
        W_dec,
        random_tensor(D, seed=4),
        card=card,
        **(options | changes),
    )


KINDS = ("relu", "topk", "batchtopk", "matryoshka", "jumprelu")


def sparse_coder(folder: Path, extra: dict[str, Tensor] | None = None, **config: Any) -> SAE:
    s = {
        "encoder.weight": random_tensor(C, D, seed=1),
        "encoder.bias": random_tensor(C, seed=3),
        "W_dec": random_tensor(C, D, seed=2),
    }
    s |= {"b_dec": random_tensor(D, seed=4), **(extra or {})}
    cfg = {"activation": "topk", "expansion_factor": 3, "k": K, "num_latents": 0, "d_in": D, **config}
    return SAE.load(write_files(folder, "sae.safetensors", s, cfg=cfg))
