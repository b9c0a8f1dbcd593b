"""Judging concepts: what fires a latent, how alike that is, a word for it, and pictures of all that.

:mod:`~torino.interpret.top_activations` looks at photos once; :mod:`~torino.interpret.monosemanticity` scores,
:mod:`~torino.interpret.naming` names, :mod:`~torino.interpret.sheet` and :mod:`~torino.interpret.dashboard` draw.
"""

from torino.interpret.monosemanticity import Monosemanticity, Scores, monosemanticity
from torino.interpret.naming import ConceptName, name_concepts, save_names
from torino.interpret.top_activations import Evidence, Looked, gather

__all__ = [
    "ConceptName",
    "Evidence",
    "Looked",
    "Monosemanticity",
    "Scores",
    "gather",
    "monosemanticity",
    "name_concepts",
    "save_names",
]
