"""The torino layout."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_cases import (
    KINDS,
    C,
    D,
    K,
    X,
    make_full_sae,
    random_tensor,
    sparse_coder,
    write_files,
)
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from torino.core.errors import BadFile, BadParameter
from torino.core.io import read_safetensors, write_arrays
from torino.sae import SAE
from torino.sae.formats import write_sae
from torino.sae.formats.native import WEIGHTS


@pytest.mark.parametrize("kind", KINDS)
def test_torino_layout_keeps_every_bit(tmp_path: Path, kind: str) -> None:
    sae = make_full_sae(kind, center=kind != "relu", normalize="layer_norm" if kind == "topk" else "none")
    assert sae.save(tmp_path / "new" / "folder") == tmp_path / "new" / "folder"
    back = SAE.load(tmp_path / "new" / "folder")
    assert back.facts() == sae.facts()
    assert back.state_dict().keys() == sae.state_dict().keys()
    assert all(torch.equal(value, sae.state_dict()[name]) for name, value in back.state_dict().items())
    assert sorted(path.name for path in (tmp_path / "new" / "folder").iterdir()) == ["card.json", "sae.safetensors"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_torino_layout_in_half_precision(tmp_path: Path, dtype: torch.dtype) -> None:
    sae = make_full_sae("jumprelu")
    sae.save(tmp_path, dtype=dtype)
    stored = load_file(tmp_path / "sae.safetensors")
    assert {name: value.dtype for name, value in stored.items() if value.ndim == 2} == {"W_enc": dtype, "W_dec": dtype}
    back = SAE.load(tmp_path)
    torch.testing.assert_close(back.W_enc, sae.W_enc, rtol=1e-2, atol=1e-3)
    assert back.threshold is not None
    assert torch.equal(back.threshold, sae.threshold)
    assert torch.equal(back.b_enc, sae.b_enc)


def test_torino_layout_refuses_a_dtype_that_overflows(tmp_path: Path) -> None:
    sae = make_full_sae("relu")
    sae.W_enc[0, 0] = 1e6
    with pytest.raises(BadParameter, match="too large"):
        sae.save(tmp_path, dtype=torch.float16)
    with pytest.raises(BadParameter, match="dtype must be"):
        sae.save(tmp_path, dtype=torch.int8)
    assert not list(tmp_path.iterdir())


def test_torino_layout_keeps_a_missing_threshold_missing(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="never estimated"):
        sae = make_full_sae("batchtopk", threshold=None)
    sae.save(tmp_path)
    with pytest.warns(UserWarning, match="never estimated"):
        assert SAE.load(tmp_path).threshold is None


def test_without_decoder_its_tensor_is_checked_in_parts_but_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_full_sae("topk").save(tmp_path)
    taken: list[str] = []

    class Spy:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.file = safe_open(*args, **kwargs)

        def __enter__(self) -> Spy:
            self.file.__enter__()
            return self

        def __exit__(self, *error: Any) -> None:
            self.file.__exit__(*error)

        def keys(self) -> list[str]:
            return list(self.file.keys())

        def metadata(self) -> Any:
            return self.file.metadata()

        def get_tensor(self, name: str) -> Tensor:
            taken.append(name)
            return self.file.get_tensor(name)

        def get_slice(self, name: str) -> Any:
            return self.file.get_slice(name)

    monkeypatch.setattr("torino.core.io.safe_open", Spy)
    assert SAE.load(tmp_path, decoder=False).W_dec is None
    assert sorted(taken) == ["W_enc", "b_dec", "b_enc"]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_decoder_that_is_not_finite_is_refused_with_and_without_it(tmp_path: Path, value: float) -> None:
    folder = make_full_sae("topk").save(tmp_path)
    tensors, metadata = read_safetensors(folder / WEIGHTS)
    tensors["W_dec"][-1, -1] = value
    write_arrays(folder / WEIGHTS, tensors, metadata)
    for decoder in (True, False):
        with pytest.raises(BadFile, match=r"'W_dec' in .* contains NaN or infinite values"):
            SAE.load(folder, decoder=decoder)


def test_tied_weights_are_written(tmp_path: Path) -> None:
    W = random_tensor(C, D)
    SAE(W, W_dec=W, kind="topk", k=K).save(tmp_path)
    assert torch.equal(SAE.load(tmp_path).W_dec, W)


def test_first_groups_are_written_alone(tmp_path: Path) -> None:
    small = make_full_sae("matryoshka").first(1)
    for layout in ("torino", "dictionary_learning", "saelens"):
        back = SAE.load(write_sae(small, tmp_path / layout, layout))
        torch.testing.assert_close(back.encode(X), small.encode(X))
    assert (tmp_path / "dictionary_learning" / "ae.pt").stat().st_size < 6000


def edit(path: Path, **changes: Any) -> None:
    card = json.loads(path.read_text()) | {"checksum": ...} | changes  # as one edits a card by hand
    path.write_text(json.dumps({name: value for name, value in card.items() if value is not ...}))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format": "torino-sae/2"}, "Update torino"),
        ({"format": ...}, "this version of torino reads 'torino-sae/1'"),
        ({"weights_sha256": "0"}, "other weights"),
        ({"latents": 7}, "latents = 7"),
        ({"groups": "many"}, "groups = 'many'"),
        ({"groups": [1, 2]}, "add up"),
        ({"kind": "gated"}, "kind must be one of"),
        ({"kind": ...}, "kind must be one of"),
        ({"normalize": "sphere"}, "normalize must be one of"),
    ],
)
def test_a_wrong_card_is_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    make_full_sae("matryoshka").save(tmp_path)
    edit(tmp_path / "card.json", **changes)
    with pytest.raises(BadFile, match=words):
        SAE.load(tmp_path)


def test_a_card_may_be_written_by_hand(tmp_path: Path) -> None:
    sae = make_full_sae("topk")
    tensors = {"W_enc": sae.W_enc, "b_enc": sae.b_enc, "W_dec": sae.W_dec, "b_dec": sae.b_dec}
    card = {"format": "torino-sae/1", "kind": "topk", "k": K, "encoder": None, "block": 22.0}
    back = SAE.load(write_files(tmp_path, "sae.safetensors", tensors, card=card))
    assert torch.equal(back.encode(X), sae.encode(X))
    assert (back.card.encoder, back.card.block) == ("", 22)


def test_a_save_without_its_card_is_incomplete(tmp_path: Path) -> None:
    make_full_sae("topk").save(tmp_path)
    (tmp_path / "card.json").unlink()
    with pytest.raises(BadFile, match=r"no card\.json"):
        SAE.load(tmp_path)


def test_keys_decide_between_torino_and_sparsify(tmp_path: Path) -> None:
    make_full_sae("relu").save(tmp_path)
    sparse_coder(tmp_path)  # the card of the torino SAE remains
    assert SAE.load(tmp_path).kind == "topk"
