"""Load the tables printed in the paper, for comparison with measured results.

Nothing in them was measured with this package. Figures are stored as printed texts, so that their rounding is known.
``scripts/read_paper.py`` made the files from the LaTeX source.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from torino.core.errors import unknown_name
from torino.core.io import read_json

FOLDER = Path(__file__).parents[1] / "data" / "paper"


@dataclass(frozen=True)
class PaperRow:
    """One row of a table: a method at a tier.

    ``scores`` and ``relative`` are the printed texts; ``marks`` lists which of them the paper marks as best or second.
    ``tokens`` is the mean number of tokens of the tier, ``latency_ms`` mean and standard deviation if given.
    """

    method: str
    tokens: int
    scores: Mapping[str, str]
    relative: str
    marks: Mapping[str, str]
    latency_ms: tuple[float, float] | None = None

    @property
    def values(self) -> dict[str, float]:
        """The scores as numbers."""
        return {name: float(text) for name, text in self.scores.items()}


@dataclass(frozen=True)
class PaperTable:
    """One table of the paper; ``baseline`` is its row with all 576 tokens, None for the ablation without an SAE."""

    name: str
    label: str
    caption: str
    model: str
    sae: str
    setting: str
    appendix: bool
    baseline: PaperRow | None
    rows: tuple[PaperRow, ...]
    notice: str

    def tiers(self) -> dict[int, list[PaperRow]]:
        """Return the rows by number of tokens, largest first."""
        tiers: dict[int, list[PaperRow]] = {}
        for row in self.rows:
            tiers.setdefault(row.tokens, []).append(row)
        return tiers


def table_names() -> tuple[str, ...]:
    """Return the names of the tables that ship with torino, the main one first."""
    names = sorted(path.stem for path in FOLDER.glob("*.json"))
    return tuple(sorted(names, key=lambda name: name != "llava-1.5-7b-x64"))


@cache
def paper_table(name: str) -> PaperTable:
    """Load one table of the paper."""
    if name not in table_names():
        raise unknown_name("table of the paper", name, table_names())
    content = read_json(FOLDER / f"{name}.json")
    baseline = _parse_row(content["baseline"], 576) if "baseline" in content else None
    return PaperTable(
        name,
        content["table"],
        content["caption"],
        content["model"],
        content["sae"],
        content["setting"],
        content["appendix"],
        baseline,
        tuple(_parse_rows(content)),
        content["notice"],
    )


def paper_tables() -> tuple[PaperTable, ...]:
    """Load all tables of the paper."""
    return tuple(paper_table(name) for name in table_names())


def _parse_rows(content: Mapping[str, Any]) -> Iterator[PaperRow]:
    for tier in content.get("tiers", []):
        for row in tier["rows"]:
            yield _parse_row(row, tier["tokens"])
    for row in content.get("rows", []):
        yield _parse_row(row, content["tokens"])


def _parse_row(row: Mapping[str, Any], tokens: int) -> PaperRow:
    time = row.get("latency_ms")
    latency = None if time is None else (float(time["mean"]), float(time["sd"]))
    return PaperRow(row["method"], tokens, row.get("scores", {}), row["relative"], row.get("marks", {}), latency)
