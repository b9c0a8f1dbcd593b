"""Photos in webdataset tars: members of one key make a sample, read where they lie."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast

from torino.core.errors import BadFile
from torino.datasets.base import (
    IMAGES,
    TEXT_COLUMNS,
    Gone,
    Photo,
    Photos,
    as_lines,
    as_texts,
    called,
    hash_of,
    limited,
    short,
    unreadable,
)

TEXT_MEMBERS = ("txt", "text", "caption", "cls", "json")  # of a sample, beside its image


class Tars(Photos):
    """Samples of webdataset tars: members of one key, an image among them, read where they lie."""

    def __init__(self, files: Sequence[Path], limit: int | None) -> None:
        samples: list[tuple[str, Path, dict[str, tuple[int, int]]]] = []
        for path in files:
            samples += [(key, path, members) for key, members in _members(path).items() if _picture_in(members)]
            if limit is not None and len(samples) >= limit:
                break
        if not samples:
            raise BadFile(f"There are no images in {called(*files)}. Images end in {', '.join(IMAGES)}.")
        chosen, describe = limited(samples, limit, called(*files))
        sizes = [(key, sorted((name, size) for name, (_, size) in members.items())) for key, _, members in chosen]
        super().__init__([key for key, _, _ in chosen], hash_of("tar", *sizes), describe)
        self._samples = chosen

    def _photo(self, index: int) -> Photo:
        _, path, members = self._samples[index]
        picture = _picture_in(members)
        wanted = [picture, *(name for name in TEXT_MEMBERS if name in members)]
        read: dict[str, bytes] = {}
        if not path.is_file():
            raise Gone(path)
        with path.open("rb") as file:
            for name in wanted:
                start, size = members[name]
                file.seek(start)
                read[name] = file.read(size)
        data = read.pop(picture)
        return Photo(self._names[index], data, next((texts for each in read.items() if (texts := _said(*each))), ()))


def _members(path: Path) -> dict[str, dict[str, tuple[int, int]]]:
    """Where the members of each sample lie: by key, then by ending, offset and size."""
    samples: dict[str, dict[str, tuple[int, int]]] = {}
    try:
        with tarfile.open(path, "r:") as file:
            for member in file:
                folder, _, base = member.name.rpartition("/")
                key, _, ending = base.partition(".")
                if member.isfile() and key and ending:
                    samples.setdefault(f"{folder}/{key}" if folder else key, {}).setdefault(
                        ending.lower(), (member.offset_data, member.size)
                    )
    except tarfile.TarError as error:
        raise BadFile(f"{path} is no tar, compressed, or cut off ({short(error)}). Unpack or fetch it anew.") from error
    except OSError as error:
        raise unreadable(path, error) from error
    return samples


def _picture_in(members: Iterable[str]) -> str:
    """The ending of the image among the members of a sample: ``jpg`` before ``seg.png``."""
    found = [name for name in members if f".{name.rpartition('.')[2]}" in IMAGES]
    return min(found, key=lambda name: name.count("."), default="")


def _said(ending: str, data: bytes) -> tuple[str, ...]:
    if ending != "json":
        return as_lines(data)
    try:
        value: Any = json.loads(data)
    except ValueError:  # a note beside the photo, no reason to lose the photo
        return ()
    fields = cast(dict[str, Any], value) if isinstance(value, dict) else {}
    return next((texts for name in TEXT_COLUMNS if (texts := as_texts(fields.get(name)))), ())
