"""``torino eval``: run the paper's protocol over tasks and methods; a stopped run resumes."""

from __future__ import annotations

import warnings
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.markup import escape

from torino.cli._common import (
    NO_SAE,
    AllowOutsideOption,
    AttentionOption,
    ClipOption,
    DeviceOption,
    DtypeOption,
    ModelOption,
    PaddingOption,
    PositionsOption,
    check_sae_names,
    errors,
    examples,
    expand_methods,
    find_package,
    load_sae,
    load_session,
    memory_errors,
    named_methods,
    note,
    parse_budgets,
    parse_pairs,
    parse_shard,
    quiet_transformers,
    reads_concepts,
    split_list,
    warn,
)
from torino.cli._progress import progress
from torino.cli._stop import on_stop
from torino.core.errors import BadFile, BadParameter, TorinoError

if TYPE_CHECKING:
    from torino.evaluation.reporting.summary import Answers
    from torino.evaluation.results import Run
    from torino.evaluation.tasks import Task

EPILOG = examples(
    "torino eval --model llava-hf/llava-1.5-7b-hf --sae ./my-sae --tasks POPE,GQA,TextVQA --data LMUData -o runs/llava",
    "torino eval --model ./llava --sae ./my-sae --tasks POPE --methods torino-m,visionzip --limit 200 -o runs/quick",
    "# several machines: run 1/4 to 4/4, then the same command again",
    "torino eval --model ./llava --sae ./my-sae --tasks POPE -o runs/llava --shard 1/4",
    "torino report runs/llava",
)


def evaluate(
    model: ModelOption,
    tasks: Annotated[
        str, typer.Option(help="Tasks separated by commas: GQA, MMBench_EN, …, or any .tsv or .jsonl file.")
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder of the run; an earlier run is resumed.")],
    data: Annotated[Path | None, typer.Option(help="Folder of the TSV files (default: $LMUData).")] = None,
    frames: Annotated[int | None, typer.Option(min=1, help="Frames to read of each video. Default: 8.")] = None,
    sae: Annotated[
        list[str] | None,
        typer.Option(
            callback=check_sae_names, help="SAE as path or label=path, several allowed; 'none' runs without one."
        ),
    ] = None,
    methods: Annotated[
        str,
        typer.Option(
            help="Methods separated by commas, optionally with options in brackets; 'all', or 'none' for the baseline."
        ),
    ] = "all",
    kd: Annotated[
        str | None,
        typer.Option(
            "--kd", help="Pairs k,delta of dynamic TORINO, separated by spaces, or 'none' (default: 3,3 2,2 1,1)."
        ),
    ] = None,
    budget: Annotated[str, typer.Option(help="Fixed budgets separated by commas, or 'none'.")] = "192,128,64",
    budget_kd: Annotated[
        str,
        typer.Option(
            "--budget-kd",
            help="k,delta of TORINO at the fixed budgets: one pair, or one per budget (the paper: '3,3 2,2 1,1').",
        ),
    ] = "2,2",
    matched: Annotated[
        bool, typer.Option(help="Run all methods at the mean lengths of dynamic TORINO, or TORINO alone.")
    ] = True,
    seeds: Annotated[int, typer.Option(help="Runs of methods that draw at random.", min=1)] = 3,
    limit: Annotated[int | None, typer.Option(help="Questions per task, drawn at random.", min=1)] = None,
    prompts: Annotated[
        Literal["auto", "plain", "standard", "vlmevalkit", "llava"],
        typer.Option(
            help="How questions are written; plain: as they are. auto: as the task says, else the model, else standard."
        ),
    ] = "auto",
    padding: PaddingOption = "crop",
    positions: PositionsOption = "auto",
    attention: AttentionOption = "auto",
    clip: ClipOption = None,
    batch: Annotated[int, typer.Option(help="Answers to one question that are generated together.", min=1)] = 8,
    max_new_tokens: Annotated[
        int | None, typer.Option(help="Longest answer (default: 32, or 256 where a judge grades).", min=1)
    ] = None,
    shard: Annotated[str, typer.Option(help="i/n: do the i-th of n parts of the work.")] = "1/1",
    on_error: Annotated[
        Literal["skip", "stop"], typer.Option(help="skip: record a failing sample and continue; or stop.")
    ] = "skip",
    retry: Annotated[bool, typer.Option("--retry", help="Retry failed samples.")] = False,
    save_images: Annotated[int, typer.Option(help="Images per task saved for torino plot.", min=0)] = 0,
    allow_outside: AllowOutsideOption = False,
    device: DeviceOption = "auto",
    dtype: DtypeOption = None,
) -> None:
    """Evaluate reduction methods on benchmarks with the paper's protocol.

    Dynamic TORINO runs first; then every method runs at the mean number of tokens that it kept, and at fixed budgets.
    The tower encodes each image once for all methods. Answers are recorded as they come: a stopped run resumes with
    the same command.
    """
    part = parse_shard(shard)
    if output.exists() and not output.is_dir():
        raise BadFile(f"--output {output} is a file. Give a folder for the run.")
    fixed, dynamic = parse_budgets("--budget", budget), None if kd is None else parse_pairs(kd)
    fixed_pairs = parse_pairs(budget_kd, "--budget-kd")
    words = split_list(methods)
    from torino.evaluation.engine import check_reducers
    from torino.evaluation.protocol import KD_METHODS, KD_PAIRS
    from torino.evaluation.reporting.summary import group_answers
    from torino.evaluation.runner import RunPlan
    from torino.evaluation.runner import evaluate as run_evaluation
    from torino.vlm.loading import check_model

    check_model(model)
    package = find_package(model)
    if not sae and package is not None and package.sae is not None:
        sae = [model]
    names, specs, notes = expand_methods(words, sae=bool(sae), clip=clip is not None)
    for text in notes:
        note(text)
    opened = _open_tasks(split_list(tasks), data, prompts, limit, allow_outside, frames)
    saes = _load_saes(sae or [], any(reads_concepts(word) for word in [*names, *specs]), device)
    if dynamic is None:
        dynamic = list(KD_PAIRS) if set(names) & set(KD_METHODS) else []
    plan = RunPlan(names, specs, dynamic, fixed, seeds, matched, fixed_pairs)
    # Refuse what cannot be evaluated before a large model is loaded.
    reducers = {setting.id: setting.reducer(saes) for setting in plan.first_settings(list(saes))}
    check_reducers(reducers, has_text_query=clip is not None)
    with quiet_transformers(), memory_errors(model, device), warnings.catch_warnings():
        with errors.status(f"Loading {escape(model)} …"):
            vlm = load_session(model, device, dtype, padding, positions, attention, clip)
        on_stop(f"Run the same command again to continue; the answers so far are in {output}.")
        with progress(errors) as report:
            run = run_evaluation(
                output,
                vlm=vlm,
                tasks=opened,
                plan=plan,
                saes=saes,
                model_name=model,
                batch=batch,
                limit=limit,
                max_new_tokens=None if max_new_tokens is None else {task.name: max_new_tokens for task in opened},
                shard=part,
                on_error=on_error,
                retry=retry,
                save_images=save_images,
                arguments={
                    "methods": methods,
                    "kd": " ".join(f"{k},{delta}" for k, delta in dynamic) or "none",
                    "budget": budget,
                    "budget_kd": budget_kd,
                    "matched": matched,
                    "seeds": seeds,
                    "sae": sae,
                },
                progress=report,
            )
    _report_failures(run)
    errors.print(
        escape(f"{len(run.settings)} settings on {len(opened)} tasks in {output}. Next: torino report {output}"),
        soft_wrap=True,
        highlight=False,
    )
    answers = group_answers(run)
    _report_implausible(run, opened, answers)
    _check_answered(run, named_methods(words), answers)


def _open_tasks(
    names: list[str], data: Path | None, prompts: Any, limit: int | None, allow_outside: bool, frames: int | None
) -> list[Task]:
    from torino.evaluation.tasks import open_task

    opened = [open_task(name, data, prompts=prompts, allow_outside=allow_outside, frames=frames) for name in names]
    for task in opened:
        for problem in task.problems[:3]:
            errors.print(escape(f"{task.name}: {problem}"), style="yellow", highlight=False)
        if len(task.problems) > 3:
            text = f"{task.name}: {len(task.problems)} rows were skipped in total."
            errors.print(escape(text), style="yellow", highlight=False)
    return opened if limit is None else [task.take(limit, seed=0) for task in opened]


def _report_failures(run: Run) -> None:
    """Print how many answers failed, and the most frequent reason."""
    failed = Counter(str(row["error"]) for row in run.rows() if "error" in row)
    if not failed:
        return
    from torino.evaluation.results import PROBLEMS

    reason, times = failed.most_common(1)[0]
    text = f"{failed.total():,} answers failed, see {run.folder / PROBLEMS}. {times:,} of them: {reason} "
    text += "Run the same command with --retry to ask them again."
    errors.print(escape(text), style="yellow", highlight=False, soft_wrap=True)


def _report_implausible(run: Run, tasks: list[Task], answers: Answers) -> None:
    """Print what makes the scores of the run meaningless, last, so that it is not overlooked."""
    from torino.evaluation.plausibility import find_implausible

    opened = {task.name: task for task in tasks}
    for item in find_implausible(run, opened, lambda task, setting: answers.get((task, setting), ())):
        warn(item.text)


def _check_answered(run: Run, named: list[str], answers: Answers) -> None:
    """Refuse a run in which all tokens, or a method that was named, answered no question."""
    failed: dict[str, str] = {}
    for setting in run.settings.values():
        rows = [row for task in run.tasks for row in answers.get((task, setting.id), ())]
        if rows and setting.method in ("full", *named) and all("error" in row for row in rows):
            failed[setting.id] = str(rows[0]["error"])
    if failed:
        first, *others = failed
        more = f", and {len(others)} more" if others else ""
        raise TorinoError(
            f"{first}{more} answered no question: {failed[first]} All other answers are kept in {run.folder}."
        )


def _load_saes(given: list[str], needed: bool, device: str) -> dict[str, Any]:
    """Load the SAEs by label, in the order given."""
    from torino.core.device import resolve_device

    if needed and not given:
        raise BadParameter(
            "Some of the methods read concepts and need an SAE: give --sae, or --sae none to run without one, or "
            "choose other --methods."
        )
    saes: dict[str, Any] = {}
    for item in given:
        label, equals, path = item.partition("=")
        if not equals:
            label, path = (NO_SAE, NO_SAE) if item == NO_SAE else (Path(item).name or item, item)
        if label in saes:
            raise BadParameter(f"Two SAEs are called {label!r}. Write label=path to distinguish them.")
        saes[label] = load_sae(path, device=resolve_device(device))
    return saes
