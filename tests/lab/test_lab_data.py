"""The lab's corpus and its benchmarks: the same every time, and true to what was drawn or written."""

from __future__ import annotations

import base64
import csv
import io
import re
from collections import Counter
from pathlib import Path
from random import Random

import numpy as np
import pytest
from PIL import Image
from torino_lab import pictures
from torino_lab.benchmarks import BENCHMARKS, BenchmarkBuilder
from torino_lab.collages import OBJECTS, RARE, cell_places, choose_label
from torino_lab.corpus import MIXTURE, Corpus, check_disjoint, degrade
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
from torino_lab.tables import KeywordGrader, blind_accuracy, fingerprint, keyword_score, write_tsv
from torino_lab.words import ACTIONS, NUMBERS, THINGS, tokens

from tests.support.lab_photos import COLORS, PHOTOS
from torino.core.errors import BadParameter, UnknownName
from torino.evaluation.benchmarks import all_benchmarks, find_benchmark
from torino.evaluation.tasks import open_task


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return Corpus(PHOTOS, seed=3, length=200)


@pytest.fixture(scope="module")
def recipe() -> BenchmarkBuilder:
    return BenchmarkBuilder(PHOTOS, scale=0.05)


def near(pixel: object, colour: tuple[int, int, int]) -> bool:
    return bool(np.abs(np.asarray(pixel, int)[:3] - colour).max() <= 8)


# ---------------------------------------------------------------------- the corpus


def test_a_picture_depends_on_seed_and_index_alone(corpus: Corpus) -> None:
    again, other = Corpus(PHOTOS, seed=3, length=40), Corpus(PHOTOS, seed=4, length=200)
    differs = 0
    for index in reversed(range(40)):
        one, two = corpus[index], again[index]
        assert one.questions == two.questions
        assert one.image.tobytes() == two.image.tobytes()
        assert one.name == two.name
        differs += one.questions != other[index].questions
    assert differs > 30
    with pytest.raises(IndexError):
        again[40]


def test_each_photo_comes_once_before_any_comes_twice(corpus: Corpus) -> None:
    shown = [photo for index in range(len(corpus)) if (photo := corpus.photo_index(index)) is not None]
    count = len(PHOTOS)
    assert len(shown) == 100
    assert sorted(shown[:count]) == sorted(shown[count : 2 * count]) == list(range(count))
    assert shown[:count] != shown[count : 2 * count]
    assert Counter(corpus.image_kind(index) for index in range(100)) == MIXTURE
    index = next(index for index in range(200) if corpus.image_kind(index) == "photo")
    assert near(
        corpus[index].image.getpixel((168, 168)), COLORS[PHOTOS[corpus.photo_index(index) or 0][0].split("-")[0]]
    )


def test_questions_keep_to_their_budget_and_form(corpus: Corpus) -> None:
    kinds = set[str]()
    for index in range(120):
        example = corpus[index]
        assert example.image.size == (SIDE, SIDE)
        assert example.image.mode == "RGB"
        assert 1 <= len(example.questions) <= MAX_QUESTIONS
        assert (
            sum(question.size for question in example.questions) <= WORD_BUDGET + 10
        )  # one is exchanged for "what is wrong"
        assert len({question.text for question in example.questions}) == len(example.questions)
        for question in example.questions:
            kinds.add(question.kind)
            if question.options:
                assert question.answer in "ABCD"[: len(question.options)]
                assert len(set(question.options)) == len(question.options) >= 3
                assert question.text.endswith(question.options[-1])
            else:
                assert question.answer == question.answer.lower()
    wanted = {"presence", "choice", "choice-zh", "caption", "cell", "cell-presence", "relation", "small", "text", "bar"}
    assert kinds >= wanted | {"who", "count", "scene", "doing", "kind", "shape", "shape-count", "quality", "which-cell"}


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


def test_bars_are_as_tall_as_the_answers_say() -> None:
    for seed in range(12):
        image, asked = pictures.bar_chart(Random(seed))
        said = {one.text: one.answer for one in asked if not one.options}
        tall = {colour: int(mask(image, colour)[:320, 18:].any(axis=1).sum()) for colour in pictures.SHAPE_COLORS}
        ground = image.getpixel((SIDE - 3, 3))
        tall = {colour: high for colour, high in tall.items() if high > 20 and not near(ground, RGB[colour])}
        assert NUMBERS.index(said["How many bars are there?"]) == len(tall)
        assert said["Which bar is the tallest?"] == max(tall, key=tall.__getitem__)
        assert said["Which bar is the shortest?"] == min(tall, key=tall.__getitem__)
        for one in asked:
            if one.kind == "bar-order":
                first, second = re.findall(r"the (\w+) bar", one.text)
                assert one.answer == ("yes" if tall[first] > tall[second] else "no")
            if one.options:
                right = one.options["ABCD".index(one.answer)]
                assert right == said["Which bar is the " + ("tallest?" if "most" in one.text else "shortest?")]
                assert one.text.startswith(one.hint + "\n")
                assert one.stem.startswith("Which bar shows")


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


def test_a_spoiled_photo_is_blurred_or_dark() -> None:
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8))
    assert np.asarray(degrade(image, "dark", Random(0))).mean() < 0.5 * np.asarray(image).mean()
    assert np.asarray(degrade(image, "blurred", Random(0))).std() < 0.3 * np.asarray(image).std()


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


# ---------------------------------------------------------------------- benchmarks


RECORDED = {
    "Lab-GQA": "ddd33400a641d494",
    "Lab-MMB": "5fe7850fc71b19f5",
    "Lab-MMB-CN": "cf93fedf0254a475",
    "Lab-MME": "25fdec1ce5ee084d",
    "Lab-POPE": "ec2038975634b838",
    "Lab-SQA": "5b6f4d5b7c9d6356",
    "Lab-TextVQA": "cc61331092e70962",
    "Lab-VizWiz": "27de7d84ebf092a8",
    "Lab-MMVet": "cfdcc9bf84767bf2",
}


@pytest.mark.parametrize("name", BENCHMARKS)
def test_benchmarks_are_fixed_and_can_be_read_back(name: str, recipe: BenchmarkBuilder, tmp_path) -> None:
    items = recipe.make(name)
    assert fingerprint(items) == fingerprint(recipe.make(name)) == RECORDED[name]
    path = tmp_path / f"{name}.tsv"
    write_tsv(path, items)
    csv.field_size_limit(10**7)
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    assert [row["question"] for row in rows] == [item.question.stem for item in items]
    for row, item in zip(rows, items, strict=True):
        held = row["image"] if len(row["image"]) > 64 else rows[int(row["image"])]["image"]
        image = Image.open(io.BytesIO(base64.b64decode(held)))
        assert image.size == (SIDE, SIDE)
        assert np.abs(np.asarray(image, int) - np.asarray(item.image, int)).mean() < 6
    task = open_task(path, kind=BENCHMARKS[name].kind)
    assert task.problems == ()
    turns = 4 if BENCHMARKS[name].kind == "circular" else 1
    assert len(task) == turns * len(items)
    judge = KeywordGrader() if BENCHMARKS[name].kind == "judge" else None
    right = [{"index": one.index, "prediction": most_said(one.answers)} for one in task]
    score = task.score(right, judge=judge)
    assert score.value >= (200 * len(BENCHMARKS[name].parts) if name == "Lab-MME" else 90)
    nothing = task.score([{"index": one.index, "prediction": "zebra"} for one in task], judge=judge)
    assert nothing.value == 0
    assert blind_accuracy(items)["constant"] <= 70


def most_said(answers: tuple[str, ...]) -> str:
    said = [answer for answer in answers if answer != "unanswerable"]
    return max(said, key=said.count).replace("<AND>", " ").replace("<OR>", " ")


def test_choices_are_right_at_each_letter_equally_often(recipe: BenchmarkBuilder) -> None:
    for name in ("Lab-MMB", "Lab-MMB-CN"):
        letters = Counter(item.question.answer for item in recipe.make(name))
        assert max(letters.values()) - min(letters[letter] for letter in "ABCD") <= 1


def test_yes_no_benchmarks_have_a_yes_and_a_no_for_each_picture(recipe: BenchmarkBuilder) -> None:
    for name in ("Lab-MME", "Lab-POPE"):
        items = recipe.make(name)
        for one, two in zip(items[::2], items[1::2], strict=True):
            assert one.image is two.image
            assert (one.question.answer, two.question.answer) == ("yes", "no")
            assert one.question.text != two.question.text


def test_key_words() -> None:
    assert keyword_score("dog<OR>puppy<AND>snow", "A puppy in the Snow.") == 1
    assert keyword_score("dog<OR>puppy<AND>snow", "hotdog snows") == 0
    assert keyword_score("two", "two") == 1


def test_benchmarks_refuse_photos_that_were_trained_on() -> None:
    check_disjoint(PHOTOS[:20], PHOTOS[20:21] if PHOTOS[20][1] not in [p[1] for p in PHOTOS[:20]] else [])
    other = ("new.jpg", b"other bytes", ["A dog"])
    check_disjoint(PHOTOS, [other])
    with pytest.raises(BadParameter, match=r"1 of 2 photos .* dog-0\.jpg"):
        check_disjoint(PHOTOS, [other, ("dog-0.jpg", b"", [])])
    with pytest.raises(BadParameter, match="such as renamed"):
        check_disjoint(PHOTOS, [("renamed", PHOTOS[3][1], [])])


def test_wrong_names_and_empty_sources_are_refused(recipe: BenchmarkBuilder) -> None:
    with pytest.raises(UnknownName, match="Lab-POPE"):
        recipe.make("Lab-POP")
    with pytest.raises(BadParameter, match="at least one photo"):
        Corpus([])


def test_a_question_knows_its_stem() -> None:
    one = ImageQuestion("choice", "A hint.\nWhich?\nA. x\nB. y", "B", options=("x", "y"), hint="A hint.")
    assert one.stem == "Which?"


def test_the_lab_benchmarks_go_as_they_are_and_by_key_words(tmp_path: Path) -> None:
    assert list(BENCHMARKS) == [name for name in all_benchmarks() if name in BENCHMARKS]
    assert all(find_benchmark(name).instruction == "" for name in BENCHMARKS)
    file = io.BytesIO()
    Image.new("RGB", (20, 20)).save(file, "PNG")
    pixel = base64.b64encode(file.getvalue()).decode()
    rows = ["index\timage\tquestion\tanswer\tcategory", f"0\t{pixel}\tDescribe the photo.\tdog<OR>puppy<AND>snow\trec"]
    path = tmp_path / "Lab-MMVet.tsv"
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    task = open_task(path)
    assert (task.name, task.kind) == ("Lab-MMVet", "judge")
    assert task.prompt(task[0]) == "Describe the photo."
    score = task.score([{"index": "0", "prediction": "a puppy on grass"}])
    assert score.value == 50
    assert score.note == "judged by key words"


def test_a_picture_may_be_asked_about_again(corpus: Corpus) -> None:
    for index in range(0, 60, 7):
        first, second, third = corpus.ask_repeatedly(index, 3)
        assert first.questions == corpus[index].questions
        assert first.image.tobytes() == second.image.tobytes() == third.image.tobytes()
        assert len({first.questions, second.questions, third.questions}) > 1


def test_parts_of_a_benchmark_share_pictures(recipe: BenchmarkBuilder) -> None:
    items = recipe.make("Lab-GQA")
    seen = {id(item.image): set[str]() for item in items}
    for item in items:
        seen[id(item.image)].add(item.category)
    assert len(seen) < 0.7 * len(items)
    assert any({"cell", "which"} <= categories for categories in seen.values())
