"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: images and videos of any shape, merged patches, three-dimensional positions."""

from __future__ import annotations

import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from torino.core.checks import check_tensor
from torino.core.errors import BadParameter, MissingSignal, TorinoError
from torino.core.ragged import Ragged
from torino.core.reduction import Reduction, ReductionBatch
from torino.core.timing import stage
from torino.core.tokens import Origin, VisualTokens
from torino.reducers import Downsample, KeepShare, PositionMode
from torino.vlm.adapters.base import Adapter, EncodedImages, ImageEmbeds
from torino.vlm.downsample import resize_packed
from torino.vlm.hooks import placing, signal_block
from torino.vlm.insertion import ShortenedPrompt
from torino.vlm.limits import check_grids

# Index of queries and keys in the output of a block's fused projection.
FUSED = {"queries": 0, "keys": 1}


@dataclass(frozen=True)
class DeepstackEmbeds(ImageEmbeds):
    """Image embeds with the features that Qwen3-VL adds in the first layers of its language model.

    Attributes
    ----------
    deepstack : tuple of Tensor of shape (n, E)
        One tensor for each deepstack layer; empty for families without deepstack.
    """

    deepstack: tuple[Tensor, ...] = ()


class Qwen(Adapter):
    """Qwen2-VL, Qwen2.5-VL, Qwen3-VL: each image is one unit, read and reduced after the merger.

    The tokens are those that the language model reads: each merges 2x2 patches, in raster order on a grid of half the
    height and width. The merger reads four neighbors at once, so single patches cannot be removed before it.
    ``origin.block`` is the number of blocks, which denotes the output of the merger.

    *Positions.* Every token keeps the three coordinates (time, row, column) it has in the full prompt, text included,
    and generated text continues where it would in the full prompt. An image occupies only max(rows, columns) position
    values, however many tokens it has, so there is hardly a gap to close: ``"compact"`` and ``"original"`` are the
    same. With ``"median"`` a merged token has the median row and the median column of its patches.

    *Merging.* A merged token has the coordinates of its anchor; a token without an anchor has those of the last patch.
    The features that Qwen3-VL adds to its visual tokens in the first layers of the language model (deepstack) are
    reduced by the same matrix. This is torino's choice; the models were trained with complete grids.

    *Signals.* These towers have no CLS token. Keys and queries of a block, before the rotary embedding, are averaged
    over the four patches of a token; without ``@`` they are those of the last block.

    *Videos.* A video is one unit of several frames: the tower merges two frames of the file into one, so its time is
    between theirs. Every token keeps the time, row and column of the patch that represents it. Qwen3-VL writes the time
    of each frame into the prompt as text, before its placeholders; this text stays, also where a frame has no token.
    A call has images or videos, not both.
    """

    families: ClassVar[tuple[str, ...]] = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
    pixel_ndims: ClassVar[tuple[int, ...]] = (2,)
    video_ndims: ClassVar[tuple[int, ...]] = (2,)
    takes_videos: ClassVar[bool] = True
    proportional_attention: ClassVar[bool] = True
    projects_patches: ClassVar[bool] = True
    position_axes: ClassVar[int] = 2
    inside_refusal: ClassVar[str] = ""
    in_tower_refusal: ClassVar[str] = (
        "its tower merges 2x2 patches into one token after its last block and needs all four"
    )

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._deltas: tuple[Tensor | None, Tensor] | None = None  # the model's own rope_deltas, and the current ones

    @property
    def inner(self) -> Any:
        """The model without its head."""
        return self.model.base_model

    @property
    def pixel_names(self) -> tuple[str, ...]:
        """Inputs that belong to the pixels, including the grid, which is that of the full image."""
        return ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw", "second_per_grid_ts")

    def encode(self, inputs: Mapping[str, Any], needs: frozenset[str]) -> EncodedImages:
        """Run the complete tower and its merger once for all images, or for all videos."""
        self._check(inputs)
        tower, is_video = self.inner.visual, self.has_videos(inputs)
        sources = {name: self._signal_source(name, len(tower.blocks)) for name in sorted(needs - {"projected"})}
        grids: Tensor = inputs["video_grid_thw" if is_video else "image_grid_thw"]
        with _capture_fused(tower.blocks, {block for _, block in sources.values()}) as fused:
            if is_video:
                output = self.inner.get_video_features(inputs["pixel_values_videos"], grids, return_dict=True)
            else:
                output = self.inner.get_image_features(inputs["pixel_values"], grids, return_dict=True)
        with stage("signals"):
            signals = {name: self._per_token(fused[block], kind, grids) for name, (kind, block) in sources.items()}
        side = int(tower.spatial_merge_size)
        origin = Origin(self._tower_name(), len(tower.blocks))
        tokens: list[VisualTokens] = []
        for i, (features, (times, rows, columns)) in enumerate(zip(output.pooler_output, grids.tolist(), strict=True)):
            image_signals = {name: values[i] for name, values in signals.items()}
            if "projected" in needs:  # the merger has projected them
                image_signals["projected"] = features.detach().float()
            tokens.append(
                VisualTokens(
                    patches=features,
                    grid=((1 if is_video else times) * rows // side, columns // side),
                    frames=times if is_video else 1,
                    times=self._seconds(inputs, i, times) if is_video else None,
                    origin=origin,
                    keys=image_signals.pop("keys", None),
                    signals=image_signals,
                )
            )
        modality = "video" if is_video else "image"
        return EncodedImages(tuple(tokens), tuple(len(unit) for unit in tokens), output, modality=modality)

    def encode_smaller(
        self, inputs: Mapping[str, Any], reducer: Downsample | KeepShare
    ) -> tuple[EncodedImages, ReductionBatch]:
        """Encode smaller images, which these towers accept; a budget counts merged tokens."""
        self._check(inputs)
        tower, grids = self.inner.visual, inputs["image_grid_thw"]
        side, patch = int(tower.spatial_merge_size), int(tower.config.patch_size)
        pixels: list[Tensor] = []
        sizes, plans = list[tuple[int, int, int]](), list[Reduction]()
        per_image: list[Tensor] = list(inputs["pixel_values"].split(grids.prod(-1).tolist()))
        for values, (times, rows, columns) in zip(per_image, grids.tolist(), strict=True):
            (height, width), plan = reducer.plan_grid((times * rows // side, columns // side))
            if height % times:
                raise TorinoError(
                    f"{reducer.spec} would give {height} rows to {times} frames. Give the frames as separate images."
                )
            small = (height // times * side, width * side)
            frames = int(tower.config.temporal_patch_size)
            pixels.append(resize_packed(values, (times, rows, columns), small, side, patch, frames))
            sizes.append((times, *small))
            plans.append(plan)
        output = self.inner.get_image_features(torch.cat(pixels), grids.new_tensor(sizes), return_dict=True)
        full = tuple(plan.patches for plan in plans)
        return EncodedImages((), full, output, reduced_tokens=tuple(output.pooler_output)), ReductionBatch.of(plans)

    def embed(self, encoded: EncodedImages, plans: ReductionBatch) -> list[ImageEmbeds]:
        """Reduce the features and those of every deepstack layer by the same plan."""
        deepstack = [list(layer) for layer in getattr(encoded.extra, "deepstack_features", None) or ()]
        reduced: Sequence[Tensor] | Ragged = encoded.reduced_tokens or plans.apply(list(encoded.extra.pooler_output))
        layers = deepstack if encoded.reduced_tokens else [plans.apply(layer) for layer in deepstack]
        return [
            DeepstackEmbeds(
                features=reduced[i],
                slots=torch.where(plan.anchor < 0, plan.patches - 1, plan.anchor),
                sizes=plan.sizes,
                patches=plan.patches,
                deepstack=tuple(layer[i] for layer in layers),
            )
            for i, plan in enumerate(plans)
        ]

    def outputs(self, encoded: EncodedImages, embeds: Sequence[ImageEmbeds]) -> Any:
        """Wrap the features in the class that the model's own ``get_image_features`` returns."""
        fields: dict[str, Any] = {"pooler_output": [item.features for item in embeds]}
        if hasattr(encoded.extra, "deepstack_features"):
            deepstack = [item.deepstack for item in embeds if isinstance(item, DeepstackEmbeds)]
            fields["deepstack_features"] = [list(layer) for layer in zip(*deepstack, strict=True)]
        return type(encoded.extra)(**fields)

    def positions(self, inputs: Mapping[str, Any], prompt: ShortenedPrompt, mode: PositionMode) -> dict[str, Any]:
        """Return the positions that the remaining tokens have in the full prompt; ``mode`` makes no difference.

        ``position_ids`` has shape (4, rows, length): the plain count, from which the model derives its mask, then time,
        row and column. The model's ``rope_deltas`` is set too: ``generate`` does not need it, but a decoding loop that
        calls ``forward`` gets the positions of new tokens from it.
        """
        ids, mask = inputs["input_ids"], inputs.get("attention_mask")
        full, deltas = self.inner.get_rope_index(
            ids,
            mm_token_type_ids=inputs["mm_token_type_ids"],
            image_grid_thw=inputs.get("image_grid_thw"),
            video_grid_thw=inputs.get("video_grid_thw"),
            second_per_grid_ts=inputs.get("second_per_grid_ts"),
            attention_mask=mask,
        )
        rows = [full[:, row, kept] for row, kept in enumerate(prompt.kept)]
        coordinates = prompt.spread(rows, 0).transpose(0, 1)
        new_mask = prompt.inputs["attention_mask"].long()
        count = (new_mask.cumsum(1) - 1).masked_fill(new_mask == 0, 0)
        full_mask = torch.ones_like(ids) if mask is None else mask.long()
        # The model adds the delta to the length so far, so a shorter prompt needs a larger delta.
        self._set_deltas(deltas + full_mask.sum(1, keepdim=True) - new_mask.sum(1, keepdim=True))
        return {"position_ids": torch.cat([count[None], coordinates])}

    def close(self) -> None:
        """Restore the model's ``rope_deltas``, unless they have been set elsewhere since."""
        if self._deltas is not None and self.inner.rope_deltas is self._deltas[1]:
            self.inner.rope_deltas = self._deltas[0]
        self._deltas = None

    def _set_deltas(self, deltas: Tensor) -> None:
        original = self.inner.rope_deltas if self._deltas is None else self._deltas[0]
        self._deltas = (original, deltas)
        self.inner.rope_deltas = deltas

    def _check(self, inputs: Mapping[str, Any]) -> None:
        """Refuse inputs that would give wrong answers, before the tower runs."""
        name = type(self.model).__name__
        kind, pixels = ("video", "pixel_values_videos") if self.has_videos(inputs) else ("image", "pixel_values")
        for required in (f"{kind}_grid_thw", "mm_token_type_ids"):
            if inputs.get(required) is None:
                raise BadParameter(
                    f"{name} cannot position the tokens of {'a' if kind == 'video' else 'an'} {kind} without "
                    f"{required}, which its processor returns with {pixels}. Pass all outputs of the processor."
                )
        check_grids(
            inputs[f"{kind}_grid_thw"], inputs[pixels], int(self.inner.visual.spatial_merge_size), f"{kind}_grid_thw"
        )
        kinds = check_tensor("mm_token_type_ids", inputs["mm_token_type_ids"], BadParameter)
        if kinds.shape != inputs["input_ids"].shape or kinds.is_floating_point():
            raise BadParameter(
                f"mm_token_type_ids must be integers of the shape of input_ids, {tuple(inputs['input_ids'].shape)}, "
                f"got {kinds.dtype} of shape {tuple(kinds.shape)}. Pass all outputs of the processor."
            )
        if inputs.get("position_ids") is not None:
            raise BadParameter(
                f"position_ids were given, and torino computes those of the reduced prompt with {name}'s own rule. "
                "Omit them."
            )

    def _seconds(self, inputs: Mapping[str, Any], video: int, frames: int) -> tuple[float, ...] | None:
        """Return the times of the frames of a video, where the processor says how far they are apart (Qwen2.5-VL)."""
        seconds = inputs.get("second_per_grid_ts")
        return None if seconds is None else tuple(i * float(seconds[video]) for i in range(frames))

    def _signal_source(self, name: str, blocks: int) -> tuple[str, int]:
        """Return what a signal is (queries or keys) and the block it comes from."""
        kind = name.partition("@")[0]
        if kind in ("cls", "cls_attention"):
            raise MissingSignal(
                f"{name} comes from a CLS token, and the vision tower of {type(self.model).__name__} has none. "
                "Choose a reducer that does not need it, such as torino-m."
            )
        if kind not in FUSED:
            raise MissingSignal(
                f"{name!r} is not a signal of this tower. Use keys or queries, optionally of another block, such as "
                "keys@-1 or keys@8."
            )
        return kind, signal_block(name, blocks - 1, blocks)

    def _tower_name(self) -> str:
        vision = getattr(self.config.vision_config, "_name_or_path", "")
        return str(vision or getattr(self.config, "_name_or_path", "") or "")

    def _per_token(self, fused: Tensor, kind: str, grids: Tensor) -> tuple[Tensor, ...]:
        """Average the queries or keys of all images' patches over the patches of each token; one tensor per image."""
        tower = self.inner.visual
        unit = int(tower.spatial_merge_size) ** 2
        patches = fused.detach().unflatten(-1, (3, -1))[:, FUSED[kind]].float()
        tokens = patches.unflatten(0, (-1, unit)).mean(1)
        if hasattr(tower, "window_size"):  # Qwen2.5-VL orders tokens by attention windows until after its merger
            from transformers.vision_utils import get_vision_window_index

            order, _ = get_vision_window_index(grids, tower.spatial_merge_size, tower.window_size, tower.patch_size)
            tokens = tokens[order.argsort().to(tokens.device)]
        return tokens.split((grids.prod(-1) // unit).tolist())


@contextmanager
def _capture_fused(blocks: nn.ModuleList, numbers: set[int]) -> Generator[dict[int, Tensor]]:
    """Capture the outputs of the fused projections of some blocks, for this thread only."""
    captured: dict[int, Tensor] = {}
    thread = threading.get_ident()

    def make_hook(number: int) -> Any:
        def hook(module: nn.Module, arguments: Any, output: Tensor) -> None:
            if threading.get_ident() == thread:
                captured[number] = output

        return hook

    with ExitStack() as stack:
        for number in numbers:
            with placing:
                handle = blocks[number].get_submodule("attn.qkv").register_forward_hook(make_hook(number))
            stack.callback(handle.remove)
        yield captured
