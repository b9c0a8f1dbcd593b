"""Running statistics: activation counts and top photos of every latent, in memory independent of the photo count."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torino.core.io import check_tensors
from torino.sae.model import SAE

MAX_DENSE = 1 << 24  # dense activations computed at a time: 64 MB
MAX_PENDING = 1 << 20  # new entries that are stored before the weaker ones are dropped


@torch.no_grad()
def encode_active(sae: SAE, patches: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return patch, latent and value of every nonzero activation, sorted by patch and then latent, on the CPU."""
    rows = max(1, MAX_DENSE // sae.latents)
    chunks: list[tuple[Tensor, Tensor, Tensor]] = []
    for start in range(0, len(patches), rows):
        z = sae.encode(patches[start : start + rows].to(sae.W_enc.device))
        patch, latent = z.nonzero(as_tuple=True)
        chunks.append(((patch + start).cpu(), latent.cpu(), z[patch, latent].float().cpu()))
    patch, latent, value = (torch.cat(parts) for parts in zip(*chunks, strict=True))
    return patch, latent, value


class RunningStats:
    """Count activations of each latent and keep the photos with the largest ones, with all their active patches.

    Parameters
    ----------
    latents : int
    keep : int
        Photos kept per latent.
    photos : int
        Total number of photos; indices are smaller.
    """

    def __init__(self, latents: int, keep: int, photos: int) -> None:
        self._latents, self._keep, self._max_photos = latents, keep, photos
        self.photos = torch.zeros((), dtype=torch.int64)
        self.patches = torch.zeros((), dtype=torch.int64)
        self.active_patches = torch.zeros(latents, dtype=torch.int64)
        self.active_photos = torch.zeros(latents, dtype=torch.int64)
        self.activation_sum = torch.zeros(latents, dtype=torch.float64)
        self.max_activation = torch.zeros(latents)
        self.floor = torch.zeros(latents)  # a photo must exceed it to be among the top photos
        empty = torch.zeros(0, dtype=torch.int64)
        self._entries: list[tuple[Tensor, ...]] = [(empty, empty, empty, torch.zeros(0))]
        self._pending = 0

    def update(self, photo: int, patches: int, patch: Tensor, latent: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add a photo; return the sum and the maximum of the activations of each latent in it.

        Photos must be added in ascending order, so that the earlier one is kept if two are equal.
        """
        counts = torch.bincount(latent, minlength=self._latents)
        sums = torch.bincount(latent, value.double(), minlength=self._latents).double()
        maxima = torch.zeros(self._latents).scatter_reduce(0, latent, value, "amax")
        self.photos += 1
        self.patches += patches
        self.active_patches += counts
        self.active_photos += counts > 0
        self.activation_sum += sums
        self.max_activation = torch.maximum(self.max_activation, maxima)
        strong = (maxima > self.floor)[latent]
        self._entries.append((latent[strong], torch.full_like(latent[strong], photo), patch[strong], value[strong]))
        self._pending += int(strong.sum())
        if self._pending > max(MAX_PENDING, len(self._entries[0][0])):
            self._prune()
        return sums, maxima

    def _prune(self) -> None:
        """Keep the top photos of each latent; sort the entries by latent, rank of the photo, and patch."""
        latent, photo, patch, value = (torch.cat(parts) for parts in zip(*self._entries, strict=True))
        key, group = torch.unique(latent * self._max_photos + photo, return_inverse=True)
        maxima = torch.zeros(len(key)).scatter_reduce(0, group, value, "amax")
        owner = key // self._max_photos
        order = (-maxima).argsort(stable=True)  # keys ascend, so equal photos stay in their order
        order = order[owner[order].argsort(stable=True)]
        first = torch.searchsorted(owner[order], torch.arange(self._latents))
        rank = torch.empty_like(order)
        rank[order] = torch.arange(len(order)) - first[owner[order]]
        last = rank == self._keep - 1
        self.floor[owner[last]] = maxima[last]
        kept = rank[group] < self._keep
        latent, photo, patch, value, rank = (part[kept] for part in (latent, photo, patch, value, rank[group]))
        order = patch.argsort(stable=True)
        order = order[(latent * self._keep + rank)[order].argsort(stable=True)]
        self._entries = [(latent[order], photo[order], patch[order], value[order])]
        self._pending = 0

    def compute(self) -> dict[str, Any]:
        """Return the fields of a :class:`~torino.interpret.top_activations.TopActivations` that are counted here."""
        self._prune()
        latent, photo, patch, value = self._entries[0]
        # a new (latent, photo) pair begins where either changes; the pairs are sorted by rank already
        is_first = torch.ones(len(latent), dtype=torch.bool)
        is_first[1:] = (latent[1:] != latent[:-1]) | (photo[1:] != photo[:-1])
        first = is_first.nonzero()[:, 0]
        owner = latent[first]
        rank = torch.arange(len(first)) - torch.searchsorted(owner, torch.arange(self._latents))[owner]
        top_photos = torch.full((self._latents, self._keep), -1)
        top_values = torch.zeros(self._latents, self._keep)
        top_photos[owner, rank] = photo[first]
        group = is_first.cumsum(0) - 1
        top_values[owner, rank] = torch.zeros(len(first)).scatter_reduce(0, group, value, "amax")
        sizes = torch.zeros(self._latents * self._keep, dtype=torch.int64)
        sizes[owner * self._keep + rank] = torch.bincount(group, minlength=len(first))
        return {
            "photo_count": int(self.photos),
            "patch_count": int(self.patches),
            "active_patches": self.active_patches,
            "active_photos": self.active_photos,
            "activation_sum": self.activation_sum,
            "max_activation": self.max_activation,
            "top_photos": top_photos,
            "top_values": top_values,
            "offsets": torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)]),
            "map_patches": patch.short() if bool((patch < 1 << 15).all()) else patch.int(),
            "map_values": value,
        }

    def state_dict(self) -> dict[str, Tensor]:
        """Return everything that is needed to continue later."""
        self._prune()
        sums = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        names = ("entry_latent", "entry_photo", "entry_patch", "entry_value")
        return {**sums, **dict(zip(names, self._entries[0], strict=True))}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue from a :meth:`state_dict`; raise ``ValueError`` if it does not fit, and change nothing."""
        sums = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        latent = torch.empty(state["entry_latent"].numel(), dtype=torch.int64, device="meta")
        entries = {"entry_latent": latent, "entry_photo": latent, "entry_patch": latent, "entry_value": latent.float()}
        check_tensors(state, sums | entries)
        for name, limit in (("entry_latent", self._latents), ("entry_photo", self._max_photos)):
            if bool(((state[name] < 0) | (state[name] >= limit)).any()):
                raise ValueError(f"{name!r} contains a number that does not exist")
        for name in sums:
            setattr(self, name, state[name])
        self._entries = [tuple(state[name] for name in entries)]
