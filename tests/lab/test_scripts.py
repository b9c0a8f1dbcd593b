"""The lab's scripts start, and their help shows how they are called."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from torino.evaluation.scoring import ScoreStats

SCRIPTS = Path(__file__).parents[2] / "lab" / "scripts"


@pytest.mark.parametrize("name", sorted(path.stem for path in SCRIPTS.glob("*.py")))
def test_scripts_have_help(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    with pytest.raises(SystemExit, match="0"):
        import_module(name).main()
    assert f"python lab/scripts/{name}.py" in capsys.readouterr().out


def test_the_difference_to_guessing_is_drawn_by_image(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    difference = import_module("baseline_table").difference

    def stats(right: list[float]) -> ScoreStats:
        sums = np.array([[value, 1.0] for value in right])
        return ScoreStats(tuple(map(str, range(len(right)))), sums, lambda s: 100 * s[..., 0] / s[..., 1])

    images = tuple(str(number // 5) for number in range(100))
    seen, blank = stats([1.0] * 100), SimpleNamespace(stats=stats([0.5] * 100))
    assert difference(seen.merge(images), blank, images, 0) == pytest.approx((50.0, 50.0))
    by_image = stats([float(number // 5 % 2) for number in range(100)])
    low, high = difference(by_image.merge(images), SimpleNamespace(stats=stats([0.0] * 100)), images, 0)
    assert low == pytest.approx(50 - 1.96 * 50 / 20**0.5, abs=4), "twenty images, not a hundred questions"
    assert high == pytest.approx(50 + 1.96 * 50 / 20**0.5, abs=4)
