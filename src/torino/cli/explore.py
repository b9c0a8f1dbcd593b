"""``torino explore``: see in a browser why a token survived."""

from __future__ import annotations

import signal
import sys
import webbrowser
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from torino.cli._common import (
    LAB,
    NO_SAE,
    AttentionOption,
    ClipOption,
    DeviceOption,
    DtypeOption,
    ModelOption,
    PaddingOption,
    PositionsOption,
    SaeOption,
    errors,
    examples,
    find_package,
    load_sae,
    load_session,
    memory_errors,
    note,
    out,
    quiet_transformers,
)
from torino.cli._stop import on_stop

EPILOG = examples(
    "torino explore",
    "torino explore ./photos",
    "torino explore --run ./run --run ./another-run",
    "torino explore ./photos --model llava-hf/llava-1.5-7b-hf --sae ./my-sae --device cuda",
    "torino explore --port 0 --no-browser",
)
NETWORK = "Network"


def explore(
    photos: Annotated[
        list[str] | None,
        typer.Argument(metavar="PHOTOS", help="Photos, folders, parquet or tar files. Default: the bundled photos."),
    ] = None,
    run: Annotated[
        list[Path] | None, typer.Option(help="Folder written by torino eval (repeatable); it may still be running.")
    ] = None,
    data: Annotated[Path | None, typer.Option(help="Folder of the task files of the runs, if they have moved.")] = None,
    model: ModelOption = LAB,
    sae: SaeOption = None,
    clip: ClipOption = None,
    padding: PaddingOption = "crop",
    positions: PositionsOption = "auto",
    attention: AttentionOption = "auto",
    device: DeviceOption = "auto",
    dtype: DtypeOption = None,
    host: Annotated[str, typer.Option(help="Address to listen on.", rich_help_panel=NETWORK)] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free port.", rich_help_panel=NETWORK)] = 8090,
    browser: Annotated[
        bool, typer.Option("--browser/--no-browser", help="Open the page.", rich_help_panel=NETWORK)
    ] = True,
    read_only: Annotated[
        bool | None,
        typer.Option(
            "--read-only/--allow-edits",
            help="Whether visitors may rename concepts and store photos. Default: only on this machine.",
            rich_help_panel=NETWORK,
        ),
    ] = None,
    max_megabytes: Annotated[int, typer.Option(min=1, help="Size of a photo.", rich_help_panel=NETWORK)] = 32,
) -> None:
    """Explore photos, concepts, methods and evaluation runs in a browser.

    Photos that are dropped on the page stay in memory and are not written to disk unless you ask for it. The page loads
    nothing from other servers.
    """
    on_stop("Run the same command again; links to bundled photos and folders stay valid.")
    with errors.status("Starting …") as status:
        from torino.core.extras import optional_import

        with optional_import("torino explore needs", "torino[serve]"):
            import fastapi  # noqa: F401  # pyright: ignore[reportUnusedImport]
            import uvicorn  # noqa: F401  # pyright: ignore[reportUnusedImport]
        from torino.core.device import resolve_device
        from torino.explorer.launch import ExplorerSources, check_sources, is_loopback, open_explorer, run_explorer
        from torino.explorer.options import ExplorerOptions
        from torino.serving.server.options import MEGABYTE
        from torino.vlm.loading import check_model

        check_sources(run or (), data)
        check_model(model)
        package = find_package(model)
        if sae is None:
            sae = model if package is not None and package.sae is not None else NO_SAE
        local = is_loopback(host)
        edits = local if read_only is None else not read_only
        options = ExplorerOptions(host=host, max_bytes=max_megabytes * MEGABYTE, edits=edits)
        sources = ExplorerSources(photos or (), run or (), data)
        encoder = load_sae(sae, device=resolve_device(device), decoder=True)
        with quiet_transformers(), memory_errors(model, device):
            status.update(f"Loading {escape(model)} …")
            vlm = load_session(model, device, dtype, padding, positions, attention, clip)
        explorer = open_explorer(vlm, encoder, model, sources, options)
    if sae == NO_SAE:
        note("There is no SAE, so patches show coordinates of their tokens instead of concepts. Give --sae FOLDER.")
    if not local:
        note(f"The explorer listens on {host}, so others may reach it. Everybody who does can use the model.")

    def on_start(address: str) -> None:
        out.print(f"Explore at [bold]{address}[/] (Ctrl-C stops)", highlight=False, soft_wrap=True)
        if browser and local and sys.stdout.isatty():  # not in scripts
            webbrowser.open(address)

    with quiet_transformers(), memory_errors(model, device):
        stopped_by = run_explorer(explorer, port, on_start)
    if stopped_by is not None:
        signal.raise_signal(stopped_by)
