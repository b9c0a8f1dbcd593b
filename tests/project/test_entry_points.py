"""A third-party package adds a model and a task through entry points, without a change in torino."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import invalidate_caches
from pathlib import Path

import pytest

from tests.support.packages import write_package
from tests.support.tiny_vlm import PATCHES, QUESTION, photo, write_files
from torino import SAE, TorinoError, make
from torino.evaluation import all_benchmarks, open_task
from torino.evaluation.benchmarks import _index_plugins
from torino.vlm import ask, load_vlm
from torino.vlm.loading import ModelPackage, load_model, model_package, model_packages

CODE = """
from pathlib import Path

from torino.evaluation.benchmarks import Benchmark
from torino.vlm.loading import ModelPackage

HOME = Path({home!r})

def model():
    return ModelPackage(folder=lambda: HOME / "llava", sae=lambda: HOME / "sae", block=1)

MODEL = model()
TASKS = {{"Dummy-Task": Benchmark("Dummy-Task", "Dummy", "vqa", files=("Dummy-Task",))}}
"""
ENTRY_POINTS = {"torino.models": "dummy = model", "torino.tasks": "dummy = TASKS"}
Install = Callable[..., Path]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_files(tmp_path_factory.mktemp("dummy"))


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Return a function that puts a dummy package on ``sys.path``."""
    modules: list[str] = []

    def install(package: str, code: str, entry_points: dict[str, str] = ENTRY_POINTS) -> Path:
        folder, module = write_package(tmp_path / "site", package, code, entry_points)
        monkeypatch.syspath_prepend(str(folder))
        invalidate_caches()
        _index_plugins.cache_clear()
        modules.append(module)
        return folder

    yield install
    monkeypatch.undo()
    for module in modules:
        sys.modules.pop(module, None)
    _index_plugins.cache_clear()


@pytest.fixture
def dummy(install: Install, home: Path) -> Path:
    return install("dummy-package", CODE.format(home=str(home)))


def run_torino(site: Path, *words: str | Path, code: int = 0) -> tuple[str, str]:
    """Run the command in a new process that has a package installed."""
    paths = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    fixed = {"PYTHONPATH": paths, "COLUMNS": "120", "HF_HUB_OFFLINE": "1", "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torino", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **fixed}, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout, done.stderr


# ---------------------------------------------------------------------- models


def test_load_vlm_finds_the_model(dummy: Path, home: Path) -> None:
    vlm = load_vlm("dummy")
    assert vlm.family == "llava"
    assert isinstance(vlm.package, ModelPackage)
    assert vlm.package.sae is not None
    assert vlm.package.sae() == home / "sae"
    answer = ask(photo(), QUESTION, model=vlm, max_new_tokens=3)
    assert answer.text == ask(photo(), QUESTION, model=load_vlm(home / "llava"), max_new_tokens=3).text


def test_entry_point_may_be_the_package_itself(install: Install, home: Path) -> None:
    install("dummy-package", CODE.format(home=str(home)), {"torino.models": "dummy = MODEL"})
    package = model_package("dummy")
    assert package is not None
    assert (package.folder(), package.block, package.tower) == (home / "llava", 1, None)


def test_ask_uses_the_sae_of_the_model(dummy: Path, home: Path) -> None:
    words = ("ask", home / "photo.png", QUESTION, "--model", "dummy", "--kd", "1,1", "--max-new-tokens", "3")
    result = json.loads(run_torino(dummy, *words, "--device", "cpu", "--json")[0])
    reducer = make("torino-m", sae=SAE.load(home / "sae"), k=1, delta=1)
    expected = ask(photo(), QUESTION, model=load_vlm(home / "llava"), reducer=reducer, max_new_tokens=3)
    assert (result["model"], result["reducer"]) == ("dummy", "torino-m(k=1, delta=1)")
    assert result["image_tokens"] == {"before": PATCHES, "after": expected.after}
    assert result["answer"] == expected.text.strip()


def test_list_shows_the_model(dummy: Path) -> None:
    rows = json.loads(run_torino(dummy, "list", "models", "--json")[0])
    assert {"name": "dummy", "kind": "installed model", "from": "dummy-package"} in rows
    table, _ = run_torino(dummy, "list", "models")
    assert any(line.split()[0] == "dummy" and "dummy-package" in line for line in table.splitlines() if line.strip())


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("raise RuntimeError('no luck')", "no luck"),
        ("def model():\n    return 1 / 0\n", "division by zero"),
        ("other = 1\n", "has no attribute 'model'"),
        ("model = 7\n", "a int, not a ModelPackage"),
        ("def model():\n    return 7\n", "a int, not a ModelPackage"),
        (
            "from torino.vlm import ModelPackage\nmodel = ModelPackage(folder=None, prompts='poetic')\n",
            "prompts must be plain, standard, vlmevalkit, llava, got 'poetic'",
        ),
    ],
)
def test_failing_model_is_one_sentence_that_names_the_package(install: Install, code: str, reason: str) -> None:
    install("faulty-package", code, {"torino.models": "faulty = model"})
    assert "faulty" in model_packages(), "listing does not load the package"
    for load in (model_package, load_model, load_vlm):
        with pytest.raises(TorinoError) as caught:
            load("faulty")
        message = str(caught.value)
        assert message.startswith("The model 'faulty' of the package faulty-package failed to load")
        assert reason in message
        assert "\n" not in message


def test_failing_model_on_the_command_line(install: Install, home: Path) -> None:
    site = install("faulty-package", "raise RuntimeError('no luck')", {"torino.models": "faulty = model"})
    output, message = run_torino(site, "ask", home / "photo.png", QUESTION, "--model", "faulty", code=2)
    assert output == ""
    assert message.startswith("torino: The model 'faulty' of the package faulty-package failed to load: ")
    assert "no luck" in message
    assert message.count("\n") == 1


# ---------------------------------------------------------------------- tasks


def test_open_task_finds_the_task(dummy: Path, tmp_path: Path) -> None:
    image = base64.b64encode(b"\x89PNG" + bytes(60)).decode()
    rows = ["index\tquestion\tanswer\timage", f"1\tWhat?\tcup\t{image}", f"2\tWhere?\ttable\t{image}"]
    (tmp_path / "Dummy-Task.tsv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    assert "Dummy-Task" in all_benchmarks()
    task = open_task("Dummy-Task", tmp_path)
    assert (task.name, task.kind, task.benchmark.label, len(task)) == ("Dummy-Task", "vqa", "Dummy", 2)
    score = task.score([{"index": "1", "prediction": "cup"}, {"index": "2", "prediction": "floor"}])
    assert score.value > 0


def test_failing_task_is_one_sentence_that_names_the_package(install: Install, tmp_path: Path) -> None:
    install("faulty-package", "raise RuntimeError('no luck')", {"torino.tasks": "faulty = TASKS"})
    with pytest.raises(TorinoError, match=r"^The tasks of the package faulty-package cannot be loaded: .*no luck"):
        open_task("Dummy-Task", tmp_path)


# ---------------------------------------------------------------------- methods and model families

EXTENSIONS = '''
from dataclasses import dataclass

import torch

from torino.core.reduction import Reduction
from torino.reducers import Reducer, register
from torino.vlm import register_adapter
from torino.vlm.adapters.llava import Llava


@register("every-other")
@dataclass(frozen=True)
class EveryOther(Reducer):
    """Keep every second patch."""

    def plan(self, tokens):
        return Reduction.pick(torch.arange(0, len(tokens), 2), tokens.grid, self.spec)


@register_adapter("my_llava")
class MyLlava(Llava):
    """A model like LLaVA-1.5."""
'''


def test_methods_and_families_are_found_on_the_command_line(install: Install) -> None:
    names = {"torino.reducers": "mine = EveryOther", "torino.adapters": "mine = MyLlava"}
    site = install("extension-package", EXTENSIONS, names)
    reducers = json.loads(run_torino(site, "list", "--json")[0])
    assert "every-other" in {row["name"] for row in reducers}
    models = json.loads(run_torino(site, "list", "models", "--json")[0])
    assert "my_llava" in {row["name"] for row in models}
    output, _ = run_torino(site, "reduce", "--method", "every-other", "--no-picture")
    assert "98.0" in output


def test_failing_extension_names_its_package(install: Install) -> None:
    site = install("broken-extension", "raise OSError('no such thing')\n", {"torino.reducers": "mine = X"})
    _, message = run_torino(site, "list", code=2)
    assert "broken-extension" in message
    assert "no such thing" in message
