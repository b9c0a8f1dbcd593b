"""The vision half of a vision-language model: tower, reducer and projector, without the language model."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from torino.core.device import resolve_device, resolve_dtype
from torino.core.errors import BadFile, BadTokens, TorinoError
from torino.core.reduction import Reduction, ReductionBatch
from torino.reducers import Reducer
from torino.vlm.adapters.base import Adapter, adapter_for, token_sizes
from torino.vlm.loading import fetch, local_name, model_package, transformers
from torino.vlm.towers import load_partial

# The class without a language-model head of each family: module in transformers.models, and name.
BASE_CLASSES = {
    "llava": ("llava.modeling_llava", "LlavaModel"),
    "llava_next": ("llava_next.modeling_llava_next", "LlavaNextModel"),
    "qwen2_vl": ("qwen2_vl.modeling_qwen2_vl", "Qwen2VLModel"),
    "qwen2_5_vl": ("qwen2_5_vl.modeling_qwen2_5_vl", "Qwen2_5_VLModel"),
}


@dataclass(frozen=True, eq=False)
class ServedImage:
    """The tokens of one image, ready for the language model.

    Attributes
    ----------
    features : Tensor of shape (n, E)
        Tokens in the input space of the language model.
    slots : Tensor of shape (n,), int64
        The placeholder of the image, counted from 0, that each token replaces.
    sizes : Tensor of shape (n,), int64
        Number of patches that each token represents.
    full : int
        Placeholders of the image in the full prompt.
    """

    features: Tensor
    slots: Tensor
    sizes: Tensor
    full: int

    def __post_init__(self) -> None:
        """Refuse tokens that would crash or confuse an engine: none, not finite, or out of range."""
        count = len(self.features)
        if self.features.ndim != 2 or not count:
            raise BadTokens(f"An image needs at least one token, got features of shape {tuple(self.features.shape)}.")
        if not bool(torch.isfinite(self.features).all()):
            raise BadTokens("The tokens of an image are not finite. Check the weights of tower and projector.")
        for name, values, low, high in (("slots", self.slots, 0, self.full - 1), ("sizes", self.sizes, 1, self.full)):
            if values.shape != (count,) or values.is_floating_point():
                raise BadTokens(f"{name} must be {count} integers, got {values.dtype} of shape {tuple(values.shape)}.")
            if not low <= int(values.min()) <= int(values.max()) <= high:
                raise BadTokens(f"{name} must be from {low} to {high}, got {int(values.min())} to {int(values.max())}.")


class VisionHalf:
    """Turn pixels into reduced and projected tokens, with the adapter that :class:`torino.vlm.VLM` uses.

    Parameters
    ----------
    model : nn.Module
        A supported model; its language model may be missing.
    reducer : Reducer, optional
        None keeps all tokens.
    """

    def __init__(self, model: nn.Module, reducer: Reducer | None) -> None:
        self.adapter: Adapter = adapter_for(model)
        self.reducer = reducer
        self._lock = threading.Lock()  # memory for one call at a time; the tower uses all threads anyway

    @torch.no_grad()
    def __call__(self, inputs: Mapping[str, Any]) -> list[ServedImage]:
        """Reduce the images of some processor outputs (``pixel_values``, and whatever the family adds)."""
        adapter, reducer = self.adapter, self.reducer
        with self._lock:
            weight = next(p for p in adapter.model.parameters() if p.is_floating_point())
            given = {
                name: value.to(weight.device) if isinstance(value, Tensor) else value for name, value in inputs.items()
            }
            plans: ReductionBatch | None = None
            if reducer is None:
                encoded = adapter.encode(given, frozenset())
                plans = ReductionBatch.of([Reduction.identity(**unit.layout) for unit in encoded.tokens])
            else:
                encoded, plans = adapter.encode_for(given, reducer)
                if plans is None:
                    plans = adapter.plan(reducer, encoded)
                else:
                    adapter.check_plans(reducer, plans)
            embeds = adapter.embed(encoded, plans)
        sizes, _ = token_sizes(embeds, plans)
        return [
            ServedImage(item.features, item.slots.cpu(), size.clamp(min=1), full)
            for item, size, full in zip(embeds, sizes, encoded.full, strict=True)
        ]


def load_vision_half(
    name_or_path: str,
    reducer: Reducer | None,
    *,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype | None = None,
    revision: str | None = None,
) -> VisionHalf:
    """Load tower and projector of a model, without its language model.

    Parameters
    ----------
    name_or_path : str
        Hub name, folder, or installed model package, as for :func:`torino.vlm.load_vlm`.
    reducer : Reducer, optional
    device : str or torch.device
    dtype : str or torch.dtype, optional
        float32 on the CPU by default, elsewhere the dtype of the checkpoint.
    revision : str, optional
        Revision of a model of the hub.

    Raises
    ------
    Unreachable, BadFile, TorinoError
        If the model cannot be loaded, or its family is not supported here.
    """
    library, target = transformers(), resolve_device(device)
    package = model_package(name_or_path)
    name = local_name(name_or_path if package is None else package.folder())
    options = {} if revision is None else {"revision": revision}
    config = fetch(library.AutoConfig.from_pretrained, name, "config.json", **options)
    family = str(config.model_type)
    if family not in BASE_CLASSES:
        raise TorinoError(
            f"The vision half of {family} models cannot be loaded alone. Supported: {', '.join(BASE_CLASSES)}."
        )
    module, class_name = BASE_CLASSES[family]
    base = getattr(import_module(f"transformers.models.{module}"), class_name)
    model, missing = load_partial(
        without_language_model(base).from_pretrained, name, dtype=resolve_dtype(dtype, target), **options
    )
    if missing:
        raise BadFile(
            f"{name} has no weights for {len(missing)} tensors of its vision half, such as {missing[0]}. The "
            "checkpoint is incomplete: download it again."
        )
    return VisionHalf(model.to(target).eval(), reducer)


def without_language_model(base: Any) -> Any:
    """Return a subclass of a model class whose objects have no language model, so that its weights are not read."""

    def initialize(self: Any, config: Any) -> None:
        base.__init__(self, config)
        self.language_model = None

    return type(base.__name__, (base,), {"__init__": initialize, "__module__": base.__module__})
