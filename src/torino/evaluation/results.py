"""Open a run folder: its settings, answers and scores."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import numpy as np
from numpy.typing import NDArray

from torino.core.checks import expand_path
from torino.core.errors import BadFile, BadParameter
from torino.core.io import is_file, read_json
from torino.core.schema import Count, Positive
from torino.evaluation.judge import Grader
from torino.evaluation.protocol import Setting
from torino.evaluation.records import read_answer_rows
from torino.evaluation.scoring import Score
from torino.evaluation.tasks import Task, open_task

FORMAT = "torino-run/1"
RUN, SETTINGS, ANSWERS, PROBLEMS = "run.json", "settings.json", "answers", "problems"
_FIX = "Restore a copy of the file, or start the run again in a new folder."


class TaskFacts(TypedDict):
    """What a result records about its task; see :meth:`torino.evaluation.tasks.Task.describe`."""

    task: str
    file: str
    fingerprint: str
    prompts: str
    prompt: str
    metric: str
    harness: str
    samples: Count
    skipped_rows: NotRequired[Count]


class TaskEntry(TaskFacts):
    """A task in ``run.json``."""

    path: str
    kind: str
    max_new_tokens: Positive
    images: NotRequired[str | None]


class SAEEntry(TypedDict):
    """An SAE in ``run.json``."""

    latents: NotRequired[Positive | None]
    kind: NotRequired[str | None]
    name: NotRequired[str | None]
    content: NotRequired[str | None]


class RunFacts(TypedDict):
    """Facts of a run that its report shows."""

    torino: str
    model: str
    versions: dict[str, str]
    hardware: NotRequired[dict[str, Any]]
    saes: NotRequired[dict[str, SAEEntry]]
    limit: NotRequired[Positive | None]


class RunFile(RunFacts):
    """Fields of ``run.json`` that are read again."""

    tasks: list[TaskEntry]
    settings: list[Setting]
    matched: NotRequired[bool]
    added: NotRequired[list[Any]]


class SettingsFile(TypedDict):
    """Contents of ``settings.json``."""

    settings: list[Setting]


@dataclass
class Run:
    """A run folder.

    Attributes
    ----------
    folder : Path
    metadata : dict
        Contents of ``run.json``: model, tasks, versions, hardware, arguments.
    settings : dict of id to Setting
        All settings planned so far, baseline first.
    left_out : list of str
        Tasks with answers that are not considered.
    """

    folder: Path
    metadata: dict[str, Any]
    settings: dict[str, Setting]
    left_out: list[str] = field(default_factory=list[str])
    _rows: list[dict[str, Any]] | None = field(default=None, repr=False)

    @property
    def tasks(self) -> list[str]:
        """Names of the tasks, in order."""
        return [str(task["task"]) for task in self.metadata["tasks"]]

    def select(self, tasks: Sequence[str]) -> Run:
        """Return the run restricted to some of its tasks; the folder does not change."""
        for name in tasks:
            if name not in self.tasks:
                raise BadParameter(f"The run has no task {name!r}. It has {', '.join(self.tasks)}.")
        if not tasks:
            raise BadParameter(f"Name at least one task: {', '.join(self.tasks)}.")
        metadata = {**self.metadata, "tasks": [task for task in self.metadata["tasks"] if task["task"] in tasks]}
        rows = [row for row in self.rows() if row["task"] in tasks]
        return Run(self.folder, metadata, self.settings, [name for name in self.tasks if name not in tasks], rows)

    def answer_files(self) -> list[Path]:
        """Return the files of answers, one per shard."""
        return sorted((self.folder / ANSWERS).glob("*.jsonl"))

    def rows(self, task: str | None = None, setting: str | None = None) -> Iterator[dict[str, Any]]:
        """Yield one row per question and setting: the last answer, or the last error if there is no answer."""
        if self._rows is None:
            latest: dict[tuple[str, str, str], dict[str, Any]] = {}
            for row in read_answer_rows(self.answer_files()):
                key = (row["task"], row["setting"], row["index"])
                if key not in latest or "error" not in row or "error" in latest[key]:
                    latest[key] = row
            self._rows = list(latest.values())
        for row in self._rows:
            if (task is None or row["task"] == task) and (setting is None or row["setting"] == setting):
                yield row

    def token_counts(self, task: str, setting: str) -> NDArray[np.int64]:
        """Return the number of visual tokens kept for each image of a task."""
        by_image = {row["image"]: int(row["tokens"]) for row in self.rows(task, setting) if "error" not in row}
        return np.array(list(by_image.values()), dtype=np.int64)

    def open_tasks(self, data: str | Path | None = None) -> dict[str, Task]:
        """Open the tasks again; raise if a file has changed since the run."""
        opened: dict[str, Task] = {}
        for entry in self.metadata["tasks"]:
            path = Path(str(entry["path"]))
            source = path if data is None and is_file(path) else str(entry["file"])
            # the run was allowed to read these images, and scoring does not read them again
            task = open_task(source, data, kind=entry["kind"], prompts=entry["prompts"], allow_outside=True)
            if task.fingerprint != entry["fingerprint"]:
                raise BadFile(
                    f"{task.source} is not the file of this run: its fingerprint is {task.fingerprint}, expected "
                    f"{entry['fingerprint']}. Restore the original file, or evaluate again."
                )
            limit = self.metadata.get("limit")
            opened[str(entry["task"])] = task if limit is None else task.take(int(limit), seed=0)
        return opened

    def scores(self, data: str | Path | None = None, judge: Grader | None = None) -> dict[str, dict[str, Score]]:
        """Score every task under every setting with answers; the result maps task to setting to score."""
        scored: dict[str, dict[str, Score]] = {}
        grouped: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
        for row in self.rows():
            grouped.setdefault((row["task"], row["setting"]), []).append(row)
        for name, task in self.open_tasks(data).items():
            scored[name] = {
                setting: task.score(grouped[name, setting], judge)
                for setting in self.settings
                if (name, setting) in grouped
            }
        return scored


def open_run(folder: str | Path) -> Run:
    """Open a run folder."""
    folder = expand_path(folder, "The run")
    if not os.path.isfile(folder / RUN):  # noqa: PTH113 (Path raises for odd names)
        raise BadFile(f"{folder} is not a run: it has no {RUN}. Give a folder written by torino eval.")
    metadata = read_run_file(folder / RUN)
    entries = [*metadata["settings"], *read_later_settings(folder)]
    settings = {setting.id: setting for setting in map(Setting.from_dict, entries)}
    return Run(folder, metadata, settings)


def read_run_file(path: Path) -> dict[str, Any]:
    """Read and check ``run.json``."""
    return read_json(path, RunFile, version=FORMAT, fix=_FIX)


def read_later_settings(folder: Path) -> list[dict[str, Any]]:
    """Read ``settings.json``: the settings at the mean lengths of dynamic TORINO. Empty if they are not known yet."""
    path = folder / SETTINGS
    return read_json(path, SettingsFile, fix=_FIX)["settings"] if path.is_file() else []
