"""Token selection: which tokens of a photo become training rows."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from torino.core.errors import BadParameter, MissingSignal
from torino.core.tokens import VisualTokens
from torino.training.sampler import hash_key, sample_without_replacement


@dataclass(frozen=True)
class TokenSelection:
    """Selection of the tokens of a photo: ``cls``, ``random:R`` patches, or ``all`` patches.

    Random patches depend only on the seed and the name of the photo, not on the order of the photos or on the batch. A
    photo with at most R patches contributes all of them.

    Examples
    --------
    >>> TokenSelection.parse("random:2")
    TokenSelection(name='random:2', count=2)
    >>> TokenSelection.parse("random:2").description, TokenSelection.parse("all").description
    ('2 random tokens per image', 'patch')
    """

    name: str
    count: int | None

    @classmethod
    def parse(cls, text: str) -> TokenSelection:
        """Parse a selection as written on the command line."""
        if text in ("cls", "all"):
            return cls(text, 1 if text == "cls" else None)
        match = re.fullmatch(r"random:([1-9]\d{0,6})", text)
        if match is None:
            raise BadParameter(f"tokens must be cls, all, or random:R for R patches per photo, got {text!r}.")
        return cls(text, int(match[1]))

    @property
    def description(self) -> str:
        """Description for the card of an SAE."""
        return {"cls": "cls", "all": "patch"}.get(self.name) or f"{self.count} random tokens per image"

    def check_tower(self, has_cls: bool, encoder: str) -> None:
        """Raise if a tower does not have these tokens."""
        if self.name == "cls" and not has_cls:
            raise MissingSignal(f"{encoder or 'This tower'} has no CLS token. Use tokens random:R or all.")

    def select_patches(self, count: int, photo: str, seed: int) -> Tensor:
        """Return the indices of the selected patches of a photo with ``count`` patches, ascending; none for ``cls``."""
        if self.name == "all":
            return torch.arange(count, dtype=torch.int32)
        if self.count is None or self.name == "cls":
            return torch.empty(0, dtype=torch.int32)
        return torch.from_numpy(sample_without_replacement(count, self.count, hash_key(seed, photo))).to(torch.int32)

    def select_rows(self, tokens: VisualTokens, patches: Tensor) -> Tensor:
        """Return the selected rows of a photo, shape (n, D), on the device of the tokens."""
        if self.name == "cls":
            assert tokens.cls is not None  # ensured by check_tower()
            return tokens.cls[None]
        return tokens.patches if self.name == "all" else tokens.patches[patches.long()]


@dataclass(frozen=True)
class SkippedPhoto:
    """A photo that could not be used, and the reason."""

    index: int
    name: str
    reason: str
