r"""Evaluate all methods under every combination of positions and attention, with ``torino eval``.

Each combination is one run in ``OUTPUT/POSITIONS-ATTENTION``, or in ``OUTPUT/POSITIONS-ATTENTION.PART`` with
``--part``, so that methods can be added later. It is done by several processes that share the questions. A
killed script continues where it stopped when it is started again. Combinations that are named first are run first.

Examples
--------
::

    python lab/scripts/make_tasks.py --data DATA --half report --photos 120 --output build/lab/report
    python research/scripts/factorial.py --model lab --data build/lab/report -o runs/factorial/lab/report
    python research/scripts/factorial.py --model build/lab-theta --data build/lab/choose -o runs/factorial/theta/choose \
        --combinations compact-plain original-proportional
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

TASKS = ("Lab-POPE", "Lab-VQAv2", "Lab-OKVQA", "Lab-DAQUAR", "Lab-Collage", "Lab-Small", "Lab-Signs")
COMBINATIONS = (
    "compact-plain",
    "original-proportional",
    "original-plain",
    "compact-proportional",
    "median-restore",
    "original-restore",
    "median-proportional",
    "compact-restore",
    "median-plain",
)
BUDGETS = "74,43,16"  # 38, 22 and 8 percent of 196 tokens, the paper's tiers


def command(args: argparse.Namespace, combination: str, shard: int) -> list[str]:
    """Return the ``torino eval`` command of one process."""
    positions, attention = combination.split("-")
    words = [sys.executable, "-m", "torino", "eval", "--model", args.model, "--data", str(args.data)]
    words += ["--tasks", ",".join(args.tasks), "--methods", args.methods, "--kd", "none", "--budget", args.budget]
    words += ["--positions", positions, "--attention", attention, "--batch", str(args.batch)]
    words += ["--shard", f"{shard}/{args.processes}", "-o", str(args.output / folder_of(args, combination))]
    words += [word for sae in args.sae for word in ("--sae", sae)]
    words += ["--limit", str(args.limit)] if args.limit else []
    return [*words, *(["--dtype", args.dtype] if args.dtype else [])]


def folder_of(args: argparse.Namespace, combination: str) -> str:
    """Return the name of a run's folder."""
    return f"{combination}.{args.part}" if args.part else combination


def run(args: argparse.Namespace, combination: str) -> None:
    """Run one combination with several processes, and stop if one of them fails."""
    began, name = time.monotonic(), folder_of(args, combination)
    args.output.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": str(args.threads)}
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for shard in range(1, args.processes + 1):
            with (args.output / f"{name}-{shard}.log").open("ab") as log:
                words = command(args, combination, shard)
                processes.append(subprocess.Popen(words, stdout=log, stderr=log, env=environment))
            if shard == 1 and args.processes > 1:  # the first process writes run.json
                while not (args.output / name / "run.json").exists() and processes[0].poll() is None:
                    time.sleep(0.5)
        codes = [process.wait() for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.terminate()
    if any(codes):
        raise SystemExit(f"{name} failed with exit codes {codes}; see {args.output}/{name}-*.log.")
    print(f"{name}: {(time.monotonic() - began) / 60:.1f} minutes", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="lab", help="model for torino eval (default: %(default)s)")
    add("--data", type=Path, required=True, help="folder of make_tasks.py")
    add("--tasks", nargs="+", default=list(TASKS), help="tasks, fixed beforehand (default: seven)")
    add("--methods", default="all", help="methods for torino eval (default: %(default)s)")
    add("--part", help="suffix of the folders, for a run of further methods")
    add("--sae", nargs="+", default=["lab"], help="SAE for torino eval (default: %(default)s)")
    add("--budget", default=BUDGETS, help="tokens (default: %(default)s)")
    add("--combinations", nargs="+", choices=COMBINATIONS, default=list(COMBINATIONS), metavar="POSITIONS-ATTENTION")
    add("--limit", type=int, help="questions of each task at most, drawn at random (default: all)")
    add("--batch", type=int, default=16, help="answers that are generated together (default: %(default)s)")
    add("--dtype", default="bfloat16", help="precision; empty for the model's own (default: %(default)s)")
    add("--processes", type=int, default=2, help="processes that share a run (default: %(default)s)")
    add("--threads", type=int, default=1, help="threads of each process (default: %(default)s)")
    add("-o", "--output", type=Path, required=True, help="folder of the runs")
    args = parser.parse_args()
    for combination in args.combinations:
        run(args, combination)


if __name__ == "__main__":
    main()
