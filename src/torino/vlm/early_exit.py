"""Measure what stopping the tower at its feature layer saves, which torino does with and without reduction."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from torino.vlm.hooks import run_all_blocks
from torino.vlm.trace import EarlyExit

if TYPE_CHECKING:
    from torino.vlm.session import VLM, Inputs


@torch.no_grad()
def measure_early_exit(vlm: VLM, inputs: Inputs, repeats: int = 1) -> EarlyExit | None:
    """Time the tower up to its feature layer and with all blocks, as the stock model runs it.

    Parameters
    ----------
    vlm : VLM
    inputs : Inputs
    repeats : int
        Number of measurements, of which the fastest count.

    Returns
    -------
    EarlyExit or None
        None if the model reads the last block of its tower, so that there is nothing to save.
    """
    with run_all_blocks() as count:
        vlm.encode(inputs).run(None)  # untimed: the later blocks have not run before
    if count.needed >= count.all:
        return None
    stopped, complete = list[float](), list[float]()
    for _ in range(repeats):
        stopped.append(vlm.encode(inputs).run(None)[2]["tower"])
        with run_all_blocks():
            complete.append(vlm.encode(inputs).run(None)[2]["tower"])
    return EarlyExit(count.needed, count.all, min(stopped), min(complete))
