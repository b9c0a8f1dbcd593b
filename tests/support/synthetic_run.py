"""Write run folders with random answers, and the command-line application of reports."""

from __future__ import annotations

import base64
import csv
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from torino.evaluation import BENCHMARKS
from torino.evaluation.protocol import Setting, matched_settings
from torino.evaluation.runner import RunPlan
from torino.evaluation.tasks import Task, open_task

QUALITY = {
    "full": 0.95,
    "torino-m": 0.92,
    "torino-p": 0.9,
    "visionzip": 0.86,
    "prunesid": 0.87,
    "random": 0.72,
    "downsample": 0.7,
}
METHODS = ["torino-p", "torino-m", "random", "visionzip", "prunesid"]
MEAN_LENGTHS = {"3,3": 217, "2,2": 129, "1,1": 47}


def encode_pixel(number: int) -> str:
    """Return a small image as base64 text; equal numbers give equal images."""
    file = io.BytesIO()
    Image.new("RGB", (2, 2), (number % 256, number // 256, 7)).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def write_task(folder: Path, name: str, questions: int) -> Task:
    """Write a file in VLMEvalKit's layout whose correct answers are Yes, No, A or word."""
    path = folder / f"{BENCHMARKS[name].files[0]}.tsv"
    options = ["A", "B"] if name in ("MMBench_EN", "MMBench_CN", "ScienceQA") else []
    yes_no = name in ("MME", "POPE")
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, delimiter="\t")
        category = ["category"] if yes_no else []
        writer.writerow(["index", "image", "question", "answer", *options, *category])
        for number in range(questions):
            answer = "A" if options else "Yes" if yes_no and number % 2 else "No" if yes_no else "word"
            kind = [["color", "count"][number % 4 // 2]] if name == "MME" else ["random"] if yes_no else []
            image = encode_pixel(number // 2 if yes_no else number)
            writer.writerow([number, image, "what is this ?", answer, *(["cat", "dog"] if options else []), *kind])
    return open_task(path)


def plan_settings(saes: list[str], methods: list[str] = METHODS) -> tuple[list[Setting], list[Setting]]:
    """Return the settings of the first and the second phase of a run."""
    plan = RunPlan(methods, dynamic=[(3, 3), (2, 2), (1, 1)], fixed=[192, 64], seeds=3)
    first = plan.first_settings(saes)
    references = {setting.tier: setting for setting in first if setting.reference}
    lengths = {tier: MEAN_LENGTHS[tier.split()[0]] for tier in references}  # with several SAEs "3,3 [label]"
    return first, matched_settings(methods, lengths, references, saes, 3)


def draw_length(setting: Setting, factor: float, rng: np.random.Generator) -> int:
    """Return the number of tokens that an image keeps."""
    if setting.method == "full":
        return 576
    if setting.budget is not None:
        return setting.budget
    return int(np.clip(MEAN_LENGTHS[setting.tier.split()[0]] * factor * rng.lognormal(0, 0.25), 4, 570))


def accuracy(setting: Setting, tokens: int) -> float:
    """Return the probability of a correct answer."""
    lost = 0.0 if setting.method == "full" else (1 - QUALITY[setting.method]) * (576 / tokens) ** 0.45 / 1.6
    return max(0.3, QUALITY["full"] - lost)


def write_synthetic_run(
    folder: Path,
    *,
    tasks: tuple[str, ...] = ("GQA", "POPE"),
    questions: int = 60,
    saes: tuple[str, ...] = ("x64",),
    answered: float = 1.0,
    model: str = "llava-hf/llava-1.5-7b-hf",
    methods: list[str] = METHODS,
) -> Path:
    """Write a run folder with random answers, correct with a probability that depends on method and tokens."""
    data = folder.parent / f"{folder.name}-data"
    data.mkdir(parents=True)
    opened = [write_task(data, name, questions) for name in tasks]
    first, second = plan_settings(list(saes), methods)
    metadata: dict[str, Any] = {
        "format": "torino-run/1",
        "torino": "0.1.0",
        "created": "2025-01-01T00:00:00+00:00",
        "model": model,
        "family": "llava",
        "padding": "crop",
        "positions": "compact",
        "attention": "auto",
        "batch": 8,
        "limit": None,
        "versions": {"python": "3.11", "torch": "2.13.0", "transformers": "5.22.2"},
        "hardware": {"machine": "x86_64", "cores": 2, "gpu": None},
        "saes": {
            label: {"latents": 1024 * int(label[1:] if label[1:].isdigit() else 4), "kind": "matryoshka-batch-topk"}
            for label in saes
        },
        "tasks": [
            task.for_model(None).describe() | {"kind": task.kind, "path": str(task.source), "max_new_tokens": 32}
            for task in opened
        ],
        "settings": [setting.to_dict() for setting in first],
        "arguments": {},
    }
    (folder / "answers").mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps(metadata))
    (folder / "settings.json").write_text(json.dumps({"settings": [setting.to_dict() for setting in second]}))
    rng = np.random.default_rng(5)
    with (folder / "answers" / "1of1.jsonl").open("w") as file:
        for position, task in enumerate(opened):
            factor = 0.85 + 0.3 * position / max(len(opened) - 1, 1)
            for setting in [*first, *second]:
                count = len(task.samples) if setting in first else round(answered * len(task.samples))
                for sample in task.samples[:count]:
                    tokens = draw_length(setting, factor, rng)
                    correct = rng.random() < accuracy(setting, tokens)
                    wrong = {"yes": "No", "no": "Yes", "a": "B", "b": "A"}.get(sample.answers[0].lower(), "other")
                    row = {"task": task.name, "index": sample.index, "setting": setting.id, "image": sample.image.key}
                    row |= {"prediction": sample.answers[0] if correct else wrong, "tokens": tokens, "before": 576}
                    row["seconds"] = {"tower": 0.1, "plan": 0.004, "projector": 0.01, "answer": 0.3, "batch": 8}
                    file.write(json.dumps(row) + "\n")
    return folder


def make_report_app() -> Any:
    """Return a command-line application with only ``report`` and ``plot``."""
    import typer

    from torino.cli.report import plot, report

    app = typer.Typer()
    app.command()(report)
    app.command()(plot)
    return app
