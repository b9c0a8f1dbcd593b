"""File format of token stores: memory-mapped shards and a manifest.

::

    STORE/manifest.json            settings, counts, and the checksums of the shards
    STORE/skipped.txt              images that could not be used, and why
    STORE/shards/00000.safetensors tokens of the first images, and what they stand for; written atomically

A shard contains, for its n images with T tokens of width E in total:

==========  ======  =========  ==================================================================================
tensor      shape   type       content
==========  ======  =========  ==================================================================================
tokens      (T, E)  any float  what the language model receives, image after image
lengths     (n,)    int32      tokens of each image; 0 for an image that could not be used
full        (n,)    int32      placeholders of each image in a prompt with all tokens
grids       (n, 2)  int32      patch grid of each image: rows and columns
anchors     (T,)    int32      the placeholder, counted from 0, whose position the token takes. Without registers it is
                               the patch that the token is anchored at
masses      (T,)    int32      number of patches that the token represents, at least 1
concepts    (T,)    int32      the concept that most of these patches share; −1 for none
==========  ======  =========  ==================================================================================

Its metadata holds the names of the images, those that were skipped with the reason, and a hash of the settings.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypedDict

import torch
from torch import Tensor

from torino.core.checksum import damaged_file, verify_safetensors
from torino.core.errors import BadFile
from torino.core.io import check_tensors, read_json, write_arrays
from torino.core.schema import Positive, check_schema
from torino.core.shards import MAX_SHARDS, METADATA, ShardedSettings, map_safetensors, open_each_shard
from torino.training.activations.selection import SkippedPhoto

MANIFEST, SKIPPED = "manifest.json", "skipped.txt"
FORMAT = "torino tokens 1"
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
PER_IMAGE = ("lengths", "full", "grids")
PER_TOKEN = ("anchors", "masses", "concepts")


class TokenShardMetadata(TypedDict):
    """Metadata of a shard."""

    settings: str
    names: list[str]
    skipped: list[list[Any]]


@dataclass(frozen=True)
class StoreSettings(ShardedSettings):
    """Settings that determine the bytes of a store; the manifest contains these fields.

    Attributes
    ----------
    hash : str
        :meth:`torino.serving.settings.ReductionSettings.hash` of the reduction and the model.
    reduction : dict
        :class:`~torino.serving.settings.ReductionSettings` as JSON; the SAE by its name, without folders.
    method : str
        The reducer with its parameters.
    model, family, model_hash : str
        Name of the model, its ``model_type``, and a hash of its tower, projector and image processor.
    width : int
        Width E of a token.
    positions : {"compact", "original"}
    proportional : bool
        How the tokens are to be presented to the language model.
    dtype : {"float16", "bfloat16", "float32"}
        Data type of the tokens on disk.
    batch, threads : int
        Images per forward pass, and CPU threads of each process; others would change the last digits of the tokens.
    data, fingerprint, sample : str
        The images: a description, a hash of their names and sizes, and a hash of the contents of a few of them.
    photos, photos_per_shard : int
    """

    hash: str
    reduction: dict[str, Any]
    method: str
    model: str
    family: str
    model_hash: str
    width: Positive
    positions: str
    proportional: bool
    dtype: str
    batch: Positive
    threads: Positive
    data: str
    fingerprint: str
    sample: str
    photos: Positive
    photos_per_shard: Positive

    @classmethod
    def from_manifest(cls, manifest: Mapping[str, Any], path: Path) -> StoreSettings:
        """Read the settings from the contents of a manifest."""
        try:
            check_schema(manifest, cls)
            settings = cls(**{field.name: manifest[field.name] for field in fields(cls)})
            if settings.dtype not in DTYPES or settings.shards > MAX_SHARDS:
                raise ValueError(f"its dtype is {settings.dtype!r} and it has {settings.shards:,} shards")
            if settings.positions not in ("compact", "original"):
                raise ValueError(f"its positions are {settings.positions!r}")
        except ValueError as error:
            raise BadFile(
                f"{path} is not the manifest of a token store: {str(error).rstrip('.')}. Delete it and run the same "
                "torino reduce command again, which keeps the shards, or use a new folder."
            ) from error
        return settings


@dataclass(frozen=True)
class TokenShard:
    """Tokens of consecutive images; see the table of the module :mod:`torino.serving.store.format`.

    Attributes
    ----------
    path : Path
    tokens : Tensor of shape (T, E)
        In the data type of the store.
    anchors, masses, concepts : Tensor of shape (T,), int32
        These and the tokens are memory-mapped: they are read from disk when they are used.
    lengths, full, grids : Tensor, int32
    names : tuple of str
        Names of the images.
    skipped : tuple of SkippedPhoto
    """

    path: Path
    tokens: Tensor
    lengths: Tensor
    full: Tensor
    grids: Tensor
    anchors: Tensor
    masses: Tensor
    concepts: Tensor
    names: tuple[str, ...]
    skipped: tuple[SkippedPhoto, ...]

    @classmethod
    def open(cls, path: Path, settings: StoreSettings, number: int) -> TokenShard:
        """Map a shard into memory; raise :class:`BadFile` if it is truncated, inconsistent or has other settings."""
        tensors, metadata = map_safetensors(
            path, TokenShardMetadata, ("tokens", *PER_IMAGE, *PER_TOKEN), "a token store"
        )
        if metadata["settings"] != settings.digest:
            raise BadFile(f"{path} was written with other settings than its store.")
        entries = [dict(zip(("index", "name", "reason"), entry, strict=False)) for entry in metadata["skipped"]]
        photos = len(settings.photo_range(number))
        rows = len(tensors["tokens"]) if tensors["tokens"].ndim else 0
        try:
            check_schema(entries, list[SkippedPhoto])
            check_schema(metadata["names"], list[str])
            check_tensors(tensors, _expected(settings, photos, rows))
            _check_counts(tensors, len(metadata["names"]), photos, rows)
        except ValueError as error:
            raise BadFile(f"{path} is damaged: {error}.") from error
        # a few numbers per image are copied into memory; everything per token stays on disk
        mapped = {name: tensors[name] for name in ("tokens", *PER_TOKEN)}
        small = {name: tensors[name].clone() for name in PER_IMAGE}
        skipped = tuple(SkippedPhoto(**entry) for entry in entries)
        return cls(path, **mapped, **small, names=tuple(metadata["names"]), skipped=skipped)

    def verify(self) -> None:
        """Read the whole shard, and raise :class:`BadFile` if its checksum is wrong or a label is invalid."""
        if not verify_safetensors(self.path):
            raise damaged_file(self.path)
        if not len(self.tokens):
            return
        limit, anchors = self.full.repeat_interleave(self.lengths), self.anchors
        if bool((anchors < 0).any()) or bool((anchors >= limit).any()):
            raise BadFile(f"{self.path} is damaged: an anchor is not a placeholder of its image.")
        if int(self.masses.min()) < 1 or int(self.concepts.min()) < -1:
            raise BadFile(f"{self.path} is damaged: a mass or a concept is out of range.")


def write_token_shard(
    path: Path,
    settings: StoreSettings,
    tensors: Mapping[str, Tensor],
    names: Sequence[str],
    skipped: Sequence[SkippedPhoto],
) -> None:
    """Write a shard atomically; the same content gives the same bytes."""
    metadata = {
        "settings": settings.digest,
        "names": list(names),
        "skipped": [[photo.index, photo.name, photo.reason] for photo in skipped],
    }
    write_arrays(path, tensors, {METADATA: json.dumps(metadata, ensure_ascii=False)})


def _expected(settings: StoreSettings, photos: int, rows: int) -> dict[str, Tensor]:
    def like(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    return {
        "tokens": like(rows, settings.width, dtype=DTYPES[settings.dtype]),
        "lengths": like(photos),
        "full": like(photos),
        "grids": like(photos, 2),
        **{name: like(rows) for name in PER_TOKEN},
    }


def _check_counts(tensors: Mapping[str, Tensor], names: int, photos: int, rows: int) -> None:
    """Raise ``ValueError`` unless the numbers per image of a shard fit each other."""
    lengths, full = tensors["lengths"].long(), tensors["full"].long()
    if names != photos:
        raise ValueError(f"it has {names} names for {photos} images")
    if bool((lengths < 0).any()) or int(lengths.sum()) != rows:
        raise ValueError(f"it has {rows} tokens, but the numbers of tokens per image do not add up to that")
    if bool((full < 0).any()) or bool(((lengths > 0) != (full > 0)).any()):
        raise ValueError("its numbers of placeholders are not valid")


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest of a store."""
    if not os.path.isfile(folder / MANIFEST):  # noqa: PTH113 (Path raises for odd names)
        raise BadFile(f"{folder} is not a token store: it has no {MANIFEST}. Give a folder that torino reduce wrote.")
    return read_json(
        folder / MANIFEST, version=FORMAT, fix="Delete it and run the same torino reduce command again to write it."
    )


def open_token_shards(
    folder: Path, settings: StoreSettings, numbers: Sequence[int] | None = None, *, verify_again: bool = False
) -> tuple[dict[int, TokenShard], dict[int, str]]:
    """Open shards of a store and verify them; return the intact ones, and a message for each of the others."""

    def open_shard(number: int, path: Path) -> TokenShard:
        return TokenShard.open(path, settings, number)

    return open_each_shard(folder, settings, open_shard, numbers=numbers, verify_again=verify_again)
