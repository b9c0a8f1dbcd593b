"""What reducers check before they plan, and the sentences they say when it does not hold."""

from __future__ import annotations

import sys
from typing import Any, get_args

import torch
from torch import Tensor

from torino.core.concepts import ConceptEncoder
from torino.core.errors import BadParameter, BadTokens, UnmetBudget
from torino.core.tokens import VisualTokens


def check_count(name: str, value: object, least: int = 1) -> None:
    """Refuse anything but a whole number of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise BadParameter(f"{name} must be a whole number of at least {least}, got {value!r}.")


def check_number(name: str, value: object, least: float = 0.0) -> None:
    """Refuse anything but a finite number of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= sys.float_info.max:
        raise BadParameter(f"{name} must be a finite number of at least {least:g}, got {value!r}.")


def check_choice(name: str, value: object, choices: Any) -> None:
    """Refuse anything but one of the values of a ``Literal``."""
    if value not in get_args(choices):
        raise BadParameter(f"{name} must be one of {', '.join(map(repr, get_args(choices)))}, got {value!r}.")


def check_flag(name: str, value: object) -> None:
    """Refuse anything but True and False."""
    if not isinstance(value, bool):
        raise BadParameter(f"{name} must be True or False, got {value!r}.")


def check_encoder(value: object) -> None:
    """Refuse anything that does not turn tokens into concepts, the class of an encoder included."""
    if isinstance(value, type) or not isinstance(value, ConceptEncoder):
        raise BadParameter(f"sae must be an SAE or RawEmbedding(), got {value!r:.60}.")


def unmet(reducer: str, budget: int, most: int, why: str) -> UnmetBudget:
    """Build the error for a budget that an image is too small for."""
    return UnmetBudget(f"{reducer} cannot give {budget} tokens for this image: {why} make {most} at most. Lower it.")


def read_signal(
    tokens: VisualTokens, name: str, wanted_by: str, shape: tuple[int | None, ...], *, check: bool = True
) -> Tensor:
    """Return a signal of the wanted shape, where None stands for any size, or say what is wrong with it.

    ``check=False`` leaves it to the caller to look for NaN in what comes of a large one.
    """
    value = tokens.signal(name, wanted_by).detach()
    fits = value.ndim == len(shape) and all(want in (None, got) for want, got in zip(shape, value.shape, strict=True))
    if not fits:
        wanted = " x ".join("any" if size is None else str(size) for size in shape)
        raise BadTokens(f"{wanted_by} reads {name} of shape ({wanted}), got {tuple(value.shape)}.")
    if check and not bool(torch.isfinite(value).all()):
        raise BadTokens(f"{name} holds NaN or infinite values. Run the encoder in float32 or bfloat16.")
    return value
