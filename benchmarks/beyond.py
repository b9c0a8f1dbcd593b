"""What ``torino-x`` costs beside ``torino-m``, tokens to reduced tokens, plain and with the int8 prefilter.

python benchmarks/beyond.py                                        # prints the table
python benchmarks/beyond.py --tokens rows/*.npy --write research/reports/beyond.md
python benchmarks/beyond.py --quick                                # small sizes, a few seconds
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path

from batches import DELTA, Batch, K, Known, lifted, prefilter_backend, real_photos
from report import machine, parser, ratio, table, time_side_by_side, write_section

from torino import VisualTokens, make
from torino.reducers import TorinoX

BUDGETS = (217, 192, 129, 128, 64, 47)
WANTED = 1.2


def whole(batch: Batch, spec: str, prefilter: str) -> Callable[[], object]:
    """Tokens to reduced tokens by one method."""
    reducer, patches = make(spec, sae=batch.sae), [image.patches for image in batch.images]

    def run() -> object:
        batch.sae.prefilter = prefilter  # type: ignore[assignment]
        return reducer.plan_batch(batch.images).apply(patches)

    return run


def measure(batch: Batch, budgets: tuple[int, ...], rounds: int) -> list[list[str]]:
    """Both methods at every budget, in turn."""
    rows: list[list[str]] = []
    for budget in budgets:
        specs = {"m": f"torino-m(k={K}, delta={DELTA}, budget={budget})", "x": f"torino-x(budget={budget})"}
        tasks = {(name, how): whole(batch, spec, how) for how in ("off", "int8") for name, spec in specs.items()}
        seconds = time_side_by_side({" ".join(key): task for key, task in tasks.items()}, rounds)
        row = [batch.name.rsplit(", ", 1)[-1], str(budget)]
        for how in ("off", "int8"):
            row += [f"{statistics.median(seconds[f'{name} {how}']) * 1e3:.1f}" for name in ("m", "x")]
            row += [f"{ratio(seconds[f'x {how}'], seconds[f'm {how}']):.3f}"]
        rows.append(row)
        print(*row, sep=" · ", flush=True)
    return rows


def larger(batch: Batch, rounds: int) -> list[list[str]]:
    """Both methods on one image of more patches, photos one below the other: all of it, and the plan alone."""
    rows: list[list[str]] = []
    for photos in (1, 2, 4, 8):
        some = batch.first(photos)
        patches, (height, columns) = some.packed, some.images[0].grid
        images, budget = [VisualTokens(patches, (height * photos, columns))], len(patches) // 9
        specs = {"m": f"torino-m(k={K}, delta={DELTA}, budget={budget})", "x": f"torino-x(budget={budget})"}
        batch.sae.prefilter = "off"
        known = {"m": Known(batch.sae.top(patches, K)), "x": Known(batch.sae.top(patches, TorinoX.concepts))}
        tasks: dict[str, Callable[[], object]] = {}
        for name, spec in specs.items():
            alone = make(spec, sae=known[name])
            tasks[name] = whole(Batch("", images, batch.sae), spec, "off")
            tasks[f"{name} alone"] = lambda alone=alone, images=images: alone.plan_batch(images)
        seconds = time_side_by_side(tasks, rounds)
        times = [f"{statistics.median(seconds[name]) * 1e3:.1f}" for name in ("m", "x", "m alone", "x alone")]
        rows.append([f"{len(patches):,}", str(budget), *times, f"{ratio(seconds['x'], seconds['m']):.3f}"])
        print(*rows[-1], sep=" · ", flush=True)
    return rows


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--quick", action="store_true", help="small sizes, to see that it runs")
    arguments.add_argument("--tokens", nargs="*", type=Path, default=[], help="real tokens, (photos, N, D) numpy files")
    given = arguments.parse_args()
    d, c, many, budgets, rounds = (
        (512, 2048, 2, (64,), 2) if given.quick else (1024, 65536, 8, BUDGETS, int(given.rounds))
    )
    prefilter_backend()
    photos = real_photos(given.tokens)
    batch = lifted(photos, d, c, given.seed)
    some = tuple(dict.fromkeys((budgets[0], *budgets[-2:])))
    rows = [*measure(batch.first(1), budgets, rounds), *measure(batch.first(many), some, rounds)]
    fewer = max(2, rounds // 3)
    by_size = larger(batch, fewer)
    source = f"{len(photos)} photos of the files given" if given.tokens else "the four bundled photos"
    headings = ["", "tokens", "`torino-m` ms", "`torino-x` ms", "ratio", "with int8: ms", "ms", "ratio"]
    worst = [max(float(row[column]) for row in rows) for column in (4, 7)]
    verdict = [
        [f"{name}: at most {WANTED} × `torino-m`", f"{value:.3f} at worst", "met" if value <= WANTED else "**not met**"]
        for name, value in zip(("plain", "with the int8 prefilter"), worst, strict=True)
    ]
    parts = [
        f"Measured by `benchmarks/beyond.py`, seed {given.seed}, medians of {rounds} rounds in turn, of times and of "
        f"each round's ratio; `torino-m` at ({K}, {DELTA}); {batch.name}, tokens of {source}. {machine()}.",
        table(["Wanted", "Got", ""], verdict),
        table(headings, rows),
        "**One image of more patches**, photos one below the other, a ninth kept, plain, "
        f"median of {fewer} rounds; alone: the plan without the SAE",
        table(
            ["patches", "tokens", "`torino-m` ms", "`torino-x` ms", "`torino-m` alone", "`torino-x` alone", "ratio"],
            by_size,
        ),
    ]
    print(*parts, sep="\n\n")
    if given.write:
        write_section(given.write, "cost", "\n\n".join(parts))


if __name__ == "__main__":
    main()
