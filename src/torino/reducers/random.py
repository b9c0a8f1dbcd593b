"""Random: a uniform draw of patches, the baseline that every other method has to beat."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from torino.core.errors import BadParameter
from torino.core.reduction import Reduction
from torino.core.tokens import VisualTokens
from torino.reducers._checks import check_choice, check_count, unmet
from torino.reducers.base import Reducer, register

Order = Literal["raster", "native"]
SAMPLE = 16  # patches that the fingerprint reads
STEP = 0.25  # its resolution, coarse against rounding in the encoder


@register("random")
@dataclass(frozen=True)
class Random(Reducer):
    """Keep ``budget`` patches drawn uniformly without replacement.

    The generator of an image is seeded with ``seed`` and a fingerprint of its patches, so an image gets the same
    draw alone, in any batch and in any order, and two images get different ones. A draw with a smaller budget is
    part of the draw with a larger one.

    There is no paper; benchmarks of the field keep the patches drawn in index order, as raster order does here.
    Report several seeds. Reads the patches alone; prunes; the kept patches have no score.

    Parameters
    ----------
    budget : int
        Exactly this many tokens, at most N.
    seed : int
        Another seed gives another draw of every image.
    order : {"raster", "native"}
        By place, or in the order of the draw.
    """

    budget: int
    seed: int = 0
    order: Order = "raster"

    emits_cls: ClassVar[bool] = False
    paper: ClassVar[str] = "none, the common baseline"
    merges: ClassVar[bool] = False
    adaptive: ClassVar[bool] = False
    cost: ClassVar[str] = "O(N)"
    original_licence: ClassVar[str] = "no original"

    def __post_init__(self) -> None:
        """Refuse hyperparameters out of range."""
        check_count("budget", self.budget)
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise BadParameter(f"seed must be a whole number, got {self.seed!r}.")
        check_choice("order", self.order, Order)

    def plan(self, tokens: VisualTokens) -> Reduction:
        """Plan one image."""
        if self.budget > len(tokens):
            raise unmet(self.name, self.budget, len(tokens), "its patches")
        told = f"{self.seed} {tokens.grid}".encode() + fingerprint(tokens.patches)
        source = torch.Generator().manual_seed(int.from_bytes(blake2b(told, digest_size=8).digest(), "little"))
        kept = torch.randperm(len(tokens), generator=source)[: self.budget]
        return Reduction.pick(kept.sort().values if self.order == "raster" else kept, tokens.grid, self.spec)


def fingerprint(patches: Tensor) -> bytes:
    """A few bytes that tell one image from another, mostly the same after rounding errors in the encoder.

    Of up to 16 patches spread over the image, the sum with alternating signs over the norm, in steps of a quarter.
    Hashing every bit instead would be slower, and would call an image another one when the encoder, run on another
    batch, rounds its last bits differently.
    """
    count = min(len(patches), SAMPLE)
    picked = torch.arange(count, device=patches.device) * len(patches) // count
    some = patches.detach().index_select(0, picked).cpu().double().numpy()
    sums = some[:, ::2].sum(1) - some[:, 1::2].sum(1)
    norms = np.sqrt((some * some).sum(1)).clip(np.finfo(np.float64).tiny)
    return np.rint(sums / norms / STEP).astype("<i8").tobytes()
