"""The scripts that analyze evaluation runs."""

from __future__ import annotations

import json
import lzma
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.synthetic_run import write_synthetic_run
from torino.core.checksum import with_checksum

SCRIPTS = Path(__file__).parents[2] / "research" / "scripts"


def test_a_lead_is_over_other_methods_not_over_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import lead

    def row(method: str, label: str, value: float, dynamic: bool = False) -> dict[str, Any]:
        versus = {"value": value - 96.0, "low": value - 99.0, "high": value - 95.0, "p": 0.04}
        versus = None if label == "TORINO-X" else versus
        return {
            "ids": [label],
            "method": method,
            "label": label,
            "dynamic": dynamic,
            "relative": {"value": value},
            "versus": versus,
        }

    rows = [
        row("torino-x", "torino-x(budget=192, locality=None)", 97.0),
        row("random", "Random", 94.0),
        row("torino-x", "TORINO-X", 96.0),
        row("torino-p", "TORINO-P", 93.0, dynamic=True),
        row("torino-p", "TORINO_FB-P", 92.0),
    ]
    line = lead.lead({"tokens": 192, "rows": rows}, "torino-x")
    assert line == [
        "192",
        "96.0",
        "1",
        "Random 94.0",
        "**+2.0 [1.0, 5.0]**",
        "0.040",
        "3 of 3",
        "dynamic TORINO-P 93.0",
        "92.0",
    ]
    rows[2]["versus"], rows[3]["versus"] = rows[1]["versus"], None  # as --versus torino-p has it: the dynamic row
    assert lead.lead({"tokens": 192, "rows": rows}, "torino-p")[:3] == ["192", "93.0", "4"]


def test_settings_are_chosen_on_one_half_and_reported_on_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import factorial_tables as script

    monkeypatch.setattr(script, "REFERENCE", "visionzip")
    monkeypatch.setitem(script.PUBLISHED, "prunesid", "original-plain")
    for half, questions in (("choose", 30), ("report", 36)):
        for combination in ("compact-plain", "original-plain"):
            write_synthetic_run(tmp_path / half / combination, questions=questions)
    # make original positions better for random, on the half for choosing
    rows = tmp_path / "choose" / "original-plain" / "answers" / "1of1.jsonl"
    rewritten = []
    for line in rows.read_text().splitlines():
        row = json.loads(line)
        if row["setting"].startswith("random"):
            row["prediction"] = "word" if row["task"] == "GQA" else row["prediction"]
        rewritten.append(json.dumps(row))
    rows.write_text("\n".join(rewritten) + "\n")
    output = tmp_path / "result.json"
    words = ["--choose", str(tmp_path / "choose"), "--report", str(tmp_path / "report"), "--name", "test model"]
    monkeypatch.setattr(sys, "argv", ["factorial_tables.py", *words, "-o", str(output)])
    script.main()
    tables = json.loads(output.read_text())["tables"]
    settings = {name: {row["method"]: row["setting"] for row in rows} for name, rows in tables.items()}
    assert settings["as published"]["prunesid"] == "original-plain"
    assert settings["as published"]["random"] == "compact-plain"
    assert settings["own best"]["random"] == "original-plain"
    assert len(set(settings["same setting"].values())) == 1
    differences = [
        cell["difference"] for row in tables["own best"] for cell in row["scores"].values() if "difference" in cell
    ]
    assert len(differences) == 4 * 2  # four methods against the fifth, at two budgets
    assert all(item["p_holm"] >= item["p"] for item in differences)
    assert min(item["p_holm"] for item in differences) == pytest.approx(8 * min(item["p"] for item in differences))
    monkeypatch.setattr(sys, "argv", ["x", *words[:2], "--report", words[1], "--name", "m", "-o", str(output)])
    with pytest.raises(SystemExit, match="tasks in common"):
        script.main()


def test_every_combination_is_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import factorial

    options = {"model": "lab", "data": tmp_path, "tasks": ["A", "B"], "methods": "all", "budget": "8", "batch": 4}
    options |= {"sae": ["lab"], "dtype": "bfloat16", "processes": 2, "output": tmp_path}
    options |= {"part": None, "limit": None}
    words = factorial.command(SimpleNamespace(**options), "median-restore", 2)
    assert words[words.index("--positions") + 1 :][:3] == ["median", "--attention", "restore"]
    assert words[words.index("--shard") + 1] == "2/2"
    assert words[words.index("-o") + 1] == str(tmp_path / "median-restore")
    assert len(factorial.COMBINATIONS) == 9
    more = SimpleNamespace(**options | {"part": "inside", "limit": 24})
    words = factorial.command(more, "median-restore", 1)
    assert words[words.index("-o") + 1] == str(tmp_path / "median-restore.inside")
    assert words[words.index("--limit") + 1] == "24"


def test_packed_runs_name_no_folder_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import pack_runs

    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs" / "compact-plain"
    (run / "answers").mkdir(parents=True)
    (run / "answers" / "1of1.jsonl").write_text('{"prediction": "yes"}\n', encoding="utf-8")
    (run / ".run.json.lock").write_text("")
    metadata = with_checksum({"tasks": [{"path": str(tmp_path / "build" / "A.tsv")}]})
    (run / "run.json").write_text(json.dumps(metadata), encoding="utf-8")

    pack_runs.pack(tmp_path / "runs", tmp_path / "runs.tar.xz")
    content = lzma.decompress((tmp_path / "runs.tar.xz").read_bytes())
    assert str(tmp_path).encode() not in content
    assert b".lock" not in content
    pack_runs.unpack(tmp_path / "runs.tar.xz", tmp_path / "again")
    again = tmp_path / "again" / "compact-plain"
    assert json.loads((again / "run.json").read_text(encoding="utf-8")) == metadata
    assert (again / "answers" / "1of1.jsonl").read_bytes() == (run / "answers" / "1of1.jsonl").read_bytes()
    with pytest.raises(SystemExit, match="not empty"):
        pack_runs.unpack(tmp_path / "runs.tar.xz", tmp_path / "again")
