"""Activation store: cached activations on disk as training rows."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping, Sequence
from functools import cached_property
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torino.core.checks import expand_path
from torino.core.errors import BadFile, BadParameter
from torino.core.schema import parse_json
from torino.training.activations.base import Part, check_batch, part_range
from torino.training.activations.selection import TokenSelection
from torino.training.activations.shards import CARD, DTYPES, NAMES, CacheSettings, Shard, open_shards, read_card
from torino.training.sampler import shuffled_epochs

WINDOW = 2**18  # rows that are mixed with each other if a store is read in blocks


class Store:
    """Cached activations in a folder; implements :class:`torino.training.activations.base.Activations`.

    Rows are numbered photo by photo. ``batch`` reads them in a pseudo-random order that is computed, not stored: every
    epoch contains each row once, and memory does not grow with the number of rows.

    Attributes
    ----------
    settings : CacheSettings
        What was cached, and how.
    seed : int
        Seed of the row order.
    mean : Tensor of shape (D,), float32
        Mean of all rows, computed in float64.
    mean_norm, rms_norm, variance : float
        Mean and root mean square of the row norms, and mean squared distance of the rows from ``mean``.
    skipped : list of SkippedPhoto
        Photos without rows.
    """

    def __init__(
        self, folder: Path, settings: CacheSettings, shards: Mapping[int, Shard], *, seed: int = 0, read_block: int = 1
    ) -> None:
        if read_block < 1:
            raise BadParameter(f"read_block must be at least 1, got {read_block}.")
        self.folder, self.settings, self.seed, self.read_block = folder, settings, seed, read_block
        self.shards = dict(sorted(shards.items()))
        self._shard_list = list(self.shards.values())
        sizes = [len(shard.rows) for shard in self._shard_list]
        self._shard_starts = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
        counts = torch.zeros(settings.photos, dtype=torch.int64)
        self._grids = torch.zeros(settings.photos, 2, dtype=torch.int32)
        for number, shard in self.shards.items():
            photos = settings.photo_range(number)
            counts[photos.start : photos.stop] = shard.counts.long()
            self._grids[photos.start : photos.stop] = shard.grids
        self._photo_starts = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
        self.skipped = [photo for shard in self._shard_list for photo in shard.skipped]
        sums = np.zeros(settings.width + 2)
        if self._shard_list:
            sums = np.sum([shard.sums.numpy() for shard in self._shard_list], axis=0)
        mean = sums[:-2] / max(self.rows, 1)
        self.mean = torch.from_numpy(mean).float()
        self.mean_norm = float(sums[-2]) / max(self.rows, 1)
        mean_square = float(sums[-1]) / max(self.rows, 1)
        self.rms_norm, self.variance = sqrt(mean_square), max(mean_square - float(mean @ mean), 0.0)
        self._mean = mean

    @classmethod
    def open(cls, path: str | Path, seed: int = 0, *, read_block: int = 1, allow_incomplete: bool = False) -> Store:
        """Open a store.

        Parameters
        ----------
        path : str or path
            Folder with cached activations.
        seed : int
            Seed of the order in which ``batch`` reads the rows.
        read_block : int
            Number of neighboring rows that are read together, for disks with slow random access. Only rows within the
            same 2¹⁸ or so are then mixed with each other.
        allow_incomplete : bool
            Open the existing shards of a store that is not complete.

        Raises
        ------
        BadFile
            If there is no store, it is not complete, or a shard is missing or damaged; the message says what to do.
        """
        folder = expand_path(path, "The store")
        card = read_card(folder)
        settings = CacheSettings.from_card(card, folder / CARD)
        shards, faults = open_shards(folder, settings)
        if faults and not allow_incomplete:
            fix = f"Run torino activations -o {folder} to write missing and damaged shards again"
            if not card.get("complete"):
                raise BadFile(
                    f"{folder} is not complete: {len(shards)} of {settings.shards} shards exist. {fix}, or open the "
                    "existing ones (allow_incomplete=True)."
                )
            raise BadFile(f"{next(iter(faults.values()))} {fix}; the other {len(shards)} shards are kept.")
        for number, message in faults.items():
            if settings.shard_path(folder, number).is_file():
                warnings.warn(f"{message} Its rows are left out.", stacklevel=2)
        if not any(len(shard.rows) for shard in shards.values()):
            raise BadFile(f"{folder} has no rows yet. Run torino activations -o {folder} to continue.")
        return cls(folder, settings, shards, seed=seed, read_block=read_block)

    def __repr__(self) -> str:
        """Return a summary of the contents."""
        settings = self.settings
        return (
            f"Store({self.rows:,} rows of width {self.width} ({settings.tokens}) from {settings.data}, "
            f"{settings.encoder}, block {settings.block})"
        )

    @property
    def width(self) -> int:
        """Width D of a row."""
        return self.settings.width

    @property
    def rows(self) -> int:
        """Number of rows."""
        return int(self._shard_starts[-1])

    @property
    def metadata(self) -> dict[str, Any]:
        """Fields for the card of an SAE."""
        settings = self.settings
        return {
            "encoder": settings.encoder,
            "block": settings.block,
            "token_kind": TokenSelection.parse(settings.tokens).description,
            "data": settings.data,
            "license": "",
        }

    @property
    def content(self) -> str:
        """Hash of the checksums of all shards; a training run is resumed only with the same rows."""
        return hashlib.sha256(" ".join(shard.crc32 for shard in self._shard_list).encode()).hexdigest()[:32]

    @cached_property
    def names(self) -> list[str]:
        """Names of the photos."""
        try:
            # not splitlines, which also splits at characters that a name may contain
            lines = (self.folder / NAMES).read_text(encoding="utf-8").split("\n")
            return [parse_json(line, str) for line in lines if line]
        except (OSError, ValueError) as error:
            raise BadFile(f"Cannot read {self.folder / NAMES} ({error}). Run torino activations again.") from error

    def batch(self, step: int, size: int, part: Part = (0, 1)) -> Tensor:
        """Return the rows of a step; see :class:`torino.training.activations.base.Activations`."""
        check_batch(step, size)
        own = part_range(size, part)
        positions = np.arange(step * size + own.start, step * size + own.stop)
        return self.get_rows(shuffled_epochs(positions, self.rows, self.seed, block=self.read_block, window=WINDOW))

    def get_rows(self, rows: Sequence[int] | Tensor | NDArray[np.int64]) -> Tensor:
        """Return rows by number, shape (n, D), float32."""
        wanted = np.asarray(rows, np.int64)
        if wanted.size and not (wanted.min() >= 0 and wanted.max() < self.rows):
            raise BadParameter(f"rows must be from 0 to {self.rows - 1}, got {wanted.min()} to {wanted.max()}.")
        order = np.argsort(wanted, kind="stable")  # read shard by shard, each from front to back
        ordered = wanted[order]
        cuts = np.searchsorted(ordered, self._shard_starts)
        values = torch.empty(len(wanted), self.width, dtype=DTYPES[self.settings.dtype])
        for shard in np.flatnonzero(np.diff(cuts)).tolist():
            start, stop = int(cuts[shard]), int(cuts[shard + 1])
            inside = torch.from_numpy(ordered[start:stop] - self._shard_starts[shard])
            torch.index_select(self._shard_list[shard].rows, 0, inside, out=values[start:stop])
        inverse = torch.empty(len(wanted), dtype=torch.int64)
        inverse[torch.from_numpy(order)] = torch.arange(len(wanted))
        return values[inverse].float()

    # -------------------------------------------------------------- rows of photos

    def row_range(self, photo: int) -> range:
        """Return the numbers of the rows of a photo; empty if it was skipped."""
        if not 0 <= photo < self.settings.photos:
            raise BadParameter(f"photo must be from 0 to {self.settings.photos - 1}, got {photo}.")
        return range(int(self._photo_starts[photo]), int(self._photo_starts[photo + 1]))

    def photo_rows(self, photo: int) -> Tensor:
        """Return the rows of a photo, shape (n, D), float32."""
        return self.get_rows(np.asarray(self.row_range(photo)))

    def photo_grid(self, photo: int) -> tuple[int, int]:
        """Return the number of rows and columns of the patch grid of a photo; (0, 0) if it was skipped."""
        height, width = self._grids[photo].tolist()
        return height, width

    def locate_rows(self, rows: Sequence[int] | Tensor) -> tuple[Tensor, Tensor]:
        """Return photo index and patch index of each row, both int64; the patch index of a CLS token is −1."""
        wanted = torch.as_tensor(rows, dtype=torch.int64)
        photos = torch.searchsorted(self._photo_starts, wanted, right=True) - 1
        if self.settings.tokens == "cls":
            return photos, torch.full_like(photos, -1)
        if self.settings.tokens == "all":
            return photos, wanted - self._photo_starts[photos]
        patches = torch.empty_like(photos)
        shards = torch.searchsorted(torch.from_numpy(self._shard_starts), wanted, right=True) - 1
        for shard in shards.unique().tolist():
            mask, indices = shards == shard, self._shard_list[shard].patches
            assert indices is not None  # always stored for random patches
            patches[mask] = indices[wanted[mask] - int(self._shard_starts[shard])].long()
        return photos, patches

    def summary(self) -> dict[str, Any]:
        """Return the counts, norms and shards of a complete store, for its card."""
        shards = [
            {"file": shard.path.name, "photos": len(shard.counts), "rows": len(shard.rows), "crc32": shard.crc32}
            for shard in self._shard_list
        ]
        norms = {"mean_norm": self.mean_norm, "rms_norm": self.rms_norm, "variance": self.variance}
        counts = {"rows": self.rows, "skipped": len(self.skipped)}
        return {**counts, **norms, "mean": self._mean.tolist(), "shards": shards}
