"""Build result tables in the paper's layout, as Markdown, LaTeX and CSV.

Tiers are stacked; the best score of a tier is bold and the second underlined.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torino.core.text import format_csv
from torino.evaluation.paper import PaperRow, PaperTable, paper_table, table_names
from torino.evaluation.protocol import NO_SAE
from torino.evaluation.reporting.summary import Summary

RELATIVE = "relative"
Mark = Literal["", "best", "second"]
PAPER_TIERS = ("3,3", "2,2", "1,1")
"""Tiers of the paper's dynamic tables, from many tokens to few."""


LATEX_ESCAPES = {char: f"\\{char}" for char in "&%#_${}"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "–": "--",
    "…": r"\dots{}",
    "δ": r"$\delta$",
    "ε": r"$\varepsilon$",
    "×": r"$\times$",
    "±": r"$\pm$",
    "↓": r"$\downarrow$\,",
}
"""Characters with another meaning, or none, in LaTeX."""


@dataclass(frozen=True)
class TableCell:
    """A printed figure, its mark, and its interval if it has one."""

    text: str = "–"
    mark: Mark = ""
    low: float | None = None
    high: float | None = None
    value: float | None = None
    sd: float | None = None


@dataclass(frozen=True)
class TableRow:
    """One row of a table; ``row`` is its row in the summary, None for a row of the paper."""

    label: str
    tokens: str
    cells: Mapping[str, TableCell]
    row: Mapping[str, Any] | None = None

    @property
    def measured(self) -> bool:
        """Whether it was measured, not taken from the paper."""
        return self.row is not None


@dataclass(frozen=True)
class TierTable:
    """The rows of a tier."""

    heading: str
    tier: str
    rows: Sequence[TableRow]
    versus: str = ""


@dataclass(frozen=True)
class ReportTable:
    """A table: columns (name and heading, Relative last) and tiers, the first of which is the baseline."""

    columns: Mapping[str, str]
    tiers: Sequence[TierTable]
    papers: Sequence[PaperTable] = field(default_factory=list[PaperTable])


def build_table(summary: Summary, papers: Sequence[PaperTable] = ()) -> ReportTable:
    """Build the table of a summarized run, with rows of the paper's tables."""
    columns = {column["task"]: column["label"] for column in summary["columns"]} | {RELATIVE: "Relative"}
    tiers: list[TierTable] = []
    baseline = summary["baseline"]
    if baseline is not None:
        printed = [table.baseline for table in papers if table.baseline is not None][:1]
        heading = f"Upper bound, {baseline['before'] or 0.0:.0f} tokens (100 %)"
        tiers.append(TierTable(heading, "full", _build_rows([baseline], columns, printed, "Baseline")))
    for tier in summary["tiers"]:
        printed = [row for table in papers for row in paper_rows_for(table, tier)]
        rows = _build_rows(tier["rows"], columns, printed)
        tiers.append(TierTable(_heading(tier), tier["tier"], rows, tier.get("versus") or ""))
    return ReportTable(columns, tiers, list(papers))


def select_paper_tables(summary: Summary, name: str | None = None) -> list[PaperTable]:
    """Return the paper's tables to compare a run with: those named, else those of the model's size.

    Several names are separated by commas.
    """
    if name:
        return [paper_table(word.strip()) for word in name.split(",")]
    size = "13b" if "13b" in str(summary["run"].get("model", "")).lower() else "7b"
    names = [f"llava-1.5-{size}-x64", f"llava-1.5-{size}-x64-fixed"]
    return [paper_table(item) for item in names if item in table_names()]


def paper_rows_for(table: PaperTable, tier: Mapping[str, Any]) -> list[PaperRow]:
    """Return the paper's rows of a tier: those with the same budget, or the same (k, δ)."""
    tiers = table.tiers()
    if table.setting == "fixed budget":
        return {str(tokens): rows for tokens, rows in tiers.items()}.get(tier["tier"], [])
    counts = list(tiers)
    pair, _ = parse_tier(str(tier["tier"]))
    if pair not in PAPER_TIERS or len(counts) != len(PAPER_TIERS):
        return []
    return tiers[counts[PAPER_TIERS.index(pair)]]


def parse_tier(tier: str) -> tuple[str, str]:
    """Return the pair (k, δ) of a dynamic tier, empty for others, and its SAE if the run has several.

    Examples
    --------
    >>> parse_tier("2,2"), parse_tier("2,2 [x64]"), parse_tier("192")
    (('2,2', ''), ('2,2', 'x64'), ('', ''))
    """
    match = re.fullmatch(r"(\d+,\d+)(?: \[(.*)\])?", tier, re.DOTALL)
    return (match[1], match[2] or "") if match else ("", "")


def to_markdown(table: ReportTable) -> str:
    """Format the table as Markdown, one table per tier."""
    headings = ["Method", "Tokens", *table.columns.values()]
    parts: list[str] = []
    for tier in table.tiers:
        lines = [headings, ["---", *["---:"] * (len(headings) - 1)]]
        for row in tier.rows:
            label = row.label if row.measured else f"*{row.label}, the paper*"
            cells = [_cell_to_markdown(row.cells[name], row.measured) for name in table.columns]
            lines.append([label, row.tokens, *cells])
        parts.append(f"**{tier.heading}**\n\n{markdown_grid(lines)}")
    return "\n\n".join(parts)


def markdown_grid(lines: Sequence[Sequence[str]]) -> str:
    """Format lines of cells as a Markdown table; line breaks and bars in a cell do not end it."""
    rows = [[re.sub(r"(?<!\\)\|", r"\\|", " ⏎ ".join(cell.splitlines())) for cell in cells] for cells in lines]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def to_latex(table: ReportTable, caption: str, label: str) -> str:
    """Format the table as LaTeX in the paper's style; needs amsmath, booktabs, graphicx, and xcolor with table."""
    width = len(table.columns) + 1
    headings = " & ".join(["Method", *(_latex_heading(heading) for heading in table.columns.values())])
    lines: list[str] = []
    for tier in table.tiers:
        heading = _escape_latex(tier.heading).replace(r"\textasciitilde{}", r"$\sim$")
        lines += [
            r"    \midrule",
            r"    \rowcolor{gray!15}",
            rf"    \multicolumn{{{width}}}{{c}}{{\textit{{{heading}}}}} \\",
            r"    \midrule",
        ]
        for row in tier.rows:
            cells = [_latex_label(row.label), *(_cell_to_latex(row.cells[name]) for name in table.columns)]
            if not row.measured:
                cells = [rf"\textcolor{{gray}}{{\textit{{{cells[0]}, paper}}}}"] + [
                    rf"\textcolor{{gray}}{{{cell}}}" for cell in cells[1:]
                ]
            lines.append(f"    {' & '.join(cells)} \\\\")
    return "\n".join(
        [
            "% Needs \\usepackage{amsmath,booktabs,graphicx} and \\usepackage[table]{xcolor}.",
            r"\begin{table*}[t]",
            r"  \centering",
            rf"  \caption{{{_escape_latex(caption)}}}",
            rf"  \label{{{re.sub('[^A-Za-z0-9:.-]+', '-', label)}}}",
            r"  \resizebox{\textwidth}{!}{%",
            rf"  \begin{{tabular}}{{l{'c' * (width - 1)}}}",
            r"    \toprule",
            rf"    {headings} \\",
            *lines,
            r"    \bottomrule",
            r"  \end{tabular}}",
            r"\end{table*}",
            "",
        ]
    )


def to_csv(table: ReportTable) -> str:
    """Format the table as CSV, one line per method; ``source`` is ``measured`` or ``paper``."""
    lines: list[list[str]] = [["tier", "heading", "source", "method", "tokens", *table.columns]]
    for tier in table.tiers:
        for row in tier.rows:
            texts = [row.cells[name].text.split(" ")[0].removesuffix("%").replace("–", "") for name in table.columns]
            source = "measured" if row.measured else "paper"
            lines.append([tier.tier, tier.heading, source, row.label, row.tokens.lstrip("~"), *texts])
    return format_csv(lines)


def to_detailed_csv(summary: Summary) -> str:
    """Format all results as CSV: one line per method and task, and one for each relative score."""
    names = ["tier", "method", "spec", "sae", "seeds", "task", "metric", "value", "low", "high", "sd", "difference"]
    names += ["difference_low", "difference_high", "p", "p_holm", "questions", "of", "failed", "unparsed", "unanswered"]
    names += ["images", "tokens_mean", "tokens_p10", "tokens_median", "tokens_p90", "tokens_min", "tokens_max"]
    lines: list[dict[str, Any]] = []
    for row in iter_rows(summary):
        common = {name: row[name] for name in ("tier", "spec", "sae", "seeds")} | {"method": row["label"]}
        for task, score in row["scores"].items():
            difference = ((row["versus"] or {}).get("tasks") or {}).get(task)
            tokens = row["tokens_by_task"].get(task, {})
            statistics = ("mean", "p10", "median", "p90", "min", "max")
            counts = {name: score["counts"].get(name, 0) for name in ("failed", "unparsed", "unanswered")}
            lines.append(
                common
                | {"task": task, "metric": score["metric"], "questions": score["questions"], "of": score["of"]}
                | _interval_columns(score)
                | _difference_columns(difference)
                | counts
                | {"images": tokens.get("images", "")}
                | {f"tokens_{name}": round(tokens[name], 3) if name in tokens else "" for name in statistics}
            )
        if row.get("difficult") is not None:
            lines.append(
                common
                | {"task": "difficult", "metric": "mean score on difficult questions"}
                | {"questions": row["difficult"]["questions"]}
                | _interval_columns(row["difficult"])
            )
        if row["relative"] is not None:
            mean = "" if row["tokens"] is None else round(row["tokens"], 3)
            lines.append(
                common
                | {"task": RELATIVE, "metric": "macro-average of ratios to the baseline", "tokens_mean": mean}
                | _interval_columns(row["relative"])
                | _difference_columns(row["versus"])
            )
    return format_csv([names, *([line.get(name, "") for name in names] for line in lines)])


def iter_rows(summary: Summary) -> Iterator[dict[str, Any]]:
    """Yield all rows of a summary, the baseline first."""
    if summary["baseline"] is not None:
        yield summary["baseline"]
    for tier in summary["tiers"]:
        yield from tier["rows"]


def format_tokens(row: Mapping[str, Any]) -> str:
    """Format the number of tokens of a row: the mean if images differ."""
    if row["tokens"] is None:
        return "–"
    constant = {task["min"] == task["max"] for task in row["tokens_by_task"].values()} == {True}
    return f"{row['tokens']:.0f}" if constant and row["tokens"] == int(row["tokens"]) else f"{row['tokens']:.1f}"


def format_p(p: float) -> str:
    """Format a p-value; never 0.

    Examples
    --------
    >>> format_p(0.00009), format_p(0.0421)
    ('<0.001', '0.042')
    """
    return "<0.001" if p < 0.001 else f"{p:.3f}"


def is_incomplete(row: Mapping[str, Any]) -> bool:
    """Return whether a row lacks answers, so that its relative score may still change."""
    return any(score["questions"] < score["of"] for score in row["scores"].values()) or any(
        task not in row["scores"] for task in (row["relative"] or {}).get("left_out", ())
    )


def _build_rows(
    rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str], printed: Sequence[PaperRow], label: str = ""
) -> list[TableRow]:
    """Return the measured rows, each followed by the paper's row of the same method; other paper rows come last."""
    cells = [{column: _build_cell(row, column) for column in columns} for row in rows]
    for column in columns:
        _mark_best(cells, column)
    result: list[TableRow] = []
    remaining = list(printed)
    for row, row_cells in zip(rows, cells, strict=True):
        name = label or row["label"]
        result.append(TableRow(name, format_tokens(row), row_cells, row))
        for match in [item for item in remaining if item.method == name]:
            result.append(_build_paper_row(match, columns))
            remaining.remove(match)
    return [*result, *(_build_paper_row(item, columns) for item in remaining)]


def _mark_best(cells: Sequence[dict[str, TableCell]], column: str) -> None:
    """Mark the best and second-best values of a column by their printed digits; incomplete scores do not compete."""
    values = [
        round(row[column].value or 0.0, 2) if row[column].value is not None and "*" not in row[column].text else None
        for row in cells
    ]
    ranks = sorted({value for value in values if value is not None}, reverse=True)
    if len(ranks) < 2:  # all values are equal
        return
    for row, value in zip(cells, values, strict=True):
        if value is not None and value in ranks[:2]:
            row[column] = replace(row[column], mark="best" if value == ranks[0] else "second")


def _build_cell(row: Mapping[str, Any], column: str) -> TableCell:
    score = row["relative"] if column == RELATIVE else row["scores"].get(column)
    if score is None or score["value"] is None:
        return TableCell()
    text = f"{score['value']:.2f}" + ("%" if column == RELATIVE else "")
    if score.get("sd") is not None:
        text += f" ± {score['sd']:.2f}"
    incomplete = score["questions"] < score["of"] if column != RELATIVE else is_incomplete(row)
    text += "*" if incomplete else ""
    return TableCell(text, "", score.get("low"), score.get("high"), score["value"], score.get("sd"))


def _build_paper_row(row: PaperRow, columns: Mapping[str, str]) -> TableRow:
    cells: dict[str, TableCell] = {}
    for column in columns:
        text = row.relative if column == RELATIVE else row.scores.get(column)
        if text is None:
            cells[column] = TableCell()
            continue
        number = text.removesuffix("%")
        cells[column] = TableCell(f"{number}%" if column == RELATIVE else number, value=float(number))
    return TableRow(row.method, f"~{row.tokens}", cells)


def _heading(tier: Mapping[str, Any]) -> str:
    if tier["tokens"] is None:
        return f"Tier {tier['tier']}, not started"
    removed = tier["removed"]
    removed = "" if removed is None else f"({'↓' if removed >= 0 else '↑'}{abs(removed):.0f} %)"
    if not tier["dynamic"]:
        return f"Retain {tier['tokens']:.0f} tokens {removed}".strip()
    pair, sae = parse_tier(str(tier["tier"]))
    what = f"(k, δ) = ({pair.replace(',', ', ')})" if pair else "methods with their own options"
    if sae:
        what += ", no SAE" if sae == NO_SAE else f", SAE {sae}"
    return f"Retain ~{tier['tokens']:.0f} tokens on average {removed}, {what}".replace("  ", " ")


def _interval_columns(score: Mapping[str, Any]) -> dict[str, Any]:
    return {name: "" if score.get(name) is None else round(score[name], 4) for name in ("value", "low", "high", "sd")}


def _difference_columns(difference: Mapping[str, Any] | None) -> dict[str, Any]:
    if difference is None:
        return {}
    keys = {"difference": "value", "difference_low": "low", "difference_high": "high"}
    corrected = {"p_holm": f"{difference['p_holm']:.4f}"} if "p_holm" in difference else {}  # not for single tasks
    rounded = {name: round(difference[key], 4) for name, key in keys.items()}
    return rounded | {"p": f"{difference['p']:.4f}"} | corrected


def _cell_to_markdown(cell: TableCell, measured: bool) -> str:
    if not measured:
        return f"*{cell.text}*" if cell.value is not None else cell.text
    text = cell.text.replace("*", "\\*")
    return {"best": f"**{text}**", "second": f"<u>{text}</u>", "": text}[cell.mark]


def _cell_to_latex(cell: TableCell) -> str:
    figure, separator, sd = _escape_latex(cell.text).partition(r"$\pm$")
    text = rf"{figure}{{\scriptsize$\pm${sd}}}" if separator else figure
    return {"best": rf"\textbf{{{text}}}", "second": rf"\underline{{{text}}}", "": text}[cell.mark]


def _escape_latex(text: str) -> str:
    return "".join(LATEX_ESCAPES.get(char, char) for char in text)


def _latex_label(label: str) -> str:
    return _escape_latex(label).replace(r"\_FB", r"\textsubscript{FB}")


def _latex_heading(heading: str) -> str:
    match = re.fullmatch(r"(MMB|SQA|VQA) (EN|CN|I|T)", heading)
    return rf"{match[1]}$^{{\text{{{match[2]}}}}}$" if match else _escape_latex(heading)
