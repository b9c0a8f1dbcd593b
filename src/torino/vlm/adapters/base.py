"""Adapter: what torino must know of a family of models. Hosts know models and nothing of methods."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast, get_args

import torch
from torch import Tensor, nn

from torino.core.errors import BadParameter, MissingSignal, TorinoError, unknown_name
from torino.core.ragged import Ragged
from torino.core.reduction import Reduction, ReductionBatch
from torino.core.timing import recording, stage
from torino.core.tokens import VisualTokens
from torino.reducers import InTowerReducer, PositionMode, Reducer, as_in_tower
from torino.vlm.insertion import ShortenedPrompt, Side, shorten_prompt
from torino.vlm.trace import Look

if TYPE_CHECKING:
    from torino.vlm.text_query import TextQuery

Positions = Literal["own", "compact", "original"]
ASKED = frozenset({"joint", "text"})  # signals of a question, which no tower gives; see torino.vlm.text_query


@dataclass(frozen=True)
class Tiling:
    """How the units of one image lie.

    Attributes
    ----------
    views : tuple of int
        The view that each unit is: 0 the whole image, then the tiles row by row. A tile that shows nothing of the
        image is no unit.
    layout : (int, int)
        Rows and columns of tiles.
    """

    views: tuple[int, ...]
    layout: tuple[int, int]


@dataclass(frozen=True)
class EncodedImages:
    """What a host saw in the pixels of one call.

    Attributes
    ----------
    tokens : tuple of VisualTokens
        The units to plan, in order: images, or tiles of images.
    full : tuple of int
        Placeholders of each image in the prompt.
    extra : object
        Whatever the host needs again when it splices.
    tilings : tuple of Tiling
        How the units of each image lie, where an image is seen whole and in tiles; otherwise none.
    came : tuple of Tensor of shape (M, D)
        What came out of a tower with a reducer at work in it; ``tokens`` are none then.
    """

    tokens: tuple[VisualTokens, ...]
    full: tuple[int, ...]
    extra: Any = None
    tilings: tuple[Tiling, ...] = ()
    came: tuple[Tensor, ...] = ()

    def reduced(self, plans: ReductionBatch, cls: Sequence[Tensor] | None = None) -> Ragged:
        """The tokens that are left of each unit: what the plans make of it, or what came out of the tower as such."""
        return Ragged.of(self.came) if self.came else plans.apply([unit.patches for unit in self.tokens], cls)

    @property
    def units(self) -> list[int]:
        """Units of each image."""
        return [len(tiling.views) for tiling in self.tilings] or [1] * len(self.full)


@dataclass(frozen=True)
class ImageEmbeds:
    """What goes into the prompt for one image.

    Attributes
    ----------
    features : Tensor of shape (n, E)
        Its tokens as the language model reads them.
    slots : Tensor of shape (n,), int64
        The placeholder of the image, counted from 0, whose place each of them takes; rising.
    """

    features: Tensor
    slots: Tensor


class Adapter(ABC):
    """One model of a family: how it sees, and how reduced tokens are handed to its language model."""

    families: ClassVar[tuple[str, ...]] = ()
    """``config.model_type`` of the models it serves."""
    merges: ClassVar[bool] = True
    """Whether tokens that are sums of patches make sense here."""
    tiles: ClassVar[bool] = False
    """Whether it tells how the tiles of an image lie (``EncodedImages.tilings``)."""

    proportional_attention: ClassVar[bool] = False
    """Whether all visual tokens of its prompt stand for patches, so that they have a mass (:mod:`torino.vlm.attention`)."""

    resumes: ClassVar[bool] = False
    """Whether a prompt can be read up to the end of its images once, and then on for each question: no token sees a
    later one, and positions simply count."""

    closed: ClassVar[str] = "torino does not run the blocks of its tower one by one"
    """Why no reducer can be at work inside the tower; empty where one can."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.config: Any = model.config

    # ------------------------------------------------------------------ what each family says

    @abstractmethod
    def look(self, inputs: Mapping[str, Any], needs: frozenset[str]) -> EncodedImages:
        """Run the vision tower up to the tap and return what it saw."""

    @abstractmethod
    def splice(self, sight: EncodedImages, plans: ReductionBatch) -> list[ImageEmbeds]:
        """Reduce and project: what each image contributes to the prompt."""

    def encode_in_tower(
        self, inputs: Mapping[str, Any], reducer: InTowerReducer
    ) -> tuple[EncodedImages, ReductionBatch]:
        """Run the tower up to the tap with a reducer at work in its blocks: what came out, and what it is made of."""
        raise TorinoError(
            f"{reducer.spec} works inside the vision tower, block by block, which cannot be done in "
            f"{type(self.model).__name__}: {self.closed}. Choose a reducer that works at the tap, such as tome or gtp."
        )

    @property
    def pixel_names(self) -> tuple[str, ...]:
        """Inputs that belong to the pixels and are used up by looking."""
        return ("pixel_values", "image_sizes")

    @property
    def image_token(self) -> int:
        """The placeholder in ``input_ids``."""
        return int(self.config.image_token_id)

    def outputs(self, sight: EncodedImages, splices: Sequence[ImageEmbeds]) -> Any:
        """Wrap the features as the model's own ``get_image_features`` returns them."""
        from transformers.modeling_outputs import BaseModelOutputWithPooling

        return BaseModelOutputWithPooling(pooler_output=[splice.features for splice in splices])  # type: ignore[arg-type]

    def positions(self, inputs: Mapping[str, Any], done: ShortenedPrompt, positions: PositionMode) -> dict[str, Any]:
        """Further inputs that place the new prompt; nothing for compact positions, which models count themselves."""
        mask = inputs.get("attention_mask")
        old = torch.ones_like(inputs["input_ids"]) if mask is None else mask.long()
        own: Tensor | None = inputs.get("position_ids")
        if positions == "compact":
            if own is not None and not _counts_up(own, old):
                raise BadParameter(
                    "The position_ids given do not simply count the tokens, so they cannot be counted anew for fewer. "
                    'Leave them out, or keep the positions of the full prompt with positions="original".'
                )
            return {}
        place = (old.cumsum(1) - 1).clamp(min=0) if own is None else own.expand(len(old), -1)
        rows = [row[at.to(row.device)] for row, at in zip(place, done.kept, strict=True)]
        return {"position_ids": done.spread(rows, 0)}

    def close(self) -> None:  # noqa: B027 (most families change nothing)
        """Give back whatever was changed in the model; called when its reduction ends."""

    # ------------------------------------------------------------------ what all families share

    def shrink(
        self,
        inputs: Mapping[str, Any],
        reducer: Reducer,
        positions: PositionMode,
        side: Side | None = None,
        asking: TextQuery | None = None,
    ) -> tuple[dict[str, Any], Look]:
        """Turn the inputs of a full prompt into those of the reduced one."""
        if inputs.get("input_ids") is None or inputs.get("inputs_embeds") is not None:
            raise BadParameter(
                "Reduction needs input_ids with image placeholders, and no inputs_embeds: embeddings cannot be shrunk. "
                "Give input_ids and pixel_values."
            )
        if dict(inputs.get("mm_encoder_outputs") or {}).get("image") is not None:
            raise BadParameter(
                "Both pixel values and mm_encoder_outputs of images were given. Give the pixels to have them reduced, "
                "or the outputs alone to have them used as they are."
            )
        needs = reducer.needs | (reducer.view_needs if self.tiles else frozenset())
        if needs & ASKED and asking is None:
            raise MissingSignal(
                f"{reducer.spec} chooses patches for a question, and was told none. Give the text half of the model's "
                "CLIP and the question, as reduced(model, reducer, asking=load_clip_text(name).about(question)) of "
                "torino.vlm, or choose a reducer that does without."
            )
        inside = as_in_tower(reducer)
        with recording() as seconds:
            with stage("tower"):
                if inside is None:
                    sight, plans = self.look(inputs, needs - ASKED), None
                else:
                    sight, plans = self.encode_in_tower(inputs, inside)
            if asking is not None and needs & ASKED:
                with stage("question"):
                    sight = asking.add(self, sight, inputs)
            if plans is None:
                with stage("plan"):
                    plans = self.plan(reducer, sight)
            else:
                self._check_plans(reducer, plans)
            with stage("projector"):
                splices = self.splice(sight, plans)
        shrunk, done = self.fill(inputs, sight, splices, positions, side)
        # the cache is a block: every row of it is as long as the longest
        saved = (inputs["input_ids"].numel() - done.inputs["input_ids"].numel()) * self._cache_bytes()
        after = tuple(len(splice.slots) for splice in splices)
        return shrunk, Look(tuple(plans), sight.full, after, dict(seconds), saved)

    def fill(
        self,
        inputs: Mapping[str, Any],
        sight: EncodedImages,
        splices: Sequence[ImageEmbeds],
        positions: PositionMode,
        side: Side | None = None,
    ) -> tuple[dict[str, Any], ShortenedPrompt]:
        """Put what each image contributes into the prompt: inputs of its final length, and how it was shortened."""
        done = shorten_prompt(
            inputs, self.image_token, sight.full, [splice.slots for splice in splices], side=side, pad=self._pad()
        )
        used = {*self.pixel_names, *done.inputs, "position_ids", "mm_encoder_outputs"}
        shrunk = {name: value for name, value in inputs.items() if name not in used}
        shrunk |= done.inputs | self.positions(inputs, done, positions)
        others = dict(inputs.get("mm_encoder_outputs") or {})
        shrunk["mm_encoder_outputs"] = {**others, "image": self.outputs(sight, splices)}
        return shrunk, done

    def plan(self, reducer: Reducer, sight: EncodedImages) -> ReductionBatch:
        """Plan every unit; those of one image together where they have one budget."""
        with torch.no_grad():
            plans = _plan(reducer, sight)
        self._check_plans(reducer, plans)
        return plans

    def has_images(self, inputs: Mapping[str, Any]) -> bool:
        """Whether there is anything to reduce in these inputs; an empty batch of pixels is none."""
        pixels = inputs.get("pixel_values")
        return pixels is not None and len(pixels) > 0

    def _check_plans(self, reducer: Reducer, plans: ReductionBatch) -> None:
        if not self.merges and not all(plan.is_pruning for plan in plans):
            raise BadParameter(
                f"{reducer.spec} merges tokens, and in {type(self.model).__name__} a merged token has no defined "
                "place. Choose a reducer that prunes, such as torino-p."
            )

    def _pad(self) -> int:
        text = self.config.get_text_config()
        pad = getattr(text, "pad_token_id", None)
        return int(pad) if pad is not None and pad >= 0 and pad != self.image_token else 0

    def _cache_bytes(self) -> int:
        """Key-value cache of one token in the language model."""
        text = self.config.get_text_config()
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        kind = next((p.dtype for p in self.model.parameters() if p.is_floating_point()), torch.float32)
        return 2 * int(text.num_hidden_layers) * int(heads) * int(size) * kind.itemsize


def _plan(reducer: Reducer, sight: EncodedImages) -> ReductionBatch:
    """Plan every unit; those of one image together where they have one budget."""
    tokens = [_detached(unit) for unit in sight.tokens]
    if not reducer.shares_views or not sight.tilings:
        return reducer.plan_batch(tokens)
    plans, rest = list[Reduction](), iter(tokens)
    for tiling in sight.tilings:
        views: list[VisualTokens | None] = [None] * (1 + prod(tiling.layout))
        for view in tiling.views:
            views[view] = next(rest)
        base, *tiles = views
        plans.extend(reducer.plan_views(cast(VisualTokens, base), tiles, tiling.layout))
    return ReductionBatch.of(plans)


def _detached(tokens: VisualTokens) -> VisualTokens:
    """The same tokens without a gradient: a plan is made of choices, and a reducer may want numpy."""
    if not tokens.patches.requires_grad:
        return tokens
    return tokens.with_(patches=tokens.patches.detach(), cls=None if tokens.cls is None else tokens.cls.detach())


def _counts_up(positions: Tensor, mask: Tensor) -> bool:
    """Whether positions of shape (rows, length) rise by one from each token to the next."""
    if positions.ndim != 2:
        return False
    rows = zip(positions.expand(len(mask), -1), mask.bool(), strict=True)
    return all(bool((row[is_real].diff() == 1).all()) for row, is_real in rows)


def place(positions: Positions, reducer: Reducer | None) -> PositionMode:
    """How tokens are numbered: as the user says, or as the method itself has it."""
    if positions not in get_args(Positions):
        raise BadParameter(f"positions must be own, compact or original, got {positions!r}.")
    if positions != "own":
        return positions
    return "compact" if reducer is None else reducer.position_mode


_hosts: dict[str, Callable[[], type[Adapter]]] = {}


def serve(*families: str) -> Callable[[Callable[[], type[Adapter]]], Callable[[], type[Adapter]]]:
    """Register a function that returns the host class of some families; it is called when one is opened."""

    def add(load: Callable[[], type[Adapter]]) -> Callable[[], type[Adapter]]:
        for family in families:
            _hosts[family] = load
        return load

    return add


def families() -> list[str]:
    """``model_type`` of all models that can be reduced."""
    return sorted(_hosts)


def adapter_for(model: nn.Module) -> Adapter:
    """Return the host for a model."""
    family = str(getattr(getattr(model, "config", None), "model_type", type(model).__name__))
    if family == "mllama":
        raise TorinoError(
            "Mllama hands images to its language model by cross-attention, not as tokens of the prompt, so there is "
            "nothing to remove from the prompt. Choose a model of another family: " + ", ".join(families()) + "."
        )
    if family not in _hosts:
        raise unknown_name("host family", family, families())
    return _hosts[family]()(model)
