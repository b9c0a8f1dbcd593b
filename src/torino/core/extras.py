"""Import packages of optional dependencies ("extras") with an error that says what to install."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from torino.core.errors import MissingPackage

PACKAGES = {"PIL": "Pillow", "torino_lab": "torino-lab"}
"""Distributions whose name differs from that of their module."""


@contextmanager
def optional_import(purpose: str, requirement: str) -> Generator[None]:
    """Run imports of optional packages, and name the requirement to install if one of them fails.

    Parameters
    ----------
    purpose : str
        Subject and verb of the error, such as ``"Figures need"``.
    requirement : str
        Argument of ``pip install``: an extra such as ``"torino[plot]"``, or a package.

    Raises
    ------
    MissingPackage
        If a package is not installed, or cannot be imported.

    Examples
    --------
    >>> with optional_import("Figures need", "torino[plot]"):
    ...     import a_missing_package
    Traceback (most recent call last):
        ...
    torino.core.errors.MissingPackage: Figures need a_missing_package, which is not installed: pip install
    "torino[plot]".
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None:
            raise _unusable(purpose, requirement, error) from error
        module = error.name.partition(".")[0]
        raise MissingPackage(
            f"{purpose} {PACKAGES.get(module, module)}, which is not installed: {install_command(requirement)}."
        ) from error
    except ImportError as error:
        raise _unusable(purpose, requirement, error) from error


def install_command(requirement: str) -> str:
    """Return the command that installs a requirement; shells would expand the brackets of an extra without quotes.

    Examples
    --------
    >>> print(install_command("torino[plot]"), install_command("wandb"), sep=", ")
    pip install "torino[plot]", pip install wandb
    """
    return f'pip install "{requirement}"' if "[" in requirement else f"pip install {requirement}"


def _unusable(purpose: str, requirement: str, error: ImportError) -> MissingPackage:
    """Build the error for a package that is installed but cannot be imported, for example an old version."""
    reason = " ".join(str(error).split())
    return MissingPackage(
        f"{purpose} a package that cannot be imported ({reason}): {install_command(requirement)} --upgrade."
    )
