"""Monosemanticity: how alike the photos are that fire a latent, in the eyes of a judge."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torino.core.errors import BadParameter, BadTokens
from torino.core.tokens import check_matrix

_NONE = 1e-12  # weight of all pairs, next to which a pair of photos at full strength proportional_attention 2


@dataclass(frozen=True, eq=False)
class Scores:
    """The monosemanticity of every latent.

    Attributes
    ----------
    values : Tensor of shape (C,), float64
        MS of each latent, −1 to 1; NaN where it is not defined.
    chance : float
        Mean similarity of any two photos: the score of a latent that fires on all photos alike.
    silent : int
        Latents that never fired.
    single : int
        Latents that fired, but leave no pair of photos to compare: in one photo alone, or in all of them alike.
    """

    values: Tensor
    chance: float
    silent: int
    single: int

    @property
    def judged(self) -> Tensor:
        """The values that are defined."""
        return self.values[~self.values.isnan()]

    @property
    def mean(self) -> float:
        """Mean over the latents that have a score; NaN where none has."""
        return float(self.judged.mean()) if len(self.judged) else float("nan")

    @property
    def median(self) -> float:
        """Median over the latents that have a score (the mean of the middle two); NaN where none has."""
        return float(self.judged.quantile(0.5)) if len(self.judged) else float("nan")

    @property
    def above(self) -> Tensor:
        """How far each latent has come from chance (0) to photos that are all alike (1), shape (C,).

        Embeddings of many towers lie in a narrow cone, where any two photos are alike; this takes it out.
        """
        return (self.values - self.chance) / max(1 - self.chance, torch.finfo(torch.float64).eps)

    def __str__(self) -> str:
        """Tell it in a line."""
        left = f"{self.silent} never fired" + (f", {self.single} left no pair of photos" if self.single else "")
        return (
            f"monosemanticity {self.mean:.3f} on average, {self.median:.3f} in the middle, "
            f"{self.chance:.3f} by chance; {len(self.judged)} latents judged, {left}"
        )


class Monosemanticity:
    r"""The score of Pach et al. (arXiv 2504.02821), added up photo by photo.

    With a_n the activation of a latent on photo n, ã_n = (a_n − min a) / (max a − min a) over all N photos, and
    s_nm the cosine similarity of the judge's embeddings of photos n and m,

    .. math:: MS = \frac{\sum_{n \ne m} ã_n ã_m s_{nm}}{\sum_{n \ne m} ã_n ã_m}

    As s_nn = 1, the sum above the line is \|Σ ã_n e_n\|² − Σ ã_n² for unit embeddings e, and the one below it
    (Σ ã_n)² − Σ ã_n². The scaling by min and max is linear, so it can wait until all photos were seen: what is kept
    is one vector per latent and a few sums, in float64, whatever the number of photos. Equal to the loop over all
    pairs up to rounding.

    Where this differs from the published figures: there a_n is the activation at the CLS token of an SAE trained on
    CLS tokens; the authors' code also takes the mean over all tokens. Here an SAE reads patches, so a_n is the mean
    (or, if asked for, the largest) activation over the patches of a photo. The embedding is the judge's CLS token
    (or the mean of its patches) at the tapped block, before a final norm or projection. Latents without a score are
    left out of mean and median, as there.
    """

    def __init__(self, latents: int, width: int) -> None:
        zeros = torch.zeros(latents, dtype=torch.float64)
        self.sums = torch.zeros(latents, width, dtype=torch.float64)
        self.first, self.second, self.high = zeros.clone(), zeros.clone(), zeros.clone()
        self.low = torch.full_like(zeros, torch.inf)
        self.embeddings = torch.zeros(width, dtype=torch.float64)
        self.photos = torch.zeros((), dtype=torch.int64)

    def add(self, activations: Tensor, embeddings: Tensor) -> None:
        """Take in some photos.

        Parameters
        ----------
        activations : Tensor of shape (n, C)
            One number per photo and latent, none negative.
        embeddings : Tensor of shape (n, E)
            What the judge makes of the photos; only the direction counts.
        """
        if embeddings.shape != (len(activations), len(self.embeddings)):
            raise BadParameter(
                f"{len(activations)} photos take as many embeddings of width {len(self.embeddings)}, "
                f"got {tuple(embeddings.shape)}."
            )
        a, e = activations.double(), embeddings.double()
        norms = e.norm(dim=1, keepdim=True)
        if not bool((norms > 0).all() & torch.isfinite(norms).all()):
            raise BadTokens(
                "The judge's embedding of a photo is zero or not finite, so it is like no other. "
                "Choose another judge, or run it in float32."
            )
        e = e / norms
        self.sums.addmm_(a.T, e)
        self.first += a.sum(0)
        self.second += (a * a).sum(0)
        self.low = torch.minimum(self.low, a.amin(0))
        self.high = torch.maximum(self.high, a.amax(0))
        self.embeddings += e.sum(0)
        self.photos += len(a)

    def scores(self) -> Scores:
        """The score of every latent over the photos taken in so far."""
        photos = int(self.photos)
        if photos < 2:
            raise BadParameter(f"Monosemanticity compares photos with each other, and {photos} was given. Give more.")
        span = self.high - self.low
        scale = torch.where(span > 0, span, 1.0)
        total = (self.first - photos * self.low) / scale
        squares = (self.second - 2 * self.low * self.first + photos * self.low**2) / scale**2
        direction = (self.sums - self.low[:, None] * self.embeddings) / scale[:, None]
        pairs = total**2 - squares
        rounding = 64 * torch.finfo(torch.float64).eps * photos * (self.high / scale) ** 2
        known = (span > 0) & (pairs > rounding.clamp(min=_NONE))
        values = ((direction**2).sum(1) - squares) / torch.where(known, pairs, 1.0)
        silent = int((self.high == 0).sum())
        return Scores(
            values=torch.where(known, values.clamp(-1, 1), torch.nan),
            chance=float(((self.embeddings**2).sum() - photos) / (photos * (photos - 1))),
            silent=silent,
            single=len(known) - int(known.sum()) - silent,
        )

    def state(self) -> dict[str, Tensor]:
        """Everything needed to go on later."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    @classmethod
    def of(cls, state: dict[str, Tensor]) -> Monosemanticity:
        """Go on from a :meth:`state`."""
        made = cls(*state["sums"].shape)
        for name, value in made.state().items():
            setattr(made, name, state[name].to(value.dtype).clone())
        return made


def monosemanticity(activations: Tensor, embeddings: Tensor, *, chunk: int = 1024) -> Scores:
    """The monosemanticity of latents whose activations are all there; see :class:`Monosemanticity`.

    Parameters
    ----------
    activations : Tensor of shape (N, C)
        One number per photo and latent, none negative.
    embeddings : Tensor of shape (N, E)
    chunk : int
        Photos taken in at a time.

    Examples
    --------
    Two photos alike and one apart: the first latent fires on the pair, the second on one of it and the other.

    >>> fires = torch.tensor([[1.0, 1.0], [1.0, 0.0], [0.0, 1.0]])
    >>> looks = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    >>> monosemanticity(fires, looks).values
    tensor([1., 0.], dtype=torch.float64)
    """
    check_matrix(activations, "activations")
    check_matrix(embeddings, "embeddings")
    if bool((activations < 0).any()):
        raise BadParameter("activations must not be negative; give the latents of an SAE as encode gives them.")
    if chunk < 1:
        raise BadParameter(f"chunk must be at least 1 photo, got {chunk}.")
    added = Monosemanticity(activations.shape[1], embeddings.shape[1])
    if len(activations) != len(embeddings):
        raise BadParameter(f"{len(activations)} photos take as many embeddings, got {len(embeddings)}.")
    for start in range(0, len(activations), chunk):
        added.add(activations[start : start + chunk], embeddings[start : start + chunk])
    return added.scores()
