"""Default methods of commands, servers and integrations."""

from __future__ import annotations

DEFAULT_METHOD = "torino-x"
"""Used where no method is given."""
KD_METHOD = "torino-m"
"""Used where (k, δ) is given without a method."""


def resolve_method(method: str | None, kd: object = None) -> str:
    """Return the given method, or the default one.

    Examples
    --------
    >>> resolve_method(None), resolve_method(None, "2,2"), resolve_method("random")
    ('torino-x', 'torino-m', 'random')
    """
    if method is not None:
        return method
    return DEFAULT_METHOD if kd is None else KD_METHOD
