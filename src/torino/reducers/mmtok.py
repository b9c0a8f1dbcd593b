"""MMTok: cover the words of the question and the patches of the image.

MMTok: Multimodal Coverage Maximization for Efficient Inference of VLMs (ICLR 2026). This is an independent
implementation; constants follow the released code (Apache-2.0).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from torino.core.errors import BadParameter, MissingSignal
from torino.core.reduction import Reduction
from torino.core.tokens import VisualTokens
from torino.reducers._checks import budget_error, check_choice, check_count, check_number, read_signal
from torino.reducers._similarity import cross_cosines, nearest_kept, pairwise_cosines
from torino.reducers.base import Order, Reducer, register


@register("mmtok")
@dataclass(frozen=True)
class MMTok(Reducer):
    """Keep patches that cover the words of the question and all other patches (MMTok).

    With t the input embeddings of the m words of the question and p the patches after the projector,
    P = softmax(cos(t, p)/0.02)/m, and with x the patches at the feature layer, Q = softmax(cos(x, x)/0.2)/N, both over
    the columns. Let M be the rows of P and of 0.5·Q. The set of kept patches grows by the patch j of largest gain
    Σ_r max(0, M_rj − c_r), where c_r is the largest value of row r among the kept patches, initially 0. Ties go to the
    lowest index. The score of a token is its gain.

    Reads the signals ``"words"`` of shape (m, E) and ``"projected"`` of shape (N, E), both in the input space of the
    language model, so no CLIP is needed. :class:`torino.vlm.WordText` computes the former. Prunes.

    Differences from the release: several images and prompts at once are possible, each with its own question.
    Similarities are computed in double precision. Patches that show only padding are left out, as released, where the
    model itself removes them (LLaVA-NeXT, LLaVA-OneVision).

    Parameters
    ----------
    budget : int
        Exact number of tokens, at most N.
    text_temperature, image_temperature : float
        Of the two softmax functions.
    image_weight : float
        Weight of the rows of Q.
    order : {"raster", "native"}
        By position, as released, or in order of selection, in which a smaller budget gives a prefix of a larger one.
    """

    budget: int
    text_temperature: float = 0.02
    image_temperature: float = 0.2
    image_weight: float = 0.5
    order: Order = "raster"

    needs: ClassVar[frozenset[str]] = frozenset({"projected", "words"})
    takes_frames: ClassVar[bool] = True
    paper: ClassVar[str] = "MMTok, ICLR 2026"
    merges: ClassVar[bool] = False
    adaptive: ClassVar[bool] = False
    cost: ClassVar[str] = "O(N²·D + B·N²)"
    original_license: ClassVar[str] = "Apache-2.0"

    def __post_init__(self) -> None:
        """Validate the hyperparameters."""
        check_count("budget", self.budget)
        for name in ("text_temperature", "image_temperature"):
            check_number(name, getattr(self, name))
            if not getattr(self, name):
                raise BadParameter(f"{name} must be above 0, got 0.")
        check_number("image_weight", self.image_weight)
        check_choice("order", self.order, Order)

    def plan(self, tokens: VisualTokens) -> Reduction:
        """Plan one image."""
        n = len(tokens)
        if self.budget > n:
            raise budget_error(self.name, self.budget, n)
        if "words" not in tokens.signals or not len(tokens.signals["words"]):
            raise MissingSignal(
                "mmtok selects patches for a question, and these tokens have none. Ask a model with VLM.answer() or "
                "torino ask, pass reduced(..., text_query=WordText(processor).query(question)), or give the embeddings "
                "of its words as the signal 'words'."
            )
        projected = read_signal(tokens, "projected", self.name, (n, None))
        words = read_signal(tokens, "words", self.name, (None, projected.shape[1])).to(projected.device)
        text = (cross_cosines(words, projected).double() / self.text_temperature).softmax(1) / len(words)
        image = (pairwise_cosines(tokens.patches, torch.float64) / self.image_temperature).softmax(1) / n
        rows = torch.cat([text.cpu(), self.image_weight * image.cpu()]).numpy()
        items, gains = cover_rows(rows, self.budget)
        order = np.argsort(items) if self.order == "raster" else np.arange(self.budget)
        kept = torch.from_numpy(items[order])
        assigned = nearest_kept(tokens.patches, kept)
        return Reduction.pick(
            kept, by=self.spec, score=torch.from_numpy(gains[order]), assigned=assigned, **tokens.layout
        )


def cover_rows(matrix: NDArray[np.float64], count: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Select columns that increase the sum of row maxima most; return them and their gains, both of length ``count``.

    Examples
    --------
    >>> items, gains = cover_rows(np.array([[0.5, 0.25, 0.0], [0.0, 0.0, 0.5]]), 3)
    >>> items.tolist(), gains.tolist()
    ([0, 2, 1], [0.5, 0.5, 0.0])
    """
    columns = np.ascontiguousarray(matrix.T)
    covered, selected = np.zeros(len(matrix)), np.zeros(len(columns), np.bool_)
    items, gains = np.empty(count, np.int64), np.empty(count)
    for step in range(count):
        gain = np.maximum(columns - covered, 0).sum(1)
        gain[selected] = -np.inf
        best = int(gain.argmax())  # the first of the largest
        items[step], gains[step], selected[best] = best, gain[best], True
        np.maximum(covered, columns[best], out=covered)
    return items, gains
