"""The layout of Prisma (ViT-Prisma, read only): a state dict, such as ``weights.pt``, and ``config.json``.

The library's ``save_model`` pickles its config into the weights; such files are refused, those of its hub repositories
contain tensors only.
"""

from __future__ import annotations

from typing import Any

from torino.core.errors import BadFile
from torino.sae.formats._common import (
    ACCEPTED,
    CheckpointFile,
    SAEParts,
    TensorNames,
    as_integer,
    check_flag,
    check_k,
    check_size,
    get_section,
    make_card,
    parse_block,
    shorten,
)
from torino.sae.model import Kind, Normalize

NAMES = TensorNames(transposed_enc=True)
CONFIG = "config.json"
KINDS: dict[str, Kind] = {"relu": "relu", "topk": "topk"}
NORMALIZE: dict[object, Normalize] = {
    None: "none",
    "none": "none",
    "layer_norm": "layer_norm",
    "constant_norm_rescale": "constant_norm",
}


def matches(file: CheckpointFile) -> bool:
    """Return whether a file with ``W_enc`` is from Prisma: its config has fields that no other library writes."""
    if file.has("cfg.json") or not file.has(CONFIG):
        return False
    config = file.json(CONFIG) or {}
    return "activation_fn_str" in config and "trainer" not in config


def read(file: CheckpointFile, decoder: bool) -> SAEParts:
    """Read a standard SAE, or a transcoder without skip connection, with a note in its card."""
    config, where = file.json(CONFIG) or {}, f"{CONFIG} next to {file.path}"
    architecture, activation = config.get("architecture") or "standard", str(config["activation_fn_str"])
    if architecture != "standard" or activation not in KINDS:
        raise BadFile(
            f"{file.path} is an SAE of Prisma with architecture {shorten(architecture)} and activation "
            f"{activation!r}. Accepted: 'standard' with {', '.join(map(repr, KINDS))}."
        )
    normalize = config.get("normalize_activations")
    if not isinstance(normalize, str | None) or normalize not in NORMALIZE:
        accepted = ", ".join(repr(name) for name in NORMALIZE if name)
        raise BadFile(f"{where} has normalize_activations = {shorten(normalize)}. Accepted: {accepted}.")
    transcoder = check_flag(config, "is_transcoder", False, where) or "b_dec_out" in file.keys
    if "W_skip" in file.keys:
        raise BadFile(f"{file.path} is a transcoder of Prisma with a skip connection. Accepted: {ACCEPTED}.")
    if transcoder and decoder:
        _check_output(file)
    parts = file.parts(NAMES, KINDS[activation], decoder)
    latents, width = parts.W_enc.shape
    check_size(config.get("d_sae"), latents, "d_sae", where)
    check_size(config.get("d_in"), width, "d_in", where)
    parts.k = check_k(get_section(config, "activation_fn_kwargs").get("k"), latents, where)
    parts.normalize = NORMALIZE[normalize]
    notes = ""
    if transcoder:  # it subtracts b_dec from the input, but adds b_dec_out to the output
        parts.set_center(False)
        if decoder:
            parts.b_dec = file.tensor_of_shape("b_dec_out", (width,), "W_dec")
        notes = "Transcoder: its latents read one site, its decoder predicts another."
    parts.card = make_card(_facts(config, notes))
    return parts


def _check_output(file: CheckpointFile) -> None:
    width, size = file.tensor("b_dec").shape[0], file.tensor("b_dec_out").shape[0]
    if size != width:
        raise BadFile(
            f"{file.path} is a transcoder of Prisma from width {width} to width {size}, so its output has no place "
            "among the tokens that it reads. Load it with decoder=False."
        )


def _facts(config: dict[str, Any], notes: str) -> dict[str, Any]:
    layer, site = as_integer(config.get("hook_point_layer")), str(config.get("layer_subtype") or "")
    block = None if layer is None else parse_block(f"blocks.{layer}.{site}".rstrip("."), layer)
    if site and block is None:
        notes = f"{notes} Hook {site}.".strip()
    tokens = (
        "cls" if config.get("cls_token_only") is True else "patch" if config.get("use_patches_only") is True else ""
    )
    encoder = str(config.get("model_name") or "").removeprefix("open-clip:")
    return {
        "encoder": encoder,
        "block": block,
        "token_kind": tokens,
        "data": config.get("dataset_name"),
        "notes": notes,
    }
