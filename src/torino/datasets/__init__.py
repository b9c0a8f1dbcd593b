"""Photos as an indexable sequence, from a folder, parquet files, webdataset tars or a Hugging Face dataset."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NotRequired, TypedDict

from torino.core.checks import expand_path, to_integer, to_path
from torino.core.errors import BadFile, BadParameter
from torino.core.io import read_json
from torino.datasets.base import (
    IMAGE_SUFFIXES,
    Photo,
    Photos,
    SourceUnavailable,
    escape_surrogates,
    hash_sample,
    unreadable_error,
)
from torino.datasets.combined import CombinedPhotos
from torino.datasets.folders import ImageFolder, walk
from torino.datasets.parquet import ParquetPhotos, open_hub, open_saved
from torino.datasets.tar import TarPhotos

__all__ = ["Photo", "Photos", "SourceUnavailable", "escape_surrogates", "hash_sample", "open_photos", "open_sources"]

PARQUET_SUFFIXES = (".parquet", ".pq")
ACCEPTED = (
    "Accepted: a folder of images, .parquet or .tar files (also as a pattern: 'photos-*.tar'), a folder written by "
    "save_to_disk, or hf:owner/name:split"
)


class SplitsFile(TypedDict):
    """Fields of ``dataset_dict.json``, which ``save_to_disk`` writes."""

    splits: NotRequired[list[str]]


def open_photos(source: str | os.PathLike[str], *, limit: int | None = None, allow_outside: bool = False) -> Photos:
    """Open a source of photos.

    ====================================  ============================================================================
    source                                photos and their texts
    ====================================  ============================================================================
    folder, or one image                  image files below the folder, sorted; texts from a ``.txt`` file next to each
                                          image, or, if all images are in folders of one level, the folder name as the
                                          label
    ``.parquet`` file(s)                  column ``image``: bytes, or a struct of bytes and path as written by Hugging
                                          Face; texts from ``captions``, ``caption``, ``text`` or ``label``
    ``.tar`` file(s)                      webdataset samples; texts from ``.txt``, ``.cls`` or ``.json`` members
    folder written by ``save_to_disk``    columns as for parquet; needs only pyarrow
    ``hf:owner/name:split``               the same from the hub, needs the package ``datasets``;
                                          ``hf:owner/name:configuration:split`` if a dataset has several
    ====================================  ============================================================================

    Several files are given as a pattern (``photos-*.tar``) or as the folder that contains them.

    Parameters
    ----------
    source : str or path
    limit : int, optional
        Use only the first ``limit`` photos.
    allow_outside : bool
        A table may contain paths of photos instead of their bytes. By default they must be below the folder of the
        table, after symbolic links are resolved; others are refused.

    Raises
    ------
    BadFile, Unreachable
        If the source does not exist, cannot be read, or contains no images.
    """
    if limit is not None and (limit := to_integer("limit", limit)) < 1:
        raise BadParameter(f"limit must be at least 1, got {limit}.")
    to_path(source, "The source of photos")
    photos = _open(os.fspath(source), limit, allow_outside)
    if not len(photos):
        raise BadFile(f"There are no photos in {os.fspath(source)}: it is empty. {ACCEPTED}.")
    return photos


def open_sources(
    sources: Sequence[str | os.PathLike[str]], *, limit: int | None = None, allow_outside: bool = False
) -> Photos:
    """Open one or several sources of photos as one.

    Files of one kind, as a pattern gives them that the shell has expanded, are one source in the given order.

    Parameters
    ----------
    sources : sequence of str or path
        See :func:`open_photos`.
    limit, allow_outside
        As for :func:`open_photos`.
    """
    if not sources:
        raise BadFile(f"No source of photos was given. {ACCEPTED}.")
    if len(sources) == 1:
        return open_photos(sources[0], limit=limit, allow_outside=allow_outside)
    if limit is not None and (limit := to_integer("limit", limit)) < 1:
        raise BadParameter(f"limit must be at least 1, got {limit}.")
    files = [expand_path(source, "The source of photos") for source in sources]
    kinds = (PARQUET_SUFFIXES, (".tar",), IMAGE_SUFFIXES)
    if any(all(file.suffix.lower() in kind and file.is_file() for file in files) for kind in kinds):
        return _open_files(files, f"{files[0]} to {files[-1].name}", limit, allow_outside)
    opened = [open_photos(source, limit=limit, allow_outside=allow_outside) for source in sources]
    return CombinedPhotos(opened, limit)


def _open(text: str, limit: int | None, allow_outside: bool) -> Photos:
    if text.startswith("hf:"):
        return open_hub(text, limit, allow_outside=allow_outside)
    path = expand_path(text)
    try:
        if path.is_dir():
            os.scandir(path).close()  # so that an error names this folder
            return _open_folder(path, limit, allow_outside)
        files = [path] if path.exists() else [Path(name) for name in sorted(glob.glob(str(path)))]  # noqa: PTH207
    except OSError as error:
        raise unreadable_error(path, error) from error
    if not files:
        raise BadFile(f"There are no photos at {text}. {ACCEPTED}.")
    if len(files) == 1 and files[0].is_dir():
        return _open_folder(files[0], limit, allow_outside)
    return _open_files(files, text, limit, allow_outside)


def _open_folder(path: Path, limit: int | None, allow_outside: bool) -> Photos:
    if (path / "dataset_dict.json").is_file():
        splits = read_json(path / "dataset_dict.json", SplitsFile).get("splits") or ["train"]
        raise BadFile(f"{path} contains several splits ({', '.join(splits)}). Give one of them: {path / splits[0]}.")
    if (path / "state.json").is_file() and (path / "dataset_info.json").is_file():
        return open_saved(path, limit, allow_outside=allow_outside)
    files: dict[str, list[tuple[str, int]]] = {"images": [], "parquet": [], "tar": [], "txt": []}
    kinds = {
        **dict.fromkeys(IMAGE_SUFFIXES, "images"),
        **dict.fromkeys(PARQUET_SUFFIXES, "parquet"),
        ".tar": "tar",
        ".txt": "txt",
    }
    try:
        for name, size in walk(path):
            kind = kinds.get(os.path.splitext(name)[1].lower())  # noqa: PTH122 (fast for a million names)
            if kind:
                files[kind].append((name, size))
    except OSError as error:
        raise unreadable_error(path, error) from error
    if files["images"]:
        return ImageFolder(path, files["images"], {name for name, _ in files["txt"]}, limit)
    for kind in ("parquet", "tar"):
        if files[kind]:
            return _open_files([path / name for name, _ in sorted(files[kind])], str(path), limit, allow_outside)
    raise BadFile(f"There are no images in {path}. {ACCEPTED}; images end in {', '.join(IMAGE_SUFFIXES)}.")


def _open_files(files: list[Path], text: str, limit: int | None, allow_outside: bool) -> Photos:
    suffixes = {file.suffix.lower() for file in files}
    if suffixes <= set(PARQUET_SUFFIXES):
        return ParquetPhotos(files, limit, allow_outside=allow_outside)
    if suffixes <= {".tar"}:
        return TarPhotos(files, limit)
    if suffixes <= set(IMAGE_SUFFIXES):
        root = files[0].parent
        entries = [(Path(os.path.relpath(file, root)).as_posix(), file.stat().st_size) for file in files]
        return ImageFolder(root, entries, set(), limit)
    if any(re.search(r"\.(tgz|tar\.\w+)$", file.name) for file in files):
        raise BadFile(f"{text} is compressed, so single photos cannot be read from it. Unpack it to a .tar file.")
    raise BadFile(f"{text} does not contain photos. {ACCEPTED}.")
