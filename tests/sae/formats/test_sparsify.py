"""The sparsify layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_cases import (
    X,
    check_sae,
    sparse_coder,
    top_k,
)
from safetensors.torch import load_file

from torino.core.errors import BadFile
from torino.sae import SAE


@pytest.mark.parametrize("transcode", [False, True])
def test_sparsify(tmp_path: Path, transcode: bool) -> None:
    sae = sparse_coder(tmp_path / "layers.22", transcode=transcode)
    s = load_file(tmp_path / "layers.22" / "sae.safetensors")
    x = X if transcode else X - s["b_dec"]
    z = top_k(torch.relu(x @ s["encoder.weight"].T + s["encoder.bias"]))
    check_sae(sae, z, z @ s["W_dec"] + s["b_dec"])
    assert sae.card.block == 22
    assert ("Transcoder" in sae.card.notes) == transcode


@pytest.mark.parametrize(
    ("config", "words"),
    [({"skip_connection": True}, "skip"), ({"activation": "groupmax"}, "groupmax"), ({"signed": True}, "signed")],
)
def test_sparsify_refuses(tmp_path: Path, config: dict[str, Any], words: str) -> None:
    with pytest.raises(BadFile, match=words):
        sparse_coder(tmp_path, **config)


def test_sparsify_needs_its_config(tmp_path: Path) -> None:
    sparse_coder(tmp_path)
    (tmp_path / "cfg.json").unlink()
    with pytest.raises(BadFile, match=r"no cfg\.json"):
        SAE.load(tmp_path)
