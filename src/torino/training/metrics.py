"""SAE metrics: reconstruction error, sparsity, dead latents and number of patch groups."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NotRequired, TypedDict

import torch
from torch import Tensor

from torino.core.concepts import Concepts
from torino.core.errors import BadParameter, BadTokens
from torino.core.grouping import group_by_overlap
from torino.core.schema import Count
from torino.sae.model import SAE
from torino.training.objectives import BatchStats

CHUNK = 1 << 23  # latents that are encoded at once


class MetricValues(TypedDict):
    """Metrics in a file; see :class:`SAEMetrics` and :func:`count_groups`."""

    fvu: float
    levels: list[float]
    l0: float
    dead: float
    top_frequency: float
    rows: Count
    groups: NotRequired[dict[str, float]]


@dataclass(frozen=True)
class SAEMetrics:
    """Metrics of an SAE over some rows.

    Attributes
    ----------
    fvu : float
        Fraction of variance unexplained, Σ‖x − x̂‖² / Σ‖x − mean‖²: 0 is perfect, 1 is no better than the mean.
    levels : tuple of float
        FVU of the first group, the first two groups, …; the last value equals ``fvu``.
    l0 : float
        Mean number of active latents per row.
    dead : float
        Fraction of dead latents. In training: not active for ``dead_after`` rows; otherwise: not active in any row.
    top_frequency : float
        Fraction of rows in which the most frequent latent is active. Close to 1, few latents dominate, and patches
        cannot be grouped well.
    rows : int
    """

    fvu: float
    levels: tuple[float, ...]
    l0: float
    dead: float
    top_frequency: float
    rows: int

    def to_dict(self) -> dict[str, Any]:
        """Return the metrics as JSON values."""
        return {
            "fvu": self.fvu,
            "levels": list(self.levels),
            "l0": self.l0,
            "dead": self.dead,
            "top_frequency": self.top_frequency,
            "rows": self.rows,
        }

    def summary(self) -> str:
        """Return the metrics as text, for the card of an SAE."""
        return (
            f"FVU {self.fvu:.4f}, L0 {self.l0:.1f}, dead {self.dead:.1%}, "
            f"most frequent latent in {self.top_frequency:.1%} of {self.rows:,} rows"
        )


class LatentStats:
    """Running sums over the batches since the last reset, from which :class:`SAEMetrics` are computed."""

    def __init__(self, levels: int, width: int, latents: int, device: torch.device) -> None:
        self.errors = torch.zeros(levels, dtype=torch.float64, device=device)
        self.square_sum = torch.zeros((), dtype=torch.float64, device=device)
        self.row_sum = torch.zeros(width, dtype=torch.float64, device=device)
        self.counts = torch.zeros(latents, dtype=torch.int64, device=device)
        self.totals = torch.zeros(3, dtype=torch.float64)  # rows, batches, sum of losses

    def update(self, batch: BatchStats, rows: int) -> None:
        """Add the statistics of a batch."""
        self.errors += batch.errors
        self.square_sum += batch.square_sum
        self.row_sum += batch.row_sum
        self.counts += batch.counts
        self.totals += torch.tensor([rows, 1, batch.loss], dtype=torch.float64)

    def state_dict(self) -> dict[str, Tensor]:
        """Return all sums under the names that checkpoints use."""
        return {
            "tally.errors": self.errors,
            "tally.square": self.square_sum,
            "tally.total": self.row_sum,
            "tally.counts": self.counts,
            "tally.plain": self.totals,
        }

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the sums from the tensors of a checkpoint."""
        for name, value in self.state_dict().items():
            value.copy_(tensors[name])

    def reset(self) -> None:
        """Set all sums to 0."""
        for value in self.state_dict().values():
            value.zero_()

    @property
    def rows(self) -> int:
        """Number of rows."""
        return int(self.totals[0])

    @property
    def loss(self) -> float:
        """Mean loss."""
        return float(self.totals[2] / self.totals[1])

    def compute(self, dead: Tensor) -> SAEMetrics:
        """Compute the metrics; ``dead`` is a mask of the dead latents."""
        rows = float(self.totals[0])
        variance = float(self.square_sum - self.row_sum.square().sum() / rows)
        levels = tuple(float(error) / variance if variance > 0 else 0.0 for error in self.errors)
        return SAEMetrics(
            fvu=levels[-1],
            levels=levels,
            l0=float(self.counts.sum()) / rows,
            dead=float(dead.double().mean()),
            top_frequency=float(self.counts.max()) / rows,
            rows=int(rows),
        )


@torch.no_grad()
def compute_metrics(sae: SAE, batches: Iterable[Tensor]) -> SAEMetrics:
    """Compute the metrics of a trained SAE at inference, on rows as the tower outputs them; batches may be empty."""
    if sae.W_dec is None or sae.normalize != "none":
        raise BadParameter("Metrics need an SAE with a decoder and without input normalization.")
    device = sae.W_enc.device
    stats = LatentStats(len(sae.groups), sae.width, sae.latents, device)
    edges = [0, *torch.tensor(sae.groups).cumsum(0).tolist()]
    step = max(1, CHUNK // sae.latents)
    for batch in batches:
        for chunk in batch.split(step):
            x = chunk.to(device).float()
            z = sae.encode(x)
            reconstruction = sae.b_dec.expand_as(x)
            errors: list[Tensor] = []
            for begin, end in pairwise(edges):
                reconstruction = reconstruction + z[:, begin:end] @ sae.W_dec[begin:end]
                errors.append((x - reconstruction).double().square().sum())
            chunk_stats = BatchStats(
                0.0, torch.stack(errors), x.double().square().sum(), x.double().sum(0), (z > 0).sum(0), 0.0
            )
            stats.update(chunk_stats, len(x))
    if not stats.rows:
        raise BadTokens("There are no rows to compute metrics on.")
    return stats.compute(stats.counts == 0)


@torch.no_grad()
def count_groups(sae: SAE, photos: Iterable[Tensor], settings: Sequence[int] = (1, 2, 3)) -> dict[str, float]:
    """Compute the mean number of groups per photo at (k, δ) = (1, 1), (2, 2), …: the tokens that TORINO would keep.

    ``photos`` are the patches of one photo each; photos without patches are ignored.
    """
    counts: list[list[int]] = []
    for patches in photos:
        if len(patches):
            top = sae.top(patches.float().to(sae.W_enc.device), max(settings))
            truncated = [Concepts(top.indices[:, :k], top.values[:, :k], top.peak) for k in settings]
            counts.append([len(group_by_overlap(top_k, delta=k)) for top_k, k in zip(truncated, settings, strict=True)])
    if not counts:
        raise BadTokens("There are no photos to count groups in.")
    means = torch.tensor(counts, dtype=torch.float64).mean(0).tolist()
    return {f"({k},{k})": mean for k, mean in zip(settings, means, strict=True)}
