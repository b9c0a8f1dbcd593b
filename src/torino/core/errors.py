"""The sentences torino says when something is wrong.

Every error states what is wrong, what was given, what is accepted and, where there is one, what to do
next. All are a ``TorinoError``, which is a ``ValueError``: code that caught that keeps working.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class TorinoError(ValueError):
    """Any input torino cannot work with; the message is written for the person who gave it."""


class BadParameter(TorinoError):
    """A hyperparameter is out of range or contradicts another one."""


class UnmetBudget(BadParameter):
    """A fixed budget asks for more tokens than the method can supply for an image."""


class BadTokens(TorinoError):
    """Visual tokens of the wrong shape, type or content."""


class MissingSignal(TorinoError):
    """A reducer needs a signal, such as CLS attention, that the tokens do not carry."""


class SAEMismatch(TorinoError):
    """The SAE was trained for other tokens than the ones it is asked to read."""


class BadFile(TorinoError):
    """A file is missing, truncated, of an unknown layout, or would run code when opened."""


class Unreachable(TorinoError):
    """The model hub could not be reached, or does not have what was asked for."""


class UnknownName(TorinoError):
    """No registered thing has this name."""


def unknown_name(kind: str, name: str, known: Iterable[str]) -> UnknownName:
    """Build the error for a name that is not registered, with the nearest names in it.

    Examples
    --------
    >>> print(unknown_name("reducer", "torino", ["torino-m", "torino-p", "random"]))
    No reducer is called 'torino'. Close: 'torino-p', 'torino-m'. All: torino list.
    """
    names = list(known)
    close = get_close_matches(name, names, n=3, cutoff=0.6)
    near = f" Close: {', '.join(map(repr, close))}." if close else f" Known: {', '.join(names) or 'none'}."
    return UnknownName(f"No {kind} is called {name!r}.{near} All: torino list.")
