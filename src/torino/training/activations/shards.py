"""File format of cached activations: memory-mapped shards and a card.

::

    STORE/card.json                settings, counts, mean and norms, and the checksums of the shards
    STORE/photos.jsonl             names of the photos, one per line
    STORE/skipped.txt              photos that could not be used, and why
    STORE/shards/00000.safetensors rows of the first photos, number of rows per photo, and sums; written atomically

Shard k holds the photos from k × ``photos_per_shard`` on, so any shard can be written again without the others.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import torch
from torch import Tensor

from torino.core.checksum import verify_safetensors
from torino.core.errors import BadFile
from torino.core.io import check_tensors, read_json, write_arrays
from torino.core.schema import Positive, check_schema
from torino.core.shards import (
    MAX_SHARDS,
    METADATA,
    ShardedSettings,
    map_safetensors,
    open_each_shard,
)
from torino.training.activations.selection import SkippedPhoto, TokenSelection

CARD, NAMES, SKIPPED = "card.json", "photos.jsonl", "skipped.txt"
DTYPES = {"float16": torch.float16, "float32": torch.float32}


class ShardMetadata(TypedDict):
    """Metadata of a shard."""

    settings: str
    crc32: str
    skipped: list[list[Any]]


@dataclass(frozen=True)
class CacheSettings(ShardedSettings):
    """Settings that determine the rows of a store; the card contains these fields.

    Attributes
    ----------
    encoder, block, width, tower
        The tower: its name, the zero-based block of the feature layer, the width of its tokens, and a hash of its
        weights and processor.
    tokens, padding, seed
        As for :class:`torino.training.activations.extraction.RowExtractor`.
    dtype : str
        Data type of the rows on disk, ``float16`` or ``float32``.
    data, fingerprint, photos
        The photos: a description, their fingerprint, and their number.
    photos_per_shard : int
    """

    encoder: str
    block: int
    width: Positive
    tower: str
    tokens: str
    padding: str
    seed: int
    dtype: str
    data: str
    fingerprint: str
    photos: Positive
    photos_per_shard: Positive

    @classmethod
    def from_card(cls, card: Mapping[str, Any], path: Path) -> CacheSettings:
        """Read the settings from the contents of a card."""
        try:
            check_schema(card, cls)
            settings = cls(**{field.name: card[field.name] for field in fields(cls)})
            TokenSelection.parse(settings.tokens)
            if settings.dtype not in DTYPES or settings.shards > MAX_SHARDS:
                raise ValueError(f"its dtype is {settings.dtype!r} and it has {settings.shards:,} shards")
        except ValueError as error:
            raise BadFile(
                f"{path} is not the card of an activation store: {str(error).rstrip('.')}. Run the same torino "
                "activations command again, which writes the card again and keeps the shards, or use a new folder."
            ) from error
        return settings


# ------------------------------------------------------------------ shards


@dataclass(frozen=True)
class Shard:
    """Rows of consecutive photos.

    Attributes
    ----------
    path : Path
    rows : Tensor of shape (n, D)
        In the dtype of the store; memory-mapped, so a row is read from disk when it is used.
    counts : Tensor of shape (photos,), int32
        Number of rows of each photo, 0 if it was skipped.
    grids : Tensor of shape (photos, 2), int32
    patches : Tensor of shape (n,), int32, or None
        Index of the patch of each row, for random patches.
    sums : Tensor of shape (D + 2,), float64
        Sum of the rows, of their norms, and of their squared norms.
    skipped : tuple of SkippedPhoto
    crc32 : str
        Checksum of all tensors.
    """

    path: Path
    rows: Tensor
    counts: Tensor
    grids: Tensor
    patches: Tensor | None
    sums: Tensor
    skipped: tuple[SkippedPhoto, ...]
    crc32: str

    @classmethod
    def open(cls, path: Path, digest: str) -> Shard:
        """Map a shard into memory; raise :class:`BadFile` if it is truncated or has other settings."""
        tensors, header = map_safetensors(
            path, ShardMetadata, ("rows", "counts", "grids", "sums"), "an activation store"
        )
        if header["settings"] != digest:
            raise BadFile(f"{path} was written with other settings than its store.")
        entries = [dict(zip(("index", "name", "reason"), entry, strict=False)) for entry in header["skipped"]]
        try:
            check_schema(entries, list[SkippedPhoto])
        except ValueError as error:
            raise BadFile(f"{path} is damaged: skipped {error}.") from error
        skipped = tuple(SkippedPhoto(**entry) for entry in entries)
        # small tensors are copied into memory; the rows stay on disk
        small = {name: tensors[name].clone() for name in ("counts", "grids", "sums")}
        return cls(
            path, tensors["rows"], patches=tensors.get("patches"), skipped=skipped, crc32=header["crc32"], **small
        )

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Tensors by name."""
        tensors = {"rows": self.rows, "counts": self.counts, "grids": self.grids, "sums": self.sums}
        return tensors if self.patches is None else tensors | {"patches": self.patches}

    def verify(self) -> None:
        """Read the whole shard, and raise :class:`BadFile` if its checksum is wrong."""
        correct = verify_safetensors(self.path)
        if correct is None:  # shards of earlier versions have only the checksum of the tensors
            correct = _checksum(self.tensors) == self.crc32
        if not correct:
            raise BadFile(f"{self.path} is damaged: its content does not match its checksum.")


def write_shard(
    path: Path,
    digest: str,
    rows: Tensor,
    counts: Tensor,
    grids: Tensor,
    patches: Tensor | None,
    skipped: Sequence[SkippedPhoto],
) -> None:
    """Write a shard atomically."""
    tensors = {"rows": rows, "counts": counts, "grids": grids, "sums": _sum_rows(rows)}
    if patches is not None:
        tensors["patches"] = patches
    entries = [list(vars(photo).values()) for photo in skipped]
    header = {"settings": digest, "crc32": _checksum(tensors), "skipped": entries}
    write_arrays(path, tensors, {METADATA: json.dumps(header, ensure_ascii=False)})


def _sum_rows(rows: Tensor) -> Tensor:
    """Sum rows, norms and squared norms in float64; the result does not depend on the number of threads."""
    total = np.zeros(rows.shape[1] + 2)
    for part in rows.split(4096):
        values = part.numpy().astype(np.float64)
        squares = (values * values).sum(1)
        total += np.concatenate([values.sum(0), [np.sqrt(squares).sum(), squares.sum()]])
    return torch.from_numpy(total)


def _checksum(tensors: Mapping[str, Tensor]) -> str:
    crc = 0
    for name in sorted(tensors):
        values = tensors[name]
        crc = zlib.crc32(f"{name} {tuple(values.shape)}".encode(), crc)
        if values.numel():
            crc = zlib.crc32(values.contiguous().flatten().view(torch.uint8).numpy().data, crc)
    return f"{crc:08x}"


def read_card(folder: Path) -> dict[str, Any]:
    """Read the card of a store."""
    if not os.path.isfile(folder / CARD):  # noqa: PTH113 (Path raises for odd names)
        raise BadFile(
            f"{folder} is not an activation store: it has no {CARD}. Give a folder that torino activations wrote."
        )
    return read_json(folder / CARD)


def open_shards(
    folder: Path, settings: CacheSettings, *, verify_again: bool = False
) -> tuple[dict[int, Shard], dict[int, str]]:
    """Open the shards of a store; return the intact ones, and a message for each of the others.

    The checksum of a shard, which needs all its data to be read, is verified once: not again until the file changes,
    unless ``verify_again``.
    """
    if settings.shards > MAX_SHARDS:
        raise BadFile(f"{folder / CARD} declares {settings.shards:,} shards; torino accepts up to {MAX_SHARDS:,}.")

    def open_shard(number: int, path: Path) -> Shard:
        shard = Shard.open(path, settings.digest)
        _check_shard(shard, settings, len(settings.photo_range(number)))
        return shard

    return open_each_shard(folder, settings, open_shard, verify_again=verify_again)


def _check_shard(shard: Shard, settings: CacheSettings, photos: int) -> None:
    """Raise :class:`BadFile` unless the tensors of a shard have the right shapes and types, and fit each other."""
    rows = len(shard.rows) if shard.rows.ndim else 0
    expected = {
        "rows": torch.empty(rows, settings.width, dtype=DTYPES[settings.dtype], device="meta"),
        "counts": torch.empty(photos, dtype=torch.int32, device="meta"),
        "grids": torch.empty(photos, 2, dtype=torch.int32, device="meta"),
        "sums": torch.empty(settings.width + 2, dtype=torch.float64, device="meta"),
    }
    if settings.tokens.startswith("random"):
        expected["patches"] = torch.empty(rows, dtype=torch.int32, device="meta")
    try:
        check_tensors(shard.tensors, expected)
        if bool((shard.counts < 0).any()) or int(shard.counts.sum()) != rows:
            raise ValueError(f"it has {rows} rows, but the numbers of rows per photo do not add up to that")
        if not bool(shard.sums.isfinite().all()) or bool((shard.sums[-2:] < 0).any()):
            raise ValueError("its sums are not valid")
    except ValueError as error:
        raise BadFile(f"{shard.path} is damaged: {error}.") from error
