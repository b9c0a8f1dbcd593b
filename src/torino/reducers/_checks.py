"""Validation of hyperparameters and signals, shared by the reducers."""

from __future__ import annotations

import torch
from torch import Tensor

from torino.core.checks import check_choice as check_choice
from torino.core.checks import describe_value, to_integer, to_number
from torino.core.concepts import ConceptEncoder
from torino.core.errors import BadParameter, BadTokens, UnmetBudget
from torino.core.tokens import VisualTokens


def check_count(name: str, value: object, minimum: int = 1) -> None:
    """Raise BadParameter unless the value is a whole number of at least ``minimum``."""
    to_integer(name, value, minimum)


def check_number(name: str, value: object, minimum: float = 0.0) -> None:
    """Raise BadParameter unless the value is a finite number of at least ``minimum``."""
    to_number(name, value, minimum)


def check_integer(name: str, value: object) -> None:
    """Raise BadParameter unless the value is an integer."""
    to_integer(name, value)


def check_flag(name: str, value: object) -> None:
    """Raise BadParameter unless the value is True or False."""
    if not isinstance(value, bool):
        raise BadParameter(f"{name} must be True or False, got {describe_value(value)}.")


def check_encoder(value: object) -> None:
    """Raise BadParameter unless the value is a concept encoder (an instance, not a class)."""
    if isinstance(value, type) or not isinstance(value, ConceptEncoder):
        raise BadParameter(f"sae must be an SAE or RawEmbedding(), got {describe_value(value)}.")


def check_finite(values: Tensor, label: str) -> None:
    """Raise BadTokens if values of a tower hold NaN or infinity, for example after an overflow."""
    if not bool(torch.isfinite(values).all()):
        raise BadTokens(f"{label} hold NaN or infinite values. Run the tower in float32 or bfloat16.")


def budget_error(reducer: str, budget: int, available: int, unit: str = "patches") -> UnmetBudget:
    """Return the error for a budget that exceeds the number of tokens an image can give."""
    return UnmetBudget(
        f"{reducer} cannot give {budget} tokens: the image has only {available} {unit}. Lower the budget."
    )


def read_signal(
    tokens: VisualTokens, name: str, reducer: str, shape: tuple[int | None, ...], *, check: bool = True
) -> Tensor:
    """Return a signal and check its shape, in which None stands for any size.

    With ``check=False`` the values are not tested for NaN; the caller tests what it computes from them.
    """
    value = tokens.signal(name, reducer).detach()
    fits = value.ndim == len(shape) and all(want in (None, got) for want, got in zip(shape, value.shape, strict=True))
    if not fits:
        expected = " x ".join("any" if size is None else str(size) for size in shape)
        raise BadTokens(f"{reducer} needs {name} of shape ({expected}), got {tuple(value.shape)}.")
    if check and not bool(torch.isfinite(value).all()):
        raise BadTokens(f"{name} holds NaN or infinite values. Run the encoder in float32 or bfloat16.")
    return value


def space_signals(space: str) -> dict[str, frozenset[str]]:
    """Return the signals that a method needs, and those it reads if there are any, to compare patches in a space."""
    projected, none = frozenset({"projected"}), frozenset[str]()
    return {"needs": projected if space == "projected" else none, "optional": projected if space == "auto" else none}


def space_features(tokens: VisualTokens, space: str, reducer: str) -> Tensor:
    """Return the vectors by which patches are compared in a space: "features", "projected", or "auto"."""
    if space == "projected" or (space == "auto" and "projected" in tokens.signals):
        return read_signal(tokens, "projected", reducer, (len(tokens), None))
    return tokens.patches.detach()
