"""Damaged activation stores, checkpoints, sweeps and top activations."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save

from tests.support.colored_squares import make_tied_sae, make_tied_tokens
from tests.support.fuzzing import FuzzCase, fuzz
from torino import SAE
from torino.core.io import write_arrays
from torino.core.topk.prefilter import quantize
from torino.core.topk.prefilter.quantization import FORMAT, _read_cached, hash_tensors
from torino.interpret import PrecomputedPhotos, TopActivations, collect_top_activations, name_concepts
from torino.interpret.top_activations import FILE, PARTIAL_FILE
from torino.training.activations.base import InMemory
from torino.training.activations.cache import _prepare_store, _read_settings
from torino.training.activations.selection import SkippedPhoto
from torino.training.activations.shards import CacheSettings, _checksum, write_shard
from torino.training.activations.store import Store
from torino.training.config import TrainConfig
from torino.training.sweep import sweep
from torino.training.trainer import train

WIDTH = 4
SETTINGS = CacheSettings("tiny/clip", 3, WIDTH, "0123", "all", "crop", 0, "float16", "5 photos", "abcd", 5, 3)
CONFIG = TrainConfig(kind="matryoshka", latents=16, k=2, steps=6, batch=8, dead_after=20)


# ------------------------------------------------------------------ activation stores


def write_store(folder: Path, settings: CacheSettings = SETTINGS) -> None:
    generator = torch.Generator().manual_seed(0)
    for number in range(settings.shards):
        indices = settings.photo_range(number)
        counts = [0 if index == 2 else 2 for index in indices]
        rows = torch.randn(sum(counts), WIDTH, generator=generator).half()
        grids = torch.tensor([(1, count) if count else (0, 0) for count in counts], dtype=torch.int32)
        patches = torch.arange(len(rows), dtype=torch.int32) % 2 if settings.tokens != "all" else None
        skipped = [SkippedPhoto(2, "photo 2", "It is broken.")] if 2 in indices else []
        path = settings.shard_path(folder, number)
        write_shard(path, settings.digest, rows, torch.tensor(counts, dtype=torch.int32), grids, patches, skipped)
    (folder / "photos.jsonl").write_text("".join(json.dumps(f"photo {i}") + "\n" for i in range(settings.photos)))
    summary = Store(folder, settings, {}).summary() | {"complete": True}
    card = {"format": "torino activations 1", **vars(settings), "given": {"data": "photos"}, **summary}
    (folder / "card.json").write_text(json.dumps(card))


def reseal_shard(content: bytes) -> bytes:
    """Correct the checksum of the tensors of a shard; return content that is not a shard as it is."""
    try:
        tensors, length = load(content), int.from_bytes(content[:8], "little")
        texts = json.loads(content[8 : 8 + length])["__metadata__"]
        metadata = json.loads(texts["torino"])
        texts["torino"] = json.dumps({**metadata, "crc32": _checksum(tensors)})
        return save(tensors, texts)
    except Exception:  # damaged
        return content


def write_random_store(folder: Path) -> None:
    write_store(folder, replace(SETTINGS, tokens="random:2"))


def use_store(folder: Path) -> None:
    for incomplete in (True, False):
        store = Store.open(folder, allow_incomplete=incomplete)
        repr(store)
        json.dumps(store.summary(), allow_nan=False)
        json.dumps(store.metadata)
        assert store.batch(3, 4).shape == (4, store.width)
        for photo in range(store.settings.photos):
            assert len(store.photo_rows(photo)) == len(store.row_range(photo))
            store.photo_grid(photo)
        store.locate_rows(range(store.rows))
        assert all(isinstance(name, str) for name in store.names)
        [f"{photo.name}\t{photo.reason}" for photo in store.skipped]


def continue_store(folder: Path) -> None:
    """Read a store as ``torino activations`` does before it continues it."""
    _read_settings(folder)
    _prepare_store(folder, SETTINGS, [f"photo {index}" for index in range(5)], {}, repair=True)


# ------------------------------------------------------------------ training


def make_activations() -> InMemory:
    return InMemory(torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(1)))


class Stop(Exception):
    """Ends a run in the middle."""


def write_stopped_run(folder: Path) -> None:
    def stop(step: int, report: Any) -> None:
        if step == 5:
            raise Stop

    with suppress(Stop):
        train(make_activations(), CONFIG, folder, save_every=2, log_every=1, callback=stop)
    assert len(list((folder / "training").glob("step-*"))) == 2


def write_single_checkpoint(folder: Path) -> None:
    write_stopped_run(folder)
    (folder / "training" / "step-00000002.safetensors").unlink()


def resume_training(folder: Path) -> None:
    result = train(make_activations(), CONFIG, folder, save_every=2, log_every=1)
    SAE.load(folder)
    json.dumps(dict(result.metrics))


def write_sweep(folder: Path) -> None:
    run_sweep(folder)


def run_sweep(folder: Path) -> None:
    rows = make_activations().tokens
    sweep(make_activations(), CONFIG, [4], folder, heldout=lambda: [rows[:6]], heldout_name="six", save_every=2)
    sweep(make_activations(), CONFIG, [4], folder, save_every=2)


# ------------------------------------------------------------------ top activations and the prefilter


def write_top_activations(folder: Path) -> None:
    collect_top_activations(make_tied_sae(), PrecomputedPhotos(make_tied_tokens()), keep=4, output=folder)


def use_top_activations(folder: Path) -> None:
    top = TopActivations.load(folder / FILE)
    str(top.monosemanticity)
    top.monosemanticity.chance_adjusted.tolist()
    for values in (top.patch_share, top.photo_share, top.mean_activation):
        assert values.shape == (top.latents,)
    for latent in range(top.latents):
        top.get_patches(latent)
        for rank, (photo, _) in enumerate(top.get_photos(latent)):
            height, width = top.grids[photo].tolist()
            patches, _ = top.get_map(latent, rank)
            assert len(patches) == 0 or int(patches.max()) < height * width
    name_concepts(top, [["a dog"]] * len(top.grids))
    collect_top_activations(make_tied_sae(), PrecomputedPhotos(make_tied_tokens()), keep=4, output=folder)


class StoppedPhotos(PrecomputedPhotos):
    """Photos that cannot be read after the first ones."""

    def read(self, start: int, stop: int) -> Any:
        if start >= 12:
            raise Stop
        return super().read(start, stop)


OPTIONS: dict[str, Any] = {"keep": 4, "batch": 4, "save_every": 0}


def write_partial(folder: Path) -> None:
    with suppress(Stop):
        collect_top_activations(make_tied_sae(), StoppedPhotos(make_tied_tokens()), output=folder, **OPTIONS)
    assert (folder / PARTIAL_FILE).is_file()


def continue_partial(folder: Path) -> None:
    collect_top_activations(make_tied_sae(), PrecomputedPhotos(make_tied_tokens()), output=folder, **OPTIONS)
    use_top_activations(folder)


WEIGHT = torch.randn(40, 64, generator=torch.Generator().manual_seed(0))


def write_quantized(folder: Path) -> None:
    tensors = quantize(WEIGHT, torch.zeros(40)).tensors()
    metadata = {"format": FORMAT, "weights_sha256": hash_tensors({"weight": WEIGHT}), "sha256": hash_tensors(tensors)}
    write_arrays(folder / "prefilter.safetensors", tensors, metadata)


def use_quantized(folder: Path) -> None:
    cached = _read_cached(folder / "prefilter.safetensors", hash_tensors({"weight": WEIGHT}), WEIGHT, 64)
    if cached is not None:
        expected = quantize(WEIGHT, torch.zeros(40)).tensors()
        assert all(torch.equal(value, expected[name]) for name, value in cached.tensors().items())


CASES = [
    *(
        FuzzCase("store", write_store, file, use_store)
        for file in ("card.json", "photos.jsonl", "shards/00000.safetensors")
    ),
    FuzzCase("store", write_store, "shards/00001.safetensors", use_store, reseal=reseal_shard),
    FuzzCase("random-store", write_random_store, "shards/00001.safetensors", use_store, reseal=reseal_shard),
    *(
        FuzzCase("continue", write_store, file, continue_store)
        for file in ("card.json", "photos.jsonl", "shards/00000.safetensors")
    ),
    *(
        FuzzCase("training", write_stopped_run, f"training/{file}", resume_training, cost=4)
        for file in ("run.json", "log.jsonl", "step-00000004.safetensors")
    ),
    FuzzCase("checkpoint", write_single_checkpoint, "training/step-00000004.safetensors", resume_training, cost=4),
    *(
        FuzzCase("sweep", write_sweep, f"x4/training/{file}", run_sweep, cost=2)
        for file in ("run.json", "heldout.json")
    ),
    FuzzCase("concepts", write_top_activations, FILE, use_top_activations, cost=2),
    FuzzCase("concepts", write_partial, PARTIAL_FILE, continue_partial, cost=2),
    FuzzCase("prefilter", write_quantized, "prefilter.safetensors", use_quantized),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_valid_files_are_read(case: FuzzCase) -> None:
    case.run(None)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_damaged_files_raise_only_torino_errors(case: FuzzCase) -> None:
    fuzz(case)
