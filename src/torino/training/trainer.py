"""Train an SAE on activations; a killed run resumes from its last checkpoint."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torino.core.checks import check_type, describe_value, to_integer, to_path
from torino.core.errors import BadParameter, BadTokens, TorinoError
from torino.core.io import check_tensors
from torino.core.tokens import check_matrix
from torino.sae.card import SAECard
from torino.sae.model import SAE, Kind
from torino.training.activations.base import Activations
from torino.training.checkpoint import CheckpointStore
from torino.training.config import TrainConfig
from torino.training.distributed import Distributed
from torino.training.init import Scaling, fit_scaling, init_weights
from torino.training.logging import MetricLogger, open_loggers
from torino.training.metrics import LatentStats, SAEMetrics, compute_metrics
from torino.training.objectives import BatchStats, Objective, Weights
from torino.version import __version__

INIT_ROWS = 4096  # rows from which scale and bias are initialized, in at most INIT_BATCHES batches
INIT_BATCHES = 64
METRIC_BATCHES = 8  # batches on which the metrics of the trained SAE are computed

StepCallback = Callable[[int, Mapping[str, Any] | None], None]
TrainerState = tuple[Mapping[str, Tensor], Mapping[str, Any]]


class Trainer:
    """State of a training run, and its training step.

    Parameters
    ----------
    activations : Activations
    config : TrainConfig
    device : torch.device or str
    distributed : Distributed, optional
    state : optional
        Result of :meth:`get_state`, to resume from it.
    """

    def __init__(
        self,
        activations: Activations,
        config: TrainConfig,
        *,
        device: torch.device | str = "cpu",
        distributed: Distributed | None = None,
        state: TrainerState | None = None,
    ) -> None:
        self.activations, self.device = activations, torch.device(device)
        self.distributed = distributed or Distributed()
        self.config = config = config.resolve(activations.width)
        self.step = 0
        self.threshold = -1.0  # a negative value means that there is no threshold yet: the first step sets it
        tensors: dict[str, Tensor] = {}
        if state is None:
            rows = self._read_init_rows().to(self.device)
            self.scaling = fit_scaling(rows, config)
            self.weights = init_weights(self.scaling(rows), config)
        else:
            # copies are aligned like newly created tensors: the math library may round differently otherwise
            tensors = {name: value.to(self.device, copy=True) for name, value in state[0].items()}
            self.scaling = Scaling(tensors["centre"], state[1]["scale"])
            self.weights = Weights(**{name: tensors[name] for name in ("W_enc", "W_dec", "b_enc", "b_dec")})
        self.distributed.broadcast_(list(self.weights.named().values()))
        self.objective = Objective(config, self.weights, self.distributed)
        self.adam = torch.optim.Adam(list(self.weights.named().values()), betas=(0.9, 0.999), fused=True)
        latents = len(self.weights.W_enc)
        self.rows_since_active = torch.zeros(latents, dtype=torch.int64, device=self.device)
        self.stats = LatentStats(len(config.group_sizes()), activations.width, latents, self.device)
        if state is not None:
            self._load_state(tensors, state[1])

    def _read_init_rows(self) -> Tensor:
        batches = max(1, min(INIT_BATCHES, -(-INIT_ROWS // self.config.batch)))
        rows = torch.cat([self.activations.batch(step, self.config.batch) for step in range(batches)])
        check_matrix(rows, "activations")
        return rows.float()

    def train_step(self, rows: Tensor) -> BatchStats:
        """Take one training step on the rows of the batch that belong to this process."""
        config, step = self.config, self.step
        scaled = self.scaling(rows.to(self.device, non_blocking=True).float())
        batch = self.objective(scaled, config.batch, config.k_at(step), config.l1_at(step), self.rows_since_active)
        if not math.isfinite(batch.loss):
            raise TorinoError(f"The loss is {batch.loss} at step {step}.")
        self._clip_gradients()
        for group in self.adam.param_groups:
            group["lr"] = config.lr_at(step)
        for name, weight in self.weights.named().items():
            weight.grad = self.objective.gradients.named()[name]
        self.adam.step()
        W_dec = self.weights.W_dec
        W_dec /= torch.linalg.vector_norm(W_dec, dim=1, keepdim=True).clamp_(min=1e-12)
        assert config.threshold_from is not None
        assert config.threshold_beta is not None
        if step >= config.threshold_from or self.threshold < 0:
            is_first = step == config.threshold_from or self.threshold < 0
            beta = 0.0 if is_first else config.threshold_beta
            self.threshold = beta * self.threshold + (1 - beta) * batch.min_kept
        self.stats.update(batch, config.batch)
        self.step += 1
        return batch

    def _clip_gradients(self) -> None:
        """Scale the gradients down to the maximum norm."""
        gradients = list(self.objective.gradients.named().values())
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(value) for value in gradients]))
        if not math.isfinite(float(norm)):
            raise TorinoError(f"The gradient norm is {float(norm)} at step {self.step}.")
        excess = float(norm) / self.config.clip
        if excess > 1:
            for value in gradients:
                value /= excess

    def pop_metrics(self) -> dict[str, Any]:
        """Return the metrics since the last call, and reset them."""
        assert self.config.dead_after is not None
        metrics = self.stats.compute(self.rows_since_active >= self.config.dead_after)
        values = {"loss": self.stats.loss, **metrics.to_dict(), "lr": self.config.lr_at(self.step - 1)}
        values |= {"k": self.config.k_at(self.step - 1), "threshold": self.threshold * self.scaling.scale}
        self.stats.reset()
        return values

    def to_sae(self, card: SAECard | None = None) -> SAE:
        """Build an SAE from the current weights, for rows as the tower outputs them."""
        weights, threshold = self.scaling.fold(self.weights, max(self.threshold, 0.0))
        kind: Kind = self.config.kind
        return SAE(
            weights.W_enc,
            weights.b_enc,
            weights.W_dec,
            weights.b_dec,
            kind=kind,
            k=None if kind == "relu" else self.config.k,
            threshold=threshold if kind in ("batchtopk", "matryoshka") else None,
            groups=self.config.group_sizes(),
            card=card,
        )

    # ------------------------------------------------------------------ state for checkpoints

    def get_state(self) -> TrainerState:
        """Return everything that the next steps depend on: tensors, and values that can be written as JSON."""
        tensors = dict(self.weights.named())
        for name, weight in self.weights.named().items():
            moments = self.adam.state.get(weight, {})
            for moment in ("exp_avg", "exp_avg_sq"):
                if moment in moments:
                    tensors[f"{name}.{moment}"] = moments[moment]
        tensors |= {"centre": self.scaling.center, "silent": self.rows_since_active, **self.stats.state_dict()}
        values = {"scale": self.scaling.scale, "threshold": self.threshold, "hint": self.objective.hint}
        return tensors, {"step": self.step, **values}

    def _load_state(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        self.step, self.threshold, self.objective.hint = values["step"], values["threshold"], values["hint"]
        self.rows_since_active.copy_(tensors["silent"])
        self.stats.load_state_dict(tensors)
        for name, weight in self.weights.named().items():
            if f"{name}.exp_avg" in tensors:
                self.adam.state[weight] = {
                    "step": torch.tensor(float(self.step), device=self.device),
                    "exp_avg": tensors[f"{name}.exp_avg"],
                    "exp_avg_sq": tensors[f"{name}.exp_avg_sq"],
                }


def check_state(config: TrainConfig, width: int, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` unless the tensors and values are a state of a run with this resolved configuration.

    Torch does not check the shapes of all of them: moments of another shape would overwrite foreign memory.
    """
    assert config.latents is not None
    matrix, biases = torch.empty(config.latents, width, device="meta"), torch.empty(config.latents, device="meta")
    weights = {"W_enc": matrix, "W_dec": matrix, "b_enc": biases, "b_dec": matrix[0]}
    stats = LatentStats(len(config.group_sizes()), width, config.latents, torch.device("meta")).state_dict()
    check_tensors(tensors, weights | {"centre": matrix[0], "silent": biases.long()} | stats)
    for moment in ("exp_avg", "exp_avg_sq"):
        check_tensors(tensors, {f"{name}.{moment}": value for name, value in weights.items()})
    if not values["scale"] > 0 or values["step"] > config.steps:
        raise ValueError(f"its scale is {values['scale']:g} and its step {values['step']} of {config.steps}")


@dataclass(frozen=True)
class TrainResult:
    """Result of a run.

    Attributes
    ----------
    folder : Path
        Folder of the SAE.
    metrics : mapping
        Metrics of the SAE. Only the main process computes them: they are empty on other processes, except for a run
        that was already finished, whose metrics every process reads from the folder.
    already_finished : bool
        Whether the run was already finished.
    """

    folder: Path
    metrics: Mapping[str, Any]
    already_finished: bool = False


def train(
    activations: Activations,
    config: TrainConfig,
    folder: str | Path,
    *,
    device: torch.device | str = "cpu",
    distributed: Distributed | None = None,
    name: str = "",
    loggers: Sequence[str] = (),
    log_every: int = 50,
    save_every: int = 500,
    callback: StepCallback | None = None,
) -> TrainResult:
    """Train an SAE into ``folder``, or resume a run that was stopped there.

    Parameters
    ----------
    activations : Activations
        Source of the rows.
    config : TrainConfig
    folder : str or Path
        Gets ``sae.safetensors`` and ``card.json`` at the end, and ``training/`` with the files of the run.
    device : torch.device or str
    distributed : Distributed, optional
    name : str
        Name of the SAE, for its card.
    loggers : sequence of str
        ``"tensorboard"`` and ``"wandb"``, in addition to ``training/log.jsonl``.
    log_every, save_every : int
        Steps between reports, and between checkpoints.
    callback : callable, optional
        Called after every step with the number of steps done, and with the metrics when they are reported, otherwise
        None.

    Examples
    --------
    >>> import tempfile
    >>> from torino.training.activations.base import InMemory
    >>> rows = torch.randn(512, 16, generator=torch.Generator().manual_seed(0))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     result = train(InMemory(rows), TrainConfig(expansion=4, k=4, steps=40, batch=128), folder)
    ...     SAE.load(folder).latents
    64
    """
    if not hasattr(activations, "rows") or not hasattr(activations, "batch"):
        given = describe_value(activations)
        raise BadParameter(f"activations must be a Store, Stream or InMemory, got {given}. Use Store.open(folder).")
    check_type("config", config, TrainConfig, "a TrainConfig")
    log_every, save_every = to_integer("log_every", log_every, 1), to_integer("save_every", save_every, 1)
    distributed, checkpoints = distributed or Distributed(), CheckpointStore(to_path(folder))
    sae_folder = checkpoints.sae_folder
    if activations.rows == 0:
        raise BadTokens("The activations are empty: there are no rows to train on. Cache activations first.")
    config = config.resolve(activations.width)
    if config.batch < distributed.size:
        raise BadParameter(f"batch must be at least {distributed.size}, one row for each process, got {config.batch}.")
    origin = {f"activations.{key}": value for key, value in _activation_settings(activations).items()}
    settings = {**config.to_dict(), **origin}
    with checkpoints.lock() if distributed.is_main else nullcontext():
        run = checkpoints.read_run(settings)
        if run is not None and "result" in run:
            if distributed.is_main:
                checkpoints.check_finished(run)
                checkpoints.remove_checkpoints()
            return TrainResult(sae_folder, run["result"], already_finished=True)
        state = checkpoints.load_latest(partial(check_state, config, activations.width)) if run is not None else None
        distributed.barrier()  # all processes have read the checkpoint before the main process writes
        trainer = Trainer(activations, config, device=device, distributed=distributed, state=state)
        opened: list[MetricLogger] = []
        if distributed.is_main:
            if run is None:
                run = checkpoints.start_run(settings, {"torino": __version__, "torch": torch.__version__})
            checkpoints.truncate_log(trainer.step)
            info = {"name": name or sae_folder.name, "id": str(run.get("id")), "config": settings}
            opened = open_loggers(loggers, checkpoints.log_file, trainer.step, info)
        try:
            _run_steps(trainer, checkpoints, opened, log_every, save_every, callback)
        finally:
            for logger in opened:
                logger.close()
        metrics = final_metrics(trainer) if distributed.is_main else None
        if metrics is not None:
            sae = trainer.to_sae(build_card(trainer, metrics, name))
            finish = getattr(activations, "finish", None)  # rows that were normalized by modality
            (sae if finish is None else finish(sae)).save(sae_folder)
            checkpoints.finish_run(metrics.to_dict())
        distributed.barrier()
    return TrainResult(sae_folder, metrics.to_dict() if metrics else {})


def _activation_settings(activations: Activations) -> dict[str, Any]:
    """Return the settings that identify the activations; a run is resumed only with the same ones."""
    settings: Any = getattr(activations, "settings", None)  # tower, photos and tokens of a store or stream
    values = asdict(settings) if is_dataclass(settings) and not isinstance(settings, type) else {}
    values |= {**activations.metadata, "width": activations.width, "rows": activations.rows}
    values["order"] = getattr(activations, "seed", None)
    if (content := getattr(activations, "content", None)) is not None:
        values["content"] = content
    if (read_block := getattr(activations, "read_block", 1)) != 1:  # a store read in blocks has another order
        values["local"] = read_block
    return values


def _run_steps(
    trainer: Trainer,
    checkpoints: CheckpointStore,
    loggers: list[MetricLogger],
    log_every: int,
    save_every: int,
    callback: StepCallback | None,
) -> None:
    """Take all remaining steps, with reports and checkpoints."""
    config = trainer.config
    report_time, report_step = time.perf_counter(), trainer.step
    for rows in _read_batches(trainer):
        try:
            trainer.train_step(rows)
        except TorinoError as error:
            raise TorinoError(_divergence_message(error, trainer, checkpoints)) from error
        report = None
        if trainer.step % log_every == 0 or trainer.step == config.steps:
            report = trainer.pop_metrics()
            report["steps_per_second"] = (trainer.step - report_step) / (time.perf_counter() - report_time)
            report_time, report_step = time.perf_counter(), trainer.step
            for logger in loggers:
                logger.write(trainer.step, report)
        if trainer.distributed.is_main and trainer.step % save_every == 0 and trainer.step < config.steps:
            checkpoints.save(trainer.step, *trainer.get_state())
        if callback is not None:
            callback(trainer.step, report)


def _divergence_message(error: Exception, trainer: Trainer, checkpoints: CheckpointStore) -> str:
    saved = checkpoints.list_checkpoints()
    last = f"the last checkpoint is {saved[-1]}" if saved else "no checkpoint was written yet"
    return (
        f"{error} Training stopped; {last}. Start a new run in another folder with a learning rate lower than "
        f"{trainer.config.lr:.3g}, and check the activations for NaN or very large values."
    )


def _read_batches(trainer: Trainer) -> Iterator[Tensor]:
    """Yield batches from the trainer's step on; on a GPU the next one is read while the current one is processed."""
    size, part, read = trainer.config.batch, trainer.distributed.part, trainer.activations.batch
    if trainer.device.type == "cpu":
        while trainer.step < trainer.config.steps:
            yield read(trainer.step, size, part)
        return
    with ThreadPoolExecutor(1) as pool:
        upcoming: Future[Tensor] = pool.submit(read, trainer.step, size, part)
        while trainer.step < trainer.config.steps:
            rows = upcoming.result()
            if trainer.step + 1 < trainer.config.steps:
                upcoming = pool.submit(read, trainer.step + 1, size, part)
            yield rows


def final_metrics(trainer: Trainer) -> SAEMetrics:
    """Compute the metrics of the SAE at inference, on the batches that would come next."""
    config = trainer.config
    batches = (trainer.activations.batch(config.steps + index, config.batch) for index in range(METRIC_BATCHES))
    return compute_metrics(trainer.to_sae(), batches)


def build_card(trainer: Trainer, metrics: SAEMetrics, name: str) -> SAECard:
    """Build the card of a trained SAE: its activations, training settings and metrics."""
    config = trainer.config
    metadata = {key: value for key, value in trainer.activations.metadata.items() if value is not None}
    kinds = {"matryoshka": "Matryoshka BatchTopK", "batchtopk": "BatchTopK", "topk": "TopK", "relu": "ReLU + L1"}
    sparsity = f"L1 weight {config.l1:g}" if config.kind == "relu" else f"k = {config.k}"
    notes = (
        f"Trained by torino {__version__} with torch {torch.__version__}: {kinds[config.kind]}, {sparsity}, "
        f"{config.steps:,} steps of {config.batch:,} rows, learning rate {config.lr:.3g}, seed {config.seed}, "
        f"precision {config.precision}. {metrics.summary()}."
    )
    return SAECard.of({**metadata, "name": name or f"{config.kind}-x{config.expansion:g}", "notes": notes})
