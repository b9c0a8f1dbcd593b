"""Sparse autoencoders: the inference model, its card, and file formats."""

from torino.sae.card import SAECard
from torino.sae.model import SAE

__all__ = ["SAE", "SAECard"]
