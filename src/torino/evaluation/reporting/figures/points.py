"""Collect points of relative score against tokens, from runs or from the paper's tables."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from torino.evaluation.paper import paper_tables
from torino.evaluation.reporting.summary import Summary
from torino.evaluation.reporting.tables import PAPER_TIERS


@dataclass(frozen=True)
class Point:
    """A method at a tier.

    ``sae`` names the SAE, and ``size`` is its sort key; ``low`` and ``high`` bound the relative score; ``complete``
    is False for an unfinished run; ``printed`` marks figures printed in the paper, which were not measured here.
    """

    label: str
    method: str
    tier: str
    tokens: float
    relative: float
    low: float | None = None
    high: float | None = None
    sae: str = ""
    size: float = 0.0
    fixed: bool = False
    complete: bool = True
    printed: bool = False


def collect_points(summaries: Sequence[Summary]) -> list[Point]:
    """Return all points of runs; an SAE label used by several runs is prefixed with the name of its run."""
    points: list[Point] = []
    labels = [label for summary in summaries for label in summary["run"].get("saes", {})]
    for summary in summaries:
        saes = summary["run"].get("saes", {})
        for row in (row for tier in summary["tiers"] for row in tier["rows"]):
            relative = row["relative"]
            if relative is None or row["tokens"] is None:
                continue
            sae = row["sae"] or ""
            size = float((saes.get(sae) or {}).get("latents") or 0)
            if labels.count(sae) > 1:
                sae = f"{summary['name']}: {sae}"
            label = row["label"].partition(" (")[0] if row["method"].startswith("torino-") else row["label"]
            points.append(
                Point(
                    label=label,
                    method=row["method"],
                    tier=row["tier"],
                    tokens=row["tokens"],
                    relative=relative["value"],
                    low=relative["low"],
                    high=relative["high"],
                    sae=sae,
                    size=size,
                    fixed=row["budget"] is not None,
                    complete=summary["progress"]["whole"],
                )
            )
    return points


def paper_points() -> list[Point]:
    """Return the points of the paper's dynamic tables for LLaVA-1.5-7B, for all SAEs trained on CLS tokens."""
    points: list[Point] = []
    for table in paper_tables():
        size = re.fullmatch(r"llava-1\.5-7b-x(\d+)", table.name)
        if size is None:
            continue
        for tier, rows in zip(PAPER_TIERS, table.tiers().values(), strict=True):
            points += [
                Point(
                    label=row.method,
                    method=row.method.lower().replace("_fb", ""),
                    tier=tier,
                    tokens=row.tokens,
                    relative=float(row.relative.removesuffix("%")),
                    sae=f"ε = {size[1]}",
                    size=float(size[1]),
                    fixed=not re.fullmatch(r"TORINO-[PM]", row.method),
                    printed=True,
                )
                for row in rows
            ]
    return points
