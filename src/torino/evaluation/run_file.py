"""The file ``run.json``: what a run is, and whether a resumed run is the same one."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from torino.core.errors import BadParameter
from torino.core.io import write_json
from torino.evaluation.protocol import Setting
from torino.evaluation.results import ANSWERS, FORMAT, RUN, read_run_file
from torino.evaluation.tasks import Task
from torino.version import __version__
from torino.vlm.session import VLM

SHORT, LONG = 32, 256
"""Default length of an answer, in tokens: for short answers, and for answers that a judge grades."""
FIXED_FACTS = ("format", "model", "family", "padding", "positions", "attention", "batch", "batching", "limit", "saes")
"""Facts that may not change when a run is resumed."""


def describe_run(
    vlm: VLM,
    model_name: str,
    tasks: Sequence[Task],
    saes: Mapping[str, Any],
    settings: Sequence[Setting],
    max_new_tokens: Mapping[str, int] | None,
) -> dict[str, Any]:
    """Return the facts of a run: model, padding, positions, attention, data, settings, versions and hardware."""
    config = vlm.model.config
    return {
        "format": FORMAT,
        "torino": __version__,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": model_name or str(getattr(config, "_name_or_path", "")),
        "family": vlm.family,
        "padding": vlm.padding,
        "positions": vlm.positions,
        "attention": vlm.attention,
        "versions": _versions(),
        "hardware": _hardware(),
        "saes": {label: _describe_sae(sae) for label, sae in saes.items()},
        "tasks": [
            task.describe()
            | {
                "kind": task.kind,
                "path": str(task.source.resolve()),  # the report may be written from another folder
                "max_new_tokens": (max_new_tokens or {}).get(task.name, LONG if task.kind == "judge" else SHORT),
            }
            for task in tasks
        ],
        "settings": [setting.to_dict() for setting in settings],
    }


def open_run_file(folder: Path, facts: dict[str, Any]) -> None:
    """Write ``run.json``, or check that it describes the same run; new settings are added to it."""
    file = folder / RUN
    if not file.is_file():
        # Another process may be writing this file, or a crash may have left a temporary one.
        foreign = folder.is_dir() and any(
            entry.name != RUN and not entry.name.startswith(f".{RUN}.") for entry in folder.iterdir()
        )
        if foreign and not (folder / ANSWERS).is_dir():
            raise BadParameter(f"{folder} contains other files. Give a new or empty folder for the run.")
        write_json(file, facts)
        return
    known = read_run_file(file)
    for name in FIXED_FACTS:
        if known.get(name) != facts[name]:
            raise BadParameter(
                f"The run in {folder} was started with {name} {known.get(name)!r}, and now it is {facts[name]!r}. "
                "Use the same value to resume it, or another folder for another run."
            )
    if _task_identity(known) != _task_identity(facts):
        names = ", ".join(str(task["task"]) for task in known["tasks"])
        raise BadParameter(
            f"The run in {folder} was started with other tasks or other data ({names}). Use the same tasks to resume "
            "it, or another folder for another run."
        )
    added = new_settings(folder, known["settings"], facts["settings"])
    if added or (facts["matched"] and not known.get("matched", True)):
        known["matched"] = facts["matched"] or known.get("matched", True)
        known["settings"] = [*known["settings"], *added]
        known.setdefault("added", []).append({name: facts[name] for name in ("created", "torino", "arguments")})
        write_json(file, known)


def new_settings(
    folder: Path, known: Sequence[dict[str, Any]], wanted: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return the settings that a run does not have yet; refuse one that it has with another spec."""
    specs = {setting["id"]: setting["spec"] for setting in known}
    for setting in wanted:
        if specs.get(setting["id"], setting["spec"]) != setting["spec"]:
            raise BadParameter(
                f"In the run in {folder}, {setting['id']} is {specs[setting['id']]}, and now it would be "
                f"{setting['spec']}. Their answers must not be mixed: use another folder for another run."
            )
    return [setting for setting in wanted if setting["id"] not in specs]


def _task_identity(facts: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    names = ("task", "fingerprint", "prompts", "max_new_tokens")
    return [tuple(task[name] for name in names) for task in facts["tasks"]]


def _describe_sae(sae: Any) -> dict[str, Any]:
    card = getattr(sae, "card", None)
    facts = {"latents": getattr(sae, "latents", None), "kind": getattr(sae, "kind", None)}
    return facts | {"name": getattr(card, "name", ""), "token_kind": getattr(card, "token_kind", "")}


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in ("torch", "transformers"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def _hardware() -> dict[str, Any]:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {"machine": platform.machine(), "system": sys.platform, "cores": os.cpu_count(), "gpu": gpu}
