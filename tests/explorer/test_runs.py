"""Runs in the explorer: filters, samples that one setting loses and another keeps, and a run that is being written."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.explorer import ExplorerClient
from tests.support.tiny_run import make_sae, open_tiny_task, run_tiny
from torino.core.errors import BadFile
from torino.evaluation.runner import RunPlan
from torino.explorer.runs import RunBrowser

PLAN = RunPlan(["torino-m", "random"], dynamic=[(2, 2)], fixed=[5], seeds=1)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, vlm: Any) -> Path:
    folder = tmp_path_factory.mktemp("run")
    run_tiny(folder / "run", [open_tiny_task(folder)], vlm, make_sae(), PLAN)
    return folder


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Path:
    shutil.copytree(finished / "run", tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def client(open_client: Callable[..., ExplorerClient], folder: Path) -> ExplorerClient:
    return open_client(runs=[folder])


def test_a_run_and_its_samples(client: ExplorerClient, folder: Path) -> None:
    (run,) = client.get("/api/runs")["runs"]
    assert run["finished"]
    assert run["notes"] == []
    assert run["tasks"] == [{"task": "small", "samples": 8}]
    assert run["settings"][0]["id"] == "full"
    assert all(setting["answered"] == 8 for setting in run["settings"])
    assert client.get("/api/runs/0/samples")["total"] == 8
    scores = RunBrowser(folder).state().run.scores()["small"]
    for setting in run["settings"]:
        values = list(scores[setting["id"]].per_sample.values())
        assert setting["accuracy"] == pytest.approx(sum(value >= 0.5 for value in values) / 8)


def test_filters(client: ExplorerClient, folder: Path) -> None:
    browser = RunBrowser(folder)
    state = browser.state()
    marks = {setting: state.correct["small", setting] for setting in state.run.settings}
    settings = list(marks)
    for lost in settings:
        for kept in settings:
            expected = [index for index in marks[lost] if not marks[lost][index] and marks[kept][index]]
            found = client.get("/api/runs/0/samples", lost=lost, kept=kept)
            assert [row["index"] for row in found["samples"]] == expected
    for correct in (True, False):
        expected = [index for index in marks["full"] if marks["full"][index] is correct]
        found = client.get("/api/runs/0/samples", method="full", correct=correct)
        assert [row["index"] for row in found["samples"]] == expected
    assert client.get("/api/runs/0/samples", task="other")["total"] == 0
    assert client.get("/api/runs/0/samples", budget="5")["total"] == 8
    assert client.get("/api/runs/0/samples", search="how many")["total"] == 4
    assert len(client.get("/api/runs/0/samples", offset=6, limit=5)["samples"]) == 2
    assert "no setting" in client.refused("/api/runs/0/samples", lost="nothing")


def test_a_sample_and_its_photo(client: ExplorerClient) -> None:
    sample = client.get("/api/runs/0/sample", task="small", index="3")
    assert sample["question"] == "how many is this ?"
    assert sample["truth"] == ["word1"]
    assert sample["answers"][0]["setting"] == "full"
    assert client.get(f"/api/photos/{sample['photo']}")["grid"] == [4, 4]
    assert client.http.get(f"/api/photos/{sample['photo']}/thumbnail").status_code == 200
    assert "no answer" in client.refused("/api/runs/0/sample", 404, task="small", index="99")
    assert "There is no run 7" in client.refused("/api/runs/7", 404)


def test_a_run_that_is_being_written_is_followed(client: ExplorerClient, folder: Path) -> None:
    (file,) = (folder / "answers").glob("*.jsonl")
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:5]) + lines[5][:20])  # the writer is in the middle of a line
    run = client.get("/api/runs/0")
    assert (run["answers"], run["finished"], run["notes"]) == (5, False, [])
    file.write_bytes(b"".join(lines[:9]))
    assert client.get("/api/runs/0")["answers"] == 9
    file.unlink()
    assert client.get("/api/runs/0")["answers"] == 0
    assert client.get("/api/runs/0/samples") == {"total": 0, "samples": []}


def test_a_damaged_line_is_a_note(client: ExplorerClient, folder: Path) -> None:
    (file,) = (folder / "answers").glob("*.jsonl")
    lines = file.read_bytes().splitlines(keepends=True)
    lines[2] = lines[2].replace(b"word", b"wxyz", 1) if b"word" in lines[2] else b"{}\n"
    file.write_bytes(b"".join(lines))
    assert "line 3" in client.get("/api/runs/0")["notes"][0]


def test_a_run_without_its_task_files_still_shows_answers(
    open_client: Callable[..., ExplorerClient], finished: Path, folder: Path
) -> None:
    run_file = folder / "run.json"
    missing = finished / "missing.tsv"
    task = finished / "small.tsv"
    task.rename(missing)
    try:
        client = open_client(runs=[folder])
        run = client.get("/api/runs/0")
        assert "not marked" in run["notes"][0]
        sample = client.get("/api/runs/0/sample", task="small", index="3")
        assert sample["question"] == ""
        assert all(answer["correct"] is None for answer in sample["answers"])
        assert "missing" in client.refused(f"/api/photos/{sample['photo']}", 404)
    finally:
        missing.rename(task)
    assert run_file.is_file()


def test_a_folder_that_is_not_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match=r"it has no run\.json"):
        RunBrowser(tmp_path)
