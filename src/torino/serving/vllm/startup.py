"""What the plug-in decides and refuses before a server starts."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, cast

from torch import nn

from torino.core.errors import BadParameter, TorinoError
from torino.reducers import KeepShare, PositionMode, Reducer
from torino.serving.settings import check_servable
from torino.serving.vllm.names import ARCHITECTURES
from torino.serving.vllm.settings import PluginSettings
from torino.vlm.adapters.base import adapter_for, families, position_choice, position_mode
from torino.vlm.attention import uses_proportional

TOWERS = {
    "llava": ("clip_vision_model", "siglip_vision_model", "dinov2", "dinov2_with_registers"),
    "llava_next": ("clip_vision_model", "siglip_vision_model"),
}
VERSIONS = ("0.32.",)
"""Releases of vLLM that the plug-in was tested with; vLLM's internals change with every minor release."""
PROPORTIONAL_TEXT = ("llama",)
"""Language models whose attention vLLM builds from LlamaAttention."""
REFUSED = {
    "gemma3": "its visual tokens attend to each other in both directions, which vLLM derives from whole images",
    "idefics3": "its prompt has markers for the rows and columns of tiles, which vLLM writes for complete tiles",
    "internvl": "vLLM prepares its images with code of its own, so pixels differ from those of torino",
    "llava_next_video": "vLLM reads only videos with it, and the plug-in reduces images",
    "llava_onevision": "vLLM counts its tokens with a rule of its own for images over the tile limit",
    "paligemma": "its visual tokens attend to each other in both directions, which vLLM derives from whole images",
    "qwen3_vl": "it adds visual features in several layers of its language model (deepstack)",
    "smolvlm": "its prompt has markers for the rows and columns of tiles, which vLLM writes for complete tiles",
}
"""Why families that torino supports in transformers are refused in vLLM."""


@dataclass(frozen=True)
class Resolved:
    """What follows from the settings of a server and its model.

    Attributes
    ----------
    positions : {"compact", "original"}
    proportional : bool
        Whether attention is proportional.
    salt : str
        Part of the identity of images in vLLM's caches.
    """

    positions: PositionMode
    proportional: bool
    salt: str

    @property
    def marked(self) -> bool:
        """Whether embeddings carry offsets and sizes."""
        return self.positions == "original" or self.proportional

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return asdict(self)


def resolve(settings: PluginSettings, config: Any, model: str, revision: str | None = None) -> Resolved:
    """Check settings against a model and resolve options that are ``"auto"``.

    Parameters
    ----------
    settings : PluginSettings
    config : the model's config
    model : str
        Name or folder of the model; with its revision, part of the salt.
    revision : str, optional

    Raises
    ------
    TorinoError
        If the family, the tower, or a combination of options is not supported in vLLM.
    """
    family = str(getattr(config, "model_type", ""))
    check_family(family)
    check_tower(family, config)
    reducer = settings.reduction.build()
    check_servable(reducer)
    stand_in = cast(nn.Module, type(ARCHITECTURES[family][0], (nn.Module,), {})())
    cast(Any, stand_in).config = config
    adapter = adapter_for(stand_in)  # only its class and config are read
    if reducer is not None and reducer.in_tower and adapter.in_tower_refusal:
        raise BadParameter(
            f"{reducer.spec} runs inside the vision tower, which {family} models do not allow: "
            f"{adapter.in_tower_refusal}. Choose a reducer for the tower's output, such as tome or gtp."
        )
    if settings.placement == "engine":
        check_engine(family, reducer)
    if position_choice(settings.reduction.positions, reducer) == "median":
        raise BadParameter(
            "The plug-in for vLLM places a token at one of its patches, not at their median. Serve with "
            "positions='original' or 'compact'."
        )
    attention = settings.reduction.attention
    if family != "llava" and attention == "auto":
        attention = "plain"
    proportional = uses_proportional(attention, reducer, adapter)
    if proportional:
        check_proportional(config)
    mode = position_mode(settings.reduction.positions, reducer)
    if family.startswith("qwen"):
        mode = "original"  # tokens always keep their coordinates; see torino.vlm.adapters.qwen
    salt = settings.reduction.hash(model, revision or "", settings.placement)
    return Resolved(mode, proportional, salt)


def check_version(version: str) -> None:
    """Refuse releases of vLLM that the plug-in was not tested with."""
    if not version.startswith(VERSIONS):
        tested = " and ".join(f"{start}*" for start in VERSIONS)
        raise TorinoError(
            f"This torino was tested with vLLM {tested}, and vLLM {version} is installed. Install a tested release, or "
            "another release of torino."
        )


def check_family(family: str) -> None:
    """Refuse families that the plug-in does not serve."""
    if family in ARCHITECTURES:
        return
    reason = REFUSED.get(family)
    if reason is None:
        reason = "it was not tested with vLLM" if family in families() else "torino has no adapter for them"
    raise TorinoError(
        f"torino does not reduce {family or 'these'} models in vLLM: {reason}. It serves {', '.join(ARCHITECTURES)}; "
        "remove the settings of torino to serve this model with all tokens, or use torino.vlm.reduced in transformers."
    )


def check_tower(family: str, config: Any) -> None:
    """Refuse towers that were not tested with a family."""
    towers = TOWERS.get(family)
    kind = str(getattr(getattr(config, "vision_config", None), "model_type", ""))
    if towers is not None and kind not in towers:
        raise TorinoError(
            f"torino does not reduce {family} models with a tower of type {kind} in vLLM. Supported: "
            f"{', '.join(towers)}."
        )


def check_engine(family: str, reducer: Reducer | None) -> None:
    """Refuse what needs to see an image before the number of its tokens is known."""
    if family != "llava":
        raise BadParameter(
            f"placement='engine' needs the same number of tokens for every image, and images of {family} models differ "
            "in size. Use placement='processor'."
        )
    if reducer is not None:
        exact_tokens(reducer, 1 << 20)


def exact_tokens(reducer: Reducer | None, patches: int) -> int:
    """Return the number of tokens that a reducer keeps of every image with this many patches.

    Raises
    ------
    BadParameter
        If it depends on the image.
    """
    if reducer is None:
        return patches
    if isinstance(reducer, KeepShare):
        return max(1, round(reducer.share * patches))
    budget = getattr(reducer, "budget", None)
    if budget is None:
        raise BadParameter(
            f"{reducer.spec} lets each image decide its number of tokens, and placement='engine' reserves the same "
            "number for all. Give a budget, or use placement='processor'."
        )
    return int(budget)


def check_proportional(config: Any) -> None:
    """Refuse proportional attention for tiles, and where vLLM's language model is not built from LlamaAttention."""
    family = str(config.model_type)
    if family != "llava":
        raise BadParameter(
            f"Proportional attention in vLLM is available for the LLaVA-1.5 family, and this model is {family}. Serve "
            "with attention='plain'."
        )
    text = str(getattr(config.get_text_config(), "model_type", ""))
    if text not in PROPORTIONAL_TEXT:
        raise BadParameter(
            f"Proportional attention in vLLM needs a language model of type {' or '.join(PROPORTIONAL_TEXT)}, and this "
            f"one is {text}. Serve with attention='plain'."
        )


def check_server(server: Any, resolved: Resolved) -> None:
    """Refuse options of a server that the plug-in does not support.

    Parameters
    ----------
    server : vllm.config.VllmConfig
    resolved : Resolved
    """
    if server.parallel_config.pipeline_parallel_size > 1:
        raise BadParameter(
            f"torino does not support pipeline parallelism, got --pipeline-parallel-size "
            f"{server.parallel_config.pipeline_parallel_size}: offsets and sizes of tokens are known to the first rank "
            "only. Use tensor parallelism."
        )
    if resolved.marked and getattr(server.parallel_config, "use_ubatching", False):
        raise BadParameter(
            "torino does not support steps that are split into micro-batches with original positions or proportional "
            "attention. Omit --enable-dbo, or serve with positions='compact' and attention='plain'."
        )
    if server.speculative_config is not None:
        raise BadParameter(
            "torino does not support speculative decoding: the draft model does not know offsets and sizes of the "
            "tokens. Omit --speculative-config."
        )
    multimodal = server.model_config.multimodal_config
    if multimodal is not None and multimodal.enable_mm_embeds:
        raise BadParameter(
            "torino does not accept embeddings from clients, because wrong ones could stop the engine. Omit "
            "--enable-mm-embeds."
        )
    if getattr(server, "ec_transfer_config", None) is not None:
        raise BadParameter("torino does not support a separate encoder process. Omit --ec-transfer-config.")
    cache = str(server.cache_config.cache_dtype)
    if resolved.proportional and cache not in ("auto", "float16", "bfloat16", "float32"):
        raise BadParameter(
            f"Proportional attention stores ln n in the key cache, which --kv-cache-dtype {cache} is too coarse for. "
            "Use auto, or serve with attention='plain'."
        )
