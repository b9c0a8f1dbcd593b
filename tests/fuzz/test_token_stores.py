"""Damaged token stores."""

from __future__ import annotations

import json
import re
import zlib
from pathlib import Path

import pytest
import torch

from tests.support.fuzzing import FuzzCase, fuzz
from torino.serving.store import TokenStore, collate
from torino.serving.store.format import StoreSettings, open_token_shards, write_token_shard
from torino.serving.store.write import _describe_shards, _write_manifest
from torino.training.activations.selection import SkippedPhoto

SETTINGS = StoreSettings(
    hash="0123",
    reduction={"method": "none"},
    method="none",
    model="tiny/llava",
    family="llava",
    model_hash="4567",
    width=4,
    positions="original",
    proportional=True,
    dtype="float16",
    batch=2,
    threads=1,
    data="5 photos",
    fingerprint="89ab",
    sample="cdef",
    photos=5,
    photos_per_shard=3,
)


def write_store(folder: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    for number in range(SETTINGS.shards):
        indices = SETTINGS.photo_range(number)
        lengths = [0 if index == 2 else 2 for index in indices]
        rows = sum(lengths)
        tensors = {
            "tokens": torch.randn(rows, SETTINGS.width, generator=generator).half(),
            "lengths": torch.tensor(lengths, dtype=torch.int32),
            "full": torch.tensor([2 * length for length in lengths], dtype=torch.int32),
            "grids": torch.tensor([(2, length) for length in lengths], dtype=torch.int32),
            "anchors": torch.arange(rows, dtype=torch.int32) % 2,
            "masses": torch.ones(rows, dtype=torch.int32),
            "concepts": torch.arange(-1, rows - 1, dtype=torch.int32),
        }
        skipped = [SkippedPhoto(2, "photo 2", "It is broken.")] if 2 in indices else []
        path = SETTINGS.shard_path(folder, number)
        write_token_shard(path, SETTINGS, tensors, [f"photo {index}" for index in indices], skipped)
    shards, _ = open_token_shards(folder, SETTINGS)
    _write_manifest(folder, SETTINGS, _describe_shards(list(shards.values())))


def use_store(folder: Path) -> None:
    store = TokenStore(folder)
    repr(store)
    images = list(store)
    assert len(images) == len(store.names) == len(store.lengths)
    for image in images:
        assert image.tokens.shape == (len(image), store.width)
        assert bool((image.anchors < image.full).all())
    if images:
        collate(images)
        collate(images, "packed")
    store.verify()


def reseal_shard(content: bytes) -> bytes:
    """Correct the checksum in the header of a shard, if there is one."""
    found = re.search(rb'"checksum":"crc32:([0-9a-f]{8})"', content)
    if found is None:
        return content
    unset = content[: found.start(1)] + b"00000000" + content[found.end(1) :]
    return content[: found.start(1)] + b"%08x" % zlib.crc32(unset) + content[found.end(1) :]


def reseal_manifest(content: bytes) -> bytes:
    """Remove the checksum of a manifest that is still JSON."""
    try:
        value = json.loads(content)
        return json.dumps({name: item for name, item in value.items() if name != "checksum"}).encode()
    except Exception:  # damaged
        return content


CASES = [
    FuzzCase("token-store", write_store, "manifest.json", use_store),
    FuzzCase("token-store-unsealed", write_store, "manifest.json", use_store, reseal=reseal_manifest),
    FuzzCase("token-store", write_store, "shards/00000.safetensors", use_store),
    FuzzCase("token-store-resealed", write_store, "shards/00001.safetensors", use_store, reseal=reseal_shard),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_valid_files_are_read(case: FuzzCase) -> None:
    case.run(None)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_damaged_files_raise_only_torino_errors(case: FuzzCase) -> None:
    fuzz(case)
