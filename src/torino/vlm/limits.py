"""Checks of what a session is given: images, conversations, reducers, and lengths that a model can read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from torino.core.checks import check_tensor, check_type, describe_value, to_integer, to_list
from torino.core.errors import BadParameter
from torino.datasets.images import Picture
from torino.datasets.video import Video
from torino.reducers import Reducer

Result = TypeVar("Result")
CHARACTERS_PER_TOKEN = 64  # more than in any text; a longer prompt is refused without splitting it into tokens


def to_pictures(images: Picture | Video | Sequence[Picture | Video]) -> list[Picture | Video]:
    """Return one image or video, or several, as a list; the types of images are checked when they are opened."""
    if not isinstance(images, list | tuple):
        return [cast("Picture | Video", images)]
    if not images:
        raise BadParameter("No image was given. Give at least one.")
    return list(cast("Sequence[Picture | Video]", images))


def check_processor(processor: Any, *, optional: bool = False) -> None:
    """Refuse anything that can neither process nor decode; a processor may be ``optional``."""
    usable = not isinstance(processor, type) and (callable(processor) or hasattr(processor, "batch_decode"))
    if not usable and not (processor is None and optional):
        raise BadParameter(f"processor must be the processor of the model, got {describe_value(processor)}.")


def check_reducer(reducer: Reducer | None) -> None:
    """Refuse anything but a Reducer, or None for all tokens."""
    if reducer is not None:
        check_type("reducer", reducer, Reducer, "a Reducer, such as torino.make('torino-m', sae=...), or None")


def check_reducers(reducers: Iterable[Reducer | None]) -> list[Reducer | None]:
    """Return the reducers as a list; refuse other objects."""
    found = to_list("reducers", reducers, (Reducer, type(None)), "Reducers, or None for all tokens", BadParameter)
    return cast("list[Reducer | None]", found)


def check_reductions(reductions: Sequence[Result], kind: type[Result]) -> list[Result]:
    """Return the results of ``VLM.reduce`` as a list; refuse other objects, and none."""
    found = to_list("generate", reductions, kind, "the results of VLM.reduce()", BadParameter)
    if not found:
        raise BadParameter("generate takes at least one reduction, got none. Use VLM.reduce().")
    return found


def check_conversations(conversations: Any) -> None:
    """Refuse anything but a list of conversations; see :data:`torino.vlm.prompt.Turn`."""
    expected = "a list of turns {'role': ..., 'content': [{'type': 'text', 'text': ...}, ...]}"
    rows = to_list("conversations", conversations, (list, tuple), "conversations", BadParameter)
    if not rows:
        raise BadParameter("No conversation was given. Give at least one.")
    for turns in rows:
        if not turns or not all(isinstance(turn, Mapping) and {"role", "content"} <= set(turn) for turn in turns):
            raise BadParameter(f"A conversation must be {expected}, got {describe_value(turns)}.")
        for turn in turns:
            parts = turn["content"]
            if not isinstance(parts, list | tuple) or not all(_is_part(part) for part in cast(list[Any], parts)):
                raise BadParameter(f"The content of a turn must be {expected[22:]}, got {describe_value(parts)}.")


def _is_part(part: Any) -> bool:
    if not isinstance(part, Mapping) or not isinstance(kind := cast(Mapping[str, Any], part).get("type"), str):
        return False
    if kind == "text":
        return isinstance(cast(Mapping[str, Any], part).get("text"), str)
    return kind != "image" or "image" in part


def check_grids(grids: Tensor, pixels: Tensor, side: int, name: str = "image_grid_thw") -> None:
    """Refuse grids that do not describe these packed patches; ``side`` patches merge in each axis of a frame."""
    packed = "pixel_values" if name == "image_grid_thw" else "pixel_values_videos"
    advice = f"Pass {name} and {packed} as the processor returns them."
    check_tensor(name, grids, BadParameter)
    check_tensor(packed, pixels, BadParameter)
    if grids.ndim != 2 or grids.shape[1] != 3 or grids.is_floating_point() or grids.is_complex():
        raise BadParameter(
            f"{name} must be integers of shape ({name.split('_')[0]}s, 3), got {grids.dtype} of shape "
            f"{tuple(grids.shape)}. {advice}"
        )
    rows: list[list[int]] = grids.tolist()
    for times, height, width in rows:
        if min(times, height, width) < 1 or height % side or width % side:
            raise BadParameter(
                f"{name} has the grid {times}x{height}x{width}; times must be at least 1, and height and width "
                f"positive multiples of {side}. {advice}"
            )
    patches = sum(times * height * width for times, height, width in rows)
    if pixels.ndim != 2 or patches != len(pixels):
        raise BadParameter(
            f"{name} describes {patches} patches, and {packed} has shape {tuple(pixels.shape)}. {advice}"
        )


def context_length(config: Any) -> int | None:
    """Return how many tokens the language model of a config can read; None if it does not say."""
    text = config.get_text_config()
    limit = getattr(text, "max_position_embeddings", None)
    if not isinstance(limit, int) or limit < 1:
        return None
    rope: Any = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None)
    factor = rope.get("factor") if isinstance(rope, dict) else None  # positions stretched after training, as by YaRN
    if isinstance(factor, int | float) and factor > 1:
        original = cast(dict[str, Any], rope).get("original_max_position_embeddings") or limit
        return max(limit, int(original * factor))
    return limit


def check_characters(prompts: Sequence[str], config: Any) -> None:
    """Refuse a prompt that is far too long for the model, before it is split into tokens."""
    limit, longest = context_length(config), max(map(len, prompts))
    if limit is not None and longest > CHARACTERS_PER_TOKEN * limit:
        raise BadParameter(
            f"The question has {longest:,} characters, and this model reads at most {limit:,} tokens. Shorten it."
        )


def check_tokens(ids: Tensor, placeholders: Sequence[int], config: Any) -> None:
    """Refuse prompts whose text alone is longer than the model can read; images may become shorter."""
    limit, longest = (
        context_length(config),
        int((~torch.isin(ids, torch.tensor(placeholders, device=ids.device))).sum(-1).max()),
    )
    if limit is not None and longest > limit:
        raise BadParameter(
            f"The question has {longest:,} tokens with the prompt around it, and this model reads at most {limit:,}. "
            "Shorten it."
        )


def check_new_tokens(max_new_tokens: int, config: Any) -> int:
    """Return the length of an answer as int; refuse more than the model can read, which would take forever."""
    number, limit = to_integer("max_new_tokens", max_new_tokens, 1), context_length(config)
    if limit is not None and number > limit:
        raise BadParameter(
            f"max_new_tokens must be at most {limit:,}, the context length of this model, got {number:,}."
        )
    return number
