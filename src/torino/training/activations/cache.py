"""Cache activations: run photos through a tower and write its tokens to a store, shard by shard."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torino.core.checks import expand_path, to_integer
from torino.core.checksum import with_checksum
from torino.core.errors import BadFile, BadParameter, BadTokens
from torino.core.shards import SHARDS
from torino.datasets import Photos, hash_sample
from torino.datasets.images import Padding
from torino.training.activations.extraction import (
    ExtractedRows,
    RowExtractor,
    hash_tower,
    ignore_frame_warnings,
    no_usable_photo,
    split_batches,
)
from torino.training.activations.selection import SkippedPhoto
from torino.training.activations.shards import (
    CARD,
    DTYPES,
    NAMES,
    SKIPPED,
    CacheSettings,
    open_shards,
    read_card,
    write_shard,
)
from torino.training.activations.store import Store
from torino.training.files import lock_folder, prepare_folder, write_text
from torino.vlm.towers import Tower

SHARD_ROWS = 65536
MAX_SHARD_PHOTOS = 1024  # a resumed run repeats at most this many photos
# Settings that must not change when a store is continued, and how the error message names them.
SETTING_LABELS = {
    "encoder": "tower {!r}",
    "block": "block {}",
    "width": "tokens of width {}",
    "tower": "a tower whose weights and processor have the hash {}",
    "tokens": "tokens {}",
    "padding": "padding {}",
    "seed": "seed {}",
    "dtype": "dtype {}",
    "photos": "{:,} photos",
    "fingerprint": "photos with the fingerprint {}",
}


def cache_activations(
    tower: Tower,
    photos: Photos,
    folder: str | Path,
    *,
    tokens: str = "all",
    padding: Padding = "crop",
    seed: int = 0,
    dtype: str = "float16",
    batch: int = 16,
    shard_rows: int = SHARD_ROWS,
    repair: bool = False,
    source: Mapping[str, Any] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Store:
    """Run photos through a tower and write its tokens to a store on disk.

    A run that was interrupted or killed continues after its last complete shard when it is called again with the same
    arguments, and ends with the same bytes as an uninterrupted run. Missing or truncated shards are written again; a
    complete store is returned as it is.

    Parameters
    ----------
    tower : Tower
    photos : Photos
    folder : str or path
        Folder of the store: new, empty, or from an earlier run.
    tokens : str
        ``cls``, ``random:R`` or ``all``.
    padding : {"crop", "square"}
        See :func:`torino.datasets.images.prepare`.
    seed : int
        Seed of the random patches.
    dtype : {"float16", "float32"}
        Data type on disk.
    batch : int
        Number of photos per forward pass. Another batch size changes the last digits of the activations.
    shard_rows : int
        Approximate number of rows per shard, with at most 1,024 photos. A resumed run repeats at most one shard.
    repair : bool
        Verify the checksums of all existing shards, and write damaged ones again.
    source : mapping, optional
        How the user specified the tower and the photos; copied to the card.
    progress : callable, optional
        Called with the number of photos that are done, including earlier runs, and the number skipped in this run.

    Raises
    ------
    BadParameter
        If the store was started with other settings.
    BadTokens
        If a value is too large for half precision.
    BadFile
        If the disk is full or the folder cannot be written; finished shards are kept, and the run can be continued.
    """
    folder = expand_path(folder, "The folder of the store")
    if dtype not in DTYPES:
        raise BadParameter(f"dtype must be float16 or float32, got {dtype!r}.")
    if (shard_rows := to_integer("shard_rows", shard_rows)) < 1:
        raise BadParameter(f"shard_rows must be at least 1, got {shard_rows}.")
    split_batches(range(0), batch)  # raises if batch is invalid
    extractor = RowExtractor(tower, photos, tokens, padding=padding, seed=seed)
    with _lock_store(folder), ignore_frame_warnings():
        existing = _read_settings(folder)
        if existing is None:
            photos_per_shard = max(1, min(shard_rows // extractor.rows_per_photo(), MAX_SHARD_PHOTOS))
        else:
            photos_per_shard = existing.photos_per_shard
        settings = _make_settings(extractor, dtype, photos_per_shard)
        sample = hash_sample(photos)
        if existing is not None:
            _check_same_settings(existing, settings, folder)
            _check_same_photos(folder, sample)
        facts = {"sample": sample, "given": dict(source or {})}
        missing = _prepare_store(folder, settings, extractor.names, facts, repair)
        try:
            _write_shards(folder, settings, extractor, missing, batch, progress)
        except BadFile as error:
            kept = sum(len(settings.photo_range(number)) for number in open_shards(folder, settings)[0])
            raise BadFile(
                f"{error} {kept:,} of {settings.photos:,} photos are saved in {folder}. Fix the problem and run the "
                "same command again to continue."
            ) from error
        return _complete_store(folder, settings, facts)


def _make_settings(extractor: RowExtractor, dtype: str, photos_per_shard: int) -> CacheSettings:
    tower, photos = extractor.tower, extractor.photos
    return CacheSettings(
        encoder=tower.origin.encoder,
        block=int(tower.block),
        width=tower.width,
        tower=hash_tower(tower),
        tokens=extractor.selection.name,
        padding=extractor.padding,
        seed=extractor.seed,
        dtype=dtype,
        data=photos.describe,
        fingerprint=photos.fingerprint,
        photos=len(photos),
        photos_per_shard=photos_per_shard,
    )


# ------------------------------------------------------------------ existing files


@contextmanager
def _lock_store(folder: Path) -> Generator[None]:
    """Create the folder, lock it against other runs, and remove temporary files of killed runs."""
    prepare_folder(folder, (CARD, NAMES, SKIPPED), "activation store")
    in_use = f"Another run is caching activations in {folder}. Wait until it ends, or use another folder."
    with lock_folder(folder, in_use):
        for pattern in (*(f".{name}.*" for name in (CARD, NAMES, SKIPPED)), f"{SHARDS}/.*"):
            for temporary in folder.glob(pattern):
                temporary.unlink(missing_ok=True)
        yield


def _read_settings(folder: Path) -> CacheSettings | None:
    """Read the settings of an existing store; None if there is none or its card is damaged."""
    if not (folder / CARD).is_file():
        return None
    try:
        return CacheSettings.from_card(read_card(folder), folder / CARD)
    except BadFile as error:
        warnings.warn(f"{error} The card is written again.", stacklevel=3)
        return None


def _check_same_settings(existing: CacheSettings, settings: CacheSettings, folder: Path) -> None:
    """Raise if the settings differ from those that a store was started with."""
    before, now = asdict(existing), asdict(settings)
    for name, label in SETTING_LABELS.items():
        if before[name] != now[name]:
            raise BadParameter(
                f"{folder} was started with {label.format(before[name])}, got {label.format(now[name])}. "
                "Use the same settings to continue, or another folder."
            )


def _check_same_photos(folder: Path, sample: str) -> None:
    """Raise if photos were replaced by others of the same names and sizes since a store was started."""
    if read_card(folder).get("sample", sample) != sample:  # stores of earlier versions do not record it
        raise BadParameter(
            f"{folder} was started with other photos of the same names and sizes. Use the same photos to continue, or "
            "another folder."
        )


def _prepare_store(
    folder: Path, settings: CacheSettings, names: list[str], facts: Mapping[str, Any], repair: bool
) -> list[int]:
    """Write the card and the names, and return the numbers of the shards that are missing."""
    _, faults = open_shards(folder, settings, verify_again=repair)
    if not faults and (folder / NAMES).is_file() and _is_complete(folder):
        return []
    _write_card(folder, settings, facts)
    write_text(folder / NAMES, "".join(json.dumps(name, ensure_ascii=False) + "\n" for name in names))
    for number, message in faults.items():
        path = settings.shard_path(folder, number)
        if path.is_file():
            warnings.warn(f"{message} It is written again.", stacklevel=3)
            path.unlink()
    return list(faults)


def _is_complete(folder: Path) -> bool:
    try:
        return bool(read_card(folder).get("complete"))
    except BadFile:
        return False


# ------------------------------------------------------------------ writing shards


def _write_shards(
    folder: Path,
    settings: CacheSettings,
    extractor: RowExtractor,
    missing: list[int],
    batch: int,
    progress: Callable[[int, int], None] | None,
) -> None:
    """Write the missing shards; each one is written while the tower processes the next."""
    plan = [(number, part) for number in missing for part in split_batches(settings.photo_range(number), batch)]
    done = settings.photos - sum(len(part) for _, part in plan)
    skipped = 0
    builder = _ShardBuilder(settings.dtype, settings.width)
    writing: Future[None] | None = None
    extracted = extractor.extract(part for _, part in plan)
    # on exit, also after an error, the shard being written is finished and decoding stops
    with ThreadPoolExecutor(1, "shards") as writer, closing(extracted):
        if progress is not None:
            progress(done, skipped)
        for (number, part), results in zip(plan, extracted, strict=True):
            builder.add(results, extractor.names)
            done, skipped = done + len(part), skipped + sum(isinstance(result, SkippedPhoto) for result in results)
            if part.stop == settings.photo_range(number).stop:
                if writing is not None:
                    writing.result()  # raises errors of the writer, and limits memory to two shards
                path = settings.shard_path(folder, number)
                writing = writer.submit(builder.write, path, settings.digest, settings.tokens)
                builder = _ShardBuilder(settings.dtype, settings.width)
            if progress is not None:
                progress(done, skipped)
        if writing is not None:
            writing.result()


class _ShardBuilder:
    """Collect the rows of one shard."""

    def __init__(self, dtype: str, width: int) -> None:
        self.dtype, self.width = DTYPES[dtype], width
        self.rows: list[Tensor] = []
        self.patches: list[Tensor] = []
        self.counts: list[int] = []
        self.grids: list[tuple[int, int]] = []
        self.skipped: list[SkippedPhoto] = []

    def add(self, results: list[ExtractedRows | SkippedPhoto], names: list[str]) -> None:
        for result in results:
            if isinstance(result, SkippedPhoto):
                self.skipped.append(result)
                self.counts.append(0)
                self.grids.append((0, 0))
                continue
            rows = result.rows.to(self.dtype)
            if self.dtype == torch.float16 and bool(rows.isinf().any()):
                largest = float(result.rows.abs().max())
                raise BadTokens(
                    f"{names[result.index]} has an activation of {largest:,.0f}, and float16 ends at 65,504. "
                    "Use dtype float32 (--dtype float32) and another folder."
                )
            self.rows.append(rows)
            self.patches.append(result.patches)
            self.counts.append(len(rows))
            self.grids.append(result.grid)

    def write(self, path: Path, digest: str, tokens: str) -> None:
        rows = torch.cat(self.rows) if self.rows else torch.empty(0, self.width, dtype=self.dtype)
        self.rows.clear()
        patches = torch.cat([torch.empty(0, dtype=torch.int32), *self.patches]) if tokens.startswith("random") else None
        counts = torch.tensor(self.counts, dtype=torch.int32)
        grids = torch.tensor(self.grids, dtype=torch.int32)
        write_shard(path, digest, rows, counts, grids, patches, self.skipped)


def _complete_store(folder: Path, settings: CacheSettings, facts: Mapping[str, Any]) -> Store:
    """Open the written store, and complete its card if necessary."""
    shards, faults = open_shards(folder, settings)
    if faults:  # a shard was removed in the meantime
        raise BadFile(f"{next(iter(faults.values()))} Run the same command again.")
    store = Store(folder, settings, shards)
    if store.rows == 0:
        raise no_usable_photo(settings.photos, store.skipped[0])
    if not _is_complete(folder):
        write_text(folder / SKIPPED, "".join(f"{photo.name}\t{photo.reason}\n" for photo in store.skipped))
        _write_card(folder, settings, {**facts, **store.summary(), "complete": True})
    return store


def _write_card(folder: Path, settings: CacheSettings, facts: Mapping[str, Any]) -> None:
    card = {"format": "torino activations 1", "complete": False, **asdict(settings), **facts}
    text = json.dumps(with_checksum(card), indent=2, ensure_ascii=False) + "\n"
    # put lists of numbers, such as the mean, on one line
    write_text(folder / CARD, re.sub(r"\[[\d\s.,e+-]+\]", lambda match: " ".join(match[0].split()), text))
