"""Small evaluation runs: images, task files, a plan, and a run of them with a tiny model."""

from __future__ import annotations

import base64
import csv
import io
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from torino import SAE
from torino.evaluation.results import Run, open_run
from torino.evaluation.runner import RunPlan, evaluate
from torino.evaluation.tasks import Task, open_task
from torino.vlm.session import VLM

METHODS = ["torino-p", "torino-m", "random", "divprune"]
PLAN = RunPlan(METHODS, dynamic=[(2, 2), (1, 1)], fixed=[5], seeds=2)
QUESTIONS = ["what is this ?", "how many is this ?"]


def make_sae() -> SAE:
    """Return an SAE of 40 latents for the tower of ``tiny_vlm``."""
    generator = torch.Generator().manual_seed(3)
    return SAE(torch.randn(40, 32, generator=generator), W_dec=torch.randn(40, 32, generator=generator))


def make_image(seed: int) -> bytes:
    """Return a PNG file of 4 × 4 random areas."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (4, 4, 3), generator=generator, dtype=torch.uint8).numpy()
    file = io.BytesIO()
    Image.fromarray(pixels).resize((56, 56), Image.Resampling.NEAREST).save(file, "PNG")
    return file.getvalue()


def write_task_file(path: Path, images: int, questions: int = 2) -> Path:
    """Write a TSV with one or two questions about each image."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, delimiter="\t")
        writer.writerow(["index", "image", "question", "answer"])
        for number in range(images):
            image = base64.b64encode(make_image(number)).decode()
            for question in range(questions):
                writer.writerow([number * questions + question, image, QUESTIONS[question], "word1"])
    return path


def open_tiny_task(folder: Path, name: str = "small", images: int = 4) -> Task:
    """Write and open a task."""
    return open_task(write_task_file(folder / f"{name}.tsv", images))


def run_tiny(folder: Path, tasks: list[Task], vlm: VLM, sae: Any, plan: RunPlan = PLAN, **options: Any) -> Run:
    """Evaluate the plan on tasks."""
    return evaluate(folder, vlm=vlm, tasks=tasks, plan=plan, saes={"s": sae}, batch=3, **options)


def answer_table(folder: Path) -> list[tuple[str, ...]]:
    """Return everything in a run that must not depend on how often it was stopped."""
    rows = open_run(folder).rows()
    return sorted((row["task"], row["setting"], row["index"], row["prediction"], str(row["tokens"])) for row in rows)
