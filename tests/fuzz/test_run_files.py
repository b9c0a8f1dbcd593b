"""Damaged files of evaluation runs: resuming, scoring, reports and figures."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.fuzzing import FuzzCase, fuzz
from tests.support.pictures import make_numbered_photo
from tests.support.synthetic_run import write_synthetic_run
from torino import Reduction
from torino.evaluation.examples import ExampleWriter, example_dir, load_examples
from torino.evaluation.records import AnswerLog
from torino.evaluation.reporting import figures
from torino.evaluation.reporting.report import write_report
from torino.evaluation.reporting.summary import (
    load_summary,
    read_scores,
    summarize,
    summarize_and_save,
    summarize_counts,
)
from torino.evaluation.reporting.tables import select_paper_tables
from torino.evaluation.results import open_run
from torino.evaluation.run_file import open_run_file
from torino.evaluation.runner import RunPlan, _Worker, mean_length

PLAN = RunPlan(["torino-p", "torino-m", "random"], dynamic=[(2, 2)], fixed=[64], seeds=2)
DRAWS = 100


def write_run(folder: Path) -> None:
    """Write a run of two tasks with few settings and answers, and its scores."""
    run = write_synthetic_run(folder / "run", questions=4)
    keep = ("full", "torino-m(2,2)[x64]", "random@64#0", "random@64#1", "visionzip@2,2")
    for name in ("run.json", "settings.json"):
        content = json.loads((run / name).read_text())
        content["settings"] = [setting for setting in content["settings"] if setting["id"] in keep]
        if name == "run.json":
            content |= {"dtype": "float16", "weights": "0123", "processor": "4567", "clip": None}
            content["saes"]["x64"]["content"] = "89ab"
            for task in content["tasks"]:
                task["images"] = "cdef"
        (run / name).write_text(json.dumps(content))
    path = run / "answers" / "1of1.jsonl"
    lines = [line for line in path.read_text().splitlines(keepends=True) if json.loads(line)["setting"] in keep]
    failed = {**json.loads(lines[0]), "error": "out of memory"}
    lines.insert(3, json.dumps({name: failed[name] for name in ("task", "index", "setting", "image", "error")}) + "\n")
    path.write_text("".join(lines))
    summarize_and_save(open_run(run), draws=DRAWS)


def use_run(top: Path) -> None:
    run = open_run(top / "run")
    run.select(run.tasks[:1])
    for task in run.tasks:
        for setting in run.settings:
            run.token_counts(task, setting)
    json.dumps(summarize_counts(run), allow_nan=False).encode()
    run.scores()
    mean_length(run, "torino-m(2,2)[x64]")
    PLAN.matched_settings(["x64"], run)
    summary = summarize(run, draws=DRAWS)
    json.dumps(summary, allow_nan=False).encode()
    write_all(summary, top / "report")


def write_all(summary: dict[str, Any], folder: Path) -> None:
    papers = select_paper_tables(summary)
    write_report(summary, folder, papers=papers)


def resume_run(top: Path) -> None:
    """Open a run again as ``torino eval`` does before it asks questions."""
    facts = json.loads((_template(write_run) / "run" / "run.json").read_text())
    facts |= {"batching": None, "matched": True, "settings": facts["settings"][:2]}
    open_run_file(top / "run", facts)
    AnswerLog(top / "run" / "answers" / "1of1.jsonl").close()
    tasks = list(open_run(_template(write_run) / "run").open_tasks().values())
    worker = _Worker(top / "run", None, tasks, {}, facts, (0, 1), "skip", False, 0, None)  # type: ignore[arg-type]
    worker.count_missing(PLAN.first_settings(["x64"]))


def use_scores(top: Path) -> None:
    """Use scores.json alone, as a report does without the data of the tasks."""
    write_all(read_scores(top / "run" / "scores.json"), top / "report")


def use_old_scores(top: Path) -> None:
    """Read scores.json because the data of the tasks is missing."""
    run = open_run(top / "run")
    for task in run.metadata["tasks"]:
        task["path"] = "gone.tsv"
    write_all(summarize_and_save(run), top / "report")
    load_summary(run)


def draw_scores(top: Path) -> None:
    summary = read_scores(top / "run" / "scores.json")
    points = figures.collect_points([summary, summary])
    for draw in (
        partial(figures.plot_distribution, summary),
        partial(figures.plot_pareto, points),
        partial(figures.plot_accuracy, points, summary.get("level", 0.95)),
    ):
        figures.to_svg(draw())


def write_saved_examples(folder: Path) -> None:
    """Write a run with saved images and reductions."""
    write_run(folder)
    run = open_run(folder / "run")
    reduction = Reduction.of([{0: 0.5, 1: 0.5}, {5: 1.0}, {11: 1.0}], (3, 4))
    for task in run.open_tasks().values():
        writer = ExampleWriter(example_dir(run.folder, task[0].image.key))
        writer.save_image(make_numbered_photo())
        for setting in run.settings:
            writer.save_reduction(setting, reduction)
    for number, path in enumerate(sorted((run.folder / "cells").rglob("*.npz"))):
        shutil.copy(path, folder / f"plan{number}.npz")


def use_saved_examples(top: Path) -> None:
    load_examples(open_run(top / "run"))


def write_examples(folder: Path) -> None:
    make_numbered_photo().save(folder / "photo.png")
    Reduction.of([{0: 0.5, 1: 0.5}, {5: 1.0}, {11: 1.0}], (3, 4)).save(folder / "plan.npz")
    shown = [{"heading": "TORINO-M", "reduction": "plan.npz", "answer": "a cat", "right": True}]
    entry = {"photo": "photo.png", "question": "what ?", "answer": "a dog", "right": False, "shown": shown}
    (folder / "examples.json").write_text(json.dumps({"format": "torino-cells/1", "examples": [entry, entry]}))


def use_examples(folder: Path) -> None:
    examples = figures.read_examples(folder / "examples.json")
    figures.to_svg(figures.plot_qualitative(examples))
    figures.to_svg(figures.plot_teaser(examples[0]))


def write_bench(folder: Path) -> None:
    spread = {"mean": 2.0, "std": 0.1, "median": 2.0}
    row = {"label": "TORINO-M", "method": "torino-m", "spec": "torino-m(k=2)", "tokens": 64.5, "module_ms": spread}
    row |= {"floor_ms": spread, "first_token_ms": spread, "answer_ms": None, "peak_mb": 12.5}
    (folder / "bench.json").write_text(json.dumps({"format": "torino-bench/1", "rows": [row, row | {"spec": "full"}]}))


def use_bench(folder: Path) -> None:
    figures.to_svg(figures.plot_latency(figures.read_bench(folder / "bench.json")))


def _template(build: Any) -> Path:
    return FuzzCase("", build, "", use_run).template


CASES = [
    FuzzCase("run", write_run, "run/run.json", use_run, cost=8),
    FuzzCase("run", write_run, "run/settings.json", use_run, cost=8),
    FuzzCase("run", write_run, "run/answers/1of1.jsonl", use_run, cost=8),
    FuzzCase("resume", write_run, "run/run.json", resume_run),
    FuzzCase("resume", write_run, "run/answers/1of1.jsonl", resume_run),
    FuzzCase("report", write_run, "run/scores.json", use_scores),
    FuzzCase("old-scores", write_run, "run/scores.json", use_old_scores, cost=4),
    FuzzCase("figures", write_run, "run/scores.json", draw_scores, cost=8),
    FuzzCase("examples", write_examples, "examples.json", use_examples, cost=8),
    FuzzCase("examples", write_examples, "plan.npz", use_examples, cost=8),
    FuzzCase("bench", write_bench, "bench.json", use_bench, cost=8),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_valid_files_are_read(case: FuzzCase) -> None:
    case.run(None)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_damaged_files_raise_only_torino_errors(case: FuzzCase) -> None:
    fuzz(case)
