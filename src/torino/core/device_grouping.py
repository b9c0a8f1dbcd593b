"""Grouping by shared concepts with fixed shapes and without host synchronization, for any device.

The result is that of :mod:`torino.core.grouping`. Patches of the same key (a subset of δ concepts) form a class.
Components are found as in Borůvka's algorithm: in every round each component joins the neighbor with the lowest label,
and pointer jumping makes all labels of a component equal. The number of components that still have a neighbor at least
halves in a round, so ⌈log2 N⌉ rounds of ⌈log2 N⌉ jumps suffice for every input.
"""

from __future__ import annotations

from itertools import combinations
from math import comb

import torch
from torch import Tensor

from torino.core.grouping import MAX_KEYS, Silent
from torino.core.topk.exact import SILENT

NONE = 2**62  # above all labels


def device_groups(indices: Tensor, delta: int, latents: int, silent: Silent) -> Tensor:
    """Return the group of each patch, numbered by first appearance in its image, shape (images, N).

    Parameters
    ----------
    indices : Tensor of shape (images, N, k), int64
        Top-k latents, −1 in silent slots; literal concepts have no silent slots.
    delta : int
        Minimum number of shared concepts.
    latents : int
        Number of latents of the encoder.
    silent : {"group", "keep", "literal"}
        As in :func:`torino.core.grouping.group_by_overlap`.
    """
    images, n, k = indices.shape
    is_silent = indices == SILENT
    symbols = torch.where(is_silent, latents - 1 + is_silent.cumsum(2), indices).sort(2).values
    patch = torch.arange(images * n, device=indices.device)
    silent_patch = is_silent.all(2)
    image = torch.arange(images, device=indices.device)[:, None].expand(images, n)
    if comb(k, delta) > MAX_KEYS:
        neighbors = _PairNeighbors(symbols, delta, latents, silent_patch if silent == "group" else None)
    else:
        subsets = list(zip(*combinations(range(k), delta), strict=True))
        key = image[:, :, None].expand(images, n, len(subsets[0])).reshape(-1)
        for column in subsets:
            part = torch.stack([symbols[:, :, slot] for slot in column], 2).reshape(-1)
            key = dense_rank(key * (latents + k) + part)
        # a subset needs an active latent; rows are sorted, so that its first symbol is the lowest
        active = torch.stack([symbols[:, :, slot] for slot in subsets[0]], 2).reshape(-1) < latents
        owner = patch.repeat_interleave(len(subsets[0]))
        if silent == "group":  # one more class per image
            key = torch.cat([key, key.shape[0] + image.reshape(-1)])
            active, owner = torch.cat([active, silent_patch.reshape(-1)]), torch.cat([owner, patch])
        neighbors = _KeyNeighbors(key, owner, active)
    label = connect(neighbors, images * n)
    first = torch.full_like(patch, NONE).scatter_reduce(0, label, patch, "amin")[label].view(images, n)
    is_first = first == patch.view(images, n)
    number = (is_first.cumsum(1) - 1).reshape(-1)
    return number[first]


def connect(neighbors: _KeyNeighbors | _PairNeighbors, nodes: int) -> Tensor:
    """Return labels that are equal exactly within connected components, shape (nodes,)."""
    rounds = max(1, (nodes - 1).bit_length())
    node = torch.arange(nodes, device=neighbors.device)
    label = node
    for _ in range(rounds):
        lowest = neighbors.lowest(label)
        parent = torch.full_like(node, NONE).scatter_reduce(0, label, lowest, "amin")
        parent = torch.where(parent == NONE, node, parent)  # no neighbor
        # choices of the lowest neighbor form no cycles but pairs, of which the lower one becomes the root
        parent = torch.where((parent[parent] == node) & (node < parent), node, parent)
        for _ in range(rounds):
            parent = parent[parent]
        label = parent[label]
    return label


class _KeyNeighbors:
    """Nodes that own the same key are neighbors."""

    def __init__(self, key: Tensor, owner: Tensor, active: Tensor) -> None:
        self.key, self.owner, self.active, self.device = key, owner, active, key.device
        self._none = key.new_full((len(key) + len(owner),), NONE)  # one entry per possible key

    def lowest(self, label: Tensor) -> Tensor:
        """Return for each node the lowest label of a neighbor in another component, NONE if there is none."""
        own = label[self.owner]
        shown = torch.where(self.active, own, NONE)
        first = self._none.scatter_reduce(0, self.key, shown, "amin")[self.key]
        second = self._none.scatter_reduce(0, self.key, torch.where(shown == first, NONE, shown), "amin")[self.key]
        other = torch.where(self.active, torch.where(first != own, first, second), NONE)
        return torch.full_like(label, NONE).scatter_reduce(0, self.owner, other, "amin")


class _PairNeighbors:
    """Patches of an image that share at least δ symbols, at least one of them active; for k with too many subsets."""

    def __init__(self, symbols: Tensor, delta: int, latents: int, grouped: Tensor | None) -> None:
        images, n, k = symbols.shape
        shared, active = (torch.zeros(images, n, n, dtype=torch.int16, device=symbols.device) for _ in range(2))
        for one in range(k):
            for two in range(k):
                same = symbols[:, :, None, one] == symbols[:, None, :, two]
                shared += same
                active += same & (symbols[:, :, None, one] < latents)
        self.linked = (shared >= delta) & (active > 0)
        if grouped is not None:
            self.linked |= grouped[:, :, None] & grouped[:, None]
        self.device, self.images = symbols.device, images

    def lowest(self, label: Tensor) -> Tensor:
        """Return for each node the lowest label of a neighbor in another component, NONE if there is none."""
        own = label.view(self.images, -1)
        other = self.linked & (own[:, :, None] != own[:, None])
        return torch.where(other, own[:, None].expand_as(other), NONE).amin(2).view(-1)


def dense_rank(key: Tensor) -> Tensor:
    """Return the rank of each key among the distinct keys, shape (n,)."""
    values, order = key.sort()
    change = torch.cat([torch.zeros_like(values[:1]), (values[1:] != values[:-1]).long()])
    return torch.empty_like(key).scatter_(0, order, change.cumsum(0))


def device_shared_concepts(indices: Tensor, values: Tensor, label: Tensor, latents: int) -> Tensor:
    """Return the most common latent of each group, shape (images, N): −1 for silent groups and beyond the last group.

    Ties go to the larger summed activation, then to the lowest latent, as in
    :func:`torino.core.grouping.shared_concepts`. Negative labels belong to no group.
    """
    images, n, k = indices.shape
    offset = torch.arange(images, device=indices.device)[:, None] * n
    group = torch.where(label < 0, images * n, label + offset)[:, :, None].expand(images, n, k).reshape(-1)
    latent = indices.reshape(-1)
    valid = (latent != SILENT) & (group < images * n)
    key, order = torch.where(valid, group * latents + latent.clamp(min=0), NONE).sort(stable=True)
    change = torch.cat([torch.zeros_like(key[:1]), (key[1:] != key[:-1]).long()]).cumsum(0)
    weight = values.double().reshape(-1)[order]
    count = torch.zeros_like(key).scatter_add(0, change, torch.ones_like(key))[change]
    total = torch.zeros_like(weight).scatter_add(0, change, weight)[change]
    # pairs are sorted by group and latent; sort by further keys, the primary one last
    best = total.sort(descending=True, stable=True).indices
    best = best[count[best].sort(descending=True, stable=True).indices]
    rank = torch.empty_like(best).scatter_(0, best, torch.arange(len(best), device=best.device))
    of = torch.where(key == NONE, images * n, key // latents)
    chosen = torch.full((images * n + 1,), NONE, device=key.device).scatter_reduce(0, of, rank, "amin")[:-1]
    found = key[best[chosen.clamp(max=len(best) - 1)]] % latents
    return torch.where(chosen == NONE, SILENT, found).view(images, n)
