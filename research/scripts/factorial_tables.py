r"""Turn the runs of ``factorial.py`` into three tables: as published, one setting for all, each method at its best.

Settings are chosen on one half of the photos and reported on the other:

- *as published*: the positions and attention of each method's release (compact and plain for most of them);
- *same setting*: the combination with the highest mean relative score over all methods and budgets;
- *own best*: for each method, the combination with its highest mean relative score over the budgets.

Scores are percent of the score with all tokens, averaged over tasks. Differences are paired by image, and p-values are
corrected by Holm's rule for all methods and budgets of a table.

Examples
--------
::

    python research/scripts/factorial_tables.py --choose runs/factorial/lab/choose --report runs/factorial/lab/report \
        --name "miniature LLaVA" -o research/results/factorial-lab.json
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from torino.core.io import write_json
from torino.evaluation.latency.probes import machine, versions
from torino.evaluation.protocol import FULL, LABELS
from torino.evaluation.results import open_run
from torino.evaluation.scoring import ScoreStats
from torino.evaluation.statistics import Interval, holm, relative_difference, relative_interval

REFERENCE = "torino-x"
PUBLISHED = {
    "torino-x": "original-proportional",
    "restore": "median-restore",
    "fastv": "original-plain",
    "pyramiddrop": "original-plain",
    "dart": "original-plain",
}
Stats = Mapping[str, ScoreStats]


@dataclass
class Half:
    """The scores of all combinations on one half of the photos.

    ``scores[combination][method, budget]`` maps task to statistics by image; seeds are averaged.
    """

    folder: Path
    scores: dict[str, dict[tuple[str, int], Stats]] = field(default_factory=dict)
    full: Stats = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        folders = sorted(path.parent for path in self.folder.glob("*/run.json"))
        if not folders:
            raise SystemExit(f"{self.folder} has no runs. Give the output folder of factorial.py.")
        for folder in folders:
            self._read(folder)

    def _read(self, folder: Path) -> None:
        run = open_run(folder)
        facts = {
            "model": run.metadata["model"],
            "tasks": {task["task"]: task["fingerprint"] for task in run.metadata["tasks"]},
        }
        if self.facts and facts != self.facts:
            raise SystemExit(f"{folder} has another model or other tasks than the runs beside it.")
        self.facts = facts
        scored = run.scores()
        groups: dict[tuple[str, int], dict[str, list[ScoreStats]]] = {}
        for name, setting in run.settings.items():
            tasks = {task: scores[name].by_image() for task, scores in scored.items() if name in scores}
            if len(tasks) < len(scored):
                raise SystemExit(f"{folder} has no answers of {name} for some tasks. Finish the run.")
            if name == FULL.id:
                self.full = tasks
                continue
            if setting.budget is None or setting.tier != str(setting.budget):  # dynamic lengths and their means
                continue
            method = re.sub(r"\(\)$", "", re.sub(r",?\s*(seed|budget)=\d+", "", setting.spec))
            group = groups.setdefault((method, setting.budget), {})
            for task, stats in tasks.items():
                group.setdefault(task, []).append(stats)
        combination = self.scores.setdefault(folder.name.split(".")[0], {})
        for key, group in groups.items():
            combination[key] = {task: _mean(stats) for task, stats in group.items()}

    def relative(self, combination: str, method: str, budget: int) -> float:
        """Return a relative score."""
        stats = self.scores[combination][method, budget]
        return float(np.mean([100 * stats[task].value / self.full[task].value for task in self.full]))

    @property
    def methods(self) -> list[str]:
        """All methods, in the order of the first run."""
        return list(dict.fromkeys(method for scores in self.scores.values() for method, _ in scores))

    @property
    def budgets(self) -> list[int]:
        """All budgets, largest first."""
        return sorted({budget for scores in self.scores.values() for _, budget in scores}, reverse=True)

    def mean(self, combination: str, method: str) -> float:
        """Return the mean relative score of a method over the budgets."""
        return float(np.mean([self.relative(combination, method, budget) for budget in self.budgets]))


def _mean(stats: list[ScoreStats]) -> ScoreStats:
    return replace(stats[0], sums=np.mean([item.sums for item in stats], axis=0))


def published(method: str) -> str:
    """Return the combination of a method's release."""
    return PUBLISHED.get(re.split(r"\W", method.replace("torino-x", "torino_x"))[0].replace("_", "-"), "compact-plain")


def same_for_all(choose: Half) -> str:
    """Return the combination that is best for all methods together."""
    common = [
        method for method in choose.methods if all((method, choose.budgets[0]) in s for s in choose.scores.values())
    ]
    return max(choose.scores, key=lambda c: float(np.mean([choose.mean(c, method) for method in common])))


def own_best(choose: Half, method: str) -> str:
    """Return the combination that is best for one method."""
    ran = [name for name, scores in choose.scores.items() if (method, choose.budgets[0]) in scores]
    return max(ran, key=lambda name: choose.mean(name, method))


def build_table(report: Half, chosen: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the rows of a table: scores, intervals, and differences to the reference with corrected p-values."""
    rows: list[dict[str, Any]] = []
    compared: list[dict[str, Any]] = []
    for method, combination in chosen.items():
        row: dict[str, Any] = {
            "method": method,
            "label": LABELS.get(method, method),
            "setting": combination,
            "scores": {},
        }
        for budget in report.budgets:
            stats = report.scores[combination].get((method, budget))
            if stats is None:
                continue
            cell: dict[str, Any] = _values(relative_interval(stats, report.full))
            cell["tasks"] = {task: round(item.value, 2) for task, item in stats.items()}
            if method != REFERENCE and REFERENCE in chosen:
                other = report.scores[chosen[REFERENCE]][REFERENCE, budget]
                difference = relative_difference(stats, other, report.full)
                cell["difference"] = {**_values(difference), "p": difference.p}
                compared.append(cell["difference"])
            row["scores"][str(budget)] = cell
        rows.append(row)
    for item, p in zip(compared, holm([item["p"] for item in compared]), strict=True):
        item["p_holm"] = p
    return sorted(rows, key=lambda row: -float(np.mean([cell["value"] for cell in row["scores"].values()])))


def _values(interval: Interval) -> dict[str, float]:
    return {"value": round(interval.value, 2), "low": round(interval.low, 2), "high": round(interval.high, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--choose", type=Path, required=True, help="runs on the photos for choosing")
    add("--report", type=Path, required=True, help="runs on the photos for reporting")
    add("--name", required=True, help="name of the model in tables")
    add("-o", "--output", type=Path, required=True, help="result file")
    args = parser.parse_args()
    choose, report = Half(args.choose), Half(args.report)
    overlap = set(choose.facts["tasks"].values()) & set(report.facts["tasks"].values())
    if overlap:
        raise SystemExit(
            "The two halves have tasks in common. Make them with make_tasks.py --half choose and --half report."
        )
    best = same_for_all(choose)
    chosen = {
        "as published": {method: published(method) for method in report.methods},
        "same setting": dict.fromkeys(report.methods, best),
        "own best": {method: own_best(choose, method) for method in report.methods},
    }
    means = {
        name: round(float(np.mean([half.mean(name, m) for m in half.methods if (m, half.budgets[0]) in scores])), 2)
        for half in (choose,)
        for name, scores in half.scores.items()
    }
    result: dict[str, Any] = {
        "format": "torino-results/1",
        "name": args.output.stem,
        "title": f"Positions, attention and methods on the {args.name}",
        "report": None,
        "command": "python " + " ".join(["research/scripts/factorial_tables.py", *sys.argv[1:]]),
        "seed": 0,
        "date": time.strftime("%Y-%m-%d"),
        "hardware": machine(),
        "versions": versions(),
        "model": args.name,
        "reference": REFERENCE,
        "chosen on": choose.facts,
        "reported on": report.facts,
        "images": {task: len(stats.units) for task, stats in report.full.items()},
        "full": {task: round(stats.value, 2) for task, stats in report.full.items()},
        "budgets": report.budgets,
        "same setting": best,
        "combinations": means,
        "tables": {name: build_table(report, settings) for name, settings in chosen.items()},
        "all": {
            name: {f"{method}@{budget}": round(report.relative(name, method, budget), 2) for method, budget in scores}
            for name, scores in report.scores.items()
        },
    }
    write_json(args.output, result)
    for name, rows in result["tables"].items():
        print(f"\n{name}")
        for row in rows:
            cells = "  ".join(f"{budget}: {cell['value']:5.1f}" for budget, cell in row["scores"].items())
            print(f"  {row['label']:28} {row['setting']:22} {cells}")


if __name__ == "__main__":
    main()
