"""Evaluation: the paper's nine benchmarks and custom tasks, their scores and confidence intervals.

>>> from torino.evaluation import BENCHMARKS, paper_table, relative_score
>>> list(BENCHMARKS)
['GQA', 'MMBench_EN', 'MMBench_CN', 'MME', 'POPE', 'ScienceQA', 'TextVQA', 'VizWiz', 'MMVet']
>>> table = paper_table("llava-1.5-13b-x64")
>>> row = next(row for row in table.rows if row.method == "TORINO-M")
>>> f"{relative_score(row.values, table.baseline.values).value:.2f}", row.relative
('97.04', '97.04')
"""

from torino.evaluation.aggregate import RelativeScore, relative_score
from torino.evaluation.benchmarks import BENCHMARKS, Benchmark, all_benchmarks, find_benchmark
from torino.evaluation.images import ImageRef
from torino.evaluation.judge import Judge
from torino.evaluation.paper import PaperRow, PaperTable, paper_table, paper_tables
from torino.evaluation.samples import RowProblem, Sample
from torino.evaluation.scoring import Score, ScoreStats
from torino.evaluation.statistics import (
    Difference,
    Interval,
    SeedInterval,
    relative_difference,
    relative_interval,
    relative_seed_interval,
    score_difference,
    score_interval,
    seed_interval,
)
from torino.evaluation.tasks import Task, data_folder, find_task, open_task, read_answers
from torino.evaluation.videos import VideoRef

__all__ = [
    "BENCHMARKS",
    "Benchmark",
    "Difference",
    "ImageRef",
    "Interval",
    "Judge",
    "PaperRow",
    "PaperTable",
    "RelativeScore",
    "RowProblem",
    "Sample",
    "Score",
    "ScoreStats",
    "SeedInterval",
    "Task",
    "VideoRef",
    "all_benchmarks",
    "data_folder",
    "find_benchmark",
    "find_task",
    "open_task",
    "paper_table",
    "paper_tables",
    "read_answers",
    "relative_difference",
    "relative_interval",
    "relative_score",
    "relative_seed_interval",
    "score_difference",
    "score_interval",
    "seed_interval",
]
