"""World: the processes that train one SAE together, each on its part of every batch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from torino.core.errors import BadParameter
from torino.vlm.towers import device_of


@dataclass(frozen=True)
class World:
    """One process among ``size`` of them. Alone, all of it does nothing."""

    rank: int = 0
    size: int = 1

    @property
    def part(self) -> tuple[int, int]:
        """The part of a batch that belongs to this process."""
        return self.rank, self.size

    @property
    def first(self) -> bool:
        """Whether this is the process that writes files and talks."""
        return self.rank == 0

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Add up tensors over all processes, in place."""
        if self.size > 1:
            for tensor in tensors:
                dist.all_reduce(tensor)

    def same_(self, tensors: Sequence[Tensor]) -> None:
        """Give all processes the tensors of the first, in place."""
        if self.size > 1:
            for tensor in tensors:
                dist.broadcast(tensor, 0)

    def gathered(self, values: Tensor) -> Tensor:
        """The values of all processes, shape (n,) here and any n elsewhere, one after the other."""
        if self.size == 1:
            return values
        length = torch.tensor([len(values)], device=values.device)
        lengths = [torch.empty_like(length) for _ in range(self.size)]
        dist.all_gather(lengths, length)
        counts = [int(count) for count in lengths]
        padded = values.new_zeros(max(counts))
        padded[: len(values)] = values
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(parts, padded)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    def wait(self) -> None:
        """Go on when all processes have come this far."""
        if self.size > 1:
            dist.barrier()

    def leave(self) -> None:
        """Part from the others."""
        if self.size > 1:
            dist.destroy_process_group()


def join(device: torch.device) -> World:
    """Join the processes that ``torchrun`` started: over NCCL on GPUs, over gloo elsewhere."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return World()
    if "RANK" not in os.environ:
        raise BadParameter(f"WORLD_SIZE is {size}, but RANK is not set. Start with torchrun --nproc-per-node={size} …")
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return World(dist.get_rank(), dist.get_world_size())


def device_here(name: str) -> torch.device:
    """The device of this process: ``auto`` is the GPU that torchrun meant for it, or the CPU; ``cuda`` is that GPU."""
    if name in ("auto", "cuda") and torch.cuda.is_available():
        name = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    device = device_of(name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device
