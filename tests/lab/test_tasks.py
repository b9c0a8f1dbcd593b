"""The lab's tasks from real questions and generated images, written as TSV and scored by torino's rules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from torino_lab.catalog import TASKS
from torino_lab.tasks import TaskBuilder
from torino_lab.tsv import fingerprint, majority_score, write_tsv

from tests.support.lab_photos import PHOTOS
from torino.core.errors import BadFile, TorinoError
from torino.evaluation import open_task

QUESTIONS = [
    ("Is there a dog in the image?", ["yes"], "pope-random+popular"),
    ("Is there a cat in the image?", ["no"], "pope-adversarial"),
    ("What color is it ?", ["red"] * 7 + ["blue"] * 3, "vqa2"),
    ("How many dogs are there?", ["2"] * 10, "vqa2"),
    ("Is it day?", ["no"] * 10, "vqa2"),
    ("Which breed?", ["collie", "dog"], "okvqa"),
    ("Is the dog left of the man?", ["no"], "vsr"),
    ("What is on the table?", ["lamp"], "daquar"),
    ("What word is written here?", ["EXIT"], "icdar15-word"),
    ("Ignored?", ["yes"], "cocoqa"),
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for name in ("pope-dev", "cocovqa-dev", "cococap-dev", "daquar-dev", "scenetext-dev", "flickr8k-dev"):
        table = {
            "file": [photo[0] for photo in PHOTOS],
            "image": [photo[1] for photo in PHOTOS],
            "captions": [photo[2] for photo in PHOTOS],
        }
        if name != "flickr8k-dev":
            table |= {
                "questions": [[text for text, _, _ in QUESTIONS]] * len(PHOTOS),
                "answers": [[answers for _, answers, _ in QUESTIONS]] * len(PHOTOS),
                "sources": [[source for _, _, source in QUESTIONS]] * len(PHOTOS),
            }
        pq.write_table(pa.table(table), folder / f"{name}.parquet")
    return folder


@pytest.mark.parametrize("name", [name for name in TASKS if TASKS[name].kind != "caption"])
def test_right_answers_score_full_marks(name: str, data: Path, tmp_path: Path) -> None:
    items = TaskBuilder(data, scale=0.05).make(name)
    write_tsv(tmp_path / f"{name}.tsv", items)
    task = open_task(tmp_path / f"{name}.tsv", kind=TASKS[name].kind)
    assert len(task) == len(items) > 0
    right = task.score([{"index": sample.index, "prediction": sample.answers[0]} for sample in task])
    assert right.value == pytest.approx(100)
    wrong = task.score([{"index": sample.index, "prediction": "nothing of the kind"} for sample in task])
    assert wrong.value == 0
    constant, answer = majority_score(task)
    assert 0 < constant <= 100
    assert task.score([{"index": sample.index, "prediction": answer} for sample in task]).value == constant


def test_questions_come_from_their_sources(data: Path) -> None:
    builder = TaskBuilder(data)
    pope = builder.make("Lab-POPE")
    assert {item.category for item in pope} == {"random,popular", "adversarial"}
    asked = builder.make("Lab-VQAv2")
    assert {item.question.text for item in asked} == {"What color is it?", "How many dogs are there?", "Is it day?"}
    assert {item.category for item in asked} == {"other", "number", "yes/no"}
    assert {len(item.answers) for item in asked} == {10}
    assert len(builder.make("Lab-OKVQA")) == 2 * len(PHOTOS)  # of two files
    captions = builder.make("Lab-Captions")
    assert all(answer.endswith(".") and len(item.answers) == 5 for item in captions for answer in item.answers)


def test_generated_tasks_are_balanced_and_fixed(data: Path) -> None:
    builder = TaskBuilder(data, scale=0.2)
    items = builder.make("Lab-Collage")
    presence = [item.question.answer for item in items if item.category == "presence"]
    assert presence.count("yes") == presence.count("no") > 0
    assert fingerprint(items) == fingerprint(TaskBuilder(data, scale=0.2).make("Lab-Collage"))
    assert fingerprint(items) != fingerprint(TaskBuilder(data, scale=0.2, seed=1).make("Lab-Collage"))
    small = builder.make("Lab-Small")
    assert not any("colour" in item.question.text or item.question.answer == "grey" for item in small)


def test_halves_share_no_photo(data: Path) -> None:
    def photos(**options: Any) -> set[bytes]:
        items = TaskBuilder(data, **options).make("Lab-VQAv2")
        assert all(isinstance(item.image, bytes) for item in items)
        return {item.image for item in items if isinstance(item.image, bytes)}

    choose, report = photos(half="choose"), photos(half="report")
    assert choose
    assert report
    assert not choose & report
    assert choose | report == photos()
    few = photos(photos=2)
    assert len(few) == 2
    assert few == photos(photos=2)
    corpora = [TaskBuilder(data, half=half)._corpus(("flickr8k-dev",)) for half in ("choose", "report")]
    assert sum(len(corpus.facts) for corpus in corpora) == len(PHOTOS)


def test_missing_files_and_unknown_names(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match=r"There is no file .*pope-dev\.parquet"):
        TaskBuilder(tmp_path).make("Lab-POPE")
    with pytest.raises(TorinoError, match="Lab-Pop"):
        TaskBuilder(tmp_path).make("Lab-Pop")
