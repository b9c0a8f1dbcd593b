"""Latency benchmarks: every method under the same conditions."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

import pytest
import torch

from tests.support import tiny
from tests.support.tiny_bench import bench_settings, make_small_sae, make_token_images
from tests.support.tiny_vlm import QUESTION, build_llava, photo
from torino import make
from torino.core.errors import BadParameter
from torino.evaluation.latency import Bench, BenchPlan, BenchRow, peak_memory, spread
from torino.evaluation.protocol import FULL
from torino.vlm import VLM, ClipText, ask, load_vlm


@pytest.fixture(scope="module")
def vlm(tmp_path_factory: pytest.TempPathFactory) -> VLM:
    folder = tmp_path_factory.mktemp("latency") / "llava"
    build_llava(folder)
    return load_vlm(folder)


def test_every_method_runs_on_the_same_images_above_the_floor() -> None:
    settings, _ = bench_settings()
    calls: list[tuple[str, int, int]] = []
    bench = Bench(settings, {"small": make_small_sae()}, BenchPlan(4, 1), lambda *call: calls.append(call))
    bench.on_tokens(make_token_images(), source="some")
    document = bench.document()
    assert document["format"] == "torino-bench/1"
    assert {"machine", "versions", "date", "protocol", "rows"} <= set(document)
    protocol = document["protocol"]
    assert (protocol["images"], protocol["warmups"], protocol["distinct_images"]) == (4, 1, 3)
    specs = [row["spec"] for row in document["rows"]]
    assert len(specs) == len(set(specs)) == len(settings), document["notes"]
    for row in document["rows"]:
        assert row["images"] == 4, "warm-ups are not counted, every image is"
        assert row["module_ms"]["mean"] > 0
        assert row["module_ms"]["median"] > 0
        assert row["above_floor_ms"] == pytest.approx(row["module_ms"]["mean"] - row["floor_ms"]["mean"], abs=1e-3)
        assert row["first_token_ms"] is row["answer_ms"] is None
        if row["budget"] is not None:
            assert row["tokens"] == 9
            assert row["tokens_range"] == [9, 9]
    dynamic = next(row for row in document["rows"] if row["spec"] == "torino-m(k=1, delta=1)")
    assert dynamic["label"] == "TORINO-M (1,1)"
    counts = [len(make(dynamic["spec"], sae=make_small_sae()).plan(image)) for image in make_token_images()]
    assert dynamic["tokens_range"][0] in counts
    assert 1 <= dynamic["tokens"] < 36
    assert next(row for row in document["rows"] if row["method"] == "visionzip")["made_up_signals"]
    assert next(row for row in document["rows"] if row["method"] == "random")["made_up_signals"] == []
    assert any("are random" in note for note in document["notes"])
    assert calls[-1] == ("module alone", 5, 5)
    json.dumps(document)


def test_the_order_shifts_so_that_no_method_is_always_first() -> None:
    settings, _ = bench_settings("random,divprune,tome", kd="none")
    bench = Bench(settings, {}, BenchPlan(1))
    orders = [[row.setting.method for row in bench._in_turn(turn)] for turn in range(4)]
    assert [order[0] for order in orders] == ["random", "divprune", "tome", "random"]
    assert all(sorted(order) == ["divprune", "random", "tome"] for order in orders)


def test_no_image_repeats_before_all_were_used() -> None:
    picked = BenchPlan(8, seed=3).pick(5)
    assert sorted(picked[:5]) == [0, 1, 2, 3, 4]
    assert len(picked) == 8
    assert picked == BenchPlan(8, seed=3).pick(5)
    assert BenchPlan(50).pick(1000) != BenchPlan(50, seed=1).pick(1000)


def test_times_are_in_milliseconds() -> None:
    seconds = [0.010, 0.020, 0.060]
    assert spread(seconds) == {
        "mean": 30.0,
        "std": pytest.approx(1e3 * statistics.stdev(seconds), abs=1e-3),
        "median": 20.0,
    }
    assert spread([]) is None
    assert spread([0.001]) == {"mean": 1.0, "std": 0.0, "median": 1.0}


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux reports the memory of a process")
def test_memory_that_is_used_and_freed_is_measured() -> None:
    little = peak_memory(lambda: None)
    much = peak_memory(lambda: torch.ones(40_000_000))
    if little is None or much is None:
        pytest.skip("this system does not let a process reset its high-water mark")
    assert little < 20
    assert 150 < much < 250


def test_methods_that_cannot_run_are_left_out_with_a_reason() -> None:
    settings, _ = bench_settings("random,divprune", budget="9,900", kd="none")
    bench = Bench(settings, {}, BenchPlan(2, 0))
    bench.on_tokens(make_token_images())
    assert [row.setting.budget for row in bench.rows] == [9, 9]
    assert len([note for note in bench.notes if "900" in note and "left out" in note]) == 2
    settings, _ = bench_settings("random", budget="900", kd="none")
    with pytest.raises(BadParameter, match=r"No method can be measured.*900"):
        Bench(settings, {}, BenchPlan(2, 0)).on_tokens(make_token_images())
    for wrong in ({"images": 0}, {"warmups": -1}, {"answers": -1}, {"length": 0}):
        with pytest.raises(BadParameter, match="at least"):
            BenchPlan(**wrong)


def test_answers_have_one_length(tmp_path: Path) -> None:
    build_llava(tmp_path / "llava")
    vlm = load_vlm(tmp_path / "llava")
    vlm.model.generation_config.eos_token_id = list(range(5, 60))  # nearly every word would end an answer
    length = {"max_new_tokens": 4, "min_new_tokens": 4}
    assert ask(photo(), QUESTION, model=vlm, **length).new_tokens == 4
    assert ask(photo(), QUESTION, model=vlm, max_new_tokens=4).new_tokens < 4
    settings, _ = bench_settings("random", "5", "none", with_model=True)
    assert ask(photo(), QUESTION, model=vlm, reducer=settings[1].reducer({}), **length).new_tokens == 4
    lengths: list[int] = []
    answer = vlm.answer
    vlm.answer = lambda *given, **options: lengths.append((result := answer(*given, **options)).new_tokens) or result
    Bench(settings, {}, BenchPlan(1, 0, 1, 4)).on_model(vlm, [photo()], question=QUESTION)
    assert set(lengths) == {4}
    assert len(lengths) == 6  # one untimed answer, one timed and one for the memory, of two methods


def test_a_method_that_reads_the_question(vlm: VLM) -> None:
    clip, tokenizer = tiny.clip(vlm.model.model.vision_tower)
    settings, _ = bench_settings("cdpruner", "5", "none", with_model=True, with_clip=True)
    session = VLM(vlm.model, vlm.processor, text_query=ClipText(clip, tokenizer))
    bench = Bench(settings, {}, BenchPlan(2, 0, 1, 2))
    bench.on_model(session, [photo()], question=QUESTION)
    assert [row.setting.method for row in bench.rows] == ["full", "cdpruner"], bench.notes
    assert bench.rows[1].tokens == [5, 5]
    without = Bench([FULL, *settings[1:]], {}, BenchPlan(2, 0, 1, 2))
    with pytest.raises(BadParameter, match="--clip"):
        without.on_model(vlm, [photo()], question=QUESTION)


def test_methods_inside_the_language_model(vlm: VLM) -> None:
    methods = "fastv,random(budget=7)+dart(budget=3)"
    settings, _ = bench_settings(methods, "5", "none", with_model=True)
    bench = Bench(settings, {}, BenchPlan(2, 0, 1, 2))
    bench.on_model(vlm, [photo()], question=QUESTION)
    rows = {row.setting.spec: row for row in bench.rows}
    assert len(rows) == 3, bench.notes
    layers = len(vlm.model.get_decoder().layers)
    assert rows["fastv(budget=5)"].tokens == [round((16 + 5 * (layers - 1)) / layers)] * 2
    assert rows["random(budget=7)+dart(budget=3)"].tokens == [round((7 + 3 * (layers - 1)) / layers)] * 2
    alone = Bench([*bench_settings("random", "5", "none")[0], *settings[1:]], {}, BenchPlan(1, 0))
    alone.on_tokens(make_token_images())
    assert [row.setting.method for row in alone.rows] == ["random"]
    assert len([note for note in alone.notes if "inside the language model" in note]) == 2


def test_host_options_are_recorded(vlm: VLM) -> None:
    settings, _ = bench_settings("random", "5", "none", with_model=True)
    session = VLM(vlm.model, vlm.processor, padding="square", positions="original", attention="proportional")
    bench = Bench(settings, {}, BenchPlan(1, 0, 1, 1))
    bench.on_model(session, [photo()], question=QUESTION)
    protocol = bench.document()["protocol"]
    recorded = (protocol["padding"], protocol["positions"], protocol["attention"], protocol["question"])
    assert recorded == ("square", "original", "proportional", QUESTION)


def test_rows_of_several_saes_have_different_labels() -> None:
    saes = {"a": make_small_sae(), "b": make_small_sae()}
    settings, _ = bench_settings("torino-m,torino-m(k=3, delta=1)", saes=saes)
    labels = [BenchRow(setting, None).facts()["label"] for setting in settings]
    assert "TORINO-M, a (1,1)" in labels
    assert "torino-m(k=3, delta=1), b" in labels
