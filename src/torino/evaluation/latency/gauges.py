"""Clock, memory, signals in the place of those that tokens lack, and the machine in words."""

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
    """The clock, once the GPU has done what was asked of it."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


def carry_out(tokens: Sequence[VisualTokens], plans: ReductionBatch) -> list[int]:
    """Carry out the plans, and return how many tokens are left of each unit."""
    cls = [unit.cls for unit in tokens if unit.cls is not None]
    plans.apply([unit.patches for unit in tokens], cls if len(cls) == len(tokens) else None)
    return [len(plan) for plan in plans]


def gather(tokens: Sequence[VisualTokens], lengths: Sequence[int]) -> float:
    """Seconds of a bare gather of as many tokens, spread evenly over the patches."""
    rows = torch.cat([unit.patches for unit in tokens]) if len(tokens) > 1 else tokens[0].patches
    count = max(sum(lengths), 1)
    wanted = (torch.arange(count, device=rows.device) * len(rows)) // count
    begin = now()
    rows.index_select(0, wanted)
    return now() - begin


def peak_memory(run: Callable[[], object], device: torch.device | str = "cpu") -> float | None:
    """MB that memory rises by while ``run`` is at work, at its highest: of the GPU, or of the process on Linux.

    None where the system does not tell. Free memory that the process holds is given back first, where the C library can
    do so, or it would be used again unseen.
    """
    place = torch.device(device)
    gc.collect(1)  # what earlier runs left is young; a whole collection takes longer than most methods
    if place.type == "cuda":
        torch.cuda.synchronize(place)
        torch.cuda.reset_peak_memory_stats(place)
        before = torch.cuda.memory_allocated(place)
        run()
        torch.cuda.synchronize(place)
        return (torch.cuda.max_memory_allocated(place) - before) / 1e6
    _give_back()
    try:
        Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
        before = _status("VmRSS")
    except (OSError, KeyError):
        return None
    run()
    return (_status("VmHWM") - before) * 1024 / 1e6


def _give_back() -> None:
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError, TypeError):  # another C library
        return


def _status(name: str) -> int:
    """A line of what Linux says about this process, in kB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    found = {line.partition(":")[0]: line.partition(":")[2] for line in lines}
    return int(found[name].split()[0])


def survivors(sae: SAE, tokens: Sequence[VisualTokens], k: int) -> dict[str, float] | None:
    """Latents a token that the int8 screen of an SAE could not exclude; None where there is no screen here.

    Parameters
    ----------
    sae : SAE
    tokens : sequence of VisualTokens
        Taken together.
    k : int
        Concepts that are looked for.
    """
    told: list[SearchStats] = []
    sae.top(torch.cat([unit.patches for unit in tokens]), k, screen="int8", told=told)
    if not told:
        return None
    left, plain = (torch.cat(parts) for parts in zip(*told, strict=True))
    counts = left.double()
    middle, most = counts.quantile(counts.new_tensor([0.5, 0.99])).tolist()
    return {
        "k": k,
        "mean": round(float(counts.mean()), 2),
        "median": middle,
        "percentile_99": most,
        "most": float(counts.max()),
        "left_to_plain": int(plain.sum()),
        "tokens": len(counts),
    }


# ---------------------------------------------------------------------- signals that tokens lack


def lacking(reducer: Reducer, image: VisualTokens) -> frozenset[str]:
    """Signals that the reducer reads and the image does not carry."""
    return frozenset(name for name in reducer.needs if image.signals.get(name, getattr(image, name, None)) is None)


def furnished(image: VisualTokens, names: frozenset[str], number: int, device: torch.device | str) -> VisualTokens:
    """The image on the device, with signals made up that it lacks."""
    source = torch.Generator().manual_seed(number)
    made = {name: made_up(name, len(image), image.width, source).to(device) for name in sorted(names)}
    plain = {name: made.pop(name) for name in PLAIN if name in made}
    there = {name: value.to(device) for name, value in image.signals.items()}
    kept = {name: value.to(device) for name in PLAIN if (value := getattr(image, name)) is not None}
    return image.with_(patches=image.patches.to(device), signals={**there, **made}, **kept, **plain)


def made_up(name: str, n: int, width: int, source: torch.Generator) -> Tensor:
    """A random signal in the shape of CLIP's and LLaVA-1.5's: attention of 16 heads, 4096 wide behind the projector."""
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
    }
    values = torch.randn(shapes.get(kind, (n, width)), generator=source)
    return (2 * values).softmax(-1) if "attention" in kind else values


# ---------------------------------------------------------------------- where it was measured


def machine() -> dict[str, Any]:
    """Processor, cores, threads, memory and GPU."""
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
    """Versions of what the figures hang on."""
    found = {"python": platform.python_version()}
    for package in ("torino", "torch", "onnxruntime", "transformers", "numpy", "scipy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
