"""Sweep over expansions: train one SAE per expansion and write a table of their metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict

import torch
from torch import Tensor

from torino.core.errors import BadParameter
from torino.core.io import read_json, write_json
from torino.core.text import format_csv
from torino.sae.formats.native import read_digest
from torino.sae.model import SAE
from torino.training.activations.base import Activations
from torino.training.config import TrainConfig
from torino.training.distributed import Distributed
from torino.training.files import write_text
from torino.training.metrics import MetricValues, compute_metrics, count_groups
from torino.training.trainer import StepCallback, train


class HeldoutFile(TypedDict):
    """Metrics on held-out photos, in ``heldout.json``."""

    photos: str
    measures: MetricValues


HeldoutPhotos = Callable[[], Iterable[Tensor]]
COUNT_COLUMNS = ("latents", "rows")
PERCENT_COLUMNS = ("dead", "top_frequency")


def sweep(
    activations: Activations,
    config: TrainConfig,
    expansions: Sequence[float],
    folder: str | Path,
    *,
    heldout: HeldoutPhotos | None = None,
    heldout_name: str = "",
    device: torch.device | str = "cpu",
    distributed: Distributed | None = None,
    callback: Callable[[float], StepCallback | None] | None = None,
    **options: Any,
) -> list[dict[str, Any]]:
    """Train one SAE per expansion into ``folder/x…``, and write ``table.md`` and ``table.csv`` after each.

    Finished SAEs are not trained again, so an interrupted sweep resumes where it stopped.

    Parameters
    ----------
    activations : Activations
    config : TrainConfig
        Settings of all runs; ``expansion`` and ``latents`` are replaced.
    expansions : sequence of float
    folder : str or Path
    heldout : callable, optional
        Returns the patches of held-out photos, one tensor per photo. If given, the metrics are computed on these, with
        the mean number of groups per photo at (k, δ) = (1, 1), (2, 2) and (3, 3).
    heldout_name : str
        Identifies the held-out photos; the metrics are computed again when it changes.
    device : torch.device or str
    distributed : Distributed, optional
    callback : callable, optional
        Returns the step callback of the run at an expansion.
    **options
        Passed to :func:`torino.training.trainer.train`.

    Returns
    -------
    list of dict
        Expansion, number of latents and metrics of each SAE; empty except in the main process.
    """
    if not expansions:
        raise BadParameter("A sweep needs at least one expansion, such as 4.")
    folder, distributed = Path(folder), distributed or Distributed()
    configs = {value: replace(config, expansion=value, latents=None) for value in expansions}
    # resolve all first, so that a bad expansion is reported before any training
    latents = {value: each.resolve(activations.width).latents for value, each in configs.items()}
    rows: list[dict[str, Any]] = []
    for expansion, run_config in configs.items():
        sae_folder = folder / f"x{expansion:g}"
        step_callback = callback(expansion) if callback is not None else None
        result = train(
            activations,
            run_config,
            sae_folder,
            device=device,
            distributed=distributed,
            callback=step_callback,
            **options,
        )
        if distributed.is_main:
            metrics = result.metrics if heldout is None else _heldout_metrics(sae_folder, heldout, heldout_name, device)
            rows.append({"expansion": expansion, "latents": latents[expansion], **metrics})
            write_tables(folder, rows)
        distributed.barrier()
    return rows


def _heldout_metrics(
    sae_folder: Path, heldout: HeldoutPhotos, name: str, device: torch.device | str
) -> Mapping[str, Any]:
    """Return the metrics on held-out photos, computed once and then read from disk."""
    path = sae_folder / "training" / "heldout.json"
    saved: dict[str, Any] = {}
    if path.exists():
        saved = read_json(path, HeldoutFile, fix="Delete it, and the metrics are computed again.")
    measured = {"photos": name, "sae": read_digest(sae_folder)}
    if any(saved.get(key) != value for key, value in measured.items()):
        sae = SAE.load(sae_folder, device=device)
        groups = count_groups(sae, heldout())
        saved = measured | {"measures": {**compute_metrics(sae, heldout()).to_dict(), "groups": groups}}
        write_json(path, saved, sealed=True)
    return saved["measures"]


def write_tables(folder: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write the rows as ``table.md``, with rounded numbers, and ``table.csv``."""
    flat = [flatten_row(row) for row in rows]
    columns = list(dict.fromkeys(name for row in flat for name in row))
    lines = ["| " + " | ".join(columns) + " |", "|" + " ---: |" * len(columns)]
    lines += [
        "| " + " | ".join(format_value(name, row[name]) if name in row else "" for name in columns) + " |"
        for row in flat
    ]
    write_text(folder / "table.csv", format_csv([columns, *([row.get(name, "") for name in columns] for row in flat)]))
    write_text(folder / "table.md", "\n".join(lines) + "\n")


def flatten_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table row with one column per group setting and one column for the FVU of all levels."""
    flat = {name: value for name, value in row.items() if name not in ("levels", "groups")}
    levels = row.get("levels", [])
    if len(levels) > 1:
        flat["fvu of levels"] = " ".join(f"{value:.4f}" for value in levels)
    return flat | {f"groups {setting}": count for setting, count in row.get("groups", {}).items()}


def format_value(name: str, value: Any) -> str:
    """Format a value of the column ``name``."""
    if name in COUNT_COLUMNS:
        return f"{value:,}"
    if name in PERCENT_COLUMNS:
        return f"{value:.1%}"
    if name == "fvu":
        return f"{value:.4f}"
    return f"{value:.1f}" if name == "l0" or name.startswith("groups") else f"{value}"
