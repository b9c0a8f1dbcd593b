"""Monosemanticity score: similarity of the photos that activate a latent."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torino.core.errors import BadParameter, BadTokens
from torino.core.io import check_tensors
from torino.core.tokens import check_matrix

MIN_PAIR_WEIGHT = 1e-12  # smallest total weight of all pairs; a single pair at full activation has weight 2


@dataclass(frozen=True, eq=False)
class MonosemanticityScores:
    """Monosemanticity of every latent.

    Attributes
    ----------
    values : Tensor of shape (C,), float64
        MS of each latent, −1 to 1; NaN if undefined.
    chance : float
        Mean similarity of two photos: the score of a latent that is equally active on all photos.
    dead : int
        Number of latents that were never active.
    unpaired : int
        Number of latents that were active but leave no pair of photos to compare: on a single photo, or on all photos
        equally.
    """

    values: Tensor
    chance: float
    dead: int
    unpaired: int

    @property
    def defined(self) -> Tensor:
        """Scores that are not NaN."""
        return self.values[~self.values.isnan()]

    @property
    def mean(self) -> float:
        """Mean over the latents that have a score; NaN if none has."""
        return float(self.defined.mean()) if len(self.defined) else float("nan")

    @property
    def median(self) -> float:
        """Median over the latents that have a score (the mean of the middle two); NaN if none has."""
        return float(self.defined.quantile(0.5)) if len(self.defined) else float("nan")

    @property
    def chance_adjusted(self) -> Tensor:
        """Scores rescaled so that chance is 0 and identical photos are 1, shape (C,).

        The embeddings of many towers lie in a narrow cone, in which any two photos are similar. This corrects for it.
        """
        return (self.values - self.chance) / max(1 - self.chance, torch.finfo(torch.float64).eps)

    def __str__(self) -> str:
        """Return a one-line summary."""
        unscored = f"{self.dead} never active" + (
            f", {self.unpaired} without a pair of photos" if self.unpaired else ""
        )
        return (
            f"monosemanticity: mean {self.mean:.3f}, median {self.median:.3f}, chance {self.chance:.3f}; "
            f"{len(self.defined)} latents scored, {unscored}"
        )


class MonosemanticityAccumulator:
    r"""Accumulate the monosemanticity score of Pach et al. (arXiv 2504.02821) over batches of photos.

    With a_n the activation of a latent on photo n, ã_n = (a_n − min a) / (max a − min a) over all N photos, and
    s_nm the cosine similarity of the embeddings of photos n and m,

    .. math:: MS = \frac{\sum_{n \ne m} ã_n ã_m s_{nm}}{\sum_{n \ne m} ã_n ã_m}

    As s_nn = 1, the numerator is \|Σ ã_n e_n\|² − Σ ã_n² for unit embeddings e, and the denominator is
    (Σ ã_n)² − Σ ã_n². The min-max scaling is linear, so it can be applied after the last photo. Only one vector and a
    few sums per latent are stored, in float64, independent of the number of photos. The result equals the loop over all
    pairs up to rounding.

    Differences from the published scores: there, a_n is the activation at the CLS token of an SAE trained on CLS
    tokens; the authors' code can also use the mean over all tokens. Here the SAE reads patches, so a_n is the mean (or,
    optionally, the maximum) activation over the patches of a photo. The embedding is the CLS token (or the mean of the
    patches) of a tower at its feature layer, before a final norm or projection. As in the paper, latents without a
    score are excluded from mean and median.
    """

    def __init__(self, latents: int, width: int) -> None:
        zeros = torch.zeros(latents, dtype=torch.float64)
        self.weighted = torch.zeros(latents, width, dtype=torch.float64)
        self.sum, self.square_sum, self.high = zeros.clone(), zeros.clone(), zeros.clone()
        self.low = torch.full_like(zeros, torch.inf)
        self.embedding_sum = torch.zeros(width, dtype=torch.float64)
        self.photos = torch.zeros((), dtype=torch.int64)

    def update(self, activations: Tensor, embeddings: Tensor) -> None:
        """Add a batch of photos.

        Parameters
        ----------
        activations : Tensor of shape (n, C)
            One non-negative value per photo and latent.
        embeddings : Tensor of shape (n, E)
            Embeddings of the photos; they are normalized here.
        """
        expected = (len(activations), len(self.embedding_sum))
        if embeddings.shape != expected:
            raise BadParameter(f"embeddings must have shape {expected}, got {tuple(embeddings.shape)}.")
        a, e = activations.double(), embeddings.double()
        norms = e.norm(dim=1, keepdim=True)
        if not bool((norms > 0).all() & torch.isfinite(norms).all()):
            raise BadTokens(
                "The embedding of a photo is zero or not finite, so its similarity is undefined. "
                "Choose another embedding tower, or run it in float32."
            )
        e = e / norms
        self.weighted.addmm_(a.T, e)
        self.sum += a.sum(0)
        self.square_sum += (a * a).sum(0)
        self.low = torch.minimum(self.low, a.amin(0))
        self.high = torch.maximum(self.high, a.amax(0))
        self.embedding_sum += e.sum(0)
        self.photos += len(a)

    def compute(self) -> MonosemanticityScores:
        """Return the score of every latent over all photos added so far."""
        photos = int(self.photos)
        if photos < 2:
            raise BadParameter(f"Monosemanticity compares photos with each other: give at least 2, got {photos}.")
        span = self.high - self.low
        scale = torch.where(span > 0, span, 1.0)
        total = (self.sum - photos * self.low) / scale
        squares = (self.square_sum - 2 * self.low * self.sum + photos * self.low**2) / scale**2
        direction = (self.weighted - self.low[:, None] * self.embedding_sum) / scale[:, None]
        pairs = total**2 - squares
        rounding = 64 * torch.finfo(torch.float64).eps * photos * (self.high / scale) ** 2
        defined = (span > 0) & (pairs > rounding.clamp(min=MIN_PAIR_WEIGHT))
        values = ((direction**2).sum(1) - squares) / torch.where(defined, pairs, 1.0)
        dead = int((self.high == 0).sum())
        return MonosemanticityScores(
            values=torch.where(defined, values.clamp(-1, 1), torch.nan),
            chance=float(((self.embedding_sum**2).sum() - photos) / (photos * (photos - 1))),
            dead=dead,
            unpaired=len(defined) - int(defined.sum()) - dead,
        )

    def state_dict(self) -> dict[str, Tensor]:
        """Return all sums, for :meth:`from_state`."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    @classmethod
    def from_state(cls, state: dict[str, Tensor]) -> MonosemanticityAccumulator:
        """Restore an accumulator from its :meth:`state_dict`; raise ``ValueError`` if its tensors do not fit."""
        if state["weighted"].ndim != 2:
            raise ValueError(f"'weighted' has shape {tuple(state['weighted'].shape)}, not that of a matrix")
        restored = cls(*state["weighted"].shape)
        check_tensors(state, restored.state_dict())
        for name, value in restored.state_dict().items():
            setattr(restored, name, state[name].to(value.dtype).clone())
        return restored


def monosemanticity_score(activations: Tensor, embeddings: Tensor, *, chunk: int = 1024) -> MonosemanticityScores:
    """Compute the monosemanticity of latents from all activations; see :class:`MonosemanticityAccumulator`.

    Parameters
    ----------
    activations : Tensor of shape (N, C)
        One non-negative value per photo and latent.
    embeddings : Tensor of shape (N, E)
    chunk : int
        Photos per batch.

    Examples
    --------
    Photos 0 and 1 are identical, photo 2 differs. The first latent is active on the identical pair, the second one on
    photos 0 and 2.

    >>> activations = torch.tensor([[1.0, 1.0], [1.0, 0.0], [0.0, 1.0]])
    >>> embeddings = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    >>> monosemanticity_score(activations, embeddings).values
    tensor([1., 0.], dtype=torch.float64)
    """
    check_matrix(activations, "activations")
    check_matrix(embeddings, "embeddings")
    if bool((activations < 0).any()):
        raise BadParameter("activations must not be negative. Give the output of SAE.encode.")
    if chunk < 1:
        raise BadParameter(f"chunk must be at least 1, got {chunk}.")
    if len(activations) != len(embeddings):
        raise BadParameter(f"{len(activations)} photos need as many embeddings, got {len(embeddings)}.")
    accumulator = MonosemanticityAccumulator(activations.shape[1], embeddings.shape[1])
    for start in range(0, len(activations), chunk):
        accumulator.update(activations[start : start + chunk], embeddings[start : start + chunk])
    return accumulator.compute()
