"""Tables in the paper's layout: tiers one below the other, best in bold, second underlined; Markdown, LaTeX and CSV."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torino.evaluation.paper import PaperRow, PaperTable, paper_table, table_names
from torino.evaluation.protocol import NO_SAE
from torino.evaluation.reporting.summary import Document

RELATIVE = "relative"
Mark = Literal["", "best", "second"]
PAIRS = ("3,3", "2,2", "1,1")
"""Tiers of the paper's dynamic tables, from many tokens to few."""


TEX = {sign: f"\\{sign}" for sign in "&%#_${}"} | {
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
"""Signs that mean something else in LaTeX, or nothing."""


@dataclass(frozen=True)
class TableCell:
    """A figure as it is printed, its mark, and its interval where it has one."""

    text: str = "–"
    mark: Mark = ""
    low: float | None = None
    high: float | None = None
    value: float | None = None
    sd: float | None = None


@dataclass(frozen=True)
class Line:
    """One row of a table; ``row`` is what the document says of it, None for a row of the paper."""

    label: str
    tokens: str
    cells: Mapping[str, TableCell]
    row: Mapping[str, Any] | None = None

    @property
    def ours(self) -> bool:
        """Whether it was measured here."""
        return self.row is not None


@dataclass(frozen=True)
class Block:
    """A tier."""

    heading: str
    tier: str
    lines: Sequence[Line]
    versus: str = ""


@dataclass(frozen=True)
class Layout:
    """A table: columns (name and heading, Relative last) and tiers, the first of which is the baseline."""

    columns: Mapping[str, str]
    blocks: Sequence[Block]
    papers: Sequence[PaperTable] = field(default_factory=list[PaperTable])


def layout(document: Document, papers: Sequence[PaperTable] = ()) -> Layout:
    """Lay out a measured run, with tables of the paper beside it."""
    columns = {column["task"]: column["label"] for column in document["columns"]} | {RELATIVE: "Relative"}
    blocks: list[Block] = []
    baseline = document["baseline"]
    beside = [(table, table.baseline) for table in papers if table.baseline is not None]
    if baseline is not None:
        before = baseline["before"] or 0.0
        lines = _lines([baseline], columns, [beside[0][1]] if beside else [], "Baseline")
        blocks.append(Block(f"Upper bound, {before:.0f} tokens (100 %)", "full", lines))
    for tier in document["tiers"]:
        theirs = [row for table in papers for row in paper_rows(table, tier)]
        lines = _lines(tier["rows"], columns, theirs)
        blocks.append(Block(_heading(tier), tier["tier"], lines, tier.get("versus") or ""))
    return Layout(columns, blocks, list(papers))


def choose_tables(document: Document, name: str | None = None) -> list[PaperTable]:
    """The paper's tables to set beside a run: the one named, else those of the model's size."""
    if name:
        return [paper_table(name)]
    size = "13b" if "13b" in str(document["run"].get("model", "")).lower() else "7b"
    wanted = [f"llava-1.5-{size}-x64", f"llava-1.5-{size}-x64-fixed"]
    return [paper_table(one) for one in wanted if one in table_names()]


def paper_rows(table: PaperTable, tier: Mapping[str, Any]) -> list[PaperRow]:
    """Rows of the paper that belong to a tier: of the same budget, or of the same (k, δ)."""
    tiers = table.tiers()
    if table.setting == "fixed budget":
        return tiers.get(int(tier["tier"]), []) if str(tier["tier"]).isdecimal() else []
    counts = list(tiers)
    pair = pair_of(str(tier["tier"]))[0]
    place = PAIRS.index(pair) if pair in PAIRS and len(counts) == len(PAIRS) else None
    return [] if place is None else tiers[counts[place]]


def pair_of(tier: str) -> tuple[str, str]:
    """The pair (k, δ) of a dynamic tier, empty for others, and its SAE where the run has several.

    Examples
    --------
    >>> pair_of("2,2"), pair_of("2,2 [x64]"), pair_of("192")
    (('2,2', ''), ('2,2', 'x64'), ('', ''))
    """
    found = re.fullmatch(r"(\d+,\d+)(?: \[(.*)\])?", tier, re.DOTALL)
    return (found[1], found[2] or "") if found else ("", "")


def markdown(table: Layout) -> str:
    """The table for Markdown, one for each tier."""
    heads = ["Method", "Tokens", *table.columns.values()]
    parts: list[str] = []
    for block in table.blocks:
        rows = [heads, ["---", *["---:"] * (len(heads) - 1)]]
        for line in block.lines:
            label = line.label if line.ours else f"*{line.label}, the paper*"
            rows.append([label, line.tokens, *(_in_markdown(line.cells[name], line.ours) for name in table.columns)])
        parts.append(f"**{block.heading}**\n\n" + "\n".join(f"| {' | '.join(row)} |" for row in rows))
    return "\n\n".join(parts)


def latex(table: Layout, caption: str, label: str) -> str:
    """The table for LaTeX, as the paper sets it; needs amsmath, booktabs, graphicx, and xcolor with table."""
    width = len(table.columns) + 1
    heads = " & ".join(["Method", *(_tex_heading(head) for head in table.columns.values())])
    rows: list[str] = []
    for block in table.blocks:
        heading = _tex(block.heading).replace(r"\textasciitilde{}", r"$\sim$")
        rows += [
            r"    \midrule",
            r"    \rowcolor{gray!15}",
            rf"    \multicolumn{{{width}}}{{c}}{{\textit{{{heading}}}}} \\",
            r"    \midrule",
        ]
        for line in block.lines:
            cells = [_tex_label(line.label), *(_in_latex(name, line.cells[name]) for name in table.columns)]
            if not line.ours:
                cells = [rf"\textcolor{{gray}}{{\textit{{{cells[0]}, paper}}}}"] + [
                    rf"\textcolor{{gray}}{{{cell}}}" for cell in cells[1:]
                ]
            rows.append(f"    {' & '.join(cells)} \\\\")
    return "\n".join(
        [
            "% Needs \\usepackage{amsmath,booktabs,graphicx} and \\usepackage[table]{xcolor}.",
            r"\begin{table*}[t]",
            r"  \centering",
            rf"  \caption{{{_tex(caption)}}}",
            rf"  \label{{{re.sub('[^A-Za-z0-9:.-]+', '-', label)}}}",
            r"  \resizebox{\textwidth}{!}{%",
            rf"  \begin{{tabular}}{{l{'c' * (width - 1)}}}",
            r"    \toprule",
            rf"    {heads} \\",
            *rows,
            r"    \bottomrule",
            r"  \end{tabular}}",
            r"\end{table*}",
            "",
        ]
    )


def wide_csv(table: Layout) -> str:
    """The table as CSV, one line a method; ``source`` tells what was measured here from what the paper printed."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["tier", "heading", "source", "method", "tokens", *table.columns])
    for block in table.blocks:
        for line in block.lines:
            texts = [line.cells[name].text.split(" ")[0].removesuffix("%").replace("–", "") for name in table.columns]
            source = "measured" if line.ours else "paper"
            writer.writerow([block.tier, block.heading, source, line.label, line.tokens.lstrip("~"), *texts])
    return out.getvalue()


def long_csv(document: Document) -> str:
    """All that was measured, one line for each method and task, and one for its relative score."""
    out = io.StringIO()
    names = ["tier", "method", "spec", "sae", "seeds", "task", "metric", "value", "low", "high", "sd", "difference"]
    names += ["difference_low", "difference_high", "p", "questions", "of", "failed", "unparsed", "unanswered"]
    names += ["images", "tokens_mean", "tokens_p10", "tokens_median", "tokens_p90", "tokens_min", "tokens_max"]
    writer = csv.DictWriter(out, names, lineterminator="\n", restval="")
    writer.writeheader()
    for row in rows_of(document):
        told = {name: row[name] for name in ("tier", "spec", "sae", "seeds")} | {"method": row["label"]}
        for task, score in row["scores"].items():
            apart = ((row["versus"] or {}).get("tasks") or {}).get(task)
            kept = row["tokens_by_task"].get(task, {})
            spread = ("mean", "p10", "median", "p90", "min", "max")
            counts = {name: score["counts"].get(name, 0) for name in ("failed", "unparsed", "unanswered")}
            writer.writerow(
                told
                | {"task": task, "metric": score["metric"], "questions": score["questions"], "of": score["of"]}
                | _figures(score)
                | _apart(apart)
                | counts
                | {"images": kept.get("images", "")}
                | {f"tokens_{name}": round(kept[name], 3) if name in kept else "" for name in spread}
            )
        if row["relative"] is not None:
            tokens = "" if row["tokens"] is None else round(row["tokens"], 3)
            writer.writerow(
                told
                | {"task": RELATIVE, "metric": "macro-average of ratios to the baseline", "tokens_mean": tokens}
                | _figures(row["relative"])
                | _apart(row["versus"])
            )
    return out.getvalue()


def rows_of(document: Document) -> Iterator[dict[str, Any]]:
    """All rows of a document, the baseline first."""
    if document["baseline"] is not None:
        yield document["baseline"]
    for tier in document["tiers"]:
        yield from tier["rows"]


def tokens_text(row: Mapping[str, Any]) -> str:
    """How many tokens a row kept: a mean where images differ."""
    if row["tokens"] is None:
        return "–"
    spread = {task["min"] == task["max"] for task in row["tokens_by_task"].values()}
    return (
        f"{row['tokens']:.0f}" if spread == {True} and row["tokens"] == int(row["tokens"]) else f"{row['tokens']:.1f}"
    )


def _lines(
    rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str], theirs: Sequence[PaperRow], name: str = ""
) -> list[Line]:
    """Our rows with marks, each followed by the paper's of the same method; the paper's others at the end."""
    printed = [{column: _cell(row, column) for column in columns} for row in rows]
    for column in columns:
        whole = [
            cells[column].value is not None and "*" not in cells[column].text for cells in printed
        ]  # what is not finished takes no part
        values = [round(float(cells[column].value or 0), 2) for cells, done in zip(printed, whole, strict=True) if done]
        ranks = sorted(set(values), reverse=True)
        if len(ranks) < 2:  # nothing is better than anything
            continue
        for cells, done in zip(printed, whole, strict=True):
            place = ranks.index(round(float(cells[column].value or 0), 2)) if done else 2
            if place < 2:
                old = cells[column]
                mark: Mark = "best" if place == 0 else "second"
                cells[column] = TableCell(old.text, mark, old.low, old.high, old.value, old.sd)
    lines: list[Line] = []
    left = list(theirs)
    for row, cells in zip(rows, printed, strict=True):
        label = name or row["label"]
        lines.append(Line(label, tokens_text(row), cells, row))
        for other in [one for one in left if one.method == label]:
            lines.append(_paper_line(other, columns))
            left.remove(other)
    return [*lines, *(_paper_line(other, columns) for other in left)]


def _cell(row: Mapping[str, Any], column: str) -> TableCell:
    score = row["relative"] if column == RELATIVE else row["scores"].get(column)
    if score is None or score["value"] is None:
        return TableCell()
    text = f"{score['value']:.2f}" + ("%" if column == RELATIVE else "")
    if score.get("sd") is not None:
        text += f" ± {score['sd']:.2f}"
    partly = score["questions"] < score["of"] if column != RELATIVE else unfinished(row)
    return TableCell(text + ("*" if partly else ""), "", score["low"], score["high"], score["value"], score.get("sd"))


def unfinished(row: Mapping[str, Any]) -> bool:
    """Whether a row lacks answers, so that its relative score may still change."""
    return any(score["questions"] < score["of"] for score in row["scores"].values()) or any(
        task not in row["scores"] for task in (row["relative"] or {}).get("left_out", ())
    )


def _paper_line(row: PaperRow, columns: Mapping[str, str]) -> Line:
    cells: dict[str, TableCell] = {}
    for column in columns:
        text = row.relative if column == RELATIVE else row.scores.get(column)
        if text is None:
            cells[column] = TableCell()
            continue
        bare = text.removesuffix("%")
        cells[column] = TableCell(f"{bare}%" if column == RELATIVE else bare, value=float(bare))
    return Line(row.method, f"~{row.tokens}", cells)


def _heading(tier: Mapping[str, Any]) -> str:
    if tier["tokens"] is None:
        return f"Tier {tier['tier']}, not begun"
    removed = f"(↓{tier['removed']:.0f} %)" if tier["removed"] is not None else ""
    if not tier["dynamic"]:
        return f"Retain {tier['tokens']:.0f} tokens {removed}".strip()
    pair, sae = pair_of(str(tier["tier"]))
    what = f"(k, δ) = ({pair.replace(',', ', ')})" if pair else "methods with specs of one's own"
    if sae:
        what += ", no SAE" if sae == NO_SAE else f", SAE {sae}"
    return f"Retain ~{tier['tokens']:.0f} tokens on average {removed}, {what}".replace("  ", " ")


def _figures(score: Mapping[str, Any]) -> dict[str, Any]:
    return {name: "" if score.get(name) is None else round(score[name], 4) for name in ("value", "low", "high", "sd")}


def _apart(apart: Mapping[str, Any] | None) -> dict[str, Any]:
    if apart is None:
        return {}
    told = {"difference": "value", "difference_low": "low", "difference_high": "high"}
    return {name: round(apart[key], 4) for name, key in told.items()} | {"p": f"{apart['p']:.4f}"}


def _in_markdown(cell: TableCell, ours: bool) -> str:
    if not ours:
        return f"*{cell.text}*" if cell.value is not None else cell.text
    text = cell.text.replace("*", "\\*")
    return {"best": f"**{text}**", "second": f"<u>{text}</u>", "": text}[cell.mark]


def _in_latex(name: str, cell: TableCell) -> str:
    figure, apart, sd = _tex(cell.text).partition(r"$\pm$")
    text = rf"{figure}{{\scriptsize$\pm${sd}}}" if apart else figure
    return {"best": rf"\textbf{{{text}}}", "second": rf"\underline{{{text}}}", "": text}[cell.mark]


def _tex(text: str) -> str:
    return "".join(TEX.get(sign, sign) for sign in text)


def _tex_label(label: str) -> str:
    return _tex(label).replace(r"\_FB", r"\textsubscript{FB}")


def _tex_heading(head: str) -> str:
    found = re.fullmatch(r"(MMB|SQA|VQA) (EN|CN|I|T)", head)
    return rf"{found[1]}$^{{\text{{{found[2]}}}}}$" if found else _tex(head)
