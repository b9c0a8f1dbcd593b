"""Cells: what a run keeps of its pictures, and the figures made of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from test_run import PLAN, checkpoint, go, sae, task, vlm  # noqa: F401 (fixtures)
from typer.testing import CliRunner

from torino import SAE, BadParameter, make
from torino.cli.main import app
from torino.cli.report import _examples, _Shown
from torino.datasets.images import open_image
from torino.evaluation.examples import cases
from torino.evaluation.results import Run
from torino.vlm.adapters.base import adapter_for


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory, vlm: tuple[Any, Any], sae: SAE) -> Run:  # noqa: F811
    folder = tmp_path_factory.mktemp("cells")
    return go(folder / "run", [task(folder, "one", 3), task(folder, "two", 2)], vlm, sae, keep=2)


def test_a_run_keeps_what_it_is_asked_to(kept: Run, vlm: tuple[Any, Any], sae: SAE) -> None:  # noqa: F811
    found = cases(kept, samples=["one:2"], settings=["torino-m(2,2)[s]", "random@5#1", "divprune"])
    (case,) = found
    assert [cell.setting.id for cell in case.cells] == ["torino-m(2,2)[s]", "random@5#1", "divprune@2,2"]
    rows = {row["setting"]: row for row in kept.rows("one") if row["index"] == "2"}
    assert [cell.answer for cell in case.cells] == [rows[cell.setting.id]["prediction"] for cell in case.cells]
    assert [len(cell.reduction) for cell in case.cells] == [rows[cell.setting.id]["tokens"] for cell in case.cells]
    assert case.question == "what is this ?"
    assert case.right is (rows["full"]["prediction"].strip() == "word1")
    model, processor = vlm
    sample = kept.open_tasks()["one"]["2"]
    inputs = processor(images=[open_image(sample.image.read())], text="<image> what", return_tensors="pt")
    sight = adapter_for(model).look(dict(inputs), frozenset())
    again = make("torino-m(k=2, delta=2)", sae=sae).plan(sight.tokens[0])
    assert again.assigned.tolist() == case.cells[0].reduction.assigned.tolist()


def test_by_default_each_picture_once_and_the_tasks_in_turn(kept: Run) -> None:
    found = cases(kept, count=3)
    assert [(case.task, case.index) for case in found] == [("one", "0"), ("two", "0"), ("one", "2")]
    assert all(cell.setting.tier == "2,2" for case in found for cell in case.cells)
    assert found[0].cells[0].setting.method == "torino-m"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"samples": ["one:4"]}, "did not keep"),
        ({"samples": ["one:77"]}, "no sample"),
        ({"samples": ["three:0"]}, "no sample"),
        ({"tier": "9,9"}, "no tier"),
        ({"settings": ["folder"]}, "no setting"),
    ],
)
def test_what_is_not_there_is_said(kept: Run, given: dict[str, Any], says: str) -> None:
    with pytest.raises(BadParameter, match=says):
        cases(kept, **given)


def test_a_run_without_cells(tmp_path: Path, vlm: tuple[Any, Any], sae: SAE) -> None:  # noqa: F811
    run = go(tmp_path / "run", [task(tmp_path, "one", 1)], vlm, sae)
    assert not (tmp_path / "run/cells").exists()
    with pytest.raises(BadParameter, match="--keep"):
        cases(run)


def test_figures_of_a_run(kept: Run, tmp_path: Path) -> None:
    given = ["plot", str(kept.folder), "--kind", "qualitative,teaser", "--format", "png", "-o", str(tmp_path)]
    done = CliRunner().invoke(app, [*given, "--samples", "one:0,two:1", "--tier", "5"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["qualitative.png", "teaser.png"]


def test_methods_are_called_as_in_the_tables(kept: Run) -> None:
    (example,) = _examples(kept.folder, _Shown("5", ["torino-m", "divprune"], ["one:0"]))
    assert [one.heading for one in example.shown] == ["TORINO_FB-M", "DivPrune"]


def test_charts_are_drawn_where_the_pictures_data_is_gone(kept: Run, tmp_path: Path) -> None:
    moved = tmp_path / "run"
    shutil.copytree(kept.folder, moved)
    facts = json.loads((moved / "run.json").read_text(encoding="utf-8"))
    for task_ in facts["tasks"]:
        task_["path"] = str(tmp_path / "gone" / task_["file"])
    (moved / "run.json").write_text(json.dumps(facts), encoding="utf-8")
    (moved / "scores.json").unlink(missing_ok=True)
    given = ["plot", str(moved), "-o", str(tmp_path / "out"), "--format", "png"]
    done = CliRunner().invoke(app, given, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["distribution.png"]
    failed = CliRunner().invoke(app, [*given, "--kind", "qualitative"])
    assert "one.tsv" in str(failed.exception)
