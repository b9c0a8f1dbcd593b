"""Reports: made of result files, with planted answers whose scores are known."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.support.files import read_only
from tests.support.synthetic_run import make_report_app, write_synthetic_run
from torino.core.errors import BadFile, BadParameter
from torino.evaluation.protocol import fixed_settings, own_settings
from torino.evaluation.reporting.report import write_report
from torino.evaluation.reporting.scores_file import read_scores
from torino.evaluation.reporting.summary import (
    display_name,
    load_summary,
    summarize,
    summarize_and_save,
    summarize_counts,
)
from torino.evaluation.reporting.tables import build_table, iter_rows, select_paper_tables, to_latex, to_markdown
from torino.evaluation.results import open_run

DRAWS = 200


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_synthetic_run(tmp_path_factory.mktemp("report") / "llava")


@pytest.fixture(scope="module")
def summary(finished: Path) -> dict[str, Any]:
    return summarize_and_save(open_run(finished), draws=DRAWS)


def find_row(summary: dict[str, Any], tier: str, label: str) -> dict[str, Any]:
    return next(row for row in iter_rows(summary) if row["tier"] == tier and row["label"] == label)


def test_scores_equal_those_of_the_tasks(finished: Path, summary: dict[str, Any]) -> None:
    run = open_run(finished)
    scores = run.scores()
    full = {task: of["full"].value for task, of in scores.items()}
    row = find_row(summary, "192", "VisionZip")
    for task in ("GQA", "POPE"):
        result = row["scores"][task]
        assert result["value"] == pytest.approx(scores[task]["visionzip@192"].value)
        assert result["low"] <= result["value"] <= result["high"]
    expected = np.mean([100 * scores[task]["visionzip@192"].value / full[task] for task in full])
    assert row["relative"]["value"] == pytest.approx(expected)
    assert summary["baseline"]["relative"]["value"] == pytest.approx(100)


def test_token_statistics_are_over_images(finished: Path, summary: dict[str, Any]) -> None:
    counts = open_run(finished).token_counts("GQA", "torino-p(2,2)[x64]")
    result = find_row(summary, "2,2", "TORINO-P")["tokens_by_task"]["GQA"]
    assert result["mean"] == pytest.approx(counts.mean())
    assert (result["min"], result["max"], result["images"]) == (counts.min(), counts.max(), 60)
    low, high = np.quantile(100 * (1 - counts / 576), [0.1, 0.9])
    assert (result["removed"]["p10"], result["removed"]["p90"]) == (pytest.approx(low), pytest.approx(high))


def test_seeds_share_one_row(finished: Path, summary: dict[str, Any]) -> None:
    scores = open_run(finished).scores()["GQA"]
    values = [scores[f"random@64#{seed}"].value for seed in range(3)]
    result = find_row(summary, "64", "Random")["scores"]["GQA"]
    assert result["value"] == pytest.approx(np.mean(values))
    assert result["sd"] == pytest.approx(np.std(values, ddof=1))
    assert len([row for row in iter_rows(summary) if row["tier"] == "64" and row["method"] == "random"]) == 1


def test_tiers_are_ordered_as_in_the_paper(summary: dict[str, Any]) -> None:
    assert [tier["tier"] for tier in summary["tiers"]] == ["3,3", "2,2", "1,1", "192", "64"]
    headings = [tier.heading for tier in build_table(summary).tiers]
    assert headings[0] == "Upper bound, 576 tokens (100 %)"
    assert headings[1].startswith("Retain ~217 tokens on average (↓62 %)")
    assert headings[4] == "Retain 192 tokens (↓67 %)"
    first = [row["label"] for row in summary["tiers"][0]["rows"]]
    assert first == [
        "Random", "VisionZip", "PruneSID", "TORINO-P", "TORINO_FB-P", "TORINO-M", "TORINO_FB-M",
    ]  # fmt: skip


def test_tier_headings_with_several_saes(summary: dict[str, Any]) -> None:
    tiers = [{**summary["tiers"][1], "tier": f"2,2 [{sae}]"} for sae in ("x64", "none")]
    table = build_table({**summary, "tiers": tiers}, select_paper_tables(summary))
    assert [tier.heading.partition(" %), ")[2] for tier in table.tiers[1:]] == [
        "(k, δ) = (2, 2), SAE x64",
        "(k, δ) = (2, 2), no SAE",
    ]
    assert all(any(not line.measured for line in tier.rows) for tier in table.tiers)


def test_specs_have_distinct_names() -> None:
    made = own_settings(["torino-m(k=4, delta=2)", "torino-m(k=5, delta=1)", "prumerge(budget=64)"], ["s"])
    assert len({display_name(item) for item in made}) == 3


def test_best_and_second_are_marked_by_printed_digits(summary: dict[str, Any]) -> None:
    for tier in build_table(summary).tiers[1:]:
        for column in ("GQA", "POPE", "relative"):
            cells = [line.cells[column] for line in tier.rows]
            ranked = sorted({round(cell.value or 0, 2) for cell in cells}, reverse=True)
            for cell in cells:
                place = ranked.index(round(cell.value or 0, 2))
                assert cell.mark == ("best", "second", "")[min(place, 2)]
    assert all(cell.mark == "" for cell in build_table(summary).tiers[0].rows[0].cells.values())


def test_methods_are_compared_with_torino_m_of_their_tier(summary: dict[str, Any]) -> None:
    tier = summary["tiers"][0]
    assert tier["versus"] == "TORINO-M"
    assert find_row(summary, "3,3", "TORINO-M")["versus"] is None
    worse = find_row(summary, "1,1", "Random")
    other = find_row(summary, "1,1", "TORINO-M")
    apart = worse["versus"]
    assert apart["value"] == pytest.approx(worse["relative"]["value"] - other["relative"]["value"], abs=0.5)
    assert apart["high"] < 0
    assert apart["p"] <= 2 / DRAWS
    assert summary["tiers"][3]["versus"] == "TORINO_FB-M"


def test_report_of_selected_tasks(finished: Path, tmp_path: Path) -> None:
    run = open_run(finished)
    whole, (first, *rest) = summarize(run, draws=100), run.tasks
    assert rest
    assert whole["notes"] == []
    part = summarize(run.select([first]), draws=100)
    assert [column["task"] for column in part["columns"]] == [first]
    assert part["notes"] == [f"Tasks of the run that are left out here: {', '.join(rest)}."]
    assert part["progress"]["whole"]
    selected, complete = find_row(part, "64", "PruneSID"), find_row(whole, "64", "PruneSID")
    assert selected["relative"]["value"] == pytest.approx(complete["relative"]["ratios"][first])
    assert selected["scores"] == {first: complete["scores"][first]}
    assert open_run(finished).tasks == run.tasks
    copy = shutil.copytree(finished, tmp_path / "run")
    arguments = ["report", str(copy), "--draws", "100", "--no-figures", "--tasks"]
    result = CliRunner().invoke(make_report_app(), [*arguments, first])
    assert result.exit_code == 0, result.output
    assert "left out here" in (copy / "report" / "report.md").read_text()
    for wrong, sentence in (("nothing", "no task 'nothing'"), ("", "at least one task")):
        assert sentence in str(CliRunner().invoke(make_report_app(), [*arguments, wrong]).exception)


def test_versus_accepts_a_method_or_a_setting(finished: Path) -> None:
    run = open_run(finished)
    named = summarize(run, draws=100, versus="visionzip")
    assert find_row(named, "64", "VisionZip")["versus"] is None
    assert find_row(named, "64", "PruneSID")["versus"] is not None
    exact = summarize(run, draws=100, versus="prunesid@192")
    assert {tier["versus"] for tier in exact["tiers"]} == {"PruneSID"}
    assert find_row(exact, "64", "PruneSID")["versus"]["value"] < 0
    with pytest.raises(BadParameter, match="No setting of this run is called 'nobody'"):
        summarize(run, draws=100, versus="nobody")


def test_resampling_images_changes_only_the_interval(tmp_path: Path) -> None:
    run = open_run(write_synthetic_run(tmp_path / "pope", tasks=("POPE",), questions=40))
    by_question, by_image = (summarize(run, draws=300, by=by) for by in ("question", "image"))
    item, two = (find_row(result, "64", "VisionZip")["scores"]["POPE"] for result in (by_question, by_image))
    assert item["value"] == two["value"]
    assert (item["low"], item["high"]) != (two["low"], two["high"])
    with pytest.raises(BadParameter, match="question or image"):
        summarize(run, by="photo")  # type: ignore[arg-type]


def test_baseline_of_another_run(finished: Path, tmp_path: Path, summary: dict[str, Any]) -> None:
    other = tmp_path / "other"
    shutil.copytree(finished, other)
    rows = [json.loads(line) for line in (other / "answers" / "1of1.jsonl").read_text().splitlines()]
    for row in rows:
        if row["setting"] == "full" and row["task"] == "GQA":
            row["prediction"] = "word" if int(row["index"]) < 30 else "other"
    (other / "answers" / "1of1.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = summarize(open_run(finished), draws=100, baseline_of=other)
    row, old = find_row(result, "64", "VisionZip"), find_row(summary, "64", "VisionZip")
    assert row["relative"]["ratios"]["GQA"] == pytest.approx(100 * row["scores"]["GQA"]["value"] / 50)
    assert row["relative"]["ratios"]["POPE"] == pytest.approx(old["relative"]["ratios"]["POPE"])
    assert result["baseline_of"] == "other"
    stranger = write_synthetic_run(tmp_path / "stranger", tasks=("GQA", "POPE"), questions=10)
    with pytest.raises(BadParameter, match="no answers to GQA with the same file"):
        summarize(open_run(finished), draws=100, baseline_of=stranger)


def test_report_without_the_data(tmp_path: Path) -> None:
    folder = write_synthetic_run(tmp_path / "moved", questions=20)
    first = summarize_and_save(open_run(folder), draws=100)
    shutil.rmtree(tmp_path / "moved-data")
    again = summarize_and_save(open_run(folder), draws=100)
    assert "Read from scores.json" in again["notes"][0]
    assert {**again, "notes": []} == first
    texts = [
        (write_report(result, tmp_path / name)[1].read_text(), (tmp_path / name / "table.tex").read_text())
        for name, result in (("a", first), ("b", again))
    ]
    assert texts[0] == texts[1]
    with pytest.raises(BadFile):
        summarize_and_save(open_run(folder), tmp_path / "nowhere")
    (folder / "scores.json").unlink()
    with pytest.raises(BadFile):
        summarize_and_save(open_run(folder))
    bare = load_summary(open_run(folder))
    assert not bare["scored"]
    assert bare["tiers"][0]["rows"][0]["tokens"] == 217
    with pytest.raises(BadFile, match="no answers that can be scored"):
        write_report(bare, tmp_path / "c")


def test_report_of_an_unfinished_run(tmp_path: Path) -> None:
    folder = write_synthetic_run(tmp_path / "half", answered=0.5)
    run = open_run(folder)
    result = summarize_and_save(run, draws=100)
    assert not result["progress"]["whole"]
    row = find_row(result, "3,3", "VisionZip")
    task = run.open_tasks()["GQA"]
    part = task.score(run.rows("GQA", "visionzip@3,3"), partial=True)
    assert row["scores"]["GQA"]["value"] == pytest.approx(part.value)
    assert (row["scores"]["GQA"]["questions"], row["scores"]["GQA"]["of"]) == (30, 60)
    here = {sample.index for sample in task.samples[:30]}
    same = task.score([item for item in run.rows("GQA", "full") if item["index"] in here], partial=True)
    assert row["relative"]["ratios"]["GQA"] == pytest.approx(100 * part.value / same.value)
    files = write_report(result, tmp_path / "out")
    text = files[0].read_text()
    assert "**Not finished**" in text
    assert f"{row['scores']['GQA']['value']:.2f}\\*" in text
    assert "Preliminary" in (tmp_path / "out" / "table.tex").read_text()
    marked = [line for line in build_table(result).tiers[1].rows if any(cell.mark for cell in line.cells.values())]
    assert {line.label for line in marked} <= {"TORINO-P", "TORINO-M"}
    (folder / "settings.json").unlink()
    waiting = summarize_counts(open_run(folder))["progress"]
    assert waiting["waits_for_budgets"]
    assert not waiting["whole"]


def test_failed_and_unparsed_answers_are_counted(tmp_path: Path) -> None:
    folder = write_synthetic_run(tmp_path / "bad", questions=12)
    file = folder / "answers" / "1of1.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    selected = [row for row in rows if row["setting"] == "visionzip@64" and row["task"] == "POPE"]
    for row in selected[:2]:
        del row["prediction"]
        row["error"] = "RuntimeError: it broke"
    selected[2]["prediction"] = "perhaps"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = summarize_and_save(open_run(folder), draws=100)
    counts = find_row(result, "64", "VisionZip")["scores"]["POPE"]["counts"]
    assert (counts["failed"], counts["unparsed"]) == (2, 1)
    text = write_report(result, tmp_path / "out")[0].read_text()
    assert "| 64 | VisionZip | 22 | 2 | 1 | 0 |" in text
    assert (
        '<td data-value="2"><span class="figure">2</span></td><td data-value="1"><span class="figure">1</span></td>'
        in (tmp_path / "out" / "report.html").read_text()
    )


def test_paper_rows_are_added_and_labeled(summary: dict[str, Any], tmp_path: Path) -> None:
    papers = select_paper_tables(summary)
    assert [table.name for table in papers] == ["llava-1.5-7b-x64", "llava-1.5-7b-x64-fixed"]
    write_report(summary, tmp_path, papers=papers)
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
    named = select_paper_tables(summary, "llava-1.5-13b-x64")
    assert [table.model for table in named] == ["LLaVA-1.5-13B"]


def test_latex_is_balanced_and_marks_the_best(summary: dict[str, Any], tmp_path: Path) -> None:
    write_report(summary, tmp_path)
    text = (tmp_path / "table.tex").read_text()
    assert text.count("{") == text.count("}")
    assert not re.search(r"(?<!\\)[%#](?!\s*Needs)", text.replace("{!}{%", ""))
    cells = [cell for tier in build_table(summary).tiers for line in tier.rows for cell in line.cells.values()]
    assert text.count(r"\textbf{") == sum(cell.mark == "best" for cell in cells)
    assert text.count(r"\underline{") == sum(cell.mark == "second" for cell in cells)
    assert r"TORINO\textsubscript{FB}-M" in text
    rows = [line for line in text.splitlines() if line.endswith(r"\\") and "&" in line]
    assert {line.count("&") for line in rows} == {3}


def test_latex_escapes(summary: dict[str, Any]) -> None:
    columns = [{"task": "GQA", "label": r"a_b^c~d{e}\f<g"}, *summary["columns"][1:]]
    text = to_latex(build_table({**summary, "columns": columns}), "50% & ~/llava_7b … #1", "tab:50% of_it")
    assert r"a\_b\textasciicircum{}c\textasciitilde{}d\{e\}\textbackslash{}f\textless{}g" in text
    assert r"\caption{50\% \& \textasciitilde{}/llava\_7b \dots{} \#1}" in text
    assert r"\label{tab:50-of-it}" in text
    assert r"\textit{Retain $\sim$217 tokens on average ($\downarrow$\,62 \%), (k, $\delta$) = (3, 3)}" in text
    assert re.search(r"& \d+\.\d\d \{\\scriptsize\$\\pm\$ \d\.\d\d\} &", text)
    assert text.isascii()


def test_page_is_self_contained_and_shows_the_configuration(tmp_path: Path) -> None:
    folder = write_synthetic_run(tmp_path / "page", questions=10, model="<script>alert(1)</script>")
    result = summarize_and_save(open_run(folder), draws=100)
    write_report(result, tmp_path / "out", figures={"A figure.": '<?xml version="1.0"?>\n<svg width="1"></svg>'})
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
    assert text.count('<table class="sortable">') == 6


def test_warnings_come_first(tmp_path: Path, summary: dict[str, Any]) -> None:
    folder = write_synthetic_run(tmp_path / "constant", questions=10)
    file = folder / "answers" / "1of1.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for row in rows:
        if row["setting"] == "full":
            row["prediction"] = "<b>B</b>" if row["task"] == "POPE" else "none"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = CliRunner().invoke(make_report_app(), ["report", str(folder), "--draws", "100", "--no-figures"])
    assert result.exit_code == 0, result.output
    text = " ".join(result.stderr.split())
    assert "warning: GQA: with all tokens the model scores 0.00: no answer is right." in text
    assert "warning: POPE: with all tokens the model gives one answer to all 10 questions, '<b>B</b>'" in text
    found = json.loads((folder / "scores.json").read_text())["warnings"]
    assert [(item["task"], item["kind"], item["answer"]) for item in found] == [
        ("GQA", "chance", None),
        ("POPE", "constant", "<b>B</b>"),
    ]
    lines = [line for line in (folder / "report" / "report.md").read_text().splitlines() if line]
    assert lines[1].startswith("> **Warning:** GQA: with all tokens the model scores 0.00")
    assert lines[2].startswith("> **Warning:** POPE: with all tokens the model gives one answer to all 10 questions")
    assert "'&lt;b>B&lt;/b>'" in lines[2]
    page = (folder / "report" / "report.html").read_text()
    first = page.index('role="alert"><strong>Warning:</strong> GQA: with all tokens')
    assert first < page.index('<p class="note">') < page.index("<h2>Scores</h2>")
    assert "<b>B</b>" not in page
    assert summary["warnings"] == [], "an ordinary run has none"
    old = {name: value for name, value in summary.items() if name != "warnings"}
    assert write_report(old, tmp_path / "old"), "summaries of earlier versions have none"


def test_prompts_are_in_the_configuration(tmp_path: Path) -> None:
    folder = write_synthetic_run(tmp_path / "run", questions=5)
    metadata = json.loads((folder / "run.json").read_text())
    metadata["tasks"][0] |= {"prompts": "plain", "prompts_from": "model"}
    (folder / "run.json").write_text(json.dumps(metadata))
    write_report(summarize(open_run(folder), draws=100), tmp_path / "out")
    text = (tmp_path / "out" / "report.md").read_text()
    assert "- Prompts: plain (of the model): GQA; standard (the default): POPE" in text


def test_a_tier_with_more_tokens_than_all(summary: dict[str, Any]) -> None:
    changed = json.loads(json.dumps(summary))
    changed["tiers"][-1] |= {"tokens": 600.0, "removed": -4.2}
    assert "(↑4 %)" in to_markdown(build_table(changed))
    assert "↓-" not in to_markdown(build_table(changed))


def test_markdown_and_details_agree(summary: dict[str, Any], tmp_path: Path) -> None:
    write_report(summary, tmp_path)
    rows = list(csv.DictReader(io.StringIO((tmp_path / "details.csv").read_text())))
    item = next(row for row in rows if (row["tier"], row["method"], row["task"]) == ("64", "VisionZip", "relative"))
    assert f"{float(item['value']):.2f}%" in to_markdown(build_table(summary))
    assert float(item["low"]) <= float(item["value"]) <= float(item["high"])
    assert item["p"]
    assert len(rows) == sum(len(row["scores"]) + 1 for row in iter_rows(summary))


def test_report_command(finished: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(
        make_report_app(),
        ["report", str(finished), "--against", "paper", "-o", str(tmp_path), "--draws", "100", "--no-figures"],
    )
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "details.csv", "report.html", "report.md", "scores.json", "table.csv", "table.tex",
    ]  # fmt: skip
    for arguments, message in (
        ([str(tmp_path)], "is not a run"),
        ([str(finished), "--against", "people"], "--against must be paper"),
        (
            [str(finished), "--draws", "100", "--no-figures", "--against", "paper:none"],
            "No table of the paper is called",
        ),
    ):
        failed = CliRunner().invoke(make_report_app(), ["report", *arguments])
        assert failed.exception is not None
        assert message in str(failed.exception)
    failed = CliRunner().invoke(make_report_app(), ["report", str(finished), "--by", "photo"])
    assert failed.exit_code == 2
    assert "question" in failed.output


def test_report_and_plot_of_a_read_only_run(tmp_path: Path) -> None:
    folder = write_synthetic_run(tmp_path / "run", questions=12)
    report = ["report", str(folder), "--draws", "100", "--no-figures"]
    with read_only(folder):
        refused = CliRunner().invoke(make_report_app(), report)
        assert "it is read-only. Give another folder: -o FOLDER" in str(refused.exception)
        result = CliRunner().invoke(make_report_app(), [*report, "-o", str(tmp_path / "out")])
        assert result.exit_code == 0, result.exception
        drawn = ["plot", str(folder), "-o", str(tmp_path / "figures"), "--kind", "accuracy", "--format", "png"]
        result = CliRunner().invoke(make_report_app(), drawn)
        assert result.exit_code == 0, result.exception
        shutil.rmtree(tmp_path / "run-data")
        again = CliRunner().invoke(make_report_app(), [*report, "-o", str(tmp_path / "out")])
        assert again.exit_code == 0, again.exception
    assert "Read from scores.json" in (tmp_path / "out" / "report.md").read_text()
    other = write_synthetic_run(tmp_path / "other", questions=12, tasks=("GQA",))
    shutil.rmtree(tmp_path / "other-data")
    failed = CliRunner().invoke(make_report_app(), ["report", str(other), "-o", str(tmp_path / "out")])
    assert isinstance(failed.exception, BadFile), "scores.json in the folder belongs to another run"


def test_scores_of_some_tasks_do_not_stand_for_the_run(tmp_path: Path) -> None:
    run = open_run(write_synthetic_run(tmp_path / "run", questions=12))
    summarize_and_save(run.select(["GQA"]), draws=100)
    assert [column["task"] for column in load_summary(run)["columns"]] == ["GQA", "POPE"]


def test_a_baseline_of_other_weights_is_noted(finished: Path, tmp_path: Path) -> None:
    folders = [shutil.copytree(finished, tmp_path / name) for name in ("one", "two")]
    for folder in folders:
        metadata = json.loads((folder / "run.json").read_text()) | {"weights": folder.name}
        (folder / "run.json").write_text(json.dumps(metadata))
    note = "The baseline was answered with other model weights than this run."
    assert note in summarize(open_run(folders[0]), draws=100, baseline_of=folders[1])["notes"]
    assert note not in summarize(open_run(folders[0]), draws=100, baseline_of=folders[0])["notes"]


def test_methods_with_options_are_separate_rows(tmp_path: Path) -> None:
    folder = write_synthetic_run(tmp_path / "run", questions=12)
    (extra,) = fixed_settings(["visionzip(order='native')"], [64], ["x64"], 1)
    metadata = json.loads((folder / "run.json").read_text())
    metadata["settings"].append(extra.to_dict())
    (folder / "run.json").write_text(json.dumps(metadata))
    file = folder / "answers" / "1of1.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    rows += [row | {"setting": extra.id} for row in rows if row["setting"] == "visionzip@64"]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary = summarize(open_run(folder), draws=100, versus="visionzip")
    plain, with_options = find_row(summary, "64", "VisionZip"), find_row(summary, "64", "VisionZip(order='native')")
    assert plain["scores"]["GQA"]["value"] == with_options["scores"]["GQA"]["value"]
    assert plain["versus"] is None  # the plain method is the reference
    assert with_options["versus"]["value"] == 0


def test_scores_with_damaged_warnings_are_refused(tmp_path: Path, summary: dict[str, Any]) -> None:
    path = tmp_path / "scores.json"
    for warnings in (None, [3], [{"task": "GQA"}], "text"):
        path.write_text(json.dumps(summary | {"warnings": warnings}))
        with pytest.raises(BadFile, match=r"scores\.json cannot be used: '?warnings.* Delete it"):
            read_scores(path)


def test_hostile_names_in_markdown_and_csv(tmp_path: Path, summary: dict[str, Any]) -> None:
    hostile = "=1+1|<script>alert(1)</script>\n\n# ![x](http://y) [z](javascript:w)\x1b[2J"
    changed = json.loads(json.dumps(summary))
    changed["run"]["model"] = changed["name"] = hostile
    changed["notes"] = [hostile]
    for task in changed["run"]["tasks"]:
        task["prompt"] = task["file"] = hostile
    for row in iter_rows(changed):
        row["label"] = hostile
    write_report(changed, tmp_path)
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "<" not in text.replace("<u>", "").replace("</u>", "")
    for syntax in ("![", "](", "\x1b", "\n# !"):
        assert syntax not in text
    assert "&lt;script>" in text
    assert all(line.startswith(("|", ">", "-", "#")) for line in text.splitlines() if "script" in line)
    for name in ("table.csv", "details.csv"):
        rows = list(csv.reader(io.StringIO((tmp_path / name).read_text(encoding="utf-8"))))
        cells = [cell for row in rows for cell in row if "script" in cell]
        assert cells
        assert all(cell.startswith("'=") for cell in cells)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<script>alert" not in page
