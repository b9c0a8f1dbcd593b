"""Checks of arguments. A wrong type raises a TorinoError of one sentence, not an AttributeError or TypeError."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np
import torch
from torch import Tensor

from torino.core.errors import BadFile, BadIndex, BadParameter, BadTokens, TorinoError


def describe_value(value: object) -> str:
    """Return a value as text for an error: short values as they are, others by type and shape.

    Examples
    --------
    >>> describe_value("a"), describe_value([1, 2]), describe_value(torch.zeros(2, 3))
    ("'a'", 'a list', 'a Tensor of shape (2, 3)')
    """
    if isinstance(value, Tensor | np.ndarray):
        return f"{_with_article(type(value).__name__)} of shape {tuple(value.shape)}"
    if value is None or isinstance(value, bool | int | float | str | bytes | np.generic):
        text = repr(value)
        return text if len(text) <= 60 else f"{text[:57]}…"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return _with_article(type(value).__name__)


def _with_article(noun: str) -> str:
    return f"{'an' if noun[:1].lower() in 'aeiou' else 'a'} {noun}"


# ---------------------------------------------------------------------- numbers and choices


def is_integer(value: object) -> bool:
    """Return whether a value is an integer of Python or numpy; bools are not integers here."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def to_integer(
    name: str,
    value: object,
    low: int | None = None,
    high: int | None = None,
    note: str = "",
    error: type[TorinoError] = BadParameter,
) -> int:
    """Return an integer of Python or numpy as int; raise an error unless it is between ``low`` and ``high``.

    Examples
    --------
    >>> to_integer("k", np.int64(3), 1, 5)
    3
    """
    if is_integer(value):
        number = int(cast(int, value))
        if (low is None or number >= low) and (high is None or number <= high):
            return number
    if low is not None and high is not None:
        limits = f" between {low} and {high}"
    else:
        limits = f" of at least {low}" if low is not None else ""
    kind = "" if is_integer(value) and " between" in limits else " a whole number"
    raise error(f"{name} must be{kind}{limits}{note}{';' if note else ','} got {describe_value(value)}.")


def to_number(name: str, value: object, low: float = -sys.float_info.max, high: float = sys.float_info.max) -> float:
    """Return a number of Python or numpy as float; raise BadParameter unless it is finite and within the limits."""
    is_number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    if is_number and low <= cast(float, value) <= high:
        return float(cast(float, value))
    limits = f" of at least {low:g}" if low > -sys.float_info.max else ""
    limits += f"{' and' if limits else ' of'} at most {high:g}" if high < sys.float_info.max else ""
    raise BadParameter(f"{name} must be a finite number{limits}, got {describe_value(value)}.")


def to_index(kind: str, index: object, size: int) -> int:
    """Return the index of an entry as a non-negative int; raise BadIndex if there is none."""
    if not is_integer(index):
        raise BadIndex(f"The index of the {kind} must be a whole number, got {describe_value(index)}.")
    number = int(cast(int, index))
    if not -size <= number < size:
        raise BadIndex(f"There is no {kind} {number}: there are {size}, counted from 0.")
    return number % size


def check_choice(name: str, value: object, choices: Any, accepted: str = "") -> Any:
    """Return the value; raise BadParameter unless it is one of a ``Literal``, which ``accepted`` can put in words."""
    if not isinstance(value, str | int | None) or value not in get_args(choices):  # a tensor cannot be compared
        expected = accepted or f"one of {', '.join(map(repr, get_args(choices)))}"
        raise BadParameter(f"{name} must be {expected}, got {describe_value(value)}.")
    return value


def check_type(name: str, value: object, kind: type | tuple[type, ...], expected: str) -> None:
    """Raise BadParameter unless the value is an instance of ``kind``; ``expected`` describes it in the message."""
    if not isinstance(value, kind):
        raise BadParameter(f"{name} must be {expected}, got {describe_value(value)}.")


def check_fields(owner: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise BadParameter for a keyword argument that is no field."""
    names = list(known)
    for name in given:
        if name not in names:
            raise BadParameter(f"{owner} has no field {name!r}. It has {', '.join(names)}.")


def to_grid(grid: object, error: type[TorinoError] = BadTokens, name: str = "grid") -> tuple[int, int]:
    """Return rows and columns as a pair of int; raise an error for anything else."""
    sizes = list(cast(Sequence[object], grid)) if isinstance(grid, tuple | list) else []
    if len(sizes) != 2 or not all(is_integer(size) for size in sizes):
        raise error(f"{name} must be a pair of integers (rows, columns), got {grid!r:.80}.")
    rows, columns = cast(list[int], sizes)
    return int(rows), int(columns)


# ---------------------------------------------------------------------- tensors, sequences and paths


def check_tensor(name: str, value: object, error: type[TorinoError] = BadTokens) -> Tensor:
    """Return a dense tensor that has values; raise an error for anything else."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        raise error(f"{name} must be a torch Tensor, got ndarray. Use torch.as_tensor(...).")
    if not isinstance(value, Tensor):
        raise error(f"{name} must be a torch Tensor, got {type(value).__name__}.")
    if value.is_meta:
        raise error(f"{name} is on the meta device and has no values. Load its values, or give another tensor.")
    if value.layout != torch.strided:
        raise error(f"{name} must be a dense tensor, got {value.layout}. Convert it with .to_dense().")
    return value


def check_real(name: str, value: Tensor, floats: Sequence[torch.dtype], error: type[TorinoError] = BadTokens) -> None:
    """Raise an error unless a tensor has one of the floating-point types."""
    if value.is_complex():
        raise error(f"{name} must be real floating point, got {value.dtype}. Give its real part or its magnitude.")
    if value.dtype not in floats:
        raise error(f"{name} must be floating point, got {value.dtype}. Convert it with .float().")


def to_list(
    name: str,
    value: object,
    kind: type | tuple[type, ...],
    expected: str,
    error: type[TorinoError] = BadTokens,
) -> list[Any]:
    """Return a sequence of instances of ``kind`` as a list; raise an error for anything else."""
    if isinstance(value, kind) and kind != (list, tuple):
        raise error(f"{name} takes a list of {expected}, got one {type(value).__name__}. Put it in a list: [...].")
    if isinstance(value, str | bytes | Mapping | Tensor | np.ndarray | type) or not isinstance(value, Iterable):
        raise error(f"{name} takes a list of {expected}, got {describe_value(value)}.")
    items = list(cast(Iterable[Any], value))
    for number, item in enumerate(items):
        if not isinstance(item, kind):
            raise error(f"{name} takes a list of {expected}, but entry {number} is {describe_value(item)}.")
    return items


def to_path(path: object, name: str = "The path") -> Path:
    """Return a path; raise BadFile for anything but text and path objects."""
    if not isinstance(path, str | os.PathLike):
        raise BadFile(f"{name} must be text or a Path, got {describe_value(path)}.")
    text = os.fspath(cast("str | os.PathLike[str]", path))
    if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]: a path object may hold bytes
        raise BadFile(f"{name} must be text or a Path, got {describe_value(text)}.")
    if "\0" in text:
        raise BadFile(f"{name} contains a NUL character: {describe_value(text)}.")
    if not text:
        raise BadFile(f"{name} is empty. Give the path of a file or folder.")
    if len(text) > 4095 or any(len(part) > 255 for part in Path(text).parts):  # Path raises an OSError when it looks
        raise BadFile(f"{name} is too long for a file system: {describe_value(text)}.")
    return Path(text)


def expand_path(path: object, name: str = "The path") -> Path:
    """Return a path in which ``~`` is the home folder; raise BadFile for anything but text and path objects."""
    given = to_path(path, name)
    try:
        return given.expanduser()
    except RuntimeError as error:
        raise BadFile(
            f"{name} begins with {given.parts[0]}, and there is no such home folder. Write it out."
        ) from error


def check_patches(indices: Sequence[int], patches: int) -> None:
    """Raise BadParameter unless all indices are patches of a grid, or ``patches``, the CLS token."""
    invalid = [patch for patch in indices if not 0 <= patch <= patches]
    if invalid:
        raise BadParameter(
            f"There is no patch {invalid[0]}: the grid has patches 0 to {patches - 1}, and {patches} is the CLS token."
        )
