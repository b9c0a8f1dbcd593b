"""Reports: what a run found, as Markdown, CSV, LaTeX and one HTML page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torino.core.errors import BadFile
from torino.core.io import write_atomic
from torino.evaluation.benchmarks import BENCHMARKS
from torino.evaluation.paper import PaperTable
from torino.evaluation.reporting.page import page
from torino.evaluation.reporting.summary import Document
from torino.evaluation.reporting.tables import (
    Layout,
    latex,
    layout,
    long_csv,
    markdown,
    rows_of,
    tokens_text,
    unfinished,
    wide_csv,
)

FILES = ("report.md", "table.csv", "details.csv", "table.tex", "report.html")


def write_report(
    document: Document,
    folder: str | Path,
    *,
    papers: Sequence[PaperTable] = (),
    figures: Mapping[str, str] | None = None,
) -> list[Path]:
    """Write all forms of the report.

    Parameters
    ----------
    document : dict
        What :func:`torino.evaluation.reporting.summary.document_of` found.
    folder : path
    papers : sequence of PaperTable
        Tables of the paper to set beside it.
    figures : mapping of caption to SVG, optional
        For the page.

    Returns
    -------
    list of Path
        ``report.md``, ``table.csv``, ``details.csv``, ``table.tex`` and ``report.html``.
    """
    if not document["scored"] or document["baseline"] is None or not any(row["scores"] for row in rows_of(document)):
        raise BadFile(
            f"The run {document['name']} holds no answer that can be scored yet. Let torino eval go on, or see its "
            "folder of problems."
        )
    table = layout(document, papers)
    texts = {
        "report.md": report_markdown(document, table),
        "table.csv": wide_csv(table),
        "details.csv": long_csv(document),
        "table.tex": latex(table, caption(document, table), f"tab:{document['name']}"),
        "report.html": page(document, table, facts(document), statements(document, table), figures or {}),
    }
    return [_write(Path(folder) / name, text) for name, text in texts.items()]


def report_markdown(document: Document, table: Layout) -> str:
    """The whole report as Markdown."""
    parts = [f"# {document['name']}", *[f"> {one}" for one in statements(document, table)]]
    parts += ["## Scores", legend(document), markdown(table)]
    parts += ["## How sure the relative scores are", certainty(document, table)]
    parts += ["## Answers", _answers(document), "## What was run", _pairs(facts(document)), _tasks(document)]
    return "\n\n".join(part for part in parts if part) + "\n"


def legend(document: Document) -> str:
    """What the marks and the last column mean."""
    best = "Best of a tier **bold**, second <u>underlined</u>, by the digits printed. "
    where = f"the run {document['baseline_of']}" if document["baseline_of"] else "this run"
    return (
        f"{best}Relative: the macro-average of per-benchmark ratios to the full-token baseline of {where}. MME in "
        "points, all others in per cent. ± is the standard deviation over seeds."
    )


def caption(document: Document, table: Layout) -> str:
    """The caption of the LaTeX table."""
    saes = ", ".join(document["run"].get("saes", {})) or "none"
    text = (
        f"Performance comparison on {document['run']['model']} across {len(document['columns'])} benchmarks. SAE: "
        f"{saes}. Best per tier in bold, second-best underlined. Relative is the macro-average of per-benchmark ratios "
        "against our own full-token baseline."
    )
    if table.papers:
        text += " Rows in grey are the figures printed in the paper, which were not measured here."
    return text if document["progress"]["whole"] else f"{text} Preliminary: the run is not finished."


def statements(document: Document, table: Layout) -> list[str]:
    """What a reader must know before the figures."""
    told: list[str] = []
    progress = document["progress"]
    if not progress["whole"]:
        waits = " The tiers of matched length have not begun." if progress["waits_for_budgets"] else ""
        told.append(
            f"**Not finished**: {progress['answers']:,} of {progress['of']:,} answers are there.{waits} A figure with "
            "* is over the questions answered so far, its ratio to the baseline over the same ones."
        )
    told += [column["note"] for column in document["columns"] if column["note"]]
    left = sorted({task for row in rows_of(document) for task in (row["relative"] or {}).get("left_out", ())})
    fewer = "A figure over fewer than the paper's nine benchmarks cannot be set beside its own."
    if left:
        told.append(
            f"Relative scores leave out {', '.join(left)} where there is no score, or the baseline's is 0. {fewer}"
        )
    elif {column["task"] for column in document["columns"]} != set(BENCHMARKS):
        tasks = [column["task"] for column in document["columns"]]
        shared = sum(task in BENCHMARKS for task in tasks)
        told.append(f"Relative scores are over {len(tasks)} task(s), {shared} among the paper's nine. {fewer}")
    if document["run"].get("limit"):
        told.append(f"Each task was cut to {document['run']['limit']:,} questions, drawn at random.")
    if table.papers:
        named = "; ".join(f"{one.model}, {one.sae}, {one.setting}" for one in table.papers)
        told.append(
            f"Rows marked *the paper* are figures printed in it ({named}). They were not measured here, and their "
            "harness, prompts and baseline may differ."
        )
    return [*told, *document["notes"]]


def facts(document: Document) -> dict[str, str]:
    """What was run, in words."""
    run = document["run"]
    saes = [f"{label} ({_about(about)})" if _about(about) else label for label, about in run.get("saes", {}).items()]
    hardware = [f"{name} {value}" for name, value in run.get("hardware", {}).items() if value not in (None, "")]
    baseline = document["baseline"] or {}
    said = baseline.get("relative") is not None
    return {
        "Model": f"{run['model']} ({run['family']})" if run.get("family") else str(run["model"]),
        "SAE": "; ".join(saes) or "none",
        "Harness": ", ".join(dict.fromkeys(str(task["harness"]) for task in run["tasks"])),
        "Prompts": ", ".join(dict.fromkeys(str(task["prompts"]) for task in run["tasks"])),
        "Padding": str(run.get("padding", "")),
        "Positions": str(run.get("positions", "")),
        "Mass": {None: "own", True: "tokens are attended to as all the patches they stand for"}.get(
            run.get("mass", False), "none"
        ),
        "Baseline": (
            f"all {baseline.get('before') or 0:.0f} tokens, "
            + (f"answered in the run {document['baseline_of']}" if document["baseline_of"] else "answered in this run")
        )
        if said
        else "none yet",
        "Intervals": (
            f"{document['level']:.0%}, bootstrap over {document['by']}s, {document['draws']:,} draws; p-values from "
            "exchanging answers, two-sided, each for one comparison"
        ),
        "Versions": ", ".join(
            f"{name} {value}" for name, value in ({"torino": run["torino"]} | run["versions"]).items()
        ),
        "Hardware": ", ".join(hardware),
        "Begun": str(run.get("created", "")),
    }


def certainty(document: Document, table: Layout) -> str:
    """Relative scores with their intervals and differences, a table a tier."""
    parts: list[str] = []
    level = f"{document['level']:.0%}"
    for block in table.blocks:
        lines = [line for line in block.lines if line.row is not None and line.row["relative"] is not None]
        if block.tier == "full" or not lines:
            continue
        heads = ["Method", "Tokens, mean", "10th–90th percentile", "Relative", f"{level} interval"]
        heads += [f"Difference to {block.versus}", "p"] if block.versus else []
        rows = [heads, ["---", *["---:"] * (len(heads) - 1)]]
        for line in lines:
            row = line.row or {}
            told = row["relative"]
            cells = [line.label, tokens_text(row), spread(row), f"{told['value']:.2f}", bounds(told)]
            if block.versus:
                apart = row["versus"]
                cells += ["", ""] if apart is None else [f"{apart['value']:+.2f} {bounds(apart)}", p_text(apart["p"])]
            rows.append(cells)
        parts.append(f"**{block.heading}**\n\n" + _grid(rows))
    return "\n\n".join(parts)


def spread(row: Mapping[str, Any]) -> str:
    """The middle 80 per cent of images: the mean over tasks of their 10th and 90th percentile."""
    tasks = list(row["tokens_by_task"].values())
    if not tasks:
        return "–"
    low, high = (sum(task[name] for task in tasks) / len(tasks) for name in ("p10", "p90"))
    return f"{low:.0f}–{high:.0f}"


def bounds(told: Mapping[str, Any]) -> str:
    """An interval as text."""
    return "" if told["low"] is None else f"[{told['low']:.2f}, {told['high']:.2f}]"


def p_text(p: float) -> str:
    """A p-value; never 0.

    Examples
    --------
    >>> p_text(0.00009), p_text(0.0421)
    ('<0.001', '0.042')
    """
    return "<0.001" if p < 0.001 else f"{p:.3f}"


def _answers(document: Document) -> str:
    """Answers that failed or could not be read, where there are any."""
    rows = [["Tier", "Method", "Answers", "Failed", "Unparsed", "Not answered"], ["---", "---", *["---:"] * 4]]
    for row in rows_of(document):
        counts = totals(row)
        if counts["failed"] or counts["unparsed"] or unfinished(row):
            rows.append([row["tier"], row["label"], *(f"{counts[name]:,}" for name in counts)])
    skipped = {task["task"]: task.get("skipped_rows", 0) for task in document["run"]["tasks"]}
    lost = [f"{name}: {count:,}" for name, count in skipped.items() if count]
    tail = f"\n\nRows of the tasks' files that could not be used: {', '.join(lost)}." if lost else ""
    if len(rows) == 2:
        return "Every question was answered, and every answer could be read." + tail
    return "All of these count as wrong, but for what is not answered yet.\n\n" + _grid(rows) + tail


def totals(row: Mapping[str, Any]) -> dict[str, int]:
    """Answers of a row over all tasks."""
    scores = list(row["scores"].values())
    summed = {
        name: sum(score["counts"].get(name, 0) for score in scores) for name in ("answered", "failed", "unparsed")
    }
    return summed | {"missing": sum(score["of"] - score["questions"] for score in scores)}


def _tasks(document: Document) -> str:
    rows = [["Task", "File", "Fingerprint", "Samples", "Metric", "Prompt"], ["---"] * 6]
    for task in document["run"]["tasks"]:
        prompt = str(task["prompt"]).replace("\n", " ⏎ ").replace("|", "\\|")
        print_, metric = str(task["fingerprint"])[:16], str(task["metric"])
        rows.append([task["task"], task["file"], f"`{print_}`", f"{task['samples']:,}", metric, prompt])
    return _grid(rows)


def _about(about: Mapping[str, Any]) -> str:
    latents = about.get("latents")
    told = [str(about.get("name") or ""), str(about.get("kind") or ""), f"{latents:,} latents" if latents else ""]
    return ", ".join(one for one in told if one)


def _pairs(told: Mapping[str, str]) -> str:
    return "\n".join(f"- {name}: {value}" for name, value in told.items() if value)


def _grid(rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _write(path: Path, text: str) -> Path:
    def write(target: Path) -> None:
        target.write_text(text, encoding="utf-8")

    return write_atomic(path, write)
