"""Trainer: steps from activations to a plain SAE folder, which any process can go on with after a kill."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torino.core.errors import BadParameter, BadTokens, TorinoError
from torino.core.tokens import check_matrix
from torino.sae.model import SAE, Kind, SAECard
from torino.training.activations.base import Activations
from torino.training.checkpoint import CheckpointStore
from torino.training.config import TrainConfig
from torino.training.distributed import World
from torino.training.init import Scaling, first_weights, scaling_of
from torino.training.logging import Log, open_logs
from torino.training.metrics import LatentStats, Measures, measure
from torino.training.objectives import Objective, Outcome, Weights
from torino.version import __version__

FIRST_ROWS = 4096  # rows from which scale and bias are set, at least where a batch is smaller
MEASURED = 8  # batches on which the finished SAE is measured

Watch = Callable[[int, Mapping[str, Any] | None], None]
State = tuple[Mapping[str, Tensor], Mapping[str, Any]]


class Trainer:
    """The state of a run, and the step that takes it on.

    Parameters
    ----------
    activations : Activations
    recipe : TrainConfig
    device : torch.device
    world : World, optional
    state : optional
        What :meth:`state` gave, to go on from there.
    """

    def __init__(
        self,
        activations: Activations,
        recipe: TrainConfig,
        *,
        device: torch.device | str = "cpu",
        world: World | None = None,
        state: State | None = None,
    ) -> None:
        self.activations, self.world, self.device = activations, world or World(), torch.device(device)
        self.recipe = recipe = recipe.settled(activations.width)
        self.step, self.threshold = 0, -1.0
        tensors: dict[str, Tensor] = {}
        if state is None:
            rows = self._first_rows().to(self.device)
            self.scaling = scaling_of(rows, recipe)
            self.weights = first_weights(self.scaling(rows), recipe)
        else:
            # memory of their own, aligned as all others: the math library may round by the address
            tensors = {name: value.to(self.device, copy=True) for name, value in state[0].items()}
            self.scaling = Scaling(tensors["centre"], state[1]["scale"])
            self.weights = Weights(**{name: tensors[name] for name in ("W_enc", "W_dec", "b_enc", "b_dec")})
        self.world.same_(list(self.weights.named().values()))
        self.objective = Objective(recipe, self.weights, self.world)
        self.adam = torch.optim.Adam(list(self.weights.named().values()), betas=(0.9, 0.999), fused=True)
        latents = len(self.weights.W_enc)
        self.silent = torch.zeros(latents, dtype=torch.int64, device=self.device)
        self.tally = LatentStats(len(recipe.groups()), activations.width, latents, self.device)
        if state is not None:
            self._load(tensors, state[1])

    def _first_rows(self) -> Tensor:
        batches = max(1, min(64, -(-FIRST_ROWS // self.recipe.batch)))
        rows = torch.cat([self.activations.batch(step, self.recipe.batch) for step in range(batches)])
        check_matrix(rows, "activations")
        return rows.float()

    def take(self, rows: Tensor) -> Outcome:
        """Take one step on this process's rows of the batch."""
        recipe, step = self.recipe, self.step
        u = self.scaling(rows.to(self.device, non_blocking=True).float())
        outcome = self.objective(u, recipe.batch, recipe.k_at(step), recipe.l1_at(step), self.silent)
        if not math.isfinite(outcome.loss):
            raise TorinoError(f"The loss is {outcome.loss} at step {step}.")
        self._clip()
        for group in self.adam.param_groups:
            group["lr"] = recipe.lr_at(step)
        for name, weight in self.weights.named().items():
            weight.grad = self.objective.gradients.named()[name]
        self.adam.step()
        W_dec = self.weights.W_dec
        W_dec /= torch.linalg.vector_norm(W_dec, dim=1, keepdim=True).clamp_(min=1e-12)
        assert recipe.threshold_from is not None
        assert recipe.threshold_beta is not None
        if step >= recipe.threshold_from or self.threshold < 0:
            fresh = step == recipe.threshold_from or self.threshold < 0
            beta = 0.0 if fresh else recipe.threshold_beta
            self.threshold = beta * self.threshold + (1 - beta) * outcome.edge
        self.tally.add(outcome, recipe.batch)
        self.step += 1
        return outcome

    def _clip(self) -> None:
        """Shorten the gradient to the norm that the recipe allows."""
        gradients = list(self.objective.gradients.named().values())
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(value) for value in gradients]))
        if not math.isfinite(float(norm)):
            raise TorinoError(f"The gradient is {float(norm)} at step {self.step}.")
        excess = float(norm) / self.recipe.clip
        if excess > 1:
            for value in gradients:
                value /= excess

    def report(self) -> dict[str, Any]:
        """What was measured since the last report."""
        assert self.recipe.dead_after is not None
        measures = self.tally.read(self.silent >= self.recipe.dead_after)
        values = {"loss": self.tally.loss, **measures.facts(), "lr": self.recipe.lr_at(self.step - 1)}
        values |= {"k": self.recipe.k_at(self.step - 1), "threshold": self.threshold * self.scaling.scale}
        self.tally.reset()
        return values

    def sae(self, card: SAECard | None = None) -> SAE:
        """The plain SAE that the weights are now, for rows as the tower gives them."""
        weights, threshold = self.scaling.fold(self.weights, max(self.threshold, 0.0))
        kind: Kind = self.recipe.kind
        return SAE(
            weights.W_enc,
            weights.b_enc,
            weights.W_dec,
            weights.b_dec,
            kind=kind,
            k=None if kind == "relu" else self.recipe.k,
            threshold=threshold if kind in ("batchtopk", "matryoshka") else None,
            groups=self.recipe.groups(),
            card=card,
        )

    # ------------------------------------------------------------------ what a checkpoint holds

    def state(self) -> State:
        """All that the next steps depend on: tensors, and facts that fit into JSON."""
        tensors = dict(self.weights.named())
        for name, weight in self.weights.named().items():
            memory = self.adam.state.get(weight, {})
            for moment in ("exp_avg", "exp_avg_sq"):
                if moment in memory:
                    tensors[f"{name}.{moment}"] = memory[moment]
        tensors |= {"centre": self.scaling.centre, "silent": self.silent, **self.tally.tensors()}
        facts = {"scale": self.scaling.scale, "threshold": self.threshold, "hint": self.objective.hint}
        return tensors, {"step": self.step, **facts}

    def _load(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        self.step, self.threshold, self.objective.hint = facts["step"], facts["threshold"], facts["hint"]
        self.silent.copy_(tensors["silent"])
        self.tally.load(tensors)
        for name, weight in self.weights.named().items():
            if f"{name}.exp_avg" in tensors:
                self.adam.state[weight] = {
                    "step": torch.tensor(float(self.step), device=self.device),
                    "exp_avg": tensors[f"{name}.exp_avg"],
                    "exp_avg_sq": tensors[f"{name}.exp_avg_sq"],
                }


@dataclass(frozen=True)
class Trained:
    """A finished run: its folder, what was measured, and whether it had been finished before."""

    folder: Path
    measures: Mapping[str, Any]
    already: bool = False


def train(
    activations: Activations,
    recipe: TrainConfig,
    folder: str | Path,
    *,
    device: torch.device | str = "cpu",
    world: World | None = None,
    name: str = "",
    logs: Sequence[str] = (),
    log_every: int = 50,
    save_every: int = 500,
    watch: Watch | None = None,
) -> Trained:
    """Train an SAE into ``folder``, or go on with a run that was stopped there.

    Parameters
    ----------
    activations : Activations
        Where the rows come from.
    recipe : TrainConfig
    folder : str or Path
        Gets ``sae.safetensors`` and ``card.json`` at the end, and ``training/`` for what the run itself needs.
    name : str
        For the card.
    logs : sequence of str
        ``"tensorboard"``, ``"wandb"``, beside ``training/log.jsonl``.
    log_every, save_every : int
        Steps between reports, and between checkpoints.
    watch : callable, optional
        Called after every step with its number and the report, if there is one.

    Examples
    --------
    >>> import tempfile
    >>> from torino.training.activations.base import InMemory
    >>> rows = torch.randn(512, 16, generator=torch.Generator().manual_seed(0))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     done = train(InMemory(rows), TrainConfig(expansion=4, k=4, steps=40, batch=128), folder)
    ...     SAE.load(folder).latents
    64
    """
    world, records = world or World(), CheckpointStore(folder)
    if activations.rows == 0:
        raise BadTokens("The activations are empty: there is no row to learn from. Harvest some first.")
    recipe = recipe.settled(activations.width)
    if recipe.batch < world.size:
        raise BadParameter(f"batch must be at least 1 row for each of {world.size} processes, got {recipe.batch}.")
    settings = {**recipe.facts(), **{f"activations.{key}": value for key, value in _origin(activations).items()}}
    with records.claimed() if world.first else nullcontext():
        told = records.begun(settings)
        if told is not None and "result" in told:
            if world.first:
                records.tidy()
            return Trained(records.sae, told["result"], already=True)
        state = records.load() if told is not None else None
        world.wait()  # all have looked before the first one writes
        trainer = Trainer(activations, recipe, device=device, world=world, state=state)
        open_: list[Log] = []
        if world.first:
            if told is None:
                told = records.begin(settings, {"torino": __version__, "torch": torch.__version__})
            records.cut_log(trainer.step)
            identity = {"name": name or records.sae.name, "id": str(told.get("id")), "config": settings}
            open_ = open_logs(logs, records.log, trainer.step, identity)
        try:
            _loop(trainer, records, open_, log_every, save_every, watch)
        finally:
            for log in open_:
                log.close()
        measures = measure_after(trainer) if world.first else None
        if measures is not None:
            trainer.sae(card_of(trainer, measures, name)).save(records.sae)
            records.finish(measures.facts())
        world.wait()
    return Trained(records.sae, measures.facts() if measures else {})


def _origin(activations: Activations) -> dict[str, Any]:
    """Whatever tells these activations from others."""
    told: Any = getattr(activations, "settings", None)  # of a store or stream: its tower, photos and tokens
    settings = asdict(told) if is_dataclass(told) and not isinstance(told, type) else {}
    seen = {"width": activations.width, "rows": activations.rows, "order": getattr(activations, "seed", None)}
    if (local := getattr(activations, "local", 1)) != 1:  # of a store that is read in pieces, in another order
        seen["local"] = local
    return {**settings, **activations.facts, **seen}


def _loop(
    trainer: Trainer, records: CheckpointStore, logs: list[Log], log_every: int, save_every: int, watch: Watch | None
) -> None:
    recipe, first = trainer.recipe, trainer.world.first
    begin, since = time.perf_counter(), trainer.step
    for rows in _batches(trainer):
        try:
            trainer.take(rows)
        except TorinoError as error:
            raise TorinoError(_sentence(error, trainer, records)) from error
        report = None
        if trainer.step % log_every == 0 or trainer.step == recipe.steps:
            report = trainer.report()
            report["steps_per_second"] = (trainer.step - since) / (time.perf_counter() - begin)
            begin, since = time.perf_counter(), trainer.step
            for log in logs:
                log.write(trainer.step, report)
        if first and trainer.step % save_every == 0 and trainer.step < recipe.steps:
            records.save(trainer.step, *trainer.state())
        if watch is not None:
            watch(trainer.step, report)


def _sentence(error: Exception, trainer: Trainer, records: CheckpointStore) -> str:
    kept = records.steps()
    where = f"the last checkpoint is {kept[-1]}" if kept else "there was no checkpoint yet"
    return (
        f"{error} Training stopped; {where}. Begin anew in another folder with a lower learning rate than "
        f"{trainer.recipe.lr:.3g}, and look for NaN or huge values among the activations."
    )


def _batches(trainer: Trainer) -> Iterator[Tensor]:
    """Batches from the trainer's step on; beside a GPU the next one is fetched while this one is worked on."""
    size, part, get = trainer.recipe.batch, trainer.world.part, trainer.activations.batch
    if trainer.device.type == "cpu":
        while trainer.step < trainer.recipe.steps:
            yield get(trainer.step, size, part)
        return
    with ThreadPoolExecutor(1) as pool:
        coming: Future[Tensor] = pool.submit(get, trainer.step, size, part)
        while trainer.step < trainer.recipe.steps:
            rows = coming.result()
            if trainer.step + 1 < trainer.recipe.steps:
                coming = pool.submit(get, trainer.step + 1, size, part)
            yield rows


def measure_after(trainer: Trainer) -> Measures:
    """Measure the SAE as it will be used, on the batches that would come next."""
    recipe = trainer.recipe
    batches = (trainer.activations.batch(recipe.steps + turn, recipe.batch) for turn in range(MEASURED))
    return measure(trainer.sae(), batches)


def card_of(trainer: Trainer, measures: Measures, name: str) -> SAECard:
    """The card of a trained SAE: facts of the activations, and how it was trained."""
    recipe = trainer.recipe
    facts = {key: value for key, value in trainer.activations.facts.items() if value is not None}
    kind = {"matryoshka": "Matryoshka BatchTopK", "batchtopk": "BatchTopK", "topk": "TopK", "relu": "ReLU + L1"}
    sparsity = f"L1 weight {recipe.l1:g}" if recipe.kind == "relu" else f"k = {recipe.k}"
    notes = (
        f"Trained by torino {__version__} with torch {torch.__version__}: {kind[recipe.kind]}, {sparsity}, "
        f"{recipe.steps:,} steps of {recipe.batch:,} rows, learning rate {recipe.lr:.3g}, seed {recipe.seed}, "
        f"precision {recipe.precision}. {measures.sentence()}."
    )
    return SAECard.of({**facts, "name": name or f"{recipe.kind}-x{recipe.expansion:g}", "notes": notes})
