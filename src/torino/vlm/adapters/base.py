"""The adapter interface: what torino must know about a family of models. Adapters know nothing about methods."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn

from torino.core.checks import check_choice, check_tensor, check_type, describe_value
from torino.core.errors import BadParameter, MissingSignal, TorinoError, unknown_name
from torino.core.placement import place_at_median
from torino.core.plugins import load_plugins
from torino.core.reduction import Reduction, ReductionBatch
from torino.core.timing import recording, stage
from torino.reducers import (
    Downsample,
    InTowerReducer,
    KeepShare,
    PositionMode,
    Reducer,
    as_in_tower,
    split_reducer,
)
from torino.vlm.adapters.encoded import EncodedImages, ImageEmbeds, plan_units
from torino.vlm.insertion import ShortenedPrompt, Side, shorten_prompt
from torino.vlm.inside import plan_inside
from torino.vlm.trace import ReducedCall

if TYPE_CHECKING:
    from torino.vlm.text_query import TextQuery

Positions = Literal["auto", "compact", "original", "median"]
CLIP_SIGNALS = frozenset({"joint", "text"})  # computed from the question by a CLIP: torino.vlm.text_query
QUERY_SIGNALS = CLIP_SIGNALS | {"words", "generic_words"}  # computed from the question, not by the tower


class Adapter(ABC):
    """One model of a family: how it encodes images and how its language model receives reduced tokens.

    Reduction runs in four stages, which :class:`~torino.vlm.session.VLM`, :func:`~torino.vlm.reduced` and
    :class:`~torino.vlm.ReducingProcessor` share: :meth:`encode_for`, :meth:`plan`, :meth:`embed`, :meth:`insert`.
    """

    families: ClassVar[tuple[str, ...]] = ()
    """``config.model_type`` of the supported models."""
    supports_merging: ClassVar[bool] = True
    """Whether tokens that are sums of patches are accepted."""
    pixel_ndims: ClassVar[tuple[int, ...]] = (4, 5)
    """Numbers of dimensions that ``pixel_values`` can have."""
    tiles: ClassVar[bool] = False
    """Whether images are split into tiles (``EncodedImages.tilings``)."""
    proportional_attention: ClassVar[bool] = False
    """Whether :meth:`embed` returns the number of patches of each token, which other attention than plain needs."""
    position_axes: ClassVar[int] = 1
    """Axes of the positions of a patch: 1 if patches are numbered, 2 for rows and columns."""
    projects_patches: ClassVar[bool] = False
    """Whether :meth:`encode` provides the signal ``"projected"``: the patches in the space of the language model."""
    shares_prefix: ClassVar[bool] = False
    """Whether the prompt up to the end of its images can be read once for several questions: attention is causal and
    positions simply count."""
    prompt_template: ClassVar[str] = ""
    """Prompt for checkpoints without a chat template, with ``{images}`` and ``{question}``; empty if there is none."""
    image_suffix: ClassVar[str] = ""
    """Text after each image marker in ``prompt_template``."""
    separates_images: ClassVar[bool] = False
    """Whether each image can be encoded by itself: its marker in the prompt becomes its placeholders and nothing else,
    and positions and outputs are plain. A server can then cache reduced images; see :mod:`torino.vlm.batching`."""
    takes_videos: ClassVar[bool] = False
    """Whether the model takes videos (``pixel_values_videos``) and :meth:`encode` encodes them."""
    video_ndims: ClassVar[tuple[int, ...]] = (5,)
    """Numbers of dimensions that ``pixel_values_videos`` can have."""
    joins_frames: ClassVar[bool] = False
    """Whether the frames of a video that are shown as several images can be reduced together: :meth:`embed` takes a
    unit of all of them."""
    joins_videos: ClassVar[bool] = False
    """Whether the model reads the features of all videos as one tensor."""
    in_tower_refusal: ClassVar[str] = "torino does not run the blocks of its tower one by one"
    """Why no reducer can run inside the tower; empty where one can."""

    inside_refusal: ClassVar[str] = "torino does not know how its images correspond to the tokens of its prompt"
    """Why no reducer can work inside the language model; empty where one can, see :mod:`torino.vlm.inside`."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.config: Any = model.config

    # ------------------------------------------------------------------ defined by each family

    @abstractmethod
    def encode(self, inputs: Mapping[str, Any], needs: frozenset[str]) -> EncodedImages:
        """Run the vision tower up to the feature layer and return its tokens with the signals named in ``needs``."""

    @abstractmethod
    def embed(self, encoded: EncodedImages, plans: ReductionBatch) -> list[ImageEmbeds]:
        """Reduce and project the tokens of each image."""

    def encode_in_tower(
        self, inputs: Mapping[str, Any], reducer: InTowerReducer
    ) -> tuple[EncodedImages, ReductionBatch]:
        """Run the tower on smaller images, or with a reducer active in its blocks; return its output and the plans."""
        if self.has_videos(inputs):
            raise TorinoError(
                f"{reducer.spec} works on the pixels or inside the vision tower, image by image, and not on videos. "
                "Choose a method for videos, such as torino-m."
            )
        if reducer.on_pixels:
            return self.encode_smaller(inputs, cast("Downsample | KeepShare", reducer))
        return self.encode_in_blocks(inputs, reducer)

    def encode_smaller(
        self, inputs: Mapping[str, Any], reducer: Downsample | KeepShare
    ) -> tuple[EncodedImages, ReductionBatch]:
        """Run the tower on smaller images."""
        raise TorinoError(
            f"{reducer.spec} shrinks the image before the vision tower, and {type(self.model).__name__} needs images "
            "of its own size, for tiles or cells of several patches. Choose pool, which averages tokens."
        )

    def encode_in_blocks(
        self, inputs: Mapping[str, Any], reducer: InTowerReducer
    ) -> tuple[EncodedImages, ReductionBatch]:
        """Run the tower with a reducer active in its blocks."""
        raise TorinoError(
            f"{reducer.spec} runs inside the vision tower, block by block, which {type(self.model).__name__} does not "
            f"allow: {self.in_tower_refusal}. Choose a reducer for the tower's output, such as tome or gtp."
        )

    @property
    def pixel_names(self) -> tuple[str, ...]:
        """Inputs that belong to the pixels and are consumed by encoding."""
        return ("pixel_values", "image_sizes")

    @property
    def image_token(self) -> int:
        """Id of the placeholder of an image in ``input_ids``."""
        return int(self.config.image_token_id)

    @property
    def video_token(self) -> int:
        """Id of the placeholder of a video in ``input_ids``, for models that take videos."""
        return int(self.config.video_token_id)

    @property
    def placeholders(self) -> tuple[int, ...]:
        """Ids of all placeholders."""
        return (self.image_token, self.video_token) if self.takes_videos else (self.image_token,)

    def placeholder(self, inputs: Mapping[str, Any]) -> int:
        """Return the id of the placeholder in some inputs, before or after encoding: that of a video or of an image."""
        encoded = dict(inputs.get("mm_encoder_outputs") or {})
        is_video = self.takes_videos and (self.has_videos(inputs) or set(encoded) == {"video"})
        return self.video_token if is_video else self.image_token

    @property
    def batches_reductions(self) -> bool:
        """Whether several reductions of one image can be answered in one batch: positions and outputs are plain."""
        return type(self).outputs is Adapter.outputs and type(self).positions is Adapter.positions

    def outputs(self, encoded: EncodedImages, embeds: Sequence[ImageEmbeds]) -> Any:
        """Wrap the features as the model's own ``get_image_features`` returns them."""
        from transformers.modeling_outputs import BaseModelOutputWithPooling

        features: Any = [item.features for item in embeds]
        if encoded.modality == "video" and self.joins_videos:
            features = torch.cat(features)[None]
        return BaseModelOutputWithPooling(pooler_output=features)

    def positions(self, inputs: Mapping[str, Any], prompt: ShortenedPrompt, mode: PositionMode) -> dict[str, Any]:
        """Return position inputs of the shortened prompt; empty for compact positions, which models count."""
        mask = inputs.get("attention_mask")
        full_mask = torch.ones_like(inputs["input_ids"]) if mask is None else mask.long()
        given: Tensor | None = inputs.get("position_ids")
        if mode == "compact":
            if given is not None and not _counts_up(given, full_mask):
                raise BadParameter(
                    "position_ids do not simply count the tokens, so they cannot be renumbered for a shorter prompt. "
                    'Omit them, or keep the positions of the full prompt with positions="original".'
                )
            return {}
        if given is not None and (given.ndim != 2 or given.shape[0] not in (1, len(full_mask))):
            raise BadParameter(f"position_ids must have one row for each prompt, got shape {tuple(given.shape)}.")
        full = (full_mask.cumsum(1) - 1).clamp(min=0) if given is None else given.expand(len(full_mask), -1)
        rows = [row[kept.to(row.device)] for row, kept in zip(full, prompt.kept, strict=True)]
        return {"position_ids": prompt.spread(rows, 0)}

    def close(self) -> None:  # noqa: B027 (most families change nothing)
        """Restore whatever was changed in the model; called when its reduction ends."""

    # ------------------------------------------------------------------ shared by all families

    def needs(self, reducer: Reducer) -> frozenset[str]:
        """Return the signals of the tower and of the question that a reducer reads in this model."""
        before, _ = split_reducer(reducer)
        if before is None:
            return frozenset()
        reducer = before
        optional = reducer.optional if self.projects_patches else frozenset[str]()
        return reducer.needs | optional | (reducer.view_needs if self.tiles else frozenset())

    def encode_for(
        self, inputs: Mapping[str, Any], reducer: Reducer, text_query: TextQuery | None = None
    ) -> tuple[EncodedImages, ReductionBatch | None]:
        """Encode the images for one reducer; a reducer inside the tower returns its plans as well."""
        before, _ = split_reducer(reducer)
        in_tower = None if before is None else as_in_tower(before)
        needs = self.needs(reducer)
        if needs & QUERY_SIGNALS and text_query is None:
            reader = "load_clip_text(name)" if needs & CLIP_SIGNALS else "WordText(processor)"
            raise MissingSignal(
                f"{reducer.spec} chooses patches by the question and received none. Pass it with what reads it: "
                f"reduced(model, reducer, text_query={reader}.query(question)), or choose a reducer that does not read "
                "it."
            )
        with stage("tower"):
            if in_tower is not None:
                return self.encode_in_tower(inputs, in_tower)
            encoded = self.encode(inputs, needs - QUERY_SIGNALS)
        return self.add_text_query(encoded, inputs, reducer, text_query), None

    def add_text_query(
        self, encoded: EncodedImages, inputs: Mapping[str, Any], reducer: Reducer, text_query: TextQuery | None
    ) -> EncodedImages:
        """Add the signals of the question where the reducer reads them."""
        if text_query is None or not self.needs(reducer) & QUERY_SIGNALS:
            return encoded
        with stage("question"):
            return text_query.add(self, encoded, inputs, self.needs(reducer))

    def place(
        self, encoded: EncodedImages, plans: ReductionBatch, positions: PositionMode
    ) -> tuple[EncodedImages, ReductionBatch]:
        """Move the tokens to the median position of their patches if ``positions`` says so."""
        if positions != "median":
            return encoded, plans
        placed = [place_at_median(plan, self.position_axes > 1) for plan in plans]
        tokens = encoded.reduced_tokens and tuple(
            values[order.to(values.device)] for values, (_, order) in zip(encoded.reduced_tokens, placed, strict=True)
        )
        return replace(encoded, reduced_tokens=tokens), ReductionBatch.of([plan for plan, _ in placed])

    def plan(self, reducer: Reducer, encoded: EncodedImages) -> ReductionBatch:
        """Plan every unit; units of one image that share a budget are planned together.

        Methods that work inside the language model keep all tokens before it.
        """
        before, _ = split_reducer(reducer)
        if before is None:
            return ReductionBatch.of([Reduction.identity(by=reducer.spec, **unit.layout) for unit in encoded.tokens])
        with torch.no_grad():
            plans = plan_units(before, encoded)
        self.check_plans(reducer, plans)
        return plans

    def reduce_inputs(
        self,
        inputs: Mapping[str, Any],
        reducer: Reducer,
        positions: PositionMode,
        side: Side | None = None,
        text_query: TextQuery | None = None,
    ) -> tuple[dict[str, Any], ReducedCall]:
        """Turn the inputs of a full prompt into those of the reduced one.

        If the reducer works inside the language model, the call says what remains to be done there.
        """
        self.check_inputs(inputs)
        with recording() as seconds:
            encoded, plans = self.encode_for(inputs, reducer, text_query)
            if plans is None:
                with stage("plan"):
                    plans = self.plan(reducer, encoded)
            else:
                self.check_plans(reducer, plans)
            encoded, plans = self.place(encoded, plans, positions)
            with stage("projector"):
                embeds = self.embed(encoded, plans)
        reduced, prompt = self.insert(inputs, encoded, embeds, positions, side)
        after = tuple(len(item.slots) for item in embeds)
        saved = self.cache_bytes(inputs["input_ids"].numel() - prompt.inputs["input_ids"].numel())
        sizes, patches = token_sizes(embeds, plans)
        inside = plan_inside(self, split_reducer(reducer)[1], sizes)
        call = ReducedCall(tuple(plans), encoded.full, after, dict(seconds), saved, "", sizes, patches, inside)
        return reduced, call

    def insert(
        self,
        inputs: Mapping[str, Any],
        encoded: EncodedImages,
        embeds: Sequence[ImageEmbeds],
        positions: PositionMode,
        side: Side | None = None,
    ) -> tuple[dict[str, Any], ShortenedPrompt]:
        """Replace the placeholders of each image by its tokens; return model inputs and how the prompt was cut."""
        slots = [item.slots for item in embeds]
        token = self.video_token if encoded.modality == "video" else self.image_token
        prompt = shorten_prompt(inputs, token, encoded.full, slots, side=side, pad=self._pad_token())
        consumed = {*self.pixel_names, *prompt.inputs, "position_ids", "mm_encoder_outputs"}
        reduced = {name: value for name, value in inputs.items() if name not in consumed}
        reduced |= prompt.inputs | self.positions(inputs, prompt, positions)
        others = dict(inputs.get("mm_encoder_outputs") or {})
        reduced["mm_encoder_outputs"] = {**others, encoded.modality: self.outputs(encoded, embeds)}
        return reduced, prompt

    def has_images(self, inputs: Mapping[str, Any]) -> bool:
        """Return whether the inputs hold images, or videos that the model takes; an empty batch of pixels has none."""
        return self.has_videos(inputs) or _has_pixels(inputs, "pixel_values")

    def has_videos(self, inputs: Mapping[str, Any]) -> bool:
        """Return whether the inputs hold videos."""
        return self.takes_videos and _has_pixels(inputs, "pixel_values_videos")

    def check_inputs(self, inputs: Mapping[str, Any]) -> None:
        """Refuse inputs that cannot be reduced."""
        if inputs.get("input_ids") is None or inputs.get("inputs_embeds") is not None:
            raise BadParameter(
                "Reduction needs input_ids with image placeholders and no inputs_embeds, because embeddings cannot be "
                "shortened. Pass input_ids and pixel_values."
            )
        for name in ("input_ids", "attention_mask", "labels", "position_ids"):
            value = inputs.get(name)
            if value is not None and (check_tensor(name, value, BadParameter).is_complex() or value.ndim < 1):
                raise BadParameter(f"{name} must have one value for each token, got {describe_value(value)}.")
        if inputs["input_ids"].ndim != 2 or inputs["input_ids"].is_floating_point():
            given = f"{inputs['input_ids'].dtype} of shape {tuple(inputs['input_ids'].shape)}"
            raise BadParameter(f"input_ids must be integers of shape (rows, length), got {given}.")
        has_videos = self.has_videos(inputs)
        if has_videos and _has_pixels(inputs, "pixel_values"):
            raise BadParameter(
                f"This call gives {type(self.model).__name__} both images and videos, and torino reduces one of them "
                "in a call. Use separate calls, or run it outside the reduced block."
            )
        for name, ndims in {"pixel_values": self.pixel_ndims, "pixel_values_videos": self.video_ndims}.items():
            pixels = inputs.get(name)
            if pixels is None or (name == "pixel_values_videos" and not has_videos):
                continue
            check_tensor(name, pixels, BadParameter)
            if pixels.ndim not in ndims or not pixels.is_floating_point():
                given = f"{pixels.dtype} of shape {tuple(pixels.shape)}"
                raise BadParameter(
                    f"{name} must be the floating-point tensor of {' or '.join(map(str, ndims))} dimensions that the "
                    f"processor returns, got {given}."
                )
        check_type("mm_encoder_outputs", inputs.get("mm_encoder_outputs") or {}, Mapping, "a mapping by modality")
        modality = "video" if has_videos else "image"
        if dict(inputs.get("mm_encoder_outputs") or {}).get(modality) is not None:
            raise BadParameter(
                f"Both pixel values and mm_encoder_outputs of {modality}s were given. Pass the pixels to reduce them, "
                "or the outputs alone to use them unchanged."
            )

    def check_plans(self, reducer: Reducer, plans: ReductionBatch) -> None:
        """Refuse plans that this family cannot represent."""
        if not self.supports_merging and not all(plan.is_pruning for plan in plans):
            raise BadParameter(
                f"{reducer.spec} merges tokens, and in {type(self.model).__name__} a merged token has no defined "
                "position. Choose a reducer that prunes, such as torino-p."
            )

    def cache_bytes(self, tokens: int) -> int:
        """Return the size of the key-value cache of some tokens."""
        text = self.config.get_text_config()
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        dtype = next((p.dtype for p in self.model.parameters() if p.is_floating_point()), torch.float32)
        return tokens * 2 * int(text.num_hidden_layers) * int(heads) * int(size) * dtype.itemsize

    def _pad_token(self) -> int:
        text = self.config.get_text_config()
        pad = getattr(text, "pad_token_id", None)
        return int(pad) if pad is not None and pad >= 0 and pad != self.image_token else 0


def _has_pixels(inputs: Mapping[str, Any], name: str) -> bool:
    pixels = inputs.get(name)
    if pixels is None:
        return False
    if not isinstance(pixels, Tensor | list | tuple) or (isinstance(pixels, Tensor) and not pixels.ndim):
        raise BadParameter(f"{name} must be the tensor of the processor, got {describe_value(pixels)}.")
    return len(cast(Sequence[Any], pixels)) > 0


def _counts_up(positions: Tensor, mask: Tensor) -> bool:
    """Return whether positions of shape (rows, length) increase by one from each token to the next."""
    if positions.ndim != 2 or positions.shape not in (mask.shape, (1, mask.shape[1])):
        return False
    rows = zip(positions.expand(len(mask), -1), mask.bool(), strict=True)
    return all(bool((row[is_token].diff() == 1).all()) for row, is_token in rows)


def token_sizes(
    embeds: Sequence[ImageEmbeds], plans: Sequence[Reduction]
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """Return the patches that each token of each image represents, and the patches of each image.

    Where an adapter does not say it, an image is one plan, after tokens that represent no patch.
    """
    sizes, patches = list[Tensor](), list[int]()
    for number, item in enumerate(embeds):
        own = plans[number].sizes if item.sizes is None and len(plans) == len(embeds) else item.sizes
        own = torch.ones(len(item.slots), dtype=torch.int64) if own is None else own
        sizes.append(nn.functional.pad(own, (len(item.slots) - len(own), 0)))
        patches.append(item.patches or int(own.sum()))
    return tuple(sizes), tuple(patches)


def position_choice(positions: Positions, reducer: Reducer | None) -> PositionMode:
    """Resolve ``"auto"`` to the reducer's own position mode."""
    check_choice("positions", positions, Positions, "auto, compact, original or median")
    if positions != "auto":
        return positions
    return "compact" if reducer is None else reducer.position_mode


def position_mode(positions: Positions, reducer: Reducer | None) -> PositionMode:
    """Return how the positions of a prompt are numbered: ``"compact"`` or ``"original"``.

    Tokens at the median of their patches have been moved before (:meth:`Adapter.place`) and keep original positions.
    """
    return "compact" if position_choice(positions, reducer) == "compact" else "original"


# ---------------------------------------------------------------------- registry

_adapters: dict[str, str | type[Adapter]] = {
    "gemma3": "gemma.Gemma3",
    "idefics3": "idefics.Idefics",
    "internvl": "internvl.InternVL",
    "llava": "llava.Llava",
    "llava_next": "llava_next.LlavaNext",
    "llava_next_video": "llava_next_video.LlavaNextVideo",
    "llava_onevision": "llava_onevision.LlavaOnevision",
    "paligemma": "gemma.PaliGemma",
    "qwen2_5_vl": "qwen.Qwen",
    "qwen2_vl": "qwen.Qwen",
    "qwen3_vl": "qwen.Qwen",
    "smolvlm": "idefics.Idefics",
}
"""The adapter class of each family, or its module and name in this package, which is imported on first use."""


def register_adapter(*families: str) -> Callable[[type[Adapter]], type[Adapter]]:
    """Register an adapter class for some families (``config.model_type``).

    Examples
    --------
    ::

        @register_adapter("my_model")
        class MyAdapter(Adapter): ...
    """
    for family in families:
        check_type("family", family, str, "the model_type of a config")

    def add(adapter: type[Adapter]) -> type[Adapter]:
        if not isinstance(adapter, type) or not issubclass(adapter, Adapter):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise BadParameter(f"register_adapter decorates a subclass of Adapter, got {describe_value(adapter)}.")
        _adapters.update(dict.fromkeys(families, adapter))
        return adapter

    return add


def families() -> list[str]:
    """Return the ``model_type`` of all supported models; packages add theirs through ``torino.adapters``."""
    load_plugins("torino.adapters")
    return sorted(_adapters)


def check_family(family: str) -> None:
    """Refuse a ``model_type`` that no adapter supports."""
    if family == "mllama":
        raise TorinoError(
            "Mllama passes images to its language model by cross-attention, not as tokens of the prompt, so there are "
            "no tokens to remove. Choose a model of another family: " + ", ".join(families()) + "."
        )
    if family not in _adapters and family not in families():
        raise unknown_name("model family", family, families(), "torino list models")


def adapter_for(model: nn.Module) -> Adapter:
    """Return the adapter of a model."""
    check_type("model", model, nn.Module, "a Hugging Face vision-language model")
    family = str(getattr(getattr(model, "config", None), "model_type", type(model).__name__))
    check_family(family)
    adapter = _adapters[family]
    if isinstance(adapter, str):
        module, name = adapter.split(".")
        adapter = cast(type[Adapter], getattr(import_module(f"torino.vlm.adapters.{module}"), name))
    return adapter(model)
