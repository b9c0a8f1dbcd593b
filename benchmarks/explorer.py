"""Measure the explorer: from a move of a slider to the picture in Chromium, and 20 visitors at once.

The model is the lab's, with its position embeddings interpolated to 384 pixels, so that a photo has 24 x 24 = 576
patches; concepts are those of the lab's SAE. Needs Node and Chromium (``make explorer-test`` installs what it needs).

    python benchmarks/explorer.py --write research/results/explorer.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SIDE, PATCH, SEED, USERS = 384, 16, 0, 20
PHOTOS = ("bundled-astronaut", "bundled-coffee", "bundled-chelsea", "bundled-rocket")


def serve() -> None:
    """Run an explorer on the enlarged lab model until it is stopped."""
    import torch

    from torino.explorer.launch import ExplorerSources, open_explorer, run_explorer
    from torino.vlm import load_vlm
    from torino.vlm.loading import quiet_loading
    from torino.vlm.saes import load_encoder

    with quiet_loading():
        vlm = load_vlm("lab")
        tower: Any = vlm.model.model.vision_tower
        embeddings = getattr(tower, "vision_model", tower).embeddings
        table = embeddings.position_embedding.weight.data
        side, wanted = int((len(table) - 1) ** 0.5), SIDE // PATCH
        grid = table[1:].reshape(1, side, side, -1).permute(0, 3, 1, 2)
        grid = torch.nn.functional.interpolate(grid, (wanted, wanted), mode="bicubic", align_corners=False)
        table = torch.cat([table[:1], grid.permute(0, 2, 3, 1).reshape(wanted * wanted, -1)])
        embeddings.position_embedding = torch.nn.Embedding.from_pretrained(table)
        embeddings.register_buffer("position_ids", torch.arange(len(table))[None], persistent=False)
        embeddings.image_size = embeddings.config.image_size = SIDE
        vlm.model.config.vision_config.image_size = SIDE
        pixels = vlm.processor.image_processor
        pixels.size, pixels.crop_size = {"shortest_edge": SIDE}, {"height": SIDE, "width": SIDE}
        with tempfile.TemporaryDirectory() as folder:
            sources = ExplorerSources(folder=Path(folder))
            explorer = open_explorer(vlm, load_encoder("lab", decoder=True), "lab at 384 pixels", sources)
            run_explorer(explorer, 0, lambda address: print(address, flush=True))


async def visit(address: str, number: int, seconds: float) -> dict[str, list[float]]:
    """Behave as one visitor: open photos, move sliders, look at tokens and concepts; every fourth asks a question."""
    import httpx2

    chosen = random.Random(SEED + number)
    times: dict[str, list[float]] = {"photo": [], "slider": [], "token": [], "concept": [], "answer": [], "error": []}
    end = time.perf_counter() + seconds

    async def get(kind: str, path: str, **query: Any) -> Any:
        begin = time.perf_counter()
        response = await client.get(path, params=query)
        times[kind].append(time.perf_counter() - begin)
        if response.status_code != 200:
            times["error"].append(response.status_code)
        return response

    async with httpx2.AsyncClient(base_url=address, timeout=120) as client:
        await asyncio.sleep(chosen.random() * 2)
        asks_at = time.perf_counter() + chosen.random() * seconds * 0.5
        asked = number % 4 != 0
        while time.perf_counter() < end:
            photo = chosen.choice(PHOTOS)
            await get("photo", f"/api/photos/{photo}")
            for _ in range(8):
                method, k = chosen.choice(("torino-m", "torino-p")), chosen.randint(1, 8)
                spec = f"{method}(k={k}, delta={chosen.randint(1, k)}, budget={chosen.randint(8, 400)})"
                await get("slider", f"/api/photos/{photo}/reduction", by=spec)
                await asyncio.sleep(0.2 + 0.4 * chosen.random())
            await get("token", f"/api/photos/{photo}/tokens/{chosen.randint(0, 7)}", by=spec)
            await get("concept", f"/api/concepts/{chosen.randint(0, 191)}")
            if not asked and time.perf_counter() > asks_at:
                asked, begin = True, time.perf_counter()
                body = {"question": "What is in the photo?", "methods": ["torino-m(budget=64)"], "max_tokens": 8}
                response = await client.post(f"/api/photos/{photo}/answers", json=body)
                times["answer"].append(time.perf_counter() - begin)
                if response.status_code != 200 or '"error"' in response.text:
                    times["error"].append(response.status_code)
    return times


async def visit_all(address: str, seconds: float) -> dict[str, list[float]]:
    every = await asyncio.gather(*(visit(address, number, seconds) for number in range(USERS)))
    return {kind: [value for times in every for value in times[kind]] for kind in every[0]}


def summary(values: Sequence[float], scale: float = 1.0) -> list[float]:
    """Return count, median, 95th percentile and maximum."""
    ordered = sorted(value * scale for value in values)
    quantile = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
    return [len(ordered), round(statistics.median(ordered), 1), round(quantile, 1), round(ordered[-1], 1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", action="store_true", help="only run the explorer, for this script itself")
    parser.add_argument("--address", help="of an explorer that --serve has started; by default it is started here")
    parser.add_argument("--moves", type=int, default=160, help="moves of sliders")
    parser.add_argument("--seconds", type=float, default=60, help="duration of the visit")
    parser.add_argument("--write", type=Path, help="JSON file for the result")
    options = parser.parse_args()
    if options.serve:
        serve()
        return
    from report import machine

    server = None
    try:
        address = options.address
        if address is None:
            server = subprocess.Popen([sys.executable, __file__, "--serve"], stdout=subprocess.PIPE, text=True)
            assert server.stdout is not None
            address = server.stdout.readline().strip()
        asyncio.run(wait_ready(address))
        words = ["node", str(ROOT / "explorer/tests/latency.mjs"), address, PHOTOS[2], str(options.moves)]
        told = subprocess.run(words, check=True, capture_output=True, text=True, timeout=240).stdout
        latency = json.loads(told)
        visits = asyncio.run(visit_all(address, options.seconds))
    finally:
        if server is not None:
            server.terminate()
            server.wait(30)
    rows = [["slider to picture, one visitor", *summary(latency["values"])]]
    names = {"slider": "regroup", "photo": "open a photo", "token": "explain a token", "concept": "describe a concept"}
    rows += [[f"{label}, {USERS} visitors", *summary(visits[kind], 1e3)] for kind, label in names.items()]
    rows += [[f"answer, {USERS} visitors", *summary(visits["answer"], 1e3)]]
    result = {
        "format": "torino-results/1",
        "name": "explorer",
        "title": "Latency of the explorer",
        "report": "docs/guides/explore.md",
        "command": [f"python benchmarks/explorer.py --moves {options.moves} --seconds {options.seconds:g}"],
        "seed": SEED,
        "recorded": {
            "measured": f"Measured by `benchmarks/explorer.py`, seed {SEED}, {latency['patches']} patches. "
            f"{machine()}.",
            "errors": len(visits["error"]),
            "patches": latency["patches"],
            "visitors": USERS,
            "cpus": os.cpu_count(),
        },
        "tables": [
            {"title": "Milliseconds", "columns": ["what", "count", "median", "p95", "longest"], "rows": rows},
        ],
    }
    print(json.dumps(result, indent=1))
    if options.write:
        options.write.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


async def wait_ready(address: str) -> None:
    """Wait until the atlas is made and all photos are encoded: what a visitor finds after the first minute."""
    import httpx2

    async with httpx2.AsyncClient(base_url=address, timeout=300) as client:
        for photo in PHOTOS:
            await client.get(f"/api/photos/{photo}")
        for _ in range(600):
            if (await client.get("/api/atlas")).json()["ready"]:
                return
            await asyncio.sleep(0.5)
    raise SystemExit("The atlas was not finished within five minutes.")


if __name__ == "__main__":
    main()
