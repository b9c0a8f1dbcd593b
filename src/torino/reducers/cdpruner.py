"""CDPruner: select diverse patches that are relevant to the question, by a determinantal point process (DPP).

Beyond Attention or Similarity: Maximizing Conditional Diversity for Token Pruning in MLLMs (Zhang, Liu, Li et al.,
NeurIPS 2025, arXiv 2506.10967), with the fast greedy MAP inference of Chen, Zhang and Zhou (NeurIPS 2018). This is an
independent implementation; constants and the sign of the relevance follow the released code (Apache-2.0).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import normalize

from torino.core.errors import BadParameter, MissingSignal
from torino.core.reduction import Reduction
from torino.core.tokens import VisualTokens
from torino.reducers._checks import budget_error, check_choice, check_count, check_flag, check_number, read_signal
from torino.reducers._similarity import nearest_kept, pairwise_cosines
from torino.reducers.base import Order, Reducer, Space, register

Relevance = Literal["text", "none"]
Floats = NDArray[np.float32]

SPAN_TOLERANCE = 1e-5  # squared distance below which a unit vector counts as in the span of the kept ones
EPSILON = 1e-6  # added before the division, as released, so that the least relevant patch keeps some weight


@register("cdpruner")
@dataclass(frozen=True)
class CDPruner(Reducer):
    """Keep diverse patches that are relevant to the question, by greedy MAP of a DPP (CDPruner).

    With L the cosine similarity of the patches and r their relevance, the kernel is K = diag(r)·L·diag(r). The set S of
    B patches grows by the patch that increases det K_S most. Its gain is r_i²·δ_i, where δ_i is the squared distance of
    the normalized patch i from the span of the kept ones, initially 1. One Cholesky row per selection keeps δ current,
    O(B²·N) in total. The relevance is r_i = −mean_m cos(patch i, text m) in CLIP's joint space, scaled to (0, 1] by
    (r − min + 1e-6)/(max − min). Ties go to the lowest index.

    Parameters
    ----------
    budget : int
        Exact number of patches, at most N. The CLS token is not part of the output.
    relevance : {"text", "none"}
        With ``"text"`` patches are weighted by the question, given as signals ``"text"`` of shape (m, d) and
        ``"joint"`` of shape (N, d): question and patches in CLIP's joint space, from :class:`torino.vlm.ClipText`.
        With ``"none"`` r = 1, a plain DPP that needs no text.
    space : {"features", "projected"}
        Where patches are compared: at the feature layer of the tower, or after the projector (signal ``"projected"``
        of shape (N, E)), as released.
    negate : bool
        Negate the cosine with the text, as released: in CLIP, patches of the objects that the text names are *less*
        similar to it than others. The authors report this only for CLIP; use False for encoders without this effect.
    theta : float, optional
        If given, r becomes exp(θ/(2(1 − θ))·r), 0 ≤ θ < 1, from diversity only to relevance. The release has this
        option but does not use it. Scores then have a common factor.
    order : {"raster", "native"}
        By position, as released, or in order of selection, in which a smaller budget gives a prefix of a larger one.

    Notes
    -----
    Deviations from the released code: minimum and maximum of r are those of the image, not of the batch. If they differ
    by at most 1e-6, r = 1, which avoids a division by rounding errors or zero. Once the kept patches span all others (B
    exceeds the rank of L), the released code takes roots of rounding errors; here the remaining ones are chosen by
    descending r, with role ``"padding"``. The release compares in ``space="projected"``; ``"features"`` needs no
    projector.
    """

    budget: int
    relevance: Relevance = "text"
    space: Space = "features"
    negate: bool = True
    theta: float | None = None
    order: Order = "raster"

    needs: ClassVar[frozenset[str]] = frozenset({"joint", "text"})
    paper: ClassVar[str] = "Zhang et al., NeurIPS 2025, arXiv 2506.10967"
    merges: ClassVar[bool] = False
    adaptive: ClassVar[bool] = False
    emits_cls: ClassVar[bool] = False
    cost: ClassVar[str] = "O(N²·D + B²·N)"
    original_license: ClassVar[str] = "Apache-2.0"

    def __post_init__(self) -> None:
        """Validate the hyperparameters."""
        check_count("budget", self.budget)
        check_choice("relevance", self.relevance, Relevance)
        check_choice("space", self.space, Space)
        check_flag("negate", self.negate)
        check_choice("order", self.order, Order)
        if self.theta is not None:
            check_number("theta", self.theta)
            if self.theta >= 1:
                raise BadParameter(f"theta must be at least 0 and below 1, got {self.theta!r}.")
            if self.relevance == "none":
                raise BadParameter(
                    "theta weights the relevance, so it cannot be combined with relevance='none'; "
                    f"got theta={self.theta!r}. Leave theta out."
                )
        needs = set[str]() if self.relevance == "none" else {"joint", "text"}
        if self.space == "projected":
            needs.add("projected")
        object.__setattr__(self, "needs", frozenset(needs))  # needs of this instance, not of the class

    def plan(self, tokens: VisualTokens) -> Reduction:
        """Plan one image."""
        n = len(tokens)
        if self.budget > n:
            raise budget_error(self.name, self.budget, n)
        weight = self._relevance(tokens)
        features = tokens.patches
        if self.space == "projected":
            features = read_signal(tokens, "projected", self.name, (n, None))
        items, gains = greedy_map(pairwise_cosines(features).cpu().numpy(), weight, self.budget)
        kept, score, has_gain = torch.from_numpy(items), torch.from_numpy(gains), torch.from_numpy(gains > 0)
        if self.order == "raster":
            kept, order = kept.sort()
            score, has_gain = score[order], has_gain[order]
        role = tuple("primary" if flag else "padding" for flag in has_gain.tolist())
        assigned = nearest_kept(tokens.patches, kept)
        return replace(Reduction.pick(kept, tokens.grid, self.spec, score=score, assigned=assigned), role=role)

    def _relevance(self, tokens: VisualTokens) -> Floats:
        """Return the relevance of each patch to the question, scaled to (0, 1]."""
        if self.relevance == "none":
            return np.ones(len(tokens), np.float32)
        if "text" not in tokens.signals or not len(tokens.signals["text"]):
            raise MissingSignal(
                "cdpruner selects patches for a question, and these tokens have none. Give its embedding in CLIP's "
                "joint space as VisualTokens(..., signals={'text': ..., 'joint': ...}), for example with "
                "torino.vlm.load_clip_text(name).signals(tokens, question), or set relevance='none' for a plain DPP."
            )
        joint = read_signal(tokens, "joint", self.name, (len(tokens), None))
        text = read_signal(tokens, "text", self.name, (None, joint.shape[1])).to(joint.device)
        similarity = normalize(joint.float(), dim=1) @ normalize(text.float(), dim=1).T
        r = similarity.mean(1).cpu().numpy()
        r = -r if self.negate else r
        span = r.max() - r.min()
        r = (r - r.min() + np.float32(EPSILON)) / span if span > EPSILON else np.ones_like(r)
        if self.theta is None:
            return r
        # a common factor on r changes no selection, and this one prevents an overflow of the exponential
        return np.exp(np.float32(self.theta / (2 * (1 - self.theta))) * (r - r.max()))


def greedy_map(similarity: Floats, weight: Floats, count: int) -> tuple[NDArray[np.int64], Floats]:
    """Select ``count`` items, each of which increases det(diag(w)·L·diag(w)) most; return them and their gains.

    The factor w of the kernel scales the rows of its Cholesky factor. The factor stored here is that of L alone, so
    small weights cost no precision. Items in the span of the selected ones have no gain; if only such items are left,
    they follow by descending weight with gain 0.

    Examples
    --------
    >>> items, gains = greedy_map(np.array([[1, 1, 0], [1, 1, 0], [0, 0, 1]], np.float32), np.ones(3, np.float32), 3)
    >>> items.tolist(), gains.tolist()
    ([0, 2, 1], [1.0, 1.0, 0.0])
    """
    n = len(similarity)
    squared_weight = weight * weight
    # δ, the squared distance of each item from the span of the selected ones; initially 1, or 0 for a zero vector
    distance = np.rint(np.diagonal(similarity))
    factor = np.empty((count, n), np.float32)
    items, gains = np.empty(count, np.int64), np.zeros(count, np.float32)
    for t in range(count):
        gain = np.where(distance > SPAN_TOLERANCE, squared_weight * distance, 0)
        j = int(gain.argmax())  # the first of the largest
        if gain[j] <= 0:
            remaining = np.setdiff1d(np.arange(n), items[:t])
            items[t:] = remaining[np.argsort(-weight[remaining], kind="stable")][: count - t]
            break
        items[t], gains[t] = j, gain[j]
        row = factor[t]
        np.subtract(similarity[j], factor[:t, j] @ factor[:t], out=row)
        row /= np.sqrt(distance[j])
        distance -= row * row
        distance[j] = 0
    return items, gains
