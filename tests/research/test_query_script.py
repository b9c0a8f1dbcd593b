"""The comparison of torino-q by question type: paired by image, corrected for all comparisons."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest

SCRIPTS = Path(__file__).parents[2] / "research" / "scripts"


def test_differences_are_paired_by_image_and_corrected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    query = import_module("query")
    images = [str(number // 2) for number in range(80)]  # two questions about each photo
    right, wrong = [(image, 1.0) for image in images], [(image, 0.0) for image in images]
    mixed = [(image, float(number % 2)) for number, image in enumerate(images)]
    scores = {
        ("small objects", 16, "torino-q"): right,
        ("small objects", 16, "torino-x"): wrong,
        ("small objects", 16, "mmtok"): mixed,
        ("regions", 16, "torino-q"): mixed,
        ("regions", 16, "torino-x"): mixed,
    }
    rows = {(row["type"], row["setting"]): row for row in query.compare(scores, "torino-q", 0)}
    ahead = rows["small objects", "torino-x"]
    assert (ahead["score"], ahead["ahead"], ahead["questions"]) == (0.0, 100.0, 80)
    assert ahead["p"] < ahead["p_holm"] < 0.01
    assert rows["small objects", "mmtok"]["ahead"] == 50.0
    assert rows["regions", "torino-x"]["ahead"] == 0.0
    assert rows["regions", "torino-x"]["p_holm"] == 1.0
    assert "p" not in rows["small objects", "torino-q"]
    assert "| torino-q is ahead by |" in query.table(list(rows.values()), "torino-q")


def test_questions_are_grouped_by_image(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    query = import_module("query")
    first, second = b"a", b"b"
    items = [SimpleNamespace(image=image) for image in (first, second, first)]
    groups = query.group_by_image(iter(("regions", item) for item in items))
    assert [(image, len(questions)) for image, questions in groups] == [(b"a", 2), (b"b", 1)]
