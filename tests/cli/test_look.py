"""The command ``torino look``: token counts and pictures of one image with any method."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from PIL import Image
from typer.testing import CliRunner

from tests.support import colored_squares as squares
from tests.support.lab import needs_weights
from torino import SAE, TorinoError, list_reducers, make
from torino.cli import look as look_module
from torino.cli.look import EPILOG, look
from torino.reducers import get
from torino.vlm import ModelPackage, loading
from torino.vlm.towers import load_tower

INSIDE = {"fastv", "pyramiddrop", "dart"}  # in the language model, which look does not run
NOT_DRAWN = {"cdpruner", "mmtok", "torino-q", "downsample", *INSIDE}  # they read the question, or shrink the image

app = typer.Typer(rich_markup_mode="rich")
app.command(epilog=EPILOG)(look)


def run(*words: str | Path) -> Any:
    return CliRunner().invoke(app, list(map(str, words)), env={"COLUMNS": "160", "NO_COLOR": "1"})


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tower of colors, an SAE with names for two of them, and a photo of three red and two blue squares on gray."""
    folder = tmp_path_factory.mktemp("look")
    squares.write_tower(folder)
    squares.write_tower(folder, "deep", blocks=12)
    torch.manual_seed(0)
    SAE(torch.randn(32, squares.WIDTH), W_dec=torch.randn(32, squares.WIDTH)).save(folder / "random-sae")
    sae = squares.make_sae()
    sae.names = {0: "red", 3: "blue"}
    sae.save(folder / "sae")
    red, blue = squares.COLORS["red"], squares.COLORS["blue"]
    photo = squares.paint_photo({0: red, 1: red, 2: red, 14: blue, 15: blue})
    (folder / "photo.png").write_bytes(photo)
    return folder


def run_look(data: Path, *options: str | Path, sae: bool = True) -> Any:
    encoder = ("--sae", data / "sae") if sae else ()
    return run(data / "photo.png", "--tower", data / squares.TOWER_NAME, *encoder, *options)


def test_groups_are_counted_and_named(data: Path, tmp_path: Path) -> None:
    result = run_look(data, "-o", tmp_path / "look.png", "--kd", "1,1", "--kd", "2,1")
    assert result.exit_code == 0, result.output
    assert re.search(r"1 +1 +3 +81\.2% +0 +11 #4, 3 red, 2 blue *\n", result.stdout)
    assert "photo.png: 16 patches of tiny-colors, block -1, reduced by torino-m" in result.stdout
    page = Image.open(tmp_path / "look.png")
    assert page.width > 3 * 336, "the photo and two settings"
    assert page.height > 2 * 336
    assert "Loading" not in result.output


def test_json_and_terminal_output(data: Path, tmp_path: Path) -> None:
    report = json.loads(run_look(data, "-o", tmp_path / "a.webp", "--method", "torino-p", "--json").stdout)
    assert [(row["k"], row["delta"]) for row in report["settings"]] == [(1, 1), (2, 2), (3, 3)]
    assert report["settings"][0]["spec"] == "torino-p(k=1, delta=1)"
    assert report["settings"][0]["tokens"] == 3
    assert report["settings"][0]["removed"] == pytest.approx(13 / 16, abs=1e-4)
    assert report["settings"][0]["largest"][1] == {"patches": 3, "concept": 0, "name": "red"}
    assert (report["patches"], report["method"], report["picture"]) == (16, "torino-p", str(tmp_path / "a.webp"))
    assert (tmp_path / "a.webp").is_file()
    shown = run_look(data, "-o", tmp_path / "a.png", "--kd", "1,1", "--show")
    assert "▀▀▀▀" in shown.stdout


@pytest.mark.parametrize("method", [*sorted(INSIDE), "random(budget=4)+fastv(budget=2)"])
def test_methods_inside_the_language_model_are_refused(data: Path, tmp_path: Path, method: str) -> None:
    given = (data / "photo.png", "--tower", data / "deep", "--method", method)
    result = run(*given, *([] if "+" in method else ["--budget", "6"]), "-o", tmp_path / "a.png")
    assert result.exit_code
    assert "torino look runs the vision tower only" in str(result.exception)


@pytest.mark.parametrize("method", sorted(set(list_reducers()) - NOT_DRAWN))
def test_every_method_can_be_drawn(data: Path, tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Methods get the signals that they read, and in-tower methods run inside the tower."""
    monkeypatch.setattr(look_module, "DEFAULT_SHARES", (0.5, 0.25))  # visionzip needs 3 tokens, 12.5 % of 16 are 2
    reads = "sae" in get(method).__dataclass_fields__  # type: ignore[attr-defined]
    given = (data / "photo.png", "--tower", data / "deep", "--block", "9", "--method", method, "--json")
    given += ("--sae", data / "random-sae") if reads else ()
    result = run(*given, "--budget", "6", "-o", tmp_path / "a.png")
    assert result.exit_code == 0, (result.output, result.exception)
    (row,) = json.loads(result.stdout)["settings"]
    reducer = make(method, budget=6, **({"sae": SAE.load(data / "random-sae")} if reads else {}))
    ((_, plan),) = load_tower(data / "deep", block=9).reduce(data / "photo.png", reducer)
    assert (row["spec"], row["tokens"], row["budget"]) == (plan.by, len(plan), 6)
    assert Image.open(tmp_path / "a.png").width > 2 * 336
    default = run(*given, "-o", tmp_path / "b.png")
    assert default.exit_code == 0, (default.output, default.exception)
    assert json.loads(default.stdout)["settings"], "every method has a default number of tokens"


def test_several_budgets_and_shares(data: Path, tmp_path: Path) -> None:
    options = ("--json", "-o", tmp_path / "a.png", "--block", "1")
    result = run_look(data, *options, "--method", "visionzip", "--budget", "4,8", "--keep", "25%,50%", sae=False)
    rows = json.loads(result.stdout)["settings"]
    assert [(row["tokens"], row.get("budget"), row.get("keep")) for row in rows] == [
        (4, 4, None),
        (8, 8, None),
        (4, None, 0.25),
        (8, None, 0.5),
    ]
    tower = run_look(data, *options, "--method", "tome-tower", "--keep", "0.75", sae=False)
    assert [row["tokens"] for row in json.loads(tower.stdout)["settings"]] == [12]
    pairs = run_look(data, "--json", "-o", tmp_path / "a.png", "--kd", "1,1 2,2", "--budget", "5")
    rows = json.loads(pairs.stdout)["settings"]
    assert [(row["k"], row["delta"], row["tokens"]) for row in rows] == [(1, 1, 5), (2, 2, 5)]
    table = run_look(data, *options[1:], "--method", "random", "--keep", "25%", sae=False)
    assert re.search(r"keep +tokens +removed.*\n *25% +4 +75\.0% +\d", table.stdout)
    spec = run_look(data, "--json", "-o", tmp_path / "a.png", "--method", "torino-m(k=2, delta=1)")
    assert [row["spec"] for row in json.loads(spec.stdout)["settings"]] == ["torino-m(k=2, delta=1)"]


def test_block_of_the_sae_is_used(data: Path, tmp_path: Path) -> None:
    squares.make_sae().update_card(block=1).save(tmp_path / "sae")
    tower = ("--tower", data / squares.TOWER_NAME, "-o", tmp_path / "a.png")
    options = (*tower, "--sae", tmp_path / "sae")
    assert "tiny-colors, block 1" in run(data / "photo.png", *options).stdout
    failed = run(data / "photo.png", *options, "--block", "0")
    assert "block 1, but the tokens have width 8 and come from tiny-colors, block 0" in str(failed.exception)
    without = run(data / "photo.png", *tower, "--sae", "none")
    assert without.exit_code == 0, without.output


def test_defaults_come_from_the_model_package(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    package = ModelPackage(
        folder=lambda: tmp_path / "model",
        sae=lambda: tmp_path / "shipped" / "sae",
        tower=lambda: data / squares.TOWER_NAME,
    )
    monkeypatch.setattr(loading, "entry_points", lambda group: [EntryPoint("lab", "tests:package", group)])
    monkeypatch.setattr(EntryPoint, "load", lambda self: package)
    assert isinstance(run().exception, TorinoError), "the package has no SAE"
    squares.make_sae().save(tmp_path / "shipped" / "sae")
    result = run()
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("astronaut: 16 patches")
    assert (tmp_path / "look.png").is_file()


@needs_weights
def test_an_sae_of_another_tower_is_refused(tmp_path: Path) -> None:
    result = run("astronaut", "--sae", "example", "-o", tmp_path / "a.png")
    assert result.exit_code != 0
    assert "384" in str(result.exception)
    assert "768" in str(result.exception)
    assert not (tmp_path / "a.png").exists()


@needs_weights
def test_counts_of_the_lab(tmp_path: Path) -> None:
    # another summation order may change near-ties on another processor
    names: set[str | None] = set()
    for name, counts in {"astronaut": [29, 75, 131], "rocket": [26, 57, 95]}.items():
        report = json.loads(run(name, "--json", "-o", tmp_path / "look.png").stdout)
        assert report["patches"] == 196
        assert [row["tokens"] for row in report["settings"]] == pytest.approx(counts, abs=3), name
        names = {group["name"] for row in report["settings"] for group in row["largest"]}
    assert "sky" in names


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--method", "magic"], "magic"),
        (["--method", "cdpruner"], "cdpruner selects patches by the question, and torino look has none"),
        (["--method", "torino-q"], "torino-q selects patches by the question, and torino look has none"),
        (["--method", "visionzip"], "visionzip reads no concepts, so --sae has no effect"),
        (["--method", "visionzip", "--kd", "2,2"], "--kd sets k and delta, which visionzip does not have"),
        (["--kd", "2,3"], "--kd takes k,delta with delta from 1 to k, such as 2,2, got '2,3'"),
        (["--budget", "0"], "--budget takes token counts separated by commas"),
        (["--keep", "200%"], "--keep must be a share such as 25% or 0.25, got '200%'"),
        (["-o", "look.txt"], "--output must end in .png, .jpg or .webp, got 'look.txt'"),
        (["--block", "7"], "block must be an integer from -1 to 1"),
        (["--sae", "./nowhere"], "nowhere"),
        (["--tower", "./nowhere"], "There is no folder './nowhere'"),
    ],
)
def test_invalid_options_are_refused(data: Path, tmp_path: Path, options: list[str], message: str) -> None:
    result = run_look(data, "-o", tmp_path / "a.png", *options)
    assert isinstance(result.exception, TorinoError), result.output
    assert message in str(result.exception)
    assert not list(tmp_path.iterdir())


def test_unknown_choice_is_refused(data: Path) -> None:
    result = run_look(data, "--padding", "round")
    assert result.exit_code == 2
    assert "'round' is not one of 'crop', 'square'" in " ".join(result.output.split())


def test_tower_without_an_sae_needs_one(data: Path, tmp_path: Path) -> None:
    tower = ("--tower", data / squares.TOWER_NAME)
    assert "torino-m reads concepts and needs an SAE" in str(run(data / "photo.png", *tower).exception)
    missing = run(tmp_path / "none.png", "--sae", data / "sae", *tower)
    assert "There is no file" in str(missing.exception)


def test_help_has_examples_on_separate_lines() -> None:
    lines = [line.strip() for line in run("--help").stdout.splitlines()]
    assert "torino look photo.jpg --method visionzip --budget 64,128,192" in lines
    assert "torino look photo.jpg --method tome-tower --keep 25%" in lines


def test_import_is_light() -> None:
    code = "import sys, torino.cli.look, torino.cli.concepts; print(' '.join(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "transformers", "PIL", "huggingface_hub", "jinja2"} & set(loaded)


@pytest.mark.parametrize("option", ["--kd", "--budget"])
def test_none_is_not_ignored(data: Path, option: str) -> None:
    result = run_look(data, option, "none")
    assert result.exit_code != 0
    assert f"{option} none leaves nothing to draw" in str(result.exception)


def test_more_tokens_than_patches_are_said_to_be_added(data: Path, tmp_path: Path) -> None:
    budget = squares.SIDE**2 + 1
    result = run_look(data, "--budget", str(budget), "-o", tmp_path / "look.png")
    assert result.exit_code == 0, result.output
    assert "% added" in result.output
    assert "-6" not in result.output.replace(str(tmp_path), "")
