"""Checkpoints: a killed run resumes from its last checkpoint and ends with the same weights.

A run keeps its files in ``training/`` inside the folder of the SAE: ``run.json`` (settings, and the result when the run
is finished), ``log.jsonl``, and the last two checkpoints, ``step-….safetensors``. All files are written atomically.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NotRequired, TypedDict
from uuid import uuid4

from torch import Tensor

from torino.core.errors import BadFile, BadParameter
from torino.core.io import read_arrays, read_json, write_arrays, write_json
from torino.core.schema import Count, parse_json
from torino.sae.formats.native import read_digest
from torino.training.files import cannot_write, lock_folder, write_text
from torino.training.metrics import MetricValues

FORMAT = "torino-training/1"
CONTENT = ("activations.content", "activations.sample")  # settings that runs of earlier versions did not record
KEPT_CHECKPOINTS = 2


class TrainingRun(TypedDict):
    """Fields of ``run.json`` that are read again."""

    settings: dict[str, Any]
    id: NotRequired[str]
    result: NotRequired[MetricValues]


class CheckpointValues(TypedDict):
    """Numbers in a checkpoint."""

    step: Count
    scale: float
    threshold: float
    hint: float


class LogLine(TypedDict):
    """A line of ``log.jsonl``, as far as it is read again."""

    step: Count


class CheckpointStore:
    """The files of a training run.

    Parameters
    ----------
    folder : str or Path
        Folder of the SAE.
    """

    def __init__(self, folder: str | Path) -> None:
        self.sae_folder = Path(folder)
        self.folder = self.sae_folder / "training"
        self.run_file = self.folder / "run.json"
        self.log_file = self.folder / "log.jsonl"

    @contextmanager
    def lock(self) -> Generator[None]:
        """Create the folder and lock it against other runs."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise cannot_write(self.sae_folder, error) from error
        in_use = f"Another run is training into {self.sae_folder}. Wait until it ends, or use another folder with -o."
        with lock_folder(self.folder, in_use):
            yield

    def read_run(self, settings: Mapping[str, Any]) -> dict[str, Any] | None:
        """Read ``run.json``, or return None for a new run; raise if the run was started with other settings."""
        if not self.run_file.exists():
            if (self.sae_folder / "card.json").exists():
                raise BadFile(
                    f"{self.sae_folder} already contains an SAE that was not trained here. Use another folder with -o."
                )
            return None
        fix = f"Restore a copy of it, or delete {self.folder} to train again from the start."
        run = read_json(self.run_file, TrainingRun, version=FORMAT, fix=fix)
        before, now = run["settings"], _to_json_values(settings)
        changed = [
            name
            for name in {**before, **now}
            if before.get(name) != now.get(name) and (name in before or name not in CONTENT)
        ]
        if changed:
            changes = [f"{name} was {before.get(name)!r}, now {now.get(name)!r}" for name in changed]
            raise BadParameter(
                f"The run in {self.sae_folder} was started with other settings: {'; '.join(changes)}. "
                "Use the same settings to resume it, or another folder with -o to start a new run."
            )
        return run

    def start_run(self, settings: Mapping[str, Any], versions: Mapping[str, str]) -> dict[str, Any]:
        """Write ``run.json`` of a new run and return its contents."""
        run = {"format": FORMAT, "id": uuid4().hex, "settings": _to_json_values(settings), "versions": dict(versions)}
        write_json(self.run_file, run, sealed=True)
        return run

    def finish_run(self, result: Mapping[str, Any]) -> None:
        """Add the result and the hash of the SAE to ``run.json``, and remove the checkpoints."""
        run = {**read_json(self.run_file), "result": _to_json_values(result), "sae": read_digest(self.sae_folder)}
        write_json(self.run_file, run, sealed=True)
        self.remove_checkpoints()

    def check_finished(self, run: Mapping[str, Any]) -> None:
        """Raise if the folder of a finished run does not contain the SAE that the run has trained."""
        if "sae" in run and read_digest(self.sae_folder) != run["sae"]:  # earlier versions did not record it
            raise BadFile(
                f"The run in {self.sae_folder} is finished, but the SAE there is missing or is another one. Restore "
                f"it, or train it again: delete {self.folder}, or use another folder with -o."
            )

    def remove_checkpoints(self) -> None:
        """Remove checkpoints and temporary files, including those of a run that was killed while it finished."""
        for path in [*self.list_checkpoints(), *self.sae_folder.glob(".sae.safetensors.*")]:
            path.unlink(missing_ok=True)

    def save(self, step: int, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> Path:
        """Write a checkpoint, then remove all but the last two."""
        path = self.folder / f"{_stem(step)}.safetensors"
        write_arrays(path, tensors, {"format": FORMAT, "facts": json.dumps({"step": step, **values})})
        for old in self.list_checkpoints()[:-KEPT_CHECKPOINTS]:
            old.unlink(missing_ok=True)
        return path

    def list_checkpoints(self) -> list[Path]:
        """Return the paths of the checkpoints, oldest first."""
        return sorted(self.folder.glob("step-*.safetensors"))

    def load_latest(
        self, check: Callable[[Mapping[str, Tensor], Mapping[str, Any]], None]
    ) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Return tensors and values of the last readable checkpoint, or None if there is none.

        ``check`` raises ``ValueError`` if a checkpoint does not belong to the run.
        """
        for temporary in self.folder.glob(".*.*"):  # partial files of a killed run
            temporary.unlink(missing_ok=True)
        paths = self.list_checkpoints()
        while paths:
            path = paths.pop()
            try:
                tensors, header = read_arrays(path)
                values = parse_json(header.get("facts", "null"), CheckpointValues)
                if path.stem != _stem(values["step"]):
                    raise ValueError(f"it is of step {values['step']}")
                check(tensors, values)
                return tensors, values
            except ValueError as error:
                next_start = "resuming from the previous checkpoint" if paths else "training starts again"
                warnings.warn(f"{path} cannot be used ({error}); {next_start}.", stacklevel=3)
        return None

    def truncate_log(self, step: int) -> None:
        """Remove log lines of steps after ``step``, which will be repeated."""
        if not self.log_file.exists():
            return
        kept: list[str] = []
        for line in self.log_file.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                if parse_json(line, LogLine)["step"] <= step:
                    kept.append(line)
            except ValueError:  # a partial line of a killed run
                continue
        write_text(self.log_file, "".join(f"{line}\n" for line in kept))


def _stem(step: int) -> str:
    return f"step-{step:08d}"


def _to_json_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values as they are after writing and reading JSON."""
    return json.loads(json.dumps(dict(values), default=str))
