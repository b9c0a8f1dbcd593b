"""Entry points that provide the lab's model and tasks to torino. Cheap to import."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torino.evaluation.benchmarks import Benchmark
    from torino.vlm.loading import ModelPackage
    from torino_lab.tables import KeywordGrader


def tasks() -> dict[str, Benchmark]:
    """Return the ``Lab-*`` tasks by name, for the entry point group ``torino.tasks``."""
    from torino.evaluation.benchmarks import Benchmark
    from torino_lab.catalog import BENCHMARKS

    return {
        name: Benchmark(
            name=name,
            label=name.replace("-", " ", 1),
            kind=entry.kind,  # type: ignore[arg-type]
            files=(name,),
            max_score=200.0 * len(entry.parts) if entry.kind == "mme" else 100.0,
            instruction="",
            grader=_keyword_grader if entry.kind == "judge" else None,
        )
        for name, entry in BENCHMARKS.items()
    }


def _keyword_grader() -> KeywordGrader:
    from torino_lab.tables import KeywordGrader

    return KeywordGrader()


def model() -> ModelPackage:
    """Return the lab's model, for the entry point group ``torino.models``."""
    from torino.vlm.loading import ModelPackage
    from torino_lab.model import SHIPPED, lab_folder
    from torino_lab.tower import BLOCK, tower_folder

    return ModelPackage(
        folder=lab_folder,
        sae=lambda: SHIPPED / "sae",
        tower=tower_folder,
        block=BLOCK,
        prompts="plain",  # it was trained on questions without an instruction
    )
