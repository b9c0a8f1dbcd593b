"""Cache and time of methods inside the language model, beside all tokens and reduction before it, in one run.

The model is a LLaVA-1.5 of random weights, because only its shapes matter here, or a real one (--model). Every turn
answers with each method once, starting with another one each time, and the first turn is not counted. The cache is that
of the answer: the bytes of all keys and values. Methods before the language model run twice: with the final number of
tokens of the methods inside it, and with the number that these process on average over the layers.

    python benchmarks/inside.py --layers 4 --width 128 --turns 2       # to see that it runs
    python benchmarks/inside.py --write                                # writes research/results/inside.json
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import torch
from report import machine
from torch import Tensor, nn

from torino import make
from torino.core.io import write_json
from torino.evaluation.latency.probes import versions
from torino.reducers import Reducer
from torino.vlm import reduced
from torino.vlm.generate import FirstTokenClock
from torino.vlm.trace import Trace

RESULTS = Path(__file__).resolve().parents[1] / "research" / "results"
IMAGE, SIDE, PATCH = 999, 24, 14


@dataclass
class Row:
    """One method and its measurements."""

    name: str
    reducer: Reducer | None
    prefill: list[float] = field(default_factory=list[float])
    decode: list[float] = field(default_factory=list[float])
    cache: int = 0
    trace: Trace | None = None

    def facts(self, full: Row) -> dict[str, Any]:
        """Return everything for JSON."""
        call = None if self.trace is None else self.trace.calls[0]
        prefill, decode = statistics.median(self.prefill), statistics.median(self.decode)
        return {
            "method": self.name,
            "tokens_first_layer": SIDE**2 if call is None else sum(call.after),
            "tokens_last_layer": SIDE**2 if call is None else min(call.layers, default=sum(call.after)),
            "tokens_layer_averaged": SIDE**2 if call is None else round(call.layer_averaged, 2),
            "cache_mb": round(self.cache / 1e6, 3),
            "cache_of_full": round(self.cache / full.cache, 4),
            "prefill_ms": round(1e3 * prefill, 2),
            "prefill_of_full": round(prefill / statistics.median(full.prefill), 4),
            "token_ms": round(1e3 * decode, 3),
            "turns": len(self.prefill),
        }


def random_model(layers: int, width: int, attention: str) -> nn.Module:
    """Return a LLaVA-1.5 of random weights with a tower of two blocks."""
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    heads = max(1, width // 64)
    vision = CLIPVisionConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=SIDE * PATCH,
        patch_size=PATCH,
    )
    text = LlamaConfig(
        hidden_size=width,
        intermediate_size=int(width * 2.6875),  # as in LLaVA-1.5-7B
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        vocab_size=1000,
        max_position_embeddings=4096,
    )
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=IMAGE)
    config._attn_implementation = attention
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration(config).eval()
    model.generation_config.eos_token_id = None
    return model


def prompt(model: nn.Module, words: int, seed: int) -> dict[str, Tensor]:
    """Return a prompt: some words, an image, a question."""
    generator = torch.Generator().manual_seed(seed)
    image_token = int(model.config.image_token_id)  # type: ignore[union-attr]
    text = torch.randint(3, 900, (words,), generator=generator)
    ids = torch.cat([text[: words // 2], torch.full((SIDE**2,), image_token), text[words // 2 :]])[None]
    pixels = torch.randn(1, 3, SIDE * PATCH, SIDE * PATCH, generator=generator)
    weight = next(model.parameters())
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return {name: value.to(weight.device) for name, value in inputs.items()} | {"pixel_values": pixels.to(weight)}


def measure(model: Any, row: Row, inputs: dict[str, Tensor], length: int, keep: bool) -> None:
    """Answer once; the time to the first token does not include encoding and planning."""
    clock, begin = FirstTokenClock(), 0.0
    generation: dict[str, Any] = {"max_new_tokens": length, "min_new_tokens": length, "do_sample": False}
    generation |= {"return_dict_in_generate": True, "stopping_criteria": [clock]}

    def start(*_: Any) -> None:
        nonlocal begin
        begin = begin or time.perf_counter()

    handle = model.get_decoder().register_forward_pre_hook(start)
    try:
        if row.reducer is None:
            output = model.generate(**inputs, **generation)
        else:
            with reduced(model, row.reducer) as row.trace:
                output = model.generate(**inputs, **generation)
    finally:
        handle.remove()
    end = time.perf_counter()
    row.cache = sum(part.nbytes for layer in output.past_key_values.layers for part in (layer.keys, layer.values))
    if keep:
        row.prefill.append(clock.first - begin)
        row.decode.append((end - clock.first) / max(1, length - 1))


def rows_for(budget: int, blocks: int) -> list[Row]:
    """Return the methods: all tokens, inside the language model, before it, and both."""
    inside = [f"{method}(budget={budget})" for method in ("fastv", "pyramiddrop", "dart")]
    averages = {round(average(spec, blocks)) for spec in inside}
    before = [f"uniform(budget={count})" for count in sorted({budget, *averages})]
    both = [f"uniform(budget={2 * budget})+fastv(budget={budget})"]
    return [Row("all tokens", None), *(Row(spec, make(spec)) for spec in [*inside, *before, *both])]


def average(spec: str, blocks: int) -> float:
    """Return the layer-averaged tokens of a method inside the language model."""
    from torino.reducers.in_language_model import LanguageModelReducer, layer_averaged, tokens_by_block

    reducer = make(spec)
    assert isinstance(reducer, LanguageModelReducer)
    return layer_averaged(tokens_by_block(SIDE**2, reducer.stages(SIDE**2, blocks), blocks))


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="hub name or folder of a LLaVA-1.5 at 336 pixels; random weights without it")
    parser.add_argument("--layers", type=int, default=32, help="of the language model with random weights")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--attention", choices=("sdpa", "eager"), default="sdpa")
    parser.add_argument("--budget", type=int, default=64)
    parser.add_argument("--words", type=int, default=40, help="tokens of text in the prompt")
    parser.add_argument("--length", type=int, default=16, help="tokens of the answer")
    parser.add_argument("--turns", type=int, default=9, help="the first is not counted")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--write", action="store_true", help="write research/results/inside.json")
    return parser.parse_args(arguments)


@torch.no_grad()
def main() -> None:
    """Measure all methods in turns."""
    given = parse(sys.argv[1:])
    if given.model is None:
        model: Any = random_model(given.layers, given.width, given.attention)
    else:
        from torino.vlm.loading import load_model

        model = load_model(given.model, given.device)[0]
    model = model.to(given.device)
    blocks = len(model.get_decoder().layers)
    rows = rows_for(given.budget, blocks)
    for turn in range(given.turns):
        inputs = prompt(model, given.words, turn)
        for row in rows[turn % len(rows) :] + rows[: turn % len(rows)]:
            measure(model, row, inputs, given.length, keep=turn > 0)
    text = model.config.get_text_config()
    results = {
        "command": " ".join(["python", "benchmarks/inside.py", *sys.argv[1:]]),
        "date": date.today().isoformat(),
        "hardware": machine(),
        "versions": versions(),
        "seed": 0,
        "model": given.model or "LLaVA-1.5 of random weights",
        "language_model": {"layers": blocks, "width": text.hidden_size, "dtype": str(model.dtype).split(".")[1]},
        "attention": text._attn_implementation,
        "prompt": {"image_tokens": SIDE**2, "text_tokens": given.words, "answer_tokens": given.length},
        "protocol": "median over turns; the methods take turns, and the first turn is not counted",
        "rows": [row.facts(rows[0]) for row in rows],
    }
    heads = (("averaged", 8), ("cache MB", 9), ("of full", 8), ("prefill ms", 10), ("of full", 8), ("token ms", 9))
    print(" ".join([f"{'method':42}", *(f"{head:>{width}}" for head, width in heads)]))
    for row in results["rows"]:
        print(
            f"{row['method']:42} {row['tokens_layer_averaged']:8} {row['cache_mb']:9} {row['cache_of_full']:8} "
            f"{row['prefill_ms']:10} {row['prefill_of_full']:8} {row['token_ms']:9}"
        )
    if given.write:
        write_json(RESULTS / "inside.json", results)


if __name__ == "__main__":
    main()
