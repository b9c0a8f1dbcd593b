"""Sweep: the same recipe at several expansions, and one table of what came out."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torino.core.errors import BadParameter
from torino.core.io import read_json, write_atomic, write_json
from torino.sae.model import SAE
from torino.training.activations.base import Activations
from torino.training.config import TrainConfig
from torino.training.distributed import World
from torino.training.metrics import group_counts, measure
from torino.training.trainer import Watch, train

Photos = Callable[[], Iterable[Tensor]]
COUNTS = ("latents", "rows")
SHARES = ("dead", "top_frequency")


def sweep(
    activations: Activations,
    recipe: TrainConfig,
    expansions: Sequence[float],
    folder: str | Path,
    *,
    heldout: Photos | None = None,
    heldout_name: str = "",
    device: torch.device | str = "cpu",
    world: World | None = None,
    watch: Callable[[float], Watch | None] | None = None,
    **options: Any,
) -> list[dict[str, Any]]:
    """Train one SAE per expansion into ``folder/x…``, and write ``table.md`` and ``table.csv`` after each.

    SAEs that are finished already are not trained again, so a sweep goes on where it was stopped.

    Parameters
    ----------
    heldout : callable, optional
        Gives the patches of held-out photos, one tensor each; then the measures are of these, with the number of
        groups a photo has at (k, δ) = (1, 1), (2, 2) and (3, 3).
    heldout_name : str
        What tells these photos from others; under another name they are measured anew.
    watch : callable, optional
        Gives the watch of the run at an expansion.
    **options
        Passed on to :func:`torino.training.trainer.train`.
    """
    if not expansions:
        raise BadParameter("A sweep needs at least one expansion, such as 4.")
    folder, world = Path(folder), world or World()
    recipes = {value: replace(recipe, expansion=value, latents=None) for value in expansions}
    for one in recipes.values():
        one.settled(activations.width)  # whatever is wrong with any is said before the first is trained
    rows: list[dict[str, Any]] = []
    for expansion, one in recipes.items():
        place = folder / f"x{expansion:g}"
        seen = watch(expansion) if watch is not None else None
        done = train(activations, one, place, device=device, world=world, watch=seen, **options)
        if world.first:
            measures = done.measures if heldout is None else _held_out(place, heldout, heldout_name, device)
            rows.append({"expansion": expansion, "latents": one.settled(activations.width).latents, **measures})
            write_tables(folder, rows)
        world.wait()
    return rows


def _held_out(place: Path, heldout: Photos, name: str, device: torch.device | str) -> Mapping[str, Any]:
    """Measures on held-out photos, worked out once."""
    path = place / "training" / "heldout.json"
    told: dict[str, Any] = read_json(path) if path.exists() else {}
    if told.get("photos") != name:
        sae = SAE.load(place, device=device)
        groups = group_counts(sae, heldout())
        told = {"photos": name, "measures": {**measure(sae, heldout()).facts(), "groups": groups}}
        write_json(path, told)
    return told["measures"]


def write_tables(folder: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write the rows as ``table.md``, for people, and ``table.csv``, for programs."""
    flat = [flattened(row) for row in rows]
    heads = list(flat[0])
    text = io.StringIO()
    writer = csv.DictWriter(text, heads, lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    lines = ["| " + " | ".join(heads) + " |", "|" + " ---: |" * len(heads)]
    lines += ["| " + " | ".join(shown(name, row[name]) for name in heads) + " |" for row in flat]
    _write(folder / "table.csv", text.getvalue())
    _write(folder / "table.md", "\n".join(lines) + "\n")


def flattened(row: Mapping[str, Any]) -> dict[str, Any]:
    """One row of the table: groups in columns of their own, the errors of the levels in one."""
    flat = {name: value for name, value in row.items() if name not in ("levels", "groups")}
    levels = row.get("levels", [])
    if len(levels) > 1:
        flat["fvu of levels"] = " ".join(f"{value:.4f}" for value in levels)
    return flat | {f"groups {setting}": count for setting, count in row.get("groups", {}).items()}


def shown(name: str, value: Any) -> str:
    """A number as people read it."""
    if name in COUNTS:
        return f"{value:,}"
    if name in SHARES:
        return f"{value:.1%}"
    if name == "fvu":
        return f"{value:.4f}"
    return f"{value:.1f}" if name == "l0" or name.startswith("groups") else f"{value}"


def _write(path: Path, text: str) -> None:
    def write(target: Path) -> None:
        target.write_text(text, encoding="utf-8")

    write_atomic(path, write)
