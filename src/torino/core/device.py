"""Resolve device and dtype options."""

from __future__ import annotations

import torch

from torino.core.errors import BadParameter


def resolve_device(device: str | torch.device) -> torch.device:
    """Return a device of this machine; ``"auto"`` selects a GPU if there is one."""
    try:
        chosen = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    except RuntimeError as error:
        raise BadParameter(f"device must be auto, cpu, cuda, cuda:1, mps or similar, got {device!r}.") from error
    available = {"cuda": torch.cuda.is_available, "mps": torch.backends.mps.is_available}
    if chosen.type in available and not available[chosen.type]():
        raise BadParameter(f"This machine has no {chosen.type} device that torch can use. Choose cpu.")
    return chosen


def resolve_dtype(dtype: str | torch.dtype | None, device: torch.device) -> torch.dtype | str:
    """Return the dtype to load in; by default float32 on the CPU, elsewhere that of the checkpoint."""
    if dtype is None:
        return torch.float32 if device.type == "cpu" else "auto"
    floats = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    chosen = dtype if dtype == "auto" or dtype in floats.values() else floats.get(str(dtype))
    if chosen is None:
        raise BadParameter(f"dtype must be float32, bfloat16, float16 or auto, got {dtype!r}.")
    return chosen
