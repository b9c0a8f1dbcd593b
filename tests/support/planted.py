"""Rows with a planted dictionary, and a program that trains on them: ``python planted.py FOLDER [STEPS]``."""

from __future__ import annotations

import sys
import time

import torch
from torch import Tensor
from torch.nn.functional import normalize

from torino.training.activations.base import InMemory
from torino.training.config import TrainConfig
from torino.training.distributed import World, join
from torino.training.trainer import Trained, train

WIDTH, CONCEPTS, ACTIVE = 32, 64, 3
FACTS = {"encoder": "tiny/tower", "block": 4, "token_kind": "patch", "data": "planted", "license": "CC0-1.0"}


def planted(rows: int = 8192, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Rows of a few concepts each, off centre and not of unit scale, with some noise; and the concepts."""
    random = torch.Generator().manual_seed(seed)
    concepts = normalize(torch.randn(CONCEPTS, WIDTH, generator=random), dim=1)
    chosen = torch.rand(rows, CONCEPTS, generator=random).topk(ACTIVE, dim=1).indices
    strength = 0.5 + torch.rand(rows, ACTIVE, generator=random)
    z = torch.zeros(rows, CONCEPTS).scatter(1, chosen, strength)
    noise = 0.05 * torch.randn(rows, WIDTH, generator=random)
    return 5 * (z @ concepts + noise) + torch.randn(WIDTH, generator=random), concepts


def recovered(concepts: Tensor, W_dec: Tensor) -> float:
    """Mean over the concepts of the largest cosine with a decoder row."""
    return float((concepts @ normalize(W_dec, dim=1).T).amax(1).mean())


def recipe(**changes: object) -> TrainConfig:
    given: dict[str, object] = {"latents": 128, "k": ACTIVE, "steps": 60, "batch": 256, "dead_after": 2000, "aux": 0.1}
    return TrainConfig(**{**given, **changes})  # type: ignore[arg-type]


def run(folder: str, world: World | None = None, pause: float = 0.0, **changes: object) -> Trained:
    """Train on the planted rows, with a report and a checkpoint every few steps."""
    activations = InMemory(planted(2048)[0], seed=5, facts=FACTS)
    watch = (lambda step, report: time.sleep(pause)) if pause else None
    return train(activations, recipe(**changes), folder, world=world, log_every=5, save_every=7, watch=watch)


if __name__ == "__main__":
    torch.set_num_threads(1)
    with_others = join(torch.device("cpu"))
    kinds = sys.argv[3].split(",") if len(sys.argv) > 3 else ["matryoshka"]
    for kind in kinds:
        place = sys.argv[1] if len(kinds) == 1 else f"{sys.argv[1]}/{kind}"
        run(place, with_others, pause=float(sys.argv[2]), kind=kind)
    with_others.leave()
