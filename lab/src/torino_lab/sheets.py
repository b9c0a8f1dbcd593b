"""The lab's benchmarks on disk and at their poorest: TSVs in VLMEvalKit's layout, key words, blind guesses."""

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
from torino_lab.choosing import Item
from torino_lab.questions import LETTERS

QUALITY = 92  # of the JPEGs
_WORD = re.compile(r"[a-z0-9]+")


class _Keyed(Protocol):
    """What a judge needs of a sample."""

    @property
    def index(self) -> str: ...

    @property
    def answers(self) -> tuple[str, ...]: ...


class KeyWords:
    """Grades a free answer by the key words in it, in place of a language model as judge.

    The right answer joins parts by ``<AND>`` and the ways to say a part by ``<OR>``, as MM-Vet does; the grade is the
    share of parts that are said.
    """

    name = "key words"

    def grade_all(self, samples: Iterable[_Keyed], said: Mapping[str, str]) -> dict[str, float | None]:
        """Grades of all answers, by index."""
        return {one.index: key_words(one.answers[0], said[one.index]) for one in samples if one.index in said}


def key_words(right: str, said: str) -> float:
    """Share of the parts of the right answer that an answer names.

    Examples
    --------
    >>> key_words("dog<OR>puppy<AND>snow", "a brown puppy runs on the grass")
    0.5
    """
    words = f" {' '.join(_WORD.findall(said.lower()))} "
    parts = [part.split("<OR>") for part in right.split("<AND>")]
    return sum(any(f" {way.strip().lower()} " in words for way in part) for part in parts) / len(parts)


# ------------------------------------------------------------------ files


def write_tsv(path: Path, items: Sequence[Item]) -> None:
    """Write a benchmark; a picture that comes again is named by the index of its first row."""
    choices = any(item.question.options for item in items)
    hints = any(item.question.hint for item in items)
    columns = ["index", "image", *(["hint"] if hints else []), "question", *(LETTERS if choices else ""), "answer"]
    columns += ["category", "split"]
    held: dict[int, str] = {}
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", delimiter="\t", lineterminator="\n")
    writer.writeheader()
    for number, item in enumerate(items):
        index = str(number)
        row = {"index": index, "question": item.question.stem, "category": item.category, "split": "dev"}
        row["image"] = held.get(id(item.picture)) or _base64(item)
        held.setdefault(id(item.picture), index)
        row |= dict(zip(LETTERS, item.question.options, strict=False)) if choices else {}
        row |= {"hint": item.question.hint} if hints else {}
        row["answer"] = json.dumps(item.answers, ensure_ascii=False) if item.answers else item.question.answer
        writer.writerow(row)

    def write(target: Path) -> None:
        target.write_text(text.getvalue(), encoding="utf-8")

    write_atomic(path, write)


def _base64(item: Item) -> str:
    file = io.BytesIO()
    item.picture.save(file, "JPEG", quality=QUALITY, subsampling=0)
    return base64.b64encode(file.getvalue()).decode()


def fingerprint(items: Iterable[Item]) -> str:
    """Hash of all questions and answers: equal recipes give equal ones. Pixels do not count, decoders differ."""
    found = hashlib.sha256()
    for item in items:
        told = [item.category, item.question.text, item.question.answer, *item.answers]
        found.update(json.dumps(told, ensure_ascii=False).encode() + b"\n")
    return found.hexdigest()[:16]


# ------------------------------------------------------------------ blind guesses


def blind(items: Sequence[Item]) -> dict[str, float]:
    """What one gets right without looking, in per cent of questions.

    Returns
    -------
    dict
        ``constant``: by the one answer that is right most often, of choices the letter; ``by category``: by one for
        each category.
    """
    groups: dict[str, list[Item]] = {}
    for item in items:
        groups.setdefault(item.category, []).append(item)
    each = sum(_best(group) for group in groups.values())
    return {"constant": 100 * _best(items) / len(items), "by category": 100 * each / len(items)}


def _best(items: Sequence[Item]) -> float:
    common = Counter(_spoken(item) for item in items).most_common(200)
    return max(sum(_score(item, said) for item in items) for said, _ in common)


def _spoken(item: Item) -> str:
    """The answer as a model would give it: of key words the first way to say each."""
    return " ".join(part.split("<OR>")[0] for part in item.question.answer.split("<AND>"))


def _score(item: Item, said: str) -> float:
    if "<" in item.question.answer:
        return key_words(item.question.answer, said)
    return float(said == item.question.answer)
