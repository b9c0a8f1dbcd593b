"""Video-MME, MVBench and LongVideoBench: VLMEvalKit's layouts from local files, and its scoring rules."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from torino.core.errors import BadFile
from torino.evaluation import Sample, Task, VideoRef, open_task
from torino.evaluation.scoring import match_first_word, match_letter
from torino.evaluation.videos import add_options, video_names, video_part

CANDIDATES = {"Video-MME": ["A. A red cup.", "B. A cat.", "C. A dog.", "D. A hat."]}
PLAIN = ["a red cup", "a cat", "a dog", "a hat"]


def write_frames(folder: Path, count: int = 12) -> Path:
    folder.mkdir(parents=True)
    for i in range(count):
        Image.new("RGB", (8, 8), (9 * i,) * 3).save(folder / f"{i + 1:05d}.jpg")
    return folder


def write_tsv(path: Path, rows: list[dict[str, Any]]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter="\t")
        writer.writeheader()
        writer.writerows(rows)
    return path


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write_frames(tmp_path / "video" / "a.mp4")  # a folder stands for a video, so that no decoder is needed
    write_frames(tmp_path / "video" / "tvqa" / "frames" / "b")
    write_frames(tmp_path / "videos" / "c.mp4")
    common = {"index": 0, "question": "What is shown?"}
    row = {"video": "a", "video_path": "./video/a.mp4", "candidates": str(CANDIDATES["Video-MME"]), "answer": "B"}
    facts = {"duration": "short", "domain": "Knowledge", "sub_category": "Law", "task_type": "Counting Problem"}
    missing = {"index": 1, "video": "x", "video_path": "./video/x.mp4"}
    write_tsv(tmp_path / "Video-MME.tsv", [common | row | facts, common | row | facts | missing])
    row = {"task_type": "Episodic Reasoning", "prefix": "video/tvqa/frames/", "data_type": "frame", "video": "b"}
    row |= {"bound": True, "start": 1.0, "end": 3.0, "candidates": str(PLAIN), "answer": "a dog"}
    write_tsv(tmp_path / "MVBench.tsv", [common | row])
    row = {"video": "c", "video_path": "./videos/c.mp4", "candidates": str(PLAIN), "correct_choice": 3}
    row |= {"duration_group": 15, "question_category": "S2E"}
    write_tsv(tmp_path / "LongVideoBench.tsv", [common | row, common | row | {"index": 1, "correct_choice": 7}])
    return tmp_path


def only(task: Task) -> Sample:
    return task.samples[0]


@pytest.mark.parametrize(
    ("name", "letter", "kind"), [("Video-MME", "B", "letter"), ("MVBench", "C", "first-word"), ("lvb", "D", "letter")]
)
def test_layouts(data: Path, name: str, letter: str, kind: str) -> None:
    task = open_task("LongVideoBench" if name == "lvb" else name, data, frames=4)
    sample = only(task)
    assert task.kind == kind
    assert sample.answers == (letter,)
    assert list(sample.options) == ["A", "B", "C", "D"]
    assert sample.options["B"].strip(".").lower() == "a cat"
    (video,) = sample.images
    assert isinstance(video, VideoRef)
    opened = video.read()
    assert len(opened) == 4
    if name == "MVBench":  # three frames per second, from 1 to 3 seconds
        assert all(1 <= time < 3 for time in opened.times)
    assert "(" not in task.prompt(sample).splitlines()[0]


def test_prompts_end_with_the_instruction_of_the_kit(data: Path) -> None:
    def prompt(name: str) -> str:
        task = open_task(name, data).for_model(None)
        return task.prompt(only(task))

    options = "A. a red cup\nB. a cat\nC. a dog\nD. a hat"
    assert prompt("MVBench") == f"What is shown?\n{options}\nOnly give the best option."
    letter = "Answer with the option's letter from the given choices directly."
    assert prompt("LongVideoBench") == f"What is shown?\n{options}\n{letter}"
    assert prompt("Video-MME").endswith("Respond with only the letter (A, B, C, or D) of the correct option.")


def test_bad_rows_are_reported(data: Path) -> None:
    (problem,) = open_task("Video-MME", data).problems
    assert problem.reason.startswith("video ./video/x.mp4 not found in")
    (problem,) = open_task("LongVideoBench", data).problems
    assert "not the number of a candidate" in problem.reason
    for text in ("nothing", "['one']", "[" * 3000, "__import__('os')"):
        assert "candidates" in add_options({"candidates": text})


def test_a_video_outside_the_folder_is_refused(data: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    outside = write_frames(tmp_path_factory.mktemp("outside") / "d")
    row = {"index": 0, "question": "What?", "video_path": str(outside), "candidates": str(PLAIN), "answer": "a cat"}
    write_tsv(data / "mine.tsv", [row])
    with pytest.raises(BadFile, match="outside its folder"):
        open_task("mine", data)
    assert only(open_task("mine", data, allow_outside=True)).answers == ("B",)


def test_other_frames_or_parts_are_another_image(data: Path) -> None:
    keys = {only(open_task("Video-MME", data, frames=count)).image.key for count in (None, 4, 8)}
    assert len(keys) == 3
    assert video_part({"bound": "False", "start": "1", "end": "2"}) is None
    assert video_part({"bound": "True", "start": "1", "end": "2.5"}) == (1.0, 2.5)
    assert video_part({"bound": "True", "start": "", "end": "2.5"}) is None
    assert video_names({"video": "v.mp4", "prefix": "video/x/"})[0] == "video/x/v.mp4"


# ---------------------------------------------------------------------- rules


def sample(letter: str = "B", options: str = "ABCD") -> Sample:
    return Sample(
        "0", "What?", (letter,), (), dict(zip(options, ["a red cup", "a cat", "a dog", "a hat", "no"], strict=False))
    )


def letter_by_the_kit(text: str, letters: str) -> str:
    """Transcribe the rule of Video-MME and LongVideoBench step by step, with the texts that a missing comma joins."""
    rest = text.strip()
    first = ("The best answer is", "The correct answer is", "The answer is", "The answer")
    joined = ("The best option isThe correct option is", "Best answer:Best option:")
    for prefix in (*first, *joined, "Answer:", "Option:"):
        while prefix in rest:
            at = rest.index(prefix)
            rest = rest[:at] + rest[at + len(prefix) :]
    return next((character for character in rest if character in letters), "")


@pytest.mark.parametrize("options", ["ABCD", "ABCDE"])
@pytest.mark.parametrize(
    "text",
    [
        *("B", "b", "(B)", "B. A cat.", "The answer is B", "The best answer is: C", "Answer: B", "Best answer: A"),
        *("Cats, B", "E", "I see a cat", "", "The correct option is D"),
        "a cat sits there and looks at the many birds of this garden",
    ],
)
def test_letter_rule_equals_its_transcription(text: str, options: str) -> None:
    found = letter_by_the_kit(text, options)
    score, extracted = match_letter(sample(options=options), text)
    if found:
        assert (score, extracted) == (float(found == "B"), found)
    else:  # as in other multiple choices: by the text of an option
        assert score == float(re.search(r"\bb\b|a cat", text) is not None)


@pytest.mark.parametrize(
    ("text", "right"),
    [
        *((text, True) for text in ("B", "b) a cat", "(B) a cat", "B. a cat", "(B)a cat", "I think it is a cat", "(")),
        *((text, False) for text in ("C", "", "a dog")),
    ],
)
def test_first_word_rule(text: str, right: bool) -> None:
    assert match_first_word(sample(), text)[0] == float(right)


def test_scores_by_duration_and_task(data: Path) -> None:
    task = open_task("Video-MME", data)
    score = task.score([{"index": item.index, "prediction": "B"} for item in task])
    assert score.value == 100
    assert any("short" in name for name in score.parts)
    assert any("Counting Problem" in name for name in score.parts)
