"""Write token stores: reduce the images of large collections, shard by shard."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torino.core.checks import check_choice, expand_path, to_integer
from torino.core.checksum import stored_checksum
from torino.core.errors import BadFile, BadParameter
from torino.core.io import write_json
from torino.core.shards import SHARDS
from torino.serving.settings import ReductionSettings
from torino.serving.store.executors import Executor, LocalExecutor, ProcessExecutor
from torino.serving.store.format import (
    DTYPES,
    FORMAT,
    MANIFEST,
    SKIPPED,
    StoreSettings,
    TokenShard,
    open_token_shards,
    read_manifest,
)
from torino.serving.store.worker import OnError, StoreFacts, StoreJob
from torino.training.activations.extraction import no_usable_photo
from torino.training.files import LOCK_FILE, lock_folder, prepare_folder, write_text
from torino.vlm.loading import encoder_name, model_packages
from torino.vlm.saes import NO_SAE

PHOTOS_PER_SHARD = 256
MAX_PHOTOS_PER_SHARD = 65536
PROGRESS = Callable[[int, int, int], None]
"""Function that receives the number of images that are done, including earlier runs, their total, and the number
skipped in this run."""
# Settings that must not change when a store is continued, and how the error message names them.
SETTING_LABELS = {
    "model": "model {!r}",
    "method": "{}",
    "reduction": "reduction {}",
    "model_hash": "a model whose tower, projector and image processor have the hash {}",
    "hash": "an SAE or a version of torino with the settings hash {}",
    "width": "tokens of width {}",
    "dtype": "data type {}",
    "batch": "--batch {}",
    "threads": "--threads {}",
    "photos_per_shard": "--shard-images {}",
    "photos": "{:,} images",
    "fingerprint": "images with the fingerprint {}",
    "sample": "images whose contents have the hash {}",
}


@dataclass(frozen=True)
class StoreOptions:
    """How a token store is written. Only ``dtype``, ``batch``, ``threads`` and ``shard_images`` change its bytes.

    Parameters
    ----------
    dtype : {"float16", "bfloat16", "float32"}
        Data type of the tokens on disk.
    batch : int
        Images per forward pass of the tower.
    threads : int
        CPU threads of each process.
    shard_images : int
        Images per shard. A run that is killed repeats at most the shards that were being written.
    processes : int, optional
        Processes on this machine, or actors on a Ray cluster. Default: 1, or all CPUs (or GPUs) of the cluster.
    part : (int, int)
        Write only part i of n, counted from 0: the shards i, i + n, i + 2n, …
    ray : str, optional
        Address of a Ray cluster, or ``"local"`` to start one on this machine.
    on_error : {"skip", "stop"}
        Record an image that cannot be used with the reason, or stop the run.
    """

    dtype: str = "float16"
    batch: int = 16
    threads: int = 1
    shard_images: int = PHOTOS_PER_SHARD
    processes: int | None = None
    part: tuple[int, int] = (0, 1)
    ray: str | None = None
    on_error: OnError = "skip"

    def __post_init__(self) -> None:
        """Raise BadParameter if an option is out of range."""
        if self.dtype not in DTYPES:
            raise BadParameter(f"dtype must be float16, bfloat16 or float32, got {self.dtype!r}.")
        to_integer("batch", self.batch, 1)
        to_integer("threads", self.threads, 1)
        to_integer("shard_images", self.shard_images, 1, MAX_PHOTOS_PER_SHARD)
        if self.processes is not None:
            to_integer("processes", self.processes, 1)
        number, parts = self.part
        to_integer("The number of parts", parts, 1)
        to_integer("The part", number, 0, parts - 1)
        check_choice("on_error", self.on_error, OnError)


@dataclass(frozen=True)
class StoreSummary:
    """Result of :func:`reduce_images`.

    Attributes
    ----------
    folder : Path
    settings : StoreSettings
    complete : bool
        Whether all shards are there.
    shards : int
        Shards of this part that are there.
    images, tokens, placeholders : int
        Images of these shards that were reduced, their tokens, and the tokens that they had before.
    skipped : tuple of (str, str)
        Names of images that could not be used, with the reasons.
    new_images : int
        Images that this run has worked on.
    """

    folder: Path
    settings: StoreSettings
    complete: bool
    shards: int
    images: int
    tokens: int
    placeholders: int
    skipped: tuple[tuple[str, str], ...]
    new_images: int


def reduce_images(
    sources: Sequence[str | os.PathLike[str]],
    folder: str | os.PathLike[str],
    model: str = "lab",
    settings: ReductionSettings | None = None,
    options: StoreOptions | None = None,
    *,
    device: str = "cpu",
    dtype: str | None = None,
    limit: int | None = None,
    allow_outside: bool = False,
    progress: PROGRESS | None = None,
) -> StoreSummary:
    """Reduce the images of a collection and write what the language model receives to a store on disk.

    A run that was interrupted or killed continues when it is called again with the same arguments, and ends with the
    same bytes as an uninterrupted run, whichever executor, number of processes or parts it uses. Finished shards are
    verified and kept; missing and damaged ones are written.

    Several processes start new Python interpreters, so a script that uses them must do its work below
    ``if __name__ == "__main__":``.

    Parameters
    ----------
    sources : sequence of str or path
        Folders, image files, parquet files or WebDataset tars; see :func:`torino.datasets.open_sources`.
    folder : str or path
        Folder of the store: new, empty, or from an earlier run.
    model : str
        Hub name, folder, or installed model package.
    settings : ReductionSettings, optional
        By default all tokens are kept.
    options : StoreOptions, optional
    device, dtype
        Of the model, as for :func:`torino.vlm.load_vlm`.
    limit, allow_outside
        As for :func:`torino.datasets.open_sources`.
    progress : callable, optional
        Called with the number of images that are done, their total, and the number skipped in this run.

    Raises
    ------
    BadParameter
        If the store was started with other settings or other images.
    BadFile
        If the folder cannot be written; finished shards are kept.
    """
    options = options or StoreOptions()
    settings = settings or ReductionSettings("none")
    place = expand_path(folder, "The folder of the store").absolute()
    job = StoreJob(
        sources=tuple(_absolute(source) for source in sources),
        model=_absolute_model(model),
        settings=settings.to_dict() | ({"sae": _absolute_model(settings.sae)} if settings.sae is not None else {}),
        folder=str(place),
        device=device,
        dtype=dtype,
        batch=options.batch,
        threads=options.threads,
        limit=limit,
        allow_outside=allow_outside,
    )
    _read_settings(place)  # refuses a damaged manifest before the model is loaded
    with _lock_store(place, options.part), closing(_start(job, options)) as executor:
        full = full_settings(settings, executor.inspect(), options)
        existing = _read_settings(place)
        if existing is not None:
            _check_same_settings(existing, full, place)
        else:
            _write_manifest(place, full, {})
        return _write_part(place, full, executor, options, progress)


def _start(job: StoreJob, options: StoreOptions) -> Executor:
    if options.ray is not None:
        from torino.serving.store.on_ray import RayExecutor

        return RayExecutor(job, options.ray, options.processes)
    if options.processes is not None and options.processes > 1:
        return ProcessExecutor(job, options.processes)
    return LocalExecutor(job)


def _absolute(source: str | os.PathLike[str]) -> str:
    """Return a source that means the same in other working directories."""
    text = os.fspath(source)
    return text if text.startswith("hf:") else str(expand_path(text, "The source of photos").absolute())


def _absolute_model(name: str) -> str:
    """Return the name of a model or SAE, with a path that means the same in other working directories."""
    if name in (NO_SAE, "example", "lab") or name in model_packages():
        return name
    is_path = re.match(r"[./~]", name) or os.path.exists(name)  # noqa: PTH110 (Path raises for odd names)
    return str(expand_path(name, "The name of the model").absolute()) if is_path else name


def full_settings(settings: ReductionSettings, facts: StoreFacts, options: StoreOptions) -> StoreSettings:
    """Return the settings of a store: those of the reduction, of model and images, and of the files."""
    reduction = settings.to_dict()
    if settings.sae is not None:
        reduction["sae"] = encoder_name(settings.sae)
    return StoreSettings(
        **asdict(facts),
        reduction=reduction,
        dtype=options.dtype,
        batch=options.batch,
        threads=options.threads,
        photos_per_shard=options.shard_images,
    )


# ---------------------------------------------------------------------- existing files


@contextmanager
def _lock_store(folder: Path, part: tuple[int, int]) -> Generator[None]:
    """Create the folder and lock one part of it: machines may write different parts of a shared folder together."""
    prepare_folder(folder, (MANIFEST, SKIPPED), "token store")
    number, parts = part
    name = LOCK_FILE if parts == 1 else f"{LOCK_FILE}-{number + 1}-of-{parts}"
    what = "the store" if parts == 1 else f"part {number + 1}/{parts} of the store"
    in_use = f"Another run is writing {what} {folder}. Wait until it ends, or use another folder."
    with lock_folder(folder, in_use, name):
        yield


def _read_settings(folder: Path) -> StoreSettings | None:
    """Read the settings of an existing store; None if there is none."""
    if not (folder / MANIFEST).is_file():
        return None
    return StoreSettings.from_manifest(read_manifest(folder), folder / MANIFEST)


def _check_same_settings(existing: StoreSettings, settings: StoreSettings, folder: Path) -> None:
    """Raise if the settings differ from those that a store was started with."""
    before, now = asdict(existing), asdict(settings)
    for name, label in SETTING_LABELS.items():
        if before[name] != now[name]:
            raise BadParameter(
                f"{folder} was started with {label.format(before[name])}, got {label.format(now[name])}. "
                "Use the same settings and images to continue, or another folder."
            )


# ---------------------------------------------------------------------- writing shards


def _write_part(
    folder: Path, settings: StoreSettings, executor: Executor, options: StoreOptions, progress: PROGRESS | None
) -> StoreSummary:
    number, parts = options.part
    own = range(number, settings.shards, parts)
    _, faults = open_token_shards(folder, settings, own)
    _remove_damaged(folder, settings, faults)
    total = sum(len(settings.photo_range(shard)) for shard in own)
    new = sum(len(settings.photo_range(shard)) for shard in faults)
    skipped = 0

    def report(done: int) -> None:
        if progress is not None:
            progress(total - new + done, total, skipped)

    report(0)
    with closing(executor.run(list(faults), settings, options.on_error, report)) as results:
        for _, bad in results:
            skipped += bad
    report(new)
    return _finish(folder, settings, own, new)


def _remove_damaged(folder: Path, settings: StoreSettings, faults: Mapping[int, str]) -> None:
    """Remove damaged shards, and temporary files that a killed run has left of the shards to write."""
    for shard, message in faults.items():
        path = settings.shard_path(folder, shard)
        if path.is_file():
            warnings.warn(f"{message} It is written again.", stacklevel=4)
            path.unlink()
        for temporary in (folder / SHARDS).glob(f".{path.name}.*"):
            temporary.unlink(missing_ok=True)


def _finish(folder: Path, settings: StoreSettings, own: range, new: int) -> StoreSummary:
    """Complete the manifest if all shards are there, whoever has written them."""
    everything = settings.shards == len(own) or all(
        settings.shard_path(folder, shard).is_file() for shard in range(settings.shards)
    )
    shards, faults = open_token_shards(folder, settings, None if everything else own)
    lost = [message for shard, message in faults.items() if shard in own]
    if lost:  # a shard was removed or damaged in the meantime
        raise BadFile(f"{lost[0]} Run the same command again.")
    complete = everything and not faults
    ordered = [shards[shard] for shard in sorted(shards)]
    if complete:
        bad = [photo for shard in ordered for photo in shard.skipped]
        if len(bad) == settings.photos:
            raise no_usable_photo(settings.photos, bad[0])
        write_text(folder / SKIPPED, "".join(f"{photo.name}\t{photo.reason}\n" for photo in bad))
        _write_manifest(folder, settings, _describe_shards(ordered))
    listed = [shard for number, shard in sorted(shards.items()) if number in own]
    return StoreSummary(
        folder=folder,
        settings=settings,
        complete=complete,
        shards=len(listed),
        images=sum(int((shard.lengths > 0).sum()) for shard in listed),
        tokens=sum(len(shard.tokens) for shard in listed),
        placeholders=sum(int(shard.full.sum()) for shard in listed),
        skipped=tuple((photo.name, photo.reason) for shard in listed for photo in shard.skipped),
        new_images=new,
    )


def _describe_shards(shards: Sequence[TokenShard]) -> dict[str, Any]:
    """Return the counts and the shards of a complete store, for its manifest."""
    return {
        "complete": True,
        "images": sum(int((shard.lengths > 0).sum()) for shard in shards),
        "tokens": sum(len(shard.tokens) for shard in shards),
        "skipped": sum(len(shard.skipped) for shard in shards),
        "shards": [
            {
                "file": shard.path.name,
                "images": len(shard.names),
                "tokens": len(shard.tokens),
                "checksum": stored_checksum(shard.path),
            }
            for shard in shards
        ],
    }


def _write_manifest(folder: Path, settings: StoreSettings, facts: Mapping[str, Any]) -> None:
    write_json(folder / MANIFEST, {"format": FORMAT, "complete": False, **asdict(settings), **facts}, sealed=True)
