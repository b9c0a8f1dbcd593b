"""What the lab's model is trained on: photos and made pictures, each with several questions, by index.

``corpus[i]`` depends on the photos, the seed and ``i`` alone, so a run can stop and go on anywhere, and features of the
pictures can be computed once and kept.
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
from torino_lab.collages import Collages, cover
from torino_lab.facts import Facts, read_facts
from torino_lab.pictures import SIDE
from torino_lab.questions import Asker, Question, fit

__all__ = ["MIXTURE", "Corpus", "Example", "Question", "check_apart", "read_photos", "spoil"]

MIXTURE = {"photo": 50, "spoiled": 6, "collage": 20, "small": 8, "sign": 8, "shapes": 5, "bars": 3}
"""Pictures of each sort in every hundred."""
ON_PHOTO = 0.6  # share of small shapes and signs that lie on a photo, the others on plain ground
SHARE = 0.35  # of the questions about such a picture that are about the photo below
FAULTS = ("blurred", "dark")

_Ask = Callable[[Random], tuple[Question, ...]]
_Maker = Callable[[int, Random], tuple[Image.Image, _Ask]]
Given = tuple[str, Picture, Sequence[str]]
"""A photo: its name, its file or the bytes of it, its captions."""


def read_photos(sources: Iterable[str | Path]) -> list[Given]:
    """Photos of several sources (see :func:`torino.datasets.open_photos`), one after the other, kept in memory."""
    return [(photo.name, photo.data, photo.texts) for source in sources for photo in open_photos(source)]


def check_apart(trained: Sequence[Given], held: Sequence[Given]) -> None:
    """Refuse photos to test on that were trained on, by name or by the bytes of the file."""
    names = {name for name, _, _ in trained}
    files = {data for _, data, _ in trained if isinstance(data, bytes)}
    both = [name for name, data, _ in held if name in names or (isinstance(data, bytes) and data in files)]
    if both:
        raise BadParameter(
            f"{len(both)} of {len(held)} photos to test on are among those trained on, such as {both[0]}. "
            "Give photos that the model has not seen."
        )


@dataclass(frozen=True)
class Example:
    """A picture of 336 x 336 pixels with questions about it."""

    name: str
    image: Image.Image
    questions: tuple[Question, ...]


class Corpus:
    """Pictures with questions.

    Parameters
    ----------
    photos : sequence of (name, bytes, captions)
        The training photos.
    seed : int
    length : int, optional
        By default so many that every photo comes once.
    asker : Asker, optional
        Where the negatives come from; by default from these photos.

    Examples
    --------
    >>> corpus = Corpus(photos)  # doctest: +SKIP
    >>> corpus[7].questions[0]  # doctest: +SKIP
    Question(kind='presence', text='Is there a dog in the photo?', answer='yes', answers=(), options=())
    """

    def __init__(
        self, photos: Sequence[Given], *, seed: int = 0, length: int | None = None, asker: Asker | None = None
    ) -> None:
        if not photos:
            raise BadParameter("A corpus needs at least one photo with captions, got none.")
        self._photos = photos
        self.seed = seed
        self.facts = [read_facts(captions) for _, _, captions in photos]
        self.asker = asker or Asker(self.facts)
        self.collages = Collages(self.facts, self.asker, self.photo)
        self._order = [kind for kind, share in MIXTURE.items() for _ in range(share)]
        Random(f"{seed}:order").shuffle(self._order)
        self._length = -(-len(photos) * len(self._order) // MIXTURE["photo"]) if length is None else length
        self._turns: dict[int, list[int]] = {}
        self._makers: dict[str, _Maker] = {
            "photo": self._plain,
            "spoiled": self._spoiled,
            "collage": self._collage,
            "small": self._small,
            "sign": self._sign,
            "shapes": lambda _, draw: _fitted(pictures.shapes(draw)),
            "bars": lambda _, draw: _fitted(pictures.bars(draw)),
        }

    def __len__(self) -> int:
        return self._length

    @property
    def fingerprint(self) -> str:
        """Of the photos: their names and captions, in order."""
        told = "\n".join(f"{name}\t{'|'.join(captions)}" for name, _, captions in self._photos)
        return blake2b(told.encode(), digest_size=8).hexdigest()

    def kinds(self, index: int) -> str:
        """The sort of picture at an index: one of the keys of :data:`MIXTURE`."""
        return self._order[self._checked(index) % len(self._order)]

    def __getitem__(self, index: int) -> Example:
        return self.turns(index, 1)[0]

    def turns(self, index: int, count: int) -> list[Example]:
        """One picture, asked about ``count`` times; the first time as ``corpus[index]``."""
        index = self._checked(index)
        kind = self.kinds(index)
        # what is drawn and what is asked have generators of their own: new questions leave the pictures as they are
        image, ask = self._makers[kind](index, Random(f"{self.seed}:{index}"))
        seeds = [f"{self.seed}:{index}:ask" + (f":{turn}" if turn else "") for turn in range(count)]
        return [Example(f"{kind}-{index}", image, ask(Random(seed))) for seed in seeds]

    def photo(self, index: int) -> Image.Image:
        """A photo, upright in RGB, in its own size."""
        return open_image(self._photos[index][1])

    def shown(self, index: int) -> int | None:
        """Which photo a picture of the sort ``photo`` shows; each comes once before any comes twice."""
        index = self._checked(index)
        if self.kinds(index) != "photo":
            return None
        rounds, place = divmod(index, len(self._order))
        before = rounds * MIXTURE["photo"] + self._order[:place].count("photo")
        turn, at = divmod(before, len(self._photos))
        return self._shuffled(turn)[at]

    # -------------------------------------------------------------- sorts of pictures

    def _plain(self, index: int, _: Random) -> tuple[Image.Image, _Ask]:
        photo = self.shown(index)
        assert photo is not None
        return self.square(photo), lambda ask: self._about(self.facts[photo], ask, "nothing")

    def _spoiled(self, _: int, draw: Random) -> tuple[Image.Image, _Ask]:
        photo = draw.randrange(len(self._photos))
        fault = draw.choice(FAULTS)
        return spoil(self.square(photo), fault, draw), lambda ask: self._about(self.facts[photo], ask, fault)

    def _about(self, facts: Facts, ask: Random, fault: str) -> tuple[Question, ...]:
        asked = self.asker.ask(facts, ask)
        if fault != "nothing" or ask.random() < 0.06:
            asked = (*asked[:-1], Question("quality", "What is wrong with the photo?", fault))
        return asked

    def _collage(self, _: int, draw: Random) -> tuple[Image.Image, _Ask]:
        picture, cells = self.collages.make(draw)
        return picture, lambda ask: fit(self.collages.ask(cells, ask), ask)

    def _small(self, _: int, draw: Random) -> tuple[Image.Image, _Ask]:
        return self._over(pictures.small, draw)

    def _sign(self, _: int, draw: Random) -> tuple[Image.Image, _Ask]:
        return self._over(pictures.signs, draw)

    def _over(
        self, make: Callable[[Image.Image | None, Random], pictures.Drawn], draw: Random
    ) -> tuple[Image.Image, _Ask]:
        """Something drawn over a photo, or on plain ground, with questions about both."""
        if draw.random() >= ON_PHOTO:
            return _fitted(make(None, draw))
        photo = draw.randrange(len(self._photos))
        picture, asked = make(self.square(photo), draw)
        return picture, lambda ask: fit([*self.asker.ask(self.facts[photo], ask, SHARE), *asked], ask)

    # -------------------------------------------------------------- small helpers

    def square(self, photo: int) -> Image.Image:
        """A photo as the tower's processor would cut it: the short side scaled to 336 pixels, the middle kept."""
        return cover(self.photo(photo), (SIDE, SIDE))

    def _shuffled(self, turn: int) -> list[int]:
        if turn not in self._turns:
            order = list(range(len(self._photos)))
            Random(f"{self.seed}:turn:{turn}").shuffle(order)
            self._turns[turn] = order
        return self._turns[turn]

    def _checked(self, index: int) -> int:
        if not -self._length <= index < self._length:
            raise IndexError(f"The corpus has {self._length} pictures, index {index} is none of them.")
        return index % self._length


def spoil(image: Image.Image, fault: str, rng: Random) -> Image.Image:
    """Blur or darken a photo, as the photos of people who cannot see are."""
    if fault == "blurred":
        return image.filter(ImageFilter.GaussianBlur(rng.uniform(2.5, 5.0)))
    return ImageEnhance.Brightness(image).enhance(rng.uniform(0.22, 0.45))


def _fitted(drawn: pictures.Drawn) -> tuple[Image.Image, _Ask]:
    return drawn[0], lambda ask: fit(drawn[1], ask)
