r"""What TORINO loses that a rival keeps: sample by sample in a run of ``torino eval`` on the lab, and what was dropped.

For each fixed tier the best other method is found. A sample is *lost* where that method answers rightly and TORINO does
not, *won* where it is the other way round, *kept* where both do. Then the pictures of lost and kept samples are looked
at again: how many groups there were, what truncation dropped, what padding added. Differences are between means over
samples, with 95 % intervals by drawing pictures anew.

Examples
--------
::

    torino eval --model lab --sae lab --data build/lab/benchmarks --tasks Lab-GQA,... -o build/lab/run
    python research/scripts/diagnose_lab.py build/lab/run --output build/lab/diagnosis.json
    python research/scripts/diagnose_lab.py build/lab/run --method torino-x
    python research/scripts/diagnose_lab.py build/lab/run --rivals prunesid divprune scope   # who keeps what is small?
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torino_lab.catalog import BENCHMARKS
from torino_lab.shipped import lab_sae
from torino_lab.tower import lab_tower

from torino import SAE, VisualTokens, make
from torino.core.concepts import Concepts
from torino.core.grouping import group_by_overlap
from torino.core.io import write_json
from torino.datasets.images import open_image
from torino.evaluation.results import Run, open_run
from torino.evaluation.samples import Sample
from torino.evaluation.scoring import Score

K = DELTA = 2
RIGHT = 0.5  # of a soft score
DRAWS = 2000
FAMILIES = {
    "small": {"where", "shape", "small", "color"},  # a small thing, put somewhere on a photo
    "drawn": {"shapes"},
    "cells": {"cell", "which", "rec,spat", "math"},  # of collages; a third of Lab-POPE too, which does not say which
}
FEATURES = {
    "groups": "groups before the budget",
    "largest": "patches of the largest group",
    "dropped_area": "share of patches in dropped groups",
    "dropped_single": "share of dropped groups that are one patch",
    "dropped_peak": "peak of dropped groups over that of kept ones",
    "dropped_border": "share of dropped patches at the border",
    "silent": "share of silent patches",
    "padding": "tokens of padding",
    "repeats": "share of padding whose group is there already",
}


def rights(scores: Mapping[str, Mapping[str, Score]]) -> dict[str, dict[tuple[str, str], bool]]:
    """Of every setting: whether each sample, (task, index), was answered."""
    found: dict[str, dict[tuple[str, str], bool]] = {}
    for task, settings in scores.items():
        for setting, score in settings.items():
            mine = found.setdefault(setting, {})
            mine.update({(task, index): value >= RIGHT for index, value in score.per_sample.items()})
    return found


def family(task: str, category: str) -> str:
    """What a kind of question is about: ``small`` things, ``drawn`` ones, ``cells`` of a collage or the ``photo``."""
    if task == "Lab-GQA" and category == "scene":
        return "cells"
    return next((name for name, kinds in FAMILIES.items() if category in kinds), "photo")


def ids(run: Run, scores: Mapping[str, Mapping[str, Score]], method: str, tier: str) -> tuple[str, dict[str, float]]:
    """Id of our method, and of all others their mean relative score, in a tier."""
    full = {task: settings["full"].value for task, settings in scores.items()}
    relative = {
        one.id: np.mean([scores[task][one.id].value / full[task] for task in scores])
        for one in run.settings.values()
        if one.tier == tier and not one.dynamic and all(one.id in scores[task] for task in scores)
    }
    ours = next((one for one in relative if one.split("@")[0] == method), None)
    if ours is None:
        raise SystemExit(f"The run has no complete answers of {method} with {tier} tokens.")
    others = {name: float(value) for name, value in relative.items() if not name.startswith(("torino-", "full"))}
    return ours, others


def net(rows: list[tuple[str, int]], seed: int = 0) -> tuple[float, float, float]:
    """Samples won less those lost, in a hundred; with the interval by drawing pictures anew."""
    pictures = sorted({picture for picture, _ in rows})
    place = {name: i for i, name in enumerate(pictures)}
    sums = np.zeros((2, len(pictures)))
    for picture, value in rows:
        sums[:, place[picture]] += value, 1
    draws = np.random.default_rng(seed).integers(0, len(pictures), (DRAWS, len(pictures)))
    drawn = sums[:, draws].sum(-1)
    low, high = np.quantile(100 * drawn[0] / drawn[1], (0.025, 0.975))
    return 100 * sums[0].sum() / sums[1].sum(), float(low), float(high)


def features(tokens: VisualTokens, sae: SAE, budget: int) -> dict[str, float]:
    """What TORINO-M at a budget did with a picture."""
    found = sae.top(tokens.patches, K)
    found = Concepts(found.indices.cpu(), found.values.cpu(), found.peak.cpu())
    groups = group_by_overlap(found, DELTA)
    plan = make("torino-m", sae=sae, k=K, delta=DELTA, budget=budget).plan(tokens)
    label, size, peak = groups.label.numpy(), groups.sizes.numpy(), found.peak.numpy()
    top = np.array([peak[label == one].max() for one in range(len(size))])
    kept = np.zeros(len(size), bool)
    is_pad = np.array([role == "padding" for role in plan.role])
    anchor = plan.anchor.numpy()
    kept[label[anchor[~is_pad]]] = True
    rows, columns = np.divmod(np.arange(len(label)), tokens.grid[1])
    border = (rows == 0) | (columns == 0) | (rows == tokens.grid[0] - 1) | (columns == tokens.grid[1] - 1)
    gone = ~kept[label]
    nan = float("nan")
    return {
        "groups": float(len(size)),
        "largest": float(size.max()),
        "dropped_area": float(gone.mean()),
        "dropped_single": float((size[~kept] == 1).mean()) if (~kept).any() else nan,
        "dropped_peak": float(top[~kept].mean() / top[kept].mean()) if (~kept).any() else nan,
        "dropped_border": float(border[gone].mean()) if gone.any() else nan,
        "silent": float((found.indices[:, 0] < 0).float().mean()),
        "padding": float(is_pad.sum()),
        "repeats": float(kept[label[anchor[is_pad]]].mean()) if is_pad.any() else nan,
    }


def compare(rows: list[tuple[str, bool, dict[str, float]]], seed: int = 0) -> dict[str, Any]:
    """Means of each feature over lost and kept samples, and the interval of the difference; rows are by picture."""
    pictures = sorted({picture for picture, _, _ in rows})
    place = {name: i for i, name in enumerate(pictures)}
    draws = np.random.default_rng(seed).integers(0, len(pictures), (DRAWS, len(pictures)))
    weight = np.stack([np.bincount(one, minlength=len(pictures)) for one in draws]).astype(float)
    told: dict[str, Any] = {}
    for name in FEATURES:
        sums = np.zeros((4, len(pictures)))
        for picture, lost, values in rows:
            if not np.isnan(values[name]):
                sums[0 if lost else 2, place[picture]] += values[name]
                sums[1 if lost else 3, place[picture]] += 1
        if not sums[1].sum() or not sums[3].sum():
            continue
        a, n, b, m = weight @ sums.T[:, 0], weight @ sums.T[:, 1], weight @ sums.T[:, 2], weight @ sums.T[:, 3]
        good = (n > 0) & (m > 0)
        low, high = np.quantile(a[good] / n[good] - b[good] / m[good], (0.025, 0.975))
        lost_mean, kept_mean = sums[0].sum() / sums[1].sum(), sums[2].sum() / sums[3].sum()
        told[name] = {"lost": lost_mean, "kept": kept_mean, "low": float(low), "high": float(high)}
    return told


def find(others: Mapping[str, float], name: str, tier: str) -> str:
    """Id of a rival in a tier."""
    names = {one.split("@")[0].split("(")[0]: one for one in others}
    if name not in names:
        raise SystemExit(f"The run has no complete answers of {name} with {tier} tokens; it has {', '.join(names)}.")
    return names[name]


def by_family(
    samples: Mapping[tuple[str, str], Sample],
    right: Mapping[str, Mapping[tuple[str, str], bool]],
    ours: str,
    rival: str,
) -> dict[str, Any]:
    """Lost and won samples by what they ask about."""
    rows: dict[str, list[tuple[str, int]]] = {}
    for key, sample in samples.items():
        if key in right[ours]:
            mine = rows.setdefault(family(key[0], sample.meta.get("category", "")), [])
            mine.append((sample.image.key, int(right[ours][key]) - int(right[rival][key])))
    told: dict[str, Any] = {}
    print(f"\n{ours} and {rival}")
    for name in sorted(rows):
        lost, won = (sum(value == one for _, value in rows[name]) for one in (-1, 1))
        middle, low, high = net(rows[name])
        told[name] = {"lost": lost, "won": won, "of": len(rows[name]), "net": middle, "low": low, "high": high}
        print(
            f"  {name:6s} lost {lost:3d}  won {won:3d}  of {len(rows[name]):4d}  "
            f"won less lost in a hundred {middle:+5.1f} [{low:+.1f}, {high:+.1f}]"
        )
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder that torino eval has written")
    parser.add_argument("--tiers", nargs="+", default=["192", "128", "64"])
    parser.add_argument("--method", default="torino-m", help="ours; groups are looked at for torino-m only")
    parser.add_argument(
        "--rivals", nargs="+", metavar="NAME", help="these, by what is asked about, in place of the best of each tier"
    )
    parser.add_argument("--sae", type=Path, help="of the run (default: the one that ships)")
    parser.add_argument("--output", type=Path, help="JSON to write")
    args = parser.parse_args()
    run = open_run(args.run)
    if not set(run.tasks) <= set(BENCHMARKS):
        raise SystemExit(f"{args.run} is not a run on the lab's benchmarks.")
    if args.sae is None and run.metadata.get("model") != "lab":
        raise SystemExit(f"{args.run} was made with {run.metadata.get('model')}: say which SAE it had, with --sae.")
    sae = lab_sae() if args.sae is None else SAE.load(args.sae)
    tower = lab_tower(sae.card.block if sae.card.block is not None else 7)
    samples = {(name, one.index): one for name, task in run.open_tasks().items() for one in task}
    scores = run.scores()
    right = rights(scores)
    seen: dict[str, VisualTokens] = {}
    told: dict[str, Any] = {}
    for tier in args.tiers:
        ours, others = ids(run, scores, args.method, tier)
        if args.rivals:
            told[tier] = {name: by_family(samples, right, ours, find(others, name, tier)) for name in args.rivals}
            continue
        rival = max(others, key=lambda name: others[name])
        both = {key: (right[ours][key], right[rival][key]) for key in samples if key in right[ours]}
        count = Counter(both.values())
        print(
            f"\n{tier} tokens: {ours} and {rival}\n  kept by both {count[True, True]}, lost {count[False, True]}, "
            f"won {count[True, False]}, neither {count[False, False]}"
        )
        by_kind: dict[str, Counter[tuple[bool, bool]]] = {}
        for key, what in both.items():
            by_kind.setdefault(f"{key[0]} {samples[key].meta.get('category', '')}", Counter())[what] += 1
        for kind, each in sorted(by_kind.items(), key=lambda item: item[1][True, False] - item[1][False, True]):
            print(f"  {kind:24s} lost {each[False, True]:3d}  won {each[True, False]:3d}  of {each.total()}")
        told[tier] = {
            "ours": ours,
            "rival": rival,
            "counts": {"kept": count[True, True], "lost": count[False, True], "won": count[True, False]},
            "kinds": {kind: [each[False, True], each[True, False], each.total()] for kind, each in by_kind.items()},
        }
        if args.method != "torino-m":
            continue
        rows: list[tuple[str, bool, dict[str, float]]] = []
        wanted = [key for key, (_, other) in both.items() if other]
        known: dict[str, dict[str, float]] = {}
        for number, key in enumerate(wanted):
            place = _tokens_of(samples[key], seen, tower)
            if place not in known:
                known[place] = features(seen[place], sae, int(tier))
            rows.append((place, not both[key][0], known[place]))
            print(f"\r  looking {number + 1}/{len(wanted)} ", end="", file=sys.stderr, flush=True)
        print("", file=sys.stderr)
        table = compare(rows)
        for name, one in table.items():
            print(
                f"  {FEATURES[name]:48s} lost {one['lost']:8.3f}  kept {one['kept']:8.3f}  difference "
                f"[{one['low']:+.3f}, {one['high']:+.3f}]"
            )
        told[tier]["features"] = table
    if args.output:
        write_json(args.output, told)


def _tokens_of(sample: Sample, seen: dict[str, VisualTokens], tower: Any) -> str:
    """Look at the picture of a sample, once; its name."""
    key = sample.image.key
    if key not in seen:
        (seen[key],) = tower.encode([open_image(sample.image.read())])
    return key


if __name__ == "__main__":
    main()
