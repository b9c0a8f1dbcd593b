"""Scorers against answers worked by hand: what a model meant, the rules of the benchmarks, and the judge."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from torino.core.errors import BadFile, BadParameter
from torino.evaluation import ImageRef, Sample, Score, Task
from torino.evaluation.benchmarks import BENCHMARKS, CUSTOM
from torino.evaluation.extraction import extract_option, extract_yes_no, normalize_answer
from torino.evaluation.scoring import soft_accuracy


def sample(index: str, answer: str | tuple[str, ...], image: str = "", **more: Any) -> Sample:
    answers = (answer,) if isinstance(answer, str) else answer
    place = ImageRef(Path("none.tsv"), image or index)
    return Sample(index, "?", answers, (place,), **({"group": index} | more))


def task(kind: Any, *samples: Sample, name: str = "GQA") -> Task:
    return Task(name, kind, samples, Path("none.tsv"), "0", BENCHMARKS.get(name, CUSTOM))


def scored(of: Task, **predictions: Any) -> Score:
    return of.score([{"index": index.lstrip("i"), "prediction": text} for index, text in predictions.items()])


# --- what was meant ------------------------------------------------------------------------------------------------

ANIMALS = {"A": "a dog", "B": "a man", "C": "two cats", "D": "none of the above"}
CHOSEN = {
    "B": "B",
    "b": "B",
    "(B).": "B",
    "B.": "B",
    "(b)": "B",
    "B) a man": "B",
    "b. a man": "B",
    "**B**": "B",
    '"B"': "B",
    "B\n\nThe picture shows a man, not a dog.": "B",
    "Answer: B": "B",
    "**Answer:** (B)": "B",
    "The answer is B.": "B",
    "The correct answer is option B, since A has four legs": "B",
    "I would choose B": "B",
    "B is correct": "B",
    "Option A": "A",
    "A": "A",
    "A.": "A",
    "A is right": "A",
    "A because of the tail": "A",
    "The answer is not A but B": "B",
    "Not A, so B": "B",
    "A is wrong, C": "C",
    "It isn't C. It is D.": "D",
    "the answer is b": "B",
    "Answer: (a).": "A",
    # the article is no option
    "A man is riding a horse": "B",
    "A man": "B",
    "A Man": "B",
    "The answer is A man": "B",
    "A horse": None,
    "A person is standing there": None,
    # the text of an option
    "a man": "B",
    "A dog": "A",
    "Two cats.": "C",
    "TWO  CATS": "C",
    "There are two cats.": "C",
    "None of the above": "D",
    "not a dog but a man": "B",
    # Chinese, and full-width letters
    "选B": "B",
    "答案是（Ｂ）": "B",
    "答案：B": "B",
    "我认为应该选 C。": "C",
    "B选项正确": "B",
    "Ｂ．": "B",
    "不是A，而是B": "B",
    # none, or more than one
    "": None,
    "   \n": None,
    "A, B": None,
    "A and B": None,
    "A or B": None,
    "A/B": None,
    "Both A and C": None,
    "Neither A nor B": None,
    "a dog or a man": None,
    "The answer is A or B": None,
    "Answer: (A) and (C)": None,
    "选 A 或 B": None,
    "The U.S.A.": None,
    "E": None,
    "I cannot tell from the picture": None,
    "The answer is A. No, the answer is B": None,
    "A-frame": None,
    "Mr. B's house": None,
    "BBBB": None,
}


@pytest.mark.parametrize("text", CHOSEN)
def test_extract_option(text: str) -> None:
    assert extract_option(text, ANIMALS) == CHOSEN[text]


def test_nested_option_texts_and_letters_inside_texts() -> None:
    assert extract_option("a black cat", {"A": "cat", "B": "black cat"}) == "B"
    assert extract_option("the cat", {"A": "cat", "B": "black cat"}) == "A"
    assert extract_option("Vitamin C", {"A": "Vitamin B", "B": "Vitamin C", "C": "Zinc"}) == "B"
    assert extract_option("It is vitamin C.", {"A": "Vitamin B", "B": "Vitamin C", "C": "Zinc"}) == "B"
    assert extract_option("C. Zinc", {"A": "Vitamin B", "B": "Vitamin C", "C": "Zinc"}) == "C"
    assert extract_option("A Paris", {"A": "Paris", "B": "Rome"}) == "A"
    assert extract_option("A. Lincoln", {"A": "G. Washington", "B": "A. Lincoln"}) == "B"
    assert extract_option("both A and B", {"A": "cat", "B": "dog", "C": "both A and B"}) == "C"
    assert extract_option("狗", {"A": "猫", "B": "狗"}) is None  # a single sign may be part of any word
    assert extract_option("图中是一只小狗", {"A": "小猫", "B": "小狗"}) == "B"
    assert extract_option("15", {"A": "5", "B": "15"}) == "B"
    assert extract_option("There are 5.", {"A": "5", "B": "15"}) == "A"


def test_long_answers() -> None:
    ramble = "The picture was taken outside and there is much to see in it. " * 30
    assert extract_option(ramble + "The answer is B.", ANIMALS) == "B"
    assert extract_option("B. " + ramble, ANIMALS) == "B"
    assert extract_option(ramble, ANIMALS) is None
    assert extract_option(ramble * 3 + "The answer is B." + ramble * 3, ANIMALS) is None  # only its ends are read
    assert extract_option(ramble + "Take plan B as it was drawn here on the wall. " + ramble, ANIMALS) is None
    assert (
        extract_option(ramble + "a man", ANIMALS) is None
    )  # too long to be a choice of the option whose text is in it
    for text in ("the answer is " * 20_000, "A " * 20_000, "not a the option " * 20_000, "选" * 50_000):
        extract_option(text, ANIMALS)  # ends, and soon
    assert extract_yes_no("well " * 20_000 + "yes") == "yes"


SAID = {
    "Yes": "yes",
    "yes.": "yes",
    "Yes, there is": "yes",
    "ＹＥＳ": "yes",
    "no.": "no",
    "No, there isn't.": "no",
    "NO!": "no",
    "(no)": "no",
    "There is no dog in the image.": "no",
    "Yes, there is no doubt about it": "yes",
    "No, yes is wrong": "no",
    "The image does not show a dog.": "no",
    "It isn't there": "no",
    "**Yes**": "yes",
    "Answer: 'no'": "no",
    "“Yes”": "yes",
    "是的": "yes",
    "有": "yes",
    "不是": "no",
    "没有": "no",
    "否": "no",
    "": None,
    "yes or no": None,
    "Yes/No": None,
    "I am not sure": None,
    "It cannot be determined; I cannot tell": None,
    "There is a dog": None,
    "yesterday": None,
    "不知道": None,
    "是否有狗？": None,
    "nothing": None,
    "It could be yes, it could be no": None,
}


@pytest.mark.parametrize("text", SAID)
def test_extract_yes_no(text: str) -> None:
    assert extract_yes_no(text) == SAID[text]


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("Two", "2"),
        ("none", "0"),
        ("ten dogs", "10 dogs"),
        ("eleven", "eleven"),
        ("The dog.", "dog"),
        ("an apple, a pear", "apple pear"),
        ("1,000", "1000"),
        ("3.5", "3.5"),
        ("U.S.A.", "usa"),
        ("coca-cola", "coca cola"),
        ("black/white", "black white"),
        ("black / white", "black white"),
        ("dont know", "don't know"),
        ("couldnt've", "couldn't've"),
        ("it's", "it's"),
        ("  Yes\n", "yes"),
        ('"stop"', "stop"),
        ("", ""),
        ("the", ""),
    ],
)
def test_normalize_answer(text: str, want: str) -> None:
    assert normalize_answer(text) == want


# --- the rules -----------------------------------------------------------------------------------------------------


def test_final_full_stop_is_ignored() -> None:
    assert scored(task("exact", sample("1", "3 p.m.")), i1="3 P.M.").value == 100


def test_exact_match() -> None:
    of = task("exact", sample("1", "Dog"), sample("2", "left"), sample("3", "red"), sample("4", ("couch", "sofa")))
    score = scored(of, i1=" dog. ", i2="to the left", i3="", i4="sofa")
    assert score.per_sample == {"1": 1, "2": 0, "3": 0, "4": 1}
    assert score.value == 50
    assert score.metric == "accuracy, exact match"


@pytest.mark.parametrize(("agree", "want"), [(0, 0), (1, 0.3), (2, 0.6), (3, 0.9), (4, 1), (10, 1)])
def test_soft_accuracy_of_ten_annotators(agree: int, want: float) -> None:
    # one agrees: it is left out once (0 others), nine times it is 1 of 3; (0 + 9 / 3) / 10 = 0.3; and so on
    ten = sample("1", ("Two dogs.",) * agree + tuple(f"else {n}" for n in range(10 - agree)))
    assert soft_accuracy(ten, "the 2 dogs")[0] == pytest.approx(want)


def test_soft_accuracy_of_few_annotators_accepts_any() -> None:
    assert soft_accuracy(sample("1", "one"), "1")[0] == 1
    assert soft_accuracy(sample("1", ("red", "dark red")), "dark red")[0] == 1
    assert soft_accuracy(sample("1", ("red", "dark red")), "blue")[0] == 0
    assert soft_accuracy(sample("1", ("red",) * 4), "red")[0] == 1
    assert soft_accuracy(sample("1", ("red", "red", "red", "pink")), "red")[0] == pytest.approx((3 * 2 / 3 + 1) / 4)


def test_vqa_task_and_its_parts() -> None:
    ten = ("yes",) * 2 + ("no",) * 8
    of = task("vqa", sample("1", ten, meta={"split": "val"}), sample("2", ten, meta={"split": "dev"}), name="TextVQA")
    score = scored(of, i1="Yes", i2="no")
    assert score.value == pytest.approx(80)
    assert score.parts == pytest.approx({"split dev": 100, "split val": 60})
    assert score.extracted == {"1": "yes", "2": "no"}


def test_multiple_choice() -> None:
    of = task("mcq", *(sample(str(n), "B", options=ANIMALS) for n in range(4)), name="ScienceQA")
    score = scored(of, i0="(B).", i1="A man is here", i2="A", i3="hm")
    assert score.per_sample == {"0": 1, "1": 1, "2": 0, "3": 0}
    assert score.value == 50
    assert score.counts["unparsed"] == 1
    assert score.extracted["3"] is None


def circular_task() -> Task:
    # two questions, of three and of two options
    options = {"A": "cat", "B": "dog", "C": "bird"}
    rows = [(0, "A"), (1, "C"), (2, "B")]
    first = [sample(f"{n}000005", right, options=options, group="5", meta={"category": "x"}) for n, right in rows]
    two = [
        sample(f"{n}000007", right, options={"A": "l", "B": "r"}, group="7", meta={"category": "y"})
        for n, right in ((0, "A"), (1, "B"))
    ]
    return task("circular", *first, *two, name="MMBench_EN")


def test_circular_evaluation_needs_every_rotation() -> None:
    of = circular_task()
    right = {item.index: item.answers[0] for item in of}
    rows = [{"index": index, "prediction": letter} for index, letter in right.items()]
    assert of.score(rows).value == 100
    rows[1]["prediction"] = "A"
    score = of.score(rows)
    assert score.value == 50
    assert score.parts == pytest.approx({"category x": 0, "category y": 100, "each rotation by itself": 80})
    assert score.per_sample["0000005"] == 1  # the rotation is right, the question is not
    assert score.stats.units == ("5", "7")
    assert of.score(rows[2:]).value == 50  # unanswered rotations are wrong
    assert of.score(rows[3:]).counts["unanswered"] == 3


def test_mme() -> None:
    # existence: 2 images, 3 of 4 right, one image whole: 75 + 50; OCR: 1 image, 1 of 2 right: 50 + 0;
    # code_reasoning: 1 image, whole: 100 + 100
    def pair(category: str, image: str) -> list[Sample]:
        group = f"{category}|{image}"
        return [
            sample(f"{category}{image}{answer}", answer, image, group=group, meta={"category": category})
            for answer in ("Yes", "No")
        ]

    of = task(
        "mme",
        *pair("existence", "a"),
        *pair("OCR", "c"),
        *pair("existence", "b"),
        *pair("code_reasoning", "d"),
        name="MME",
    )
    predictions = {"existenceaYes": "Yes", "existenceaNo": "no.", "existencebYes": "Yes", "existencebNo": "yes"}
    predictions |= {
        "OCRcYes": "I cannot tell",
        "OCRcNo": "No",
        "code_reasoningdYes": "Yes, it is",
        "code_reasoningdNo": "No",
    }
    score = of.score([{"index": index, "prediction": text} for index, text in predictions.items()])
    assert score.value == pytest.approx(125 + 50 + 200)
    assert score.parts["perception"] == pytest.approx(175)
    assert score.parts["cognition"] == pytest.approx(200)
    assert (score.parts["existence acc"], score.parts["existence acc+"]) == (75, 50)
    assert (score.parts["OCR acc"], score.parts["OCR acc+"]) == (50, 0)
    assert score.counts["unparsed"] == 1
    assert len(score.stats.units) == 4


def test_perfect_mme_score_is_2800() -> None:
    from torino.evaluation.scoring import COGNITION, PERCEPTION

    samples = [
        sample(f"{name}{answer}", answer, group=name, meta={"category": name})
        for name in (*PERCEPTION, *COGNITION)
        for answer in ("Yes", "No")
    ]
    score = task("mme", *samples, name="MME").score([{"index": s.index, "prediction": s.answers[0]} for s in samples])
    assert (score.value, score.parts["perception"], score.parts["cognition"]) == (2800, 2000, 800)
    assert score.value == BENCHMARKS["MME"].max_score


def test_pope() -> None:
    rows = [
        ("1", "Yes", "random", "Yes"),  # true yes
        ("2", "Yes", "random,popular", "yes, there is"),  # true yes, in two splits
        ("3", "Yes", "popular", "no."),  # missed
        ("4", "No", "random", "Yes"),  # false yes
        ("5", "No", "popular", "No"),  # right no
        ("6", "No", "popular", "maybe"),  # neither: wrong, and no yes
        ("7", "Yes", "popular", "No"),  # missed
    ]
    of = task("pope", *(sample(i, a, meta={"category": c}) for i, a, c, _ in rows), name="POPE")
    score = of.score([{"index": i, "prediction": p} for i, _, _, p in rows])
    # over all: yes said rightly 3 times, wrongly once, missed twice; 8 questions, of which 4 right
    assert score.value == pytest.approx(100 * 2 * 3 / (2 * 3 + 1 + 2))
    assert score.parts["precision"] == pytest.approx(75)
    assert score.parts["recall"] == pytest.approx(60)
    assert score.parts["accuracy"] == pytest.approx(50)
    assert score.parts["yes ratio"] == pytest.approx(50)
    assert score.parts["f1 random"] == pytest.approx(100 * 4 / 5)  # 2 right, 1 false
    assert score.parts["f1 popular"] == pytest.approx(100 * 2 / 4)  # 1 right, 2 missed
    assert score.parts["f1 mean of splits"] == pytest.approx((80 + 50) / 2)
    assert score.parts["accuracy popular"] == pytest.approx(40)
    assert score.parts["yes ratio popular"] == pytest.approx(20)
    assert score.counts["unparsed"] == 1


def test_pope_without_any_yes() -> None:
    of = task("pope", sample("1", "Yes"), sample("2", "No"), name="POPE")
    score = scored(of, i1="No", i2="No")
    assert (score.value, score.parts["precision"], score.parts["recall"], score.parts["accuracy"]) == (0, 0, 0, 50)


def test_custom_yes_no_task() -> None:
    assert scored(task("yes-no", sample("1", "yes"), sample("2", "No")), i1="Yes!", i2="yes").value == 50


# --- answers that are missing, failed, twice or foreign -------------------------------------------------------------


def test_counts() -> None:
    of = task("exact", *(sample(str(n), "a") for n in range(5)))
    rows: list[dict[str, Any]] = [
        {"index": 0, "prediction": "a"},  # numbers are as good as texts
        {"index": "1", "prediction": None, "error": "out of memory"},
        {"index": "2", "prediction": "b"},
        {"index": "2", "prediction": "a"},  # the last one counts
        {"index": "3", "prediction": "a"},
        {"index": "3", "error": "a failure after an answer does not take it back"},
        {"index": "77", "prediction": "a"},
    ]
    score = of.score(rows)
    assert score.value == 60
    assert score.counts == {"samples": 5, "answered": 3, "unanswered": 1, "failed": 1, "ignored": 1}
    assert score.per_sample["4"] == 0
    seen = of.score(rows, partial=True)
    assert seen.value == 75
    assert seen.counts["samples"] == 4
    assert json.loads(json.dumps(score.to_dict()))["value"] == 60


def test_partial_scores_leave_out_incomplete_groups() -> None:
    of = circular_task()
    rows = [{"index": item.index, "prediction": item.answers[0]} for item in of.samples[1:]]
    assert of.score(rows).value == 50
    assert of.score(rows, partial=True).stats.units == ("7",)


def test_answers_of_another_task_raise() -> None:
    of = task("exact", sample("1", "a"))
    with pytest.raises(BadFile, match="None of the 2 answers belongs to a sample of GQA"):
        of.score([{"index": "x", "prediction": "a"}, {"index": "y", "prediction": "a"}])
    with pytest.raises(BadParameter, match="no sample to score"):
        of.score([], partial=True)
    assert of.score([]).value == 0


def test_stats_by_image() -> None:
    of = task("exact", sample("1", "a", "x"), sample("2", "a", "y"), sample("3", "a", "x"))
    score = scored(of, i1="a", i2="b", i3="b")
    merged = score.by_image()
    assert merged.units == ("x", "y")
    assert merged.sums.tolist() == [[1, 2], [0, 1]]
    assert merged.value == score.value


# --- VLMEvalKit, where it is installed ------------------------------------------------------------------------------


def test_agreement_with_vlmevalkit() -> None:
    try:
        from vlmeval.dataset.utils.vqa_eval import process_line  # type: ignore[import-not-found]
        from vlmeval.dataset.utils.yorn import YOrN_Extraction  # type: ignore[import-not-found]
        from vlmeval.utils.matching_util import can_infer  # type: ignore[import-not-found]
    except Exception as error:  # it fails to import in many ways
        pytest.skip(f"VLMEvalKit cannot be imported here ({type(error).__name__})")
    texts = ["Two dogs.", "the 2 dogs", "1,000", "dont know", "coca-cola", "it's", "U.S.A.", "yes", "", "a", "3.5"]
    for right in (["2 dogs"] * 3 + ["dogs"] * 7, ["1000"] * 10, ["don't know"] * 2 + ["no"] * 8, ["coca cola"] * 10):
        for text in texts:
            kit = process_line({"answer": str(right), "prediction": text}, method="vqa_score")["match"]
            ours = soft_accuracy(sample("1", tuple(right)), text)[0]
            assert ours == pytest.approx(sum(kit) / len(kit)), text
    for text in SAID:
        kit = YOrN_Extraction(text)
        assert kit == "Unknown" or kit.lower() == extract_yes_no(text), text
    # where it decides, we decide alike, but for the article and for what is denied
    meant = ("man", "Man", "horse", "person", "not", "Not", "isn't", "wrong", "dog or", "plan", "cats")
    for text in CHOSEN:
        kit = can_infer(text, dict(ANIMALS))
        assert not kit or kit == extract_option(text, ANIMALS) or any(word in text for word in meant), text
