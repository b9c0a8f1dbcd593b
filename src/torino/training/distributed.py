"""Distributed training: each process trains on its part of every batch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from torino.core.device import resolve_device
from torino.core.errors import BadParameter


@dataclass(frozen=True)
class Distributed:
    """Rank of this process among ``size`` processes. With one process, all operations do nothing."""

    rank: int = 0
    size: int = 1

    @property
    def part(self) -> tuple[int, int]:
        """The part of a batch that belongs to this process, as (rank, size)."""
        return self.rank, self.size

    @property
    def is_main(self) -> bool:
        """Whether this is the process that writes files and prints messages."""
        return self.rank == 0

    def all_reduce_(self, tensors: Sequence[Tensor]) -> None:
        """Sum tensors over all processes, in place."""
        if self.size > 1:
            for tensor in tensors:
                dist.all_reduce(tensor)

    def broadcast_(self, tensors: Sequence[Tensor]) -> None:
        """Copy the tensors of the main process to all processes, in place."""
        if self.size > 1:
            for tensor in tensors:
                dist.broadcast(tensor, 0)

    def all_gather(self, values: Tensor) -> Tensor:
        """Concatenate the values of all processes; their lengths may differ."""
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

    def barrier(self) -> None:
        """Wait until all processes have reached this point."""
        if self.size > 1:
            dist.barrier()

    def shutdown(self) -> None:
        """Leave the process group."""
        if self.size > 1:
            dist.destroy_process_group()


def init_distributed(device: torch.device) -> Distributed:
    """Join the process group that ``torchrun`` started, with NCCL on GPUs and gloo elsewhere."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return Distributed()
    if "RANK" not in os.environ:
        raise BadParameter(f"WORLD_SIZE is {size}, but RANK is not set. Start with torchrun --nproc-per-node={size} …")
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return Distributed(dist.get_rank(), dist.get_world_size())


def local_device(name: str) -> torch.device:
    """Return the device of this process.

    ``cuda`` is the GPU that torchrun assigned to this process; ``auto`` is that GPU, or the CPU if there is none.
    """
    if name in ("auto", "cuda") and torch.cuda.is_available():
        name = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    device = resolve_device(name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device
