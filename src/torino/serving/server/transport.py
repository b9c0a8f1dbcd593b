"""Send reduced images from a front to an engine on the same machine: tensors in safetensors, the rest in JSON.

Nothing is unpickled, and the engine checks shapes, ranges and numbers, because a wrong slot would read outside the
prompt.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from torino.core.errors import BadTokens
from torino.core.reduction import Reduction, ReductionBatch
from torino.reducers import PositionMode
from torino.serving.server.jobs import AnswerEvent, FinishedAnswer, TextPiece
from torino.serving.server.schema import Sampling
from torino.vlm.adapters.base import EncodedImages, ImageEmbeds
from torino.vlm.prompt import Turn
from torino.vlm.session import ReducedImages

REQUEST = "request"


def pack_request(conversation: Sequence[Turn], images: Sequence[ReducedImages], sampling: Sampling) -> bytes:
    """Return a request as bytes."""
    modes = [{"positions": image.positions, "proportional": image.proportional} for image in images]
    text = json.dumps({"conversation": list(conversation), "sampling": asdict(sampling), "images": modes})
    tensors = {REQUEST: torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)}
    for index, image in enumerate(images):
        embeds = image.embeds[0]
        tensors[f"{index}.features"] = embeds.features.detach().cpu().contiguous()
        tensors[f"{index}.slots"] = embeds.slots.cpu().long().contiguous()
        tensors[f"{index}.sizes"] = torch.cat([plan.sizes for plan in image.plans]).long()
        tensors[f"{index}.full"] = torch.tensor([sum(image.encoded.full)])
    return save(tensors)


def unpack_request(body: bytes, width: int, device: torch.device) -> tuple[list[Turn], list[ReducedImages], Sampling]:
    """Return conversation, images and sampling of a request; ``width`` is that of a token in the language model.

    Raises
    ------
    BadTokens
        If anything is missing, has the wrong shape, or is out of range.
    """
    try:
        tensors = load(body)
        text = json.loads(tensors[REQUEST].numpy().tobytes())
        given: dict[str, Any] = {**text["sampling"], "stop": tuple(text["sampling"]["stop"])}
        sampling = Sampling(**given)
        images = [_image(index, mode, tensors, width, device) for index, mode in enumerate(text["images"])]
    except BadTokens:
        raise
    except (SafetensorError, KeyError, TypeError, ValueError, UnicodeError, RecursionError) as error:
        raise BadTokens(f"The engine received a request that it cannot read: {type(error).__name__}.") from error
    return cast("list[Turn]", text["conversation"]), images, sampling


def _image(
    index: int, mode: dict[str, Any], tensors: dict[str, Tensor], width: int, device: torch.device
) -> ReducedImages:
    features, slots, sizes, full = (tensors[f"{index}.{name}"] for name in ("features", "slots", "sizes", "full"))
    count = len(features)
    length = int(full.reshape(-1)[0])
    if features.ndim != 2 or not count or features.shape[1] != width or not features.is_floating_point():
        raise BadTokens(f"Embeddings must have shape (tokens, {width}), got {tuple(features.shape)}.")
    if not bool(features.isfinite().all()):
        raise BadTokens("Embeddings contain NaN or infinite values.")
    if slots.shape != (count,) or slots.dtype != torch.int64 or int(slots.min()) < 0 or int(slots.max()) >= length:
        raise BadTokens(f"Each of the {count} embeddings needs a position from 0 to {length - 1}.")
    if sizes.ndim != 1 or len(sizes) > count or sizes.dtype != torch.int64 or not len(sizes) or int(sizes.min()) < 1:
        raise BadTokens(f"Each of the {count} embeddings needs the number of patches that it represents, at least 1.")
    if int(sizes.sum()) > 1 << 24:
        raise BadTokens("The embeddings represent more patches than an image has.")
    if mode.get("positions") not in ("compact", "original") or not isinstance(mode.get("proportional"), bool):
        raise BadTokens("The engine received an unknown mode of positions or attention.")
    return ReducedImages(
        ReductionBatch.of([_plan(sizes)]),
        EncodedImages((), (length,)),
        [ImageEmbeds(features.to(device), slots)],
        {},
        cast(PositionMode, mode["positions"]),
        bool(mode["proportional"]),
    )


def _plan(sizes: Tensor) -> Reduction:
    """Return a reduction whose tokens represent this many patches; nothing else of it is used by the engine."""
    tokens = torch.arange(len(sizes))
    assigned = tokens.repeat_interleave(sizes)
    return Reduction.pick(tokens, (1, int(sizes.sum())), "front", assigned=assigned)


# ---------------------------------------------------------------------- events


def pack_event(event: AnswerEvent) -> bytes:
    """Return an event as one line; the front knows its images."""
    if isinstance(event, TextPiece):
        return json.dumps({"text": event.text}).encode() + b"\n"
    values = {name: value for name, value in asdict(event).items() if name != "images"}
    return json.dumps({"end": values}).encode() + b"\n"


def unpack_event(line: str) -> AnswerEvent | dict[str, Any]:
    """Return the event of a line, or the fields of an error."""
    value: dict[str, Any] = json.loads(line)
    if "text" in value:
        return TextPiece(str(value["text"]))
    if "end" in value:
        return FinishedAnswer(**value["end"])
    return dict(value["error"])
