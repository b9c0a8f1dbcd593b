"""The lab's generated images: the same every time, and true to what was drawn or written."""

from __future__ import annotations

import re
from collections import Counter
from random import Random

import numpy as np
import pytest
from PIL import Image
from torino_lab import pictures
from torino_lab.collages import OBJECTS, RARE, cell_places, choose_label
from torino_lab.corpus import Corpus
from torino_lab.facts import read_facts
from torino_lab.pictures import RGB, SIDE, zone
from torino_lab.questions import (
    MAX_CAPTION_WORDS,
    MAX_QUESTIONS,
    WORD_BUDGET,
    ImageQuestion,
    QuestionMaker,
    with_article,
)
from torino_lab.words import ACTIONS, NUMBERS, THINGS, tokens

from tests.support.lab_photos import COLORS, PHOTOS
from torino.core.errors import BadParameter


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return Corpus(PHOTOS)


def near(pixel: object, colour: tuple[int, int, int]) -> bool:
    return bool(np.abs(np.asarray(pixel, int)[:3] - colour).max() <= 8)


# ---------------------------------------------------------------------- the corpus


@pytest.mark.parametrize("kind", ["collage", "small", "sign", "shapes"])
def test_an_image_depends_on_its_generator_alone(kind: str, corpus: Corpus) -> None:
    differs = 0
    for seed in range(12):
        image, ask = corpus.make_image(kind, Random(seed))
        again, ask_again = Corpus(PHOTOS).make_image(kind, Random(seed))
        assert image.tobytes() == again.tobytes()
        assert ask(Random(1)) == ask_again(Random(1))
        differs += ask(Random(1)) != ask(Random(2))
        assert (image.size, image.mode) == ((SIDE, SIDE), "RGB")
        questions = ask(Random(3))
        assert 1 <= len(questions) <= MAX_QUESTIONS
        assert sum(question.size for question in questions) <= WORD_BUDGET
        assert len({question.text for question in questions}) == len(questions)
    assert differs > 6


def test_a_corpus_needs_photos() -> None:
    with pytest.raises(BadParameter, match="at least one photo"):
        Corpus([])


def test_captions_use_known_words_only() -> None:
    facts = [read_facts(captions) for _, _, captions in PHOTOS]
    odd = read_facts(["An odd zyzzyva dog runs", "A dog " + "very " * MAX_CAPTION_WORDS + "big", "A dog"])
    question_maker = QuestionMaker([*facts, odd])
    assert question_maker.caption(odd, Random(0)) == []
    for photo in facts:
        for seed in range(5):
            text = question_maker.caption(photo, Random(seed))[0].answer
            assert text in photo.captions
            assert not text.endswith((".", " "))
            assert len(text.split()) <= MAX_CAPTION_WORDS


# ---------------------------------------------------------------------- captions


NAMES = {with_article(name): name for name in THINGS}


def test_nothing_is_denied_that_a_caption_mentions_or_hides() -> None:
    tricky = [
        ["A skier goes down a slope ."] * 5,  # no word of snow
        ["A puppy with its owner ."] * 5,  # a dog, and somebody
        ["People watch a match in a stadium ."] * 5,
        ["A surfer rides a wave ."] * 5,
    ]
    facts = [read_facts(captions) for captions in [*tricky, *(captions for _, _, captions in PHOTOS)]]
    question_maker = QuestionMaker(facts)
    asked = Counter[str]()
    for photo in facts:
        for seed in range(30):
            for question in question_maker.presence(photo, Random(seed), 20) + question_maker.action_presence(
                photo, Random(seed), 20
            ):
                name = re.sub(r"^(Is there|Do you see|Does the photo show) | in the photo\?$|\?$", "", question.text)
                word = ACTIONS[name] if question.kind == "action" else THINGS[NAMES[name]]
                mentions = sum(bool(set(tokens(caption)) & word.words) for caption in photo.captions)
                asked[question.answer] += 1
                if question.answer == "yes":
                    assert mentions >= 2
                else:
                    assert mentions == 0
                    assert not photo.words & word.hidden
    assert min(asked["yes"], asked["no"]) > 200
    assert not facts[0].lacks(THINGS["snow"])
    assert not facts[1].lacks(THINGS["person"])
    assert not facts[2].lacks(THINGS["ball"])
    assert facts[1].lacks(THINGS["boat"])


def test_yes_and_no_are_even_for_each_thing() -> None:
    facts = [read_facts(captions) for _, _, captions in PHOTOS]
    question_maker = QuestionMaker(facts)
    answers: dict[str, Counter[str]] = {}
    for seed in range(80):
        for number, photo in enumerate(facts):
            for question in question_maker.presence(photo, Random(seed * 1000 + number), 99):
                name = re.sub(r"^(Is there|Do you see) | in the photo\?$|\?$", "", question.text)
                answers.setdefault(name, Counter())[question.answer] += 1
    for name in ("a dog", "a boat", "a horse", "a bird"):
        yes, no = answers[name]["yes"], answers[name]["no"]
        assert yes > 150
        assert 0.8 < yes / no < 1.25


def test_what_captions_say() -> None:
    dogs = read_facts(["Two black dogs play .", "Two dogs play in snow", "Three dogs and a ball", "A dog", "Dogs"])
    assert "dog" not in dogs.counts  # they disagree
    assert dogs.colors["dog"] == ("black", 1)
    assert dogs.things["dog"] == 5
    assert dogs.who == "nobody"
    assert dogs.place() is None  # one caption is not enough
    man = read_facts(
        ["A man in a red shirt surfs", "A man with a blue shirt", "The man is surfing", "A surfer", "a man"]
    )
    assert "shirt" not in man.colors  # one says red, one says blue
    assert man.who == "man"
    assert man.doing() == "surfing"
    assert man.counts["person"] == 1
    trunks = read_facts(["A boy in swimming trunks stands"] * 5)
    assert "swimming" not in trunks.actions
    assert read_facts(["A dog with a baseball"] * 5).actions == {}
    assert read_facts(["Two boys run", "Two boys running", "Two children run"]).counts["person"] == 2


# ---------------------------------------------------------------------- drawn pictures, against their pixels


def mask(image: Image.Image, colour: str) -> np.ndarray:
    return np.abs(np.asarray(image, int) - RGB[colour]).max(axis=2) <= 6


def test_small_shapes_are_where_the_answer_says() -> None:
    found = 0
    for seed in range(60):
        image, asked = pictures.small_shapes(None, Random(seed))
        forms = {one.answer: one.text.split()[-1][:-1] for one in asked if one.kind == "shape"}
        for question in asked:
            if question.kind != "small":
                continue
            colour = forms[question.text.split()[-1][:-1]]
            rows, columns = np.nonzero(mask(image, colour))
            assert zone(columns.mean(), rows.mean()) == question.answer
            assert 20 <= np.ptp(rows) + 1 <= 72
            found += 1
    assert found > 60


def test_scenes_of_shapes_agree_with_themselves_and_their_pixels() -> None:
    sides = 0
    for seed in range(40):
        image, asked = pictures.shape_scene(Random(seed))
        for one in asked:
            if one.kind == "shape-count" and (match := re.match(r"How many (\w+) shapes are there", one.text)):
                shown = mask(image, match[1])
                if not near(image.getpixel((1, 1)), RGB[match[1]]):
                    assert (one.answer == "zero") == (not shown.any())
            if one.kind == "shape-presence" and one.answer == "yes":
                assert mask(image, one.text.split()[3]).sum() > 300
            if match := re.match(r"Is the (\w+) (\w+) (left of|right of|above|below) the (\w+) (\w+)\?", one.text):
                first, _, side, second, _ = match.groups()
                others = [q.text for q in asked if q.text.startswith("Which shape is ")]
                if f"Which shape is {first}?" in others and f"Which shape is {second}?" in others:  # one of each
                    (y, x), (v, u) = (np.argwhere(mask(image, colour)).mean(0) for colour in (first, second))
                    true = {"left of": x < u, "right of": x > u, "above": y < v, "below": y > v}[side]
                    assert one.answer == ("yes" if true else "no")
                    sides += 1
    assert sides > 10


def test_signs_say_what_the_answers_say() -> None:
    for seed in range(40):
        image, asked = pictures.sign_scene(None, Random(seed))
        said = {one.text.split("the ")[1].removesuffix(" say?"): one.answer for one in asked if one.kind == "text"}
        assert NUMBERS[len(said)] == next(one.answer for one in asked if one.kind == "sign-count")
        for one in asked:
            if match := re.match(r"Does the (.*sign) say (\w+)\?", one.text):
                assert (one.answer == "yes") == (said[match[1]] == match[2])
            if match := re.match(r"What colour is the (.*sign)\?", one.text):
                rows, columns = np.nonzero(mask(image, one.answer))
                assert len(rows) > 800
                if match[1] == "left sign":
                    assert columns.mean() < SIDE / 2
                if match[1] == "bottom sign":
                    assert rows.mean() > SIDE / 2


# ---------------------------------------------------------------------- collages, against their pixels


def seen_label(image: Image.Image, place: str, grid: tuple[int, int]) -> str:
    row, column = divmod(cell_places(*grid).index(place), grid[1])
    pixel = image.getpixel((int(SIDE * (column + 0.5) / grid[1]), int(SIDE * (row + 0.5) / grid[0])))
    return next(name for name, colour in COLORS.items() if near(pixel, colour))


def test_cells_hold_what_the_answers_say(corpus: Corpus) -> None:
    checked = Counter[str]()
    for seed in range(80):
        rng = Random(seed)
        grid = rng.choice([(1, 2), (2, 1), (2, 2), (2, 3), (3, 2), (3, 3)])
        image, cells = corpus.collages.make(rng, grid)
        shown = {cell.place: seen_label(image, cell.place, grid) for cell in cells}
        assert shown == {cell.place: cell.label for cell in cells}
        spot = {place: divmod(number, grid[1]) for number, place in enumerate(shown)}
        for one in corpus.collages.ask(cells, rng):
            checked[one.kind] += 1
            if one.kind == "photos":
                assert one.answer == NUMBERS[len(shown)]
            elif one.kind == "cell":
                assert one.answer == shown[re.sub(r".* (?:in|on|at) the ", "", one.text)[:-1]]
            elif one.kind == "which-cell":
                assert NAMES[one.text.removeprefix("Which photo shows ")[:-1]] == shown[one.answer]
            elif one.kind == "relation":
                first, side, second = re.match(
                    r"Is the (.+) (left of|right of|above|below) the (.+)\?", one.text
                ).groups()
                (y, x), (v, u) = (spot[next(p for p, name in shown.items() if name == it)] for it in (first, second))
                true = {"left of": x < u, "right of": x > u, "above": y < v, "below": y > v}[side]
                assert one.answer == ("yes" if true else "no")
            elif one.kind == "cell-presence" and one.answer == "no":
                name, place = re.match(r"Is there (.+) (?:in|on|at) the (.+)\?", one.text).groups()
                assert shown[place] != NAMES[name]
            elif one.kind == "photos-of":
                name = NAMES[one.text.removeprefix("How many photos show ")[:-1]]
                if name in (*OBJECTS, "pool"):
                    assert one.answer == NUMBERS[list(shown.values()).count(name)]
    assert min(checked[kind] for kind in ("cell", "which-cell", "relation", "cell-presence", "photos-of")) > 20


def test_a_cell_is_named_after_one_thing_only() -> None:
    assert choose_label(read_facts(["A dog and a horse"] * 3)) is None
    assert choose_label(read_facts([f"A {RARE[0]} on the grass"] * 3)) is None
    assert choose_label(read_facts(["A dog in the snow"] * 3)) == "dog"
    assert choose_label(read_facts(["A man smiles"] * 3)) == "person"
    assert choose_label(read_facts(["Something"] * 3)) is None


def test_a_question_knows_its_stem() -> None:
    one = ImageQuestion("choice", "A hint.\nWhich?\nA. x\nB. y", "B", options=("x", "y"), hint="A hint.")
    assert one.stem == "Which?"
