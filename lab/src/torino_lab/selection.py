"""Select the questions of a benchmark so that no answer and no letter is correct more often than necessary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from random import Random
from typing import Generic, TypeVar

from PIL import Image

from torino_lab.questions import LETTERS, ImageQuestion, join_options

POOL_FACTOR = 2  # candidates generated for each selected question
MAX_TRIES = 40  # images inspected for each candidate
ImageQuestions = tuple[Image.Image, Sequence[ImageQuestion]]
T = TypeVar("T")


class Replayable(Generic[T]):
    """Cache the items of an iterator, so that several consumers iterate over the same ones.

    Items are generated on first use. Parts of a benchmark share images this way, because encoding an image costs more
    than asking another question about it.
    """

    def __init__(self, source: Iterator[T]) -> None:
        self._source, self._items = source, list[T]()

    def __iter__(self) -> Iterator[T]:
        """Iterate from the first item."""
        index = 0
        while True:
            if index == len(self._items):
                item = next(self._source, None)
                if item is None:
                    return
                self._items.append(item)
            yield self._items[index]
            index += 1


@dataclass(frozen=True)
class Item:
    """A question of a benchmark about an image; several items may share an image.

    ``answers`` are the answers of several people if the scoring rule uses them, otherwise empty.
    """

    image: Image.Image | bytes
    question: ImageQuestion
    category: str
    answers: tuple[str, ...] = ()


class AnswerBalancer:
    """Choose names so that each is asked about equally often where it is present and where it is absent."""

    def __init__(self, rng: Random) -> None:
        self._rng, self._surplus = rng, Counter[str]()

    def pick_present(self, names: Sequence[str]) -> str:
        """Choose one of the names that are present."""
        name = min(self._rng.sample(names, len(names)), key=lambda name: self._surplus[name])
        self._surplus[name] += 1
        return name

    def pick_absent(self, names: Sequence[str]) -> str:
        """Choose one of the names that are absent."""
        name = max(self._rng.sample(names, len(names)), key=lambda name: self._surplus[name])
        self._surplus[name] -= 1
        return name


def select_questions(
    source: Iterable[ImageQuestions],
    kinds: Sequence[str],
    category: str,
    total: int,
    rng: Random,
    *,
    per_image: int = 1,
    prefix: str = "",
) -> list[Item]:
    """Collect questions of some kinds, at most ``per_image`` of an image, and balance their answers."""
    pool: list[Item] = []
    for image, questions in islice(source, MAX_TRIES * POOL_FACTOR * total):
        candidates = [question for question in questions if question.kind in kinds and question.stem.startswith(prefix)]
        chosen = rng.sample(candidates, min(per_image, len(candidates)))
        pool += [Item(image, question, category) for question in chosen]
        if len(pool) >= POOL_FACTOR * total:
            break
    return balance_answers(pool, total, rng)


def select_pairs(source: Iterable[ImageQuestions], category: str, total: int) -> list[Item]:
    """Collect images with one question whose answer is yes and one whose answer is no."""
    items: list[Item] = []
    for image, questions in islice(source, MAX_TRIES * POOL_FACTOR * total):
        yes, no = (
            next((question for question in questions if question.answer == answer), None) for answer in ("yes", "no")
        )
        if yes and no:
            items += [Item(image, yes, category), Item(image, no, category)]
        if len(items) >= 2 * total:
            break
    return items


def balance_answers(pool: Sequence[Item], total: int, rng: Random) -> list[Item]:
    """Choose items so that no answer is more frequent than necessary; for choices, the text of the option counts.

    The first items of each answer are taken, so that parts which share images share the first ones.
    """
    groups: dict[str, list[Item]] = {}
    for item in pool:
        groups.setdefault(_correct_text(item.question), []).append(item)
    answers = rng.sample(list(groups), len(groups))
    chosen: list[Item] = []
    for rank in range(max(map(len, groups.values()), default=0)):
        chosen += [groups[answer][rank] for answer in answers if rank < len(groups[answer])]
    return chosen[:total]


def rotate_options(items: Sequence[Item]) -> list[Item]:
    """Rotate the options of choices, so that each letter is correct equally often."""
    rotated: list[Item] = []
    for number, item in enumerate(items):
        question = item.question
        options = list(question.options)
        shift = (LETTERS.index(question.answer) - number) % len(options)
        options = options[shift:] + options[:shift]
        answer = LETTERS[options.index(_correct_text(question))]
        text = join_options(question.stem, options, question.hint)
        rotated.append(replace(item, question=replace(question, text=text, answer=answer, options=tuple(options))))
    return rotated


def _correct_text(question: ImageQuestion) -> str:
    return question.options[LETTERS.index(question.answer)] if question.options else question.answer
