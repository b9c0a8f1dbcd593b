"""What methods cost: figures of the right shape, every method under the same conditions, sentences for bad input."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from test_ask import _build, photo

from torino import SAE, VisualTokens
from torino.cli.bench import _print, _settings
from torino.cli.bench import bench as command
from torino.core.errors import BadParameter, UnknownName
from torino.core.tokens import save_tokens
from torino.evaluation.latency import Bench, BenchPlan, BenchRow, peak_memory, spread
from torino.evaluation.protocol import FULL
from torino.sae import SAECard


def images(count: int = 3) -> list[VisualTokens]:
    source = torch.Generator().manual_seed(0)
    centres = torch.randn(6, 32, generator=source)
    return [
        VisualTokens.of(
            centres[torch.randint(6, (36,), generator=source)] + 0.1 * torch.randn(36, 32, generator=source)
        )
        for _ in range(count)
    ]


def small_sae() -> SAE:
    return SAE(torch.randn(24, 32, generator=torch.Generator().manual_seed(1)))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench")
    _build(folder / "llava")
    source = torch.Generator().manual_seed(1)
    SAE(
        torch.randn(24, 32, generator=source),
        W_dec=torch.randn(24, 32, generator=source),
        card=SAECard(encoder="tiny/clip", block=1),
    ).save(folder / "sae")
    (folder / "photos").mkdir()
    for seed in range(3):
        photo(seed=seed).save(folder / "photos" / f"{seed}.png")
    save_tokens(images(), folder / "tokens.npz")
    return folder


def settings(methods: str = "all", budgets: str = "9", dynamic: str = "1,1", **others: Any) -> Any:
    given = {"saes": {"small": small_sae()}, "with_model": False, "with_clip": False, **others}
    return _settings(methods, budgets, dynamic, **given)


def run(home: Path, *arguments: str) -> dict[str, Any]:
    import typer

    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(command)
    target = home / "bench.json"
    target.unlink(missing_ok=True)
    place = [] if "--device" in arguments else ["--device", "cpu"]
    app([*arguments, *place, "-o", str(target)], standalone_mode=False)
    return json.loads(target.read_text())


# ---------------------------------------------------------------------- the measuring


def test_every_method_on_the_same_images_and_the_floor_below() -> None:
    found, _ = settings()
    calls: list[tuple[str, int, int]] = []
    bench = Bench(found, {"small": small_sae()}, BenchPlan(4, 1), lambda *call: calls.append(call))
    bench.on_tokens(images(), source="some")
    told = bench.document()
    assert told["format"] == "torino-bench/1"
    assert {"machine", "versions", "date", "protocol", "rows"} <= set(told)
    assert (told["protocol"]["images"], told["protocol"]["warmups"], told["protocol"]["distinct_images"]) == (4, 1, 3)
    specs = [row["spec"] for row in told["rows"]]
    assert len(specs) == len(set(specs)) == len(found), told["notes"]
    for row in told["rows"]:
        assert row["images"] == 4, "warm-ups are not counted, every image is"
        assert row["module_ms"]["mean"] > 0
        assert row["module_ms"]["median"] > 0
        assert row["above_floor_ms"] == pytest.approx(row["module_ms"]["mean"] - row["floor_ms"]["mean"], abs=1e-3)
        assert row["first_token_ms"] is row["answer_ms"] is None
        if row["budget"] is not None:
            assert row["tokens"] == 9
            assert row["tokens_range"] == [9, 9]
    dynamic = next(row for row in told["rows"] if row["spec"] == "torino-m(k=1, delta=1)")
    assert dynamic["label"] == "TORINO-M (1,1)"
    from torino import make

    counts = [len(make(dynamic["spec"], sae=small_sae()).plan(image)) for image in images()]
    assert dynamic["tokens_range"][0] in counts
    assert 1 <= dynamic["tokens"] < 36
    assert next(row for row in told["rows"] if row["method"] == "visionzip")["made_up_signals"]
    assert next(row for row in told["rows"] if row["method"] == "random")["made_up_signals"] == []
    assert any("made up" in note for note in told["notes"])
    assert calls[-1] == ("module alone", 5, 5)
    json.dumps(told)


def test_the_order_moves_on_so_that_no_method_is_always_first() -> None:
    found, _ = settings("random,divprune,tome", dynamic="no")
    bench = Bench(found, {}, BenchPlan(1))
    orders = [[row.setting.method for row in bench._in_turn(turn)] for turn in range(4)]
    assert [order[0] for order in orders] == ["random", "divprune", "tome", "random"]
    assert all(sorted(order) == ["divprune", "random", "tome"] for order in orders)


def test_images_are_drawn_once_each_before_one_comes_again() -> None:
    picked = BenchPlan(8, seed=3).pick(5)
    assert sorted(picked[:5]) == [0, 1, 2, 3, 4]
    assert len(picked) == 8
    assert picked == BenchPlan(8, seed=3).pick(5)
    assert BenchPlan(50).pick(1000) != BenchPlan(50, seed=1).pick(1000)


def test_figures_are_in_milliseconds() -> None:
    seconds = [0.010, 0.020, 0.060]
    told = spread(seconds)
    assert told == {
        "mean": 30.0,
        "std": pytest.approx(1e3 * statistics.stdev(seconds), abs=1e-3),
        "median": 20.0,
    }
    assert spread([]) is None
    assert spread([0.001]) == {"mean": 1.0, "std": 0.0, "median": 1.0}


@pytest.mark.skipif(sys.platform != "linux", reason="memory of a process is told by Linux only")
def test_memory_that_is_used_and_freed_is_seen() -> None:
    little = peak_memory(lambda: None)
    much = peak_memory(lambda: torch.ones(40_000_000))
    if little is None:
        pytest.skip("this system does not let a process reset its high-water mark")
    assert little < 20
    assert 150 < much < 250


def test_what_cannot_run_is_left_out_with_a_reason() -> None:
    found, _ = settings("random,divprune", budgets="9,900", dynamic="no")
    bench = Bench(found, {}, BenchPlan(2, 0))
    bench.on_tokens(images())
    assert [row.setting.budget for row in bench.rows] == [9, 9]
    assert len([note for note in bench.notes if "900" in note and "left out" in note]) == 2
    found, _ = settings("random", budgets="900", dynamic="no")
    with pytest.raises(BadParameter, match=r"No method can be measured.*900"):
        Bench(found, {}, BenchPlan(2, 0)).on_tokens(images())
    for wrong in ({"images": 0}, {"warmups": -1}, {"answers": -1}, {"length": 0}):
        with pytest.raises(BadParameter, match="at least"):
            BenchPlan(**wrong)


# ---------------------------------------------------------------------- a model


def test_on_a_model_from_the_module_to_the_whole_answer(home: Path) -> None:
    arguments = ["--model", str(home / "llava"), "--images", str(home / "photos"), "--sae", str(home / "sae")]
    arguments += ["--methods", "torino-p,torino-m,visionzip,tome-tower,random"]
    sizes = ["--count", "4", "--warmups", "1", "--answers", "2", "--max-new-tokens", "3"]
    told = run(home, *arguments, *sizes, "--budgets", "5", "--dynamic", "1,1", "--question", "what is this ?")
    rows = {row["spec"]: row for row in told["rows"]}
    full = rows["full"]
    assert full["label"] == "All tokens"
    assert (full["tokens"], full["module_ms"], full["answers"]) == (16, None, 2)
    assert "tome-tower(budget=5)" in rows, "what works inside the tower is measured by its steps"
    assert "visionzip(budget=5)" in rows
    assert len(rows) == 8, told["notes"]
    for row in rows.values():
        assert row["answers"] == 2
        assert 0 < row["first_token_ms"]["mean"] < row["answer_ms"]["mean"]
        assert row["peak_mb"] is None or row["peak_mb"] >= 0
        if row is not full:
            assert row["images"] == 4
            assert min(row["module_ms"]["mean"], row["floor_ms"]["mean"]) > 0  # which is larger, a busy machine decides
            assert row["made_up_signals"] == []
    assert told["protocol"]["model"] == "llava", "a name, not a path"
    assert str(home) not in json.dumps(told)
    assert (told["protocol"]["family"], told["protocol"]["dtype"]) == ("llava", "float32")


def test_noise_in_the_place_of_photos_is_said(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", str(home / "llava"), "--methods", "random", "--budgets", "4", "--count", "2"]
    told = run(home, *arguments, "--warmups", "0", "--answers", "0")
    assert [row["spec"] for row in told["rows"]] == ["random(budget=4, seed=0)"]
    assert told["protocol"]["source"] == "generated noise"
    assert any("noise" in note for note in told["notes"])
    assert "answers" not in capsys.readouterr().out


def test_answers_are_of_one_length_and_those_of_ask(home: Path) -> None:
    from torino.vlm.session import ask, load_vlm

    model, processor = load_vlm(home / "llava")
    model.generation_config.eos_token_id = list(range(5, 60))  # nearly every word would end an answer
    asked = ask(photo(), "what is this ?", model=model, processor=processor, max_new_tokens=4, min_new_tokens=4)
    assert asked.new_tokens == 4
    assert ask(photo(), "what is this ?", model=model, processor=processor, max_new_tokens=4).new_tokens < 4
    reducer = settings("random", "5", "no")[0][0].reducer({})
    options: dict[str, Any] = {"model": model, "processor": processor, "max_new_tokens": 4, "min_new_tokens": 4}
    assert ask(photo(), "what is this ?", reducer=reducer, **options).new_tokens == 4


def test_a_method_that_reads_the_question(home: Path) -> None:
    from torino.vlm import ClipText
    from torino.vlm.session import load_vlm

    model, processor = load_vlm(home / "llava")
    clip, tokenizer = tiny.clip(model.model.vision_tower)
    found, _ = settings("cdpruner", "5", "no", with_model=True, with_clip=True)
    bench = Bench(found, {}, BenchPlan(2, 0, 1, 2))
    bench.on_model(model, processor, [photo()], text_query=ClipText(clip, tokenizer), question="what is this ?")
    assert [row.setting.method for row in bench.rows] == ["full", "cdpruner"], bench.notes
    assert bench.rows[1].tokens == [5, 5]
    without = Bench([FULL, *found[1:]], {}, BenchPlan(2, 0, 1, 2))
    with pytest.raises(BadParameter, match="--clip"):
        without.on_model(model, processor, [photo()], question="what is this ?")


def test_all_methods_are_those_that_can_be_measured() -> None:
    def all_of(**given: Any) -> tuple[set[str], str]:
        found, notes = settings(**given)
        return {one.method for one in found}, " ".join(notes)

    alone, said = all_of()
    assert {"torino-m", "cdpruner", "visionzip"} <= alone
    assert not {"tome-tower", "full"} & alone
    assert "tome-tower, which work inside a vision tower" in said
    model, said = all_of(with_model=True)
    assert {"tome-tower", "full"} <= model
    assert "cdpruner" not in model
    assert "--clip" in said
    without, said = all_of(with_model=True, with_clip=True, saes={})
    assert "cdpruner" in without
    assert "torino-m" not in without
    assert "--sae" in said


# ---------------------------------------------------------------------- the command


def test_the_command_prints_a_table(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = run(home, "--tokens", str(home / "tokens.npz"), "--methods", "random,tome", "--budgets", "9", "--count", "2")
    shown = capsys.readouterr()
    assert [row["label"] for row in told["rows"]] == ["Random", "ToMe"]
    assert "Random" in shown.out
    assert "above" in shown.out
    assert "first" not in shown.out, "no model, no answers"
    assert "3 images of tokens.npz" in shown.out
    from torino.evaluation.reporting.figures.charts import read_bench

    assert len(read_bench(home / "bench.json")) == 2


def test_figures_are_whole_on_a_narrow_screen(capsys: pytest.CaptureFixture[str]) -> None:
    figures = {"mean": 1234.5678, "std": 234.5678, "median": 1.0}
    row = {
        "label": "TORINO-M, an SAE of a long name (2,2)",
        "tokens": 1192.25,
        "module_ms": figures,
        "peak_mb": 12345.6,
    }
    row |= {"floor_ms": figures, "above_floor_ms": 1234.5, "first_token_ms": figures, "answer_ms": figures}
    protocol = {"images": 5, "distinct_images": 5, "warmups": 1, "source": "noise", "memory": "answer"}
    _print({"rows": [row], "protocol": protocol, "notes": [], "survivors": {}})
    shown = capsys.readouterr().out
    assert "…" not in shown
    assert all(text in shown for text in ("1,192.2", "1234.57 ± 234.57", "1,234.568", "1,234.50", "12,345.6"))


def test_rows_of_several_saes_are_told_apart(home: Path) -> None:
    found, _ = settings("torino-m,torino-m(k=3, delta=1)", "9", "1,1", saes={"a": small_sae(), "b": small_sae()})
    labels = [BenchRow(one, None).facts()["label"] for one in found]
    assert "TORINO-M, a (1,1)" in labels
    assert "torino-m(k=3, delta=1), b" in labels
    with pytest.raises(BadParameter, match="Two SAEs are called 'sae'"):
        run(home, "--sae", str(home / "sae"), "--sae", str(home / "." / "sae") + "/")


def test_both_searches_side_by_side_give_the_same_tokens(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnxruntime")
    given = ("--tokens", str(home / "tokens.npz"), "--sae", str(home / "sae"), "--methods", "torino-m", "--count", "2")
    told = run(home, *given, "--budgets", "9", "--dynamic", "1,1", "--prefilter", "both")
    rows = {row["label"]: row["tokens"] for row in told["rows"]}
    assert rows["TORINO-M, sae plain (1,1)"] == rows["TORINO-M, sae int8 (1,1)"]
    assert list(told["survivors"]) == ["sae int8"]
    left = told["survivors"]["sae int8"]
    assert 3 <= left["median"] <= left["percentile_99"] <= left["most"] <= 24
    assert "the int8 prefilter kept" in capsys.readouterr().out
    eye = torch.eye(small_sae().width + 3)
    wider = SAE(eye, W_dec=eye).save(home / "wider")  # which cannot read these tokens
    told = run(home, *given, "--sae", str(wider), "--budgets", "9", "--dynamic", "no", "--prefilter", "int8")
    assert list(told["survivors"]) == ["sae"]
    assert any("was left out" in note for note in told["notes"])
    monkeypatch.setattr("torino.core.topk.prefilter.backend_for", lambda device: None)
    for prefilter in ("both", "int8"):
        told = run(home, *given, "--budgets", "9", "--dynamic", "no", "--prefilter", prefilter)
        assert [row["label"] for row in told["rows"]] == ["TORINO-M"]
        assert any("torino[fast]" in note for note in told["notes"])


def test_bad_input_gets_a_sentence(home: Path) -> None:
    tokens, model = ["--tokens", str(home / "tokens.npz")], ["--model", str(home / "llava")]
    cases: list[tuple[list[str], str]] = [
        ([*tokens, *model], "not both"),
        (["--images", "x"], "--model too"),
        (["--clip", "x"], "--model too"),
        ([*tokens, "--methods", "nobody"], "nobody"),
        ([*tokens, "--methods", "torino-m"], "--sae"),
        ([*tokens, "--methods", "torino-m(k=2)"], "--sae"),
        ([*tokens, "--budgets", "many"], "whole numbers"),
        ([*tokens, "--methods", "random", "--budgets", "no"], "nothing to measure"),
        ([*tokens, "--methods", "random", "--dynamic", "1"], "k,delta"),
        ([*tokens, "--padding", "stretch"], "crop or square"),
        ([*tokens, "--positions", "none"], "compact or original"),
        ([*tokens, "--prefilter", "fast"], "auto, int8, off or both"),
        ([*tokens, "--count", "0"], "at least 1"),
        ([*tokens, "--device", "abacus"], "device"),
        (["--tokens", str(home / "none.npz")], "no file"),
        ([*model, "--images", str(home / "none"), "--methods", "random"], "no photos"),
        (["--model", str(home / "sae" / "nothing"), "--methods", "random"], "no folder"),
    ]
    for arguments, expected in cases:
        with pytest.raises((BadParameter, UnknownName, ValueError), match=expected) as caught:
            run(home, *arguments)
        assert len(str(caught.value)) < 600
    for output in ("bench.txt", "folder.json"):
        (home / "folder.json").mkdir(exist_ok=True)
        with pytest.raises(BadParameter, match="--output"):
            command(tokens=home / "tokens.npz", output=home / output)


def test_importing_the_command_stays_light() -> None:
    code = "import sys, torino.cli.bench; print(' '.join(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"transformers", "PIL", "pyarrow"} & set(loaded)
