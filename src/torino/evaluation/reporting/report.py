"""Write the report of a run as Markdown, CSV, LaTeX and one HTML page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torino.core.errors import BadFile
from torino.core.io import write_atomic
from torino.core.text import neutralize_markdown, printable
from torino.evaluation.benchmarks import BENCHMARKS
from torino.evaluation.paper import PaperTable
from torino.evaluation.reporting.page import render_page
from torino.evaluation.reporting.summary import Summary
from torino.evaluation.reporting.tables import (
    ReportTable,
    build_table,
    format_p,
    format_tokens,
    is_incomplete,
    iter_rows,
    markdown_grid,
    to_csv,
    to_detailed_csv,
    to_latex,
    to_markdown,
)

DIFFICULT = (
    "Questions that the model answers with all tokens and not with a smaller image of the same tier (`downsample`), as "
    "in VTC-Bench: mean score in percent over the questions of all tasks."
)


def write_report(
    summary: Summary,
    folder: str | Path,
    *,
    papers: Sequence[PaperTable] = (),
    figures: Mapping[str, str] | None = None,
) -> list[Path]:
    """Write all formats of the report.

    Parameters
    ----------
    summary : dict
        From :mod:`torino.evaluation.reporting.summary`.
    folder : path
    papers : sequence of PaperTable
        Tables of the paper to compare with.
    figures : mapping of caption to SVG, optional
        For the HTML page.

    Returns
    -------
    list of Path
        ``report.md``, ``table.csv``, ``details.csv``, ``table.tex`` and ``report.html``.
    """
    if not summary["scored"] or summary["baseline"] is None or not any(row["scores"] for row in iter_rows(summary)):
        raise BadFile(
            f"The run {summary['name']} has no answers that can be scored yet. Continue it with torino eval, or see "
            "the folder problems of the run."
        )
    table = build_table(summary, papers)
    texts = {
        "report.md": write_markdown(summary, table),
        "table.csv": to_csv(table),
        "details.csv": to_detailed_csv(summary),
        "table.tex": to_latex(table, write_caption(summary, table), f"tab:{summary['name']}"),
        "report.html": render_page(
            summary, table, list_facts(summary), list_warnings(summary), list_statements(summary, table), figures or {}
        ),
    }
    return [_write(Path(folder) / name, text) for name, text in texts.items()]


def write_markdown(summary: Summary, table: ReportTable) -> str:
    """Return the complete report as Markdown."""
    parts = [
        f"# {_one_line(summary['name'])}",
        *[f"> **Warning:** {_one_line(text)}" for text in list_warnings(summary)],
    ]
    parts += [f"> {_one_line(statement)}" for statement in list_statements(summary, table)]
    parts += ["## Scores", _legend(summary), to_markdown(table)]
    parts += ["## Confidence intervals of relative scores", _interval_tables(summary, table)]
    if difficult := _difficult_tables(summary):
        parts += ["## Difficult questions", DIFFICULT, difficult]
    parts += ["## Answers", _answer_table(summary)]
    facts = "\n".join(f"- {name}: {_one_line(value)}" for name, value in list_facts(summary).items() if value)
    parts += ["## Configuration", facts, _task_table(summary)]
    text = "\n\n".join(part for part in parts if part) + "\n"
    return neutralize_markdown(text, allowed=["u"])  # names of models, tasks and SAEs come from others


def write_caption(summary: Summary, table: ReportTable) -> str:
    """Return the caption of the LaTeX table."""
    saes = ", ".join(summary["run"].get("saes", {})) or "none"
    text = (
        f"Performance comparison on {summary['run']['model']} across {len(summary['columns'])} benchmarks. SAE: "
        f"{saes}. Best per tier in bold, second-best underlined. Relative is the macro-average of per-benchmark ratios "
        "against our own full-token baseline."
    )
    if table.papers:
        text += " Rows in gray are the figures printed in the paper, which were not measured here."
    return text if summary["progress"]["whole"] else f"{text} Preliminary: the run is not finished."


def list_warnings(summary: Summary) -> list[str]:
    """Return what makes scores meaningless, for the top of the report; summaries of older versions have none."""
    return [str(warning["text"]) for warning in summary.get("warnings", ())]


def list_statements(summary: Summary, table: ReportTable) -> list[str]:
    """Return the notes that a reader needs before the figures."""
    statements: list[str] = []
    progress = summary["progress"]
    if not progress["whole"]:
        waits = " The tiers of matched length have not started." if progress["waits_for_budgets"] else ""
        statements.append(
            f"**Not finished**: {progress['answers']:,} of {progress['of']:,} answers.{waits} A score with * covers "
            "the questions answered so far, and its ratio uses the baseline on the same questions."
        )
    statements += [column["note"] for column in summary["columns"] if column["note"]]
    left_out = sorted({task for row in iter_rows(summary) for task in (row["relative"] or {}).get("left_out", ())})
    warning = "Relative scores over fewer than the paper's nine benchmarks are not comparable with the paper's."
    tasks = [column["task"] for column in summary["columns"]]
    if left_out:
        statements.append(
            f"Relative scores leave out {', '.join(left_out)} if a score is missing or the baseline scores 0. {warning}"
        )
    elif set(tasks) != set(BENCHMARKS):
        shared = sum(task in BENCHMARKS for task in tasks)
        statements.append(f"Relative scores cover {len(tasks)} task(s), {shared} of the paper's nine. {warning}")
    if summary["run"].get("limit"):
        statements.append(f"Each task is limited to {summary['run']['limit']:,} randomly drawn questions.")
    if table.papers:
        names = "; ".join(f"{paper.model}, {paper.sae}, {paper.setting}" for paper in table.papers)
        statements.append(
            f"Rows marked *the paper* are figures printed in the paper ({names}). They were not measured here, and "
            "their harness, prompts and baseline may differ."
        )
    return [*statements, *summary["notes"]]


def list_facts(summary: Summary) -> dict[str, str]:
    """Return the configuration of the run as texts; empty ones are unknown."""
    run = summary["run"]
    hardware = [f"{name} {value}" for name, value in run.get("hardware", {}).items() if value not in (None, "")]
    versions = {"torino": run["torino"]} | run["versions"]
    return {
        "Model": f"{run['model']} ({run['family']})" if run.get("family") else str(run["model"]),
        "SAE": "; ".join(_describe_sae(label, sae) for label, sae in run.get("saes", {}).items()) or "none",
        "Harness": ", ".join(dict.fromkeys(str(task["harness"]) for task in run["tasks"])),
        "Prompts": _describe_prompts(run["tasks"]),
        "Padding": str(run.get("padding", "")),
        "Positions": str(run.get("positions", "")),
        "Attention": str(run.get("attention", "")),
        "Baseline": _describe_baseline(summary),
        "Intervals": (
            f"{summary['level']:.0%}, bootstrap over {summary['by']}s, {summary['draws']:,} resamples; two-sided "
            "p-values from paired permutation tests, not corrected for multiple comparisons"
        ),
        "Versions": ", ".join(f"{name} {value}" for name, value in versions.items()),
        "Hardware": ", ".join(hardware),
        "Started": str(run.get("created", "")),
    }


def _legend(summary: Summary) -> str:
    """Explain the marks and the last column of the table."""
    run = f"the run {summary['baseline_of']}" if summary["baseline_of"] else "this run"
    return (
        "Best of a tier **bold**, second <u>underlined</u>, by the printed digits. Relative: the macro-average of "
        f"per-benchmark ratios to the full-token baseline of {run}. MME in points, all others in percent. ± is the "
        "standard deviation over seeds."
    )


def _describe_prompts(tasks: Sequence[Mapping[str, Any]]) -> str:
    """Return the prompt styles of the tasks and who chose them, with the names of the tasks if they differ."""
    by_style: dict[str, list[str]] = {}
    for task in tasks:
        style, source = str(task["prompts"]), task.get("prompts_from")
        chosen = {"option": "as given", "model": "of the model", "default": "the default"}.get(str(source), "")
        text = "the task's own" if style == "task" else style + (f" ({chosen})" if chosen else "")
        by_style.setdefault(text, []).append(str(task["task"]))
    if len(by_style) == 1:
        return next(iter(by_style))
    return "; ".join(f"{text}: {', '.join(names)}" for text, names in by_style.items())


def _describe_sae(label: str, sae: Mapping[str, Any]) -> str:
    latents = sae.get("latents")
    parts = [str(sae.get("name") or ""), str(sae.get("kind") or ""), f"{latents:,} latents" if latents else ""]
    description = ", ".join(part for part in parts if part)
    return f"{label} ({description})" if description else label


def _describe_baseline(summary: Summary) -> str:
    baseline = summary["baseline"] or {}
    if baseline.get("relative") is None:
        return "none yet"
    run = f"the run {summary['baseline_of']}" if summary["baseline_of"] else "this run"
    return f"all {baseline.get('before') or 0:.0f} tokens, answered in {run}"


def _interval_tables(summary: Summary, table: ReportTable) -> str:
    """Format relative scores with their intervals and differences, one table per tier."""
    parts: list[str] = []
    for tier in table.tiers:
        rows = [(item.label, item.row) for item in tier.rows if item.row is not None and item.row["relative"]]
        if tier.tier == "full" or not rows:
            continue
        headings = ["Method", "Tokens, mean", "10th–90th percentile", "Relative", f"{summary['level']:.0%} interval"]
        headings += [f"Difference to {tier.versus}", "p (Holm)"] if tier.versus else []
        lines = [headings, ["---", *["---:"] * (len(headings) - 1)]]
        for label, row in rows:
            relative = row["relative"]
            cells = [label, format_tokens(row), _format_spread(row), f"{relative['value']:.2f}", _bounds(relative)]
            if tier.versus:
                difference = row["versus"]
                cells += (
                    ["", ""]
                    if difference is None
                    else [f"{difference['value']:+.2f} {_bounds(difference)}", format_p(difference["p_holm"])]
                )
            lines.append(cells)
        parts.append(f"**{tier.heading}**\n\n{markdown_grid(lines)}")
    return "\n\n".join(parts)


def _difficult_tables(summary: Summary) -> str:
    """Format the scores on difficult questions, one table per tier that has them."""
    parts: list[str] = []
    for tier in summary["tiers"]:
        rows = [row for row in tier["rows"] if row.get("difficult") is not None]
        if not rows:
            continue
        lines = [["Method", "Questions", "Score", f"{summary['level']:.0%} interval"], ["---", *["---:"] * 3]]
        for row in sorted(rows, key=lambda row: -row["difficult"]["value"]):
            score = row["difficult"]
            lines.append([row["label"], f"{score['questions']:,}", f"{score['value']:.2f}", _bounds(score)])
        parts.append(f"**Tier {tier['tier']}**\n\n{markdown_grid(lines)}")
    return "\n\n".join(parts)


def _format_spread(row: Mapping[str, Any]) -> str:
    """Format the 10th and 90th percentile of the tokens per image, averaged over tasks."""
    tasks = list(row["tokens_by_task"].values())
    if not tasks:
        return "–"
    low, high = (sum(task[name] for task in tasks) / len(tasks) for name in ("p10", "p90"))
    return f"{low:.0f}–{high:.0f}"


def _bounds(interval: Mapping[str, Any]) -> str:
    return "" if None in (interval["low"], interval["high"]) else f"[{interval['low']:.2f}, {interval['high']:.2f}]"


def _answer_table(summary: Summary) -> str:
    """Format the counts of answers that failed, could not be parsed or are missing, if there are any."""
    lines = [["Tier", "Method", "Answers", "Failed", "Unparsed", "Not answered"], ["---", "---", *["---:"] * 4]]
    for row in iter_rows(summary):
        counts = _count_answers(row)
        if counts["failed"] or counts["unparsed"] or is_incomplete(row):
            lines.append([row["tier"], row["label"], *(f"{counts[name]:,}" for name in counts)])
    skipped = {task["task"]: task.get("skipped_rows", 0) for task in summary["run"]["tasks"]}
    problems = [f"{name}: {count:,}" for name, count in skipped.items() if count]
    tail = f"\n\nSkipped rows of the tasks' files: {', '.join(problems)}." if problems else ""
    if len(lines) == 2:
        return "All questions were answered, and all answers could be parsed." + tail
    return f"Failed and unparsed answers count as wrong.\n\n{markdown_grid(lines)}{tail}"


def _count_answers(row: Mapping[str, Any]) -> dict[str, int]:
    """Return the counts of answers of a row over all tasks."""
    scores = list(row["scores"].values())
    counts = {
        name: sum(score["counts"].get(name, 0) for score in scores) for name in ("answered", "failed", "unparsed")
    }
    return counts | {"missing": sum(score["of"] - score["questions"] for score in scores)}


def _task_table(summary: Summary) -> str:
    lines = [["Task", "File", "Fingerprint", "Samples", "Metric", "Prompt"], ["---"] * 6]
    for task in summary["run"]["tasks"]:
        fingerprint = f"`{str(task['fingerprint'])[:16]}`"
        cells = [task["task"], task["file"], fingerprint, f"{task['samples']:,}", task["metric"], task["prompt"]]
        lines.append([str(cell) for cell in cells])
    return markdown_grid(lines)


def _one_line(text: str) -> str:
    return " ".join(text.splitlines())


def _write(path: Path, text: str) -> Path:
    def write(target: Path) -> None:
        target.write_text(printable(text), encoding="utf-8")

    return write_atomic(path, write)
