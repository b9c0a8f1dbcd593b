"""``torino reduce``: reduce visual tokens from a file, and show the result."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from torino.cli._common import (
    BudgetOption,
    KdOption,
    KeepOption,
    LevelsOption,
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
from torino.core.errors import BadParameter, UnmetBudget

if TYPE_CHECKING:
    from torino.core.reduction import ReductionBatch
    from torino.core.tokens import VisualTokens
    from torino.reducers import Reducer

EPILOG = examples(
    "torino reduce",
    "torino reduce tokens.npz --sae ./my-sae --method torino-p --kd 3,3 -o out.npz",
    "torino reduce tokens.safetensors --sae none --keep 25%",
)
BATCH = 16  # images planned together: enough for the matrix product, few enough for progress to be visible
DRAWN = 8  # images drawn at most


def reduce(
    tokens: Annotated[
        Path | None,
        typer.Argument(metavar="TOKENS", help=".npz or .safetensors with 'patches'; bundled photos by default."),
    ] = None,
    sae: SaeOption = None,
    method: Annotated[str, typer.Option(help="Method by name or with options in brackets (torino list).")] = "torino-m",
    kd: KdOption = None,
    budget: BudgetOption = None,
    keep: KeepOption = None,
    levels: LevelsOption = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write tokens and provenance to .npz or .safetensors.")
    ] = None,
    explain: Annotated[int, typer.Option(min=0, help="Explain the N largest output tokens of each image.")] = 0,
    picture: Annotated[
        bool | None, typer.Option("--picture/--no-picture", help="Draw the groups as text (default: in a terminal).")
    ] = None,
    draw: Annotated[Path | None, typer.Option(help="Write an image of the groups: .png, .jpg or .webp.")] = None,
) -> None:
    """Reduce the visual tokens of images from a file, and show the groups."""
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
