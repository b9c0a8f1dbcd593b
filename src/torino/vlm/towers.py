"""Load vision towers and compute visual tokens from images, without a language model."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from torino.core.checks import check_tensor, check_type, describe_value, is_integer, to_integer
from torino.core.device import resolve_device, resolve_dtype
from torino.core.errors import BadFile, BadParameter, MissingSignal, TorinoError
from torino.core.reduction import Reduction
from torino.core.tokens import Origin, VisualTokens
from torino.datasets.images import Padding, Picture, mean_color, open_image, prepare
from torino.datasets.video import Video
from torino.reducers import InTowerReducer, Reducer, as_in_tower
from torino.vlm.hooks import CapturedFeatures, TowerLayout, capture, tower_layout
from torino.vlm.in_tower import run_in_tower
from torino.vlm.limits import check_grids, check_processor, to_pictures
from torino.vlm.loading import encoder_name, fetch, local_name, model_package, transformers

# Supported towers: model_type of the config, then module and class in transformers.
TOWERS = {
    "clip_vision_model": ("clip", "CLIPVisionModel"),
    "siglip_vision_model": ("siglip", "SiglipVisionModel"),
    "siglip2_vision_model": ("siglip2", "Siglip2VisionModel"),
    "dinov2": ("dinov2", "Dinov2Model"),
    "dinov2_with_registers": ("dinov2_with_registers", "Dinov2WithRegistersModel"),
    "qwen2_vl_vision": ("qwen2_vl", "Qwen2VisionTransformerPretrainedModel"),
    "qwen2_5_vl_vision": ("qwen2_5_vl", "Qwen2_5_VisionTransformerPretrainedModel"),
    "qwen3_vl_vision": ("qwen3_vl", "Qwen3VLVisionModel"),
}
SUPPORTED = "CLIP, SigLIP, SigLIP2, DINOv2 (with or without registers), and those of Qwen2-VL, Qwen2.5-VL and Qwen3-VL"

Result = TypeVar("Result")
# Prefixes of a tower's weights in the checkpoint of a larger model, in current and older layouts.
TOWER_PREFIXES = {r"^(?:model\.)?(?:vision_tower|visual|vision_model)\.(?:vision_model\.)?": ""}
# Modules after the last block. Features of a block do not depend on them, so a checkpoint may lack them.
AFTER_BLOCKS = ("post_layernorm", "layernorm", "head", "deepstack_merger_list", "pooler")


def load_tower(
    name_or_path: str | os.PathLike[str],
    *,
    block: int | None = None,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype | None = None,
) -> Tower:
    """Load a vision tower by hub name, folder, or the name of an installed model package.

    The checkpoint may also be a complete model with a tower, such as CLIP, LLaVA or Qwen-VL; only its tower is loaded.

    Parameters
    ----------
    name_or_path : str or path
        Hub name such as ``openai/clip-vit-large-patch14-336``, a folder written by ``save_pretrained``, or an installed
        model package such as ``lab``.
    block : int, optional
        Zero-based block whose output is the feature layer; −1 is the input of the first block. The default is the layer
        that the model itself uses, if its config defines one (``vision_feature_layer`` of the LLaVA family), otherwise
        the second-to-last block, as in LLaVA. For Qwen, the number of blocks stands for the merger after them.
    device : str or torch.device
        ``"auto"`` selects a GPU if there is one.
    dtype : str or torch.dtype, optional
        float32 on the CPU by default, elsewhere the dtype of the checkpoint.

    Raises
    ------
    Unreachable, BadFile, TorinoError
        If it cannot be downloaded, if something is missing, or if this kind of tower is not supported.
    """
    library, target = transformers(), resolve_device(device)
    package = model_package(name_or_path)
    if package is not None and package.tower is not None:
        name_or_path, block = package.tower(), package.block if block is None else block
    name = local_name(name_or_path)
    config = fetch(library.AutoConfig.from_pretrained, name, "config.json")
    vision_config = getattr(config, "vision_config", None) or config
    kind = str(type(vision_config).model_type)  # of the class: Qwen's files write the family of the whole model there
    if kind not in TOWERS:
        raise TorinoError(f"{name} ({config.model_type}) has no supported vision tower. Supported: {SUPPORTED}.")
    module, cls = TOWERS[kind]
    load = getattr(import_module(f"transformers.models.{module}.modeling_{module}"), cls).from_pretrained
    processor = fetch(library.AutoImageProcessor.from_pretrained, name, "preprocessor_config.json", backend="pil")
    encoder = _tower_name(config, vision_config, name)
    model, missing = load_partial(
        load, name, config=vision_config, dtype=resolve_dtype(dtype, target), key_mapping=TOWER_PREFIXES
    )
    missing = [key for key in missing if not key.startswith(AFTER_BLOCKS)]
    if missing:
        raise BadFile(
            f"{name} has no weights for {len(missing)} tensors of its vision tower, such as {missing[0]}. "
            "The checkpoint is incomplete, or torino does not support its layout."
        )
    if block is None:
        block = _default_block(config, len(_find_layout(model).blocks))
    return Tower(model.to(target).eval(), processor, block, encoder=encoder)


def load_partial(load: Callable[..., Any], name: str, **options: Any) -> tuple[Any, list[str]]:
    """Load a part of a checkpoint without warnings about its other weights; return the model and missing weights."""
    logger = logging.getLogger("transformers")
    level = logger.level
    try:
        logger.setLevel(logging.ERROR)  # it would list all other weights of the checkpoint as unexpected
        model, info = fetch(load, name, "weights", output_loading_info=True, **options)
    finally:
        logger.setLevel(level)
    return model, sorted(info["missing_keys"])


class Tower:
    """A vision tower and its image processor, read at one feature layer; later blocks never run.

    Towers of Qwen-VL are read before their merger, one token for each patch, in raster order; their keys and queries
    are those before the rotary embedding. ``block=tower.blocks`` selects the output of their merger, whose tokens (2x2
    patches each) are the ones that torino reduces in these models.

    Parameters
    ----------
    model : nn.Module
        A loaded tower, or a loaded model that has one (CLIP, LLaVA, Qwen-VL, …). It is not changed.
    processor : image processor, or a processor that has one
    block : int, optional
        As for :func:`load_tower`. The attribute ``blocks`` is the number of blocks.
    encoder : str, optional
        Name of the encoder in the origin of the tokens; by default the name in the config.
    """

    def __init__(
        self, model: nn.Module, processor: Any, block: int | None = None, *, encoder: str | None = None
    ) -> None:
        check_type("model", model, nn.Module, "a vision tower, or a model that has one")
        if not hasattr(model, "config"):
            raise BadParameter(f"{type(model).__name__} has no config, so it is no tower of transformers.")
        check_processor(processor, optional=True)
        check_type("encoder", encoder, (str, type(None)), "the name of the encoder")
        self.model = _find_tower(model)
        self.processor = getattr(processor, "image_processor", processor)
        parts, config = _find_layout(self.model), cast(Any, model).config
        name = _tower_name(config, self.model.config, config._name_or_path) if encoder is None else encoder
        self._parts = replace(parts, name=name)
        self.blocks = len(parts.blocks)
        last = self.blocks - (not hasattr(self.model, "merger"))
        chosen: Any = _default_block(config, self.blocks) if block is None else block
        if not is_integer(chosen) or not -1 <= chosen <= last:
            given = describe_value(chosen)
            raise BadParameter(f"block must be an integer from -1 to {last} for this tower, got {given}.")
        self.block = int(chosen)
        self.origin = Origin(name, self.block)

    @property
    def width(self) -> int:
        """Width D of a token."""
        config: Any = self.model.config
        if self.block == self.blocks:
            return int(getattr(config, "out_hidden_size", None) or config.hidden_size)
        return int(getattr(config, "embed_dim", None) or config.hidden_size)

    @property
    def has_cls(self) -> bool:
        """Whether the tower has a CLS token, and thus the signals ``cls`` and ``cls_attention``."""
        return self._parts.has_cls

    def __repr__(self) -> str:
        """Return the tower and its feature layer."""
        return f"Tower({type(self.model).__name__} of {self.blocks} blocks, {self.width} wide: {self.origin})"

    @torch.no_grad()
    def encode(
        self,
        images: Picture | Sequence[Picture],
        needs: frozenset[str] = frozenset(),
        *,
        padding: Padding = "crop",
        batch: int = 16,
    ) -> list[VisualTokens]:
        """Return the tokens of each image.

        Parameters
        ----------
        images : path, bytes, PIL image, or a sequence of them
        needs : frozenset of str
            Signals besides the patches: ``cls``, ``cls_attention``, ``keys``, ``queries`` and the others of
            :data:`torino.vlm.hooks.SIGNALS`, with ``@+1`` or ``@8`` for another block than the feature layer's.
        padding : {"crop", "square"}
            See :func:`torino.datasets.images.prepare`.
        batch : int
            Number of images in one forward pass.

        Returns
        -------
        list of VisualTokens
            On the device and in the dtype of the tower.
        """
        check_type("needs", needs, (frozenset, set, list, tuple), "a set of signals such as {'keys'}")
        for name in needs:
            check_type("needs", name, str, "a set of signals such as {'keys'}")
        signals = frozenset(needs)
        return self._run_batches(images, lambda inputs: self.visual_tokens(inputs, signals), padding, batch)

    @torch.no_grad()
    def reduce(
        self,
        images: Picture | Sequence[Picture],
        reducer: Reducer,
        *,
        padding: Padding = "crop",
        batch: int = 16,
    ) -> list[tuple[Tensor, Reduction]]:
        """Return the reduced tokens of each image.

        Parameters
        ----------
        images, padding, batch
            As for :meth:`encode`.
        reducer : Reducer
            A reducer that works inside the tower, such as ``tome-tower``, is active in all blocks up to the feature
            layer.

        Returns
        -------
        list of (Tensor of shape (M, D), Reduction)
            The remaining tokens of each image, and the patches they represent. Tokens that were reduced inside the
            tower differ from the reduction applied to its output: see :mod:`torino.reducers.in_tower`.
        """
        check_type("reducer", reducer, Reducer, "a Reducer, such as torino.make('torino-m', sae=...)")
        in_tower = as_in_tower(reducer)

        def reduce(inputs: Mapping[str, Tensor]) -> list[tuple[Tensor, Reduction]]:
            if in_tower is not None:
                return self._reduce_in_tower(inputs, in_tower)
            tokens = self.visual_tokens(inputs, reducer.needs)
            plans = reducer.plan_batch(tokens)
            return [(plan.apply(image.patches, image.cls), plan) for image, plan in zip(tokens, plans, strict=True)]

        return self._run_batches(images, reduce, padding, batch)

    def process(self, images: Sequence[Any]) -> Iterator[dict[str, Tensor]]:
        """Yield tower inputs for prepared images; consecutive images of equal shape share one batch, Qwen's always."""
        weight = next(self.model.parameters())
        group: list[dict[str, Tensor]] = []
        for image in images:
            inputs: dict[str, Tensor] = {
                key: value.to(weight if value.is_floating_point() else weight.device)
                for key, value in self.processor(images=[image], return_tensors="pt").items()
                if isinstance(value, Tensor)
            }
            fits = "image_grid_thw" in inputs or not group
            if not fits and group[0]["pixel_values"].shape != inputs["pixel_values"].shape:
                yield {key: torch.cat([item[key] for item in group]) for key in group[0]}
                group = []
            group.append(inputs)
        yield {key: torch.cat([item[key] for item in group]) for key in group[0]}

    @torch.no_grad()
    def visual_tokens(self, inputs: Mapping[str, Tensor], needs: frozenset[str] = frozenset()) -> list[VisualTokens]:
        """Return the tokens for inputs from :meth:`process`; together they do what :meth:`encode` does."""
        if not isinstance(inputs, Mapping) or not isinstance(inputs.get("pixel_values"), Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise BadParameter(
                f"inputs must be those of Tower.process, with pixel_values, got {describe_value(inputs)}."
            )
        check_tensor("pixel_values", inputs["pixel_values"], BadParameter)
        if "image_grid_thw" in inputs:
            return self._encode_packed(inputs["pixel_values"], inputs["image_grid_thw"], needs)
        pixels, shapes = inputs["pixel_values"], inputs.get("spatial_shapes")
        extra = {key: value for key, value in inputs.items() if key in ("spatial_shapes", "pixel_attention_mask")}
        if shapes is None:
            grids = [self._grid(pixels)] * len(pixels)
        else:  # SigLIP2 takes images of any shape: patches in raster order, then padding
            grids = [(int(rows), int(columns)) for rows, columns in shapes.tolist()]
        captured = capture(self.model, self._parts, self.block, needs, lambda: self.model(pixels, **extra))
        return [self._make_tokens(captured, i, grid) for i, grid in enumerate(grids)]

    def _run_batches(
        self,
        images: Picture | Sequence[Picture],
        run: Callable[[Mapping[str, Tensor]], list[Result]],
        padding: Padding,
        batch: int,
    ) -> list[Result]:
        """Open and process images, and run a function on batches of them."""
        if (batch := to_integer("batch", batch)) < 1:
            raise BadParameter(f"batch must be at least 1, got {batch}.")
        is_empty = isinstance(images, list | tuple) and not images
        sources: list[Picture] = []
        for source in [] if is_empty else to_pictures(images):
            if isinstance(source, Video):
                raise BadParameter("A tower reads images, got a video. Give its frames: video.frames.")
            sources.append(source)
        color = mean_color(self.processor)
        results: list[Result] = []
        for start in range(0, len(sources), batch):
            prepared = [prepare(open_image(source), padding, color) for source in sources[start : start + batch]]
            try:
                for inputs in self.process(prepared):
                    results.extend(run(inputs))
            except ValueError as error:  # TorinoError is one too; other errors concern sizes the tower does not take
                if isinstance(error, TorinoError):
                    raise
                raise TorinoError(f"{type(self.model).__name__} refused an image: {error}") from error
        return results

    def _grid(self, pixels: Tensor) -> tuple[int, int]:
        if pixels.ndim != 4:
            raise BadParameter(f"pixel_values must have shape (images, 3, height, width), got {tuple(pixels.shape)}.")
        size = cast(Any, self.model.config).patch_size
        height, width = cast(Sequence[int], size) if isinstance(size, list | tuple) else (size, size)
        return (pixels.shape[-2] // height, pixels.shape[-1] // width)

    def _reduce_in_tower(self, inputs: Mapping[str, Tensor], reducer: InTowerReducer) -> list[tuple[Tensor, Reduction]]:
        if "image_grid_thw" in inputs or "spatial_shapes" in inputs:
            raise TorinoError(
                f"{reducer.spec} runs inside the vision tower, block by block, and {type(self.model).__name__} takes "
                "images of different shapes in one batch, which cannot all lose the same number of tokens. Choose a "
                "reducer that works on the tower's output, such as tome or gtp."
            )
        pixels = inputs["pixel_values"]
        grid = self._grid(pixels)
        output = run_in_tower(self.model, self._parts, self.block, reducer, grid, lambda: self.model(pixels))
        return list(zip(output.states[:, self._parts.prefix :], output.plans, strict=True))

    def _encode_packed(self, pixels: Tensor, grids: Tensor, needs: frozenset[str]) -> list[VisualTokens]:
        """Encode images with Qwen's towers: all in one sequence, in window order, with fused projections."""
        check_grids(grids, pixels, int(cast(Any, self.model).spatial_merge_size))
        sizes, shapes = grids.prod(1).tolist(), [(rows, columns) for _, rows, columns in grids.tolist()]
        if self.block == self.blocks:
            if needs:
                raise TorinoError(
                    f"The output of the merger has no {', '.join(sorted(needs))}. Choose a block before the merger."
                )
            merge = int(cast(Any, self.model).spatial_merge_size)
            merged = self.model(pixels, grid_thw=grids).pooler_output.split([size // merge**2 for size in sizes])
            merged_shapes = [(rows // merge, columns // merge) for rows, columns in shapes]
            return [
                self._make_tokens(CapturedFeatures(features[None], {}), 0, shape)
                for features, shape in zip(merged, merged_shapes, strict=True)
            ]
        missing = sorted(need for need in needs if not need.startswith(("keys", "queries", "cls")))
        if missing:  # signals of a CLS token are refused by capture
            raise MissingSignal(f"Qwen's tower has no {missing[0]}. Use keys or queries, of any block.")
        captured = capture(self.model, self._parts, self.block, needs, lambda: self.model(pixels, grid_thw=grids))
        order = _raster_order(self.model, grids)
        states = captured.states[order].split(sizes)
        parts = {name: values.chunk(3, -1)[not name.startswith("queries")] for name, values in captured.signals.items()}
        signals = {name: values[order].split(sizes) for name, values in parts.items()}
        return [
            self._make_tokens(
                CapturedFeatures(image[None], {name: values[i][None] for name, values in signals.items()}), 0, shapes[i]
            )
            for i, image in enumerate(states)
        ]

    def _make_tokens(self, captured: CapturedFeatures, image: int, grid: tuple[int, int]) -> VisualTokens:
        prefix, count, states = self._parts.prefix, grid[0] * grid[1], captured.states[image]
        signals = {
            name: _drop_padding(values[image], name.partition("@")[0], count)
            for name, values in captured.signals.items()
        }
        return VisualTokens(
            patches=states[prefix : prefix + count],
            grid=grid,
            origin=self.origin,
            cls=states[0] if self.has_cls else None,
            cls_attention=signals.pop("cls_attention", None),
            keys=signals.pop("keys", None),
            signals=signals,
        )


def _drop_padding(values: Tensor, kind: str, count: int) -> Tensor:
    """Crop a signal to the first ``count`` patches, which precede the padding."""
    if kind == "attention":
        return values[:, :count, :count]
    return values[..., :count] if kind == "cls_attention" else values[:count]


def _find_tower(model: nn.Module) -> nn.Module:
    """Return the tower of a model, or the model itself if it is a tower."""
    for path in ("model.vision_tower", "vision_tower", "model.visual", "visual", "vision_model"):
        with suppress(AttributeError):
            inner = model.get_submodule(path)
            if hasattr(inner, "config"):
                return inner
    return model


def _find_layout(tower: nn.Module) -> TowerLayout:
    config: Any = tower.config
    if not str(type(config).model_type).startswith("qwen"):
        return tower_layout(tower)
    fused: Callable[[nn.Module], nn.Module] = lambda block: block.get_submodule("attn.qkv")  # noqa: E731
    return TowerLayout(cast(nn.ModuleList, tower.blocks), 0, False, int(config.num_heads), fused, fused, "")


def _tower_name(config: Any, vision_config: Any, name: str) -> str:
    """Return the name of a tower; a tower from another model, such as LLaVA's CLIP, is not named after its model."""
    is_own = vision_config is config or str(type(vision_config).model_type).startswith(str(config.model_type))
    return encoder_name(getattr(vision_config, "_name_or_path", "") or (name if is_own else ""))


def _default_block(config: Any, blocks: int) -> int:
    """Return the block whose output the model itself uses, or the second-to-last block."""
    layer = getattr(config, "vision_feature_layer", None)
    if layer is None:
        return max(blocks - 2, 0)
    if not isinstance(layer, int):
        raise TorinoError(f"This model reads several tower layers at once ({layer}). Select one with block=...")
    return layer % (blocks + 1) - 1  # hidden state 0 is the input of block 0


def _raster_order(tower: nn.Module, grids: Tensor) -> Tensor:
    """Return the index of each patch in Qwen's packed sequence, image by image in raster order."""
    inner = cast(Any, tower)
    merge = int(inner.spatial_merge_size)
    windows, start = list[Tensor](), 0
    for _, rows, columns in grids.tolist():
        raster = start + torch.arange(rows * columns).view(rows // merge, merge, columns // merge, merge)
        windows.append(raster.transpose(1, 2).reshape(-1, merge * merge))  # the patches of each merge window
        start += rows * columns
    patches = torch.cat(windows).to(grids.device)
    if hasattr(inner, "window_size"):  # Qwen2.5-VL sorts merge windows by larger attention windows
        from transformers.vision_utils import get_vision_window_index

        order = get_vision_window_index(grids, merge, inner.window_size, inner.patch_size)[0]
        patches = patches[order.to(patches.device)]
    return patches.flatten().argsort()
