"""Metric loggers: a JSONL file, always, and optionally TensorBoard and Weights & Biases."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from errno import ENOSPC
from pathlib import Path
from typing import Any, Protocol

from torino.core.errors import BadFile, BadParameter
from torino.core.extras import optional_import

LOGGERS = ("tensorboard", "wandb")


class MetricLogger(Protocol):
    """Destination of the training metrics."""

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Write the metrics of a step."""
        ...

    def close(self) -> None:
        """Close the logger."""
        ...


class JsonlLogger:
    """Write ``log.jsonl``, one line per report, without buffering."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab", buffering=0)  # unbuffered: closing never has to write
        except OSError as error:
            raise self._write_error(error) from error

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Append a line."""
        line = (json.dumps({"step": step, **values}) + "\n").encode()
        try:
            if self._file.write(line) != len(line):  # a nearly full disk may accept half a line
                raise OSError(ENOSPC, os.strerror(ENOSPC))
        except OSError as error:
            raise self._write_error(error) from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write_error(self, error: OSError) -> BadFile:
        return BadFile(
            f"Cannot write {self._path}: {error.strerror or error}. Free some disk space and run the same command "
            "again; training resumes from its last checkpoint."
        )


class TensorBoardLogger:
    """Write event files for ``tensorboard --logdir``."""

    def __init__(self, folder: Path, first_step: int) -> None:
        with optional_import("--log tensorboard needs", "torino[train]"):
            from torch.utils.tensorboard import SummaryWriter
        # purge_step drops what a killed run wrote after its last checkpoint
        self._writer = SummaryWriter(str(folder), purge_step=first_step or None)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Write the numbers of a report."""
        for name, value in flatten_metrics(values).items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


class WandbLogger:
    """Send metrics to a run at Weights & Biases."""

    def __init__(self, folder: Path, run: Mapping[str, Any]) -> None:
        with optional_import("--log wandb needs", "wandb"):
            import wandb  # pyright: ignore[reportMissingImports]: in no extra, and not a development dependency
        self._run: Any = wandb.init(project="torino", dir=str(folder), resume="allow", **run)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Send the numbers of a report."""
        self._run.log(flatten_metrics(values), step=step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


def open_loggers(names: Sequence[str], log_file: Path, first_step: int, run: Mapping[str, Any]) -> list[MetricLogger]:
    """Open the JSONL log and the loggers in ``names``.

    Parameters
    ----------
    names : sequence of str
        ``"tensorboard"`` or ``"wandb"``.
    log_file : Path
        Path of the JSONL log; the other loggers write to its folder.
    first_step : int
        Step from which the run resumes.
    run : mapping
        ``name``, ``id`` and ``config`` of the run.
    """
    for name in names:
        if name not in LOGGERS:
            raise BadParameter(f"log must be {' or '.join(LOGGERS)}, got {name!r}.")
    folder = log_file.parent
    loggers: list[MetricLogger] = []
    if "tensorboard" in names:
        loggers.append(TensorBoardLogger(folder / "tensorboard", first_step))
    if "wandb" in names:
        loggers.append(WandbLogger(folder, run))
    return [JsonlLogger(log_file), *loggers]


def flatten_metrics(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a report; those in lists get their index, from 1, appended to the name.

    Examples
    --------
    >>> flatten_metrics({"fvu": 0.1, "levels": [0.3, 0.1]})
    {'fvu': 0.1, 'levels/1': 0.3, 'levels/2': 0.1}
    """
    flat: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, (list, tuple)):
            flat |= {f"{name}/{index}": float(number) for index, number in enumerate(value, start=1)}  # type: ignore
        elif isinstance(value, (int, float)):
            flat[name] = float(value)
    return flat
