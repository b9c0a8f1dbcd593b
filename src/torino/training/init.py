"""Where training starts: the scale of the rows, the first bias, the first directions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torino.core.errors import BadTokens
from torino.training.config import TrainConfig
from torino.training.objectives import Weights


@dataclass(frozen=True)
class Scaling:
    """u = (x − centre) / scale: what is done to rows before training, and undone on saving."""

    centre: Tensor
    scale: float

    def __call__(self, x: Tensor) -> Tensor:
        """Scale rows."""
        return (x - self.centre) / self.scale

    def fold(self, weights: Weights, threshold: float) -> tuple[Weights, float]:
        """Weights that do to x what ``weights`` do to u: latents and biases grow by the scale, directions stay.

        From x̂ = scale · û + centre and, z being positively homogeneous, scale · z(u) = z'(x).
        """
        return (
            Weights(
                weights.W_enc.clone(),
                weights.W_dec.clone(),
                weights.b_enc * self.scale,
                weights.b_dec * self.scale + self.centre,
            ),
            threshold * self.scale,
        )


def scaling_of(rows: Tensor, recipe: TrainConfig) -> Scaling:
    """Centre and scale, from the first rows: the mean square norm becomes 1."""
    centre = rows.double().mean(0).to(rows.dtype) if recipe.centre else rows.new_zeros(rows.shape[1])
    square = float((rows - centre).double().square().sum(1).mean())
    if not square > 0:
        raise BadTokens("All rows are alike, so there is nothing to learn from them. Give activations of real images.")
    return Scaling(centre, square**0.5 if recipe.scale else 1.0)


def first_weights(u: Tensor, recipe: TrainConfig) -> Weights:
    """Random unit directions, the encoder equal to the decoder, and the bias that the recipe names."""
    assert recipe.latents is not None
    generator = torch.Generator().manual_seed(recipe.seed)
    directions = torch.randn(recipe.latents, u.shape[1], generator=generator).to(u)
    directions /= torch.linalg.vector_norm(directions, dim=1, keepdim=True)
    bias = u.new_zeros(u.shape[1])
    if recipe.bias == "mean":
        bias = u.mean(0)
    elif recipe.bias == "median":
        bias = geometric_median(u)
    return Weights(directions.clone(), directions, u.new_zeros(recipe.latents), bias)


def geometric_median(points: Tensor, turns: int = 100, close: float = 1e-5) -> Tensor:
    """The point with the least mean distance to all points, by Weiszfeld's iteration.

    Examples
    --------
    >>> geometric_median(torch.tensor([[0.0], [1.0], [9.0]])).round(decimals=2)
    tensor([1.])
    """
    guess = points.mean(0)
    for _ in range(turns):
        distance = torch.linalg.vector_norm(points - guess, dim=1).clamp(min=1e-12)
        weight = 1 / distance
        before, guess = guess, (weight / weight.sum()) @ points
        if float(torch.linalg.vector_norm(guess - before)) < close:
            break
    return guess
