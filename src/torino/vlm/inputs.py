"""Model inputs with all visual tokens, and the images of some inputs after reduction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from torino.core.reduction import Reduction, ReductionBatch
from torino.reducers import AttentionMode, PositionMode
from torino.reducers.in_language_model import layer_averaged
from torino.vlm.adapters.base import EncodedImages, ImageEmbeds, token_sizes
from torino.vlm.inside import InsideImage, InsideRun
from torino.vlm.prompt import Turn
from torino.vlm.trace import sum_layers

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
    inside : tuple of InsideImage
        What happens to the tokens of each image inside the language model; empty for methods that work before it.
    by : str
        The reducer.
    """

    plans: ReductionBatch
    encoded: EncodedImages
    embeds: list[ImageEmbeds]
    seconds: dict[str, float]
    positions: PositionMode
    proportional: bool
    restore: bool = False
    inside: tuple[InsideImage, ...] = ()
    by: str = ""

    @property
    def tokens(self) -> int:
        """Visual tokens that the language model processes. If it drops some, the mean over its layers, rounded."""
        return round(layer_averaged(self.layers or (sum(len(item.slots) for item in self.embeds),)))

    @property
    def layers(self) -> tuple[int, ...]:
        """Visual tokens that each decoder layer processes; empty if all layers process the same."""
        return sum_layers(self.inside)

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


def finish_plans(reductions: Sequence[ReducedImages], run: InsideRun | None) -> list[tuple[Reduction, ...]]:
    """Return the plans of each reduction, with what happened inside the language model.

    Parameters
    ----------
    reductions : sequence of ReducedImages
    run : InsideRun or None
        The run of all their images, one after the other.
    """
    finished: list[tuple[Reduction, ...]] = []
    number = 0
    for reduction in reductions:
        plans = tuple(reduction.plans)
        if run is not None and reduction.inside:
            plans = tuple(run.finish(number + i, plan, reduction.by) for i, plan in enumerate(plans))
        finished.append(plans)
        number += len(reduction.embeds)
    return finished
