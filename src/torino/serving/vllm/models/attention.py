"""Proportional attention on vLLM's own kernels.

softmax(q·k·s + ln n) is the attention of heads with two more channels: both are 2^j in q, and in k they sum to
ln n / (s 2^j). The power of two is exact in every floating-point type, and two channels represent ln n in bfloat16 to
16 bits. Channels are added up to the next head size that the attention backend supports; they cost key-value cache.
"""

# pyright: reportMissingImports=false, reportUntypedBaseClass=false, reportUntypedClassDecorator=false
from __future__ import annotations

from math import ceil, log2
from typing import Any

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.llama import LlamaAttention, LlamaDecoderLayer
from vllm.v1.attention.selector import get_attn_backend

from torino.core.errors import TorinoError

CHANNELS = 2  # for ln n


class ProportionalLlamaAttention(LlamaAttention):
    """Attention of Llama whose logits include ln n of every key, for tokens that represent n patches."""

    def __init__(self, *, prefix: str = "", cache_config: Any = None, quant_config: Any = None, **options: Any) -> None:
        super().__init__(prefix=prefix, cache_config=cache_config, quant_config=quant_config, **options)
        # The attention of the base class has the wrong head size; its name must be free for the new one.
        get_current_vllm_config().compilation_config.static_forward_context.pop(f"{prefix}.attn")
        kept = "auto" if cache_config is None else cache_config.cache_dtype
        self.wide = wider_head(self.head_dim, torch.get_default_dtype(), kept)
        self.attn = Attention(
            self.num_heads,
            self.wide,
            self.scaling,
            num_kv_heads=self.num_kv_heads,
            cache_config=cache_config,
            quant_config=quant_config,
            prefix=f"{prefix}.attn",
        )
        self.factor = 2.0 ** ceil(log2(1 / self.scaling))
        self.log_sizes: Tensor = torch.empty(0)  # shared by all layers; set by the model

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        """Run attention over the tokens of a step, shape (tokens, width)."""
        qkv, _ = self.qkv_proj(hidden_states)
        q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        q, k = self.rotary_emb(positions, q, k)
        count, extra = q.shape[0], self.wide - self.head_dim
        q, k, v = (states.reshape(count, -1, self.head_dim) for states in (q, k, v))
        bias = (self.log_sizes[:count] / (self.scaling * self.factor))[:, None]
        coarse = bias.to(k.dtype)
        fine = (bias - coarse.float()).to(k.dtype)
        channels = torch.cat([coarse, fine, coarse.new_zeros(count, extra - CHANNELS)], 1)[:, None]
        constant = q.new_zeros(extra)
        constant[:CHANNELS] = self.factor
        q = torch.cat([q, constant.expand(count, q.shape[1], extra)], 2)
        k = torch.cat([k, channels.expand(count, k.shape[1], extra)], 2)
        v = torch.cat([v, v.new_zeros(count, v.shape[1], extra)], 2)
        output = self.attn(q.flatten(1), k.flatten(1), v.flatten(1))
        output = output.reshape(count, self.num_heads, self.wide)[..., : self.head_dim].flatten(1)
        return self.o_proj(output)[0]


class ProportionalLlamaLayer(LlamaDecoderLayer):
    """Decoder layer of Llama with proportional attention."""

    def __init__(self, vllm_config: Any, prefix: str = "", config: Any = None) -> None:
        super().__init__(vllm_config, prefix, config, attn_layer_type=ProportionalLlamaAttention)


def wider_head(size: int, dtype: torch.dtype, cache_dtype: str) -> int:
    """Return the smallest head size with room for the channels of ln n that an attention backend supports."""
    for wider in range(-(-(size + CHANNELS) // 8) * 8, 2 * size + 1, 8):
        try:
            if get_attn_backend(wider, dtype, cache_dtype).supports_head_size(wider):
                return wider
        except ValueError:  # no backend for this size
            continue
    raise TorinoError(
        f"No attention backend of this machine supports heads of {size + CHANNELS} to {2 * size} channels, which "
        "proportional attention needs. Choose another backend, or serve with attention='plain'."
    )
