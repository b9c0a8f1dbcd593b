"""Reports: made of result files, with planted answers whose scores are known."""

from __future__ import annotations

import base64
import csv
import io
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from torino import BadFile, BadParameter
from torino.evaluation import BENCHMARKS
from torino.evaluation.protocol import Setting, matched_settings, own_settings
from torino.evaluation.reporting.report import write_report
from torino.evaluation.reporting.summary import counts_only, display, document_of, known_document, measure
from torino.evaluation.reporting.tables import choose_tables, latex, layout, markdown, rows_of
from torino.evaluation.results import open_run
from torino.evaluation.runner import RunPlan
from torino.evaluation.tasks import Task, open_task

QUALITY = {"full": 0.95, "torino-m": 0.92, "torino-p": 0.9, "visionzip": 0.86, "prunesid": 0.87, "random": 0.72}
METHODS = ["torino-p", "torino-m", "random", "visionzip", "prunesid"]
DRAWS = 200


def pixel(number: int) -> str:
    file = io.BytesIO()
    Image.new("RGB", (2, 2), (number % 256, number // 256, 7)).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def write_task(folder: Path, name: str, questions: int) -> Task:
    """A file in VLMEvalKit's layout whose right answers are Yes, A or word."""
    path = folder / f"{BENCHMARKS[name].files[0]}.tsv"
    options = ["A", "B"] if name in ("MMBench_EN", "MMBench_CN", "ScienceQA") else []
    said = name in ("MME", "POPE")
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, delimiter="\t")
        category = ["category"] if said else []
        writer.writerow(["index", "image", "question", "answer", *options, *category])
        for number in range(questions):
            answer = "A" if options else "Yes" if said and number % 2 else "No" if said else "word"
            kind = [["color", "count"][number % 4 // 2]] if name == "MME" else ["random"] if said else []
            picture = number // 2 if said else number
            writer.writerow(
                [number, pixel(picture), "what is this ?", answer, *(["cat", "dog"] if options else []), *kind]
            )
    return open_task(path)


def planned(saes: list[str]) -> tuple[list[Setting], list[Setting]]:
    plan = RunPlan(METHODS, dynamic=[(3, 3), (2, 2), (1, 1)], fixed=[192, 64], seeds=3)
    first = plan.first(saes)
    references = {one.tier: one for one in first if one.reference}
    budgets = {"3,3": 217, "2,2": 129, "1,1": 47}
    return first, matched_settings(METHODS, budgets, references, saes, 3)


def kept_tokens(setting: Setting, easy: float, rng: np.random.Generator) -> int:
    if setting.method == "full":
        return 576
    if setting.budget is not None:
        return setting.budget
    mean = {"3,3": 217, "2,2": 129, "1,1": 47}[setting.tier]
    return int(np.clip(mean * easy * rng.lognormal(0, 0.25), 4, 570))


def chance(setting: Setting, tokens: int) -> float:
    lost = 0.0 if setting.method == "full" else (1 - QUALITY[setting.method]) * (576 / tokens) ** 0.45 / 1.6
    return max(0.3, QUALITY["full"] - lost)


def synthetic(
    folder: Path,
    *,
    tasks: tuple[str, ...] = ("GQA", "POPE"),
    questions: int = 60,
    saes: tuple[str, ...] = ("x64",),
    upto: float = 1.0,
    model: str = "llava-hf/llava-1.5-7b-hf",
) -> Path:
    """A run folder with random answers: each is right with a chance that its method and tokens decide."""
    data = folder.parent / f"{folder.name}-data"
    data.mkdir(parents=True)
    opened = [write_task(data, name, questions) for name in tasks]
    first, second = planned(list(saes))
    facts: dict[str, Any] = {
        "format": "torino-run/1",
        "torino": "0.1.0",
        "created": "2025-01-01T00:00:00+00:00",
        "model": model,
        "family": "llava",
        "padding": "crop",
        "positions": "compact",
        "batch": 8,
        "limit": None,
        "versions": {"python": "3.11", "torch": "2.13.0", "transformers": "5.22.2"},
        "hardware": {"machine": "x86_64", "cores": 2, "gpu": None},
        "saes": {label: {"latents": 1024 * int(label[1:]), "kind": "matryoshka-batch-topk"} for label in saes},
        "tasks": [
            task.facts() | {"kind": task.kind, "path": str(task.source), "max_new_tokens": 32} for task in opened
        ],
        "settings": [one.facts() for one in first],
        "arguments": {},
    }
    (folder / "answers").mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps(facts))
    (folder / "settings.json").write_text(json.dumps({"settings": [one.facts() for one in second]}))
    rng = np.random.default_rng(5)
    with (folder / "answers" / "1of1.jsonl").open("w") as file:
        for place, task in enumerate(opened):
            easy = 0.85 + 0.3 * place / max(len(opened) - 1, 1)
            for setting in [*first, *second]:
                done = len(task.samples) if setting in first else round(upto * len(task.samples))
                for sample in task.samples[:done]:
                    tokens = kept_tokens(setting, easy, rng)
                    right = rng.random() < chance(setting, tokens)
                    wrong = {"yes": "No", "no": "Yes", "a": "B", "b": "A"}.get(sample.answers[0].lower(), "other")
                    row = {"task": task.name, "index": sample.index, "setting": setting.id, "image": sample.image.key}
                    row |= {"prediction": sample.answers[0] if right else wrong, "tokens": tokens, "before": 576}
                    row["seconds"] = {"tower": 0.1, "plan": 0.004, "projector": 0.01, "answer": 0.3, "batch": 8}
                    file.write(json.dumps(row) + "\n")
    return folder


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthetic(tmp_path_factory.mktemp("report") / "llava")


@pytest.fixture(scope="module")
def document(finished: Path) -> dict[str, Any]:
    return document_of(open_run(finished), draws=DRAWS)


def row_of(document: dict[str, Any], tier: str, label: str) -> dict[str, Any]:
    return next(row for row in rows_of(document) if row["tier"] == tier and row["label"] == label)


def test_scores_are_the_tasks_own(finished: Path, document: dict[str, Any]) -> None:
    run = open_run(finished)
    scores = run.scores()
    full = {task: of["full"].value for task, of in scores.items()}
    row = row_of(document, "192", "VisionZip")
    for task in ("GQA", "POPE"):
        told = row["scores"][task]
        assert told["value"] == pytest.approx(scores[task]["visionzip@192"].value)
        assert told["low"] <= told["value"] <= told["high"]
    expected = np.mean([100 * scores[task]["visionzip@192"].value / full[task] for task in full])
    assert row["relative"]["value"] == pytest.approx(expected)
    assert document["baseline"]["relative"]["value"] == pytest.approx(100)


def test_counts_of_tokens_are_those_of_the_images(finished: Path, document: dict[str, Any]) -> None:
    counts = open_run(finished).tokens("GQA", "torino-p(2,2)[x64]")
    told = row_of(document, "2,2", "TORINO-P")["tokens_by_task"]["GQA"]
    assert told["mean"] == pytest.approx(counts.mean())
    assert (told["min"], told["max"], told["images"]) == (counts.min(), counts.max(), 60)
    low, high = np.quantile(100 * (1 - counts / 576), [0.1, 0.9])
    assert (told["removed"]["p10"], told["removed"]["p90"]) == (pytest.approx(low), pytest.approx(high))


def test_seeds_are_one_row(finished: Path, document: dict[str, Any]) -> None:
    scores = open_run(finished).scores()["GQA"]
    values = [scores[f"random@64#{seed}"].value for seed in range(3)]
    told = row_of(document, "64", "Random")["scores"]["GQA"]
    assert told["value"] == pytest.approx(np.mean(values))
    assert told["sd"] == pytest.approx(np.std(values, ddof=1))
    assert len([row for row in rows_of(document) if row["tier"] == "64" and row["method"] == "random"]) == 1


def test_tiers_stand_as_in_the_paper(document: dict[str, Any]) -> None:
    assert [tier["tier"] for tier in document["tiers"]] == ["3,3", "2,2", "1,1", "192", "64"]
    headings = [block.heading for block in layout(document).blocks]
    assert headings[0] == "Upper bound, 576 tokens (100 %)"
    assert headings[1].startswith("Retain ~217 tokens on average (↓62 %)")
    assert headings[4] == "Retain 192 tokens (↓67 %)"
    first = [row["label"] for row in document["tiers"][0]["rows"]]
    assert first == [
        "Random", "VisionZip", "PruneSID", "TORINO-P", "TORINO_FB-P", "TORINO-M", "TORINO_FB-M",
    ]  # fmt: skip


def test_headings_of_tiers_where_there_are_several_saes(document: dict[str, Any]) -> None:
    tiers = [{**document["tiers"][1], "tier": f"2,2 [{sae}]"} for sae in ("x64", "none")]
    table = layout({**document, "tiers": tiers}, choose_tables(document))
    assert [block.heading.partition(" %), ")[2] for block in table.blocks[1:]] == [
        "(k, δ) = (2, 2), SAE x64",
        "(k, δ) = (2, 2), no SAE",
    ]
    assert all(any(not line.ours for line in block.lines) for block in table.blocks)


def test_specs_of_ones_own_are_told_apart() -> None:
    made = own_settings(["torino-m(k=4, delta=2)", "torino-m(k=5, delta=1)", "prumerge(budget=64)"], ["s"])
    assert len({display(one) for one in made}) == 3


def test_best_and_second_by_the_digits_printed(document: dict[str, Any]) -> None:
    for block in layout(document).blocks[1:]:
        for column in ("GQA", "POPE", "relative"):
            cells = [line.cells[column] for line in block.lines]
            ranked = sorted({round(cell.value or 0, 2) for cell in cells}, reverse=True)
            for cell in cells:
                place = ranked.index(round(cell.value or 0, 2))
                assert cell.mark == ("best", "second", "")[min(place, 2)]
    assert all(cell.mark == "" for cell in layout(document).blocks[0].lines[0].cells.values())


def test_each_method_is_compared_with_torino_m_of_its_tier(document: dict[str, Any]) -> None:
    tier = document["tiers"][0]
    assert tier["versus"] == "TORINO-M"
    assert row_of(document, "3,3", "TORINO-M")["versus"] is None
    worse = row_of(document, "1,1", "Random")
    other = row_of(document, "1,1", "TORINO-M")
    apart = worse["versus"]
    assert apart["value"] == pytest.approx(worse["relative"]["value"] - other["relative"]["value"], abs=0.5)
    assert apart["high"] < 0
    assert apart["p"] <= 2 / DRAWS
    assert document["tiers"][3]["versus"] == "TORINO_FB-M"


def test_a_report_of_some_tasks(finished: Path, tmp_path: Path) -> None:
    run = open_run(finished)
    whole, (first, *rest) = measure(run, draws=100), run.tasks
    assert rest
    assert whole["notes"] == []
    part = measure(run.only([first]), draws=100)
    assert [column["task"] for column in part["columns"]] == [first]
    assert part["notes"] == [f"Left out, though the run has answers: {', '.join(rest)}."]
    assert part["progress"]["whole"]
    mine, all_ = row_of(part, "64", "PruneSID"), row_of(whole, "64", "PruneSID")
    assert mine["relative"]["value"] == pytest.approx(all_["relative"]["ratios"][first])
    assert mine["scores"] == {first: all_["scores"][first]}
    assert open_run(finished).tasks == run.tasks
    copy = shutil.copytree(finished, tmp_path / "run")
    words = ["report", str(copy), "--draws", "100", "--no-figures", "--tasks"]
    told = CliRunner().invoke(app(), [*words, first])
    assert told.exit_code == 0, told.output
    assert "Left out" in (copy / "report" / "report.md").read_text()
    for wrong, sentence in (("nothing", "no task 'nothing'"), ("", "at least one task")):
        assert sentence in str(CliRunner().invoke(app(), [*words, wrong]).exception)


def test_versus_takes_a_method_or_a_setting_and_refuses_others(finished: Path) -> None:
    run = open_run(finished)
    named = measure(run, draws=100, versus="visionzip")
    assert row_of(named, "64", "VisionZip")["versus"] is None
    assert row_of(named, "64", "PruneSID")["versus"] is not None
    exact = measure(run, draws=100, versus="prunesid@192")
    assert {tier["versus"] for tier in exact["tiers"]} == {"PruneSID"}
    assert row_of(exact, "64", "PruneSID")["versus"]["value"] < 0
    with pytest.raises(BadParameter, match="No setting of this run is called 'nobody'"):
        measure(run, draws=100, versus="nobody")


def test_drawing_images_keeps_the_score_and_changes_the_interval(tmp_path: Path) -> None:
    run = open_run(synthetic(tmp_path / "pope", tasks=("POPE",), questions=40))
    by_question, by_image = (measure(run, draws=300, by=by) for by in ("question", "image"))
    one, two = (row_of(told, "64", "VisionZip")["scores"]["POPE"] for told in (by_question, by_image))
    assert one["value"] == two["value"]
    assert (one["low"], one["high"]) != (two["low"], two["high"])
    with pytest.raises(BadParameter, match="question or image"):
        measure(run, by="photo")  # type: ignore[arg-type]


def test_the_baseline_of_another_run(finished: Path, tmp_path: Path, document: dict[str, Any]) -> None:
    other = tmp_path / "other"
    shutil.copytree(finished, other)
    rows = [json.loads(line) for line in (other / "answers" / "1of1.jsonl").read_text().splitlines()]
    for row in rows:
        if row["setting"] == "full" and row["task"] == "GQA":
            row["prediction"] = "word" if int(row["index"]) < 30 else "other"
    (other / "answers" / "1of1.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    told = measure(open_run(finished), draws=100, baseline_of=other)
    row, old = row_of(told, "64", "VisionZip"), row_of(document, "64", "VisionZip")
    assert row["relative"]["ratios"]["GQA"] == pytest.approx(100 * row["scores"]["GQA"]["value"] / 50)
    assert row["relative"]["ratios"]["POPE"] == pytest.approx(old["relative"]["ratios"]["POPE"])
    assert told["baseline_of"] == "other"
    stranger = synthetic(tmp_path / "stranger", tasks=("GQA", "POPE"), questions=10)
    with pytest.raises(BadParameter, match="not asked GQA of the same file"):
        measure(open_run(finished), draws=100, baseline_of=stranger)


def test_a_report_is_made_again_without_the_data(tmp_path: Path) -> None:
    folder = synthetic(tmp_path / "moved", questions=20)
    first = document_of(open_run(folder), draws=100)
    shutil.rmtree(tmp_path / "moved-data")
    again = document_of(open_run(folder), draws=100)
    assert "Made of scores.json" in again["notes"][0]
    assert {**again, "notes": []} == first
    texts = [
        (write_report(told, tmp_path / name)[1].read_text(), (tmp_path / name / "table.tex").read_text())
        for name, told in (("a", first), ("b", again))
    ]
    assert texts[0] == texts[1]
    with pytest.raises(BadFile):
        document_of(open_run(folder), tmp_path / "nowhere")
    (folder / "scores.json").unlink()
    with pytest.raises(BadFile):
        document_of(open_run(folder))
    bare = known_document(open_run(folder))
    assert not bare["scored"]
    assert bare["tiers"][0]["rows"][0]["tokens"] == 217
    with pytest.raises(BadFile, match="no answer that can be scored"):
        write_report(bare, tmp_path / "c")


def test_an_unfinished_run_is_reported_as_far_as_it_goes(tmp_path: Path) -> None:
    folder = synthetic(tmp_path / "half", upto=0.5)
    run = open_run(folder)
    told = document_of(run, draws=100)
    assert not told["progress"]["whole"]
    row = row_of(told, "3,3", "VisionZip")
    task = run.open_tasks()["GQA"]
    part = task.score(run.rows("GQA", "visionzip@3,3"), partial=True)
    assert row["scores"]["GQA"]["value"] == pytest.approx(part.value)
    assert (row["scores"]["GQA"]["questions"], row["scores"]["GQA"]["of"]) == (30, 60)
    here = {sample.index for sample in task.samples[:30]}
    same = task.score([one for one in run.rows("GQA", "full") if one["index"] in here], partial=True)
    assert row["relative"]["ratios"]["GQA"] == pytest.approx(100 * part.value / same.value)
    files = write_report(told, tmp_path / "out")
    text = files[0].read_text()
    assert "**Not finished**" in text
    assert f"{row['scores']['GQA']['value']:.2f}\\*" in text
    assert "Preliminary" in (tmp_path / "out" / "table.tex").read_text()
    marked = [line for line in layout(told).blocks[1].lines if any(cell.mark for cell in line.cells.values())]
    assert {line.label for line in marked} <= {"TORINO-P", "TORINO-M"}
    (folder / "settings.json").unlink()
    waiting = counts_only(open_run(folder))["progress"]
    assert waiting["waits_for_budgets"]
    assert not waiting["whole"]


def test_what_failed_or_could_not_be_read_is_counted(tmp_path: Path) -> None:
    folder = synthetic(tmp_path / "bad", questions=12)
    file = folder / "answers" / "1of1.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    mine = [row for row in rows if row["setting"] == "visionzip@64" and row["task"] == "POPE"]
    for row in mine[:2]:
        del row["prediction"]
        row["error"] = "RuntimeError: it broke"
    mine[2]["prediction"] = "perhaps"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    told = document_of(open_run(folder), draws=100)
    counts = row_of(told, "64", "VisionZip")["scores"]["POPE"]["counts"]
    assert (counts["failed"], counts["unparsed"]) == (2, 1)
    text = write_report(told, tmp_path / "out")[0].read_text()
    assert "| 64 | VisionZip | 22 | 2 | 1 | 0 |" in text
    assert "<td data-v='2'>2</td><td data-v='1'>1</td>" in (tmp_path / "out" / "report.html").read_text()


def test_the_papers_figures_stand_beside_and_are_labelled(document: dict[str, Any], tmp_path: Path) -> None:
    papers = choose_tables(document)
    assert [table.name for table in papers] == ["llava-1.5-7b-x64", "llava-1.5-7b-x64-fixed"]
    write_report(document, tmp_path, papers=papers)
    with (tmp_path / "table.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    theirs = [row for row in rows if row["source"] == "paper" and row["method"] == "TORINO-M"]
    assert [(row["tier"], row["tokens"], row["GQA"], row["relative"]) for row in theirs] == [
        ("3,3", "217", "60.3", "98.7"),
        ("2,2", "129", "58.6", "96.0"),
        ("1,1", "47", "54.9", "89.6"),
    ]
    assert {row["tokens"] for row in rows if row["source"] == "paper" and row["tier"] == "64"} == {"64"}
    text = (tmp_path / "report.md").read_text()
    assert "| *TORINO-M, the paper* | ~217 | *60.3* |" in text
    assert "They were not measured here" in text
    assert "were not measured here" in (tmp_path / "table.tex").read_text()
    assert not [
        row for row in csv.DictReader(io.StringIO((tmp_path / "details.csv").read_text())) if row["tier"] == "paper"
    ]
    named = choose_tables(document, "llava-1.5-13b-x64")
    assert [table.model for table in named] == ["LLaVA-1.5-13B"]


def test_latex_is_whole_and_marks_as_many_as_the_table(document: dict[str, Any], tmp_path: Path) -> None:
    write_report(document, tmp_path)
    text = (tmp_path / "table.tex").read_text()
    assert text.count("{") == text.count("}")
    assert not re.search(r"(?<!\\)[%#](?!\s*Needs)", text.replace("{!}{%", ""))
    cells = [cell for block in layout(document).blocks for line in block.lines for cell in line.cells.values()]
    assert text.count(r"\textbf{") == sum(cell.mark == "best" for cell in cells)
    assert text.count(r"\underline{") == sum(cell.mark == "second" for cell in cells)
    assert r"TORINO\textsubscript{FB}-M" in text
    rows = [line for line in text.splitlines() if line.endswith(r"\\") and "&" in line]
    assert {line.count("&") for line in rows} == {3}


def test_signs_of_latex_are_escaped(document: dict[str, Any]) -> None:
    columns = [{"task": "GQA", "label": r"a_b^c~d{e}\f<g"}, *document["columns"][1:]]
    text = latex(layout({**document, "columns": columns}), "50% & ~/llava_7b … #1", "tab:50% of_it")
    assert r"a\_b\textasciicircum{}c\textasciitilde{}d\{e\}\textbackslash{}f\textless{}g" in text
    assert r"\caption{50\% \& \textasciitilde{}/llava\_7b \dots{} \#1}" in text
    assert r"\label{tab:50-of-it}" in text
    assert r"\textit{Retain $\sim$217 tokens on average ($\downarrow$\,62 \%), (k, $\delta$) = (3, 3)}" in text
    assert re.search(r"& \d+\.\d\d \{\\scriptsize\$\\pm\$ \d\.\d\d\} &", text)
    assert text.isascii()


def test_the_page_stands_alone_and_says_what_was_run(tmp_path: Path) -> None:
    folder = synthetic(tmp_path / "page", questions=10, model="<script>alert(1)</script>")
    told = document_of(open_run(folder), draws=100)
    write_report(told, tmp_path / "out", figures={"A figure.": '<?xml version="1.0"?>\n<svg width="1"></svg>'})
    text = (tmp_path / "out" / "report.html").read_text()
    assert "<script>alert" not in text
    assert not re.search(r"(?:src|href)\s*=", text)
    assert '<figure><svg width="1"></svg>' in text
    for fact in (
        "standard",
        "crop",
        "transformers 5.22.2",
        "cores 2",
        "VLMEvalKit",
        "all 576 tokens",
        "x64 (matryoshka",
    ):
        assert fact in text, fact
    assert str(tmp_path) not in text
    assert text.count("<table class='sorted'>") == 6


def test_markdown_and_details_hold_the_same_figures(document: dict[str, Any], tmp_path: Path) -> None:
    write_report(document, tmp_path)
    rows = list(csv.DictReader(io.StringIO((tmp_path / "details.csv").read_text())))
    one = next(row for row in rows if (row["tier"], row["method"], row["task"]) == ("64", "VisionZip", "relative"))
    assert f"{float(one['value']):.2f}%" in markdown(layout(document))
    assert float(one["low"]) <= float(one["value"]) <= float(one["high"])
    assert one["p"]
    assert len(rows) == sum(len(row["scores"]) + 1 for row in rows_of(document))


def app() -> Any:
    import typer

    from torino.cli.report import plot, report

    made = typer.Typer()
    made.command()(report)
    made.command()(plot)
    return made


def test_the_command(finished: Path, tmp_path: Path) -> None:
    told = CliRunner().invoke(
        app(), ["report", str(finished), "--against", "paper", "-o", str(tmp_path), "--draws", "100", "--no-figures"]
    )
    assert told.exit_code == 0, told.output
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "details.csv", "report.html", "report.md", "table.csv", "table.tex",
    ]  # fmt: skip
    for words, said in (
        ([str(tmp_path)], "is no run"),
        ([str(finished), "--against", "people"], "--against must be paper"),
        ([str(finished), "--by", "photo"], "--by must be question or image"),
        (
            [str(finished), "--draws", "100", "--no-figures", "--against", "paper:none"],
            "No table of the paper is called",
        ),
    ):
        failed = CliRunner().invoke(app(), ["report", *words])
        assert failed.exception is not None
        assert said in str(failed.exception)
