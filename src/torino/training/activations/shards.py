"""Shards: how activations lie on the disk. Rows are mapped into memory, and a card says what they are.

::

    STORE/card.json                what was harvested, counts, mean and norms, and the shards with their checksums
    STORE/photos.jsonl             the names of the photos, one to a line
    STORE/skipped.txt              photos that could not be used, and why
    STORE/shards/00000.safetensors rows of the first photos, how many each gave, and their sums; whole or not there

Shard k holds the photos from k × ``photos_per_shard`` on, so any shard can be made anew without the others.
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

from torino.core.errors import BadFile
from torino.core.io import read_json, write_arrays
from torino.training.activations.selection import Skipped

CARD, NAMES, SKIPPED, SHARDS = "card.json", "photos.jsonl", "skipped.txt", "shards"
DTYPES = {"float16": torch.float16, "float32": torch.float32}
_TYPES = {"F16": torch.float16, "F32": torch.float32, "F64": torch.float64, "I32": torch.int32}


@dataclass(frozen=True)
class CacheSettings:
    """What decides on the rows of a store; the card holds these fields.

    Attributes
    ----------
    encoder, block, width, tower
        The tower: its name, the block tapped, the width of its tokens, and a hash of its weights and processor.
    tokens, padding, seed
        As for :class:`torino.training.activations.extraction.Looker`.
    dtype : str
        Of the rows on disk, ``float16`` or ``float32``.
    data, fingerprint, photos
        The photos: a line of words, their fingerprint, and how many.
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
    def of(cls, card: Mapping[str, Any], path: Path) -> CacheSettings:
        """Take the settings out of a card."""
        try:
            return cls(**{field.name: card[field.name] for field in fields(cls)})
        except KeyError as error:
            raise BadFile(f"{path} is not the card of a store: it lacks {error}. Harvest into a new folder.") from error

    @property
    def digest(self) -> str:
        """A hash that every shard carries."""
        told = {name: value for name, value in asdict(self).items() if name != "data"}
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def shards(self) -> int:
        """How many shards there are in all."""
        return -(-self.photos // self.photos_per_shard)

    def range_of(self, shard: int) -> range:
        """Photos of a shard."""
        return range(shard * self.photos_per_shard, min((shard + 1) * self.photos_per_shard, self.photos))

    def file_of(self, folder: Path, shard: int) -> Path:
        """Where a shard lies."""
        return folder / SHARDS / f"{shard:05d}.safetensors"


# ------------------------------------------------------------------ shards


@dataclass(frozen=True)
class Shard:
    """The rows of some photos.

    Attributes
    ----------
    rows : Tensor of shape (n, D)
        In the dtype of the store; mapped, so a row is read from the disk when it is asked for.
    counts : Tensor of shape (photos,), int32
        Rows of each photo, 0 for one that was skipped.
    grids : Tensor of shape (photos, 2), int32
    patches : Tensor of shape (n,), int32, or None
        Number of the patch of each row, for random ones.
    sums : Tensor of shape (D + 2,), float64
        Sum of the rows, of their norms, and of their squared norms.
    skipped : tuple of Skipped
    crc32 : str
        Of everything above.
    """

    path: Path
    rows: Tensor
    counts: Tensor
    grids: Tensor
    patches: Tensor | None
    sums: Tensor
    skipped: tuple[Skipped, ...]
    crc32: str

    @classmethod
    def open(cls, path: Path, digest: str) -> Shard:
        """Map a shard; one that is cut off, or of other settings, is a :class:`BadFile`."""
        tensors, told = _mapped(path)
        if told["settings"] != digest:
            raise BadFile(f"{path} was harvested with other settings than its store.")
        skipped = tuple(Skipped(*each) for each in told["skipped"])
        patches = tensors.get("patches")
        # what is small is taken into memory; the rows stay on the disk
        small = {name: tensors[name].clone() for name in ("counts", "grids", "sums")}
        return cls(path, tensors["rows"], patches=patches, skipped=skipped, crc32=told["crc32"], **small)

    @property
    def parts(self) -> dict[str, Tensor]:
        """Its tensors by name."""
        parts = {"rows": self.rows, "counts": self.counts, "grids": self.grids, "sums": self.sums}
        return parts if self.patches is None else parts | {"patches": self.patches}

    def whole(self) -> bool:
        """Whether the checksum is right; reads all of the shard."""
        return _checksum(self.parts) == self.crc32


def write_shard(
    path: Path,
    digest: str,
    rows: Tensor,
    counts: Tensor,
    grids: Tensor,
    patches: Tensor | None,
    skipped: Sequence[Skipped],
) -> None:
    """Write a shard, whole or not at all."""
    tensors = {"rows": rows, "counts": counts, "grids": grids, "sums": _sums(rows)}
    if patches is not None:
        tensors["patches"] = patches
    told = {"settings": digest, "crc32": _checksum(tensors), "skipped": [list(vars(each).values()) for each in skipped]}
    # one field: the order of several would differ from run to run
    write_arrays(path, tensors, {"torino": json.dumps(told, ensure_ascii=False)})


def _sums(rows: Tensor) -> Tensor:
    """Sum of rows, norms and squared norms in float64, in an order that no number of threads changes."""
    total = np.zeros(rows.shape[1] + 2)
    for part in rows.split(4096):
        values = part.numpy().astype(np.float64)
        squares = (values * values).sum(1)
        total += np.concatenate([values.sum(0), [np.sqrt(squares).sum(), squares.sum()]])
    return torch.from_numpy(total)


def _checksum(tensors: Mapping[str, Tensor]) -> str:
    found = 0
    for name in sorted(tensors):
        values = tensors[name]
        found = zlib.crc32(f"{name} {tuple(values.shape)}".encode(), found)
        if values.numel():
            found = zlib.crc32(values.contiguous().flatten().view(torch.uint8).numpy().data, found)
    return f"{found:08x}"


def _mapped(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a safetensors file where they lie on the disk, and what it says about itself."""
    damaged = f"{path} is cut off or damaged"
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 0 < length <= size - 8:
                raise BadFile(f"{damaged}.")
            header: dict[str, Any] = json.loads(file.read(length))
        told: dict[str, Any] = json.loads(header.pop("__metadata__")["torino"])
        if {"settings", "crc32", "skipped"} - set(told) or {"rows", "counts", "grids", "sums"} - set(header):
            raise BadFile(f"{path} is no shard of a store.")
        if size != 8 + length + max(int(entry["data_offsets"][1]) for entry in header.values()):
            raise BadFile(f"{damaged}: it has {size:,} bytes and should have more or less.")
        # torch maps without keeping the file open: a store may have more shards than a process may have open files
        data = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)[8 + length :]
        tensors: dict[str, Tensor] = {}
        for name, entry in header.items():
            start, stop = entry["data_offsets"]
            dtype, shape = _TYPES[entry["dtype"]], tuple(entry["shape"])
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
    return tensors, told


def read_card(folder: Path) -> dict[str, Any]:
    """Read the card of a store."""
    if not (folder / CARD).is_file():
        raise BadFile(f"{folder} holds no store: there is no {CARD} in it. Give a folder that torino harvest wrote.")
    return read_json(folder / CARD)


def open_shards(
    folder: Path, settings: CacheSettings, *, thorough: bool = False
) -> tuple[dict[int, Shard], dict[int, str]]:
    """Open the shards of a store: those that are whole, and a sentence for each that is not.

    Sizes and headers are always checked; checksums, for which all is read, if ``thorough``.
    """
    shards: dict[int, Shard] = {}
    faults: dict[int, str] = {}
    for number in range(settings.shards):
        path = settings.file_of(folder, number)
        if not path.is_file():
            faults[number] = f"{path} is missing."
            continue
        try:
            shard = Shard.open(path, settings.digest)
            if shard.rows.shape[1] != settings.width or len(shard.counts) != len(settings.range_of(number)):
                raise BadFile(f"{path} does not hold what it should.")
            if thorough and not shard.whole():
                raise BadFile(f"{path} is damaged: its checksum is not {shard.crc32}.")
            shards[number] = shard
        except BadFile as error:
            faults[number] = str(error)
    return shards, faults
