"""Reduce images one by one and answer prompts with them together, as a server does.

:meth:`VLM.chat_inputs` processes the images and the text of a prompt together. A server receives the same image with
other questions, and several prompts at once, so here the steps are separate: :func:`process_image` and
:func:`reduce_pixels` do not need a prompt, so their result can be cached or sent to another process;
:func:`write_inputs` needs only the lengths of the images; :func:`pad_inputs` and :func:`join_images` make one batch for
:meth:`VLM.generate`. The result equals that of :meth:`VLM.answer`. Possible where ``adapter.separates_images``.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torino.core.errors import BadParameter, TorinoError
from torino.core.reduction import ReductionBatch
from torino.datasets.images import Picture
from torino.reducers import Reducer
from torino.vlm import limits
from torino.vlm.adapters.base import EncodedImages
from torino.vlm.inputs import Inputs, ReducedImages
from torino.vlm.insertion import FILL
from torino.vlm.prompt import Turn, image_marker, special_token_options, write_prompt
from torino.vlm.session import VLM, Encoded

Pixels = Mapping[str, Tensor]
"""What the image processor returns for one image."""


def check_separable(vlm: VLM) -> None:
    """Refuse a model whose images cannot be encoded without their prompt."""
    if not vlm.adapter.separates_images:
        raise BadParameter(
            f"{type(vlm.model).__name__} writes more than placeholders for an image, or numbers them by its size, so "
            "its images cannot be encoded without their prompt. Use VLM.chat_inputs()."
        )


def process_image(vlm: VLM, image: Picture) -> dict[str, Tensor]:
    """Open an image and return its pixels as the tower takes them, on the CPU."""
    check_separable(vlm)
    opened = vlm.open(image)
    try:
        processed = vlm.processor.image_processor(images=[opened], return_tensors="pt")
    except (ValueError, TypeError) as error:
        raise TorinoError(f"{type(vlm.processor).__name__} refused an image: {error}") from error
    return {name: value for name, value in dict(processed).items() if name in vlm.adapter.pixel_names}


def reduce_pixels(vlm: VLM, pixels: Sequence[Pixels], reducer: Reducer | None) -> list[ReducedImages]:
    """Encode, reduce and project some images; None keeps all tokens.

    Images of the same shape run through the tower together. Reducers that plan several images together are refused,
    because the result of an image would depend on the others.

    Returns
    -------
    list of ReducedImages
        One for each image. The seconds are those of all images that ran together, divided by their number.
    """
    check_separable(vlm)
    if reducer is not None and reducer.shares_batch and len(pixels) > 1:
        raise BadParameter(f"{reducer.spec} plans several images together. Give one image at a time.")
    groups: dict[Any, list[int]] = {}
    for index, item in enumerate(pixels):
        groups.setdefault(tuple((name, tuple(value.shape)) for name, value in item.items()), []).append(index)
    results: dict[int, ReducedImages] = {}
    for indices in groups.values():
        tensors: dict[str, Any] = {}
        for name in pixels[indices[0]]:
            value = torch.cat([pixels[i][name] for i in indices])
            tensors[name] = value.to(vlm.device, vlm.dtype if value.is_floating_point() else None)
        reduced = vlm.reduce(Encoded(vlm, Inputs(tensors, ()), [reducer]), reducer)
        results |= dict(zip(indices, split_images(reduced), strict=True))
    return [results[index] for index in range(len(pixels))]


def split_images(reduced: ReducedImages) -> list[ReducedImages]:
    """Return each image by itself, without the tower's output."""
    count, plans = len(reduced.embeds), list(reduced.plans)
    units = reduced.encoded.units if len(plans) != count else [1] * count
    seconds = {name: value / count for name, value in reduced.seconds.items()}
    parts: list[ReducedImages] = []
    for embeds, full, number in zip(reduced.embeds, reduced.encoded.full, units, strict=True):
        own, plans = plans[:number], plans[number:]
        parts.append(
            ReducedImages(
                ReductionBatch.of(own),
                EncodedImages((), (full,)),
                [embeds],
                seconds,
                reduced.positions,
                reduced.proportional,
                reduced.restore,
            )
        )
    return parts


def join_images(parts: Sequence[ReducedImages]) -> ReducedImages:
    """Return several images as one, in the order in which the prompts show them."""
    if not parts:
        raise BadParameter("No image was given. Use VLM.generate_text() for prompts without images.")
    modes = {(part.positions, part.attention) for part in parts}
    if len(modes) > 1:
        raise BadParameter("The images were reduced for different positions or attention. Reduce all of them alike.")
    seconds: dict[str, float] = {}
    for part in parts:
        for name, value in part.seconds.items():
            seconds[name] = seconds.get(name, 0.0) + value
    full = tuple(length for part in parts for length in part.encoded.full)
    return ReducedImages(
        ReductionBatch.of([plan for part in parts for plan in part.plans]),
        EncodedImages((), full),
        [embeds for part in parts for embeds in part.embeds],
        seconds,
        parts[0].positions,
        parts[0].proportional,
        parts[0].restore,
    )


def write_inputs(vlm: VLM, conversation: Sequence[Turn], full: Sequence[int]) -> Inputs:
    """Build the inputs of one conversation whose images have these numbers of tokens; the images are not needed.

    Parameters
    ----------
    vlm : VLM
    conversation : conversation
        Its image parts may lack ``image``.
    full : sequence of int
        All tokens of each image, before reduction (``ReducedImages.encoded.full``).
    """
    begin = time.perf_counter()
    check_separable(vlm)
    turns = [
        {**turn, "content": [{"image": None, **part} if part["type"] == "image" else part for part in turn["content"]]}
        for turn in conversation
    ]
    limits.check_conversations([turns])
    prompt = write_prompt(turns, vlm.processor, vlm.adapter)
    limits.check_characters([prompt], vlm.adapter.config)
    marker = image_marker(vlm.processor)
    pieces = prompt.split(marker)
    if len(pieces) != len(full) + 1:
        raise TorinoError(
            f"The prompt shows {len(pieces) - 1} images, and {len(full)} were given. The chat template of this model "
            "may not write one marker for each image."
        )
    text = pieces[0] + "".join(marker * length + piece for length, piece in zip(full, pieces[1:], strict=True))
    tokens = vlm.processor.tokenizer(text, return_tensors="pt", **special_token_options(prompt, vlm.processor))
    tensors = {name: tokens[name].to(vlm.device) for name in ("input_ids", "attention_mask")}
    limits.check_tokens(tensors["input_ids"], vlm.adapter.placeholders, vlm.adapter.config)
    return Inputs(tensors, (prompt,), (turns,), (), time.perf_counter() - begin)


def pad_inputs(rows: Sequence[Inputs]) -> Inputs:
    """Return several inputs of one prompt each as one batch, padded on the left."""
    length = max(row.tensors["input_ids"].shape[1] for row in rows)

    def padded(name: str) -> Tensor:
        values: list[Tensor] = [row.tensors[name] for row in rows]
        fill = FILL.get(name, 0)
        return torch.cat([torch.nn.functional.pad(value, (length - value.shape[1], 0), value=fill) for value in values])

    return Inputs(
        {name: padded(name) for name in rows[0].tensors},
        tuple(prompt for row in rows for prompt in row.prompts),
        tuple(conversation for row in rows for conversation in row.conversations),
        (),
        sum(row.seconds for row in rows),
    )


def prompt_length(inputs: Inputs, parts: Sequence[ReducedImages]) -> tuple[int, int]:
    """Return the tokens of one prompt with reduced images, and the positions that it takes in the language model."""
    full = int(inputs.tensors["attention_mask"].sum())
    short = full - sum(sum(part.encoded.full) - part.tokens for part in parts)
    return short, full if any(part.positions == "original" for part in parts) else short
