"""Throughput of ``torino reduce`` on a collection: a Ray cluster against plain processes, after start-up.

Both have as many workers, which have loaded the model before the clock starts. They take turns on parts of the same
collection, so that a slow moment of the machine falls on both alike; their stores must have the same bytes. A run that
ends after ``--minutes`` continues with the missing parts when it is started again.

    python benchmarks/store.py                                # 2,000 crops of the bundled photos, two workers
    python benchmarks/store.py --images a.parquet b.parquet --minutes 6
    python benchmarks/store.py --photos 24 --shard-images 4 --turns 2 -o /tmp/store.json    # to see that it runs
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import ray
from report import machine
from servers import RESULTS, ROOT, make_crops, open_results, versions

from torino.core.io import write_json
from torino.serving.settings import ReductionSettings, default_sae
from torino.serving.store import StoreOptions, executors
from torino.serving.store.on_ray import RayExecutor
from torino.serving.store.worker import StoreJob
from torino.serving.store.write import full_settings


def write_crops(folder: Path, count: int, seed: int) -> None:
    """Write crops of the bundled photos as JPEG files, unless they are there."""
    folder.mkdir(parents=True, exist_ok=True)
    if len(list(folder.iterdir())) < count:
        for number, data in enumerate(make_crops(count, seed)):
            (folder / f"{number:06d}.jpg").write_bytes(data)


def load_together(slot: int, count: int) -> None:
    """Load the model in a process of the pool, and wait there until all have: none can do it twice."""
    executors._worker()
    executors._State.counts[slot] = -1
    while any(executors._State.counts[other] != -1 for other in range(count)):
        time.sleep(0.05)


def start_processes(job: StoreJob, count: int) -> executors.ProcessExecutor:
    executor = executors.ProcessExecutor(job, count)
    for task in [executor._pool.submit(load_together, slot, count) for slot in range(count)]:
        task.result()
    return executor


def start_ray(job: StoreJob, count: int) -> RayExecutor:
    executor = RayExecutor(job, "local", count)
    if len(executor._actors) != count:
        raise SystemExit(f"Ray found room for {len(executor._actors)} actors, not for {count}.")
    ray.get([actor.ready.remote() for actor in executor._actors])
    return executor


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photos", type=int, default=2000, help="number of photos (default: 2000)")
    parser.add_argument("--images", type=Path, nargs="+", help="parquet files, tars or folders instead of crops")
    parser.add_argument("--model", default="lab")
    parser.add_argument("--method", default="torino-x")
    parser.add_argument("--sae", help="default: that of the model package")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--shard-images", type=int, default=25)
    parser.add_argument("--turns", type=int, default=8, help="parts of the collection; each is timed separately")
    parser.add_argument("--minutes", type=float, default=60.0, help="start no other part after this time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "store-benchmark", help="folder of the stores")
    parser.add_argument("-o", "--output", type=Path, default=RESULTS / "serving-store.json")
    return parser.parse_args()


def main() -> None:
    given = parse()
    names = ("photos", "model", "method", "sae", "workers", "batch", "shard_images", "turns", "seed")
    run = {name: getattr(given, name) for name in names}
    run["images"] = [path.name for path in given.images] if given.images else "crops of the bundled photos"
    title = "torino reduce on a collection: Ray against plain processes"
    empty = {"title": title, "command": [], "seed": given.seed, "turns": []}
    results = open_results(given.output, "docs/guides/large-collections.md", run, empty)
    results |= {"date": date.today().isoformat(), "hardware": machine(), "versions": versions()}
    words = [Path(word).name if word.endswith((".parquet", ".json")) else word for word in sys.argv[1:]]
    results["command"].append(f"python benchmarks/store.py {' '.join(words)}".strip())
    sources = given.images
    if sources is None:
        sources = [given.work / "photos"]
        write_crops(sources[0], given.photos, given.seed)
    settings = ReductionSettings(given.method, sae=given.sae or default_sae(given.method, given.model))
    paths = tuple(str(path.absolute()) for path in sources)
    jobs = {
        name: StoreJob(
            paths, given.model, settings.to_dict(), str(given.work / name), batch=given.batch, limit=given.photos
        )
        for name in ("processes", "ray")
    }
    measure(jobs, settings, given, results)
    write_json(given.output, results)
    shown = ("images_per_second", "ratio", "median_ratio")
    print({name: results[name] for name in shown if name in results} or "Start it again for the missing parts.")


def measure(
    jobs: dict[str, StoreJob], settings: ReductionSettings, given: argparse.Namespace, results: dict[str, Any]
) -> None:
    """Start both executors, and let them take turns on the parts that are missing in the results."""
    end = time.monotonic() + 60 * given.minutes
    startup: dict[str, float] = {}
    running: dict[str, Any] = {}
    for name, start in (("processes", start_processes), ("ray", start_ray)):
        begin = time.perf_counter()
        running[name] = start(jobs[name], given.workers)
        startup[name] = round(time.perf_counter() - begin, 2)
    results["startup_seconds"] = startup
    options = StoreOptions(batch=given.batch, shard_images=given.shard_images)
    try:
        full = full_settings(settings, running["processes"].inspect(), options)
        if full != full_settings(settings, running["ray"].inspect(), options):
            raise SystemExit("The two executors see different models or photos.")
        parts = [part.tolist() for part in np.array_split(np.arange(full.shards), given.turns) if len(part)]
        for turn, part in enumerate(parts):
            if turn < len(results["turns"]) or time.monotonic() > end:
                continue
            seconds: dict[str, float] = {}
            for name in sorted(running, reverse=bool(turn % 2)):
                begin = time.perf_counter()
                for _ in running[name].run(part, full, "stop", lambda done: None):
                    pass
                seconds[name] = round(time.perf_counter() - begin, 3)
            results["turns"].append({"photos": sum(len(full.photo_range(number)) for number in part), **seconds})
            write_json(given.output, results)
            print(f"turn {turn + 1}/{len(parts)}: {seconds}", flush=True)
    finally:
        for executor in running.values():
            executor.close()
    turns = results["turns"]
    if len(turns) < len(parts):
        return
    for number in range(full.shards):
        first, second = (full.shard_path(Path(job.folder), number).read_bytes() for job in jobs.values())
        if first != second:
            raise SystemExit(f"Shard {number} differs between the two executors.")
    totals = {name: sum(turn[name] for turn in turns) for name in jobs}
    results |= {
        "settings": asdict(full),
        "same_bytes": True,
        "images_per_second": {name: round(full.photos / total, 3) for name, total in totals.items()},
        # of the whole run; the median of the turns is less sensitive to other work on the machine
        "ratio": round(totals["processes"] / totals["ray"], 4),
        "median_ratio": round(statistics.median(turn["processes"] / turn["ray"] for turn in turns), 4),
    }


if __name__ == "__main__":
    main()
