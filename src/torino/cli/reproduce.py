"""``torino reproduce``: fetch model, SAE and benchmarks, run the paper's protocol, and compare with its tables."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from torino.cli import activations as _activations
from torino.cli import eval as _eval
from torino.cli import report as _report
from torino.cli import train as _train
from torino.cli._common import (
    DeviceOption,
    DtypeChoice,
    errors,
    examples,
    parse_shard,
    split_list,
    warn,
)
from torino.cli._progress import progress
from torino.cli._reproduction import ReproductionPlan, eval_options, print_comparison, print_text
from torino.cli._stop import on_stop
from torino.core.errors import BadParameter, TorinoError, Unreachable

if TYPE_CHECKING:
    from torino.evaluation.reproduction.comparison import Comparison
    from torino.evaluation.reproduction.plan import StateFile

EPILOG = examples(
    "torino reproduce llava-1.5-7b --dry-run --gpu A100 --price-per-hour 1.80",
    "torino reproduce llava-1.5-7b --yes -o llava",
    "torino reproduce llava-1.5-7b --tasks POPE,GQA --limit 200 -o quick",
    "# with local files",
    "torino reproduce llava-1.5-7b --model ./llava --sae ./my-sae --data LMUData -o llava",
)


def reproduce(
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE", help="llava-1.5-7b, or a recipe as a .json file.", show_default=False)
    ],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="Folder for everything but the model. Default: reproduction-RECIPE."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print plan and estimate, and stop.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Start without asking.")] = False,
    model: Annotated[str | None, typer.Option(help="Another model: hub name, folder or model package.")] = None,
    sae: Annotated[str | None, typer.Option(help="Another SAE: folder, file or hub repository.")] = None,
    train_sae: Annotated[
        str | None,
        typer.Option(
            metavar="IMAGES",
            help="Train the SAE with the recipe's settings on these images, as torino train; the paper: ImageNet-1K.",
        ),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Folder of the TSV files; missing ones are downloaded to it. Default: in -o.")
    ] = None,
    tasks: Annotated[str | None, typer.Option(help="Some of the recipe's tasks, separated by commas.")] = None,
    methods: Annotated[str | None, typer.Option(help="Other methods, as for torino eval.")] = None,
    kd: Annotated[str | None, typer.Option("--kd", help="Other dynamic tiers, as for torino eval, or 'none'.")] = None,
    budget: Annotated[str | None, typer.Option(help="Other fixed budgets, separated by commas, or 'none'.")] = None,
    seeds: Annotated[int | None, typer.Option(help="Runs of methods that draw at random.", min=1)] = None,
    limit: Annotated[int | None, typer.Option(help="Questions per task, drawn at random.", min=1)] = None,
    batch: Annotated[int | None, typer.Option(help="Answers that are generated together.", min=1)] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="Longest answer (default: the recipe's).", min=1)] = None,
    shard: Annotated[str, typer.Option(help="i/n: answer the i-th of n parts of the questions.")] = "1/1",
    retry: Annotated[bool, typer.Option("--retry", help="Retry failed samples.")] = False,
    device: DeviceOption = "auto",
    dtype: Annotated[DtypeChoice | None, typer.Option(help="Default: float32 on the CPU, else the recipe's.")] = None,
    gpu: Annotated[
        str | None, typer.Option(help="GPU of the estimate, such as A100 (default: this machine's).")
    ] = None,
    price_per_hour: Annotated[
        float | None, typer.Option(min=0.0, help="Price of an hour of the machine, for the estimate.")
    ] = None,
) -> None:
    """Reproduce a table of the paper: download, train or load the SAE, evaluate, and compare with the printed figures.

    Plan, time and cost are printed first. Every step resumes: run the same command again after an interruption.
    """
    from torino.evaluation.reproduction import plan as planning
    from torino.evaluation.reproduction.recipe import load_recipe

    if sae is not None and train_sae is not None:
        raise BadParameter("Give --sae or --train-sae, not both.")
    parse_shard(shard)
    original = load_recipe(recipe)
    chosen = original if tasks is None else original.select(split_list(tasks))
    folders = planning.plan_folders(original, output, data)
    on_cpu = device.startswith("cpu")
    given = {"model": model, "sae": sae, "train_sae": train_sae, "methods": methods, "kd": kd, "budget": budget}
    given |= {"tasks": None if tasks is None else ",".join(source.task for source in chosen.tasks)}
    given |= {"seeds": seeds, "limit": limit, "dtype": dtype or ("float32" if on_cpu else None)}
    given |= {"max_new_tokens": max_new_tokens}
    plan = ReproductionPlan(
        chosen,
        folders,
        eval_options(chosen, folders, given, batch, shard, retry, device),
        train_sae=train_sae,
        changes=planning.list_changes(original, given),
        price=price_per_hour,
    )
    fixed = ("model", "sae", "train_sae", "tasks", "limit", "dtype", "max_new_tokens")
    state = planning.open_state(folders.output, original, {name: given[name] for name in fixed})
    problems = plan.prepare(device, gpu, check_hub=not dry_run)
    plan.print_plan()
    if dry_run:
        for text in problems:
            warn(text)
        return
    if problems:
        raise TorinoError(problems[0])
    _confirm(yes)
    _run(plan, state)


def _run(plan: ReproductionPlan, state: StateFile) -> None:
    """Do all steps; those that are done return quickly."""
    from torino.evaluation.reproduction.plan import finish_step, write_state

    output = plan.folders.output
    on_stop("Run the same command again to continue.")
    write_state(output, state)  # first, so that an interrupted download is known as one
    _download_data(plan)
    finish_step(output, state, "data", folder=str(plan.folders.data))
    if plan.needs_model:
        from torino.evaluation.reproduction.machine import download_model

        print_text(f"Model: {plan.options['model']}")
        download_model(plan.options["model"])
    finish_step(output, state, "model", name=plan.options["model"])
    if plan.options["sae"]:
        _get_sae(plan)
    finish_step(output, state, "sae", source=plan.options["sae"])
    print_text(f"Evaluation: {plan.folders.run}")
    _eval.evaluate(**plan.options)
    finish_step(output, state, "evaluation", folder=str(plan.folders.run))
    comparison = _compare(plan)
    finish_step(output, state, "report", folder=str(plan.folders.report), verdict=comparison["verdict"])


def _download_data(plan: ReproductionPlan) -> None:
    """Download missing files, and check those that torino has downloaded."""
    from torino.core.verified import VerifiedFiles
    from torino.evaluation.reproduction.download import REMOVE, check_file, download

    folder = plan.folders.data
    verified = VerifiedFiles(folder)
    with progress(errors) as update:
        for source in plan.recipe.tasks:
            path = folder / source.file
            if path.is_file():
                if plan.folders.owns_data:
                    verified.check(path, lambda path=path, md5=source.md5: check_file(path, md5, REMOVE))
                continue
            print_text(f"Data: {source.url}")
            download(
                source.url,
                path,
                md5=source.md5,
                size=source.bytes,
                progress=lambda done, total, file=source.file: update(file, done, total or done),
            )
    verified.save()


def _get_sae(plan: ReproductionPlan) -> None:
    """Train the SAE, or fetch the published one."""
    if plan.train_sae is not None:
        training = plan.recipe.sae.training
        print_text(f"Activations: {plan.folders.activations}")
        _activations.activations(
            plan.folders.activations,
            tower=training.tower,
            images=plan.train_sae,
            tokens=training.tokens,
            block=training.block,
            device=plan.options["device"],
        )
        print_text(f"SAE: {plan.folders.sae}")
        _train.train(
            plan.folders.sae,
            plan.folders.activations,
            objective="matryoshka",
            expansion=training.expansion,
            k=training.k,
            steps=training.steps,
            batch=training.batch,
            aux=training.aux,
            device=plan.options["device"],
        )
    elif plan.needs_sae:
        from torino.sae.formats.locate import locate

        print_text(f"SAE: {plan.recipe.sae.source}")
        try:
            locate(plan.recipe.sae.source)
        except Unreachable as error:
            raise Unreachable(
                f"{error} Or give another SAE with --sae, or train one with the paper's settings with --train-sae "
                "IMAGES."
            ) from error


def _compare(plan: ReproductionPlan) -> Comparison:
    """Write the report and the comparison with the paper, and print the latter."""
    from torino.core.io import write_atomic, write_json
    from torino.core.text import printable
    from torino.evaluation.reporting.scores_file import SCORES, read_scores
    from torino.evaluation.reproduction.comparison import compare_with_paper, to_markdown

    folder = plan.folders.report
    _report.report(plan.folders.run, against=f"paper:{','.join(plan.recipe.tables)}", output=folder)
    comparison = compare_with_paper(
        read_scores(folder / SCORES),
        plan.recipe.paper_tables(),
        recipe=plan.recipe.name,
        changes=plan.changes,
        notes=plan.recipe.notes,
    )

    def write(target: Path) -> None:
        target.write_text(printable(to_markdown(comparison)), encoding="utf-8")

    write_atomic(folder / "comparison.md", write)
    write_json(folder / "comparison.json", comparison, sealed=True)
    print_comparison(comparison)
    for name in ("comparison.md", "comparison.json"):
        print_text(str(folder / name))
    return comparison


def _confirm(yes: bool) -> None:
    if yes:
        return
    if not sys.stdin.isatty():
        raise BadParameter("Nobody can be asked here: give --yes to start, or --dry-run to see plan and estimate only.")
    typer.confirm("Start?", abort=True)
