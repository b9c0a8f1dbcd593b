"""Write and read the trainer's checkpoints."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor


def optimiser_state(optimiser: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the state of an optimiser as named tensors."""
    state: dict[str, Tensor] = {}
    for number, values in optimiser.state_dict()["state"].items():
        state |= {f"optimiser.{number}.{name}": value for name, value in values.items()}
    return state


def load_optimiser(optimiser: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Load what :func:`optimiser_state` gave."""
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        _, number, name = key.split(".")
        state.setdefault(int(number), {})[name] = value
    optimiser.load_state_dict({**optimiser.state_dict(), "state": state})


def save_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write a safetensors file atomically."""
    temporary = path.with_suffix(".tmp")
    save_file({name: value.detach().contiguous() for name, value in tensors.items()}, temporary)
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    temporary.replace(path)
