"""The layout of Qwen-Scope (read only): one file ``layer<N>.sae.pt`` for each layer of a language model.

Four tensors, ``W_enc`` (C, D), ``b_enc``, ``W_dec`` (D, C) and ``b_dec``. The encoder does not subtract ``b_dec``. The
file does not contain k, the name of the repository does: ``SAE-Res-<model>-W<latents>K-L0_<k>``. The encoder of
Qwen-Scope keeps the k largest values even if they are negative; here negative ones are 0.
"""

from __future__ import annotations

import re
from typing import Any

from torino.sae.formats._common import CheckpointFile, SAEParts, TensorNames, check_k, make_card

NAMES = TensorNames(transposed_dec=True)
KEYS = frozenset({"W_enc", "b_enc", "W_dec", "b_dec"})
ADVICE = (
    "Qwen-Scope gives k in the name of the repository: keep the file in a folder with that name "
    "(SAE-Res-<model>-W<latents>K-L0_<k>), give SAE.load(..., k=50), or convert it with "
    "'torino export FILE FOLDER --k 50'."
)

_LAYER = re.compile(r"layer_?(\d+)(?:\.sae)?\.(?:pt|pth|safetensors)")
_REPOSITORY = re.compile(r"(?:.*--)?SAE-Res-(?P<model>.+)-W\d+K-L0_(?P<k>\d+)")


def matches(file: CheckpointFile) -> bool:
    """Return whether the encoder is stored as (C, D), unlike that of other libraries with these keys."""
    encoder, latents, width = (file.shape(name) for name in ("W_enc", "b_enc", "b_dec"))
    if file.keys != KEYS or encoder is None or latents is None or width is None or encoder != latents + width:
        return False
    return latents != width or _LAYER.fullmatch(file.path.name) is not None


def read(file: CheckpointFile, decoder: bool) -> SAEParts:
    """Read the SAE of one layer."""
    parts = file.parts(NAMES, "topk", decoder)
    parts.center, parts.advice = False, ADVICE
    facts: dict[str, Any] = {}
    layer = _LAYER.fullmatch(file.path.name)
    if layer is not None:
        facts["block"] = int(layer[1])
    for folder in reversed(file.path.absolute().parts[:-1]):
        repository = _REPOSITORY.fullmatch(folder)
        if repository is not None:
            parts.k = check_k(int(repository["k"]), len(parts.W_enc), f"The folder {folder}")
            facts |= {"name": folder.split("--")[-1], "encoder": f"Qwen/{repository['model']}"}
            break
    parts.card = make_card(facts)
    return parts
