"""Estimate the time of a run from its tokens, or from the speed of answers that it already has.

Before a run has answers, the time is the sum of four parts, with the assumptions below:

- reading: 2 × parameters operations for each token that the language model reads,
- writing: one step for each token of an answer, and one for the prompt, for all settings of a batch together,
- encoding: the tower and the SAE, once per image and phase of the run,
- reducing: a constant time per image and setting.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from torino.evaluation import protocol
from torino.evaluation.paper import PaperTable
from torino.evaluation.protocol import Setting
from torino.evaluation.reporting.tables import PAPER_TIERS
from torino.evaluation.reproduction.recipe import ModelSource, SAETraining, TaskSource
from torino.evaluation.results import Run
from torino.evaluation.runner import RunPlan

UTILIZATION = 0.4
"""Assumed share of the peak speed that matrix products reach."""
STEP_SECONDS = 0.03
"""Assumed shortest time of one forward pass of a 7B model in transformers, which is bound by kernel launches."""
REDUCE_SECONDS = 0.03
"""Assumed time to reduce one image: the mean of the paper's latencies on an A40."""
FULL_PRECISION = 8
"""Assumed ratio of the peak speeds in half and in full precision, for training an SAE."""
DOWNLOAD_BYTES = 50e6
"""Assumed bytes per second of downloads."""
BYTES_PER_ANSWER = 400
"""Size of a recorded answer on disk."""


@dataclass(frozen=True)
class GPU:
    """A GPU: peak operations per second in half precision, without sparsity, and bytes per second of its memory."""

    name: str
    flops: float
    bandwidth: float


GPUS = (
    GPU("H200", 989e12, 4.8e12),
    GPU("H100", 989e12, 3.35e12),
    GPU("A100", 312e12, 1.94e12),
    GPU("L40S", 362e12, 0.86e12),
    GPU("A40", 150e12, 0.70e12),
    GPU("A10", 125e12, 0.60e12),
    GPU("L4", 121e12, 0.30e12),
    GPU("4090", 165e12, 1.01e12),
    GPU("3090", 71e12, 0.94e12),
    GPU("V100", 125e12, 0.90e12),
    GPU("T4", 65e12, 0.32e12),
)
"""Figures of the makers' data sheets."""
CPU = GPU("CPU", 0.5e12, 0.05e12)
DEFAULT_GPU = "A100"


@dataclass(frozen=True)
class RunEstimate:
    """Seconds of each part of a run, and the number of answers that they produce.

    ``measured`` tells whether the speed was measured in the run; then ``parts`` has a single entry.
    """

    parts: Mapping[str, float]
    answers: int
    measured: bool = False

    @property
    def seconds(self) -> float:
        """The whole time."""
        return sum(self.parts.values())


def find_gpu(name: str) -> GPU | None:
    """Return the known GPU whose name is part of ``name``, such as ``NVIDIA A100-SXM4-80GB``.

    Examples
    --------
    >>> find_gpu("NVIDIA A100-SXM4-80GB").name, find_gpu("NVIDIA L40S").name, find_gpu("Quadro")
    ('A100', 'L40S', None)
    """
    matches = [gpu for gpu in GPUS if gpu.name.lower() in name.lower()]
    return max(matches, key=lambda gpu: len(gpu.name), default=None)


def expected_tokens(tier: str, tables: Sequence[PaperTable], visual_tokens: int) -> int:
    """Return the number of tokens of a tier: its budget, or the paper's mean for its (k, δ), else half of all."""
    if tier.isdecimal():
        return int(tier)
    for table in tables:
        counts = list(table.tiers())
        if table.setting == "dynamic" and tier in PAPER_TIERS and len(counts) == len(PAPER_TIERS):
            return counts[PAPER_TIERS.index(tier)]
    return visual_tokens // 2


def plan_phases(plan: RunPlan, label: str, tables: Sequence[PaperTable], visual_tokens: int) -> list[list[Setting]]:
    """Return the settings of each phase of a run; the budgets of matched tiers are the expected ones."""
    first = plan.first_settings([label])
    if not plan.dynamic or not plan.matched:
        return [first]
    references = {setting.tier: setting for setting in first if setting.reference}
    budgets = {tier: expected_tokens(tier, tables, visual_tokens) for tier in references}
    methods = [*plan.methods, *protocol.split_specs(plan.specs)[0]]
    return [first, protocol.matched_settings(methods, budgets, references, [label], plan.seeds)]


def estimate_run(
    tasks: Sequence[TaskSource],
    phases: Sequence[Sequence[Setting]],
    tables: Sequence[PaperTable],
    model: ModelSource,
    batch: int,
    gpu: GPU,
) -> RunEstimate:
    """Estimate the time of a run on a GPU, see the module for the formula."""
    settings = [setting for phase in phases for setting in phase]
    visual = sum(
        model.visual_tokens if item.tier == "full" else expected_tokens(item.tier, tables, model.visual_tokens)
        for item in settings
    )
    calls = sum(_count_batches(phase, batch) for phase in phases)
    speed = UTILIZATION * gpu.flops
    step = max(STEP_SECONDS, 2 * model.parameters / gpu.bandwidth)
    read = sum(task.images * visual + task.questions * len(settings) * task.question_tokens for task in tasks)
    images = sum(task.images for task in tasks)
    parts = {
        "reading": 2 * model.parameters * read / speed,
        "writing": sum(task.questions * (task.answer_tokens + 1) for task in tasks) * calls * step,
        "encoding": images * len(phases) * model.image_flops / speed,
        "reducing": images * sum(item.tier != "full" for item in settings) * REDUCE_SECONDS,
    }
    return RunEstimate(parts, len(settings) * sum(task.questions for task in tasks))


def measure_speed(run: Run) -> dict[str, float]:
    """Return the seconds per answer of each task of a run, from the times that its answers record.

    An answer takes its share of its batch. Tower, reduction and projector count once per image.
    """
    seconds: dict[str, float] = defaultdict(float)
    answers: dict[str, int] = defaultdict(int)
    shared: set[tuple[str, ...]] = set()
    for row in run.rows():
        times = row.get("seconds")
        if not times:
            continue
        task, setting, image = str(row["task"]), str(row["setting"]), str(row["image"])
        answers[task] += 1
        seconds[task] += times["answer"] / times["batch"]
        once = {(task, image): ("tower",), (task, image, setting): ("plan", "projector")}
        for key, names in once.items():
            if key not in shared:
                shared.add(key)
                seconds[task] += sum(times.get(name, 0.0) for name in names)
    return {task: seconds[task] / answers[task] for task in answers}


def estimate_rest(tasks: Sequence[TaskSource], settings: int, run: Run) -> RunEstimate | None:
    """Estimate the rest of a run that has answers from their speed; None if it has none.

    Tasks without answers get the mean speed of the others.
    """
    speed = measure_speed(run)
    if not speed:
        return None
    done: dict[str, int] = defaultdict(int)
    for row in run.rows():
        done[str(row["task"])] += 1
    mean = sum(speed.values()) / len(speed)
    missing = {task.task: max(0, task.questions * settings - done[task.task]) for task in tasks}
    seconds = sum(count * speed.get(name, mean) for name, count in missing.items())
    return RunEstimate({"answers": seconds}, sum(missing.values()), measured=True)


def estimate_training(training: SAETraining, image_flops: float, gpu: GPU) -> float:
    """Estimate the seconds to train the SAE: the tower over all images, and three dense products per step."""
    tower = training.images * image_flops / (UTILIZATION * gpu.flops)
    row = 2 * training.width * training.width * training.expansion
    steps = 3 * training.steps * training.batch * row
    return tower + steps / (UTILIZATION * gpu.flops / FULL_PRECISION)


def _count_batches(settings: Sequence[Setting], batch: int) -> int:
    """Return how many calls of the language model answer one question: settings of a tier go together."""
    tiers = sorted(setting.tier for setting in settings)
    return sum(-(-len(list(group)) // batch) for _, group in groupby(tiers))
