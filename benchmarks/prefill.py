"""What reduction gains inside a model of full size: time to the first token, key-value cache, and the reducer's share.

CLIP ViT-L/14@336, an SAE of expansion 64 and a Llama of 1.1 billion parameters, random weights, in one LLaVA. All in
one run, in turn: the stock tower and the one stopped at the tap, the reducer, the language model's prefill and the
whole way to the first token, at 576, 217, 129 and 47 visual tokens.

    python benchmarks/prefill.py                               # prints the tables
    python benchmarks/prefill.py --write research/reports/performance.md   # and writes them into the page
    python benchmarks/prefill.py --quick                       # a small model, to see that it runs
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from report import machine, parser, ratio, table, time_side_by_side, write_section
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration
from transformers.utils import logging

from torino import SAE, Reducer, make
from torino.vlm import adapter_for, reduced

TEXT = 60  # tokens of text around the image: LLaVA-1.5's system prompt and a question
IMAGE_TOKEN = 31999


def build(quick: bool) -> LlavaForConditionalGeneration:
    """A LLaVA of real shapes and random weights, without the slow initialisation."""
    vision = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
    text = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32}
    if quick:
        vision |= {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
        text |= {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(image_size=336, patch_size=14, **vision),
        text_config=LlamaConfig(num_key_value_heads=4, vocab_size=32000, eos_token_id=None, pad_token_id=0, **text),
        image_token_id=IMAGE_TOKEN,
        vision_feature_layer=-2,
    )
    with torch.device("meta"):
        model = LlavaForConditionalGeneration(config)
    model = model.to_empty(device="cpu").eval()
    source = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.uniform_(-0.03, 0.03, generator=source) if weight.ndim > 1 else weight.fill_(float("norm" in name))
        for module in model.modules():  # buffers that are computed, not stored
            if hasattr(module, "position_ids"):
                module.position_ids = torch.arange(module.position_ids.shape[-1])[None]
            if hasattr(module, "inv_freq"):
                size = module.inv_freq.numel() * 2
                module.inv_freq = 1.0 / 10000 ** (torch.arange(0, size, 2).float() / size)
                module.original_inv_freq = module.inv_freq
    return model


def main() -> None:
    arguments = parser(__doc__)
    arguments.set_defaults(rounds=3)
    arguments.add_argument("--quick", action="store_true", help="a small model, to see that it runs")
    given = arguments.parse_args()
    logging.set_verbosity_error()
    torch.manual_seed(given.seed)
    torch.set_grad_enabled(False)

    model = build(given.quick)
    width, latents = model.config.vision_config.hidden_size, 4096 if given.quick else 65536
    weight = torch.nn.functional.normalize(torch.randn(latents, width), dim=1)
    sae = SAE(weight, 0.01 * torch.randn(latents), kind="matryoshka", threshold=0.0, k=20)
    ids = torch.cat([torch.arange(1, TEXT // 2 + 1), torch.full((576,), IMAGE_TOKEN), torch.arange(40, 40 + TEXT // 2)])
    inputs: dict[str, Any] = {"input_ids": ids[None], "attention_mask": torch.ones_like(ids)[None]}
    inputs["pixel_values"] = torch.randn(1, 3, 336, 336)

    host = adapter_for(model)
    settings = {217: 3, 129: 2, 47: 1}
    reducers: dict[int, Reducer] = {
        count: make("torino-m", sae=sae, k=k, delta=k, budget=count) for count, k in settings.items()
    }
    features = model.get_image_features(inputs["pixel_values"])
    prompts: dict[int, dict[str, Any]] = {576: {**inputs, "mm_encoder_outputs": {"image": features}}}
    prompts[576].pop("pixel_values")
    for count, reducer in reducers.items():
        prompts[count] = host.reduce_inputs(inputs, reducer, "compact", side="left")[0]

    def prefill(count: int) -> Callable[[], object]:
        return lambda: model(
            **{**prompts[count], "mm_encoder_outputs": dict(prompts[count]["mm_encoder_outputs"])}, logits_to_keep=1
        )

    every_patch = make("random", budget=576)  # its tower stops too, so that the rows differ in their tokens only

    def answer(count: int) -> Callable[[], object]:
        def run() -> None:
            with reduced(model, reducers.get(count, every_patch)):
                model.generate(**inputs, max_new_tokens=1, do_sample=False)

        return run

    sight = host.encode(inputs, frozenset())
    tasks: dict[str, Callable[[], object]] = {
        "stock tower": lambda: model.model.vision_tower(inputs["pixel_values"], output_hidden_states=True),
        "tower stopped after the tap block": lambda: host.encode(inputs, frozenset()),
    }
    for count, reducer in reducers.items():
        tasks[f"torino at {count}"] = lambda reducer=reducer: reducer.plan_batch(list(sight.tokens)).apply(
            [tokens.patches for tokens in sight.tokens]
        )
    counts = (576, *settings)
    seconds = time_side_by_side(tasks, 4 * given.rounds)  # shorter, so more rounds
    tasks = {f"prefill at {count}": prefill(count) for count in counts}
    tasks |= {f"first token at {count}": answer(count) for count in counts}
    seconds |= time_side_by_side(tasks, given.rounds)

    parts = [
        f"Measured by `benchmarks/prefill.py`, seed {given.seed}, median of {given.rounds} rounds in turn "
        f"({4 * given.rounds} before the language model). {machine()}."
    ]
    parts += [f"**Prompt of {TEXT} text tokens and an image; seconds**"]
    prompt = len(ids)
    rows: list[list[str]] = []
    for count in counts:
        removed = (576 - count) / prompt
        saved = 1 - ratio(seconds[f"prefill at {count}"], seconds["prefill at 576"])
        cache = model(
            **{**prompts[count], "mm_encoder_outputs": dict(prompts[count]["mm_encoder_outputs"])}, use_cache=True
        ).past_key_values
        size = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers) / 2**20
        rows.append(
            [
                str(count),
                f"{removed:.1%}",
                f"{statistics.median(seconds[f'prefill at {count}']):.2f}",
                f"{saved:.1%}" if count < 576 else "",
                f"{saved / removed:.2f}" if count < 576 else "",
                f"{statistics.median(seconds[f'first token at {count}']):.2f}",
                f"{1 / ratio(seconds[f'first token at {count}'], seconds['first token at 576']):.2f} ×",
                f"{size:.1f}",
            ]
        )
    headings = [
        "visual tokens",
        "prompt removed",
        "prefill",
        "prefill saved",
        "saved / removed",
        "first token",
        "faster by",
        "cache MiB",
    ]
    parts += [table(headings, rows)]
    parts += ["**Before the language model; seconds, and as a share of the stock tower**"]
    stock = seconds["stock tower"]
    names = ["stock tower", "tower stopped after the tap block", *[f"torino at {count}" for count in settings]]
    rows = [[name, f"{statistics.median(seconds[name]):.3f}", f"{ratio(seconds[name], stock):.3f}"] for name in names]
    parts += [table(["", "seconds", "ratio"], rows)]
    print(*parts, sep="\n\n")
    if given.write:
        write_section(given.write, "prefill", "\n\n".join(parts))


if __name__ == "__main__":
    main()
