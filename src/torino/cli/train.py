"""The commands ``torino train`` and ``torino sweep``: train SAEs on activations."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from torino.cli._common import AllowOutsideOption, DeviceOption, errors, examples, out, quiet_transformers
from torino.cli._joint import JointSource
from torino.cli._progress import ProgressUpdate, progress
from torino.cli._stop import on_stop
from torino.core.errors import BadParameter, TorinoError
from torino.training.config import PAPER_SETTINGS, BiasInit, ObjectiveName, Precision, TrainConfig

if TYPE_CHECKING:  # these import torch, which slows down the start
    from torino.datasets import Photos
    from torino.training.activations.store import Store
    from torino.training.activations.stream import Stream
    from torino.training.distributed import Distributed
    from torino.training.trainer import StepCallback

TRAIN_EPILOG = examples(
    "torino train store -o my-sae",
    "torino train store -o my-sae --expansion 64 --paper --log tensorboard",
    "torino train --tower lab --images photos --tokens random:2 -o my-sae",
    "torino train --joint projected --model lab --images photos.parquet --tokens random:32 -o joint-sae",
    "torchrun --nproc-per-node 8 -m torino train store -o my-sae --batch 32768",
)
SWEEP_EPILOG = examples(
    "torino sweep store -o sweep --expansions 1,2,4,8,16,64",
    "torino sweep store -o sweep --heldout val-store --steps 20000",
)


class LoggerName(StrEnum):
    """Loggers in addition to the log file; an enum because typer has no lists of literals."""

    tensorboard = "tensorboard"
    wandb = "wandb"


class ExportLayout(StrEnum):
    """Layouts of other libraries."""

    dictionary_learning = "dictionary_learning"
    saelens = "saelens"


def _default(text: str) -> str:
    return f"  [dim]\\[default: {text}][/]"


Output = Annotated[Path, typer.Option("--output", "-o", help="Folder for the SAE and the files of the run.")]
Objective = Annotated[ObjectiveName, typer.Option(help="matryoshka uses BatchTopK, relu uses an L1 penalty.")]
K = Annotated[int | None, typer.Option(help="Active latents per row, on average over a batch." + _default("20"))]
Steps = Annotated[int | None, typer.Option(help="Training steps." + _default("5000"))]
Batch = Annotated[int | None, typer.Option(help="Rows per step, over all processes." + _default("2048"))]
Lr = Annotated[float | None, typer.Option(help="Peak learning rate." + _default("16 / (125 √latents)"))]
L1 = Annotated[float | None, typer.Option(help="Weight of the L1 penalty of relu." + _default("0.03"))]
Aux = Annotated[
    float | None, typer.Option(help="Weight of the auxiliary loss that revives dead latents." + _default("1/32"))
]
DeadAfter = Annotated[
    int | None,
    typer.Option(help="Rows without an activation after which a latent is dead." + _default("a tenth of the run")),
]
Fractions = Annotated[
    str | None,
    typer.Option(
        help="Sizes of the Matryoshka groups as fractions, coarse to fine." + _default("0.0625,0.125,0.25,0.5625")
    ),
]
Paper = Annotated[
    bool,
    typer.Option(
        "--paper", help="Settings of Pach et al.: 110,000 steps of 4096 rows, k 20, aux 0.03. Needs a GPU in practice."
    ),
]
Seed = Annotated[int, typer.Option(help="Seed of the initial weights and of the row order.")]
PrecisionOption = Annotated[
    Precision, typer.Option(help="Precision of the one dense product; half precision is for GPUs.")
]
LogTo = Annotated[
    list[LoggerName] | None,
    # --log-to is for torchrun, which takes --log for an abbreviation of one of its own options
    typer.Option("--log", "--log-to", help="Logger in addition to training/log.jsonl; can be repeated."),
]
LogEvery = Annotated[int, typer.Option(min=1, help="Steps between reports.")]
SaveEvery = Annotated[int, typer.Option(min=1, help="Steps between checkpoints.")]


def train(
    output: Output,
    store: Annotated[
        Path | None, typer.Argument(metavar="STORE", help="Folder written by torino activations; or use --tower.")
    ] = None,
    tower: Annotated[
        str | None, typer.Option(help="Train directly on the activations of this tower: hub name, folder, or lab.")
    ] = None,
    images: Annotated[
        str | None, typer.Option(help="With --tower: a folder, parquet, webdataset tar, or HF dataset.")
    ] = None,
    block: Annotated[int | None, typer.Option(help="With --tower: zero-based block whose output is used.")] = None,
    tokens: Annotated[str | None, typer.Option(help="With --tower: cls, random:R or all." + _default("all"))] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="With --tower: use only the first N images.")] = None,
    buffer: Annotated[
        int | None,
        typer.Option(min=1, help="With --tower: images whose rows are mixed with each other." + _default("128")),
    ] = None,
    joint: Annotated[
        str | None,
        typer.Option(
            metavar="SPACE",
            help="Train on image and text tokens of one space of a model: projected (input of its language model), "
            "block:N (after a block of it), or clip. Needs --model and --images, or --rows.",
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(help="With --joint: hub name or folder of the model, or lab.")] = None,
    texts: Annotated[
        str | None,
        typer.Option(
            help="With --joint: text file, or parquet or JSONL file, also FILE:COLUMN."
            + _default("the captions of the photos")
        ),
    ] = None,
    rows: Annotated[
        Path | None,
        typer.Option(help="With --joint: .safetensors file of the rows; written if it does not exist, else read."),
    ] = None,
    clip_text: Annotated[str | None, typer.Option(help="With --joint clip: the CLIP of the model's tower.")] = None,
    allow_outside: AllowOutsideOption = False,
    objective: Objective = "matryoshka",
    expansion: Annotated[float, typer.Option(help="Number of latents as a multiple of the row width.")] = 16,
    latents: Annotated[int | None, typer.Option(help="Number of latents, instead of --expansion.")] = None,
    k: K = None,
    k_start: Annotated[
        int | None, typer.Option(help="Start with this many active latents per row, and decrease to k.")
    ] = None,
    anneal: Annotated[int | None, typer.Option(help="Steps over which k decreases." + _default("a fifth"))] = None,
    fractions: Fractions = None,
    weights: Annotated[
        str | None, typer.Option(help="Weights of the errors of the levels, coarse to fine." + _default("equal"))
    ] = None,
    l1: L1 = None,
    steps: Steps = None,
    batch: Batch = None,
    lr: Lr = None,
    warmup: Annotated[int | None, typer.Option(help="Warm-up steps." + _default("5 %, at most 1000"))] = None,
    decay_from: Annotated[
        int | None, typer.Option(help="Step from which the learning rate decays to 0." + _default("80 %"))
    ] = None,
    clip: Annotated[float, typer.Option(help="Maximum norm of the gradient.")] = 1.0,
    aux: Aux = None,
    aux_k: Annotated[
        int | None, typer.Option(help="Dead latents per row in the auxiliary loss." + _default("width / 2"))
    ] = None,
    dead_after: DeadAfter = None,
    bias: Annotated[BiasInit, typer.Option(help="Initial decoder bias; median is the geometric median.")] = "median",
    scale: Annotated[bool, typer.Option(help="Scale rows to a mean squared norm of 1; folded into the SAE.")] = True,
    center: Annotated[bool, typer.Option(help="Subtract the mean of the rows first; folded into the SAE.")] = False,
    paper: Paper = False,
    precision: PrecisionOption = "float32",
    device: DeviceOption = "auto",
    seed: Seed = 0,
    name: Annotated[str, typer.Option(help="Name of the SAE, for its card.")] = "",
    log: LogTo = None,
    log_every: LogEvery = 50,
    save_every: SaveEvery = 500,
    export: Annotated[
        list[ExportLayout] | None,
        typer.Option(help="Also write the SAE for another library, into a subfolder of that name; can be repeated."),
    ] = None,
) -> None:
    """Train an SAE on activations. Run the same command again to resume an interrupted run."""
    config = _make_config(
        paper,
        kind=objective,
        expansion=expansion,
        latents=latents,
        k=k,
        k_start=k_start,
        anneal=anneal,
        fractions=_parse_numbers("--fractions", fractions),
        weights=_parse_numbers("--weights", weights),
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
        center=center,
        precision=precision,
        seed=seed,
    )
    joint_options = {"--model": model, "--texts": texts, "--rows": rows, "--clip-text": clip_text}
    if joint is not None:
        source = JointSource(joint, model, images, texts, rows, clip_text, tokens, limit, seed, allow_outside)
        source.check({"STORE": store, "--tower": tower, "--block": block, "--buffer": buffer, "--export": export})
    elif (store is None) == (tower is None) or (tower is None) != (images is None):
        raise BadParameter("Give either STORE, or both --tower and --images.")
    else:
        source = None
    for option, value in joint_options.items():
        if joint is None and value is not None:
            raise BadParameter(f"{option} has no effect without --joint. Leave it out, or add --joint SPACE.")
    for option, value in {"--block": block, "--tokens": tokens, "--limit": limit, "--buffer": buffer}.items():
        if store is not None and value is not None:
            raise BadParameter(
                f"{option} needs --tower: the activations in {store} are cached already. Leave {option} out, or cache "
                "other activations with torino activations."
            )

    from torino.sae.model import SAE
    from torino.training.activations.store import Store
    from torino.training.distributed import init_distributed, local_device
    from torino.training.trainer import train as run_training

    target = local_device(device)
    distributed = init_distributed(target)
    if source is not None:
        activations = source.open(target)
    elif store is not None:
        with errors.status(f"Verifying {escape(str(store))} …"):  # reads all of it, but only the first time
            activations = Store.open(store, seed=seed)
    else:
        assert tower is not None
        assert images is not None
        from torino.datasets import open_photos

        photos = open_photos(images, limit=limit, allow_outside=allow_outside)
        activations = _open_stream(tower, photos, block, target, tokens or "all", seed, buffer or 128)
    with _handle_errors(output, config, distributed), progress(errors, {"training": config.steps}) as update:
        result = run_training(
            activations,
            config,
            output,
            device=target,
            distributed=distributed,
            name=name,
            loggers=log or [],
            log_every=log_every,
            save_every=save_every,
            callback=_step_callback(update, "training", distributed),
        )
    if not distributed.is_main:
        return
    if result.already_finished:
        _print(f"{escape(str(output))} is already finished. Use another folder with -o to start a new run.")
    _print_metrics(result.metrics)
    for layout in export or []:
        SAE.load(output).export(output / layout, layout)
        _print(f"Wrote {escape(str(output / layout))} in the {layout} layout.")
    _print(f"The SAE is in {escape(str(output))}.")


def sweep(
    store: Annotated[Path, typer.Argument(metavar="STORE", help="Folder written by torino activations.")],
    output: Output,
    expansions: Annotated[str, typer.Option(help="Numbers of latents as multiples of the width.")] = "1,2,4,8,16,64",
    heldout: Annotated[
        Path | None,
        typer.Option(help="Store with all patches of other photos: compute the metrics on these, and count groups."),
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
    device: DeviceOption = "auto",
    seed: Seed = 0,
    log: LogTo = None,
    log_every: LogEvery = 50,
    save_every: SaveEvery = 500,
) -> None:
    """Train one SAE per expansion and write a table. Run the same command again to resume an interrupted sweep."""
    config = _make_config(
        paper,
        kind=objective,
        k=k,
        fractions=_parse_numbers("--fractions", fractions),
        l1=l1,
        steps=steps,
        batch=batch,
        lr=lr,
        aux=aux,
        dead_after=dead_after,
        precision=precision,
        seed=seed,
    )
    factors = _parse_numbers("--expansions", expansions) or ()

    from torino.training.activations.store import Store
    from torino.training.distributed import init_distributed, local_device
    from torino.training.sweep import flatten_row, format_value
    from torino.training.sweep import sweep as run_sweep

    target = local_device(device)
    distributed = init_distributed(target)
    with errors.status(f"Verifying {escape(str(store))} …"):
        activations = Store.open(store, seed=seed)
    photos, photos_name = (None, "") if heldout is None else _open_heldout(heldout, activations)
    phases = {f"x{factor:g}": config.steps for factor in factors}
    with _handle_errors(output, config, distributed), progress(errors, phases) as update:
        rows = run_sweep(
            activations,
            config,
            factors,
            output,
            heldout=photos,
            heldout_name=photos_name,
            device=target,
            distributed=distributed,
            callback=lambda factor: _step_callback(update, f"x{factor:g}", distributed),
            loggers=log or [],
            log_every=log_every,
            save_every=save_every,
        )
    if not distributed.is_main:
        return
    table = Table(box=None, pad_edge=False)
    flat = [flatten_row(row) for row in rows]
    for column in flat[0]:
        table.add_column(escape(column), justify="right")
    for row in flat:
        table.add_row(*[escape(format_value(column, value)) for column, value in row.items()])
    out.print(table)
    _print(f"Wrote {escape(str(output))}/table.md and table.csv.")


# ---------------------------------------------------------------------- options


def _make_config(paper: bool, **options: Any) -> TrainConfig:
    """Build the configuration from the options that were given; raise if one of them has no effect."""
    given = {name: value for name, value in options.items() if value is not None}
    kind = given["kind"]
    without_effect = {
        "l1": kind != "relu" and "only relu has an L1 penalty",
        "fractions": kind != "matryoshka" and "only matryoshka has levels",
        "weights": kind != "matryoshka" and "only matryoshka has levels",
        "k": kind == "relu" and "relu has no k; use --l1 to control sparsity",
        "k_start": kind == "relu" and "relu has no k; use --l1 to control sparsity",
        "anneal": "k_start" not in given and "k decreases only with --k-start",
    }
    for name, reason in without_effect.items():
        if reason and name in given:
            raise BadParameter(f"--{name.replace('_', '-')} has no effect with --objective {kind}: {reason}.")
    if paper and kind != "matryoshka":
        raise BadParameter(f"--paper needs --objective matryoshka, got {kind}.")
    return TrainConfig(**{**(PAPER_SETTINGS if paper else {}), **given})


def _parse_numbers(option: str, text: str | None) -> tuple[float, ...] | None:
    """Parse a list such as ``1,2,4``."""
    if text is None:
        return None
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise BadParameter(f"{option} must be numbers separated by commas, such as 1,2,4, got {text!r}.") from error


# ---------------------------------------------------------------------- activations


def _open_stream(
    tower: str, photos: Photos, block: int | None, device: Any, tokens: str, seed: int, buffer: int
) -> Stream:
    from torino.training.activations.stream import Stream
    from torino.vlm.towers import load_tower

    with errors.status(f"Loading {escape(tower)} …"), quiet_transformers():
        opened = load_tower(tower, block=block, device=device)
    return Stream(opened, photos, tokens=tokens, seed=seed, buffer=buffer)


def _open_heldout(path: Path, trained: Store) -> tuple[Callable[[], Iterable[Any]], str]:
    """Return a function that yields the patches of each photo of a store, and a name that identifies the photos."""
    from torino.training.activations.store import Store

    store = Store.open(path)
    held, used = store.settings, trained.settings
    if held.tokens != "all" or (held.encoder, held.block, held.width) != (used.encoder, used.block, used.width):
        raise BadParameter(
            f"--heldout must contain all patches of photos, after block {used.block} of "
            f"{used.encoder or 'the same tower'}, with width {used.width}; {path} contains {held.tokens}, after block "
            f"{held.block} of {held.encoder or 'another tower'}, with width {held.width}. Cache it with --tokens all "
            "and the same tower."
        )
    photos = [photo for photo in range(held.photos) if len(store.row_range(photo))]  # without skipped photos
    return lambda: (store.photo_rows(photo) for photo in photos), f"{held.data}, {held.digest}, {store.content}"


# ---------------------------------------------------------------------- output


def _step_callback(update: ProgressUpdate, phase: str, distributed: Distributed) -> StepCallback | None:
    """Return the callback that shows the progress of a run; only the main process shows it."""
    if not distributed.is_main:
        return None

    def callback(step: int, report: Mapping[str, Any] | None) -> None:
        note = ""
        if report is not None:
            note = (
                f"FVU {report['fvu']:.4f}, L0 {report['l0']:.1f}, dead {report['dead']:.1%}, "
                f"top {report['top_frequency']:.1%}"
            )
        update(phase, step, note=note)

    return callback


@contextmanager
def _handle_errors(output: Path, config: TrainConfig, distributed: Distributed) -> Generator[None]:
    """Explain how to continue after an interruption or a lack of memory; leave the process group at the end."""
    on_stop(f"Run the same command again to resume from the last checkpoint in {output}.")
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "memory" not in str(error):
            raise
        raise TorinoError(
            f"A batch of {config.batch:,} rows, or the latents, do not fit into memory ({error}). Decrease --batch or "
            "--expansion, or use another --device."
        ) from error
    distributed.shutdown()


def _print_metrics(metrics: Mapping[str, Any]) -> None:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_row("[bold]FVU[/]", f"{metrics['fvu']:.4f}")
    if len(metrics["levels"]) > 1:
        table.add_row("[bold]FVU of levels[/]", " ".join(f"{value:.4f}" for value in metrics["levels"]))
    table.add_row("[bold]L0[/]", f"{metrics['l0']:.1f}")
    table.add_row("[bold]dead[/]", f"{metrics['dead']:.1%} not active in {metrics['rows']:,} rows")
    table.add_row("[bold]top latent[/]", f"active in {metrics['top_frequency']:.1%} of the rows")
    out.print(table, highlight=False)


def _print(text: str) -> None:
    out.print(text, highlight=False, soft_wrap=True)
