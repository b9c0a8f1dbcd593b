"""What every registered method costs, side by side: the fair latency table.

In one run, in turn: each method from tokens to reduced tokens, alone and in a batch of eight; a bare gather, the floor
below which no method can go; and one N × N × D product of similarities, the unit the others are given in. Signals are
there already, as they are when the encoder has run. Then PruMerge, PruneSID and DivPrune against their published rules
carried out step by step, each step in tensors, as their releases do.

    python benchmarks/methods.py                                # prints the tables
    python benchmarks/methods.py --write research/reports/performance.md    # and writes them into the page
    python benchmarks/methods.py --quick                        # small sizes, a few seconds
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import partial
from itertools import product
from typing import Any, cast

import torch
from report import machine, parser, ratio, table, time_repeatedly, write_section
from torch import Tensor
from torch.nn.functional import normalize

from torino import SAE, Reducer, VisualTokens, make
from torino.core.errors import TorinoError
from torino.core.ragged import Ragged
from torino.reducers import get, list_reducers

UNIT, FLOOR = "one product of similarities", "bare gather, the floor"
VARIANTS: dict[str, list[dict[str, Any]]] = {"prunesid": [{}, {"decomposition": "randomized"}]}
Task = Callable[[], Any]


@dataclass
class Setting:
    """Images of one size with signals made when asked for, and SAEs of random weights."""

    images: list[VisualTokens]
    saes: list[SAE]
    seed: int

    @classmethod
    def of(cls, side: int, d: int, latents: list[int], batch: int, seed: int) -> Setting:
        """Tokens in clusters that share a direction, as patches of a photo do: a mean cosine of about a third."""
        random = torch.Generator().manual_seed(seed)
        images: list[VisualTokens] = []
        for _ in range(batch):
            centres = 0.7 * torch.randn(1, d, generator=random) + 0.8 * torch.randn(48, d, generator=random)
            patches = centres[torch.randint(48, (side * side,), generator=random)]
            patches = patches + 0.5 * torch.randn(side * side, d, generator=random)
            images.append(VisualTokens(patches, (side, side)))
        weights = [normalize(torch.randn(c, d, generator=random), dim=1) for c in latents]
        saes = [SAE(weight, kind="batchtopk", threshold=0.5) for weight in weights]
        return cls(images, saes, seed)

    def give(self, name: str) -> bool:
        """Give all images a signal, of any block; False for a name this file does not know."""
        for i, image in enumerate(self.images):
            if name in image.signals:
                continue
            value = made_signal(name, image, torch.Generator().manual_seed(self.seed + i))
            if value is None:
                return False
            self.images[i] = image.with_(signals={**image.signals, name: value})
        return True


def made_signal(name: str, image: VisualTokens, random: torch.Generator) -> Tensor | None:
    """A signal of the right shape: attention peaked as CLIP's is, everything else normal."""
    n, d, kind = len(image), image.width, name.split("@")[0]
    attentions = {"cls_attention": (16,), "cls_attention_joint": (), "received_attention": (), "attention": (16, n)}
    if kind in attentions:
        return (2 * torch.randn(*attentions[kind], n + 1, generator=random)).softmax(-1)[..., 1:]
    shapes = {"cls": (d,), "keys": (n, d), "queries": (n, d), "head_keys": (n, d // 16), "projected": (n, 4096)}
    shapes |= {"joint": (n, 768), "text": (12, 768)}
    return torch.randn(*shapes[kind], generator=random) if kind in shapes else None


def built(setting: Setting, budget: int) -> Iterator[tuple[str, Reducer]]:
    """Every registered method at this budget, once for each SAE where it reads one; says what it leaves out."""
    for name in list_reducers():
        saes = setting.saes if "sae" in {field.name for field in fields(cast(Any, get(name)))} else [None]
        for variant, sae in product(VARIANTS.get(name, [{}]), saes):
            label = ", ".join([name, *variant.values(), *([f"{sae.latents:,} latents"] if sae else [])])
            try:
                reducer = make(name, budget=budget, **variant, **({"sae": sae} if sae else {}))
                unknown = [need for need in sorted(reducer.needs) if not setting.give(need)]
                if unknown:
                    raise TorinoError(f"it reads {', '.join(unknown)}, which this benchmark cannot make.")
                got = len(reducer.plan(setting.images[0]))
                if got != budget:
                    raise TorinoError(f"it gave {got} tokens.")
                yield label, reducer
            except TorinoError as error:
                print(f"Left out at {budget} tokens: {label}, because {error}", flush=True)


def run(reducer: Reducer, images: list[VisualTokens]) -> Task:
    """From tokens to reduced tokens, for one image or a batch."""
    if len(images) == 1:
        return lambda: reducer.plan(images[0]).apply(images[0].patches, images[0].signals.get("cls"))
    packed = Ragged.of([image.patches for image in images])
    cls = [image.signals["cls"] for image in images] if "cls" in reducer.needs else None
    return lambda: reducer.plan_batch(images).apply(packed, cls)


def measure(setting: Setting, budget: int, rounds: int) -> list[list[str]]:
    """Time all methods at one budget; rows for the table, cheapest first below the unit and the floor."""
    reducers = dict(built(setting, budget))
    images, batch = setting.images, len(setting.images)
    x, packed = images[0].patches, Ragged.of([image.patches for image in images]).values
    some = torch.arange(budget) * len(x) // budget
    all_some = torch.cat([some + i * len(x) for i in range(batch)])
    tasks: dict[str, Task] = {f"1 {UNIT}": lambda: x @ x.T, f"1 {FLOOR}": lambda: x.index_select(0, some)}
    tasks |= {f"{batch} {UNIT}": lambda: [image.patches @ image.patches.T for image in images]}
    tasks |= {f"{batch} {FLOOR}": lambda: packed.index_select(0, all_some)}
    for label, reducer in reducers.items():
        tasks |= {f"1 {label}": run(reducer, images[:1]), f"{batch} {label}": run(reducer, images)}
    seconds = time_repeatedly(tasks, rounds)
    each = {name: [value / int(name.split()[0]) for value in values] for name, values in seconds.items()}
    unit = each[f"1 {UNIT}"]

    def row(label: str) -> list[str]:
        alone, many = each[f"1 {label}"], each[f"{batch} {label}"]
        times = [f"{statistics.median(values) * 1e3:.2f}" for values in (alone, many)]
        reads = ", ".join(sorted(reducers[label].needs)) if label in reducers else ""
        return [label, *times, f"{ratio(alone, unit):.2f}", f"{ratio(many, unit):.2f}", reads]

    return [row(UNIT), row(FLOOR), *sorted(map(row, reducers), key=lambda cells: float(cells[1]))]


# ---------------------------------------------------------------------- published rules, step by step


def prumerge_by_steps(image: VisualTokens, budget: int) -> Tensor:
    """One centre after the other: all other patches and keys put together, the 32 nearest, their weighted sum."""
    x, a, keys = image.patches, image.signals["cls_attention_joint@+1"], normalize(image.signals["keys@+1"], dim=1)
    ranked = a.argsort(descending=True)
    centres, others = ranked[: budget - 1], ranked[budget - 1 :]
    rows: list[Tensor] = []
    for place, i in enumerate(centres):
        rest = torch.cat([centres[:place], centres[place + 1 :], others])
        near = rest[(keys[rest] @ keys[i]).topk(32).indices]
        rows.append(x[i] + (a[near, None] * x[near]).sum(0))
    return torch.stack([*rows, (a[others, None] * x[others]).sum(0)])


def divprune_by_steps(image: VisualTokens, budget: int) -> Tensor:
    """At each step the least distance to all that is picked, searched anew."""
    unit = normalize(image.patches, dim=1)
    distance = 1 - unit @ unit.T
    picked = [int(distance.topk(2, dim=0, largest=False).values[1].argmax())]
    while len(picked) < budget:
        nearest = distance[picked].min(0).values
        nearest[picked] = -1
        picked.append(int(nearest.argmax()))
    return image.patches[picked]


def prunesid_by_steps(image: VisualTokens, budget: int, exact: bool) -> Tensor:
    """Groups by PCA, suppression with a similarity matrix per group, and shares group by group."""
    x, attention, n, k = image.patches, image.signals["cls_attention"].sum(0), len(image), budget // 4
    z = x.sigmoid()
    with torch.random.fork_rng():  # torch's PCA draws from the global state
        loading = torch.linalg.svd(z - z.mean(1, True)).U[:, :k] if exact else torch.pca_lowrank(z.T, q=k)[2]
    group = loading.abs().argmax(1)
    unit = normalize(x, dim=1)
    similar = unit @ unit.T
    tau = budget / 32 * float(similar[torch.ones_like(similar).triu(1) > 0].mean())
    live = group == torch.arange(k)[:, None]
    within = similar * (live[:, :, None] & live[:, None, :])
    rank, survivors, counter = attention.expand(k, n).clone(), torch.zeros(k), 1000.0
    sizes = live.sum(1)
    rank[~live] = -torch.inf
    while bool(live.any()):
        some = live.any(1).nonzero()[:, 0]
        best = attention.where(live[some], -torch.inf).argmax(1)
        rank[some, best] = counter
        live[some] &= ~(within[some, best] > tau)
        live[some, best] = False
        survivors[some] += 1
        counter -= 1
    most = torch.minimum(torch.minimum(sizes, survivors), torch.tensor(5 * -(-budget // 64)))
    while most.sum() < budget:
        most = torch.minimum(most + 1, sizes)
    least = sizes.clamp(max=1)
    edges = ((budget - 1 - least.sum()).clamp(min=0) * survivors.cumsum(0) / survivors.sum()).round()
    share = torch.minimum(least + edges.diff(prepend=torch.zeros(1)), most)
    for g in survivors.argsort(descending=True, stable=True):
        share[g] += min(int(budget - 1 - share.sum()), int(most[g] - share[g]))
    kept = [rank[g].topk(int(share[g])).indices for g in range(k)]
    return torch.cat([image.signals["cls"][None], x[torch.cat(kept)]])


BY_STEPS: dict[str, Callable[[VisualTokens, int], Tensor]] = {
    "prumerge(order='native')": prumerge_by_steps,
    "divprune(order='native')": divprune_by_steps,
    "prunesid(order='native')": partial(prunesid_by_steps, exact=True),
    "prunesid(order='native', decomposition='randomized')": partial(prunesid_by_steps, exact=False),
}


def measure_steps(setting: Setting, budgets: list[int], rounds: int) -> list[list[str]]:
    """Our code against the same rule step by step, and how many tokens both gave alike."""
    rows: list[list[str]] = []
    known = {spec: steps for spec, steps in BY_STEPS.items() if spec.split("(")[0] in list_reducers()}
    for (spec, steps), budget in product(known.items(), budgets):
        reducer = make(spec, budget=budget)
        if all(setting.give(need) for need in reducer.needs):
            image = setting.images[0]
            tasks = {"ours": run(reducer, [image]), "steps": partial(steps, image, budget)}
            apart = torch.cdist(tasks["ours"](), tasks["steps"](), compute_mode="donot_use_mm_for_euclid_dist")
            same = int((apart.amin(1) < 1e-2).sum())  # near-ties may fall either way
            seconds = time_repeatedly(tasks, rounds)
            times = [f"{statistics.median(seconds[name]) * 1e3:.1f}" for name in tasks]
            faster = f"{ratio(seconds['steps'], seconds['ours']):.1f} ×"
            rows.append([f"`{spec}`", str(budget), *times, faster, f"{same} of {budget}"])
    return rows


def verdicts(times: list[list[str]], steps: list[list[str]], budget: int) -> list[list[str]]:
    """What was wanted of the methods at the largest budget, and what came out; the slowest of each kind speaks."""
    ours = [cells for cells in times[2:] if not cells[0].startswith(("torino", "scts", "prunesid"))]
    slowest = max(ours, key=lambda cells: float(cells[3]))
    multiple = float(slowest[3])
    said = f"without SAE or decomposition, at {budget}: at most 4 × the product; the slowest is {slowest[0]}"
    rows = [[said, f"{multiple:.2f} ×", _met(multiple <= 4)]]
    for name in ("prumerge", "prunesid", "divprune"):
        some = [cells for cells in steps if cells[0].startswith(f"`{name}") and "randomized" not in cells[0]]
        for at, met in ((cells[1], float(cells[4].split()[0])) for cells in some):
            rows.append([f"{name} at {at}: at least 5 × its rule step by step", f"{met:.1f} ×", _met(met >= 5)])
    return rows


def _met(met: bool) -> str:
    return "met" if met else "**not met**"


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--quick", action="store_true", help="small sizes, to see that it runs")
    arguments.add_argument("--latents", type=int, nargs="+", default=[4096, 65536], help="sizes of the SAEs")
    given = arguments.parse_args()
    rounds, side, d, latents, batch, budgets = (
        (1, 12, 64, [512], 2, [48]) if given.quick else (given.rounds, 24, 1024, given.latents, 8, [192, 128, 64])
    )
    setting = Setting.of(side, d, latents, batch, given.seed)
    n = side * side
    parts = [f"Measured by `benchmarks/methods.py`, seed {given.seed}, median of {rounds} rounds in turn. {machine()}."]
    measured: list[list[list[str]]] = []
    for budget in budgets:
        head = ["", "ms, alone", f"ms an image, batch of {batch}", "× product, alone", "× product, batch", "reads"]
        parts += [f"**{n} tokens × {d} wide to {budget}; the product is {n} × {n} × {d}**"]
        measured += [measure(setting, budget, rounds)]
        parts += [table(head, measured[-1])]
        print(parts[-2], parts[-1], sep="\n\n", flush=True)
    parts += ["**Against the published rule, step by step in tensors, milliseconds**"]
    head = ["", "tokens", "ours", "by steps", "ours is faster by", "same tokens"]
    by_steps = measure_steps(setting, budgets, rounds)
    parts += [table(head, by_steps)]
    parts.insert(1, table(["Wanted", "Got", ""], verdicts(measured[0], by_steps, budgets[0])))
    print(parts[-2], parts[-1], parts[1], sep="\n\n", flush=True)
    if given.write:
        write_section(given.write, "methods", "\n\n".join(parts))


if __name__ == "__main__":
    main()
