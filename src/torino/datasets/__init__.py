"""Photos by number, from wherever they lie: a folder, parquet, webdataset tars, a Hugging Face dataset."""

from __future__ import annotations

import glob
import os
import re
from pathlib import Path

from torino.core.errors import BadFile, BadParameter
from torino.core.io import read_json
from torino.datasets.base import IMAGES, Gone, Photo, Photos, printable, unreadable
from torino.datasets.folders import ImageFolder, walk
from torino.datasets.parquet import Parquet, open_hub, open_saved
from torino.datasets.tar import Tars

__all__ = ["Gone", "Photo", "Photos", "open_photos", "printable"]

PARQUET = (".parquet", ".pq")
ACCEPTED = (
    "Accepted: a folder of images, .parquet or .tar files (also as a pattern: 'photos-*.tar'), a folder written by "
    "save_to_disk, or hf:owner/name:split"
)


def open_photos(source: str | os.PathLike[str], *, limit: int | None = None) -> Photos:
    """Open a source of photos.

    ====================================  ============================================================================
    source                                photos and their texts
    ====================================  ============================================================================
    folder, or one image                  image files below it, sorted; texts from a ``.txt`` beside each, or, where
                                          all lie in folders of one level, the name of the folder as the label
    ``.parquet`` file(s)                  column ``image``: bytes, or a struct of bytes and path, as Hugging Face
                                          writes it; texts from ``captions``, ``caption``, ``text`` or ``label``
    ``.tar`` file(s)                      webdataset samples; texts from ``.txt``, ``.cls`` or ``.json`` members
    folder written by ``save_to_disk``    columns as for parquet; needs pyarrow alone
    ``hf:owner/name:split``               the same from the hub, through the package ``datasets``;
                                          ``hf:owner/name:configuration:split`` where a dataset has several
    ====================================  ============================================================================

    Several files are given as a pattern (``photos-*.tar``) or as the folder they lie in.

    Parameters
    ----------
    source : str or path
    limit : int, optional
        Take only the first this many.

    Raises
    ------
    BadFile, Unreachable
        If there is no such thing, it cannot be read, or it holds no images.
    """
    if limit is not None and limit < 1:
        raise BadParameter(f"limit must be at least 1, got {limit}.")
    photos = _opened(os.fspath(source), limit)
    if not len(photos):
        raise BadFile(f"There are no photos in {os.fspath(source)}: it is empty. {ACCEPTED}.")
    return photos


def _opened(text: str, limit: int | None) -> Photos:
    if text.startswith("hf:"):
        return open_hub(text, limit)
    path = Path(text).expanduser()
    try:
        if path.is_dir():
            os.scandir(path).close()  # so that it is the folder that an error speaks of
            return _folder(path, limit)
        files = [path] if path.exists() else [Path(name) for name in sorted(glob.glob(str(path)))]  # noqa: PTH207
    except OSError as error:
        raise unreadable(path, error) from error
    if not files:
        raise BadFile(f"There are no photos at {text}. {ACCEPTED}.")
    if len(files) == 1 and files[0].is_dir():
        return _folder(files[0], limit)
    return _files(files, text, limit)


def _folder(path: Path, limit: int | None) -> Photos:
    if (path / "dataset_dict.json").is_file():
        splits = read_json(path / "dataset_dict.json").get("splits") or ["train"]
        raise BadFile(f"{path} holds several splits ({', '.join(splits)}). Give one of them: {path / splits[0]}.")
    if (path / "state.json").is_file() and (path / "dataset_info.json").is_file():
        return open_saved(path, limit)
    found: dict[str, list[tuple[str, int]]] = {"images": [], "parquet": [], "tar": [], "txt": []}
    kinds = {**dict.fromkeys(IMAGES, "images"), **dict.fromkeys(PARQUET, "parquet"), ".tar": "tar", ".txt": "txt"}
    try:
        for name, size in walk(path):
            kind = kinds.get(os.path.splitext(name)[1].lower())  # noqa: PTH122 (a million names)
            if kind:
                found[kind].append((name, size))
    except OSError as error:
        raise unreadable(path, error) from error
    if found["images"]:
        return ImageFolder(path, found["images"], {name for name, _ in found["txt"]}, limit)
    for kind in ("parquet", "tar"):
        if found[kind]:
            return _files([path / name for name, _ in sorted(found[kind])], str(path), limit)
    raise BadFile(f"There are no images in {path}. {ACCEPTED}; images end in {', '.join(IMAGES)}.")


def _files(files: list[Path], text: str, limit: int | None) -> Photos:
    endings = {file.suffix.lower() for file in files}
    if endings <= set(PARQUET):
        return Parquet(files, limit)
    if endings <= {".tar"}:
        return Tars(files, limit)
    if endings <= set(IMAGES):
        top = files[0].parent
        return ImageFolder(
            top, [(Path(os.path.relpath(file, top)).as_posix(), file.stat().st_size) for file in files], set(), limit
        )
    if any(re.search(r"\.(tgz|tar\.\w+)$", file.name) for file in files):
        raise BadFile(f"{text} is compressed, and its photos could only be read from the start. Unpack it to a .tar.")
    raise BadFile(f"{text} is nothing that holds photos. {ACCEPTED}.")
