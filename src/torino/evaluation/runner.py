"""Running: the paper's protocol over tasks and methods, answer by answer, so that it can stop and go on anywhere."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torino.core.concepts import CachedEncoder
from torino.core.errors import BadParameter, TorinoError
from torino.core.io import read_json, write_json
from torino.datasets.images import Padding
from torino.evaluation import protocol as settings_
from torino.evaluation.engine import BATCHING, Asked, Engine, OnError
from torino.evaluation.examples import ExampleWriter, place_of
from torino.evaluation.protocol import FULL, Setting
from torino.evaluation.records import AnswerLog, read_records
from torino.evaluation.results import ANSWERS, FORMAT, PROBLEMS, RUN, SETTINGS, Run, open_run
from torino.evaluation.samples import Sample
from torino.evaluation.tasks import Task
from torino.version import __version__
from torino.vlm.adapters.base import Positions
from torino.vlm.text_query import ClipText

SHORT, LONG = 32, 256
"""Longest answer of a task, in tokens: of those with short answers, and of those whose answers a judge grades."""
Key = tuple[str, str]
"""Task and index of a sample."""


@dataclass(frozen=True)
class RunPlan:
    """What is to be run.

    Attributes
    ----------
    methods : sequence of str
        Names of the registry.
    specs : sequence of str
        Methods with hyperparameters of one's own, run besides.
    dynamic : sequence of (int, int)
        Pairs (k, δ) of dynamic TORINO; each makes a tier in which all methods get its mean length.
    fixed : sequence of int
        Budgets of the other tiers.
    seeds : int
        How often methods that draw at random are run.
    matched : bool
        Whether methods get the mean lengths of dynamic TORINO too, or it is alone in its tiers.
    """

    methods: Sequence[str]
    specs: Sequence[str] = ()
    dynamic: Sequence[tuple[int, int]] = settings_.PAIRS
    fixed: Sequence[int] = settings_.FIXED
    seeds: int = 3
    matched: bool = True

    def first(self, saes: Sequence[str]) -> list[Setting]:
        """What can run at once: all tokens, dynamic TORINO, the fixed tiers, and what the user wrote out."""
        if self.dynamic and not any(name in self.methods for name in ("torino-p", "torino-m")):
            raise BadParameter(
                "The dynamic tiers take their budgets from TORINO, and neither torino-p nor torino-m is among the "
                "methods. Add one, or run the fixed tiers alone."
            )
        idle = [name for name in self.methods if name not in settings_.PAIRED]
        if idle and self.dynamic and not self.matched and not self.fixed:
            raise BadParameter(
                f"{idle[0]} has no tier to run in: TORINO is to be alone in the dynamic ones, and there are no fixed "
                "ones. Leave it out, or give fixed tiers."
            )
        found = [FULL, *settings_.dynamic_settings(self.methods, saes, self.dynamic)]
        found += settings_.fixed_settings(self.methods, self.fixed, saes, self.seeds)
        return [*found, *settings_.own_settings(self.specs, saes)]

    def second(self, saes: Sequence[str], run: Run) -> list[Setting]:
        """What waits for the mean lengths of dynamic TORINO; a tier that has methods already stays at its length."""
        references = {one.tier: one for one in run.settings.values() if one.reference}
        held = {one.tier: one.budget for one in run.settings.values() if one.budget is not None}
        budgets = {tier: held.get(tier) or mean_length(run, one.id) for tier, one in references.items()}
        return settings_.matched_settings(self.methods, budgets, references, saes, self.seeds)


def mean_length(run: Run, setting: str) -> int:
    """Mean count of visual tokens over the images of each task, then over tasks, rounded."""
    means = [float(counts.mean()) for task in run.tasks if len(counts := run.tokens(task, setting))]
    if not means:
        raise TorinoError(
            f"{setting} answered no question, so its tier has no budget. See {run.folder / PROBLEMS} for the reasons."
        )
    return max(1, round(sum(means) / len(means)))


def evaluate(
    folder: str | Path,
    *,
    model: nn.Module,
    processor: Any,
    tasks: Sequence[Task],
    plan: RunPlan,
    saes: Mapping[str, Any],
    name: str = "",
    padding: Padding = "crop",
    positions: Positions = "own",
    mass: bool | None = None,
    batch: int = 8,
    limit: int | None = None,
    lengths: Mapping[str, int] | None = None,
    shard: tuple[int, int] = (0, 1),
    on_error: OnError = "skip",
    retry: bool = False,
    asking: ClipText | None = None,
    keep: int = 0,
    arguments: Mapping[str, Any] | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> Run:
    """Ask every question under every setting, and keep all answers.

    Begun again with the same arguments, a run goes on where it was stopped, however it was stopped; with further
    methods or tiers it takes them in, and what is answered stays. Several processes share the work when each is given
    its ``shard``; pictures belong to one of them.

    Parameters
    ----------
    folder : path
        Of the run; new, or begun earlier.
    model, processor, name
        As :func:`torino.vlm.session.load_vlm` gives them, and what the model is called.
    tasks : sequence of Task
        Already cut to ``limit`` questions, if that is given.
    plan : RunPlan
    saes : mapping of label to SAE
        ``none`` stands for no SAE and needs no entry.
    padding, positions, mass, batch, on_error, asking
        See :class:`Engine`.
    lengths : mapping, optional
        Longest answer by task, in tokens.
    shard : (int, int)
        Which part of the work this process does, from 0, and of how many.
    retry : bool
        Whether what failed earlier is asked again; else a failure stands for its answer.
    keep : int
        Pictures of each task that are kept with their Reductions, for figures.
    arguments : mapping, optional
        What the user gave, for ``run.json``.
    progress : callable, optional
        Called with a phase, the number of answers there are in it and that there will be.

    Returns
    -------
    Run
    """
    folder = Path(folder).expanduser()
    part, parts = shard
    if not 0 <= part < parts:
        raise BadParameter(f"shard must be i of n with i from 0 to n - 1, got {part} of {parts}.")
    called = [task.name for task in tasks]
    twice = sorted({name for name in called if called.count(name) > 1})
    if twice:
        raise BadParameter(
            f"Two tasks are called {twice[0]}, and their answers could not be told apart. Name each file once, or "
            "rename one of them."
        )
    labels = list(saes)
    first = plan.first(labels)
    facts = {
        "format": FORMAT,
        "torino": __version__,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": name or str(getattr(model.config, "_name_or_path", "")),
        "family": str(getattr(model.config, "model_type", "")),
        "padding": padding,
        "positions": positions,
        "mass": mass,
        "batch": batch,
        "batching": BATCHING,
        "limit": limit,
        "matched": plan.matched,
        "versions": _versions(),
        "hardware": _hardware(),
        "saes": {label: _about(sae) for label, sae in saes.items()},
        "tasks": [
            task.facts()
            | {
                "kind": task.kind,
                "path": str(task.source.resolve()),  # the report may be made elsewhere
                "max_new_tokens": _length(task, lengths),
            }
            for task in tasks
        ],
        "settings": [setting.facts() for setting in first],
        "arguments": dict(arguments or {}),
    }
    _begin(folder, facts)
    worker = _Worker(folder, model, processor, tasks, saes, facts, part, parts, on_error, retry, asking, keep, progress)
    worker.phase("first answers", first)
    if plan.dynamic and plan.matched:
        later = folder / SETTINGS
        waiting = 0 if later.is_file() else worker.missing(first)
        if waiting:
            raise TorinoError(
                f"This part of the work is done, and the mean lengths wait for {waiting:,} answers of other parts. "
                "Run the same command again when they are there."
            )
        second = plan.second(labels, open_run(folder))
        held = read_json(later)["settings"] if later.is_file() else []
        added = _added(folder, held, [setting.facts() for setting in second])
        if added:
            write_json(later, {"settings": [*held, *added]})
        worker.phase("matched lengths", second)
    return open_run(folder)


class _Worker:
    """One process of a run."""

    def __init__(
        self,
        folder: Path,
        model: nn.Module,
        processor: Any,
        tasks: Sequence[Task],
        saes: Mapping[str, Any],
        facts: Mapping[str, Any],
        part: int,
        parts: int,
        on_error: OnError,
        retry: bool,
        asking: ClipText | None,
        keep: int,
        progress: Callable[[str, int, int], None] | None,
    ) -> None:
        self.folder, self.model, self.processor, self.tasks, self.saes = folder, model, processor, tasks, saes
        self.facts, self.part, self.parts = facts, part, parts
        self.on_error: OnError = on_error
        self.retry, self.asking, self.progress = retry, asking, progress
        self.kept = {group[1][0].image.key for task in tasks for group in list(_pictures(task))[:keep]}
        self.lengths = {str(task["task"]): int(task["max_new_tokens"]) for task in facts["tasks"]}

    def phase(self, name: str, settings: Sequence[Setting]) -> None:
        """Ask what is not answered yet, picture by picture."""
        records = AnswerLog(self.folder / ANSWERS / f"{self.part + 1}of{self.parts}.jsonl")
        problems = AnswerLog(self.folder / PROBLEMS / f"{self.part + 1}of{self.parts}.jsonl")
        try:
            done = self._done(failures=not self.retry)
            ids = {setting.id for setting in settings}
            groups = [group for task in self.tasks for group in _pictures(task) if self._mine(group[1][0])]
            total = sum(len(samples) for _, samples in groups) * len(ids)
            here = {(task.name, sample.index) for task, samples in groups for sample in samples}
            count = sum(key[:2] in here for key in done if key[2] in ids)
            self._tell(name, count, total)
            if count == total:
                return
            remembering = {label: CachedEncoder(sae) for label, sae in self.saes.items()}
            engine = Engine(
                self.model,
                self.processor,
                {setting.id: setting.reducer(remembering) for setting in settings},
                padding=self.facts["padding"],
                positions=self.facts["positions"],
                mass=self.facts["mass"],
                batch=int(self.facts["batch"]),
                tiers={setting.id: setting.tier.partition(" ")[0] for setting in settings},  # of all SAEs together
                on_error=self.on_error,
                asking=self.asking,
            )
            for task, samples in groups:
                asked = [Asked((task.name, one.index), task.prompt(one), self.lengths[task.name]) for one in samples]
                missing = [q for q in asked if any((*q.key, one) not in done for one in ids)]
                if not missing:
                    continue
                key = samples[0].images[0].key
                pictures = self._read(samples[0], missing, ids, done, key, records, problems)
                if pictures is None:
                    count += sum((*q.key, one) not in done for q in missing for one in ids)
                    self._tell(name, count, total)
                    continue
                keeper = ExampleWriter(place_of(self.folder, key)) if key in self.kept else None
                for answers in engine.answers(pictures, asked, lambda q, one: (*q, one) not in done, keeper):
                    rows = [_row(answer, key) for answer in answers]
                    records.add(rows)
                    problems.add([row for row in rows if "error" in row])
                    done.update((row["task"], row["index"], row["setting"]) for row in rows)
                    count += len(rows)
                    self._tell(name, count, total)
        finally:
            records.close()
            problems.close()

    def missing(self, settings: Sequence[Setting]) -> int:
        """Answers that are not there yet, in all parts of the work."""
        done = self._done()
        wanted = ((task.name, one.index, setting.id) for task in self.tasks for one in task for setting in settings)
        return sum(key not in done for key in wanted)

    def _done(self, failures: bool = True) -> set[tuple[str, str, str]]:
        files = sorted((self.folder / ANSWERS).glob("*.jsonl"))
        rows = (row for row in read_records(files) if failures or "error" not in row)
        return {(str(row["task"]), str(row["index"]), str(row["setting"])) for row in rows}

    def _mine(self, sample: Sample) -> bool:
        return int.from_bytes(blake2b(sample.images[0].key.encode(), digest_size=8).digest()) % self.parts == self.part

    def _read(
        self,
        sample: Sample,
        missing: Sequence[Asked],
        ids: set[str],
        done: set[tuple[str, str, str]],
        key: str,
        records: AnswerLog,
        problems: AnswerLog,
    ) -> list[bytes] | None:
        """The picture files; where one cannot be read, that is the answer to all questions about it."""
        try:
            return [place.read() for place in sample.images]
        except TorinoError as error:
            if self.on_error == "stop":
                raise
            rows = [
                {"task": q.key[0], "index": q.key[1], "setting": one, "image": key, "error": f"BadFile: {error}"}
                for q in missing
                for one in sorted(ids)
                if (*q.key, one) not in done
            ]
            records.add(rows)
            problems.add(rows[:1])
            return None

    def _tell(self, name: str, count: int, total: int) -> None:
        if self.progress is not None:
            self.progress(name, count, total)


def _pictures(task: Task) -> Iterator[tuple[Task, list[Sample]]]:
    """Samples of a task that are about the same picture, in order of its first appearance."""
    groups: dict[tuple[str, ...], list[Sample]] = {}
    for sample in task:
        groups.setdefault(tuple(place.key for place in sample.images), []).append(sample)
    for samples in groups.values():
        yield task, samples


def _row(answer: Any, image: str) -> dict[str, Any]:
    task, index = answer.key
    row: dict[str, Any] = {"task": task, "index": index, "setting": answer.setting, "image": image}
    if answer.error:
        return row | {"error": answer.error}
    seconds = {name: round(value, 6) for name, value in answer.seconds.items()}
    return row | {
        "prediction": answer.text,
        "tokens": answer.tokens,
        "before": answer.before,
        "seconds": seconds,
    }


def _begin(folder: Path, facts: dict[str, Any]) -> None:
    """Write what the run is, or see that it is the one begun earlier."""
    file = folder / RUN
    if not file.is_file():
        # another part of the work may just be writing this file, or a crash have left half of it
        strange = folder.is_dir() and any(
            one.name != RUN and not one.name.startswith(f".{RUN}.") for one in folder.iterdir()
        )
        if strange and not (folder / ANSWERS).is_dir():
            raise BadParameter(f"{folder} holds other things. Give a new or empty folder for the run.")
        write_json(file, facts)
        return
    held = read_json(file)
    held.setdefault("mass", False)  # which earlier runs do not say
    for name in ("format", "model", "family", "padding", "positions", "mass", "batch", "batching", "limit", "saes"):
        if held.get(name) != facts[name]:
            raise BadParameter(
                f"The run in {folder} was begun with {name} {held.get(name)!r}, and now it is {facts[name]!r}. "
                "Give the same again to go on, or another folder for another run."
            )
    old = [(one["task"], one["fingerprint"], one["prompts"], one["max_new_tokens"]) for one in held["tasks"]]
    new = [(one["task"], one["fingerprint"], one["prompts"], one["max_new_tokens"]) for one in facts["tasks"]]
    if old != new:
        raise BadParameter(
            f"The run in {folder} was begun with other tasks or other data ({', '.join(one[0] for one in old)}). Give "
            "the same again to go on, or another folder for another run."
        )
    added = _added(folder, held["settings"], facts["settings"])
    if added or (facts["matched"] and not held.get("matched", True)):
        held["matched"] = facts["matched"] or held.get("matched", True)
        held["settings"] = [*held["settings"], *added]
        held.setdefault("added", []).append({name: facts[name] for name in ("created", "torino", "arguments")})
        write_json(file, held)


def _added(folder: Path, held: Sequence[dict[str, Any]], wanted: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Settings that a run does not have yet; one that it has under another spec is an error."""
    was = {one["id"]: one["spec"] for one in held}
    for one in wanted:
        if was.get(one["id"], one["spec"]) != one["spec"]:
            raise BadParameter(
                f"In the run in {folder}, {one['id']} is {was[one['id']]}, and now it would be {one['spec']}. Answers "
                "of the two must not be mixed: give another folder for another run."
            )
    return [one for one in wanted if one["id"] not in was]


def _length(task: Task, lengths: Mapping[str, int] | None) -> int:
    return (lengths or {}).get(task.name, LONG if task.kind == "judge" else SHORT)


def _about(sae: Any) -> dict[str, Any]:
    card = getattr(sae, "card", None)
    told = {"latents": getattr(sae, "latents", None), "kind": getattr(sae, "kind", None)}
    return told | {"name": getattr(card, "name", ""), "token_kind": getattr(card, "token_kind", "")}


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in ("torch", "transformers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _hardware() -> dict[str, Any]:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {"machine": platform.machine(), "system": sys.platform, "cores": os.cpu_count(), "gpu": gpu}
