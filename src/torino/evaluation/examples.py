"""Cells: photos and Reductions that a run keeps on request, so that figures can show what became of the patches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from PIL import Image

from torino.core.errors import BadParameter, TorinoError
from torino.core.io import write_atomic
from torino.core.reduction import Reduction
from torino.evaluation.benchmarks import words
from torino.evaluation.judge import Grader
from torino.evaluation.protocol import FULL, Setting
from torino.evaluation.results import Run
from torino.evaluation.tasks import Task

FOLDER, PHOTO = "cells", "photo.png"
MOST = 5  # methods of a tier that are shown unless they are named


def place_of(folder: Path, key: str) -> Path:
    """Where a run keeps what it made of a picture."""
    return folder / FOLDER / _short(key)


@dataclass(frozen=True)
class ExampleWriter:
    """Keeps one picture as the tower saw it, and what each setting made of it.

    Attributes
    ----------
    folder : Path
        Of the picture, see :func:`place_of`.
    """

    folder: Path

    def photo(self, image: Image.Image) -> None:
        """Keep the picture, once."""
        file = self.folder / PHOTO
        if not file.is_file():
            write_atomic(file, lambda target: image.save(target, "PNG"))

    def plan(self, setting: str, plan: Reduction) -> None:
        """Keep a Reduction, once."""
        file = self.folder / f"{_short(setting)}.npz"
        if not file.is_file():
            plan.save(file)


@dataclass(frozen=True)
class SavedExample:
    """A Reduction of a picture with the answer that was given with it.

    Attributes
    ----------
    setting : Setting
    reduction : Reduction
    answer : str
    right : bool or None
        None where a sample has no score of its own.
    """

    setting: Setting
    reduction: Reduction
    answer: str
    right: bool | None


@dataclass(frozen=True)
class ExampleCase:
    """A question of a run whose picture and Reductions were kept.

    Attributes
    ----------
    task, index, question : str
    photo : Image
    answer : str
        With all tokens.
    right : bool or None
    cells : sequence of SavedExample
        In the order of the run's settings.
    """

    task: str
    index: str
    question: str
    photo: Image.Image
    answer: str
    right: bool | None
    cells: Sequence[SavedExample]


def cases(
    run: Run,
    *,
    samples: Sequence[str] = (),
    tier: str | None = None,
    settings: Sequence[str] = (),
    count: int = 4,
    data: str | Path | None = None,
    judge: Grader | None = None,
) -> list[ExampleCase]:
    """Questions of a run to show.

    Parameters
    ----------
    run : Run
        Made with ``keep``.
    samples : sequence of str
        ``TASK:INDEX`` each; by default the first about each picture that was kept, the tasks in turn, ``count`` in all.
    tier : str, optional
        Shows methods of one tier: ``2,2``, ``192``; by default that of (2, 2), else the first there is.
    settings : sequence of str
        Ids of settings, or names of methods in the tier; by default TORINO and the first others of the tier.
    count : int
    data : path, optional
        Where the tasks' files are now.
    judge : Grader, optional
        For tasks whose answers are graded.
    """
    if not (run.folder / FOLDER).is_dir():
        raise BadParameter(
            f"The run in {run.folder} kept no reductions. Evaluate with --keep 12, say, in a new folder."
        )
    shown = _settings(run, tier, settings)
    tasks = run.open_tasks(data)
    found: list[ExampleCase] = []
    for name, index in _chosen(run, tasks, samples, count):
        marks = {one.id: _mark(run, tasks[name], one.id, index, judge) for one in (FULL, *shown)}
        sample = tasks[name][index]
        folder = place_of(run.folder, sample.image.key)
        cells = [
            SavedExample(one, Reduction.load(folder / f"{_short(one.id)}.npz"), *marks[one.id])
            for one in shown
            if (folder / f"{_short(one.id)}.npz").is_file()
        ]
        if not cells:
            raise TorinoError(f"Nothing was kept of {name}:{index} by the settings asked for.")
        with Image.open(folder / PHOTO) as photo:
            found.append(ExampleCase(name, index, words(sample), photo.convert("RGB"), *marks[FULL.id], cells))
    if not found:
        raise BadParameter(f"The run in {run.folder} has no answered question about a picture that it kept.")
    return found


def _settings(run: Run, tier: str | None, wanted: Sequence[str]) -> list[Setting]:
    tiers = list(dict.fromkeys(one.tier for one in run.settings.values() if one.method != "full"))
    used = tier or ("2,2" if "2,2" in tiers else tiers[0] if tiers else "")
    if used not in tiers:
        raise BadParameter(f"The run in {run.folder} has no tier {used!r}; it has {', '.join(tiers) or 'none'}.")
    there = [one for one in run.settings.values() if one.tier == used]
    if not wanted:
        ours = [one for one in there if one.method.startswith("torino-")]
        first = [one for one in ours if one.dynamic] or ours
        others = [one for one in there if one not in ours and one.seed in (None, 0)]
        return [*first[-1:], *others][:MOST]
    found: list[Setting] = []
    for name in wanted:
        match = [run.settings[name]] if name in run.settings else [one for one in there if one.method == name]
        if not match:
            raise BadParameter(
                f"The run has no setting {name!r}, and no method of that name in tier {used}. Settings of the tier: "
                f"{', '.join(one.id for one in there)}."
            )
        found += match[:1]
    return found


def _chosen(run: Run, tasks: Mapping[str, Task], samples: Sequence[str], count: int) -> Iterator[tuple[str, str]]:
    if samples:
        for one in samples:
            name, _, index = one.partition(":")
            if name not in tasks or not any(sample.index == index for sample in tasks[name]):
                raise BadParameter(f"{one!r} is no sample of this run. Write TASK:INDEX, such as {_first(tasks)}.")
            if not (place_of(run.folder, tasks[name][index].image.key) / PHOTO).is_file():
                raise BadParameter(f"The run did not keep the picture of {one}. Evaluate with a larger --keep.")
            yield name, index
        return
    kept = {name: _first_of_each(run, task) for name, task in tasks.items()}
    turns = ((name, indices[turn]) for turn in range(count) for name, indices in kept.items() if turn < len(indices))
    for number, one in enumerate(turns):
        if number == count:
            return
        yield one


def _first_of_each(run: Run, task: Task) -> list[str]:
    """The first question about each picture of a task that was kept."""
    found: dict[str, str] = {}
    for one in task:
        if one.image.key not in found and (place_of(run.folder, one.image.key) / PHOTO).is_file():
            found[one.image.key] = one.index
    return list(found.values())


def _mark(run: Run, task: Task, setting: str, index: str, judge: Grader | None) -> tuple[str, bool | None]:
    """The answer to one sample under one setting, and whether it is right."""
    rows: list[dict[str, Any]] = [row for row in run.rows(task.name, setting) if row["index"] == index]
    if not rows or rows[-1].get("prediction") is None:
        return "", None
    score = task.score(rows, judge, partial=False).per_sample.get(index)
    return str(rows[-1]["prediction"]), None if score is None else score >= 0.5


def _first(tasks: Mapping[str, Task]) -> str:
    return next(f"{name}:{task[0].index}" for name, task in tasks.items())


def _short(text: str) -> str:
    return blake2b(text.encode(), digest_size=8).hexdigest()
