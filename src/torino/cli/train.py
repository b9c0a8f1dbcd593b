"""The commands ``torino train`` and ``torino sweep``: from activations to SAEs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from torino.core.errors import BadParameter, TorinoError

if TYPE_CHECKING:  # torch and transformers are only fetched by those who train
    from torino.training.activations.store import Store
    from torino.training.config import TrainConfig
    from torino.training.distributed import World
    from torino.training.trainer import Watch
    from torino.vlm.towers import Tower

out = Console()
errors = Console(stderr=True)

TRAIN_EPILOG = (
    "Examples: [cyan]torino train ./store -o ./my-sae[/] · "
    "[cyan]torino train ./store -o ./my-sae --expansion 64 --paper --log tensorboard[/] · "
    "[cyan]torino train --tower openai/clip-vit-large-patch14-336 --images photos/ --tokens random:2 -o ./my-sae[/] · "
    "[cyan]torchrun --nproc-per-node 8 -m torino train ./store -o ./my-sae --batch 32768 --precision bfloat16[/]"
)
SWEEP_EPILOG = (
    "Examples: [cyan]torino sweep ./store -o ./sweep --expansions 1,2,4,8,16,64[/] · "
    "[cyan]torino sweep ./store -o ./sweep --heldout ./val-store --steps 20000[/]"
)
LAYOUTS = ("dictionary_learning", "saelens")


def _default(text: str) -> str:
    return f"  [dim]\\[default: {text}][/]"


Output = Annotated[Path, typer.Option("--output", "-o", help="Folder for the SAE, and for what the run itself needs.")]
Objective = Annotated[str, typer.Option(help="matryoshka (with BatchTopK), batchtopk, topk, or relu (with L1).")]
K = Annotated[int | None, typer.Option(help="Active latents a row, on average over a batch." + _default("20"))]
Steps = Annotated[int | None, typer.Option(help="Steps of training." + _default("5000"))]
Batch = Annotated[int | None, typer.Option(help="Rows a step, over all processes." + _default("2048"))]
Lr = Annotated[float | None, typer.Option(help="Peak learning rate." + _default("16 / (125 √latents)"))]
L1 = Annotated[float | None, typer.Option(help="Weight of the L1 penalty of relu." + _default("0.03"))]
Aux = Annotated[
    float | None, typer.Option(help="Weight of the auxiliary loss that revives dead latents." + _default("1/32"))
]
DeadAfter = Annotated[
    int | None,
    typer.Option(help="Rows without firing after which a latent is dead." + _default("a tenth of the run")),
]
Fractions = Annotated[
    str | None,
    typer.Option(help="Shares of the Matryoshka groups, coarse to fine." + _default("0.0625,0.125,0.25,0.5625")),
]
Paper = Annotated[
    bool,
    typer.Option("--paper", help="The recipe of Pach et al.: 110,000 steps of 4096 rows, k 20, aux 0.03. Give a GPU."),
]
Seed = Annotated[int, typer.Option(help="Of the starting weights and of the order of the rows.")]
PrecisionOption = Annotated[
    str, typer.Option(help="float32, bfloat16 or float16, for the one dense product; half precision is for GPUs.")
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, …")]
LogTo = Annotated[
    list[str] | None,
    # torchrun takes --log for an option of its own, cut short
    typer.Option("--log", "--log-to", help="tensorboard or wandb, beside training/log.jsonl; may be repeated."),
]
LogEvery = Annotated[int, typer.Option(min=1, help="Steps between reports.")]
SaveEvery = Annotated[int, typer.Option(min=1, help="Steps between checkpoints.")]


def train(
    output: Output,
    store: Annotated[
        Path | None, typer.Argument(metavar="STORE", help="Folder that torino harvest wrote; or give --tower.")
    ] = None,
    tower: Annotated[
        str | None, typer.Option(help="Train straight from this tower: hub name, folder, or 'lab'.")
    ] = None,
    images: Annotated[
        str | None, typer.Option(help="With --tower: a folder, parquet, webdataset tar, or HF dataset.")
    ] = None,
    block: Annotated[int | None, typer.Option(help="With --tower: the block that is tapped.")] = None,
    tokens: Annotated[str | None, typer.Option(help="With --tower: cls, random:R or all." + _default("all"))] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="With --tower: the first images only.")] = None,
    buffer: Annotated[
        int | None,
        typer.Option(min=1, help="With --tower: images whose rows are mixed with each other." + _default("128")),
    ] = None,
    objective: Objective = "matryoshka",
    expansion: Annotated[float, typer.Option(help="Latents, as a multiple of the width of the rows.")] = 16,
    latents: Annotated[int | None, typer.Option(help="Number of latents, instead of --expansion.")] = None,
    k: K = None,
    k_start: Annotated[
        int | None, typer.Option(help="Begin with this many active latents a row, and let them fall to k.")
    ] = None,
    anneal: Annotated[int | None, typer.Option(help="Steps over which they fall." + _default("a fifth"))] = None,
    fractions: Fractions = None,
    weights: Annotated[
        str | None, typer.Option(help="Weights of the levels' errors, coarse to fine." + _default("all alike"))
    ] = None,
    l1: L1 = None,
    steps: Steps = None,
    batch: Batch = None,
    lr: Lr = None,
    warmup: Annotated[int | None, typer.Option(help="Steps of warm-up." + _default("5 %, at most 1000"))] = None,
    decay_from: Annotated[
        int | None, typer.Option(help="Step from which the rate falls to 0." + _default("80 %"))
    ] = None,
    clip: Annotated[float, typer.Option(help="Largest norm of the gradient.")] = 1.0,
    aux: Aux = None,
    aux_k: Annotated[
        int | None, typer.Option(help="Dead latents a row that the auxiliary loss takes." + _default("width / 2"))
    ] = None,
    dead_after: DeadAfter = None,
    bias: Annotated[str, typer.Option(help="First decoder bias: median (geometric), mean or zero.")] = "median",
    scale: Annotated[bool, typer.Option(help="Scale rows to a mean square norm of 1; folded back on saving.")] = True,
    centre: Annotated[bool, typer.Option(help="Subtract the mean of the rows first; folded back on saving.")] = False,
    paper: Paper = False,
    precision: PrecisionOption = "float32",
    device: Device = "auto",
    seed: Seed = 0,
    name: Annotated[str, typer.Option(help="Of the SAE, for its card.")] = "",
    log: LogTo = None,
    log_every: LogEvery = 50,
    save_every: SaveEvery = 500,
    export: Annotated[
        list[str] | None,
        typer.Option(help="Also write the layout of dictionary_learning or saelens, into a folder of that name."),
    ] = None,
) -> None:
    """Train an SAE on activations. A run that was stopped goes on when the same command is given again."""
    from torino.training.trainer import train as run

    for layout in export or []:
        if layout not in LAYOUTS:
            raise BadParameter(f"--export must be dictionary_learning or saelens, got {layout!r}.")
    recipe = _recipe(
        paper,
        kind=objective,
        expansion=expansion,
        latents=latents,
        k=k,
        k_start=k_start,
        anneal=anneal,
        fractions=_numbers("--fractions", fractions),
        weights=_numbers("--weights", weights),
        l1=l1,
        steps=steps,
        batch=batch,
        lr=lr,
        warmup=warmup,
        decay_from=decay_from,
        clip=clip,
        aux=aux,
        aux_k=aux_k,
        dead_after=dead_after,
        bias=bias,
        scale=scale,
        centre=centre,
        precision=precision,
        seed=seed,
    )
    if (store is None) == (tower is None) or (tower is None) != (images is None):
        raise BadParameter("Give a STORE, or both --tower and --images to train straight from a tower.")
    for option, value in {"--block": block, "--tokens": tokens, "--limit": limit, "--buffer": buffer}.items():
        if store is not None and value is not None:
            raise BadParameter(
                f"{option} goes with --tower; what {store} holds was chosen when it was harvested. Leave {option} out, "
                "or harvest another store with it."
            )
    place, world = _joined(device)
    if store is not None:
        activations = _open_store(store, seed)
    else:
        from torino.datasets import open_photos
        from torino.training.activations.stream import Stream

        assert tower is not None
        assert images is not None
        photos = open_photos(images, limit=limit)
        opened = _tower(tower, block, place)
        activations = Stream(opened, photos, tokens=tokens or "all", seed=seed, buffer=buffer or 128)
    with _shown(recipe.steps, world) as watch, _stopped(output, recipe, world):
        done = run(
            activations,
            recipe,
            output,
            device=place,
            world=world,
            name=name,
            logs=log or [],
            log_every=log_every,
            save_every=save_every,
            watch=watch(),
        )
    if not world.first:
        return
    if done.already:
        out.print(
            f"{escape(str(output))} was finished already, and nothing was done. Give another -o to train anew.",
            highlight=False,
            soft_wrap=True,
        )
    _print_measures(done.measures)
    for layout in export or []:
        from torino.sae.model import SAE

        SAE.load(output).export(output / layout, layout)
        out.print(f"Wrote {escape(str(output / layout))}, in the layout of {layout}.", highlight=False, soft_wrap=True)
    out.print(f"The SAE is in {escape(str(output))}.", highlight=False, soft_wrap=True)


def sweep(
    store: Annotated[Path, typer.Argument(metavar="STORE", help="Folder that torino harvest wrote.")],
    output: Output,
    expansions: Annotated[str, typer.Option(help="Latents, as multiples of the width.")] = "1,2,4,8,16,64",
    heldout: Annotated[
        Path | None,
        typer.Option(help="Store of other photos with all their patches: measure on these, and count groups."),
    ] = None,
    objective: Objective = "matryoshka",
    k: K = None,
    fractions: Fractions = None,
    l1: L1 = None,
    steps: Steps = None,
    batch: Batch = None,
    lr: Lr = None,
    aux: Aux = None,
    dead_after: DeadAfter = None,
    paper: Paper = False,
    precision: PrecisionOption = "float32",
    device: Device = "auto",
    seed: Seed = 0,
    log: LogTo = None,
    log_every: LogEvery = 50,
    save_every: SaveEvery = 500,
) -> None:
    """Train one SAE per expansion, and write one table. A sweep that was stopped goes on where it stood."""
    from torino.training.sweep import flattened, shown
    from torino.training.sweep import sweep as run

    recipe = _recipe(
        paper,
        kind=objective,
        k=k,
        fractions=_numbers("--fractions", fractions),
        l1=l1,
        steps=steps,
        batch=batch,
        lr=lr,
        aux=aux,
        dead_after=dead_after,
        precision=precision,
        seed=seed,
    )
    wanted = _numbers("--expansions", expansions) or ()
    place, world = _joined(device)
    activations = _open_store(store, seed)
    photos, called = (None, "") if heldout is None else _photos(heldout, activations)
    with _shown(recipe.steps, world) as watch, _stopped(output, recipe, world):
        rows = run(
            activations,
            recipe,
            wanted,
            output,
            heldout=photos,
            heldout_name=called,
            device=place,
            world=world,
            watch=lambda expansion: watch(f"x{expansion:g}"),
            logs=log or [],
            log_every=log_every,
            save_every=save_every,
        )
    if not world.first:
        return
    table = Table(box=None, pad_edge=False)
    flat = [flattened(row) for row in rows]
    for heading in flat[0]:
        table.add_column(heading, justify="right")
    for row in flat:
        table.add_row(*[shown(heading, value) for heading, value in row.items()])
    out.print(table)
    out.print(f"Wrote {escape(str(output))}/table.md and table.csv.", highlight=False, soft_wrap=True)


# ---------------------------------------------------------------------- what was asked for


def _recipe(paper: bool, **given: Any) -> TrainConfig:
    from torino.training.config import PAPER, TrainConfig

    told = {name: value for name, value in given.items() if value is not None}
    kind = told["kind"]
    useless = {
        "l1": kind != "relu" and "only relu has a penalty",
        "fractions": kind != "matryoshka" and "only matryoshka has levels",
        "weights": kind != "matryoshka" and "only matryoshka has levels",
        "k": kind == "relu" and "relu has no k; --l1 makes it sparser",
        "k_start": kind == "relu" and "relu has no k; --l1 makes it sparser",
        "anneal": "k_start" not in told and "k only falls with --k-start",
    }
    for name, why in useless.items():
        if why and name in told:
            raise BadParameter(f"--{name.replace('_', '-')} would do nothing with --objective {kind}: {why}.")
    if paper and told["kind"] != "matryoshka":
        raise BadParameter(f"--paper is a recipe for matryoshka, and --objective is {told['kind']}. Leave one out.")
    return TrainConfig(**{**(PAPER if paper else {}), **told})


def _numbers(option: str, text: str | None) -> tuple[float, ...] | None:
    """Read a list such as ``1,2,4``."""
    if text is None:
        return None
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise BadParameter(f"{option} takes numbers with commas, such as 1,2,4; got {text!r}.") from error


def _joined(device: str) -> tuple[Any, World]:
    from torino.training.distributed import device_here, join

    place = device_here(device)
    return place, join(place)


def _open_store(path: Path, seed: int) -> Store:
    from torino.training.activations.store import Store

    return Store.open(path, seed=seed)


def _tower(name: str, block: int | None, device: Any) -> Tower:
    from torino.vlm.towers import load_tower, transformers

    transformers().logging.set_verbosity_error()
    transformers().logging.disable_progress_bar()
    with errors.status(f"Opening {escape(name)} …"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformers
        if name == "lab":
            from torino_lab.tower import lab_tower

            return lab_tower(device=device) if block is None else lab_tower(block, device=device)
        return load_tower(name, block=block, device=device)


def _photos(path: Path, trained: Store) -> tuple[Callable[[], Iterable[Any]], str]:
    """The patches of the photos of a store, one after the other, and what tells them from those of another."""
    store = _open_store(path, 0)
    here, there = store.settings, trained.settings
    if here.tokens != "all" or (here.encoder, here.block, here.width) != (there.encoder, there.block, there.width):
        raise BadParameter(
            f"--heldout needs all patches of photos, after block {there.block} of {there.encoder or 'the same tower'}, "
            f"{there.width} wide; {path} holds {here.tokens}, after block {here.block} of "
            f"{here.encoder or 'another tower'}, {here.width} wide. Harvest it with --tokens all, from the same tower."
        )
    photos = [photo for photo in range(here.photos) if len(store.rows_of(photo))]  # some could not be opened
    return lambda: (store.photo_rows(photo) for photo in photos), f"{here.data}, {here.digest}"


# ---------------------------------------------------------------------- what is shown


@contextmanager
def _shown(steps: int, world: World) -> Generator[Callable[..., Watch | None]]:
    """A progress bar; where nobody watches, a line for each tenth of a run."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[state]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as progress:

        def begin(name: str = "training") -> Watch | None:
            if not world.first:
                return None
            task = progress.add_task(name, total=steps, state="")
            tenth = max(1, steps // 10)
            told = 0

            def watch(step: int, report: Mapping[str, Any] | None) -> None:
                nonlocal told
                progress.update(task, completed=step)
                if report is not None:
                    progress.update(task, state=_state(report))
                if report is not None and not errors.is_terminal and step // tenth > told:
                    told = step // tenth
                    errors.print(f"{name} {step:,} of {steps:,}: {_state(report)}", highlight=False, soft_wrap=True)

            return watch

        yield begin


def _state(report: Mapping[str, Any]) -> str:
    return (
        f"{report['steps_per_second']:.1f} steps/s · FVU {report['fvu']:.4f} · L0 {report['l0']:.1f} · "
        f"dead {report['dead']:.1%} · top {report['top_frequency']:.1%}"
    )


@contextmanager
def _stopped(output: Path, recipe: TrainConfig, world: World) -> Generator[None]:
    """Say in a sentence what a run can be stopped by from outside."""
    try:
        yield
    except KeyboardInterrupt:
        errors.print(
            f"Stopped. Give the same command again to go on from the last checkpoint in {escape(str(output))}.",
            highlight=False,
            soft_wrap=True,
        )
        raise typer.Exit(130) from None
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "memory" not in str(error):
            raise
        raise TorinoError(
            f"{recipe.batch:,} rows at once, or so many latents, do not fit into the memory here ({error}). Lower "
            "--batch or --expansion, or take another --device."
        ) from error
    world.leave()


def _print_measures(measures: Mapping[str, Any]) -> None:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_row("[bold]FVU[/]", f"{measures['fvu']:.4f}")
    if len(measures["levels"]) > 1:
        table.add_row("[bold]FVU of levels[/]", " ".join(f"{value:.4f}" for value in measures["levels"]))
    table.add_row("[bold]L0[/]", f"{measures['l0']:.1f}")
    table.add_row("[bold]dead[/]", f"{measures['dead']:.1%} silent in {measures['rows']:,} rows")
    table.add_row("[bold]top latent[/]", f"fires in {measures['top_frequency']:.1%} of the rows")
    out.print(table, highlight=False)
