"""Error classes.

Every message states what is wrong, what was given, what is accepted and, if possible, what to do next. All errors
derive from ``TorinoError``, which is a ``ValueError``.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from torino.core.text import printable

MAX_MESSAGE = 1500  # characters; messages quote values of files, which may be long


class TorinoError(ValueError):
    """Base class: the input cannot be processed."""

    def __str__(self) -> str:
        """Return the message, without the middle of a very long one, and as text that can always be printed."""
        text = printable(super().__str__())
        return text if len(text) <= MAX_MESSAGE else f"{text[: MAX_MESSAGE - 500]} … {text[-450:]}"


class BadParameter(TorinoError):
    """A hyperparameter is out of range or contradicts another one."""


class UnmetBudget(BadParameter):
    """A fixed budget exceeds the number of tokens that the method can supply for an image."""


class BadTokens(TorinoError):
    """Visual tokens have the wrong shape, type or content."""


class MissingSignal(TorinoError):
    """A reducer needs a signal, such as CLS attention, that the tokens do not have."""


class SAEMismatch(TorinoError):
    """The SAE was trained on tokens of another encoder, block or width."""


class BadFile(TorinoError):
    """A file is missing, truncated, in an unknown format, or would run code when opened."""


class PickledObject(BadFile):
    """A checkpoint contains an object besides tensors, and could run code when it is opened."""

    name: str = ""  #: class of the object


class Unreachable(TorinoError):
    """The model hub cannot be reached, or it does not have the requested file."""


class MissingPackage(TorinoError):
    """An optional package is not installed; the message names the extra that brings it."""


MANY = 20  # names that are not listed in a message if a command lists them


class UnknownName(TorinoError):
    """No entry of this name is registered."""


class BadIndex(TorinoError, IndexError):
    """A batch or trace has no entry of this index; an IndexError too, as the protocol of sequences requires."""


def pickled_object(path: object, name: str, advice: str = "") -> PickledObject:
    """Build the error for a checkpoint that contains an object of the class ``name``."""
    error = PickledObject(
        f"{path} was not loaded: besides tensors it contains a pickled object ({name}) and could run code when opened. "
        "Accepted: a state dict of plain tensors, or safetensors. "
        + (advice or "Ask its publisher for one, or save its state_dict() in an environment you trust.")
    )
    error.name = name
    return error


def unknown_name(kind: str, name: object, known: Iterable[str], command: str = "") -> UnknownName:
    """Build the error for a name that is not registered; the message suggests similar names.

    ``command`` is the command that lists all names, if there is one.

    Examples
    --------
    >>> print(unknown_name("reducer", "torino", ["torino-m", "torino-p", "random"], "torino list"))
    No reducer is called 'torino'. Did you mean 'torino-p', 'torino-m'? Run 'torino list' to see all names.
    """
    names = list(known)
    close = get_close_matches(name, names, n=3, cutoff=0.6) if isinstance(name, str) and len(name) < 200 else []
    hint = f" Did you mean {', '.join(map(repr, close))}?" if close else f" Known: {', '.join(names) or 'none'}."
    if command and not close and len(names) > MANY:
        hint = ""
    advice = f" Run '{command}' to see all names." if command else ""
    return UnknownName(f"No {kind} is called {name!r:.80}.{hint}{advice}")
