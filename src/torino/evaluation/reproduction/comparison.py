"""Compare a run with the figures that the paper prints, cell by cell."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypedDict

from torino.core.text import neutralize_markdown
from torino.evaluation.aggregate import relative_score
from torino.evaluation.benchmarks import BENCHMARKS
from torino.evaluation.paper import PaperRow, PaperTable
from torino.evaluation.reporting.report import list_facts, list_warnings
from torino.evaluation.reporting.summary import Summary
from torino.evaluation.reporting.tables import (
    RELATIVE,
    build_table,
    format_tokens,
    is_incomplete,
    markdown_grid,
    paper_rows_for,
)

FORMAT = "torino-comparison/1"
LEGEND = (
    "The paper's figures are those printed in it. A difference in brackets is one that sampling may explain: the "
    "paper's figure is inside our 95 % interval. * marks rows without all answers."
)


class ComparedScore(TypedDict):
    """Our score, its interval, the paper's score, and the difference; None where one of them is missing."""

    ours: float | None
    low: float | None
    high: float | None
    paper: float | None
    difference: float | None
    inside: bool | None


class ComparedRow(TypedDict):
    """A method at a tier.

    ``table`` is the paper's table, ``complete`` tells whether our row has all answers, and ``relative_over`` lists the
    benchmarks of both relative scores.
    """

    method: str
    table: str
    tokens: str
    paper_tokens: int
    complete: bool
    relative_over: list[str]
    scores: dict[str, ComparedScore]


class ComparedTier(TypedDict):
    """The rows of a tier that are both in the run and in the paper."""

    tier: str
    heading: str
    rows: list[ComparedRow]


class Comparison(TypedDict):
    """A run beside the paper; written as ``comparison.json``."""

    format: str
    recipe: str
    columns: dict[str, str]
    tiers: list[ComparedTier]
    verdict: list[str]
    changes: list[str]
    notes: list[str]
    facts: dict[str, str]


def compare_with_paper(
    summary: Summary,
    tables: Sequence[PaperTable],
    *,
    recipe: str = "",
    changes: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> Comparison:
    """Set a summarized run beside tables of the paper.

    Our relative scores are macro-averages over the tasks of the run. If these are not all nine, the paper's relative
    scores are computed again from its printed scores over the same tasks.

    Parameters
    ----------
    summary : Summary
    tables : sequence of PaperTable
    recipe : str
        Name of the recipe.
    changes : sequence of str
        What differs from the recipe, because the user changed it.
    notes : sequence of str
        Notes of the recipe.
    """
    columns = {column["task"]: column["label"] for column in summary["columns"]} | {RELATIVE: "Relative"}
    headings = {tier.tier: tier.heading for tier in build_table(summary).tiers}
    tiers: list[ComparedTier] = []
    baseline = summary["baseline"]
    if baseline is not None:
        printed = [(table, table.baseline) for table in tables if table.baseline is not None][:1]
        rows = [_compare_row("All tokens", baseline, row, table, columns) for table, row in printed]
        tiers.append({"tier": "full", "heading": headings["full"], "rows": rows})
    for tier in summary["tiers"]:
        printed = {row.method: (table, row) for table in tables for row in paper_rows_for(table, tier)}
        pairs = [(row, *printed[row["label"]]) for row in tier["rows"] if row["label"] in printed]
        rows = [_compare_row(row["label"], row, paper, table, columns) for row, table, paper in pairs]
        tiers.append({"tier": tier["tier"], "heading": headings[tier["tier"]], "rows": rows})
    return {
        "format": FORMAT,
        "recipe": recipe,
        "columns": columns,
        "tiers": (shown := [tier for tier in tiers if tier["rows"]]),
        "verdict": _verdict(shown, columns),
        "changes": list(changes),
        "notes": [
            *list_warnings(summary),
            *(column["note"] for column in summary["columns"] if column["note"]),
            *notes,
        ],
        "facts": {name: value for name, value in list_facts(summary).items() if value},
    }


def table_lines(tier: ComparedTier, columns: Mapping[str, str]) -> Iterator[list[str]]:
    """Yield the lines of a tier: for each method ours, the paper's, and the difference."""
    for row in tier["rows"]:
        scores = [row["scores"][name] for name in columns]
        star = "" if row["complete"] else "*"
        yield [row["method"], f"{row['tokens']}{star}", *(_format(score["ours"]) for score in scores)]
        yield ["  paper", f"~{row['paper_tokens']}", *(_format(score["paper"]) for score in scores)]
        yield ["  difference", "", *(_format_difference(score) for score in scores)]


def to_markdown(comparison: Comparison) -> str:
    """Format the comparison as Markdown."""
    columns = comparison["columns"]
    parts = [f"# {comparison['recipe']}: our run beside the paper"]
    parts += [f"> **Not the recipe:** {text}" for text in comparison["changes"]]
    parts += [f"> {text}" for text in comparison["notes"]]
    parts.append("\n".join(f"- {text}" for text in comparison["verdict"]))
    parts.append(LEGEND)
    headings = ["Method", "Tokens", *columns.values()]
    for tier in comparison["tiers"]:
        rows = [
            [f"*{cell.strip()}*" if cell.startswith(" ") else cell for cell in line]
            for line in table_lines(tier, columns)
        ]
        grid = markdown_grid([headings, ["---", *["---:"] * (len(headings) - 1)], *rows])
        parts.append(f"**{tier['heading']}**\n\n{grid}")
    parts.append("\n".join(f"- {name}: {' '.join(value.split())}" for name, value in comparison["facts"].items()))
    return neutralize_markdown("\n\n".join(part for part in parts if part) + "\n", allowed=[])


def _compare_row(
    method: str, row: Mapping[str, Any], paper: PaperRow, table: PaperTable, columns: Mapping[str, str]
) -> ComparedRow:
    scores = {
        name: _compare_score(row["scores"].get(name), paper.values.get(name)) for name in columns if name != RELATIVE
    }
    left_out = set((row["relative"] or {}).get("left_out", ()))
    over = [name for name in columns if name in BENCHMARKS and name not in left_out]
    scores[RELATIVE] = _compare_score(row["relative"], _paper_relative(paper, table, over))
    return {
        "method": method,
        "table": table.name,
        "tokens": format_tokens(row),
        "paper_tokens": paper.tokens,
        "complete": not is_incomplete(row),
        "relative_over": over,
        "scores": scores,
    }


def _compare_score(ours: Mapping[str, Any] | None, paper: float | None) -> ComparedScore:
    value = None if ours is None else ours["value"]
    low, high = (None, None) if ours is None else (ours.get("low"), ours.get("high"))
    difference = None if value is None or paper is None else value - paper
    inside = None if paper is None or value is None or low is None or high is None else low <= paper <= high
    return {"ours": value, "low": low, "high": high, "paper": paper, "difference": difference, "inside": inside}


def _paper_relative(paper: PaperRow, table: PaperTable, tasks: Sequence[str]) -> float | None:
    """Return the paper's relative score: as printed for all nine benchmarks, else computed over ``tasks``."""
    if set(tasks) == set(BENCHMARKS):
        return float(paper.relative.removesuffix("%"))
    baseline = {} if table.baseline is None else table.baseline.values
    shared = [name for name in tasks if name in paper.values and name in baseline]
    if not shared:
        return None
    scores, full = ({name: values[name] for name in shared} for values in (paper.values, baseline))
    return relative_score(scores, full).value


def _verdict(tiers: Sequence[ComparedTier], columns: Mapping[str, str]) -> list[str]:
    """Return sentences about all differences."""
    rows = [(tier, row) for tier in tiers for row in tier["rows"]]
    if not rows:
        return ["No row of this run is in the paper's tables: compare runs with the paper's tiers and methods."]
    cells = [row["scores"][name] for _, row in rows for name in columns if name != RELATIVE]
    tested = [cell for cell in cells if cell["inside"] is not None]
    inside = sum(bool(cell["inside"]) for cell in tested)
    sentences = [f"{inside} of {len(tested)} scores of the paper are inside our 95 % intervals."]
    differences = [
        (value, row["method"], tier["tier"])
        for tier, row in rows
        if tier["tier"] != "full" and (value := row["scores"][RELATIVE]["difference"]) is not None
    ]
    if differences:
        mean = math.fsum(value for value, _, _ in differences) / len(differences)
        largest, method, tier = max(differences, key=lambda item: abs(item[0]))
        what = f"(k, δ) = ({tier.replace(',', ', ')})" if "," in tier else f"{tier} tokens"
        sentences.append(
            f"Relative scores differ from the paper's by {mean:+.2f} on average over {len(differences)} rows; the "
            f"largest difference is {largest:+.2f} ({method}, {what})."
        )
    left_out = [name for name in BENCHMARKS if any(name not in row["relative_over"] for _, row in rows)]
    if left_out:
        sentences.append(
            f"Relative scores, ours and the paper's, leave out {', '.join(left_out)}, where this run has no score or "
            "scores 0 with all tokens."
        )
    return sentences


def _format(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _format_difference(score: ComparedScore) -> str:
    if score["difference"] is None:
        return "–"
    text = f"{score['difference']:+.2f}"
    return f"({text})" if score["inside"] else text
