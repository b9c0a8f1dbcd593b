"""Activation stream: training rows directly from a tower, without a store."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torino.core.errors import BadParameter
from torino.datasets import Photos, hash_sample
from torino.datasets.images import Padding
from torino.training.activations.base import Part, check_batch, part_range
from torino.training.activations.extraction import (
    ExtractedRows,
    RowExtractor,
    hash_tower,
    ignore_frame_warnings,
    no_usable_photo,
)
from torino.training.activations.selection import SkippedPhoto
from torino.training.sampler import Permutation, hash_key, shuffled_epochs
from torino.vlm.towers import Tower


@dataclass(frozen=True)
class StreamSettings:
    """Settings that, with the seed, determine the rows of a stream; a run is resumed only with the same ones."""

    tower: str
    fingerprint: str
    sample: str
    tokens: str
    padding: str
    buffer: int
    lane: int


class Stream:
    """Activations computed while an SAE trains; implements :class:`torino.training.activations.base.Activations`.

    Photos are read in a pseudo-random order, which differs in every epoch, one buffer at a time. The rows of a buffer
    are mixed and used for as many steps as they last, so that every step gets rows of all photos of the buffer. The
    photos in the buffer of a step depend only on the step: a resumed run processes the photos of that one buffer again,
    and no others.

    The photos of a buffer are divided into lanes of ``batch`` photos, and each lane fills its own part of every batch.
    Processes that share a batch therefore process only the lanes of their part, and get the same rows as a single
    process.

    Another epoch over a store is cheap; a stream has to run the tower again. It is meant for photos whose activations
    do not fit on the disk, or for runs of less than about one epoch.

    Parameters
    ----------
    tower : Tower
    photos : Photos
    tokens : str
        ``cls``, ``random:R`` or ``all``.
    seed : int
        Seed of the order and of the random patches.
    buffer : int
        Number of photos that are mixed with each other; more if one batch needs more. Their rows are kept in memory, in
        float32: 128 photos with 576 patches of width 1,024 take 300 MB.
    padding : {"crop", "square"}
    batch : int
        Number of photos per forward pass of the tower.

    Attributes
    ----------
    skipped : dict of str to SkippedPhoto
        Photos that could not be used so far, by name. Other photos of their lane replace them.
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
        self._extractor = RowExtractor(tower, photos, tokens, padding=padding, seed=seed)
        self.seed, self.buffer, self._lane_size = seed, min(buffer, len(photos)), batch
        self.skipped: dict[str, SkippedPhoto] = {}
        # rows in memory: the key (batch size, number of the buffer), and the rows of its lanes
        self._loaded: tuple[tuple[int, int], dict[int, Tensor]] = ((-1, -1), {})

    @property
    def width(self) -> int:
        """Width D of a row."""
        return self._extractor.tower.width

    @property
    def metadata(self) -> dict[str, Any]:
        """Fields for the card of an SAE."""
        origin = self._extractor.tower.origin
        return {
            "encoder": origin.encoder,
            "block": origin.block,
            "token_kind": self._extractor.selection.description,
            "data": self._extractor.photos.describe,
            "license": "",
        }

    @cached_property
    def settings(self) -> StreamSettings:
        """Settings that identify the rows."""
        extractor = self._extractor
        return StreamSettings(
            tower=hash_tower(extractor.tower),
            fingerprint=extractor.photos.fingerprint,
            sample=hash_sample(extractor.photos),
            tokens=extractor.selection.name,
            padding=extractor.padding,
            buffer=self.buffer,
            lane=self._lane_size,
        )

    @cached_property
    def _rows_per_photo(self) -> int:
        with ignore_frame_warnings():
            return self._extractor.rows_per_photo()

    def batch(self, step: int, size: int, part: Part = (0, 1)) -> Tensor:
        """Return the rows of a step; see :class:`torino.training.activations.base.Activations`."""
        check_batch(step, size)
        lanes, steps = self._buffer_plan(size)
        buffer_number, step_in_buffer = divmod(step, steps)
        own = part_range(size, part)
        shares = {lane: part_range(size, (lane, lanes)) for lane in range(lanes)}
        wanted = {
            lane: range(max(share.start, own.start) - share.start, min(share.stop, own.stop) - share.start)
            for lane, share in shares.items()
            if max(share.start, own.start) < min(share.stop, own.stop)
        }
        self._load_lanes(size, lanes, buffer_number, list(wanted))
        parts: list[Tensor] = [torch.empty(0, self.width)]
        for lane, offsets in wanted.items():
            rows = self._lane_rows(size, lanes, buffer_number, lane)
            positions = step_in_buffer * len(shares[lane]) + np.asarray(offsets)
            order = Permutation(len(rows), hash_key(self.seed, "rows", buffer_number, lane))
            parts.append(rows[torch.from_numpy(order[positions % len(rows)])])
        return torch.cat(parts)

    def _buffer_plan(self, size: int) -> tuple[int, int]:
        """Return the number of lanes of a buffer and of the steps that it lasts; less than one lane is left over."""
        steps = max(1, -(-self.buffer * self._rows_per_photo // size))
        return -(-steps * size // (self._lane_size * self._rows_per_photo)), steps

    def _lane_rows(self, size: int, lanes: int, buffer_number: int, lane: int) -> Tensor:
        """Return the rows of a lane, or of the next lane with a usable photo if it has none."""
        for other in range(lane, lane + lanes):
            self._load_lanes(size, lanes, buffer_number, [other % lanes])
            if len(rows := self._loaded[1][other % lanes]):
                return rows
        raise no_usable_photo(lanes * self._lane_size, next(iter(self.skipped.values())))

    def _load_lanes(self, size: int, lanes: int, buffer_number: int, wanted: list[int]) -> None:
        """Load the rows of some lanes into memory, and drop those of other buffers."""
        if self._loaded[0] != (size, buffer_number):
            self._loaded = ((size, buffer_number), {})
        loaded = self._loaded[1]
        missing = [lane for lane in wanted if lane not in loaded]
        if not missing:
            return
        photos = self._extractor.photos
        block, window = photos.locality
        indices = [
            shuffled_epochs(
                np.arange(self._lane_size) + (buffer_number * lanes + lane) * self._lane_size,
                len(photos),
                self.seed,
                block=block,
                window=window,
            ).tolist()
            for lane in missing
        ]
        with ignore_frame_warnings(), closing(self._extractor.extract(indices)) as batches:
            for lane, results in zip(missing, batches, strict=True):
                rows = [result.rows for result in results if isinstance(result, ExtractedRows)]
                self.skipped |= {result.name: result for result in results if isinstance(result, SkippedPhoto)}
                loaded[lane] = torch.cat([torch.empty(0, self.width), *rows])
