"""Measure time and memory, fill in missing signals, and describe the machine."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torino.core.reduction import ReductionBatch
from torino.core.tokens import VisualTokens
from torino.core.topk.prefilter import SearchStats
from torino.reducers import Reducer
from torino.sae.model import SAE

PLAIN = ("cls", "cls_attention", "keys")


def now() -> float:
    """Return the time, after waiting for queued GPU work."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


def apply_plans(tokens: Sequence[VisualTokens], plans: ReductionBatch) -> list[int]:
    """Apply the plans and return the number of tokens of each unit."""
    cls = [unit.cls for unit in tokens if unit.cls is not None]
    plans.apply([unit.patches for unit in tokens], cls if len(cls) == len(tokens) else None)
    return [len(plan) for plan in plans]


def time_gather(tokens: Sequence[VisualTokens], lengths: Sequence[int]) -> float:
    """Return the seconds of gathering as many tokens, evenly spaced, which is a lower bound for any reducer."""
    rows = torch.cat([unit.patches for unit in tokens]) if len(tokens) > 1 else tokens[0].patches
    count = max(sum(lengths), 1)
    wanted = (torch.arange(count, device=rows.device) * len(rows)) // count
    begin = now()
    rows.index_select(0, wanted)
    return now() - begin


def peak_memory(run: Callable[[], object], device: torch.device | str = "cpu") -> float | None:
    """Return the peak increase of memory during ``run`` in MB: of the GPU, or of the process on Linux.

    None where the system does not report it. Free memory that the process holds is returned to the system first, where
    the C library can; otherwise its reuse would not be noticed.
    """
    place = torch.device(device)
    gc.collect(1)  # leftovers of earlier runs are young; a full collection takes longer than most methods
    if place.type == "cuda":
        torch.cuda.synchronize(place)
        torch.cuda.reset_peak_memory_stats(place)
        before = torch.cuda.memory_allocated(place)
        run()
        torch.cuda.synchronize(place)
        return (torch.cuda.max_memory_allocated(place) - before) / 1e6
    _trim_heap()
    try:
        Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
        before = _status("VmRSS")
    except (OSError, KeyError):
        return None
    run()
    return (_status("VmHWM") - before) * 1024 / 1e6


def _trim_heap() -> None:
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError, TypeError):  # another C library
        return


def _status(name: str) -> int:
    """Return a value of /proc/self/status, in kB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    values = {line.partition(":")[0]: line.partition(":")[2] for line in lines}
    return int(values[name].split()[0])


def count_survivors(sae: SAE, tokens: Sequence[VisualTokens], k: int) -> dict[str, float] | None:
    """Count the latents per token that the int8 prefilter of an SAE could not exclude; None without a prefilter.

    Parameters
    ----------
    sae : SAE
    tokens : sequence of VisualTokens
        Searched together.
    k : int
        Number of concepts to find.
    """
    stats: list[SearchStats] = []
    sae.top(torch.cat([unit.patches for unit in tokens]), k, prefilter="int8", stats=stats)
    if not stats:
        return None
    survivors, fallback = (torch.cat(parts) for parts in zip(*stats, strict=True))
    counts = survivors.double()
    middle, most = counts.quantile(counts.new_tensor([0.5, 0.99])).tolist()
    return {
        "k": k,
        "mean": round(float(counts.mean()), 2),
        "median": middle,
        "percentile_99": most,
        "most": float(counts.max()),
        "left_to_plain": int(fallback.sum()),
        "tokens": len(counts),
    }


# ---------------------------------------------------------------------- missing signals


def missing_signals(reducer: Reducer, image: VisualTokens) -> frozenset[str]:
    """Return the signals that the reducer reads and the image lacks."""
    return frozenset(name for name in reducer.needs if image.signals.get(name, getattr(image, name, None)) is None)


def with_signals(image: VisualTokens, names: frozenset[str], number: int, device: torch.device | str) -> VisualTokens:
    """Move the image to the device and add random signals for those it lacks."""
    source = torch.Generator().manual_seed(number)
    made = {name: random_signal(name, len(image), image.width, source).to(device) for name in sorted(names)}
    plain = {name: made.pop(name) for name in PLAIN if name in made}
    there = {name: value.to(device) for name, value in image.signals.items()}
    kept = {name: value.to(device) for name in PLAIN if (value := getattr(image, name)) is not None}
    return image.with_(patches=image.patches.to(device), signals={**there, **made}, **kept, **plain)


def random_signal(name: str, n: int, width: int, source: torch.Generator) -> Tensor:
    """Return a random signal with the shape it has in LLaVA-1.5: 16 heads, width 4096 after the projector."""
    kind = name.partition("@")[0]
    heads = 16 if width % 16 == 0 else 1
    shapes = {
        "cls": (width,),
        "cls_attention": (heads, n),
        "cls_attention_joint": (n,),
        "received_attention": (n,),
        "attention": (heads, n, n),
        "head_keys": (n, width // heads),
        "projected": (n, 4096),
        "joint": (n, 768),
        "text": (1, 768),
        "words": (8, 4096),
        "generic_words": (80, 4096),
    }
    values = torch.randn(shapes.get(kind, (n, width)), generator=source)
    return (2 * values).softmax(-1) if "attention" in kind else values


# ---------------------------------------------------------------------- the machine


def machine() -> dict[str, Any]:
    """Describe processor, cores, threads, memory and GPU."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0
    return {
        "processor": names[0] if names else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gb": round(pages / 1e9, 1) or None,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "system": sys.platform,
    }


def versions() -> dict[str, str]:
    """Return the versions of the libraries that affect the measurements."""
    versions_ = {"python": platform.python_version()}
    for package in ("torino", "torch", "onnxruntime", "transformers", "numpy", "scipy"):
        try:
            versions_[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions_
