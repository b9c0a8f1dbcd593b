"""Exact products of small whole numbers, encoder rows by tokens, by whatever a machine multiplies fastest.

A product takes ``weights`` of shape (c, D), uint8, in which ``zero`` stands for 0; ``tokens`` of shape (D, n), int8,
from −127 to 127; and a place of shape (c, n), int32, that it may fill. It returns the whole numbers
(weights − zero) · tokens.

Weights have 8 bits, 128 for 0, where that is exact, and 7 bits, 64 for 0, elsewhere: processors without VNNI add pairs
of products in 16 bits, which 2 · 127 · 127 fits into and 2 · 255 · 127 does not.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, Literal

import torch
from torch import Tensor

LARGEST = 127  # of a token
ZEROS = (128, 64)  # of weights with 8 and with 7 bits

Product = Callable[[Tensor, Tensor, Tensor], Tensor]
Backend = Literal["onnxruntime", "int_mm", "torch"]

_said: set[str] = set()


def backend_for(device: torch.device) -> Backend | None:
    """The fast product of a device; None, and one line that says why, where it has none."""
    if device.type == "cuda":
        return "int_mm"
    if device.type != "cpu":
        return _without(f"there is no exact product of 8-bit numbers for {device.type} here")
    try:
        zero_for("onnxruntime")
    except ImportError:
        return _without("onnxruntime is not installed: pip install torino[fast]")
    except Exception as error:  # whatever onnxruntime raises where its library does not fit the machine
        return _without(f"onnxruntime does not work here ({type(error).__name__}: {error})")
    return "onnxruntime"


def zero_for(backend: Backend) -> int:
    """What stands for 0 among the weights: 128 where products of 8 bits are exact, else 64."""
    if backend != "onnxruntime":
        return ZEROS[0]
    try:
        _session(1, os.getpid(), ZEROS[0])
    except ArithmeticError:
        _session(1, os.getpid(), ZEROS[1])
        return ZEROS[1]
    return ZEROS[0]


def product_by(backend: Backend, zero: int, threads: int = 1) -> Product:
    """One of the products by its name; that of onnxruntime brings threads of its own, beyond the one that calls it."""
    if backend == "onnxruntime":
        return partial(by_onnxruntime, _session(threads, os.getpid(), zero))
    return partial({"int_mm": by_int_mm, "torch": by_torch}[backend], zero)


def _without(why: str) -> None:
    """Say once why concepts are found by the plain product."""
    if why not in _said:
        _said.add(why)
        warnings.warn(f"Concepts are found without the int8 screen, the same but slower: {why}.", stacklevel=2)


# ---------------------------------------------------------------------- three products


def by_torch(zero: int, weights: Tensor, tokens: Tensor, place: Tensor) -> Tensor:
    """The product in floating point, which is exact for whole numbers this small; the yardstick of the others."""
    kind = torch.float32 if weights.shape[1] * zero * LARGEST < 2**24 else torch.float64
    return place.copy_((weights.to(kind) - zero) @ tokens.to(kind))


def by_int_mm(zero: int, weights: Tensor, tokens: Tensor, place: Tensor) -> Tensor:
    """``torch._int_mm``, for CUDA: sizes must be multiples of 8, so tokens are filled up."""
    n = tokens.shape[1]
    tokens = torch.nn.functional.pad(tokens.T, (0, 0, 0, -n % 8)).contiguous().T  # by columns, as the library wants it
    signed = (weights.short() - zero).char()
    return torch._int_mm(signed, tokens)[:, :n]  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]


def by_onnxruntime(session: Any, weights: Tensor, tokens: Tensor, place: Tensor) -> Tensor:
    """``MatMulInteger`` of onnxruntime, on memory that is there: nothing is copied on the way in or out."""
    import numpy as np

    binding = session.io_binding()
    for name, value, kind in (("weights", weights, np.uint8), ("tokens", tokens, np.int8)):
        binding.bind_input(name, "cpu", 0, kind, tuple(value.shape), value.data_ptr())
    binding.bind_output("scores", "cpu", 0, np.int32, tuple(place.shape), place.data_ptr())
    session.run_with_iobinding(binding)
    return place


@lru_cache(8)
def _session(threads: int, process: int, zero: int) -> Any:
    """A session with that many threads, once it has shown that it multiplies exactly; they do not outlive a fork."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.enable_cpu_mem_arena = options.enable_mem_pattern = False
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(_model(zero), options, providers=["CPUExecutionProvider"])
    # the largest numbers, of one sign and of both, where sums in 16 bits would overflow; and numbers of all sizes
    place = torch.arange(512)
    signs = (place[:, None] // (1 + place[:40]) % 2) * 2 - 1
    tokens = torch.cat([LARGEST * signs, torch.full((512, 4), LARGEST), (place % 255 - LARGEST)[:, None]], 1)
    weights = zero + torch.cat([(zero - 1) * signs, torch.full((512, 55), zero - 1), (place % zero)[:, None]], 1).T
    made = torch.empty(len(weights), tokens.shape[1], dtype=torch.int32)
    by_onnxruntime(session, weights.byte().contiguous(), tokens.char(), made)
    if not torch.equal(made.long(), (weights - zero) @ tokens):
        raise ArithmeticError("its products of 8-bit numbers are not exact")
    return session


# ---------------------------------------------------------------------- the model, one node of it


def _model(zero: int) -> bytes:
    """A model of one ``MatMulInteger``, in the wire format of ONNX: saves the package that would write it."""

    def value(name: str, kind: int, *sizes: str) -> bytes:
        shape = b"".join(_field(1, _field(2, size)) for size in sizes)
        return _field(1, name) + _field(2, _field(1, _field(1, kind) + _field(2, shape)))

    uint8, int8, int32 = 2, 3, 6
    names = b"".join(_field(1, name) for name in ("weights", "tokens", "zero"))
    graph = (
        _field(1, names + _field(2, "scores") + _field(4, "MatMulInteger"))
        + _field(2, "screen")
        + _field(5, _field(2, uint8) + _field(8, "zero") + _field(9, bytes([zero])))
        + _field(11, value("weights", uint8, "c", "d"))
        + _field(11, value("tokens", int8, "d", "n"))
        + _field(12, value("scores", int32, "c", "n"))
    )
    return _field(1, 8) + _field(7, graph) + _field(8, _field(2, 13))  # IR version, graph, operator set


def _field(number: int, value: int | str | bytes) -> bytes:
    """One field of a protocol buffer: a whole number, or bytes with their length."""
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    data = value.encode() if isinstance(value, str) else value
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    """A whole number, seven bits a byte.

    Examples
    --------
    >>> _varint(300).hex()
    'ac02'
    """
    low, high = value & 127, value >> 7
    return bytes([low | 128]) + _varint(high) if high else bytes([low])
