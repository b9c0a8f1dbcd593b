"""Figures of runs, in the style of a paper. Needs matplotlib (``pip install "torino[plot]"``).

Charts are drawn from result files: :func:`plot_distribution`, :func:`plot_pareto` and :func:`plot_accuracy` from the
summary in ``scores.json`` (see :mod:`torino.evaluation.reporting.summary`), :func:`plot_latency` from the files of
``torino bench``. :func:`plot_qualitative` and :func:`plot_teaser` need images and reductions.
"""

from torino.evaluation.reporting.figures.charts import (
    plot_accuracy,
    plot_distribution,
    plot_latency,
    plot_pareto,
    read_bench,
)
from torino.evaluation.reporting.figures.pictures import (
    FigureExample,
    Panel,
    plot_qualitative,
    plot_teaser,
    read_examples,
)
from torino.evaluation.reporting.figures.points import Point, collect_points, paper_points
from torino.evaluation.reporting.figures.style import save_figure, to_svg

__all__ = [
    "FigureExample",
    "Panel",
    "Point",
    "collect_points",
    "paper_points",
    "plot_accuracy",
    "plot_distribution",
    "plot_latency",
    "plot_pareto",
    "plot_qualitative",
    "plot_teaser",
    "read_bench",
    "read_examples",
    "save_figure",
    "to_svg",
]
