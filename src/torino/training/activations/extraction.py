"""Extract training rows from photos: threads decode the next photos while the tower runs."""

from __future__ import annotations

import hashlib
import warnings
import zlib
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torino.core.checks import describe_value
from torino.core.errors import BadParameter, TorinoError
from torino.datasets import Photos, SourceUnavailable, escape_surrogates
from torino.datasets.images import Padding, mean_color, open_image, prepare
from torino.datasets.prefetch import decoding_threads, prefetch
from torino.training.activations.selection import SkippedPhoto, TokenSelection
from torino.vlm.towers import Tower

# Settings of an image processor that determine the pixels a tower receives.
PIXEL_SETTINGS = (
    *("size", "crop_size", "image_mean", "image_std", "resample", "do_resize", "do_center_crop", "do_pad"),
    *("patch_size", "max_num_patches", "min_pixels", "max_pixels"),
)
MAX_REASON = 300  # characters


@dataclass(frozen=True)
class ExtractedRows:
    """Rows of a photo, in float32 on the CPU, the indices of their patches, and the patch grid."""

    index: int
    rows: Tensor
    patches: Tensor
    grid: tuple[int, int]


class RowExtractor:
    """Extract training rows from photos with one tower and one token selection.

    Parameters
    ----------
    tower : Tower
    photos : Photos
    tokens : str
        See :class:`torino.training.activations.selection.TokenSelection`.
    padding : {"crop", "square"}
    seed : int
        Seed of the random patches.
    """

    def __init__(
        self, tower: Tower, photos: Photos, tokens: str = "all", *, padding: Padding = "crop", seed: int = 0
    ) -> None:
        if not hasattr(tower, "process") or not hasattr(photos, "names"):
            raise BadParameter(
                f"Activations are extracted by a Tower from open_photos(...), got {describe_value(tower)} and "
                f"{describe_value(photos)}."
            )
        if padding not in ("crop", "square"):
            raise BadParameter(f"padding must be 'crop' or 'square', got {padding!r}.")
        self.tower, self.photos, self.seed = tower, photos, seed
        self.padding: Padding = padding
        self.selection = TokenSelection.parse(tokens)
        self.selection.check_tower(tower.has_cls, tower.origin.encoder)
        self.names = photos.names()
        self.workers = decoding_threads(next(tower.model.parameters()).device.type)

    def extract(self, batches: Iterable[Sequence[int]]) -> Generator[list[ExtractedRows | SkippedPhoto]]:
        """Yield the rows of batches of photos in order; threads decode the next batches while the tower runs.

        A photo that cannot be read, or that the tower rejects, is skipped; the others are not affected.
        """
        with closing(prefetch(batches, self._prepare, self.workers)) as prepared:
            for photos in prepared:
                yield self._extract_batch(photos)

    def rows_per_photo(self) -> int:
        """Return the number of rows per photo; for ``all``, that of the first readable photo."""
        if self.selection.count is not None:
            return self.selection.count
        first_skipped: SkippedPhoto | None = None
        for index in range(len(self.photos)):
            (result,) = self._extract_batch([self._prepare(index)])
            if isinstance(result, ExtractedRows):
                return len(result.rows)
            first_skipped = first_skipped or result
        assert first_skipped is not None  # a source has at least one photo
        raise no_usable_photo(len(self.photos), first_skipped)

    def _prepare(self, index: int) -> _PreparedPhoto | SkippedPhoto:
        """Decode and preprocess a photo; runs in a thread."""
        data = None
        try:
            data = self.photos[index].data
            picture = prepare(open_image(data), self.padding, mean_color(self.tower.processor))
            (inputs,) = self.tower.process([picture])
        except (SourceUnavailable, MemoryError, torch.OutOfMemoryError):  # not caused by this photo
            raise
        except Exception as error:  # decoders and processors raise many kinds of errors
            return SkippedPhoto(index, self.names[index], describe_failure(error, data, self.names[index]))
        return _PreparedPhoto(index, inputs)

    def _extract_batch(self, batch: Sequence[_PreparedPhoto | SkippedPhoto]) -> list[ExtractedRows | SkippedPhoto]:
        results: list[ExtractedRows | SkippedPhoto] = [photo for photo in batch if isinstance(photo, SkippedPhoto)]
        prepared = (photo for photo in batch if isinstance(photo, _PreparedPhoto))
        # as in Tower.process: neighbors that can be concatenated go through the tower together
        for _, group in groupby(prepared, key=_input_shape):
            photos = list(group)
            try:
                results += self._run_tower(photos)
            except ValueError:  # includes TorinoError; run one by one to find the photo that causes it
                for photo in photos:
                    try:
                        results += self._run_tower([photo])
                    except ValueError as error:
                        results.append(SkippedPhoto(photo.index, self.names[photo.index], _one_line(error)))
        position = {photo.index: place for place, photo in enumerate(batch)}
        return sorted(results, key=lambda result: position[result.index])

    @torch.no_grad()
    def _run_tower(self, photos: Sequence[_PreparedPhoto]) -> list[ExtractedRows]:
        inputs = {key: torch.cat([photo.inputs[key] for photo in photos]) for key in photos[0].inputs}
        tokens = self.tower.visual_tokens(inputs)
        patches = [
            self.selection.select_patches(len(image), self.names[photo.index], self.seed)
            for photo, image in zip(photos, tokens, strict=True)
        ]
        rows = [self.selection.select_rows(image, chosen) for image, chosen in zip(tokens, patches, strict=True)]
        on_cpu = torch.cat(rows).to("cpu", torch.float32)  # one transfer for the whole batch
        parts = on_cpu.split([len(image_rows) for image_rows in rows])
        return [
            ExtractedRows(photo.index, part, chosen, image.grid)
            for photo, part, chosen, image in zip(photos, parts, patches, tokens, strict=True)
        ]


@dataclass(frozen=True)
class _PreparedPhoto:
    """Inputs of the tower for one photo."""

    index: int
    inputs: dict[str, Tensor]


def _input_shape(photo: _PreparedPhoto) -> object:
    return None if "image_grid_thw" in photo.inputs else photo.inputs["pixel_values"].shape


def describe_failure(error: Exception, data: object = None, name: str = "") -> str:
    """Return on one line why a photo could not be used.

    A path of the photo is replaced by its name: a store must not contain paths of the machine it was made on.
    """
    reason = _one_line(error)
    return reason.replace(escape_surrogates(str(data)), name) if isinstance(data, Path) else reason


def _one_line(error: Exception) -> str:
    text = " ".join((escape_surrogates(str(error)).strip() or type(error).__name__).split())
    return text if len(text) < MAX_REASON else text[:MAX_REASON] + "…"


def no_usable_photo(count: int, first: SkippedPhoto) -> TorinoError:
    """Build the error for a source without any usable photo."""
    return TorinoError(f"None of the {count:,} photos could be used. The first, {first.name}: {first.reason}")


def split_batches(numbers: range, size: int) -> Iterator[range]:
    """Split a range into batches."""
    if size < 1:
        raise BadParameter(f"batch must be at least 1, got {size}.")
    return (numbers[start : start + size] for start in range(0, len(numbers), size))


@contextmanager
def ignore_frame_warnings() -> Generator[None]:
    """Ignore warnings about photos with several frames, and restore the warning filters, which threads may change."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*several frames")
        yield


def hash_tower(tower: Tower) -> str:
    """Hash the weights of a tower and the settings of its processor that affect the pixels."""
    digest = hashlib.sha256(type(tower.model).__name__.encode())
    for name, weight in sorted(tower.model.state_dict().items()):
        values = weight.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)} {zlib.crc32(values):08x}\n".encode())
    digest.update(describe_pixels(tower.processor).encode())
    return digest.hexdigest()[:16]


def describe_pixels(image_processor: Any) -> str:
    """Return the settings of an image processor that determine the pixels, as text that identifies them."""
    settings: dict[str, Any] = image_processor.to_dict() if hasattr(image_processor, "to_dict") else {}
    return repr([(key, _plain_value(settings.get(key))) for key in PIXEL_SETTINGS])


def _plain_value(value: Any) -> Any:
    """Convert a processor setting to plain types without empty fields; some releases wrap settings in classes."""
    if hasattr(value, "items"):
        return sorted((str(key), _plain_value(item)) for key, item in value.items() if item is not None)
    if isinstance(value, list | tuple):
        return [_plain_value(item) for item in value]  # pyright: ignore[reportUnknownVariableType]
    return float(value) if isinstance(value, int | float) else str(value)
