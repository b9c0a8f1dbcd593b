"""Running the protocol: shared features, resumption after kill -9, shards, failures, and the command."""

from __future__ import annotations

import base64
import csv
import io
import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from test_ask import _build

from torino import SAE, RawEmbedding, TorinoError, make
from torino.core.errors import BadFile, BadParameter
from torino.evaluation.engine import Asked, Engine
from torino.evaluation.protocol import FULL, dynamic_settings, fixed_settings, matched_settings
from torino.evaluation.records import AnswerLog, read_records
from torino.evaluation.reporting.summary import summarize
from torino.evaluation.results import open_run
from torino.evaluation.runner import RunPlan, _added, evaluate, mean_length
from torino.evaluation.tasks import Task, open_task
from torino.vlm.session import ask, load_vlm

METHODS = ["torino-p", "torino-m", "random", "divprune"]
PLAN = RunPlan(METHODS, dynamic=[(2, 2), (1, 1)], fixed=[5], seeds=2)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "llava"
    _build(folder)
    return folder


@pytest.fixture(scope="module")
def vlm(checkpoint: Path) -> tuple[Any, Any]:
    return load_vlm(checkpoint)


@pytest.fixture(scope="module")
def sae(tmp_path_factory: pytest.TempPathFactory) -> SAE:
    generator = torch.Generator().manual_seed(3)
    return SAE(torch.randn(40, 32, generator=generator), W_dec=torch.randn(40, 32, generator=generator))


def picture(seed: int) -> bytes:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (4, 4, 3), generator=generator, dtype=torch.uint8).numpy()
    file = io.BytesIO()
    Image.fromarray(pixels).resize((56, 56), Image.Resampling.NEAREST).save(file, "PNG")
    return file.getvalue()


def write_tsv(path: Path, images: int, questions: int = 2) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, delimiter="\t")
        writer.writerow(["index", "image", "question", "answer"])
        for number in range(images):
            coded = base64.b64encode(picture(number)).decode()
            for question in range(questions):
                index = number * questions + question
                writer.writerow([index, coded, ["what is this ?", "how many is this ?"][question], "word1"])
    return path


def task(folder: Path, name: str = "small", images: int = 4) -> Task:
    return open_task(write_tsv(folder / f"{name}.tsv", images))


def table(folder: Path) -> list[tuple[str, ...]]:
    """Everything in a run that must not depend on how often it was stopped."""
    rows = open_run(folder).rows()
    return sorted((row["task"], row["setting"], row["index"], row["prediction"], str(row["tokens"])) for row in rows)


def go(folder: Path, tasks: list[Task], vlm: tuple[Any, Any], sae: Any, plan: RunPlan = PLAN, **options: Any) -> Any:
    return evaluate(folder, model=vlm[0], processor=vlm[1], tasks=tasks, plan=plan, saes={"s": sae}, batch=3, **options)


# ---------------------------------------------------------------------- settings


def test_settings_of_the_protocol() -> None:
    dynamic = dynamic_settings(METHODS, ["s"])
    assert [(one.method, one.tier, one.reference) for one in dynamic[:2]] == [
        ("torino-p", "3,3", True),
        ("torino-m", "3,3", False),
    ]
    references = {one.tier: one for one in dynamic if one.reference}
    matched = matched_settings(METHODS, {"2,2": 7}, references, ["s"], seeds=2)
    assert [one.spec for one in matched] == [
        "torino-p(k=2, delta=2, budget=7)",
        "torino-m(k=2, delta=2, budget=7)",
        "random(budget=7, seed=0)",
        "random(budget=7, seed=1)",
        "divprune(budget=7)",
    ]
    assert matched[0].label == "TORINO-P_FB"
    fixed = fixed_settings(METHODS, [64], ["s"], seeds=1)
    ids = [one.id for one in [FULL, *dynamic, *matched, *fixed]]
    assert len(set(ids)) == len(ids)
    for one in [*dynamic, *matched, *fixed]:
        made = one.reducer({"s": RawEmbedding()})
        assert made is not None
        assert made.name == one.method


def test_each_sae_has_tiers_of_its_own() -> None:
    dynamic = dynamic_settings(METHODS, ["a", "b"], [(2, 2)])
    assert [one.tier for one in dynamic if one.reference] == ["2,2 [a]", "2,2 [b]"]
    references = {one.tier: one for one in dynamic if one.reference}
    matched = matched_settings(METHODS, {"2,2 [a]": 7, "2,2 [b]": 9}, references, ["a", "b"], seeds=1)
    assert [(one.sae, one.budget) for one in matched if one.method == "torino-m"] == [("a", 7), ("b", 9)]
    ids = [one.id for one in [*dynamic, *matched]]
    assert len(set(ids)) == len(ids)


def test_a_dynamic_tier_needs_torino() -> None:
    with pytest.raises(BadParameter, match="neither torino-p nor torino-m"):
        RunPlan(["random"]).first(["s"])


# ---------------------------------------------------------------------- the engine


@pytest.mark.parametrize(("positions", "mass"), [("own", None), ("original", False), ("own", True)])
def test_answers_are_those_of_asking_one_by_one(
    vlm: tuple[Any, Any], sae: SAE, positions: Any, mass: bool | None
) -> None:
    model, processor = vlm
    reducers = {
        "full": None,
        "m": make("torino-m(k=2, delta=1)", sae=sae),
        "zip": make("visionzip(budget=6)"),
        "tower": make("tome-tower(budget=7)"),
        "r": make("random(budget=5)"),
        "x": make("torino-x(budget=5)", sae=sae),
        "c": make("torino-x(budget=5, positions='compact')", sae=sae),
    }
    asked = [Asked(("t", "0"), "what is this ?", 4), Asked(("t", "1"), "how many ?", 4)]
    for batch in (1, 8):
        engine = Engine(model, processor, reducers, batch=batch, on_error="stop", positions=positions, mass=mass)
        done = [one for group in engine.answers([picture(1)], asked, lambda key, name: True) for one in group]
        assert len(done) == 14
        for one in done:
            question = next(each.text for each in asked if each.key == one.key)
            reducer = reducers[one.setting]
            alone = ask(
                picture(1),
                question,
                model=model,
                processor=processor,
                reducer=reducer,
                max_new_tokens=4,
                positions=positions,
                mass=mass,
            )
            assert one.text == alone.text.strip()
            assert (one.tokens, one.before) == (alone.after, 16)


def test_the_tower_looks_once(vlm: tuple[Any, Any], sae: SAE) -> None:
    model, processor = vlm
    calls: list[int] = []
    handle = model.model.vision_tower.register_forward_pre_hook(lambda *_: calls.append(1))
    try:
        reducers = {name: make(f"{name}(budget=5)") for name in ("random", "divprune", "visionzip", "hired", "scope")}
        engine = Engine(model, processor, {"full": None, **reducers}, on_error="stop")
        asked = [Asked(("t", str(n)), "what is this ?", 2) for n in range(3)]
        assert len(list(engine.answers([picture(1)], asked, lambda key, name: True)))
    finally:
        handle.remove()
    assert len(calls) == 1


class Reading:
    """Reads a question for cdpruner, or fails at it."""

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails

    def query(self, text: str) -> Reading:
        if self.fails:
            raise RuntimeError("too long")
        return self

    def add(self, adapter: Any, encoded: Any, inputs: Any) -> Any:
        (unit,) = encoded.tokens
        source = torch.Generator().manual_seed(1)
        given = {"joint": torch.randn(16, 8, generator=source), "text": torch.randn(1, 8, generator=source)}
        return replace(encoded, tokens=(unit.with_(signals={**unit.signals, **given}),))


def test_a_budget_that_pictures_share_is_refused(vlm: tuple[Any, Any]) -> None:
    pooled = make("torino-x(budget=3, pooled=True)", sae=RawEmbedding())
    with pytest.raises(BadParameter, match="each picture is planned alone"):
        Engine(*vlm, {"x": pooled})


def test_what_reads_the_question_may_fail_too(vlm: tuple[Any, Any]) -> None:
    asked = [Asked(("t", "0"), "what is this ?", 2)]
    reducers = {"full": None, "c": make("cdpruner(budget=5)")}
    broken: Any = Reading(fails=True)
    engine = Engine(*vlm, reducers, text_query=broken)
    done = [one for group in engine.answers([picture(1)], asked, lambda key, name: True) for one in group]
    assert {one.setting: one.error for one in done} == {"full": "", "c": "RuntimeError: too long"}
    engine = Engine(*vlm, reducers, text_query=broken, on_error="stop")
    with pytest.raises(TorinoError, match="failed with RuntimeError: too long"):
        list(engine.answers([picture(1)], asked, lambda key, name: True))


def test_what_is_asked_together_does_not_depend_on_what_is_missing(
    vlm: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    reducers = {
        "full": None,
        "c": make("cdpruner(budget=5)"),
        "r": make("random(budget=6)"),
        "s": make("scope(budget=7)"),
    }
    text_query: Any = Reading()
    engine = Engine(*vlm, reducers, text_query=text_query, batch=2, on_error="stop")
    together: list[list[str]] = []
    stock = engine._generate
    monkeypatch.setattr(
        engine, "_generate", lambda *given: together.append([part.setting for part in given[2]]) or stock(*given)
    )
    asked = [Asked(("t", "0"), "what is this ?", 2)]
    list(engine.answers([picture(1)], asked, lambda key, name: True))
    assert together == [["r", "s"], ["full"], ["c"]]
    together.clear()
    planned: list[str] = []
    part = engine._part
    monkeypatch.setattr(engine, "_part", lambda name, *given: planned.append(name) or part(name, *given))
    list(engine.answers([picture(1)], asked, lambda key, name: name == "r"))  # as after a crash
    assert together == [["r", "s"]]
    assert planned == ["r", "s"]  # and nothing is worked out for batches that have answered


def test_batches_are_of_one_tier_and_even(vlm: tuple[Any, Any]) -> None:
    reducers = {f"{tier}{i}": make(f"random(budget={tier})") for tier in (5, 6) for i in range(5)}
    engine = Engine(*vlm, {**reducers, "full": None}, batch=4, tiers={name: name[0] for name in reducers})
    assert engine._at_once == [["50", "51"], ["52", "53", "54"], ["60", "61"], ["62", "63", "64"], ["full"]]


# ---------------------------------------------------------------------- runs


def test_dynamic_torino_alone(tmp_path: Path, vlm: tuple[Any, Any], sae: SAE) -> None:
    plan = replace(PLAN, methods=("torino-p", "torino-m"), fixed=(), matched=False)
    run = go(tmp_path / "run", [task(tmp_path, "one")], vlm, sae, plan)
    assert set(run.settings) == {"full"} | {f"torino-{x}({t})[s]" for x in "pm" for t in ("2,2", "1,1")}
    assert not any(one.budget for one in run.settings.values())
    assert set(run.scores()["one"]) == set(run.settings)
    told = summarize(run, draws=100)["progress"]
    assert told == {"answers": 40, "of": 40, "whole": True, "waits_for_budgets": False}
    run = go(tmp_path / "run", [task(tmp_path, "one")], vlm, sae, replace(plan, matched=True))
    assert len([one for one in run.settings.values() if one.budget]) == 4
    with pytest.raises(BadParameter, match="random has no tier to run in"):
        replace(plan, methods=("torino-p", "random")).first(["s"])


def test_the_protocol(tmp_path: Path, vlm: tuple[Any, Any], sae: SAE) -> None:
    tasks = [task(tmp_path, "one"), task(tmp_path, "two", images=2)]
    told: list[tuple[str, int, int]] = []
    run = go(tmp_path / "run", tasks, vlm, sae, progress=lambda *now: told.append(now))
    rows = list(run.rows())
    keys = [(row["task"], row["setting"], row["index"]) for row in rows]
    assert len(keys) == len(set(keys)) == len(run.settings) * (8 + 4)
    for tier in ("2,2", "1,1"):
        reference = next(one for one in run.settings.values() if one.reference and one.tier == tier)
        counts = [run.token_counts(name, reference.id) for name in ("one", "two")]
        assert [len(each) for each in counts] == [4, 2]
        budget = round(sum(each.mean() for each in counts) / 2)
        assert mean_length(run, reference.id) == budget
        matched = [one for one in run.settings.values() if one.tier == tier and not one.dynamic]
        assert {one.budget for one in matched} == {budget}
        assert len(matched) == 5
        for one in matched:
            assert set(run.token_counts("one", one.id)) == {budget}
    assert set(run.token_counts("one", "full")) == {16}
    assert told[-1][1] == told[-1][2]
    scores = run.scores()
    assert set(scores) == {"one", "two"}
    assert set(scores["one"]) == set(run.settings)
    before = table(tmp_path / "run")
    go(tmp_path / "run", tasks, vlm, sae)  # nothing left to do
    assert table(tmp_path / "run") == before


def test_parts_of_the_work_make_the_same_table(tmp_path: Path, vlm: tuple[Any, Any], sae: SAE) -> None:
    tasks = [task(tmp_path, images=5)]
    go(tmp_path / "whole", tasks, vlm, sae)
    with pytest.raises(TorinoError, match=r"wait for .* answers of other parts"):
        go(tmp_path / "parts", tasks, vlm, sae, shard=(0, 2))
    go(tmp_path / "parts", tasks, vlm, sae, shard=(1, 2))
    go(tmp_path / "parts", tasks, vlm, sae, shard=(0, 2))
    assert len(list((tmp_path / "parts/answers").glob("*.jsonl"))) == 2
    assert table(tmp_path / "parts") == table(tmp_path / "whole")


SCRIPT = """
import sys, torch
from pathlib import Path
torch.set_num_threads(1)
from torino import SAE
from torino.vlm.session import load_vlm
from torino.evaluation.runner import RunPlan, evaluate
from torino.evaluation.tasks import open_task
model, processor = load_vlm(sys.argv[1])
generator = torch.Generator().manual_seed(3)
sae = SAE(torch.randn(40, 32, generator=generator), W_dec=torch.randn(40, 32, generator=generator))
plan = RunPlan(["torino-p", "torino-m", "random", "divprune"], dynamic=[(2, 2), (1, 1)], fixed=[5], seeds=2)
evaluate(sys.argv[3], model=model, processor=processor, tasks=[open_task(sys.argv[2])], plan=plan, saes={"s": sae},
         batch=3, name="tiny")
"""


def test_killed_at_any_moment_it_goes_on(tmp_path: Path, checkpoint: Path, vlm: tuple[Any, Any], sae: SAE) -> None:
    data = write_tsv(tmp_path / "small.tsv", images=9)
    go(tmp_path / "whole", [open_task(data)], vlm, sae, name="tiny")
    wanted = table(tmp_path / "whole")
    dice = random.Random(5)
    answers = tmp_path / "run/answers/1of1.jsonl"
    command = [sys.executable, "-c", SCRIPT, str(checkpoint), str(data), str(tmp_path / "run")]
    killed = 0
    for _ in range(8):
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        size = answers.stat().st_size if answers.exists() else 0
        more = dice.randrange(200, 20_000)
        while process.poll() is None:
            if answers.exists() and answers.stat().st_size > size + more and killed < 2:
                os.kill(process.pid, signal.SIGKILL)
                killed += 1
                break
            time.sleep(0.005)
        if process.wait() == 0:
            break
        with answers.open("ab") as file:  # and as if the machine had died within a line
            file.write(b'{"task": "small", "ind')
    assert killed >= 1
    rows = [json.loads(line) for line in answers.read_text(encoding="utf-8").splitlines()]
    keys = [(row["task"], row["setting"], row["index"]) for row in rows]
    assert len(keys) == len(set(keys))  # no sample twice
    assert table(tmp_path / "run") == wanted


def test_what_fails_is_noted_and_passed_over(tmp_path: Path, vlm: tuple[Any, Any], sae: SAE) -> None:
    path = write_tsv(tmp_path / "small.tsv", images=3, questions=1)
    lines = path.read_text(encoding="utf-8").splitlines()
    index, image, question, answer = lines[2].split("\t")
    broken = base64.b64encode(base64.b64decode(image)[:60]).decode()  # half a picture
    lines[2] = "\t".join([index, broken, question, answer])
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    tasks = [open_task(path)]
    run = go(tmp_path / "run", tasks, vlm, sae, plan=RunPlan(["random"], dynamic=[], fixed=[5], seeds=1))
    failed = [row for row in run.rows() if "error" in row]
    assert {row["index"] for row in failed} == {"1"}
    assert {row["setting"] for row in failed} == {"full", "random@5#0"}
    score = run.scores()["small"]["full"]
    assert (score.counts["answered"], score.counts["failed"]) == (2, 1)
    assert list(read_records((tmp_path / "run/problems").glob("*.jsonl")))
    with pytest.raises(BadFile):
        go(tmp_path / "stop", tasks, vlm, sae, plan=RunPlan(["random"], dynamic=[], fixed=[5]), on_error="stop")


def test_a_model_that_raises_on_one_sample(
    tmp_path: Path, vlm: tuple[Any, Any], sae: SAE, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = vlm
    stock = type(model).generate
    calls = {"n": 0}

    def sometimes(self: Any, *arguments: Any, **given: Any) -> Any:
        calls["n"] += 1
        if calls["n"] in (2, 3):  # the batch, and the first of its answers alone
            raise RuntimeError("no luck")
        return stock(self, *arguments, **given)

    monkeypatch.setattr(type(model), "generate", sometimes)
    plan = RunPlan(["random", "divprune"], dynamic=[], fixed=[5], seeds=1)
    run = go(tmp_path / "run", [task(tmp_path, images=2)], vlm, sae, plan=plan)
    failed = [row for row in run.rows() if "error" in row]
    assert len(failed) == 1
    assert failed[0]["error"] == "RuntimeError: no luck"
    assert len(list(run.rows())) == 3 * 4
    size = (tmp_path / "run/answers/1of1.jsonl").stat().st_size
    go(tmp_path / "run", [task(tmp_path, images=2)], vlm, sae, plan=plan)
    assert (tmp_path / "run/answers/1of1.jsonl").stat().st_size == size  # a failure stands for its answer
    mended = go(tmp_path / "run", [task(tmp_path, images=2)], vlm, sae, plan=plan, retry=True)
    assert len((tmp_path / "run/answers/1of1.jsonl").read_text(encoding="utf-8").splitlines()) == 3 * 4 + 1
    assert table(mended.folder) == table(go(tmp_path / "new", [task(tmp_path, images=2)], vlm, sae, plan=plan).folder)


def test_a_full_disk_loses_nothing(tmp_path: Path) -> None:
    records = AnswerLog(tmp_path / "a.jsonl")
    records.add([{"n": 1}])

    class Full(io.RawIOBase):
        def tell(self) -> int:
            return 9

        def write(self, data: Any) -> int:
            raise OSError(28, "No space left on device")

    records._file = Full()  # type: ignore[assignment]
    with pytest.raises(BadFile, match=r"No space left on device\. Earlier answers are kept"):
        records.add([{"n": 2}])
    records.add([{"n": 3}])
    records.close()
    assert [row["n"] for row in read_records([tmp_path / "a.jsonl"])] == [1, 3]


def test_a_start_that_was_cut_short_is_no_other_run(tmp_path: Path, vlm: tuple[Any, Any], sae: SAE) -> None:
    plan = RunPlan(["random"], dynamic=[], fixed=[5], seeds=1)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".run.json.k2x.json").write_text(
        "{", encoding="utf-8"
    )  # as kill -9, or another part, leaves it
    go(tmp_path / "run", [task(tmp_path, images=1)], vlm, sae, plan=plan)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    with pytest.raises(BadParameter, match="holds other things"):
        go(tmp_path / "mine", [task(tmp_path, images=1)], vlm, sae, plan=plan)


def test_two_tasks_of_one_name_are_refused(tmp_path: Path, vlm: tuple[Any, Any], sae: SAE) -> None:
    with pytest.raises(BadParameter, match="Two tasks are called small"):
        go(tmp_path / "run", [task(tmp_path, images=1)] * 2, vlm, sae)


def test_two_processes_do_not_share_a_part(tmp_path: Path) -> None:
    pytest.importorskip("fcntl")
    first = AnswerLog(tmp_path / "a.jsonl")
    with pytest.raises(BadFile, match="Another process is writing"):
        AnswerLog(tmp_path / "a.jsonl")
    first.close()
    AnswerLog(tmp_path / "a.jsonl").close()


def test_a_run_is_found_from_another_folder(
    tmp_path: Path, vlm: tuple[Any, Any], sae: SAE, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tsv(tmp_path / "small.tsv", images=1)
    monkeypatch.chdir(tmp_path)
    plan = RunPlan(["random"], dynamic=[], fixed=[5], seeds=1)
    go(tmp_path / "run", [open_task("small.tsv")], vlm, sae, plan=plan)
    monkeypatch.chdir("/")
    assert open_run(tmp_path / "run").scores()["small"]["full"].counts["answered"] == 2


def test_a_run_takes_further_methods(tmp_path: Path, vlm: tuple[Any, Any], sae: SAE) -> None:
    tasks = [task(tmp_path, images=2)]
    few = replace(PLAN, methods=["torino-m", "random"])
    go(tmp_path / "grown", tasks, vlm, sae, plan=few)
    before = {(row["setting"], row["index"]): row for row in open_run(tmp_path / "grown").rows()}
    go(tmp_path / "grown", tasks, vlm, sae)
    go(tmp_path / "whole", tasks, vlm, sae)
    assert table(tmp_path / "grown") == table(tmp_path / "whole")
    after = {(row["setting"], row["index"]): row for row in open_run(tmp_path / "grown").rows()}
    assert before.items() <= after.items()
    assert len(open_run(tmp_path / "grown").metadata["added"]) == 1
    go(tmp_path / "grown", tasks, vlm, sae, plan=few)  # fewer again: nothing is lost
    assert table(tmp_path / "grown") == table(tmp_path / "whole")


def test_a_picture_is_read_once_for_all_its_questions(vlm: tuple[Any, Any], sae: SAE) -> None:
    model, processor = vlm
    read: list[int] = []
    handle = model.model.language_model.register_forward_pre_hook(
        lambda _, args, given: read.append(given["inputs_embeds"].shape[1]), with_kwargs=True
    )
    try:
        engine = Engine(model, processor, {"full": None}, on_error="stop")
        asked = [Asked(("t", str(n)), f"what is {n} ?", 1) for n in range(3)]
        list(engine.answers([picture(1)], asked, lambda key, name: True))
        together = list(read)
        read.clear()
        list(engine.answers([picture(1)], asked[:1], lambda key, name: True))
        (alone,) = read
    finally:
        handle.remove()
    assert together[0] > 16
    assert len(together) == 4
    assert all(together[0] + each == alone for each in together[1:])


def test_other_arguments_are_another_run(tmp_path: Path, vlm: tuple[Any, Any], sae: SAE) -> None:
    plan = RunPlan(["random"], dynamic=[], fixed=[5], seeds=1)
    tasks = [task(tmp_path, images=1)]
    go(tmp_path / "run", tasks, vlm, sae, plan=plan)
    with pytest.raises(BadParameter, match="begun with padding 'crop', and now it is 'square'"):
        go(tmp_path / "run", tasks, vlm, sae, plan=plan, padding="square")
    with pytest.raises(BadParameter, match=r"own is divprune\(budget=5\), and now it would be divprune\(budget=6\)"):
        _added(tmp_path, [{"id": "own", "spec": "divprune(budget=5)"}], [{"id": "own", "spec": "divprune(budget=6)"}])
    with pytest.raises(BadParameter, match="other tasks or other data"):
        go(tmp_path / "run", [task(tmp_path, "other", images=1)], vlm, sae, plan=plan)
    write_tsv(tmp_path / "small.tsv", images=2)
    with pytest.raises(BadFile, match="is not the file of this run"):
        open_run(tmp_path / "run").scores()
    with pytest.raises(BadFile, match="is not a run"):
        open_run(tmp_path)


def test_the_command(tmp_path: Path, checkpoint: Path, sae: SAE) -> None:
    from typer.testing import CliRunner

    from torino.cli.main import app

    sae.save(tmp_path / "sae")
    data = write_tsv(tmp_path / "small.tsv", images=2)
    given = ["eval", "--model", str(checkpoint), "--tasks", str(data), "-o", str(tmp_path / "run"), "--limit", "3"]
    given += ["--sae", f"s={tmp_path / 'sae'}", "--methods", "torino-m,random", "--dynamic", "2,2", "--tiers", "6"]
    done = CliRunner().invoke(app, [*given, "--device", "cpu", "--seeds", "1"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    run = open_run(tmp_path / "run")
    assert {one.method for one in run.settings.values()} == {"full", "torino-m", "random"}
    assert len(list(run.rows())) == 3 * len(run.settings)


def test_the_command_says_what_failed_and_what_is_wrong(tmp_path: Path, checkpoint: Path) -> None:
    from typer.testing import CliRunner

    from torino.cli.main import app

    data = write_tsv(tmp_path / "small.tsv", images=1)
    with data.open("a", encoding="utf-8") as file:
        file.write("9\tnone [/b]\twhat ?\tword1\n")  # brackets are no markup
    given = ["eval", "--model", str(checkpoint), "--tasks", str(data), "--methods", "random", "--seeds", "1"]
    given += ["--device", "cpu", "--tiers"]
    done = CliRunner().invoke(app, [*given, "99", "-o", str(tmp_path / "run")], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "none [/b]" in done.output
    assert "2 answers failed" in done.output
    for words, said in (
        (["5", "-o", str(data)], "is a file"),
        (["5,some", "-o", str(tmp_path / "x")], "--tiers takes"),
    ):
        failed = CliRunner().invoke(app, [*given, *words])
        assert said in str(failed.exception)
    assert not (tmp_path / "x").exists()
