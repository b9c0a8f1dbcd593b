"""Recipes: what a reproduction needs, as JSON files in ``torino/data/recipes``.

A recipe names the model, the SAE, the benchmarks' files with their checksums, the methods and tiers, and the tables of
the paper to compare with. Counts and lengths of questions and answers serve the estimate only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any

from torino.core.errors import BadFile, BadParameter, unknown_name
from torino.core.io import is_file, read_json
from torino.core.schema import Bounds, Positive
from torino.evaluation.benchmarks import find_benchmark
from torino.evaluation.paper import PaperTable, paper_table

FOLDER = Path(__file__).parents[2] / "data" / "recipes"
FORMAT = "torino-recipe/1"
_MD5 = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class ModelSource:
    """The model on the hub.

    ``parameters`` are those of the language model, and ``image_flops`` the operations of tower and SAE for one image.
    """

    repository: str
    revision: str
    about_bytes: Positive
    parameters: Positive
    visual_tokens: Positive
    image_flops: Positive

    @property
    def name(self) -> str:
        """Hub name with revision, as ``--model`` takes it."""
        return f"{self.repository}@{self.revision}"


@dataclass(frozen=True)
class SAETraining:
    """How to train the SAE if the published one is not used."""

    tower: str
    block: int
    tokens: str
    images: Positive
    width: Positive
    expansion: Annotated[float, Bounds(0.001)]
    k: Positive
    steps: Positive
    batch: Positive
    aux: float


@dataclass(frozen=True)
class SAESource:
    """The published SAE; ``source`` is a folder in a hub repository."""

    label: str
    source: str
    about_bytes: Positive
    training: SAETraining


@dataclass(frozen=True)
class TaskSource:
    """The file of a benchmark.

    ``bytes`` is its exact size if known, else ``about_bytes`` estimates it. ``groups`` counts what ``--limit`` counts:
    questions with their rotations, or images of MME.
    """

    task: str
    file: str
    url: str
    md5: str
    questions: Positive
    images: Positive
    question_tokens: Positive
    answer_tokens: Positive
    bytes: Positive | None = None
    about_bytes: Positive | None = None
    groups: Positive | None = None

    @property
    def size(self) -> int:
        """Size of the file, exact or estimated."""
        return self.bytes or self.about_bytes or 0

    def limited(self, limit: int | None) -> TaskSource:
        """Return the counts of a random selection of at most ``limit`` groups."""
        groups = self.groups or self.questions
        if limit is None or limit >= groups:
            return self
        return replace(
            self, questions=max(1, round(self.questions * limit / groups)), images=min(self.images, limit), groups=limit
        )


@dataclass(frozen=True)
class Recipe:
    """A reproduction of tables of the paper; the settings are those of ``torino eval``."""

    format: str
    name: str
    title: str
    tables: list[str]
    model: ModelSource
    sae: SAESource
    tasks: list[TaskSource]
    methods: list[str]
    kd: str
    budget: str
    budget_kd: str
    seeds: Positive
    prompts: str
    padding: str
    positions: str
    attention: str
    dtype: str
    max_new_tokens: Positive
    batch: Positive
    notes: list[str] = field(default_factory=list[str])

    def paper_tables(self) -> list[PaperTable]:
        """Return the tables to compare with."""
        return [paper_table(name) for name in self.tables]

    def select(self, names: Sequence[str]) -> Recipe:
        """Return the recipe with some of its tasks, in its own order."""
        known = {source.task: source for source in self.tasks}
        chosen: set[str] = set()
        for name in names:
            benchmark = find_benchmark(name)
            if benchmark is None or benchmark.name not in known:
                raise unknown_name(f"task of the recipe {self.name}", name, known)
            chosen.add(benchmark.name)
        if not chosen:
            raise BadParameter(f"--tasks is empty. The recipe has {', '.join(known)}.")
        return replace(self, tasks=[source for source in self.tasks if source.task in chosen])


def recipe_names() -> list[str]:
    """Return the names of the recipes that ship with torino."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def load_recipe(name: str) -> Recipe:
    """Load a recipe by name, or from a JSON file.

    Examples
    --------
    >>> recipe = load_recipe("llava-1.5-7b")
    >>> len(recipe.tasks), sum(source.questions for source in recipe.tasks)
    (9, 40291)
    """
    if name.endswith(".json"):
        if not is_file(Path(name)):
            raise BadFile(f"There is no recipe {name}. Recipes of torino: {', '.join(recipe_names())}.")
        path = Path(name)
    elif name in recipe_names():
        path = FOLDER / f"{name}.json"
    else:
        raise unknown_name("recipe", name, recipe_names())
    fix = "Fix the recipe, or use one of torino."
    content = read_json(path, Recipe, version=FORMAT, fix=fix)
    training = _build(path, SAETraining, content["sae"]["training"])
    recipe = _build(
        path,
        Recipe,
        content
        | {
            "model": _build(path, ModelSource, content["model"]),
            "sae": _build(path, SAESource, content["sae"] | {"training": training}),
            "tasks": [_build(path, TaskSource, source) for source in content["tasks"]],
        },
    )
    for source in recipe.tasks:
        benchmark = find_benchmark(source.task)
        stem = Path(source.file).stem
        if benchmark is None or benchmark.name != source.task or find_benchmark(stem) is not benchmark:
            raise BadFile(f"{path}: {source.file} is not a file of a benchmark called {source.task!r}. {fix}")
        if source.file != f"{stem}.tsv" or Path(source.file).name != source.file or not _MD5.fullmatch(source.md5):
            raise BadFile(f"{path}: {source.file!r} must be the name of a .tsv file, with its MD5. {fix}")
    recipe.paper_tables()
    return recipe


def _build(path: Path, kind: Any, values: Mapping[str, Any]) -> Any:
    """Create an object from values whose types are already checked; refuse unknown fields."""
    known = {item.name for item in fields(kind)}
    for name in values:
        if name not in known:
            raise BadFile(f"{path}: the field {name!r} is unknown; accepted are {', '.join(sorted(known))}.")
    return kind(**values)
