"""Resolve device and dtype options."""

from __future__ import annotations

import torch

from torino.core.checks import describe_value, is_integer
from torino.core.errors import BadParameter


def resolve_device(device: str | torch.device) -> torch.device:
    """Return a device of this machine; ``"auto"`` selects a GPU if there is one."""
    accepted = "device must be auto, cpu, cuda, cuda:1, mps or similar"
    if is_integer(device):
        device = f"cuda:{device}"
    if not isinstance(device, str | torch.device):  # pyright: ignore[reportUnnecessaryIsInstance]: untyped callers
        raise BadParameter(f"{accepted}, got {describe_value(device)}.")
    try:
        chosen = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    except RuntimeError as error:
        raise BadParameter(f"{accepted}, got {device!r:.60}.") from error
    if chosen.type == "meta":
        raise BadParameter(f"{accepted}, got {chosen.type!r}, which holds no values.")
    available = {"cuda": torch.cuda.is_available, "mps": torch.backends.mps.is_available}
    if chosen.type in available and not available[chosen.type]():
        raise BadParameter(f"This machine has no {chosen.type} device that torch can use. Choose cpu.")
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise BadParameter(
            f"This machine has {torch.cuda.device_count()} cuda devices, counted from 0, got {device!r}."
        )
    return chosen


def resolve_dtype(dtype: str | torch.dtype | None, device: torch.device) -> torch.dtype | str:
    """Return the dtype to load in; by default float32 on the CPU, elsewhere that of the checkpoint."""
    if dtype is None:
        return torch.float32 if device.type == "cpu" else "auto"
    floats = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if isinstance(dtype, torch.dtype):
        chosen = dtype if dtype in floats.values() else None
    else:
        chosen = "auto" if str(dtype) == "auto" else floats.get(str(dtype))
    if chosen is None:
        raise BadParameter(f"dtype must be float32, bfloat16, float16 or auto, got {describe_value(dtype)}.")
    return chosen
