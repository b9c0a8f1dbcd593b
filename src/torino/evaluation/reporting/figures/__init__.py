"""Figures: what runs found, as a paper prints it. Needs matplotlib (``pip install "torino[plot]"``).

Charts are made of result files alone: :func:`distribution`, :func:`pareto` and :func:`accuracy` of the document that
:mod:`torino.evaluation.reporting.summary` keeps in ``scores.json``, :func:`latency` of the files of ``torino bench``.
:func:`qualitative` and :func:`teaser` need photos and Reductions.
"""

from torino.evaluation.reporting.figures.charts import accuracy, distribution, latency, pareto, read_bench
from torino.evaluation.reporting.figures.pictures import Example, Shown, qualitative, read_examples, teaser
from torino.evaluation.reporting.figures.points import Point, paper_points, points_of
from torino.evaluation.reporting.figures.style import save_figure, svg_text

__all__ = [
    "Example",
    "Point",
    "Shown",
    "accuracy",
    "distribution",
    "latency",
    "paper_points",
    "pareto",
    "points_of",
    "qualitative",
    "read_bench",
    "read_examples",
    "save_figure",
    "svg_text",
    "teaser",
]
