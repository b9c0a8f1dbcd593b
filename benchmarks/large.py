"""Cost of ``torino-x`` and ``torino-m`` on large images: time per token and memory at 576, 2,304 and 9,216 tokens.

A large image is a square of bundled photos, some of them mirrored, a ninth of whose tokens are kept. The whole goes
from tokens to reduced tokens; the plan alone has its concepts given. Memory is that of a process of its own, beyond
tokens and weights.

    python benchmarks/large.py -o research/results/speed-large.json --write research/reports/performance.md
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from batches import Known
from report import machine, peak_extra_memory, table, time_side_by_side, write_section

from torino import Reducer, VisualTokens, make
from torino.datasets.bundled import example_sae, example_tokens

SIDES = (1, 2, 4)  # photos in a row
METHODS = ("torino-x", "torino-m")
WANTED = 2.0  # time per token, relative to 576 tokens


def large_image(side: int) -> VisualTokens:
    """Return side × side photos as one image."""
    photos = [image.patches.view(*image.grid, -1) for image in example_tokens()]
    photos += [photo.flip(1) for photo in photos]
    rows = [torch.cat([photos[(r * side + c) % len(photos)] for c in range(side)], 1) for r in range(side)]
    grid = torch.cat(rows)
    return VisualTokens(grid.flatten(0, 1), (grid.shape[0], grid.shape[1]))


def task(method: str, image: VisualTokens, *, alone: bool) -> Callable[[], object]:
    """Return the reduction of an image; alone, its plan with concepts that are given."""
    sae = example_sae()
    budget = len(image) // 9
    spec = f"{method}(budget={budget})" if method == "torino-x" else f"{method}(k=2, delta=2, budget={budget})"
    reducer: Reducer = make(spec, sae=sae)
    if not alone:
        return lambda: reducer.plan(image).apply(image.patches)
    k = int(getattr(reducer, "concepts", 0) or getattr(reducer, "k", 2))
    given: Reducer = make(spec, sae=Known(sae.top(image.patches, k)))
    return lambda: given.plan(image)


def memory_of(method: str, side: int) -> float:
    """Return MiB of a first call; for a process of its own."""
    task(method, large_image(1), alone=False)()  # loads the code and the SAE
    return peak_extra_memory(task(method, large_image(side), alone=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", type=Path, help="page whose section 'large' is rewritten")
    parser.add_argument("-o", "--output", type=Path, help="write the measurements as JSON")
    parser.add_argument("--memory-of", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.memory_of:
        print(memory_of(given.memory_of[0], int(given.memory_of[1])))
        return
    rows: list[dict[str, object]] = []
    first: dict[str, float] = {}
    for side in SIDES:
        image = large_image(side)
        for method in METHODS:
            tasks = {"whole": task(method, image, alone=False), "alone": task(method, image, alone=True)}
            seconds = time_side_by_side(tasks, given.rounds)
            micro = {name: 1e6 * statistics.median(values) / len(image) for name, values in seconds.items()}
            words = [sys.executable, __file__, "--memory-of", method, str(side)]
            memory = float(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
            first.setdefault(method, micro["whole"])
            row: dict[str, object] = {"method": method, "tokens": len(image), "budget": len(image) // 9}
            row |= {f"{name} µs a token": round(value, 2) for name, value in micro.items()}
            row |= {"relative to 576": round(micro["whole"] / first[method], 3), "plan MiB": round(memory, 1)}
            rows.append(row)
            print(row, flush=True)
    worst = max(float(str(row["relative to 576"])) for row in rows if row["method"] == "torino-x")
    square = 4 * rows[-1]["tokens"] ** 2 / 2**20  # type: ignore[operator]
    verdict = [
        f"`torino-x`, time per token: at most {WANTED:g} × that at 576 tokens",
        f"{worst:.2f} × at worst",
        "met" if worst <= WANTED else "**not met**",
    ]
    text = "\n\n".join(
        [
            f"Measured by `benchmarks/large.py`, median of {given.rounds} rounds in turn, tokens of bundled photos, "
            f"the bundled SAE of {example_sae().latents:,} latents; a ninth of the tokens is kept. {machine()}.",
            table(["Wanted", "Got", ""], [verdict]),
            table(
                ["method", "tokens", "kept", "whole, µs a token", "relative", "plan alone, µs a token", "plan, MiB"],
                [
                    [
                        f"`{row['method']}`",
                        f"{row['tokens']:,}",
                        f"{row['budget']:,}",
                        f"{row['whole µs a token']:.1f}",
                        f"{row['relative to 576']:.2f}",
                        f"{row['alone µs a token']:.1f}",
                        f"{row['plan MiB']:.1f}",
                    ]
                    for row in rows
                ],
            ),
            f"One float32 matrix of all pairs of the largest image would take {square:,.0f} MiB.",
        ]
    )
    print(text)
    if given.output:
        record = {
            "format": "torino-results/1",
            "name": "speed-large",
            "title": "torino-x and torino-m on large images",
            "report": "research/reports/performance.md",
            "command": ["python benchmarks/large.py"],
            "recorded": {"measured": machine()},
            "rows": rows,
        }
        given.output.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    if given.write:
        write_section(given.write, "large", text)


if __name__ == "__main__":
    main()
