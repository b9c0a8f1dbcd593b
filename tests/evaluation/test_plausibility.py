"""Warnings about scores that mean nothing: a baseline at chance, or one answer to all questions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from torino.evaluation.plausibility import chance_score, check_baseline, find_implausible
from torino.evaluation.protocol import FULL, Setting
from torino.evaluation.results import Run
from torino.evaluation.tasks import Task, open_task


def make_task(folder: Path, answers: list[str], name: str = "own", **more: Any) -> Task:
    """Write and open a task with one question for each answer."""
    (folder / "photo.jpg").write_bytes(b"never opened here")
    rows = [
        {"index": str(i), "image": "photo.jpg", "question": "?", "answer": answer, **more}
        for i, answer in enumerate(answers)
    ]
    path = folder / f"{name}.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return open_task(path)


def answer_all(*texts: str | None) -> list[dict[str, Any]]:
    return [{"index": str(i), "prediction": text} for i, text in enumerate(texts) if text is not None]


def test_chance_is_the_best_constant_answer(tmp_path: Path) -> None:
    task = make_task(tmp_path, ["yes", "Yes.", "no", "two"])
    assert chance_score(task) == (50, "always answering 'yes'")
    assert chance_score(make_task(tmp_path, ["a cat", "a cat"])) == (0, ""), "one right answer: nothing to guess"
    pope = make_task(tmp_path, ["yes", "no", "no", "no"], "POPE", category="random")
    assert chance_score(pope) == (pytest.approx(40), "always answering 'Yes'"), "by the task's own rule, F1"


def test_chance_of_a_multiple_choice(tmp_path: Path) -> None:
    task = make_task(tmp_path, ["A", "A", "A", "B"], options=["cat", "dog"])
    assert chance_score(task) == (75, "always answering 'A'")
    assert chance_score(make_task(tmp_path, ["A", "A"], options=["cat", "dog"])) == (50, "guessing among the options")
    circular = make_task(tmp_path, ["A", "B"], "MMBench", options=["cat", "dog"])
    assert len(circular) == 4
    assert chance_score(circular) == (25, "guessing among the options"), "both rotations must be right"


@pytest.mark.parametrize(
    ("answers", "kind"),
    [
        (["yes", "no", "two", "no"], None),
        (["yes", "yes", "no", "no"], "chance"),
        (["B", "C", "B", "D"], "chance"),
        (["yes", "Yes", "yes.", " yes"], "constant"),
        ([None, None, None, None], None),
        (["yes", None, None, None], None),
    ],
)
def test_the_baseline_is_checked(tmp_path: Path, answers: list[str | None], kind: str | None) -> None:
    task = make_task(tmp_path, ["yes", "no", "two", "three"])
    found = check_baseline(task, answer_all(*answers))
    assert (None if found is None else found.kind) == kind


def test_texts(tmp_path: Path) -> None:
    task = make_task(tmp_path, ["yes", "yes", "no", "three"])
    letters = check_baseline(task, answer_all("B", "C", "B", "D"))
    assert letters is not None
    assert letters.text == (
        "own: with all tokens the model scores 0.00, not above chance: always answering 'yes' scores 50.00."
    )
    assert (letters.score, letters.chance, letters.answer, letters.questions) == (0, 50, None, 4)
    same = check_baseline(task, answer_all(*["word " * 20] * 4))
    assert same is not None
    assert same.text.startswith("own: with all tokens the model gives one answer to all 4 questions, 'word word")
    assert "…' and scores 0.00." in same.text
    assert len(same.text) < 200
    one_truth = make_task(tmp_path, ["yes", "yes", "yes"])
    assert check_baseline(one_truth, answer_all("yes", "yes", "yes")) is None, "the same answer is right everywhere"
    wrong = check_baseline(one_truth, answer_all("B", "C", "D"))
    assert wrong is not None
    assert wrong.text == "own: with all tokens the model scores 0.00: no answer is right."


def test_a_graded_task_is_checked_for_a_constant_answer_only(tmp_path: Path) -> None:
    task = make_task(tmp_path, ["a boat", "a car"], "MMVet", category="rec")
    assert check_baseline(task, answer_all("wrong", "also wrong")) is None
    found = check_baseline(task, answer_all("B", "B"))
    assert found is not None
    assert (found.kind, found.score) == ("constant", None)


def test_methods_with_one_answer_are_listed(tmp_path: Path) -> None:
    task = make_task(tmp_path, ["yes", "no", "two", "three", "four"])
    right = answer_all("yes", "no", "two", "three", "four")
    rows = {("own", "full"): right, ("own", "a"): answer_all(*["no"] * 5), ("own", "b"): right}
    settings = {"full": FULL} | {name: Setting(name, "random", name, "random(budget=1)", "1") for name in "ab"}
    run = Run(tmp_path, {"tasks": [task.for_model("plain").describe()]}, settings)
    (found,) = find_implausible(run, {"own": task}, lambda *key: rows.get(key, ()))
    assert (found.kind, found.settings, found.questions) == ("constant-methods", ("a",), 5)
    assert found.text == "own: a gives one answer to all questions."
    rows["own", "full"] = answer_all(*["no"] * 5)
    (found,) = find_implausible(run, {"own": task}, lambda *key: rows.get(key, ()))
    assert found.kind == "constant"
    assert "Check the prompt style (plain: 'question')" in found.text
    assert json.loads(json.dumps(found.to_dict()))["answer"] == "no"
