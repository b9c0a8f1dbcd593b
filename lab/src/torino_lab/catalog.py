"""List the lab's benchmarks: names, scoring rules and sources. Cheap to import."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LabTask:
    """The name, scoring rule and source of a benchmark.

    Attributes
    ----------
    name, kind : str
        The scoring rule is one of torino's (:data:`torino.evaluation.benchmarks.Kind`).
    files : tuple of str
        Parquet files without their ending, all of photos that nothing was trained on.
    sources : tuple of str
        Questions of these origins are used; a name matches what it begins.
    parts : mapping of category to count
        Of generated benchmarks: questions in each category.
    """

    name: str
    kind: str
    files: tuple[str, ...]
    sources: tuple[str, ...] = ()
    parts: dict[str, int] | None = None


_ALL = (
    LabTask("Lab-POPE", "pope", ("pope-dev",), ("pope",)),
    LabTask("Lab-VQAv2", "vqa", ("cocovqa-dev",), ("vqa2",)),
    LabTask("Lab-OKVQA", "vqa", ("cocovqa-dev", "cococap-dev"), ("okvqa",)),
    LabTask("Lab-VSR", "yes-no", ("cocovqa-dev", "cococap-dev"), ("vsr",)),
    LabTask("Lab-DAQUAR", "vqa", ("daquar-dev",), ("daquar",)),
    LabTask("Lab-Text", "vqa", ("scenetext-dev",), ("icdar15",)),
    LabTask("Lab-Captions", "caption", ("cococap-dev", "flickr8k-dev")),
    LabTask("Lab-Collage", "exact", ("flickr8k-dev",), parts={"cell": 160, "which": 80, "presence": 160, "scene": 60}),
    LabTask("Lab-Small", "exact", ("flickr8k-dev",), parts={"where": 80, "shape": 80, "color": 80, "presence": 80}),
    LabTask("Lab-Signs", "exact", ("flickr8k-dev",), parts={"read": 160, "presence": 160}),
    LabTask(
        "Lab-Clips",
        "exact",
        ("flickr8k-dev",),
        parts={"presence": 80, "order": 80, "count": 60, "when": 80, "appear": 60, "shapes": 60, "pan": 40},
    ),
)
TASKS = {benchmark.name: benchmark for benchmark in _ALL}
