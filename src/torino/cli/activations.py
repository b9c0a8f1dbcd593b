"""The command ``torino harvest``: what a tower says of many photos, kept on disk to train SAEs on."""

from __future__ import annotations

import json
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, Task, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from torino.core.errors import BadFile, BadParameter, TorinoError

if TYPE_CHECKING:  # torch and Pillow are only fetched by those who harvest
    from torino.training.activations.store import Store
    from torino.vlm.towers import Tower

out = Console()
errors = Console(stderr=True)

EPILOG = (
    "Examples: [cyan]torino harvest --tower openai/clip-vit-large-patch14-336 --images ./photos --tokens cls "
    "-o ./clip-cls[/] · [cyan]torino harvest --tower lab --images 'photos-*.parquet' --tokens random:2 -o ./store[/] · "
    "[cyan]torino harvest -o ./store[/] (goes on with a run that was stopped) · "
    "[cyan]torino harvest -o ./store --check[/]"
)
LINE_EVERY = 60  # seconds between lines where there is no terminal to draw a bar on


def harvest(
    output: Annotated[Path, typer.Option("--output", "-o", metavar="STORE", help="Folder of the store.")],
    tower: Annotated[
        str | None, typer.Option(help="Hub name or folder of a vision tower or of a model that has one; or lab.")
    ] = None,
    images: Annotated[
        str | None,
        typer.Option(
            help="Folder, .parquet or .tar file(s) (also 'photos-*.tar'), save_to_disk folder, or hf:owner/name:split."
        ),
    ] = None,
    tokens: Annotated[
        str | None, typer.Option(help="cls, random:R (R patches a photo) or all, which is the default.")
    ] = None,
    block: Annotated[
        int | None, typer.Option(help="Zero-based block whose output is taken; by default what the model hands on.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Only the first this many photos.")] = None,
    padding: Annotated[
        str | None,
        typer.Option(help="crop: as the tower's processor does it; square: pad first, so that nothing is cut."),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of the random patches; 0 by default.")] = None,
    dtype: Annotated[str | None, typer.Option(help="On disk: float16, the default, or float32.")] = None,
    batch: Annotated[int, typer.Option(help="Photos that go through the tower at once.")] = 16,
    shard_rows: Annotated[
        int, typer.Option(help="About so many rows make a shard, at most 1,024 photos; a stopped run repeats one.")
    ] = 65536,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, …")] = "auto",
    check: Annotated[bool, typer.Option("--check", help="Read a store, and say whether all of it is right.")] = False,
    repair: Annotated[bool, typer.Option("--repair", help="Read a store, and harvest again what is damaged.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Run photos through a vision tower and keep its tokens on disk, to train SAEs on.

    Run the same command again, or name the store alone, to go on with what was stopped.
    """
    output = output.expanduser()
    if check:
        if repair:
            raise BadParameter("Give --check or --repair, not both: the first only reads, the second also harvests.")
        _check(output, as_json)
        return
    given = {"tower": tower, "images": images, "tokens": tokens, "block": block, "limit": limit, "padding": padding}
    asked = _asked(output, given | {"seed": seed, "dtype": dtype})
    from torino.datasets import open_photos
    from torino.training.activations.cache import harvest as run

    photos = open_photos(asked["images"], limit=asked["limit"])
    opened = _tower(asked["tower"], asked["block"], device)
    shown = _Shown(len(photos))
    began = time.perf_counter()
    with shown:
        try:
            store = run(
                opened,
                photos,
                output,
                **{name: asked[name] for name in ("tokens", "padding", "seed", "dtype")},
                batch=batch,
                shard_rows=shard_rows,
                repair=repair,
                given={name: asked[name] for name in ("tower", "images", "limit")},
                progress=shown.update,
            )
        except KeyboardInterrupt:
            shown.stop()
            errors.print(f"Stopped. Go on with [cyan]torino harvest -o {escape(str(output))}[/].", highlight=False)
            raise typer.Exit(130) from None
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and "memory" not in str(error):
                raise
            raise TorinoError(
                f"{batch} photos at once do not fit into the memory of this machine (--device {device}). Try --batch "
                f"{max(1, batch // 4)}; what was harvested so far is kept."
            ) from error
    _report(store, shown.here / max(time.perf_counter() - began, 1e-9), as_json)


def _asked(output: Path, given: dict[str, Any]) -> dict[str, Any]:
    """What is asked for: options, then what an existing store was begun with, then defaults."""
    from torino.training.activations.shards import CARD, read_card

    asked: dict[str, Any] = {"tokens": "all", "padding": "crop", "seed": 0, "dtype": "float16"}
    if (output / CARD).is_file():
        card = read_card(output)
        asked |= {name: card[name] for name in ("block", *asked) if name in card} | dict(card.get("given") or {})
    asked = dict.fromkeys(given) | asked | {name: value for name, value in given.items() if value is not None}
    for name, example in (("tower", "openai/clip-vit-large-patch14-336"), ("images", "./photos")):
        if asked[name] is None:
            raise BadParameter(
                f"Say what goes into {output}: --{name} {example}. Only a store begun by this command knows."
            )
    return asked


def _tower(name: str, block: int | None, device: str) -> Tower:
    from torino.vlm.towers import device_of, load_tower, transformers

    transformers().logging.set_verbosity_error()
    transformers().logging.disable_progress_bar()
    with errors.status(f"Opening {escape(name)} …"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformers
        if name == "lab":
            from torino_lab.tower import lab_tower

            options = {} if block is None else {"block": block}
            return lab_tower(**options, device=device_of(device))
        return load_tower(name, block=block, device=device)


class _Speed(TextColumn):
    """Images a second, once it is known."""

    def __init__(self) -> None:
        super().__init__("")

    def render(self, task: Task) -> Text:
        return Text("" if not task.speed else f"{task.speed:.1f} images/s")


class _Shown:
    """The progress bar; a line a minute where there is no terminal."""

    def __init__(self, total: int) -> None:
        self.total, self.here = total, 0  # photos in all, and those of this run
        self._start, self._began, self._told = 0, 0.0, 0.0
        bar = (TextColumn("Harvesting"), BarColumn(), MofNCompleteColumn(), _Speed())
        self._bar = Progress(*bar, TimeRemainingColumn(), TextColumn("{task.fields[skipped]}"), console=errors)
        self._task: TaskID | None = None

    def __enter__(self) -> _Shown:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        if errors.is_terminal:
            self._bar.stop()

    def update(self, done: int, skipped: int) -> None:
        """Tell how many photos are done, and how many of this run were skipped."""
        lost = f"{skipped} skipped" if skipped else ""
        now = time.perf_counter()
        if self._task is None:
            self._start, self._began, self._told = done, now, now
            self._task = self._bar.add_task("", total=self.total, completed=done, skipped=lost)
            if errors.is_terminal:
                self._bar.start()
            return
        self.here = done - self._start
        self._bar.update(self._task, completed=done, skipped=lost)
        if not errors.is_terminal and now - self._told > LINE_EVERY:
            self._told = now
            speed = self.here / (now - self._began)
            left = (self.total - done) / speed / 60
            line = f"{done:,} of {self.total:,} photos, {speed:.1f} images/s, {left:.0f} minutes left"
            errors.print(f"{line}{', ' if lost else ''}{lost}", highlight=False)


def _check(folder: Path, as_json: bool) -> None:
    """Read all of a store."""
    from torino.training.activations.shards import CARD, CacheSettings, open_shards, read_card
    from torino.training.activations.store import Store

    card = read_card(folder)
    settings = CacheSettings.of(card, folder / CARD)
    with errors.status(f"Reading {settings.shards} shards …"):
        shards, faults = open_shards(folder, settings, thorough=True)
    if faults and card.get("complete"):
        more = f" {len(faults) - 1} more are not whole." if len(faults) > 1 else ""
        raise BadFile(f"{next(iter(faults.values()))}{more} Mend it with torino harvest -o {folder} --repair.")
    if faults:
        there = f"{len(shards)} of {settings.shards} shards are there and right"
        raise BadFile(f"{folder} is not finished: {there}. Go on with torino harvest -o {folder}.")
    recorded = {shard["file"]: shard["crc32"] for shard in card.get("shards", [])}
    changed = [shard.path.name for shard in shards.values() if recorded.get(shard.path.name) != shard.crc32]
    if changed:
        raise BadFile(
            f"{folder / CARD} tells other checksums than {len(changed)} shards, such as {changed[0]}. Remove the card "
            "and run the command that made the store again."
        )
    _report(Store(folder, settings, shards), None, as_json)


def _report(store: Store, speed: float | None, as_json: bool) -> None:
    from torino.training.activations.shards import SKIPPED

    told, size = store.settings, sum(shard.path.stat().st_size for shard in store.shards.values())
    if as_json:
        summary = {name: value for name, value in store.summary().items() if name not in ("mean", "shards")}
        known = {"store": str(store.folder), "data": told.data, "photos": told.photos, "width": told.width}
        known |= {"shards": len(store.shards), "bytes": size, "images_per_second": speed}
        out.print_json(json.dumps(known | summary))
        return
    what = {"cls": "the CLS token", "all": "all patches"}.get(told.tokens) or f"{told.tokens[7:]} random patches"
    out.print(
        f"{store.rows:,} rows of width {told.width}: {what} of each of {escape(told.data)}, after block {told.block} "
        f"of {escape(told.encoder or 'an unnamed tower')}.",
        highlight=False,
        soft_wrap=True,
    )
    shards = f"{len(store.shards)} shard{'s' if len(store.shards) > 1 else ''}"
    pace = ", all checksums right" if speed is None else f", {speed:.1f} images/s" if speed else ", there already"
    large = f"{size / 1e6:,.1f} MB" if size >= 1e6 else f"{size / 1e3:,.1f} kB"
    out.print(f"{large} in {shards}{pace}. Mean norm {store.mean_norm:.3g}.", highlight=False)
    if store.skipped:
        first = store.skipped[0]
        out.print(
            f"{len(store.skipped)} photos could not be used, listed in {escape(str(store.folder / SKIPPED))}; the "
            f"first, {escape(first.name)}: {escape(first.reason)}",
            highlight=False,
            soft_wrap=True,
        )
