"""Tokens of the bundled photos for commands without a model, and the SAE that reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torino.cli._common import LAB, NO_SAE, errors, quiet_transformers
from torino.core.errors import Unreachable

if TYPE_CHECKING:
    from torino.core.tokens import VisualTokens
    from torino.vlm.loading import ModelPackage

EXAMPLE = "example"
"""The SAE that is bundled with stored tokens of the photos, for installations without the model package."""


def default_photo_sae() -> str:
    """Return the SAE that reads the bundled photos: that of the default model package, else the bundled example."""
    package = _default_package()
    return EXAMPLE if package is None or package.sae is None else LAB


def photo_tokens(sae: str | None, encoder: Any = None, needs: frozenset[str] = frozenset()) -> list[VisualTokens]:
    """Return tokens of the bundled photos, as ``torino look`` and ``torino ask`` compute them.

    Parameters
    ----------
    sae : str or None
        Name of the SAE; None for a method that reads no concepts.
    encoder : ConceptEncoder, optional
        The loaded SAE. Its card names the block to read; without one, it is that of the model package.
    needs : frozenset of str
        Signals that the method reads.

    Returns
    -------
    list of VisualTokens
        Of the tower of the default model package, or the stored ones: for the bundled SAE, without the package, and
        for an SAE that was trained on them.
    """
    from torino.datasets.bundled import PHOTOS, example_folder, example_tokens

    package, card = _default_package(), getattr(encoder, "card", None)
    stored = example_tokens()
    block = getattr(card, "block", None)
    fits = card is not None and (card.encoder, block) == (stored[0].origin.encoder, stored[0].origin.block)
    if sae == EXAMPLE or fits or package is None:
        return stored
    from torino.vlm.hooks import SIGNALS
    from torino.vlm.towers import load_tower

    signals = frozenset(name for name in needs if name.partition("@")[0] in SIGNALS)
    with errors.status("Encoding the bundled photos …"), quiet_transformers():
        try:
            tower = load_tower(LAB, block=None if sae in (None, NO_SAE) else block)
        except Unreachable as error:
            raise Unreachable(f"{error} To use the stored tokens of the photos instead: --sae {EXAMPLE}.") from error
        return tower.encode([example_folder() / "photos" / f"{name}.jpg" for name in PHOTOS], signals)


def _default_package() -> ModelPackage | None:
    """Return the default model package if it is installed and has a tower."""
    from torino.vlm.loading import model_package, model_packages

    package = model_package(LAB) if LAB in model_packages() else None
    return None if package is None or package.tower is None else package
