"""The levels of a Matryoshka SAE as a tree: each concept below the most similar one of the level before."""

from __future__ import annotations

from bisect import bisect_right
from functools import cached_property
from itertools import accumulate

import torch

from torino.sae import SAE

CHUNK = 1024  # concepts whose parents are searched at once


class ConceptTree:
    """Nested levels of an SAE.

    The parent of a concept is the concept of the previous level whose decoder row has the largest cosine with its own,
    ties to the lowest number. An SAE without levels, or without a decoder, has only roots.

    Parameters
    ----------
    sae : SAE
    """

    def __init__(self, sae: SAE) -> None:
        self._sae = sae
        self._starts = [0, *accumulate(sae.groups)]

    def level(self, latent: int) -> int:
        """Return the level of a concept, counted from 0."""
        return bisect_right(self._starts, latent) - 1

    @cached_property
    def _parents(self) -> list[int]:
        """The parent of each concept, −1 for roots."""
        parents, rows = [-1] * self._sae.latents, self._sae.W_dec
        if rows is None or len(self._sae.groups) < 2:
            return parents
        rows = torch.nn.functional.normalize(rows.detach().cpu().float(), dim=1)
        for level in range(1, len(self._sae.groups)):
            above = slice(self._starts[level - 1], self._starts[level])
            for start in range(self._starts[level], self._starts[level + 1], CHUNK):
                stop = min(start + CHUNK, self._starts[level + 1])
                nearest = (rows[start:stop] @ rows[above].T).argmax(1) + above.start
                parents[start:stop] = nearest.tolist()
        return parents

    @cached_property
    def _children(self) -> dict[int, list[int]]:
        children: dict[int, list[int]] = {}
        for latent, parent in enumerate(self._parents):
            children.setdefault(parent, []).append(latent)
        return children

    def parent(self, latent: int) -> int | None:
        """Return the concept above; None for a root."""
        parent = self._parents[latent]
        return None if parent < 0 else parent

    def children(self, latent: int) -> list[int]:
        """Return the concepts directly below."""
        return self._children.get(latent, [])

    def roots(self) -> list[int]:
        """Return the concepts of the first level."""
        return self._children.get(-1, [])
