"""Browse evaluation runs: answers of all settings, filtered by task, method, budget and correctness.

A run may still be written: its files are read again when they have grown.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torino.core.errors import BadFile, BadParameter, TorinoError
from torino.evaluation.benchmarks import format_question
from torino.evaluation.examples import IMAGE, example_dir
from torino.evaluation.protocol import Setting
from torino.evaluation.results import ANSWERS, RUN, SETTINGS, Run, open_run
from torino.evaluation.samples import Sample
from torino.evaluation.tasks import Task
from torino.serving.server.errors import ApiError

CORRECT = 0.5  # an answer with this score is correct
WARN_AFTER = 3  # problems of a run that are shown


@dataclass(frozen=True)
class SampleFilter:
    """Which samples of a run to list.

    Attributes
    ----------
    task, method, budget : str
        Only samples of this task, answered by this method, under settings of this tier; empty for all.
    correct : bool or None
        Only samples that a listed setting answers correctly, or wrongly.
    lost, kept : str
        Ids of settings: only samples that ``lost`` answers wrongly and ``kept`` correctly.
    search : str
        Text in the question, the index or an answer.
    """

    task: str = ""
    method: str = ""
    budget: str = ""
    correct: bool | None = None
    lost: str = ""
    kept: str = ""
    search: str = ""


@dataclass(frozen=True, eq=False)
class RunState:
    """A run as it was when its files were last read.

    Attributes
    ----------
    run : Run
    tasks : dict of str to Task
        Empty if the files of the tasks are missing.
    rows : dict of (task, index) to dict of setting to row
    correct : dict of (task, setting) to dict of index to bool
    notes : list of str
        What could not be read.
    """

    run: Run
    tasks: dict[str, Task]
    rows: dict[tuple[str, str], dict[str, Mapping[str, Any]]]
    correct: dict[tuple[str, str], dict[str, bool]]
    notes: list[str]


class RunBrowser:
    """One run folder of ``torino eval``.

    Parameters
    ----------
    folder : path
    data : path, optional
        Folder of the tasks' files, if they have moved.
    """

    def __init__(self, folder: str | Path, data: str | Path | None = None) -> None:
        open_run(folder)  # refuses a folder that is not a run
        self.folder, self.data = Path(folder), data
        self._lock = threading.Lock()
        self._signature: object = None
        self._state: RunState | None = None

    def state(self) -> RunState:
        """Return the run, read again if a file has changed."""
        with self._lock:
            signature = self._files()
            if self._state is None or signature != self._signature:
                self._state, self._signature = self._read(), signature
            return self._state

    def _files(self) -> object:
        files = [self.folder / RUN, self.folder / SETTINGS, *sorted((self.folder / ANSWERS).glob("*.jsonl"))]
        found: list[tuple[str, int, int]] = []
        for file in files:
            try:
                status = file.stat()
            except OSError:  # it is written later
                continue
            found.append((file.name, status.st_size, status.st_mtime_ns))
        return found

    def _read(self) -> RunState:
        run, notes = open_run(self.folder), list[str]()
        try:
            tasks = run.open_tasks(self.data)
        except TorinoError as error:
            tasks = {}
            notes.append(f"Questions and photos are not shown, and answers not marked: {error}")
        rows: dict[tuple[str, str], dict[str, Mapping[str, Any]]] = {}
        grouped: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
        try:
            for row in run.rows():
                rows.setdefault((row["task"], row["index"]), {})[row["setting"]] = row
                grouped.setdefault((row["task"], row["setting"]), []).append(row)
        except BadFile as error:
            notes.append(str(error))
        correct: dict[tuple[str, str], dict[str, bool]] = {}
        for (name, setting), answers in grouped.items():
            if name not in tasks:
                continue
            try:
                scores = tasks[name].score(answers, partial=True).per_sample
            except TorinoError as error:
                notes.append(f"Answers to {name} are not marked: {error}")
                continue
            given = {str(row["index"]) for row in answers}
            correct[name, setting] = {index: score >= CORRECT for index, score in scores.items() if index in given}
        return RunState(run, tasks, rows, correct, list(dict.fromkeys(notes))[:WARN_AFTER])

    # ------------------------------------------------------------------ views

    def summary(self) -> dict[str, Any]:
        """Return the facts of the run, its settings and how far it is."""
        state = self.state()
        run = state.run
        answered = sum(len(settings) for settings in state.rows.values())
        samples = {str(entry["task"]): int(entry["samples"]) for entry in run.metadata["tasks"]}
        limit = run.metadata.get("limit")
        planned = sum(min(count, limit or count) for count in samples.values()) * len(run.settings)
        return {
            "name": self.folder.resolve().name,
            "model": _short(str(run.metadata["model"])),
            "tasks": [{"task": name, "samples": count} for name, count in samples.items()],
            "settings": [self._setting(state, setting) for setting in run.settings.values()],
            "budgets": list(dict.fromkeys(setting.tier for setting in run.settings.values())),
            "answers": answered,
            "planned": planned,
            "finished": answered >= planned,
            "notes": state.notes,
        }

    def _setting(self, state: RunState, setting: Setting) -> dict[str, Any]:
        marks = [mark for (_, name), marks in state.correct.items() if name == setting.id for mark in marks.values()]
        return {
            "id": setting.id,
            "method": setting.method,
            "label": setting.label,
            "spec": setting.spec,
            "budget": setting.tier,
            "answered": sum(setting.id in rows for rows in state.rows.values()),
            "accuracy": sum(marks) / len(marks) if marks else None,
        }

    def samples(self, wanted: SampleFilter, offset: int, limit: int) -> dict[str, Any]:
        """Return one page of the samples that match a filter, and how many there are."""
        state = self.state()
        for setting in (wanted.lost, wanted.kept):
            if setting and setting not in state.run.settings:
                raise BadParameter(f"The run has no setting {setting!r}. It has {', '.join(state.run.settings)}.")
        found = [key for key in state.rows if self._matches(state, key, wanted)]
        return {"total": len(found), "samples": [self._row(state, key) for key in found[offset : offset + limit]]}

    def _matches(self, state: RunState, key: tuple[str, str], wanted: SampleFilter) -> bool:
        task, index = key
        if wanted.task and task != wanted.task:
            return False

        def mark(setting: str) -> bool | None:
            return state.correct.get((task, setting), {}).get(index)

        if wanted.lost and mark(wanted.lost) is not False:
            return False
        if wanted.kept and mark(wanted.kept) is not True:
            return False
        listed = [
            setting
            for setting in state.rows[key]
            if (known := state.run.settings.get(setting)) is not None
            and wanted.method in ("", known.method)
            and wanted.budget in ("", known.tier)
        ]
        if not listed or (wanted.correct is not None and not any(mark(name) is wanted.correct for name in listed)):
            return False
        if not wanted.search:
            return True
        sample = self._sample(state, task, index)
        texts = [index, sample.question if sample else ""]
        texts += [str(row.get("prediction", "")) for row in state.rows[key].values()]
        return any(wanted.search.lower() in text.lower() for text in texts)

    def _row(self, state: RunState, key: tuple[str, str]) -> dict[str, Any]:
        task, index = key
        sample = self._sample(state, task, index)
        marks = [state.correct.get((task, setting), {}).get(index) for setting in state.rows[key]]
        return {
            "task": task,
            "index": index,
            "question": sample.question if sample else "",
            "answers": len(marks),
            "correct": sum(mark is True for mark in marks),
            "wrong": sum(mark is False for mark in marks),
        }

    def sample(self, task: str, index: str) -> dict[str, Any]:
        """Return one sample with the answers of all settings."""
        state = self.state()
        rows = state.rows.get((task, index))
        if rows is None:
            raise ApiError(404, f"The run has no answer to {task[:60]}:{index[:60]} yet.", "sample")
        sample = self._sample(state, task, index)
        answers: list[dict[str, Any]] = []
        for setting in (item for item in state.run.settings.values() if item.id in rows):
            row = rows[setting.id]
            answers.append(
                {
                    "setting": setting.id,
                    "label": setting.label,
                    "spec": setting.spec,
                    "budget": setting.tier,
                    "answer": row.get("prediction"),
                    "error": row.get("error"),
                    "tokens": row.get("tokens"),
                    "before": row.get("before"),
                    "correct": state.correct.get((task, setting.id), {}).get(index),
                }
            )
        return {
            "task": task,
            "index": index,
            "question": format_question(sample) if sample else "",
            "prompt": state.tasks[task].prompt(sample) if sample else "",
            "truth": list(sample.answers) if sample else [],
            "answers": answers,
        }

    def image(self, task: str, index: str) -> bytes | Path:
        """Return the photo of a sample: from the file of the task, or as the run saved it."""
        state = self.state()
        sample = self._sample(state, task, index)
        if sample is not None:
            return sample.image.read()
        row = next((row for row in state.rows.get((task, index), {}).values() if "image" in row), None)
        saved = None if row is None else example_dir(self.folder, str(row["image"])) / IMAGE
        if saved is None or not saved.is_file():
            raise ApiError(404, "The photo of this sample is not available: the file of its task is missing.", "photo")
        return saved

    @staticmethod
    def _sample(state: RunState, task: str, index: str) -> Sample | None:
        try:
            return state.tasks[task][index]
        except KeyError:
            return None


def _short(model: str) -> str:
    """Return the name of a model; of a folder only its last part, because visitors need not know where it is."""
    return Path(model).name if Path(model).is_absolute() else model
