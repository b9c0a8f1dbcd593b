"""The commands ``torino list``, ``torino info`` and ``torino export``."""

from __future__ import annotations

import json
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch

from tests.support.command import run_torino
from torino import SAE, list_reducers
from torino.datasets.bundled import example_folder


def test_list_reducers() -> None:
    assert "torino-m" in run_torino("list").out
    rows = json.loads(run_torino("list", "reducers", "--json").out)
    assert [row["name"] for row in rows] == list_reducers()
    assert {row["name"] for row in rows} >= {"torino-m", "torino-p"}


def test_list_layouts() -> None:
    assert "saelens" in run_torino("list", "layouts").out
    rows = json.loads(run_torino("list", "layouts", "--json").out)
    for name in ("sparsify", "saev", "prisma", "overcomplete", "qwen-scope"):
        assert {"name": name, "read": "yes", "written": "no"} in rows


def test_list_models(monkeypatch: pytest.MonkeyPatch) -> None:
    from torino.vlm import families, loading

    entry = EntryPoint("lab", "tests:package", loading.GROUP)
    monkeypatch.setattr(loading, "entry_points", lambda group: [entry] if group == loading.GROUP else [])
    text = run_torino("list", "models").text
    assert "llava_next model family transformers" in text
    assert "lab installed model" in text
    rows = json.loads(run_torino("list", "models", "--json").out)
    assert [row["name"] for row in rows] == [*families(), "lab"]
    assert rows[-1] == {"name": "lab", "kind": "installed model", "from": ""}
    assert {"llava", "qwen2_5_vl", "gemma3"} <= {row["name"] for row in rows if row["kind"] == "model family"}


def test_info() -> None:
    assert "matryoshka" in run_torino("info", "example").out
    facts = json.loads(run_torino("info", example_folder() / "sae", "--json").out)
    assert (facts["width"], facts["latents"], facts["block"]) == (384, 1536, 10)
    assert facts["threshold"] > 0


def test_export_round_trip(tmp_path: Path) -> None:
    weights = torch.eye(6)[:, :4]
    SAE(weights, W_dec=weights.clone(), kind="matryoshka", k=2, threshold=0.5, groups=(2, 4)).save(tmp_path / "sae")
    text = run_torino("export", tmp_path / "sae", tmp_path / "dl", "--layout", "dictionary_learning").text
    assert "in the dictionary_learning layout" in text
    facts = json.loads(run_torino("info", tmp_path / "dl", "--json").out)
    assert facts["groups"] == [2, 4]


def test_export_of_a_file_without_kind_and_k(tmp_path: Path) -> None:
    state = {"encoder.final_block.0.weight": torch.eye(6)[:, :4], "encoder.final_block.0.bias": torch.zeros(6)}
    state |= {"dictionary._weights": torch.eye(6)[:, :4], "dictionary.multiplier": torch.tensor(0.0)}
    torch.save(state, tmp_path / "sae.pt")
    refused = run_torino("info", tmp_path / "sae.pt", code=2)
    assert "torino export FILE FOLDER --kind topk --k 32" in refused.text
    run_torino("export", tmp_path / "sae.pt", tmp_path / "mine", "--kind", "topk", "--k", "2")
    facts = json.loads(run_torino("info", tmp_path / "mine", "--json").out)
    assert (facts["kind"], facts["k"]) == ("topk", 2)
    run_torino("export", tmp_path / "sae.pt", tmp_path / "batch", "--kind", "batchtopk", "--threshold", "0.5")
    assert json.loads(run_torino("info", tmp_path / "batch", "--json").out)["threshold"] == pytest.approx(0.5)


def test_errors(tmp_path: Path) -> None:
    cases: list[tuple[tuple[str | Path, ...], str]] = [
        (("info", "owner/of-nothing-at-all"), "owner/of-nothing-at-all"),
        (("info", tmp_path), "o SAE"),
        (("info", "none"), "'none' means no SAE"),
        (("list", "everything"), "'everything' is not one of 'reducers', 'models', 'layouts'"),
        (("export", "example", tmp_path / "x", "--layout", "onnx"), "'onnx' is not one of 'torino'"),
        (("export", "none", tmp_path / "x"), "'none' means no SAE"),
    ]
    for words, expected in cases:
        output = run_torino(*words, code=2)
        assert expected in output.text, words
        assert output.out == ""
        assert len(output.text) < 700
    assert not (tmp_path / "x").exists()
