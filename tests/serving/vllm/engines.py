"""Run vLLM in this process, and compare its answers with those of ``reduced()`` in transformers."""

from __future__ import annotations

import base64
import gc
import io
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np
import torch
from PIL import Image

from torino.serving.server.vllm import encode_embeds
from torino.serving.settings import ReductionSettings
from torino.serving.vllm.names import ARCHITECTURES, CLASSES
from torino.serving.vllm.settings import PluginSettings
from torino.vlm import VLM, load_vlm, reduced
from torino.vlm.batching import process_image, reduce_pixels

NEW = 6  # tokens of an answer
CHUNK = 48  # tokens of one step; longer prompts are prefilled in chunks
BLOCK = 32  # tokens of a block of the prefix cache
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Request:
    """Images and a question."""

    images: tuple[Image.Image, ...]
    question: str


@dataclass(frozen=True)
class Result:
    """An answer: its tokens, their log probabilities, and the length of the prompt."""

    tokens: list[int]
    logprobs: list[float]
    prompt: int
    cached: int = 0


class Served:
    """A model in vLLM and the same model in transformers; with ``front``, vLLM receives embeddings."""

    def __init__(self, llm: Any, vlm: VLM, reduction: ReductionSettings, front: bool = False) -> None:
        self.llm, self.vlm, self.reduction, self.front = llm, vlm, reduction, front
        self.reducer = reduction.build()

    def answer(self, requests: Sequence[Request]) -> list[Result]:
        """Answer some requests in vLLM, all at once."""
        from vllm import SamplingParams

        prompts = [
            {
                "prompt_token_ids": self.prompt_ids(request),
                "multi_modal_data": {"image": self.embeds(request) if self.front else list(request.images)},
            }
            for request in requests
        ]
        options = SamplingParams(temperature=0, max_tokens=NEW, logprobs=1, ignore_eos=True)
        outputs = self.llm.generate(prompts, options, use_tqdm=False)
        return [
            Result(
                list(output.outputs[0].token_ids),
                [
                    step[token].logprob
                    for step, token in zip(output.outputs[0].logprobs, output.outputs[0].token_ids, strict=True)
                ],
                len(output.prompt_token_ids),
                output.num_cached_tokens or 0,
            )
            for output in outputs
        ]

    def embeds(self, request: Request) -> list[torch.Tensor]:
        """Return what a front sends for the images of a request."""
        pixels = [process_image(self.vlm, image) for image in request.images]
        return [read_embeds(encode_embeds(image)) for image in reduce_pixels(self.vlm, pixels, self.reducer)]

    def prompt_ids(self, request: Request) -> list[int]:
        """Return the tokens of a prompt, with one placeholder for each image, as chat requests have it."""
        text = self.vlm.inputs(request.images, request.question).prompts[0]
        tokenizer: Any = self.vlm.processor.tokenizer
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    @torch.no_grad()
    def expected(self, request: Request) -> Result:
        """Answer a request with ``reduced()`` in transformers."""
        inputs = self.vlm.inputs(request.images, request.question).tensors
        model: Any = self.vlm.model
        options = {"positions": self.reduction.positions, "attention": self.reduction.attention}
        with reduced(model, self.reducer, **options) as trace:
            output = model.generate(
                **inputs, max_new_tokens=NEW, do_sample=False, return_dict_in_generate=True, output_logits=True
            )
        length = inputs["input_ids"].shape[1]
        tokens = output.sequences[0, length:].tolist()
        logprobs = [
            float(logits[0].float().log_softmax(-1)[token]) for logits, token in zip(output.logits, tokens, strict=True)
        ]
        call = trace.calls[0]
        return Result(tokens, logprobs, length - sum(call.before) + sum(call.after))

    def check(self, requests: Sequence[Request]) -> list[Result]:
        """Answer requests in vLLM and assert that tokens and log probabilities equal those of transformers."""
        results = self.answer(requests)
        for request, result in zip(requests, results, strict=True):
            expected = self.expected(request)
            assert result.prompt == expected.prompt
            assert result.tokens == expected.tokens
            difference = max(abs(a - b) for a, b in zip(result.logprobs, expected.logprobs, strict=True))
            assert difference <= TOLERANCE
        return results


def read_embeds(text: str) -> torch.Tensor:
    """Read embeddings as vLLM does."""
    return torch.from_numpy(np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False))


@cache
def preload() -> None:
    """Import the models here; otherwise vLLM starts a process to inspect each of them, which takes long.

    The class for LLaVA is left to vLLM, so that one reference of the plug-in is resolved as in a server.
    """
    from vllm.model_executor.models import ModelRegistry
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    for family, (stock_name, name) in ARCHITECTURES.items():
        module, _, class_name = CLASSES[name].partition(":")
        model: Any = getattr(import_module(module), class_name)
        ModelRegistry.register_model(stock_name, model.stock)
        if family != "llava":
            ModelRegistry.register_model(name, model)


@contextmanager
def serve(model: str, settings: dict[str, Any], **options: Any) -> Generator[Served]:
    """Start vLLM with a model, in this process; with placement ``front``, without the plug-in."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    preload()
    front = settings.get("placement") == "front"
    if front:
        settings = {name: value for name, value in settings.items() if name != "placement"}
    llm: Any = LLM(
        model,
        **{
            "hf_overrides": {"torino": settings} if settings and not front else {},
            "enable_mm_embeds": front,
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 384,
            "max_num_batched_tokens": CHUNK,
            "max_num_seqs": 4,
            "block_size": BLOCK,
            "num_gpu_blocks_override": 96,
            "limit_mm_per_prompt": {"image": 4},
            "enable_chunked_prefill": True,
            "enable_prefix_caching": True,
            **options,
        },
    )
    try:
        reduction = PluginSettings.from_dict(settings or {"method": "none"}).reduction
        vlm = load_vlm(model, padding=reduction.padding, positions=reduction.positions, attention=reduction.attention)
        vlm.model.generation_config.eos_token_id = None  # type: ignore[union-attr]
        yield Served(llm, vlm, reduction, front)
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()
