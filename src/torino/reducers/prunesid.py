"""PruneSID: group patches by principal components, drop near-duplicates within each group, share out the budget.

Prune Redundancy, Preserve Essence: Vision Token Compression in VLMs via Synergistic Importance-Diversity (Fang, Lyu,
Zhang et al., ICLR 2026, arXiv 2603.09480). Written from descriptions of the method and of the released code.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from hashlib import blake2b
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
from torino.reducers._checks import check_choice, check_count, check_flag, check_number, read_signal, unmet
from torino.reducers.base import Reducer, register
from torino.reducers.divprune import products
from torino.reducers.random import fingerprint

Order = Literal["raster", "native"]
Fidelity = Literal["released", "paper"]
Decomposition = Literal["exact", "randomised"]
Ints = NDArray[np.int64]

ROUNDS = 2  # power iterations of the randomised decomposition, as in the released code

SPARE = 32  # directions followed beside those wanted
MANY = 5  # how many times more there must be than are followed, to be faster than all of them at once
SETTLED = 1e-13  # of the largest eigenvalue: how far from an eigenvector a direction may be
TURNS, DEGREE = 5, 10  # at most
GROWTH = 40  # strongest over weakest wanted, as a log: beyond this, rounding errors of the strong drown the weak


@register("prunesid")
@dataclass(frozen=True)
class PruneSID(Reducer):
    """Keep the best patches of each principal-component group, near-duplicates last (PruneSID).

    For a budget of B tokens:

    1. Z = σ(patches), centred; V (N × K) are its K = ⌊B/4⌋ strongest principal directions over the patches, the right
       singular vectors of Zᵀ. The group of patch i is argmax_j |V_ij|.
    2. ρ is the mean cosine similarity of two different patches, τ = (B/32)·ρ.
    3. In each group, by falling score, a patch is kept unless an already kept one has a cosine above τ with it.
    4. Each group is given a number of tokens that grows with the patches kept in it (:func:`allocate`), and gives its
       best: the kept ones by falling score, then, if these do not suffice, the suppressed ones by falling score.

    Parameters
    ----------
    budget : int, optional
        Exactly this many tokens, the CLS token included where it is emitted. Give it, or ``dynamic=True``.
    fidelity : {"released", "paper"}
        ``"released"`` scores patches by CLS attention (sum over heads), subtracts from each patch its mean over
        channels, and emits the CLS token. ``"paper"`` scores by the loading |V_i,g(i)|, subtracts the mean over
        patches, emits patches only, and needs no signal beyond them.
    decomposition : {"exact", "randomised"}
        V from an eigendecomposition of ZZᵀ in float64, or, as released, from a randomised range finder of K columns
        with two power iterations in float32: several times faster, approximate in the weaker directions, and dependent
        on the numbering of the patches.
    dynamic : bool
        Let the image decide: B = round(mean_budget·φ/mean_information), with φ = 1 − ρ its information, but at least 4
        and at most all tokens.
    mean_budget : int, optional
        For ``dynamic``: the number of tokens of an image of average information.
    mean_information : float, optional
        For ``dynamic``: φ of an average image; :func:`calibrate_information` measures it on reference images. The paper
        says only that B is proportional to φ, and the released code has no dynamic budget.
    seed : int
        For the randomised decomposition; the draw depends on it and on the patches of the image, not on the batch.
    order : {"raster", "native"}
        By place with the CLS token last, or the released one: CLS token, then group by group, best first.

    Notes
    -----
    Deviations from both sources: budgets below 4 get one group instead of none. K is at most min(N, D). Components
    without variance (rank below K, as with identical patches) are dropped, since their direction is arbitrary. With the
    image at full budget the allocation stops once every patch is granted; the released loop would not end. Ranks are
    sorted instead of written into scores from 1000 down, which is the same for up to 1000 patches. The released code
    draws V from the global random state.
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
    cost: ClassVar[str] = "O(N²·D + N³); randomised O(N²·D + B·N·D)"
    original_licence: ClassVar[str] = "Apache-2.0 by its README, no licence file"

    def __post_init__(self) -> None:
        """Refuse hyperparameters out of range."""
        for name, value in (("budget", self.budget), ("mean_budget", self.mean_budget)):
            check_count(name, 1 if value is None else value)
        if self.mean_information is not None:
            check_number("mean_information", self.mean_information)
            if not 0 < self.mean_information <= 2:
                raise BadParameter(
                    f"mean_information must be above 0 and at most 2, as 1 − ρ is, got {self.mean_information!r}."
                )
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise BadParameter(f"seed must be a whole number, got {self.seed!r}.")
        check_flag("dynamic", self.dynamic)
        check_choice("fidelity", self.fidelity, Fidelity)
        check_choice("decomposition", self.decomposition, Decomposition)
        check_choice("order", self.order, Order)
        self._check_budget()
        if self.fidelity == "paper":  # what this very reducer reads and gives
            object.__setattr__(self, "needs", frozenset[str]())
            object.__setattr__(self, "emits_cls", False)

    def _check_budget(self) -> None:
        if not self.dynamic:
            if self.budget is None:
                raise BadParameter(
                    "prunesid needs budget, the exact number of tokens of an image. "
                    "For one that follows the image give dynamic=True, mean_budget and mean_information."
                )
            if self.mean_budget is not None or self.mean_information is not None:
                raise BadParameter("mean_budget and mean_information belong to dynamic=True, and dynamic is False.")
        else:
            if self.budget is not None:
                raise BadParameter(
                    f"budget is an exact count, got {self.budget}, and with dynamic=True the image decides. "
                    f"Give mean_budget={self.budget} instead."
                )
            if self.mean_budget is None or self.mean_information is None:
                raise BadParameter(
                    "dynamic=True needs mean_budget, the tokens of an average image, and mean_information, its "
                    "information: calibrate_information(tokens) measures it on reference images."
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
            score = attention.detach().float().sum(0).cpu().double().numpy()

        order = np.lexsort((-score, group))  # group by group, best first, ties by rising index
        kept = suppress(unit, threshold(budget, rho), order, group)
        sizes = np.bincount(group, minlength=loading.shape[1])
        share = allocate(np.bincount(group[order[kept]], minlength=len(sizes)), sizes, budget, budget - extra)
        ranked = order[np.lexsort((~kept, group[order]))]  # stable: in each group the kept ones, then the suppressed
        place = np.arange(n) - (sizes.cumsum() - sizes)[group[ranked]]
        chosen = ranked[place < share[group[ranked]]]

        picks = np.concatenate([np.full(extra, n), chosen])
        picks = np.sort(picks) if self.order == "raster" else picks
        scores = torch.from_numpy(np.append(score, np.nan)[picks])
        plan = Reduction.pick(torch.from_numpy(picks), tokens.grid, self.spec, score=scores)
        return replace(plan, role=tuple("cls" if pick == n else "primary" for pick in picks.tolist()))

    def _budget(self, rho: float, most: int) -> int:
        """How many tokens this image gets, of ``most`` there are."""
        if self.mean_budget is not None and self.mean_information is not None:
            wanted = round(self.mean_budget * (1 - rho) / self.mean_information)
            return min(max(wanted, 4), most)
        budget = self.budget or 1
        if budget > most:
            raise unmet(self.name, budget, most, "its patches and CLS token" if self.emits_cls else "its patches")
        return budget

    def _loading(self, patches: Tensor, groups: int) -> NDArray[np.float64]:
        """|V|, the weight of each patch in each principal direction, (N, K); those without variance are left out."""
        exact = self.decomposition == "exact"
        z = patches.detach().float().to(torch.float64 if exact else torch.float32).sigmoid()
        size = float(z.flatten().dot(z.flatten())) ** 0.5
        z.sub_(z.mean(1 if self.fidelity == "released" else 0, keepdim=True))
        groups = min(groups, *z.shape)
        if exact:
            value, vector = leading(products(z if len(z) <= z.shape[1] else z.T), groups)
            value = value.clamp(min=0).sqrt()
        else:
            source = torch.Generator().manual_seed(self._seed(patches))
            basis = torch.randn(len(z), groups, generator=source).to(z.device)
            basis = torch.linalg.qr(z.T @ basis).Q
            for _ in range(ROUNDS):
                basis = torch.linalg.qr(z @ basis).Q
                basis = torch.linalg.qr(z.T @ basis).Q
            vector, value, _ = torch.linalg.svd(z @ basis, full_matrices=False)
        # what rounding alone can leave behind: of the strongest direction, and of the mean that was subtracted
        of_first, of_mean = (1e-6, 1e-10) if exact else (1e-4, 1e-6)
        real = value > max(of_first * float(value[0]), of_mean * size)
        if len(vector) < len(z):  # directions over the channels
            vector = z @ (vector / value.where(real, torch.inf))
        loading = (vector * real)[:, : max(1, int(real.sum()))].abs().double().cpu().numpy()
        return loading.round(9)  # so that equal patches, which rounding errors tell apart, tie

    def _seed(self, patches: Tensor) -> int:
        """A seed of its own for each image, whatever batch it comes in."""
        told = f"prunesid {self.seed}".encode() + fingerprint(patches)
        return int.from_bytes(blake2b(told, digest_size=8).digest(), "little")


def leading(gram: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The ``count`` largest eigenvalues, falling, of a symmetric matrix without negative ones, and vectors (N, count).

    As exact as :func:`torch.linalg.eigh`, and faster where few are wanted of many: see :func:`_filtered`. That is left
    to ``eigh`` where the eigenvalues fall so slowly that it would take long.
    """
    found = _filtered(gram, count, count + SPARE) if MANY * (count + SPARE) <= len(gram) else None
    if found is None:
        value, vector = torch.linalg.eigh(gram)
        return value.flip(0)[:count], vector.flip(1)[:, :count]
    return found


def _filtered(gram: Tensor, count: int, width: int) -> tuple[Tensor, Tensor] | None:
    """Leading eigenvalues and vectors by subspace iteration; None where these are not settled soon.

    ``width`` directions, at first random, are turned into the best approximations of eigenvectors within what they
    span, and multiplied by a Chebyshev polynomial of the matrix. That is small on all eigenvalues below the weakest
    of them, and the larger the farther beyond (Zhou, Saad, Tiago and Chelikowsky, 2006).
    """
    start = torch.randn(len(gram), width, generator=torch.Generator().manual_seed(0)).to(gram)
    value, vector, image = _within(gram, gram @ (gram @ start))
    for turn in range(TURNS):
        first, last, cut = float(value[0]), float(value[count - 1]), float(value[-1])
        error = float((image - vector * value)[:, :count].norm(dim=0).max())
        if error <= SETTLED * first:
            return value[:count], vector[:, :count]
        if cut <= 1e-13 * first or last < 1.5 * cut or turn == TURNS - 1:
            break
        far, near = math.acosh(2 * first / cut - 1), math.acosh(2 * last / cut - 1)  # growth with each degree, as logs
        enough = math.ceil((math.log(error / (SETTLED * first)) + 1) / near)
        degree = min(enough, int(GROWTH / max(far - near, GROWTH / DEGREE)))
        before, now = vector, (2 / cut) * image - vector
        for _ in range(degree - 1):
            before, now = now, before.add_(now, alpha=2).addmm_(gram, now, beta=-1, alpha=4 / cut)
        value, vector, image = _within(gram, now / now.norm(dim=0))
    return None


def _within(gram: Tensor, columns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rayleigh–Ritz: values falling, vectors, and the matrix times these, as good as what the columns span allows."""
    basis = torch.linalg.qr(columns).Q
    image = gram @ basis
    value, turn = torch.linalg.eigh(basis.T @ image)
    turn = turn.flip(1)
    return value.flip(0), basis @ turn, image @ turn


def suppress(unit: Tensor, tau: float, order: Ints, group: Ints) -> NDArray[np.bool_]:
    """Which patches survive: those that no surviving better one of their group is more like than ``tau``.

    A patch is settled as soon as all better ones that are too like it are: those free of open rivals survive, and their
    rivals go. That is the greedy rule, for all groups at once, in as many rounds as its longest chain.

    Parameters
    ----------
    unit : Tensor of shape (N, D)
        Normalised patches.
    tau : float
        The cosine above which two patches are too like each other.
    order : array of shape (N,)
        The patches, within each group from best to worst.
    group : array of shape (N,)
        Group of each patch.

    Returns
    -------
    array of shape (N,), bool
        In the order of ``order``.
    """
    if tau >= 1:  # no cosine is above 1
        return np.ones(len(order), np.bool_)
    sorted_ = np.argsort(group[order], kind="stable")
    ranked = unit[torch.from_numpy(order[sorted_]).to(unit.device)]
    rivals = unit.new_zeros(len(order), len(order))
    ends = np.bincount(group).cumsum().tolist()
    for first, end in pairwise([0, *ends]):
        mine = ranked[first:end]
        rivals[first:end, first:end] = mine @ mine.T > tau
    rivals.triu_(1)  # the row is better than the column, and too like it
    open_ = torch.ones(len(order), dtype=torch.bool, device=unit.device)
    survives = ~open_
    while bool(open_.any()):
        free = open_ & (open_.float() @ rivals == 0)
        survives |= free
        open_ &= ~free & (free.float() @ rivals == 0)
    kept = np.empty(len(order), np.bool_)
    kept[sorted_] = survives.cpu().numpy()
    return kept


def threshold(budget: int, rho: float) -> float:
    """τ = (B/32)·ρ: 6ρ, 4ρ and 2ρ for budgets of 192, 128 and 64. From 1 on, nothing is suppressed."""
    return budget / 32 * rho


def redundancy(unit: Tensor) -> float:
    """ρ, the mean cosine similarity of two different patches, from normalised patches of shape (N, D).

    The sum over all pairs is (‖Σ u_i‖² − Σ‖u_i‖²), so no N × N matrix is needed. 0 for a single patch.

    Examples
    --------
    >>> redundancy(torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]))
    0.3333333333333333
    """
    n = len(unit)
    if n < 2:
        return 0.0
    wide = unit.double()
    whole, own = wide.sum(0).square().sum(), wide.flatten().dot(wide.flatten())
    return float((whole - own) / (n * (n - 1)))


def calibrate_information(tokens: Iterable[VisualTokens]) -> float:
    """The mean of φ = 1 − ρ over reference images: ``mean_information`` for a dynamic budget."""
    scores = [1 - redundancy(normalize(image.patches.detach().float(), dim=1)) for image in tokens]
    if not scores:
        raise BadTokens("calibrate_information was given no image. Give at least one, better some hundred.")
    return sum(scores) / len(scores)


def allocate(kept: Ints, sizes: Ints, budget: int, patches: int) -> Ints:
    """How many tokens each group gives, given how many of its patches survive suppression and how many it has.

    Parameters
    ----------
    kept, sizes : arrays of shape (K,)
        Survivors and patches of each group.
    budget : int
        All tokens of the image, the CLS token included where there is one; it sets the ceilings.
    patches : int
        How many of them are patches.

    Returns
    -------
    array of shape (K,)
        It adds up to ``patches``.

    Examples
    --------
    >>> allocate(np.array([3, 1, 4]), np.array([4, 1, 5]), budget=8, patches=7).tolist()
    [3, 1, 3]
    """
    if patches == 0:  # a budget of 1 that the CLS token takes
        return np.zeros_like(sizes)
    least = np.minimum(1, sizes)
    most = np.minimum(np.minimum(5 * -(-budget // 64), sizes), kept)
    while most.sum() < min(budget, sizes.sum()):
        most = np.minimum(most + 1, sizes)
    rest = max(0, patches - int(least.sum()))
    edges = np.rint(rest * kept.cumsum() / kept.sum()).astype(np.int64)  # whole numbers over one: no ill-rounded halves
    given = np.minimum(least + np.diff(edges, prepend=0), most)
    filled = np.argsort(-kept, kind="stable")  # what is still lacking comes from the groups with most survivors
    room = (most - given)[filled]
    given[filled] += np.clip(patches - given.sum() - (room.cumsum() - room), 0, room)
    return given
