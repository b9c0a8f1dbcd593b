"""The layout of EleutherAI's sparsify (read only): ``sae.safetensors`` and ``cfg.json``."""

from __future__ import annotations

from torino.core.errors import BadFile
from torino.sae.formats._common import (
    ACCEPTED,
    CheckpointFile,
    SAEParts,
    TensorNames,
    check_flag,
    check_k,
    check_size,
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
    where = f"cfg.json next to {file.path}"
    activation, signed = config.get("activation", "topk"), check_flag(config, "signed", False, where)
    if activation != "topk" or signed:
        name = "signed top-k" if signed else repr(activation)
        raise BadFile(f"{file.path} is a sparsify coder with {name} activation. Accepted: {ACCEPTED}.")
    if check_flag(config, "skip_connection", False, where) or "W_skip" in file.keys:
        raise BadFile(f"{file.path} is a sparsify coder with a skip connection. Accepted: {ACCEPTED}.")
    parts = file.parts(NAMES, "topk", decoder)
    check_size(config.get("d_in"), parts.W_enc.shape[1], "d_in", where)
    parts.k = check_k(config.get("k"), len(parts.W_enc), where)
    facts: dict[str, object] = {"block": parse_block(file.path.parent.name, None)}
    if check_flag(config, "transcode", False, where):
        parts.center = False  # its decoder bias belongs to the predicted site, not to the input
        facts["notes"] = "Transcoder: its latents read one site, its decoder predicts another."
    parts.card = make_card(facts)
    return parts
