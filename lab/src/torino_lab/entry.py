"""Entry points that provide the lab's model and tasks to torino. Cheap to import."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torino.evaluation.benchmarks import Benchmark
    from torino.vlm.loading import ModelPackage


def tasks() -> dict[str, Benchmark]:
    """Return the ``Lab-*`` tasks by name, for the entry point group ``torino.tasks``."""
    from torino.evaluation.benchmarks import Benchmark
    from torino_lab.catalog import TASKS

    return {
        name: Benchmark(
            name=name,
            label=name.replace("-", " ", 1),
            kind=task.kind,  # type: ignore[arg-type]
            files=(name,),
            instruction="",
        )
        for name, task in TASKS.items()
    }


def model() -> ModelPackage:
    """Return the lab's model, for the entry point group ``torino.models``."""
    from torino.vlm.loading import ModelPackage
    from torino_lab.assembly import BLOCK, SHIPPED, lab_folder, tower_folder

    return ModelPackage(
        folder=lab_folder,
        sae=lambda: SHIPPED / "sae",
        tower=tower_folder,
        block=BLOCK,
        prompts="plain",  # it was trained on questions with and without an instruction
    )
