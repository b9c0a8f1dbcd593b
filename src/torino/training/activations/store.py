"""A store: activations that were harvested to a folder, as rows to train on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torino.core.errors import BadFile, BadParameter
from torino.training.activations.base import Part, part_of
from torino.training.activations.selection import TokenKind
from torino.training.activations.shards import CARD, DTYPES, NAMES, CacheSettings, Shard, open_shards, read_card
from torino.training.sampler import endless

WINDOW = 2**18  # rows that are mixed with each other where a store is read locally


class Store:
    """Activations that were harvested to a folder; an :class:`torino.training.activations.base.Activations`.

    Rows are numbered photo by photo. ``batch`` goes through them in a pseudo-random order that is worked out, not
    kept: every row comes once in a pass, and memory does not grow with their number.

    Attributes
    ----------
    settings : CacheSettings
        What was harvested, and how.
    seed : int
        Of the order.
    mean : Tensor of shape (D,), float32
        Mean of all rows; worked out in float64.
    mean_norm, rms_norm, variance : float
        Mean and root mean square of the norms of the rows, and their mean squared distance from ``mean``.
    skipped : list of Skipped
        Photos that gave no rows.
    """

    def __init__(
        self, folder: Path, settings: CacheSettings, shards: Mapping[int, Shard], *, seed: int = 0, local: int = 1
    ) -> None:
        if local < 1:
            raise BadParameter(f"local is the number of neighbouring rows that are read together, got {local}.")
        self.folder, self.settings, self.seed, self.local = folder, settings, seed, local
        self.shards = dict(sorted(shards.items()))
        held = list(self.shards.values())
        self._held = held
        self._starts = np.concatenate([[0], np.cumsum([len(shard.rows) for shard in held], dtype=np.int64)])
        counts = torch.zeros(settings.photos, dtype=torch.int64)
        self._grids = torch.zeros(settings.photos, 2, dtype=torch.int32)
        for number, shard in self.shards.items():
            here = settings.range_of(number)
            counts[here.start : here.stop] = shard.counts.long()
            self._grids[here.start : here.stop] = shard.grids
        self._offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
        self.skipped = [each for shard in held for each in shard.skipped]
        sums = np.sum([shard.sums.numpy() for shard in held], axis=0) if held else np.zeros(settings.width + 2)
        mean = sums[:-2] / max(self.rows, 1)
        self.mean = torch.from_numpy(mean).float()
        self.mean_norm = float(sums[-2]) / max(self.rows, 1)
        mean_square = float(sums[-1]) / max(self.rows, 1)
        self.rms_norm, self.variance = sqrt(mean_square), max(mean_square - float(mean @ mean), 0.0)
        self._mean = mean

    @classmethod
    def open(cls, path: str | Path, seed: int = 0, *, local: int = 1, unfinished: bool = False) -> Store:
        """Open a store.

        Parameters
        ----------
        path : str or path
            The folder that was harvested to.
        seed : int
            Of the order in which ``batch`` goes through the rows.
        local : int
            For disks that are slow at jumping: so many neighbouring rows are read together, and only rows of the
            same 2¹⁸ or so are mixed with each other.
        unfinished : bool
            Take what is there of a store whose harvest was stopped, or that lost a shard.

        Raises
        ------
        BadFile
            If there is no store, it is not finished, or a shard is missing or damaged; says what to do.
        """
        folder = Path(path).expanduser()
        card = read_card(folder)
        settings = CacheSettings.of(card, folder / CARD)
        shards, faults = open_shards(folder, settings)
        if faults and not unfinished:
            again = f"Run torino harvest -o {folder} to make what is missing"
            if not card.get("complete"):
                raise BadFile(
                    f"{folder} is not finished: {len(shards)} of {settings.shards} shards are there. {again}, or "
                    "take what is there (unfinished=True)."
                )
            raise BadFile(f"{next(iter(faults.values()))} {again}; the other {len(shards)} shards stay as they are.")
        store = cls(folder, settings, shards, seed=seed, local=local)
        if store.rows == 0:
            raise BadFile(f"{folder} holds no rows yet. Run torino harvest -o {folder} to go on.")
        return store

    def __repr__(self) -> str:
        """Say what is in here."""
        told = self.settings
        return (
            f"Store({self.rows:,} rows of width {self.width} ({told.tokens}) from {told.data}, {told.encoder}, "
            f"block {told.block})"
        )

    @property
    def width(self) -> int:
        """Width D of a row."""
        return self.settings.width

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return int(self._starts[-1])

    @property
    def facts(self) -> dict[str, Any]:
        """What the card of an SAE says of its training data."""
        told = self.settings
        kind = TokenKind.of(told.tokens).words
        return {"encoder": told.encoder, "block": told.block, "token_kind": kind, "data": told.data, "license": ""}

    @cached_property
    def names(self) -> list[str]:
        """Names of the photos."""
        try:
            # not splitlines, which also cuts at characters that a name may have
            lines = (self.folder / NAMES).read_text(encoding="utf-8").split("\n")
            return [str(json.loads(line)) for line in lines if line]
        except (OSError, ValueError) as error:
            raise BadFile(f"Cannot read {self.folder / NAMES} ({error}). Run torino harvest again.") from error

    def batch(self, step: int, size: int, part: Part = (0, 1)) -> Tensor:
        """Rows of a step; see :class:`torino.training.activations.base.Activations`."""
        if size < 1 or step < 0:
            raise BadParameter(f"A batch needs a size of at least 1 and a step from 0, got {size} and {step}.")
        mine = part_of(size, part)
        places = np.arange(step * size + mine.start, step * size + mine.stop)
        return self.take(endless(places, self.rows, self.seed, block=self.local, window=WINDOW))

    def take(self, rows: Sequence[int] | Tensor | NDArray[np.int64]) -> Tensor:
        """Some rows by number, shape (n, D), float32."""
        wanted = np.asarray(rows, np.int64)
        if wanted.size and not (wanted.min() >= 0 and wanted.max() < self.rows):
            raise BadParameter(f"Rows are numbered from 0 to {self.rows - 1}, got {wanted.min()} to {wanted.max()}.")
        order = np.argsort(wanted, kind="stable")  # shard by shard, and there from front to back
        ordered = wanted[order]
        cuts = np.searchsorted(ordered, self._starts)
        found = torch.empty(len(wanted), self.width, dtype=DTYPES[self.settings.dtype])
        for shard in np.flatnonzero(np.diff(cuts)).tolist():
            start, stop = int(cuts[shard]), int(cuts[shard + 1])
            inside = torch.from_numpy(ordered[start:stop] - self._starts[shard])
            torch.index_select(self._held[shard].rows, 0, inside, out=found[start:stop])
        back = torch.empty(len(wanted), dtype=torch.int64)
        back[torch.from_numpy(order)] = torch.arange(len(wanted))
        return found[back].float()

    # -------------------------------------------------------------- which photo a row is of

    def rows_of(self, photo: int) -> range:
        """Numbers of the rows of a photo; none for one that was skipped."""
        if not 0 <= photo < self.settings.photos:
            raise BadParameter(f"Photos are numbered from 0 to {self.settings.photos - 1}, got {photo}.")
        return range(int(self._offsets[photo]), int(self._offsets[photo + 1]))

    def photo_rows(self, photo: int) -> Tensor:
        """The rows of a photo, shape (n, D), float32."""
        return self.take(np.asarray(self.rows_of(photo)))

    def grid_of(self, photo: int) -> tuple[int, int]:
        """Rows and columns of the patch grid of a photo; (0, 0) for one that was skipped."""
        down, across = self._grids[photo].tolist()
        return down, across

    def origins(self, rows: Sequence[int] | Tensor) -> tuple[Tensor, Tensor]:
        """Where rows come from: the numbers of their photos, and of their patches there (−1 for CLS), both int64."""
        wanted = torch.as_tensor(rows, dtype=torch.int64)
        photos = torch.searchsorted(self._offsets, wanted, right=True) - 1
        if self.settings.tokens == "cls":
            return photos, torch.full_like(photos, -1)
        if self.settings.tokens == "all":
            return photos, wanted - self._offsets[photos]
        patches = torch.empty_like(photos)
        shards = torch.searchsorted(torch.from_numpy(self._starts), wanted, right=True) - 1
        for shard in shards.unique().tolist():
            here, numbers = shards == shard, self._held[shard].patches
            assert numbers is not None  # written for random patches
            patches[here] = numbers[wanted[here] - int(self._starts[shard])].long()
        return photos, patches

    def summary(self) -> dict[str, Any]:
        """What is known once a store is whole, for its card."""
        shards = [
            {"file": shard.path.name, "photos": len(shard.counts), "rows": len(shard.rows), "crc32": shard.crc32}
            for shard in self._held
        ]
        norms = {"mean_norm": self.mean_norm, "rms_norm": self.rms_norm, "variance": self.variance}
        counts = {"rows": self.rows, "skipped": len(self.skipped)}
        return {**counts, **norms, "mean": self._mean.tolist(), "shards": shards}
