"""Initialization of a training run: scaling of the rows, initial bias and initial directions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torino.core.errors import BadTokens
from torino.training.config import TrainConfig
from torino.training.objectives import Weights


@dataclass(frozen=True)
class Scaling:
    """Row scaling u = (x − center) / scale, applied before training and folded into the saved weights."""

    center: Tensor
    scale: float

    def __call__(self, x: Tensor) -> Tensor:
        """Return the scaled rows."""
        return (x - self.center) / self.scale

    def fold(self, weights: Weights, threshold: float) -> tuple[Weights, float]:
        """Return the weights and the threshold that act on x as ``weights`` and ``threshold`` act on u.

        From x̂ = scale · û + center and scale · z(u) = z'(x), which holds because z is positively homogeneous: biases
        and threshold are multiplied by the scale, and directions are unchanged.
        """
        return (
            Weights(
                weights.W_enc.clone(),
                weights.W_dec.clone(),
                weights.b_enc * self.scale,
                weights.b_dec * self.scale + self.center,
            ),
            threshold * self.scale,
        )


def fit_scaling(rows: Tensor, config: TrainConfig) -> Scaling:
    """Compute center and scale from the first rows, so that their mean squared norm becomes 1."""
    center = rows.double().mean(0).to(rows.dtype) if config.center else rows.new_zeros(rows.shape[1])
    mean_square = float((rows - center).double().square().sum(1).mean())
    if not mean_square > 0:
        raise BadTokens("All rows are equal, so there is nothing to learn. Use activations of real images.")
    return Scaling(center, mean_square**0.5 if config.scale else 1.0)


def init_weights(u: Tensor, config: TrainConfig) -> Weights:
    """Initialize the weights: random unit directions, encoder equal to decoder, and the configured decoder bias."""
    assert config.latents is not None
    generator = torch.Generator().manual_seed(config.seed)
    directions = torch.randn(config.latents, u.shape[1], generator=generator).to(u)
    directions /= torch.linalg.vector_norm(directions, dim=1, keepdim=True)
    bias = u.new_zeros(u.shape[1])
    if config.bias == "mean":
        bias = u.mean(0)
    elif config.bias == "median":
        bias = geometric_median(u)
    return Weights(directions.clone(), directions, u.new_zeros(config.latents), bias)


def geometric_median(points: Tensor, max_iter: int = 100, tol: float = 1e-5) -> Tensor:
    """Compute the point with the smallest mean distance to all points, by Weiszfeld's algorithm.

    Examples
    --------
    >>> geometric_median(torch.tensor([[0.0], [1.0], [9.0]])).round(decimals=2)
    tensor([1.])
    """
    median = points.mean(0)
    for _ in range(max_iter):
        distance = torch.linalg.vector_norm(points - median, dim=1).clamp(min=1e-12)
        weight = 1 / distance
        previous, median = median, (weight / weight.sum()) @ points
        if float(torch.linalg.vector_norm(median - previous)) < tol:
            break
    return median
