"""TORINO: visual token reduction for vision-language models, guided by interpretable concepts.

>>> import torch, torino
>>> tokens = torino.VisualTokens.of(torch.eye(9)[[0, 0, 1, 0, 0, 1, 2, 2, 2]])
>>> plan = torino.make("torino-m(k=1, delta=1)", sae=torino.RawEmbedding()).plan(tokens)
>>> plan
Reduction(9 -> 3 tokens by torino-m(k=1, delta=1): 3 primary)
>>> plan.apply(tokens.patches).shape
torch.Size([3, 9])
>>> print(plan.explain(1))
Token 1 of 3 (primary) takes the place of patch 2 (row 0, column 2) and sums 2 patches
with weights of 0.847. It stands for 2 patches, 22% of the image. Their most common concept
is 1. Score 1.
"""

from torino.core.concepts import ConceptEncoder, Concepts, RawEmbedding
from torino.core.errors import (
    BadFile,
    BadParameter,
    BadTokens,
    MissingSignal,
    SAEMismatch,
    TorinoError,
    UnknownName,
    UnmetBudget,
    Unreachable,
)
from torino.core.explanation import Explanation
from torino.core.grouping import Groups, group_by_overlap
from torino.core.ragged import Ragged
from torino.core.reduction import Reduction, ReductionBatch
from torino.core.tokens import Origin, VisualTokens, load_tokens, save_tokens
from torino.reducers import Reducer, list_reducers, make, register
from torino.reducers.calibration import Calibration, CoverCalibration, calibrate, calibrate_cover
from torino.sae.model import SAE, SAECard
from torino.version import __version__

__all__ = [
    "SAE",
    "BadFile",
    "BadParameter",
    "BadTokens",
    "Calibration",
    "ConceptEncoder",
    "Concepts",
    "CoverCalibration",
    "Explanation",
    "Groups",
    "MissingSignal",
    "Origin",
    "Ragged",
    "RawEmbedding",
    "Reducer",
    "Reduction",
    "ReductionBatch",
    "SAECard",
    "SAEMismatch",
    "TorinoError",
    "UnknownName",
    "UnmetBudget",
    "Unreachable",
    "VisualTokens",
    "__version__",
    "calibrate",
    "calibrate_cover",
    "group_by_overlap",
    "list_reducers",
    "load_tokens",
    "make",
    "register",
    "save_tokens",
]
