"""Find the weights file of a source, which is a local path or a hub repository."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from glob import escape
from pathlib import Path, PurePosixPath
from typing import Any, cast

from torino.core.checks import describe_value
from torino.core.errors import BadFile, Unreachable
from torino.core.extras import optional_import
from torino.sae.formats._common import SUFFIXES

NAMES = ("sae.safetensors", "sae_weights.safetensors", "ae.pt", "ae.safetensors")
OTHER_FILES = (
    "sparsity.safetensors",
    "activation_whitening.safetensors",
    "activations_store_state.safetensors",
    "top_activations.safetensors",
    "top_activations.partial.safetensors",
)
SETTINGS = ("card.json", "cfg.json", "config.json", "names.json")
DEPTH = 5  # levels of subfolders that are searched; run/experiment/activations/trainer_0/ae.pt has four

_REPOSITORY = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:/(.+?))?/?")


def locate(source: str | Path) -> Path:
    """Return the weights file of a source; download it from the hub if necessary.

    A local path takes precedence over a repository of the same name.
    """
    if not isinstance(source, str | Path):  # pyright: ignore[reportUnnecessaryIsInstance]: callers may not check
        raise BadFile(
            f"An SAE is loaded from a path or the name of a hub repository, got {describe_value(source)}. Give text or "
            "a Path."
        )
    text = str(source)
    path = _local_path(text)
    if path is not None:
        return _find_weights(path)
    repository = _split_repository(text)
    if repository is None:
        raise BadFile(
            f"There is no file or folder {text!r}, and it is not the name of a hub repository either. "
            "Accepted: an existing local path, or owner/repository, optionally with /sub/folder."
        )
    return _download_sae(*repository)


def choose(files: Iterable[PurePosixPath], where: str) -> PurePosixPath:
    """Select the weights file among relative paths.

    Well-known names take precedence over others, and files in the folder itself over those in subfolders.

    Examples
    --------
    >>> choose([PurePosixPath("trainer_0/ae.pt"), PurePosixPath("trainer_0/checkpoints/ae_100.pt")], "run")
    PurePosixPath('trainer_0/ae.pt')
    """
    weights = [file for file in files if file.suffix in SUFFIXES and file.name not in OTHER_FILES]
    named = [file for file in weights if file.name in NAMES] or weights
    candidates = [file for file in named if len(file.parts) == 1] or named
    if not candidates:
        raise BadFile(
            f"There is no SAE in {where}: no file in it or up to {DEPTH} levels below ends in {', '.join(SUFFIXES)}. "
            "Give the path of an SAE."
        )
    if len(candidates) > 1:
        names = sorted(map(str, candidates))
        more = f" and {len(names) - 20} more" if len(names) > 20 else ""
        raise BadFile(
            f"{where} contains {len(names)} files that may be the SAE: {', '.join(names[:20])}{more}. "
            f"Give the path of one of them, such as {where.rstrip('/')}/{names[0]}."
        )
    return candidates[0]


def _local_path(text: str) -> Path | None:
    try:
        path = Path(text).expanduser()
        return path if text.strip() and path.exists() else None
    except (OSError, RuntimeError, ValueError):  # a name that is too long, ~ of an unknown user, or a NUL character
        return None


def _find_weights(path: Path) -> Path:
    """Return the weights file of an existing path; a JSON file refers to its folder."""
    if path.is_file() and path.suffix != ".json":
        return path
    folder = path if path.is_dir() else path.parent
    return folder / choose(_list_files(folder), str(folder))


def _list_files(folder: Path) -> list[PurePosixPath]:
    files: list[PurePosixPath] = []
    for root, folders, names in os.walk(folder):
        relative = Path(root).relative_to(folder)
        at_limit = len(relative.parts) >= DEPTH
        folders[:] = [] if at_limit else [name for name in folders if not name.startswith(".")]
        files += [PurePosixPath((relative / name).as_posix()) for name in names if not name.startswith(".")]
    return files


# ------------------------------------------------------------------ the hub


def _split_repository(text: str) -> tuple[str, str] | None:
    match = _REPOSITORY.fullmatch(text)
    if match is None or any(part in ("", ".", "..") for part in text.rstrip("/").split("/")):
        return None
    repository, inside = match[1], match[2] or ""
    return None if repository.endswith((*SUFFIXES, ".json")) else (repository, inside)


def _download_sae(repository: str, inside: str) -> Path:
    """Download one SAE and its settings, not the other files of the repository."""
    where = f"{repository}/{inside}".rstrip("/")
    prefix = f"{escape(inside)}/" if inside else ""
    patterns = [f"{prefix}*{ending}" for ending in (*SUFFIXES, ".json")]
    if inside.endswith(SUFFIXES):
        patterns = _file_patterns(PurePosixPath(inside))
    else:
        listed = _list_repository(repository, patterns)
        if listed is not None:
            files = [file.relative_to(inside) for file in listed if file.is_relative_to(inside)]
            if not any(file.suffix in SUFFIXES for file in files):
                raise _no_sae_error(repository, inside)
            weights = inside / choose(files, where)
            patterns, inside = _file_patterns(weights), str(weights)
    target = Path(_download(repository, where, patterns)) / inside
    if not target.exists():
        raise _no_sae_error(repository, inside)
    return _find_weights(target)


def _no_sae_error(repository: str, inside: str) -> Unreachable:
    location = f" in {inside!r}" if inside else ""
    return Unreachable(
        f"The hub repository {repository!r} has no SAE{location}: no file there ends in {', '.join(SUFFIXES)}. "
        f"See https://huggingface.co/{repository}/tree/main for its files, or give a local path."
    )


def _file_patterns(weights: PurePosixPath) -> list[str]:
    """Return patterns for a weights file and its settings."""
    folder = weights.parent
    folders = [folder, folder.parent] if folder.name == "checkpoints" else [folder]
    settings = [escape(str(parent / name)) for parent in folders for name in SETTINGS]
    extra = [escape(str(folder / name)) for name in ("activation_scaler.json", "activation_whitening.safetensors")]
    return [escape(str(weights)), *settings, *extra]


def _list_repository(repository: str, patterns: list[str]) -> list[PurePosixPath] | None:
    """Return the names of matching files without downloading them, or None if the hub does not list them."""
    try:
        import huggingface_hub

        files: Any = huggingface_hub.snapshot_download(repository, allow_patterns=patterns, dry_run=True)
    except Exception:  # offline, or an older hub client without dry_run; the download reports errors
        return None
    if not isinstance(files, list):
        return None
    return [PurePosixPath(file.filename) for file in cast(list[Any], files)]


def _download(repository: str, where: str, patterns: list[str]) -> str:
    with optional_import(f"There is no local path {where!r}, and loading it from the hub needs", "torino[vlm]"):
        import huggingface_hub
    try:
        return str(huggingface_hub.snapshot_download(repository, allow_patterns=patterns))
    except Exception as error:  # the hub client raises errors of its HTTP library
        cached = getattr(error, "snapshot_path", None)
        if cached is not None and Path(cached).is_dir():  # offline, but downloaded before
            return str(cached)
        raise Unreachable(
            f"{_reason(error, repository)} {where!r} was looked up on the hub because there is no local path of that "
            "name. You can also give the path of a downloaded folder."
        ) from error


def _reason(error: Exception, repository: str) -> str:
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        page = f"https://huggingface.co/{repository}"
        return f"{repository!r} is gated: accept its terms at {page}, then run 'hf auth login'."
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"The hub has no model repository {repository!r}, or it is private: check the name or run 'hf auth login'."
        )
    if isinstance(error, errors.OfflineModeIsEnabled | errors.LocalEntryNotFoundError):
        return f"The hub cannot be reached or is disabled (HF_HUB_OFFLINE), and {repository!r} is not cached."
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    return f"Downloading {repository!r} from the hub failed ({type(error).__name__}: {first})."
