"""The command ``torino concepts``: what fires the latents of an SAE, in pictures, figures and words."""

from __future__ import annotations

import os
import warnings
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from torino.core.errors import BadFile, BadParameter

if TYPE_CHECKING:  # torch, Pillow and transformers are only fetched by those who ask
    from PIL.Image import Image

    from torino.datasets import Photos
    from torino.interpret.naming import ConceptName
    from torino.interpret.photos import Looking
    from torino.interpret.sheet import Concept
    from torino.interpret.top_activations import Evidence
    from torino.sae.model import SAE
    from torino.vlm.towers import Tower

out = Console()
errors = Console(stderr=True)

EPILOG = (
    "Examples: [cyan]torino concepts ./my-sae --images photos/ --tower openai/clip-vit-large-patch14-336[/] · "
    "[cyan]torino concepts ./my-sae --images captions.parquet --tower lab --rank monosemanticity -o report[/] · "
    "[cyan]torino concepts ./my-sae --images photos/ --tower ./clip --latents 3,17 --judge facebook/dinov2-base[/]"
)
SHEET, PAGE = "concepts.png", "concepts.html"
RANKS = ("usage", "monosemanticity", "lift")
LINE_EVERY = 60  # seconds between lines where there is no terminal to draw a bar on


def concepts(
    sae: Annotated[str, typer.Argument(metavar="SAE", help="Folder, file or hub repository; 'example' is bundled.")],
    images: Annotated[str, typer.Option(help="Photos: a folder, parquet file, webdataset tar, or HF dataset.")],
    tower: Annotated[str, typer.Option(help="Hub name or folder of the tower that the SAE reads; 'lab' is the lab's.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder for sheet and page.  [dim]\\[default: the SAE's][/]")
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Concepts on the sheet.")] = 24,
    page: Annotated[int, typer.Option(min=1, help="Concepts on the page.")] = 240,
    latents: Annotated[str | None, typer.Option(help="Only these latents: 3,17.")] = None,
    rank: Annotated[str, typer.Option(help="Which concepts, and in which order: usage, monosemanticity or lift.")] = (
        "usage"
    ),
    judge: Annotated[
        str | None,
        typer.Option(help="Tower that says how alike photos are.  [dim]\\[default: the tower itself][/]"),
    ] = None,
    judge_block: Annotated[int | None, typer.Option(help="Block that the judge is tapped after.")] = None,
    pool: Annotated[
        str, typer.Option(help="Activation of a photo, for monosemanticity: mean or max over its patches.")
    ] = "mean",
    keep: Annotated[int, typer.Option(min=1, help="Photos kept for each latent, and used to name it.")] = 16,
    limit: Annotated[int | None, typer.Option(min=1, help="Look at the first photos only.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Photos looked at together.")] = 16,
    padding: Annotated[
        str, typer.Option(help="crop: as the tower's processor does it; square: pad first, so that nothing is cut.")
    ] = "crop",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, …")] = "auto",
) -> None:
    """Show what fires the concepts of an SAE: a sheet, a page, scores, and names where photos have captions."""
    from torino.datasets import open_photos

    # Whatever can be wrong without the tower is said before the tower is fetched.
    if rank not in RANKS:
        raise BadParameter(f"--rank must be usage, monosemanticity or lift, got {rank!r}.")
    if pool not in ("mean", "max"):
        raise BadParameter(f"--pool must be mean or max, got {pool!r}.")
    if padding not in ("crop", "square"):
        raise BadParameter(f"--padding must be crop or square, got {padding!r}.")
    if judge is None and judge_block is not None:
        raise BadParameter("--judge-block chooses a block of the judge. Say which one: --judge TOWER.")
    folder, loaded = _open_sae(sae, output)
    target = _writable(output or folder)
    wanted = _numbers(latents, loaded.latents)
    photos = open_photos(images, limit=limit)
    _enough(len(photos), keep)
    if rank == "lift" and not _said(photos):
        raise BadParameter(f"--rank lift takes names, and the photos of {images} have no captions or labels.")
    opened, other = _towers(loaded, tower, judge, judge_block, device)
    from torino.interpret.photos import Looking

    looking = Looking(photos, opened, other, padding=padding)  # type: ignore[arg-type]: checked above
    try:
        evidence = _gather(loaded, looking, folder, keep, pool, batch)
    except KeyboardInterrupt:
        errors.print("Stopped. Run the same command again to go on.")
        raise typer.Exit(130) from None
    texts = looking.texts()
    names = _names(folder, loaded, evidence, texts)
    from torino.interpret.dashboard import write_page
    from torino.interpret.sheet import concepts as choose
    from torino.interpret.sheet import draw_concepts, shrunk
    from torino.viz.draw import save_picture

    @lru_cache(2048)  # 85 kB each
    def picture(photo: int) -> Image:
        return shrunk(looking.picture(photo), 168)

    title = f"Concepts of {loaded.card.name or Path(sae).name}"
    shown = choose(evidence, names, latents=wanted, top=max(top, page), rank=rank)  # type: ignore[arg-type]: checked
    with errors.status("Drawing …"):
        save_picture(draw_concepts(evidence, shown[:top], picture, title=title), target / SHEET)
        write_page(target / PAGE, loaded, evidence, shown[:page], picture, title=title, sort=rank, texts=texts)
    _print(evidence, shown)
    for file in (target / SHEET, target / PAGE):
        out.print(f"Wrote {escape(str(file))}", highlight=False, soft_wrap=True)


def _open_sae(name: str, output: Path | None) -> tuple[Path, SAE]:
    """The SAE, and the folder for what is found out about it: its own, or the output where that is not ours."""
    from torino.sae.formats.locate import locate
    from torino.sae.model import SAE

    if name == "example" or not Path(name).expanduser().exists():
        from torino.datasets.bundled import example_sae

        loaded = example_sae() if name == "example" else SAE.load(name)
        if output is None:
            raise BadParameter(f"{name} is not a local folder, so say where to write what is found: -o FOLDER.")
        return output, loaded
    loaded = SAE.load(name)
    folder = locate(name).parent
    if not os.access(folder, os.W_OK):
        if output is None:
            raise BadParameter(f"{folder} is read-only, so say where to write what is found: -o FOLDER.")
        return output, loaded
    return folder, loaded


def _writable(folder: Path) -> Path:
    """A folder that can be written to, said before hours are spent."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or error
        raise BadParameter(f"Cannot write to {folder}: {reason}. Choose another folder: -o FOLDER.") from error
    if not os.access(folder, os.W_OK):
        raise BadParameter(f"Cannot write to {folder}: it is read-only. Choose another folder: -o FOLDER.")
    return folder


def _numbers(latents: str | None, of: int) -> list[int] | None:
    """Read a list such as ``3,17``."""
    if latents is None:
        return None
    parts = [part.strip() for part in latents.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise BadParameter(f"--latents takes whole numbers with commas, such as 3,17; got {latents!r}.")
    numbers = [int(part) for part in parts]
    if max(numbers) >= of:
        raise BadParameter(f"--latents asks for {max(numbers)}, and this SAE has {of} latents, numbered from 0.")
    return numbers


def _enough(photos: int, keep: int) -> None:
    if photos <= keep:
        raise BadParameter(
            f"The {keep} strongest photos of each concept are compared with the others, and there are {photos} in all. "
            f"Give more photos, or a smaller --keep."
        )


def _said(photos: Photos) -> bool:
    """Whether any photo has a caption or label; one that cannot be read has none."""
    for index in range(len(photos)):
        with suppress(BadFile, OSError):
            if photos[index].texts:
                return True
    return False


def _towers(sae: SAE, name: str, judge: str | None, judge_block: int | None, device: str) -> tuple[Tower, Tower | None]:
    """The tower that the SAE reads, and the judge if it is another one."""
    from torino.vlm.towers import transformers

    library = transformers()
    library.logging.set_verbosity_error()
    library.logging.disable_progress_bar()
    with errors.status(f"Opening {escape(name)} …"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformers
        opened = _tower(name, sae.card.block, device)
        sae.check_origin(opened.origin, opened.width)
        other = None if judge is None else _tower(judge, judge_block, device)
    sae.to(next(opened.model.parameters()).device)
    return opened, other


def _tower(name: str, block: int | None, device: str) -> Tower:
    from torino.vlm.towers import load_tower

    if name == "lab":
        from torino_lab.tower import lab_tower

        return lab_tower(device=device) if block is None else lab_tower(block, device=device)
    return load_tower(name, block=block, device=device)


def _gather(sae: SAE, looking: Looking, folder: Path, keep: int, pool: str, batch: int) -> Evidence:
    from torino.interpret.top_activations import gather

    with _Shown(len(looking), batch) as shown:
        evidence = gather(
            sae,
            looking,
            keep=keep,
            pool=pool,  # type: ignore[arg-type]: checked above
            batch=batch,
            into=folder,
            progress=shown.update,
        )
    if evidence.skipped:
        first = next(iter(evidence.skipped.values()))
        _note(f"{len(evidence.skipped)} photos could not be read and were left out. The first: {first}")
    return evidence


class _Shown:
    """The progress bar; a line a minute where there is no terminal."""

    def __init__(self, total: int, batch: int) -> None:
        self._total, self._batch = total, batch
        rate = TextColumn("{task.fields[rate]}")
        self._bar = Progress(
            TextColumn("Looking"),
            BarColumn(),
            MofNCompleteColumn(),
            rate,
            TimeRemainingColumn(),
            console=errors,
            transient=True,
        )
        self._task = self._bar.add_task("", total=total, rate="")
        self._start, self._began = 0, monotonic()
        self._told = self._began

    def __enter__(self) -> _Shown:
        if errors.is_terminal:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if errors.is_terminal:
            self._bar.stop()

    def update(self, done: int, of: int) -> None:
        """Tell how many photos are done."""
        now = monotonic()
        if self._start == 0 and done > self._batch:  # taken up where an earlier run was stopped
            self._start = done - self._batch
            self._bar.reset(self._task, total=of, completed=self._start, rate="")
        rate = (done - self._start) / max(now - self._began, 1e-9)
        self._bar.update(self._task, completed=done, rate=f"{rate:.1f} images/s")
        if not errors.is_terminal and now - self._told > LINE_EVERY:
            self._told = now
            left = (of - done) / rate / 60
            _say(f"{done:,} of {of:,} photos, {rate:.1f} images/s, {left:.0f} minutes left")


def _say(line: str) -> None:
    errors.print(escape(line), highlight=False, soft_wrap=True)


def _note(line: str) -> None:
    errors.print(f"[yellow]note:[/] {escape(line)}", highlight=False, soft_wrap=True)


def _names(folder: Path, sae: SAE, evidence: Evidence, texts: list[tuple[str, ...]]) -> dict[int, ConceptName]:
    """Name the concepts where there are words for it, and keep the names beside the SAE."""
    from torino.interpret.naming import name_concepts, save_names

    if not any(texts):
        _note("The photos have no captions or labels, so concepts stay unnamed.")
        return {}
    names = name_concepts(evidence, texts)
    save_names(folder, names, evidence)
    sae.names = {latent: one.name for latent, one in names.items()}
    return names


def _print(evidence: Evidence, shown: list[Concept]) -> None:
    table = Table(box=None, pad_edge=False)
    for heading in ("latent", "name", "of patches", "of photos", "monosemanticity", "lift"):
        table.add_column(heading, justify="left" if heading == "name" else "right")
    for one in shown[:10]:
        table.add_row(
            str(one.latent),
            escape(one.name.name) if one.name else "",
            f"{one.usage:.2%}",
            f"{one.photos:.1%}",
            f"{one.monosemanticity:.3f}" if one.monosemanticity == one.monosemanticity else "",
            f"{one.name.lift:.1f}" if one.name else "",
        )
    if len(shown) > 10:
        table.add_row("…", f"{len(shown) - 10} more", "", "", "", "")
    out.print(table)
    scores = str(evidence.monosemanticity)
    out.print(f"{evidence.photos} photos, judged by the {escape(evidence.about['judge'])}", highlight=False)
    out.print(scores[0].upper() + scores[1:] + ".", highlight=False, soft_wrap=True)
