"""Tiny vision towers with random weights, and a folder of photos of which two are broken."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

COUNT, PATCHES, SIDE, WIDTH = 11, 16, 56, 32  # photos, patches per photo, image size, token width
BROKEN = (4, 7)
GOOD = [number for number in range(COUNT) if number not in BROKEN]
VISION: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": SIDE,
    "patch_size": 14,
}
ModelFactory = Callable[[], tuple[nn.Module, Any]]


def make_clip() -> tuple[nn.Module, Any]:
    """Return a CLIP tower and its processor."""
    from transformers import CLIPImageProcessorPil, CLIPVisionConfig, CLIPVisionModel

    processor = CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE})
    return CLIPVisionModel(CLIPVisionConfig(**VISION)), processor


def make_dinov2() -> tuple[nn.Module, Any]:
    """Return a DINOv2 tower and its processor."""
    from transformers import BitImageProcessorPil, Dinov2Config, Dinov2Model

    processor = BitImageProcessorPil(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE})
    return Dinov2Model(Dinov2Config(**VISION)), processor


def make_siglip2() -> tuple[nn.Module, Any]:
    """Return a SigLIP2 tower, which has no CLS token and a grid that depends on the shape of the photo."""
    from transformers import Siglip2ImageProcessorPil, Siglip2VisionConfig, Siglip2VisionModel

    config = Siglip2VisionConfig(**{**VISION, "num_patches": 16})
    return Siglip2VisionModel(config), Siglip2ImageProcessorPil(patch_size=14, max_num_patches=16)


def write_tower(folder: Path, make: ModelFactory = make_clip, seed: int = 0) -> Path:
    """Save a tower with random weights and its processor."""
    torch.manual_seed(seed)
    model, processor = make()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.2)
    model.save_pretrained(folder)  # type: ignore[operator]
    processor.save_pretrained(folder)
    return folder


def write_photos(folder: Path) -> Path:
    """Write photos of several shapes, of which one is truncated and one is not an image."""
    random = np.random.default_rng(0)
    for number in range(COUNT):
        size = (60 + 7 * (number % 3), 80 - 5 * (number % 4), 3)
        Image.fromarray(random.integers(0, 255, size, dtype=np.uint8)).save(folder / f"{number:02d}.jpg")
    truncated, not_an_image = (folder / f"{number:02d}.jpg" for number in BROKEN)
    data = truncated.read_bytes()
    truncated.write_bytes(data[: len(data) // 2])
    not_an_image.write_bytes(b"this is no photo")
    return folder
