"""SCTS: keep the patches that together show as many concepts of an SAE, as strongly, as a budget allows.

Semantically Comprehensive Token Pruning in LVLMs via Maximizing Concept Coverage (Li et al., ACL 2026, long 1282).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from torino.core.concepts import ConceptEncoder, Concepts
from torino.core.errors import UnmetBudget
from torino.core.reduction import Reduction, ReductionBatch
from torino.core.timing import stage
from torino.core.tokens import VisualTokens, ragged_patches
from torino.reducers._checks import check_choice, check_count, check_encoder
from torino.reducers.base import Reducer, register

Order = Literal["raster", "native"]
Coverage = Literal["max", "binary"]
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@register("scts")
@dataclass(frozen=True)
class SCTS(Reducer):
    """Pick, one by one, the patch that adds most to the concepts covered so far (SCTS).

    Each patch i has the activations z_ij of its ``m`` strongest latents. The coverage c_j of latent j is its largest
    activation in any patch picked so far, 0 at first. The next pick is the patch of the largest marginal gain

        gain(i) = Σ_j max(0, z_ij - c_j),

    ties to the lowest index: greedy maximisation of a facility-location function. With binary coverage an active
    latent counts 1 instead of z_ij, and the gain is the number of concepts not seen before. When no patch adds
    anything, the budget is filled with the patches of highest peak activation a(i), as padding.

    Only the abstract of the paper is known to us, and no code: disentangle with an SAE, pose pruning as maximum
    concept coverage, pick by marginal semantic gain over uncovered concepts. Coverage by maximum, ``m``, and the
    filling are our reading of it, and numbers of this class are not the authors' numbers.

    The concept of a token is the latent it gained most on (of padding, its strongest), its score the gain when it was
    picked (0 for padding). A pruned patch is stood for by the token that covers its strongest concept.

    Parameters
    ----------
    sae : ConceptEncoder
        An SAE, or ``RawEmbedding()``.
    budget : int
        Exactly this many tokens, at most N.
    m : int
        Latents looked at per patch; latents that are not active never count. At most the latents there are.
    coverage : {"max", "binary"}
        How a concept is covered, see above.
    order : {"raster", "native"}
        By place, or in the order of picking with the padding last.
    """

    sae: ConceptEncoder
    budget: int
    m: int = 20
    coverage: Coverage = "max"
    order: Order = "raster"

    paper: ClassVar[str] = "Li et al., SCTS, ACL 2026 (long 1282)"
    merges: ClassVar[bool] = False
    adaptive: ClassVar[bool] = False
    emits_cls: ClassVar[bool] = False
    cost: ClassVar[str] = "O(N·D·C + B·N·m)"
    original_licence: ClassVar[str] = "no code found"

    def __post_init__(self) -> None:
        """Refuse hyperparameters out of range."""
        check_count("budget", self.budget)
        check_count("m", self.m)
        check_choice("coverage", self.coverage, Coverage)
        check_choice("order", self.order, Order)
        check_encoder(self.sae)

    def plan(self, tokens: VisualTokens) -> Reduction:
        """Plan one image."""
        return self.plan_batch([tokens])[0]

    def plan_batch(self, images: Sequence[VisualTokens]) -> ReductionBatch:
        """Plan several images with one pass of the SAE; each is then picked from alone."""
        packed = ragged_patches(images)
        for tokens in images:
            self.sae.check_origin(tokens.origin, tokens.width)
            if self.budget > len(tokens):
                raise UnmetBudget(
                    f"{self.name} cannot give {self.budget} tokens for an image of {len(tokens)} patches. "
                    "Lower the budget."
                )
        with stage("sae"):
            concepts = self.sae.top(packed.values, self.m)
            parts = [part.cpu().split(packed.lengths.tolist()) for part in (concepts.indices, concepts.values)]
            peaks = concepts.peak.cpu().split(packed.lengths.tolist())
        with stage("picking"):
            each = zip(images, *parts, peaks, strict=True)
            return ReductionBatch.of([self._plan(image.grid, Concepts(*of_image)) for image, *of_image in each])

    def _plan(self, grid: tuple[int, int], concepts: Concepts) -> Reduction:
        indices = concepts.indices.numpy()
        active = (indices >= 0) & (concepts.values.numpy() > 0)
        weight = concepts.values.double().numpy() if self.coverage == "max" else np.ones(indices.shape)
        latents, slot = np.unique(indices, return_inverse=True)
        slot = slot.reshape(indices.shape)
        picked, gain, best, holder = _cover(slot, np.where(active, weight, 0.0), len(latents), self.budget)

        peak = concepts.peak.double().numpy().copy()
        peak[picked] = -np.inf
        padding = np.argsort(-peak, kind="stable")[: self.budget - len(picked)]
        kept = np.concatenate([picked, padding])
        concept = np.concatenate([indices[picked, best], indices[padding, 0]])
        score = np.concatenate([gain, np.zeros(len(padding))])
        order = np.argsort(kept, kind="stable") if self.order == "raster" else np.arange(len(kept))

        token = np.full(len(indices), -1)
        token[kept[order]] = np.arange(len(kept))
        covering = np.where(active[:, 0], holder[slot[:, 0]], -1)  # the pick that covers each patch's strongest latent
        assigned = np.where((token < 0) & (covering >= 0), token[covering], token)
        return Reduction(
            sources=torch.from_numpy(kept[order]),
            weights=torch.ones(len(kept)),
            offsets=torch.arange(len(kept) + 1),
            anchor=torch.from_numpy(kept[order]),
            concept=torch.from_numpy(concept[order]),
            role=tuple(np.where(order < len(picked), "primary", "padding").tolist()),
            grid=grid,
            by=self.spec,
            assigned=torch.from_numpy(assigned),
            score=torch.from_numpy(score[order]).float(),
        )


def _cover(slot: Ints, weight: Floats, latents: int, most: int) -> tuple[Ints, Floats, Ints, Ints]:
    """Pick greedily until nothing is gained or ``most`` are picked.

    Takes the latent, numbered 0 … ``latents`` - 1, and the weight of each slot of each patch, both (N, m). Returns the
    picks, the gain of each, the slot it gained most on, and for each latent the pick that covers it, -1 where none.
    """
    slots, weights = np.ascontiguousarray(slot.T), np.ascontiguousarray(weight.T)  # one vector sum per slot
    covered, holder = np.zeros(latents), np.full(latents, -1)
    added = np.empty_like(weights)
    picked: list[int] = []
    gains: list[float] = []
    best: list[int] = []
    while len(picked) < most:
        np.take(covered, slots, out=added, mode="clip")  # "clip" writes straight into ``added``
        np.subtract(weights, added, out=added)
        np.maximum(added, 0.0, out=added)
        gain = added.sum(0)
        patch = int(gain.argmax())
        if gain[patch] <= 0:
            break
        picked.append(patch)
        gains.append(float(gain[patch]))
        best.append(int(added[:, patch].argmax()))
        rises = added[:, patch] > 0
        covered[slots[rises, patch]] = weights[rises, patch]
        holder[slots[rises, patch]] = patch
    return np.array(picked, np.int64), np.array(gains), np.array(best, np.int64), holder
