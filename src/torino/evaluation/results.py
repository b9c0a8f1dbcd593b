"""Results: a run as it lies on disk, and what can be said of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from torino.core.errors import BadFile, BadParameter
from torino.core.io import read_json
from torino.evaluation.judge import Grader
from torino.evaluation.protocol import Setting
from torino.evaluation.records import read_records
from torino.evaluation.scoring import Score
from torino.evaluation.tasks import Task, open_task

FORMAT = "torino-run/1"
RUN, SETTINGS, ANSWERS, PROBLEMS = "run.json", "settings.json", "answers", "problems"


@dataclass
class Run:
    """A run folder.

    Attributes
    ----------
    folder : Path
    facts : dict
        What ``run.json`` says: model, tasks, versions, hardware, arguments.
    settings : dict of id to Setting
        All that were planned so far, baseline first.
    left_out : list of str
        Tasks that it has answers of, and that are not looked at.
    """

    folder: Path
    facts: dict[str, Any]
    settings: dict[str, Setting]
    left_out: list[str] = field(default_factory=list[str])
    _rows: list[dict[str, Any]] | None = field(default=None, repr=False)

    @property
    def tasks(self) -> list[str]:
        """Names of the tasks, in order."""
        return [str(task["task"]) for task in self.facts["tasks"]]

    def only(self, tasks: Sequence[str]) -> Run:
        """The same run with some of its tasks, in its own order; on disk nothing changes."""
        for name in tasks:
            if name not in self.tasks:
                raise BadParameter(f"This run has no task {name!r}. It has {', '.join(self.tasks)}.")
        if not tasks:
            raise BadParameter(f"Name at least one task of {', '.join(self.tasks)}.")
        facts = {**self.facts, "tasks": [task for task in self.facts["tasks"] if task["task"] in tasks]}
        rows = [row for row in self.rows() if row["task"] in tasks]
        return Run(self.folder, facts, self.settings, [name for name in self.tasks if name not in tasks], rows)

    def files(self) -> list[Path]:
        """The files of answers, one for each part of the work."""
        return sorted((self.folder / ANSWERS).glob("*.jsonl"))

    def rows(self, task: str | None = None, setting: str | None = None) -> Iterator[dict[str, Any]]:
        """Answers, each once: of several to one question an answer goes before an error, and the last before others."""
        if self._rows is None:
            found: dict[tuple[str, str, str], dict[str, Any]] = {}
            for row in read_records(self.files()):
                key = (str(row.get("task")), str(row.get("setting")), str(row.get("index")))
                if key not in found or "error" not in row or "error" in found[key]:
                    found[key] = row
            self._rows = list(found.values())
        for row in self._rows:
            if (task is None or row["task"] == task) and (setting is None or row["setting"] == setting):
                yield row

    def tokens(self, task: str, setting: str) -> NDArray[np.int64]:
        """Visual tokens that each image of a task kept, one number an image."""
        by_image = {row["image"]: int(row["tokens"]) for row in self.rows(task, setting) if "error" not in row}
        return np.array(list(by_image.values()), dtype=np.int64)

    def open_tasks(self, data: str | Path | None = None) -> dict[str, Task]:
        """Open the tasks again; a file that has changed since is an error."""
        opened: dict[str, Task] = {}
        for facts in self.facts["tasks"]:
            place = Path(str(facts["path"]))
            source = place if data is None and place.is_file() else str(facts["file"])
            task = open_task(source, data, kind=facts["kind"], prompts=facts["prompts"])
            if task.fingerprint != facts["fingerprint"]:
                raise BadFile(
                    f"{task.source} is not the file that this run was made with: its fingerprint is "
                    f"{task.fingerprint}, and was {facts['fingerprint']}. Find the old file, or evaluate again."
                )
            limit = self.facts.get("limit")
            opened[str(facts["task"])] = task if limit is None else task.take(int(limit), seed=0)
        return opened

    def scores(self, data: str | Path | None = None, judge: Grader | None = None) -> dict[str, dict[str, Score]]:
        """Score every task under every setting that has answers: task, then setting."""
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
    folder = Path(folder).expanduser()
    if not (folder / RUN).is_file():
        raise BadFile(f"{folder} is no run: it has no {RUN}. Give a folder that torino eval has written.")
    facts = read_json(folder / RUN)
    if facts.get("format") != FORMAT:
        raise BadFile(f"{folder / RUN} is of format {facts.get('format')!r}, and this torino reads {FORMAT!r}.")
    listed = list(cast(list[dict[str, Any]], facts["settings"]))
    later = folder / SETTINGS
    if later.is_file():
        listed += cast(list[dict[str, Any]], read_json(later)["settings"])
    settings = {setting.id: setting for setting in map(Setting.of, listed)}
    return Run(folder, facts, settings)
