"""How much TORINO itself costs, beside the one matrix product that it cannot do without.

In one run, in turn: (a) the method as the paper describes it, dense latents, top-k, a comparison of all pairs and
union-find; (b) a lone float32 matrix product of that size, the floor; (c) torino, whole and by stage. Then torino with
the int8 prefilter beside the same floor.

    python benchmarks/core.py                                # prints the tables
    python benchmarks/core.py --write research/reports/performance.md    # and writes them into the page
    python benchmarks/core.py --only prefilter --write research/reports/fast.md
    python benchmarks/core.py --only prefilter --tokens rows/*.npy --sae ./my-sae   # other tokens, (photos, N, D) each
    python benchmarks/core.py --quick                        # small sizes, a few seconds
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from batches import DELTA, Batch, K, isotropic, lifted, own_size, prefilter_backend, real_photos
from report import machine, parser, peak_extra_memory, ratio, table, time_repeatedly, time_side_by_side, write_section
from torch import Tensor

from torino import SAE, VisualTokens, make
from torino.core.concepts import Concepts
from torino.core.grouping import group_by_overlap
from torino.core.topk.prefilter import zero_point_for
from torino.datasets.bundled import example_sae
from torino.evaluation.latency.probes import count_survivors


@dataclass
class Setting:
    """One size: tokens and an SAE of random weights."""

    tokens: VisualTokens
    sae: SAE

    @classmethod
    def of(cls, n: int, d: int, c: int, seed: int) -> Setting:
        """Tokens in clusters, as patches of a photo are, and unit-norm encoder rows."""
        random = torch.Generator().manual_seed(seed)
        centres = torch.randn(max(2, n // 12), d, generator=random)
        patches = centres[torch.randint(len(centres), (n,), generator=random)]
        patches = patches + 0.5 * torch.randn(n, d, generator=random)
        weight = torch.nn.functional.normalize(torch.randn(c, d, generator=random), dim=1)
        bias = 0.01 * torch.randn(c, generator=random)
        sae = SAE(weight, bias, kind="matryoshka", threshold=0.5, groups=(c // 4, c - c // 4), k=20)
        sae.prefilter = "off"
        rows = next(r for r in range(int(n**0.5), 0, -1) if n % r == 0)
        return cls(VisualTokens(patches, (rows, n // rows)), sae)


def dense_top(sae: SAE, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Stage 1 as the paper writes it: all latents of all tokens, then the top k."""
    values, indices = sae.encode(x).topk(k, dim=1)
    return indices, values


def pairwise_groups(sets: list[frozenset[int]], delta: int) -> list[int]:
    """Stage 2 as the paper writes it for δ > 1: compare all pairs, union-find."""
    parent = list(range(len(sets)))

    def find(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    for i, mine in enumerate(sets):
        for j in range(i):
            if len(mine & sets[j]) >= delta:
                parent[find(i)] = find(j)
    return [find(i) for i in range(len(sets))]


def pairwise_groups_vectorised(indices: Tensor, delta: int) -> Tensor:
    """The same comparison of all pairs as one tensor operation, components by scipy: a stronger rival to (a)."""
    from scipy.sparse.csgraph import connected_components

    shared = (indices[:, None, :, None] == indices[None, :, None, :]).sum((2, 3))
    return torch.from_numpy(connected_components((shared >= delta).numpy(), directed=False)[1])


def paper_pipeline(setting: Setting) -> Tensor:
    """(a), whole: dense latents, top-k, pairs, and the merged tokens group by group."""
    x = setting.tokens.patches
    indices, _ = dense_top(setting.sae, x, K)
    label = pairwise_groups([frozenset(row) for row in indices.tolist()], DELTA)
    members: dict[int, list[int]] = {}
    for patch, group in enumerate(label):
        members.setdefault(group, []).append(patch)
    merged = [(1 + torch.tensor(len(g)).log()) / len(g) * x[g].sum(0) for g in members.values()]
    return torch.stack(merged)


def whole(setting: Setting) -> Callable[[], Tensor]:
    reducer = make(f"torino-m(k={K}, delta={DELTA})", sae=setting.sae)
    return lambda: reducer.plan(setting.tokens).apply(setting.tokens.patches)


def measure_size(n: int, d: int, c: int, rounds: int, seed: int, with_paper: bool) -> list[list[str]]:
    """Time one size; rows for the table."""
    setting = Setting.of(n, d, c, seed)
    x, sae = setting.tokens.patches, setting.sae
    out = torch.empty(n, c)
    reducer = make(f"torino-m(k={K}, delta={DELTA})", sae=sae)
    concepts = sae.top(x, K)
    groups = group_by_overlap(concepts, DELTA)
    plan = reducer.plan(setting.tokens)

    tasks: dict[str, Callable[[], object]] = {
        "(b) lone matrix product, into a buffer that is there": lambda: torch.mm(x, sae.W_enc.T, out=out),
        "(b') lone matrix product, as one writes it: `x @ W.T`": lambda: x @ sae.W_enc.T,
        "(c) torino-m, tokens to reduced tokens": whole(setting),
        "— concepts (`sae.top`)": lambda: sae.top(x, K),
        "— grouping": lambda: group_by_overlap(concepts, DELTA),
        "— reduction (plan and apply)": lambda: (
            reducer.reduce_groups(concepts, groups, [setting.tokens.layout]),  # type: ignore[attr-defined]
            plan.apply(x),
        ),
    }
    if with_paper:
        tasks["(a) as the paper writes it"] = lambda: paper_pipeline(setting)
    seconds = time_side_by_side(tasks, rounds)
    floor = seconds["(b) lone matrix product, into a buffer that is there"]
    return [
        [name, f"{statistics.median(times) * 1e3:.1f}", f"{min(times) * 1e3:.1f}", f"{ratio(times, floor):.3f}"]
        for name, times in seconds.items()
    ]


def measure_grouping(n: int, c: int, rounds: int, seed: int) -> list[list[str]]:
    """Grouping alone, for the settings of (k, δ), against both ways of comparing pairs."""
    rows: list[list[str]] = []
    sae_setting = Setting.of(n, 64, c, seed)
    for k, delta in ((1, 1), (2, 2), (3, 3), (2, 1), (3, 2), (6, 3)):
        concepts: Concepts = sae_setting.sae.top(sae_setting.tokens.patches, k)
        sets = [frozenset(row) for row in concepts.indices.tolist()]
        seconds = time_repeatedly(
            {
                "ours": lambda: group_by_overlap(concepts, delta),
                "pairs": lambda: pairwise_groups(sets, delta),
                "vectorised": lambda: pairwise_groups_vectorised(concepts.indices, delta),
            },
            rounds,
        )
        ours, pairs, vectorised = (statistics.median(seconds[name]) * 1e3 for name in ("ours", "pairs", "vectorised"))
        rows.append(
            [
                f"({k}, {delta})",
                str(len(group_by_overlap(concepts, delta))),
                f"{ours:.2f}",
                f"{pairs:.1f}",
                f"{ratio(seconds['pairs'], seconds['ours']):.0f} ×",
                f"{vectorised:.1f}",
                f"{ratio(seconds['vectorised'], seconds['ours']):.1f} ×",
            ]
        )
    return rows


def measure_length(d: int, c: int, lengths: list[int], rounds: int, seed: int) -> list[list[str]]:
    """How the cost grows with the number of tokens."""
    rows: list[list[str]] = []
    for n in lengths:
        setting = Setting.of(n, d, c, seed)
        x = setting.tokens.patches
        task = whole(setting)
        seconds = time_side_by_side({"ours": task, "floor": lambda: x @ setting.sae.W_enc.T}, rounds)
        ours = statistics.median(seconds["ours"])
        rows.append(
            [f"{n:,}", f"{ours * 1e3:.0f}", f"{ours / n * 1e6:.0f}", f"{ratio(seconds['ours'], seconds['floor']):.3f}"]
        )
    return rows


# ---------------------------------------------------------------------- the int8 prefilter


def measure_screen(batches: list[Batch], rounds: int) -> tuple[list[list[str]], list[list[str]]]:
    """Both searches beside the lone product; and how many latents the prefilter leaves."""
    times: list[list[str]] = []
    left: list[list[str]] = []
    for batch in batches:
        x, sae = batch.packed, batch.sae
        plain, fast = sae.top(x, K, prefilter="off"), sae.top(x, K, prefilter="int8")
        same = torch.equal(plain.indices, fast.indices) and torch.equal(plain.values, fast.values)
        out = torch.empty(len(x), sae.latents)
        seconds = time_side_by_side(
            {
                "product": lambda: torch.mm(x, sae.W_enc.T, out=out),
                "off": batch.whole("off"),
                "int8": batch.whole("int8"),
                "top": lambda: sae.top(x, K, prefilter="int8"),
                "lone": batch.lone_int8(),
                "rest": batch.rest(),
            },
            rounds,
        )
        median = {name: f"{statistics.median(values) * 1e3:.1f}" for name, values in seconds.items()}
        shares = [f"{ratio(seconds[name], seconds['product']):.3f}" for name in ("off", "int8", "top", "lone", "rest")]
        times.append(
            [batch.name, median["product"], median["off"], median["int8"], *shares, "yes" if same else "**no**"]
        )
        told = count_survivors(sae, batch.images, K)
        assert told is not None
        spread = [f"{told['mean']:.1f}", *(f"{told[name]:.0f}" for name in ("median", "percentile_99", "most"))]
        left.append([batch.name, *spread, f"{told['left_to_plain']} of {len(x):,}"])
    return times, left


def prefilter_verdicts(times: list[list[str]], memory: list[list[str]], wanted: list[str]) -> list[list[str]]:
    """What was wanted of the prefilter, and whether it was met."""
    rows = [(f"{row[0]}: whole, at most 0.5 of (b)", row[5], float(row[5]) <= 0.5) for row in times if row[0] in wanted]
    rows += [("the same concepts as the plain search", "in all rows", all(row[-1] == "yes" for row in times))]
    extra = float(memory[-1][1])
    rows += [("extra memory beyond the int8 weights, under 32 MiB", f"{extra:.1f} MiB", extra < 32)]
    return [[name, got, "met" if met else "**not met**"] for name, got, met in rows]


def memory_of(what: str, n: int, d: int, c: int, seed: int) -> float:
    """Peak resident memory of a first call, MiB beyond tokens and weights; for a process of its own."""
    small = Setting.of(64, 64, 512, seed)  # loads scipy and the math library, whose code is not what is measured
    whole(small)()
    dense_top(small.sae, small.tokens.patches, K)
    if what == "prefilter":
        small.sae.top(small.tokens.patches, K, prefilter="int8")
    setting = Setting.of(n, d, c, seed)
    x, sae = setting.tokens.patches, setting.sae
    out = torch.zeros(n, c) if what == "product" else torch.empty(0)
    tasks: dict[str, Callable[[], object]] = {
        "product": lambda: torch.mm(x, sae.W_enc.T, out=out),
        "dense": lambda: dense_top(sae, x, K),
        "ours": whole(setting),
        "prefilter": whole(setting),
    }
    if what == "prefilter":  # the int8 weights are made before, in the SAE as they are in a folder
        sae.prefilter = "int8"
        sae.top(x[:1], K)
    return peak_extra_memory(tasks[what])


def measure_memory(n: int, d: int, c: int, seed: int, only: tuple[str, ...]) -> list[list[str]]:
    """Each in a fresh process: memory that was used before and kept by the allocator would hide a peak."""
    names = {
        "product": "lone matrix product, into a buffer that is there (the library's own workspace)",
        "dense": "dense encode and top-k",
        "ours": "torino-m, tokens to reduced tokens",
        "prefilter": "torino-m with the int8 prefilter, beyond the int8 weights too",
    }
    names = {what: name for what, name in names.items() if what in only}
    rows = [["the N × C latents alone", f"{n * c * 4 / 2**20:.0f}"]]
    for what, name in names.items():
        command = [sys.executable, __file__, "--memory-of", what, *map(str, (n, d, c, seed))]
        rows.append([name, f"{float(subprocess.run(command, capture_output=True, text=True, check=True).stdout):.1f}"])
    return rows


def verdicts(
    size: list[list[str]], memory: list[list[str]], grouping: list[list[str]], growth: list[list[str]]
) -> list[list[str]]:
    """What was wanted of the largest size, and whether it was met."""
    share = {name.lstrip("— ").split(" ")[0]: float(value) for name, _, _, value in size}
    extra = float(memory[-1][1])
    faster = {row[0]: float(row[4].split()[0]) for row in grouping if not row[0].endswith("1)")}
    each = [float(row[2]) for row in growth]
    rows = [
        ("whole, at most 1.10 of (b)", f"{share['(c)']:.3f}", share["(c)"] <= 1.10),
        (
            "grouping and reduction, under 3 % of (b)",
            f"{share['grouping'] + share['reduction']:.1%}",
            share["grouping"] + share["reduction"] < 0.03,
        ),
        ("extra memory, under 32 MiB", f"{extra:.1f} MiB", extra < 32),
    ]
    rows += [
        (f"grouping at (k, δ) = {name}, at least 50 × (a)", f"{value:.0f} ×", value >= 50)
        for name, value in faster.items()
    ]
    rows += [("cost linear in N", f"{min(each):.0f} to {max(each):.0f} µs a token", max(each) < 1.5 * min(each))]
    return [[wanted, got, "met" if met else "**not met**"] for wanted, got, met in rows]


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--quick", action="store_true", help="small sizes, to see that it runs")
    arguments.add_argument("--only", choices=["core", "prefilter"], help="one of the two parts; both without it")
    arguments.add_argument("--tokens", nargs="*", type=Path, default=[], help="real tokens, (photos, N, D) numpy files")
    arguments.add_argument("--sae", type=Path, help="an SAE for them (default: the bundled one)")
    arguments.add_argument("--memory-of", nargs=5, help=argparse.SUPPRESS)
    given = arguments.parse_args()
    if given.memory_of:
        what, *sizes = given.memory_of
        print(memory_of(what, *map(int, sizes)))
        return
    for name in ("core", "prefilter"):
        if given.only in (None, name):
            text = (core if name == "core" else prefilter)(given)
            # the figures of the prefilter have a page of their own, so one page may hold one of the two sections
            if given.write and (given.only or f"<!-- {name}: begin -->" in given.write.read_text(encoding="utf-8")):
                write_section(given.write, name, text)


def core(given: argparse.Namespace) -> str:
    """The plain search: all tables and what was wanted of them."""
    rounds, seed = (2, given.seed) if given.quick else (given.rounds, given.seed)
    n, d, sizes, lengths = (
        (64, 128, [2048], [64, 128]) if given.quick else (576, 1024, [65536, 4096], [576, 1152, 2304, 4608, 9216])
    )
    parts = [f"Measured by `benchmarks/core.py`, seed {seed}, median of {rounds} rounds in turn. {machine()}."]

    def add(title: str, made: str) -> None:
        parts.extend([f"**{title}**", made])
        print(f"**{title}**", made, sep="\n\n", flush=True)

    by_size = {c: measure_size(n, d, c, rounds, seed, with_paper=True) for c in sizes}
    for c, rows in by_size.items():
        title = f"{n} tokens × {d} wide × {c:,} latents, (k, δ) = ({K}, {DELTA})"
        add(title, table(["", "median ms", "best ms", "ratio to (b)"], rows))
    memory = measure_memory(n, d, sizes[0], seed, ("product", "dense", "ours"))
    add(f"Extra memory at {n} × {d} × {sizes[0]:,}, MiB beyond tokens and weights", table(["", "MiB"], memory))
    headings = [
        "(k, δ)",
        "groups",
        "ours",
        "all pairs, Python",
        "ours is faster by",
        "all pairs, tensor",
        "ours is faster by",
    ]
    grouping = measure_grouping(n, sizes[-1], rounds, seed)
    add(
        f"Grouping alone, {n} tokens, milliseconds (mean of repeated calls, as `timeit` does)",
        table(headings, grouping),
    )
    growth = measure_length(d, sizes[-1], lengths, rounds, seed)
    title = f"Growth with the number of tokens, {sizes[-1]:,} latents; the floor here is `x @ W.T`"
    add(title, table(["tokens", "ms", "µs a token", "ratio to the floor"], growth))
    parts.insert(1, table(["Wanted", "Got", ""], verdicts(by_size[sizes[0]], memory, grouping, growth)))
    print(parts[1])
    return "\n\n".join(parts)


def prefilter(given: argparse.Namespace) -> str:
    """The int8 prefilter beside the plain search and the lone product."""
    rounds, seed = (2, given.seed) if given.quick else (given.rounds, given.seed)
    n, d, c, many = (576, 512, 2048, 2) if given.quick else (576, 1024, 65536, 8)
    backend = prefilter_backend()
    photos = real_photos(given.tokens)
    sae = example_sae() if given.sae is None else SAE.load(given.sae, decoder=False)
    real, own, noise = lifted(photos, d, c, seed), own_size(photos, sae), isotropic(n, d, c, seed)
    batches = [batch.first(count) for batch in (real, own, noise) for count in (1, many)]
    source = f"{len(photos)} photos of the files given" if given.tokens else "the four bundled photos"
    parts = [
        f"Measured by `benchmarks/core.py --only prefilter`, seed {seed}, median of {rounds} rounds in turn, k = {K}; "
        f"real tokens: {source}. {machine()}; {backend} {version(backend)}, "
        f"{zero_point_for(backend).bit_length()}-bit weights."
    ]

    def add(title: str, made: str) -> None:
        parts.extend([f"**{title}**", made])
        print(f"**{title}**", made, sep="\n\n", flush=True)

    times, left = measure_screen(batches, rounds)
    headings = ["", "(b) ms", "plain ms", "int8 ms", "plain", "int8", "`top` alone", "int8 product alone"]
    headings += ["grouping and reduction alone", "same"]
    add("Tokens to reduced tokens, in ms and as shares of (b), the lone float32 product", table(headings, times))
    headings = ["", "mean", "median", "99 %", "most", "left to the plain search"]
    add("Latents a token that the prefilter could not exclude", table(headings, left))
    memory = measure_memory(n, d, c, seed, ("ours", "prefilter"))
    add(f"Extra memory at {n} × {d} × {c:,}, MiB beyond tokens and weights", table(["", "MiB"], memory))
    wanted = [batch.name for batch in batches[:4]]
    parts.insert(1, table(["Wanted", "Got", ""], prefilter_verdicts(times, memory, wanted)))
    print(parts[1])
    return "\n\n".join(parts)


if __name__ == "__main__":
    main()
