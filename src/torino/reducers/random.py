"""Random selection of patches, the baseline."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from torino.core.reduction import Reduction
from torino.core.tokens import VisualTokens
from torino.reducers._checks import budget_error, check_choice, check_count, check_integer
from torino.reducers._similarity import nearest_in_frame
from torino.reducers.base import Order, Reducer, register

SAMPLE_SIZE = 16  # number of patches that the fingerprint reads
RESOLUTION = 0.25  # step of the fingerprint, large compared to rounding errors of the encoder


@register("random")
@dataclass(frozen=True)
class Random(Reducer):
    """Keep patches drawn uniformly without replacement.

    The random generator is seeded with ``seed`` and a fingerprint of the patches. An image therefore gets the same draw
    alone, in any batch and in any order, and different images get different draws. A draw with a smaller budget is a
    subset of the draw with a larger one.

    There is no paper. Benchmarks in the literature keep the drawn patches in index order, as raster order does here.
    Report several seeds. Reads only the patches; prunes; the kept patches have no score.

    Parameters
    ----------
    budget : int
        Exact number of tokens, at most N.
    seed : int
        Random seed; another seed changes the draw of every image.
    order : {"raster", "native"}
        By position, or in the order of the draw.
    """

    budget: int
    seed: int = 0
    order: Order = "raster"

    emits_cls: ClassVar[bool] = False
    takes_frames: ClassVar[bool] = True
    paper: ClassVar[str] = "none, the common baseline"
    merges: ClassVar[bool] = False
    adaptive: ClassVar[bool] = False
    cost: ClassVar[str] = "O(N)"
    original_license: ClassVar[str] = "no original"

    def __post_init__(self) -> None:
        """Validate the hyperparameters."""
        check_count("budget", self.budget)
        check_integer("seed", self.seed)
        check_choice("order", self.order, Order)

    def plan(self, tokens: VisualTokens) -> Reduction:
        """Plan one image."""
        if self.budget > len(tokens):
            raise budget_error(self.name, self.budget, len(tokens))
        seed = image_seed(f"{self.seed} {tokens.grid}", tokens.patches)
        kept = torch.randperm(len(tokens), generator=torch.Generator().manual_seed(seed))[: self.budget]
        kept = kept.sort().values if self.order == "raster" else kept
        return Reduction.pick(
            kept, by=self.spec, assigned=nearest_in_frame(tokens.patches, kept, tokens.frames), **tokens.layout
        )


def image_seed(prefix: str, patches: Tensor) -> int:
    """Return a random seed that depends on a prefix and on the image, but not on its batch."""
    return int.from_bytes(blake2b(prefix.encode() + fingerprint(patches), digest_size=8).digest(), "little")


def fingerprint(patches: Tensor) -> bytes:
    """Return a few bytes that identify an image and rarely change with rounding errors of the encoder.

    They are computed from up to 16 patches at regular intervals: the sum with alternating signs divided by the norm, in
    steps of a quarter. A hash of all bits would be slower, and would change when the encoder runs on another batch and
    rounds the last bits differently.
    """
    count = min(len(patches), SAMPLE_SIZE)
    picked = torch.arange(count, device=patches.device) * len(patches) // count
    sample = patches.detach().index_select(0, picked).cpu().double().numpy()
    sums = sample[:, ::2].sum(1) - sample[:, 1::2].sum(1)
    norms = np.sqrt((sample * sample).sum(1)).clip(np.finfo(np.float64).tiny)
    return np.rint(sums / norms / RESOLUTION).astype("<i8").tobytes()
