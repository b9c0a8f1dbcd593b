r"""Cost of the exact search for small SAEs and of grouping, before and after, in one run.

Each version of the code runs in a process of its own, in turn, and measures itself beside the lone float32 product
(search) or the comparison of all pairs (grouping, single calls).

    python benchmarks/small.py --before ../main/src -o research/results/speed-small.json \
        --write research/reports/performance.md
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

SIZES = (
    (196, 384, 1536),
    (576, 384, 1536),
    (4608, 384, 1536),
    (196, 768, 12288),
    (576, 768, 12288),
    (4608, 768, 12288),
)
HERE = Path(__file__).resolve()


def median_ms(tasks: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Time single calls in turn, after two warm-ups."""
    seconds: dict[str, list[float]] = {name: [] for name in tasks}
    for turn in range(rounds + 2):
        for name, task in tasks.items():
            begin = time.perf_counter()
            task()
            if turn > 1:
                seconds[name].append(time.perf_counter() - begin)
    return {name: 1e3 * statistics.median(values) for name, values in seconds.items()}


def measure(rounds: int, seed: int) -> dict[str, object]:
    """Measure the version of torino that is imported."""
    import torch
    from core import Setting, pairwise_groups

    from torino.core.grouping import group_by_overlap

    search: list[dict[str, object]] = []
    for n, d, c in SIZES:
        setting = Setting.of(n, d, c, seed)
        x, sae = setting.tokens.patches, setting.sae
        out = torch.empty(n, c)
        tasks: dict[str, Callable[[], object]] = {"product": lambda: torch.mm(x, sae.W_enc.T, out=out)}
        for mode in ("off", "auto"):
            tasks[mode] = lambda mode=mode: sae.top(x, 3, prefilter=mode)
        found = sae.top(x, 3, prefilter="auto")
        digest = hashlib.sha256(found.indices.numpy().tobytes() + found.values.numpy().tobytes()).hexdigest()
        search.append({"size": [n, d, c], "digest": digest, **median_ms(tasks, rounds if n * c < 2e7 else 3)})
    grouping: list[dict[str, object]] = []
    setting = Setting.of(576, 64, 4096, seed)
    for k, delta in ((3, 2), (6, 3)):
        concepts = setting.sae.top(setting.tokens.patches, k)
        sets = [frozenset(row) for row in concepts.indices.tolist()]
        tasks = {"ours": lambda: group_by_overlap(concepts, delta), "pairs": lambda: pairwise_groups(sets, delta)}
        grouping.append({"setting": [k, delta], **median_ms(tasks, rounds)})
    return {"search": search, "grouping": grouping}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="src folder of an earlier checkout")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", type=Path, help="page whose section 'small' is rewritten")
    parser.add_argument("-o", "--output", type=Path, help="write the measurements as JSON")
    parser.add_argument("--self", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.self:
        print(json.dumps(measure(given.rounds, given.seed)))
        return
    folders = {"before": given.before, "after": HERE.parents[1] / "src"}
    runs: dict[str, dict[str, list[dict[str, object]]]] = {}
    for name, folder in folders.items():
        if folder is None:
            continue
        command = [sys.executable, str(HERE), "--self", "--rounds", str(given.rounds), "--seed", str(given.seed)]
        environment = {**os.environ, "PYTHONPATH": f"{Path(folder).resolve()}{os.pathsep}{HERE.parent}"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
        runs[name] = json.loads(done.stdout)
    from report import machine, table, write_section

    rows: list[list[str]] = []
    for i, size in enumerate(SIZES):
        after, before = runs["after"]["search"][i], runs.get("before", runs["after"])["search"][i]
        ratios = [
            float(str(run[mode])) / float(str(run["product"]))
            for run, mode in ((before, "auto"), (after, "off"), (after, "auto"))
        ]
        same = "yes" if after["digest"] == before["digest"] else "**no**"
        rows.append(
            [
                " × ".join(f"{v:,}" for v in size),
                f"{float(str(after['product'])):.1f}",
                *(f"{r:.2f}" for r in ratios),
                same,
            ]
        )
    groups = [
        [
            f"({run['setting'][0]}, {run['setting'][1]})",
            *(f"{float(str(r['pairs'])) / float(str(r['ours'])):.0f} ×" for r in (old, run)),
        ]  # type: ignore[index]
        for old, run in zip(runs.get("before", runs["after"])["grouping"], runs["after"]["grouping"], strict=True)
    ]
    text = "\n\n".join(
        [
            f"Measured by `benchmarks/small.py`, seed {given.seed}, median of {given.rounds} rounds in turn, k = 3. "
            f"{machine()}.",
            table(["tokens × width × latents", "product ms", "before", "float32", "auto", "same result"], rows),
            "Grouping of 576 tokens, single calls, faster than all pairs in Python by:",
            table(["(k, δ)", "before", "after"], groups),
        ]
    )
    print(text)
    if given.output:
        record = {
            "format": "torino-results/1",
            "name": "speed-small",
            "title": "Exact search of small SAEs and grouping",
            "report": "research/reports/performance.md",
            "command": ["python benchmarks/small.py --before MAIN/src"],
            "seed": given.seed,
            "recorded": {"measured": machine()},
            "runs": runs,
        }
        given.output.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    if given.write:
        write_section(given.write, "small", text)


if __name__ == "__main__":
    main()
