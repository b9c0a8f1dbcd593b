"""Looking at photos with a tower, to judge concepts by them: tokens, embeddings, and what the tower saw."""

from __future__ import annotations

from typing import Any, Protocol

from PIL import Image

from torino.core.errors import BadFile, BadParameter, TorinoError
from torino.core.tokens import VisualTokens
from torino.datasets import Gone, printable
from torino.datasets.images import Padding, as_seen, mean_colour, open_image, prepare
from torino.interpret.top_activations import View, embedding_of
from torino.training.activations.extraction import hash_of_tower
from torino.vlm.towers import Tower


class PhotoReader(Protocol):
    """What :func:`torino.datasets.open_photos` gives."""

    fingerprint: str
    describe: str

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


class Looking:
    """Photos, looked at as they are asked for.

    Parameters
    ----------
    photos : PhotoReader
    tower : Tower
        The one whose tokens the SAE reads.
    judge : Tower, optional
        The one that says how alike photos are, by its CLS token or the mean of its patches. By default the tower
        itself, which costs nothing more; an independent judge is fairer, as it cannot share the tower's blind spots.
    padding : {"crop", "square"}
        See :func:`torino.datasets.images.prepare`.
    """

    def __init__(
        self, photos: PhotoReader, tower: Tower, judge: Tower | None = None, *, padding: Padding = "crop"
    ) -> None:
        if not len(photos):
            raise BadParameter("There are no photos to look at. Give a folder or file that has some.")
        self.photos, self.tower, self.judge = photos, tower, judge
        self.padding: Padding = padding

    @property
    def about(self) -> dict[str, str]:
        """Which photos, tower and judge these are."""
        judge = self.judge or self.tower
        return {
            "photos": self.photos.describe,
            "fingerprint": self.photos.fingerprint,
            "tower": str(self.tower.origin),
            "weights": " ".join(hash_of_tower(tower) for tower in (self.tower, self.judge) if tower is not None),
            "padding": self.padding,
            "judge": f"{'CLS token' if judge.has_cls else 'mean of patches'} of {judge.origin}",
        }

    def __len__(self) -> int:
        """Return the number of photos."""
        return len(self.photos)

    def views(self, start: int, stop: int) -> list[View | str]:
        """Look at photos ``start`` to ``stop``; one that cannot be used gives the sentence that says why."""
        seen: list[View | str] = []
        opened: list[tuple[int, Image.Image]] = []
        for place, index in enumerate(range(start, min(stop, len(self)))):
            try:
                opened.append((place, self._prepared(index)))
                seen.append("")
            except Gone:  # not the fault of this photo, nor of those after it
                raise
            except BadFile as error:
                seen.append(printable(str(error)))
            except OSError as error:  # of a caption beside it
                seen.append(f"Photo {index} cannot be read: {error.strerror or error}.")
        try:
            views: list[View | str] = [*self._views([picture for _, picture in opened])]
        except TorinoError:  # which of them was it?
            views = [self._alone(picture) for _, picture in opened]
        for (place, _), view in zip(opened, views, strict=True):
            seen[place] = view
        return seen

    def _views(self, pictures: list[Image.Image]) -> list[View]:
        tokens = self._look(self.tower, pictures)
        embeddings = tokens if self.judge is None else self._look(self.judge, pictures)
        return [View(mine, embedding_of(theirs)) for mine, theirs in zip(tokens, embeddings, strict=True)]

    def _alone(self, picture: Image.Image) -> View | str:
        try:
            return self._views([picture])[0]
        except TorinoError as error:
            return str(error)

    @staticmethod
    def _look(tower: Tower, pictures: list[Image.Image]) -> list[VisualTokens]:
        return tower.look(pictures, batch=len(pictures)) if pictures else []

    def picture(self, index: int) -> Image.Image:
        """A photo as the tower sees it, scaled and cropped."""
        picture = self._prepared(index)
        inputs = self.tower.processor(images=[picture], return_tensors="pt")
        return as_seen(inputs, self.tower.processor, [picture])[0]

    def texts(self) -> list[tuple[str, ...]]:
        """Captions or labels of all photos; empty tuples where there are none."""
        said: list[tuple[str, ...]] = []
        for index in range(len(self)):
            try:
                said.append(tuple(self.photos[index].texts))
            except Gone:
                raise
            except (BadFile, OSError):  # listed when it was looked at
                said.append(())
        return said

    def _prepared(self, index: int) -> Image.Image:
        return prepare(open_image(self.photos[index].data), self.padding, mean_colour(self.tower.processor))
