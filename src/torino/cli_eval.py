"""The command ``torino eval``: the paper's protocol over tasks and methods, resumable."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from torino.errors import BadParameter
from torino.options import share_of_work, split_pairs, split_words

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
    seeds: Annotated[int, typer.Option(help="Runs of methods that draw at random.", min=1)] = 3,
    limit: Annotated[int | None, typer.Option(help="Questions of each task, drawn at random.", min=1)] = None,
    prompts: Annotated[str, typer.Option(help="standard, vlmevalkit or llava.")] = "standard",
    padding: Annotated[str, typer.Option(help="crop or square.")] = "crop",
    positions: Annotated[str, typer.Option(help="compact or original.")] = "compact",
    batch: Annotated[int, typer.Option(help="Answers to one question that are made together.", min=1)] = 8,
    max_new_tokens: Annotated[
        int | None, typer.Option(help="Longest answer; by default 32, or 256 where a judge grades.", min=1)
    ] = None,
    shard: Annotated[str, typer.Option(help="i/n: do the i-th of n parts of the work.")] = "1/1",
    on_error: Annotated[str, typer.Option(help="skip: note a failing sample and go on; stop.")] = "skip",
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
        ("--positions", positions, ("compact", "original")),
        ("--on-error", on_error, ("skip", "stop")),
        ("--prompts", prompts, ("standard", "vlmevalkit", "llava")),
    ):
        if value not in accepted:
            raise BadParameter(f"{name} must be {' or '.join(accepted)}, got {value!r}.")
    part = share_of_work(shard)
    from torino.evaluate.settings import default_methods
    from torino.evaluate.tasks import open_task
    from torino.reducers import get
    from torino.vlm.towers import local_name, transformers

    local_name(model)
    words = split_words(methods)
    names = [word for word in words if "(" not in word]
    if names == ["all"]:
        names = [one for one in default_methods() if sae or not _reads_concepts(one)]
    for one in names:
        get(one)
    found = [open_task(one, data, prompts=cast(Any, prompts)) for one in split_words(tasks)]
    for task in found:
        for problem in task.problems[:3]:
            errors.print(f"{task.name}: {problem}", style="yellow", highlight=False)
        if len(task.problems) > 3:
            errors.print(f"{task.name}: {len(task.problems)} rows skipped in all.", style="yellow", highlight=False)
    if limit is not None:
        found = [task.take(limit, seed=0) for task in found]
    transformers().logging.set_verbosity_error()
    from torino.ask import open_vlm
    from torino.evaluate.run import Plan
    from torino.evaluate.run import evaluate as run
    from torino.vlm import open_clip_text

    saes = _saes(sae or [], any(_reads_concepts(one) for one in [*names, *[w for w in words if "(" in w]]), device)
    plan = Plan(
        names,
        specs=[word for word in words if "(" in word],
        dynamic=split_pairs(dynamic) if any(one.startswith("torino-") for one in names) else (),
        fixed=[] if tiers == "no" else [_budget(one) for one in split_words(tiers)],
        seeds=seeds,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformers
        with errors.status(f"Opening {model} …"):
            opened, processor = open_vlm(model, device, dtype)
            asking = None if clip is None else open_clip_text(clip, device=device, dtype=dtype)
        bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=errors,
        )
        shown: dict[str, Any] = {}

        def progress(phase: str, done: int, total: int) -> None:
            if phase not in shown:
                shown[phase] = bars.add_task(phase, total=total)
            bars.update(shown[phase], completed=done, total=total)

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
                positions=cast(Literal["compact", "original"], positions),
                batch=batch,
                limit=limit,
                lengths=None if max_new_tokens is None else {task.name: max_new_tokens for task in found},
                shard=part,
                on_error=cast(Literal["skip", "stop"], on_error),
                asking=asking,
                keep=keep,
                arguments={"methods": methods, "dynamic": dynamic, "tiers": tiers, "seeds": seeds, "sae": sae},
                progress=progress,
            )
    errors.print(f"{len(finished.settings)} settings on {len(found)} tasks in {output}. Next: torino report {output}")


def _reads_concepts(spec: str) -> bool:
    from torino.evaluate.settings import takes

    return takes(spec.partition("(")[0].strip(), "sae")


def _saes(given: list[str], needed: bool, device: str) -> dict[str, Any]:
    """SAEs by label, in the order given."""
    from torino.concepts import RawEmbedding
    from torino.evaluate.settings import NO_SAE
    from torino.sae import SAE
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
        found[label] = RawEmbedding() if label == NO_SAE else SAE.load(path, device=device_of(device))
    return found


def _budget(word: str) -> int:
    if not word.isdecimal() or int(word) < 1:
        raise BadParameter(f"--tiers takes whole numbers of tokens, such as 192,128,64, got {word!r}.")
    return int(word)
