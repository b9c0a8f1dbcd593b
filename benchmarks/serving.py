"""Load test of ``torino serve`` on loopback: all tokens against three budgets, 1 to 32 clients.

Every client sends its next request when the last one is answered (closed loop). The servers run side by side and are
loaded one at a time, budget by budget for each number of clients, so that a slow moment of the machine falls on all of
them alike. Caches are off: every photo is new to the server. Beside each measurement stands the prediction of
``torino.serving.sizing.MeasuredCosts`` from times of single requests, measured in the same run.

    python benchmarks/serving.py --images photos.parquet --clients 1 2     # run again with other numbers of clients
    python benchmarks/serving.py --images photos.parquet --clients 4 8     # they are added to the same file
    python benchmarks/serving.py --engine vllm --one-at-a-time --clients 1 2    # one server at a time: less memory
    python benchmarks/serving.py --quick -o /tmp/serving.json              # a few requests, to see that it runs
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import httpx2
from report import machine
from servers import CHAT, RESULTS, Server, log_file, open_results, read_photos, to_url, versions

from torino.core.io import write_json
from torino.serving.settings import ReductionSettings, default_sae, open_vlm
from torino.serving.sizing import MeasuredCosts
from torino.vlm.loading import quiet_loading

QUESTION = "Describe the photo in one sentence."
FULL = "all tokens"
# The stages of one request in the server's thread; sae and grouping are parts of plan.
BUSY = ("image", "tower", "plan", "projector", "prompt", "prefill", "decode")
VLLM = "--dtype float32 --enforce-eager --max-model-len 512 --block-size 128 --num-gpu-blocks-override 128"
VLLM_ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
NO_CACHES = " --no-enable-prefix-caching --mm-processor-cache-gb 0 --max-num-seqs "


@dataclass(frozen=True)
class Setting:
    """One way of serving: a name, and how images are reduced."""

    name: str
    settings: ReductionSettings

    @property
    def words(self) -> list[str]:
        """Words of ``torino serve``."""
        given = self.settings
        words = ["--method", given.method]
        for option in ("sae", "budget"):
            value = getattr(given, option)
            words += [] if value is None else [f"--{option}", str(value)]
        return words


# ---------------------------------------------------------------------- requests


def make_body(photo: bytes, length: int) -> bytes:
    content = [{"type": "image_url", "image_url": {"url": to_url(photo)}}, {"type": "text", "text": QUESTION}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": length, "temperature": 0}
    return json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()


async def ask(client: httpx2.AsyncClient, body: bytes) -> dict[str, float]:
    """Send one request; return the times to the first token and to the end, and its tokens."""
    begin, first = time.perf_counter(), 0.0
    usage: dict[str, int] = {}
    async with client.stream("POST", CHAT, content=body, headers={"content-type": "application/json"}) as response:
        if response.status_code != 200:
            raise SystemExit(f"The server answered {response.status_code}: {(await response.aread())[:300]!r}")
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            usage = event.get("usage") or usage
            if not first and any(choice["delta"].get("content") for choice in event["choices"]):
                first = time.perf_counter() - begin
    total = time.perf_counter() - begin
    tokens = {"prompt": usage["prompt_tokens"], "new": usage["completion_tokens"]}
    return {"first": first or total, "total": total, **tokens}


async def load(
    address: str, bodies: Sequence[bytes], clients: int, requests: int
) -> tuple[list[dict[str, float]], float]:
    """Send requests from several clients in a closed loop; return their times, and the seconds of all."""
    turn = iter(range(requests))
    results: list[dict[str, float]] = []

    async def work(client: httpx2.AsyncClient) -> None:
        for number in turn:
            results.append(await ask(client, bodies[number % len(bodies)]))

    limits = httpx2.Limits(max_connections=clients, max_keepalive_connections=clients)
    async with httpx2.AsyncClient(base_url=address, timeout=600, limits=limits, trust_env=False) as client:
        begin = time.perf_counter()
        await asyncio.gather(*[work(client) for _ in range(clients)])
        return results, time.perf_counter() - begin


# ---------------------------------------------------------------------- costs and predictions


def inspect(given: argparse.Namespace, settings: Sequence[Setting], photos: Sequence[bytes]) -> dict[str, Any]:
    """Measure in this process what a server of vLLM does not report: the reducer's seconds and the cache per token."""
    with quiet_loading():
        vlm = open_vlm(given.model, settings[0].settings, given.device)
    times: dict[str, list[float]] = {item.name: [] for item in settings if item.name != FULL}
    reducers = {item.name: item.settings.build(vlm.device) for item in settings}
    for turn in range(given.rounds + 1):
        encoded = vlm.encode(vlm.inputs(photos[turn % len(photos)], QUESTION), list(reducers.values()))
        for name, kept in times.items():
            seconds = vlm.reduce(encoded, reducers[name]).seconds["plan"]
            if turn:  # the first one is slow
                kept.append(seconds)
    medians = {name: round(statistics.median(kept), 5) for name, kept in times.items()}
    return {"kv_bytes_per_token": vlm.adapter.cache_bytes(1), "reducer_seconds": medians}


def median_costs(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the costs of single requests."""
    steps = [(row["total"] - row["first"]) / (row["new"] - 1) for row in rows if row["new"] > 1]
    return {
        "prompt": statistics.median(row["prompt"] for row in rows),
        "first": round(statistics.median(row["first"] for row in rows), 4),
        "step": round(statistics.median(steps) if steps else 0.0, 5),
    }


def add_predictions(rows: Iterable[dict[str, Any]], costs: dict[str, dict[str, float]], batch: int) -> None:
    """Add the formula's prediction to each row, and measured and predicted gains over all tokens."""
    longest = max(costs.values(), key=lambda row: row["prompt"])
    shortest = min(costs.values(), key=lambda row: row["prompt"])
    slope = (longest["first"] - shortest["first"]) / max(longest["prompt"] - shortest["prompt"], 1)
    rows = list(rows)
    for row in rows:
        cost = costs[row["setting"]]
        measured = MeasuredCosts(cost["first"], cost["step"], max(slope, 0.0))
        predicted = measured.requests_per_second(min(row["clients"], batch), row["new_tokens"])
        row["predicted_requests_per_second"] = round(predicted, 4)
    for row in rows:
        full = next(other for other in rows if other["setting"] == FULL and other["clients"] == row["clients"])
        for name in ("", "predicted_"):
            key = f"{name}requests_per_second"
            row[f"{name}gain"] = round(row[key] / full[key], 3)


# ---------------------------------------------------------------------- one cell


def measure(
    given: argparse.Namespace, server: Server, item: Setting, bodies: Sequence[bytes], clients: int, facts: Any
) -> dict[str, Any]:
    """Load a server with some clients."""
    before = server.metrics()
    results, seconds = asyncio.run(load(server.address, bodies, clients, max(given.requests, 2 * clients)))
    after = server.metrics()
    change = {key: value - before.get(key, 0.0) for key, value in after.items()}
    firsts = sorted(row["first"] for row in results)
    tokens = statistics.mean(row["prompt"] + row["new"] for row in results)
    row: dict[str, Any] = {
        "setting": item.name,
        "clients": clients,
        "requests": len(results),
        "seconds": round(seconds, 3),
        "requests_per_second": round(len(results) / seconds, 4),
        "first_token_p50": round(percentile(firsts, 50), 4),
        "first_token_p95": round(percentile(firsts, 95), 4),
        "prompt_tokens": round(statistics.mean(row["prompt"] for row in results), 2),
        "new_tokens": round(statistics.mean(row["new"] for row in results), 2),
        "kv_bytes": round(tokens * facts["kv_bytes_per_token"]),
    }
    stages = {stage: change.get(f'torino_stage_seconds_sum{{stage="{stage}"}}', 0.0) for stage in BUSY}
    if sum(stages.values()):
        row["stage_seconds"] = {stage: round(value, 4) for stage, value in stages.items()}
        row["mean_batch"] = round(change["torino_batch_requests_sum"] / change["torino_batch_requests_count"], 2)
        row["reducer_share"] = round(stages["plan"] / sum(stages.values()), 4)
    else:  # vLLM: the reducer's time in this process, of the time in which the server answers one request
        row["reducer_share"] = round(facts["reducer_seconds"].get(item.name, 0.0) * len(results) / seconds, 4)
    return row


def percentile(values: Sequence[float], percent: float) -> float:
    return values[min(len(values) - 1, int(len(values) * percent / 100))]


# ---------------------------------------------------------------------- the run


def serve_words(given: argparse.Namespace, setting: Setting) -> list[str]:
    words = [given.model, "--engine", given.engine, *setting.words]
    if given.engine == "vllm":
        return [*words, "--placement", given.placement, "--vllm", f"{given.vllm}{NO_CACHES}{given.batch}"]
    words += ["--cache-megabytes", "0", "--batch", str(given.batch), "--device", given.device]
    return [*words, "--max-tokens", str(given.tokens)]


def run_load(given: argparse.Namespace, results: dict[str, Any]) -> None:
    sae = given.sae or default_sae(given.method, given.model)
    settings = [Setting(FULL, ReductionSettings("none"))]
    settings += [Setting(f"{given.method}, {b}", ReductionSettings(given.method, sae, b)) for b in given.budgets]
    done = {row["clients"] for row in results["rows"]}
    counts = [clients for clients in given.clients if clients not in done]
    if not counts:
        print("These numbers of clients are measured already.")
        return
    photos = read_photos(given.images, given.photos, given.seed)
    bodies = [make_body(photo, given.tokens) for photo in photos]
    facts = results["facts"] = results["facts"] or inspect(given, settings, photos)
    environment = VLLM_ENVIRONMENT if given.engine == "vllm" else {}
    environment |= {"OMP_NUM_THREADS": str(given.threads)} if given.threads else {}
    costs: dict[str, dict[str, float]] = {}
    rows: list[dict[str, Any]] = []
    for group in [[item] for item in settings] if given.one_at_a_time else [settings]:
        servers = {item.name: Server(serve_words(given, item), log_file("serving"), environment) for item in group}
        try:
            single: dict[str, list[dict[str, float]]] = {item.name: [] for item in group}
            for server in servers.values():
                server.wait()
                asyncio.run(load(server.address, bodies[:2], 1, 2))  # the first requests of a process are slow
            for number in range(given.rounds):
                for name, server in servers.items():
                    single[name] += asyncio.run(load(server.address, bodies[-1 - number :], 1, 1))[0]
            costs |= {name: median_costs(kept) for name, kept in single.items()}
            for clients in counts:
                # the same photos for all settings, others for each number of clients
                first = ALL_CLIENTS.index(clients) * given.requests % len(bodies) if clients in ALL_CLIENTS else 0
                turned = [*bodies[first:], *bodies[:first]]
                for item in group:
                    rows.append(measure(given, servers[item.name], item, turned, clients, facts))
                    show(rows[-1])
        finally:
            for server in servers.values():
                server.stop()
    add_predictions(rows, costs, given.batch)
    rows.sort(key=lambda row: counts.index(row["clients"]))  # settings stay in order
    results["rows"] += rows
    results["costs"].append({"clients": counts, "settings": costs})
    for row in rows:
        if row["setting"] != FULL:
            print(f"{row['setting']}, {row['clients']} clients: gain {row['gain']}, predicted {row['predicted_gain']}")


def show(row: dict[str, Any]) -> None:
    print(
        f"{row['setting']:>16}, {row['clients']:>2} clients: {row['requests_per_second']:.2f} requests/s, first token "
        f"{row['first_token_p50']:.2f} s, reducer {100 * row['reducer_share']:.1f} %",
        flush=True,
    )


ALL_CLIENTS = [1, 2, 4, 8, 16, 32]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="lab")
    parser.add_argument("--sae", help="default: that of the model package")
    parser.add_argument("--method", default="torino-m")
    parser.add_argument("--budgets", type=int, nargs="+", default=[96, 64, 32])
    parser.add_argument("--engine", choices=["transformers", "vllm"], default="transformers")
    parser.add_argument("--placement", choices=["processor", "engine"], default="processor", help="with vLLM")
    parser.add_argument("--vllm", default=VLLM, help=f"options of vLLM (default: {VLLM})")
    parser.add_argument("--one-at-a-time", action="store_true", help="start the servers one after another")
    parser.add_argument("--clients", type=int, nargs="+", default=ALL_CLIENTS, help="default: all from 1 to 32")
    parser.add_argument("--requests", type=int, default=40, help="of each cell; at least two per client")
    parser.add_argument("--photos", type=int, default=200)
    parser.add_argument("--images", type=Path, help="folder, parquet or tar; by default crops of the bundled photos")
    parser.add_argument("--tokens", type=int, default=16, help="longest answer")
    parser.add_argument("--batch", type=int, default=8, help="requests that a server answers together")
    parser.add_argument("--rounds", type=int, default=6, help="single requests of each setting, for the prediction")
    parser.add_argument("--threads", type=int, default=0, help="of each process; 0: the default of torch")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="a few requests, to see that it runs")
    parser.add_argument("-o", "--output", type=Path, help="default: research/results/serving-ENGINE.json")
    given = parser.parse_args()
    if given.quick:
        given.clients, given.requests, given.photos, given.rounds, given.tokens = [1, 4], 4, 8, 1, 4
    given.output = given.output or RESULTS / f"serving-{given.engine}.json"
    return given


def main() -> None:
    given = parse()
    names = ("model", "sae", "method", "budgets", "engine", "requests", "photos", "tokens", "batch", "seed", "device")
    run = {name: getattr(given, name) for name in (*names, "threads")}
    run |= {"placement": given.placement, "vllm": given.vllm} if given.engine == "vllm" else {}
    run["images"] = given.images.name if given.images else "crops of the bundled photos"
    title = "Load test of torino serve: all tokens against three budgets"
    empty = {"title": title, "command": [], "seed": given.seed, "facts": {}, "costs": [], "rows": []}
    report = f"docs/guides/{'serve-with-vllm' if given.engine == 'vllm' else 'serve'}.md"
    results = open_results(given.output, report, run, empty)
    results |= {"date": date.today().isoformat(), "hardware": machine(), "versions": versions()}
    words = [Path(word).name if word.endswith((".parquet", ".json")) else word for word in sys.argv[1:]]
    results["command"].append(f"python benchmarks/serving.py {' '.join(words)}".strip())
    run_load(given, results)
    write_json(given.output, results)


if __name__ == "__main__":
    main()
