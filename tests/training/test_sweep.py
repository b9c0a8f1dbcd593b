"""Sweeps over expansions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support import planted_dictionary as planted
from torino import SAE
from torino.core.errors import BadParameter
from torino.training.activations.base import InMemory
from torino.training.sweep import sweep

ROWS, _ = planted.make_rows()
ACTIVATIONS = InMemory(ROWS, metadata=planted.METADATA)


def test_sweep_writes_a_table_and_resumes(tmp_path: Path) -> None:
    photos = [ROWS[:16], ROWS[16:32]]
    options: dict[str, Any] = {"heldout": lambda: photos, "log_every": 10}
    config = planted.make_config(steps=20, latents=None)
    sweep(ACTIVATIONS, config, [1], tmp_path, **options)
    modified = (tmp_path / "x1" / "sae.safetensors").stat().st_mtime_ns
    rows = sweep(ACTIVATIONS, config, [1, 2.5], tmp_path, **options)
    assert (tmp_path / "x1" / "sae.safetensors").stat().st_mtime_ns == modified
    assert [row["latents"] for row in rows] == [32, 80]
    assert SAE.load(tmp_path / "x2.5").latents == 80
    table = (tmp_path / "table.md").read_text().splitlines()
    assert len(table) == 4
    for heading in ("latents", "fvu", "l0", "dead", "top_frequency", "groups (1,1)", "groups (2,2)", "groups (3,3)"):
        assert heading in table[0]
    lines = (tmp_path / "table.csv").read_text().splitlines()
    assert len(lines) == 3
    assert float(lines[2].split(",")[lines[0].split(",").index("fvu")]) == rows[1]["fvu"]
    with pytest.raises(BadParameter, match="at least one expansion"):
        sweep(ACTIVATIONS, config, [], tmp_path)


def test_metrics_of_another_sae_are_not_reused(tmp_path: Path) -> None:
    options: dict[str, Any] = {"heldout": lambda: [ROWS[:16], ROWS[16:32]]}
    (first,) = sweep(ACTIVATIONS, planted.make_config(steps=20, latents=None), [1], tmp_path, **options)
    for name in ("sae.safetensors", "card.json", "training/run.json", "training/log.jsonl"):
        (tmp_path / "x1" / name).unlink()
    (second,) = sweep(ACTIVATIONS, planted.make_config(steps=20, latents=None, seed=1), [1], tmp_path, **options)
    assert second["fvu"] != first["fvu"]
