"""The command ``torino``: what the library does, from a shell."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from torino.cli import activations as cli_harvest
from torino.cli import ask as cli_ask
from torino.cli import bench as cli_bench
from torino.cli import compare as cli_compare
from torino.cli import concepts as cli_concepts
from torino.cli import eval as cli_eval
from torino.cli import look as cli_look
from torino.cli import report as cli_report
from torino.cli import train as cli_train
from torino.cli._common import build_reducer, open_sae, share_of
from torino.core.errors import BadParameter, TorinoError, UnmetBudget

app = typer.Typer(
    name="torino",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Visual token reduction for vision-language models, guided by interpretable concepts.",
)
out = Console()
errors = Console(stderr=True)

BATCH = 16  # images planned at once: enough to fill the matrix product, few enough for the progress bar to move


def main() -> None:
    """Run the command; what is wrong is said in one sentence, with exit code 2."""
    warnings.showwarning = _note
    try:
        app()
    except TorinoError as error:
        _fail(error)
    except BrokenPipeError:  # the reader, such as head, has seen enough
        sys.stderr.close()
        sys.exit(0)


def _note(message: Warning | str, *_: object, **__: object) -> None:
    """Say a warning as a sentence, without the line of code that it comes from."""
    errors.print(f"[yellow]note:[/] {escape(str(message))}", soft_wrap=True, highlight=False)


def _fail(error: Exception) -> NoReturn:
    errors.print(f"[bold red]torino:[/] {escape(str(error))}", soft_wrap=True)
    sys.exit(2)


def _version(wanted: bool) -> None:
    if wanted:
        from torino.version import __version__

        out.print(f"torino {__version__}")
        raise typer.Exit


@app.callback()
def top_level(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    """Visual token reduction for vision-language models, guided by interpretable concepts."""


@app.command("list", epilog="Example: [cyan]torino list layouts[/]")
def list_(
    what: Annotated[str, typer.Argument(help="reducers, or layouts (of SAE files).")] = "reducers",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List the reducers, or the SAE layouts that can be read and written."""
    from torino.reducers import describe, list_reducers
    from torino.sae.formats import LAYOUTS

    if what == "reducers":
        shown = ("name", "summary", "needs", "length", "output", "cost")
        rows = [
            {key: value for key, value in describe(name).items() if as_json or key in shown} for name in list_reducers()
        ]
    elif what == "layouts":
        rows = [{"name": name, "read": "yes", "written": "yes"} for name in LAYOUTS]
        rows.append({"name": "sparsify", "read": "yes", "written": "no"})
    else:
        raise BadParameter(f"torino list knows 'reducers' and 'layouts', got {what!r}.")
    if as_json:
        out.print_json(json.dumps(rows))
        return
    table = Table(box=None, pad_edge=False)
    for heading in rows[0]:
        table.add_column(heading, style="bold" if heading == "name" else None, no_wrap=heading == "name")
    for row in rows:
        table.add_row(*[escape(value) for value in row.values()])
    out.print(table)


@app.command(epilog="Examples: [cyan]torino info ./my-sae[/] · [cyan]torino info owner/repository/sub/folder[/]")
def info(
    sae: Annotated[str, typer.Argument(metavar="SAE", help="Folder, file or hub repository; 'example' is bundled.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Tell what an SAE is: kind, sizes, threshold, and where it comes from."""
    loaded = open_named(sae)
    facts: dict[str, Any] = loaded.facts()
    threshold = loaded.threshold
    if threshold is not None:
        facts["threshold"] = (
            float(threshold) if threshold.ndim == 0 else [float(threshold.min()), float(threshold.max())]
        )
    if as_json:
        out.print_json(json.dumps(facts))
        return
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, value in facts.items():
        if value not in ("", None):
            table.add_row(f"[bold]{name}[/]", escape(str(value)))
    out.print(table)


@app.command(
    epilog="Examples: [cyan]torino reduce[/] (bundled photos) · "
    "[cyan]torino reduce tokens.npz --sae ./my-sae --method torino-p --k 3 --delta 3 -o out.npz[/] · "
    "[cyan]torino reduce tokens.safetensors --sae raw --keep 25%[/]"
)
def reduce(
    tokens: Annotated[
        Path | None,
        typer.Argument(metavar="TOKENS", help=".npz or .safetensors with 'patches'; bundled photos if left out."),
    ] = None,
    sae: Annotated[
        str | None,
        typer.Option(
            help="Folder, file or hub repository of the SAE; 'example' is bundled, 'raw' is the no-SAE ablation."
        ),
    ] = None,
    method: Annotated[
        str, typer.Option(help="Reducer, by name or spec: torino-m, 'torino-p(order=\"native\")', …")
    ] = "torino-m",
    k: Annotated[
        int | None, typer.Option(help="Concepts kept per patch.  [dim]\\[default: the method's own, 2][/]")
    ] = None,
    delta: Annotated[
        int | None,
        typer.Option(help="Concepts that linked patches share, 1 to k.  [dim]\\[default: the method's own, 2][/]"),
    ] = None,
    budget: Annotated[
        int | None, typer.Option(help="Exactly this many tokens an image; without it the image decides.")
    ] = None,
    keep: Annotated[str | None, typer.Option(help="The budget as a share of the patches: 25% or 0.25.")] = None,
    levels: Annotated[int | None, typer.Option(help="Use only the first Matryoshka levels of the SAE.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write tokens and provenance to .npz or .safetensors.")
    ] = None,
    explain: Annotated[int, typer.Option(min=0, help="Explain the N largest output tokens of each image.")] = 0,
    picture: Annotated[
        bool | None, typer.Option("--picture/--no-picture", help="Draw the groups; by default in a terminal.")
    ] = None,
    draw: Annotated[
        Path | None, typer.Option(help="Write a picture of the groups to .png, .jpg or .webp; needs torino\\[draw].")
    ] = None,
) -> None:
    """Reduce the visual tokens of images, and show what became of them."""
    from torino.core.explanation import names_of
    from torino.core.reduction import Reduction, ReductionBatch
    from torino.core.tokens import load_tokens, ragged_patches
    from torino.datasets.bundled import PHOTOS, example_tokens

    bundled = tokens is None
    if output is not None and output.suffix not in (".npz", ".safetensors"):
        raise BadParameter(f"--output must end in .npz or .safetensors, got {output.name!r}.")
    if output is not None and output.is_dir():
        raise BadParameter(f"--output {output} is a folder. Give the path of a file.")
    if draw is not None and draw.suffix.lower() not in (".png", ".jpg", ".jpeg", ".webp"):
        raise BadParameter(f"--draw must end in .png, .jpg or .webp, got {draw.name!r}.")
    images = example_tokens() if tokens is None else load_tokens(tokens)
    given = {"k": k, "delta": delta, "budget": _budget(budget, keep, [len(image) for image in images])}
    reducer = build_reducer(method, sae or _default_sae(method, bundled), levels, given)

    plans: list[Reduction] = []
    columns = (TextColumn("reducing"), BarColumn(), MofNCompleteColumn(), TextColumn("images"), TimeRemainingColumn())
    with Progress(*columns, console=errors, transient=True, disable=len(images) <= BATCH) as progress:
        task = progress.add_task("", total=len(images))
        together = len(images) if reducer.shares_batch else BATCH
        for start in range(0, len(images), together):
            part = images[start : start + together]
            try:
                plans.extend(reducer.plan_batch(part))
            except UnmetBudget as error:  # which counts the images of its own batch
                raise UnmetBudget(
                    f"{error} (Images are counted from number {start} of the file.)" if start else str(error)
                ) from error
            progress.advance(task, len(part))
    batch = ReductionBatch.of(plans)
    words = names_of(reducer)

    list_reducers = list(PHOTOS) if bundled else [f"image {index}" for index in range(len(images))]
    count = f"{len(images)} image{'s' if len(images) > 1 else ''}"
    out.print(f"[bold]{escape(reducer.spec)}[/] on {count} of {escape(str(images[0].origin))}")
    out.print(_summary(list_reducers, batch))
    if picture or (picture is None and out.is_terminal):
        from torino.viz.terminal import draw_groups

        shown = list(zip(list_reducers, batch, strict=True))[: 4 if picture is None else None]
        out.print(draw_groups(shown, out.width, words))
    for name, plan in zip(list_reducers, batch, strict=True):
        largest = sorted(range(len(plan)), key=lambda m: (-int((plan.assigned == m).sum()), m))[:explain]
        for token in largest:
            out.print(f"[bold]{escape(name)}[/]: {escape(str(plan.explain(token, words)))}", highlight=False)
    if draw is not None:
        _draw(draw, list_reducers, batch, bundled, words)
        out.print(f"Drew {min(len(images), 8)} images to {escape(str(draw))}.", highlight=False)
    if output is not None:
        reduced = batch.apply(ragged_patches(images))
        batch.save(output, tokens=reduced.values)
        out.print(
            f"Wrote {len(reduced.values)} tokens with their provenance to {escape(str(output))}.", highlight=False
        )


@app.command(
    epilog="Examples: [cyan]torino calibrate --target 128[/] (bundled photos) · "
    "[cyan]torino calibrate tokens.npz --sae ./my-sae --target 192[/] · "
    "[cyan]torino calibrate --method torino-x --target 100[/]"
)
def calibrate(
    tokens: Annotated[Path | None, typer.Argument(metavar="TOKENS", help="Tokens of a few typical images.")] = None,
    target: Annotated[float, typer.Option(help="Wanted average number of tokens an image.")] = 128,
    sae: Annotated[str | None, typer.Option(help="As for torino reduce.")] = None,
    method: Annotated[
        str, typer.Option(help="torino-m (torino-p is the same), or torino-x, by name or spec.")
    ] = "torino-m",
    max_k: Annotated[int, typer.Option(help="Largest k to try.")] = 6,
) -> None:
    """Find the (k, δ) that gives a wanted average number of tokens, or the threshold of torino-x."""
    from torino.core.tokens import load_tokens
    from torino.datasets.bundled import example_tokens
    from torino.reducers import TorinoX, make
    from torino.reducers.calibration import calibrate as search
    from torino.reducers.calibration import calibrate_cover

    images = example_tokens() if tokens is None else load_tokens(tokens)
    if sae is None and tokens is not None:
        raise BadParameter(
            "Say which SAE reads these tokens: --sae FOLDER, --sae owner/repository, --sae raw for none."
        )
    if method.partition("(")[0].strip() not in ("torino-p", "torino-m", "torino-x"):
        raise BadParameter(f"--method must be torino-p, torino-m or torino-x, got {method!r}.")
    reader = open_sae(sae or "example")
    made = make(method, sae=reader)
    if isinstance(made, TorinoX):
        cut = calibrate_cover(images, target, reducer=made)
        made = replace(made, budget=None, pooled=False, least=float(f"{cut.least:.8g}"))
        low, high = int(cut.counts.min()), int(cut.counts.max())
        out.print(
            f"Nearest to {target:g}: {escape(made.spec)}, {cut.mean:.1f} tokens on average over "
            f"{len(images)} images, {low} to {high}.",
            highlight=False,
        )
        return
    found = search(images, target, sae=reader, max_k=max_k)
    table = Table(title=f"tokens per image over {len(images)} images", box=None, pad_edge=False)
    for heading in ("k", "delta", "mean", "min", "median", "max"):
        table.add_column(heading, justify="right")
    for (k, delta), counts in sorted(found.table.items(), key=lambda item: float(item[1].double().mean())):
        chosen = "bold green" if (k, delta) == (found.k, found.delta) else ""
        row = (float(counts.double().mean()), int(counts.min()), float(counts.double().median()), int(counts.max()))
        table.add_row(str(k), str(delta), f"{row[0]:.1f}", str(row[1]), f"{row[2]:.0f}", str(row[3]), style=chosen)
    out.print(table)
    out.print(f"Nearest to {target:g}: --k {found.k} --delta {found.delta}, {found.mean:.1f} tokens on average.")


@app.command(epilog="Example: [cyan]torino export ./my-sae ./for-saelens --layout saelens[/]")
def export(
    sae: Annotated[str, typer.Argument(metavar="SAE", help="Folder, file or hub repository.")],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where to write it.")],
    layout: Annotated[str, typer.Option(help="torino, dictionary_learning or saelens.")] = "torino",
) -> None:
    """Write an SAE in another library's layout."""
    from torino.sae.formats import write_sae

    loaded = open_named(sae)
    out.print(f"Wrote {escape(str(write_sae(loaded, folder, layout)))} in the {layout} layout.", highlight=False)


app.command(epilog=cli_look.EPILOG)(cli_look.look)
app.command(epilog=cli_ask.EPILOG)(cli_ask.ask)
app.command(epilog=cli_compare.EPILOG)(cli_compare.compare)
app.command(epilog=cli_harvest.EPILOG)(cli_harvest.harvest)
app.command(epilog=cli_train.TRAIN_EPILOG)(cli_train.train)
app.command(epilog=cli_train.SWEEP_EPILOG)(cli_train.sweep)
app.command(epilog=cli_concepts.EPILOG)(cli_concepts.concepts)
app.command("eval", epilog=cli_eval.EPILOG)(cli_eval.evaluate)
app.command(epilog=cli_report.REPORT_EPILOG)(cli_report.report)
app.command(epilog=cli_report.PLOT_EPILOG)(cli_report.plot)
app.command(epilog=cli_bench.EPILOG)(cli_bench.bench)


def _default_sae(method: str, bundled: bool) -> str | None:
    """The bundled SAE for the bundled photos, where the method reads concepts."""
    from torino.reducers import get

    reads = "sae" in get(method.partition("(")[0].strip()).__dataclass_fields__  # type: ignore[attr-defined]
    return "example" if bundled and reads else None


def open_named(name: str) -> Any:
    """Open a whole SAE, decoder included, to look at it or to write it again."""
    from torino_lab.shipped import lab_sae

    from torino.datasets.bundled import example_sae
    from torino.sae.model import SAE

    shipped = {"example": example_sae, "lab": lab_sae}
    return shipped[name]() if name in shipped else SAE.load(name)


def _draw(path: Path, names: list[str], batch: Any, bundled: bool, words: Mapping[int, str]) -> None:
    """Draw the first images, over their photos where there are any."""
    from torino.datasets.bundled import example_folder
    from torino.datasets.images import open_image
    from torino.viz.draw import draw_sheet, save_picture

    rows: dict[str, Any] = {}
    for name, plan in list(zip(names, batch, strict=True))[:8]:
        photo = open_image(example_folder() / "photos" / f"{name}.jpg") if bundled else None
        rows[name] = (photo, [(plan.by, plan)])
    save_picture(draw_sheet(rows, names=words), path)


def _budget(budget: int | None, keep: str | None, lengths: list[int]) -> int | None:
    """Turn ``--budget`` or ``--keep`` into a number of tokens."""
    if keep is None:
        return budget
    if budget is not None:
        raise BadParameter("Give --budget or --keep, not both.")
    share = share_of(keep)
    if len(set(lengths)) > 1:
        raise BadParameter(
            f"--keep needs images of one size, these have {min(lengths)} to {max(lengths)} patches. Give --budget."
        )
    return max(1, round(share * lengths[0]))


def _summary(list_reducers: list[str], batch: Any) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("image", "patches", "tokens", "removed", "largest group"):
        table.add_column(heading, justify="left" if heading == "image" else "right")
    rows = [
        (name, plan.patches, len(plan), int(plan.assigned[plan.assigned >= 0].bincount().max()))
        for name, plan in zip(list_reducers, batch, strict=True)
    ]
    for name, patches, tokens, largest in rows[:20]:
        table.add_row(
            escape(name),
            str(patches),
            str(tokens),
            f"{1 - tokens / patches:.1%}",
            f"{largest} patch{'es' if largest > 1 else ''}",
        )
    if len(rows) > 20:
        table.add_row(f"… {len(rows) - 20} more", "", "", "", "")
    if len(rows) > 1:
        patches, tokens = sum(row[1] for row in rows) / len(rows), sum(row[2] for row in rows) / len(rows)
        table.add_section()
        table.add_row("mean", f"{patches:.0f}", f"{tokens:.1f}", f"{1 - tokens / patches:.1%}", "", style="bold")
    return table
