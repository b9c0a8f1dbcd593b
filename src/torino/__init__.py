"""TORINO: visual token reduction for vision-language models, guided by interpretable concepts.

>>> import torch, torino
>>> tokens = torino.VisualTokens.of(torch.eye(9)[[0, 0, 1, 0, 0, 1, 2, 2, 2]])
>>> plan = torino.make("torino-m(k=1, delta=1)", sae=torino.RawEmbedding()).plan(tokens)
>>> plan
Reduction(9 -> 3 tokens by torino-m(k=1, delta=1): 3 primary)
>>> plan.apply(tokens.patches).shape
torch.Size([3, 9])
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torino.core.errors import TorinoError
from torino.core.lazy import lazy_attributes
from torino.version import __version__

if TYPE_CHECKING:
    from torino.core.concepts import RawEmbedding
    from torino.core.reduction import Reduction
    from torino.core.tokens import VisualTokens
    from torino.reducers import Reducer, list_reducers, make, register
    from torino.sae import SAE
    from torino.vlm import ask, load_vlm, reduced

__all__ = [
    "SAE",
    "RawEmbedding",
    "Reducer",
    "Reduction",
    "TorinoError",
    "VisualTokens",
    "__version__",
    "ask",
    "list_reducers",
    "load_vlm",
    "make",
    "reduced",
    "register",
]

# Loaded on first use: torch takes seconds to import, and transformers is optional.
_MODULES = {
    "SAE": "torino.sae",
    "RawEmbedding": "torino.core.concepts",
    "Reducer": "torino.reducers",
    "Reduction": "torino.core.reduction",
    "VisualTokens": "torino.core.tokens",
    "ask": "torino.vlm",
    "list_reducers": "torino.reducers",
    "load_vlm": "torino.vlm",
    "make": "torino.reducers",
    "reduced": "torino.vlm",
    "register": "torino.reducers",
}

__getattr__, __dir__ = lazy_attributes(__name__, _MODULES)
