"""Choice between the two implementations of planning: numpy on the CPU, or torch on the device of the tokens."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal

import torch

from torino.core.checks import check_choice

Planner = Literal["auto", "numpy", "torch"]
_planner: ContextVar[Planner] = ContextVar("torino_planner", default="auto")


@contextmanager
def use_planner(planner: Planner) -> Generator[None]:
    """Choose how plans are computed inside the block.

    Parameters
    ----------
    planner : {"auto", "numpy", "torch"}
        ``"torch"`` plans on the device of the tokens without synchronizing with the host until the plan is read
        (:mod:`torino.reducers.device`); ``"numpy"`` plans on the CPU. The default ``"auto"`` uses torch for CUDA
        tensors. Groups, anchors and roles are the same. Methods other than ``torino-p``, ``torino-m`` and ``torino-x``
        are not affected.

    Examples
    --------
    >>> from torino import RawEmbedding, VisualTokens, make
    >>> with use_planner("torch"):
    ...     make("torino-p", sae=RawEmbedding(), budget=2).plan(VisualTokens.of(torch.eye(4))).anchor
    tensor([0, 2])
    """
    token = _planner.set(check_choice("planner", planner, Planner))
    try:
        yield
    finally:
        _planner.reset(token)


def plans_with_torch(device: torch.device) -> bool:
    """Return whether tokens on this device are planned with torch."""
    return _planner.get() == "torch" or (_planner.get() == "auto" and device.type == "cuda")
