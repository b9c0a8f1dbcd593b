"""Measures: how well an SAE rebuilds rows, how sparsely, and which of its latents do the work."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from torino.core.concepts import Concepts
from torino.core.errors import BadParameter, BadTokens
from torino.core.grouping import group_by_overlap
from torino.sae.model import SAE
from torino.training.objectives import Outcome

CHUNK = 1 << 23  # latents encoded at once


@dataclass(frozen=True)
class Measures:
    """What was measured over some rows.

    Attributes
    ----------
    fvu : float
        Fraction of variance unexplained, Σ‖x − x̂‖² / Σ‖x − mean‖²: 0 is perfect, 1 no better than the mean.
    levels : tuple of float
        The same for the first group alone, the first two, …; the last is ``fvu``.
    l0 : float
        Active latents a row.
    dead : float
        Share of latents that count as dead: in training, silent for ``dead_after`` rows; else silent in all ``rows``.
    top_frequency : float
        Share of rows in which the most frequent latent fires. Near 1, few latents dominate, and patches group badly.
    rows : int
    """

    fvu: float
    levels: tuple[float, ...]
    l0: float
    dead: float
    top_frequency: float
    rows: int

    def facts(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "fvu": self.fvu,
            "levels": list(self.levels),
            "l0": self.l0,
            "dead": self.dead,
            "top_frequency": self.top_frequency,
            "rows": self.rows,
        }

    def sentence(self) -> str:
        """The same in words."""
        return (
            f"FVU {self.fvu:.4f}, L0 {self.l0:.1f}, dead {self.dead:.1%}, "
            f"most frequent latent in {self.top_frequency:.1%} of {self.rows:,} rows"
        )


class LatentStats:
    """Sums from which :class:`Measures` follow, over the batches since the last reset."""

    def __init__(self, levels: int, width: int, latents: int, device: torch.device) -> None:
        self.errors = torch.zeros(levels, dtype=torch.float64, device=device)
        self.square = torch.zeros((), dtype=torch.float64, device=device)
        self.total = torch.zeros(width, dtype=torch.float64, device=device)
        self.counts = torch.zeros(latents, dtype=torch.int64, device=device)
        self.plain = torch.zeros(3, dtype=torch.float64)  # rows, batches, sum of losses

    def add(self, outcome: Outcome, rows: int) -> None:
        """Add a batch."""
        self.errors += outcome.errors
        self.square += outcome.square
        self.total += outcome.total
        self.counts += outcome.counts
        self.plain += torch.tensor([rows, 1, outcome.loss], dtype=torch.float64)

    def tensors(self) -> dict[str, Tensor]:
        """All sums, by name."""
        return {f"tally.{name}": getattr(self, name) for name in ("errors", "square", "total", "counts", "plain")}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the sums from named tensors."""
        for name, value in self.tensors().items():
            value.copy_(tensors[name])

    def reset(self) -> None:
        """Begin anew."""
        for value in self.tensors().values():
            value.zero_()

    @property
    def loss(self) -> float:
        """Mean loss."""
        return float(self.plain[2] / self.plain[1])

    def read(self, dead: Tensor) -> Measures:
        """The measures so far; ``dead`` says which latents count as dead."""
        rows = float(self.plain[0])
        variance = float(self.square - self.total.square().sum() / rows)
        levels = tuple(float(error) / variance if variance > 0 else 0.0 for error in self.errors)
        return Measures(
            fvu=levels[-1],
            levels=levels,
            l0=float(self.counts.sum()) / rows,
            dead=float(dead.double().mean()),
            top_frequency=float(self.counts.max()) / rows,
            rows=int(rows),
        )


@torch.no_grad()
def measure(sae: SAE, batches: Iterable[Tensor]) -> Measures:
    """Measure a finished SAE, as it is used, on rows as the tower gives them; a batch may be empty."""
    if sae.W_dec is None or sae.normalize != "none":
        raise BadParameter("Only an SAE with its decoder, and without normalisation of its own, can be measured.")
    device = sae.W_enc.device
    tally = LatentStats(len(sae.groups), sae.width, sae.latents, device)
    edges = [0, *torch.tensor(sae.groups).cumsum(0).tolist()]
    step = max(1, CHUNK // sae.latents)
    for batch in batches:
        for some in batch.split(step):
            x = some.to(device).float()
            z = sae.encode(x)
            rebuilt = sae.b_dec.expand_as(x)
            errors: list[Tensor] = []
            for begin, end in pairwise(edges):
                rebuilt = rebuilt + z[:, begin:end] @ sae.W_dec[begin:end]
                errors.append((x - rebuilt).double().square().sum())
            outcome = Outcome(
                0.0, torch.stack(errors), x.double().square().sum(), x.double().sum(0), (z > 0).sum(0), 0.0
            )
            tally.add(outcome, len(x))
    if not tally.plain[0]:
        raise BadTokens("There are no rows to measure the SAE on.")
    return tally.read(tally.counts == 0)


@torch.no_grad()
def group_counts(sae: SAE, photos: Iterable[Tensor], settings: Sequence[int] = (1, 2, 3)) -> dict[str, float]:
    """Mean number of groups of a photo at (k, δ) = (1, 1), (2, 2), …: the tokens that TORINO would leave of it.

    ``photos`` are the patches of one photo each; photos without patches do not count.
    """
    groups: list[list[int]] = []
    for patches in photos:
        if len(patches):
            top = sae.top(patches.float().to(sae.W_enc.device), max(settings))
            cut = [Concepts(top.indices[:, :k], top.values[:, :k], top.peak) for k in settings]
            groups.append([len(group_by_overlap(some, delta=k)) for some, k in zip(cut, settings, strict=True)])
    if not groups:
        raise BadTokens("There are no photos to count the groups of.")
    means = torch.tensor(groups, dtype=torch.float64).mean(0).tolist()
    return {f"({k},{k})": mean for k, mean in zip(settings, means, strict=True)}
