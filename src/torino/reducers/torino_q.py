"""TORINO-Q: the tokens of TORINO-X, finer where the question asks.

This method extends the paper.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from math import ceil
from typing import Any, ClassVar

import numpy as np
import torch
from torch.nn.functional import normalize

from torino.core.concepts import Concepts, Rank
from torino.core.errors import BadParameter, MissingSignal
from torino.core.grouping import Ints
from torino.core.reduction import Reduction
from torino.core.tokens import VisualTokens
from torino.reducers._checks import check_number, read_signal
from torino.reducers._similarity import nearest_kept
from torino.reducers.base import register
from torino.reducers.torino_x import TIE, Floats, TorinoX, assign_patches, greedy_coverage

SAME_WORD = 1 - 1e-6  # cosine from which two embeddings count as the same word
NAMED = 0.5  # relevance from which a token names the word


@register("torino-q")
@dataclass(frozen=True)
class TorinoQ(TorinoX):
    """Cover the image as TORINO-X, with finer tokens where the question asks (TORINO-Q).

    Evidence: Let c(j, t) be the cosine of patch j after the projector with the input embedding of word t of the
    question. The same cosines with the words of many generic questions ("What is in the picture?") have mean μ(j) and
    standard deviation σ(j). The evidence z(j, t) = (c(j, t) − μ(j))/σ(j) thus has no part that all questions share.
    Words of the question that are words of generic questions are left out.

    Relevance: A word stands out if its largest evidence in the image reaches T = ``threshold``. The relevance of a
    patch to it is r(j, t) = max(0, z(j, t) − T/2)/(max_i z(i, t) − T/2); patches with the same concepts nearby share
    it: ρ(j) = max_t max_i o(i, j)·r(i, t), with the overlap o of TORINO-X. If no word stands out, the tokens are those
    of TORINO-X.

    Selection: TORINO-X would keep M tokens. The first ⌈``floor``·M⌉ tokens are selected by its rule. The next ones
    maximize the same coverage with the weights w(j)·(1 − q + q·ρ(j)), scaled to the same sum, where q = ``query``. So
    relevant groups are split into fine tokens and the others stay coarse. With a budget the rule of TORINO-X fills what
    is left once no token adds coverage; without one, tokens are added while their gain is at least ``min_gain``.
    Tokens that the question selected have the role ``"question"``; a token whose patch has a relevance of at least 0.5
    names the words.

    Bound: Let f be the coverage of TORINO-X and S its M tokens. Then f(tokens of TORINO-Q) ≥ ``floor``·f(S), up to
    rounding of ties (M·1e-4), for every question. Proof: the tokens include the first F = ⌈``floor``·M⌉ tokens of S,
    and f only grows with more tokens. Each selected token has the largest gain of its step, and gains never increase,
    so the first F of the M gains are at least F/M of their sum f(S).

    Tokens: As in TORINO-X. Patches that overlap with no token are in addition assigned to the token with the most
    similar patch, so that every patch is represented.

    Reads the patches and the signals ``"projected"`` of shape (N, E), ``"words"`` of shape (m, E) and
    ``"generic_words"`` of shape (g, E), all in the input space of the language model;
    :class:`torino.vlm.WordText` computes the last two. With ``query=0`` it needs none of them and equals TORINO-X.

    Related work: MMTok (``mmtok``) also compares patches with the input embeddings of the language model. It prunes,
    covers every word of the question, and has no concepts and no bound.

    Parameters
    ----------
    sae, budget, min_gain, pooled, concepts, locality, mode, order, positions, proportional
        As for ``torino-x``. Pooled images share their budget by the gains of TORINO-X.
    query : float
        Influence of the question, from 0 (TORINO-X) to 1 (tokens beyond the floor only where the question asks, as
        long as they add anything there).
    floor : float
        Share of the tokens that does not depend on the question, from 0 to 1.
    threshold : float
        Evidence from which a word stands out, in standard deviations.
    """

    query: float = 1.0
    floor: float = 0.5
    threshold: float = 5.0

    needs: ClassVar[frozenset[str]] = frozenset({"projected", "words", "generic_words"})
    paper: ClassVar[str] = "ours, beyond the TORINO paper"
    takes_frames: ClassVar[bool] = False
    cost: ClassVar[str] = "O(N·D·C + N·E·(m + g) + B·N²) at worst"

    def __post_init__(self) -> None:
        """Validate the hyperparameters."""
        super().__post_init__()
        for name in ("query", "floor"):
            check_number(name, getattr(self, name))
            if getattr(self, name) > 1:
                raise BadParameter(f"{name} must be between 0 and 1, got {getattr(self, name)!r}.")
        check_number("threshold", self.threshold)
        if self.threshold == 0:
            raise BadParameter("threshold must be above 0, got 0: every word would stand out.")
        if self.query == 0:
            object.__setattr__(self, "needs", frozenset[str]())  # needs of this instance, not of the class

    @property
    def parent(self) -> TorinoX:
        """The reducer that ignores the question."""
        return TorinoX(**{field.name: getattr(self, field.name) for field in fields(TorinoX)})

    def device_rule(self, grid: tuple[int, int], latents: int, device: torch.device) -> tuple[int, Rank, Any] | None:
        """Return the rule of TORINO-X if the question has no influence; otherwise None."""
        return self.parent.device_rule(grid, latents, device) if self.query == 0 else None

    def _plan(self, image: VisualTokens, codes: Concepts, max_tokens: int) -> Reduction:
        if self.query == 0:
            return super()._plan(image, codes, max_tokens)
        words, evidence = self._evidence(image)
        overlap = self._overlap(image, codes)
        relevance = spread_relevance(word_relevance(evidence, self.threshold), overlap)
        kept, gains, asked = self._select_for(relevance, image, codes, overlap, max_tokens)
        order = np.argsort(kept) if self.order == "raster" else np.arange(len(kept))
        token = assign_patches(overlap, kept[order])
        share = overlap[kept[order][token], np.arange(len(token))]
        plan = self._build(image, codes, kept[order], gains[order], token, share)
        assigned = plan.assigned
        if bool((assigned < 0).any()):
            assigned = torch.where(assigned < 0, nearest_kept(image.patches, plan.anchor), assigned)
        return replace(
            plan,
            assigned=assigned,
            role=tuple("question" if index in asked else "primary" for index in order.tolist()),
            words=_name_words(relevance[:, kept[order]], words),
        )

    def _evidence(self, image: VisualTokens) -> tuple[tuple[str, ...], Floats]:
        """Return the words of the question that generic questions do not have, and z(j, t) of shape (words, N)."""
        if any(not len(image.signals.get(name, ())) for name in ("words", "generic_words")):
            raise MissingSignal(
                "torino-q keeps finer tokens where a question asks, and these tokens have none. Ask a model with "
                "VLM.answer() or torino ask, pass reduced(..., text_query=WordText(processor).query(question)), or set "
                "query=0."
            )
        projected = read_signal(image, "projected", self.name, (len(image), None)).float()
        patches = normalize(projected, dim=1)
        words, generic = (
            normalize(read_signal(image, name, self.name, (None, projected.shape[1])).to(projected.device).float())
            for name in ("words", "generic_words")
        )
        names = image.question_words if len(image.question_words) == len(words) else tuple(map(str, range(len(words))))
        special = (words @ generic.T).amax(1) < SAME_WORD
        common = patches @ generic.T
        deviation, mean = torch.std_mean(common, dim=1, correction=0)
        known = deviation > 1e-6  # cosines below are rounding errors
        evidence = (patches @ words[special].T - mean[:, None]) / deviation.where(known, 1)[:, None]
        evidence = evidence.where(known[:, None], 0)
        kept_names = tuple(name for name, keep in zip(names, special.tolist(), strict=True) if keep)
        return kept_names, evidence.T.contiguous().cpu().numpy()

    def _select_for(
        self, relevance: Floats, image: VisualTokens, codes: Concepts, overlap: Floats, max_tokens: int
    ) -> tuple[Ints, Floats, range]:
        """Return the selected patches, their gains, and the range of those that the question selected."""
        dynamic = self.budget is None
        min_gain = self.min_gain if dynamic else 0.0
        weight = self.patch_weights(codes)
        focused = focus_weights(weight, relevance, self.query)
        if focused is None:
            kept, gains = self.select(image, codes, overlap, max_tokens, min_gain)
            return kept, gains, range(0)
        first = max_tokens if dynamic else ceil(self.floor * max_tokens)
        kept, gains = self.select(image, codes, overlap, max(first, 1), min_gain)
        if dynamic:
            first = ceil(self.floor * len(kept))
        kept, gains = kept[:first], gains[:first]
        # a gain of 0 ends the part of the question; with a budget, coverage of the whole image fills the rest
        limit = self.min_gain if dynamic else 2 * TIE
        asked, asked_gains = greedy_coverage(overlap, focused, max_tokens - first, limit, kept)
        kept, gains = np.concatenate([kept, asked]), np.concatenate([gains, asked_gains])
        rest = 0 if dynamic else max_tokens - len(kept)
        if rest:
            more, more_gains = greedy_coverage(overlap, weight, rest, 0.0, kept)
            kept, gains = np.concatenate([kept, more]), np.concatenate([gains, more_gains])
        return kept, gains, range(first, first + len(asked))


def word_relevance(evidence: Floats, threshold: float) -> Floats:
    """Return the relevance r of each patch to each word, (words, N); 0 for words that do not stand out.

    Examples
    --------
    >>> word_relevance(np.array([[8.0, 4.0, 2.0], [4.0, 4.0, 4.0]], np.float32), 4.0).tolist()
    [[1.0, 0.3333333432674408, 0.0], [1.0, 1.0, 1.0]]
    """
    peak = evidence.max(1, keepdims=True, initial=0.0)
    relevance = np.maximum(evidence - threshold / 2, 0) / np.maximum(peak - threshold / 2, threshold / 4)
    return np.where(peak >= threshold, relevance, 0).astype(np.float32)


def spread_relevance(relevance: Floats, overlap: Floats) -> Floats:
    """Return max_i o(i, j)·r(i, t) for each word and patch, (words, N)."""
    spread = np.zeros_like(relevance)
    for word, row in enumerate(relevance):
        relevant = np.flatnonzero(row)
        if len(relevant):
            spread[word] = (overlap[relevant] * row[relevant, None]).max(0)
    return spread


def focus_weights(weight: Floats, relevance: Floats, query: float) -> Floats | None:
    """Return the weights of the patches for a question, with the same sum; None if it does not distinguish them."""
    focused = weight * (1 - query + query * relevance.max(0, initial=0.0))
    if not relevance.any() or not focused.any():
        return None
    return (focused * (weight.sum(dtype=np.float64) / focused.sum(dtype=np.float64))).astype(np.float32)


def _name_words(relevance: Floats, words: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """Return the words that each token, a column, is relevant to, the most relevant first and each only once."""
    named = list[tuple[str, ...]]()
    for column in relevance.T:
        order = np.argsort(-column, kind="stable")
        named.append(tuple(dict.fromkeys(words[word] for word in order.tolist() if column[word] >= NAMED)))
    return tuple(named)
