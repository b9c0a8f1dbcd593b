"""The file ``run.json``: what a run is, and whether a resumed run is the same one."""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from torino.core.errors import BadFile, BadParameter
from torino.core.io import fingerprint_tensors, write_json
from torino.evaluation.images import ImageRef
from torino.evaluation.protocol import Setting
from torino.evaluation.results import ANSWERS, FORMAT, RUN, read_run_file
from torino.evaluation.tasks import Task
from torino.sae.identity import hash_sae
from torino.sae.model import SAE
from torino.training.activations.extraction import describe_pixels
from torino.version import __version__
from torino.vlm.session import VLM

SHORT, LONG = 32, 256
"""Default length of an answer, in tokens: for short answers, and for answers that a judge grades."""
FIXED_FACTS = ("format", "model", "family", "padding", "positions", "attention", "batch", "batching", "limit")
"""Facts that may not change when a run is resumed."""
CONTENT_FACTS = {
    "dtype": "the model {model!r} in another precision",
    "weights": "other weights of the model {model!r}",
    "processor": "another image processor, vocabulary or chat template of the model {model!r}",
    "clip": "another CLIP that reads the questions (--clip)",
}
"""Facts that may not change once they are known; runs of earlier versions did not record them."""
LOCK_SECONDS = 60


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
        "dtype": str(vlm.dtype).removeprefix("torch."),
        "weights": fingerprint_tensors(vlm.model.state_dict()),
        "processor": _hash_processor(vlm.processor),
        "clip": None if vlm.text_query is None else fingerprint_tensors(vlm.text_query.model.state_dict()),
        "versions": _versions(),
        "hardware": _hardware(),
        "saes": {label: _describe_sae(sae) for label, sae in saes.items()},
        "tasks": [
            task.describe()
            | {
                "kind": task.kind,
                "path": str(task.source.resolve()),  # the report may be written from another folder
                "max_new_tokens": (max_new_tokens or {}).get(task.name, LONG if task.kind == "judge" else SHORT),
                "images": _hash_images(task),
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
    with _lock(folder):  # parts of the work that start together must agree
        if not file.is_file():
            write_json(file, facts, sealed=True)
            return
        known = read_run_file(file)
        _check_same_run(folder, known, facts)
        changed = _add_content(known, facts)
        added = new_settings(folder, known["settings"], facts["settings"])
        if added or (facts["matched"] and not known.get("matched", True)):
            known["matched"] = facts["matched"] or known.get("matched", True)
            known["settings"] = [*known["settings"], *added]
            known.setdefault("added", []).append({name: facts[name] for name in ("created", "torino", "arguments")})
            changed = True
        if changed:
            write_json(file, known, sealed=True)


@contextmanager
def _lock(folder: Path) -> Generator[None]:
    """Let one process at a time read and write ``run.json``."""
    lock = FileLock(folder / f".{RUN}.lock", timeout=LOCK_SECONDS)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout as error:
        raise BadFile(f"Another process has been writing {folder / RUN} for {LOCK_SECONDS} s. Try again.") from error
    except (OSError, NotImplementedError):  # not writable, which write_json reports, or without support for locks
        pass
    try:
        yield
    finally:
        lock.release()


def _check_same_run(folder: Path, known: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    """Refuse to resume a run with another model, SAE or task, also if only its content differs."""
    for name in FIXED_FACTS:
        if known.get(name) != facts[name]:
            raise BadParameter(
                f"The run in {folder} was started with {name} {known.get(name)!r}, and now it is {facts[name]!r}. "
                "Use the same value to resume it, or another folder for another run."
            )
    differences = [(text.format(**facts), known.get(name), facts[name]) for name, text in CONTENT_FACTS.items()]
    before, now = known.get("saes") or {}, facts["saes"]
    if {label: {**sae, "content": ""} for label, sae in before.items()} != {
        label: {**sae, "content": ""} for label, sae in now.items()
    }:
        raise BadParameter(
            f"The run in {folder} was started with the SAEs {_list_saes(before)}, and now they are {_list_saes(now)}. "
            "Use the same SAEs to resume it, or another folder for another run."
        )
    differences += [
        (f"another SAE called {label!r}", before[label].get("content"), sae["content"]) for label, sae in now.items()
    ]
    if _task_identity(known) != _task_identity(facts):
        names = ", ".join(str(task["task"]) for task in known["tasks"])
        raise BadParameter(
            f"The run in {folder} was started with other tasks or other data ({names}). Use the same tasks to resume "
            "it, or another folder for another run."
        )
    _check_prompts(folder, known, facts)
    differences += [
        (f"other images of {task['task']}", old.get("images"), task["images"])
        for old, task in zip(known["tasks"], facts["tasks"], strict=True)
    ]
    for text, old, new in differences:
        if None not in (old, new) and old != new:
            raise BadParameter(
                f"The run in {folder} was started with {text}: its content was {old} and is now {new}. Use the same "
                "content to resume it, or another folder for another run."
            )


def _add_content(known: dict[str, Any], facts: Mapping[str, Any]) -> bool:
    """Record what a run did not record yet, and return whether there is anything."""
    pairs = [(known, {name: facts[name] for name in CONTENT_FACTS})]
    pairs += [(known["saes"][label], {"content": sae["content"]}) for label, sae in facts["saes"].items()]
    pairs += [(old, {"images": task["images"]}) for old, task in zip(known["tasks"], facts["tasks"], strict=True)]
    changed = False
    for old, new in pairs:
        missing = {name: value for name, value in new.items() if value is not None and old.get(name) is None}
        old.update(missing)
        changed |= bool(missing)
    return changed


def _list_saes(saes: Mapping[str, Any]) -> str:
    return (
        ", ".join(f"{label} ({sae.get('kind')}, {sae.get('latents')} latents)" for label, sae in saes.items()) or "none"
    )


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
    names = ("task", "fingerprint", "max_new_tokens")
    return [tuple(task[name] for name in names) for task in facts["tasks"]]


def _check_prompts(folder: Path, known: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    """Refuse other prompts than those of the recorded answers."""
    for old, new in zip(known["tasks"], facts["tasks"], strict=True):
        if (old["prompts"], old["prompt"]) != (new["prompts"], new["prompt"]):
            raise BadParameter(
                f"The run in {folder} asked {old['task']} with the prompts {old['prompts']!r} ({old['prompt']!r}), and "
                f"now they are {new['prompts']!r} ({new['prompt']!r}). Use the same prompts to resume it (--prompts), "
                "or another folder for another run."
            )


def _describe_sae(sae: Any) -> dict[str, Any]:
    card = getattr(sae, "card", None)
    facts = {"latents": getattr(sae, "latents", None), "kind": getattr(sae, "kind", None)}
    facts |= {"name": getattr(card, "name", ""), "token_kind": getattr(card, "token_kind", "")}
    return facts | {"content": hash_sae(sae) if isinstance(sae, SAE) else None}


def _hash_processor(processor: Any) -> str:
    """Hash what determines the pixels and tokens of a prompt."""
    tokenizer: Any = getattr(processor, "tokenizer", None)
    vocabulary = sorted(tokenizer.get_vocab().items()) if hasattr(tokenizer, "get_vocab") else []
    template = getattr(processor, "chat_template", None) or getattr(tokenizer, "chat_template", None)
    text = f"{describe_pixels(getattr(processor, 'image_processor', None))}\n{vocabulary}\n{template}"
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()[:32]


def _hash_images(task: Task) -> str | None:
    """Hash the image files of a task; None if it has none: the fingerprint covers images inside the task's file."""
    files: dict[str, ImageRef] = {image.key: image for sample in task for image in sample.images if not image.length}
    digest = hashlib.sha256()
    for key in sorted(files):
        try:
            content = files[key].checksum()
        except BadFile:  # recorded as a failure when its turn comes
            content = "unreadable"
        digest.update(f"{key} {content}\n".encode())
    return digest.hexdigest()[:32] if files else None


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
