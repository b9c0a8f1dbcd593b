"""Videos in a session: what the processor is given, and the frames and times of encoded tokens.

A model that takes videos receives them through its processor, with the time of each frame. To any other model the
frames are shown as several images. Where the method and the adapter allow it, these are planned as one video, so that
tokens can be merged over time, and return to the places of their frames.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from torino.core.errors import TorinoError
from torino.core.tokens import VisualTokens, stack_frames
from torino.datasets.video import Video
from torino.reducers import Reducer
from torino.vlm.adapters.base import Adapter
from torino.vlm.adapters.encoded import EncodedImages
from torino.vlm.prompt import Turn

MILLISECONDS = 1000  # processors count frames, so times are given as the frames of a video of this rate


def show_frames(conversation: Sequence[Turn]) -> list[Turn]:
    """Replace each video of a conversation by its frames as images."""

    def parts(part: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        if part["type"] != "video":
            return [part]
        return [{"type": "image", "image": frame} for frame in part["video"].frames]

    return [{**turn, "content": [shown for part in turn["content"] for shown in parts(part)]} for turn in conversation]


def visual_parts(conversation: Sequence[Turn]) -> list[Video | None]:
    """Return what each visual part of a conversation is, in order: a video, or None for an image."""
    shown: list[Video | None] = []
    for part in (part for turn in conversation for part in turn["content"]):
        if part["type"] == "video" and not isinstance(part.get("video"), Video):
            raise TorinoError(
                "The conversation contains a video that is not opened. Give a Video "
                "(torino.datasets.video.open_video), or some of its frames as images."
            )
        if part["type"] in ("image", "video"):
            shown.append(part.get("video"))
    return shown


def processor_options(videos: Sequence[Video]) -> dict[str, Any]:
    """Return the arguments of a processor for some videos, whose frames have been sampled already."""
    return {
        "videos": [list(video.frames) for video in videos],
        "videos_kwargs": {"video_metadata": [_metadata(video) for video in videos], "do_sample_frames": False},
    }


def _metadata(video: Video) -> dict[str, Any]:
    """Return what processors read times from: numbers of frames, at a thousand frames per second."""
    width, height = video.frames[0].size
    return {
        "total_num_frames": round(MILLISECONDS * len(video) / video.rate),  # gives the rate of the sampled frames
        "fps": float(MILLISECONDS),
        "frames_indices": [round(MILLISECONDS * time) for time in video.times],
        "duration": video.duration,
        "width": width,
        "height": height,
    }


def add_times(images: EncodedImages, videos: Sequence[Video]) -> EncodedImages:
    """Add the times of the frames of the videos to their tokens."""
    if images.modality != "video" or len(images.tokens) != len(videos):
        return images
    tokens = [
        unit.with_(times=mean_times(video.times, unit.frames)) if unit.frames <= len(video) else unit
        for unit, video in zip(images.tokens, videos, strict=True)
    ]
    return replace(images, tokens=tuple(tokens))


def mean_times(times: Sequence[float], frames: int) -> tuple[float, ...]:
    """Return the time of each frame of a unit whose frames each merge several frames of the video: their mean.

    Examples
    --------
    >>> mean_times([0.0, 1.0, 2.0], frames=2), mean_times([0.0, 1.0], frames=2)
    ((0.5, 2.0), (0.0, 1.0))
    """
    step = -(-len(times) // frames)
    parts = [times[i * step : (i + 1) * step] for i in range(frames)]
    return tuple(sum(part) / len(part) for part in parts)


def plans_together(adapter: Adapter, reducer: Reducer | None) -> bool:
    """Return whether the frames of a video that are shown as images are reduced together."""
    return adapter.joins_frames and reducer is not None and reducer.takes_frames and not reducer.in_tower


def join_frames(images: EncodedImages, runs: Sequence[Video | None]) -> EncodedImages:
    """Join the units of images that are the frames of one video; other images stay as they are.

    Parameters
    ----------
    images : EncodedImages
        One unit for each image.
    runs : sequence of Video or None
        What the images show, in order: an image (None), or a video of one or more of them.
    """
    registers: Tensor = images.extra
    if registers.shape[1]:  # a frame begins with tokens that are no patches
        return images
    units = iter(images.tokens)
    tokens: list[VisualTokens] = []
    for video in runs:
        frames = [next(units) for _ in range(1 if video is None else len(video))]
        tokens.append(frames[0] if video is None else stack_frames(frames, video.times))
    full = tuple(len(unit) for unit in tokens)
    return replace(images, tokens=tuple(tokens), full=full, extra=torch.empty(len(tokens), *registers.shape[1:]))
