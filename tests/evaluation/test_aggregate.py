"""The relative score, and the paper's tables: every Relative cell of the paper from its nine scores."""

from __future__ import annotations

import importlib.util
import math
import sys
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path

import pytest

from torino.core.errors import BadParameter, UnknownName
from torino.evaluation import BENCHMARKS, PaperRow, PaperTable, paper_table, paper_tables, relative_score
from torino.evaluation.paper import table_names

SCORED = [table for table in paper_tables() if table.baseline is not None]
ROWS = [(table, row) for table in SCORED for row in table.rows]

# Of the 174 rows, 151 (131 of the appendix, 20 of the main table) come out to the last printed digit. In these 23 our
# figure is one unit of the last digit away, because it is taken from scores that were rounded for printing: the printed
# cell is within what that rounding leaves open, in every row (the test below). Given: the paper's cell, and ours.
ONE_DIGIT_OFF = {
    ("llava-1.5-13b-x64", 217, "FOLDER"): ("95.80", "95.81"),
    ("llava-1.5-13b-x64", 217, "PruMerge"): ("96.69", "96.70"),
    ("llava-1.5-13b-x64", 217, "TORINO-P"): ("97.23", "97.24"),
    ("llava-1.5-13b-x64", 47, "Random"): ("81.21", "81.22"),
    ("llava-1.5-13b-x64", 47, "PruneSID"): ("91.74", "91.75"),
    ("llava-1.5-7b-x1", 243, "PruneSID"): ("96.79", "96.80"),
    ("llava-1.5-7b-x1", 123, "TORINO-P"): ("93.92", "93.93"),
    ("llava-1.5-7b-x2", 290, "FOLDER"): ("98.63", "98.64"),
    ("llava-1.5-7b-x2", 185, "TORINO-M"): ("96.05", "96.06"),
    ("llava-1.5-7b-x4", 365, "Random"): ("97.40", "97.41"),
    ("llava-1.5-7b-x4", 365, "TORINO-P"): ("99.35", "99.36"),
    ("llava-1.5-7b-x4", 284, "Random"): ("95.63", "95.64"),
    ("llava-1.5-7b-x4", 109, "PruneSID"): ("95.07", "95.08"),
    ("llava-1.5-7b-x8", 150, "PruneSID"): ("95.68", "95.69"),
    ("llava-1.5-7b-x16", 136, "Random"): ("85.68", "85.69"),
    ("llava-1.5-7b-x16", 17, "PruMerge"): ("78.15", "78.16"),
    ("llava-1.5-7b-x64-fixed", 128, "FOLDER"): ("90.12", "90.13"),
    ("llava-1.5-7b-x64-fixed", 64, "TORINO_FB-M"): ("89.56", "89.57"),
    ("llava-1.5-7b-x64-spatial", 34, "FOLDER"): ("67.68", "67.69"),
    ("llava-1.5-7b-x64", 217, "PruMerge"): ("96.7", "96.6"),
    ("llava-1.5-7b-x64", 129, "FOLDER"): ("90.1", "90.0"),
    ("llava-1.5-7b-x64", 129, "PruMerge"): ("94.9", "94.8"),
    ("llava-1.5-7b-x64", 47, "PruMerge"): ("90.9", "90.8"),
}


def ours(table: PaperTable, row: PaperRow) -> Decimal:
    """Our relative score, rounded as the cell is printed."""
    assert table.baseline is not None
    value = Decimal(relative_score(row.values, table.baseline.values).value)
    return value.quantize(Decimal(row.relative), ROUND_HALF_UP)


def half(printed: str) -> float:
    """How far a number may be from how it is printed."""
    return 0.5 * 10.0 ** Decimal(printed).as_tuple().exponent  # type: ignore[operator]


def test_all_tables_are_present() -> None:
    appendix = [table for table in SCORED if table.appendix]
    assert len(table_names()) == 10
    assert len(appendix) == 8
    assert sum(len(table.rows) for table in appendix) == 150
    assert {table.name: len(table.rows) for table in SCORED if not table.appendix} == {"llava-1.5-7b-x64": 24}
    assert [len(rows) for table in appendix for rows in table.tiers().values()].count(6) == 21
    for table in SCORED:
        assert table.baseline is not None
        assert list(table.baseline.scores) == list(BENCHMARKS)
        assert all(list(row.scores) == list(BENCHMARKS) for row in table.rows)
        assert len(table.tiers()) == 3


def test_relative_score_reproduces_the_paper() -> None:
    off = {
        (table.name, row.tokens, row.method): (row.relative, str(ours(table, row)))
        for table, row in ROWS
        if ours(table, row) != Decimal(row.relative)
    }
    assert len(ROWS) == 174
    assert off == ONE_DIGIT_OFF
    appendix = [key for key in off if paper_table(key[0]).appendix]
    assert (150 - len(appendix), 24 - (len(off) - len(appendix))) == (131, 20)


@pytest.mark.parametrize("table", SCORED, ids=lambda table: table.name)
def test_relative_cells_are_within_rounding(table: PaperTable) -> None:
    """The nine scores and the baseline are known to half a digit; the printed mean must be possible within that."""
    assert table.baseline is not None
    full = table.baseline
    for row in table.rows:
        low = relative_score(
            {name: row.values[name] - half(text) for name, text in row.scores.items()},
            {name: full.values[name] + half(text) for name, text in full.scores.items()},
        )
        high = relative_score(
            {name: row.values[name] + half(text) for name, text in row.scores.items()},
            {name: full.values[name] - half(text) for name, text in full.scores.items()},
        )
        assert low.value - half(row.relative) <= float(row.relative) <= high.value + half(row.relative), row
        # and that leaves hardly a choice: 0.05 points in the appendix, 0.5 in the main table with its single digit
        assert high.value - low.value < (0.05 if table.appendix else 0.5)
        # no figure is more than one unit of its last digit away
        assert abs(ours(table, row) - Decimal(row.relative)) <= Decimal(str(2 * half(row.relative)))


def test_baseline_is_100() -> None:
    for table in SCORED:
        assert table.baseline is not None
        assert relative_score(table.baseline.values, table.baseline.values).value == pytest.approx(100)
        assert float(table.baseline.relative) == 100


def test_contents_of_the_tables() -> None:
    main = paper_table("llava-1.5-7b-x64")
    best = next(row for row in main.rows if (row.tokens, row.method) == (217, "TORINO-M"))
    assert (best.relative, best.marks["Relative"], best.latency_ms) == ("98.7", "best", (26.4, 2.6))
    assert best.scores["MME"] == "1778.8"
    assert (main.model, main.setting) == ("LLaVA-1.5-7B", "dynamic")
    assert "nothing here was measured" in main.notice
    assert "ε=64" in main.sae
    fixed = paper_table("llava-1.5-7b-x64-fixed")
    assert list(fixed.tiers()) == [192, 128, 64]
    assert {row.method for row in fixed.rows} >= {"TORINO_FB-P", "TORINO_FB-P-r2", "PruMerge"}
    spatial = paper_table("llava-1.5-7b-x64-spatial")
    assert "spatial" in spatial.sae
    ablation = paper_table("no-sae")
    assert [(row.method, row.relative, row.tokens) for row in ablation.rows] == [
        ("No SAE", "84.40", 47),
        ("TORINO-M (ε=64)", "89.60", 47),
    ]
    with pytest.raises(UnknownName, match="No table of the paper"):
        paper_table("llava")


def test_marks_agree_with_the_scores() -> None:
    """Best and second best of each tier, as set by the paper, are its highest relative scores."""
    for table in SCORED:
        for tier in table.tiers().values():
            order = sorted(tier, key=lambda row: -float(row.relative))
            assert order[0].marks.get("Relative") == "best"
            assert [row.marks.get("Relative") for row in order[2:]] == [None] * (len(order) - 2)


def test_script_converts_latex_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small table in the paper's LaTeX goes through the script; the whole source is not part of the package."""
    path = Path(__file__).parents[2] / "scripts" / "read_paper.py"
    spec = importlib.util.spec_from_file_location("read_paper", path)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    head = " & ".join(["Method", *(name.replace(" ", "$^{\\text{") + "}}$" * (" " in name) for name in script.PRINTED)])
    body = rf"""\toprule
    {head} & Relative \\ \midrule
    \rowcolor{{gray!15}} \multicolumn{{11}}{{c}}{{\textit{{Upper Bound, 576 Tokens (100\%)}}}} \\
    Baseline & 60.00 & 60.00 & 50.00 & 1800.00 & 80.00 & 70.00 & 40.00 & 50.00 & 30.00 & 100.00\% \\
    \multicolumn{{11}}{{c}}{{\textit{{Retain $\sim$64 Tokens in Average ($\downarrow$ 89\%)}}}} \\ \midrule
    $\mathrm{{TORINO}}_{{FB}}$-P & \textbf{{54.00}} & 54.00 & 45.00 & 1620.00 & 72.00 & 63.00 & \underline{{36.00}}
    & 45.00 & 27.00 & 90.00\% \\ \bottomrule"""
    label = "tab:results-llava-v1-5-7b-x1-cls-only"
    source = tmp_path / "paper.tex"
    source.write_text(
        r"\begin{table*}\caption{LLaVA-1.5-7B, $\varepsilon=1$.}" + rf"\label{{{label}}}" + body + r"\end{table*}",
        encoding="utf-8",
    )
    monkeypatch.setattr(script, "TABLES", {label: ("small", True)})
    monkeypatch.setattr(sys, "argv", ["read_paper.py", "--paper", str(source), "--out", str(tmp_path)])
    script.main()
    monkeypatch.setattr("torino.evaluation.paper.FOLDER", tmp_path)
    table = paper_table("small")
    assert table.baseline is not None
    assert (table.rows[0].method, table.rows[0].tokens) == ("TORINO_FB-P", 64)
    assert table.rows[0].marks == {"GQA": "best", "TextVQA": "second"}
    assert ours(table, table.rows[0]) == Decimal("90.00")


def test_benchmarks_without_a_score_are_left_out() -> None:
    result = relative_score({"GQA": 30.0, "MMVet": math.nan, "MME": 900.0}, {"GQA": 60.0, "MMVet": 31.0, "POPE": 80.0})
    assert result.value == 50
    assert result.ratios == {"GQA": 50}
    assert set(result.left_out) == {"MMVet", "POPE", "MME"}
    with pytest.raises(BadParameter, match="No benchmark has a score both"):
        relative_score({"GQA": 30.0}, {"POPE": 80.0})
    with pytest.raises(BadParameter, match="baseline of GQA is 0"):
        relative_score({"GQA": 30.0}, {"GQA": 0.0})
