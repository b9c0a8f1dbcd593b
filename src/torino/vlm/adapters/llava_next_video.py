"""LLaVA-NeXT-Video: images as in LLaVA-NeXT, and videos whose frames are pooled before the projector."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from torino.vlm.adapters.pooled_video import PooledVideo


class LlavaNextVideo(PooledVideo):
    """LLaVA-NeXT-Video: images as in LLaVA-NeXT; see :mod:`torino.vlm.adapters.pooled_video` for videos.

    Parameters
    ----------
    model : a Hugging Face LLaVA-NeXT-Video model
    newlines : {"rows", "all", "none"}, optional
        The newline tokens of images to keep; the class attribute by default. Videos have none.
    """

    families: ClassVar[tuple[str, ...]] = ("llava_next_video",)

    def pool(self, values: Tensor) -> Tensor:
        """Pool 2x2 patches with the model's own pooling; signals, of another width, by their mean."""
        resampler = self.inner.vision_resampler
        if not isinstance(resampler.pool, torch.nn.Conv2d) or values.shape[-1] == resampler.pool.in_channels:
            return resampler(values)
        side, stride = round(values.shape[1] ** 0.5), int(self.config.spatial_pool_stride)
        planes = values.view(len(values), side, side, -1).permute(0, 3, 1, 2)
        return torch.nn.functional.avg_pool2d(planes, stride, stride).flatten(2).transpose(1, 2)

    def stock_videos(self, states: Tensor) -> Tensor:
        """Pool and project."""
        return self.inner.multi_modal_projector(self.inner.vision_resampler(states))
