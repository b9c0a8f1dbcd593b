"""List the lab's nine benchmarks: names, scoring rules and sizes. Cheap to import."""

from __future__ import annotations

from dataclasses import dataclass

SPLITS = ("random", "popular", "adversarial")


@dataclass(frozen=True)
class LabBenchmark:
    """The name, scoring rule and size of a benchmark.

    Attributes
    ----------
    name, kind : str
        The scoring rule is one of ``exact``, ``circular``, ``mcq``, ``mme``, ``pope``, ``vqa`` and ``judge``; ``judge``
        uses :class:`torino_lab.tables.KeywordGrader`.
    parts : mapping of category to count
        Questions in each category; images for ``mme``, which asks two questions about each.
    """

    name: str
    kind: str
    parts: dict[str, int]


_NINE = (
    LabBenchmark(
        "Lab-GQA",
        "exact",
        {"cell": 90, "which": 60, "scene": 20, "shapes": 60, "where": 40, "shape": 40, "colour": 30},
    ),
    LabBenchmark("Lab-MMB", "circular", {"photo": 120, "cell": 70, "which": 25, "small": 45}),
    LabBenchmark("Lab-MMB-CN", "circular", {"photo": 120, "cell": 60, "small": 40}),
    LabBenchmark("Lab-MME", "mme", {"existence": 40, "action": 20, "cell": 40, "color": 30}),
    LabBenchmark("Lab-POPE", "pope", dict.fromkeys(SPLITS, 150)),
    LabBenchmark("Lab-SQA", "mcq", {"chart": 120, "diagram": 120}),
    LabBenchmark("Lab-TextVQA", "vqa", {"sign": 240}),
    LabBenchmark("Lab-VizWiz", "vqa", {"scene": 60, "doing": 60, "kind": 60, "colour": 40, "quality": 60}),
    LabBenchmark("Lab-MMVet", "judge", {"rec": 70, "rec,spat": 70, "math": 60}),
)
BENCHMARKS = {benchmark.name: benchmark for benchmark in _NINE}
