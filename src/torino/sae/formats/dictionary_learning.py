"""The layout of dictionary_learning: ``ae.pt`` and ``config.json``."""

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
    CHECKPOINTS,
    Names,
    Parts,
    Stored,
    block_of,
    card_of,
    integers,
    section,
    whole,
)
from torino.sae.model import SAE, Kind

LINEAR = Names("encoder.weight", "encoder.bias", "decoder.weight", flip_dec=True)
PARAMETER = Names(flip_enc=True)
SAELENS_ONLY = frozenset({"topk_threshold", "log_threshold", "scaling_factor"})

# Pach et al. leave encoder and layer out of config.json and put them into the name of the run folder.
_RUN = re.compile(r"(?P<data>[a-z0-9_]+)_activations_(?P<encoder>[^_/]+)_(?P<block>\d+)_post_mlp_residual", re.I)
_RANDOM = re.compile(r"random_k_(\d+)")


def claims(stored: Stored) -> bool:
    """Tell a file with ``W_enc`` of dictionary_learning from one of SAELens, which shares most of its keys."""
    if stored.keys & SAELENS_ONLY:
        return False
    if stored.keys & {"k", "group_sizes"}:
        return True
    if stored.path.suffix in CHECKPOINTS:  # SAELens writes safetensors only
        return True
    return not stored.has("cfg.json") and bool(_trainer(_config(stored)))


def read(stored: Stored, decoder: bool) -> Parts:
    """Read any of the library's classes but the gated one."""
    config = _config(stored)
    trainer = _trainer(config)
    parts = (_read_parameters if "W_enc" in stored.keys else _read_linear)(stored, trainer, decoder)
    k = stored.number("k")
    parts.k = whole(trainer.get("k")) if k is None else int(k)
    if parts.kind == "matryoshka":
        parts.groups = stored.integers("group_sizes") or integers(trainer.get("group_sizes"))
    parts.card = card_of(_path_facts(stored.path), _facts(trainer), section(config, "torino"))
    return parts


def _read_linear(stored: Stored, trainer: dict[str, Any], decoder: bool) -> Parts:
    """Read the classes built of nn.Linear; the name of the decoder's bias tells them apart."""
    if "b_dec" in stored.keys:  # BatchTopKSAE and AutoEncoderTopK have the same keys
        told = _told_kind(trainer)
        parts = stored.parts(LINEAR, "topk" if told == "topk" else "batchtopk", decoder)
        parts.threshold = stored.threshold(parts.W_enc.shape[0])
        return parts
    if "bias" in stored.keys:  # AutoEncoder; its norms are folded on loading, as the library does
        parts = stored.parts(LINEAR._replace(b_dec="bias"), "relu", decoder=True)
        if not _is_unit(parts.decoder_norms()):
            parts.fold_decoder_norms()
        parts.W_dec = parts.W_dec if decoder else None
        return parts
    parts = stored.parts(LINEAR._replace(b_dec="decoder.bias"), "relu", decoder)  # AutoEncoderNew
    parts.center = False
    return parts


def _read_parameters(stored: Stored, trainer: dict[str, Any], decoder: bool) -> Parts:
    """Read the classes built of plain parameters: the Matryoshka and the JumpReLU one."""
    told = _told_kind(trainer)
    parts = stored.parts(PARAMETER, "batchtopk", decoder)
    parts.threshold = threshold = stored.threshold(parts.W_enc.shape[0])
    if "group_sizes" in stored.keys or told == "matryoshka":
        parts.kind = "matryoshka"
    elif told == "topk":
        parts.kind = "topk"
    elif "k" not in stored.keys and told != "batchtopk":
        if threshold is None:
            raise BadFile(
                f"{stored.path} has neither 'threshold', 'k' nor 'group_sizes', so its kind is unknown. "
                f"Accepted: {ACCEPTED}. Fetch the config.json or cfg.json that belongs to it."
            )
        parts.kind, parts.center = "jumprelu", False  # this class does not subtract b_dec
    return parts


def _config(stored: Stored) -> dict[str, Any]:
    folder = stored.path.parent
    places = [folder, folder.parent] if folder.name == "checkpoints" else [folder]
    found = [place / "config.json" for place in places if (place / "config.json").is_file()]
    return read_json(found[0]) if found else {}


def _trainer(config: dict[str, Any]) -> dict[str, Any]:
    return section(config, "trainer")


def _told_kind(trainer: dict[str, Any]) -> Kind | None:
    """Read the kind from a class name, in either spelling of Matryoshka."""
    name = str(trainer.get("dict_class") or trainer.get("trainer_class") or "").lower().replace("_", "")
    if "matryoshka" in name or "matroyshka" in name:
        return "matryoshka"
    kinds: tuple[Kind, ...] = ("batchtopk", "topk", "jumprelu")
    return next((kind for kind in kinds if kind in name), None)


def _facts(trainer: dict[str, Any]) -> dict[str, Any]:
    site, layer = str(trainer.get("submodule_name") or ""), whole(trainer.get("layer"))
    block = block_of(site, layer)
    notes = f"Site {site}, layer {layer}." if site and block is None else ""
    return {"encoder": trainer.get("lm_name"), "block": block, "notes": notes}


def _path_facts(path: Path) -> dict[str, Any]:
    place = "/".join(path.parts[-6:-1])
    run, random = _RUN.search(place), _RANDOM.search(place)
    facts: dict[str, Any] = {} if run is None else {**run.groupdict(), "block": int(run["block"])}
    return facts | ({"token_kind": f"{random[1]} random tokens per image"} if run and random else {})


def _is_unit(norms: Tensor) -> bool:
    return torch.allclose(norms, torch.ones_like(norms))


# ------------------------------------------------------------------ writing


def write(sae: SAE, folder: Path) -> Path:
    """Write ``ae.pt``, then ``config.json`` with the trainer section that the library reads."""
    if sae.normalize != "none":
        raise BadParameter(
            f"The dictionary_learning layout has no normalisation, and this SAE has normalize={sae.normalize!r}. "
            "Export it as 'saelens'."
        )
    if len(sae.groups) > 1 and sae.kind != "matryoshka":
        raise BadParameter(
            f"The dictionary_learning layout has groups for Matryoshka SAEs only, and this {sae.kind} SAE has "
            f"{sae.groups}. Export it as 'saelens'."
        )
    dict_class, trainer_class, state = _state(Parts.of(sae))
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
    except RuntimeError as error:  # what torch makes of a full disk
        raise OSError(f"{type(error).__name__} in torch.save, is the disk full?") from error


def _state(parts: Parts) -> tuple[str, str, dict[str, Tensor]]:
    """Choose the class that computes the same latents, and name its tensors."""
    assert parts.W_dec is not None
    if parts.kind == "relu":
        # The library rescales an AutoEncoder whose decoder is not of unit norm; an AutoEncoderNew it leaves alone.
        if parts.center and _is_unit(parts.decoder_norms()):
            return "AutoEncoder", "StandardTrainer", _linear(parts) | {"bias": parts.b_dec}
        state = _linear(parts.recentre(False)) | {"decoder.bias": parts.b_dec}
        return "AutoEncoderNew", "StandardTrainer", state
    if parts.kind == "jumprelu":
        state = _parameters(parts.recentre(False))
        threshold = torch.as_tensor(0.0 if parts.threshold is None else parts.threshold)
        state["threshold"] = threshold.expand(len(parts.W_enc))
        return "JumpReluAutoEncoder", "JumpReluTrainer", state
    state = (_parameters if parts.kind == "matryoshka" else _linear)(parts.recentre(True))
    state |= {"b_dec": parts.b_dec, "k": _k(parts), "threshold": _one_threshold(parts)}
    if parts.kind == "matryoshka":
        state["group_sizes"] = torch.tensor(parts.groups)
        return "MatryoshkaBatchTopKSAE", "MatryoshkaBatchTopKTrainer", state
    if parts.kind == "topk":
        return "AutoEncoderTopK", "TopKTrainer", state
    return "BatchTopKSAE", "BatchTopKTrainer", state


def _linear(parts: Parts) -> dict[str, Tensor]:
    assert parts.W_dec is not None
    return {"encoder.weight": parts.W_enc, "encoder.bias": parts.b_enc, "decoder.weight": parts.W_dec.T}


def _parameters(parts: Parts) -> dict[str, Tensor]:
    assert parts.W_dec is not None
    return {"W_enc": parts.W_enc.T, "b_enc": parts.b_enc, "W_dec": parts.W_dec, "b_dec": parts.b_dec}


def _k(parts: Parts) -> Tensor:
    if parts.k is None:
        raise BadParameter(
            f"dictionary_learning cannot load a {parts.kind} SAE without k, and this one has none. "
            "Set sae.k to the number of latents that were active per token in training."
        )
    return torch.tensor(parts.k, dtype=torch.int)


def _one_threshold(parts: Parts) -> Tensor:
    value = torch.as_tensor(-1.0 if parts.threshold is None else parts.threshold)
    if value.ndim and not bool((value == value[0]).all()):
        raise BadParameter(
            f"dictionary_learning keeps one threshold for a {parts.kind} SAE, and this one has one per latent. "
            "Export it as 'saelens'."
        )
    return value.reshape(-1)[0]
