"""Judging concepts: what fires a latent, how alike that is, a word for it, and pictures of all that.

:mod:`~torino.judge.evidence` looks at photos once; :mod:`~torino.judge.monosemanticity` scores,
:mod:`~torino.judge.names` names, :mod:`~torino.judge.sheet` and :mod:`~torino.judge.page` draw.
"""

from torino.judge.evidence import Evidence, Looked, gather
from torino.judge.monosemanticity import Monosemanticity, Scores, monosemanticity
from torino.judge.names import ConceptName, name_concepts, save_names

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
