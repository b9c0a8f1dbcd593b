"""A dispatch mode that refuses operations that wait for a device or whose shape depends on values."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

SYNCHRONIZING = (
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "unique",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "bincount",
    "repeat_interleave.Tensor",
    "is_nonzero",
    "equal",
    "item",
    "histc",
)


class HostSynchronizationError(AssertionError):
    """An operation would wait for the device."""


class NoHostSync(TorchDispatchMode):
    """Raise at operations that would synchronize a GPU with the host, also on CPU tensors."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).removeprefix("aten.")
        kwargs = kwargs or {}
        if any(name == bad or name.split(".")[0] == bad for bad in SYNCHRONIZING):
            raise HostSynchronizationError(f"{func} synchronizes with the host.")
        if name.startswith(("_to_copy", "copy_", "to.")) and torch.device("cpu") in (
            kwargs.get("device"),
            *[a for a in args if isinstance(a, torch.device)],
        ):
            raise HostSynchronizationError(f"{func} copies to the host.")
        if name.startswith(("index.Tensor", "index_put")):
            masks = [i for i in args[1] if i is not None and i.dtype in (torch.bool, torch.uint8)]
            if masks:
                raise HostSynchronizationError(f"{func} with a mask synchronizes with the host.")
        return func(*args, **kwargs)
