"""Evaluation: the paper's nine benchmarks and tasks of one's own, their scores, and how sure these are.

>>> from torino.evaluation import BENCHMARKS, paper_table, relative
>>> list(BENCHMARKS)
['GQA', 'MMBench_EN', 'MMBench_CN', 'MME', 'POPE', 'ScienceQA', 'TextVQA', 'VizWiz', 'MMVet']
>>> table = paper_table("llava-1.5-13b-x64")
>>> row = next(row for row in table.rows if row.method == "TORINO-M")
>>> f"{relative(row.values, table.baseline.values).value:.2f}", row.relative
('97.04', '97.04')
"""

from torino.evaluation.aggregate import Relative, relative
from torino.evaluation.benchmarks import BENCHMARKS, Benchmark, benchmark_of
from torino.evaluation.judge import Judge
from torino.evaluation.paper import PaperRow, PaperTable, paper_table, paper_tables
from torino.evaluation.samples import Place, Problem, Sample
from torino.evaluation.scoring import Score, ScoreStats
from torino.evaluation.statistics import (
    Difference,
    Interval,
    OverSeeds,
    difference,
    interval,
    over_seeds,
    relative_difference,
    relative_interval,
    relative_over_seeds,
)
from torino.evaluation.tasks import Task, data_folder, find_task, open_task, read_answers

__all__ = [
    "BENCHMARKS",
    "Benchmark",
    "Difference",
    "Interval",
    "Judge",
    "OverSeeds",
    "PaperRow",
    "PaperTable",
    "Place",
    "Problem",
    "Relative",
    "Sample",
    "Score",
    "ScoreStats",
    "Task",
    "benchmark_of",
    "data_folder",
    "difference",
    "find_task",
    "interval",
    "open_task",
    "over_seeds",
    "paper_table",
    "paper_tables",
    "read_answers",
    "relative",
    "relative_difference",
    "relative_interval",
    "relative_over_seeds",
]
