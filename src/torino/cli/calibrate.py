"""``torino calibrate``: find the parameters that give a wanted number of tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from torino.cli._common import SaeOption, errors, examples, load_sae, out
from torino.cli._photos import default_photo_sae, photo_tokens
from torino.cli._progress import progress
from torino.cli._stop import START_OVER, on_stop
from torino.core.errors import BadParameter

EPILOG = examples(
    "torino calibrate --target 128",
    "torino calibrate tokens.npz --sae ./my-sae --target 192",
    "torino calibrate --method torino-x --target 100",
)
SHOWN_ROWS = 30
METHODS = ("torino-p", "torino-m", "torino-x")


def calibrate(
    tokens: Annotated[
        Path | None, typer.Argument(metavar="TOKENS", help="Tokens of a few typical images; bundled ones by default.")
    ] = None,
    target: Annotated[float, typer.Option(help="Wanted mean number of tokens per image.")] = 128,
    sae: SaeOption = None,
    method: Annotated[
        str, typer.Option(help="torino-m (the same as torino-p) or torino-x, optionally with options in brackets.")
    ] = "torino-m",
    max_k: Annotated[int, typer.Option(min=1, help="Largest k to try.")] = 6,
) -> None:
    """Find the (k, δ) that gives a wanted mean number of tokens, or the threshold of torino-x."""
    on_stop(START_OVER)
    from torino.core.tokens import load_tokens
    from torino.reducers import TorinoX, make
    from torino.reducers.calibration import calibrate as search
    from torino.reducers.calibration import calibrate_cover

    images = [] if tokens is None else load_tokens(tokens)
    if sae is None and tokens is not None:
        raise BadParameter("Say which SAE reads these tokens: --sae FOLDER, --sae owner/repository, or --sae none.")
    if method.partition("(")[0].strip() not in METHODS:
        raise BadParameter(f"--method must be torino-p, torino-m or torino-x, got {method!r}.")
    sae = default_photo_sae() if sae is None else sae
    encoder = load_sae(sae)
    reducer = make(method, sae=encoder)
    if tokens is None:
        images = photo_tokens(sae, encoder)
    if isinstance(reducer, TorinoX):
        result = calibrate_cover(images, target, reducer=reducer)
        reducer = replace(reducer, budget=None, pooled=False, min_gain=float(f"{result.min_gain:.8g}"))
        low, high = int(result.counts.min()), int(result.counts.max())
        out.print(
            f"Closest to {target:g}: {escape(reducer.spec)}, {result.mean:.1f} tokens on average over "
            f"{len(images)} images, {low} to {high}.",
            highlight=False,
        )
        return
    with progress(errors) as report, errors.status("Computing concepts …") as status:

        def update(done: int, total: int) -> None:
            status.stop()
            report("settings", done, total)

        best = search(images, target, sae=encoder, max_k=max_k, progress=update)
    table = Table(title=f"tokens per image over {len(images)} images", box=None, pad_edge=False)
    for heading in ("k", "delta", "mean", "min", "median", "max"):
        table.add_column(heading, justify="right")
    means = {setting: float(counts.double().mean()) for setting, counts in best.table.items()}
    nearest = sorted(means, key=lambda setting: (abs(means[setting] - target), setting))[:SHOWN_ROWS]
    for k, delta in sorted(nearest, key=lambda setting: means[setting]):
        counts = best.table[k, delta]
        values = counts.double()
        cells = (f"{float(values.mean()):.1f}", str(int(counts.min())), f"{float(values.median()):.0f}")
        style = "bold green" if (k, delta) == (best.k, best.delta) else ""
        table.add_row(str(k), str(delta), *cells, str(int(counts.max())), style=style)
    out.print(table)
    if len(means) > SHOWN_ROWS:
        out.print(f"The {SHOWN_ROWS} nearest of {len(means):,} settings.", highlight=False)
    out.print(f"Closest to {target:g}: --kd {best.k},{best.delta}, {best.mean:.1f} tokens on average.", highlight=False)
