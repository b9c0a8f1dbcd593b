"""Saved images and reductions of a run, and the figures drawn from them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.support import tiny
from tests.support.command import run_torino
from tests.support.tiny_run import open_tiny_task, run_tiny
from torino import SAE, TorinoError, make
from torino.cli.main import app
from torino.cli.report import _ExampleSelection, _load_examples
from torino.core.errors import BadParameter
from torino.datasets.images import open_image
from torino.evaluation.examples import _reduction_file, example_dir, load_examples
from torino.evaluation.results import Run, open_run
from torino.vlm.session import VLM


@pytest.fixture(scope="module")
def vlm() -> VLM:
    return VLM(tiny.llava(), tiny.processor())


@pytest.fixture(scope="module")
def sae() -> SAE:
    return tiny.sae()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, vlm: VLM, sae: SAE) -> Run:
    folder = tmp_path_factory.mktemp("examples")
    tasks = [open_tiny_task(folder, "one", 3), open_tiny_task(folder, "two", 2)]
    return run_tiny(folder / "run", tasks, vlm, sae, save_images=2)


def test_saved_reductions_belong_to_the_answers(run: Run, vlm: VLM, sae: SAE) -> None:
    (case,) = load_examples(run, samples=["one:2"], settings=["torino-m(2,2)[s]", "random@5#1", "divprune"])
    examples = case.examples
    assert [item.setting.id for item in examples] == ["torino-m(2,2)[s]", "random@5#1", "divprune@2,2"]
    rows = {row["setting"]: row for row in run.rows("one") if row["index"] == "2"}
    assert [item.answer for item in examples] == [rows[item.setting.id]["prediction"] for item in examples]
    assert [len(item.reduction) for item in examples] == [rows[item.setting.id]["tokens"] for item in examples]
    assert case.question == "what is this ?"
    assert case.correct is (rows["full"]["prediction"].strip() == "word1")
    image = open_image(run.open_tasks()["one"]["2"].image.read())
    inputs = vlm.processor(images=[image], text="<image> what", return_tensors="pt")
    encoded = vlm.adapter.encode(dict(inputs), frozenset())
    again = make("torino-m(k=2, delta=2)", sae=sae).plan(encoded.tokens[0])
    assert again.assigned.tolist() == examples[0].reduction.assigned.tolist()


def test_default_examples_alternate_between_tasks(run: Run) -> None:
    cases = load_examples(run, count=3)
    assert [(case.task, case.index) for case in cases] == [("one", "0"), ("two", "0"), ("one", "2")]
    assert all(item.setting.tier == "2,2" for case in cases for item in case.examples)
    assert cases[0].examples[0].setting.method == "torino-m"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"samples": ["one:4"]}, "did not save the image of one:4"),
        ({"samples": ["one:77"]}, "'one:77' is not a sample"),
        ({"samples": ["three:0"]}, "'three:0' is not a sample"),
        ({"tier": "9,9"}, "no tier '9,9'"),
        ({"settings": ["folder"]}, "no setting 'folder'"),
    ],
)
def test_missing_examples_are_reported(run: Run, options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadParameter, match=message):
        load_examples(run, **options)


def test_run_without_saved_images(tmp_path: Path, vlm: VLM, sae: SAE) -> None:
    run = run_tiny(tmp_path / "run", [open_tiny_task(tmp_path, "one", 1)], vlm, sae)
    assert not (tmp_path / "run/cells").exists()
    with pytest.raises(BadParameter, match="--save-images"):
        load_examples(run)


def test_plot_command_draws_saved_examples(run: Run, tmp_path: Path) -> None:
    options = ["plot", str(run.folder), "--kind", "qualitative,teaser", "--format", "png", "-o", str(tmp_path)]
    result = CliRunner().invoke(app, [*options, "--samples", "one:0,two:1", "--tier", "5"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["qualitative.png", "teaser.png"]


def test_a_selection_that_cannot_be_shown_is_an_error(run: Run, tmp_path: Path) -> None:
    plot = ("plot", run.folder, "--format", "png", "-o", tmp_path / "figures")
    failed = run_torino(*plot, "--methods", "folder", code=2)
    assert "The run has no setting 'folder'" in failed.text
    failed = run_torino(*plot, "--methods", "random", "--kind", "pareto", code=2)
    assert "--methods selects what the figures qualitative and teaser show" in failed.text
    moved = tmp_path / "run"
    shutil.copytree(run.folder, moved)
    (case,) = load_examples(run, samples=["one:0"], settings=["random@5#1", "divprune@5"])
    folder = example_dir(moved, open_run(moved).open_tasks()["one"]["0"].image.key)
    _reduction_file(folder, case.examples[0].setting.id).unlink()
    with pytest.raises(TorinoError, match="saved no reduction of one:0 by random@5#1"):
        load_examples(open_run(moved), samples=["one:0"], settings=["random@5#1", "divprune@5"])


def test_methods_are_named_as_in_the_tables(run: Run) -> None:
    (example,) = _load_examples(run.folder, _ExampleSelection("5", ["torino-m", "divprune"], ["one:0"]))
    assert [panel.heading for panel in example.panels] == ["TORINO_FB-M", "DivPrune"]


def test_charts_are_drawn_without_the_data(run: Run, tmp_path: Path) -> None:
    moved = tmp_path / "run"
    shutil.copytree(run.folder, moved)
    metadata = json.loads((moved / "run.json").read_text(encoding="utf-8"))
    for task in metadata["tasks"]:
        task["path"] = str(tmp_path / "gone" / task["file"])
    del metadata["checksum"]
    (moved / "run.json").write_text(json.dumps(metadata), encoding="utf-8")
    (moved / "scores.json").unlink(missing_ok=True)
    options = ["plot", str(moved), "-o", str(tmp_path / "out"), "--format", "png"]
    result = CliRunner().invoke(app, options, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["distribution.png"]
    failed = CliRunner().invoke(app, [*options, "--kind", "qualitative"])
    assert "one.tsv" in str(failed.exception)
