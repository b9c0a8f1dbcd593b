"""The score on difficult questions, against a count by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.synthetic_run import METHODS, write_synthetic_run
from torino.evaluation.reporting.report import write_report
from torino.evaluation.reporting.scores_file import read_scores
from torino.evaluation.reporting.summary import summarize_and_save
from torino.evaluation.reporting.tables import iter_rows
from torino.evaluation.results import open_run


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_synthetic_run(tmp_path_factory.mktemp("difficult") / "llava", methods=[*METHODS, "downsample"])


@pytest.fixture(scope="module")
def summary(run_folder: Path) -> dict[str, Any]:
    return summarize_and_save(open_run(run_folder), draws=50)


def rights(folder: Path) -> dict[str, dict[tuple[str, str], bool]]:
    """Return whether each question was answered, by setting."""
    run = open_run(folder)
    answers = {(name, s.index): s.answers[0] for name, task in run.open_tasks().items() for s in task.samples}
    table: dict[str, dict[tuple[str, str], bool]] = {}
    for row in run.rows():
        key = (row["task"], str(row["index"]))
        table.setdefault(row["setting"], {})[key] = row["prediction"] == answers[key]
    return table


def test_scores_equal_a_count_by_hand(run_folder: Path, summary: dict[str, Any]) -> None:
    table, compared = rights(run_folder), 0
    for tier in summary["tiers"]:
        small = next(row["ids"][0] for row in tier["rows"] if row["method"] == "downsample")
        hard = [key for key, right in table["full"].items() if right and not table[small][key]]
        assert len(hard) > 5
        for row in tier["rows"]:
            shares = [sum(table[setting][key] for key in hard) / len(hard) for setting in row["ids"]]
            assert row["difficult"]["questions"] == len(hard)
            assert row["difficult"]["value"] == pytest.approx(100 * sum(shares) / len(shares))
            assert row["difficult"]["low"] <= row["difficult"]["value"] <= row["difficult"]["high"]
            compared += 1
    assert compared > 20
    assert all(row["difficult"]["value"] == 0 for row in iter_rows(summary) if row["method"] == "downsample")


def test_reports_show_them(run_folder: Path, summary: dict[str, Any], tmp_path: Path) -> None:
    assert read_scores(run_folder / "scores.json")["tiers"] == summary["tiers"]
    write_report(summary, tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "## Difficult questions" in text
    assert text.count("| Smaller image |") >= len(summary["tiers"])
    page = (tmp_path / "report.html").read_text()
    assert page.count("Difficult questions of tier") == len(summary["tiers"])
    lines = [line for line in (tmp_path / "details.csv").read_text().splitlines() if ",difficult," in line]
    assert len(lines) == sum(len(tier["rows"]) for tier in summary["tiers"])


def test_runs_without_smaller_images_have_none(tmp_path: Path) -> None:
    folder = write_synthetic_run(tmp_path / "llava", questions=8)
    summary = summarize_and_save(open_run(folder), draws=20)
    assert all("difficult" not in row for row in iter_rows(summary))
    write_report(summary, tmp_path / "out")
    assert "Difficult" not in (tmp_path / "out" / "report.md").read_text()
