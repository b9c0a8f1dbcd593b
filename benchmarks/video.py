"""Time and memory of every method that reduces videos, by the number of frames, in one run.

Clips are synthetic: scenes of objects that move a little from frame to frame, with a cut every 16 frames; tokens and
SAE are random but clustered as patches are. Methods are timed in turn, size by size, so ratios can be compared. A
method is not run at sizes where its growth so far predicts more time or memory than the limits.

    python benchmarks/video.py                               # 1, 8, 64 and 256 frames of 196 and 576 tokens
    python benchmarks/video.py --write                       # the same, to research/results/video-scaling.json
    python benchmarks/video.py --frames 1 4 8 --sides 6 --rounds 1    # small, a few seconds
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
from report import machine, peak_extra_memory, table

from torino import SAE, VisualTokens, list_reducers, make
from torino.core.grouping import group_by_overlap
from torino.core.io import write_json
from torino.core.timing import recording
from torino.reducers import get

TARGET = Path(__file__).resolve().parents[1] / "research" / "results" / "video-scaling.json"
SCENE = 16  # frames between cuts
BASE = "torino-m"  # times of other methods are shown relative to it
GROUPINGS = ((2, 2), (6, 3))


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument(
        "--sides", type=int, nargs="+", default=[14, 24], help="sides of the patch grid (default 14 24)"
    )
    parser.add_argument("--width", type=int, default=256, help="width of a token (default 256)")
    parser.add_argument("--latents", type=int, default=4096, help="latents of the SAE (default 4096)")
    parser.add_argument("--share", type=float, default=0.1, help="share of the tokens that is kept (default 0.1)")
    parser.add_argument("--methods", nargs="+", default=None, help="default: all that take videos")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=300, help="limit of one plan (default 300)")
    parser.add_argument("--memory", type=float, default=4000, help="limit of one plan in MiB (default 4000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", nargs="?", type=Path, const=TARGET, help=f"default: {TARGET.name}")
    return parser.parse_args()


def clip(frames: int, side: int, width: int, seed: int) -> VisualTokens:
    """Return a clip of scenes, each with a dozen objects that drift; every object has its own patches and noise."""
    generator = torch.Generator().manual_seed(seed)
    size = side * side
    row, column = torch.arange(size) // side, torch.arange(size) % side
    parts: list[torch.Tensor] = []
    for frame in range(frames):
        if frame % SCENE == 0:
            centers = torch.rand(12, 2, generator=generator) * side
            drift = torch.randn(12, 2, generator=generator) * 0.2
            objects = torch.randn(12, width, generator=generator)
            texture = 0.5 * torch.randn(size, width, generator=generator)
        at = centers + drift * (frame % SCENE)
        nearest = ((row[:, None] - at[:, 0]) ** 2 + (column[:, None] - at[:, 1]) ** 2).argmin(1)
        parts.append(objects[nearest] + texture + 0.2 * torch.randn(size, width, generator=generator))
    return VisualTokens(torch.cat(parts), (side, side), frames=frames, times=[frame / 2 for frame in range(frames)])


def random_sae(width: int, latents: int, seed: int) -> SAE:
    """Return an SAE of random unit vectors."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.nn.functional.normalize(torch.randn(latents, width, generator=generator), dim=1)
    groups = (latents // 4, latents - latents // 4)
    return SAE(weight, torch.zeros(latents), kind="matryoshka", threshold=0.5, groups=groups, k=20)


def signals(video: VisualTokens, needs: frozenset[str]) -> VisualTokens:
    """Return the video with the signals that a method needs."""
    n = len(video)
    generator = torch.Generator().manual_seed(1)
    given: dict[str, Any] = {"projected": video.patches, "head_keys": video.patches[:, :64]}
    given["words"] = torch.randn(8, video.width, generator=generator)
    attention = torch.rand(1, n, generator=generator)
    chosen = {name: given[name] for name in needs if name in given}
    return video.with_(signals=chosen, cls_attention=attention / attention.sum(), keys=video.patches[:, :64])


def tasks(video: VisualTokens, sae: SAE, names: list[str], share: float) -> dict[str, Callable[[], object]]:
    """Return the plan of each method, and the grouping alone."""
    budget, made = max(1, round(share * len(video))), dict[str, Callable[[], object]]()
    for name in names:
        fields: Any = get(name).__dataclass_fields__  # type: ignore[attr-defined]
        options: dict[str, Any] = {"sae": sae} if "sae" in fields else {}
        reducer = make(name, **options, **({} if name == "scissor" else {"budget": budget}))
        tokens = signals(video, reducer.needs)
        made[name] = lambda reducer=reducer, tokens=tokens: reducer.plan(tokens)
    for k, delta in GROUPINGS:
        concepts = sae.top(video.patches, k)
        made[f"grouping ({k}, {delta})"] = lambda concepts=concepts, delta=delta: group_by_overlap(concepts, delta)
    return made


def measure(task: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds of a call, and those of its SAE."""
    with recording() as stages:
        begin = time.perf_counter()
        task()
        return time.perf_counter() - begin, stages.get("sae", 0.0)


def predicted(rows: list[dict[str, Any]], tokens: int, field: str) -> float:
    """Return time or memory of a larger size if it grows as it did between the last two, or else with the square."""
    if not rows:
        return 0.0
    power = 2.0
    if len(rows) > 1 and min(rows[-1][field], rows[-2][field]) > 0:
        growth = rows[-1][field] / rows[-2][field]
        power = min(2.0, max(1.0, math.log(growth) / math.log(rows[-1]["tokens"] / rows[-2]["tokens"])))
    return rows[-1][field] * (tokens / rows[-1]["tokens"]) ** power


def run(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure all sizes; one row for each method and size, with the reason if it was not run."""
    sae, rows = random_sae(given.width, given.latents, given.seed), list[dict[str, Any]]()
    names = given.methods or [n for n in list_reducers() if get(n).takes_frames and not get(n).ablation]
    for side in given.sides:
        for frames in sorted(given.frames):
            video = clip(frames, side, given.width, given.seed)
            made, feasible = tasks(video, sae, names, given.share), dict[str, Callable[[], object]]()
            for name, task in made.items():
                before = [r for r in rows if r["method"] == name and r["side"] == side and "seconds" in r]
                skipped = any(r["method"] == name and r["side"] == side and "skipped" in r for r in rows)
                late, large = (predicted(before, len(video), field) for field in ("seconds", "mebibytes"))
                row = {"method": name, "side": side, "frames": frames, "tokens": len(video)}
                if skipped or late > given.seconds or large > given.memory:
                    rows.append(row | {"skipped": f"would take about {late:.0f} s and {large:.0f} MiB"})
                else:
                    feasible[name] = task
            timed: dict[str, list[tuple[float, float]]] = {name: [] for name in feasible}
            memory = {name: peak_extra_memory(task) for name, task in feasible.items()}  # also a warm-up
            for _ in range(given.rounds):
                for name, task in feasible.items():
                    timed[name].append(measure(task))
            for name, pairs in timed.items():
                seconds, encoding = (statistics.median(values) for values in zip(*pairs, strict=True))
                base = [
                    mine[0] / base[0] for mine, base in zip(pairs, timed.get(BASE, []), strict=BASE in timed) if base[0]
                ]
                rows.append(
                    {"method": name, "side": side, "frames": frames, "tokens": len(video)}
                    | {"seconds": seconds, "sae_seconds": encoding, "mebibytes": memory[name]}
                    | ({"ratio": statistics.median(base)} if base else {})
                )
            print(show(rows, side, frames), flush=True)
    return rows


def show(rows: list[dict[str, Any]], side: int, frames: int) -> str:
    """Return the table of one size."""
    lines: list[list[str]] = []
    for row in (r for r in rows if (r["side"], r["frames"]) == (side, frames)):
        if "skipped" in row:
            lines.append([row["method"], row["skipped"], "", "", "", ""])
            continue
        before = [r for r in rows if (r["method"], r["side"]) == (row["method"], side) and "seconds" in r]
        power = ""
        if len(before) > 1 and before[-1] is row:
            power = f"{math.log(row['seconds'] / before[-2]['seconds'], row['tokens'] / before[-2]['tokens']):.2f}"
        ratio = f"{row['ratio']:.2f} ×" if "ratio" in row else ""
        times = [f"{1000 * row[field]:.1f}" for field in ("seconds", "sae_seconds")]
        lines.append([row["method"], *times, ratio, f"{row['mebibytes']:.0f}", power])
    tokens = frames * side * side
    heading = f"\n{frames} frames of {side} x {side}: {tokens} tokens\n"
    columns = ["method", "ms", "of which SAE", f"of {BASE}", "MiB", "growth: power of tokens"]
    return heading + table(columns, lines)


def main() -> None:
    """Measure and print; write if asked to."""
    given = parse()
    torch.manual_seed(given.seed)
    rows = run(given)
    print(f"\n{machine()}")
    if given.write:
        command = " ".join(["python benchmarks/video.py", *(word for word in sys.argv[1:] if "/" not in word)])
        settings = {name: getattr(given, name) for name in ("width", "latents", "share", "rounds", "seconds", "memory")}
        result = {
            "format": "torino-results/1",
            "name": given.write.stem,
            "title": "Time and memory of reducing videos, by frames",
            "report": "docs/guides/video.md",
            "command": [command],
            "seed": given.seed,
            "date": date.today().isoformat(),
            "hardware": machine(),
            "settings": settings,
            "rows": rows,
        }
        write_json(given.write, result)
        print(f"Wrote {len(rows)} rows to {given.write}.")


if __name__ == "__main__":
    main()
