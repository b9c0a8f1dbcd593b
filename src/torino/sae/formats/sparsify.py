"""The layout of EleutherAI's sparsify (read only): ``sae.safetensors`` and ``cfg.json``."""

from __future__ import annotations

from torino.core.errors import BadFile
from torino.sae.formats._common import (
    ACCEPTED,
    CheckpointFile,
    SAEParts,
    TensorNames,
    as_integer,
    make_card,
    parse_block,
)

NAMES = TensorNames(W_enc="encoder.weight", b_enc="encoder.bias")


def read(file: CheckpointFile, decoder: bool) -> SAEParts:
    """Read a top-k sparse coder; a transcoder is read without centering, with a note in its card."""
    config = file.json("cfg.json")
    if config is None:
        raise BadFile(
            f"{file.path} has the tensors of sparsify, but there is no cfg.json next to it, which defines k. "
            "Download the whole folder."
        )
    activation = config.get("activation", "topk")
    if activation != "topk" or config.get("signed"):
        name = "signed top-k" if config.get("signed") else repr(activation)
        raise BadFile(f"{file.path} is a sparsify coder with {name} activation. Accepted: {ACCEPTED}.")
    if config.get("skip_connection") or "W_skip" in file.keys:
        raise BadFile(f"{file.path} is a sparsify coder with a skip connection. Accepted: {ACCEPTED}.")
    parts = file.parts(NAMES, "topk", decoder)
    parts.k = as_integer(config.get("k"))
    facts: dict[str, object] = {"block": parse_block(file.path.parent.name, None)}
    if config.get("transcode"):
        parts.center = False  # its decoder bias belongs to the predicted site, not to the input
        facts["notes"] = "Transcoder: its latents read one site, its decoder predicts another."
    parts.card = make_card(facts)
    return parts
