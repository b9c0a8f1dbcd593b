"""Metric loggers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support import planted_dictionary as planted
from torino.core.errors import BadFile, BadParameter, MissingPackage
from torino.training.activations.base import InMemory
from torino.training.checkpoint import CheckpointStore
from torino.training.logging import JsonlLogger
from torino.training.trainer import train

ROWS, _ = planted.make_rows()
ACTIVATIONS = InMemory(ROWS, metadata=planted.METADATA)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_disk_is_reported_by_the_log(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").symlink_to("/dev/full")
    log = JsonlLogger(tmp_path / "log.jsonl")
    with pytest.raises(BadFile, match=r"log\.jsonl: No space left on device.*resumes from its last checkpoint"):
        log.write(1, {"fvu": 0.5})
    log.close()  # nothing is buffered that could fail again


def test_log_is_truncated_atomically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = CheckpointStore(tmp_path)
    log = JsonlLogger(checkpoints.log_file)
    for step in (5, 10, 15):
        log.write(step, {"fvu": 0.5})
    log.close()

    def fail(self: Path, target: Path) -> None:
        raise KeyboardInterrupt

    before = checkpoints.log_file.read_bytes()
    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(KeyboardInterrupt):
        checkpoints.truncate_log(10)
    monkeypatch.undo()
    assert checkpoints.log_file.read_bytes() == before
    checkpoints.truncate_log(10)
    assert [line["step"] for line in planted.read_log(tmp_path)] == [5, 10]


def test_tensorboard_matches_the_log(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(ACTIVATIONS, planted.make_config(steps=20), tmp_path, loggers=["tensorboard"], log_every=5)
    events = EventAccumulator(str(tmp_path / "training" / "tensorboard"))
    events.Reload()
    values = {event.step: event.value for event in events.Scalars("fvu")}
    assert values == pytest.approx({line["step"]: line["fvu"] for line in planted.read_log(tmp_path)}, rel=1e-6)
    assert set(events.Tags()["scalars"]) >= {"loss", "l0", "dead", "top_frequency", "levels/1", "levels/4"}


def test_unavailable_loggers_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadParameter, match="tensorboard or wandb"):
        train(ACTIVATIONS, planted.make_config(), tmp_path, loggers=["mlflow"])
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingPackage, match="pip install wandb"):
        train(ACTIVATIONS, planted.make_config(), tmp_path, loggers=["wandb"])
