"""Damaged task files, answers, grades and replies of a judge."""

from __future__ import annotations

import base64
import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.damage import Draw, damage_bytes, damage_lines, damage_table, damaged
from tests.support.fuzzing import FuzzCase, fuzz, only_torino_errors
from tests.support.tiny_run import make_image
from torino.evaluation.judge import Judge, parse_grade
from torino.evaluation.judge import _parse_reply as parse_reply
from torino.evaluation.judge import _ReplyError as ReplyError
from torino.evaluation.tasks import Task, open_task, read_answers

KINDS = (None, "exact", "vqa", "mcq", "circular", "yes-no", "mme", "pope", "judge")
ROWS: list[dict[str, Any]] = [
    {"index": 0, "question": "is it red ?", "answer": "yes", "A": "yes", "B": "no", "category": "color"},
    {"index": 1, "question": "is it blue ?", "answer": "no", "A": "yes", "B": "no", "category": "color"},
    {"index": 1000001, "question": "and now ?", "answer": "B", "A": "yes", "B": "no", "category": "count", "hint": "x"},
    {
        "index": 7,
        "question": "how many ?",
        "answer": "A",
        "A": "two",
        "B": "3",
        "category": "count",
        "image_path": "1.png",
    },
]
COLUMNS = ("index", "image", "question", "answer", "A", "B", "category", "hint", "image_path", "answers")


def write_tsv(folder: Path) -> None:
    write_images(folder)
    with (folder / "task.tsv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, delimiter="\t", restval="", lineterminator="\n")
        writer.writeheader()
        for number, row in enumerate(ROWS):
            image = base64.b64encode(make_image(number)).decode()
            cell = {0: image, 1: "0", 2: f"['{image}', '{image}']", 3: ""}[number]
            writer.writerow(row | {"image": cell, "answers": "['two', '2']" if number == 3 else ""})


def write_jsonl(folder: Path) -> None:
    write_images(folder)
    lines = [
        {"image": "0.png", "question": "is it red ?", "answer": "yes", "category": "color", "id": 3},
        {"image": ["0.png", "1.png"], "question": "and ?", "answers": ["a", {"answer": "b"}], "options": ["a", "b"]},
        {
            "images": ["1.png"],
            "question": "no ?",
            "answer": "B",
            "choices": {"A": "x", "B": "y"},
            "hint": "look",
            "index": "k",
        },
    ]
    (folder / "task.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_images(folder: Path) -> None:
    for number in range(2):
        (folder / f"{number}.png").write_bytes(make_image(number))


def use_task(folder: Path) -> None:
    errors = 0
    for kind in KINDS:
        try:
            use_samples(open_task(next(folder.glob("task.*")), kind=kind))  # type: ignore[arg-type]
        except ValueError as error:
            if not type(error).__module__.startswith("torino"):
                raise
            errors, last = errors + 1, error
    if errors == len(KINDS):
        raise last


def use_samples(task: Task) -> None:
    json.dumps(task.describe()).encode()
    for sample in task:
        task.prompt(sample).encode()
        assert sample.images
        for image in sample.images:
            image.read()
        task[sample.index]
    task.score([{"index": sample.index, "prediction": sample.answers[0]} for sample in task])
    task.take(1, seed=0)


def write_answers(folder: Path) -> None:
    write_tsv(folder)
    rows: list[dict[str, Any]] = [{"index": row["index"], "prediction": row["answer"]} for row in ROWS]
    rows += [{"index": 7, "error": "out of memory"}, {"index": "0", "prediction": 1, "seconds": {"plan": 0.1}}]
    (folder / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def use_answers(folder: Path) -> None:
    task = open_task(folder / "task.tsv")
    task.score(read_answers(folder / "answers.jsonl"))


def write_grades(folder: Path) -> None:
    rows = [{"key": str(number) * 32, "index": "1", "model": "m", "grade": 0.5, "reply": "0.5"} for number in range(3)]
    (folder / "grades.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def use_grades(folder: Path) -> None:
    judge = Judge("http://localhost", "m", cache=folder / "grades.jsonl")
    assert all(isinstance(grade, float) and 0 <= grade <= 1 for grade in judge._grades.values())
    judge._save({"key": "new", "index": "2", "model": "m", "grade": 1.0, "reply": "1"})


CASES = [
    FuzzCase("tsv", write_tsv, "task.tsv", use_task, cost=2),
    FuzzCase("tsv", write_tsv, "1.png", use_task, cost=2),
    FuzzCase("jsonl", write_jsonl, "task.jsonl", use_task, cost=2),
    FuzzCase("answers", write_answers, "answers.jsonl", use_answers),
    FuzzCase("judge", write_grades, "grades.jsonl", use_grades),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_valid_files_are_read(case: FuzzCase) -> None:
    case.run(None)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_damaged_files_raise_only_torino_errors(case: FuzzCase) -> None:
    fuzz(case)


@st.composite
def last_row_damaged(draw: Draw, name: str, damage: Callable[[Draw, bytes], bytes]) -> bytes:
    """Return a task file whose last row is damaged in its structure or its bytes."""
    data = (FOLDERS[name].template / f"task.{name}").read_bytes()
    *rows, last = data.splitlines(keepends=True)
    return b"".join(rows) + (damage(draw, last) if draw(st.booleans()) else damage_bytes(draw, last))


FOLDERS = {"tsv": CASES[0], "jsonl": CASES[2]}


@pytest.mark.parametrize(("name", "damage", "kept"), [("tsv", damage_table, 3), ("jsonl", damage_lines, 2)])
def test_a_damaged_row_is_skipped_and_the_others_are_used(name: str, damage: Any, kept: int) -> None:
    @given(last_row_damaged(name, damage))
    def check(content: bytes) -> None:
        path = FOLDERS[name].template / f"damaged.{name}"
        path.write_bytes(content)
        task = open_task(path, kind="vqa")
        assert len(task) >= kept
        use_samples(task)

    check()


REPLY = {
    "id": "chatcmpl-1",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "0.5"}, "finish_reason": "stop"}],
    "usage": {"total_tokens": 9},
}


@given(damaged(json.dumps(REPLY).encode(), "reply.json"))
def test_damaged_replies_of_a_judge(content: bytes) -> None:
    with only_torino_errors():
        try:
            grade = parse_grade(parse_reply(content))
        except ReplyError as error:  # becomes a TorinoError with the address of the judge
            str(error).encode()
            return
        assert grade is None or 0 <= grade <= 1
