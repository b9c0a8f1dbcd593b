"""The command ``torino compare``: one question answered with the tokens of several methods."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from PIL import Image
from test_ask import QUESTION, _build, photo
from typer.testing import CliRunner

from torino import SAE, TorinoError, make
from torino.cli.compare import EPILOG, compare
from torino.sae import SAECard
from torino.vlm.session import ask, load_vlm

app = typer.Typer(rich_markup_mode="rich")
app.command(epilog=EPILOG)(compare)


def torino(*words: str | Path) -> Any:
    return CliRunner().invoke(app, list(map(str, words)), env={"COLUMNS": "160", "NO_COLOR": "1"})


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
    return torino(home / "photo.png", QUESTION, *given)


def test_compare_asks_with_every_method(home: Path, tmp_path: Path) -> None:
    done = compared(home, "--budget", "6", "-o", tmp_path / "all.png", "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    rows = {row["method"]: row for row in told["answers"]}
    assert next(iter(rows)) == "full"
    assert list(rows)[1:3] == ["torino-m", "torino-p"]
    assert {"tome-tower", "gtp-tower", "visionzip", "divprune", "random"} <= set(rows)
    assert "cdpruner" not in rows
    vlm = load_vlm(home / "llava")
    full = ask(photo(), QUESTION, model=vlm, max_new_tokens=4)
    assert (rows["full"]["answer"], rows["full"]["tokens"]) == (full.text.strip(), 16)
    sae = SAE.load(home / "sae")
    for name in ("torino-m", "tome-tower", "visionzip", "random"):
        made = make(rows[name]["spec"], **({"sae": sae} if name.startswith("torino") else {}))
        alone = ask(photo(), QUESTION, model=vlm, reducer=made, max_new_tokens=4)
        assert rows[name]["answer"] == alone.text.strip(), name
        assert rows[name]["tokens"] == alone.after
        assert rows[name]["same"] == (alone.text.strip() == full.text.strip())
    assert rows["tome-tower"]["plan_ms"] is None
    assert rows["visionzip"]["plan_ms"] > 0
    failed = [row["label"] for row in told["answers"] if "error" in row]
    assert sorted(note.partition(" was left out: ")[0] for note in told["notes"]) == sorted(failed)
    assert told["picture"] == str(tmp_path / "all.png")
    assert Image.open(tmp_path / "all.png").width > 1000


def test_compare_prints_a_table_and_encodes_once(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forward_passes = list[int]()

    def load_counted(*given: Any, **options: Any) -> Any:
        vlm = load_vlm(*given, **options)
        embedding: Any = vlm.model.model.vision_tower.get_submodule("embeddings.patch_embedding")
        embedding.register_forward_hook(lambda *_: forward_passes.append(1))
        return vlm

    monkeypatch.setattr("torino.vlm.load_vlm", load_counted)
    methods = "random(budget=16),visionzip,torino-m,hired"
    done = compared(home, "--budget", "5", "--methods", methods, "-o", tmp_path / "few.png")
    assert done.exit_code == 0, done.output
    assert len(forward_passes) == 1
    lines = done.stdout.splitlines()
    assert re.match(r"method +tokens +plan, ms +answer", lines[0])
    assert re.match(r"All tokens +16 ", lines[1])
    assert re.match(r"random\(budget=16\) +16 +[0-9.]+ += ", lines[2]), (
        "all patches are kept, so the answer is the same"
    )
    assert re.match(r"VisionZip +5 ", lines[3])
    assert re.search(r"= same answer as with all 16 tokens \([1-4] of 4 methods\)", " ".join(done.stdout.split()))
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
    without = torino(home / "photo.png", QUESTION, "--model", home / "llava", "-o", tmp_path / "b.png", "--budget", "5")
    assert "Left out: torino-m, torino-p, torino-x, scts, which read concepts: give --sae." in " ".join(
        without.output.split()
    )


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--methods", "cdpruner"], "chooses patches by the question"),
        (["--methods", "magic"], "magic"),
        (["--methods", ","], "nothing to compare"),
        (["-o", "a.gif"], "--output must end in .png"),
        (["--model", "./nowhere"], "There is no folder './nowhere'"),
    ],
)
def test_compare_says_what_is_wrong(home: Path, options: list[str], told: str) -> None:
    failed = compared(home, *options)
    assert isinstance(failed.exception, TorinoError), failed.output
    assert told in str(failed.exception)


def test_unknown_choice_is_refused(home: Path) -> None:
    failed = compared(home, "--padding", "round")
    assert failed.exit_code == 2
    assert "'round' is not one of 'crop', 'square'" in " ".join(failed.output.split())


def test_help_has_examples() -> None:
    assert 'torino compare photo.jpg "What is this?"' in " ".join(torino("--help").stdout.split())


def test_import_is_light() -> None:
    code = "import sys, torino.cli.compare; print(' '.join(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"transformers", "PIL", "huggingface_hub"} & set(loaded)
