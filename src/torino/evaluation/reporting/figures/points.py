"""Points of the plane of tokens and relative score, from runs or from the paper's tables."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from torino.evaluation.paper import paper_tables
from torino.evaluation.reporting.summary import Document
from torino.evaluation.reporting.tables import PAIRS


@dataclass(frozen=True)
class Point:
    """A method at a tier.

    ``sae`` names the SAE, or the paper's, and ``size`` sorts them; ``low`` and ``high`` bound the relative score.
    ``printed`` marks what the paper printed and nobody measured here.
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
    whole: bool = True
    printed: bool = False


def points_of(documents: Sequence[Document]) -> list[Point]:
    """All points of measured runs; SAEs of different runs that share a name are told apart by the run."""
    found: list[Point] = []
    names = [label for document in documents for label in document["run"].get("saes", {})]
    for document in documents:
        saes = document["run"].get("saes", {})
        for tier in document["tiers"]:
            for row in tier["rows"]:
                told = row["relative"]
                if told is None or row["tokens"] is None:
                    continue
                sae = row["sae"] or ""
                size = float((saes.get(sae) or {}).get("latents") or 0)
                if names.count(sae) > 1:
                    sae = f"{document['name']}: {sae}"
                found.append(
                    Point(
                        row["label"].partition(" (")[0] if row["method"].startswith("torino-") else row["label"],
                        row["method"],
                        row["tier"],
                        row["tokens"],
                        told["value"],
                        told["low"],
                        told["high"],
                        sae,
                        size,
                        row["budget"] is not None,
                        document["progress"]["whole"],
                    )
                )
    return found


def paper_points() -> list[Point]:
    """The points that the paper's tables for LLaVA-1.5-7B print, dynamic setting, all SAEs trained on CLS tokens."""
    found: list[Point] = []
    for table in paper_tables():
        size = re.fullmatch(r"llava-1\.5-7b-x(\d+)", table.name)
        if size is None:
            continue
        for tier, rows in zip(PAIRS, table.tiers().values(), strict=True):
            for row in rows:
                fixed = not re.fullmatch(r"TORINO-[PM]", row.method)
                method = row.method.lower().replace("_fb", "")
                relative = float(row.relative.removesuffix("%"))
                sae = f"ε = {size[1]}"
                found.append(
                    Point(
                        row.method,
                        method,
                        tier,
                        row.tokens,
                        relative,
                        sae=sae,
                        size=float(size[1]),
                        fixed=fixed,
                        printed=True,
                    )
                )
    return found
