"""Steps a second, peak memory and loss of SAE training, beside dictionary_learning and sae-lens.

All three train a Matryoshka BatchTopK SAE on the same rows, batches, width, groups, k, learning rate and schedule, in
turn, step by step, so that a slow moment of the machine falls on all alike. Rivals run as they are: their own trainer
classes with their own defaults for everything else. The loss is each one's own reconstruction, by its own batch top-k,
of rows that none of them saw. Memory is that of one trainer alone, in a process of its own.

    python benchmarks/train.py                                   # prints the tables; some 15 minutes
    python benchmarks/train.py --rows tokens/*.npy               # on real tokens, (…, D) arrays in numpy files
    python benchmarks/train.py --write research/reports/performance.md       # and writes them into the page
    python benchmarks/train.py --quick                           # small sizes, a few seconds

Rivals are installed as benchmarks/requirements-train.txt says; one that is not there is left out.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import statistics
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import numpy as np
import torch
from report import _status, machine, parser, ratio, table, write_section
from torch import Tensor

from torino.training.activations.base import InMemory
from torino.training.config import TrainConfig
from torino.training.trainer import Trainer

FRACTIONS = (0.0625, 0.125, 0.25, 0.5625)
K, BATCH = 20, 2048
SIZES = {(384, 6144): 150, (1024, 16384): 50}  # width, latents: steps
QUICK = {(32, 256): 20}
WANTED = 1.5
DEAD = 10_000_000  # rows without firing: nobody's latents are dead in so short a run


Series = dict[str, list[float]]
Candidate = tuple[Callable[[int, Tensor], object], Callable[[Tensor], Tensor]]
"""A trainer: its step on numbered batches, and what it rebuilds of rows, by its own batch top-k."""


def ours(width: int, latents: int, steps: int, first: Tensor) -> Candidate:
    made = TrainConfig(latents=latents, k=K, steps=steps, batch=len(first), dead_after=DEAD, scale=False)
    trainer = Trainer(InMemory(first), made)
    w = trainer.weights

    def rebuilt(u: Tensor) -> Tensor:
        z = ((u - w.b_dec) @ w.W_enc.T + w.b_enc).relu()
        return (z * (z >= z.flatten().topk(K * len(u)).values.min())) @ w.W_dec + w.b_dec

    return lambda number, u: trainer.train_step(u), rebuilt


@cache
def trainers_of_dictionary_learning() -> types.ModuleType:
    """The module of its trainer, without the package around it, which imports nnsight."""
    found = importlib.util.find_spec("dictionary_learning")
    assert found is not None
    assert found.origin is not None
    for name, place in (("dictionary_learning", ""), ("dictionary_learning.trainers", "trainers")):
        package = types.ModuleType(name)
        package.__path__ = [str(Path(found.origin).parent / place)]
        sys.modules[name] = package
    return importlib.import_module("dictionary_learning.trainers.matryoshka_batch_top_k")


def dictionary_learning(width: int, latents: int, steps: int, first: Tensor) -> Candidate:
    config = TrainConfig(latents=latents, k=K, steps=steps).resolve(width)
    trainer = trainers_of_dictionary_learning().MatryoshkaBatchTopKTrainer(
        steps=steps,
        activation_dim=width,
        dict_size=latents,
        k=K,
        layer=0,
        lm_name="",
        group_fractions=list(FRACTIONS),
        lr=config.lr,
        warmup_steps=config.warmup,
        decay_start=config.decay_from,
        seed=0,
        device="cpu",
    )
    return trainer.update, lambda u: trainer.ae.decode(trainer.ae.encode(u, use_threshold=False))


def sae_lens(width: int, latents: int, steps: int, first: Tensor) -> Candidate:
    """Its trainer, on activations scaled as it recommends."""
    from sae_lens.config import LoggingConfig, SAETrainerConfig
    from sae_lens.saes import matryoshka_batchtopk_sae as module
    from sae_lens.training.sae_trainer import SAETrainer

    config = TrainConfig(latents=latents, k=K, steps=steps).resolve(width)
    widths = np.cumsum(config.group_sizes()).tolist()
    made = module.MatryoshkaBatchTopKTrainingSAEConfig(
        d_in=width, d_sae=latents, k=K, matryoshka_widths=widths, device="cpu"
    )
    trainer_config = SAETrainerConfig(
        n_checkpoints=0,
        checkpoint_path=None,
        save_final_checkpoint=False,
        total_training_samples=len(first) * steps,
        device="cpu",
        autocast=False,
        lr=config.lr,
        lr_end=0.0,
        lr_scheduler_name="constant",
        lr_warm_up_steps=config.warmup,
        adam_beta1=0.9,
        adam_beta2=0.999,
        lr_decay_steps=steps - config.decay_from,
        n_restart_cycles=1,
        train_batch_size_samples=len(first),
        dead_feature_window=1000,
        feature_sampling_window=2000,
        logger=LoggingConfig(log_to_wandb=False),
    )
    torch.manual_seed(0)
    sae = module.MatryoshkaBatchTopKTrainingSAE(made)
    trainer = SAETrainer(trainer_config, sae, iter([]))
    scale = float(width**0.5 / first.norm(dim=1).mean())

    def step(number: int, u: Tensor) -> None:
        trainer.step(u * scale)
        trainer.n_training_steps += 1

    return step, lambda u: sae.decode(sae.encode(u * scale)) / scale


CANDIDATES = {"torino": ours, "dictionary_learning": dictionary_learning, "sae-lens": sae_lens}
MODULES = {"dictionary_learning": "dictionary_learning", "sae-lens": "sae_lens"}


def rows_of(width: int, files: list[Path], seed: int, wanted: int) -> Tensor:
    """Rows of mean square norm 1: real ones, lifted to the width by an orthonormal map, or with planted concepts."""
    random = torch.Generator().manual_seed(seed)
    if files:
        arrays = [np.load(path, mmap_mode="r", allow_pickle=False) for path in files]
        x = torch.cat([torch.from_numpy(np.array(array)).flatten(0, -2) for array in arrays])
        x = x[torch.randperm(len(x), generator=random)[:wanted]].float()
        if x.shape[1] != width:
            lift = torch.linalg.qr(torch.randn(width, x.shape[1], generator=random)).Q
            noise = 0.02 * x.square().mean().sqrt() * torch.randn(len(x), width, generator=random)
            x = x @ lift.T + noise
    else:
        concepts = torch.nn.functional.normalize(torch.randn(4 * width, width, generator=random), dim=1)
        often = 1 / torch.arange(2, len(concepts) + 2).float()
        x = torch.empty(wanted, width)
        for part in x.split(4096):
            chosen = torch.multinomial(often.expand(len(part), -1), K, generator=random)
            weights = torch.rand(len(part), K, 1, generator=random) + 0.5
            part.copy_((weights * concepts[chosen]).sum(1))
        x += 0.05 * torch.randn(x.shape, generator=random)
    return x / x.square().sum(1).mean().sqrt()


@cache
def there(name: str) -> bool:
    return name not in MODULES or importlib.util.find_spec(MODULES[name]) is not None


def peak_of(name: str, width: int, latents: int, batch: int) -> float:
    """MiB that a trainer takes at its highest, in a process of its own."""
    command = [sys.executable, __file__, "--memory", name, "--sizes", f"{width},{latents},{batch}"]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return float(json.loads(told.splitlines()[-1]))


def memory(name: str, width: int, latents: int, batch: int) -> None:
    """Build a trainer, take three steps, and print the peak; what importing takes is left out."""
    u = rows_of(width, [], 0, batch)
    small = rows_of(16, [], 0, 64)
    CANDIDATES[name](16, 64, 40, small)[0](0, small)  # whatever is imported late
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    step, _ = CANDIDATES[name](width, latents, 100, u)
    for number in range(3):
        step(number, u)
    print(json.dumps((_status("VmHWM") - before) / 1024))


def measure(
    width: int, latents: int, steps: int, batch: int, files: list[Path], seed: int, rounds: int
) -> tuple[Series, Series]:
    """Train all in turn; per trainer: seconds of the timed steps, and FVU on new rows at some steps."""
    x = rows_of(width, files, seed, (steps + 1) * batch)
    batches = [x[step * batch : (step + 1) * batch] for step in range(-(-len(x) // batch))]
    new, batches = batches[-1], batches[:-1]
    trainers = {name: make(width, latents, steps, batches[0]) for name, make in CANDIDATES.items() if there(name)}
    seconds: Series = {name: [] for name in trainers}
    losses: Series = {name: [] for name in trainers}
    spread = (new - new.mean(0)).square().sum()
    for number in range(steps):
        u = batches[number % len(batches)]
        for name, (step, _) in trainers.items():
            begin = time.perf_counter()
            step(number, u)
            if 3 <= number < 3 + rounds:
                seconds[name].append(time.perf_counter() - begin)
        if number + 1 in (steps // 3, steps):
            with torch.no_grad():
                for name, (_, rebuilt) in trainers.items():
                    losses[name].append(float((new - rebuilt(new)).square().sum() / spread))
    return seconds, losses


def rows_for(seconds: Series, losses: Series, memory_of: dict[str, float]) -> Iterator[list[str]]:
    ours = seconds["torino"]
    for name, taken in seconds.items():
        slower = "" if name == "torino" else f"{ratio(taken, ours):.1f} ×"
        yield [
            name,
            f"{1 / statistics.median(taken):.2f}",
            slower,
            f"{memory_of[name]:,.0f}",
            *[f"{loss:.4f}" for loss in losses[name]],
        ]


def verdicts(size: str, seconds: Series, losses: Series) -> list[list[str]]:
    others = [name for name in seconds if name != "torino"]
    if not others:
        return []
    fastest = min(others, key=lambda name: statistics.median(seconds[name]))
    speed = ratio(seconds[fastest], seconds["torino"])
    mine, best = losses["torino"][-1], min(losses[name][-1] for name in others)
    return [
        [f"{size}: at least {WANTED} × the faster, {fastest}", f"{speed:.1f} ×", _met(speed >= WANTED)],
        [f"{size}: FVU equal or lower after equal steps", f"{mine:.4f} beside {best:.4f}", _met(mine <= best * 1.001)],
    ]


def _met(met: bool) -> str:
    return "met" if met else "**not met**"


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--quick", action="store_true", help="small sizes, to see that it runs")
    arguments.add_argument("--rows", type=Path, nargs="+", default=[], help=".npy files of tokens, (…, D)")
    arguments.add_argument("--width", type=int, help="only the size of this width")
    arguments.add_argument("--steps", type=int, help="steps of training, instead of what is usual for the size")
    arguments.add_argument("--memory", help="measure one trainer's memory, and nothing else")
    arguments.add_argument("--sizes", default="", help="for --memory: width,latents,batch")
    given = arguments.parse_args()
    if given.memory:
        memory(given.memory, *[int(part) for part in given.sizes.split(",")])
        return
    sizes, batch = (QUICK, 256) if given.quick else (SIZES, BATCH)
    sizes = {size: steps for size, steps in sizes.items() if given.width in (None, size[0])}
    missing = [name for name in CANDIDATES if not there(name)]
    for name in missing:
        print(f"{name} is not installed, and left out; see benchmarks/requirements-train.txt.", flush=True)
    met: list[list[str]] = []
    bodies: list[str] = []
    for (width, latents), usual in sizes.items():
        steps = given.steps or usual
        rounds = min(given.rounds, steps - 3)
        peaks = {name: peak_of(name, width, latents, batch) for name in CANDIDATES if there(name)}
        seconds, losses = measure(width, latents, steps, batch, given.rows, given.seed, rounds)
        size = f"d = {width:,}, C = {latents:,}"
        head = [
            "",
            "steps a second",
            "slower than torino",
            "peak MiB",
            *[f"FVU, step {n}" for n in (steps // 3, steps)],
        ]
        bodies += [
            f"**{size}, batches of {batch:,} rows, k = {K}**",
            table(head, list(rows_for(seconds, losses, peaks))),
        ]
        met += verdicts(size, seconds, losses)
        print(bodies[-2], bodies[-1], sep="\n\n", flush=True)
    data = "real patch tokens (lifted by an orthonormal map where wider)" if given.rows else "planted concepts"
    versions = [f"{name} {_version(module)}" for name, module in MODULES.items() if there(name)]
    intro = (
        f"Measured by `benchmarks/train.py` on {data}, seed {given.seed}, {given.rounds} steps in turn after three, "
        f"beside {' and '.join(versions) or 'nobody'}. {machine()}."
    )
    parts = [intro, *([table(["Wanted", "Got", ""], met)] if met else []), *bodies]
    print(*parts[:2], sep="\n\n", flush=True)
    if given.write:
        write_section(given.write, "train", "\n\n".join(parts))


def _version(module: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(module.replace("_", "-"))
    except PackageNotFoundError:
        return "of an unpacked source"


if __name__ == "__main__":
    main()
