"""The command ``torino concepts``: top activations, monosemanticity and names of the latents of an SAE."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from functools import lru_cache
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

import typer
from rich.markup import escape
from rich.table import Table

from torino.cli._common import (
    NO_SAE,
    AllowOutsideOption,
    DeviceOption,
    PaddingOption,
    errors,
    examples,
    load_sae,
    note,
    out,
    quiet_transformers,
)
from torino.cli._joint import write_shared_concepts
from torino.cli._progress import progress
from torino.cli._stop import on_stop
from torino.core.errors import BadFile, BadParameter

if TYPE_CHECKING:  # imported in functions, so that torino --help stays fast
    from PIL.Image import Image

    from torino.datasets import Photos
    from torino.interpret.naming import ConceptName
    from torino.interpret.photos import PhotoReader
    from torino.interpret.sheet import ConceptSummary
    from torino.interpret.top_activations import TopActivations
    from torino.sae.model import SAE
    from torino.vlm.towers import Tower

EPILOG = examples(
    "torino concepts ./my-sae --images photos/ --tower ./clip",
    "torino concepts lab --images captions.parquet --tower lab -o report",
    "torino concepts ./my-sae --images captions.parquet --tower ./clip -o report --save-names",
    "torino concepts ./my-sae --images photos/ --tower ./clip --rank monosemanticity",
    "torino concepts ./my-sae --images photos/ --tower ./clip --latents 3,17",
    "# a joint SAE: words and patches side by side; --tower is the whole model",
    "torino concepts ./joint-sae --images captions.parquet --tower lab -o report",
    "# measure the similarity of photos with another tower",
    "torino concepts ./my-sae --images photos/ --tower ./clip --embedder ./dinov2",
)
SHEET, DASHBOARD = "concepts.png", "concepts.html"
SHOWN_ROWS = 10
THUMBNAIL = 168  # pixels

RankChoice = Literal["usage", "monosemanticity", "lift"]
PoolChoice = Literal["mean", "max"]


def concepts(
    sae: Annotated[
        str, typer.Argument(metavar="SAE", help="Folder, file, hub repository or model package; 'example' is bundled.")
    ],
    images: Annotated[str, typer.Option(help="Photos: a folder, parquet file, webdataset tar, or HF dataset.")],
    tower: Annotated[
        str, typer.Option(help="Hub name, folder or model package of the vision tower that the SAE was trained on.")
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Folder of the results. Nothing is written elsewhere. Default: the folder of the SAE.",
        ),
    ] = None,
    save_names: Annotated[
        bool, typer.Option("--save-names", help="With -o: save the names next to the SAE too, for all other commands.")
    ] = False,
    replace_names: Annotated[
        bool, typer.Option("--replace-names", help="Replace the names of the SAE even if the new ones are fewer.")
    ] = False,
    top: Annotated[int, typer.Option(min=1, help=f"Concepts on the sheet ({SHEET}).")] = 24,
    page: Annotated[int, typer.Option(min=1, help=f"Concepts on the dashboard ({DASHBOARD}).")] = 240,
    latents: Annotated[str | None, typer.Option(help="Show only these latents, separated by commas: 3,17.")] = None,
    rank: Annotated[RankChoice, typer.Option(help="Order of the concepts; lift needs captions.")] = "usage",
    embedder: Annotated[
        str | None, typer.Option(help="Tower that measures the similarity of photos. Default: --tower.")
    ] = None,
    embedder_block: Annotated[
        int | None, typer.Option(help="Zero-based block of the embedder whose output is used.")
    ] = None,
    pool: Annotated[
        PoolChoice, typer.Option(help="Activation of a photo in the monosemanticity: mean or max over its patches.")
    ] = "mean",
    keep: Annotated[int, typer.Option(min=1, help="Top photos per latent, which are also used to name it.")] = 16,
    limit: Annotated[int | None, typer.Option(min=1, help="Use only the first N photos.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Photos per forward pass of the tower.")] = 16,
    padding: PaddingOption = "crop",
    device: DeviceOption = "auto",
    allow_outside: AllowOutsideOption = False,
    clip_text: Annotated[
        str | None, typer.Option(help="For a joint SAE of the space clip: the CLIP of the model's tower.")
    ] = None,
) -> None:
    """Show the top activating photos of the latents of an SAE, score their monosemanticity, and name them.

    Writes a sheet, an HTML dashboard and, if the photos have captions or labels, names. torino uses the names in the
    folder of the SAE. Run the same command again to continue an interrupted run.

    For an SAE of images and text (torino train --joint) it compares the words and the photos that each latent fires
    for, and writes shared-concepts.json and a sheet of words and patches.
    """
    # Validate the options before loading the tower.
    if embedder is None and embedder_block is not None:
        raise BadParameter("--embedder-block selects a block of the embedder. Give one: --embedder TOWER.")
    folder, loaded = _open_sae(sae, output, save_names)
    target = _check_writable(output or cast(Path, folder))
    from torino.sae.joint import JointSAE

    if isinstance(loaded, JointSAE):
        write_shared_concepts(loaded, tower, images, target, top, limit, device, allow_outside, clip_text)
        return
    selected = _parse_latents(latents, loaded.latents)

    from torino.datasets import open_photos

    photos = open_photos(images, limit=limit, allow_outside=allow_outside)
    if len(photos) <= keep:
        raise BadParameter(
            f"Comparing the top {keep} photos of each latent with the others needs more than {keep} photos, and "
            f"{images} has {len(photos)}. Give more photos, or a smaller --keep."
        )
    if rank == "lift" and not _has_captions(photos):
        raise BadParameter(f"--rank lift needs names, and the photos of {images} have no captions or labels.")
    opened, other = _open_towers(loaded, tower, embedder, embedder_block, device)

    from torino.interpret.dashboard import write_dashboard
    from torino.interpret.photos import PhotoReader
    from torino.interpret.sheet import draw_concept_sheet, resize_longest_side, select_concepts
    from torino.viz.draw import save_picture

    reader = PhotoReader(photos, opened, other, padding=padding)
    on_stop("Run the same command again to continue.")
    activations = _collect(loaded, reader, target, folder, keep, pool, batch)
    texts = reader.get_texts()
    names = _name_concepts(loaded, activations, texts)

    @lru_cache(2048)  # 85 kB each
    def load_photo(photo: int) -> Image:
        return resize_longest_side(reader.get_picture(photo), THUMBNAIL)

    title = f"Concepts of {loaded.card.name or Path(sae).name}"
    summaries = select_concepts(activations, names, latents=selected, top=max(top, page), rank=rank)
    with errors.status("Drawing …"):
        save_picture(draw_concept_sheet(activations, summaries[:top], load_photo, title=title), target / SHEET)
        write_dashboard(
            target / DASHBOARD,
            loaded,
            activations,
            summaries[:page],
            load_photo,
            title=title,
            sort=rank,
            texts=texts,
        )
    _print_summary(activations, summaries)
    for file in (target / SHEET, target / DASHBOARD):
        out.print(f"Wrote {escape(str(file))}", highlight=False, soft_wrap=True)
    if any(texts):
        _save_names(target, folder, names, activations, save_names, replace_names)


def _open_sae(name: str, output: Path | None, save_names: bool) -> tuple[Path | None, SAE]:
    """Return the folder of the SAE, None if it is not a local one, and the SAE."""
    from torino.core.checks import expand_path
    from torino.sae.formats.locate import locate

    if name == NO_SAE:
        raise BadParameter("torino concepts describes the latents of an SAE, so SAE cannot be none.")
    folder = locate(name).parent if expand_path(name, "SAE").exists() else None
    reason = f"{name} is not a local folder" if folder is None else ""
    if folder is not None and not os.access(folder, os.W_OK):
        reason = f"{folder} is read-only"
    if reason and output is None:
        raise BadParameter(f"{reason}, so give a folder for the results: -o FOLDER.")
    if reason and save_names:
        raise BadParameter(f"{reason}, so --save-names cannot save names there. Omit it; the names are saved in -o.")
    return folder, cast("SAE", load_sae(name, decoder=True))


def _check_writable(folder: Path) -> Path:
    """Create a folder if needed, and refuse it if nothing can be written to it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or error
        raise BadParameter(f"Cannot write to {folder}: {reason}. Choose another folder: -o FOLDER.") from error
    if not os.access(folder, os.W_OK):
        raise BadParameter(f"Cannot write to {folder}: it is read-only. Choose another folder: -o FOLDER.")
    return folder


def _parse_latents(text: str | None, latents: int) -> list[int] | None:
    """Parse a list such as ``3,17``."""
    if text is None:
        return None
    words = [word.strip() for word in text.split(",")]
    if not all(re.fullmatch(r"\d{1,9}", word) for word in words):
        raise BadParameter(f"--latents takes whole numbers separated by commas, such as 3,17, got {text!r}.")
    numbers = [int(word) for word in words]
    if max(numbers) >= latents:
        raise BadParameter(f"--latents contains {max(numbers)}, but this SAE has {latents} latents, numbered from 0.")
    return numbers


def _has_captions(photos: Photos) -> bool:
    """Return whether any readable photo has a caption or label."""
    for index in range(len(photos)):
        with suppress(BadFile, OSError):
            if photos[index].texts:
                return True
    return False


def _open_towers(
    sae: SAE, name: str, embedder: str | None, embedder_block: int | None, device: str
) -> tuple[Tower, Tower | None]:
    """Load the tower of the SAE, and the embedder if it is another one."""
    from torino.vlm.towers import load_tower

    with errors.status(f"Loading {escape(name)} …"), quiet_transformers():
        opened = load_tower(name, block=sae.card.block, device=device)
        sae.check_origin(opened.origin, opened.width)
        other = None if embedder is None else load_tower(embedder, block=embedder_block, device=device)
    sae.to(next(opened.model.parameters()).device)
    return opened, other


def _collect(
    sae: SAE, reader: PhotoReader, target: Path, folder: Path | None, keep: int, pool: PoolChoice, batch: int
) -> TopActivations:
    from torino.interpret.top_activations import collect_top_activations

    with progress(errors, {"photos": len(reader)}) as update:
        activations = collect_top_activations(
            sae,
            reader,
            keep=keep,
            pool=pool,
            batch=batch,
            output=target,
            earlier=folder,
            progress=lambda done, total: update("photos", done, total),
        )
    if activations.skipped:
        reason = next(iter(activations.skipped.values()))
        note(f"{len(activations.skipped)} photos could not be read and were skipped. First error: {reason}")
    return activations


def _name_concepts(sae: SAE, activations: TopActivations, texts: list[tuple[str, ...]]) -> dict[int, ConceptName]:
    """Name the concepts if the photos have captions."""
    from torino.interpret.naming import name_concepts

    if not any(texts):
        note("The photos have no captions or labels, so concepts stay unnamed.")
        return {}
    names = name_concepts(activations, texts)
    sae.names = {latent: name.name for latent, name in names.items()}
    return names


def _save_names(
    target: Path,
    folder: Path | None,
    names: dict[int, ConceptName],
    activations: TopActivations,
    save: bool,
    replace: bool,
) -> None:
    """Save the names in the folder of the results, and next to the SAE if ``save``."""
    from torino.interpret.naming import save_names
    from torino.sae.formats.native import count_names, read_digest

    next_to_sae = folder is not None and target.resolve() == folder.resolve()
    if not next_to_sae:
        path = save_names(target, names, activations, sae_folder=folder, replace=True)
        out.print(f"Wrote {escape(str(path))}", highlight=False, soft_wrap=True)
        if not save:
            note("The names of the SAE were not changed. Give --save-names to save the new ones there.")
            return
    assert folder is not None
    before = count_names(folder, read_digest(folder))
    try:
        path = save_names(folder, names, activations, replace=replace)
        text = f"Saved {len(names):,} names in {path}" + (f" in place of {before:,}" if before else "")
        out.print(escape(text), highlight=False, soft_wrap=True)
    except BadParameter as error:
        if save:
            raise
        note(str(error))


def _print_summary(activations: TopActivations, summaries: list[ConceptSummary]) -> None:
    table = Table(box=None, pad_edge=False)
    for heading in ("latent", "name", "of patches", "of photos", "monosemanticity", "lift"):
        table.add_column(heading, justify="left" if heading == "name" else "right")
    for concept in summaries[:SHOWN_ROWS]:
        table.add_row(
            str(concept.latent),
            escape(concept.name.name) if concept.name else "",
            f"{concept.patch_share:.2%}",
            f"{concept.photo_share:.1%}",
            "" if isnan(concept.monosemanticity) else f"{concept.monosemanticity:.3f}",
            f"{concept.name.lift:.1f}" if concept.name else "",
        )
    if len(summaries) > SHOWN_ROWS:
        table.add_row("…", f"{len(summaries) - SHOWN_ROWS} more", "", "", "", "")
    out.print(table)
    embedding = escape(activations.metadata["embedding"])
    out.print(f"{activations.photo_count} photos; similarity by the {embedding}", highlight=False, soft_wrap=True)
    scores = str(activations.monosemanticity)
    out.print(scores[0].upper() + scores[1:] + ".", highlight=False, soft_wrap=True)
