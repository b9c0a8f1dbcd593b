"""Load extensions that other packages provide through entry points."""

from __future__ import annotations

from importlib.metadata import entry_points

from torino.core.errors import TorinoError

_loaded: set[str] = set()


def load_plugins(group: str) -> None:
    """Import the entry points of a group once; importing them registers what they provide.

    Raises
    ------
    TorinoError
        If one of them fails; the message names its package.
    """
    if group in _loaded:
        return
    _loaded.add(group)
    for entry in entry_points(group=group):
        try:
            entry.load()
        except Exception as error:
            package = entry.dist.name if entry.dist else entry.value
            raise TorinoError(
                f"The entry point {entry.name!r} ({group}) of the package {package} failed: {error}"
            ) from error
