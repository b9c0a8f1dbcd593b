"""Rows for training SAEs, read from the cached features of several sources without loading them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from torino.training.activations.base import Part, check_batch, part_range
from torino.training.sampler import shuffled_epochs
from torino_lab.training.features import Features

TokenKind = Literal["all", "random2", "cls"]
DESCRIPTIONS: dict[TokenKind, str] = {"all": "all patches", "random2": "2 random patches per photo", "cls": "CLS"}


class FeatureRows:
    """Tokens of one kind; implements :class:`torino.training.activations.base.Activations`.

    Parameters
    ----------
    sources : sequence of Features
    kind : {"all", "random2", "cls"}
    seed : int
        Of the order of the rows and of the random patches.
    metadata : mapping
        Fields for the card of the SAE.
    """

    def __init__(self, sources: Sequence[Features], kind: TokenKind, seed: int, metadata: Mapping[str, Any]) -> None:
        self.sources, self.kind, self.seed = sources, kind, seed
        self.metadata = {**metadata, "token_kind": DESCRIPTIONS[kind]}
        self._starts = np.cumsum([0, *(source.rows for source in sources)])
        patches = sources[0].values.shape[1] - 1
        photos = int(self._starts[-1])
        if kind == "all":
            self._tokens = np.broadcast_to(np.arange(1, patches + 1), (photos, patches))
        elif kind == "random2":
            keys = np.random.default_rng(seed).random((photos, patches))
            self._tokens = np.argpartition(keys, 2, axis=1)[:, :2] + 1
        else:
            self._tokens = np.zeros((photos, 1), dtype=np.int64)

    @property
    def width(self) -> int:
        """Width of a row."""
        return int(self.sources[0].values.shape[2])

    @property
    def rows(self) -> int:
        """Number of rows."""
        return int(self._tokens.size)

    def batch(self, step: int, size: int, part: Part = (0, 1)) -> Tensor:
        """Return the rows of a step; every epoch has each row once, in another order."""
        check_batch(step, size)
        own = part_range(size, part)
        positions = np.arange(step * size + own.start, step * size + own.stop)
        wanted = shuffled_epochs(positions, self.rows, self.seed)
        photos, columns = np.divmod(wanted, self._tokens.shape[1])
        tokens = self._tokens[photos, columns]
        result = np.empty((len(wanted), self.width), dtype=np.float16)
        owners = np.searchsorted(self._starts, photos, side="right") - 1
        for owner in np.unique(owners).tolist():
            mask = owners == owner
            result[mask] = self.sources[owner].values[photos[mask] - self._starts[owner], tokens[mask]]
        return torch.from_numpy(result).float()
