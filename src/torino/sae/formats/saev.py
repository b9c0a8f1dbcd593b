"""The layout of saev (read only): a line of JSON, then a torch state dict, in one file ``sae.pt``.

Versions of the library differ in the header and in whether the encoder subtracts ``b_dec``:

======================  ====================================================  ==============================
header                  settings                                              encoder
======================  ====================================================  ==============================
no ``schema`` (0.1.0)   ``d_vit``, ``exp_factor``; always ReLU                subtracts ``b_dec``
``schema`` 1            ``cls`` names the activation                          depends on the commit
``schema`` 2 to 5       ``cfg.activation`` with ``cls`` and ``params``        does not subtract it
======================  ====================================================  ==============================

A TopK encoder of saev keeps the k largest values even if they are negative; here negative ones are 0.
"""

from __future__ import annotations

import re
import warnings
from typing import Any

from torino.core.errors import BadFile
from torino.sae.card import SAECard
from torino.sae.formats._common import (
    ACCEPTED,
    CheckpointFile,
    SAEParts,
    TensorNames,
    as_integer,
    check_k,
    check_size,
    get_section,
    make_card,
    shorten,
)
from torino.sae.model import Kind

NAMES = TensorNames(transposed_enc=True)
KINDS: dict[str, Kind] = {"Relu": "relu", "TopK": "topk", "BatchTopK": "batchtopk"}
SCHEMAS = (1, 2, 3, 4, 5)
THRESHOLD = "activation.threshold"
TOKENS = {"patches": "patch", "content": "patch", "cls": "cls", "special": "cls"}


def read(file: CheckpointFile, decoder: bool) -> SAEParts:
    """Read a file of any version, except those of which the file does not tell what they compute."""
    header = file.json_header or {}
    where = f"The JSON header of {file.path}"
    legacy = "schema" not in header
    config = header if legacy else get_section(header, "cfg")
    if not {"W_enc", "b_enc", "W_dec", "b_dec"} <= file.keys or not config or (legacy and "d_vit" not in header):
        raise BadFile(f"{file.path} begins with a line of JSON, but is not an SAE of saev. Accepted: {ACCEPTED}.")
    schema = header.get("schema")
    if not legacy and schema not in SCHEMAS:
        raise BadFile(
            f"{where} has schema = {shorten(schema)}. Accepted: none, or {', '.join(map(str, SCHEMAS))}. "
            "Save the SAE with a version of saev that writes one of these."
        )
    name, parameters = ("Relu", {}) if legacy else _activation(header, config)
    if name not in KINDS:
        raise BadFile(f"{file.path} is an SAE of saev with the activation {name!r}. Accepted: {', '.join(KINDS)}.")
    parts = file.parts(NAMES, KINDS[name], decoder)
    latents, width = parts.W_enc.shape
    _check_sizes(config, latents, width, where)
    if name != "Relu":
        k = as_integer(parameters.get("top_k"))
        parts.k = check_k(parameters.get("top_k") if k is None else min(k, latents), latents, where)
    if name == "BatchTopK" and THRESHOLD in file.keys:
        parts.threshold = file.number(THRESHOLD)
    elif name == "BatchTopK":
        parts.kind = None
        parts.advice = (
            "It is a BatchTopK SAE of saev without a threshold. Give SAE.load(..., kind='batchtopk', threshold=...), "
            "or kind='topk' to use its k for each token."
        )
    parts.center = legacy
    if schema == 1 and str(header.get("cls")) in KINDS and bool(parts.b_dec.any()):
        raise BadFile(
            f"{where} has schema 1, which saev used before and after its encoder stopped to subtract b_dec, so the "
            "latents are unknown. Load it with the version of saev that trained it, and save it with a newer one."
        )
    parts.card = _card(file, legacy)
    return parts


def _activation(header: dict[str, Any], config: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return class and parameters of the activation; in the first schema the class is that of the whole config."""
    name = str(header.get("cls"))
    if name in KINDS:
        return name, config
    activation = get_section(config, "activation")
    return str(activation.get("cls")), get_section(activation, "params")


def _check_sizes(config: dict[str, Any], latents: int, width: int, where: str) -> None:
    check_size(config.get("d_vit"), width, "d_vit", where)
    check_size(config.get("d_model"), width, "d_model", where)
    check_size(config.get("d_sae"), latents, "d_sae", where)
    factor = as_integer(config.get("exp_factor"))
    if factor is not None and "d_sae" not in config:
        check_size(factor * width, latents, "d_vit * exp_factor", where)


def _card(file: CheckpointFile, legacy: bool) -> SAECard:
    """Fill the card from ``config.json`` of the training run and from a folder ``layer_<N>``."""
    config = file.json("config.json") or {}
    data = get_section(config, "data") or get_section(config, "train_data")
    scaled = [name for name in ("scale_mean", "scale_norm") if data.get(name, legacy) is not False]
    if scaled:
        warnings.warn(
            f"saev normalizes the activations it trains on ({', '.join(scaled)}), but {file.path} does not contain "
            "their mean and scale, so latents of plain tokens are wrong. Fold both into the weights, see the guide "
            "'Load an SAE'.",
            stacklevel=2,
        )
    folders = [match[1] for part in file.path.parts[-4:-1] if (match := re.fullmatch(r"layer_(\d+)", part))]
    layer = as_integer(data.get("layer"))
    block = layer if layer is not None and layer >= 0 else (int(folders[-1]) if folders else None)
    tokens = data.get("patches", data.get("tokens"))
    notes = f"Trained on normalized activations ({', '.join(scaled)})." if scaled else ""
    return make_card({"block": block, "token_kind": TOKENS.get(str(tokens)), "notes": notes})
