"""Captioned photos, and images generated from them: collages, small shapes, signs and drawn scenes, with questions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from random import Random

from PIL import Image

from torino.core.errors import BadParameter
from torino.datasets import open_photos
from torino.datasets.images import Picture, open_image
from torino_lab import pictures
from torino_lab.collages import Collages, scale_and_crop
from torino_lab.facts import read_facts
from torino_lab.pictures import SIDE
from torino_lab.questions import ImageQuestion, QuestionMaker, fit_budget

ON_PHOTO = 0.6  # share of images of small shapes and signs that have a photo as background
SHARE = 0.35  # share of the questions about such an image that are about the photo

AskFunction = Callable[[Random], tuple[ImageQuestion, ...]]
ImageMaker = Callable[[Random], tuple[Image.Image, AskFunction]]
CaptionedPhoto = tuple[str, Picture, Sequence[str]]
"""A photo: its name, its file or the contents of the file, and its captions."""


def read_photos(sources: Iterable[str | Path]) -> list[CaptionedPhoto]:
    """Read the photos of several sources, see :func:`torino.datasets.open_photos`, into memory."""
    return [(photo.name, photo.data, photo.texts) for source in sources for photo in open_photos(source)]


class Corpus:
    """Generate images from photos, and questions about them.

    Parameters
    ----------
    photos : sequence of (name, bytes, captions)

    Examples
    --------
    >>> image, ask = Corpus(photos).make_image("collage", Random(0))  # doctest: +SKIP
    >>> ask(Random(1))[0].text  # doctest: +SKIP
    'What is in the photo at the top left?'
    """

    def __init__(self, photos: Sequence[CaptionedPhoto]) -> None:
        if not photos:
            raise BadParameter("A corpus needs at least one photo with captions, got none.")
        self._photos = photos
        self.facts = [read_facts(captions) for _, _, captions in photos]
        self.question_maker = QuestionMaker(self.facts)
        self.collages = Collages(self.facts, self.question_maker, self.open_photo)
        self._makers: dict[str, ImageMaker] = {
            "collage": self._collage,
            "small": lambda rng: self._over(pictures.small_shapes, rng),
            "sign": lambda rng: self._over(pictures.sign_scene, rng),
            "shapes": lambda rng: _fitted(pictures.shape_scene(rng)),
        }

    def make_image(self, kind: str, rng: Random) -> tuple[Image.Image, AskFunction]:
        """Return a new image of a kind (collage, small, sign, shapes), and a function that asks about it."""
        return self._makers[kind](rng)

    def open_photo(self, index: int) -> Image.Image:
        """Open a photo, upright in RGB, in its original size."""
        return open_image(self._photos[index][1])

    def crop_photo(self, index: int) -> Image.Image:
        """Return a photo with its short side scaled to 336 pixels, cropped to its center square."""
        return scale_and_crop(self.open_photo(index), (SIDE, SIDE))

    def _collage(self, rng: Random) -> tuple[Image.Image, AskFunction]:
        image, cells = self.collages.make(rng)
        return image, lambda ask: fit_budget(self.collages.ask(cells, ask), ask)

    def _over(
        self, make: Callable[[Image.Image | None, Random], pictures.DrawnImage], rng: Random
    ) -> tuple[Image.Image, AskFunction]:
        """Draw over a photo or a plain background, and ask about both."""
        if rng.random() >= ON_PHOTO:
            return _fitted(make(None, rng))
        photo = rng.randrange(len(self._photos))
        image, questions = make(self.crop_photo(photo), rng)
        return image, lambda ask: fit_budget([*self.question_maker.ask(self.facts[photo], ask, SHARE), *questions], ask)


def _fitted(drawn: pictures.DrawnImage) -> tuple[Image.Image, AskFunction]:
    return drawn[0], lambda ask: fit_budget(drawn[1], ask)
