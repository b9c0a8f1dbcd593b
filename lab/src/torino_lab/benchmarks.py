"""Build the lab's nine small benchmarks, modelled on the paper's nine, from photos that were not trained on.

The same photos and the same seed give the same questions. Answers about photos come from their captions; answers about
drawings are exact. Answers are balanced, so that a model that ignores the image scores low. Several questions share an
image, because encoding an image costs more than a question.
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
from torino_lab.collages import CollageCell, with_preposition
from torino_lab.corpus import FAULTS, ON_PHOTO, CaptionedPhoto, Corpus, degrade
from torino_lab.facts import Facts, read_facts, single_key
from torino_lab.questions import ImageQuestion, with_article
from torino_lab.selection import (
    POOL_FACTOR,
    AnswerBalancer,
    ImageQuestions,
    Item,
    Replayable,
    T,
    balance_answers,
    rotate_options,
    select_pairs,
    select_questions,
)
from torino_lab.words import ACTIONS, THINGS, Word

SEED = 2024
MIN_AGREEING = 3  # captions that must agree on an answer
GRIDS = ((1, 2), (2, 1), (2, 2), (2, 2), (2, 3), (3, 2), (3, 3), (3, 3))
CANDIDATES = 8  # most common, or most plausible, absent things for the popular and adversarial splits


class BenchmarkBuilder:
    """Build the benchmarks from captioned photos.

    Parameters
    ----------
    photos : sequence of (name, bytes, captions)
        Photos that were not trained on.
    seed : int
    scale : float
        Number of questions, relative to the default.

    Examples
    --------
    >>> items = BenchmarkBuilder(photos).make("Lab-POPE")  # doctest: +SKIP
    """

    def __init__(self, photos: Sequence[CaptionedPhoto], *, seed: int = SEED, scale: float = 1.0) -> None:
        self.corpus = Corpus(photos, seed=seed)
        self.seed, self.scale = seed, scale
        self._question_maker, self._collages = self.corpus.question_maker, self.corpus.collages
        self._shared_images: dict[str, Replayable[Any]] = {}

    def make(self, name: str) -> list[Item]:
        """Return all questions of a benchmark."""
        if name not in BENCHMARKS:
            raise unknown_name("lab benchmark", name, BENCHMARKS)
        benchmark = BENCHMARKS[name]
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
        self._shared_images.clear()
        parts = {part: max(2, round(count * self.scale)) for part, count in benchmark.parts.items()}
        items = [item for part, count in parts.items() for item in makers[name](part, count, rng)]
        return rotate_options(items) if benchmark.kind in ("circular", "mcq") else items

    # -------------------------------------------------------------- the nine benchmarks

    def _gqa(self, part: str, count: int, rng: Random) -> list[Item]:
        if part == "colour":
            return select_questions(
                self._photos(rng, lambda facts, _: _certain_colors(facts)), ("colour",), part, count, rng, per_image=2
            )
        kinds = {"cell": "cell", "which": "which-cell", "scene": "cell-scene"}
        if part in kinds:
            return select_questions(self._grids(rng), (kinds[part],), part, count, rng, per_image=4)
        if part == "shapes":
            return select_questions(
                self._drawn(pictures.shape_scene, rng), ("shape-colour", "shape"), part, count, rng, per_image=4
            )
        kind = ("small",) if part == "where" else ("shape-colour", "shape")
        return select_questions(self._over(pictures.small_shapes, rng), kind, part, count, rng, per_image=2)

    def _mmb(self, part: str, count: int, rng: Random) -> list[Item]:
        return self._choices("choice", part, count, rng)

    def _mmb_cn(self, part: str, count: int, rng: Random) -> list[Item]:
        return self._choices("choice-zh", part, count, rng)

    def _choices(self, kind: str, part: str, count: int, rng: Random) -> list[Item]:
        if part == "photo":
            source = self._photos(
                rng, lambda facts, rng: self._question_maker.choices(facts, rng, kind == "choice-zh", MIN_AGREEING + 1)
            )
        elif part in ("cell", "which"):
            source = self._grids(rng)
        else:
            source = self._over(pictures.small_shapes, rng)
        prefix = {"cell": "What is", "which": "Which photo"}.get(part, "") if kind == "choice" else ""
        return select_questions(source, (kind,), part, count, rng, prefix=prefix, per_image=4)

    def _mme(self, part: str, count: int, rng: Random) -> list[Item]:
        if part in ("existence", "action"):
            balancer = AnswerBalancer(rng)
            table = THINGS if part == "existence" else ACTIONS
            return select_pairs(
                self._photos(rng, lambda facts, rng: self._ask_presence_pair(facts, table, balancer, rng)), part, count
            )
        kind, source = {
            "cell": ("cell-presence", self._grids(rng)),
            "color": ("shape-presence", self._over(pictures.small_shapes, rng)),
        }[part]
        return select_pairs(
            ((image, [q for q in questions if q.kind == kind]) for image, questions in source), part, count
        )

    def _pope(self, part: str, count: int, rng: Random) -> list[Item]:
        """Ask two thirds about whole photos and one third about cells of collages, balanced for each thing."""
        balancer, items = AnswerBalancer(rng), list[Item]()
        whole = count * 2 // 3 // 2
        source = self._photos(rng, lambda facts, rng: self._ask_presence_pair(facts, THINGS, balancer, rng, part))
        items += select_pairs(source, part, whole)
        cells = select_pairs(self._cell_pairs(part, balancer, rng), part, count // 2 - whole)
        return items + cells

    def _sqa(self, part: str, count: int, rng: Random) -> list[Item]:
        if part == "chart":
            return select_questions(
                self._drawn(pictures.bar_chart, rng), ("choice-hint",), part, count, rng, per_image=2
            )
        return select_questions(self._drawn(pictures.shape_scene, rng), ("choice",), part, count, rng, per_image=2)

    def _text(self, part: str, count: int, rng: Random) -> list[Item]:
        return select_questions(self._over(pictures.sign_scene, rng), ("text",), part, count, rng, per_image=2)

    def _vizwiz(self, part: str, count: int, rng: Random) -> list[Item]:
        pool: list[Item] = []
        for facts, fault, image in self._shared("degraded", self._degraded_photos, rng):
            if part == "quality":
                candidates = [(ImageQuestion("quality", "What is wrong with the photo?", fault), (fault,) * 5)]
            else:
                questions = [q for q in self._question_maker.about(facts, rng) if q.kind == part and q.answer != "none"]
                candidates = [(q, _answers_by_caption(q, facts)) for q in questions]
                candidates = [(q, answers) for q, answers in candidates if answers.count(q.answer) >= MIN_AGREEING]
            pool += [Item(image, question, part, answers) for question, answers in candidates[:1]]
            if len(pool) >= POOL_FACTOR * count:
                break
        return balance_answers(pool, count, rng)

    def _mmvet(self, part: str, count: int, rng: Random) -> list[Item]:
        if part == "rec":
            return select_questions(
                self._photos(rng, lambda facts, _: _ask_description(facts)), ("caption",), part, count, rng
            )
        kind = "cell" if part == "rec,spat" else "photos-of"
        items = select_questions(self._grids(rng), (kind,), part, count, rng, per_image=3)
        if part != "rec,spat":
            return items
        return [_accept_synonyms(item, THINGS[item.question.answer]) for item in items]

    # -------------------------------------------------------------- yes and no

    def _ask_presence_pair(
        self, facts: Facts, table: dict[str, Word], balancer: AnswerBalancer, rng: Random, split: str = "random"
    ) -> list[ImageQuestion]:
        """Ask about one present and one absent thing, if the captions allow both."""
        maker = self._question_maker
        mentions, counts = (
            (facts.things, maker.thing_counts) if table is THINGS else (facts.actions, maker.action_counts)
        )
        present = [name for name, times in mentions.items() if times >= MIN_AGREEING]
        absent = [name for name in counts if facts.lacks(table[name])]
        if split == "popular":
            absent = sorted(absent, key=lambda name: (-counts[name], name))[:CANDIDATES]
        elif split == "adversarial":
            absent = sorted(absent, key=lambda name: (-maker.plausibility(facts, name), -counts[name], name))[
                :CANDIDATES
            ]
        if not present or not absent:
            return []
        stem = rng.choice(("Is there {} in the photo?", "Do you see {}?"))
        if table is not THINGS:
            stem = "Does the photo show {}?"
        return [
            ImageQuestion("presence", stem.format(with_article(name) if table is THINGS else name), answer)
            for name, answer in ((balancer.pick_present(present), "yes"), (balancer.pick_absent(absent), "no"))
        ]

    def _cell_pairs(self, split: str, balancer: AnswerBalancer, rng: Random) -> Iterator[ImageQuestions]:
        for image, cells in self._shared("collages", self._collage_images, rng):
            cell = rng.choice(cells)
            labels = [other.label for other in cells]
            absent = [name for name in self._collages.photos_by_label if cell.facts.lacks(THINGS[name])]
            if split == "adversarial":
                absent = [name for name in absent if name in labels]
            elif split == "popular":
                absent = sorted(absent, key=lambda name: (-len(self._collages.photos_by_label[name]), name))[
                    :CANDIDATES
                ]
            if absent:
                names = ((balancer.pick_present([cell.label]), "yes"), (balancer.pick_absent(absent), "no"))
                where = with_preposition(cell.place)
                yield (
                    image,
                    [
                        ImageQuestion("presence", f"Is there {with_article(name)} {where}?", answer)
                        for name, answer in names
                    ],
                )

    # -------------------------------------------------------------- images

    def _shared(self, name: str, source: Callable[[Random], Iterator[T]], rng: Random) -> Replayable[T]:
        """Return images that all parts of a benchmark share; the first part to use them seeds them."""
        if name not in self._shared_images:
            self._shared_images[name] = Replayable(source(Random(rng.getrandbits(64))))
        return self._shared_images[name]

    def _photos(self, rng: Random, ask: Callable[[Facts, Random], Sequence[ImageQuestion]]) -> Iterator[ImageQuestions]:
        for facts, image in self._shared("photos", self._whole_photos, rng):
            questions = ask(facts, rng)
            if questions:
                yield image, questions

    def _grids(self, rng: Random) -> Replayable[ImageQuestions]:
        return self._shared("grids", self._collage_questions, rng)

    def _over(
        self, make: Callable[[Image.Image | None, Random], pictures.DrawnImage], rng: Random
    ) -> Replayable[ImageQuestions]:
        def source(rng: Random) -> Iterator[ImageQuestions]:
            while True:
                photo = (
                    self.corpus.crop_photo(rng.randrange(len(self.corpus.facts))) if rng.random() < ON_PHOTO else None
                )
                yield make(photo, rng)

        return self._shared(make.__name__, source, rng)

    def _drawn(self, make: Callable[[Random], pictures.DrawnImage], rng: Random) -> Replayable[ImageQuestions]:
        def source(rng: Random) -> Iterator[ImageQuestions]:
            while True:
                yield make(rng)

        return self._shared(make.__name__, source, rng)

    def _order(self, rng: Random) -> list[int]:
        return rng.sample(range(len(self.corpus.facts)), len(self.corpus.facts))

    def _whole_photos(self, rng: Random) -> Iterator[tuple[Facts, Image.Image]]:
        for index in self._order(rng):
            yield self.corpus.facts[index], self.corpus.crop_photo(index)

    def _degraded_photos(self, rng: Random) -> Iterator[tuple[Facts, str, Image.Image]]:
        for index in self._order(rng):
            fault, image = rng.choice((*FAULTS, "nothing")), self.corpus.crop_photo(index)
            yield self.corpus.facts[index], fault, image if fault == "nothing" else degrade(image, fault, rng)

    def _collage_images(self, rng: Random) -> Iterator[tuple[Image.Image, list[CollageCell]]]:
        while True:
            yield self._collages.make(rng, rng.choice(GRIDS))

    def _collage_questions(self, rng: Random) -> Iterator[ImageQuestions]:
        for image, cells in self._collage_images(rng):
            yield image, self._collages.ask(cells, rng)


# ------------------------------------------------------------------ answers from captions


def _certain_colors(facts: Facts) -> list[ImageQuestion]:
    return [
        ImageQuestion("colour", f"What colour is the {name}?", color)
        for name, (color, times) in sorted(facts.colors.items())
        if times >= 2
    ]


def _answers_by_caption(question: ImageQuestion, facts: Facts) -> tuple[str, ...]:
    """Return the answer that each caption alone supports."""
    return tuple(_answer_from(question, read_facts([caption])) or "unanswerable" for caption in facts.captions)


def _answer_from(question: ImageQuestion, facts: Facts) -> str | None:
    if question.kind == "scene":
        return single_key(facts.scenes)
    if question.kind == "doing":
        return single_key(facts.actions)
    if question.kind == "colour":
        color = facts.colors.get(question.text.removeprefix("What colour is the ").removesuffix("?"))
        return color[0] if color else None
    if question.text == "What sport is this?":
        sports = [name.removeprefix("playing ") for name in facts.actions]
        return question.answer if question.answer in sports else None
    return question.answer if question.answer in facts.things else None


def _ask_description(facts: Facts) -> list[ImageQuestion]:
    """Ask for a description; its keywords are the things and the action that nearly every caption mentions."""
    things = [name for name in facts.main(MIN_AGREEING + 1) if THINGS[name].group != "person"][:2]
    actions = [name for name, times in facts.actions.items() if times >= MIN_AGREEING + 1][:1]
    words = [THINGS[name] for name in things] + [ACTIONS[name] for name in actions]
    keys = "<AND>".join("<OR>".join(sorted(word.words)) for word in words)
    return [ImageQuestion("caption", "Describe the photo.", keys)] if things else []


def _accept_synonyms(item: Item, word: Word) -> Item:
    return replace(item, question=replace(item.question, answer="<OR>".join(sorted(word.words)), answers=()))
