"""List the lab's nine benchmarks: names, scoring rules and sizes. Cheap to import."""

from __future__ import annotations

from dataclasses import dataclass

SPLITS = ("random", "popular", "adversarial")


@dataclass(frozen=True)
class Benchmark:
    """A benchmark: its name, its scoring rule, and how many questions it has in each category.

    Attributes
    ----------
    name, kind : str
        The rule is one of ``exact``, ``circular``, ``mcq``, ``mme``, ``pope``, ``vqa`` and ``judge``; the judge here
        is :class:`torino_lab.sheets.KeyWords`.
    parts : mapping of category to count
        Questions in each category; images for ``mme``, which asks two questions about each.
    """

    name: str
    kind: str
    parts: dict[str, int]


_NINE = (
    Benchmark(
        "Lab-GQA",
        "exact",
        {"cell": 90, "which": 60, "scene": 20, "shapes": 60, "where": 40, "shape": 40, "colour": 30},
    ),
    Benchmark("Lab-MMB", "circular", {"photo": 120, "cell": 70, "which": 25, "small": 45}),
    Benchmark("Lab-MMB-CN", "circular", {"photo": 120, "cell": 60, "small": 40}),
    Benchmark("Lab-MME", "mme", {"existence": 40, "action": 20, "cell": 40, "color": 30}),
    Benchmark("Lab-POPE", "pope", dict.fromkeys(SPLITS, 150)),
    Benchmark("Lab-SQA", "mcq", {"chart": 120, "diagram": 120}),
    Benchmark("Lab-TextVQA", "vqa", {"sign": 240}),
    Benchmark("Lab-VizWiz", "vqa", {"scene": 60, "doing": 60, "kind": 60, "colour": 40, "quality": 60}),
    Benchmark("Lab-MMVet", "judge", {"rec": 70, "rec,spat": 70, "math": 60}),
)
BENCHMARKS = {benchmark.name: benchmark for benchmark in _NINE}
