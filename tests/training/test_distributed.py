"""Distributed training."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support import planted_dictionary as planted
from torino import SAE
from torino.core.errors import BadParameter
from torino.training.distributed import Distributed, local_device
from torino.training.trainer import train


def test_two_processes_match_one(tmp_path: Path) -> None:
    """Each process gets half of the batch, BatchTopK covers both halves, and weights agree to 1e-4."""
    kinds = ["matryoshka", "relu"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, planted.__file__, str(tmp_path / "two"), "0", ",".join(kinds)]
    ranks = [
        subprocess.Popen(command, env={**environment, "WORLD_SIZE": "2", "RANK": str(rank)}, stderr=subprocess.PIPE)
        for rank in range(2)
    ]
    try:
        output = [process.communicate(timeout=300)[1].decode() for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0, 0], output
    for kind in kinds:
        planted.run_training(str(tmp_path / "one" / kind), kind=kind)
        one, two = (SAE.load(tmp_path / count / kind) for count in ("one", "two"))
        for name in ("W_enc", "W_dec", "b_enc", "b_dec"):
            torch.testing.assert_close(getattr(two, name), getattr(one, name), rtol=0, atol=1e-4)
        for two_line, one_line in zip(
            planted.read_log(tmp_path / "two" / kind), planted.read_log(tmp_path / "one" / kind), strict=True
        ):
            assert two_line["l0"] == pytest.approx(one_line["l0"], rel=1e-3)
            assert two_line["fvu"] == pytest.approx(one_line["fvu"], rel=1e-3)


def test_every_process_needs_a_row(tmp_path: Path) -> None:
    with pytest.raises(BadParameter, match="at least 4, one row for each process, got 3"):
        train(planted.make_activations(), planted.make_config(batch=3), tmp_path, distributed=Distributed(0, 4))


def test_local_device_is_the_one_that_torchrun_assigned(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setenv("LOCAL_RANK", "3")
    for name in ("auto", "cuda"):
        assert local_device(name) == torch.device("cuda:3")
    assert local_device("cuda:1") == torch.device("cuda:1")
    assert local_device("cpu") == torch.device("cpu")
    assert [device.index for device in chosen] == [3, 3, 1], "set_device needs a device index"


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]
