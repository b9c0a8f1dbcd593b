"""Folders of shards: safetensors files, each with the results of consecutive photos, read through memory maps.

Activation stores and token stores share this module. Shard k holds the photos from k × ``photos_per_shard`` on, so any
shard can be written again without the others.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, is_dataclass
from math import prod
from pathlib import Path
from typing import Any, Literal, Protocol, TypedDict, TypeVar

import torch
from torch import Tensor

from torino.core.errors import BadFile
from torino.core.safety import check_size
from torino.core.schema import JSON_SHARE, Count, check_schema, parse_json
from torino.core.verified import VerifiedFiles

SHARDS = "shards"
"""Folder of the shards, below that of the store."""
MAX_SHARDS = 1_000_000
METADATA = "torino"
"""Field of the metadata of a shard; its value is JSON."""
_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "I32": torch.int32,
}


class ShardTensor(TypedDict):
    """Location of a tensor in a shard."""

    dtype: Literal["BF16", "F16", "F32", "F64", "I32"]
    shape: list[Count]
    data_offsets: list[Count]


class ShardedSettings:
    """Base class of the settings of a folder of shards, which are dataclasses with these two fields."""

    photos: int
    photos_per_shard: int

    @property
    def digest(self) -> str:
        """Hash of the settings without the description ``data``, which every shard contains."""
        assert is_dataclass(self)
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


class VerifiableShard(Protocol):
    """A shard whose checksum can be verified."""

    def verify(self) -> None:
        """Read the whole shard, and raise :class:`BadFile` if its checksum is wrong."""
        ...


AnyShard = TypeVar("AnyShard", bound=VerifiableShard)


def open_each_shard(
    folder: Path,
    settings: ShardedSettings,
    open_shard: Callable[[int, Path], AnyShard],
    *,
    numbers: Iterable[int] | None = None,
    verify_again: bool = False,
) -> tuple[dict[int, AnyShard], dict[int, str]]:
    """Open shards of a store; return the intact ones, and a message for each of the others.

    The checksum of a shard, which needs all its data to be read, is verified once: not again until the file changes,
    unless ``verify_again``.

    Parameters
    ----------
    folder : Path
        Folder of the store.
    settings : ShardedSettings
    open_shard : callable
        Opens the shard of a number and a path, and raises :class:`BadFile` if it cannot be used.
    numbers : iterable of int, optional
        Shards to open; all by default.
    verify_again : bool
    """
    shards: dict[int, AnyShard] = {}
    faults: dict[int, str] = {}
    verified = VerifiedFiles(folder / SHARDS)
    for number in range(settings.shards) if numbers is None else numbers:
        path = settings.shard_path(folder, number)
        if not path.is_file():
            faults[number] = f"{path} is missing."
            continue
        try:
            shard = open_shard(number, path)
            verified.check(path, shard.verify, again=verify_again)
            shards[number] = shard
        except BadFile as error:
            faults[number] = str(error)
    verified.save()
    return shards, faults


def map_safetensors(
    path: Path, kind: Any, required: Collection[str], owner: str
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Map the tensors of a shard into memory and read its metadata.

    Parameters
    ----------
    path : Path
    kind : type
        Fields of the metadata, see :func:`torino.core.schema.check_schema`.
    required : collection of str
        Tensors that the shard must have.
    owner : str
        What it is a shard of, for the error message.
    """
    damaged = f"{path} is truncated or damaged"
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 0 < length <= size - 8:
                raise BadFile(f"{damaged}.")
            check_size(f"The header of {path}", length, JSON_SHARE)
            header: dict[str, Any] = parse_json(file.read(length), dict)
        texts = header.pop("__metadata__")
        check_schema(texts, dict[str, str])
        metadata: dict[str, Any] = parse_json(texts[METADATA], kind)
        check_schema(header, dict[str, ShardTensor])
        if set(required) - set(header):
            raise BadFile(f"{path} is not a shard of {owner}.")
        expected = 8 + length + max(int(entry["data_offsets"][1]) for entry in header.values())
        if size != expected:
            raise BadFile(f"{damaged}: it has {size:,} bytes instead of {expected:,}.")
        # torch maps without keeping the file open: a store may have more shards than a process may have open files
        data = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)[8 + length :]
        tensors: dict[str, Tensor] = {}
        for name, entry in header.items():
            start, stop = entry["data_offsets"]
            dtype, shape = _DTYPES[entry["dtype"]], tuple(entry["shape"])
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
