"""The paper's nine benchmarks and the lab's: their files, their rules, and how their questions are put."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, cast

from torino_lab.benchmarks import BENCHMARKS as LAB

from torino.evaluation.samples import Sample

Prompts = Literal["standard", "vlmevalkit", "llava"]
Kind = Literal["exact", "vqa", "mcq", "circular", "yes-no", "mme", "pope", "judge"]

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
        Its name here, and in the paper's tables as they ship.
    label : str
        How the paper's tables head its column.
    kind : str or None
        The rule it is scored by; None leaves it to the file.
    files : tuple of str
        Names of its TSVs in VLMEvalKit, the paper's first.
    also : tuple of str
        Other names it goes by.
    best : float
        The highest score there is.
    bare : bool
        Whether its questions go as they are, because the model that it was made for knows no instructions.
    words : bool
        Whether key words grade its free answers, in place of a language model as judge.
    """

    name: str
    label: str
    kind: Kind | None
    files: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    best: float = 100.0
    bare: bool = False
    words: bool = False


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
    Benchmark("MME", "MME", "mme", ("MME",), best=2800.0),
    Benchmark("POPE", "POPE", "pope", ("POPE",)),
    Benchmark("ScienceQA", "SQA I", "mcq", ("ScienceQA_TEST", "ScienceQA_VAL"), ("SQA", "SQA_I", "ScienceQA_IMG")),
    Benchmark("TextVQA", "VQA T", "vqa", ("TextVQA_VAL",), ("VQA_T", "TextVQA")),
    Benchmark("VizWiz", "VizWiz", "vqa", ("VizWiz",)),
    Benchmark("MMVet", "MMVet", "judge", ("MMVet",), ("MM-Vet",)),
)
_LAB = tuple(
    Benchmark(
        one.name,
        one.name.replace("-", " ", 1),
        cast(Kind, one.kind),
        (one.name,),
        best=200.0 * len(one.parts) if one.kind == "mme" else 100.0,
        bare=True,
        words=one.kind == "judge",
    )
    for one in LAB.values()
)
BENCHMARKS = {one.name: one for one in _NINE}
LAB_BENCHMARKS = {one.name: one for one in _LAB}
CUSTOM = Benchmark("custom", "custom", None)


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


_BY_NAME = {_plain(name): one for one in (*_NINE, *_LAB) for name in (one.name, *one.files, *one.also)}


def benchmark_of(name: str) -> Benchmark | None:
    """The benchmark of this name, however it is spelt.

    Examples
    --------
    >>> [benchmark_of(name).name for name in ("gqa", "GQA_TestDev_Balanced", "MM-Vet", "mmbench_dev_cn", "SQA")]
    ['GQA', 'GQA', 'MMVet', 'MMBench_CN', 'ScienceQA']
    """
    return _BY_NAME.get(_plain(name))


def words(sample: Sample) -> str:
    """Hint, question and options, one below the other."""
    hint = [sample.hint] if sample.hint else []
    return "\n".join([*hint, sample.question, *(f"{letter}. {text}" for letter, text in sample.options.items())])


def instruction(benchmark: Benchmark, kind: str, prompts: Prompts, text: str) -> str:
    """The line below the question, which says in what form to answer; may be empty.

    ``vlmevalkit`` is what that kit sends to LLaVA-1.5; ``llava`` what LLaVA-1.5's own scripts send. ``standard`` is the
    kit's with one repair: the kit asks VizWiz bare, at which models are reported to talk at length and score next to
    nothing, so its questions get LLaVA's line.
    """
    if benchmark.bare:
        return ""
    if kind in ("mcq", "circular"):
        return LETTER_CHINESE if re.search(r"[\u4e00-\u9fff]", text) else LETTER
    if benchmark.name == "VizWiz":
        return "" if prompts == "vlmevalkit" else UNANSWERABLE
    if kind in ("mme", "pope"):
        return SHORT if prompts == "llava" else ""
    return "" if kind == "judge" else SHORT
