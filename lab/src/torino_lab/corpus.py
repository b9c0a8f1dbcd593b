"""The training data of the lab's model: photos and generated images, each with several questions.

``corpus[i]`` depends only on the photos, the seed and ``i``. A killed run can therefore resume anywhere, and features
of the images can be cached.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from random import Random

from PIL import Image, ImageEnhance, ImageFilter

from torino.core.errors import BadParameter
from torino.datasets import open_photos
from torino.datasets.images import Picture, open_image
from torino_lab import pictures
from torino_lab.collages import Collages, scale_and_crop
from torino_lab.facts import Facts, read_facts
from torino_lab.pictures import SIDE
from torino_lab.questions import ImageQuestion, QuestionMaker, fit_budget

__all__ = ["MIXTURE", "Corpus", "Example", "ImageQuestion", "check_disjoint", "degrade", "read_photos"]

MIXTURE = {"photo": 50, "spoiled": 6, "collage": 20, "small": 8, "sign": 8, "shapes": 5, "bars": 3}
"""Number of images of each kind per hundred."""
ON_PHOTO = 0.6  # share of images of small shapes and signs that have a photo as background
SHARE = 0.35  # share of the questions about such an image that are about the photo
FAULTS = ("blurred", "dark")

AskFunction = Callable[[Random], tuple[ImageQuestion, ...]]
ImageMaker = Callable[[int, Random], tuple[Image.Image, AskFunction]]
CaptionedPhoto = tuple[str, Picture, Sequence[str]]
"""A photo: its name, its file or the contents of the file, and its captions."""


def read_photos(sources: Iterable[str | Path]) -> list[CaptionedPhoto]:
    """Read the photos of several sources, see :func:`torino.datasets.open_photos`, into memory."""
    return [(photo.name, photo.data, photo.texts) for source in sources for photo in open_photos(source)]


def check_disjoint(training: Sequence[CaptionedPhoto], test: Sequence[CaptionedPhoto]) -> None:
    """Refuse test photos that are among the training photos, by name or by file contents."""
    names = {name for name, _, _ in training}
    files = {data for _, data, _ in training if isinstance(data, bytes)}
    shared = [name for name, data, _ in test if name in names or (isinstance(data, bytes) and data in files)]
    if shared:
        raise BadParameter(
            f"{len(shared)} of {len(test)} photos to test on are among the training photos, such as {shared[0]}. "
            "Give photos that were not trained on."
        )


@dataclass(frozen=True)
class Example:
    """An image of 336 x 336 pixels with questions about it."""

    name: str
    image: Image.Image
    questions: tuple[ImageQuestion, ...]


class Corpus:
    """Images with questions, by index.

    Parameters
    ----------
    photos : sequence of (name, bytes, captions)
        The training photos.
    seed : int
    length : int, optional
        Number of images; by default, every photo is shown once.
    question_maker : QuestionMaker, optional
        By default one for these photos.

    Examples
    --------
    >>> corpus = Corpus(photos)  # doctest: +SKIP
    >>> corpus[7].questions[0]  # doctest: +SKIP
    ImageQuestion(kind='presence', text='Is there a dog in the photo?', answer='yes', answers=(), options=(), hint='')
    """

    def __init__(
        self,
        photos: Sequence[CaptionedPhoto],
        *,
        seed: int = 0,
        length: int | None = None,
        question_maker: QuestionMaker | None = None,
    ) -> None:
        if not photos:
            raise BadParameter("A corpus needs at least one photo with captions, got none.")
        self._photos = photos
        self.seed = seed
        self.facts = [read_facts(captions) for _, _, captions in photos]
        self.question_maker = question_maker or QuestionMaker(self.facts)
        self.collages = Collages(self.facts, self.question_maker, self.open_photo)
        self._order = [kind for kind, share in MIXTURE.items() for _ in range(share)]
        Random(f"{seed}:order").shuffle(self._order)
        self._length = -(-len(photos) * len(self._order) // MIXTURE["photo"]) if length is None else length
        self._turns: dict[int, list[int]] = {}
        self._makers: dict[str, ImageMaker] = {
            "photo": self._plain,
            "spoiled": self._degraded,
            "collage": self._collage,
            "small": self._small,
            "sign": self._sign,
            "shapes": lambda _, rng: _fitted(pictures.shape_scene(rng)),
            "bars": lambda _, rng: _fitted(pictures.bar_chart(rng)),
        }

    def __len__(self) -> int:
        return self._length

    @property
    def fingerprint(self) -> str:
        """Hash of the names and captions of the photos."""
        text = "\n".join(f"{name}\t{'|'.join(captions)}" for name, _, captions in self._photos)
        return blake2b(text.encode(), digest_size=8).hexdigest()

    def image_kind(self, index: int) -> str:
        """Return the kind of image at an index: one of the keys of :data:`MIXTURE`."""
        return self._order[self._checked(index) % len(self._order)]

    def __getitem__(self, index: int) -> Example:
        return self.ask_repeatedly(index, 1)[0]

    def ask_repeatedly(self, index: int, count: int) -> list[Example]:
        """Return one image with ``count`` sets of questions; the first equals ``corpus[index]``."""
        index = self._checked(index)
        kind = self.image_kind(index)
        # Images and questions have separate random generators, so that new questions do not change the images.
        image, ask = self._makers[kind](index, Random(f"{self.seed}:{index}"))
        seeds = [f"{self.seed}:{index}:ask" + (f":{turn}" if turn else "") for turn in range(count)]
        return [Example(f"{kind}-{index}", image, ask(Random(seed))) for seed in seeds]

    def make_image(self, kind: str, rng: Random) -> tuple[Image.Image, AskFunction]:
        """Return a new image of a generated kind, and a function that asks about it."""
        return self._makers[kind](0, rng)

    def open_photo(self, index: int) -> Image.Image:
        """Open a photo, upright in RGB, in its original size."""
        return open_image(self._photos[index][1])

    def photo_index(self, index: int) -> int | None:
        """Return which photo an image of kind ``photo`` shows; every photo is shown once before any is repeated."""
        index = self._checked(index)
        if self.image_kind(index) != "photo":
            return None
        rounds, place = divmod(index, len(self._order))
        before = rounds * MIXTURE["photo"] + self._order[:place].count("photo")
        turn, at = divmod(before, len(self._photos))
        return self._shuffled(turn)[at]

    # -------------------------------------------------------------- kinds of images

    def _plain(self, index: int, _: Random) -> tuple[Image.Image, AskFunction]:
        photo = self.photo_index(index)
        assert photo is not None
        return self.crop_photo(photo), lambda ask: self._about(self.facts[photo], ask, "nothing")

    def _degraded(self, _: int, rng: Random) -> tuple[Image.Image, AskFunction]:
        photo = rng.randrange(len(self._photos))
        fault = rng.choice(FAULTS)
        return degrade(self.crop_photo(photo), fault, rng), lambda ask: self._about(self.facts[photo], ask, fault)

    def _about(self, facts: Facts, ask: Random, fault: str) -> tuple[ImageQuestion, ...]:
        questions = self.question_maker.ask(facts, ask)
        if fault != "nothing" or ask.random() < 0.06:
            questions = (*questions[:-1], ImageQuestion("quality", "What is wrong with the photo?", fault))
        return questions

    def _collage(self, _: int, rng: Random) -> tuple[Image.Image, AskFunction]:
        image, cells = self.collages.make(rng)
        return image, lambda ask: fit_budget(self.collages.ask(cells, ask), ask)

    def _small(self, _: int, rng: Random) -> tuple[Image.Image, AskFunction]:
        return self._over(pictures.small_shapes, rng)

    def _sign(self, _: int, rng: Random) -> tuple[Image.Image, AskFunction]:
        return self._over(pictures.sign_scene, rng)

    def _over(
        self, make: Callable[[Image.Image | None, Random], pictures.DrawnImage], rng: Random
    ) -> tuple[Image.Image, AskFunction]:
        """Draw over a photo or a plain background, and ask about both."""
        if rng.random() >= ON_PHOTO:
            return _fitted(make(None, rng))
        photo = rng.randrange(len(self._photos))
        image, questions = make(self.crop_photo(photo), rng)
        return image, lambda ask: fit_budget([*self.question_maker.ask(self.facts[photo], ask, SHARE), *questions], ask)

    # -------------------------------------------------------------- helpers

    def crop_photo(self, photo: int) -> Image.Image:
        """Return a photo as the tower's processor crops it: short side scaled to 336 pixels, center crop."""
        return scale_and_crop(self.open_photo(photo), (SIDE, SIDE))

    def _shuffled(self, turn: int) -> list[int]:
        if turn not in self._turns:
            order = list(range(len(self._photos)))
            Random(f"{self.seed}:turn:{turn}").shuffle(order)
            self._turns[turn] = order
        return self._turns[turn]

    def _checked(self, index: int) -> int:
        if not -self._length <= index < self._length:
            raise IndexError(f"index must be below {self._length}, the number of images, got {index}.")
        return index % self._length


def degrade(image: Image.Image, fault: str, rng: Random) -> Image.Image:
    """Blur or darken a photo, like the photos of VizWiz."""
    if fault == "blurred":
        return image.filter(ImageFilter.GaussianBlur(rng.uniform(2.5, 5.0)))
    return ImageEnhance.Brightness(image).enhance(rng.uniform(0.22, 0.45))


def _fitted(drawn: pictures.DrawnImage) -> tuple[Image.Image, AskFunction]:
    return drawn[0], lambda ask: fit_budget(drawn[1], ask)
