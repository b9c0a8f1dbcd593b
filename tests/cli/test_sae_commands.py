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
    assert {"name": "sparsify", "read": "yes", "written": "no"} in rows


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
