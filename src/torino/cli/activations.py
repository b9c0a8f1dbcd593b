"""The command ``torino activations``: cache the activations of a vision tower, to train SAEs on them."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.markup import escape

from torino.cli._common import (
    AllowOutsideOption,
    DeviceOption,
    JsonOption,
    PaddingChoice,
    errors,
    examples,
    out,
    quiet_transformers,
)
from torino.cli._progress import progress
from torino.cli._stop import on_stop
from torino.core.errors import BadFile, BadParameter, TorinoError

if TYPE_CHECKING:  # these import torch, which slows down the start
    from torino.training.activations.store import Store

EPILOG = examples(
    "torino activations --tower facebook/dinov2-base --images photos -o store",
    "torino activations --tower lab --images 'photos-*.tar' --tokens cls -o store",
    "# Continue an interrupted run, or verify a store",
    "torino activations -o store",
    "torino activations -o store --check",
)


def activations(
    output: Annotated[Path, typer.Option("--output", "-o", metavar="STORE", help="Folder of the store.")],
    tower: Annotated[
        str | None, typer.Option(help="Hub name or folder of a vision tower, or of a model with one; or lab.")
    ] = None,
    images: Annotated[
        str | None,
        typer.Option(
            help="Folder, .parquet or .tar file(s) (also 'photos-*.tar'), save_to_disk folder, or hf:owner/name:split."
        ),
    ] = None,
    tokens: Annotated[
        str | None, typer.Option(help="cls, random:R (R random patches per photo) or all. [dim]\\[default: all][/]")
    ] = None,
    block: Annotated[
        int | None,
        typer.Option(help="Zero-based block whose output is used. [dim]\\[default: the feature layer of the model][/]"),
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Use only the first N photos.")] = None,
    padding: Annotated[
        PaddingChoice | None,
        typer.Option(
            help="crop: as the processor of the tower does it; square: pad to a square first, so that nothing is cut "
            "off. [dim]\\[default: crop][/]"
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the random patches. [dim]\\[default: 0][/]")] = None,
    dtype: Annotated[
        Literal["float16", "float32"] | None, typer.Option(help="Data type on disk. [dim]\\[default: float16][/]")
    ] = None,
    batch: Annotated[int, typer.Option(help="Photos per forward pass of the tower.")] = 16,
    shard_rows: Annotated[
        int,
        typer.Option(help="Approximate rows per shard, with at most 1,024 photos; a resumed run repeats one shard."),
    ] = 65536,
    device: DeviceOption = "auto",
    allow_outside: AllowOutsideOption = False,
    check: Annotated[bool, typer.Option("--check", help="Verify all checksums of a store, and stop.")] = False,
    repair: Annotated[
        bool, typer.Option("--repair", help="Verify all checksums, and write damaged shards again.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Run photos through a vision tower and cache its tokens on disk, to train SAEs on them.

    Run the same command again, or give only the store, to continue an interrupted run.
    """
    from torino.core.checks import expand_path

    output = expand_path(output, "--output")
    if check:
        if repair:
            raise BadParameter("Give --check or --repair, not both: --check only reads the store.")
        _check_store(output, as_json)
        return
    given = {"tower": tower, "images": images, "tokens": tokens, "block": block, "limit": limit, "padding": padding}
    settings = _resolve_settings(output, given | {"seed": seed, "dtype": dtype})

    from torino.datasets import open_photos
    from torino.training.activations.cache import cache_activations
    from torino.vlm.towers import load_tower

    photos = open_photos(settings["images"], limit=settings["limit"], allow_outside=allow_outside)
    with errors.status(f"Loading {escape(settings['tower'])} …"), quiet_transformers():
        opened = load_tower(settings["tower"], block=settings["block"], device=device)
    counts: list[int] = []  # photos that are done, at each report
    started = time.perf_counter()
    on_stop(f"Continue with torino activations -o {output}.")
    try:
        with progress(errors, {"photos": len(photos)}) as update:

            def report(done: int, skipped: int) -> None:
                counts.append(done)
                update("photos", done, note=f"{skipped} skipped" if skipped else "")

            store = cache_activations(
                opened,
                photos,
                output,
                **{name: settings[name] for name in ("tokens", "padding", "seed", "dtype")},
                batch=batch,
                shard_rows=shard_rows,
                repair=repair,
                source={name: settings[name] for name in ("tower", "images", "limit")},
                progress=report,
            )
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "memory" not in str(error):
            raise
        raise TorinoError(
            f"A batch of {batch} photos does not fit into memory (--device {device}). Try --batch "
            f"{max(1, batch // 4)}; finished shards are kept."
        ) from error
    new_photos = counts[-1] - counts[0] if counts else 0
    _print_store(store, new_photos / max(time.perf_counter() - started, 1e-9), as_json)


def _resolve_settings(output: Path, given: dict[str, Any]) -> dict[str, Any]:
    """Combine the given options with those of an existing store and the defaults, in this order of priority."""
    from torino.training.activations.shards import CARD, read_card

    settings: dict[str, Any] = {"tokens": "all", "padding": "crop", "seed": 0, "dtype": "float16"}
    if (output / CARD).is_file():
        card = read_card(output)
        settings |= {name: card[name] for name in ("block", *settings) if name in card} | dict(card.get("given") or {})
    settings = dict.fromkeys(given) | settings | {name: value for name, value in given.items() if value is not None}
    for name, example in (("tower", "openai/clip-vit-large-patch14-336"), ("images", "./photos")):
        if settings[name] is None:
            raise BadParameter(
                f"--{name} is missing, for example --{name} {example}. "
                f"It can be left out only if {output} was started by this command."
            )
    return settings


def _check_store(folder: Path, as_json: bool) -> None:
    """Verify all checksums of a store and print its summary."""
    from torino.training.activations.shards import CARD, CacheSettings, open_shards, read_card
    from torino.training.activations.store import Store

    card = read_card(folder)
    settings = CacheSettings.from_card(card, folder / CARD)
    with errors.status(f"Reading {settings.shards} shards …"):
        shards, faults = open_shards(folder, settings, verify_again=True)
    if faults and card.get("complete"):
        more = f" {len(faults) - 1} more shards are missing or damaged." if len(faults) > 1 else ""
        raise BadFile(f"{next(iter(faults.values()))}{more} Repair it with torino activations -o {folder} --repair.")
    if faults:
        raise BadFile(
            f"{folder} is not complete: {len(shards)} of {settings.shards} shards exist and are correct. "
            f"Continue with torino activations -o {folder}."
        )
    recorded = {shard["file"]: shard["crc32"] for shard in card.get("shards", [])}
    changed = [shard.path.name for shard in shards.values() if recorded.get(shard.path.name) != shard.crc32]
    if changed:
        raise BadFile(
            f"{folder / CARD} has other checksums than {len(changed)} shards, such as {changed[0]}. Delete the card "
            "and run the command that created the store again."
        )
    _print_store(Store(folder, settings, shards), None, as_json)


def _print_store(store: Store, rate: float | None, as_json: bool) -> None:
    """Print a summary of a store; ``rate`` is in photos per second, or None after a check."""
    from torino.training.activations.shards import SKIPPED

    settings, size = store.settings, sum(shard.path.stat().st_size for shard in store.shards.values())
    if as_json:
        summary = {name: value for name, value in store.summary().items() if name not in ("mean", "shards")}
        values = {"store": str(store.folder), "data": settings.data, "photos": settings.photos, "width": settings.width}
        values |= {"shards": len(store.shards), "bytes": size, "images_per_second": rate}
        out.print_json(json.dumps(values | summary))
        return
    names = {"cls": "the CLS token", "all": "all patches"}
    selected = names.get(settings.tokens) or f"{settings.tokens.removeprefix('random:')} random patches"
    _print(
        f"{store.rows:,} rows of width {settings.width}: {escape(selected)} of each of {escape(settings.data)}, "
        f"after block {settings.block} of {escape(settings.encoder or 'an unnamed tower')}."
    )
    shards = f"{len(store.shards)} shard{'s' if len(store.shards) > 1 else ''}"
    status = "all checksums are correct" if rate is None else f"{rate:.1f} photos/s" if rate else "already complete"
    size_text = f"{size / 1e6:,.1f} MB" if size >= 1e6 else f"{size / 1e3:,.1f} kB"
    _print(f"{size_text} in {shards}, {status}. Mean norm {store.mean_norm:.3g}.")
    if store.skipped:
        first = store.skipped[0]
        _print(
            f"{len(store.skipped)} photos could not be used, see {escape(str(store.folder / SKIPPED))}. "
            f"The first, {escape(first.name)}: {escape(first.reason)}"
        )


def _print(text: str) -> None:
    out.print(text, highlight=False, soft_wrap=True)
