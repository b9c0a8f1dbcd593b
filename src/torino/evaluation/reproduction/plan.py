"""Plan a reproduction: the recipe with the user's changes, its data files, and the state of an output folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypedDict

from torino.core.checks import expand_path
from torino.core.errors import BadParameter
from torino.core.io import read_json, write_json
from torino.evaluation.protocol import FIXED_PAIR
from torino.evaluation.reproduction.download import md5_of
from torino.evaluation.reproduction.recipe import Recipe, TaskSource
from torino.evaluation.tasks import open_task
from torino.version import __version__

STATE, FORMAT = "reproduction.json", "torino-reproduction/1"


class StateFile(TypedDict):
    """Contents of ``reproduction.json``."""

    options: dict[str, Any]
    steps: dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Folders:
    """The folders of a reproduction; ``data`` may be one of the user's."""

    output: Path
    data: Path

    @property
    def owns_data(self) -> bool:
        """Whether the data is in the output folder, so that every file in it must be that of the recipe."""
        return self.data == self.output / "data"

    @property
    def run(self) -> Path:
        """Folder of the run of ``torino eval``."""
        return self.output / "run"

    @property
    def sae(self) -> Path:
        """Folder of the SAE, if one is trained."""
        return self.output / "sae"

    @property
    def activations(self) -> Path:
        """Folder of the activations that the SAE is trained on."""
        return self.output / "activations"

    @property
    def report(self) -> Path:
        """Folder of the report and the comparison."""
        return self.output / "report"


def plan_folders(recipe: Recipe, output: Path | None, data: Path | None) -> Folders:
    """Return the folders; the default output is ``reproduction-NAME`` in the working folder."""
    folder = expand_path(output or Path(f"reproduction-{recipe.name}"), "--output")
    return Folders(folder, folder / "data" if data is None else expand_path(data, "--data"))


def pair_budgets(recipe: Recipe, budget: str) -> str:
    """Return the pair (k, δ) of TORINO at each budget: that of the recipe, or the default for other budgets.

    Examples
    --------
    >>> from torino.evaluation.reproduction.recipe import load_recipe
    >>> pair_budgets(load_recipe("llava-1.5-7b"), "64,32")
    '1,1 2,2'
    """
    known = dict(zip(recipe.budget.split(","), recipe.budget_kd.split(), strict=True))
    default = ",".join(map(str, FIXED_PAIR))
    return " ".join(known.get(word.strip(), default) for word in budget.split(",")) if budget != "none" else default


def list_changes(recipe: Recipe, given: Mapping[str, Any]) -> list[str]:
    """Return what the user changed: one text for each option whose value is not that of the recipe."""
    own: dict[str, Any] = {
        "model": recipe.model.name,
        "sae": recipe.sae.source,
        "train_sae": None,
        "tasks": ",".join(source.task for source in recipe.tasks),
        "methods": ",".join(recipe.methods),
        "limit": None,
    } | {name: getattr(recipe, name) for name in ("kd", "budget", "seeds", "dtype", "max_new_tokens")}
    return [
        f"--{name.replace('_', '-')} {value} (recipe: {own[name] if own[name] is not None else 'not given'})"
        for name, value in given.items()
        if value is not None and name in own and str(value) != str(own[name])
    ]


def count_questions(source: TaskSource, folder: Path, limit: int | None) -> TaskSource:
    """Return the task with the number of its questions and images.

    The recipe has these numbers; a local file of another size than the recipe's is counted.
    """
    path = folder / source.file
    if not path.is_file() or path.stat().st_size == source.bytes:
        return source.limited(limit)
    task = open_task(path)
    task = task if limit is None else task.take(limit, seed=0)
    images = {tuple(image.key for image in sample.images) for sample in task}
    return replace(source, questions=len(task), images=len(images), groups=None)


def find_other_files(tasks: Sequence[TaskSource], folder: Path) -> list[str]:
    """Return the files of the user's folder that are not those of the recipe, by their MD5."""
    present = [source for source in tasks if (folder / source.file).is_file()]
    return [source.file for source in present if md5_of(folder / source.file) != source.md5]


def open_state(folder: Path, recipe: Recipe, options: Mapping[str, Any]) -> StateFile:
    """Read ``reproduction.json``; refuse to continue with another recipe or other options. Nothing is written."""
    path = folder / STATE
    fixed = {"recipe": asdict(recipe) | {"notes": []}} | dict(options)
    if not path.is_file():
        if folder.is_dir() and any(folder.iterdir()):
            raise BadParameter(f"{folder} contains other files. Give a new or empty folder with -o.")
        return {"options": fixed, "steps": {}}
    content = read_json(path, StateFile, version=FORMAT, fix="Start again in a new folder.")
    for name, value in fixed.items():
        if content["options"].get(name) != value:
            shown = (
                "another recipe" if name == "recipe" else f"--{name.replace('_', '-')} {content['options'].get(name)}"
            )
            raise BadParameter(
                f"The reproduction in {folder} was started with {shown}. Use the same to continue it, or another "
                "folder (-o)."
            )
    return {"options": content["options"], "steps": content["steps"]}


def finish_step(output: Path, state: StateFile, step: str, **facts: Any) -> None:
    """Record in ``reproduction.json`` that a step is done."""
    state["steps"][step] = facts | {"finished": datetime.now(UTC).isoformat(timespec="seconds")}
    write_state(output, state)


def write_state(output: Path, state: StateFile) -> None:
    """Write ``reproduction.json``."""
    write_json(output / STATE, {"format": FORMAT, "torino": __version__, **state}, sealed=True)
