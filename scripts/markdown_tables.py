"""Markdown tables for the pages that scripts write."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(heads: Sequence[str], rows: Iterable[Sequence[object]], left: int = 1) -> str:
    """Format a Markdown table; the first ``left`` columns are aligned to the left."""
    aligned = ["---"] * left + ["---:"] * (len(heads) - left)
    lines = [heads, aligned, *[["" if cell is None else str(cell) for cell in row] for row in rows]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
