"""Choosing questions for a benchmark, so that neither an answer nor a letter is right more often than it must be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from random import Random
from typing import Generic, TypeVar

from PIL import Image

from torino_lab.questions import LETTERS, Question

POOL = 2  # times as many questions are made as are taken
Asked = tuple[Image.Image, Sequence[Question]]
One = TypeVar("One")


class Shelf(Generic[One]):
    """Things in one order, made when they are first wanted: who begins again gets the same ones.

    A picture costs more than a question about it, so those who ask share pictures.
    """

    def __init__(self, source: Iterator[One]) -> None:
        self._source, self._held = source, list[One]()

    def __iter__(self) -> Iterator[One]:
        """Go through all from the first."""
        for at in count():
            if at == len(self._held):
                one = next(self._source, None)
                if one is None:
                    return
                self._held.append(one)
            yield self._held[at]


@dataclass(frozen=True)
class Item:
    """A question of a benchmark about a picture; several items may share one.

    ``answers`` are those of several people, where the rule wants them, else empty.
    """

    picture: Image.Image
    question: Question
    category: str
    answers: tuple[str, ...] = ()


class Even:
    """Chooses names so that each is right about as often as it is wrong."""

    def __init__(self, rng: Random) -> None:
        self._rng, self._more = rng, Counter[str]()

    def yes(self, names: Sequence[str]) -> str:
        """One of the names, to be asked for where it is."""
        name = min(self._rng.sample(names, len(names)), key=lambda name: self._more[name])
        self._more[name] += 1
        return name

    def no(self, names: Sequence[str]) -> str:
        """One of the names, to be asked for where it is not."""
        name = max(self._rng.sample(names, len(names)), key=lambda name: self._more[name])
        self._more[name] -= 1
        return name


def pick(
    source: Iterable[Asked],
    kinds: Sequence[str],
    category: str,
    wanted: int,
    rng: Random,
    *,
    most: int = 1,
    begins: str = "",
) -> list[Item]:
    """Take questions of some kinds, ``most`` of a picture, until there is a pool to level the answers from."""
    pool: list[Item] = []
    for picture, asked in islice(source, 40 * POOL * wanted):
        able = [one for one in asked if one.kind in kinds and one.stem.startswith(begins)]
        pool += [Item(picture, one, category) for one in rng.sample(able, min(most, len(able)))]
        if len(pool) >= POOL * wanted:
            break
    return level(pool, wanted, rng)


def pairs(source: Iterable[Asked], category: str, wanted: int) -> list[Item]:
    """Pictures with one question to answer by yes and one by no."""
    items: list[Item] = []
    for picture, asked in islice(source, 40 * POOL * wanted):
        yes, no = (next((one for one in asked if one.answer == answer), None) for answer in ("yes", "no"))
        if yes and no:
            items += [Item(picture, yes, category), Item(picture, no, category)]
        if len(items) >= 2 * wanted:
            break
    return items


def level(pool: Sequence[Item], wanted: int, rng: Random) -> list[Item]:
    """Choose items so that no answer is more frequent than it must be; of a choice the text of the answer counts.

    Of each answer the first items are taken, so that parts which share pictures share the first ones.
    """
    groups: dict[str, list[Item]] = {}
    for item in pool:
        groups.setdefault(_right(item.question), []).append(item)
    answers = rng.sample(list(groups), len(groups))
    chosen: list[Item] = []
    for turn in range(max(map(len, groups.values()), default=0)):
        chosen += [groups[answer][turn] for answer in answers if turn < len(groups[answer])]
    return chosen[:wanted]


def turned(items: Sequence[Item]) -> list[Item]:
    """Move the options of choices round, so that each letter is right equally often."""
    found: list[Item] = []
    for number, item in enumerate(items):
        one = item.question
        options = list(one.options)
        turn = (LETTERS.index(one.answer) - number) % len(options)
        options = options[turn:] + options[:turn]
        lines = "\n".join(f"{letter}. {option}" for letter, option in zip(LETTERS, options, strict=False))
        text = f"{one.hint}\n{one.stem}\n{lines}" if one.hint else f"{one.stem}\n{lines}"
        answer = LETTERS[options.index(_right(one))]
        found.append(replace(item, question=replace(one, text=text, answer=answer, options=tuple(options))))
    return found


def _right(question: Question) -> str:
    return question.options[LETTERS.index(question.answer)] if question.options else question.answer
