"""The layout of Qwen-Scope: layer<N>.sae.pt in a repository SAE-Res-<model>-W<latents>K-L0_<k>.

Formulas of the model cards (SAE-Res-Qwen3-8B-Base-W64K-L0_50), and of the loader of sae-lens 6.54.12.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoint_cases import (
    C,
    D,
    K,
    X,
    check_sae,
    k_and_threshold,
    random_tensor,
    top_k,
    write_files,
)
from torch import Tensor

from torino.core.errors import BadFile
from torino.sae import SAE

REPOSITORY = f"SAE-Res-Qwen3.5-2B-Base-W32K-L0_{K}"


def weights(latents: int = C, width: int = D) -> dict[str, Tensor]:
    return {
        "W_enc": random_tensor(latents, width, seed=1),
        "W_dec": random_tensor(width, latents, seed=2),
        "b_enc": random_tensor(latents, seed=3),
        "b_dec": random_tensor(width, seed=4),
    }


def latents(s: dict[str, Tensor], x: Tensor = X, k: int = K) -> Tensor:
    return torch.relu(top_k(x @ s["W_enc"].T + s["b_enc"], k))


@pytest.mark.parametrize("folder", [REPOSITORY, f"models--Qwen--{REPOSITORY}/snapshots/0a1b2c"])
def test_qwen_scope(tmp_path: Path, folder: str) -> None:
    s = weights()
    sae = SAE.load(write_files(tmp_path / folder, "layer17.sae.pt", s) / "layer17.sae.pt")
    check_sae(sae, latents(s), latents(s) @ s["W_dec"].T + s["b_dec"])
    assert (sae.kind, sae.k, sae.center) == ("topk", K, False)
    assert (sae.card.name, sae.card.encoder, sae.card.block) == (REPOSITORY, "Qwen/Qwen3.5-2B-Base", 17)
    assert SAE.load(tmp_path, decoder=False).W_dec is None


def test_qwen_scope_without_the_name_of_the_repository(tmp_path: Path) -> None:
    s = weights()
    path = write_files(tmp_path, "mine.pt", s) / "mine.pt"
    with pytest.raises(BadFile, match=r"needs k between 1 and 24.*Qwen-Scope gives k in the name of the repository"):
        SAE.load(path)
    sae = SAE.load(path, k=5)
    check_sae(sae, latents(s, k=5), latents(s, k=5) @ s["W_dec"].T + s["b_dec"])
    assert sae.card.block is None


def test_a_given_k_replaces_that_of_the_repository(tmp_path: Path) -> None:
    assert SAE.load(write_files(tmp_path / REPOSITORY, "layer0.sae.pt", weights()), k=7).k == 7


def test_the_name_of_the_file_decides_for_square_matrices(tmp_path: Path) -> None:
    s = weights(D, D)
    sae = SAE.load(write_files(tmp_path / REPOSITORY, "layer3.sae.pt", s))
    torch.testing.assert_close(sae.encode(X), latents(s))
    with pytest.raises(BadFile, match="kind is unknown"):
        SAE.load(write_files(tmp_path / "other", "ae.pt", s))


def test_other_tensors_are_not_of_qwen_scope(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match="'b_enc'"):  # dictionary_learning stores its encoder as (D, C)
        SAE.load(write_files(tmp_path, "ae.pt", weights() | k_and_threshold()))


def test_a_repository_of_all_layers_lists_them(tmp_path: Path) -> None:
    for layer in range(3):
        write_files(tmp_path / REPOSITORY, f"layer{layer}.sae.pt", weights())
    with pytest.raises(BadFile, match=r"contains 3 files that may be the SAE: layer0\.sae\.pt, layer1\.sae\.pt"):
        SAE.load(tmp_path / REPOSITORY)


def test_qwen_scope_k_that_does_not_fit(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match=r"L0_500 has k = 500\. Accepted: an integer from 1 to 24"):
        SAE.load(write_files(tmp_path / "SAE-Res-Qwen3-8B-Base-W64K-L0_500", "layer0.sae.pt", weights()))
