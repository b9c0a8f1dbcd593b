"""ApET: keep the patches that a few basis patches approximate worst, and merge the others into them.

ApET: Approximation-Error Guided Token Compression for Efficient VLMs (Ma et al., CVPR 2026).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from torino.core.reduction import Reduction
from torino.core.tokens import VisualTokens
from torino.reducers._checks import budget_error, check_choice, check_count, check_integer
from torino.reducers._matching import MergedSequence, mean_reduction
from torino.reducers._similarity import nearest_kept
from torino.reducers.base import Order, Reducer, register
from torino.reducers.random import image_seed

RIDGE = 1e-5


@register("apet")
@dataclass(frozen=True)
class ApET(Reducer):
    """Keep the patches of largest approximation error and merge the others into them (ApET).

    1. ``basis`` patches are chosen by farthest-point sampling with squared Euclidean distances, from a random start.
    2. Every patch x is approximated by a linear combination of the basis B: w minimizes ‖x − Bw‖² + 1e-5·‖w‖². Its
       error is e = ‖x − Bw‖.
    3. The B patches of largest error are kept, ties to the lowest index, but the basis takes the place of those with
       the smallest errors among them.
    4. Every other patch is averaged into the most similar kept patch (cosine).

    The score of a token is its error. Reads only the patches. Differences from the release: the random start depends on
    ``seed`` and the image, not on the batch. A patch that repeats a basis patch exactly is not chosen for the basis
    again, so the basis may be smaller. The release also prunes in layer 16 of the language model, which is not part of
    this method.

    Parameters
    ----------
    budget : int
        Exact number of tokens, at most N.
    basis : int
        Number of basis patches; at most the budget are used.
    seed : int
        Seed of the first basis patch.
    order : {"raster", "native"}
        By position, or basis first and then by descending error.
    """

    budget: int
    basis: int = 10
    seed: int = 0
    order: Order = "raster"

    takes_frames: ClassVar[bool] = True
    paper: ClassVar[str] = "Ma et al., CVPR 2026"
    merges: ClassVar[bool] = True
    adaptive: ClassVar[bool] = False
    cost: ClassVar[str] = "O(N·D·B)"
    original_license: ClassVar[str] = "none stated"

    def __post_init__(self) -> None:
        """Validate the hyperparameters."""
        check_count("budget", self.budget)
        check_count("basis", self.basis)
        check_integer("seed", self.seed)
        check_choice("order", self.order, Order)

    def plan(self, tokens: VisualTokens) -> Reduction:
        """Plan one image."""
        n = len(tokens)
        if self.budget > n:
            raise budget_error(self.name, self.budget, n)
        x = tokens.patches.detach().double().cpu().numpy()
        start = image_seed(f"{self.seed} {tokens.grid}", tokens.patches) % n
        basis = farthest_points(x, min(self.basis, self.budget), start)
        error = approximation_errors(x, basis)
        ranked = np.argsort(-error, kind="stable")
        others = ranked[~np.isin(ranked, basis)][: self.budget - len(basis)]
        kept = np.concatenate([basis, others])
        if self.order == "raster":
            kept.sort()
        anchor = torch.from_numpy(kept)
        label = nearest_kept(tokens.patches, anchor)
        merged = mean_reduction(MergedSequence(label, anchor), tokens.layout, self.spec, order="native")
        role = tuple("basis" if patch in basis else "primary" for patch in kept.tolist())
        return replace(merged, role=role, score=torch.from_numpy(error[kept]).float())


def farthest_points(x: NDArray[np.float64], count: int, start: int) -> NDArray[np.int64]:
    """Choose rows by farthest-point sampling, ties to the lowest index; stop when all rows are repetitions."""
    chosen = [start]
    distance = ((x - x[start]) ** 2).sum(1)
    while len(chosen) < count and distance.max() > 0:
        chosen.append(int(distance.argmax()))
        distance = np.minimum(distance, ((x - x[chosen[-1]]) ** 2).sum(1))
    return np.array(chosen)


def approximation_errors(x: NDArray[np.float64], basis: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return how far each row is from its regularized least-squares approximation by the basis rows."""
    rows = x[basis]
    gram = rows @ rows.T + RIDGE * np.eye(len(rows))
    weights = np.linalg.solve(gram, rows @ x.T)
    return np.linalg.norm(x - weights.T @ rows, axis=1)
