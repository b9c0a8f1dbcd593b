"""The SAELens layout: ``sae_weights.safetensors`` and ``cfg.json``, from training or inference saves."""

from __future__ import annotations

from dataclasses import asdict
from itertools import accumulate, pairwise
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torino.core.errors import BadFile
from torino.core.io import read_safetensors, write_arrays, write_json
from torino.sae.formats._common import (
    CheckpointFile,
    SAEParts,
    TensorNames,
    as_integer,
    as_integers,
    get_section,
    make_card,
    parse_block,
)
from torino.sae.model import SAE, Kind, Normalize

KINDS: dict[str, Kind] = {
    "standard": "relu",
    "topk": "topk",
    "batchtopk": "batchtopk",
    "matryoshka_batchtopk": "matryoshka",
    "jumprelu": "jumprelu",
}
NORMALIZE: dict[str, Normalize] = {
    "none": "none",
    "layer_norm": "layer_norm",
    "constant_norm_rescale": "constant_norm",
}
NAMES = TensorNames(transposed_enc=True)
RESCALED = ("topk", "batchtopk", "matryoshka_batchtopk")
SCALER, WHITENING = "activation_scaler.json", "activation_whitening.safetensors"
VERSION = "6.0.0"  # the first release with this structure of cfg.json


def read(file: CheckpointFile, decoder: bool) -> SAEParts:
    """Read the weights, and fold settings into them that :class:`SAE` does not have."""
    config = file.json("cfg.json")
    if config is None:
        raise BadFile(
            f"There is no cfg.json next to {file.path}. It defines the kind of the SAE and whether it is centered. "
            "Download the whole folder, or, for dictionary_learning, the config.json."
        )
    metadata = get_section(config, "metadata")
    details = get_section(metadata, "training_architecture_details")
    architecture = _architecture(file.path, config, metadata)
    rescale = architecture in RESCALED and bool(config.get("rescale_acts_by_decoder_norm"))
    parts = file.parts(NAMES, KINDS[architecture], decoder or rescale)
    _check_sizes(file.path, config, parts)
    parts.center = bool(config.get("apply_b_dec_to_input", True))
    kwargs = get_section(config, "activation_fn_kwargs")
    k = next((value for value in (config.get("k"), kwargs.get("k"), details.get("k")) if value is not None), None)
    # k of BatchTopK is an average and may have a fraction
    parts.k = round(k) if architecture != "topk" and isinstance(k, float) and isfinite(k) else as_integer(k)
    parts.threshold = _threshold(file, architecture, len(parts.W_enc))
    _restore_training(parts, architecture, metadata)
    parts.groups = _groups(config.get("matryoshka_widths") or details.get("matryoshka_widths"), len(parts.W_enc))
    _fold_finetuning(file, config, parts)
    _fold_input(file, config, parts, rescale)
    parts.W_dec = parts.W_dec if decoder else None
    parts.card = make_card(_facts(config, metadata), get_section(metadata, "torino"))
    return parts


def _architecture(path: Path, config: dict[str, Any], metadata: dict[str, Any]) -> str:
    """Return the architecture in the current spelling; raise :class:`BadFile` if it is not supported."""
    architecture = str(config.get("architecture") or "standard")
    activation = config.get("activation_fn", config.get("activation_fn_str")) or "relu"
    if activation == "topk":  # before version 6, top-k was a standard SAE with another activation
        architecture, activation = "topk", "relu"
    if architecture not in KINDS or activation != "relu":
        kind = architecture if architecture not in KINDS else f"{architecture} with {activation} activation"
        raise BadFile(f"{path} is a SAELens SAE of kind {kind!r}. Accepted: {', '.join(KINDS)}.")
    hook = str(config.get("hook_name") or config.get("hook_point") or metadata.get("hook_name") or "")
    reshape = config.get("reshape_activations") or ("hook_z" if "hook_z" in hook else "none")
    if reshape != "none":
        raise BadFile(
            f"{path} reads concatenated attention heads (reshape_activations={reshape!r}), not tokens. "
            "Accepted: SAEs trained on the output of a block."
        )
    return architecture


def _check_sizes(path: Path, config: dict[str, Any], parts: SAEParts) -> None:
    for name, size in (("d_sae", parts.W_enc.shape[0]), ("d_in", parts.W_enc.shape[1])):
        if config.get(name) is not None and config[name] != size:
            raise BadFile(
                f"cfg.json next to {path} has {name} = {config[name]!r}, but 'W_enc' has {size}. "
                "The two files do not belong together: download both again."
            )


def _threshold(file: CheckpointFile, architecture: str, latents: int) -> Tensor | float | None:
    if "topk_threshold" in file.keys:
        return file.number("topk_threshold")
    if "log_threshold" in file.keys:
        return file.tensor_of_shape("log_threshold", (latents,), "W_enc").exp()
    if architecture == "jumprelu":
        return file.tensor_of_shape("threshold", (latents,), "W_enc")
    return file.threshold(latents)


def _restore_training(parts: SAEParts, architecture: str, metadata: dict[str, Any]) -> None:
    """Restore the training kind of an inference save, whose architecture is always jumprelu."""
    trained = KINDS.get(str(metadata.get("training_architecture")))
    if architecture == "jumprelu" and trained in ("batchtopk", "matryoshka"):
        parts.kind = trained
        if isinstance(parts.threshold, Tensor) and bool((parts.threshold == parts.threshold[0]).all()):
            parts.threshold = parts.threshold[0]


def _groups(widths: object, latents: int) -> tuple[int, ...] | None:
    """Convert the cumulative widths of SAELens to group sizes."""
    ends = as_integers(widths)
    if not ends:
        return None
    ends = ends if ends[-1] == latents else (*ends, latents)  # the library adds the last level itself
    return tuple(end - start for start, end in pairwise((0, *ends)))


def _fold_finetuning(file: CheckpointFile, config: dict[str, Any], parts: SAEParts) -> None:
    """Fold the factor per latent that older versions apply when decoding after finetuning."""
    for name in ("scaling_factor", "finetuning_scaling_factor"):
        if name not in file.keys or parts.W_dec is None:
            continue
        factor = file.tensor_of_shape(name, (len(parts.W_enc),), "W_enc")
        if torch.allclose(factor, torch.ones_like(factor)):  # some versions always wrote it
            continue
        if not config.get("finetuning_scaling_factor"):
            raise file.error(name, "is not 1, but cfg.json does not set finetuning_scaling_factor.")
        parts.W_dec = parts.W_dec * factor[:, None]


def _fold_input(file: CheckpointFile, config: dict[str, Any], parts: SAEParts, rescale: bool) -> None:
    """Fold activation scaling, decoder norms and whitening into the weights, or set ``normalize``."""
    mode = config.get("normalize_activations") or "none"
    mode = "expected_average_only_in" if mode is True else str(mode)
    if mode in NORMALIZE:
        parts.normalize = NORMALIZE[mode]
    elif mode == "expected_average_only_in":
        _fold_scale(file, parts, rescale)
    elif mode != "covariance_whitening":
        raise BadFile(
            f"cfg.json next to {file.path} has normalize_activations = {mode!r}. Accepted: {', '.join(NORMALIZE)}."
        )
    if rescale:
        parts.fold_decoder_norms()
    if mode == "covariance_whitening":
        _fold_whitening(file, parts)


def _fold_scale(file: CheckpointFile, parts: SAEParts, rescale: bool) -> None:
    scale = (file.json(SCALER) or {}).get("scaling_factor")
    if not isinstance(scale, int | float) or not 0 < scale < torch.finfo(torch.float32).max:
        raise BadFile(
            f"{file.path} was trained on scaled activations (normalize_activations='expected_average_only_in'), but "
            f"{SCALER} with the scale is missing or empty. Download that file too, or fold the scale with SAELens "
            "(fold_activation_norm_scaling_factor) and save again."
        )
    parts.W_enc, parts.b_dec = parts.W_enc * scale, parts.b_dec / scale
    parts.W_dec = None if parts.W_dec is None else parts.W_dec / scale
    if rescale and parts.threshold is not None:
        parts.threshold = parts.threshold / scale  # it is in units of the decoder norm


def _fold_whitening(file: CheckpointFile, parts: SAEParts) -> None:
    if not file.has(WHITENING):
        raise BadFile(
            f"{file.path} was trained on whitened activations (normalize_activations='covariance_whitening'), but "
            f"{WHITENING} is missing. Download that file too, or fold it with SAELens (fold_activation_whitening) "
            "and save again."
        )
    tensors, _ = read_safetensors(file.path.parent / WHITENING)
    width = parts.W_enc.shape[1]
    shapes = {"mean": (width,), "matrix": (width, width), "inverse_matrix": (width, width)}
    for name, shape in shapes.items():
        if name not in tensors or tuple(tensors[name].shape) != shape:
            raise BadFile(f"{file.path.parent / WHITENING} has no {name!r} of shape {shape}. Download it again.")
    mean, matrix, inverse = (tensors[name].double() for name in shapes)
    W_enc = parts.W_enc.double() @ matrix.T
    if not parts.center:
        parts.b_enc = (parts.b_enc - W_enc @ mean).float()
    parts.W_enc = W_enc.float()
    parts.W_dec = None if parts.W_dec is None else (parts.W_dec.double() @ inverse).float()
    parts.b_dec = (parts.b_dec.double() @ inverse + mean).float()


def _facts(config: dict[str, Any], metadata: dict[str, Any]) -> dict[str, Any]:
    known = config | metadata
    site = str(known.get("hook_name") or known.get("hook_point") or "")
    block = parse_block(site, as_integer(known.get("hook_layer", known.get("hook_point_layer"))))
    notes = f"Hook {site}." if site and block is None else ""
    return {"encoder": known.get("model_name"), "block": block, "data": known.get("dataset_path"), "notes": notes}


# ------------------------------------------------------------------ writing


def write(sae: SAE, folder: Path) -> Path:
    """Write an inference save: BatchTopK and Matryoshka become JumpReLU, as in SAELens."""
    parts = SAEParts.of(sae)
    assert parts.W_dec is not None
    tensors = {"W_enc": parts.W_enc.T, "b_enc": parts.b_enc, "W_dec": parts.W_dec, "b_dec": parts.b_dec}
    architecture = {"relu": "standard", "topk": "topk"}.get(sae.kind, "jumprelu")
    if architecture == "jumprelu":
        # -1 marks "never estimated", and every positive activation exceeds it
        threshold = torch.as_tensor(-1.0 if parts.threshold is None else parts.threshold)
        tensors["threshold"] = threshold.expand(sae.latents)
    config: dict[str, Any] = {
        "architecture": architecture,
        "d_in": sae.width,
        "d_sae": sae.latents,
        "dtype": "float32",
        "device": "cpu",
        "apply_b_dec_to_input": sae.center,
        "normalize_activations": next(name for name, value in NORMALIZE.items() if value == sae.normalize),
        "reshape_activations": "none",
        "metadata": _metadata(sae),
    }
    if architecture == "topk":
        config |= {"k": sae.k, "rescale_acts_by_decoder_norm": False}
    write_arrays(folder / "sae_weights.safetensors", tensors)
    write_json(folder / "cfg.json", config)
    return folder


def _metadata(sae: SAE) -> dict[str, Any]:
    details: dict[str, Any] = {"k": sae.k} if sae.k and sae.kind != "topk" else {}
    if len(sae.groups) > 1:
        details["matryoshka_widths"] = list(accumulate(sae.groups))
    block = sae.card.block
    return {
        "sae_lens_version": VERSION,
        "model_name": sae.card.encoder or None,
        "hook_name": None if block is None else f"blocks.{block}.hook_resid_post",
        "training_architecture": next(name for name, kind in KINDS.items() if kind == sae.kind),
        "training_architecture_details": details,
        "torino": asdict(sae.card),
    }
