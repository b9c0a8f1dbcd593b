"""Golden plans of all reducers, to detect unintended changes.

Record them again after an intended change::

    python tests/reducers/test_golden.py --record
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from torino import SAE, Reduction, VisualTokens, list_reducers, make
from torino.core.concepts import RawEmbedding
from torino.core.errors import UnmetBudget
from torino.datasets.bundled import example_sae, example_tokens
from torino.reducers import Downsample, Reducer, as_in_tower, get
from torino.testing import sample_tokens, sample_videos, simulate_language_model, simulate_tower

FILE = Path(__file__).with_name("golden_plans.safetensors")
WIDTH = 16
HOW_TO_RECORD = "Add its settings to SETTINGS and run: python tests/reducers/test_golden.py --record"
BUDGETS = (5, 16)
EXAMPLE_BUDGET = 64
# Settings besides the budgets, on the images of sample_tokens.
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "apet": [{"basis": 2, "order": "native"}, {"seed": 3}],
    "cdpruner": [{"relevance": "none"}, {"theta": 0.5, "negate": False}, {"space": "projected"}],
    "divprune": [{"space": "projected"}, {"order": "native"}],
    "evs": [{"space": "features"}, {"order": "native"}],
    "fastervlm": [{"order": "native"}],
    "flashvid": [{"budget": None}, {"order": "native"}],
    "folder": [{"metric": "keys", "class_token": True}, {"log_size_scale": "always"}],
    "folder-full": [{"alpha": 0.5, "order": "native"}],
    "folder-tower": [{"alpha": 0.5, "order": "native"}],
    "frames": [{"order": "native"}],
    "gtp": [{"graph": "semantic", "neighbors": 3, "hops": 3}, {"select": "cosine"}],
    "gtp-tower": [{"graph": "spatial", "alpha": 0.3}, {"proportional": False, "order": "native"}],
    "hiprune": [{"alpha": 1.0}, {"alpha": 1.0, "fidelity": "paper"}],
    "hired": [{"order": "native"}],
    "holov": [{"runs": 4, "order": "native"}, {"space": "projected"}],
    "pool": [{"keep_norm": True}, {"order": "native"}],
    "mmtok": [{"image_weight": 0.0}, {"order": "native"}],
    "prumerge": [{"budget": None}, {"budget": None, "extra_token": False, "neighbors": 3}],
    "prumerge-plus": [{"budget": None}, {"order": "native"}],
    "prunesid": [{"fidelity": "paper"}, {"decomposition": "randomized", "budget": 16}],
    "random": [{"seed": 1, "order": "native"}],
    "restore": [{"pruner": "divprune"}, {"order": "native"}],
    "scissor": [{"budget": None}, {"budget": None, "tau": 0.5, "order": "native"}],
    "scope": [{"alpha": 0.0}, {"order": "native"}],
    "scts": [{"coverage": "binary"}, {"m": 4, "order": "native"}],
    "tome": [{"steps": None, "step_order": "raster"}, {"class_token": False}],
    "tome-tower": [{"schedule": "decreasing"}, {"proportional": False, "order": "native"}],
    "torino-m": [{"budget": None, "k": 3, "delta": 2}, {"scale": "sqrt"}, {"budget": None, "silent": "keep"}],
    "torino-p": [
        {"budget": None, "k": 3, "delta": 2},
        {"rank": "pre-threshold"},
        {"budget": None, "silent": "literal"},
    ],
    "torino-x": [{"budget": None}, {"mode": "prune"}, {"locality": None}, {"concepts": 3, "order": "native"}],
    "vidcom2": [{"temperature": 0.1}, {"order": "native"}],
    "visionzip": [{"fidelity": "paper"}, {"contextual": 1, "order": "native"}],
    "vispruner": [{"important_ratio": 0.0}, {"order": "native"}],
}


def bundled_reducers() -> list[str]:
    """Return the methods in src, without those that ablations or plugins register."""
    return [name for name in list_reducers() if get(name).__module__.startswith("torino.reducers.")]


def small_sae() -> SAE:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(48, WIDTH, generator=generator)
    b_enc, b_dec = 0.1 * torch.randn(48, generator=generator), 0.1 * torch.randn(WIDTH, generator=generator)
    return SAE(weight, b_enc, b_dec=b_dec, kind="matryoshka", threshold=3.0, groups=(12, 36), k=4)


def build(name: str, sae: SAE | RawEmbedding, parameters: dict[str, Any]) -> Reducer:
    return make(name, **({"sae": sae} if "sae" in get(name).__dataclass_fields__ else {}), **parameters)  # type: ignore[attr-defined]


def plan(reducer: Reducer, image: VisualTokens) -> Reduction:
    if isinstance(reducer, Downsample):
        return reducer.plan_grid(image.grid)[1]
    if reducer.in_language_model:
        return simulate_language_model(reducer, image)
    in_tower = as_in_tower(reducer)
    return reducer.plan(image) if in_tower is None else simulate_tower(in_tower, image)[1]


def cases(name: str) -> Iterator[tuple[str, Reducer, list[VisualTokens]]]:
    """Yield the key, the reducer and the images of each case."""
    for parameters in [*({"budget": budget} for budget in BUDGETS), *SETTINGS.get(name, [])]:
        parameters = {"budget": BUDGETS[0], **parameters}
        reducer = build(name, small_sae(), parameters)
        key = ", ".join(f"{key}={value!r}" for key, value in parameters.items())
        videos = sample_videos(WIDTH, needs=reducer.needs) if get(name).for_videos else []
        yield f"{name}({key})", reducer, sample_tokens(WIDTH, needs=reducer.needs) + videos
    if not get(name).needs:  # the bundled example has no signals
        yield f"{name} on the example", build(name, example_sae(), {"budget": EXAMPLE_BUDGET}), example_tokens()


def compute(name: str) -> dict[str, Tensor]:
    """Return the plans of all cases of a reducer, concatenated over images.

    ``lengths`` holds the number of tokens of each image, -1 for an image that is too small for the budget; ``counts``
    the number of patches of each token, the differences of the offsets.
    """
    tensors: dict[str, Tensor] = {}
    for key, reducer, images in cases(name):
        plans, lengths = list[Reduction](), list[int]()
        for image in images:
            try:
                plans.append(plan(reducer, image))
                lengths.append(len(plans[-1]))
            except UnmetBudget:
                lengths.append(-1)
        fields = {
            "lengths": torch.tensor(lengths),
            "sources": torch.cat([result.sources for result in plans]),
            "counts": torch.cat([result.offsets.diff() for result in plans]),
            "anchor": torch.cat([result.anchor for result in plans]),
        }
        tensors |= {f"{key}/{field}": value.to(torch.int16) for field, value in fields.items()}
        tensors[f"{key}/weights"] = torch.cat([result.weights for result in plans])
    return tensors


@pytest.mark.parametrize("name", bundled_reducers())
def test_golden(name: str) -> None:
    golden = load_file(FILE)
    expected = {key: value for key, value in golden.items() if key.startswith((f"{name}(", f"{name} "))}
    if not expected:
        pytest.fail(f"No plans of {name} are recorded. {HOW_TO_RECORD}")
    tensors = compute(name)
    different = sorted(tensors.keys() ^ expected.keys())
    assert not different, f"The cases of {name} are not the recorded ones: {different}. {HOW_TO_RECORD}"
    for key, value in tensors.items():
        if key.endswith("/weights"):  # rounding differs between processors
            assert torch.allclose(value, expected[key], rtol=1e-5, atol=1e-7), key
        else:
            assert torch.equal(value, expected[key]), key


if __name__ == "__main__":
    if sys.argv[1:] != ["--record"]:
        sys.exit(f"Usage: python {sys.argv[0]} --record")
    torch.set_num_threads(1)
    tensors = {key: value for name in bundled_reducers() for key, value in compute(name).items()}
    save_file(tensors, FILE)
    print(f"Recorded {len(tensors)} tensors in {FILE} ({FILE.stat().st_size / 1000:.0f} kB).")  # noqa: T201
