"""Save images and reductions during a run, and load them for figures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from torino.core.errors import BadParameter, TorinoError
from torino.core.extras import optional_import
from torino.core.io import write_atomic
from torino.core.reduction import Reduction
from torino.datasets.images import open_image
from torino.evaluation.benchmarks import format_question
from torino.evaluation.judge import Grader
from torino.evaluation.protocol import FULL, Setting
from torino.evaluation.results import Run
from torino.evaluation.tasks import Task

with optional_import("Saved images need", "torino[vlm]"):
    from PIL import Image

FOLDER, IMAGE = "cells", "photo.png"
MAX_METHODS = 5  # methods of a tier that are shown by default


def example_dir(folder: Path, key: str) -> Path:
    """Return the folder in which a run saves what belongs to an image."""
    return folder / FOLDER / _hash(key)


@dataclass(frozen=True)
class ExampleWriter:
    """Saves one image as the tower sees it, and its reduction under each setting.

    Attributes
    ----------
    folder : Path
        Folder of the image, see :func:`example_dir`.
    """

    folder: Path

    def save_image(self, image: Image.Image) -> None:
        """Save the image unless it is saved already."""
        file = self.folder / IMAGE
        if not file.is_file():
            write_atomic(file, lambda target: image.save(target, "PNG"))

    def save_reduction(self, setting: str, reduction: Reduction) -> None:
        """Save a reduction unless it is saved already."""
        file = _reduction_file(self.folder, setting)
        if not file.is_file():
            reduction.save(file)


@dataclass(frozen=True)
class SavedExample:
    """A reduction of an image with the answer given with it.

    Attributes
    ----------
    setting : Setting
    reduction : Reduction
    answer : str
    correct : bool or None
        None if samples have no individual score.
    """

    setting: Setting
    reduction: Reduction
    answer: str
    correct: bool | None


@dataclass(frozen=True)
class ExampleCase:
    """A question of a run whose image and reductions were saved.

    Attributes
    ----------
    task, index, question : str
    image : Image
    answer : str
        With all tokens.
    correct : bool or None
    examples : sequence of SavedExample
        In the order of the run's settings.
    """

    task: str
    index: str
    question: str
    image: Image.Image
    answer: str
    correct: bool | None
    examples: Sequence[SavedExample]


def load_examples(
    run: Run,
    *,
    samples: Sequence[str] = (),
    tier: str | None = None,
    settings: Sequence[str] = (),
    count: int = 4,
    data: str | Path | None = None,
    judge: Grader | None = None,
) -> list[ExampleCase]:
    """Load questions of a run with their saved images and reductions.

    Parameters
    ----------
    run : Run
        Made with saved images.
    samples : sequence of str
        ``TASK:INDEX`` each; by default the first question about each saved image, alternating between tasks, ``count``
        in total.
    tier : str, optional
        The tier whose methods are shown, such as ``2,2`` or ``192``; by default ``2,2``, else the first.
    settings : sequence of str
        Ids of settings, or names of methods in the tier; by default TORINO and the first others of the tier.
    count : int
    data : path, optional
        Folder of the tasks' files.
    judge : Grader, optional
        For tasks with graded answers.
    """
    if not (run.folder / FOLDER).is_dir():
        raise BadParameter(
            f"The run in {run.folder} saved no images. Evaluate into a new folder with --save-images 12, for example."
        )
    shown = _select_settings(run, tier, settings)
    tasks = run.open_tasks(data)
    cases: list[ExampleCase] = []
    for name, index in _select_samples(run, tasks, samples, count):
        answers = {item.id: _grade_answer(run, tasks[name], item.id, index, judge) for item in (FULL, *shown)}
        sample = tasks[name][index]
        folder = example_dir(run.folder, sample.image.key)
        files = {setting.id: _reduction_file(folder, setting.id) for setting in shown}
        examples = [
            SavedExample(setting, Reduction.load(files[setting.id]), *answers[setting.id])
            for setting in shown
            if files[setting.id].is_file()
        ]
        missing = [setting.id for setting in shown if not files[setting.id].is_file()]
        if not examples or (settings and missing):
            raise TorinoError(f"The run has saved no reduction of {name}:{index} by {', '.join(missing)}.")
        image, question = open_image(folder / IMAGE), format_question(sample)
        cases.append(ExampleCase(name, index, question, image, *answers[FULL.id], examples))
    if not cases:
        raise BadParameter(f"The run in {run.folder} has no answered question about a saved image.")
    return cases


def _select_settings(run: Run, tier: str | None, names: Sequence[str]) -> list[Setting]:
    tiers = list(dict.fromkeys(setting.tier for setting in run.settings.values() if setting.method != "full"))
    used = tier or ("2,2" if "2,2" in tiers else tiers[0] if tiers else "")
    if used not in tiers:
        raise BadParameter(f"The run in {run.folder} has no tier {used!r}; it has {', '.join(tiers) or 'none'}.")
    members = [setting for setting in run.settings.values() if setting.tier == used]
    if not names:
        own = [setting for setting in members if setting.method.startswith("torino-")]
        preferred = [setting for setting in own if setting.dynamic] or own
        others = [setting for setting in members if setting not in own and setting.seed in (None, 0)]
        return [*preferred[-1:], *others][:MAX_METHODS]
    selected: list[Setting] = []
    for name in names:
        matches = [run.settings[name]] if name in run.settings else [item for item in members if item.method == name]
        if not matches:
            raise BadParameter(
                f"The run has no setting {name!r}, and no method with that name in tier {used}. Settings of the tier: "
                f"{', '.join(setting.id for setting in members)}."
            )
        selected += matches[:1]
    return selected


def _select_samples(
    run: Run, tasks: Mapping[str, Task], samples: Sequence[str], count: int
) -> Iterator[tuple[str, str]]:
    """Yield the task and index of each question to show."""
    if samples:
        for text in samples:
            name, _, index = text.partition(":")
            if name not in tasks or not any(sample.index == index for sample in tasks[name]):
                example = next(f"{title}:{task[0].index}" for title, task in tasks.items())
                raise BadParameter(f"{text!r} is not a sample of this run. Write TASK:INDEX, such as {example}.")
            if not (example_dir(run.folder, tasks[name][index].image.key) / IMAGE).is_file():
                raise BadParameter(f"The run did not save the image of {text}. Evaluate with a larger --save-images.")
            yield name, index
        return
    saved = {name: _first_questions(run, task) for name, task in tasks.items()}
    alternating = (
        (name, indices[turn]) for turn in range(count) for name, indices in saved.items() if turn < len(indices)
    )
    for number, choice in enumerate(alternating):
        if number == count:
            return
        yield choice


def _first_questions(run: Run, task: Task) -> list[str]:
    """Return the first question about each saved image of a task."""
    first: dict[str, str] = {}
    for sample in task:
        if sample.image.key not in first and (example_dir(run.folder, sample.image.key) / IMAGE).is_file():
            first[sample.image.key] = sample.index
    return list(first.values())


def _grade_answer(run: Run, task: Task, setting: str, index: str, judge: Grader | None) -> tuple[str, bool | None]:
    """Return the answer to one sample under one setting, and whether it is correct."""
    rows: list[dict[str, Any]] = [row for row in run.rows(task.name, setting) if row["index"] == index]
    if not rows or rows[-1].get("prediction") is None:
        return "", None
    score = task.score(rows, judge, partial=False).per_sample.get(index)
    return str(rows[-1]["prediction"]), None if score is None else score >= 0.5


def _reduction_file(folder: Path, setting: str) -> Path:
    return folder / f"{_hash(setting)}.npz"


def _hash(text: str) -> str:
    return blake2b(text.encode(), digest_size=8).hexdigest()
