"""PruneSID: group patches by principal components, suppress near-duplicates, and divide the budget among groups.

Prune Redundancy, Preserve Essence: Vision Token Compression in VLMs via Synergistic Importance-Diversity (Fang, Lyu,
Zhang et al., ICLR 2026, arXiv 2603.09480). Implemented from descriptions of the method and of the released code.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import normalize

from torino.core.errors import BadParameter, BadTokens
from torino.core.reduction import Reduction
from torino.core.tokens import VisualTokens
from torino.reducers._checks import (
    budget_error,
    check_choice,
    check_count,
    check_flag,
    check_integer,
    check_number,
    read_signal,
)
from torino.reducers._similarity import gram_matrix, nearest_kept
from torino.reducers.base import Fidelity, Order, Reducer, register
from torino.reducers.random import image_seed

Decomposition = Literal["exact", "randomized"]
Ints = NDArray[np.int64]

POWER_ITERATIONS = 2  # of the randomized decomposition, as in the released code

# subspace iteration
EXTRA_DIRECTIONS = 32  # directions iterated in addition to those returned
MIN_SIZE_RATIO = 5  # matrix size per iterated direction from which on it is faster than a full decomposition
TOLERANCE = 1e-13  # residual of an eigenvector, relative to the largest eigenvalue
MAX_ITERATIONS, MAX_DEGREE = 5, 10
MAX_LOG_GROWTH = 40  # log ratio of largest to smallest growth; beyond it rounding errors dominate the weak directions


@register("prunesid")
@dataclass(frozen=True)
class PruneSID(Reducer):
    """Keep the best patches of each principal-component group, near-duplicates last (PruneSID).

    For a budget of B tokens:

    1. Z = σ(patches), centered; V (N × K) are its K = ⌊B/4⌋ strongest principal directions over the patches, the right
       singular vectors of Zᵀ. The group of patch i is argmax_j |V_ij|.
    2. ρ is the mean cosine similarity of two different patches, τ = (B/32)·ρ.
    3. In each group, by descending score, a patch is suppressed if a kept one has a cosine above τ with it.
    4. Each group gets a number of tokens that grows with the number of kept patches (:func:`allocate`). It gives its
       kept patches by descending score, then, if these are not enough, the suppressed ones by descending score.

    Parameters
    ----------
    budget : int, optional
        Exact number of tokens, including the CLS token if it is part of the output. Required unless ``dynamic=True``.
    fidelity : {"released", "paper"}
        ``"released"`` scores patches by CLS attention (sum over heads), subtracts from each patch its mean over
        channels, and outputs the CLS token. ``"paper"`` scores by the loading |V_i,g(i)|, subtracts the mean over
        patches, outputs only patches, and needs no signal besides them.
    decomposition : {"exact", "randomized"}
        V from an eigendecomposition of ZZᵀ in float64, or, as released, from a randomized range finder of K columns
        with two power iterations in float32. The latter is several times faster, approximate in the weaker directions,
        and depends on the order of the patches. Two draws of the release agree on 0.22 to 0.71 of their patches
        (Jaccard), so report several seeds of ``"randomized"``.
    dynamic : bool
        Adapt the budget to the image: B = round(mean_budget·φ/mean_information), where φ = 1 − ρ is the information of
        the image, at least 4 and at most all tokens.
    mean_budget : int, optional
        For ``dynamic``: number of tokens of an image of average information.
    mean_information : float, optional
        For ``dynamic``: φ of an average image, as measured by :func:`calibrate_information` on reference images. The
        paper states only that B is proportional to φ, and the released code has no dynamic budget.
    seed : int
        Seed of the randomized decomposition. The draw depends on it and on the patches, not on the batch.
    order : {"raster", "native"}
        By position with the CLS token last, or as released: CLS token, then group by group, best first.

    Notes
    -----
    Deviations from both sources: budgets below 4 get one group instead of none. K is at most min(N, D). Components
    without variance (rank below K, for example with identical patches) are dropped, since their direction is arbitrary.
    With a budget of all patches the allocation stops once every patch is granted; the released loop would not end.
    Ranks are sorted instead of written into scores from 1000 downwards, which is the same for up to 1000 patches. The
    released code draws V from the global random state.
    """

    budget: int | None = None
    fidelity: Fidelity = "released"
    decomposition: Decomposition = "exact"
    dynamic: bool = False
    mean_budget: int | None = None
    mean_information: float | None = None
    seed: int = 0
    order: Order = "raster"

    needs: ClassVar[frozenset[str]] = frozenset({"cls", "cls_attention"})
    paper: ClassVar[str] = "Fang et al., ICLR 2026, arXiv 2603.09480"
    merges: ClassVar[bool] = False
    adaptive: ClassVar[bool] = True
    emits_cls: ClassVar[bool] = True
    cost: ClassVar[str] = "O(N²·D + N³); randomized O(N²·D + B·N·D)"
    original_license: ClassVar[str] = "Apache-2.0 by its README, no license file"

    def __post_init__(self) -> None:
        """Validate the hyperparameters."""
        for name, value in (("budget", self.budget), ("mean_budget", self.mean_budget)):
            check_count(name, 1 if value is None else value)
        if self.mean_information is not None:
            check_number("mean_information", self.mean_information)
            if not 0 < self.mean_information <= 2:
                raise BadParameter(
                    f"mean_information must be above 0 and at most 2, like 1 − ρ, got {self.mean_information!r}."
                )
        check_integer("seed", self.seed)
        check_flag("dynamic", self.dynamic)
        check_choice("fidelity", self.fidelity, Fidelity)
        check_choice("decomposition", self.decomposition, Decomposition)
        check_choice("order", self.order, Order)
        self._check_budget()
        if self.fidelity == "paper":  # attributes of this instance, not of the class
            object.__setattr__(self, "needs", frozenset[str]())
            object.__setattr__(self, "emits_cls", False)

    def _check_budget(self) -> None:
        if not self.dynamic:
            if self.budget is None:
                raise BadParameter(
                    "prunesid needs budget, the exact number of tokens of an image. "
                    "For a budget that depends on the image give dynamic=True, mean_budget and mean_information."
                )
            if self.mean_budget is not None or self.mean_information is not None:
                raise BadParameter("mean_budget and mean_information require dynamic=True, but dynamic is False.")
        else:
            if self.budget is not None:
                raise BadParameter(
                    f"budget={self.budget} is an exact count and cannot be combined with dynamic=True. "
                    f"Give mean_budget={self.budget} instead."
                )
            if self.mean_budget is None or self.mean_information is None:
                raise BadParameter(
                    "dynamic=True needs mean_budget, the number of tokens of an average image, and mean_information, "
                    "which calibrate_information(tokens) measures on reference images."
                )

    def plan(self, tokens: VisualTokens) -> Reduction:
        """Plan one image."""
        n, extra = len(tokens), int(self.emits_cls)
        if self.emits_cls:
            tokens.signal("cls", self.name)
        unit = normalize(tokens.patches.detach().float(), dim=1)
        rho = redundancy(unit)
        budget = self._budget(rho, n + extra)
        loading = self._loading(tokens.patches, max(1, budget // 4))
        group = loading.argmax(1)  # the first of the largest
        score = loading.max(1)
        if self.fidelity == "released":
            attention = read_signal(tokens, "cls_attention", self.name, (None, n))
            score = attention.float().sum(0).cpu().double().numpy()

        order = np.lexsort((-score, group))  # group by group, best first, ties by ascending index
        kept = suppress(unit, threshold(budget, rho), order, group)
        sizes = np.bincount(group, minlength=loading.shape[1])
        share = allocate(np.bincount(group[order[kept]], minlength=len(sizes)), sizes, budget, budget - extra)
        ranked = order[np.lexsort((~kept, group[order]))]  # stable: in each group the kept ones, then the suppressed
        rank_in_group = np.arange(n) - (sizes.cumsum() - sizes)[group[ranked]]
        chosen = ranked[rank_in_group < share[group[ranked]]]

        sources = np.concatenate([np.full(extra, n), chosen])
        sources = np.sort(sources) if self.order == "raster" else sources
        scores = torch.from_numpy(np.append(score, np.nan)[sources])
        picked = torch.from_numpy(sources)
        assigned = nearest_kept(tokens.patches, picked)
        plan = Reduction.pick(picked, tokens.grid, self.spec, score=scores, assigned=assigned)
        return replace(plan, role=tuple("cls" if source == n else "primary" for source in sources.tolist()))

    def _budget(self, rho: float, available: int) -> int:
        """Return the number of tokens of this image, given the number of available tokens."""
        if self.mean_budget is not None and self.mean_information is not None:
            budget = round(self.mean_budget * (1 - rho) / self.mean_information)
            return min(max(budget, 4), available)
        budget = self.budget or 1
        if budget > available:
            unit = "tokens (patches and the CLS token)" if self.emits_cls else "patches"
            raise budget_error(self.name, budget, available, unit)
        return budget

    def _loading(self, patches: Tensor, groups: int) -> NDArray[np.float64]:
        """Return |V|, the weight of each patch in each principal direction with variance, (N, K)."""
        exact = self.decomposition == "exact"
        z = patches.detach().float().to(torch.float64 if exact else torch.float32).sigmoid()
        norm = float(z.flatten().dot(z.flatten())) ** 0.5
        z.sub_(z.mean(1 if self.fidelity == "released" else 0, keepdim=True))
        groups = min(groups, *z.shape)
        if exact:
            value, vector = leading_eigenvectors(gram_matrix(z if len(z) <= z.shape[1] else z.T), groups)
            value = value.clamp(min=0).sqrt()
        else:
            generator = torch.Generator().manual_seed(image_seed(f"prunesid {self.seed}", patches))
            basis = torch.randn(len(z), groups, generator=generator).to(z.device)
            basis = torch.linalg.qr(z.T @ basis).Q
            for _ in range(POWER_ITERATIONS):
                basis = torch.linalg.qr(z @ basis).Q
                basis = torch.linalg.qr(z.T @ basis).Q
            vector, value, _ = torch.linalg.svd(z @ basis, full_matrices=False)
        # smaller values can be rounding errors, relative to the strongest direction or to the subtracted mean
        relative_to_first, relative_to_mean = (1e-6, 1e-10) if exact else (1e-4, 1e-6)
        real = value > max(relative_to_first * float(value[0]), relative_to_mean * norm)
        if len(vector) < len(z):  # directions over the channels
            vector = z @ (vector / value.where(real, torch.inf))
        loading = (vector * real)[:, : max(1, int(real.sum()))].abs().double().cpu().numpy()
        return loading.round(9)  # rounding makes equal patches tie


def leading_eigenvectors(gram: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the ``count`` largest eigenvalues, descending, of a positive semidefinite matrix, and vectors (N, count).

    The result is as accurate as that of :func:`torch.linalg.eigh`, and faster if ``count`` is small compared to N (see
    :func:`_subspace_iteration`). If the eigenvalues decay too slowly for a fast iteration, ``eigh`` is used.
    """
    width = count + EXTRA_DIRECTIONS
    result = _subspace_iteration(gram, count, width) if MIN_SIZE_RATIO * width <= len(gram) else None
    if result is None:
        value, vector = torch.linalg.eigh(gram)
        return value.flip(0)[:count], vector.flip(1)[:, :count]
    return result


def _subspace_iteration(gram: Tensor, count: int, width: int) -> tuple[Tensor, Tensor] | None:
    """Compute leading eigenvalues and vectors by Chebyshev-filtered subspace iteration; None if it converges slowly.

    Each iteration replaces ``width`` directions, initially random, by the best approximations of eigenvectors in their
    span and multiplies them by a Chebyshev polynomial of the matrix. The polynomial is small on all eigenvalues below
    the smallest Ritz value and grows beyond it (Zhou, Saad, Tiago and Chelikowsky, 2006).
    """
    start = torch.randn(len(gram), width, generator=torch.Generator().manual_seed(0)).to(gram)
    value, vector, image = _rayleigh_ritz(gram, gram @ (gram @ start))
    for iteration in range(MAX_ITERATIONS):
        first, last, cut = float(value[0]), float(value[count - 1]), float(value[-1])
        error = float((image - vector * value)[:, :count].norm(dim=0).max())
        if error <= TOLERANCE * first:
            return value[:count], vector[:, :count]
        if cut <= 1e-13 * first or last < 1.5 * cut or iteration == MAX_ITERATIONS - 1:
            break
        # log of the growth per degree, for the largest and the smallest wanted eigenvalue
        first_growth, last_growth = math.acosh(2 * first / cut - 1), math.acosh(2 * last / cut - 1)
        sufficient = math.ceil((math.log(error / (TOLERANCE * first)) + 1) / last_growth)
        degree = min(sufficient, int(MAX_LOG_GROWTH / max(first_growth - last_growth, MAX_LOG_GROWTH / MAX_DEGREE)))
        previous, current = vector, (2 / cut) * image - vector
        for _ in range(degree - 1):
            previous, current = current, previous.add_(current, alpha=2).addmm_(gram, current, beta=-1, alpha=4 / cut)
        value, vector, image = _rayleigh_ritz(gram, current / current.norm(dim=0))
    return None


def _rayleigh_ritz(gram: Tensor, columns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return Ritz values (descending), Ritz vectors in the span of the columns, and the matrix times these vectors."""
    basis = torch.linalg.qr(columns).Q
    image = gram @ basis
    value, rotation = torch.linalg.eigh(basis.T @ image)
    rotation = rotation.flip(1)
    return value.flip(0), basis @ rotation, image @ rotation


def suppress(unit: Tensor, tau: float, order: Ints, group: Ints) -> NDArray[np.bool_]:
    """Return which patches are kept: those without a kept, better patch of their group at a cosine above ``tau``.

    A patch is decided as soon as all better patches that are too similar to it are decided: patches without undecided
    rivals are kept, and their own rivals are suppressed. This is the greedy rule for all groups at once, in as many
    rounds as its longest chain.

    Parameters
    ----------
    unit : Tensor of shape (N, D)
        Normalized patches.
    tau : float
        Cosine above which two patches are too similar.
    order : array of shape (N,)
        Patches, within each group from best to worst.
    group : array of shape (N,)
        Group of each patch.

    Returns
    -------
    array of shape (N,), bool
        In the order of ``order``.
    """
    if tau >= 1:  # no cosine is above 1
        return np.ones(len(order), np.bool_)
    by_group = np.argsort(group[order], kind="stable")
    ranked = unit[torch.from_numpy(order[by_group]).to(unit.device)]
    rivals = unit.new_zeros(len(order), len(order))
    ends = np.bincount(group).cumsum().tolist()
    for first, end in pairwise([0, *ends]):
        members = ranked[first:end]
        rivals[first:end, first:end] = members @ members.T > tau
    rivals.triu_(1)  # the patch of the row is better than that of the column and too similar to it
    undecided = torch.ones(len(order), dtype=torch.bool, device=unit.device)
    is_kept = ~undecided
    while bool(undecided.any()):
        free = undecided & (undecided.float() @ rivals == 0)
        is_kept |= free
        undecided &= ~free & (free.float() @ rivals == 0)
    kept = np.empty(len(order), np.bool_)
    kept[by_group] = is_kept.cpu().numpy()
    return kept


def threshold(budget: int, rho: float) -> float:
    """Return τ = (B/32)·ρ: 6ρ, 4ρ and 2ρ for budgets of 192, 128 and 64. With τ ≥ 1 nothing is suppressed."""
    return budget / 32 * rho


def redundancy(unit: Tensor) -> float:
    """Return ρ, the mean cosine similarity of two different patches, from normalized patches of shape (N, D).

    The sum over all pairs is ‖Σ u_i‖² − Σ‖u_i‖², so no N × N matrix is needed. The result is 0 for a single patch.

    Examples
    --------
    >>> redundancy(torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]))
    0.3333333333333333
    """
    n = len(unit)
    if n < 2:
        return 0.0
    wide = unit.double()
    all_pairs, equal_pairs = wide.sum(0).square().sum(), wide.flatten().dot(wide.flatten())
    return float((all_pairs - equal_pairs) / (n * (n - 1)))


def calibrate_information(tokens: Iterable[VisualTokens]) -> float:
    """Return the mean of φ = 1 − ρ over reference images, the ``mean_information`` of a dynamic budget."""
    scores = [1 - redundancy(normalize(image.patches.detach().float(), dim=1)) for image in tokens]
    if not scores:
        raise BadTokens("calibrate_information needs at least one image, got none. A few hundred are recommended.")
    return sum(scores) / len(scores)


def allocate(kept: Ints, sizes: Ints, budget: int, patches: int) -> Ints:
    """Return how many tokens each group gives.

    Parameters
    ----------
    kept, sizes : arrays of shape (K,)
        Number of patches of each group that are not suppressed, and of all its patches.
    budget : int
        Number of tokens of the image, including the CLS token if there is one. It determines the upper limits.
    patches : int
        Number of these tokens that are patches.

    Returns
    -------
    array of shape (K,)
        The sum is ``patches``.

    Examples
    --------
    >>> allocate(np.array([3, 1, 4]), np.array([4, 1, 5]), budget=8, patches=7).tolist()
    [3, 1, 3]
    """
    if patches == 0:  # a budget of 1, used by the CLS token
        return np.zeros_like(sizes)
    minimum = np.minimum(1, sizes)
    maximum = np.minimum(np.minimum(5 * -(-budget // 64), sizes), kept)
    while maximum.sum() < min(budget, sizes.sum()):
        maximum = np.minimum(maximum + 1, sizes)
    rest = max(0, patches - int(minimum.sum()))
    edges = np.rint(rest * kept.cumsum() / kept.sum()).astype(np.int64)  # a ratio of integers: halves are exact
    share = np.minimum(minimum + np.diff(edges, prepend=0), maximum)
    by_kept = np.argsort(-kept, kind="stable")  # missing tokens come from the groups with most kept patches
    room = (maximum - share)[by_kept]
    share[by_kept] += np.clip(patches - share.sum() - (room.cumsum() - room), 0, room)
    return share
