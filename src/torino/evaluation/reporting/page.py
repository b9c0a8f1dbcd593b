"""Render the HTML page of a report: one self-contained file with a light and a dark theme.

Template, style and script are in ``assets``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from torino.evaluation.reporting.summary import Summary
from torino.evaluation.reporting.tables import RELATIVE, ReportTable, TableCell, TableRow, TierTable, format_p

PACKAGE = "torino.evaluation.reporting"


@dataclass(frozen=True)
class PageCell:
    """A cell of an HTML table; ``value`` is its sort key."""

    value: object
    text: str
    small: str = ""
    sd: str = ""
    title: str = ""
    css: str = ""


def render_page(
    summary: Summary,
    table: ReportTable,
    facts: Mapping[str, str],
    warnings: Sequence[str],
    statements: Sequence[str],
    figures: Mapping[str, str],
) -> str:
    """Render the page: warnings, notes, a sortable table per tier, figures, and the configuration of the run.

    Parameters
    ----------
    summary : dict
    table : ReportTable
    facts : mapping of name to str
        Configuration of the run.
    warnings : sequence of str
        What makes scores meaningless.
    statements : sequence of str
        Notes, which may contain ``**bold**`` and ``*italic*``.
    figures : mapping of caption to SVG
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader(PACKAGE, "assets"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["emphasize"] = emphasize
    level = f"{summary['level']:.0%}"
    return environment.get_template("report.html.j2").render(
        name=summary["name"],
        model=summary["run"]["model"],
        level=level,
        warnings=warnings,
        statements=statements,
        tiers=[_build_tier(tier, table, level) for tier in table.tiers] + _build_difficult(summary),
        figures=[(caption, Markup(strip_xml_header(svg))) for caption, svg in figures.items()],
        facts=facts,
        tasks=summary["run"]["tasks"],
        css=Markup(_read_asset("report.css")),
        js=Markup(_read_asset("report.js")),
    )


def strip_xml_header(svg: str) -> str:
    """Return the ``<svg>`` element of an SVG file, for embedding in HTML."""
    return svg[svg.index("<svg") :]


def emphasize(text: str) -> Any:
    """Escape a text and convert ``**bold**`` and ``*italic*`` to HTML."""
    from markupsafe import Markup, escape

    bold = re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", str(escape(text)))
    return Markup(re.sub(r"(?<![\w*])\*([^*\s][^*]*?)\*(?![\w*])", r"<em>\1</em>", bold))


def _read_asset(name: str) -> str:
    return (files(PACKAGE) / "assets" / name).read_text(encoding="utf-8")


def _build_tier(tier: TierTable, table: ReportTable, level: str) -> dict[str, Any]:
    with_plan = tier.tier != "full"
    headings = ["Method", "Tokens", *table.columns.values()]
    headings += ["Δ Rel.", "p (Holm)"] if tier.versus else []
    headings += ["Failed", "Unparsed", *(["Plan, ms"] if with_plan else [])]
    rows = [
        {"css": _row_class(row), "cells": _build_cells(row, table, level, bool(tier.versus), with_plan)}
        for row in tier.rows
    ]
    return {"heading": tier.heading, "versus": tier.versus, "headings": headings, "rows": rows}


def _build_difficult(summary: Summary) -> list[dict[str, Any]]:
    """Return the tables of difficult questions: answered with all tokens and not with a smaller image."""
    tables: list[dict[str, Any]] = []
    for tier in summary["tiers"]:
        rows: list[dict[str, Any]] = []
        for row in tier["rows"]:
            score = row.get("difficult")
            if score is None:
                continue
            small = "" if score["low"] is None else f"{score['low']:.1f}–{score['high']:.1f}"
            cells = [PageCell(row["label"], row["label"], title=str(row["spec"]))]
            cells += [PageCell(score["questions"], f"{score['questions']:,}")]
            cells += [PageCell(score["value"], f"{score['value']:.2f}", small=small, css="relative")]
            rows.append({"css": "torino" if row["method"].startswith("torino-") else "", "cells": cells})
        if rows:
            heading = f"Difficult questions of tier {tier['tier']}: answered with all tokens, not with a smaller image"
            tables.append(
                {"heading": heading, "versus": "", "headings": ["Method", "Questions", "Score"], "rows": rows}
            )
    return tables


def _row_class(row: TableRow) -> str:
    if row.row is None:
        return "paper"
    return "torino" if row.row["method"].startswith("torino-") else ""


def _build_cells(row: TableRow, table: ReportTable, level: str, compared: bool, with_plan: bool) -> list[PageCell]:
    cells = [_label_cell(row), _token_cell(row)]
    cells += [_score_cell(row.cells[name], name, level) for name in table.columns]
    if compared:
        cells += _difference_cells(row.row)
    for name in ("failed", "unparsed"):
        count = "" if row.row is None else sum(score["counts"].get(name, 0) for score in row.row["scores"].values())
        cells.append(PageCell(count, str(count)))
    if with_plan:
        time = None if row.row is None else row.row["plan_ms"]
        cells.append(PageCell("", "") if time is None else PageCell(time, f"{time:.1f}"))
    return cells


def _label_cell(row: TableRow) -> PageCell:
    if row.row is None:
        return PageCell(row.label, f"{row.label}, the paper", title="printed in the paper")
    return PageCell(row.label, row.label, title=str(row.row["spec"] or row.row["label"]))


def _token_cell(row: TableRow) -> PageCell:
    if row.row is None or not row.row["tokens_by_task"]:
        return PageCell(row.tokens.strip("~–"), row.tokens)
    tasks = row.row["tokens_by_task"]
    low, high = min(task["min"] for task in tasks.values()), max(task["max"] for task in tasks.values())
    lines = [f"{name}: {task['mean']:.1f} ({task['min']:.0f} to {task['max']:.0f})" for name, task in tasks.items()]
    small = f"{low:.0f}–{high:.0f}" if low < high else "each"
    return PageCell(row.row["tokens"], row.tokens, small=small, title="\n".join(lines))


def _score_cell(cell: TableCell, name: str, level: str) -> PageCell:
    css = " ".join(filter(None, [cell.mark, "relative" if name == RELATIVE else ""]))
    value = "" if cell.value is None else f"{cell.value:.6f}"
    small = title = ""
    if cell.low is not None and cell.high is not None:
        title = f"{level} interval {cell.low:.2f} to {cell.high:.2f}"
        small = f"{cell.low:.1f}–{cell.high:.1f}"
    text, _, sd = cell.text.partition(" ± ")  # the standard deviation goes below, so that the table stays narrow
    return PageCell(value, text, small=small, sd=sd, title=title, css=css)


def _difference_cells(row: Mapping[str, Any] | None) -> list[PageCell]:
    difference = None if row is None else row["versus"]
    if difference is None:
        return [PageCell("", ""), PageCell("", "")]
    small = f"{difference['low']:+.2f} to {difference['high']:+.2f}"
    return [
        PageCell(difference["value"], f"{difference['value']:+.2f}", small=small),
        PageCell(difference["p_holm"], format_p(difference["p_holm"])),
    ]
