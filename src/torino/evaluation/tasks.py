"""Open tasks: samples with their prompt and scoring rule.

:func:`open_task` opens a known benchmark by name, and any other TSV or JSONL file as a custom task. A runner iterates
over the samples, sends ``task.prompt(sample)`` with the image to a model, and writes one JSON object per line with
``index`` and ``prediction`` (or ``error``). :meth:`Task.score` needs only the task and those lines.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from torino.core.checks import check_type, expand_path
from torino.core.checksum import split_record
from torino.core.errors import BadFile, BadParameter, UnknownName, unknown_name
from torino.core.io import is_file
from torino.core.prompt_styles import PromptStyle
from torino.core.schema import parse_json
from torino.evaluation import scoring
from torino.evaluation.benchmarks import (
    CUSTOM,
    OPTION_KINDS,
    Benchmark,
    Kind,
    Prompts,
    all_benchmarks,
    answer_instruction,
    find_benchmark,
    format_question,
)
from torino.evaluation.captions import caption_score, grade_captions
from torino.evaluation.judge import NO_JUDGE, Grader, make_rule
from torino.evaluation.samples import OnBadRow, RowProblem, Sample, SampleTable, read_jsonl, read_tsv

ROTATION_STEP = 1_000_000  # between the indices of a question's rotations, in MMBench's TSV

PromptsFrom = Literal["option", "task", "model", "default"]
_Rule = Callable[[Sample, str], scoring.Grade]
_Total = Callable[[scoring.GradedAnswers], tuple[scoring.ScoreStats, scoring.Parts]]
_RULES: dict[str, tuple[str, _Rule, _Total]] = {
    "exact": ("accuracy, exact match", scoring.exact_match, scoring.mean_score),
    "vqa": ("VQA soft accuracy", scoring.soft_accuracy, scoring.mean_score),
    "mcq": ("accuracy", scoring.match_option, scoring.mean_score),
    "letter": ("accuracy", scoring.match_letter, scoring.mean_score),
    "first-word": ("accuracy", scoring.match_first_word, scoring.mean_score),
    "circular": ("circular accuracy", scoring.match_option, scoring.circular_score),
    "yes-no": ("accuracy", scoring.match_yes_no, scoring.mean_score),
    "mme": ("acc + acc+, summed over categories", scoring.match_yes_no, scoring.mme_score),
    "pope": ("F1 of yes", scoring.match_yes_no, scoring.pope_score),
    "caption": ("CIDEr-D", make_rule({}), caption_score),
    "judge": ("mean grade of the judge", make_rule({}), scoring.ability_score),
}
_PARSED = (*OPTION_KINDS, "yes-no", "mme", "pope")
_PROMPTS = ("auto", "task", *get_args(PromptStyle))


@dataclass(frozen=True)
class Task:
    """Samples with their prompt and scoring rule.

    Attributes
    ----------
    name : str
        ``GQA``, ``MMBench_EN``, …, or the name of the file for a custom task.
    kind : str
        Scoring rule: ``exact``, ``vqa``, ``mcq``, ``circular``, ``yes-no``, ``mme``, ``pope``, ``caption`` or
        ``judge``.
    samples : tuple of Sample
    source : Path
    fingerprint : str
        Hash of the contents of the file, to identify the data of a result.
    benchmark : Benchmark
    problems : tuple of RowProblem
        Rows of the file that could not be used.
    prompts : str
        Prompt style: ``plain``, ``standard``, ``vlmevalkit`` or ``llava``; ``task`` for the benchmark's own
        instruction; ``auto`` until :meth:`for_model` has chosen one.
    prompts_from : {"option", "task", "model", "default"}
        Who chose the prompt style.
    """

    name: str
    kind: Kind
    samples: tuple[Sample, ...]
    source: Path
    fingerprint: str
    benchmark: Benchmark = CUSTOM
    problems: tuple[RowProblem, ...] = ()
    prompts: Prompts = "auto"
    prompts_from: PromptsFrom = "option"
    _positions: dict[str, int] = field(default_factory=dict[str, int], init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Index the samples."""
        self._positions.update({sample.index: position for position, sample in enumerate(self.samples)})

    def __len__(self) -> int:
        return len(self.samples)

    def __iter__(self) -> Iterator[Sample]:
        return iter(self.samples)

    def __getitem__(self, index: str | int) -> Sample:
        """Return the sample with this index, or at this position if it is an integer."""
        return self.samples[index if isinstance(index, int) else self._positions[index]]

    def prompt(self, sample: Sample) -> str:
        """Return the text that the model is asked together with the image."""
        question = format_question(sample)
        instruction = answer_instruction(self.benchmark, self.kind, self.prompts, question)
        if self.kind in ("mme", "pope", "yes-no") and self.prompts == "llava":
            question = re.sub(r"\s*Please answer yes or no\.?\s*$", "", question, flags=re.IGNORECASE)
        return question if not instruction or instruction in question else f"{question}\n{instruction}"

    def for_model(self, prompts: PromptStyle | None) -> Task:
        """Choose the prompt style if none was given: the task's own, else the model's, else ``standard``.

        Parameters
        ----------
        prompts : str or None
            The style that the model states, see :class:`torino.vlm.loading.ModelPackage`.
        """
        if self.prompts != "auto":
            return self
        if self.benchmark.instruction is not None:
            return replace(self, prompts="task", prompts_from="task")
        if prompts is not None:
            return replace(self, prompts=prompts, prompts_from="model")
        return replace(self, prompts="standard", prompts_from="default")

    def take(self, count: int, seed: int | None = None) -> Task:
        """Return the task with its first ``count`` questions, or with a seed ``count`` random ones.

        A question comes with all its rotations, and with the other questions that it is scored with.
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
            Each with ``index`` and ``prediction``; a row with ``error`` or without a text means that the model failed.
            The last of several answers to a sample counts; a failure counts only if there is no answer.
        judge : Grader, optional
            For tasks with graded answers; without one the task is not scored, and ``note`` gives the reason.
        partial : bool
            Leave out questions that are not answered yet, instead of counting them as wrong.
        """
        predictions, failed, ignored = self._read(rows)
        samples = self.samples
        if partial:
            open_groups = {item.group for item in samples if item.index not in predictions and item.index not in failed}
            samples = tuple(sample for sample in samples if sample.group not in open_groups)
        counts = {
            "samples": len(samples),
            "answered": sum(sample.index in predictions for sample in samples),
            "unanswered": sum(sample.index not in predictions and sample.index not in failed for sample in samples),
            "failed": sum(sample.index in failed for sample in samples),
            "ignored": ignored,
        }
        metric, rule, total = _RULES[self.kind]
        note = ""
        if self.kind == "judge":
            judge = self.benchmark.grader() if self.benchmark.grader is not None else judge
            if judge is None:
                return scoring.build_empty_score(self.name, metric, samples, counts, f"{self.name}: {NO_JUDGE}")
            rule, note = make_rule(judge.grade_all(samples, predictions)), f"judged by {judge.name}"
        if self.kind == "caption":
            rule = make_rule(grade_captions(self.samples, predictions))
        graded = scoring.GradedAnswers(samples, predictions, self.benchmark.category_columns).grade(rule)
        if self.kind in (*_PARSED, "judge"):
            counts["unparsed"] = sum(
                graded.extracted[sample.index] is None for sample in samples if sample.index in predictions
            )
        return scoring.build_score(self.name, metric, graded, total, counts, note)

    def describe(self) -> dict[str, Any]:
        """Return what a result records about its task, ready for JSON."""
        instruction = answer_instruction(self.benchmark, self.kind, self.prompts, "")
        chinese = answer_instruction(self.benchmark, self.kind, self.prompts, "中")
        prompt = f"question\n{instruction}" if instruction else "question"
        if self.kind in OPTION_KINDS:
            translated = "" if chinese == instruction else f" (Chinese: {chinese})"
            prompt = f"hint\nquestion\nA. …\nB. …\n{instruction}{translated}".rstrip()
        return {
            "task": self.name,
            "file": self.source.name,
            "fingerprint": self.fingerprint,
            "harness": "torino, VLMEvalKit's data layout",
            "prompts": self.prompts,
            "prompts_from": self.prompts_from,
            "prompt": prompt,
            "metric": _RULES[self.kind][0],
            "samples": len(self.samples),
            "questions": len({sample.group for sample in self.samples}),
            "skipped_rows": len(self.problems),
            "problems": [str(problem) for problem in self.problems[:20]],
        }

    def _read(self, rows: Iterable[Mapping[str, Any]]) -> tuple[dict[str, str], set[str], int]:
        """Return the answers by index, the indices that failed, and the number of rows that were ignored."""
        predictions: dict[str, str] = {}
        failed: set[str] = set()
        ignored = 0
        for row in rows:
            index = str(row.get("index", ""))
            text = row.get("prediction")
            if index not in self._positions:
                ignored += 1
            elif text is None or row.get("error"):
                failed.add(index)
            else:
                predictions[index] = str(text)
        if ignored and not predictions and not failed:
            raise BadFile(
                f"None of the {ignored} answers belongs to a sample of {self.name}. Check that the answers are of this "
                "task."
            )
        return predictions, failed - predictions.keys(), ignored


def open_task(
    name: str | Path,
    folder: str | Path | None = None,
    *,
    kind: Kind | None = None,
    prompts: Prompts = "auto",
    image_root: str | Path | None = None,
    on_bad_row: OnBadRow = "skip",
    allow_outside: bool = False,
    frames: int | None = None,
) -> Task:
    """Open a task.

    Parameters
    ----------
    name : str or path
        A benchmark (``GQA`` or ``GQA_TestDev_Balanced``, ``MMBench_EN``, ``MMBench_CN``, ``MME``, ``POPE``,
        ``ScienceQA``, ``TextVQA``, ``VizWiz``, ``MMVet``, ``Video-MME``, ``MVBench``, ``LongVideoBench``, or one of
        an installed package, see :mod:`torino.evaluation.benchmarks`), the name of a file in the folder, or a path.
    folder : path, optional
        Folder of the TSV files; by default the environment variable ``LMUData``, else ``LMUData`` in the home folder.
    kind : str, optional
        Scoring rule; by default that of the benchmark, for other files ``mcq`` if they have options, else ``vqa``.
    prompts : {"auto", "plain", "standard", "vlmevalkit", "llava"}
        Prompt style; see :func:`torino.evaluation.benchmarks.answer_instruction`. ``auto`` is the task's own, else
        that of the model that is evaluated, else ``standard``.
    image_root : path, optional
        Folder of relative image paths.
    on_bad_row : {"skip", "raise"}
        Add rows that cannot be used to ``problems``, or raise :class:`BadFile`.
    allow_outside : bool
        Accept image files outside ``image_root``, or the folder of the file if that is not given. By default such a
        path raises :class:`BadFile`; symbolic links are resolved.
    frames : int, optional
        Number of frames to read of each video, 8 by default.
    """
    if prompts not in _PROMPTS:
        raise BadParameter(f"prompts must be auto or one of {', '.join(get_args(PromptStyle))}, got {prompts!r}.")
    if kind is not None and kind not in _RULES:
        raise BadParameter(f"kind must be one of {', '.join(_RULES)}, got {kind!r}.")
    path = find_task(name, folder)
    options: dict[str, Any] = {"image_root": image_root, "on_bad_row": on_bad_row, "allow_outside": allow_outside}
    table = read_jsonl(path, **options) if path.suffix == ".jsonl" else read_tsv(path, **options, frames=frames)
    stem = path.stem.removesuffix("_local")
    benchmark = find_benchmark(stem) or CUSTOM
    rule: Kind = kind or benchmark.kind or ("mcq" if any(sample.options for sample in table.samples) else "vqa")
    samples, problems = _select_scorable(rule, table, path, on_bad_row)
    if not samples:
        first = f" The first: {problems[0]}." if problems else ""
        raise BadFile(f"{path} contains no usable sample; {len(problems)} rows were skipped.{first}")
    title = benchmark.name if benchmark is not CUSTOM else stem
    return Task(
        title, rule, tuple(_group(rule, samples)), path, table.fingerprint, benchmark, tuple(problems), prompts=prompts
    )


def find_task(name: str | Path, folder: str | Path | None = None) -> Path:
    """Return the file of a task; raise :class:`BadFile` or ``UnknownName`` if there is none."""
    check_type("The task", name, (str, os.PathLike), "a name or path")
    path = Path(name)
    if path.suffix in (".tsv", ".jsonl") and is_file(path):
        return path
    root = data_folder(folder)
    text = str(name)
    benchmark = find_benchmark(text)
    stems = [text, *(benchmark.files if benchmark else ())]
    for stem in dict.fromkeys(stems):
        for ending in ("", ".tsv", "_local.tsv", ".jsonl"):
            candidate = root / f"{stem}{ending}"
            if is_file(candidate) and candidate.suffix in (".tsv", ".jsonl"):
                return candidate
    files = sorted(file.name for file in root.glob("*.tsv")) + sorted(file.name for file in root.glob("*.jsonl"))
    contents = f"it contains {', '.join(files)}" if files else "it contains no .tsv and no .jsonl file"
    if benchmark:
        raise BadFile(
            f"{benchmark.name} is not in {root}: {contents}. Put {(*benchmark.files, benchmark.name)[0]}.tsv there (in "
            "VLMEvalKit's layout), or give the folder that has it, also through the environment variable LMUData."
        )
    if path.suffix in (".tsv", ".jsonl"):
        raise BadFile(f"There is no file {path}, and none with that name in {root}: {contents}.")
    error = unknown_name("task", text, [*all_benchmarks(), *(Path(file).stem for file in files)])
    raise UnknownName(f"{error} Searched {root}: {contents}.")


def data_folder(folder: str | Path | None = None) -> Path:
    """Return the folder of the TSV files: ``folder``, else the environment's ``LMUData``, else ``~/LMUData``."""
    given = folder or os.environ.get("LMUData") or "~/LMUData"  # noqa: SIM112 (VLMEvalKit's spelling)
    return expand_path(given, "The folder of the tasks")


def read_answers(path: str | Path) -> list[dict[str, Any]]:
    """Read the rows of an answers file; skip a last line cut short by a crash, and raise for any other bad line."""
    rows: list[dict[str, Any]] = []
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except OSError as error:
        raise BadFile(f"Cannot read {path}: {error.strerror or error}.") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        content, correct = split_record(line)
        try:
            if not correct:
                raise ValueError("it does not match its checksum")
            row: dict[str, Any] = parse_json(content, dict)
            if "index" not in row:
                raise ValueError("it has no index")
        except ValueError as error:
            if number == len(lines):
                break
            raise BadFile(f"{path}, line {number} is not an answer: {error}. Remove that line.") from error
        rows.append(row)
    return rows


def _select_scorable(
    kind: Kind, table: SampleTable, path: Path, on_bad_row: OnBadRow
) -> tuple[list[Sample], list[RowProblem]]:
    """Return the samples that the rule can score, and all problems."""
    kept: list[Sample] = []
    problems = list(table.problems)
    for sample in table.samples:
        reason = ""
        if kind in OPTION_KINDS and len(sample.options) < 2:
            reason = "fewer than two options"
        elif kind in ("mme", "pope", "yes-no") and sample.answers[0].strip().lower() not in ("yes", "no"):
            reason = f"the answer must be yes or no, got {sample.answers[0]!r}"
        elif kind == "mme" and "category" not in sample.meta:
            reason = "no category"
        if not reason:
            kept.append(sample)
            continue
        problem = RowProblem(sample.row, sample.index, reason)
        if on_bad_row == "raise":
            raise BadFile(f"{path}, {problem}. Fix the row, or skip such rows with on_bad_row='skip'.")
        problems.append(problem)
    return kept, sorted(problems, key=lambda problem: problem.row)


def _group(kind: Kind, samples: Sequence[Sample]) -> list[Sample]:
    """Assign the groups that are scored together; add MMBench's rotations if the file has none."""
    if kind == "mme":
        return [
            replace(sample, group=f"{sample.meta['category']}|{sample.meta.get('image_path') or sample.image.key}")
            for sample in samples
        ]
    if kind != "circular":
        return list(samples)
    grouped = [replace(sample, group=sample.meta.get("g_index") or _base_index(sample.index)) for sample in samples]
    if len({sample.group for sample in grouped}) < len(grouped):
        return grouped
    return [rotation for sample in grouped for rotation in make_rotations(sample)]


def _base_index(index: str) -> str:
    return str(int(index) % ROTATION_STEP) if _is_number(index) else index


def _is_number(index: str) -> bool:
    return index.isdecimal() and len(index) < 19  # Python refuses to convert thousands of digits


def make_rotations(sample: Sample) -> list[Sample]:
    """Return the question with its options rotated by 0, 1, … positions, so that each option gets each letter once."""
    letters, texts = list(sample.options), list(sample.options.values())
    correct = letters.index(sample.answers[0])
    rotations: list[Sample] = []
    for turn in range(len(letters)):
        options = dict(zip(letters, texts[turn:] + texts[:turn], strict=True))
        answer = letters[(correct - turn) % len(letters)]
        index = str(int(sample.index) + turn * ROTATION_STEP) if _is_number(sample.index) else f"{sample.index}+{turn}"
        rotations.append(replace(sample, index=index if turn else sample.index, options=options, answers=(answer,)))
    return rotations
