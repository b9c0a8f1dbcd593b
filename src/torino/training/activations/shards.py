"""File format of cached activations: memory-mapped shards and a card.

::

    STORE/card.json                settings, counts, mean and norms, and the checksums of the shards
    STORE/photos.jsonl             names of the photos, one per line
    STORE/skipped.txt              photos that could not be used, and why
    STORE/shards/00000.safetensors rows of the first photos, number of rows per photo, and sums; written atomically

Shard k holds the photos from k × ``photos_per_shard`` on, so any shard can be written again without the others.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torino.core.checksum import verify_safetensors
from torino.core.errors import BadFile
from torino.core.io import JSON_SHARE, read_json, write_arrays
from torino.core.safety import check_size
from torino.core.verified import VerifiedFiles
from torino.training.activations.selection import SkippedPhoto

CARD, NAMES, SKIPPED, SHARDS = "card.json", "photos.jsonl", "skipped.txt", "shards"
MAX_SHARDS = 1_000_000  # of up to 1,024 photos each
DTYPES = {"float16": torch.float16, "float32": torch.float32}
_SAFETENSORS_DTYPES = {"F16": torch.float16, "F32": torch.float32, "F64": torch.float64, "I32": torch.int32}


@dataclass(frozen=True)
class CacheSettings:
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
    width: int
    tower: str
    tokens: str
    padding: str
    seed: int
    dtype: str
    data: str
    fingerprint: str
    photos: int
    photos_per_shard: int

    @classmethod
    def from_card(cls, card: Mapping[str, Any], path: Path) -> CacheSettings:
        """Read the settings from the contents of a card."""
        try:
            return cls(**{field.name: card[field.name] for field in fields(cls)})
        except KeyError as error:
            raise BadFile(
                f"{path} is not the card of an activation store: {error} is missing. Cache activations in a new folder."
            ) from error

    @property
    def digest(self) -> str:
        """Hash of the settings, which every shard contains."""
        values = {name: value for name, value in asdict(self).items() if name != "data"}
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def shards(self) -> int:
        """Number of shards of the complete store."""
        return -(-self.photos // self.photos_per_shard)

    def photo_range(self, shard: int) -> range:
        """Return the indices of the photos of a shard."""
        return range(shard * self.photos_per_shard, min((shard + 1) * self.photos_per_shard, self.photos))

    def shard_path(self, folder: Path, shard: int) -> Path:
        """Return the path of a shard."""
        return folder / SHARDS / f"{shard:05d}.safetensors"


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
        tensors, header = _map_safetensors(path)
        if header["settings"] != digest:
            raise BadFile(f"{path} was written with other settings than its store.")
        skipped = tuple(SkippedPhoto(*entry) for entry in header["skipped"])
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
    write_arrays(path, tensors, {"torino": json.dumps(header, ensure_ascii=False)})


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


def _map_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Map the tensors of a shard into memory and read its metadata."""
    damaged = f"{path} is truncated or damaged"
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 0 < length <= size - 8:
                raise BadFile(f"{damaged}.")
            check_size(f"The header of {path}", length, JSON_SHARE)
            header: dict[str, Any] = json.loads(file.read(length))
        metadata: dict[str, Any] = json.loads(header.pop("__metadata__")["torino"])
        if {"settings", "crc32", "skipped"} - set(metadata) or {"rows", "counts", "grids", "sums"} - set(header):
            raise BadFile(f"{path} is not a shard of an activation store.")
        expected = 8 + length + max(int(entry["data_offsets"][1]) for entry in header.values())
        if size != expected:
            raise BadFile(f"{damaged}: it has {size:,} bytes instead of {expected:,}.")
        # torch maps without keeping the file open: a store may have more shards than a process may have open files
        data = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)[8 + length :]
        tensors: dict[str, Tensor] = {}
        for name, entry in header.items():
            start, stop = entry["data_offsets"]
            dtype, shape = _SAFETENSORS_DTYPES[entry["dtype"]], tuple(entry["shape"])
            if stop - start != prod(shape) * dtype.itemsize:
                raise BadFile(f"{damaged}.")
            aligned = (data.storage_offset() + start) % dtype.itemsize == 0
            part = data[start:stop] if aligned else data[start:stop].clone()
            tensors[name] = part.view(dtype).view(shape)
    except OSError as error:
        raise BadFile(f"Cannot read {path}: {error.strerror or error}.") from error
    except (ValueError, KeyError, TypeError, IndexError, RuntimeError) as error:
        if isinstance(error, BadFile):
            raise
        raise BadFile(f"{damaged} ({type(error).__name__}).") from error
    return tensors, metadata


def read_card(folder: Path) -> dict[str, Any]:
    """Read the card of a store."""
    if not (folder / CARD).is_file():
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
    shards: dict[int, Shard] = {}
    faults: dict[int, str] = {}
    verified = VerifiedFiles(folder / SHARDS)
    if settings.shards > MAX_SHARDS:
        raise BadFile(f"{folder / CARD} declares {settings.shards:,} shards; torino accepts up to {MAX_SHARDS:,}.")
    for number in range(settings.shards):
        path = settings.shard_path(folder, number)
        if not path.is_file():
            faults[number] = f"{path} is missing."
            continue
        try:
            shard = Shard.open(path, settings.digest)
            if shard.rows.shape[1] != settings.width or len(shard.counts) != len(settings.photo_range(number)):
                raise BadFile(f"{path} has the wrong width or number of photos.")
            verified.check(path, shard.verify, again=verify_again)
            shards[number] = shard
        except BadFile as error:
            faults[number] = str(error)
    verified.save()
    return shards, faults
