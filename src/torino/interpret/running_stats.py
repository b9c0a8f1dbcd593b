"""Tally: sums over photos and the strongest photos of every latent, in memory that does not grow with the photos."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torino.sae.model import SAE

ROOM = 1 << 24  # dense activations worked out at a time: 64 MB
WAITING = 1 << 20  # entries that may wait before the weaker ones are dropped


@torch.no_grad()
def active(sae: SAE, patches: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The latents that fire: patch, latent and activation of each, by patch and then latent, on the CPU."""
    rows = max(1, ROOM // sae.latents)
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    for start in range(0, len(patches), rows):
        z = sae.encode(patches[start : start + rows].to(sae.W_enc.device))
        patch, latent = z.nonzero(as_tuple=True)
        found.append(((patch + start).cpu(), latent.cpu(), z[patch, latent].float().cpu()))
    patch, latent, value = (torch.cat(parts) for parts in zip(*found, strict=True))
    return patch, latent, value


class RunningStats:
    """How often and how strongly each latent fired, and the photos that fired it most, with all their patches."""

    def __init__(self, latents: int, keep: int, photos: int) -> None:
        self._latents, self._keep, self._of = latents, keep, photos
        self.photos = torch.zeros((), dtype=torch.int64)
        self.patches = torch.zeros((), dtype=torch.int64)
        self.fired_patches = torch.zeros(latents, dtype=torch.int64)
        self.fired_photos = torch.zeros(latents, dtype=torch.int64)
        self.total = torch.zeros(latents, dtype=torch.float64)
        self.peak = torch.zeros(latents)
        self.floor = torch.zeros(latents)  # a photo has to exceed it to be among the strongest
        empty = torch.zeros(0, dtype=torch.int64)
        self._entries: list[tuple[Tensor, ...]] = [(empty, empty, empty, torch.zeros(0))]
        self._waiting = 0

    def add(self, photo: int, patches: int, patch: Tensor, latent: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Take in one photo; the sum and the largest of the activations of each latent in it come back.

        Photos come in rising order, so that of equals the earlier one stays.
        """
        counts = torch.bincount(latent, minlength=self._latents)
        sums = torch.bincount(latent, value.double(), minlength=self._latents).double()
        peaks = torch.zeros(self._latents).scatter_reduce(0, latent, value, "amax")
        self.photos += 1
        self.patches += patches
        self.fired_patches += counts
        self.fired_photos += counts > 0
        self.total += sums
        self.peak = torch.maximum(self.peak, peaks)
        strong = (peaks > self.floor)[latent]
        self._entries.append((latent[strong], torch.full_like(latent[strong], photo), patch[strong], value[strong]))
        self._waiting += int(strong.sum())
        if self._waiting > max(WAITING, len(self._entries[0][0])):
            self._drop()
        return sums, peaks

    def _drop(self) -> None:
        """Keep the strongest photos of each latent; entries end up by latent, then strength of photo, then patch."""
        latent, photo, patch, value = (torch.cat(parts) for parts in zip(*self._entries, strict=True))
        key, group = torch.unique(latent * self._of + photo, return_inverse=True)
        peaks = torch.zeros(len(key)).scatter_reduce(0, group, value, "amax")
        owner = key // self._of
        order = (-peaks).argsort(stable=True)  # keys rise, so equals stay in the order of their photos
        order = order[owner[order].argsort(stable=True)]
        first = torch.searchsorted(owner[order], torch.arange(self._latents))
        rank = torch.empty_like(order)
        rank[order] = torch.arange(len(order)) - first[owner[order]]
        last = rank == self._keep - 1
        self.floor[owner[last]] = peaks[last]
        kept = rank[group] < self._keep
        latent, photo, patch, value, rank = (part[kept] for part in (latent, photo, patch, value, rank[group]))
        order = patch.argsort(stable=True)
        order = order[(latent * self._keep + rank)[order].argsort(stable=True)]
        self._entries = [(latent[order], photo[order], patch[order], value[order])]
        self._waiting = 0

    def result(self) -> dict[str, Any]:
        """The fields of an :class:`~torino.interpret.top_activations.Evidence` that are counted here."""
        self._drop()
        latent, photo, patch, value = self._entries[0]
        # a new photo of a latent begins where either changes; they are already in the order of their ranks
        fresh = torch.ones(len(latent), dtype=torch.bool)
        fresh[1:] = (latent[1:] != latent[:-1]) | (photo[1:] != photo[:-1])
        begin = fresh.nonzero()[:, 0]
        owner = latent[begin]
        rank = torch.arange(len(begin)) - torch.searchsorted(owner, torch.arange(self._latents))[owner]
        top_photos = torch.full((self._latents, self._keep), -1)
        top_values = torch.zeros(self._latents, self._keep)
        top_photos[owner, rank] = photo[begin]
        group = fresh.cumsum(0) - 1
        top_values[owner, rank] = torch.zeros(len(begin)).scatter_reduce(0, group, value, "amax")
        sizes = torch.zeros(self._latents * self._keep, dtype=torch.int64)
        sizes[owner * self._keep + rank] = torch.bincount(group, minlength=len(begin))
        return {
            "photos": int(self.photos),
            "patches": int(self.patches),
            "fired_patches": self.fired_patches,
            "fired_photos": self.fired_photos,
            "total": self.total,
            "peak": self.peak,
            "top_photos": top_photos,
            "top_values": top_values,
            "offsets": torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)]),
            "map_patches": patch.short() if bool((patch < 1 << 15).all()) else patch.int(),
            "map_values": value,
        }

    def state(self) -> dict[str, Tensor]:
        """Everything needed to go on later."""
        self._drop()
        sums = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        names = ("entry_latent", "entry_photo", "entry_patch", "entry_value")
        return {**sums, **dict(zip(names, self._entries[0], strict=True))}

    def take_up(self, state: dict[str, Tensor]) -> None:
        """Go on from a :meth:`state`."""
        for name, value in list(vars(self).items()):
            if isinstance(value, Tensor):
                setattr(self, name, state[name])
        self._entries = [tuple(state[f"entry_{name}"] for name in ("latent", "photo", "patch", "value"))]
