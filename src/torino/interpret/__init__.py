"""Interpret the latents of an SAE: top activations, monosemanticity, names, and pictures of them.

:mod:`~torino.interpret.top_activations` encodes photos once and keeps the top activations of every latent,
:mod:`~torino.interpret.monosemanticity` scores them, :mod:`~torino.interpret.naming` names them,
:mod:`~torino.interpret.sheet` and :mod:`~torino.interpret.dashboard` draw them.
"""

from torino.interpret.monosemanticity import (
    MonosemanticityAccumulator,
    MonosemanticityScores,
    monosemanticity_score,
)
from torino.interpret.naming import ConceptName, name_concepts, save_names
from torino.interpret.top_activations import PrecomputedPhotos, TopActivations, collect_top_activations

__all__ = [
    "ConceptName",
    "MonosemanticityAccumulator",
    "MonosemanticityScores",
    "PrecomputedPhotos",
    "TopActivations",
    "collect_top_activations",
    "monosemanticity_score",
    "name_concepts",
    "save_names",
]
