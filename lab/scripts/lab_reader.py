"""What is trained for the lab: projector and a small stock Llama; how they begin, and how they take a step."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from torino.core.io import read_json, read_safetensors

PATCHES, WIDTH = 576, 384


class Reader(nn.Module):
    """Projector and language model: what is trained."""

    def __init__(self, vocabulary: int, args: argparse.Namespace) -> None:
        super().__init__()
        # what the tower says is brought to mean 0 and variance 1 a channel; saved, that is part of the first layer
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("deviation", torch.ones(WIDTH))
        self.linear_1 = nn.Linear(WIDTH, args.width)
        self.linear_2 = nn.Linear(args.width, args.width)
        self.llama = LlamaForCausalLM(llama_config(vocabulary, args))

    @torch.no_grad()
    def begin(self, aligned: dict[str, Tensor]) -> None:
        """Start from aligned words; queries and keys start alike, so that a word attends to patches that look like it.

        Parameters
        ----------
        aligned : dict of Tensor
            Of ``lab_align.align_words``.
        """
        for name in ("linear_1", "linear_2"):
            part = getattr(self, name)
            part.weight.copy_(aligned[f"{name}.weight"])
            part.bias.copy_(aligned[f"{name}.bias"])
        table = self.llama.get_input_embeddings().weight
        table.copy_(nn.functional.normalize(table, dim=-1))
        table[aligned["words"]] = aligned["vectors"]
        for layer in self.llama.model.layers:
            query, key = layer.self_attn.q_proj.weight, layer.self_attn.k_proj.weight
            query.mul_(2)
            key.copy_(query)

    def forward(self, pictures: Tensor, head: Tensor, text: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """Hidden states of the text (B, T, width), after ``head`` and the pictures (B, M, 384)."""
        embed = self.llama.get_input_embeddings()
        seen = self.linear_2(nn.functional.gelu(self.linear_1((pictures - self.mean) / self.deviation)))
        front = embed(head).expand(len(pictures), -1, -1)
        states = torch.cat([front, seen, embed(text)], 1)
        core = self.llama.model
        turn = core.rotary_emb(states, positions)
        start = front.shape[1] + pictures.shape[1]
        for layer in core.layers[:-1]:
            states = one_layer(layer, states, start, mask, turn)
        # nobody reads what the last layer would make of the picture
        return core.norm(one_layer(core.layers[-1], states, start, mask, turn, text_alone=True))


def read_reader(folder: Path) -> tuple[Reader, dict[str, Any]]:
    """What the stage save of ``train_lab.py`` wrote, ready to read; and its sizes, block and step."""
    facts = read_json(folder / "reader.json")
    sizes = facts["language"]
    args = argparse.Namespace(width=sizes["hidden_size"], layers=sizes["num_hidden_layers"])
    reader = Reader(sizes["vocab_size"], args)
    given, _ = read_safetensors(folder / "reader.safetensors")
    state = {"mean": reader.mean, "deviation": reader.deviation}  # which are part of the first layer
    for name, value in given.items():
        inner = name.removeprefix("multi_modal_projector.")
        state[inner if inner != name else f"llama.model.{name.removeprefix('language_model.')}"] = value.float()
    state["llama.lm_head.weight"] = state["llama.model.embed_tokens.weight"]
    reader.load_state_dict(state)
    return reader.eval(), facts


def one_layer(
    layer: nn.Module, states: Tensor, start: int, mask: Tensor, turn: tuple[Tensor, Tensor], *, text_alone: bool = False
) -> Tensor:
    """A layer of the stock Llama, with attention in two parts: the picture to itself, the text to both.

    What stands before ``start`` is plainly causal, for which there is a faster kernel; ``mask`` (B, 1, T, start + T)
    says what the text sees.
    """
    attend, normed = layer.self_attn, layer.input_layernorm(states)
    asks = normed[:, start:] if text_alone else normed
    q, k, v = (
        part(given).unflatten(-1, (-1, attend.head_dim)).transpose(1, 2)
        for part, given in ((attend.q_proj, asks), (attend.k_proj, normed), (attend.v_proj, normed))
    )
    cos, sin = turn
    first = start if text_alone else 0
    q = apply_rotary_pos_emb(q, q, cos[:, first:], sin[:, first:])[0]
    k = apply_rotary_pos_emb(k, k, cos, sin)[0]
    sdpa = nn.functional.scaled_dot_product_attention
    seen = sdpa(q if text_alone else q[:, :, start:], k, v, attn_mask=mask)
    if not text_alone:
        before = sdpa(q[:, :, :start], k[:, :, :start], v[:, :, :start], is_causal=True)
        seen = torch.cat([before, seen], 2)
    states = states[:, first:] + attend.o_proj(seen.transpose(1, 2).flatten(2))
    return states + layer.mlp(layer.post_attention_layernorm(states))


class Muon(torch.optim.Optimizer):
    """Muon in float32: momentum made orthogonal by five Newton-Schulz steps, of the size an Adam step has.

    torch's own rounds to bfloat16, which this kind of CPU has no instructions for.
    """

    def __init__(self, params: list[nn.Parameter], lr: float, decay: float) -> None:
        super().__init__(params, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take a step."""
        for group in self.param_groups:
            for p in group["params"]:
                moment = self.state[p].setdefault("moment", torch.zeros_like(p))
                moment.lerp_(p.grad, 0.05)
                turned = orthogonal(p.grad.lerp(moment, 0.95))
                p.mul_(1 - group["lr"] * group["decay"])
                p.add_(turned, alpha=-group["lr"] * 0.2 * max(p.shape) ** 0.5)


def orthogonal(x: Tensor) -> Tensor:
    """The nearest matrix with orthonormal rows or columns, nearly."""
    wide = x.shape[0] <= x.shape[1]
    y = (x if wide else x.T) / (x.norm() + 1e-7)
    for _ in range(5):
        gram = y @ y.T
        y = torch.addmm(y, torch.addmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), y, beta=3.4445)
    return y if wide else y.T


def llama_config(vocabulary: int, args: argparse.Namespace) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=args.width,
        intermediate_size=3 * args.width,
        num_hidden_layers=args.layers,
        num_attention_heads=args.width // 64,
        num_key_value_heads=args.width // 64,
        max_position_embeddings=2048,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=3,
        initializer_range=0.02,
        # slow turns: what a word asks of a patch should not depend on how far apart they stand
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        attn_implementation="sdpa",
    )
