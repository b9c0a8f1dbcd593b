"""Towers: visual tokens from images alone, with no language model, for SAE training and for looking around.

The last part, opening things of transformers by name, also serves :mod:`torino.vlm.session`.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from torino.core.errors import BadFile, BadParameter, MissingSignal, TorinoError, Unreachable
from torino.core.reduction import Reduction
from torino.core.tokens import Origin, VisualTokens
from torino.datasets.images import Padding, Picture, mean_colour, open_image, prepare
from torino.reducers import InTowerReducer, Reducer, as_in_tower
from torino.vlm.hooks import CapturedFeatures, TowerLayout, tap, tower_layout
from torino.vlm.in_tower import run_in_tower

# The towers that can be tapped: model_type of their config, then module and class in transformers.
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
KNOWN = "CLIP, SigLIP, SigLIP2, DINOv2 (with or without registers), and those of Qwen2-VL, Qwen2.5-VL and Qwen3-VL"

Seen = TypeVar("Seen")
# Where the checkpoint of a larger model keeps its tower, today and in older layouts.
INSIDE = {r"^(?:model\.)?(?:vision_tower|visual|vision_model)\.(?:vision_model\.)?": ""}
# What comes after the last block: no tap of a block reads it, so a checkpoint may lack it.
AFTER = ("post_layernorm", "layernorm", "head", "deepstack_merger_list", "pooler")


def load_tower(
    name_or_path: str | os.PathLike[str],
    *,
    block: int | None = None,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype | None = None,
) -> Tower:
    """Open a vision tower by its hub name or the folder of its checkpoint.

    Also takes a whole model, such as CLIP with its text half, LLaVA or Qwen-VL, and loads its tower alone.

    Parameters
    ----------
    name_or_path : str or path
        ``openai/clip-vit-large-patch14-336``, or a folder written by ``save_pretrained``.
    block : int, optional
        Zero-based block whose output is tapped; −1 is what enters the first block. By default what the model itself
        hands on where its config tells (``vision_feature_layer`` of the LLaVA family), and otherwise the last block
        but one, which is LLaVA's choice. For Qwen the number of blocks stands for the merger behind them.
    device : str or torch.device
        ``"auto"`` takes a GPU where there is one.
    dtype : str or torch.dtype, optional
        By default float32 on the CPU, and what the checkpoint holds elsewhere.

    Raises
    ------
    Unreachable, BadFile, TorinoError
        If the hub does not give it, if something is missing in it, or if torino cannot tap this kind of tower.
    """
    library, name, device = transformers(), local_name(name_or_path), device_of(device)
    config = fetch(library.AutoConfig.from_pretrained, name, "config.json")
    inner = getattr(config, "vision_config", None) or config
    kind = str(type(inner).model_type)  # that of the class: the files of Qwen write the whole family there
    if kind not in TOWERS:
        raise TorinoError(f"{name} ({config.model_type}) has no vision tower that torino can tap. Known: {KNOWN}.")
    module, cls = TOWERS[kind]
    load = getattr(import_module(f"transformers.models.{module}.modeling_{module}"), cls).from_pretrained
    processor = fetch(library.AutoImageProcessor.from_pretrained, name, "preprocessor_config.json")
    encoder = _called(config, inner, name)
    options = {"config": inner, "dtype": dtype_of(dtype, device), "key_mapping": INSIDE, "output_loading_info": True}
    talk = logging.getLogger("transformers")
    level = talk.level
    try:
        talk.setLevel(logging.ERROR)  # it would list all of the language model as unexpected
        model, told = fetch(load, name, "weights", **options)
    finally:
        talk.setLevel(level)
    lacking = sorted(key for key in told["missing_keys"] if not key.startswith(AFTER))
    if lacking:
        raise BadFile(
            f"{name} holds no weights for {len(lacking)} parts of its vision tower, such as {lacking[0]}. "
            "The checkpoint is incomplete or in a layout that torino does not know."
        )
    if block is None:
        block = _handed_on(config, len(_tower_layout(model).blocks))
    return Tower(model.to(device).eval(), processor, block, encoder=encoder)


class Tower:
    """A vision tower and its image processor, tapped after one block; what is behind the tap never runs.

    The towers of Qwen-VL are tapped patch by patch before their merger, in raster order; their keys and queries are
    those before the rotary embedding. ``block=tower.blocks`` taps their merger, whose tokens (2x2 patches each) are
    what torino reduces in these models.

    Parameters
    ----------
    model : nn.Module
        A loaded tower, or a loaded model that has one (CLIP, LLaVA, Qwen-VL, …), which is left as it is.
    processor : image processor, or a processor that has one
    block : int, optional
        As for :func:`load_tower`; it stays in the attribute ``block``, beside ``blocks``, how many there are.
    encoder : str, optional
        The name written into the origin of the tokens; by default the one in the config.
    """

    def __init__(
        self, model: nn.Module, processor: Any, block: int | None = None, *, encoder: str | None = None
    ) -> None:
        self.model = _tower_in(model)
        self.processor = getattr(processor, "image_processor", processor)
        parts, config = _tower_layout(self.model), cast(Any, model).config
        name = _called(config, self.model.config, config._name_or_path) if encoder is None else encoder
        self._parts = replace(parts, name=name)
        self.blocks = len(parts.blocks)
        self.block: Any = _handed_on(config, self.blocks) if block is None else block
        last = self.blocks - (not hasattr(self.model, "merger"))
        if isinstance(self.block, bool) or not isinstance(self.block, int) or not -1 <= self.block <= last:
            raise BadParameter(f"block must be a whole number from -1 to {last} for this tower, got {self.block!r}.")
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
        """Whether there is a CLS token, and with it ``cls`` and ``cls_attention``."""
        return self._parts.has_cls

    def __repr__(self) -> str:
        """Tell what is tapped where."""
        return f"Tower({type(self.model).__name__} of {self.blocks} blocks, {self.width} wide: {self.origin})"

    @torch.no_grad()
    def look(
        self,
        images: Picture | Sequence[Picture],
        needs: frozenset[str] = frozenset(),
        *,
        padding: Padding = "crop",
        batch: int = 16,
    ) -> list[VisualTokens]:
        """Look at images and return the tokens of each.

        Parameters
        ----------
        images : path, bytes, PIL image, or a sequence of them
        needs : frozenset of str
            Signals beyond the patches, as a reducer names them: ``cls``, ``cls_attention``, ``keys``, ``queries``, with
            ``@+1`` or ``@8`` for another block than the tap.
        padding : {"crop", "square"}
            See :func:`torino.datasets.images.prepare`.
        batch : int
            Images that go through the tower at once.

        Returns
        -------
        list of VisualTokens
            On the device and in the dtype of the tower.
        """
        return self._each(images, lambda inputs: self.see(inputs, needs), padding, batch)

    @torch.no_grad()
    def reduce(
        self,
        images: Picture | Sequence[Picture],
        reducer: Reducer,
        *,
        padding: Padding = "crop",
        batch: int = 16,
    ) -> list[tuple[Tensor, Reduction]]:
        """Look at images and reduce their tokens, at the tap or, with ``tome-tower`` and the like, on the way to it.

        Parameters
        ----------
        images, padding, batch
            As for :meth:`look`.
        reducer : Reducer
            One that works inside the tower does so in all blocks up to and including the tap.

        Returns
        -------
        list of (Tensor of shape (M, D), Reduction)
            The tokens that are left of each image, and what they are made of. Tokens that were reduced inside the
            tower are not what the reduction would make of its finished tokens: see :mod:`torino.reducers.in_tower`.
        """
        inside = as_in_tower(reducer)

        def see(inputs: Mapping[str, Tensor]) -> list[tuple[Tensor, Reduction]]:
            if inside is not None:
                return self._see_inside(inputs, inside)
            tokens = self.see(inputs, reducer.needs)
            plans = reducer.plan_batch(tokens)
            return [(plan.apply(image.patches, image.cls), plan) for image, plan in zip(tokens, plans, strict=True)]

        return self._each(images, see, padding, batch)

    def _each(
        self,
        images: Picture | Sequence[Picture],
        see: Callable[[Mapping[str, Tensor]], list[Seen]],
        padding: Padding,
        batch: int,
    ) -> list[Seen]:
        """Open images, process them, and see them in batches."""
        if batch < 1:
            raise BadParameter(f"batch must be at least 1, got {batch}.")
        single = isinstance(images, str | bytes) or not isinstance(images, Sequence)
        sources = cast(Sequence[Picture], [images] if single else images)
        seen: list[Seen] = []
        for start in range(0, len(sources), batch):
            pictures = [open_image(source) for source in sources[start : start + batch]]
            pictures = [prepare(picture, padding, mean_colour(self.processor)) for picture in pictures]
            try:
                for inputs in self.process(pictures):
                    seen.extend(see(inputs))
            except ValueError as error:  # TorinoError is one too; others are sizes that a tower was not made for
                if isinstance(error, TorinoError):
                    raise
                raise TorinoError(f"{type(self.model).__name__} refused an image: {error}") from error
        return seen

    def process(self, pictures: Sequence[Any]) -> Iterator[dict[str, Tensor]]:
        """Inputs of the tower for prepared images; neighbours of one shape, or laid end to end, go together."""
        weight = next(self.model.parameters())
        run: list[dict[str, Tensor]] = []
        for picture in pictures:
            inputs: dict[str, Tensor] = {
                key: value.to(weight if value.is_floating_point() else weight.device)
                for key, value in self.processor(images=[picture], return_tensors="pt").items()
                if isinstance(value, Tensor)
            }
            fits = "image_grid_thw" in inputs or not run
            if not fits and run[0]["pixel_values"].shape != inputs["pixel_values"].shape:
                yield {key: torch.cat([each[key] for each in run]) for key in run[0]}
                run = []
            run.append(inputs)
        yield {key: torch.cat([each[key] for each in run]) for key in run[0]}

    @torch.no_grad()
    def see(self, inputs: Mapping[str, Tensor], needs: frozenset[str] = frozenset()) -> list[VisualTokens]:
        """Run the tower on what :meth:`process` gave: the second half of :meth:`look`, for those who decode ahead."""
        if "image_grid_thw" in inputs:
            return self._see_packed(inputs["pixel_values"], inputs["image_grid_thw"], needs)
        pixels, shapes = inputs["pixel_values"], inputs.get("spatial_shapes")
        extra = {key: value for key, value in inputs.items() if key in ("spatial_shapes", "pixel_attention_mask")}
        if shapes is None:
            grids = [self._grid(pixels)] * len(pixels)
        else:  # SigLIP2 of any shape: patches in raster order, then padding
            grids = [(int(rows), int(columns)) for rows, columns in shapes.tolist()]
        seen = tap(self.model, self._parts, self.block, needs, lambda: self.model(pixels, **extra))
        return [self._tokens(seen, i, grid) for i, grid in enumerate(grids)]

    def _grid(self, pixels: Tensor) -> tuple[int, int]:
        side = cast(Any, self.model.config).patch_size
        down, across = cast(Sequence[int], side) if isinstance(side, list | tuple) else (side, side)
        return (pixels.shape[-2] // down, pixels.shape[-1] // across)

    def _see_inside(self, inputs: Mapping[str, Tensor], reducer: InTowerReducer) -> list[tuple[Tensor, Reduction]]:
        if "image_grid_thw" in inputs or "spatial_shapes" in inputs:
            raise TorinoError(
                f"{reducer.spec} works inside the vision tower, block by block, and {type(self.model).__name__} takes "
                "images of many shapes together, padded or packed, which cannot all lose the same number of tokens. "
                "Choose a reducer that works at the tap, such as tome or gtp."
            )
        pixels = inputs["pixel_values"]
        grid = self._grid(pixels)
        passed = run_in_tower(self.model, self._parts, self.block, reducer, grid, lambda: self.model(pixels))
        return list(zip(passed.states[:, self._parts.prefix :], passed.plans, strict=True))

    def _see_packed(self, pixels: Tensor, grids: Tensor, needs: frozenset[str]) -> list[VisualTokens]:
        """Qwen: all images in one sequence, ordered by windows, with one projection for queries, keys and values."""
        sizes, shapes = grids.prod(1).tolist(), [(rows, columns) for _, rows, columns in grids.tolist()]
        if self.block == self.blocks:
            if needs:
                raise TorinoError(f"Behind the merger there is no {', '.join(needs)}. Tap a block before it.")
            merge = int(cast(Any, self.model).spatial_merge_size)
            parts = self.model(pixels, grid_thw=grids).pooler_output.split([size // merge**2 for size in sizes])
            shapes = [(rows // merge, columns // merge) for rows, columns in shapes]
            return [
                self._tokens(CapturedFeatures(part[None], {}), 0, at) for part, at in zip(parts, shapes, strict=True)
            ]
        odd = sorted(need for need in needs if not need.startswith(("keys", "queries", "cls")))
        if odd:  # and of what a CLS token would give, the tap says that there is none
            raise MissingSignal(f"Qwen's tower has no {odd[0]}. It gives keys and queries, of any block.")
        seen = tap(self.model, self._parts, self.block, needs, lambda: self.model(pixels, grid_thw=grids))
        order = _raster(self.model, grids)
        states = seen.states[order].split(sizes)
        third = {name: values.chunk(3, -1)[not name.startswith("queries")] for name, values in seen.signals.items()}
        signals = {name: values[order].split(sizes) for name, values in third.items()}
        return [
            self._tokens(
                CapturedFeatures(part[None], {name: values[i][None] for name, values in signals.items()}), 0, shapes[i]
            )
            for i, part in enumerate(states)
        ]

    def _tokens(self, seen: CapturedFeatures, image: int, grid: tuple[int, int]) -> VisualTokens:
        prefix, count, states = self._parts.prefix, grid[0] * grid[1], seen.states[image]
        signals = {
            name: _first_patches(values[image], name.partition("@")[0], count) for name, values in seen.signals.items()
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


def _first_patches(values: Tensor, kind: str, count: int) -> Tensor:
    """Cut a signal to the patches of one image, which may stand before padding."""
    if kind == "attention":
        return values[:, :count, :count]
    return values[..., :count] if kind == "cls_attention" else values[:count]


# ------------------------------------------------------------------ inside a model


def _tower_in(model: nn.Module) -> nn.Module:
    """The tower of a model, or the model itself if it is one."""
    for path in ("model.vision_tower", "vision_tower", "model.visual", "visual", "vision_model"):
        with suppress(AttributeError):
            inner = model.get_submodule(path)
            if hasattr(inner, "config"):
                return inner
    return model


def _tower_layout(tower: nn.Module) -> TowerLayout:
    config: Any = tower.config
    if not str(type(config).model_type).startswith("qwen"):
        return tower_layout(tower)
    fused: Callable[[nn.Module], nn.Module] = lambda block: block.get_submodule("attn.qkv")  # noqa: E731
    return TowerLayout(cast(nn.ModuleList, tower.blocks), 0, False, int(config.num_heads), fused, fused, "")


def _called(config: Any, inner: Any, name: str) -> str:
    """The name of a tower. One that came from elsewhere, such as LLaVA's CLIP, is not called like its model."""
    own = inner is config or str(type(inner).model_type).startswith(str(config.model_type))
    return encoder_name(getattr(inner, "_name_or_path", "") or (name if own else ""))


def _handed_on(config: Any, blocks: int) -> int:
    """The block whose output a model hands on, or LLaVA's choice."""
    layer = getattr(config, "vision_feature_layer", None)
    if layer is None:
        return max(blocks - 2, 0)
    if not isinstance(layer, int):
        raise TorinoError(f"This model reads several tower layers at once ({layer}). Say which one to tap: block=...")
    return layer % (blocks + 1) - 1  # hidden state 0 enters block 0


def _raster(tower: nn.Module, grids: Tensor) -> Tensor:
    """Where in a packed sequence of Qwen each patch is, image after image in raster order."""
    inner = cast(Any, tower)
    merge = int(inner.spatial_merge_size)
    patch, start = list[Tensor](), 0
    for _, rows, columns in grids.tolist():
        raster = start + torch.arange(rows * columns).view(rows // merge, merge, columns // merge, merge)
        patch.append(raster.transpose(1, 2).reshape(-1, merge * merge))  # the patches of each merge window
        start += rows * columns
    at = torch.cat(patch).to(grids.device)
    if hasattr(inner, "window_size"):  # Qwen2.5-VL sorts merge windows by larger windows of attention
        from transformers.vision_utils import get_vision_window_index

        at = at[get_vision_window_index(grids, merge, inner.window_size, inner.patch_size)[0].to(at.device)]
    return at.flatten().argsort()


# ------------------------------------------------------------------ opening by name


def transformers() -> Any:
    """The library, or a sentence where it is missing."""
    try:
        return import_module("transformers")
    except ImportError as error:
        raise TorinoError('Opening models needs transformers: pip install "torino[vlm]".') from error


def local_name(name_or_path: str | os.PathLike[str]) -> str:
    """A name for ``from_pretrained``: a folder that exists, or something that may be on the hub."""
    text = os.fspath(name_or_path)
    path = Path(text).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise BadFile(f"{text} has no config.json. Give a folder written by save_pretrained, or a hub name.")
        return str(path)
    if path.exists() or not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", text):
        raise BadFile(f"There is no folder {text!r}, and it does not read as a hub name (owner/repository) either.")
    return text


def encoder_name(text: str) -> str:
    """What to call an encoder in the origin of its tokens: its hub name, or the last part of a path."""
    cached = re.search(r"models--(.+?)--([^/\\]+)[/\\]snapshots", text)
    if cached:
        return f"{cached[1]}/{cached[2]}"
    return Path(text).absolute().name if text and Path(text).is_dir() else text


def device_of(device: str | torch.device) -> torch.device:
    """A device that this machine has; ``"auto"`` is a GPU where there is one."""
    try:
        chosen = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    except RuntimeError as error:
        raise BadParameter(f"device must be auto, cpu, cuda, cuda:1, mps or the like, got {device!r}.") from error
    there = {"cuda": torch.cuda.is_available, "mps": torch.backends.mps.is_available}
    if chosen.type in there and not there[chosen.type]():
        raise BadParameter(f"This machine has no {chosen.type} device that torch can use. Choose cpu.")
    return chosen


def dtype_of(dtype: str | torch.dtype | None, device: torch.device) -> torch.dtype | str:
    """The dtype to load in; by default float32 on the CPU, where half precision is slow, else the checkpoint's own."""
    if dtype is None:
        return torch.float32 if device.type == "cpu" else "auto"
    floats = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    found = dtype if dtype == "auto" or dtype in floats.values() else floats.get(str(dtype))
    if found is None:
        raise BadParameter(f"dtype must be float32, bfloat16, float16 or auto, got {dtype!r}.")
    return found


def fetch(load: Callable[..., Any], name: str, what: str, **options: Any) -> Any:
    """Call a ``from_pretrained``, and say in a sentence why it failed."""
    try:
        return load(name, **options)
    except Exception as error:  # transformers and the hub client raise what the libraries below them raise
        raise _reason(error, name, what) from error


def _reason(error: Exception, name: str, what: str) -> TorinoError:
    from huggingface_hub import errors as hub

    chain: list[BaseException] = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(cause)
    if any(isinstance(link, hub.GatedRepoError) for link in chain):
        return Unreachable(f"{name} is gated: accept its terms at https://huggingface.co/{name}, then 'hf auth login'.")
    if any(isinstance(link, hub.RepositoryNotFoundError) for link in chain):
        return Unreachable(f"The hub has no model {name}, or it is private: check the name, or 'hf auth login'.")
    away = (hub.LocalEntryNotFoundError, hub.OfflineModeIsEnabled, ConnectionError)
    if any(isinstance(link, away) for link in chain) and not Path(name).is_dir():
        return Unreachable(
            f"The hub could not be reached, or is switched off (HF_HUB_OFFLINE), and {name} is neither cached nor a "
            "local folder. Check the connection, or give the path of a downloaded folder."
        )
    text = " ".join((str(error).strip() or type(error).__name__).split())
    return BadFile(f"{name} could not be opened: its {what} gave: {text if len(text) < 300 else text[:300] + '…'}")
