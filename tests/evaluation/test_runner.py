"""Run the protocol: budgets, resumption after kill -9, shards, failures."""

from __future__ import annotations

import base64
import copy
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from PIL import Image

from tests.support.files import read_folder
from tests.support.tiny_run import PLAN, answer_table, make_sae, open_tiny_task, run_tiny, write_task_file
from tests.support.tiny_vlm import build_llava
from torino import SAE, TorinoError
from torino.core.errors import BadFile, BadParameter
from torino.core.io import write_json
from torino.evaluation import run_file
from torino.evaluation.records import read_records
from torino.evaluation.reporting.summary import summarize
from torino.evaluation.results import open_run
from torino.evaluation.run_file import describe_run, new_settings, open_run_file
from torino.evaluation.runner import RunPlan, mean_length
from torino.evaluation.tasks import open_task
from torino.vlm import VLM, ModelPackage, load_vlm
from torino.vlm.text_query import ClipText

RANDOM = RunPlan(["random"], dynamic=[], fixed=[5], seeds=1)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "llava"
    build_llava(folder)
    return folder


@pytest.fixture(scope="module")
def vlm(checkpoint: Path) -> VLM:
    return load_vlm(checkpoint)


@pytest.fixture(scope="module")
def sae() -> SAE:
    return make_sae()


def test_dynamic_torino_alone(tmp_path: Path, vlm: VLM, sae: SAE) -> None:
    plan = replace(PLAN, methods=("torino-p", "torino-m"), fixed=(), matched=False)
    run = run_tiny(tmp_path / "run", [open_tiny_task(tmp_path, "one")], vlm, sae, plan)
    assert set(run.settings) == {"full"} | {f"torino-{x}({t})[s]" for x in "pm" for t in ("2,2", "1,1")}
    assert not any(setting.budget for setting in run.settings.values())
    assert set(run.scores()["one"]) == set(run.settings)
    progress = summarize(run, draws=100)["progress"]
    assert progress == {"answers": 40, "of": 40, "whole": True, "waits_for_budgets": False}
    run = run_tiny(tmp_path / "run", [open_tiny_task(tmp_path, "one")], vlm, sae, replace(plan, matched=True))
    assert len([setting for setting in run.settings.values() if setting.budget]) == 4


def test_the_protocol(tmp_path: Path, vlm: VLM, sae: SAE) -> None:
    tasks = [open_tiny_task(tmp_path, "one"), open_tiny_task(tmp_path, "two", images=2)]
    reports: list[tuple[str, int, int]] = []
    run = run_tiny(tmp_path / "run", tasks, vlm, sae, progress=lambda *report: reports.append(report))
    rows = list(run.rows())
    keys = [(row["task"], row["setting"], row["index"]) for row in rows]
    assert len(keys) == len(set(keys)) == len(run.settings) * (8 + 4)
    for tier in ("2,2", "1,1"):
        reference = next(setting for setting in run.settings.values() if setting.reference and setting.tier == tier)
        counts = [run.token_counts(name, reference.id) for name in ("one", "two")]
        assert [len(each) for each in counts] == [4, 2]
        budget = round(sum(each.mean() for each in counts) / 2)
        assert mean_length(run, reference.id) == budget
        matched = [setting for setting in run.settings.values() if setting.tier == tier and not setting.dynamic]
        assert {setting.budget for setting in matched} == {budget}
        assert len(matched) == 5
        for setting in matched:
            assert set(run.token_counts("one", setting.id)) == {budget}
    assert set(run.token_counts("one", "full")) == {16}
    assert reports[-1][1] == reports[-1][2]
    scores = run.scores()
    assert set(scores) == {"one", "two"}
    assert set(scores["one"]) == set(run.settings)
    before = answer_table(tmp_path / "run")
    run_tiny(tmp_path / "run", tasks, vlm, sae)  # nothing left to do
    assert answer_table(tmp_path / "run") == before


def test_shards_give_the_same_answers(tmp_path: Path, vlm: VLM, sae: SAE) -> None:
    tasks = [open_tiny_task(tmp_path, images=5)]
    run_tiny(tmp_path / "whole", tasks, vlm, sae)
    with pytest.raises(TorinoError, match=r"need .* answers of other parts"):
        run_tiny(tmp_path / "parts", tasks, vlm, sae, shard=(0, 2))
    run_tiny(tmp_path / "parts", tasks, vlm, sae, shard=(1, 2))
    run_tiny(tmp_path / "parts", tasks, vlm, sae, shard=(0, 2))
    assert len(list((tmp_path / "parts/answers").glob("*.jsonl"))) == 2
    assert answer_table(tmp_path / "parts") == answer_table(tmp_path / "whole")
    with pytest.raises(BadParameter, match="shard must be i of n"):
        run_tiny(tmp_path / "parts", tasks, vlm, sae, shard=(2, 2))


SCRIPT = """
import sys, torch
from pathlib import Path
torch.set_num_threads(1)
from tests.support.tiny_run import make_sae, run_tiny
from torino.vlm import load_vlm
from torino.evaluation.tasks import open_task
run_tiny(Path(sys.argv[3]), [open_task(sys.argv[2])], load_vlm(sys.argv[1]), make_sae(), model_name="tiny")
"""


def test_a_run_killed_at_any_moment_resumes(tmp_path: Path, checkpoint: Path, vlm: VLM, sae: SAE) -> None:
    data = write_task_file(tmp_path / "small.tsv", images=9)
    run_tiny(tmp_path / "whole", [open_task(data)], vlm, sae, model_name="tiny")
    wanted = answer_table(tmp_path / "whole")
    dice = random.Random(5)
    answers = tmp_path / "run/answers/1of1.jsonl"
    command = [sys.executable, "-c", SCRIPT, str(checkpoint), str(data), str(tmp_path / "run")]
    root = Path(__file__).parents[2]
    killed = 0
    for _ in range(8):
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL, cwd=root)
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
        with answers.open("ab") as file:  # as if the machine had died within a line
            file.write(b'{"task": "small", "ind')
    assert killed >= 1
    rows = [json.loads(line) for line in answers.read_text(encoding="utf-8").splitlines()]
    keys = [(row["task"], row["setting"], row["index"]) for row in rows]
    assert len(keys) == len(set(keys))  # no sample twice
    assert answer_table(tmp_path / "run") == wanted


def test_failures_are_recorded_and_skipped(tmp_path: Path, vlm: VLM, sae: SAE) -> None:
    path = write_task_file(tmp_path / "small.tsv", images=3, questions=1)
    lines = path.read_text(encoding="utf-8").splitlines()
    index, image, question, answer = lines[2].split("\t")
    broken = base64.b64encode(base64.b64decode(image)[:60]).decode()  # half an image
    lines[2] = "\t".join([index, broken, question, answer])
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    tasks = [open_task(path)]
    run = run_tiny(tmp_path / "run", tasks, vlm, sae, plan=RANDOM)
    failed = [row for row in run.rows() if "error" in row]
    assert {row["index"] for row in failed} == {"1"}
    assert {row["setting"] for row in failed} == {"full", "random@5#0"}
    score = run.scores()["small"]["full"]
    assert (score.counts["answered"], score.counts["failed"]) == (2, 1)
    assert list(read_records((tmp_path / "run/problems").glob("*.jsonl")))
    with pytest.raises(BadFile):
        run_tiny(tmp_path / "stop", tasks, vlm, sae, plan=replace(RANDOM, seeds=3), on_error="stop")


def test_a_question_that_cannot_be_asked_is_recorded(tmp_path: Path, vlm: VLM, sae: SAE) -> None:
    path = write_task_file(tmp_path / "small.tsv", images=2)
    path.write_text(path.read_text(encoding="utf-8").replace("how many is", "<image> how many is", 1), encoding="utf-8")
    run = run_tiny(tmp_path / "run", [open_task(path)], vlm, sae, plan=RANDOM)
    assert {(row["index"], row["setting"]) for row in run.rows() if "error" in row} == {
        ("1", "full"),
        ("1", "random@5#0"),
    }
    assert len(list(run.rows())) == 2 * 4


def test_a_model_that_fails_on_one_sample(tmp_path: Path, vlm: VLM, sae: SAE, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = type(vlm.model).generate
    calls = {"n": 0}

    def sometimes(self: Any, *arguments: Any, **given: Any) -> Any:
        calls["n"] += 1
        if calls["n"] in (2, 3):  # the batch, and the first of its answers alone
            raise RuntimeError("no luck")
        return stock(self, *arguments, **given)

    monkeypatch.setattr(type(vlm.model), "generate", sometimes)
    plan = RunPlan(["random", "divprune"], dynamic=[], fixed=[5], seeds=1)
    tasks = [open_tiny_task(tmp_path, images=2)]
    run = run_tiny(tmp_path / "run", tasks, vlm, sae, plan=plan)
    failed = [row for row in run.rows() if "error" in row]
    assert len(failed) == 1
    assert failed[0]["error"] == "RuntimeError: no luck"
    assert len(list(run.rows())) == 3 * 4
    file = tmp_path / "run/answers/1of1.jsonl"
    size = file.stat().st_size
    run_tiny(tmp_path / "run", tasks, vlm, sae, plan=plan)
    assert file.stat().st_size == size  # a recorded failure is not asked again
    retried = run_tiny(tmp_path / "run", tasks, vlm, sae, plan=plan, retry=True)
    assert len(file.read_text(encoding="utf-8").splitlines()) == 3 * 4 + 1
    new = run_tiny(tmp_path / "new", tasks, vlm, sae, plan=plan)
    assert answer_table(retried.folder) == answer_table(new.folder)


def test_a_start_that_was_cut_short_is_not_another_run(tmp_path: Path, vlm: VLM, sae: SAE) -> None:
    tasks = [open_tiny_task(tmp_path, images=1)]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".run.json.k2x.json").write_text("{", encoding="utf-8")  # as kill -9 or another part leaves it
    run_tiny(tmp_path / "run", tasks, vlm, sae, plan=RANDOM)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    with pytest.raises(BadParameter, match="contains other files"):
        run_tiny(tmp_path / "mine", tasks, vlm, sae, plan=RANDOM)


def test_a_method_that_cannot_be_evaluated_starts_no_run(tmp_path: Path, vlm: VLM, sae: SAE) -> None:
    for plan, expected in (
        (replace(RANDOM, methods=["cdpruner"]), "a CLIP text tower must read"),
        (replace(RANDOM, specs=["torino-x(budget=5, pooled=True)"]), "plans each image alone"),
    ):
        with pytest.raises(BadParameter, match=expected):
            run_tiny(tmp_path / "run", [open_tiny_task(tmp_path, images=1)], vlm, sae, plan=plan)
    assert not (tmp_path / "run").exists()


def test_two_tasks_of_one_name_are_refused(tmp_path: Path, vlm: VLM, sae: SAE) -> None:
    with pytest.raises(BadParameter, match="Two tasks are called small"):
        run_tiny(tmp_path / "run", [open_tiny_task(tmp_path, images=1)] * 2, vlm, sae)


def test_a_run_is_read_from_another_folder(tmp_path: Path, vlm: VLM, sae: SAE, monkeypatch: pytest.MonkeyPatch) -> None:
    write_task_file(tmp_path / "small.tsv", images=1)
    monkeypatch.chdir(tmp_path)
    run_tiny(tmp_path / "run", [open_task("small.tsv")], vlm, sae, plan=RANDOM)
    monkeypatch.chdir("/")
    assert open_run(tmp_path / "run").scores()["small"]["full"].counts["answered"] == 2


def test_a_run_takes_further_methods(tmp_path: Path, vlm: VLM, sae: SAE) -> None:
    tasks = [open_tiny_task(tmp_path, images=2)]
    few = replace(PLAN, methods=["torino-m", "random"])
    run_tiny(tmp_path / "grown", tasks, vlm, sae, plan=few)
    before = {(row["setting"], row["index"]): row for row in open_run(tmp_path / "grown").rows()}
    run_tiny(tmp_path / "grown", tasks, vlm, sae)
    run_tiny(tmp_path / "whole", tasks, vlm, sae)
    assert answer_table(tmp_path / "grown") == answer_table(tmp_path / "whole")
    after = {(row["setting"], row["index"]): row for row in open_run(tmp_path / "grown").rows()}
    assert before.items() <= after.items()
    assert len(open_run(tmp_path / "grown").metadata["added"]) == 1
    run_tiny(tmp_path / "grown", tasks, vlm, sae, plan=few)  # fewer again: nothing is lost
    assert answer_table(tmp_path / "grown") == answer_table(tmp_path / "whole")


def test_the_prompt_style_is_that_of_the_model(tmp_path: Path, vlm: VLM, sae: SAE) -> None:
    package = ModelPackage(folder=lambda: tmp_path, prompts="plain")
    session = VLM(vlm.model, vlm.processor, package=package)
    asked = list[str]()
    inputs = session.inputs
    session.inputs = lambda images, question: asked.append(question) or inputs(images, question)  # type: ignore[method-assign]
    tasks = [open_tiny_task(tmp_path, images=1)]
    run = run_tiny(tmp_path / "run", tasks, session, sae, plan=RANDOM)
    assert set(asked) == {"what is this ?", "how many is this ?"}
    (entry,) = run.metadata["tasks"]
    assert (entry["prompts"], entry["prompts_from"], entry["prompt"]) == ("plain", "model", "question")
    assert list(run.open_tasks()["small"])
    for other in (None, replace(package, prompts="llava"), replace(package, prompts="standard")):
        session = VLM(vlm.model, vlm.processor, package=other)
        with pytest.raises(
            BadParameter, match=r"asked small with the prompts 'plain' \('question'\), and now they are"
        ):
            run_tiny(tmp_path / "run", tasks, session, sae, plan=RANDOM)
    given = [open_task(tmp_path / "small.tsv", prompts="plain")]
    run_tiny(tmp_path / "run", given, vlm, sae, plan=RANDOM)


def changed(vlm: VLM, **options: Any) -> VLM:
    """A session with the same name and shapes, but one other weight."""
    model = copy.deepcopy(vlm.model)
    with torch.no_grad():
        next(model.parameters()).view(-1)[5] += 1
    return VLM(model, vlm.processor, **options)


def test_other_content_of_the_same_name_is_another_run(tmp_path: Path, vlm: VLM, sae: SAE) -> None:
    tasks = [open_tiny_task(tmp_path, images=2)]
    run_tiny(tmp_path / "run", tasks, vlm, sae, plan=RANDOM)
    before = read_folder(tmp_path / "run")
    other_sae = copy.deepcopy(sae)
    other_sae.W_enc[3, 4] += 1
    half = VLM(copy.deepcopy(vlm.model).bfloat16(), vlm.processor)
    processor = copy.deepcopy(vlm.processor)
    processor.image_processor.image_mean = [0.1, 0.2, 0.3]
    model = re.escape(repr(open_run(tmp_path / "run").metadata["model"]))
    use = "Use the same content to resume it, or another folder for another run"
    for other, encoder, message in (
        (vlm, other_sae, rf"another SAE called 's': its content was \w+ and is now \w+\. {use}"),
        (changed(vlm), sae, rf"other weights of the model {model}: its content was \w+ and is now \w+\. {use}"),
        (half, sae, f"the model {model} in another precision: its content was float32 and is now bfloat16"),
        (VLM(vlm.model, processor), sae, f"another image processor, vocabulary or chat template of the model {model}"),
    ):
        for shard in ((0, 1), (1, 2)):
            with pytest.raises(BadParameter, match=message):
                run_tiny(tmp_path / "run", tasks, other, encoder, plan=RANDOM, shard=shard)
    assert read_folder(tmp_path / "run") == before
    run_tiny(tmp_path / "run", tasks, VLM(copy.deepcopy(vlm.model), vlm.processor), copy.deepcopy(sae), plan=RANDOM)


def test_another_clip_is_another_run(tmp_path: Path, vlm: VLM, sae: SAE) -> None:
    from tests.support import tiny

    def session(seed: int) -> VLM:
        return VLM(vlm.model, vlm.processor, text_query=ClipText(*tiny.clip(vlm.model.model.vision_tower, seed=seed)))

    tasks = [open_tiny_task(tmp_path, images=1)]
    run_tiny(tmp_path / "run", tasks, vlm, sae, plan=RANDOM)
    more = replace(RANDOM, methods=["random", "cdpruner"])
    run_tiny(tmp_path / "run", tasks, session(0), sae, plan=more)  # added later
    with pytest.raises(BadParameter, match=r"another CLIP that reads the questions \(--clip\)"):
        run_tiny(tmp_path / "run", tasks, session(1), sae, plan=more)
    run_tiny(tmp_path / "run", tasks, vlm, sae, plan=RANDOM)  # no method reads the question


def test_replaced_image_files_are_another_run(tmp_path: Path, vlm: VLM, sae: SAE) -> None:
    for number in range(2):
        Image.new("RGB", (8, 8), (number, 0, 0)).save(tmp_path / f"{number}.bmp")
    rows = [{"image": f"{number}.bmp", "question": "what is this ?", "answer": "word1"} for number in range(2)]
    (tmp_path / "task.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run_tiny(tmp_path / "run", [open_task(tmp_path / "task.jsonl")], vlm, sae, plan=RANDOM)
    run_tiny(tmp_path / "run", [open_task(tmp_path / "task.jsonl")], vlm, sae, plan=RANDOM)
    Image.new("RGB", (8, 8), (9, 9, 9)).save(tmp_path / "1.bmp")  # of the same size
    with pytest.raises(BadParameter, match="started with other images of task: its content was"):
        run_tiny(tmp_path / "run", [open_task(tmp_path / "task.jsonl")], vlm, sae, plan=RANDOM)


def test_a_run_of_an_earlier_version_is_resumed(tmp_path: Path, vlm: VLM, sae: SAE) -> None:
    """It has no hashes; they are recorded when it is resumed."""
    tasks = [open_tiny_task(tmp_path, images=1)]
    run_tiny(tmp_path / "run", tasks, vlm, sae, plan=RANDOM)
    file = tmp_path / "run" / "run.json"
    metadata = json.loads(file.read_text(encoding="utf-8"))
    for name in ("checksum", "dtype", "weights", "processor", "clip"):
        del metadata[name]
    del metadata["saes"]["s"]["content"], metadata["tasks"][0]["images"]
    file.write_text(json.dumps(metadata), encoding="utf-8")
    run_tiny(tmp_path / "run", tasks, vlm, sae, plan=RANDOM)
    with pytest.raises(BadParameter, match="other weights of the model"):
        run_tiny(tmp_path / "run", tasks, changed(vlm), sae, plan=RANDOM)


def test_parts_that_start_together_agree(tmp_path: Path, vlm: VLM, sae: SAE) -> None:
    """The second process waits for the first to write ``run.json``, and compares."""
    facts = describe_run(vlm, "tiny", [], {"s": sae}, [], None) | {"batch": 1, "batching": 1, "limit": None}
    facts |= {"matched": True, "arguments": {}}
    others = facts | {"weights": "0" * 32}
    started = Event()

    def slow(path: Path, value: object, *, sealed: bool = False) -> Path:
        started.set()
        time.sleep(0.3)
        return write_json(path, value, sealed=sealed)

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(1) as pool:
        patch.setattr(run_file, "write_json", slow)
        first = pool.submit(open_run_file, tmp_path / "run", facts)
        started.wait(10)
        with pytest.raises(BadParameter, match="other weights of the model 'tiny'"):
            open_run_file(tmp_path / "run", others)
        first.result()


def test_other_options_are_another_run(tmp_path: Path, vlm: VLM, sae: SAE) -> None:
    tasks = [open_tiny_task(tmp_path, images=1)]
    run_tiny(tmp_path / "run", tasks, vlm, sae, plan=RANDOM)
    for option, old, new in (
        ("padding", "crop", "square"),
        ("positions", "auto", "original"),
        ("attention", "auto", "proportional"),
    ):
        session = VLM(vlm.model, vlm.processor, **{option: new})
        with pytest.raises(BadParameter, match=f"started with {option} '{old}', and now it is '{new}'"):
            run_tiny(tmp_path / "run", tasks, session, sae, plan=RANDOM)
    with pytest.raises(BadParameter, match=r"own is divprune\(budget=5\), and now it would be divprune\(budget=6\)"):
        new_settings(
            tmp_path, [{"id": "own", "spec": "divprune(budget=5)"}], [{"id": "own", "spec": "divprune(budget=6)"}]
        )
    with pytest.raises(BadParameter, match="other tasks or other data"):
        run_tiny(tmp_path / "run", [open_tiny_task(tmp_path, "other", images=1)], vlm, sae, plan=RANDOM)
    write_task_file(tmp_path / "small.tsv", images=2)
    with pytest.raises(BadFile, match="is not the file of this run"):
        open_run(tmp_path / "run").scores()
    with pytest.raises(BadFile, match="is not a run"):
        open_run(tmp_path)
