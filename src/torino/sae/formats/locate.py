"""From a source, which is a path or a hub repository, to the one file of weights it stands for."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from glob import escape
from pathlib import Path, PurePosixPath
from typing import Any, cast

from torino.core.errors import BadFile, Unreachable
from torino.sae.formats._common import ENDINGS

NAMES = ("sae.safetensors", "sae_weights.safetensors", "ae.pt", "ae.safetensors")
BESIDE = (
    "sparsity.safetensors",
    "activation_whitening.safetensors",
    "activations_store_state.safetensors",
    "evidence.safetensors",
    "evidence.partial.safetensors",
)
SETTINGS = ("card.json", "cfg.json", "config.json", "names.json")
DEPTH = 5  # levels below a folder that are searched: run/experiment/activations/trainer_0/ae.pt and one more

_REPOSITORY = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:/(.+?))?/?")


def locate(source: str | Path) -> Path:
    """Return the file of weights that a source stands for, fetching it from the hub if need be.

    A local path wins over a repository of the same name.
    """
    text = os.fspath(source)
    path = _local(text)
    if path is not None:
        return _in_place(path)
    repository = _split_repository(text)
    if repository is None:
        raise BadFile(
            f"There is no file or folder {text!r}, and it does not read as a hub repository either. "
            "Accepted: a local path that exists, or owner/repository, optionally with /sub/folder."
        )
    return _fetch(*repository)


def choose(files: Iterable[PurePosixPath], where: str) -> PurePosixPath:
    """Pick the one file of weights out of relative paths.

    Well-known names come before others, and files directly in the folder before those deeper down.

    Examples
    --------
    >>> choose([PurePosixPath("trainer_0/ae.pt"), PurePosixPath("trainer_0/checkpoints/ae_100.pt")], "run")
    PurePosixPath('trainer_0/ae.pt')
    """
    weights = [file for file in files if file.suffix in ENDINGS and file.name not in BESIDE]
    named = [file for file in weights if file.name in NAMES] or weights
    here = [file for file in named if len(file.parts) == 1] or named
    if not here:
        raise BadFile(
            f"There is no SAE in {where}: no file ends in {', '.join(ENDINGS)}, down to {DEPTH} folders deep. "
            "Give the folder or file of one."
        )
    if len(here) > 1:
        names = sorted(map(str, here))
        more = f" and {len(names) - 20} more" if len(names) > 20 else ""
        raise BadFile(
            f"{where} holds {len(names)} files that may be the SAE: {', '.join(names[:20])}{more}. "
            f"Give the path of one of them, such as {where.rstrip('/')}/{names[0]}."
        )
    return here[0]


def _local(text: str) -> Path | None:
    try:
        path = Path(text).expanduser()
        return path if text.strip() and path.exists() else None
    except (OSError, RuntimeError):  # a name too long for the disk, or ~ of an unknown user: it is not there
        return None


def _in_place(path: Path) -> Path:
    """Find the weights under a path that exists; a card or config stands for its folder."""
    if path.is_file() and path.suffix != ".json":
        return path
    folder = path if path.is_dir() else path.parent
    return folder / choose(_files(folder), str(folder))


def _files(folder: Path) -> list[PurePosixPath]:
    found: list[PurePosixPath] = []
    for place, folders, names in os.walk(folder):
        inside = Path(place).relative_to(folder)
        deep = len(inside.parts) >= DEPTH
        folders[:] = [] if deep else [name for name in folders if not name.startswith(".")]
        found += [PurePosixPath((inside / name).as_posix()) for name in names if not name.startswith(".")]
    return found


# ------------------------------------------------------------------ the hub


def _split_repository(text: str) -> tuple[str, str] | None:
    found = _REPOSITORY.fullmatch(text)
    if found is None or any(part in ("", ".", "..") for part in text.rstrip("/").split("/")):
        return None
    repository, inside = found[1], found[2] or ""
    return None if repository.endswith((*ENDINGS, ".json")) else (repository, inside)


def _fetch(repository: str, inside: str) -> Path:
    """Download one SAE and what belongs to it, not the others of its repository."""
    where = f"{repository}/{inside}".rstrip("/")
    prefix = f"{escape(inside)}/" if inside else ""
    patterns = [f"{prefix}*{ending}" for ending in (*ENDINGS, ".json")]
    if inside.endswith(ENDINGS):
        patterns = _belonging(PurePosixPath(inside))
    else:
        listed = _listing(repository, patterns)
        if listed is not None:
            files = [file.relative_to(inside) for file in listed if file.is_relative_to(inside)]
            if not any(file.suffix in ENDINGS for file in files):
                raise _absent(repository, inside)
            weights = inside / choose(files, where)
            patterns, inside = _belonging(weights), str(weights)
    target = Path(_download(repository, where, patterns)) / inside
    if not target.exists():
        raise _absent(repository, inside)
    return _in_place(target)


def _absent(repository: str, inside: str) -> Unreachable:
    place = f" in {inside!r}" if inside else ""
    return Unreachable(
        f"The hub repository {repository!r} has no SAE{place}: no file there ends in {', '.join(ENDINGS)}. "
        f"See https://huggingface.co/{repository}/tree/main for what it has, or give a local path."
    )


def _belonging(weights: PurePosixPath) -> list[str]:
    """Name a file of weights and its settings as patterns."""
    folder = weights.parent
    places = [folder, folder.parent] if folder.name == "checkpoints" else [folder]
    beside = [escape(str(place / name)) for place in places for name in SETTINGS]
    extra = [escape(str(folder / name)) for name in ("activation_scaler.json", "activation_whitening.safetensors")]
    return [escape(str(weights)), *beside, *extra]


def _listing(repository: str, patterns: list[str]) -> list[PurePosixPath] | None:
    """Return the names of files that match, without fetching them, or None where the hub cannot tell."""
    try:
        import huggingface_hub

        found: Any = huggingface_hub.snapshot_download(repository, allow_patterns=patterns, dry_run=True)
    except Exception:  # offline, or an older hub client without dry_run: the download itself will say
        return None
    if not isinstance(found, list):
        return None
    return [PurePosixPath(file.filename) for file in cast(list[Any], found)]


def _download(repository: str, where: str, patterns: list[str]) -> str:
    try:
        import huggingface_hub
    except ImportError as error:
        raise Unreachable(
            f"There is no local path {where!r}, and reading it as a hub repository takes the package huggingface_hub, "
            "which is not installed. Install torino[hub], or give the path of a downloaded folder."
        ) from error
    try:
        return str(huggingface_hub.snapshot_download(repository, allow_patterns=patterns))
    except Exception as error:  # the hub client passes on the errors of whichever HTTP library it uses
        cached = getattr(error, "snapshot_path", None)
        if cached is not None and Path(cached).is_dir():  # offline, with the SAEs that were used before
            return str(cached)
        raise Unreachable(
            f"{_reason(error, repository)} Tried {where!r} on the hub, as no local path has that name; "
            "the path of a downloaded folder works too."
        ) from error


def _reason(error: Exception, repository: str) -> str:
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        page = f"https://huggingface.co/{repository}"
        return f"{repository!r} is gated: accept its terms at {page}, then run 'hf auth login'."
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"The hub has no model repository {repository!r}, or it is private: check the name, or 'hf auth login'."
    if isinstance(error, errors.OfflineModeIsEnabled | errors.LocalEntryNotFoundError):
        return f"The hub could not be reached, or is switched off (HF_HUB_OFFLINE), and {repository!r} is not cached."
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    return f"The hub did not give {repository!r} ({type(error).__name__}: {first})."
