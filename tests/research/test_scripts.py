"""The scripts that analyze evaluation runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


def test_a_lead_is_over_other_methods_not_over_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "research" / "scripts"))
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
