"""Write the lab's benchmarks as TSV files in VLMEvalKit's layout, grade by keywords, and compute blind accuracy."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from torino.core.io import write_atomic
from torino_lab.questions import LETTERS
from torino_lab.selection import Item

QUALITY = 92  # of the JPEGs
COMMON_ANSWERS = 200  # candidates for the best constant answer
_WORD = re.compile(r"[a-z0-9]+")


class _GradedSample(Protocol):
    """The attributes of a sample that a grader reads."""

    @property
    def index(self) -> str: ...

    @property
    def answers(self) -> tuple[str, ...]: ...


class KeywordGrader:
    """Grade a free-form answer by the keywords it contains, instead of with an LLM judge.

    As in MM-Vet, the correct answer joins parts by ``<AND>`` and the synonyms of a part by ``<OR>``. The grade is the
    share of parts that the answer contains.
    """

    name = "key words"

    def grade_all(self, samples: Iterable[_GradedSample], predictions: Mapping[str, str]) -> dict[str, float | None]:
        """Return the grades of all answers by index."""
        return {
            sample.index: keyword_score(sample.answers[0], predictions[sample.index])
            for sample in samples
            if sample.index in predictions
        }


def keyword_score(correct: str, prediction: str) -> float:
    """Return the share of the parts of the correct answer that a prediction contains.

    Examples
    --------
    >>> keyword_score("dog<OR>puppy<AND>snow", "a brown puppy runs on the grass")
    0.5
    """
    words = f" {' '.join(_WORD.findall(prediction.lower()))} "
    parts = [part.split("<OR>") for part in correct.split("<AND>")]
    return sum(any(f" {synonym.strip().lower()} " in words for synonym in part) for part in parts) / len(parts)


# ------------------------------------------------------------------ files


def write_tsv(path: Path, items: Sequence[Item]) -> None:
    """Write a benchmark; a repeated image is given by the index of its first row."""
    has_options = any(item.question.options for item in items)
    has_hints = any(item.question.hint for item in items)
    columns = ["index", "image", *(["hint"] if has_hints else []), "question", *(LETTERS if has_options else "")]
    columns += ["answer", "category", "split"]
    first_rows: dict[int, str] = {}
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", delimiter="\t", lineterminator="\n")
    writer.writeheader()
    for number, item in enumerate(items):
        index = str(number)
        row = {"index": index, "question": item.question.stem, "category": item.category, "split": "dev"}
        row["image"] = first_rows.get(id(item.image)) or _encode_image(item)
        first_rows.setdefault(id(item.image), index)
        row |= dict(zip(LETTERS, item.question.options, strict=False)) if has_options else {}
        row |= {"hint": item.question.hint} if has_hints else {}
        row["answer"] = json.dumps(item.answers, ensure_ascii=False) if item.answers else item.question.answer
        writer.writerow(row)

    def write(target: Path) -> None:
        target.write_text(text.getvalue(), encoding="utf-8")

    write_atomic(path, write)


def _encode_image(item: Item) -> str:
    file = io.BytesIO()
    item.image.save(file, "JPEG", quality=QUALITY, subsampling=0)
    return base64.b64encode(file.getvalue()).decode()


def fingerprint(items: Iterable[Item]) -> str:
    """Return a hash of all questions and answers; pixels are excluded, because image decoders differ."""
    digest = hashlib.sha256()
    for item in items:
        fields = [item.category, item.question.text, item.question.answer, *item.answers]
        digest.update(json.dumps(fields, ensure_ascii=False).encode() + b"\n")
    return digest.hexdigest()[:16]


# ------------------------------------------------------------------ blind accuracy


def blind_accuracy(items: Sequence[Item]) -> dict[str, float]:
    """Return the accuracy of the best constant answer, which ignores the image, in percent.

    Returns
    -------
    dict
        ``constant``: one answer (for choices, one letter) for the whole benchmark; ``by category``: one answer for
        each category.
    """
    groups: dict[str, list[Item]] = {}
    for item in items:
        groups.setdefault(item.category, []).append(item)
    by_category = sum(_best_constant(group) for group in groups.values())
    return {"constant": 100 * _best_constant(items) / len(items), "by category": 100 * by_category / len(items)}


def _best_constant(items: Sequence[Item]) -> float:
    common = Counter(_as_answer(item) for item in items).most_common(COMMON_ANSWERS)
    return max(sum(_score(item, answer) for item in items) for answer, _ in common)


def _as_answer(item: Item) -> str:
    """Return the correct answer as a model would write it; of keywords, the first synonym of each part."""
    return " ".join(part.split("<OR>")[0] for part in item.question.answer.split("<AND>"))


def _score(item: Item, answer: str) -> float:
    if "<" in item.question.answer:
        return keyword_score(item.question.answer, answer)
    return float(answer == item.question.answer)
