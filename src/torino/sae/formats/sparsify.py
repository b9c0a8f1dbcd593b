"""The layout of EleutherAI's sparsify: ``sae.safetensors`` and ``cfg.json``; read only."""

from __future__ import annotations

from torino.core.errors import BadFile
from torino.sae.formats._common import ACCEPTED, Names, Parts, Stored, block_of, card_of, whole

NAMES = Names(W_enc="encoder.weight", b_enc="encoder.bias")


def read(stored: Stored, decoder: bool) -> Parts:
    """Read a top-k sparse coder; a transcoder is read too, uncentred, and its card says so."""
    config = stored.json("cfg.json")
    if config is None:
        raise BadFile(
            f"{stored.path} has sparsify's tensors, but no cfg.json next to it to say how many latents are active. "
            "Fetch the whole folder."
        )
    activation = config.get("activation", "topk")
    if activation != "topk" or config.get("signed"):
        what = "signed top-k" if config.get("signed") else repr(activation)
        raise BadFile(f"{stored.path} is a sparsify coder with {what} activation. Accepted: {ACCEPTED}.")
    if config.get("skip_connection") or "W_skip" in stored.keys:
        raise BadFile(f"{stored.path} is a sparsify coder with a skip connection. Accepted: {ACCEPTED}.")
    parts = stored.parts(NAMES, "topk", decoder)
    parts.k = whole(config.get("k"))
    facts: dict[str, object] = {"block": block_of(stored.path.parent.name, None)}
    if config.get("transcode"):
        parts.center = False  # its decoder bias belongs to the site it predicts, not to the one it reads
        facts["notes"] = "Transcoder: its latents read one site, its decoder predicts another."
    parts.card = card_of(facts)
    return parts
