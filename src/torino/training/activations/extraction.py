"""From photos to rows: the tower is kept busy while threads decode the photos to come."""

from __future__ import annotations

import hashlib
import os
import warnings
import zlib
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torino.core.errors import BadParameter, TorinoError
from torino.datasets import Gone, Photos, printable
from torino.datasets.images import Padding, mean_colour, open_image, prepare
from torino.training.activations.selection import Skipped, TokenKind
from torino.vlm.towers import Tower

# What of an image processor decides on the pixels that a tower sees.
PIXELS = (
    *("size", "crop_size", "image_mean", "image_std", "resample", "do_resize", "do_center_crop", "do_pad"),
    *("patch_size", "max_num_patches", "min_pixels", "max_pixels"),
)


@dataclass(frozen=True)
class Taken:
    """What a photo gave: its rows in float32 on the CPU, the numbers of their patches, and the grid."""

    index: int
    rows: Tensor
    patches: Tensor
    grid: tuple[int, int]


class Looker:
    """Looks at photos by number, through one tower and in one way.

    Parameters
    ----------
    tower : Tower
    photos : Photos
    tokens : str
        See :class:`torino.training.activations.selection.TokenKind`.
    padding : {"crop", "square"}
    seed : int
        Of the random patches.
    """

    def __init__(
        self, tower: Tower, photos: Photos, tokens: str = "all", *, padding: Padding = "crop", seed: int = 0
    ) -> None:
        if padding not in ("crop", "square"):
            raise BadParameter(f"padding must be 'crop' or 'square', got {padding!r}.")
        self.tower, self.photos, self.seed = tower, photos, seed
        self.padding: Padding = padding
        self.kind = TokenKind.of(tokens)
        self.kind.check(tower.has_cls, tower.origin.encoder)
        self.names = photos.names()
        # a tower on the CPU uses all of it: a second thread that decodes would only be in its way
        on_cpu = next(tower.model.parameters()).device.type == "cpu"
        self.workers = 1 if on_cpu else min(16, os.cpu_count() or 1)

    def look(self, batches: Iterable[Sequence[int]]) -> Generator[list[Taken | Skipped]]:
        """Look at batches of photos in order; those to come are decoded by threads while the tower runs.

        A photo that cannot be read, or that the tower refuses, is skipped and stops no other.
        """
        todo = iter(batches)
        waiting: deque[list[Future[_Ready | Skipped]]] = deque()
        pool = ThreadPoolExecutor(self.workers, "photos")
        try:
            while True:
                # two batches ahead, or so many that every thread has something to do
                while len(waiting) < 3 or sum(map(len, waiting)) < 2 * self.workers:
                    batch = next(todo, None)
                    if batch is None:
                        break
                    waiting.append([pool.submit(self._ready, index) for index in batch])
                if not waiting:
                    return
                yield self._seen([future.result() for future in waiting.popleft()])
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def rows_per_photo(self) -> int:
        """How many rows a photo gives; for ``all``, as many as the first that can be read."""
        if self.kind.count is not None:
            return self.kind.count
        first: Skipped | None = None
        for index in range(len(self.photos)):
            (seen,) = self._seen([self._ready(index)])
            if isinstance(seen, Taken):
                return len(seen.rows)
            first = first or seen
        assert first is not None  # a source has at least one photo
        raise nothing_read(len(self.photos), first)

    def _ready(self, index: int) -> _Ready | Skipped:
        """Decode a photo and bring it into the form that the tower takes; in a thread."""
        data = None
        try:
            data = self.photos[index].data
            picture = prepare(open_image(data), self.padding, mean_colour(self.tower.processor))
            (inputs,) = self.tower.process([picture])
        except (Gone, MemoryError, torch.OutOfMemoryError):  # not the fault of this photo
            raise
        except Exception as error:  # decoders and processors raise whatever they stumble over
            # where the photo lies on this machine is nobody's business who reads the store
            reason = (
                _sentence(error).replace(printable(str(data)), self.names[index])
                if isinstance(data, Path)
                else _sentence(error)
            )
            return Skipped(index, self.names[index], reason)
        return _Ready(index, inputs)

    def _seen(self, batch: Sequence[_Ready | Skipped]) -> list[Taken | Skipped]:
        found: list[Taken | Skipped] = [photo for photo in batch if isinstance(photo, Skipped)]
        # as in the tower itself: neighbours of one shape, or laid end to end, go through together
        for _, same in groupby((photo for photo in batch if isinstance(photo, _Ready)), key=_shape):
            run = list(same)
            try:
                found += self._through(run)
            except ValueError:  # TorinoError is one too: then which of them was it?
                for photo in run:
                    try:
                        found += self._through([photo])
                    except ValueError as error:
                        found.append(Skipped(photo.index, self.names[photo.index], _sentence(error)))
        at = {photo.index: place for place, photo in enumerate(batch)}
        return sorted(found, key=lambda photo: at[photo.index])

    @torch.no_grad()
    def _through(self, run: Sequence[_Ready]) -> list[Taken]:
        inputs = {key: torch.cat([photo.inputs[key] for photo in run]) for key in run[0].inputs}
        tokens = self.tower.see(inputs)
        patches = [
            self.kind.patches(len(each), self.names[photo.index], self.seed)
            for photo, each in zip(run, tokens, strict=True)
        ]
        rows = [self.kind.rows(each, chosen) for each, chosen in zip(tokens, patches, strict=True)]
        together = torch.cat(rows).to("cpu", torch.float32)  # one way off the device for the whole batch
        parts = together.split([len(each) for each in rows])
        return [
            Taken(photo.index, part, chosen, each.grid)
            for photo, part, chosen, each in zip(run, parts, patches, tokens, strict=True)
        ]


@dataclass(frozen=True)
class _Ready:
    """A photo as the tower takes it."""

    index: int
    inputs: dict[str, Tensor]


def _shape(photo: _Ready) -> object:
    return None if "image_grid_thw" in photo.inputs else photo.inputs["pixel_values"].shape


def _sentence(error: Exception) -> str:
    text = " ".join((printable(str(error)).strip() or type(error).__name__).split())
    return text if len(text) < 300 else text[:300] + "…"


def nothing_read(count: int, first: Skipped) -> TorinoError:
    """Build the error for photos of which none can be used."""
    return TorinoError(f"None of the {count:,} photos could be used. The first, {first.name}: {first.reason}")


def batches_of(numbers: range, size: int) -> Iterator[range]:
    """Cut a range into batches."""
    if size < 1:
        raise BadParameter(f"batch must be at least 1, got {size}.")
    return (numbers[start : start + size] for start in range(0, len(numbers), size))


@contextmanager
def calm() -> Generator[None]:
    """Keep warnings about photos off the screen, and what threads do to the filters of warnings out of the program."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*several frames")
        yield


def hash_of_tower(tower: Tower) -> str:
    """Says which tower this is: a hash of its weights, and of what its processor does to a photo."""
    found = hashlib.sha256(type(tower.model).__name__.encode())
    for name, weight in sorted(tower.model.state_dict().items()):
        values = weight.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        found.update(f"{name} {weight.dtype} {tuple(weight.shape)} {zlib.crc32(values):08x}\n".encode())
    told: dict[str, Any] = tower.processor.to_dict() if hasattr(tower.processor, "to_dict") else {}
    found.update(repr([(key, _plain(told.get(key))) for key in PIXELS]).encode())
    return found.hexdigest()[:16]


def _plain(value: Any) -> Any:
    """Settings of a processor without the classes that some releases wrap them in, and without empty fields."""
    if hasattr(value, "items"):
        return sorted((str(key), _plain(each)) for key, each in value.items() if each is not None)
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]  # pyright: ignore[reportUnknownVariableType]
    return float(value) if isinstance(value, int | float) else str(value)
