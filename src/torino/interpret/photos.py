"""Read and encode photos with a vision tower, to collect top activations."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from torino.core.errors import BadFile, BadParameter, TorinoError
from torino.core.tokens import VisualTokens
from torino.datasets import SourceUnavailable, escape_surrogates, hash_sample
from torino.datasets.images import Padding, as_seen, mean_color, open_image, prepare
from torino.interpret.top_activations import EncodedPhoto, image_embedding
from torino.training.activations.extraction import hash_tower
from torino.vlm.towers import Tower

if TYPE_CHECKING:
    from PIL import Image


class PhotoSource(Protocol):
    """The part of :class:`torino.datasets.Photos` that is used here."""

    fingerprint: str
    describe: str

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


class PhotoReader:
    """Read photos and encode them on demand.

    Parameters
    ----------
    photos : PhotoSource
        For example from :func:`torino.datasets.open_photos`.
    tower : Tower
        The tower whose tokens the SAE reads.
    embedder : Tower, optional
        The tower whose CLS token, or mean of patches, measures the similarity of photos. By default ``tower``, at no
        extra cost. Another tower gives a fairer score, because it does not share the errors of ``tower``.
    padding : {"crop", "square"}
        See :func:`torino.datasets.images.prepare`.
    """

    def __init__(
        self, photos: PhotoSource, tower: Tower, embedder: Tower | None = None, *, padding: Padding = "crop"
    ) -> None:
        if not len(photos):
            raise BadParameter("There are no photos to read. Give a folder or file that contains some.")
        self.photos, self.tower, self.embedder = photos, tower, embedder
        self.padding: Padding = padding

    @cached_property
    def _sample(self) -> str:
        return hash_sample(self.photos)

    @property
    def metadata(self) -> dict[str, str]:
        """Identification of photos, tower and embedding."""
        embedder = self.embedder or self.tower
        return {
            "photos": self.photos.describe,
            "fingerprint": self.photos.fingerprint,
            "sample": self._sample,
            "tower": str(self.tower.origin),
            "weights": " ".join(hash_tower(tower) for tower in (self.tower, self.embedder) if tower is not None),
            "padding": self.padding,
            "embedding": f"{'CLS token' if embedder.has_cls else 'mean of patches'} of {embedder.origin}",
        }

    def __len__(self) -> int:
        """Return the number of photos."""
        return len(self.photos)

    def read(self, start: int, stop: int) -> list[EncodedPhoto | str]:
        """Encode photos ``start`` to ``stop``; a photo that cannot be read becomes a sentence with the reason."""
        results: list[EncodedPhoto | str] = []
        opened: list[tuple[int, Image.Image]] = []
        for position, index in enumerate(range(start, min(stop, len(self)))):
            try:
                opened.append((position, self._prepare(index)))
                results.append("")
            except SourceUnavailable:  # concerns all photos
                raise
            except BadFile as error:
                results.append(escape_surrogates(str(error)))
            except OSError as error:  # for example of its caption file
                results.append(f"Photo {index} cannot be read: {error.strerror or error}.")
        try:
            encoded: list[EncodedPhoto | str] = [*self._encode([picture for _, picture in opened])]
        except TorinoError:  # encode one by one to find the photo that caused it
            encoded = [self._encode_single(picture) for _, picture in opened]
        for (position, _), photo in zip(opened, encoded, strict=True):
            results[position] = photo
        return results

    def _encode(self, pictures: list[Image.Image]) -> list[EncodedPhoto]:
        tokens = self._run_tower(self.tower, pictures)
        embedded = tokens if self.embedder is None else self._run_tower(self.embedder, pictures)
        return [EncodedPhoto(image, image_embedding(other)) for image, other in zip(tokens, embedded, strict=True)]

    def _encode_single(self, picture: Image.Image) -> EncodedPhoto | str:
        try:
            return self._encode([picture])[0]
        except TorinoError as error:
            return str(error)

    @staticmethod
    def _run_tower(tower: Tower, pictures: list[Image.Image]) -> list[VisualTokens]:
        return tower.encode(pictures, batch=len(pictures)) if pictures else []

    def get_picture(self, index: int) -> Image.Image:
        """Return a photo as the tower sees it, scaled and cropped."""
        picture = self._prepare(index)
        inputs = self.tower.processor(images=[picture], return_tensors="pt")
        return as_seen(inputs, self.tower.processor, [picture])[0]

    def get_texts(self) -> list[tuple[str, ...]]:
        """Return the captions or labels of all photos; an empty tuple for a photo without any."""
        texts: list[tuple[str, ...]] = []
        for index in range(len(self)):
            try:
                texts.append(tuple(self.photos[index].texts))
            except SourceUnavailable:
                raise
            except (BadFile, OSError):  # reported by read
                texts.append(())
        return texts

    def _prepare(self, index: int) -> Image.Image:
        return prepare(open_image(self.photos[index].data), self.padding, mean_color(self.tower.processor))
