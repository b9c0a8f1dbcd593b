"""The lab's model as torino finds, assembles and asks it."""

from __future__ import annotations

import json
import shutil
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from torino_lab.assembly import BLOCK, lab_folder, tower_folder
from torino_lab.catalog import TASKS
from torino_lab.shipped import lab_sae

from tests.support.command import run_torino
from tests.support.lab import needs_weights
from torino import SAE, make
from torino.core.errors import BadFile
from torino.datasets.bundled import example_folder
from torino.evaluation.benchmarks import all_benchmarks, find_benchmark
from torino.evaluation.results import open_run
from torino.vlm import ask, load_vlm
from torino.vlm.loading import model_package, model_packages


def photo(name: str) -> Path:
    return example_folder() / "photos" / f"{name}.jpg"


@needs_weights
def test_model_of_the_package_answers_correctly() -> None:
    expected = {
        "astronaut": {"Is there a person in the image?": "yes", "Is there a dog in the image?": "no"},
        "chelsea": {"What animal is this?": "cat", "Is there a person in the image?": "no"},
        "coffee": {"Is there a cup in the image?": "yes", "What is in the cup?": "coffee"},
    }
    vlm = load_vlm("lab", "cpu")
    assert type(vlm.model).__name__ == "LlavaForConditionalGeneration"
    assert vlm.package is not None
    assert vlm.package.block == BLOCK
    assert vlm.package.tower is not None
    assert vlm.package.tower() == tower_folder()
    assert vlm.package.sae is not None
    assert SAE.load(vlm.package.sae()).facts() == lab_sae().facts()
    reducer = make("torino-m(k=3, delta=3)", sae=lab_sae())
    for name, questions in expected.items():
        for question, correct in questions.items():
            answer = ask(photo(name), question, model=vlm, reducer=reducer, baseline=True)
            assert answer.baseline is not None
            assert answer.baseline.text.strip().lower() == correct, (name, question)
            assert answer.after < 196 == answer.before
    caption = ask(photo("chelsea"), "Describe the photo in one sentence.", model=vlm, max_new_tokens=30)
    assert "cat" in caption.text.lower()
    assert caption.text.strip().endswith(".")


def test_missing_files_are_reported(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match=r"projector\.safetensors.*python -m torino_lab\.training\.export"):
        lab_folder(tmp_path)
    with pytest.raises(BadFile, match="There is no SAE in"):
        lab_sae(tmp_path)


def test_torino_finds_the_model_by_its_entry_point() -> None:
    (entry,) = entry_points(group="torino.models", name="lab")
    assert entry.dist is not None
    assert entry.dist.name == "torino-lab"
    assert model_packages()["lab"] == entry


def test_torino_finds_the_tasks_and_asks_them_as_they_are() -> None:
    assert list(TASKS) == [name for name in all_benchmarks() if name in TASKS]
    for name in TASKS:
        benchmark = find_benchmark(name)
        assert benchmark is not None
        assert benchmark.instruction == ""


@needs_weights
def test_a_custom_task_is_asked_as_the_model_was_trained(tmp_path: Path) -> None:
    rows = [
        ("astronaut", "Is there a person in the image?", "yes"),
        ("chelsea", "Is there a person in the image?", "no"),
        ("rocket", "Is there a dog in the image?", "no"),
    ]
    for name, _, _ in rows:
        shutil.copy(photo(name), tmp_path)
    lines = [json.dumps({"image": f"{name}.jpg", "question": text, "answer": truth}) for name, text, truth in rows]
    (tmp_path / "own.jsonl").write_text("\n".join(lines))
    words = ("eval", "--model", "lab", "--tasks", tmp_path / "own.jsonl", "--methods", "none", "-o", tmp_path / "run")
    done = run_torino(*words, "--device", "cpu")
    assert "warning" not in done.text, "the baseline is right"
    run = open_run(tmp_path / "run")
    package = model_package("lab")
    assert package is not None
    assert run.metadata["tasks"][0]["prompts"] == (package.prompts or "standard")
    assert run.scores()["own"]["full"].value == 100
