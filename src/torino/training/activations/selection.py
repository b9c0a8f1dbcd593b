"""Which tokens of a photo are trained on, and what is said of a photo that gave none."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from torino.core.errors import BadParameter, MissingSignal
from torino.core.tokens import VisualTokens
from torino.training.sampler import drawn, key_of


@dataclass(frozen=True)
class TokenKind:
    """Which tokens of a photo are rows: ``cls``, ``random:R``, or ``all`` patches.

    Random patches are drawn by the seed and the name of the photo, so they hang neither on the order of the photos
    nor on the batch. A photo with no more than R patches gives all of them.

    Examples
    --------
    >>> TokenKind.of("random:2")
    TokenKind(name='random:2', count=2)
    >>> TokenKind.of("random:2").words, TokenKind.of("all").words
    ('2 random tokens per image', 'patch')
    """

    name: str
    count: int | None

    @classmethod
    def of(cls, text: str) -> TokenKind:
        """Read a kind as it is written on the command line."""
        if text in ("cls", "all"):
            return cls(text, 1 if text == "cls" else None)
        found = re.fullmatch(r"random:([1-9]\d{0,6})", text)
        if found is None:
            raise BadParameter(f"tokens must be cls, all, or random:R with R patches a photo (random:2), got {text!r}.")
        return cls(text, int(found[1]))

    @property
    def words(self) -> str:
        """The kind as the card of an SAE says it."""
        return {"cls": "cls", "all": "patch"}.get(self.name) or f"{self.count} random tokens per image"

    def check(self, has_cls: bool, encoder: str) -> None:
        """Refuse a tower that has no such tokens."""
        if self.name == "cls" and not has_cls:
            raise MissingSignal(
                f"{encoder or 'This tower'} has no CLS token, and tokens are cls. Take random:R or all."
            )

    def patches(self, count: int, photo: str, seed: int) -> Tensor:
        """Numbers of the patches taken from a photo of ``count`` patches, ascending; none of them for ``cls``."""
        if self.name == "all":
            return torch.arange(count, dtype=torch.int32)
        if self.count is None or self.name == "cls":
            return torch.empty(0, dtype=torch.int32)
        return torch.from_numpy(drawn(count, self.count, key_of(seed, photo))).to(torch.int32)

    def rows(self, tokens: VisualTokens, patches: Tensor) -> Tensor:
        """The rows of a photo, shape (n, D), where the tower left them."""
        if self.name == "cls":
            assert tokens.cls is not None  # check() has seen to it
            return tokens.cls[None]
        return tokens.patches if self.name == "all" else tokens.patches[patches.long()]


@dataclass(frozen=True)
class Skipped:
    """A photo that could not be used, and the sentence that says why."""

    index: int
    name: str
    reason: str
