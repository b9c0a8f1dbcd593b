r"""Compare ``torino-q`` with ``torino-x``, ``mmtok`` and, with ``--clip``, ``cdpruner``, by question type.

Photos are of the lab's benchmarks, which nothing was trained on. Small objects: ``Lab-Small``. Regions: ``Lab-VSR`` and
the cells of ``Lab-Collage``. Whole image: ``Lab-VQAv2``, ``Lab-OKVQA`` and the scenes of ``Lab-Collage``. All methods answer
the same questions; differences are paired permutation tests by image, corrected by Holm over all comparisons of the run.

Two turns: of two different questions about one image, the second is answered with the tokens that were kept for the
first, with those kept for itself, and with those of ``torino-x``.

Examples
--------
::

    python research/scripts/query.py --data DATA -o research/results/query.json
    python research/scripts/query.py --data DATA --budgets 16 32 --questions 40 -o build/query.json
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from torino_lab.selection import Item
from torino_lab.tasks import TaskBuilder

from torino import Reducer, make
from torino.cli._common import load_sae
from torino.core.io import write_json
from torino.evaluation.latency.probes import machine, versions
from torino.evaluation.samples import Sample
from torino.evaluation.scoring import ScoreStats, exact_match, soft_accuracy
from torino.evaluation.statistics import holm, score_difference, score_interval
from torino.vlm import VLM, load_clip_text, load_vlm

TYPES = {
    "small objects": {"Lab-Small": None},
    "regions": {"Lab-VSR": None, "Lab-Collage": ("cell", "which", "presence")},
    "whole image": {"Lab-VQAv2": None, "Lab-OKVQA": None, "Lab-Collage": ("scene",)},
}
TURNS = ("same question", "other question", "torino-x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", type=Path, required=True, help="folder with the lab's parquet files of dev photos")
    add("--model", default="lab")
    add("--sae", default="lab")
    add("--clip", help="CLIP with a text tower, for cdpruner")
    add("--budgets", type=int, nargs="+", default=[8, 16, 32, 64, 128])
    add("--questions", type=int, default=400, help="of each type (default: %(default)s)")
    add("--settings", nargs="*", default=[], help="further settings, such as 'torino-q(query=0.5)'")
    add("--half", choices=("choose", "report"), help="one half of the photos")
    add("--seed", type=int, default=0)
    add("-o", "--output", type=Path, required=True, help="JSON file to write")
    args = parser.parse_args()
    vlm = load_vlm(args.model, text_query=None if args.clip is None else load_clip_text(args.clip))
    sae = load_sae(args.sae)
    methods = ["torino-x", "torino-q", "mmtok", *(["cdpruner"] if args.clip else []), *args.settings]
    groups = group_by_image(draw(TaskBuilder(args.data, half=args.half), args.questions, args.seed))
    single: dict[tuple[str, int, str], list[tuple[str, float]]] = defaultdict(list)
    turns: dict[tuple[str, int, str], list[tuple[str, float]]] = defaultdict(list)
    for number, (image, items) in enumerate(groups):
        ask_image(vlm, sae, image, items, str(number), methods, args.budgets, single, turns)
        print(f"{number + 1} of {len(groups)} images", end="\r", flush=True)
    results = {
        "single": compare(single, "torino-q", args.seed),
        "two turns": compare(turns, TURNS[1], args.seed),
        "settings": {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
        | {"data": args.data.name},
        "images": len(groups),
        "hardware": machine(),
        "versions": versions(),
        "date": datetime.now(UTC).date().isoformat(),
    }
    results["settings"].pop("output")
    write_json(args.output, results)
    print(
        table(results["single"], "torino-q"), table(results["two turns"], TURNS[1]), f"Wrote {args.output}", sep="\n\n"
    )


def draw(builder: TaskBuilder, count: int, seed: int) -> Iterator[tuple[str, Item]]:
    """Yield questions with their type, about equally many of each type and task."""
    for kind, tasks in TYPES.items():
        for task, parts in tasks.items():
            items = [item for item in builder.make(task) if parts is None or item.category in parts]
            rng = Random(f"{seed}:{kind}:{task}")
            rng.shuffle(items)
            # whole images, so that there are pairs of questions about one
            images = list(dict.fromkeys(id(item.image) for item in items))
            order = {image: place for place, image in enumerate(images)}
            items.sort(key=lambda item: order[id(item.image)])
            yield from ((kind, item) for item in items[: -(-count // len(tasks))])


def group_by_image(drawn: Iterator[tuple[str, Item]]) -> list[tuple[Any, list[tuple[str, Item]]]]:
    """Return images with their questions."""
    groups: dict[int, tuple[Any, list[tuple[str, Item]]]] = {}
    for kind, item in drawn:
        groups.setdefault(id(item.image), (item.image, []))[1].append((kind, item))
    return list(groups.values())


@torch.no_grad()
def ask_image(
    vlm: VLM,
    sae: Any,
    image: Any,
    items: Sequence[tuple[str, Item]],
    name: str,
    methods: Sequence[str],
    budgets: Sequence[int],
    single: dict[tuple[str, int, str], list[tuple[str, float]]],
    turns: dict[tuple[str, int, str], list[tuple[str, float]]],
) -> None:
    """Answer all questions about one image; the tower runs once."""
    reducers: dict[tuple[str, int], Reducer] = {}
    for method in methods:
        parameters = {"sae": sae} if method.startswith("torino") else {}
        reducers |= {(method, budget): make(method, budget=budget, **parameters) for budget in budgets}
    opened = vlm.open(image)
    encoded = vlm.encode(vlm.inputs(opened, items[0][1].question.text), reducers.values())
    asked = [encoded.with_question(item.question.text) for _, item in items]
    for budget in budgets:
        kept = {method: [vlm.reduce(source, reducers[method, budget]) for source in asked] for method in methods}
        for number, (kind, item) in enumerate(items):
            scores = {
                method: answer_score(vlm, asked[number].inputs, reductions[number], item)
                for method, reductions in kept.items()
            }
            for method, score in scores.items():
                single[kind, budget, method].append((name, score))
            other = next((n for n, (_, o) in enumerate(items) if o.question.text != item.question.text), None)
            if other is not None:
                first = answer_score(vlm, asked[number].inputs, kept["torino-q"][other], item)
                values = (scores["torino-q"], first, scores["torino-x"])
                for turn, score in zip(TURNS, values, strict=True):
                    turns[kind, budget, turn].append((name, score))


def answer_score(vlm: VLM, inputs: Any, reduction: Any, item: Item) -> float:
    """Answer a question with reduced tokens and grade the answer."""
    text = vlm.generate(inputs, [reduction], max_new_tokens=12).texts[0]
    sample = Sample("0", item.question.text, item.answers or (item.question.answer,), ())
    return (soft_accuracy if item.answers else exact_match)(sample, text)[0]


def compare(
    scores: Mapping[tuple[str, int, str], Sequence[tuple[str, float]]], mine: str, seed: int
) -> list[dict[str, Any]]:
    """Return the score of each type, budget and setting, and its difference to ``mine``, corrected by Holm."""
    rows = list[dict[str, Any]]()
    for kind, budget, method in scores:
        stats, own = to_stats(scores[kind, budget, method]), to_stats(scores[kind, budget, mine])
        interval = score_interval(stats, seed=seed)
        row = {"type": kind, "budget": budget, "setting": method, "questions": int(stats.sums[:, 1].sum())}
        row |= {"score": interval.value, "low": interval.low, "high": interval.high}
        if method != mine:
            difference = score_difference(own, stats, seed=seed)
            row |= {"ahead": difference.value, "ahead_low": difference.low, "ahead_high": difference.high}
            row["p"] = difference.p
        rows.append(row)
    tested = [row for row in rows if "p" in row]
    for row, p in zip(tested, holm([row["p"] for row in tested]), strict=True):
        row["p_holm"] = p
    return sorted(rows, key=lambda row: (row["type"], row["budget"], row["setting"]))


def to_stats(scores: Sequence[tuple[str, float]]) -> ScoreStats:
    """Return sums by image, so that images are resampled."""
    images, values = zip(*scores, strict=True)
    sums = np.array([[value, 1.0] for value in values])
    return ScoreStats(tuple(map(str, range(len(images)))), sums, percent).merge(images)


def percent(sums: np.ndarray) -> np.ndarray:
    """Return mean scores in percent."""
    return 100 * sums[..., 0] / np.maximum(sums[..., 1], 1)


def table(rows: Sequence[Mapping[str, Any]], mine: str) -> str:
    """Return a Markdown table."""
    lines = [
        f"| type | budget | setting | n | score | {mine} is ahead by | p (Holm) |",
        "|---|---:|---|---:|---:|---:|---:|",
    ]
    for row in rows:
        ahead = f"{row['ahead']:+.1f} [{row['ahead_low']:.1f}, {row['ahead_high']:.1f}]" if "p" in row else ""
        p = f"{row['p_holm']:.3f}" if "p" in row else ""
        cells = [row["type"], row["budget"], row["setting"], row["questions"], f"{row['score']:.1f}", ahead, p]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
