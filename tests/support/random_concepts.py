"""Random concepts with many ties, and images with clustered patches."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from torino import VisualTokens
from torino.core.concepts import Concepts


@st.composite
def random_concepts(draw: Any) -> Concepts:
    """Draw concepts with few latents and few activation levels, so that many patches tie; some are silent."""
    n, k, latents = draw(st.integers(1, 14)), draw(st.integers(1, 4)), draw(st.integers(4, 9))
    seed = draw(st.integers(0, 10_000))
    generator = np.random.default_rng(seed)
    index = np.stack([generator.permutation(latents)[:k] for _ in range(n)])
    levels = generator.integers(1, draw(st.sampled_from([2, 4, 1000])) + 1, (n, k)).astype(np.float32)
    value = -np.sort(-levels, 1)
    silent = np.arange(k) >= generator.integers(0, k + 1, n)[:, None]
    return Concepts(
        torch.from_numpy(np.where(silent, -1, index)),
        torch.from_numpy(np.where(silent, 0, value).astype(np.float32)),
        torch.from_numpy(np.where(silent[:, 0], 0, value[:, 0]).astype(np.float32)),
    )


def clustered_images(noise: float) -> list[VisualTokens]:
    """Return three images of 6 × 6 patches in 2, 4 and 6 clusters with added noise."""
    generator = torch.Generator().manual_seed(0)
    images = [
        VisualTokens(torch.randn(6, 20, generator=generator)[torch.randint(n, (36,), generator=generator)], (6, 6))
        for n in (2, 4, 6)
    ]
    return [image.with_(patches=image.patches + noise * torch.randn(36, 20, generator=generator)) for image in images]
