"""Checkpoints: a run that is killed at any moment goes on from its last one, to the same weights.

A run keeps ``training/`` in the folder of its SAE: ``run.json`` (settings, and the result once there is one),
``log.jsonl``, and its last two checkpoints, ``step-….safetensors``. Every file is written whole or not at all.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

from torch import Tensor

from torino.core.errors import BadFile, BadParameter
from torino.core.io import read_arrays, read_json, write_arrays, write_atomic, write_json

FORMAT = "torino-training/1"
LOCK = ".lock"
KEPT = 2


class CheckpointStore:
    """The files of one run."""

    def __init__(self, folder: str | Path) -> None:
        self.sae = Path(folder)
        self.folder = self.sae / "training"
        self.run = self.folder / "run.json"
        self.log = self.folder / "log.jsonl"

    @contextmanager
    def claimed(self) -> Generator[None]:
        """Make the folder and keep other runs out of it; the system lets go of the lock when a run dies."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            reason = error.strerror or error
            raise BadFile(f"Cannot write to {self.sae}: {reason}. Choose a writable folder with -o.") from error
        try:
            import fcntl

            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:  # not on Windows, where it is on the user to start one run only
            pass
        except OSError as error:
            os.close(handle)
            raise BadFile(f"Another run is training into {self.sae}. Wait for it, or give another -o.") from error
        try:
            yield
        finally:
            os.close(handle)

    def begun(self, settings: Mapping[str, Any]) -> dict[str, Any] | None:
        """What ``run.json`` says, or None for a new run; other settings than these are refused."""
        if not self.run.exists():
            if (self.sae / "card.json").exists():
                raise BadFile(f"{self.sae} holds an SAE already, not trained here. Give another folder with -o.")
            return None
        told = read_json(self.run)
        if told.get("format") != FORMAT:
            raise BadFile(f"{self.run} is of format {told.get('format')!r}; this torino reads {FORMAT!r}.")
        before, now = told.get("settings", {}), _plain(settings)
        changed = [name for name in {**before, **now} if before.get(name) != now.get(name)]
        if changed:
            lines = [f"{name} was {before.get(name)!r}, now {now.get(name)!r}" for name in changed]
            raise BadParameter(
                f"The run in {self.sae} was begun with other settings: {'; '.join(lines)}. "
                "Give those to go on, or another folder with -o to begin anew."
            )
        return told

    def begin(self, settings: Mapping[str, Any], versions: Mapping[str, str]) -> dict[str, Any]:
        """Write ``run.json`` of a new run."""
        told = {"format": FORMAT, "id": uuid4().hex, "settings": _plain(settings), "versions": dict(versions)}
        write_json(self.run, told)
        return told

    def finish(self, result: Mapping[str, Any]) -> None:
        """Note the result, and drop the checkpoints, which nothing can follow any more."""
        write_json(self.run, {**read_json(self.run), "result": _plain(result)})
        self.tidy()

    def tidy(self) -> None:
        """Drop what a finished run needs no more, also what one left that was killed while it finished."""
        for path in [*self.folder.glob("step-*.safetensors"), *self.sae.glob(".sae.safetensors.*")]:
            path.unlink(missing_ok=True)

    def save(self, step: int, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> Path:
        """Write a checkpoint, then drop all but the last two."""
        path = self.folder / f"step-{step:08d}.safetensors"
        write_arrays(path, tensors, {"format": FORMAT, "facts": json.dumps({"step": step, **facts})})
        for old in self.steps()[:-KEPT]:
            old.unlink(missing_ok=True)
        return path

    def steps(self) -> list[Path]:
        """Checkpoints, the oldest first."""
        return sorted(self.folder.glob("step-*.safetensors"))

    def load(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Tensors and facts of the last checkpoint that can be read; None where there is none."""
        for left in self.folder.glob(".*.*"):  # half a file that a killed run was writing
            left.unlink(missing_ok=True)
        for path in reversed(self.steps()):
            try:
                tensors, header = read_arrays(path)
                return tensors, json.loads(header["facts"])
            except (BadFile, KeyError, ValueError) as error:
                warnings.warn(f"{path} cannot be read ({error}); going on from the one before it.", stacklevel=3)
        return None

    def cut_log(self, step: int) -> None:
        """Drop lines about steps after ``step``, which will be taken anew."""
        if not self.log.exists():
            return
        kept: list[str] = []
        for line in self.log.read_text(encoding="utf-8").splitlines():
            try:
                if json.loads(line)["step"] <= step:
                    kept.append(line)
            except (ValueError, KeyError, TypeError):  # a line cut short by the kill
                continue

        def write(target: Path) -> None:
            target.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")

        write_atomic(self.log, write)


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values as they come back from JSON."""
    return json.loads(json.dumps(dict(values), default=str))
