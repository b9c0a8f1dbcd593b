"""Rows with a planted dictionary, and a program that trains on them.

``python planted_dictionary.py FOLDER [PAUSE] [KIND,KIND]`` trains one SAE per kind, with a pause after every step.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from torino.training.activations.base import InMemory
from torino.training.config import TrainConfig
from torino.training.distributed import Distributed, init_distributed
from torino.training.trainer import TrainResult, train

WIDTH, CONCEPTS, ACTIVE = 32, 64, 3
METADATA = {"encoder": "tiny/tower", "block": 4, "token_kind": "patch", "data": "planted", "license": "CC0-1.0"}


def make_rows(count: int = 8192, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return rows that are sums of a few concepts, not centered and not of unit scale, with noise; and the concepts."""
    generator = torch.Generator().manual_seed(seed)
    concepts = normalize(torch.randn(CONCEPTS, WIDTH, generator=generator), dim=1)
    chosen = torch.rand(count, CONCEPTS, generator=generator).topk(ACTIVE, dim=1).indices
    strength = 0.5 + torch.rand(count, ACTIVE, generator=generator)
    z = torch.zeros(count, CONCEPTS).scatter(1, chosen, strength)
    noise = 0.05 * torch.randn(count, WIDTH, generator=generator)
    return 5 * (z @ concepts + noise) + torch.randn(WIDTH, generator=generator), concepts


def recovery(concepts: Tensor, W_dec: Tensor) -> float:
    """Return the mean over the concepts of the largest cosine similarity with a decoder row."""
    return float((concepts @ normalize(W_dec, dim=1).T).amax(1).mean())


def make_config(**changes: object) -> TrainConfig:
    """Return a small configuration."""
    defaults: dict[str, object] = {"latents": 128, "k": ACTIVE, "steps": 60, "batch": 256}
    defaults |= {"dead_after": 2000, "aux": 0.1}
    return TrainConfig(**{**defaults, **changes})  # type: ignore[arg-type]


def make_activations() -> InMemory:
    """Return the rows that :func:`run_training` trains on."""
    return InMemory(make_rows(2048)[0], seed=5, metadata=METADATA)


def run_training(
    folder: str, distributed: Distributed | None = None, pause: float = 0.0, **changes: object
) -> TrainResult:
    """Train on the planted rows, with a report and a checkpoint every few steps."""
    return train(
        make_activations(),
        make_config(**changes),
        folder,
        distributed=distributed,
        log_every=5,
        save_every=7,
        callback=(lambda step, report: time.sleep(pause)) if pause else None,
    )


def read_log(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of the log of a run, without the speed."""
    lines = [json.loads(line) for line in (folder / "training" / "log.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "steps_per_second"} for line in lines]


if __name__ == "__main__":
    torch.set_num_threads(1)
    group = init_distributed(torch.device("cpu"))
    kinds = sys.argv[3].split(",") if len(sys.argv) > 3 else ["matryoshka"]
    for kind in kinds:
        target = sys.argv[1] if len(kinds) == 1 else f"{sys.argv[1]}/{kind}"
        run_training(target, group, pause=float(sys.argv[2]), kind=kind)
    group.shutdown()
