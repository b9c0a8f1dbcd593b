"""Harvesting: photos through a tower, and what it says of them into a store, shard by shard."""

from __future__ import annotations

import json
import os
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

from torino.core.errors import BadFile, BadParameter, BadTokens
from torino.core.io import write_atomic
from torino.datasets import Photos
from torino.datasets.images import Padding
from torino.training.activations.extraction import Looker, Taken, batches_of, calm, hash_of_tower, nothing_read
from torino.training.activations.selection import Skipped
from torino.training.activations.shards import (
    CARD,
    DTYPES,
    NAMES,
    SHARDS,
    SKIPPED,
    CacheSettings,
    open_shards,
    read_card,
    write_shard,
)
from torino.training.activations.store import Store
from torino.vlm.towers import Tower

SHARD_ROWS = 65536
SHARD_PHOTOS = 1024  # at most: what a stopped run has to look at again
LOCK = ".lock"
# How a difference between what a store was begun with and what is asked for now is said.
WORDS = {
    "encoder": "the tower {!r}",
    "block": "block {}",
    "width": "tokens {} wide",
    "tower": "a tower whose weights and processor have the hash {}",
    "tokens": "tokens {}",
    "padding": "padding {}",
    "seed": "seed {}",
    "dtype": "dtype {}",
    "photos": "{:,} photos",
    "fingerprint": "photos with the fingerprint {}",
}


def harvest(
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
    given: Mapping[str, Any] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Store:
    """Look at photos and keep the tokens in a store on disk.

    A run that was stopped, in whatever way, goes on after its last whole shard when called again with the same
    arguments, and ends with the same bytes as one that was not. Shards that are missing or cut off are made again;
    a store that is whole is given back as it is.

    Parameters
    ----------
    tower, photos
        Who looks, and at what.
    folder : str or path
        Of the store; new, empty, or begun earlier.
    tokens : str
        ``cls``, ``random:R`` or ``all``.
    padding : {"crop", "square"}
        See :func:`torino.datasets.images.prepare`.
    seed : int
        Of the random patches.
    dtype : {"float16", "float32"}
        On disk.
    batch : int
        Photos that go through the tower at once. Another batch changes what a tower says in the last digits.
    shard_rows : int
        About so many rows make a shard, and never more than 1,024 photos; what a stopped run has to repeat.
    repair : bool
        Read all shards that are there, and make those again whose checksum is wrong.
    given : mapping, optional
        Goes into the card as it is: what the user wrote to get this tower and these photos.
    progress : callable, optional
        Called with the number of photos done, also by earlier runs, and how many this run has skipped.

    Raises
    ------
    BadParameter
        If the store was begun with other settings.
    BadTokens
        If a value does not fit into half precision.
    BadFile
        If the disk is full or the folder cannot be written; what was written stays, and the run can go on.
    """
    folder = Path(folder).expanduser()
    if dtype not in DTYPES:
        raise BadParameter(f"dtype must be float16 or float32, got {dtype!r}.")
    if shard_rows < 1:
        raise BadParameter(f"shard_rows must be at least 1, got {shard_rows}.")
    batches_of(range(0), batch)  # refuses what is no batch
    looker = Looker(tower, photos, tokens, padding=padding, seed=seed)
    with _claimed(folder), calm():
        begun = _begun(folder)
        if begun is None:
            per_shard = max(1, min(shard_rows // looker.rows_per_photo(), SHARD_PHOTOS))
        else:
            per_shard = begun.photos_per_shard
        settings = _settings(looker, dtype, per_shard)
        if begun is not None:
            _same(begun, settings, folder)
        given = dict(given or {})
        missing = _prepare(folder, settings, looker.names, given, repair)
        try:
            _fill(folder, settings, looker, missing, batch, progress)
        except BadFile as error:
            kept = sum(len(settings.range_of(number)) for number in open_shards(folder, settings)[0])
            raise BadFile(
                f"{error} {kept:,} of {settings.photos:,} photos are kept in {folder}: see to the disk and run the "
                "same again to go on."
            ) from error
        return _finish(folder, settings, given)


def _settings(looker: Looker, dtype: str, photos_per_shard: int) -> CacheSettings:
    tower, photos = looker.tower, looker.photos
    return CacheSettings(
        encoder=tower.origin.encoder,
        block=int(tower.block),
        width=tower.width,
        tower=hash_of_tower(tower),
        tokens=looker.kind.name,
        padding=looker.padding,
        seed=looker.seed,
        dtype=dtype,
        data=photos.describe,
        fingerprint=photos.fingerprint,
        photos=len(photos),
        photos_per_shard=photos_per_shard,
    )


# ------------------------------------------------------------------ what is there already


@contextmanager
def _claimed(folder: Path) -> Generator[None]:
    """Make the folder and keep other runs out of it; the system lets go of the lock when a run dies."""
    known = (CARD, NAMES, SKIPPED, SHARDS, LOCK)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        others = [path.name for path in folder.iterdir() if path.name not in known and not path.name.startswith(".")]
        if others and not (folder / CARD).is_file():
            raise BadFile(
                f"{folder} holds other things, such as {others[0]}, and no store. Give a new or empty folder."
            )
        (folder / SHARDS).mkdir(exist_ok=True)
        handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise BadFile(f"Cannot write to {folder}: {error.strerror or error}. Choose a writable folder.") from error
    try:
        try:
            import fcntl

            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:  # not on Windows; two runs would do the same work twice, and write the same
            pass
        except OSError as error:
            raise BadFile(f"Another run is harvesting to {folder}. Wait for it, or give another folder.") from error
        for pattern in (*(f".{name}.*" for name in (CARD, NAMES, SKIPPED)), f"{SHARDS}/.*"):
            for left in folder.glob(pattern):  # what a killed run was writing
                left.unlink(missing_ok=True)
        yield
    finally:
        os.close(handle)


def _begun(folder: Path) -> CacheSettings | None:
    if not (folder / CARD).is_file():
        return None
    try:
        return CacheSettings.of(read_card(folder), folder / CARD)
    except BadFile as error:
        warnings.warn(f"{error} It is written anew.", stacklevel=3)
        return None


def _same(begun: CacheSettings, asked: CacheSettings, folder: Path) -> None:
    """Refuse to go on with other settings than a store was begun with."""
    before, now = asdict(begun), asdict(asked)
    for name, words in WORDS.items():
        if before[name] != now[name]:
            raise BadParameter(
                f"{folder} was begun with {words.format(before[name])}, and now it is {words.format(now[name])}. "
                "Give the same settings to go on, or another folder."
            )


def _prepare(
    folder: Path, settings: CacheSettings, names: list[str], given: Mapping[str, Any], repair: bool
) -> list[int]:
    """Write down what the store will be, and tell which shards are still to be made."""
    _, faults = open_shards(folder, settings, thorough=repair)
    if not faults and (folder / NAMES).is_file() and _is_complete(folder):
        return []
    _write_card(folder, settings, given, {})
    text = "".join(json.dumps(name, ensure_ascii=False) + "\n" for name in names)
    _write_text(folder / NAMES, text)
    for number, sentence in faults.items():
        path = settings.file_of(folder, number)
        if path.is_file():
            warnings.warn(f"{sentence} It is harvested again.", stacklevel=3)
            path.unlink()
    return list(faults)


def _is_complete(folder: Path) -> bool:
    try:
        return bool(read_card(folder).get("complete"))
    except BadFile:
        return False


# ------------------------------------------------------------------ the harvest


def _fill(
    folder: Path,
    settings: CacheSettings,
    looker: Looker,
    missing: list[int],
    batch: int,
    progress: Callable[[int, int], None] | None,
) -> None:
    """Make the missing shards; one is written while the next is looked at."""
    plan = [(number, part) for number in missing for part in batches_of(settings.range_of(number), batch)]
    done = settings.photos - sum(len(part) for _, part in plan)
    skipped = 0
    sheaf = _Sheaf(settings.dtype, settings.width)
    writing: Future[None] | None = None
    looked = looker.look(part for _, part in plan)
    # on leaving, also by an error, what is being written is finished, and nothing more is decoded
    with ThreadPoolExecutor(1, "shards") as writer, closing(looked):
        if progress is not None:
            progress(done, skipped)
        for (number, part), seen in zip(plan, looked, strict=True):
            sheaf.add(seen, looker.names)
            done, skipped = done + len(part), skipped + sum(isinstance(photo, Skipped) for photo in seen)
            if part.stop == settings.range_of(number).stop:
                if writing is not None:
                    writing.result()  # raises what went wrong; and no more than two shards are in memory
                writing = writer.submit(sheaf.write, settings.file_of(folder, number), settings.digest, settings.tokens)
                sheaf = _Sheaf(settings.dtype, settings.width)
            if progress is not None:
                progress(done, skipped)
        if writing is not None:
            writing.result()


class _Sheaf:
    """The rows of one shard as they come in."""

    def __init__(self, dtype: str, width: int) -> None:
        self.dtype, self.width = DTYPES[dtype], width
        self.rows: list[Tensor] = []
        self.patches: list[Tensor] = []
        self.counts: list[int] = []
        self.grids: list[tuple[int, int]] = []
        self.skipped: list[Skipped] = []

    def add(self, seen: list[Taken | Skipped], names: list[str]) -> None:
        for photo in seen:
            if isinstance(photo, Skipped):
                self.skipped.append(photo)
                self.counts.append(0)
                self.grids.append((0, 0))
                continue
            rows = photo.rows.to(self.dtype)
            if self.dtype == torch.float16 and bool(rows.isinf().any()):
                most = float(photo.rows.abs().max())
                raise BadTokens(
                    f"{names[photo.index]} gives a value of {most:,.0f}, and half precision ends at 65,504. "
                    "Harvest with dtype float32 (--dtype float32) into another folder."
                )
            self.rows.append(rows)
            self.patches.append(photo.patches)
            self.counts.append(len(rows))
            self.grids.append(photo.grid)

    def write(self, path: Path, digest: str, tokens: str) -> None:
        rows = torch.cat(self.rows) if self.rows else torch.empty(0, self.width, dtype=self.dtype)
        self.rows.clear()
        patches = torch.cat([torch.empty(0, dtype=torch.int32), *self.patches]) if tokens.startswith("random") else None
        counts = torch.tensor(self.counts, dtype=torch.int32)
        grids = torch.tensor(self.grids, dtype=torch.int32)
        write_shard(path, digest, rows, counts, grids, patches, self.skipped)


def _finish(folder: Path, settings: CacheSettings, given: Mapping[str, Any]) -> Store:
    """Open what is there now, and write its card if that is not yet done."""
    shards, faults = open_shards(folder, settings)
    if faults:  # someone took a shard away meanwhile
        raise BadFile(f"{next(iter(faults.values()))} Run the same again.")
    store = Store(folder, settings, shards)
    if store.rows == 0:
        raise nothing_read(settings.photos, store.skipped[0])
    if not _is_complete(folder):
        _write_text(folder / SKIPPED, "".join(f"{photo.name}\t{photo.reason}\n" for photo in store.skipped))
        _write_card(folder, settings, given, store.summary() | {"complete": True})
    return store


def _write_card(folder: Path, settings: CacheSettings, given: Mapping[str, Any], more: Mapping[str, Any]) -> None:
    card = {"format": "torino activations 1", "complete": False, **asdict(settings), "given": dict(given), **more}
    text = json.dumps(card, indent=2, ensure_ascii=False) + "\n"
    # a mean of a thousand numbers on as many lines is nothing to read
    _write_text(folder / CARD, re.sub(r"\[[\d\s.,e+-]+\]", lambda found: " ".join(found[0].split()), text))


def _write_text(path: Path, text: str) -> None:
    def write(target: Path) -> None:
        target.write_text(text, encoding="utf-8")

    write_atomic(path, write)
