"""The command ``torino reproduce``, from the download of tiny benchmarks to the table beside the paper's."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Generator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import huggingface_hub
import pytest

from tests.support.command import CommandOutput, run_torino
from tests.support.tiny_benchmarks import write_benchmarks
from tests.support.tiny_run import make_image, make_sae
from tests.support.tiny_vlm import build_llava
from torino.cli._stop import Stop
from torino.core.io import read_json
from torino.evaluation.records import AnswerLog
from torino.evaluation.reproduction import machine
from torino.evaluation.reproduction.recipe import FOLDER
from torino.evaluation.results import open_run

TASKS = ("MMBench_EN", "MME", "POPE", "ScienceQA", "VizWiz")


class Home(NamedTuple):
    """A tiny model, SAE and recipe, and the paths that the server of the recipe's files was asked for."""

    folder: Path
    requests: list[str]

    @property
    def recipe(self) -> Path:
        return self.folder / "tiny.json"


class Quiet(SimpleHTTPRequestHandler):
    """Serve files, and note the paths instead of printing them."""

    def __init__(self, *args: Any, requests: list[str], **options: Any) -> None:
        self.paths = requests
        super().__init__(*args, **options)

    def log_message(self, *args: Any) -> None:
        self.paths.append(self.path)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Generator[Home]:
    folder = tmp_path_factory.mktemp("reproduce")
    build_llava(folder / "llava")
    make_sae().save(folder / "sae")
    data = write_benchmarks(folder / "data")
    requests: list[str] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(data), requests=requests))
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    content = json.loads((FOLDER / "llava-1.5-7b.json").read_text(encoding="utf-8"))
    for task in content["tasks"]:
        file = data / task["file"]
        task |= {"url": f"http://127.0.0.1:{server.server_port}/{file.name}", "bytes": file.stat().st_size}
        task["md5"] = hashlib.md5(file.read_bytes()).hexdigest()
    content |= {"name": "tiny", "max_new_tokens": 2, "seeds": 1, "methods": ["random", "torino-p", "torino-m"]}
    content["tasks"] = [task for task in content["tasks"] if task["task"] in TASKS]
    content |= {"budget": "6", "budget_kd": "2,2"}
    training = {"tower": str(folder / "llava"), "block": 1, "images": 8, "width": 32, "expansion": 2, "k": 4}
    content["sae"]["training"] |= training | {"steps": 6, "batch": 4}
    (folder / "tiny.json").write_text(json.dumps(content), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("no_proxy", "*")
        yield Home(folder, requests)
    server.shutdown()
    server.server_close()
    thread.join()


def reproduce(home: Home, output: Path, *options: str | Path, code: int = 0, local: bool = True) -> CommandOutput:
    given = ("--model", home.folder / "llava", "--sae", home.folder / "sae", "--device", "cpu") if local else ()
    return run_torino("reproduce", home.recipe, "-o", output, *given, *options, code=code)


def test_from_the_download_to_the_table_with_a_stop(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    asked = reproduce(home, out, code=2)
    assert "Nobody can be asked here: give --yes" in asked.text
    assert not out.exists()
    add, count = AnswerLog.add, iter(range(1000))

    def stop_later(log: AnswerLog, rows: Any) -> None:
        if next(count) == 12:
            raise Stop(15)
        add(log, rows)

    with monkeypatch.context() as patch:
        patch.setattr(AnswerLog, "add", stop_later)
        stopped = reproduce(home, out, "--yes", code=143)
    assert "Run the same command again to continue" in stopped.text
    assert "assumed speed of CPU" in stopped.text
    before = {(row["task"], row["index"], row["setting"]): row for row in open_run(out / "run").rows()}
    assert before
    requests = len(home.requests)
    assert requests == len(TASKS)

    done = reproduce(home, out, "--yes", "--price-per-hour", "3")
    assert "measured in this run" in done.text
    assert "Cost" in done.out
    assert len(home.requests) == requests, "nothing is downloaded again"
    after = {(row["task"], row["index"], row["setting"]): row for row in open_run(out / "run").rows()}
    assert {key: after[key] for key in before} == before
    run = open_run(out / "run")
    assert run.metadata["padding"] == "square"
    assert {"torino-m(3,3)[x64]", "torino-p@2,2", "random@6#0"} <= set(run.settings)
    assert len(after) == len(run.settings) * (4 + 4 + 2 + 2 + 2)

    comparison = read_json(out / "report" / "comparison.json")
    assert [tier["tier"] for tier in comparison["tiers"]] == ["full", "3,3", "2,2", "1,1"]
    methods = [row["method"] for row in comparison["tiers"][1]["rows"]]
    assert methods == ["Random", "TORINO-P", "TORINO_FB-P", "TORINO-M", "TORINO_FB-M"]
    cell = comparison["tiers"][1]["rows"][3]["scores"]["POPE"]
    assert cell["paper"] == 85.3
    assert cell["difference"] == pytest.approx(cell["ours"] - 85.3)
    assert "TORINO_FB-M" in done.out
    assert "85.30" in done.out
    assert any("leave out GQA, MMBench_CN" in sentence for sentence in comparison["verdict"])
    assert any(text.startswith("--model") for text in comparison["changes"])
    assert "**Not the recipe:** --model" in (out / "report" / "comparison.md").read_text(encoding="utf-8")
    assert "the paper" in (out / "report" / "report.md").read_text(encoding="utf-8")
    state = read_json(out / "reproduction.json")
    assert list(state["steps"]) == ["data", "model", "sae", "evaluation", "report"]

    refused = reproduce(home, out, "--yes", "--limit", "1", code=2)
    assert "was started with --limit None" in refused.text
    with (out / "data" / "POPE.tsv").open("ab") as file:
        file.write(b"\n")
    damaged = reproduce(home, out, "--yes", code=2)
    assert "POPE.tsv has the MD5" in damaged.text
    assert "Remove it to download it again" in damaged.text


def test_an_sae_is_trained(home: Home, tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    photos.mkdir()
    for number in range(8):
        (photos / f"{number}.png").write_bytes(make_image(number))
    options = ("--model", home.folder / "llava", "--device", "cpu", "--train-sae", photos, "--tasks", "pope")
    rest = ("--methods", "torino-m", "--kd", "2,2", "--budget", "none", "--yes")
    done = reproduce(home, tmp_path / "out", *options, *rest, local=False)
    assert "SAE, 6 steps" in done.text
    sae = open_run(tmp_path / "out" / "run").metadata["saes"]["x64"]
    assert (sae["latents"], sae["token_kind"]) == (64, "cls")
    again = reproduce(home, tmp_path / "out", *options, *rest, local=False)
    assert "is already finished" in again.text


def test_a_dry_run_needs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(machine.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: SimpleNamespace(free=1_000_000_000))
    shown = run_torino("reproduce", "llava-1.5-7b", "--dry-run", "--gpu", "A100", "--price-per-hour", "2")
    assert "40,291 questions" in shown.text
    assert "55, 2,216,005 answers" in shown.text
    assert "There is no GPU" in shown.text
    assert "1.0 GB free" in shown.text
    assert "--budget-kd '3,3 2,2 1,1'" in shown.text
    small = run_torino("reproduce", "llava-1.5-7b", "--dry-run", "--gpu", "H100", "--tasks", "MME", "--limit", "100")
    assert "MME (200 questions)" in small.text
    assert list(tmp_path.iterdir()) == []


def test_bad_states_give_one_sentence(home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = len(home.requests)
    (tmp_path / "file").touch()
    cases: list[tuple[tuple[str | Path, ...], str]] = [
        (("--tasks", "Birds"), "No task of the recipe tiny is called 'Birds'"),
        (("--gpu", "Abacus"), "--gpu Abacus is not a known GPU"),
        (("--data", tmp_path / "file"), "is a file. Give a folder"),
        (("--model", "./nowhere"), "There is no folder './nowhere'"),
        (("--sae", "./nowhere"), "There is no file or folder './nowhere'"),
        (("--train-sae", "photos"), "Give --sae or --train-sae, not both"),
        (("--methods", "tomee"), "No reducer is called 'tomee'"),
        (("--budget", "many"), "--budget takes token counts"),
        (("--shard", "3/2"), "--shard takes i/n"),
    ]
    for options, expected in cases:
        failed = reproduce(home, tmp_path / "x", "--yes", *options, code=2)
        assert expected in failed.text, options
    assert not (tmp_path / "x" / "run").exists()
    assert not home.requests[asked:], "all were refused before a download"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(machine.torch.cuda, "is_available", lambda: False)
    failed = run_torino("reproduce", "llava-1.5-7b", "--yes", "-o", tmp_path / "y", code=2)
    assert "torino: There is no GPU" in failed.text
    failed = run_torino("reproduce", "llava-1.5-7b", "--yes", "--device", "cpu", "-o", tmp_path / "y", code=2)
    assert "The hub could not be reached" in failed.text
    sae = ("--model", home.folder / "llava", "--device", "cpu", "--tasks", "POPE", "--yes", "-o", tmp_path / "z")
    failed = run_torino("reproduce", home.recipe, *sae, code=2)
    assert "The hub cannot be reached" in failed.text
    assert "--train-sae IMAGES" in failed.text
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: SimpleNamespace(free=1_000))
    failed = reproduce(home, tmp_path / "w", "--yes", code=2)
    assert "GB are needed" in failed.text
    assert not (tmp_path / "w").exists()
