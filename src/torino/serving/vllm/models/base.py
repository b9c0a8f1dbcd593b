"""What the models of all families share: embeddings with marks, positions of the full prompt, the vision half."""

# pyright: reportMissingImports=false, reportUntypedBaseClass=false, reportUntypedClassDecorator=false
from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from vllm.model_executor.models.interfaces import SupportsMRoPE, SupportsMultiModal
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.utils import AutoWeightsLoader, init_vllm_registered_model, maybe_prefix

from torino.core.errors import TorinoError
from torino.serving.vision import VisionHalf, load_vision_half
from torino.serving.vllm.hook import resolved_of, settings_of
from torino.serving.vllm.marks import detach
from torino.serving.vllm.models.attention import ProportionalLlamaLayer
from torino.serving.vllm.models.processing import marked_embeds
from torino.serving.vllm.positions import full_positions

VISION_WEIGHTS = ("vision_tower.", "multi_modal_projector.", "image_newline", "visual.")
SCALED_BY_POSITIONS = ("dynamic", "longrope", "yarn")  # types of RoPE that depend on max_position_embeddings


class ReducedModel(nn.Module, SupportsMultiModal, SupportsMRoPE):
    """A language model of vLLM that receives reduced visual tokens.

    With placement ``processor`` it has no tower: images arrive as embeddings. With placement ``engine`` it runs the
    vision half of transformers, so that tokens equal those of :class:`torino.vlm.VLM`.
    """

    stock: ClassVar[Any]
    """vLLM's own class of the family."""
    coordinates: ClassVar[int] = 1
    """Number of position coordinates of a token."""
    offsets: Tensor
    positions: Tensor
    log_sizes: Tensor
    language_model: Any
    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }

    hf_to_vllm_mapper: ClassVar[Any]
    """vLLM's names of the weights, also for quantized checkpoints."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Take over the names of weights from vLLM's class."""
        super().__init_subclass__(**options)
        if hasattr(cls, "stock"):
            cls.hf_to_vllm_mapper = cls.stock.hf_to_vllm_mapper

    @classmethod
    def get_placeholder_str(cls, modality: str, i: int) -> str | None:
        """Return the text that stands for an image in a prompt."""
        return cls.stock.get_placeholder_str(modality, i)

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        model_config = vllm_config.model_config
        self.config, self.model_config = model_config.hf_config, model_config
        self.multimodal_config = model_config.multimodal_config
        self.settings, self.resolved = settings_of(self.config), resolved_of(self.config)
        self.width = int(self.config.get_text_config().hidden_size)
        self.configure_mm_token_handling(
            vocab_size=self.config.get_text_config().vocab_size, mm_token_ids=[self.image_token]
        )
        with self._mark_language_model(vllm_config):
            self.language_model = self.build_language_model(vllm_config, maybe_prefix(prefix, "language_model"))
        most = int(vllm_config.scheduler_config.max_num_batched_tokens)
        # Of the tokens of one step. Compiled graphs read these tensors, so they are never replaced.
        for name in ("offsets", "positions"):
            self.register_buffer(name, torch.zeros(self.coordinates, most, dtype=torch.int64), persistent=False)
        self.register_buffer("log_sizes", torch.zeros(most, dtype=torch.float32), persistent=False)
        layers = self.language_model.model.layers
        if self.resolved.proportional:
            for layer in layers:
                layer.self_attn.log_sizes = self.log_sizes
        self.last_position = len(layers[0].self_attn.rotary_emb.cos_sin_cache) - 1
        self._half: VisionHalf | None = None

    @property
    def image_token(self) -> int:
        """Id of the placeholder."""
        return int(self.config.image_token_id)

    def build_language_model(self, vllm_config: Any, prefix: str) -> nn.Module:
        """Build the language model, with attention as resolved and with a position table for the full prompt."""
        text = self.config.text_config
        kind = (getattr(text, "rope_parameters", None) or {}).get("rope_type", "default")
        if self.resolved.positions == "original" and kind not in SCALED_BY_POSITIONS:
            # The last prompt position is below the limit, and an answer has at most max_model_len tokens.
            text = copy.deepcopy(text)
            text.max_position_embeddings += int(self.model_config.max_model_len)
        if not self.resolved.proportional:
            return init_vllm_registered_model(vllm_config=vllm_config, hf_config=text, prefix=prefix)
        own = vllm_config.with_hf_config(text, architectures=["LlamaForCausalLM"])
        return LlamaForCausalLM(vllm_config=own, prefix=prefix, layer_type=ProportionalLlamaLayer)

    # ------------------------------------------------------------------ images

    def embed_multimodal(self, **kwargs: Any) -> list[Tensor]:
        """Return the embeddings of each image, with offsets and sizes behind their channels where they are needed."""
        embeds = kwargs.get("image_embeds")
        if embeds is not None:
            return [image.reshape(-1, image.shape[-1]) for image in embeds]
        pixels = kwargs.get("pixel_values")
        if pixels is None:
            return []
        images = self.vision_half({"pixel_values": pixels if isinstance(pixels, Tensor) else torch.stack(list(pixels))})
        return [
            marked_embeds(image, self.resolved, image.slots[:, None]).to(self.model_config.dtype) for image in images
        ]

    @property
    def vision_half(self) -> VisionHalf:
        """Tower, reducer and projector in the worker; loaded with the weights, or on first use."""
        if self._half is None:
            if self.settings.placement != "engine":
                raise TorinoError("Pixels reached the worker although placement is 'processor'. Please report this.")
            device = self.log_sizes.device
            self._half = load_vision_half(
                str(self.model_config.model),
                self.settings.reduction.build(device),
                device=device,
                dtype=self.model_config.dtype,
                revision=self.model_config.revision,
            )
        return self._half

    # ------------------------------------------------------------------ steps

    def embed_input_ids(
        self, input_ids: Tensor, multimodal_embeddings: Any = None, *, is_multimodal: Tensor | None = None
    ) -> Tensor:
        """Embed the tokens of a step; offsets and sizes of visual tokens go to the buffers of the model."""
        if self.resolved.marked:
            self.offsets.zero_()  # also of the padding of the last step
            self.log_sizes.zero_()
            if multimodal_embeddings is not None and len(multimodal_embeddings) and is_multimodal is not None:
                joined = torch.cat([embeds.reshape(-1, embeds.shape[-1]) for embeds in multimodal_embeddings])
                features, integers = detach(joined, self.width)
                where = is_multimodal.nonzero()[:, 0].to(input_ids.device)  # on the CPU, where vLLM keeps it
                self.offsets[:, where] = integers[:, : self.coordinates].T
                if self.resolved.proportional:
                    self.log_sizes[where] = integers[:, self.coordinates].float().clamp(min=1).log()
                multimodal_embeddings = [features]
        return super().embed_input_ids(input_ids, multimodal_embeddings, is_multimodal=is_multimodal)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
        **_: Any,
    ) -> Any:
        """Run the language model; with original positions, visual tokens are moved to their offsets."""
        if self.resolved.positions == "original":
            count = positions.shape[-1]
            moved = positions[: self.coordinates] + self.offsets[:, :count]
            kept = self.positions[:, :count]
            kept.copy_(moved.clamp(max=self.last_position))
            positions = kept if self.coordinates > 1 else kept[0]
        return self.language_model.model(input_ids, positions, intermediate_tensors, inputs_embeds=inputs_embeds)

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        """Return the logits of the next tokens."""
        return self.language_model.compute_logits(hidden_states)

    def get_mrope_input_positions(self, input_tokens: Sequence[int], mm_features: Sequence[Any]) -> tuple[Tensor, int]:
        """Return the positions of a prompt as if all images had all their tokens, and the shift of generated tokens."""
        features = sorted(mm_features, key=lambda feature: feature.mm_position.offset)
        ranges = [(feature.mm_position.offset, feature.mm_position.length) for feature in features]
        occupied = [int(feature.data["image_positions"].data) for feature in features]
        positions, delta = full_positions(len(input_tokens), ranges, occupied)
        return positions.expand(3, -1).clone(), delta

    # ------------------------------------------------------------------ weights

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load the language model; in the engine, also the vision half, which transformers reads by itself."""
        text = ((name, w) for name, w in weights if not name.removeprefix("model.").startswith(VISION_WEIGHTS))
        loaded = AutoWeightsLoader(self).load_weights(text, mapper=self.hf_to_vllm_mapper)
        if self.settings.placement == "engine":
            _ = self.vision_half
        return loaded
