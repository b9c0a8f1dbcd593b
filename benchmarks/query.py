"""What reading the question costs: ``torino-q`` beside ``torino-x``, from pixels to projected tokens.

Both run a vision tower of the size of CLIP ViT-L/14, plan, and project the tokens they keep with a two-layer projector.
``torino-q`` also projects all patches, which it compares with the words of the question. Weights are random, and plans
are made for given tokens in clusters, one of which has the direction of a word, so that the question stands out.

    python benchmarks/query.py                                # 576 x 1,024 x 65,536, prints a table
    python benchmarks/query.py --without-tower                # from patches to projected tokens
    python benchmarks/query.py --quick                        # small sizes, a few seconds
    python benchmarks/query.py --json research/results/query_cost.json
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from report import machine, parser, ratio, table, time_side_by_side
from torch import Tensor, nn
from torch.nn.functional import normalize
from transformers import CLIPVisionConfig, CLIPVisionModel

from torino import SAE, Reducer, VisualTokens, make

LIMIT = 1.25


def main() -> None:
    """Measure and print; write JSON if asked to."""
    arguments = parser(__doc__)
    arguments.add_argument("--quick", action="store_true", help="small sizes")
    arguments.add_argument("--without-tower", action="store_true", help="leave out the vision tower")
    arguments.add_argument("--side", type=int, default=24)
    arguments.add_argument("--width", type=int, default=1024)
    arguments.add_argument("--latents", type=int, default=65536)
    arguments.add_argument("--language", type=int, default=4096, help="width of the language model")
    arguments.add_argument("--budget", type=int, default=64)
    arguments.add_argument("--json", type=Path, help="file to write")
    options = arguments.parse_args()
    if options.quick:
        options.side, options.width, options.latents, options.language = 8, 64, 512, 128
        options.budget, options.rounds = 16, 3
    torch.manual_seed(options.seed)
    image, projector, words, generic = scene(options.side, options.width, options.language)
    tower = None if options.without_tower else make_tower(options.side, options.width)
    pixels = torch.randn(1, 3, 14 * options.side, 14 * options.side)
    sae = SAE(normalize(torch.randn(options.latents, options.width), dim=1), kind="batchtopk", threshold=0.5)

    def request(reducer: Reducer, question: Tensor) -> Callable[[], Tensor]:
        @torch.no_grad()
        def run() -> Tensor:
            tokens = image
            if tower is not None:
                tower(pixels)
            if reducer.needs:
                signals = {"projected": projector(image.patches), "words": question, "generic_words": generic}
                tokens = image.with_(signals=signals)
            return projector(reducer.plan(tokens).apply(image.patches))

        return run

    blind = make("torino-x", sae=sae, budget=options.budget)
    asking = make("torino-q", sae=sae, budget=options.budget)
    tasks = {
        "torino-x": request(blind, words),
        "torino-q, a question that stands out": request(asking, words),
        "torino-q, an unrelated question": request(asking, torch.randn_like(words)),
    }
    seconds = time_side_by_side(tasks, options.rounds)
    ratios = {name: ratio(values, seconds["torino-x"]) for name, values in seconds.items()}
    rows = [[name, f"{statistics.median(seconds[name]) * 1e3:.1f}", f"{ratios[name]:.3f}"] for name in tasks]
    print(table(["method", "milliseconds, median", "ratio to torino-x"], rows))
    worst = max(ratios.values())
    print(f"Largest ratio {worst:.3f}: {'within' if worst <= LIMIT else 'above'} the limit of {LIMIT}.")
    if options.json is not None:
        result = {
            "command": "python benchmarks/query.py",
            "settings": {name: value for name, value in vars(options).items() if name != "json"},
            "machine": machine(),
            "seconds": seconds,
            "ratios": ratios,
        }
        options.json.write_text(json.dumps(result, indent=1, default=str) + "\n")


def make_tower(side: int, width: int) -> nn.Module:
    """Return a tower with the 23 blocks that LLaVA-1.5 runs, with random weights."""
    config = CLIPVisionConfig(
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=23,
        num_attention_heads=max(1, width // 64),
        image_size=14 * side,
        patch_size=14,
    )
    return CLIPVisionModel(config).eval()


def scene(side: int, width: int, language: int) -> tuple[VisualTokens, nn.Module, Tensor, Tensor]:
    """Return an image, a projector, the words of a question and those of generic questions."""
    centers = 0.7 * torch.randn(1, width) + 0.8 * torch.randn(48, width)
    patches = centers[torch.randint(48, (side * side,))] + 0.5 * torch.randn(side * side, width)
    projector = nn.Sequential(nn.Linear(width, language), nn.GELU(), nn.Linear(language, language)).eval()
    with torch.no_grad():
        words = torch.cat([projector(patches[:1]), torch.randn(7, language)])
    return VisualTokens(patches, (side, side)), projector, words, torch.randn(80, language)


if __name__ == "__main__":
    main()
