"""The dictionary_learning layout: ``ae.pt`` and ``config.json``."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torino.core.errors import BadFile, BadParameter
from torino.core.io import read_json, write_atomic, write_json
from torino.sae.formats._common import (
    ACCEPTED,
    CheckpointFile,
    SAEParts,
    TensorNames,
    as_integer,
    check_integers,
    check_k,
    get_section,
    make_card,
    parse_block,
)
from torino.sae.model import SAE, Kind

LINEAR = TensorNames("encoder.weight", "encoder.bias", "decoder.weight", transposed_dec=True)
PARAMETER = TensorNames(transposed_enc=True)
SAELENS_ONLY = frozenset({"topk_threshold", "log_threshold", "scaling_factor"})

# Pach et al. store encoder and layer not in config.json but in the name of the run folder.
_RUN = re.compile(r"(?P<data>[a-z0-9_]+)_activations_(?P<encoder>[^_/]+)_(?P<block>\d+)_post_mlp_residual", re.I)
_RANDOM = re.compile(r"random_k_(\d+)")


def matches(file: CheckpointFile) -> bool:
    """Return whether a file with ``W_enc`` is from dictionary_learning, not from SAELens, which has similar keys."""
    if file.keys & SAELENS_ONLY:
        return False
    if file.keys & {"k", "group_sizes"}:
        return True
    if file.is_checkpoint:  # SAELens writes safetensors only
        return True
    return not file.has("cfg.json") and bool(_trainer(_config(file)))


def read(file: CheckpointFile, decoder: bool) -> SAEParts:
    """Read any class of the library except the gated one."""
    config = _config(file)
    trainer = _trainer(config)
    parts = (_read_parameters if "W_enc" in file.keys else _read_linear)(file, trainer, decoder)
    latents, k = len(parts.W_enc), file.number("k")
    where = f"config.json of {file.path}"
    parts.k = check_k(trainer.get("k"), latents, where) if k is None else check_k(k, latents, file.path)
    if parts.kind == "matryoshka":
        parts.groups = file.integers("group_sizes")
        if parts.groups is None and trainer.get("group_sizes") is not None:
            parts.groups = check_integers(trainer["group_sizes"], "group_sizes", where)
    parts.card = make_card(_path_facts(file.path), _facts(trainer), get_section(config, "torino"))
    return parts


def _read_linear(file: CheckpointFile, trainer: dict[str, Any], decoder: bool) -> SAEParts:
    """Read the classes that use nn.Linear; they differ in the name of the decoder bias."""
    if "b_dec" in file.keys:  # BatchTopKSAE and AutoEncoderTopK have the same keys
        parts = file.parts(LINEAR, "topk" if _trainer_kind(trainer) == "topk" else "batchtopk", decoder)
        parts.threshold = file.threshold(parts.W_enc.shape[0])
        return parts
    if "bias" in file.keys:  # AutoEncoder; the library also folds its norms when loading
        parts = file.parts(LINEAR._replace(b_dec="bias"), "relu", decoder=True)
        if not _is_unit(parts.decoder_norms()):
            parts.fold_decoder_norms()
        parts.W_dec = parts.W_dec if decoder else None
        return parts
    parts = file.parts(LINEAR._replace(b_dec="decoder.bias"), "relu", decoder)  # AutoEncoderNew
    parts.center = False
    return parts


def _read_parameters(file: CheckpointFile, trainer: dict[str, Any], decoder: bool) -> SAEParts:
    """Read the classes that use plain parameters: Matryoshka and JumpReLU."""
    trainer_kind = _trainer_kind(trainer)
    parts = file.parts(PARAMETER, "batchtopk", decoder)
    parts.threshold = threshold = file.threshold(parts.W_enc.shape[0])
    if "group_sizes" in file.keys or trainer_kind == "matryoshka":
        parts.kind = "matryoshka"
    elif trainer_kind == "topk":
        parts.kind = "topk"
    elif "k" not in file.keys and trainer_kind != "batchtopk":
        if threshold is None:
            raise BadFile(
                f"{file.path} has neither 'threshold', 'k' nor 'group_sizes', so its kind is unknown. "
                f"Accepted: {ACCEPTED}. Download the config.json or cfg.json of this SAE."
            )
        parts.kind, parts.center = "jumprelu", False  # this class does not subtract b_dec
    return parts


def _config(file: CheckpointFile) -> dict[str, Any]:
    folder = file.path.parent
    folders = [folder, folder.parent] if folder.name == "checkpoints" else [folder]
    paths = [path for path in (candidate / "config.json" for candidate in folders) if path.is_file()]
    return read_json(paths[0]) if paths else {}


def _trainer(config: dict[str, Any]) -> dict[str, Any]:
    return get_section(config, "trainer")


def _trainer_kind(trainer: dict[str, Any]) -> Kind | None:
    """Return the kind given by a class name, in either spelling of Matryoshka."""
    name = str(trainer.get("dict_class") or trainer.get("trainer_class") or "").lower().replace("_", "")
    if "matryoshka" in name or "matroyshka" in name:
        return "matryoshka"
    kinds: tuple[Kind, ...] = ("batchtopk", "topk", "jumprelu")
    return next((kind for kind in kinds if kind in name), None)


def _facts(trainer: dict[str, Any]) -> dict[str, Any]:
    site, layer = str(trainer.get("submodule_name") or ""), as_integer(trainer.get("layer"))
    block = parse_block(site, layer)
    notes = f"Site {site}, layer {layer}." if site and block is None else ""
    return {"encoder": trainer.get("lm_name"), "block": block, "notes": notes}


def _path_facts(path: Path) -> dict[str, Any]:
    folders = "/".join(path.parts[-6:-1])
    run, random = _RUN.search(folders), _RANDOM.search(folders)
    facts: dict[str, Any] = {} if run is None else {**run.groupdict(), "block": int(run["block"])}
    return facts | ({"token_kind": f"{random[1]} random tokens per image"} if run and random else {})


def _is_unit(norms: Tensor) -> bool:
    return torch.allclose(norms, torch.ones_like(norms))


# ------------------------------------------------------------------ writing


def write(sae: SAE, folder: Path) -> Path:
    """Write ``ae.pt``, then ``config.json`` with the trainer section that the library reads."""
    if sae.normalize != "none":
        raise BadParameter(
            f"The dictionary_learning layout does not support normalize={sae.normalize!r}. Export the SAE as 'saelens'."
        )
    if len(sae.groups) > 1 and sae.kind != "matryoshka":
        raise BadParameter(
            f"The dictionary_learning layout supports groups only for Matryoshka SAEs, but this {sae.kind} SAE has "
            f"groups {sae.groups}. Export it as 'saelens'."
        )
    dict_class, trainer_class, state = _state(SAEParts.of(sae))
    plain = {name: value.detach().contiguous().clone() for name, value in state.items()}
    write_atomic(folder / "ae.pt", lambda target: _save(plain, target))
    trainer: dict[str, Any] = {
        "dict_class": dict_class,
        "trainer_class": trainer_class,
        "activation_dim": sae.width,
        "dict_size": sae.latents,
        "k": sae.k,
        "layer": sae.card.block,
        "lm_name": sae.card.encoder,
        "wandb_name": sae.card.name or dict_class,
        "submodule_name": None,
    }
    if sae.kind == "matryoshka":
        trainer |= {"group_sizes": list(sae.groups), "group_fractions": [size / sae.latents for size in sae.groups]}
    write_json(folder / "config.json", {"trainer": trainer, "buffer": {}, "torino": asdict(sae.card)})
    return folder


def _save(state: dict[str, Tensor], target: Path) -> None:
    try:
        torch.save(state, target)
    except RuntimeError as error:  # torch raises it if the disk is full
        raise OSError(f"{type(error).__name__} in torch.save, is the disk full?") from error


def _state(parts: SAEParts) -> tuple[str, str, dict[str, Tensor]]:
    """Return dictionary class, trainer class and tensors of the class that computes the same latents."""
    assert parts.W_dec is not None
    if parts.kind == "relu":
        # the library normalizes the decoder of an AutoEncoder, but not of an AutoEncoderNew
        if parts.center and _is_unit(parts.decoder_norms()):
            return "AutoEncoder", "StandardTrainer", _linear(parts) | {"bias": parts.b_dec}
        state = _linear(parts.set_center(False)) | {"decoder.bias": parts.b_dec}
        return "AutoEncoderNew", "StandardTrainer", state
    if parts.kind == "jumprelu":
        state = _parameters(parts.set_center(False))
        threshold = torch.as_tensor(0.0 if parts.threshold is None else parts.threshold)
        state["threshold"] = threshold.expand(len(parts.W_enc))
        return "JumpReluAutoEncoder", "JumpReluTrainer", state
    state = (_parameters if parts.kind == "matryoshka" else _linear)(parts.set_center(True))
    state |= {"b_dec": parts.b_dec, "k": _k(parts), "threshold": _single_threshold(parts)}
    if parts.kind == "matryoshka":
        state["group_sizes"] = torch.tensor(parts.groups)
        return "MatryoshkaBatchTopKSAE", "MatryoshkaBatchTopKTrainer", state
    if parts.kind == "topk":
        return "AutoEncoderTopK", "TopKTrainer", state
    return "BatchTopKSAE", "BatchTopKTrainer", state


def _linear(parts: SAEParts) -> dict[str, Tensor]:
    assert parts.W_dec is not None
    return {"encoder.weight": parts.W_enc, "encoder.bias": parts.b_enc, "decoder.weight": parts.W_dec.T}


def _parameters(parts: SAEParts) -> dict[str, Tensor]:
    assert parts.W_dec is not None
    return {"W_enc": parts.W_enc.T, "b_enc": parts.b_enc, "W_dec": parts.W_dec, "b_dec": parts.b_dec}


def _k(parts: SAEParts) -> Tensor:
    if parts.k is None:
        raise BadParameter(
            f"dictionary_learning cannot load a {parts.kind} SAE without k, but this SAE has no k. "
            "Set sae.k to the number of active latents per token in training."
        )
    return torch.tensor(parts.k, dtype=torch.int)


def _single_threshold(parts: SAEParts) -> Tensor:
    value = torch.as_tensor(-1.0 if parts.threshold is None else parts.threshold)
    if value.ndim and not bool((value == value[0]).all()):
        raise BadParameter(
            f"dictionary_learning supports one threshold for a {parts.kind} SAE, but this SAE has one per latent. "
            "Export it as 'saelens'."
        )
    return value.reshape(-1)[0]
