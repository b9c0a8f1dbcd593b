"""Tokens, an SAE and settings for latency benchmarks that take milliseconds."""

from __future__ import annotations

from typing import Any

import torch

from torino import SAE, VisualTokens
from torino.evaluation.protocol import Setting


def make_token_images(count: int = 3) -> list[VisualTokens]:
    """Return images of 36 tokens of width 32, near six centers."""
    source = torch.Generator().manual_seed(0)
    centers = torch.randn(6, 32, generator=source)
    return [
        VisualTokens.of(
            centers[torch.randint(6, (36,), generator=source)] + 0.1 * torch.randn(36, 32, generator=source)
        )
        for _ in range(count)
    ]


def make_small_sae() -> SAE:
    """Return an SAE of 24 latents for these tokens."""
    return SAE(torch.randn(24, 32, generator=torch.Generator().manual_seed(1)))


def bench_settings(
    methods: str = "all", budget: str = "9", kd: str = "1,1", **options: Any
) -> tuple[list[Setting], list[str]]:
    """Return the settings of ``torino bench`` and its notes about methods that are left out."""
    from torino.cli._common import parse_budgets, parse_pairs
    from torino.cli.bench import _settings

    given: dict[str, Any] = {"saes": {"small": make_small_sae()}, "with_model": False, "with_clip": False, **options}
    return _settings(methods, parse_budgets("--budget", budget), parse_pairs(kd), **given)
