"""The command ``torino bench``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.command import run_torino
from tests.support.tiny_bench import bench_settings, make_small_sae, make_token_images
from tests.support.tiny_vlm import QUESTION, photo, write_files
from torino import SAE
from torino.cli.bench import _print
from torino.core.tokens import save_tokens
from torino.evaluation.reporting.figures.charts import read_bench


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_files(tmp_path_factory.mktemp("bench"))
    (folder / "photos").mkdir()
    for seed in range(3):
        photo(seed=seed).save(folder / "photos" / f"{seed}.png")
    save_tokens(make_token_images(), folder / "tokens.npz")
    return folder


def bench(home: Path, *options: str | Path, code: int = 0) -> tuple[dict[str, Any], str]:
    """Run the command and return its JSON and what it printed."""
    target = home / "bench.json"
    target.unlink(missing_ok=True)
    device = () if "--device" in options else ("--device", "cpu")
    text = run_torino("bench", *options, *device, "-o", target, code=code).text
    return json.loads(target.read_text()), text


def test_with_a_model_up_to_the_whole_answer(home: Path) -> None:
    options = ["--model", home / "llava", "--images", home / "photos", "--sae", home / "sae"]
    options += ["--methods", "torino-p,torino-m,visionzip,tome-tower,random"]
    sizes = ["--count", "4", "--warmups", "1", "--answers", "2", "--max-new-tokens", "3"]
    document, text = bench(home, *options, *sizes, "--budget", "5", "--kd", "1,1", "--question", QUESTION)
    rows = {row["spec"]: row for row in document["rows"]}
    full = rows["full"]
    assert full["label"] == "All tokens"
    assert (full["tokens"], full["module_ms"], full["answers"]) == (16, None, 2)
    assert "tome-tower(budget=5)" in rows, "a method inside the tower is measured by its steps"
    assert "visionzip(budget=5)" in rows
    assert len(rows) == 8, document["notes"]
    for row in rows.values():
        assert row["answers"] == 2
        assert 0 < row["first_token_ms"]["mean"] < row["answer_ms"]["mean"]
        assert row["peak_mb"] is None or row["peak_mb"] >= 0
        if row is not full:
            assert row["images"] == 4
            assert min(row["module_ms"]["mean"], row["floor_ms"]["mean"]) > 0  # which is larger, a busy machine decides
            assert row["made_up_signals"] == []
    assert document["protocol"]["model"] == "llava", "a name, not a path"
    assert str(home) not in json.dumps(document)
    assert (document["protocol"]["family"], document["protocol"]["dtype"]) == ("llava", "float32")
    assert "mean of 2 answers of 3 tokens each" in text
    early_exit = document["protocol"]["early_exit"]
    assert (early_exit["blocks"], early_exit["of"]) == (2, 3)
    assert early_exit["all_seconds"] > 0
    assert "In all rows, also with all tokens, the tower stops after block 2 of 3." in text


def test_noise_instead_of_photos_is_noted(home: Path) -> None:
    options = ("--model", home / "llava", "--methods", "random", "--budget", "4", "--count", "2")
    document, text = bench(home, *options, "--warmups", "0", "--answers", "0")
    assert [row["spec"] for row in document["rows"]] == ["random(budget=4, seed=0)"]
    assert document["protocol"]["source"] == "generated noise"
    assert any("noise" in note for note in document["notes"])
    assert "answers" not in text


def test_all_methods_are_those_that_can_be_measured() -> None:
    def all_methods(**options: Any) -> tuple[set[str], str]:
        settings, notes = bench_settings(**options)
        return {setting.method for setting in settings}, " ".join(notes)

    alone, notes = all_methods()
    assert {"torino-m", "cdpruner", "visionzip"} <= alone
    assert not {"tome-tower", "fastv", "full"} & alone
    assert "tome-tower, which run inside a vision tower or a language model: give --model" in notes
    with_model, notes = all_methods(with_model=True)
    assert {"tome-tower", "fastv", "full"} <= with_model
    assert "cdpruner" not in with_model
    assert "--clip" in notes
    without_sae, notes = all_methods(with_model=True, with_clip=True, saes={}, kd="none")
    assert "cdpruner" in without_sae
    assert "torino-m" not in without_sae
    assert "--sae" in notes


def test_a_method_in_brackets_is_measured_at_the_budgets(home: Path) -> None:
    methods = 'divprune(space="projected"),tome(budget=7)'
    document, _ = bench(home, "--tokens", home / "tokens.npz", "--methods", methods, "--budget", "9,6", "--count", "1")
    assert sorted(row["tokens"] for row in document["rows"]) == [6, 7, 9]


def test_a_table_is_printed(home: Path) -> None:
    options = ("--tokens", home / "tokens.npz", "--methods", "random,tome", "--budget", "9", "--count", "2")
    document, text = bench(home, *options)
    assert [row["label"] for row in document["rows"]] == ["Random", "ToMe"]
    assert "Random" in text
    assert "above" in text
    assert "first" not in text, "no model, no answers"
    assert "3 images of tokens.npz" in text
    assert len(read_bench(home / "bench.json")) == 2


def test_numbers_are_complete_on_a_narrow_screen(capsys: pytest.CaptureFixture[str]) -> None:
    times = {"mean": 1234.5678, "std": 234.5678, "median": 1.0}
    row = {
        "label": "TORINO-M, an SAE of a long name (2,2)",
        "tokens": 1192.25,
        "module_ms": times,
        "peak_mb": 12345.6,
    }
    row |= {"floor_ms": times, "above_floor_ms": 1234.5, "first_token_ms": times, "answer_ms": times}
    protocol = {"images": 5, "distinct_images": 5, "warmups": 1, "source": "noise", "memory": "answer"}
    _print({"rows": [row], "protocol": protocol, "notes": [], "survivors": {}})
    shown = capsys.readouterr().out
    assert "…" not in shown
    assert all(text in shown for text in ("1,192.2", "1234.57 ± 234.57", "1,234.568", "1,234.50", "12,345.6"))


def test_both_searches_give_the_same_tokens(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxruntime")
    options = ("--tokens", home / "tokens.npz", "--sae", home / "sae", "--methods", "torino-m", "--count", "2")
    options = (*options, "--budget", "9")
    document, text = bench(home, *options, "--kd", "1,1", "--prefilter", "both")
    rows = {row["label"]: row["tokens"] for row in document["rows"]}
    assert rows["TORINO-M, sae plain (1,1)"] == rows["TORINO-M, sae int8 (1,1)"]
    assert list(document["survivors"]) == ["sae int8"]
    survivors = document["survivors"]["sae int8"]
    assert 3 <= survivors["median"] <= survivors["percentile_99"] <= survivors["most"] <= 24
    assert "the int8 prefilter kept" in text
    eye = torch.eye(make_small_sae().width + 3)
    wider = SAE(eye, W_dec=eye).save(home / "wider")  # which cannot read these tokens
    document, _ = bench(home, *options, "--sae", wider, "--kd", "none", "--prefilter", "int8", code=2)
    assert list(document["survivors"]) == ["sae"]
    assert any("was left out" in note for note in document["notes"])
    monkeypatch.setattr("torino.core.topk.prefilter.backend_for", lambda device: None)
    for prefilter in ("both", "int8"):
        document, _ = bench(home, *options, "--kd", "none", "--prefilter", prefilter)
        assert [row["label"] for row in document["rows"]] == ["TORINO-M"]
        assert any("torino[fast]" in note for note in document["notes"])


def test_a_named_method_is_measured_or_an_error(home: Path) -> None:
    options = ("--tokens", home / "tokens.npz", "--methods", "random,tome-tower", "--budget", "9", "--count", "1")
    document, text = bench(home, *options, code=2)
    assert [row["method"] for row in document["rows"]] == ["random"], "what could be measured is kept"
    assert "Not all methods that were asked for could be measured. tome-tower(budget=9) was left out" in text
    options = ("--tokens", home / "tokens.npz", "--methods", "random,torino-m", "--sae", home / "sae")
    for more in (("--budget", "none"), ("--budget", "none", "--kd", "1,1")):
        failed = run_torino("bench", *options, *more, code=2)
        assert "random has no number of tokens to be measured at" in failed.text
    failed = run_torino("bench", *options[:3], "random", "--kd", "1,1", code=2)
    assert "neither torino-p nor torino-m is measured" in failed.text


def test_errors_are_one_sentence(home: Path) -> None:
    tokens, model = ("--tokens", home / "tokens.npz"), ("--model", home / "llava")
    (home / "folder.json").mkdir(exist_ok=True)
    cases: list[tuple[tuple[str | Path, ...], str]] = [
        ((*tokens, *model), "not both"),
        (("--images", "x"), "--model too"),
        (("--clip", "x"), "--model too"),
        (("--question", "x"), "--model too"),
        ((*tokens, "--methods", "nobody"), "nobody"),
        ((*tokens, "--methods", "torino-m"), "--sae"),
        ((*tokens, "--methods", "torino-m(k=2)"), "--sae"),
        ((*tokens, "--budget", "many"), "--budget takes token counts"),
        ((*tokens, "--methods", "random", "--budget", "none"), "random has no number of tokens"),
        ((*tokens, "--methods", ","), "--methods is empty"),
        ((*tokens, "--methods", "random", "--kd", "1"), "k,delta"),
        ((*tokens, "--methods", "random", "--kd", "no"), "k,delta"),
        ((*tokens, "--count", "0"), "at least 1"),
        ((*tokens, "--device", "abacus"), "device"),
        (("--tokens", home / "none.npz"), "no file"),
        ((*model, "--images", home / "none", "--methods", "random"), "no photos"),
        (("--model", home / "sae" / "nothing", "--methods", "random"), "no folder"),
        (("--sae", home / "sae", "--sae", f"{home / 'sae'}/"), "Two SAEs are called 'sae'"),
        ((*tokens, "-o", home / "bench.txt"), "--output"),
        ((*tokens, "-o", home / "folder.json"), "--output"),
    ]
    for options, expected in cases:
        failed = run_torino("bench", *options, code=2)
        assert failed.err.startswith("torino: "), options
        assert expected in failed.text, f"{options}: {failed.err}"
        assert len(failed.err) < 600


@pytest.mark.parametrize(
    ("option", "value", "choices"),
    [
        ("--padding", "stretch", "'crop', 'square'"),
        ("--positions", "none", "'auto', 'compact', 'original', 'median'"),
        ("--attention", "heavy", "'auto', 'plain', 'proportional', 'restore'"),
        ("--prefilter", "fast", "'auto', 'int8', 'bf16', 'off', 'both'"),
    ],
)
def test_unknown_choices_are_usage_errors(home: Path, option: str, value: str, choices: str) -> None:
    failed = run_torino("bench", "--tokens", home / "tokens.npz", option, value, code=2)
    assert f"'{value}' is not one of {choices}" in failed.text


def test_importing_the_command_stays_light() -> None:
    code = "import sys, torino.cli.bench; print(' '.join(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "transformers", "PIL", "pyarrow"} & set(loaded)
