r"""Start-up of the command line and of ``import torino``, beside ``import torch``, in processes of their own, in turn.

``torino ask`` on a warm cache is divided into the imports of torch and transformers, loading the model, answering
(image processor, tower, reducer, language model; with fewer tokens, with all, and the comparison of early exit), and
the rest: the interpreter, torino's own imports, options, reading the SAE, opening the photo, drawing the table.

    python benchmarks/startup.py -o research/results/speed-startup.json --write research/reports/performance.md
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ASK = ["ask", "astronaut", "Is there a person in the photo?"]
PROCESSES = {
    "python": ["-c", "pass"],
    "import torch": ["-c", "import torch"],
    "import torino": ["-c", "import torino"],
    "import torino, SAE and methods": ["-c", "import torino; torino.SAE; torino.make"],
    "torino --help": ["-m", "torino", "--help"],
}


def measure_ask() -> dict[str, float]:
    """Run ``torino ask`` in this process and return the seconds of its parts."""
    stat = Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()
    started = int(stat[19]) / os.sysconf("SC_CLK_TCK")  # since boot
    begin = time.perf_counter()
    before = time.clock_gettime(time.CLOCK_BOOTTIME) - started
    seconds: dict[str, float] = {"imports": 0.0, "load": 0.0, "answer": 0.0}

    def timed(part: str, owner: object, name: str) -> None:
        call = getattr(owner, name)

        def run(*args: object, **kwargs: object) -> object:
            start = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                seconds[part] += time.perf_counter() - start

        setattr(owner, name, run)

    start = time.perf_counter()
    import torch  # noqa: F401
    import transformers
    from transformers import AutoProcessor, CLIPVisionModel, LlamaForCausalLM, LlavaForConditionalGeneration

    assert all((transformers, AutoProcessor, CLIPVisionModel, LlamaForCausalLM, LlavaForConditionalGeneration))
    seconds["imports"] = time.perf_counter() - start

    import torino.cli.ask
    import torino.vlm
    from torino.cli.main import main as command

    timed("load", torino.cli.ask, "load_session")
    timed("answer", torino.vlm, "ask")
    sys.argv, out = ["torino", *ASK], sys.stdout
    sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115
    try:
        command()
    except SystemExit as stop:
        if stop.code:
            raise
    sys.stdout = out
    total = before + time.perf_counter() - begin
    return {**seconds, "rest": total - sum(seconds.values()), "total": total}


def run(arguments: list[str]) -> tuple[float, str]:
    """Run Python with these arguments; return the seconds it took and its output."""
    begin = time.perf_counter()
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=True)
    return time.perf_counter() - begin, done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--write", type=Path, help="page whose section 'startup' is rewritten")
    parser.add_argument("-o", "--output", type=Path, help="write the measurements as JSON")
    parser.add_argument("--ask", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.ask:
        print(json.dumps(measure_ask()))
        return
    rounds: list[dict[str, float]] = []
    for turn in range(given.rounds + 1):
        seconds = {name: run(arguments)[0] for name, arguments in PROCESSES.items()}
        asked = json.loads(run([__file__, "--ask"])[1])
        if turn:  # the first round reads files into memory
            rounds.append({**seconds, **{f"ask: {part}": value for part, value in asked.items()}})
    median = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
    lazily, whole = (
        statistics.median(one[name] / one["import torch"] for one in rounds)
        for name in ("import torino", "import torino, SAE and methods")
    )
    from report import machine, table, write_section

    wanted = [
        ("`torino --help`, under 0.5 s", f"{median['torino --help']:.2f} s", median["torino --help"] < 0.5),
        ("`import torino`: at most 1.2 × `import torch`, which it does not import", f"{lazily:.2f} ×", lazily <= 1.2),
        ("the same with its SAE and all methods, which import torch", f"{whole:.2f} ×", whole <= 1.2),
        ("`torino ask`, the rest: under 1 s", f"{median['ask: rest']:.2f} s", median["ask: rest"] < 1.0),
    ]
    text = "\n\n".join(
        [
            f"Measured by `benchmarks/startup.py`, median of {given.rounds} rounds in turn, warm cache, the lab model. "
            f"{machine()}.",
            table(["Wanted", "Got", ""], [[name, got, "met" if met else "**not met**"] for name, got, met in wanted]),
            table(["", "seconds"], [[name, f"{value:.2f}"] for name, value in median.items()]),
        ]
    )
    print(text)
    if given.output:
        record = {
            "format": "torino-results/1",
            "name": "speed-startup",
            "title": "Start-up of the command line",
            "report": "research/reports/performance.md",
            "command": ["python benchmarks/startup.py"],
            "recorded": {"measured": machine()},
            "rounds": rounds,
        }
        given.output.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    if given.write:
        write_section(given.write, "startup", text)


if __name__ == "__main__":
    main()
