"""``torino reduce``: reduce visual tokens from a file and show the result, or reduce images to a store."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.markup import escape
from rich.table import Table

from torino.cli._common import (
    LAB,
    AttentionChoice,
    BudgetOption,
    DtypeChoice,
    KdOption,
    KeepOption,
    OptionalMethodOption,
    PaddingChoice,
    PositionsChoice,
    SaeOption,
    build_reducer_with_budget,
    check_image_path,
    errors,
    examples,
    out,
    reads_concepts,
)
from torino.cli._photos import default_photo_sae, photo_tokens
from torino.cli._progress import progress
from torino.cli._stop import START_OVER, on_stop
from torino.cli._store import reduce_to_store
from torino.core.defaults import resolve_method
from torino.core.errors import BadParameter, UnmetBudget

if TYPE_CHECKING:
    from torino.core.reduction import ReductionBatch
    from torino.core.tokens import VisualTokens
    from torino.reducers import Reducer

EPILOG = examples(
    "# Show how tokens are grouped",
    "torino reduce",
    "torino reduce tokens.npz --sae ./my-sae --method torino-p --kd 3,3 -o out.npz",
    "torino reduce tokens.safetensors --sae none --keep 25%",
    "# Reduce a collection of images; the same command continues a run that was stopped",
    "torino reduce ./photos --model lab --method torino-x -o store",
    "torino reduce photos-*.tar --model llava-hf/llava-1.5-7b-hf --sae ./my-sae --budget 128 -o store",
    "torino reduce ./photos --processes 4 -o store",
    "torino reduce ./photos --shard 1/2 -o store",
    "torino reduce ./photos --ray auto -o store",
)
BATCH = 16  # images planned together: enough for the matrix product, few enough for progress to be visible
DRAWN = 8  # images drawn at most
TOKEN_SUFFIXES = (".npz", ".safetensors")
# Options that only make sense for one of the two uses of the command.
OF_TOKENS = ("explain", "picture", "draw", "levels")
OF_IMAGES = (
    *("model", "padding", "positions", "attention", "device", "dtype", "store_dtype", "batch", "shard_images"),
    *("processes", "threads", "shard", "ray", "on_error", "limit", "allow_outside"),
)
TOKENS_PANEL, IMAGES_PANEL = "Options for tokens", "Options for images"


def reduce(
    context: typer.Context,
    inputs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TOKENS|IMAGES",
            help="A .npz or .safetensors file with 'patches'; or folders, images, .parquet or .tar files. Bundled "
            "photos by default.",
        ),
    ] = None,
    sae: SaeOption = None,
    method: OptionalMethodOption = None,
    kd: KdOption = None,
    budget: BudgetOption = None,
    keep: KeepOption = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="Write tokens and provenance to .npz or .safetensors; for images, a folder."
        ),
    ] = None,
    levels: Annotated[
        int | None,
        typer.Option(help="Use only the first Matryoshka levels of the SAE.", rich_help_panel=TOKENS_PANEL),
    ] = None,
    explain: Annotated[
        int,
        typer.Option(min=0, help="Explain the N largest output tokens of each image.", rich_help_panel=TOKENS_PANEL),
    ] = 0,
    picture: Annotated[
        bool | None,
        typer.Option(
            "--picture/--no-picture",
            help="Draw the groups as text (default: in a terminal).",
            rich_help_panel=TOKENS_PANEL,
        ),
    ] = None,
    draw: Annotated[
        Path | None,
        typer.Option(help="Write an image of the groups: .png, .jpg or .webp.", rich_help_panel=TOKENS_PANEL),
    ] = None,
    model: Annotated[
        str,
        typer.Option(
            help="Model whose tower and projector are used: hub name, folder, or installed model package.",
            rich_help_panel=IMAGES_PANEL,
        ),
    ] = LAB,
    store_dtype: Annotated[
        Literal["float16", "bfloat16", "float32"],
        typer.Option(help="Data type of the tokens on disk.", rich_help_panel=IMAGES_PANEL),
    ] = "float16",
    processes: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Processes on this machine, or Ray actors. [dim]\\[default: 1; with --ray the whole cluster][/]",
            rich_help_panel=IMAGES_PANEL,
        ),
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads of each process.", rich_help_panel=IMAGES_PANEL)] = 1,
    shard: Annotated[
        str | None,
        typer.Option(metavar="I/N", help="Write only part I of N, for several machines.", rich_help_panel=IMAGES_PANEL),
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Run on a Ray cluster: auto, host:port or ray://host:port; local starts one here.",
            rich_help_panel=IMAGES_PANEL,
        ),
    ] = None,
    on_error: Annotated[
        Literal["skip", "stop"],
        typer.Option(help="Record an image that cannot be used, or stop.", rich_help_panel=IMAGES_PANEL),
    ] = "skip",
    limit: Annotated[
        int | None, typer.Option(min=1, help="Use only the first N images.", rich_help_panel=IMAGES_PANEL)
    ] = None,
    batch: Annotated[
        int, typer.Option(min=1, help="Images per forward pass of the tower.", rich_help_panel=IMAGES_PANEL)
    ] = 16,
    shard_images: Annotated[
        int,
        typer.Option(
            min=1, help="Images per shard; a run that is killed repeats its last shards.", rich_help_panel=IMAGES_PANEL
        ),
    ] = 256,
    padding: Annotated[
        PaddingChoice,
        typer.Option(
            help="crop: the processor's own cropping; square: pad to a square first.", rich_help_panel=IMAGES_PANEL
        ),
    ] = "crop",
    positions: Annotated[
        PositionsChoice,
        typer.Option(
            help="Recorded for the reader: compact, original, median, or as the method has it.",
            rich_help_panel=IMAGES_PANEL,
        ),
    ] = "auto",
    attention: Annotated[
        AttentionChoice,
        typer.Option(
            help="Recorded for the reader: plain, proportional, or as the method has it.",
            rich_help_panel=IMAGES_PANEL,
        ),
    ] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, …", rich_help_panel=IMAGES_PANEL)] = "auto",
    dtype: Annotated[
        DtypeChoice | None,
        typer.Option(
            help="Data type of the model. Default: float32 on the CPU, else the checkpoint's.",
            rich_help_panel=IMAGES_PANEL,
        ),
    ] = None,
    allow_outside: Annotated[
        bool,
        typer.Option(
            "--allow-outside", help="Read images that a table names outside its folder.", rich_help_panel=IMAGES_PANEL
        ),
    ] = False,
) -> None:
    """Reduce the visual tokens of a file and show the groups, or reduce images and write what a model receives.

    With a token file, or without one for the bundled photos, the groups are shown. With images, the tokens that the
    language model receives are written to a store, which torino.serving.store.TokenStore reads.
    """
    method = resolve_method(method, kd)
    tokens = _token_file(inputs or [])
    given = {name for name in (*OF_TOKENS, *OF_IMAGES) if _is_given(context, name)}
    if inputs and tokens is None:
        _refuse_options(OF_TOKENS, given, "for token files, not for images")
        reduce_to_store(
            inputs,
            output,
            model=model,
            method=method,
            sae=sae,
            kd=kd,
            budget=budget,
            keep=keep,
            options={
                "dtype": store_dtype,
                "batch": batch,
                "threads": threads,
                "shard_images": shard_images,
                "processes": processes,
                "ray": ray,
                "on_error": on_error,
            },
            shard=shard,
            host={"padding": padding, "positions": positions, "attention": attention},
            device=device,
            dtype=dtype,
            limit=limit,
            allow_outside=allow_outside,
        )
        return
    _refuse_options(OF_IMAGES, given, "for images, which are folders, image files, .parquet or .tar files")
    _reduce_tokens(
        tokens,
        sae=sae,
        method=method,
        kd=kd,
        budget=budget,
        keep=keep,
        levels=levels,
        output=output,
        explain=explain,
        picture=picture,
        draw=draw,
    )


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _refuse_options(names: tuple[str, ...], given: set[str], what: str) -> None:
    wrong = [name for name in names if name in given]
    if wrong:
        raise BadParameter(f"--{wrong[0].replace('_', '-')} is {what}. Omit it.")


def _token_file(inputs: list[str]) -> Path | None:
    """Return the token file among the arguments; None if there is none. Token files and images cannot be mixed."""
    tokens = [name for name in inputs if Path(name).suffix in TOKEN_SUFFIXES]
    if len(inputs) > 1 and tokens:
        others = [name for name in inputs if name not in tokens]
        if others:
            raise BadParameter(f"{tokens[0]} holds tokens and {others[0]} images. Reduce them with two commands.")
        raise BadParameter(f"Give one token file at a time, got {len(tokens)}: {', '.join(tokens[:3])}.")
    return Path(tokens[0]) if tokens else None


def _reduce_tokens(
    tokens: Path | None,
    *,
    sae: str | None,
    method: str,
    kd: str | None,
    budget: int | None,
    keep: str | None,
    levels: int | None,
    output: Path | None,
    explain: int,
    picture: bool | None,
    draw: Path | None,
) -> None:
    """Reduce the tokens of a file, or of the bundled photos, and show the groups."""
    on_stop(START_OVER)
    from torino.core.explanation import concept_names
    from torino.core.tokens import load_tokens, ragged_patches
    from torino.datasets.bundled import PHOTOS

    bundled = tokens is None
    if output is not None and output.suffix not in (".npz", ".safetensors"):
        raise BadParameter(f"--output must end in .npz or .safetensors, got {output.name!r}.")
    if output is not None and output.is_dir():
        raise BadParameter(f"--output {output} is a folder. Give the path of a file.")
    if draw is not None:
        check_image_path("--draw", draw)
    images = [] if tokens is None else load_tokens(tokens)
    if sae is None and bundled and method != "none" and reads_concepts(method):
        sae = default_photo_sae()
    reducer = build_reducer_with_budget(method, sae, levels, kd, budget, keep)
    if reducer is None:
        raise BadParameter("--method none keeps all tokens, so there is nothing to reduce. Choose a method.")
    if bundled:
        images = photo_tokens(sae, getattr(getattr(reducer, "inner", reducer), "sae", None), reducer.needs)
    batch = _plan(reducer, images)
    names = list(PHOTOS) if bundled else [f"image {index}" for index in range(len(images))]
    words = concept_names(reducer)
    count = f"{len(images)} image{'s' if len(images) > 1 else ''}"
    out.print(f"[bold]{escape(reducer.spec)}[/] on {count} of {escape(str(images[0].origin))}")
    out.print(_summary(names, batch))
    if picture or (picture is None and out.is_terminal):
        from torino.viz.terminal import draw_groups

        shown = list(zip(names, batch, strict=True))[: 4 if picture is None else None]
        out.print(draw_groups(shown, out.width, words))
    for name, plan in zip(names, batch, strict=True):
        largest = sorted(range(len(plan)), key=lambda m: (-int((plan.assigned == m).sum()), m))[:explain]
        for token in largest:
            out.print(f"[bold]{escape(name)}[/]: {escape(str(plan.explain(token, words)))}", highlight=False)
    if draw is not None:
        _draw(draw, names, batch, bundled, words)
        out.print(f"Drew {min(len(images), DRAWN)} images to {escape(str(draw))}.", highlight=False)
    if output is not None:
        reduced = batch.apply(ragged_patches(images))
        batch.save(output, tokens=reduced.values)
        text = f"Wrote {len(reduced.values)} tokens with their provenance to {escape(str(output))}."
        out.print(text, highlight=False)


def _plan(reducer: Reducer, images: list[VisualTokens]) -> ReductionBatch:
    from torino.core.reduction import Reduction, ReductionBatch

    plans: list[Reduction] = []
    size = len(images) if reducer.shares_batch else BATCH
    with progress(errors, {"reducing": len(images)}) as report:
        for start in range(0, len(images), size):
            part = images[start : start + size]
            try:
                plans.extend(reducer.plan_batch(part))
            except UnmetBudget as error:  # it counts the images of its own batch
                suffix = f" (Images are counted from number {start} of the file.)" if start else ""
                raise UnmetBudget(f"{error}{suffix}") from error
            report("reducing", len(plans))
    return ReductionBatch.of(plans)


def _draw(path: Path, names: list[str], batch: Any, bundled: bool, words: Mapping[int, str]) -> None:
    """Draw the first images, over their photos if there are any."""
    from torino.datasets.bundled import example_folder
    from torino.datasets.images import open_image
    from torino.viz.draw import draw_sheet, save_picture

    rows: dict[str, Any] = {}
    for name, plan in list(zip(names, batch, strict=True))[:DRAWN]:
        photo = open_image(example_folder() / "photos" / f"{name}.jpg") if bundled else None
        rows[name] = (photo, [(plan.by, plan)])
    save_picture(draw_sheet(rows, names=words), path)


def _summary(names: list[str], batch: Any) -> Table:
    from torino.core.explanation import format_removed

    table = Table(box=None, pad_edge=False)
    for heading in ("image", "patches", "tokens", "removed", "largest group"):
        table.add_column(heading, justify="left" if heading == "image" else "right")
    rows = [
        (name, plan.patches, len(plan), int(plan.assigned[plan.assigned >= 0].bincount().max()))
        for name, plan in zip(names, batch, strict=True)
    ]
    for name, patches, tokens, largest in rows[:20]:
        size = f"{largest} patch{'es' if largest > 1 else ''}"
        table.add_row(escape(name), str(patches), str(tokens), format_removed(patches, tokens), size)
    if len(rows) > 20:
        table.add_row(f"… {len(rows) - 20} more", "", "", "", "")
    if len(rows) > 1:
        patches, tokens = sum(row[1] for row in rows) / len(rows), sum(row[2] for row in rows) / len(rows)
        table.add_section()
        table.add_row("mean", f"{patches:.0f}", f"{tokens:.1f}", format_removed(patches, tokens), "", style="bold")
    return table
