"""Check that a machine can run a reproduction: GPU, disk and hub."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torino.core.device import resolve_device
from torino.core.errors import TorinoError, Unreachable
from torino.core.extras import optional_import
from torino.vlm.loading import fetch, split_revision

MODEL_FILES = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]
"""Files of a model that are downloaded: neither pickles nor weights of other libraries."""


@dataclass(frozen=True)
class SpaceNeeded:
    """Bytes that will be written into a folder, and what they are."""

    folder: Path
    bytes: int
    what: str


def find_device(device: str) -> tuple[str, str | None]:
    """Return the name of the processor that ``--device`` selects, and what is wrong with it, if anything."""
    if device == "auto" and resolve_device(device).type == "cpu":
        return "CPU", (
            "There is no GPU, and on the CPU the run would take weeks. Use a machine with a GPU, or give --device cpu "
            "to run a small model here."
        )
    target = resolve_device(device)
    return ("CPU" if target.type == "cpu" else _gpu_name(target)), None


def check_memory(device: str, weights: int) -> str | None:
    """Return what is wrong if the weights of the model do not fit into the memory of the GPU."""
    target = resolve_device(device)
    if target.type != "cuda":
        return None
    total = torch.cuda.get_device_properties(target).total_memory
    if total >= 1.15 * weights:
        return None
    return (
        f"The GPU {_gpu_name(target)} has {total / 1e9:.0f} GB of memory, and the weights alone take "
        f"{weights / 1e9:.0f} GB. Use a GPU with at least 24 GB."
    )


def check_space(needs: Sequence[SpaceNeeded]) -> str | None:
    """Return what is wrong if a disk has too little space; folders on the same disk share its space."""
    by_disk: dict[int, list[SpaceNeeded]] = {}
    for need in needs:
        by_disk.setdefault(_existing_parent(need.folder).stat().st_dev, []).append(need)
    for group in by_disk.values():
        wanted = sum(need.bytes for need in group)
        free = shutil.disk_usage(_existing_parent(group[0].folder)).free
        if free < wanted:
            contents = ", ".join(f"{need.what} {need.bytes / 1e9:.1f} GB" for need in group if need.bytes)
            return (
                f"The disk of {group[0].folder} has {free / 1e9:.1f} GB free, and {wanted / 1e9:.1f} GB are needed "
                f"({contents}). Free some space, or choose other folders with -o, --data or HF_HOME."
            )
    return None


def hub_cache() -> Path:
    """Return the folder in which the hub client keeps models."""
    with optional_import("Loading models needs", "torino[vlm]"):
        from huggingface_hub import constants
    return Path(constants.HF_HUB_CACHE)


def missing_bytes(model: str) -> int:
    """Return how much of a model on the hub is not downloaded yet; raise one sentence if it cannot be reached."""
    name, revision = split_revision(model)
    try:
        files: Any = _snapshot(str(name), revision, dry_run=True)
    except TorinoError as error:
        if is_cached(model):
            return 0
        if isinstance(error, Unreachable):  # gated, or not there
            raise
        raise Unreachable(
            f"The hub could not be reached, or is disabled (HF_HUB_OFFLINE), and {name} is not cached. Check the "
            "connection, or give the folder of a downloaded model with --model."
        ) from error
    return sum(int(file.file_size) for file in files if file.will_download)


def is_cached(model: str) -> bool:
    """Return whether the hub client has a model on this machine, without asking the hub."""
    name, revision = split_revision(model)
    try:
        folder = Path(str(_snapshot(str(name), revision, local_files_only=True)))
    except TorinoError:
        return False
    return any(folder.glob("*.safetensors"))


def download_model(model: str) -> None:
    """Download a model into the hub client's cache; an interrupted download resumes."""
    name, revision = split_revision(model)
    _snapshot(str(name), revision)


def _snapshot(name: str, revision: str | None, **options: Any) -> Any:
    with optional_import("Loading models needs", "torino[vlm]"):
        from huggingface_hub import snapshot_download
    return fetch(snapshot_download, name, "files", revision=revision, allow_patterns=MODEL_FILES, **options)


def _gpu_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _existing_parent(folder: Path) -> Path:
    folder = folder.absolute()
    while not os.path.exists(folder):  # noqa: PTH110 (Path raises for odd names)
        folder = folder.parent
    return folder
