"""Plan of ``torino reproduce``: checks of the machine, estimate, and what is printed before and after the run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

from torino.cli._common import (
    NO_SAE,
    errors,
    expand_methods,
    find_package,
    note,
    out,
    parse_budgets,
    parse_pairs,
    reads_concepts,
    split_list,
)
from torino.cli._progress import format_duration
from torino.core.errors import BadParameter, TorinoError

if TYPE_CHECKING:
    from torino.evaluation.reproduction.comparison import Comparison
    from torino.evaluation.reproduction.estimate import GPU, RunEstimate
    from torino.evaluation.reproduction.machine import SpaceNeeded
    from torino.evaluation.reproduction.plan import Folders
    from torino.evaluation.reproduction.recipe import Recipe, TaskSource

JUDGE_TASK = "MMVet"


@dataclass
class ReproductionPlan:
    """What a reproduction does, needs and costs; ``options`` are those of ``torino eval``."""

    recipe: Recipe
    folders: Folders
    options: dict[str, Any]
    train_sae: str | None
    changes: list[str]
    price: float | None
    tasks: list[TaskSource] | None = None
    estimate: RunEstimate | None = None
    gpu: GPU | None = None
    settings: int = 0
    model_bytes: int = 0

    @property
    def needs_model(self) -> bool:
        """Whether the model is on the hub."""
        model = self.options["model"]
        return not Path(model).is_dir() and find_package(model) is None

    @property
    def needs_sae(self) -> bool:
        """Whether the published SAE is used."""
        return self.options["sae"] == [f"{self.recipe.sae.label}={self.recipe.sae.source}"]

    def missing_files(self) -> list[TaskSource]:
        """Return the benchmarks whose files are not there."""
        return [source for source in self.recipe.tasks if not (self.folders.data / source.file).is_file()]

    # ------------------------------------------------------------------ checks and estimate

    def prepare(self, device: str, gpu: str | None, *, check_hub: bool) -> list[str]:
        """Check the machine and estimate the run; return what is wrong."""
        from torino.evaluation.reproduction import estimate, machine, plan
        from torino.evaluation.results import RUN, open_run
        from torino.evaluation.runner import RunPlan

        recipe, options = self.recipe, self.options
        if self.folders.data.exists() and not self.folders.data.is_dir():
            raise BadParameter(f"--data {self.folders.data} is a file. Give a folder.")
        self._check_sources()
        names, specs, notes = expand_methods(split_list(options["methods"]), sae=True, clip=False)
        for text in notes:
            note(text)
        kd, budgets = parse_pairs(options["kd"]), parse_budgets("--budget", options["budget"])
        pairs = parse_pairs(options["budget_kd"])
        run_plan = RunPlan(names, specs, kd, budgets, options["seeds"], fixed_pairs=pairs)
        if not any(reads_concepts(word) for word in [*names, *specs]):
            options["sae"] = None
        tables = recipe.paper_tables()
        phases = estimate.plan_phases(run_plan, recipe.sae.label, tables, recipe.model.visual_tokens)
        self.settings = sum(map(len, phases))
        processor, problem = machine.find_device(device)
        problems = [] if problem is None else [problem]
        self.gpu = self._find_gpu(gpu, processor)
        if not self.folders.owns_data:
            with errors.status("Checking the data …"):
                other = plan.find_other_files(recipe.tasks, self.folders.data)
            if other:
                self.changes.append(f"files in {self.folders.data} whose MD5 is another one: {', '.join(other)}")
        self.tasks = [plan.count_questions(source, self.folders.data, options["limit"]) for source in recipe.tasks]
        self.estimate = estimate.estimate_run(self.tasks, phases, tables, recipe.model, options["batch"], self.gpu)
        if (self.folders.run / RUN).is_file():
            rest = estimate.estimate_rest(self.tasks, self.settings, open_run(self.folders.run))
            self.estimate = rest or self.estimate
        if options["model"] == recipe.model.name:
            weights = machine.check_memory(device, 2 * recipe.model.parameters)
            problems += [] if weights is None else [weights]
        if self.needs_model:
            self.model_bytes = self._model_bytes(check_hub, problems)
        space = machine.check_space(self._space())
        return [*problems, *([] if space is None else [space])]

    def _check_sources(self) -> None:
        """Refuse a model or SAE that can be neither local nor on the hub, before anything is downloaded."""
        from torino.sae.formats.locate import locate
        from torino.vlm.loading import check_model

        check_model(self.options["model"])
        sae = self.options["sae"][0].partition("=")[2]
        on_hub = not Path(sae).exists() and re.match(r"\w[\w.-]*/\w", sae)
        if self.train_sae is None and not on_hub and sae not in (NO_SAE, "example") and find_package(sae) is None:
            locate(sae)

    def _model_bytes(self, check_hub: bool, problems: list[str]) -> int:
        """Return how much of the model is to be downloaded: asked of the hub, or estimated."""
        from torino.evaluation.reproduction import machine

        if not check_hub:
            return 0 if machine.is_cached(self.options["model"]) else self.recipe.model.about_bytes
        try:
            return machine.missing_bytes(self.options["model"])
        except TorinoError as error:
            problems.append(str(error))
            return self.recipe.model.about_bytes

    def _find_gpu(self, name: str | None, processor: str) -> GPU:
        from torino.evaluation.reproduction import estimate

        if name is None and processor == "CPU":
            return estimate.CPU
        found = estimate.find_gpu(name or processor)
        if found is None and name is not None:
            known = ", ".join(item.name for item in estimate.GPUS)
            raise BadParameter(f"--gpu {name} is not a known GPU. Known: {known}.")
        if found is None:
            note(f"The speed of {processor} is not known: the estimate is for an {estimate.DEFAULT_GPU}.")
        found = found or estimate.find_gpu(estimate.DEFAULT_GPU)
        assert found is not None
        return found

    def _space(self) -> list[SpaceNeeded]:
        """Return what will be written where."""
        from torino.evaluation.reproduction.estimate import BYTES_PER_ANSWER
        from torino.evaluation.reproduction.machine import SpaceNeeded, hub_cache

        assert self.estimate is not None
        training = self.recipe.sae.training
        activations = 2 * training.images * training.width if self.train_sae is not None else 0
        needs = [
            SpaceNeeded(self.folders.data, sum(source.size for source in self.missing_files()), "benchmarks"),
            SpaceNeeded(self.folders.output, self.estimate.answers * BYTES_PER_ANSWER, "answers"),
            SpaceNeeded(self.folders.output, activations, "activations"),
        ]
        if self.needs_model or self.needs_sae:
            sae = self.recipe.sae.about_bytes if self.needs_sae else 0
            needs += [SpaceNeeded(hub_cache(), self.model_bytes, "model"), SpaceNeeded(hub_cache(), sae, "SAE")]
        return needs

    def print_plan(self) -> None:
        """Print what will run, where it differs from the recipe, and how long it takes."""
        assert self.tasks is not None
        assert self.estimate is not None
        recipe, options = self.recipe, self.options
        questions = sum(source.questions for source in self.tasks)
        sae = options["sae"][0].partition("=")[2] if options["sae"] else "none"
        if self.train_sae is not None:
            sae = f"trained on {self.train_sae}"
        facts = {
            "recipe": recipe.title,
            "model": options["model"],
            "SAE": sae,
            "tasks": f"{', '.join(source.task for source in self.tasks)} ({questions:,} questions)",
            "methods": options["methods"],
            "tiers": f"(k, δ) {options['kd']}; budgets {options['budget']}",
            "settings": f"{self.settings}, {self.settings * questions:,} answers",
            "output": str(self.folders.output),
        }
        table = Table(box=None, show_header=False, pad_edge=False)
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in facts.items():
            table.add_row(f"[bold]{name}[/]", escape(value))
        out.print(table, highlight=False)
        for text in self.changes:
            note(f"Not the recipe: {text}.")
        for text in recipe.notes:
            note(text)
        self._print_judge()
        self._print_estimate()
        out.print(f"[dim]{escape(format_command(options))}[/]", soft_wrap=True, highlight=False)

    def _print_judge(self) -> None:
        from torino.evaluation.judge import Judge

        assert self.tasks is not None
        judged = [source.questions for source in self.tasks if source.task == JUDGE_TASK]
        if not judged:
            return
        if Judge.from_environment() is None:
            note(
                f"{JUDGE_TASK} will be answered but not scored: no judge is set (TORINO_JUDGE_URL, TORINO_JUDGE_MODEL)."
            )
        else:
            note(
                f"The judge of {JUDGE_TASK} gets {judged[0] * self.settings:,} requests, which are not in the estimate."
            )

    def _print_estimate(self) -> None:
        """Print time and cost of each step."""
        from torino.evaluation.reproduction import estimate

        assert self.estimate is not None
        assert self.gpu is not None
        size = sum(source.size for source in self.missing_files()) + self.model_bytes
        size += self.recipe.sae.about_bytes if self.needs_sae else 0
        rows = [(f"download {size / 1e9:.1f} GB", "at 50 MB/s", size / estimate.DOWNLOAD_BYTES)]
        if self.train_sae is not None:
            training = self.recipe.sae.training
            seconds = estimate.estimate_training(training, self.recipe.model.image_flops, self.gpu)
            rows.append((f"SAE, {training.steps:,} steps", f"assumed, {self.gpu.name}", seconds))
        how = (
            "measured in this run"
            if self.estimate.measured
            else f"assumed speed of {self.gpu.name}; rough until answers are measured"
        )
        left = "remaining " if self.estimate.measured else ""
        rows.append((f"{self.estimate.answers:,} {left}answers", how, self.estimate.seconds))
        total = sum(seconds for _, _, seconds in rows)
        table = Table(box=None, pad_edge=False)
        table.add_column("Estimate")
        table.add_column("")
        table.add_column("Time", justify="right")
        if self.price is not None:
            table.add_column("Cost", justify="right")
        for label, how, seconds in [*rows, ("total", "", total)]:
            cost = [] if self.price is None else [f"{self.price * seconds / 3600:.2f}"]
            table.add_row(escape(label), escape(how), format_duration(seconds), *cost)
        out.print(table, highlight=False)


def eval_options(
    recipe: Recipe,
    folders: Folders,
    given: Mapping[str, Any],
    batch: int | None,
    shard: str,
    retry: bool,
    device: str,
) -> dict[str, Any]:
    """Return the options of ``torino eval``: the recipe's, unless others are given."""
    from torino.evaluation.protocol import KD_METHODS
    from torino.evaluation.reproduction.plan import pair_budgets

    budget = str(given["budget"] or recipe.budget)
    methods = str(given["methods"] or ",".join(recipe.methods))
    runs_torino = any(word.partition("(")[0] in (*KD_METHODS, "all") for word in split_list(methods))
    source = given["sae"] or (str(folders.sae) if given["train_sae"] else recipe.sae.source)
    return {
        "model": given["model"] or recipe.model.name,
        "tasks": ",".join(Path(source.file).stem for source in recipe.tasks),
        "output": folders.run,
        "data": folders.data,
        "sae": [f"{recipe.sae.label}={source}"],
        "methods": methods,
        "kd": given["kd"] or (recipe.kd if runs_torino else "none"),
        "budget": budget,
        "budget_kd": pair_budgets(recipe, budget),
        "seeds": given["seeds"] or recipe.seeds,
        "limit": given["limit"],
        "prompts": recipe.prompts,
        "padding": recipe.padding,
        "positions": recipe.positions,
        "attention": recipe.attention,
        "batch": batch or recipe.batch,
        "max_new_tokens": given["max_new_tokens"] or recipe.max_new_tokens,
        "shard": shard,
        "retry": retry,
        "device": device,
        "dtype": given["dtype"] or recipe.dtype,
    }


def format_command(options: Mapping[str, Any]) -> str:
    """Return the command of ``torino eval`` with these options."""
    words = ["torino", "eval"]
    for name, value in options.items():
        values = value if isinstance(value, list) else [value]
        if value is True:
            words.append(f"--{name.replace('_', '-')}")
        elif value is not None and value is not False:
            words += [part for item in values for part in (f"--{name.replace('_', '-')}", str(item))]
    return shlex.join(words)


def print_comparison(comparison: Comparison) -> None:
    """Print ours, the paper's and the difference of each method, one table per tier."""
    from torino.evaluation.reproduction.comparison import LEGEND, table_lines

    columns = comparison["columns"]
    for tier in comparison["tiers"]:
        table = Table(box=None, pad_edge=False, title=escape(tier["heading"]), title_justify="left")
        for number, heading in enumerate(["Method", "Tokens", *columns.values()]):
            table.add_column(escape(heading), justify="right" if number else "left", no_wrap=True)
        for line in table_lines(tier, columns):
            style = None if not line[0].startswith(" ") else "dim"
            table.add_row(*map(escape, line), style=style)
        out.print(table, highlight=False, soft_wrap=True)
        out.print()
    for text in [*comparison["verdict"], LEGEND]:
        print_text(text)
    if comparison["changes"]:
        note(f"This is not the recipe: {len(comparison['changes'])} changes are listed in comparison.md.")


def print_text(text: str) -> None:
    """Print a line without markup."""
    out.print(escape(text), highlight=False, soft_wrap=True)
