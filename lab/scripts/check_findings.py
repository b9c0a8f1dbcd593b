r"""Test the paper's findings on the lab's model, from one run of ``torino eval`` with several SAEs.

The run holds TORINO-P and TORINO-M, dynamic at the paper's three (k, δ) and at fixed budgets, for each SAE, and the
main SAE also at the mean lengths of its dynamic settings (``--matched`` in a second run, or in the same). Relative
scores are percent of the score with all tokens, averaged over tasks. Intervals are 95 %, bootstrapped over images; a
finding holds if the interval is on its side of zero.

Examples
--------
::

    torino eval --model lab --data build/lab/tasks --tasks Lab-POPE,Lab-VQAv2,Lab-DAQUAR,Lab-Collage,Lab-Small \
        --limit 200 --sae e4=SAES/all/x4 --sae e16=SAES/all/x16 --sae e64=SAES/all/x64 --sae cls=SAES/cls/x16 \
        --sae random2=SAES/random2/x16 --sae none --methods torino-p,torino-m --no-matched --budget 65,43,22 -o runs/saes
    torino eval --model lab --data build/lab/tasks --tasks Lab-POPE,Lab-VQAv2,Lab-DAQUAR,Lab-Collage,Lab-Small \
        --limit 200 --sae e4=SAES/all/x4 --methods torino-p,torino-m --budget none -o runs/matched
    python lab/scripts/check_findings.py runs/saes runs/matched -o research/results/lab-findings.json
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from torino.core.io import write_json
from torino.evaluation.latency.probes import machine, versions
from torino.evaluation.protocol import KD_PAIRS, NO_SAE, Setting
from torino.evaluation.results import Run, open_run
from torino.evaluation.scoring import ScoreStats
from torino.evaluation.statistics import Interval, relative_difference, relative_interval

METHODS = ("torino-p", "torino-m")
TIERS = [f"{k},{delta}" for k, delta in KD_PAIRS]
LETTERS = {"torino-p": "P", "torino-m": "M"}


@dataclass
class Runs:
    """Settings, scores and lengths of one or several runs on the same questions."""

    runs: Sequence[Run]

    def __post_init__(self) -> None:
        self.scored: dict[str, Mapping[str, ScoreStats]] = {}
        self.lengths: dict[str, dict[str, np.ndarray[Any, Any]]] = {}
        self.settings: dict[str, Setting] = {}
        for number, run in enumerate(self.runs):
            scores = run.scores()
            for name, setting in run.settings.items():
                key = name if name == "full" else f"{number}:{name}"
                tasks = {task: by[name].by_image() for task, by in scores.items() if name in by}
                if len(tasks) == len(scores):
                    self.scored[key], self.settings[key] = tasks, setting
                    self.lengths[key] = {task: run.token_counts(task, name) for task in tasks}

    @property
    def full(self) -> Mapping[str, ScoreStats]:
        """Scores with all tokens."""
        return self.scored["full"]

    def find(self, method: str, tier: str, sae: str | None, dynamic: bool) -> str:
        """Return the id of a setting."""
        for key, setting in self.settings.items():
            same = setting.method == method and base_tier(setting) == tier and setting.dynamic == dynamic
            if same and (sae is None or setting.sae == sae):
                return key
        raise SystemExit(f"The runs have no {'dynamic ' * dynamic}{method} at {tier} with the SAE {sae}, complete.")

    def tokens(self, key: str) -> float:
        """Return the mean length, averaged over tasks."""
        return float(np.mean([counts.mean() for counts in self.lengths[key].values()]))

    def relative(self, key: str) -> dict[str, float]:
        """Return the relative score with its interval."""
        return values(relative_interval(self.scored[key], self.full))

    def difference(self, first: str, second: str) -> dict[str, float]:
        """Return the difference of two relative scores with its interval."""
        return values(relative_difference(self.scored[first], self.scored[second], self.full))


def base_tier(setting: Setting) -> str:
    """Return the tier without the label of an SAE, which it has in runs with several."""
    return setting.tier.split()[0]


def values(interval: Interval) -> dict[str, float]:
    """Round an interval for a result file."""
    return {"value": round(interval.value, 2), "low": round(interval.low, 2), "high": round(interval.high, 2)}


def shown(interval: Mapping[str, float], sign: bool = True) -> str:
    """Write a difference with its interval."""
    value = f"{interval['value']:+.1f}" if sign else f"{interval['value']:.1f}"
    return f"{value} [{interval['low']:.1f}, {interval['high']:.1f}]".replace("-", "−")


def verdict(differences: Sequence[Mapping[str, float]]) -> str:
    """Say whether differences are above zero, in words."""
    above = [item["low"] > 0 for item in differences]
    below = [item["high"] < 0 for item in differences]
    if all(above):
        return "yes"
    if any(above):
        return f"partly: {sum(above)} of {len(above)} significant" + (", the opposite too" if any(below) else "")
    if any(below):
        return f"no: the opposite in {sum(below)} of {len(below)}"
    return "not seen: within chance"


# ---------------------------------------------------------------------- the findings


def dynamic_lengths(runs: Runs, main: str) -> dict[str, Any]:
    """A length of its own for each image against the mean length for all."""
    found = []
    for method in METHODS:
        for tier in TIERS:
            own, fixed = runs.find(method, tier, main, True), runs.find(method, tier, main, False)
            found.append({"method": method, "tier": tier, "tokens": runs.tokens(own), **runs.difference(own, fixed)})
    text = "; ".join(
        f"{LETTERS[method]} " + ", ".join(f"{shown(i)} at {i['tokens']:.0f}" for i in found if i["method"] == method)
        for method in METHODS
    )
    return {
        "finding": "dynamic lengths",
        "paper": "A dynamic length is better than the same mean length for all images",
        "lab": f"{text} tokens",
        "holds": verdict(found),
        "values": found,
    }


def prune_or_merge(runs: Runs, main: str) -> dict[str, Any]:
    """Pruning against merging, from little to strong reduction."""
    found = []
    for tier in TIERS:
        pruned, merged = (runs.find(method, tier, main, True) for method in METHODS)
        found.append({"tier": tier, "tokens": runs.tokens(pruned), **runs.difference(pruned, merged)})
    little, strong = found[0], found[-1]
    merged_first = {"low": -little["high"], "high": -little["low"]}
    return {
        "finding": "P and M",
        "paper": "M leads at little reduction, P at strong reduction",
        "lab": "P − M: " + ", ".join(f"{shown(item)} at {item['tokens']:.0f}" for item in found) + " tokens",
        "holds": f"first half: {verdict([merged_first])}; second half: {verdict([strong])}",
        "values": found,
    }


def spread(runs: Runs, main: str) -> dict[str, Any]:
    """How far lengths of images differ, in points of all tokens."""
    total = max(int(counts.max()) for counts in runs.lengths["full"].values())
    found = []
    for tier in TIERS:
        lengths = runs.lengths[runs.find("torino-p", tier, main, True)]
        spans = {task: np.ptp(np.quantile(counts, [0.1, 0.9])) / total * 100 for task, counts in lengths.items()}
        found.append({"tier": tier, "spans": {task: round(float(span), 1) for task, span in spans.items()}})
    middle = [float(np.mean(list(item["spans"].values()))) for item in found]
    text = ", ".join(
        f"{min(item['spans'].values()):.0f}–{max(item['spans'].values()):.0f} at ({item['tier'].replace(',', ', ')})"
        for item in found
    )
    return {
        "finding": "spread of lengths",
        "paper": "Lengths vary more for larger (k, δ): 80 % of images within 20–25 points at (3, 3), 5–8 at (1, 1)",
        "lab": f"By task {text}",
        "holds": "yes" if all(a > b for a, b in pairwise(middle)) else "no",
        "values": found,
    }


def task_order(runs: Runs, main: str) -> dict[str, Any]:
    """Whether tasks keep their order of mean lengths."""
    orders = []
    for tier in TIERS:
        lengths = runs.lengths[runs.find("torino-p", tier, main, True)]
        means = {task: float(counts.mean()) for task, counts in lengths.items()}
        orders.append(sorted(means, key=means.__getitem__))
    same = all(order == orders[0] for order in orders)
    ranks = [[order.index(task) for task in orders[0]] for order in orders]
    correlation = min(float(np.corrcoef(ranks[0], other)[0, 1]) for other in ranks[1:])
    text = f"The same order of {len(orders[0])} tasks at all three settings" if same else "The order changes"
    return {
        "finding": "order of tasks",
        "paper": "Tasks keep their order of lengths at every (k, δ)",
        "lab": text + f" (rank correlation at least {correlation:.2f})".replace("-", "−"),
        "holds": "yes" if same else "mostly" if correlation > 0.7 else "no",
        "values": orders,
    }


def without_sae(runs: Runs, saes: Sequence[str]) -> dict[str, Any]:
    """SAE against raw embeddings, each setting beside the SAE's setting with the nearest mean length."""
    found = []
    for method in METHODS:
        for tier in TIERS:
            raw = runs.find(method, tier, NO_SAE, True)
            length = runs.tokens(raw)
            others = [runs.find(method, other, sae, True) for sae in saes for other in TIERS]
            near = min(others, key=lambda key: abs(np.log(runs.tokens(key) / length)))
            row = {"method": method, "tokens": length, "of the SAE": runs.tokens(near), "sae": runs.settings[near].sae}
            found.append({**row, **runs.difference(near, raw)})
    like = [item for item in found if 0.8 < item["of the SAE"] / item["tokens"] < 1.25]
    text = "; ".join(
        f"{LETTERS[item['method']]} {shown(item)} ({item['of the SAE']:.0f} against {item['tokens']:.0f} tokens)"
        for item in like
    )
    return {
        "finding": "the SAE's contribution",
        "paper": "Without the SAE 5.2 points are lost at similar length",
        "lab": f"With the SAE {text}" if like else "No pair of settings has similar lengths",
        "holds": verdict(like) if like else "not testable",
        "values": found,
    }


def token_kinds(runs: Runs, budgets: Sequence[str]) -> dict[str, Any]:
    """An SAE of CLS tokens against one of two random patches per image, at fixed budgets."""
    found = []
    for method in METHODS:
        for budget in budgets:
            first, second = (runs.find(method, budget, sae, False) for sae in ("cls", "random2"))
            found.append({"method": method, "tokens": int(budget), **runs.difference(first, second)})
    merged = [item for item in found if item["method"] == "torino-m"]
    return {
        "finding": "CLS or patches",
        "paper": "An SAE of CLS tokens beats one of two random patches by 2.7, 7.7, 19.6 points (M; 33, 22, 11 % of tokens)",
        "lab": ", ".join(f"{shown(item)} at {item['tokens']}" for item in merged) + " tokens (M)",
        "holds": verdict(merged),
        "values": found,
    }


def dictionary_size(rows: Sequence[Mapping[str, Any]], saes: Sequence[str]) -> dict[str, Any]:
    """Which dictionary is best at which length."""
    best = []
    for tier in TIERS:
        of_tier = [row for row in rows if row["tier"] == tier and row["sae"] in saes]
        for method in METHODS:
            first = max((row for row in of_tier if row["method"] == method), key=lambda row: row["value"])
            best.append(f"{LETTERS[method]} at ({tier.replace(',', ', ')}) {first['sae']} with {first['value']:.1f}")
    return {
        "finding": "dictionary size",
        "paper": "ε = 4 is best at moderate reduction, ε = 64 at 8 % of tokens, ε = 16 collapses there",
        "lab": "Best by score alone: " + "; ".join(best),
        "holds": "see the table: lengths differ",
        "values": best,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("runs", type=Path, nargs="+", help="runs of torino eval on the same questions")
    add("--main", default="e4", help="label of the SAE that ships (default: %(default)s)")
    add("--sizes", nargs="+", default=["e4", "e16", "e64"], help="labels of SAEs of several sizes")
    add("-o", "--output", type=Path, required=True, help="result file")
    args = parser.parse_args()
    opened = [open_run(folder) for folder in args.runs]
    prints = [[(task["task"], task["fingerprint"]) for task in run.metadata["tasks"]] for run in opened]
    if any(other != prints[0] for other in prints) or len({run.metadata.get("limit") for run in opened}) > 1:
        raise SystemExit("The runs have other questions. Evaluate the same tasks with the same --limit.")
    runs = Runs(opened)
    rows: list[dict[str, Any]] = [
        {
            "sae": setting.sae,
            "method": setting.method,
            "tier": base_tier(setting),
            "dynamic": setting.dynamic,
            "tokens": round(runs.tokens(key), 1),
            **runs.relative(key),
        }
        for key, setting in runs.settings.items()
        if setting.method in METHODS
    ]
    budgets = sorted({row["tier"] for row in rows if row["tier"].isdigit()}, key=int, reverse=True)
    findings = [
        dynamic_lengths(runs, args.main),
        prune_or_merge(runs, args.main),
        spread(runs, args.main),
        task_order(runs, args.main),
        without_sae(runs, args.sizes),
        token_kinds(runs, budgets),
        dictionary_size([row for row in rows if row["dynamic"]], args.sizes),
    ]
    write_json(
        args.output,
        {
            "format": "torino-results/1",
            "name": args.output.stem,
            "title": "The paper's findings on the lab's model",
            "report": None,
            "command": "python " + " ".join(["lab/scripts/check_findings.py", *map(str, sys.argv[1:])]),
            "seed": 0,
            "date": time.strftime("%Y-%m-%d"),
            "hardware": machine(),
            "versions": versions(),
            "tasks": {task["task"]: task["fingerprint"] for task in opened[0].metadata["tasks"]},
            "questions": opened[0].metadata.get("limit"),
            "full": {task: round(stats.value, 2) for task, stats in runs.full.items()},
            "saes": {label: entry for run in opened for label, entry in run.metadata.get("saes", {}).items()},
            "findings": findings,
            "rows": rows,
        },
    )
    for item in findings:
        print(f"{item['finding']}: {item['lab']} -> {item['holds']}")


if __name__ == "__main__":
    main()
