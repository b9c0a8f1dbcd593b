"""The photos that a visitor can choose: bundled ones, a collection, uploads, and the samples of runs."""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
import threading
import warnings
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from torino.core.errors import BadFile
from torino.core.extras import optional_import
from torino.core.io import write_atomic
from torino.datasets import Photo, Photos
from torino.datasets.bundled import PHOTOS, example_folder
from torino.datasets.images import image_size, open_image
from torino.explorer.options import ExplorerOptions
from torino.explorer.runs import RunBrowser
from torino.serving.server.errors import ApiError, bad_request

with optional_import("torino explore needs", "torino[serve]"):
    from PIL import Image

CROP_SHARE = 0.6  # side of a crop of a bundled photo
CORNERS = ("top left", "top right", "bottom left", "bottom right", "center")
_UPLOAD = re.compile(r"upload-[0-9a-f]{24}")
_SAMPLE = re.compile(r"run(\d{1,4})-([A-Za-z0-9_-]{1,800})")


@dataclass(frozen=True, eq=False)
class LibraryPhoto:
    """A photo with the name under which it is shown.

    Attributes
    ----------
    id : str
        Its name in addresses of the page.
    name : str
    image : PIL.Image.Image
        Upright RGB.
    texts : tuple of str
        Captions.
    notes : tuple of str
        What a visitor should know, for example that only the first frame is used.
    """

    id: str
    name: str
    image: Image.Image
    texts: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


class BundledCrops:
    """The bundled photos and five crops of each: a small collection for the concept atlas."""

    fingerprint = "bundled photos and crops/1"
    describe = "4 bundled photos and 20 crops of them"

    def __len__(self) -> int:
        """Return the number of photos and crops."""
        return len(PHOTOS) * (1 + len(CORNERS))

    def __getitem__(self, index: int) -> Photo:
        """Return a photo or a crop; the whole photos come first."""
        if index < len(PHOTOS):
            return Photo(PHOTOS[index], _open_bundled(PHOTOS[index]))
        crop, number = divmod(index - len(PHOTOS), len(PHOTOS))
        image = _open_bundled(PHOTOS[number])
        width, height = (round(CROP_SHARE * side) for side in image.size)
        right, below = image.width - width, image.height - height
        left, top = ((0, 0), (right, 0), (0, below), (right, below), (right // 2, below // 2))[crop]
        return Photo(f"{PHOTOS[number]}, {CORNERS[crop]}", image.crop((left, top, left + width, top + height)))


@lru_cache(len(PHOTOS))
def _open_bundled(name: str) -> Image.Image:
    return open_image(example_folder() / "photos" / f"{name}.jpg")


class PhotoLibrary:
    """All photos of an explorer. Uploads are kept in memory and forgotten, unless their owner asks to store them.

    Parameters
    ----------
    options : ExplorerOptions
    collection : Photos, optional
        Photos of the user; the bundled ones are offered without it.
    runs : sequence of RunBrowser
    folder : Path
        Folder for photos that a visitor asks to store.
    """

    def __init__(
        self, options: ExplorerOptions, collection: Photos | None, runs: Sequence[RunBrowser], folder: Path
    ) -> None:
        self.options, self.collection, self.runs, self.folder = options, collection, runs, folder
        self._uploads: OrderedDict[str, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def list(self, search: str = "", offset: int = 0, limit: int = 60) -> dict[str, Any]:
        """Return one page of the photos that can be picked, and how many there are."""
        if self.collection is None:
            entries = [{"id": f"bundled-{name}", "name": name} for name in PHOTOS]
        else:
            names = enumerate(self.collection.names())
            entries = [{"id": f"photo-{number}", "name": name} for number, name in names]
        word = search.strip().lower()
        entries = [entry for entry in entries if word in entry["name"].lower()]
        return {"total": len(entries), "photos": entries[offset : offset + limit]}

    def open(self, photo: str) -> LibraryPhoto:
        """Open a photo by its id.

        Raises
        ------
        ApiError
            With status 404 if there is no such photo, and 400 if it cannot be read.
        """
        name, data, texts = self._find(photo)
        image, notes = self._decode(data)
        return LibraryPhoto(photo, name, image, texts, notes)

    def add(self, data: bytes, store: bool = False) -> LibraryPhoto:
        """Accept a photo of a visitor; with ``store`` it is also written to the folder, so that links keep working."""
        if not data:
            raise bad_request("The photo is empty. Choose a JPEG, PNG, WebP, GIF, BMP or TIFF file.")
        if store and not self.options.edits:
            raise ApiError(403, "This explorer stores nothing: it was started with --read-only.", "edits")
        image, notes = self._decode(data)
        identifier = f"upload-{hashlib.sha256(data).hexdigest()[:24]}"
        if store:
            write_atomic(self.folder / identifier, lambda target: _write(target, data))
        with self._lock:
            self._uploads[identifier] = data
            self._uploads.move_to_end(identifier)
            while len(self._uploads) > self.options.uploads:
                self._uploads.popitem(last=False)
        return LibraryPhoto(identifier, "your photo", image, (), notes)

    def forget(self, photo: str) -> None:
        """Delete an upload from memory and from the folder."""
        if not _UPLOAD.fullmatch(photo):
            raise bad_request("Only your own photos can be forgotten.")
        with self._lock:
            self._uploads.pop(photo, None)
        (self.folder / photo).unlink(missing_ok=True)

    def is_stored(self, photo: str) -> bool:
        """Return whether an upload is in the folder."""
        return bool(_UPLOAD.fullmatch(photo)) and (self.folder / photo).is_file()

    # ------------------------------------------------------------------ sources

    def _find(self, photo: str) -> tuple[str, Any, tuple[str, ...]]:
        """Return name, data and captions of a photo."""
        kind, _, rest = photo.partition("-")
        if kind == "bundled" and rest in PHOTOS:
            return rest, example_folder() / "photos" / f"{rest}.jpg", ()
        if kind == "photo" and self.collection is not None and re.fullmatch(r"\d{1,9}", rest):
            if int(rest) < len(self.collection):
                found = self.collection[int(rest)]
                return found.name, found.data, tuple(found.texts)
        elif _UPLOAD.fullmatch(photo):
            data = self._uploads.get(photo)
            if data is None and (self.folder / photo).is_file():
                data = (self.folder / photo).read_bytes()
            if data is not None:
                return "your photo", data, ()
            raise ApiError(404, "This photo is no longer in memory, and it was not stored. Choose it again.", "photo")
        elif match := _SAMPLE.fullmatch(photo):
            number, (task, index) = int(match[1]), decode_sample(match[2])
            if number < len(self.runs):
                return f"{task} {index}", self.runs[number].image(task, index), ()
        raise ApiError(404, f"There is no photo {photo[:60]!r}.", "photo")

    def _decode(self, data: Any) -> tuple[Image.Image, tuple[str, ...]]:
        """Open an image within the limits; a second frame is a note, not an error."""
        if isinstance(data, Image.Image):
            return open_image(data), ()
        try:
            width, height = image_size(data)
            if width * height > self.options.max_pixels:
                raise bad_request(
                    f"The photo has {width}x{height} pixels; this explorer accepts up to {self.options.max_pixels:,}. "
                    "Scale it down first."
                )
            if max(width, height) < 2:
                raise bad_request("The photo is a single pixel. Choose a larger one.")
            with self._lock, warnings.catch_warnings(record=True) as caught:  # the filters are those of the process
                warnings.simplefilter("always")
                image = open_image(data)
        except BadFile as error:
            raise bad_request(str(error)) from error
        several = any("several frames" in str(item.message) for item in caught)
        return image, ("It has several frames; only the first is shown.",) if several else ()


def encode_sample(run: int, task: str, index: str) -> str:
    """Return the id of the photo of a sample."""
    name = base64.urlsafe_b64encode(f"{task}\0{index}".encode()).decode()
    return f"run{run}-{name.rstrip('=')}"


def decode_sample(text: str) -> tuple[str, str]:
    """Return task and index of a sample from the second part of its photo's id."""
    try:
        task, _, index = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)).decode().partition("\0")
    except (binascii.Error, UnicodeDecodeError, ValueError) as error:
        raise ApiError(404, "There is no such sample.", "photo") from error
    return task, index


def _write(target: Path, data: bytes) -> None:
    target.write_bytes(data)
