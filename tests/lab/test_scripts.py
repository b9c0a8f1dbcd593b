"""The lab's scripts start, and their help shows how they are called."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tests.support.synthetic_run import write_synthetic_run
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


def test_findings_are_read_from_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    script = import_module("check_findings")
    run = write_synthetic_run(tmp_path / "run", questions=40, saes=("x4", "x16", "cls", "random2", "none"))
    output = tmp_path / "findings.json"
    words = [str(run), "--main", "x4", "--sizes", "x4", "x16", "-o", str(output)]
    monkeypatch.setattr(sys, "argv", ["check_findings.py", *words])
    script.main()
    found = {item["finding"]: item for item in json.loads(output.read_text())["findings"]}
    assert found["spread of lengths"]["holds"] == "yes"  # lengths are drawn in proportion to their mean
    assert found["order of tasks"]["values"][0] == ["GQA", "POPE"]
    assert [item["tokens"] for item in found["CLS or patches"]["values"]] == [192, 64] * 2
    pair = found["the SAE's contribution"]["values"][0]
    assert pair["of the SAE"] == pytest.approx(pair["tokens"], rel=0.2)
    monkeypatch.setattr(sys, "argv", ["check_findings.py", str(run), "--main", "x64", "-o", str(output)])
    with pytest.raises(SystemExit, match="no dynamic torino-p at 3,3 with the SAE x64"):
        script.main()
    assert script.verdict([{"low": 1, "high": 2}, {"low": 0.5, "high": 1}]) == "yes"
    assert script.verdict([{"low": -1, "high": 2}]) == "not seen: within chance"
    assert script.verdict([{"low": -2, "high": -1}]) == "no: the opposite in 1 of 1"
    assert script.verdict([{"low": 1, "high": 2}, {"low": -1, "high": 2}]) == "partly: 1 of 2 significant"
