"""Nine small benchmarks in the spirit of the nine big ones, made from photos the model has not seen.

They are a recipe: the same photos and the same seed give the same questions. What a photo shows is known from its
captions, what was drawn is known exactly. Answers are levelled, so that a model that does not look earns little.
Several questions are asked about a picture, since seeing it costs more than a question.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from random import Random
from typing import Any

from PIL import Image

from torino.core.errors import unknown_name
from torino_lab import pictures
from torino_lab.catalog import BENCHMARKS
from torino_lab.choosing import POOL, Asked, Even, Item, One, Shelf, level, pairs, pick, turned
from torino_lab.collages import Cell, at
from torino_lab.corpus import FAULTS, ON_PHOTO, Corpus, Given, spoil
from torino_lab.facts import Facts, only, read_facts
from torino_lab.questions import Question, named
from torino_lab.words import ACTIONS, THINGS, Word

SEED = 2024
SURE = 3  # captions that must agree
GRIDS = ((1, 2), (2, 1), (2, 2), (2, 2), (2, 3), (3, 2), (3, 3), (3, 3))
LIKELY = 8  # how many of the most common, or most tempting, things a popular or adversarial no is taken from


class TrainConfig:
    """Makes the benchmarks.

    Parameters
    ----------
    photos : sequence of (name, bytes, captions)
        Photos that were not trained on.
    seed : int
    scale : float
        Size of each benchmark, relative to the usual one.

    Examples
    --------
    >>> items = TrainConfig(photos).make("Lab-POPE")  # doctest: +SKIP
    """

    def __init__(self, photos: Sequence[Given], *, seed: int = SEED, scale: float = 1.0) -> None:
        self.corpus = Corpus(photos, seed=seed)
        self.seed, self.scale = seed, scale
        self._asker, self._collages = self.corpus.asker, self.corpus.collages
        self._shelves: dict[str, Shelf[Any]] = {}

    def make(self, name: str) -> list[Item]:
        """All questions of a benchmark."""
        if name not in BENCHMARKS:
            raise unknown_name("lab benchmark", name, BENCHMARKS)
        one = BENCHMARKS[name]
        rng = Random(f"{self.seed}:{name}")
        makers = {
            "Lab-GQA": self._gqa,
            "Lab-MMB": self._mmb,
            "Lab-MMB-CN": self._mmb_cn,
            "Lab-MME": self._mme,
            "Lab-POPE": self._pope,
            "Lab-SQA": self._sqa,
            "Lab-TextVQA": self._text,
            "Lab-VizWiz": self._vizwiz,
            "Lab-MMVet": self._mmvet,
        }
        self._shelves.clear()
        parts = {part: max(2, round(count * self.scale)) for part, count in one.parts.items()}
        items = [item for part, count in parts.items() for item in makers[name](part, count, rng)]
        return turned(items) if one.kind in ("circular", "mcq") else items

    # -------------------------------------------------------------- the nine

    def _gqa(self, part: str, count: int, rng: Random) -> list[Item]:
        if part == "colour":
            return pick(self._photos(rng, lambda facts, _: _sure_colours(facts)), ("colour",), part, count, rng, most=2)
        kinds = {"cell": "cell", "which": "which-cell", "scene": "cell-scene"}
        if part in kinds:
            return pick(self._grids(rng), (kinds[part],), part, count, rng, most=4)
        if part == "shapes":
            return pick(self._drawn(pictures.shapes, rng), ("shape-colour", "shape"), part, count, rng, most=4)
        kind = ("small",) if part == "where" else ("shape-colour", "shape")
        return pick(self._over(pictures.small, rng), kind, part, count, rng, most=2)

    def _mmb(self, part: str, count: int, rng: Random) -> list[Item]:
        return self._choices("choice", part, count, rng)

    def _mmb_cn(self, part: str, count: int, rng: Random) -> list[Item]:
        return self._choices("choice-zh", part, count, rng)

    def _choices(self, kind: str, part: str, count: int, rng: Random) -> list[Item]:
        if part == "photo":
            source = self._photos(
                rng, lambda facts, rng: self._asker.choices(facts, rng, kind == "choice-zh", SURE + 1)
            )
        elif part in ("cell", "which"):
            source = self._grids(rng)
        else:
            source = self._over(pictures.small, rng)
        which = {"cell": "What is", "which": "Which photo"}.get(part, "") if kind == "choice" else ""
        return pick(source, (kind,), part, count, rng, begins=which, most=4)

    def _mme(self, part: str, count: int, rng: Random) -> list[Item]:
        if part in ("existence", "action"):
            even = Even(rng)
            table = THINGS if part == "existence" else ACTIONS
            return pairs(self._photos(rng, lambda facts, rng: self._yes_and_no(facts, table, even, rng)), part, count)
        kind, source = {
            "cell": ("cell-presence", self._grids(rng)),
            "color": ("shape-presence", self._over(pictures.small, rng)),
        }[part]
        return pairs(((picture, [q for q in asked if q.kind == kind]) for picture, asked in source), part, count)

    def _pope(self, part: str, count: int, rng: Random) -> list[Item]:
        """Two thirds about whole photos, one third about cells of collages; yes and no even for each thing."""
        even, items = Even(rng), list[Item]()
        whole = count * 2 // 3 // 2
        source = self._photos(rng, lambda facts, rng: self._yes_and_no(facts, THINGS, even, rng, part))
        items += pairs(source, part, whole)
        cells = pairs(self._cell_pairs(part, even, rng), part, count // 2 - whole)
        return items + cells

    def _sqa(self, part: str, count: int, rng: Random) -> list[Item]:
        if part == "chart":
            return pick(self._drawn(pictures.bars, rng), ("choice-hint",), part, count, rng, most=2)
        return pick(self._drawn(pictures.shapes, rng), ("choice",), part, count, rng, most=2)

    def _text(self, part: str, count: int, rng: Random) -> list[Item]:
        return pick(self._over(pictures.signs, rng), ("text",), part, count, rng, most=2)

    def _vizwiz(self, part: str, count: int, rng: Random) -> list[Item]:
        pool: list[Item] = []
        for facts, fault, picture in self._shelf("spoilt", self._spoilt, rng):
            if part == "quality":
                found = [(Question("quality", "What is wrong with the photo?", fault), (fault,) * 5)]
            else:
                questions = [q for q in self._asker.about(facts, rng) if q.kind == part and q.answer != "none"]
                found = [(q, _each_says(q, facts)) for q in questions]
                found = [(q, said) for q, said in found if said.count(q.answer) >= SURE]
            pool += [Item(picture, question, part, said) for question, said in found[:1]]
            if len(pool) >= POOL * count:
                break
        return level(pool, count, rng)

    def _mmvet(self, part: str, count: int, rng: Random) -> list[Item]:
        if part == "rec":
            return pick(self._photos(rng, lambda facts, _: _key_words(facts)), ("caption",), part, count, rng)
        kind = "cell" if part == "rec,spat" else "photos-of"
        items = pick(self._grids(rng), (kind,), part, count, rng, most=3)
        if part != "rec,spat":
            return items
        return [_with_keys(item, THINGS[item.question.answer]) for item in items]

    # -------------------------------------------------------------- yes and no

    def _yes_and_no(
        self, facts: Facts, table: dict[str, Word], even: Even, rng: Random, how: str = "random"
    ) -> list[Question]:
        """One thing that is there and one that is not, if the captions allow both."""
        said = facts.things if table is THINGS else facts.actions
        there = [name for name, times in said.items() if times >= SURE]
        often = self._asker.often if table is THINGS else self._asker.acted
        able = [name for name in often if facts.lacks(table[name])]
        if how == "popular":
            able = sorted(able, key=lambda name: (-often[name], name))[:LIKELY]
        elif how == "adversarial":
            able = sorted(able, key=lambda name: (-self._asker.tempting(facts, name), -often[name], name))[:LIKELY]
        if not there or not able:
            return []
        stem = rng.choice(("Is there {} in the photo?", "Do you see {}?"))
        if table is not THINGS:
            stem = "Does the photo show {}?"
        return [
            Question("presence", stem.format(named(name) if table is THINGS else name), answer)
            for name, answer in ((even.yes(there), "yes"), (even.no(able), "no"))
        ]

    def _cell_pairs(self, how: str, even: Even, rng: Random) -> Iterator[Asked]:
        for picture, cells in self._shelf("collages", self._made, rng):
            cell = rng.choice(cells)
            shown = [other.label for other in cells]
            able = [name for name in self._collages.labelled if cell.facts.lacks(THINGS[name])]
            if how == "adversarial":
                able = [name for name in able if name in shown]
            elif how == "popular":
                able = sorted(able, key=lambda name: (-len(self._collages.labelled[name]), name))[:LIKELY]
            if able:
                names = ((even.yes([cell.label]), "yes"), (even.no(able), "no"))
                yield (
                    picture,
                    [Question("presence", f"Is there {named(name)} {at(cell.place)}?", said) for name, said in names],
                )

    # -------------------------------------------------------------- pictures

    def _shelf(self, name: str, source: Callable[[Random], Iterator[One]], rng: Random) -> Shelf[One]:
        """Pictures that all parts of a benchmark share; the first that wants them says by what chance."""
        if name not in self._shelves:
            self._shelves[name] = Shelf(source(Random(rng.getrandbits(64))))
        return self._shelves[name]

    def _photos(self, rng: Random, ask: Callable[[Facts, Random], Sequence[Question]]) -> Iterator[Asked]:
        for facts, picture in self._shelf("photos", self._whole, rng):
            asked = ask(facts, rng)
            if asked:
                yield picture, asked

    def _grids(self, rng: Random) -> Shelf[Asked]:
        return self._shelf("grids", self._about_grids, rng)

    def _over(self, make: Callable[[Image.Image | None, Random], pictures.Drawn], rng: Random) -> Shelf[Asked]:
        def source(rng: Random) -> Iterator[Asked]:
            while True:
                photo = self.corpus.square(rng.randrange(len(self.corpus.facts))) if rng.random() < ON_PHOTO else None
                yield make(photo, rng)

        return self._shelf(make.__name__, source, rng)

    def _drawn(self, make: Callable[[Random], pictures.Drawn], rng: Random) -> Shelf[Asked]:
        def source(rng: Random) -> Iterator[Asked]:
            while True:
                yield make(rng)

        return self._shelf(make.__name__, source, rng)

    def _order(self, rng: Random) -> list[int]:
        return rng.sample(range(len(self.corpus.facts)), len(self.corpus.facts))

    def _whole(self, rng: Random) -> Iterator[tuple[Facts, Image.Image]]:
        for index in self._order(rng):
            yield self.corpus.facts[index], self.corpus.square(index)

    def _spoilt(self, rng: Random) -> Iterator[tuple[Facts, str, Image.Image]]:
        for index in self._order(rng):
            fault, picture = rng.choice((*FAULTS, "nothing")), self.corpus.square(index)
            yield self.corpus.facts[index], fault, picture if fault == "nothing" else spoil(picture, fault, rng)

    def _made(self, rng: Random) -> Iterator[tuple[Image.Image, list[Cell]]]:
        while True:
            yield self._collages.make(rng, rng.choice(GRIDS))

    def _about_grids(self, rng: Random) -> Iterator[Asked]:
        for picture, cells in self._made(rng):
            yield picture, self._collages.ask(cells, rng)


# ------------------------------------------------------------------ what captions say


def _sure_colours(facts: Facts) -> list[Question]:
    return [
        Question("colour", f"What colour is the {name}?", colour)
        for name, (colour, times) in sorted(facts.colours.items())
        if times >= 2
    ]


def _each_says(question: Question, facts: Facts) -> tuple[str, ...]:
    """What each of the captions alone would answer."""
    return tuple(_says(question, read_facts([caption])) or "unanswerable" for caption in facts.captions)


def _says(question: Question, facts: Facts) -> str | None:
    if question.kind == "scene":
        return only(facts.scenes)
    if question.kind == "doing":
        return only(facts.actions)
    if question.kind == "colour":
        colour = facts.colours.get(question.text.removeprefix("What colour is the ").removesuffix("?"))
        return colour[0] if colour else None
    if question.text == "What sport is this?":
        sports = [name.removeprefix("playing ") for name in facts.actions]
        return question.answer if question.answer in sports else None
    return question.answer if question.answer in facts.things else None


def _key_words(facts: Facts) -> list[Question]:
    """The things and the action that nearly every caption speaks of, as key words that a description should have."""
    things = [name for name in facts.main(SURE + 1) if THINGS[name].group != "person"][:2]
    acted = [name for name, times in facts.actions.items() if times >= SURE + 1][:1]
    words = [THINGS[name] for name in things] + [ACTIONS[name] for name in acted]
    keys = "<AND>".join("<OR>".join(sorted(word.words)) for word in words)
    return [Question("caption", "Describe the photo.", keys)] if things else []


def _with_keys(item: Item, word: Word) -> Item:
    return replace(item, question=replace(item.question, answer="<OR>".join(sorted(word.words)), answers=()))
