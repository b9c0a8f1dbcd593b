"""The paper's own tables, as data: what it printed, to be set beside what was measured here.

Nothing in them was measured with this package. Figures are kept as the texts that were printed, so that their rounding
is not lost. ``scripts/read_paper.py`` made the files from the LaTeX source.
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

    ``scores`` and ``relative`` are the texts as printed; ``marks`` says which of them the paper set as best or second.
    ``tokens`` is how many the tier keeps on average, ``latency_ms`` mean and standard deviation where given.
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
    """One table of the paper; ``baseline`` is its row of all 576 tokens, absent from the ablation without an SAE."""

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
        """Rows by the tokens kept, most first."""
        found: dict[int, list[PaperRow]] = {}
        for row in self.rows:
            found.setdefault(row.tokens, []).append(row)
        return found


def table_names() -> tuple[str, ...]:
    """Names of the tables that ship, the main one first."""
    names = sorted(path.stem for path in FOLDER.glob("*.json"))
    return tuple(sorted(names, key=lambda name: name != "llava-1.5-7b-x64"))


@cache
def paper_table(name: str) -> PaperTable:
    """One table of the paper."""
    if name not in table_names():
        raise unknown_name("table of the paper", name, table_names())
    read = read_json(FOLDER / f"{name}.json")
    baseline = _row(read["baseline"], 576) if "baseline" in read else None
    return PaperTable(
        name,
        read["table"],
        read["caption"],
        read["model"],
        read["sae"],
        read["setting"],
        read["appendix"],
        baseline,
        tuple(_rows(read)),
        read["notice"],
    )


def paper_tables() -> tuple[PaperTable, ...]:
    """All tables of the paper."""
    return tuple(paper_table(name) for name in table_names())


def _rows(read: Mapping[str, Any]) -> Iterator[PaperRow]:
    for tier in read.get("tiers", []):
        for row in tier["rows"]:
            yield _row(row, tier["tokens"])
    for row in read.get("rows", []):
        yield _row(row, read["tokens"])


def _row(row: Mapping[str, Any], tokens: int) -> PaperRow:
    time = row.get("latency_ms")
    latency = None if time is None else (float(time["mean"]), float(time["sd"]))
    return PaperRow(row["method"], tokens, row.get("scores", {}), row["relative"], row.get("marks", {}), latency)
