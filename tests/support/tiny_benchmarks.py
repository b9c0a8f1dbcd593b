"""The nine benchmarks as tiny TSV files in the columns of VLMEvalKit's files."""

from __future__ import annotations

import base64
import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.tiny_run import make_image

WORDS = [f"word{number}" for number in range(6)]


def write_benchmarks(folder: Path, images: int = 2) -> Path:
    """Write the files of all nine benchmarks, with a few questions about each image."""
    folder.mkdir(parents=True, exist_ok=True)
    pictures = [base64.b64encode(make_image(number)).decode() for number in range(images)]
    numbered = list(enumerate(pictures))
    _write(
        folder / "GQA_TestDev_Balanced.tsv",
        [{"index": i, "image": image, "question": "what is this ?", "answer": WORDS[i]} for i, image in numbered],
    )
    for language in ("EN", "CN"):
        _write(folder / f"MMBench_DEV_{language}.tsv", list(_circular(pictures)))
    _write(
        folder / "MME.tsv",
        [
            {
                "index": 2 * i + turn,
                "category": "color",
                "image_path": f"color/{i}.png",
                "question": "is this word1 ? Please answer yes or no.",
                "answer": ("Yes", "No")[turn],
                "image": image,
            }
            for i, image in numbered
            for turn in range(2)
        ],
    )
    _write(
        folder / "POPE.tsv",
        [
            {"index": i, "image": image, "question": "is this ?", "answer": ("yes", "no")[i % 2], "category": "random"}
            for i, image in numbered
        ],
    )
    options = {"A": "word1", "B": "word2"}
    _write(
        folder / "ScienceQA_TEST.tsv",
        [
            {"index": i, "image": image, "question": "what is this ?", **options, "hint": "word3", "answer": "A"}
            for i, image in numbered
        ],
    )
    for name in ("TextVQA_VAL", "VizWiz"):
        answers = {"TextVQA_VAL": "answer", "VizWiz": "answers"}[name]
        rows = [
            {"index": i, "image": image, "question": "what is this ?", answers: str([WORDS[i]] * 10)}
            for i, image in numbered
        ]
        _write(folder / f"{name}.tsv", rows)
    _write(
        folder / "MMVet.tsv",
        [
            {"index": i, "image": image, "question": "what is this ?", "answer": WORDS[i], "capability": "rec"}
            for i, image in numbered
        ],
    )
    return folder


def _circular(pictures: Sequence[str]) -> list[dict[str, Any]]:
    """Return questions with their rotations, as MMBench lists them: a rotation refers to the image of its question."""
    rows: list[dict[str, Any]] = []
    for number, image in enumerate(pictures):
        for turn in range(2):
            texts = WORDS[1:3][turn:] + WORDS[1:3][:turn]
            rows.append(
                {
                    "index": number + turn * 1_000_000,
                    "question": "what is this ?",
                    "hint": "",
                    "A": texts[0],
                    "B": texts[1],
                    "answer": "AB"[turn],
                    "category": "color",
                    "image": number if turn else image,
                    "l2-category": "attribute",
                    "split": "dev",
                }
            )
    return rows


def _write(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter="\t")
        writer.writeheader()
        writer.writerows(rows)
