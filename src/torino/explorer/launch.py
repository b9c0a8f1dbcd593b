"""Start an explorer: load model and SAE, open photos and runs, listen."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torino.core.concepts import ConceptEncoder
from torino.core.errors import BadParameter
from torino.core.io import cache_dir
from torino.datasets import Photos, open_sources
from torino.explorer.app import Explorer, build_app
from torino.explorer.atlas import ConceptAtlas
from torino.explorer.model import ExplorerModel
from torino.explorer.options import ExplorerOptions
from torino.explorer.photos import BundledCrops, PhotoLibrary
from torino.explorer.runs import RunBrowser
from torino.serving.server.gate import ServerState
from torino.serving.server.http import open_socket, run_app
from torino.serving.server.options import ServerOptions
from torino.vlm.session import VLM

PHOTOS, ATLAS = "photos", "atlas"


@dataclass(frozen=True)
class ExplorerSources:
    """What an explorer shows.

    Attributes
    ----------
    photos : sequence of str
        Sources of photos for :func:`torino.datasets.open_sources`; the bundled ones if there are none.
    runs : sequence of Path
        Folders of ``torino eval``.
    data : Path or None
        Folder of the runs' task files, if they have moved.
    folder : Path or None
        Folder for the atlas and for photos that visitors store; the cache folder by default.
    """

    photos: Sequence[str] = ()
    runs: Sequence[Path] = ()
    data: Path | None = None
    folder: Path | None = None


def open_explorer(
    vlm: VLM,
    encoder: ConceptEncoder,
    name: str,
    sources: ExplorerSources | None = None,
    options: ExplorerOptions | None = None,
) -> Explorer:
    """Open photos and runs around a model."""
    sources, options = sources or ExplorerSources(), options or ExplorerOptions()
    folder = cache_dir() / "explorer" if sources.folder is None else sources.folder
    runs = [RunBrowser(run, sources.data) for run in sources.runs]
    collection: Photos | None = open_sources(sources.photos) if sources.photos else None
    model = ExplorerModel(vlm, encoder, name, options.encoded, options.waiting)
    atlas = None if model.sae is None else ConceptAtlas(model, collection or BundledCrops(), folder / ATLAS)
    library = PhotoLibrary(options, collection, runs, folder / PHOTOS)
    return Explorer(model, library, runs, atlas, options)


def run_explorer(explorer: Explorer, port: int, on_start: Callable[[str], None]) -> int | None:
    """Serve until a signal; return the signal, or None.

    Parameters
    ----------
    explorer : Explorer
    port : int
        0 is any free port.
    on_start : callable
        Receives the address once the explorer listens.
    """
    options = explorer.options
    listener = open_socket(options.host, port)
    host, taken = listener.getsockname()[:2]
    on_start(f"http://{'localhost' if is_loopback(host) else host if ':' not in host else f'[{host}]'}:{taken}")
    state = ServerState()
    limits = ServerOptions(batch=1, queue=options.waiting, max_bytes=options.max_bytes, grace=3.0)
    return run_app(build_app(explorer, state), listener, limits, state)


def is_loopback(host: str) -> bool:
    """Return whether an address can be reached only from this machine.

    Examples
    --------
    >>> [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "example.org")]
    [True, True, True, False, False]
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_sources(runs: Sequence[Path], data: Path | None) -> None:
    """Refuse a folder of data without a run."""
    if data is not None and not runs:
        raise BadParameter(
            "--data says where the tasks of a run are, and no run is given. Add --run FOLDER, or omit it."
        )
