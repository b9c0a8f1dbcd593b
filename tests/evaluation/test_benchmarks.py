"""Benchmarks of installed packages, through the entry point group ``torino.tasks``."""

from __future__ import annotations

import base64
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import invalidate_caches
from pathlib import Path

import pytest

from tests.support.packages import write_package
from torino.core.errors import TorinoError, UnknownName
from torino.evaluation import BENCHMARKS, all_benchmarks, find_benchmark, open_task
from torino.evaluation.benchmarks import _index_plugins
from torino.evaluation.tasks import find_task

CODE = """
from torino.evaluation.benchmarks import Benchmark

class Length:
    name = "length of the answer"

    def grade_all(self, samples, predictions):
        return {sample.index: min(1.0, len(predictions.get(sample.index, "")) / 4) for sample in samples}

TASKS = {
    "Birds": Benchmark("Birds", "BIRDS", "mcq", ("Birds_TEST",), ("Bird-QA",), category_columns=("species",)),
    "Essays": Benchmark("Essays", "ESSAYS", "judge", ("Essays",), instruction="Answer in one sentence.", grader=Length),
}

def tasks():
    return TASKS
"""
Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Return a function that installs a dummy package with entry points."""
    modules: list[str] = []

    def install(package: str, code: str = CODE, target: str = "TASKS") -> None:
        entry_points = {"torino.tasks": f"{package} = {target}"}
        folder, module = write_package(tmp_path / "site", package, code, entry_points)
        monkeypatch.syspath_prepend(str(folder))
        invalidate_caches()
        _index_plugins.cache_clear()
        modules.append(module)

    yield install
    monkeypatch.undo()
    for module in modules:
        sys.modules.pop(module, None)
    _index_plugins.cache_clear()


def write_table(path: Path, columns: list[str], rows: list[list[str]]) -> Path:
    image = base64.b64encode(b"\x89PNG" + bytes(60)).decode()
    lines = ["\t".join([*columns, "image"]), *("\t".join([*row, image]) for row in rows)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.mark.parametrize("target", ["TASKS", "tasks"])
def test_package_adds_tasks(install: Install, tmp_path: Path, target: str) -> None:
    assert find_benchmark("Birds") is None
    install("bird-watch", target=target)
    assert list(all_benchmarks())[:9] == list(BENCHMARKS)
    assert {"Birds", "Essays"} <= all_benchmarks().keys()
    assert "Birds" not in BENCHMARKS
    columns = ["index", "question", "answer", "A", "B", "species"]
    rows = [["1", "Which?", "A", "owl", "crow", "owls"], ["2", "Which?", "B", "owl", "crow", "crows"]]
    path = write_table(tmp_path / "Birds_TEST.tsv", columns, rows)
    for name in ("Birds", "birds", "Bird-QA", "Birds_TEST", path):
        task = open_task(name, tmp_path)
        assert (task.name, task.kind, task.benchmark.label) == ("Birds", "mcq", "BIRDS")
    score = task.score([{"index": "1", "prediction": "A"}, {"index": "2", "prediction": "A"}])
    assert score.value == 50
    assert score.parts == {"species crows": 0, "species owls": 100}


def test_package_sets_instruction_and_grader(install: Install, tmp_path: Path) -> None:
    install("essays")
    write_table(tmp_path / "Essays.tsv", ["index", "question", "answer"], [["1", "Why?", "because"]])
    task = open_task("Essays", tmp_path)
    assert task.prompt(task[0]) == "Why?\nAnswer in one sentence."
    score = task.score([{"index": "1", "prediction": "so"}])
    assert score.value == 50
    assert score.note == "judged by length of the answer"


def test_unknown_task_suggests_tasks_of_packages(install: Install, tmp_path: Path) -> None:
    install("bird-watch")
    with pytest.raises(UnknownName, match="Did you mean 'Birds'"):
        find_task("Birdz", tmp_path)


def test_package_that_fails_to_load_is_named(install: Install, tmp_path: Path) -> None:
    install("broken", code="raise RuntimeError('no luck')")
    with pytest.raises(
        TorinoError, match=r"package broken cannot be loaded: RuntimeError: no luck .*dummy_broken:TASKS"
    ):
        find_benchmark("Birds")
    install("lazy", code="def tasks():\n    return 1 / 0\n", target="tasks")
    with pytest.raises(TorinoError, match="package broken cannot be loaded"):
        all_benchmarks()
    assert find_benchmark("POPE") is BENCHMARKS["POPE"]  # torino's own benchmarks still work


def test_missing_object_and_failing_function(install: Install) -> None:
    install("lazy", code="def tasks():\n    return 1 / 0\n", target="tasks")
    with pytest.raises(TorinoError, match="package lazy cannot be loaded: ZeroDivisionError"):
        all_benchmarks()


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("TASKS = [1]", "it is a list, not a mapping"),
        ("TASKS = {'Birds': 1}", "'Birds' maps to a int, not a Benchmark"),
        (CODE + "TASKS = {'Fish': TASKS['Birds']}", "'Fish' maps to a Benchmark named 'Birds'"),
        (CODE + "TASKS = {'X': Benchmark('X', 'X', 'guess')}", "'X' has the unknown kind 'guess'"),
    ],
)
def test_invalid_tasks_are_reported(install: Install, code: str, message: str) -> None:
    install("odd", code=code)
    with pytest.raises(TorinoError, match=f"package odd are invalid: {message}"):
        all_benchmarks()


def test_two_packages_with_the_same_task(install: Install) -> None:
    install("first")
    install("second")
    with pytest.raises(TorinoError, match="packages first and second both provide a task named 'Birds'"):
        all_benchmarks()


@pytest.mark.parametrize("name", ["POPE", "pope", "MM-Vet", "TextVQA_VAL"])
def test_package_cannot_replace_a_benchmark_of_torino(install: Install, name: str) -> None:
    install("greedy", code=CODE + f"TASKS = {{{name!r}: Benchmark({name!r}, 'X', 'vqa')}}")
    with pytest.raises(TorinoError, match=f"packages torino and greedy both provide a task named {name!r}"):
        all_benchmarks()
    assert find_benchmark("POPE") is BENCHMARKS["POPE"]


def test_importing_the_evaluation_loads_no_plugin() -> None:
    code = "import sys, torino.evaluation; print([name for name in sys.modules if name.startswith('torino_lab')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_listing_the_lab_tasks_is_cheap() -> None:
    pytest.importorskip("torino_lab")
    code = (
        "import sys\nfrom torino.evaluation import all_benchmarks\nassert 'Lab-VQAv2' in all_benchmarks()\n"
        "print(sorted(name for name in sys.modules if name.startswith('torino_lab')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['torino_lab', 'torino_lab.catalog', 'torino_lab.entry']"
