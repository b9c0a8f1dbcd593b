"""Describe benchmarks: their files, scoring rules and prompts.

torino knows the paper's nine benchmarks and three of videos: Video-MME, MVBench and LongVideoBench. An installed
package can add tasks through the entry point group ``torino.tasks``::

    [project.entry-points."torino.tasks"]
    my-package = "my_package.tasks:TASKS"

The object is a mapping from task name to :class:`Benchmark`, or a function without parameters that returns one::

    from torino.evaluation.benchmarks import Benchmark

    TASKS = {"Birds": Benchmark("Birds", "Birds", "mcq", files=("Birds_TEST",), category_columns=("species",))}

Each key must equal the ``name`` of its benchmark. Names, aliases and file names are compared without case and
punctuation, and no two packages may use the same one. :func:`torino.evaluation.open_task` then opens the task by name
from the data folder. Entry points are loaded on first use, when a name is not among the nine, so importing the object
should be cheap; give ``grader`` as a function that imports what it needs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from torino.core.errors import TorinoError
from torino.core.prompt_styles import PromptStyle
from torino.evaluation.samples import Sample

if TYPE_CHECKING:
    from torino.evaluation.judge import Grader

Prompts = PromptStyle | Literal["auto", "task"]
"""A prompt style; ``task`` for the task's own instruction; ``auto`` for that, else the model's style, else
``standard``."""
Kind = Literal["exact", "vqa", "mcq", "circular", "yes-no", "mme", "pope", "caption", "judge", "letter", "first-word"]

OPTION_KINDS = ("mcq", "circular", "letter", "first-word")
"""Scoring rules of multiple choices."""

GROUP = "torino.tasks"
SHORT = "Answer the question using a single word or phrase."
LETTER = "Answer with the option's letter from the given choices directly."
LETTER_CHINESE = "请直接回答选项字母。"
UNANSWERABLE = f"When the provided information is insufficient, respond with 'Unanswerable'.\n{SHORT}"


@dataclass(frozen=True)
class Benchmark:
    """One benchmark.

    Attributes
    ----------
    name : str
        Its name in torino, also in the paper's tables that ship with torino.
    label : str
        Its column heading in tables.
    kind : str or None
        Scoring rule: ``exact``, ``vqa``, ``mcq``, ``circular``, ``yes-no``, ``mme``, ``pope``, ``caption``, ``judge``,
        or those of video benchmarks, ``letter`` and ``first-word``. None chooses ``mcq`` for a file with options and
        ``vqa`` for others.
    files : tuple of str
        Names of its TSV files without the ending, the preferred one first.
    aliases : tuple of str
        Other accepted names.
    max_score : float
        Highest possible score.
    instruction : str or None
        The task's own prompt style: a line added below the question; empty for none. None leaves the style to the
        model.
    category_columns : tuple of str
        Columns whose values get their own accuracy in a report.
    grader : callable, optional
        Returns the :class:`~torino.evaluation.judge.Grader` of a ``judge`` task; None uses the LLM judge.
    """

    name: str
    label: str
    kind: Kind | None
    files: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    max_score: float = 100.0
    instruction: str | None = None
    category_columns: tuple[str, ...] = ("split", "l2-category", "category")
    grader: Callable[[], Grader] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """All names it can be opened by."""
        return (self.name, *self.files, *self.aliases)


_NINE = (
    Benchmark("GQA", "GQA", "exact", ("GQA_TestDev_Balanced",)),
    Benchmark(
        "MMBench_EN",
        "MMB EN",
        "circular",
        ("MMBench_DEV_EN", "MMBench_DEV_EN_V11", "MMBench", "MMBench_V11", "MMBench_TEST_EN", "MMBench_TEST_EN_V11"),
        ("MMB", "MMB_EN", "MMBench_DEV"),
    ),
    Benchmark(
        "MMBench_CN",
        "MMB CN",
        "circular",
        (
            "MMBench_DEV_CN",
            "MMBench_DEV_CN_V11",
            "MMBench_CN",
            "MMBench_CN_V11",
            "MMBench_TEST_CN",
            "MMBench_TEST_CN_V11",
        ),
        ("MMB_CN",),
    ),
    Benchmark("MME", "MME", "mme", ("MME",), max_score=2800.0),
    Benchmark("POPE", "POPE", "pope", ("POPE",)),
    Benchmark("ScienceQA", "SQA I", "mcq", ("ScienceQA_TEST", "ScienceQA_VAL"), ("SQA", "SQA_I", "ScienceQA_IMG")),
    Benchmark("TextVQA", "VQA T", "vqa", ("TextVQA_VAL",), ("VQA_T", "TextVQA")),
    Benchmark("VizWiz", "VizWiz", "vqa", ("VizWiz",)),
    Benchmark("MMVet", "MMVet", "judge", ("MMVet",), ("MM-Vet",)),
)
BENCHMARKS = {benchmark.name: benchmark for benchmark in _NINE}
"""The paper's nine benchmarks."""
VIDEO_BENCHMARKS = {
    benchmark.name: benchmark
    for benchmark in (
        Benchmark(
            "Video-MME",
            "Video-MME",
            "letter",
            ("Video-MME",),
            instruction="Respond with only the letter (A, B, C, or D) of the correct option.",
            category_columns=("duration", "domain", "sub_category", "task_type"),
        ),
        Benchmark(
            "MVBench",
            "MVBench",
            "first-word",
            ("MVBench", "MVBench_MP4"),
            instruction="Only give the best option.",
            category_columns=("task_type",),
        ),
        Benchmark(
            "LongVideoBench",
            "LVBench",
            "letter",
            ("LongVideoBench",),
            ("LVB",),
            instruction=LETTER,
            category_columns=("duration_group", "question_category"),
        ),
    )
}
"""Benchmarks of videos, scored as in VLMEvalKit; see :mod:`torino.evaluation.videos`."""
CUSTOM = Benchmark("custom", "custom", None)
"""Stands for a file that belongs to no known benchmark."""


def _normalize(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


_BY_NAME = {
    _normalize(name): benchmark for benchmark in (*_NINE, *VIDEO_BENCHMARKS.values()) for name in benchmark.names
}


def find_benchmark(name: str) -> Benchmark | None:
    """Return the benchmark with this name, ignoring case and punctuation, or None.

    Examples
    --------
    >>> [find_benchmark(name).name for name in ("gqa", "GQA_TestDev_Balanced", "MM-Vet", "mmbench_dev_cn", "SQA")]
    ['GQA', 'GQA', 'MMVet', 'MMBench_CN', 'ScienceQA']
    """
    key = _normalize(name)
    return _BY_NAME.get(key) or _index_plugins().get(key)


def all_benchmarks() -> dict[str, Benchmark]:
    """Return the nine benchmarks, those of videos and those of installed packages, by name."""
    return BENCHMARKS | VIDEO_BENCHMARKS | {benchmark.name: benchmark for benchmark in _index_plugins().values()}


@cache
def _index_plugins() -> dict[str, Benchmark]:
    """Load the benchmarks of installed packages, by every normalized name."""
    owners = dict.fromkeys(_BY_NAME, "torino")
    index: dict[str, Benchmark] = {}
    for entry_point in sorted(entry_points(group=GROUP), key=lambda entry: (_package(entry), entry.name)):
        package = _package(entry_point)
        for benchmark in _load(entry_point, package):
            for name in benchmark.names:
                key = _normalize(name)
                if key in owners and index.get(key) is not benchmark:
                    raise TorinoError(
                        f"The packages {owners[key]} and {package} both provide a task named {name!r}. Uninstall one "
                        "of them, or rename the task in one of them."
                    )
                owners[key], index[key] = package, benchmark
    return index


def _package(entry_point: EntryPoint) -> str:
    return entry_point.dist.name if entry_point.dist is not None else entry_point.module


def _load(entry_point: EntryPoint, package: str) -> list[Benchmark]:
    """Return the benchmarks of one entry point."""
    try:
        provided: Any = entry_point.load()
        if callable(provided):
            provided = provided()
    except Exception as error:  # a third-party package can fail in any way
        raise TorinoError(
            f"The tasks of the package {package} cannot be loaded: {type(error).__name__}: {error} (entry point "
            f"{entry_point.value} in {GROUP}). Update the package or uninstall it."
        ) from error
    if not isinstance(provided, Mapping):
        raise _invalid(package, entry_point, f"it is a {type(provided).__name__}, not a mapping from name to Benchmark")
    benchmarks: list[Benchmark] = []
    for name, benchmark in cast(Mapping[Any, Any], provided).items():
        if not isinstance(benchmark, Benchmark):
            raise _invalid(package, entry_point, f"{name!r} maps to a {type(benchmark).__name__}, not a Benchmark")
        if benchmark.name != name:
            raise _invalid(package, entry_point, f"{name!r} maps to a Benchmark named {benchmark.name!r}")
        if benchmark.kind is not None and benchmark.kind not in get_args(Kind):
            raise _invalid(package, entry_point, f"{name!r} has the unknown kind {benchmark.kind!r}")
        benchmarks.append(benchmark)
    return benchmarks


def _invalid(package: str, entry_point: EntryPoint, reason: str) -> TorinoError:
    return TorinoError(
        f"The tasks of the package {package} are invalid: {reason} (entry point {entry_point.value} in {GROUP}). "
        "Update the package or uninstall it."
    )


def format_question(sample: Sample) -> str:
    """Return hint, question and options, one per line."""
    hint = [sample.hint] if sample.hint else []
    return "\n".join([*hint, sample.question, *(f"{letter}. {text}" for letter, text in sample.options.items())])


def answer_instruction(benchmark: Benchmark, kind: str, prompts: Prompts, text: str) -> str:
    """Return the line below the question that asks for a form of answer; may be empty.

    ``plain`` sends the question as it is. ``vlmevalkit`` is what VLMEvalKit sends to LLaVA-1.5; ``llava`` is what
    LLaVA-1.5's own scripts send. ``standard`` is VLMEvalKit's with one change: VLMEvalKit sends VizWiz questions
    without an instruction, for which long answers and scores near zero are reported, so they get LLaVA's instruction.
    ``task`` and ``auto`` use the instruction of the benchmark if it has one, else ``standard``.
    """
    if prompts == "plain":
        return ""
    if prompts in ("task", "auto") and benchmark.instruction is not None:
        return benchmark.instruction
    if kind in OPTION_KINDS:
        return LETTER_CHINESE if re.search(r"[\u4e00-\u9fff]", text) else LETTER
    if benchmark.name == "VizWiz":
        return "" if prompts == "vlmevalkit" else UNANSWERABLE
    if kind in ("mme", "pope"):
        return SHORT if prompts == "llava" else ""
    return "" if kind in ("caption", "judge") else SHORT
