"""CDPruner: the patches that are most diverse among themselves and most relevant to the question, by a DPP.

Beyond Attention or Similarity: Maximizing Conditional Diversity for Token Pruning in MLLMs (Zhang, Liu, Li et al.,
NeurIPS 2025, arXiv 2506.10967), with the fast greedy MAP inference of Chen, Zhang and Zhou (NeurIPS 2018). Written
anew, with the released code (Apache-2.0) read for its constants and its sign.
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
from torino.reducers._checks import check_choice, check_count, check_flag, check_number, read_signal, unmet
from torino.reducers.base import Reducer, register
from torino.reducers.divprune import cosines

Order = Literal["raster", "native"]
Relevance = Literal["text", "none"]
Space = Literal["tap", "projected"]
Floats = NDArray[np.float32]

SPANNED = 1e-5  # squared distance below which a unit vector counts as lying in the span of those kept: float32 noise
LEAST = 1e-6  # what the released code adds before it divides, so that the least relevant patch keeps some weight


@register("cdpruner")
@dataclass(frozen=True)
class CDPruner(Reducer):
    """Keep a diverse set of patches that bear on the question, by greedy MAP of a DPP (CDPruner).

    With L the cosine similarity of the patches and r their relevance, the kernel is K = diag(r)·L·diag(r), and the
    set S of B patches is grown by the patch that raises det K_S most. Its gain is r_i²·δ_i, where δ_i, at first 1, is
    the squared distance of the normalised patch i from the span of those kept; a Cholesky row a pick keeps δ current
    in O(B²·N). Relevance is r_i = −mean_m cos(patch i, text m) in CLIP's joint space, brought to (0, 1] by
    (r − min + 1e-6)/(max − min). Ties go to the lowest index.

    Parameters
    ----------
    budget : int
        Exactly this many patches are kept; at most N. No CLS token is emitted.
    relevance : {"text", "none"}
        Weigh patches by the question, which the signals ``"text"`` of shape (m, d) and ``"joint"`` of shape (N, d)
        hold: question and patches in CLIP's joint space, as :class:`torino.vlm.ClipText` gives them. With ``"none"``
        r = 1, a plain DPP that needs no text.
    space : {"tap", "projected"}
        Where patches are compared: as the vision tower gives them, or after the projector (signal ``"projected"`` of
        shape (N, E)), as in the released code.
    negate : bool
        Take the cosine with the text negatively, as released: in CLIP, patches of what the text names are *less* like
        it than others. The authors report this for CLIP alone; set it to False for encoders without that quirk.
    theta : float, optional
        If given, r becomes exp(θ/(2(1 − θ))·r), 0 ≤ θ < 1, from diversity alone to relevance; the release has
        it, but not in use. Scores then carry a common factor.
    order : {"raster", "native"}
        By place, as released, or in order of choice; a smaller budget then gives a prefix of a larger one.

    Notes
    -----
    Deviations from the released code. Minimum and maximum of r are those of the image, not of the batch; where they
    differ by no more than 1e-6, r = 1 instead of a division by rounding errors or zero. Once the kept patches span all
    others (B beyond the rank of L) the released code takes roots of rounding errors; here the rest is filled by falling
    r, with role ``"padding"``. The release compares in ``space="projected"``; ``"tap"`` needs no projector.
    """

    budget: int
    relevance: Relevance = "text"
    space: Space = "tap"
    negate: bool = True
    theta: float | None = None
    order: Order = "raster"

    needs: ClassVar[frozenset[str]] = frozenset({"joint", "text"})
    paper: ClassVar[str] = "Zhang et al., NeurIPS 2025, arXiv 2506.10967"
    merges: ClassVar[bool] = False
    adaptive: ClassVar[bool] = False
    emits_cls: ClassVar[bool] = False
    cost: ClassVar[str] = "O(N²·D + B²·N)"
    original_licence: ClassVar[str] = "Apache-2.0"

    def __post_init__(self) -> None:
        """Refuse hyperparameters out of range."""
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
                    f"theta proportional_attention relevance, and relevance='none' has none; got theta={self.theta!r}. Leave theta out."
                )
        reads = ({"joint", "text"} if self.relevance == "text" else set[str]()) | ({self.space} - {"tap"})
        object.__setattr__(self, "needs", frozenset(reads))  # what this very reducer reads

    def plan(self, tokens: VisualTokens) -> Reduction:
        """Plan one image."""
        n = len(tokens)
        if self.budget > n:
            raise unmet(self.name, self.budget, n, "its patches")
        weight = self._weight(tokens)
        features = tokens.patches
        if self.space == "projected":
            features = read_signal(tokens, "projected", self.name, (n, None))
        picks, gains = greedy_map(cosines(features).cpu().numpy(), weight, self.budget)
        kept, score, real = torch.from_numpy(picks), torch.from_numpy(gains), torch.from_numpy(gains > 0)
        if self.order == "raster":
            kept, order = kept.sort()
            score, real = score[order], real[order]
        role = tuple("primary" if is_real else "padding" for is_real in real.tolist())
        return replace(Reduction.pick(kept, tokens.grid, self.spec, score=score), role=role)

    def _weight(self, tokens: VisualTokens) -> Floats:
        """Relevance of each patch to the question, brought to (0, 1]."""
        if self.relevance == "none":
            return np.ones(len(tokens), np.float32)
        if "text" not in tokens.signals or not len(tokens.signals["text"]):
            raise MissingSignal(
                "cdpruner chooses patches for a question, and these tokens do not carry one. Give its embedding in "
                "CLIP's joint space as VisualTokens(..., signals={'text': ..., 'joint': ...}), as "
                "torino.vlm.load_clip_text(name).signals(tokens, question) does, or set relevance='none' for a plain "
                "DPP."
            )
        joint = read_signal(tokens, "joint", self.name, (len(tokens), None))
        text = read_signal(tokens, "text", self.name, (None, joint.shape[1])).to(joint.device)
        like = normalize(joint.detach().float(), dim=1) @ normalize(text.detach().float(), dim=1).T
        r = like.mean(1).cpu().numpy()
        r = -r if self.negate else r
        span = r.max() - r.min()
        r = (r - r.min() + np.float32(LEAST)) / span if span > LEAST else np.ones_like(r)
        if self.theta is None:
            return r
        # a common factor on r changes no choice, and this one keeps the exponential from overflowing
        return np.exp(np.float32(self.theta / (2 * (1 - self.theta))) * (r - r.max()))


def greedy_map(similarity: Floats, weight: Floats, picks: int) -> tuple[NDArray[np.int64], Floats]:
    """Grow a set by the item that raises det(diag(w)·L·diag(w)) most; return the items in that order and their gains.

    The factor w of the kernel scales rows of its Cholesky factor, so the factor is that of L alone, and tiny weights
    cost no precision. Items in the span of those taken have no gain; if only such are left, they follow by falling
    weight with gain 0.

    Examples
    --------
    >>> items, gains = greedy_map(np.array([[1, 1, 0], [1, 1, 0], [0, 0, 1]], np.float32), np.ones(3, np.float32), 3)
    >>> items.tolist(), gains.tolist()
    ([0, 2, 1], [1.0, 1.0, 0.0])
    """
    n = len(similarity)
    worth = weight * weight
    # δ, what is left of each item outside the span of those taken; at first 1, or 0 for an item of no length
    rest = np.rint(np.diagonal(similarity))
    factor = np.empty((picks, n), np.float32)
    items, gains = np.empty(picks, np.int64), np.zeros(picks, np.float32)
    for t in range(picks):
        gain = np.where(rest > SPANNED, worth * rest, 0)
        j = int(gain.argmax())  # the first of the largest
        if gain[j] <= 0:
            left = np.setdiff1d(np.arange(n), items[:t])
            items[t:] = left[np.argsort(-weight[left], kind="stable")][: picks - t]
            break
        items[t], gains[t] = j, gain[j]
        row = factor[t]
        np.subtract(similarity[j], factor[:t, j] @ factor[:t], out=row)
        row /= np.sqrt(rest[j])
        rest -= row * row
        rest[j] = 0
    return items, gains
