"""Parse JSON that may be damaged, and check it against type hints.

All files of torino that contain JSON are read with :func:`parse_json`, or with :func:`torino.core.io.read_json`, which
adds the name of the file. What a file must contain is declared as a ``TypedDict`` or dataclass next to its reader.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NotRequired, Union, cast, get_args, get_origin, get_type_hints, is_typeddict

from torino.core.safety import BYTES_VARIABLE, max_bytes

JSON_SHARE = 2  # parsed JSON takes up to 20 times the size of its text, so only a part of the limit is accepted
MAX_DEPTH = 64  # nested lists and objects; Python's own limit is about 1000, and comparing or printing fails earlier

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_KINDS: dict[Any, str] = {
    str: "a text",
    int: "a whole number",
    float: "a finite number",
    bool: "true or false",
    NoneType: "null",
}


@dataclass(frozen=True)
class Bounds:
    """The smallest and the largest number allowed, in ``Annotated[int, Bounds(1)]``."""

    minimum: float
    maximum: float = sys.float_info.max


Count = Annotated[int, Bounds(0)]
Positive = Annotated[int, Bounds(1)]
Measure = Annotated[float, Bounds(-1e12, 1e12)]
"""A measured value, such as a score; larger ones cannot be drawn."""


def max_json_bytes() -> int:
    """Return the largest size of JSON that is parsed."""
    return max_bytes() // JSON_SHARE


def parse_json(data: bytes | str, kind: Any = Any) -> Any:
    """Parse JSON and check that it has the type ``kind``; see :func:`check_schema`.

    Refused are data that is not UTF-8, larger than :func:`max_json_bytes` or nested deeper than ``MAX_DEPTH``, objects
    in which a name occurs twice, and texts that are not valid Unicode. NaN and Infinity are numbers, as in Python.

    Raises
    ------
    ValueError
        With the reason, which is at most one sentence without a full stop.

    Examples
    --------
    >>> parse_json(b'{"step": 3}', dict[str, int])
    {'step': 3}
    >>> parse_json('{"step": "three"}', dict[str, int])
    Traceback (most recent call last):
    ...
    ValueError: 'step' must be a whole number, got 'three'
    """
    limit = max_json_bytes()
    if len(data) > limit:
        raise ValueError(f"it has more than {limit:,} bytes, a limit that the variable {BYTES_VARIABLE} raises")
    try:
        text = data if isinstance(data, str) else data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not text in UTF-8: {error.reason} at byte {error.start}") from error
    try:
        value = json.loads(text, object_pairs_hook=_object)
    except RecursionError:
        raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep") from None
    except ValueError as error:
        raise ValueError(f"it is not valid JSON: {str(error).partition(';')[0]}") from error
    if text.count("[") + text.count("{") > MAX_DEPTH and _is_deep(value):
        raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep")
    if not text.isascii() or _SURROGATE.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError("it contains text that is not valid Unicode, a lone surrogate") from None
    check_schema(value, kind)
    return value


def check_schema(value: object, kind: Any, name: str = "") -> None:
    """Raise ``ValueError`` unless a JSON value has the type ``kind``.

    ``kind`` is built from ``str``, ``int`` (of 64 bits), ``float`` (a finite number), ``bool``, ``None``, ``Any``,
    ``list``, ``dict`` with ``str`` keys, ``Literal``, unions, ``Annotated`` with :class:`Bounds`, and ``TypedDict`` or
    dataclasses for objects. Fields with a default or ``NotRequired`` may be missing, and unknown fields are allowed.
    ``name`` is the name of the value in the message.
    """
    _checker(kind)(value, name)


def shorten(value: object, length: int = 60) -> str:
    """Return the ``repr`` of a value for a message, at most ``length`` characters long."""
    text = repr(value[: length + 1]) if isinstance(value, str | bytes) else repr(value)
    return text if len(text) <= length else f"{text[:length]}…"


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the name {shorten(repeated)} occurs twice in an object")
    return values


def _is_deep(value: object) -> bool:
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH + 1):
        children = [item for node in level for item in (node.values() if isinstance(node, dict) else node)]
        level = [item for item in children if isinstance(item, dict | list)]
        if not level:
            return False
    return True


# ------------------------------------------------------------------ types

_Check = Callable[[Any, str], None]


@cache
def _checker(kind: Any) -> _Check:
    """Build the function that checks values of a type."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return lambda value, name: None
    if kind is None or kind in _KINDS:
        return _scalar_checker(NoneType if kind is None else kind)
    if origin is Annotated:
        return _bounds_checker(arguments[0], arguments[1])
    if origin is Literal:
        return _literal_checker(arguments)
    if origin in (Union, UnionType):
        return _union_checker(arguments)
    if kind is list or origin is list:
        return _list_checker(arguments[0] if arguments else Any)
    if kind is dict or origin is dict:
        return _dict_checker(arguments[1] if arguments else Any)
    if is_typeddict(kind) or is_dataclass(kind):
        return _fields_checker(kind)
    raise TypeError(f"{kind} is not a type of JSON values.")


def _scalar_checker(kind: Any) -> _Check:
    def check(value: Any, name: str) -> None:
        if kind in (int, float):
            accepted = not isinstance(value, bool) and isinstance(value, int if kind is int else int | float)
            largest = 2**63 - 1 if kind is int else sys.float_info.max
            accepted = accepted and -largest <= value <= largest
        else:
            accepted = isinstance(value, kind)
        if not accepted:
            raise _wrong(name, _KINDS[kind], value)

    return check


def _bounds_checker(kind: Any, bounds: Bounds) -> _Check:
    base = _checker(kind)

    def check(value: Any, name: str) -> None:
        base(value, name)
        if value < bounds.minimum:
            raise _wrong(name, f"{_KINDS[kind]} of at least {bounds.minimum:g}", value)
        if value > bounds.maximum:
            raise _wrong(name, f"{_KINDS[kind]} of at most {bounds.maximum:g}", value)

    return check


def _literal_checker(choices: tuple[Any, ...]) -> _Check:
    def check(value: Any, name: str) -> None:
        if not isinstance(value, str | int) or value not in choices:
            raise _wrong(name, f"one of {', '.join(map(repr, choices))}", value)

    return check


def _union_checker(kinds: tuple[Any, ...]) -> _Check:
    checks = [_checker(kind) for kind in kinds if kind is not NoneType]
    optional = len(checks) < len(kinds)

    def check(value: Any, name: str) -> None:
        if value is None and optional:
            return
        errors: list[ValueError] = []
        for candidate in checks:
            try:
                candidate(value, name)
            except ValueError as error:
                errors.append(error)
            else:
                return
        raise errors[-1]

    return check


def _list_checker(kind: Any) -> _Check:
    item_check = None if kind is Any else _checker(kind)

    def check(value: Any, name: str) -> None:
        if not isinstance(value, list):
            raise _wrong(name, "a list", value)
        if item_check is not None:
            for position, item in enumerate(cast(list[Any], value)):
                item_check(item, f"{name}[{position}]")

    return check


def _dict_checker(kind: Any) -> _Check:
    item_check = None if kind is Any else _checker(kind)

    def check(value: Any, name: str) -> None:
        if not isinstance(value, dict):
            raise _wrong(name, "an object with named fields", value)
        if item_check is not None:
            for key, item in cast(dict[str, Any], value).items():
                item_check(item, f"{name}.{key}" if name else key)

    return check


def _fields_checker(kind: Any) -> _Check:
    hints = get_type_hints(kind, include_extras=True)
    if is_typeddict(kind):
        required = [name for name, hint in hints.items() if get_origin(hint) is not NotRequired]
    else:
        required = [item.name for item in fields(kind) if item.default is MISSING and item.default_factory is MISSING]
    checks = {
        name: _checker(get_args(hint)[0] if get_origin(hint) is NotRequired else hint) for name, hint in hints.items()
    }

    def check(value: Any, name: str) -> None:
        if not isinstance(value, dict):
            raise _wrong(name, "an object with named fields", value)
        prefix = f"{name}." if name else ""
        for key in required:
            if key not in value:
                raise ValueError(f"{prefix + key!r} is missing")
        for key, item_check in checks.items():
            if key in value:
                item_check(value[key], f"{prefix}{key}" if prefix else key)

    return check


def _wrong(name: str, expected: str, value: object) -> ValueError:
    return ValueError(f"{shorten(name, 100) if name else 'it'} must be {expected}, got {shorten(value)}")
