"""Tables of the serving guides, from the results of the benchmarks of serving."""

from __future__ import annotations

from typing import Any

from markdown_tables import table


def load_test(stored: dict[str, Any]) -> str:
    """Load test of a server, for three numbers of clients if they were measured, and what all of them show."""
    measured = {row["clients"] for row in stored["rows"]}
    shown = {1, 8, 32} if {1, 8, 32} <= measured else measured
    rows = [
        [
            row["clients"],
            row["setting"].removeprefix(f"{stored['run']['method']}, "),
            f"{row['requests_per_second']:.2f}",
            f"{row['gain']:.2f}",
            f"{row['predicted_gain']:.2f}",
            f"{row['first_token_p50']:.2f}",
            f"{row['first_token_p95']:.2f}",
            f"{row['kv_bytes'] / 2**20:.1f}",
            f"{100 * row['reducer_share']:.1f} %",
        ]
        for row in sorted(stored["rows"], key=lambda row: row["clients"])
        if row["clients"] in shown
    ]
    heads = ["clients", "tokens of an image", "requests/s", "gain", "predicted gain"]
    heads += ["first token p50, s", "p95, s", "KV cache of a request, MiB", "reducer"]
    return f"{table(heads, rows, left=2)}\n\n{verdict(stored)}"


def verdict(stored: dict[str, Any]) -> str:
    """State whether a load test met its targets."""
    reduced = [row for row in stored["rows"] if row["reducer_share"]]
    clients = sorted({row["clients"] for row in reduced})
    shares = sorted(row["gain"] / row["predicted_gain"] for row in reduced)
    reducer = max(row["reducer_share"] for row in reduced)
    missed = [
        f"{row['setting']} with {row['clients']} clients ({row['gain'] / row['predicted_gain']:.2f})"
        for row in reduced
        if row["gain"] < 0.8 * row["predicted_gain"]
    ]
    counts = f"{', '.join(map(str, clients[:-1]))} and {clients[-1]}"
    text = (
        f"With {counts} clients the gain is {shares[0]:.2f} to {shares[-1]:.2f} of the predicted one (target: at least "
        f"0.8), and the reducer takes at most {100 * reducer:.1f} % of the time (target: at most 10 %)."
    )
    return text + (f" Below the target: {'; '.join(missed)}." if missed else "")


FAULTS = {
    "malformed": (
        "malformed requests",
        lambda seen: f"{seen['requests']:,}",
        lambda seen: "each got 400 with one sentence",
    ),
    "image-bomb": (
        "PNG of 60,000 × 60,000 pixels in 49 kB",
        lambda seen: seen["requests"],
        lambda seen: f"each got 400; memory grew by {seen['MiB']} MiB",
    ),
    "disconnects": (
        "clients that leave in the middle of a stream",
        lambda seen: seen["streams"],
        lambda seen: "their places are free; the next request was answered",
    ),
    "slow-clients": (
        "clients that send a byte at a time",
        lambda seen: seen["slow"],
        lambda seen: (
            f"others were answered within {seen['longest seconds']} s; without them, within "
            f"{seen['longest seconds without them']} s"
        ),
    ),
    "memory": (
        "requests, a quarter of them malformed",
        lambda seen: f"{seen['requests']:,}",
        lambda seen: f"memory grew by {seen['growth']} MiB after the first quarter",
    ),
    "engine-killed": (
        "`kill -9` of the engine behind a front, under load",
        lambda seen: 1,
        lambda seen: f"503 while it was away, answers again after {seen['seconds until answers']} s",
    ),
}


def faults(stored: dict[str, Any]) -> str:
    """What the servers did when they were attacked."""
    found = stored["faults"]
    rows = [
        [what, count(found[name]), seen(found[name]) if found[name]["passed"] else f"**not handled**: {found[name]}"]
        for name, (what, count, seen) in FAULTS.items()
        if name in found
    ]
    return table(["fault", "number", "seen"], rows, left=3)


def store(stored: dict[str, Any]) -> str:
    """Throughput of a collection: Ray against plain processes."""
    turns = stored["turns"]
    photos = sum(turn["photos"] for turn in turns)
    rates = {name: photos / sum(turn[name] for turn in turns) for name in ("processes", "ray")}
    ratios = sorted(turn["processes"] / turn["ray"] for turn in turns)
    rows = [
        [label, f"{rates[name]:.2f}", f"{stored['startup_seconds'][name]:.1f}"]
        for name, label in (("processes", "two processes"), ("ray", "Ray, two actors"))
    ]
    text = (
        f"{photos:,} photos in {len(turns)} parts, each done by both in turn, after start-up: Ray has "
        f"{rates['ray'] / rates['processes']:.2f} × the throughput of plain processes, {ratios[0]:.2f} to "
        f"{ratios[-1]:.2f} by part (target: at least 0.9). Both stores have the same bytes."
    )
    return f"{table(['', 'photos/s', 'start-up, s'], rows)}\n\n{text}"
