"""Tasks: a set of samples with the prompt they are asked by and the rule they are scored by.

:func:`open_task` opens the paper's nine benchmarks by name, and any other TSV or JSONL as a task of its own. A runner
iterates the samples, sends ``task.prompt(sample)`` with the picture to a model and writes one JSON object a line, with
``index`` and ``prediction`` (or ``error``); :meth:`Task.score` needs nothing but the task and those lines.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
from torino_lab.sheets import KeyWords

from torino.core.errors import BadFile, BadParameter, UnknownName, unknown_name
from torino.evaluation import scoring
from torino.evaluation.benchmarks import (
    BENCHMARKS,
    CUSTOM,
    LAB_BENCHMARKS,
    Benchmark,
    Kind,
    Prompts,
    benchmark_of,
    instruction,
    words,
)
from torino.evaluation.judge import NO_JUDGE, Grader, graded
from torino.evaluation.samples import Broken, Problem, Sample, SampleTable, read_jsonl, read_tsv

TURN = 1_000_000  # between the indices of a question's rotations, in the TSV of MMBench

_Each = Callable[[Sample, str], tuple[float, str | None]]
_All = Callable[[scoring.Marked], tuple[scoring.ScoreStats, scoring.Parts]]
_RULES: dict[str, tuple[str, _Each, _All]] = {
    "exact": ("accuracy, exact match", scoring.exact_match, scoring.mean_score),
    "vqa": ("VQA soft accuracy", scoring.soft_accuracy, scoring.mean_score),
    "mcq": ("accuracy", scoring.choice, scoring.mean_score),
    "circular": ("circular accuracy", scoring.choice, scoring.circular),
    "yes-no": ("accuracy", scoring.yes_no, scoring.mean_score),
    "mme": ("acc + acc+, summed over categories", scoring.yes_no, scoring.mme),
    "pope": ("F1 of yes", scoring.yes_no, scoring.pope),
    "judge": ("mean grade of the judge", graded({}), scoring.abilities),
}
_PARSED = ("mcq", "circular", "yes-no", "mme", "pope")


@dataclass(frozen=True)
class Task:
    """Samples, the prompt they are asked by and the rule they are scored by.

    Attributes
    ----------
    name : str
        ``GQA``, ``MMBench_EN``, …, or the name of the file for a task of one's own.
    kind : str
        The rule: ``exact``, ``vqa``, ``mcq``, ``circular``, ``yes-no``, ``mme``, ``pope`` or ``judge``.
    samples : tuple of Sample
    problems : tuple of Problem
        Rows of the file that could not be used.
    source : Path
    fingerprint : str
        Hash of what the file says, so that a result tells which data it is of.
    prompts : str
        Whose prompts: ``standard``, ``vlmevalkit`` or ``llava``.
    """

    name: str
    kind: Kind
    samples: tuple[Sample, ...]
    source: Path
    fingerprint: str
    benchmark: Benchmark = CUSTOM
    problems: tuple[Problem, ...] = ()
    prompts: Prompts = "standard"
    _places: dict[str, int] = field(default_factory=dict[str, int], init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Note where each sample is."""
        self._places.update({sample.index: place for place, sample in enumerate(self.samples)})

    def __len__(self) -> int:
        return len(self.samples)

    def __iter__(self) -> Iterator[Sample]:
        return iter(self.samples)

    def __getitem__(self, index: str | int) -> Sample:
        """The sample of this index, or at this place if it is a number."""
        return self.samples[index if isinstance(index, int) else self._places[index]]

    def prompt(self, sample: Sample) -> str:
        """What the model is asked about the picture."""
        question = words(sample)
        tail = instruction(self.benchmark, self.kind, self.prompts, question)
        if self.kind in ("mme", "pope", "yes-no") and self.prompts == "llava":
            question = re.sub(r"\s*Please answer yes or no\.?\s*$", "", question, flags=re.IGNORECASE)
        return question if not tail or tail in question else f"{question}\n{tail}"

    def take(self, count: int, seed: int | None = None) -> Task:
        """The task with ``count`` questions only: the first ones, or with a seed random ones.

        A question comes with all its rotations, and with the other questions that it is judged with.
        """
        if count < 1:
            raise BadParameter(f"A task needs at least 1 question, got {count}.")
        groups = list(dict.fromkeys(sample.group for sample in self.samples))
        if seed is not None:
            groups = [groups[i] for i in np.random.default_rng(seed).permutation(len(groups))]
        chosen = set(groups[:count])
        return replace(self, samples=tuple(sample for sample in self.samples if sample.group in chosen))

    def score(
        self, rows: Iterable[Mapping[str, Any]], judge: Grader | None = None, *, partial: bool = False
    ) -> scoring.Score:
        """Score answers.

        Parameters
        ----------
        rows : iterable of mappings
            Each with ``index`` and ``prediction``; one with ``error``, or without a text, says that the model failed.
            Of several answers to a sample the last counts, and a failure only if there is no answer.
        judge : Grader, optional
            For tasks whose answers are graded; without one they are not scored, and ``note`` says so.
        partial : bool
            Leave out questions that are not answered yet, instead of counting them as wrong.
        """
        said, failed, ignored = self._read(rows)
        samples = self.samples
        if partial:
            waiting = {one.group for one in samples if one.index not in said and one.index not in failed}
            samples = tuple(one for one in samples if one.group not in waiting)
        counts = {
            "samples": len(samples),
            "answered": sum(one.index in said for one in samples),
            "unanswered": sum(one.index not in said and one.index not in failed for one in samples),
            "failed": sum(one.index in failed for one in samples),
            "ignored": ignored,
        }
        metric, each, total = _RULES[self.kind]
        note = ""
        if self.kind == "judge":
            judge = KeyWords() if self.benchmark.words else judge
            if judge is None:
                return scoring.unscored(self.name, metric, samples, counts, f"{self.name}: {NO_JUDGE}")
            each, note = graded(judge.grade_all(samples, said)), f"judged by {judge.name}"
        marked = scoring.Marked(samples, said).mark(each)
        if self.kind in (*_PARSED, "judge"):
            counts["unparsed"] = sum(marked.extracted[one.index] is None for one in samples if one.index in said)
        return scoring.score_of(self.name, metric, marked, total, counts, note)

    def facts(self) -> dict[str, Any]:
        """What a result should say about its task, ready for JSON."""
        tail = instruction(self.benchmark, self.kind, self.prompts, "")
        chinese = instruction(self.benchmark, self.kind, self.prompts, "中")
        asked = f"question\n{tail}" if tail else "question"
        if self.kind in ("mcq", "circular"):
            asked = f"hint\nquestion\nA. …\nB. …\n{tail}" + ("" if chinese == tail else f" (Chinese: {chinese})")
        return {
            "task": self.name,
            "file": self.source.name,
            "fingerprint": self.fingerprint,
            "harness": "torino, VLMEvalKit's data layout",
            "prompts": self.prompts,
            "prompt": asked,
            "metric": _RULES[self.kind][0],
            "samples": len(self.samples),
            "questions": len({sample.group for sample in self.samples}),
            "skipped_rows": len(self.problems),
            "problems": [str(problem) for problem in self.problems[:20]],
        }

    def _read(self, rows: Iterable[Mapping[str, Any]]) -> tuple[dict[str, str], set[str], int]:
        said: dict[str, str] = {}
        failed: set[str] = set()
        ignored = 0
        for row in rows:
            index = str(row.get("index", ""))
            text = row.get("prediction")
            if index not in self._places:
                ignored += 1
            elif text is None or row.get("error"):
                failed.add(index)
            else:
                said[index] = str(text)
        if ignored and not said and not failed:
            raise BadFile(f"None of the {ignored} answers is to a sample of {self.name}. Is it another task's file?")
        return said, failed - said.keys(), ignored


def open_task(
    name: str | Path,
    folder: str | Path | None = None,
    *,
    kind: Kind | None = None,
    prompts: Prompts = "standard",
    image_root: str | Path | None = None,
    broken: Broken = "skip",
) -> Task:
    """Open a task.

    Parameters
    ----------
    name : str or path
        One of the nine (``GQA`` or ``GQA_TestDev_Balanced``, ``MMBench_EN``, ``MMBench_CN``, ``MME``, ``POPE``,
        ``ScienceQA``, ``TextVQA``, ``VizWiz``, ``MMVet``), the name of a file in the folder, or the path of one.
    folder : path, optional
        Where the TSVs are; by default the environment variable ``LMUData``, else ``LMUData`` in the home folder.
    kind : str, optional
        The rule to score by; by default that of the benchmark, for other files ``mcq`` if they have options, else
        ``vqa``.
    prompts : {"standard", "vlmevalkit", "llava"}
        Whose prompts; see ``docs/evaluation.md``.
    image_root : path, optional
        Where relative image paths start from.
    broken : {"skip", "raise"}
        Rows that cannot be used are counted in ``problems``, or stop the reading.
    """
    if prompts not in ("standard", "vlmevalkit", "llava"):
        raise BadParameter(f"prompts must be standard, vlmevalkit or llava, got {prompts!r}.")
    if kind is not None and kind not in _RULES:
        raise BadParameter(f"kind must be one of {', '.join(_RULES)}, got {kind!r}.")
    path = find_task(name, folder)
    read = read_jsonl if path.suffix == ".jsonl" else read_tsv
    table = read(path, image_root=image_root, broken=broken)
    stem = path.stem.removesuffix("_local")
    known = benchmark_of(stem) or CUSTOM
    used: Kind = kind or known.kind or ("mcq" if any(sample.options for sample in table.samples) else "vqa")
    samples, problems = _fitting(used, table, path, broken)
    if not samples:
        first = f" The first: {problems[0]}." if problems else ""
        raise BadFile(f"{path} holds no sample that can be used; {len(problems)} rows were skipped.{first}")
    named = known.name if known is not CUSTOM else stem
    return Task(
        named, used, tuple(_grouped(used, samples)), path, table.fingerprint, known, tuple(problems), prompts=prompts
    )


def find_task(name: str | Path, folder: str | Path | None = None) -> Path:
    """The file of a task; a :class:`BadFile` or ``UnknownName`` says what is missing."""
    path = Path(name)
    if path.suffix in (".tsv", ".jsonl") and path.is_file():
        return path
    root = data_folder(folder)
    text = str(name)
    known = benchmark_of(text)
    stems = [text, *(known.files if known else ())]
    for stem in dict.fromkeys(stems):
        for ending in ("", ".tsv", "_local.tsv", ".jsonl"):
            found = root / f"{stem}{ending}"
            if found.is_file() and found.suffix in (".tsv", ".jsonl"):
                return found
    there = sorted(one.name for one in root.glob("*.tsv")) + sorted(one.name for one in root.glob("*.jsonl"))
    holds = f"it holds {', '.join(there)}" if there else "it holds no .tsv and no .jsonl file"
    if known:
        raise BadFile(
            f"{known.name} is not in {root}: {holds}. Put {known.files[0]}.tsv there (VLMEvalKit's file), or name the "
            "folder that has it, also by the environment variable LMUData."
        )
    if path.suffix in (".tsv", ".jsonl"):
        raise BadFile(f"There is no file {path}, nor one of that name in {root}: {holds}.")
    error = unknown_name("task", text, [*BENCHMARKS, *LAB_BENCHMARKS, *(Path(one).stem for one in there)])
    raise UnknownName(f"{str(error).removesuffix(' All: torino list.')} Looked in {root}: {holds}.")


def data_folder(folder: str | Path | None = None) -> Path:
    """The folder of the TSVs: the one given, else ``LMUData`` of the environment, else the one at home."""
    return Path(folder or os.environ.get("LMUData") or Path.home() / "LMUData")  # noqa: SIM112 (VLMEvalKit's spelling)


def read_answers(path: str | Path) -> list[dict[str, Any]]:
    """The rows of an answers file; a last line that a crash cut short is left out, any other bad line is an error."""
    rows: list[dict[str, Any]] = []
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except OSError as error:
        raise BadFile(f"Cannot read {path}: {error.strerror or error}.") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if not isinstance(row, dict) or "index" not in row:
                raise ValueError("no object with an index")
        except ValueError as error:
            if number == len(lines):
                break
            raise BadFile(f"{path}, line {number} is not an answer ({error}). Remove that line.") from error
        rows.append(cast(dict[str, Any], row))
    return rows


def _fitting(kind: Kind, table: SampleTable, path: Path, broken: Broken) -> tuple[list[Sample], list[Problem]]:
    """The samples that the rule can score, and all problems."""
    kept: list[Sample] = []
    problems = list(table.problems)
    for sample in table.samples:
        what = ""
        if kind in ("mcq", "circular") and len(sample.options) < 2:
            what = "it has fewer than two options"
        elif kind in ("mme", "pope", "yes-no") and sample.answers[0].strip().lower() not in ("yes", "no"):
            what = f"its answer must be yes or no, and is {sample.answers[0]!r}"
        elif kind == "mme" and "category" not in sample.meta:
            what = "it has no category"
        if not what:
            kept.append(sample)
            continue
        problem = Problem(sample.row, sample.index, what)
        if broken == "raise":
            raise BadFile(f"{path}, {problem}. Mend the row, or let such rows be skipped and counted.")
        problems.append(problem)
    return kept, sorted(problems, key=lambda problem: problem.row)


def _grouped(kind: Kind, samples: Sequence[Sample]) -> list[Sample]:
    """Say which samples are judged together; make the rotations of MMBench where the file has none."""
    if kind == "mme":
        return [
            replace(one, group=f"{one.meta['category']}|{one.meta.get('image_path') or one.image.key}")
            for one in samples
        ]
    if kind != "circular":
        return list(samples)
    grouped = [replace(one, group=one.meta.get("g_index") or _first(one.index)) for one in samples]
    if len({one.group for one in grouped}) < len(grouped):
        return grouped
    return [turned for one in grouped for turned in rotations(one)]


def _first(index: str) -> str:
    return str(int(index) % TURN) if index.isdecimal() else index


def rotations(sample: Sample) -> list[Sample]:
    """The question with its options moved round by 0, 1, … places, so that each option stands once at each letter."""
    letters, texts = list(sample.options), list(sample.options.values())
    right = letters.index(sample.answers[0])
    turned: list[Sample] = []
    for turn in range(len(letters)):
        options = dict(zip(letters, texts[turn:] + texts[:turn], strict=True))
        answer = letters[(right - turn) % len(letters)]
        index = str(int(sample.index) + turn * TURN) if sample.index.isdecimal() else f"{sample.index}+{turn}"
        turned.append(replace(sample, index=index if turn else sample.index, options=options, answers=(answer,)))
    return turned
