"""A stream: rows to train on straight from a tower, with no store in between."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torino.core.errors import BadParameter
from torino.datasets import Photos
from torino.datasets.images import Padding
from torino.training.activations.base import Part, part_of
from torino.training.activations.extraction import Looker, Taken, calm, hash_of_tower, nothing_read
from torino.training.activations.selection import Skipped
from torino.training.sampler import Order, endless, key_of
from torino.vlm.towers import Tower


@dataclass(frozen=True)
class StreamSettings:
    """What decides on the rows of a stream, beside its seed: a run goes on only with the same."""

    tower: str
    fingerprint: str
    tokens: str
    padding: str
    buffer: int
    lane: int


class Stream:
    """Activations that a tower gives while an SAE trains on them; an :class:`torino.training.activations.base.Activations`.

    Photos come in a pseudo-random order, anew in every pass, one buffer of them after the other. The rows of a buffer
    are mixed and handed out over as many steps as they last, so that every step sees rows of all its photos. Which
    photos make the buffer of a step follows from the step alone: a run resumed in the middle looks at the photos of
    that one buffer again, and at no others.

    The photos of a buffer lie in lanes of ``batch`` photos, and each lane fills its own part of every batch. Processes
    that share a batch thus look only at the lanes of their part, and see the same rows as one process would.

    A pass through a store is repeated at no cost; a stream pays the tower again. It is for more photos than the disk
    has room for, or for less than about one pass.

    Parameters
    ----------
    tower : Tower
    photos : Photos
    tokens : str
        ``cls``, ``random:R`` or ``all``.
    seed : int
        Of the order, and of the random patches.
    buffer : int
        Photos that are mixed with each other; more where one batch takes more. Their rows are kept in memory, in
        float32: 128 photos of 576 patches 1,024 wide are 300 MB.
    padding : {"crop", "square"}
    batch : int
        Photos that go through the tower at once.

    Attributes
    ----------
    skipped : dict of str to Skipped
        Photos that could not be used so far, by name. Others of their lane take their place.
    """

    rows = None

    def __init__(
        self,
        tower: Tower,
        photos: Photos,
        tokens: str = "all",
        *,
        seed: int = 0,
        buffer: int = 128,
        padding: Padding = "crop",
        batch: int = 16,
    ) -> None:
        if buffer < 1 or batch < 1:
            raise BadParameter(f"buffer and batch must be at least 1, got {buffer} and {batch}.")
        self._looker = Looker(tower, photos, tokens, padding=padding, seed=seed)
        self.seed, self.buffer, self._lane = seed, min(buffer, len(photos)), batch
        self.skipped: dict[str, Skipped] = {}
        self._held: tuple[tuple[int, int], dict[int, Tensor]] = ((-1, -1), {})

    @property
    def width(self) -> int:
        """Width D of a row."""
        return self._looker.tower.width

    @property
    def facts(self) -> dict[str, Any]:
        """What the card of an SAE says of its training data."""
        origin, kind = self._looker.tower.origin, self._looker.kind.words
        data = self._looker.photos.describe
        return {"encoder": origin.encoder, "block": origin.block, "token_kind": kind, "data": data, "license": ""}

    @cached_property
    def settings(self) -> StreamSettings:
        """What tells these rows from others."""
        look = self._looker
        tower, photos = hash_of_tower(look.tower), look.photos.fingerprint
        return StreamSettings(tower, photos, look.kind.name, look.padding, self.buffer, self._lane)

    @cached_property
    def _per_photo(self) -> int:
        with calm():
            return self._looker.rows_per_photo()

    def batch(self, step: int, size: int, part: Part = (0, 1)) -> Tensor:
        """Rows of a step; see :class:`torino.training.activations.base.Activations`."""
        if size < 1 or step < 0:
            raise BadParameter(f"A batch needs a size of at least 1 and a step from 0, got {size} and {step}.")
        lanes, steps = self._plan(size)
        filling, inside = divmod(step, steps)
        mine = part_of(size, part)
        shares = {lane: part_of(size, (lane, lanes)) for lane in range(lanes)}
        wanted = {
            lane: range(max(share.start, mine.start) - share.start, min(share.stop, mine.stop) - share.start)
            for lane, share in shares.items()
            if max(share.start, mine.start) < min(share.stop, mine.stop)
        }
        self._look(size, lanes, filling, list(wanted))
        found: list[Tensor] = [torch.empty(0, self.width)]
        for lane, positions in wanted.items():
            rows = self._rows(size, lanes, filling, lane)
            places = inside * len(shares[lane]) + np.asarray(positions)
            chosen = Order(len(rows), key_of(self.seed, "rows", filling, lane)).at(places % len(rows))
            found.append(rows[torch.from_numpy(chosen)])
        return torch.cat(found)

    def _plan(self, size: int) -> tuple[int, int]:
        """Lanes of a buffer and steps that it lasts: so many lanes that no more than one is left over."""
        steps = max(1, -(-self.buffer * self._per_photo // size))
        return -(-steps * size // (self._lane * self._per_photo)), steps

    def _rows(self, size: int, lanes: int, filling: int, lane: int) -> Tensor:
        """Rows of a lane; of the next one that has any, if no photo of it can be used."""
        for other in range(lane, lane + lanes):
            self._look(size, lanes, filling, [other % lanes])
            if len(rows := self._held[1][other % lanes]):
                return rows
        raise nothing_read(lanes * self._lane, next(iter(self.skipped.values())))

    def _look(self, size: int, lanes: int, filling: int, wanted: list[int]) -> None:
        """Have the rows of some lanes in memory, and of no other buffer."""
        if self._held[0] != (size, filling):
            self._held = ((size, filling), {})
        held = self._held[1]
        lacking = [lane for lane in wanted if lane not in held]
        if not lacking:
            return
        photos = self._looker.photos
        block, window = photos.nearby
        numbers = [
            endless(
                np.arange(self._lane) + (filling * lanes + lane) * self._lane,
                len(photos),
                self.seed,
                block=block,
                window=window,
            ).tolist()
            for lane in lacking
        ]
        with calm(), closing(self._looker.look(numbers)) as looked:
            for lane, seen in zip(lacking, looked, strict=True):
                taken = [photo.rows for photo in seen if isinstance(photo, Taken)]
                self.skipped |= {photo.name: photo for photo in seen if isinstance(photo, Skipped)}
                held[lane] = torch.cat([torch.empty(0, self.width), *taken])
