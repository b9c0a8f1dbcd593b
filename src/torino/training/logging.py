"""Logs: one line of JSON per report, always; TensorBoard and wandb where asked for."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from errno import ENOSPC
from pathlib import Path
from typing import Any, Protocol

from torino.core.errors import BadFile, BadParameter

KINDS = ("tensorboard", "wandb")


class Log(Protocol):
    """Where reports go."""

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Take the report of a step."""
        ...

    def close(self) -> None:
        """No more will come."""
        ...


class JsonLines:
    """``log.jsonl``: a line a report, there as soon as it is written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab", buffering=0)  # nothing is held back that closing would have to write
        except OSError as error:
            raise self._full(error) from error

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Append a line."""
        line = (json.dumps({"step": step, **values}) + "\n").encode()
        try:
            if self._file.write(line) != len(line):  # a disk may take half a line before it is full
                raise OSError(ENOSPC, os.strerror(ENOSPC))
        except OSError as error:
            raise self._full(error) from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _full(self, error: OSError) -> BadFile:
        return BadFile(
            f"Cannot write {self._path}: {error.strerror or error}. See to the disk and give the same command again; "
            "the run goes on from its last checkpoint."
        )


class TensorBoard:
    """Event files for ``tensorboard --logdir``."""

    def __init__(self, folder: Path, begin: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise BadParameter("--log tensorboard needs the package tensorboard: pip install tensorboard.") from error
        self._writer = SummaryWriter(str(folder), purge_step=begin or None)  # what a killed run wrote beyond is dropped

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Write the numbers of a report."""
        for name, value in numbers(values).items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()


class Wandb:
    """A run at Weights & Biases."""

    def __init__(self, folder: Path, identity: Mapping[str, Any]) -> None:
        try:
            import wandb  # pyright: ignore[reportMissingImports]: optional, and not among the tools of this project
        except ImportError as error:
            raise BadParameter("--log wandb needs the package wandb: pip install wandb, then wandb login.") from error
        self._run: Any = wandb.init(project="torino", dir=str(folder), resume="allow", **identity)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Send the numbers of a report."""
        self._run.log(numbers(values), step=step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


def open_logs(kinds: Sequence[str], lines: Path, begin: int, identity: Mapping[str, Any]) -> list[Log]:
    """Open the logs called ``kinds`` beside the one that is always there.

    ``begin`` is the step that the run goes on from; ``identity`` has the ``name``, ``id`` and ``config`` of the run.
    """
    for kind in kinds:
        if kind not in KINDS:
            raise BadParameter(f"log must be {' or '.join(KINDS)}, got {kind!r}.")
    folder = lines.parent
    logs: list[Log] = []
    if "tensorboard" in kinds:
        logs.append(TensorBoard(folder / "tensorboard", begin))
    if "wandb" in kinds:
        logs.append(Wandb(folder, identity))
    return [JsonLines(lines), *logs]


def numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a report, those in lists with their place in the name.

    Examples
    --------
    >>> numbers({"fvu": 0.1, "levels": [0.3, 0.1]})
    {'fvu': 0.1, 'levels/1': 0.3, 'levels/2': 0.1}
    """
    flat: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, (list, tuple)):
            flat |= {f"{name}/{place}": float(number) for place, number in enumerate(value, start=1)}  # type: ignore
        elif isinstance(value, (int, float)):
            flat[name] = float(value)
    return flat
