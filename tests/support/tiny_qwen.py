"""Tiny Qwen2-VL, Qwen2.5-VL and Qwen3-VL models with random weights, and their inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transformers
from torch import Tensor

PAD, IMAGE, VIDEO, START, END, VOCAB = 0, 60, 61, 62, 63, 64
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
PATCH = 4
NEW = 5
# Grids (rows, columns) of tokens of the images of each row; empty for text only.
ROWS = ([(3, 2)], [], [(2, 4), (1, 3)], [(5, 5)])


def make_model(family: str, **options: Any) -> Any:
    """Return a new model of a family."""
    text: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
        "bos_token_id": 1,
        "eos_token_id": None,
        "pad_token_id": PAD,
    }
    vision: dict[str, Any] = {"depth": 3, "num_heads": 2, "patch_size": PATCH, "spatial_merge_size": 2}
    if family == "qwen2_vl":
        vision |= {"embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2}
        config, cls = transformers.Qwen2VLConfig, transformers.Qwen2VLForConditionalGeneration
    elif family == "qwen2_5_vl":
        vision |= {"hidden_size": 16, "out_hidden_size": 32, "intermediate_size": 24}
        vision |= {"window_size": 16, "fullatt_block_indexes": [1]}  # windows of 2x2 tokens
        config, cls = transformers.Qwen2_5_VLConfig, transformers.Qwen2_5_VLForConditionalGeneration
    else:
        vision |= {"hidden_size": 16, "out_hidden_size": 32, "intermediate_size": 24}
        vision |= {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}
        config, cls = transformers.Qwen3VLConfig, transformers.Qwen3VLForConditionalGeneration
    torch.manual_seed(7)
    model_config = config(
        text_config=text,
        vision_config=vision,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=END,
        **options,
    )
    model = cls(model_config).eval()
    with torch.no_grad():
        for weights in model.parameters():
            weights.mul_(4)  # initial weights are so small that every answer would be the same token
    return model


def make_inputs(rows: Sequence[Sequence[tuple[int, int]]], *, side: str = "left", seed: int = 3) -> dict[str, Tensor]:
    """Return the inputs of some rows; a row does not depend on the other rows."""
    lines: list[list[int]] = []
    pixels: list[Tensor] = []
    grids: list[tuple[int, int, int]] = []
    for images in rows:
        source = torch.Generator().manual_seed(seed + sum(9 * h + w for h, w in images))

        def words(count: int, source: torch.Generator = source) -> list[int]:
            return torch.randint(2, 50, (count,), generator=source).tolist()

        line = words(3)
        for height, width in images:
            line += [START, *[IMAGE] * (height * width), END, *words(2)]
            pixels.append(torch.randn(4 * height * width, 3 * 2 * PATCH * PATCH, generator=source))
            grids.append((1, 2 * height, 2 * width))
        lines.append(line + words(2))
    length = max(map(len, lines))
    padding = [[PAD] * (length - len(line)) for line in lines]
    ids = torch.tensor([pad + line if side == "left" else line + pad for pad, line in zip(padding, lines, strict=True)])
    inputs = {"input_ids": ids, "attention_mask": (ids != PAD).long(), "mm_token_type_ids": (ids == IMAGE).long()}
    if pixels:
        inputs |= {"pixel_values": torch.cat(pixels), "image_grid_thw": torch.tensor(grids)}
    return inputs


# Frames, rows and columns of tokens of the videos of each row.
VIDEO_ROWS = ([(3, 2, 3)], [], [(2, 2, 2), (1, 1, 3)], [(4, 3, 2)])


def make_video_inputs(
    family: str, rows: Sequence[Sequence[tuple[int, int, int]]], *, side: str = "left", seed: int = 3
) -> dict[str, Any]:
    """Return the inputs of some rows with videos, as the family's processor writes them.

    Qwen3-VL writes the time of each frame as text before its placeholders; Qwen2.5-VL returns the seconds between
    frames.
    """
    lines: list[list[int]] = []
    pixels: list[Tensor] = []
    grids: list[tuple[int, int, int]] = []
    for videos in rows:
        source = torch.Generator().manual_seed(seed + sum(81 * t + 9 * h + w for t, h, w in videos))

        def words(count: int, source: torch.Generator = source) -> list[int]:
            return torch.randint(2, 50, (count,), generator=source).tolist()

        line = words(3)
        for times, height, width in videos:
            if family == "qwen3_vl":
                for _ in range(times):
                    line += [*words(2), START, *[VIDEO] * (height * width), END]
            else:
                line += [START, *[VIDEO] * (times * height * width), END]
            line += words(2)
            pixels.append(torch.randn(4 * times * height * width, 3 * 2 * PATCH * PATCH, generator=source))
            grids.append((times, 2 * height, 2 * width))
        lines.append(line + words(2))
    length = max(map(len, lines))
    padding = [[PAD] * (length - len(line)) for line in lines]
    ids = torch.tensor([pad + line if side == "left" else line + pad for pad, line in zip(padding, lines, strict=True)])
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": (ids != PAD).long()}
    inputs["mm_token_type_ids"] = 2 * (ids == VIDEO).long()
    if pixels:
        inputs |= {"pixel_values_videos": torch.cat(pixels), "video_grid_thw": torch.tensor(grids)}
        if family == "qwen2_5_vl":
            inputs["second_per_grid_ts"] = [0.5 + 0.25 * i for i in range(len(grids))]
    return inputs
