"""SCTS: select patches that maximize the coverage of SAE concepts.

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
from torino.core.frames import Layout
from torino.core.reduction import Reduction, ReductionBatch
from torino.core.timing import stage
from torino.core.tokens import VisualTokens, ragged_patches
from torino.reducers._checks import budget_error, check_choice, check_count, check_encoder
from torino.reducers.base import Order, Reducer, register

Coverage = Literal["max", "binary"]
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@register("scts")
@dataclass(frozen=True)
class SCTS(Reducer):
    """Select patches by their gain in concept coverage (our reading of the abstract of SCTS).

    Each patch i has the activations z_ij of its ``m`` strongest latents. The coverage c_j of latent j is its largest
    activation in any selected patch, initially 0. The next patch is the one of largest marginal gain

        gain(i) = Σ_j max(0, z_ij - c_j),

    ties to the lowest index: greedy maximization of a facility-location function. With binary coverage an active latent
    counts 1 instead of z_ij, so the gain is the number of new concepts. If no patch has a gain, the budget is filled
    with the patches of highest peak activation a(i), as padding.

    Only the abstract of the paper was available, and no code: disentangle with an SAE, formulate pruning as maximum
    concept coverage, select by marginal semantic gain over uncovered concepts. Coverage by maximum, ``m`` and the
    padding are our interpretation, and results of this class are not the authors' results.

    The concept of a token is the latent with the largest gain (for padding, its strongest latent). The score is the
    gain at selection (0 for padding). A pruned patch is assigned to the token that covers its strongest concept.

    Parameters
    ----------
    sae : ConceptEncoder
        An SAE, or ``RawEmbedding()``.
    budget : int
        Exact number of tokens, at most N.
    m : int
        Number of latents per patch, at most the number of latents of the SAE. Inactive latents never count.
    coverage : {"max", "binary"}
        How a concept is covered, see above.
    order : {"raster", "native"}
        By position, or in order of selection with the padding last.
    """

    sae: ConceptEncoder
    budget: int
    m: int = 20
    coverage: Coverage = "max"
    order: Order = "raster"

    takes_frames: ClassVar[bool] = True
    paper: ClassVar[str] = "after the abstract of Li et al., SCTS, ACL 2026 (long 1282)"
    merges: ClassVar[bool] = False
    adaptive: ClassVar[bool] = False
    emits_cls: ClassVar[bool] = False
    cost: ClassVar[str] = "O(N·D·C + B·N·m)"
    original_license: ClassVar[str] = "no code found"

    def __post_init__(self) -> None:
        """Validate the hyperparameters."""
        check_count("budget", self.budget)
        check_count("m", self.m)
        check_choice("coverage", self.coverage, Coverage)
        check_choice("order", self.order, Order)
        check_encoder(self.sae)

    def plan(self, tokens: VisualTokens) -> Reduction:
        """Plan one image."""
        return self.plan_batch([tokens])[0]

    def plan_batch(self, images: Sequence[VisualTokens]) -> ReductionBatch:
        """Plan several images with one pass of the SAE; the selection is independent for each image."""
        packed = ragged_patches(images)
        for tokens in images:
            self.sae.check_origin(tokens.origin, tokens.width)
            if self.budget > len(tokens):
                raise budget_error(self.name, self.budget, len(tokens))
        with stage("sae"):
            concepts = self.sae.top(packed.values, self.m)
            lengths = packed.lengths.tolist()
            parts = [part.cpu().split(lengths) for part in (concepts.indices, concepts.values, concepts.peak)]
        with stage("selection"):
            per_image = zip(images, *parts, strict=True)
            return ReductionBatch.of([self._plan(image.layout, Concepts(*part)) for image, *part in per_image])

    def _plan(self, layout: Layout, concepts: Concepts) -> Reduction:
        indices = concepts.indices.numpy()
        active = (indices >= 0) & (concepts.values.numpy() > 0)
        weight = concepts.values.double().numpy() if self.coverage == "max" else np.ones(indices.shape)
        latents, latent_index = np.unique(indices, return_inverse=True)
        latent_index = latent_index.reshape(indices.shape)
        weight = np.where(active, weight, 0.0)
        selected, gain, best_slot, covered_by = _select_greedily(latent_index, weight, len(latents), self.budget)

        peak = concepts.peak.double().numpy().copy()
        peak[selected] = -np.inf
        padding = np.argsort(-peak, kind="stable")[: self.budget - len(selected)]
        kept = np.concatenate([selected, padding])
        concept = np.concatenate([indices[selected, best_slot], indices[padding, 0]])
        score = np.concatenate([gain, np.zeros(len(padding))])
        order = np.argsort(kept, kind="stable") if self.order == "raster" else np.arange(len(kept))

        token = np.full(len(indices), -1)
        token[kept[order]] = np.arange(len(kept))
        covering = np.where(active[:, 0], covered_by[latent_index[:, 0]], -1)  # patch that covers the strongest latent
        assigned = np.where((token < 0) & (covering >= 0), token[covering], token)
        return Reduction(
            sources=torch.from_numpy(kept[order]),
            weights=torch.ones(len(kept)),
            offsets=torch.arange(len(kept) + 1),
            anchor=torch.from_numpy(kept[order]),
            concept=torch.from_numpy(concept[order]),
            role=tuple(np.where(order < len(selected), "primary", "padding").tolist()),
            by=self.spec,
            assigned=torch.from_numpy(assigned),
            score=torch.from_numpy(score[order]).float(),
            **layout,
        )


def _select_greedily(
    latent_index: Ints, weight: Floats, num_latents: int, max_patches: int
) -> tuple[Ints, Floats, Ints, Ints]:
    """Select patches greedily until there is no gain or ``max_patches`` are selected.

    Parameters
    ----------
    latent_index, weight : arrays of shape (N, m)
        Latent, from 0 to ``num_latents`` - 1, and weight of each of the m slots of each patch.
    num_latents, max_patches : int

    Returns
    -------
    selected, gains, best_slot : arrays of shape (M,)
        Selected patches, their gains, and the slots of largest gain.
    covered_by : array of shape (num_latents,)
        Selected patch that covers each latent, or -1.
    """
    slots, weights = np.ascontiguousarray(latent_index.T), np.ascontiguousarray(weight.T)  # one vector sum per slot
    coverage, covered_by = np.zeros(num_latents), np.full(num_latents, -1)
    added = np.empty_like(weights)
    selected: list[int] = []
    gains: list[float] = []
    best_slot: list[int] = []
    while len(selected) < max_patches:
        np.take(coverage, slots, out=added, mode="clip")  # "clip" writes directly into ``added``
        np.subtract(weights, added, out=added)
        np.maximum(added, 0.0, out=added)
        gain = added.sum(0)
        patch = int(gain.argmax())
        if gain[patch] <= 0:
            break
        selected.append(patch)
        gains.append(float(gain[patch]))
        best_slot.append(int(added[:, patch].argmax()))
        increased = added[:, patch] > 0
        coverage[slots[increased, patch]] = weights[increased, patch]
        covered_by[slots[increased, patch]] = patch
    return np.array(selected, np.int64), np.array(gains), np.array(best_slot, np.int64), covered_by
