"""Reduce images to a token store, for ``torino reduce``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rich.markup import escape

from torino.cli._common import (
    DtypeChoice,
    errors,
    memory_errors,
    missing_sae,
    out,
    parse_pair,
    parse_shard,
    parse_share,
    reads_concepts,
)
from torino.cli._progress import progress
from torino.cli._stop import on_stop
from torino.core.errors import BadParameter

if TYPE_CHECKING:
    from torino.serving.settings import ReductionSettings
    from torino.serving.store.write import StoreSummary

LOADING = "loading the model"


def reduce_to_store(
    images: list[str],
    output: Path | None,
    *,
    model: str,
    method: str,
    sae: str | None,
    kd: str | None,
    budget: int | None,
    keep: str | None,
    options: dict[str, Any],
    shard: str | None,
    host: dict[str, Any],
    device: str,
    dtype: DtypeChoice | None,
    limit: int | None,
    allow_outside: bool,
) -> None:
    """Reduce images and write what the language model receives to the folder ``output``."""
    folder = _check_output(output)
    part = (0, 1) if shard is None else parse_shard(shard)

    from torino.core.device import resolve_device
    from torino.serving.store import StoreOptions, reduce_images
    from torino.vlm.loading import check_model

    settings = _settings(model, method, sae, kd, budget, keep, host)
    check_model(model)
    store_options = StoreOptions(**options, part=part)
    if store_options.ray is None:
        device = str(resolve_device(device))
    sources = [_bundled_photo(name) for name in images]
    started: list[float] = []
    on_stop("Run the same command again to continue.")
    with memory_errors(model, device), progress(errors) as update:
        update(LOADING, 0, 1)

        def report(done: int, total: int, skipped: int) -> None:
            if not started:
                update(LOADING, 1, 1)
                started.append(time.perf_counter())
            update("images", done, total, f"{skipped} skipped" if skipped else "")

        summary = reduce_images(
            sources,
            folder,
            model,
            settings,
            store_options,
            device=device,
            dtype=dtype,
            limit=limit,
            allow_outside=allow_outside,
            progress=report,
        )
    _print_summary(summary, time.perf_counter() - started[0], store_options.part)


def _check_output(output: Path | None) -> Path:
    from torino.core.checks import expand_path

    if output is None:
        raise BadParameter("Reduced images are written to a folder. Give it with -o, for example -o store.")
    output = expand_path(output, "--output")
    if output.suffix in (".npz", ".safetensors") or output.is_file():
        raise BadParameter(f"--output {output} is a file, and images are written to a folder. Give -o FOLDER.")
    return output


def _settings(
    model: str,
    method: str,
    sae: str | None,
    kd: str | None,
    budget: int | None,
    keep: str | None,
    host: dict[str, Any],
) -> ReductionSettings:
    from torino.serving.settings import ALL_TOKENS, ReductionSettings, default_sae

    if kd is not None:
        if "(" in method or method == ALL_TOKENS:
            raise BadParameter(f"Give --kd, or options in brackets as in {method!r}, not both.")
        k, delta = parse_pair(kd)
        method = f"{method}(k={k}, delta={delta})"
    sae = sae if sae is not None else default_sae(method, model)
    if sae is None and method != ALL_TOKENS and reads_concepts(method):
        raise missing_sae(method)
    share = None if keep is None else parse_share(keep)
    return ReductionSettings(method, sae, budget, share, **host)


def _bundled_photo(name: str) -> str:
    """Return the path of a bundled photo that is given by its name; other sources as they are."""
    from torino.datasets.bundled import PHOTOS, example_folder

    return str(example_folder() / "photos" / f"{name}.jpg") if name in PHOTOS and not Path(name).exists() else name


def _print_summary(summary: StoreSummary, seconds: float, part: tuple[int, int]) -> None:
    from torino.core.explanation import format_removed
    from torino.serving.store.format import SKIPPED

    settings = summary.settings
    mean, before = (count / max(summary.images, 1) for count in (summary.tokens, summary.placeholders))
    _print(
        f"{summary.images:,} images: {summary.tokens:,} tokens of width {settings.width}, {mean:.1f} of {before:.0f} "
        f"per image ({format_removed(before, mean)} removed), by {escape(settings.method)} on {escape(settings.model)}."
    )
    own = range(part[0], settings.shards, part[1])
    size = sum(settings.shard_path(summary.folder, number).stat().st_size for number in own)
    text = f"{size / 1e6:,.1f} MB" if size >= 1e6 else f"{size / 1e3:,.1f} kB"
    rate = f"{summary.new_images / seconds:.1f} images/s" if summary.new_images else "already complete"
    shards = f"{summary.shards} shard{'s' if summary.shards != 1 else ''}"
    _print(f"{text} in {shards} of {escape(str(summary.folder))}, {rate}.")
    if not summary.complete:
        _print(f"This is part {part[0] + 1}/{part[1]}. The store is complete when the other parts are written too.")
    if summary.skipped:
        name, reason = summary.skipped[0]
        listed = f", see {escape(str(summary.folder / SKIPPED))}" if summary.complete else ""
        _print(f"{len(summary.skipped)} images could not be used{listed}. The first, {escape(name)}: {escape(reason)}")


def _print(text: str) -> None:
    cast(Any, out).print(text, highlight=False, soft_wrap=True)
