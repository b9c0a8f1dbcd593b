"""Model inputs with all visual tokens, and the images of some inputs after reduction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from torino.core.reduction import ReductionBatch
from torino.reducers import AttentionMode, PositionMode
from torino.vlm.adapters.base import EncodedImages, ImageEmbeds, token_sizes
from torino.vlm.prompt import Turn

if TYPE_CHECKING:
    from PIL import Image

    from torino.datasets.video import Video


@dataclass(frozen=True, eq=False)
class Inputs:
    """Model inputs of one or several prompts, with all visual tokens.

    Attributes
    ----------
    tensors : dict
        Output of the model's processor, on the model's device.
    prompts : tuple of str
        The text of each prompt, with one marker per image.
    conversations : tuple of conversations
        What each prompt was written from.
    images : tuple of PIL images
        All images and frames of videos, in order, as the processor received them.
    shown : tuple
        What was shown, in order: a Video, or None for an image. Empty if all are images.
    seconds : float
        Time that opening and processing took.
    """

    tensors: dict[str, Any]
    prompts: tuple[str, ...]
    conversations: tuple[Sequence[Turn], ...] = ()
    images: tuple[Image.Image, ...] = field(default=(), repr=False)
    seconds: float = 0.0
    shown: tuple[Video | None, ...] = field(default=(), repr=False)

    @property
    def videos(self) -> list[Video]:
        """The videos, in order."""
        return [video for video in self.shown if video is not None]


@dataclass(frozen=True, eq=False)
class ReducedImages:
    """The images of some inputs, reduced by one reducer and projected.

    Attributes
    ----------
    plans : ReductionBatch
        The reduction of each unit (image or tile).
    encoded : EncodedImages
    embeds : list of ImageEmbeds
        What replaces the placeholders of each image.
    seconds : dict
        ``tower``, ``question``, ``plan``, ``projector`` and their parts. Work that several reducers share counts in
        full for each of them.
    positions : {"compact", "original"}
    proportional : bool
        Whether attention depends on the patches that each token represents.
    restore : bool
        Whether it also depends on distance, as in RESTORE.
    """

    plans: ReductionBatch
    encoded: EncodedImages
    embeds: list[ImageEmbeds]
    seconds: dict[str, float]
    positions: PositionMode
    proportional: bool
    restore: bool = False

    @property
    def tokens(self) -> int:
        """Visual tokens that the language model receives."""
        return sum(len(item.slots) for item in self.embeds)

    @property
    def attention(self) -> AttentionMode:
        """How the language model attends to the tokens; see :mod:`torino.vlm.attention`."""
        return "plain" if not self.proportional else "restore" if self.restore else "proportional"

    @property
    def sizes(self) -> Sequence[Tensor]:
        """Number of patches that each token of each image represents; 0 for separators and registers."""
        return token_sizes(self.embeds, self.plans)[0]

    @property
    def patches(self) -> Sequence[int]:
        """Number of patches of each image."""
        return token_sizes(self.embeds, self.plans)[1]
