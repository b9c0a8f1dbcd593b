"""The command ``torino eval``: the paper's protocol over tasks and methods, resumable."""

from __future__ import annotations

import warnings
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer
from rich.console import Console
from rich.markup import escape

from torino.cli._common import POSITIONS, open_sae, share_of_work, split_pairs, split_words
from torino.cli._progress import phase_bars
from torino.core.errors import BadFile, BadParameter

if TYPE_CHECKING:  # torch is only fetched by those who evaluate
    from torino.evaluation.results import Run
    from torino.vlm.adapters.base import Positions

errors = Console(stderr=True)
EPILOG = (
    "Examples: [cyan]torino eval --model llava-hf/llava-1.5-7b-hf --sae ./my-sae --tasks POPE,GQA,TextVQA "
    "--data LMUData -o runs/llava[/] · "
    "[cyan]torino eval --model ./llava --sae ./my-sae --tasks POPE --methods torino-m,visionzip,random --limit 200 "
    "-o runs/quick[/] · "
    "[cyan]torino eval … -o runs/llava --shard 1/4[/] and so on to 4/4, on as many machines, then the same command "
    "again · [cyan]torino report runs/llava[/]"
)


def evaluate(
    model: Annotated[str, typer.Option(help="Hub name or folder of a vision-language model.")],
    tasks: Annotated[
        str,
        typer.Option(help="Tasks, separated by commas: GQA, MMBench_EN, …, or any .tsv or .jsonl file."),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder of the run; one begun earlier goes on.")],
    data: Annotated[
        Path | None, typer.Option(help="Folder of the TSVs; by default LMUData of the environment.")
    ] = None,
    sae: Annotated[
        list[str] | None,
        typer.Option(help="SAE, as label=path or path; may be given more than once. 'none' is the no-SAE ablation."),
    ] = None,
    methods: Annotated[
        str, typer.Option(help="Methods, separated by commas, or 'all'; specs with brackets run as they are written.")
    ] = "all",
    dynamic: Annotated[
        str, typer.Option(help="Pairs k,delta of dynamic TORINO, separated by spaces; 'no' leaves these tiers out.")
    ] = "3,3 2,2 1,1",
    tiers: Annotated[
        str, typer.Option(help="Fixed budgets, separated by commas; 'no' leaves them out.")
    ] = "192,128,64",
    matched: Annotated[
        bool, typer.Option(help="Whether all methods get the mean lengths of dynamic TORINO too, or it is alone there.")
    ] = True,
    seeds: Annotated[int, typer.Option(help="Runs of methods that draw at random.", min=1)] = 3,
    limit: Annotated[int | None, typer.Option(help="Questions of each task, drawn at random.", min=1)] = None,
    prompts: Annotated[str, typer.Option(help="standard, vlmevalkit or llava.")] = "standard",
    padding: Annotated[str, typer.Option(help="crop or square.")] = "crop",
    positions: Annotated[str, typer.Option(help="own: as each method has it; compact; or original.")] = "own",
    mass: Annotated[
        bool | None,
        typer.Option(
            "--mass/--no-mass",
            help="Attend to each token as to all the patches it stands for; by default as each method has it.",
        ),
    ] = None,
    batch: Annotated[int, typer.Option(help="Answers to one question that are made together.", min=1)] = 8,
    max_new_tokens: Annotated[
        int | None, typer.Option(help="Longest answer; by default 32, or 256 where a judge grades.", min=1)
    ] = None,
    shard: Annotated[str, typer.Option(help="i/n: do the i-th of n parts of the work.")] = "1/1",
    on_error: Annotated[str, typer.Option(help="skip: note a failing sample and go on; stop.")] = "skip",
    retry: Annotated[
        bool, typer.Option("--retry", help="Ask what failed earlier again, as after a full memory.")
    ] = False,
    keep: Annotated[
        int, typer.Option(help="Pictures of each task kept with their reductions, for torino plot.", min=0)
    ] = 0,
    clip: Annotated[str | None, typer.Option(help="CLIP that reads the question, for cdpruner.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, …")] = "auto",
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16, float16 or auto.")] = None,
) -> None:
    """Evaluate reduction methods on benchmarks, by the paper's protocol.

    Dynamic TORINO runs first; then every method gets the mean number of tokens that it left. Each picture is seen by
    the tower once for all methods. Every answer is kept as soon as it is there: stop the run and start it again.
    """
    for name, value, accepted in (
        ("--padding", padding, ("crop", "square")),
        ("--positions", positions, POSITIONS),
        ("--on-error", on_error, ("skip", "stop")),
        ("--prompts", prompts, ("standard", "vlmevalkit", "llava")),
    ):
        if value not in accepted:
            raise BadParameter(f"{name} must be {' or '.join(accepted)}, got {value!r}.")
    part = share_of_work(shard)
    if output.exists() and not output.is_dir():
        raise BadFile(f"--output {output} is a file. Give a folder for the run, new or begun earlier.")
    from torino.evaluation.protocol import default_methods, read_budgets
    from torino.evaluation.tasks import open_task
    from torino.reducers import get
    from torino.vlm.session import check_vlm, load_vlm
    from torino.vlm.towers import transformers

    check_vlm(model)
    words = split_words(methods)
    names = [word for word in words if "(" not in word]
    if "all" in names:
        names = [one for one in default_methods(asking=clip is not None) if sae or not _reads_concepts(one)]
    for one in names:
        get(one)
    found = [open_task(one, data, prompts=cast(Any, prompts)) for one in split_words(tasks)]
    for task in found:
        for problem in task.problems[:3]:
            errors.print(escape(f"{task.name}: {problem}"), style="yellow", highlight=False)
        if len(task.problems) > 3:
            told = f"{task.name}: {len(task.problems)} rows skipped in all."
            errors.print(escape(told), style="yellow", highlight=False)
    if limit is not None:
        found = [task.take(limit, seed=0) for task in found]
    library = transformers()
    library.logging.set_verbosity_error()
    library.logging.disable_progress_bar()
    from torino.evaluation.runner import RunPlan
    from torino.evaluation.runner import evaluate as run
    from torino.vlm import load_clip_text

    saes = _saes(sae or [], any(_reads_concepts(one) for one in [*names, *[w for w in words if "(" in w]]), device)
    plan = RunPlan(
        names,
        specs=[word for word in words if "(" in word],
        dynamic=split_pairs(dynamic) if any(one.startswith("torino-") for one in names) else (),
        fixed=read_budgets("--tiers", tiers),
        seeds=seeds,
        matched=matched,
    )
    plan.first(list(saes))  # what cannot be planned is said before a large model is opened
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformers
        with errors.status(f"Opening {escape(model)} …"):
            opened, processor = load_vlm(model, device, dtype)
            asking = None if clip is None else load_clip_text(clip, device=device, dtype=dtype)
        bars, progress = phase_bars(errors)
        with bars:
            finished = run(
                output,
                model=opened,
                processor=processor,
                tasks=found,
                plan=plan,
                saes=saes,
                name=model,
                padding=cast(Literal["crop", "square"], padding),
                positions=cast("Positions", positions),
                mass=mass,
                batch=batch,
                limit=limit,
                lengths=None if max_new_tokens is None else {task.name: max_new_tokens for task in found},
                shard=part,
                on_error=cast(Literal["skip", "stop"], on_error),
                retry=retry,
                asking=asking,
                keep=keep,
                arguments={
                    "methods": methods,
                    "dynamic": dynamic,
                    "tiers": tiers,
                    "matched": matched,
                    "seeds": seeds,
                    "sae": sae,
                },
                progress=progress,
            )
    _tell_failures(finished)
    told = f"{len(finished.settings)} settings on {len(found)} tasks in {output}. Next: torino report {output}"
    errors.print(escape(told), soft_wrap=True)


def _tell_failures(run: Run) -> None:
    """Say how many questions have an error in the place of an answer, and the commonest reason."""
    failed = Counter(str(row["error"]) for row in run.rows() if "error" in row)
    if failed:
        from torino.evaluation.results import PROBLEMS

        why, times = failed.most_common(1)[0]
        told = f"{failed.total():,} answers failed, see {run.folder / PROBLEMS}. {times:,} of them: {why} "
        told += "The same command with --retry asks them again."
        errors.print(escape(told), style="yellow", highlight=False, soft_wrap=True)


def _reads_concepts(spec: str) -> bool:
    from torino.evaluation.protocol import takes

    return takes(spec.partition("(")[0].strip(), "sae")


def _saes(given: list[str], needed: bool, device: str) -> dict[str, Any]:
    """SAEs by label, in the order given."""
    from torino.core.concepts import RawEmbedding
    from torino.evaluation.protocol import NO_SAE
    from torino.vlm.towers import device_of

    if needed and not given:
        raise BadParameter(
            "Some of the methods read concepts, and no SAE is given. Give --sae, or --sae none for the tokens "
            "themselves, or name --methods that do without."
        )
    found: dict[str, Any] = {}
    for one in given:
        label, equals, path = one.partition("=")
        if not equals:
            label, path = (NO_SAE, "") if one in (NO_SAE, "raw") else (Path(one).name or one, one)
        if label in found:
            raise BadParameter(f"Two SAEs are called {label!r}. Write label=path to tell them apart.")
        found[label] = RawEmbedding() if label == NO_SAE else open_sae(path, device=device_of(device))
    return found
