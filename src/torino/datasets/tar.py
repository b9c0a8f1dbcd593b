"""Photos in webdataset tar files, read without unpacking."""

from __future__ import annotations

import tarfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from torino.core.errors import BadFile
from torino.core.safety import check_size
from torino.core.schema import JSON_SHARE, parse_json
from torino.datasets.base import (
    IMAGE_SUFFIXES,
    TEXT_COLUMNS,
    Photo,
    Photos,
    SourceUnavailable,
    format_error,
    hash_parts,
    parse_lines,
    parse_texts,
    source_name,
    take_first,
    unreadable_error,
)

TEXT_MEMBERS = ("txt", "text", "caption", "cls", "json")  # members of a sample that hold its captions


class TarPhotos(Photos):
    """Samples of webdataset tar files: members with the same key, one of them an image."""

    def __init__(self, files: Sequence[Path], limit: int | None) -> None:
        samples: list[tuple[str, Path, dict[str, tuple[int, int]]]] = []
        for path in files:
            samples += [(key, path, members) for key, members in _index(path).items() if _find_image(members)]
            if limit is not None and len(samples) >= limit:
                break
        if not samples:
            raise BadFile(f"There are no images in {source_name(*files)}. Images end in {', '.join(IMAGE_SUFFIXES)}.")
        selected, describe = take_first(samples, limit, source_name(*files))
        sizes = [(key, sorted((name, size) for name, (_, size) in members.items())) for key, _, members in selected]
        super().__init__([key for key, _, _ in selected], hash_parts("tar", *sizes), describe)
        self._samples = selected

    def _photo(self, index: int) -> Photo:
        _, path, members = self._samples[index]
        image = _find_image(members)
        if not path.is_file():
            raise SourceUnavailable(path)
        contents: dict[str, bytes] = {}
        with path.open("rb") as file:
            for name in [image, *(name for name in TEXT_MEMBERS if name in members)]:
                start, size = members[name]
                check_size(f"{self._names[index]}.{name} in {path}", size, JSON_SHARE if name == "json" else 1)
                file.seek(start)
                contents[name] = file.read(size)
        data = contents.pop(image)
        texts = next((texts for name, content in contents.items() if (texts := _parse_captions(name, content))), ())
        return Photo(self._names[index], data, texts)


def _index(path: Path) -> dict[str, dict[str, tuple[int, int]]]:
    """Return offset and size of every member of a tar, by sample key and file ending."""
    samples: dict[str, dict[str, tuple[int, int]]] = {}
    try:
        with tarfile.open(path, "r:") as file:
            for member in file:
                folder, _, base = member.name.rpartition("/")
                key, _, ending = base.partition(".")
                if member.issparse():
                    raise tarfile.TarError(f"{member.name} is stored as a sparse file")
                if member.isfile() and key and ending:
                    samples.setdefault(f"{folder}/{key}" if folder else key, {}).setdefault(
                        ending.lower(), (member.offset_data, member.size)
                    )
    except tarfile.TarError as error:
        raise BadFile(
            f"{path} is not a tar file, is compressed, or is cut off ({format_error(error)}). "
            "Unpack it to an uncompressed .tar, or download it again."
        ) from error
    except OSError as error:
        raise unreadable_error(path, error) from error
    return samples


def _find_image(members: Iterable[str]) -> str:
    """Return the ending of the image among the members of a sample; ``jpg`` has precedence over ``seg.png``."""
    images = [name for name in members if f".{name.rpartition('.')[2]}" in IMAGE_SUFFIXES]
    return min(images, key=lambda name: name.count("."), default="")


def _parse_captions(ending: str, data: bytes) -> tuple[str, ...]:
    if ending != "json":
        return parse_lines(data)
    try:
        fields: dict[str, Any] = parse_json(data, dict)
    except ValueError:  # a broken caption file does not make the photo unusable
        return ()
    return next((texts for name in TEXT_COLUMNS if (texts := parse_texts(fields.get(name)))), ())
