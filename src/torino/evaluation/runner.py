"""Run the paper's protocol over tasks and methods; a stopped run resumes from its recorded answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from torino.core.checks import expand_path, to_grid, to_integer, to_list
from torino.core.concepts import CachedEncoder
from torino.core.errors import BadParameter, TorinoError
from torino.core.io import write_json
from torino.evaluation import protocol
from torino.evaluation.engine import BATCHING, Engine, EngineAnswer, OnError, QuestionToAsk, check_reducers
from torino.evaluation.examples import ExampleWriter, example_dir
from torino.evaluation.protocol import FULL, Setting
from torino.evaluation.records import AnswerLog, read_answer_rows
from torino.evaluation.results import ANSWERS, PROBLEMS, SETTINGS, Run, open_run, read_later_settings
from torino.evaluation.run_file import describe_run, new_settings, open_run_file
from torino.evaluation.samples import Sample
from torino.evaluation.tasks import Task
from torino.reducers.base import method_name
from torino.vlm.session import VLM

Key = tuple[str, str, str]
"""Task, index of a sample, and setting."""
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class RunPlan:
    """The settings of a run.

    Attributes
    ----------
    methods : sequence of str
        Names of registered methods.
    specs : sequence of str
        Methods with their own options, such as ``divprune(space="projected")``, at the budgets of the tiers unless
        they give one, see :func:`torino.evaluation.protocol.split_specs`.
    dynamic : sequence of (int, int)
        Pairs (k, δ) of dynamic TORINO; each makes a tier in which all methods get its mean length.
    fixed : sequence of int
        Budgets of the other tiers.
    seeds : int
        Number of runs of methods that draw at random.
    matched : bool
        Whether all methods run in the dynamic tiers. If False, only TORINO runs in the dynamic tiers.
    fixed_pairs : sequence of (int, int)
        Pair (k, δ) of TORINO at the fixed budgets: one for all, or one for each. The paper uses (3, 3), (2, 2) and
        (1, 1) for 192, 128 and 64 tokens.
    """

    methods: Sequence[str]
    specs: Sequence[str] = ()
    dynamic: Sequence[tuple[int, int]] = protocol.KD_PAIRS
    fixed: Sequence[int] = protocol.FIXED_BUDGETS
    seeds: int = 3
    matched: bool = True
    fixed_pairs: Sequence[tuple[int, int]] = (protocol.FIXED_PAIR,)

    def __post_init__(self) -> None:
        """Check the types."""
        to_list("methods", self.methods, str, "names of methods", BadParameter)
        to_list("specs", self.specs, str, "methods with options", BadParameter)
        for name in ("dynamic", "fixed_pairs"):
            pairs = to_list(name, getattr(self, name), (list, tuple), "pairs (k, delta)", BadParameter)
            object.__setattr__(self, name, tuple(to_grid(pair, BadParameter, name) for pair in pairs))
        budgets = to_list("fixed", self.fixed, (int, np.integer), "budgets", BadParameter)
        object.__setattr__(self, "fixed", tuple(to_integer("fixed", budget) for budget in budgets))
        object.__setattr__(self, "seeds", to_integer("seeds", self.seeds))

    def first_settings(self, saes: Sequence[str]) -> list[Setting]:
        """Return the settings that need no other result: all tokens, dynamic TORINO, fixed tiers and specs."""
        if self.dynamic and not any(name in self.methods for name in ("torino-p", "torino-m")):
            raise BadParameter(
                "The dynamic tiers take their budgets from TORINO, and neither torino-p nor torino-m is among the "
                "methods. Add one, or run the fixed tiers alone."
            )
        budgeted, as_written = protocol.split_specs(self.specs)
        if not self.fixed and not (self.dynamic and self.matched):
            alone = protocol.KD_METHODS if self.dynamic else ()
            idle = [name for name in self.methods if name not in alone]
            idle += [spec for spec in budgeted if spec not in as_written]
            if idle:
                dynamic = "TORINO runs alone in the dynamic tiers" if self.dynamic else "there are no dynamic tiers"
                raise BadParameter(
                    f"{idle[0]} has no tier to run in: {dynamic}, and there are no fixed ones. Leave it out, or give "
                    "fixed tiers (--budget 64)."
                )
        reads = [word for word in (*self.methods, *self.specs) if protocol.has_parameter(method_name(word), "sae")]
        if reads and not saes:
            raise BadParameter(
                f"{reads[0]} reads concepts and there is no SAE. Give one, or 'none' to run without one."
            )
        if self.seeds < 1:
            raise BadParameter(f"seeds must be at least 1, got {self.seeds}.")
        settings = [FULL, *protocol.dynamic_settings(self.methods, saes, self.dynamic)]
        settings += protocol.fixed_settings([*self.methods, *budgeted], self.fixed, saes, self.seeds, self.fixed_pairs)
        return [*settings, *protocol.own_settings(as_written, saes)]

    def matched_settings(self, saes: Sequence[str], run: Run) -> list[Setting]:
        """Return the settings at the mean lengths of dynamic TORINO; a tier with answers keeps its length."""
        references = {setting.tier: setting for setting in run.settings.values() if setting.reference}
        known = {setting.tier: setting.budget for setting in run.settings.values() if setting.budget is not None}
        budgets = {tier: known.get(tier) or mean_length(run, setting.id) for tier, setting in references.items()}
        methods = [*self.methods, *protocol.split_specs(self.specs)[0]]
        return protocol.matched_settings(methods, budgets, references, saes, self.seeds)


def mean_length(run: Run, setting: str) -> int:
    """Return the mean number of visual tokens over the images of each task, then over tasks, rounded."""
    means = [float(counts.mean()) for task in run.tasks if len(counts := run.token_counts(task, setting))]
    if not means:
        raise TorinoError(
            f"{setting} answered no question, so its tier has no budget. See {run.folder / PROBLEMS} for the reasons."
        )
    return max(1, round(sum(means) / len(means)))


def evaluate(
    folder: str | Path,
    *,
    vlm: VLM,
    tasks: Sequence[Task],
    plan: RunPlan,
    saes: Mapping[str, Any],
    model_name: str = "",
    batch: int = 8,
    limit: int | None = None,
    max_new_tokens: Mapping[str, int] | None = None,
    shard: tuple[int, int] = (0, 1),
    on_error: OnError = "skip",
    retry: bool = False,
    save_images: int = 0,
    arguments: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> Run:
    """Ask every question under every setting and record all answers.

    A run started again with the same arguments continues where it stopped. Further methods or tiers are added to it;
    recorded answers stay. Several processes share the work when each gets its ``shard``; an image belongs to one of
    them.

    Parameters
    ----------
    folder : path
        Folder of the run, new or started earlier.
    vlm : VLM
        The model, with its padding, positions, attention and text query.
    tasks : sequence of Task
        Tasks with ``prompts="auto"`` and without an instruction of their own use the prompt style of the model's
        package.
    plan : RunPlan
    saes : mapping of label to SAE
        ``none`` stands for no SAE and needs no entry.
    model_name : str
        Name of the model, for ``run.json``. Default: the name in its configuration.
    batch, on_error
        See :class:`Engine`.
    limit : int, optional
        Number of questions per task, recorded in ``run.json``; the tasks are already cut.
    max_new_tokens : mapping of task name to int, optional
        Maximum length of an answer, in tokens. Tasks without an entry have a default length.
    shard : (int, int)
        Part of the work that this process does, counted from 0, and the number of parts.
    retry : bool
        Retry failed samples, for example after running out of memory.
    save_images : int
        Images of each task that are saved with their reductions, for figures.
    arguments : mapping, optional
        The user's arguments, for ``run.json``.
    progress : callable, optional
        Called with a phase, the number of its answers so far, and the number there will be.
    """
    folder = expand_path(folder, "The folder of the run")
    part, parts = shard
    if not 0 <= part < parts:
        raise BadParameter(f"shard must be i of n with i from 0 to n - 1, got {part} of {parts}.")
    names = [task.name for task in tasks]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise BadParameter(
            f"Two tasks are called {repeated[0]}, so their answers could not be told apart. Give each file once, or "
            "rename one of them."
        )
    tasks = [task.for_model(None if vlm.package is None else vlm.package.prompts) for task in tasks]
    labels = list(saes)
    first_settings = plan.first_settings(labels)
    reducers = {setting.id: setting.reducer(saes) for setting in first_settings}
    check_reducers(reducers, has_text_query=vlm.text_query is not None)
    facts = describe_run(vlm, model_name, tasks, saes, first_settings, max_new_tokens)
    facts |= {"batch": batch, "batching": BATCHING, "limit": limit, "matched": plan.matched}
    facts["arguments"] = dict(arguments or {})
    open_run_file(folder, facts)
    worker = _Worker(folder, vlm, tasks, saes, facts, (part, parts), on_error, retry, save_images, progress)
    worker.run_phase("first answers", first_settings)
    if plan.dynamic and plan.matched:
        later = folder / SETTINGS
        missing = 0 if later.is_file() else worker.count_missing(first_settings)
        if missing:
            raise TorinoError(
                f"This part of the work is done. The mean lengths need {missing:,} answers of other parts: run the "
                "same command again when they are there."
            )
        matched_settings = plan.matched_settings(labels, open_run(folder))
        known = read_later_settings(folder)
        added = new_settings(folder, known, [setting.to_dict() for setting in matched_settings])
        if added:
            write_json(later, {"settings": [*known, *added]}, sealed=True)
        worker.run_phase("matched lengths", matched_settings)
    return open_run(folder)


class _Worker:
    """One process of a run."""

    def __init__(
        self,
        folder: Path,
        vlm: VLM,
        tasks: Sequence[Task],
        saes: Mapping[str, Any],
        facts: Mapping[str, Any],
        shard: tuple[int, int],
        on_error: OnError,
        retry: bool,
        save_images: int,
        progress: Progress | None,
    ) -> None:
        self.folder, self.vlm, self.tasks, self.saes, self.facts = folder, vlm, tasks, saes, facts
        self.part, self.parts = shard
        self.on_error: OnError = on_error
        self.retry, self.progress = retry, progress
        self.keys_to_save = {group[1][0].image.key for task in tasks for group in list(_by_image(task))[:save_images]}
        self.max_new_tokens = {str(task["task"]): int(task["max_new_tokens"]) for task in facts["tasks"]}

    def run_phase(self, name: str, settings: Sequence[Setting]) -> None:
        """Ask everything that is not answered yet, image by image."""
        file = f"{self.part + 1}of{self.parts}.jsonl"
        log, problems = AnswerLog(self.folder / ANSWERS / file), AnswerLog(self.folder / PROBLEMS / file)
        try:
            done = self._done(failures=not self.retry)
            ids = {setting.id for setting in settings}
            groups = [group for task in self.tasks for group in _by_image(task) if self._is_mine(group[1][0])]
            total = sum(len(samples) for _, samples in groups) * len(ids)
            mine = {(task.name, sample.index) for task, samples in groups for sample in samples}
            count = sum(key[:2] in mine for key in done if key[2] in ids)
            self._report(name, count, total)
            if count == total:
                return
            engine = self._engine(settings)
            for task, samples in groups:
                for rows in self._answer_image(engine, task, samples, ids, done):
                    log.add(rows)
                    problems.add([row for row in rows if "error" in row])
                    done.update((row["task"], row["index"], row["setting"]) for row in rows)
                    count += len(rows)
                    self._report(name, count, total)
        finally:
            log.close()
            problems.close()

    def _engine(self, settings: Sequence[Setting]) -> Engine:
        cached = {label: CachedEncoder(sae) for label, sae in self.saes.items()}
        return Engine(
            self.vlm,
            {setting.id: setting.reducer(cached) for setting in settings},
            batch=int(self.facts["batch"]),
            # The tier name without the label of its SAE: settings of different SAEs are batched together.
            tiers={setting.id: setting.tier.partition(" ")[0] for setting in settings},
            on_error=self.on_error,
        )

    def _answer_image(
        self, engine: Engine, task: Task, samples: Sequence[Sample], ids: set[str], done: set[Key]
    ) -> Iterator[list[dict[str, Any]]]:
        """Yield the rows of the missing answers about one image, batch by batch."""
        length, key = self.max_new_tokens[task.name], samples[0].images[0].key
        questions = [QuestionToAsk((task.name, sample.index), task.prompt(sample), length) for sample in samples]
        missing = [(*q.key, setting) for q in questions for setting in sorted(ids) if (*q.key, setting) not in done]
        if not missing:
            return
        try:
            images = [source.read() for source in samples[0].images]
        except TorinoError as error:
            if self.on_error == "stop":
                raise
            message = f"{type(error).__name__}: {error}"
            yield [
                {"task": task_name, "index": index, "setting": setting, "image": key, "error": message}
                for task_name, index, setting in missing
            ]
            return
        writer = ExampleWriter(example_dir(self.folder, key)) if key in self.keys_to_save else None
        for answers in engine.answers(images, questions, lambda q, setting: (*q, setting) not in done, writer):
            yield [_row(answer, key) for answer in answers]

    def count_missing(self, settings: Sequence[Setting]) -> int:
        """Return how many answers are missing, over all parts of the work."""
        done = self._done()
        wanted = ((task.name, sample.index, s.id) for task in self.tasks for sample in task for s in settings)
        return sum(key not in done for key in wanted)

    def _done(self, failures: bool = True) -> set[Key]:
        files = sorted((self.folder / ANSWERS).glob("*.jsonl"))
        rows = (row for row in read_answer_rows(files) if failures or "error" not in row)
        return {(row["task"], row["index"], row["setting"]) for row in rows}

    def _is_mine(self, sample: Sample) -> bool:
        return int.from_bytes(blake2b(sample.images[0].key.encode(), digest_size=8).digest()) % self.parts == self.part

    def _report(self, name: str, count: int, total: int) -> None:
        if self.progress is not None:
            self.progress(name, count, total)


def _by_image(task: Task) -> Iterator[tuple[Task, list[Sample]]]:
    """Group the samples of a task by image, in order of first appearance."""
    groups: dict[tuple[str, ...], list[Sample]] = {}
    for sample in task:
        groups.setdefault(tuple(source.key for source in sample.images), []).append(sample)
    for samples in groups.values():
        yield task, samples


def _row(answer: EngineAnswer, image: str) -> dict[str, Any]:
    task, index = answer.key
    row: dict[str, Any] = {"task": task, "index": index, "setting": answer.setting, "image": image}
    if answer.error:
        return row | {"error": answer.error}
    seconds = {name: round(value, 6) for name, value in answer.seconds.items()}
    return row | {"prediction": answer.text, "tokens": answer.tokens, "before": answer.before, "seconds": seconds}
