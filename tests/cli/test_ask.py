"""The command ``torino ask``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from tests.support.lab import needs_weights
from tests.support.tiny_vlm import QUESTION, photo, write_files
from torino import SAE, TorinoError, make
from torino.cli.ask import ask as command
from torino.reducers import Reducer
from torino.sae import SAECard
from torino.vlm import VLM, ModelPackage, ask, load_vlm


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_files(tmp_path_factory.mktemp("ask"))


@pytest.fixture(scope="module")
def vlm(home: Path) -> VLM:
    return load_vlm(home / "llava")


@pytest.fixture
def reducer(home: Path) -> Reducer:
    return make("torino-m", sae=SAE.load(home / "sae"), k=1, delta=1)


def torino(*words: str | Path, code: int = 0) -> tuple[str, str]:
    """Run the command in a process of its own, as a person does."""
    environment = {**os.environ, "COLUMNS": "120", "HF_HUB_OFFLINE": "1", "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "torino", "ask", *map(str, words)], capture_output=True, text=True, env=environment
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout, done.stderr


def test_command_answers_beside_its_baseline(home: Path, tmp_path: Path, vlm: VLM, reducer: Reducer) -> None:
    drawn = tmp_path / "drawn.png"
    words = (home / "photo.png", QUESTION, "--model", home / "llava", "--sae", home / "sae", "--kd", "1,1")
    said, noise = torino(*words, "--max-new-tokens", "5", "--draw", drawn, "--device", "cpu")
    expected = ask(photo(), QUESTION, model=vlm, reducer=reducer, max_new_tokens=5, baseline=True)
    assert expected.baseline is not None
    assert f"{expected.after} tokens: {expected.text.strip()}" in said
    assert f"16 tokens: {expected.baseline.text.strip()}" in said
    assert f"16 → {expected.after} image tokens" in said
    for word in ("by torino-m(k=1, delta=1)", "padding crop", "tower", "prefill", "decode", "total", "first token"):
        assert word in said
    assert f"{expected.after} instead of 16 tokens: first token " in said
    assert "In both, the tower stops after block 2 of 3, which saves " in said
    assert noise == "", "chatter of transformers on the screen"
    assert Image.open(drawn).size[0] > 300


def test_command_says_what_is_wrong_in_one_sentence(home: Path) -> None:
    said, noise = torino(home / "none.png", QUESTION, "--model", home / "llava", "--sae", home / "sae", code=2)
    assert said == ""
    assert noise.startswith("torino: There is no file")
    assert noise.count("\n") == 1


def test_command_help_has_examples() -> None:
    said, _ = torino("--help")
    assert 'torino ask astronaut "Is there a person in the photo?"' in " ".join(said.split())


def run(home: Path, *, image: str | Path | None = None, **options: Any) -> None:
    """The command in this process."""
    given = {"model": str(home / "llava"), "sae": str(home / "sae"), "max_new_tokens": 2, **options}
    command(str(image or home / "photo.png"), QUESTION, **given)


def test_command_prints_json(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(home, keep="25%", padding="square", positions="original", as_json=True)
    told = json.loads(capsys.readouterr().out)
    assert told["image_tokens"] == {"before": 16, "after": 4}
    assert told["reducer"] == "torino-x(budget=4, locality=0.2, proportional=True)"
    assert (told["padding"], told["new_tokens"], told["question"]) == ("square", 2, QUESTION)
    assert told["baseline"]["image_tokens"] == {"before": 16, "after": 16}
    run(home, baseline=False, as_json=True)
    assert "baseline" not in json.loads(capsys.readouterr().out)
    run(home, method="none", sae=None)
    assert "16 → 16 image tokens, all kept" in capsys.readouterr().out
    run(home, method="torino-p(k=1, delta=1)", sae="none", budget=3)
    assert "16 → 3 image tokens, 81.2% removed by torino-p(k=1, delta=1, budget=3)" in capsys.readouterr().out


def test_a_model_package_brings_its_sae(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from torino.vlm import loading

    package = ModelPackage(folder=lambda: home / "llava", sae=lambda: home / "sae")
    entry = EntryPoint("lab", "tests:package", loading.GROUP)
    monkeypatch.setattr(loading, "entry_points", lambda group: [entry])
    monkeypatch.setattr(EntryPoint, "load", lambda self: lambda: package)
    photo_file = str(home / "photo.png")
    command(photo_file, QUESTION, kd="1,1", max_new_tokens=3, as_json=True)
    result = json.loads(capsys.readouterr().out)
    assert (result["model"], result["reducer"]) == ("lab", "torino-m(k=1, delta=1)")
    assert result["baseline"]["reducer"] is None
    command(photo_file, QUESTION, method="random", budget=5, max_new_tokens=3)  # reads no concepts, needs no SAE
    assert "16 → 5 image tokens" in capsys.readouterr().out


def test_without_the_lab_package_the_error_names_it(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torino.vlm import loading

    monkeypatch.setattr(loading, "entry_points", lambda group: [])
    with pytest.raises(TorinoError, match="torino-lab, which is not installed"):
        command(str(home / "photo.png"), QUESTION)


@needs_weights
def test_the_lab_answers(capsys: pytest.CaptureFixture[str]) -> None:
    command("astronaut", "Is there a person in the photo?", device="cpu", as_json=True)
    told = json.loads(capsys.readouterr().out)
    assert told["image_tokens"]["before"] == 196
    assert 1 <= told["image_tokens"]["after"] < 150
    assert told["answer"].strip() == told["baseline"]["answer"].strip() == "yes"


def test_command_takes_odd_images(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    photo().convert("L").save(tmp_path / "grey.png")
    photo().convert("CMYK").save(tmp_path / "ink.jpg")
    photo().convert("RGBA").save(tmp_path / "clear.png")
    for name in ("grey.png", "ink.jpg", "clear.png"):
        run(home, image=tmp_path / name)
        said = capsys.readouterr()
        assert "image tokens" in said.out
        assert not said.err


def test_mistakes_on_the_command_line(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    (tmp_path / "broken.png").write_bytes((home / "photo.png").read_bytes()[:300])
    (tmp_path / "words.txt").write_text("not an image")
    frames = [photo(), photo(seed=1)]
    frames[0].save(tmp_path / "moving.gif", save_all=True, append_images=frames[1:])
    Image.new("RGB", (1, 1)).save(tmp_path / "pixel.png")
    SAE(torch.randn(8, 16), W_dec=torch.randn(8, 16)).save(tmp_path / "narrow")
    SAE(torch.randn(8, 32), W_dec=torch.randn(8, 32), card=SAECard(block=9)).save(tmp_path / "elsewhere")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"image": tmp_path / "broken.png"}, "cut off or damaged"),
        ({"image": tmp_path / "words.txt"}, "not an image"),
        ({"image": tmp_path / "moving.gif"}, "several frames"),
        ({"image": tmp_path / "pixel.png"}, "single pixel"),
        ({"image": tmp_path}, "folder"),
        ({"image": "https://example.org/cat.jpg"}, "does not download images"),
        ({"model": "owner/of-nothing-at-all"}, "hub could not be reached"),
        ({"model": str(tmp_path)}, "no config.json"),
        ({"sae": None}, "--sae FOLDER"),
        ({"sae": str(tmp_path / "none" / "at" / "all")}, "none/at/all"),
        ({"sae": "owner/of-nothing-at-all"}, "owner/of-nothing-at-all"),
        ({"sae": str(tmp_path / "narrow")}, "width 16"),
        ({"sae": str(tmp_path / "elsewhere")}, "block 9"),
        ({"method": "torino"}, "torino-x"),
        ({"method": "none"}, "no effect"),
        ({"method": "none", "sae": None, "baseline": True}, "--baseline"),
        ({"method": "none", "sae": None, "draw": tmp_path / "x.png"}, "--draw"),
        ({"kd": "1,2"}, "delta from 1 to k"),
        ({"keep": "lots"}, "25%"),
        ({"keep": "25%", "budget": 4}, "not both"),
        ({"padding": "stretch"}, "'crop' or 'square'"),
        ({"positions": "mixed"}, "auto, compact, original or median"),
        ({"draw": tmp_path / "x.txt"}, ".png"),
        ({"device": "abacus"}, "device"),
        ({"dtype": "int3"}, "dtype"),
        ({"max_new_tokens": 0}, "at least 1"),
    ]
    for options, expected in cases:
        with pytest.raises(TorinoError, match=expected) as caught:
            run(home, **options)
        assert len(str(caught.value)) < 700


def test_memory_that_runs_out_is_a_sentence(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torino.vlm

    def full(*_: Any, **__: Any) -> Any:
        raise RuntimeError("CUDA out of memory. Tried to allocate 14 GiB")

    monkeypatch.setattr(torino.vlm, "load_vlm", full)
    with pytest.raises(TorinoError, match="does not fit into the memory"):
        run(home)


def test_importing_the_command_stays_light() -> None:
    code = "import sys, torino.cli.ask; print(' '.join(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"transformers", "PIL", "huggingface_hub"} & set(loaded)
