"""Exact integer products of quantized tokens and encoder rows, computed by the fastest available backend.

Weights are ``levels`` of shape (C', D'), uint8, with a zero point; tokens are integers from −127 to 127. Weights have 8
bits (zero point 128) if the products are exact, otherwise 7 bits (zero point 64): processors without VNNI add pairs of
products in 16 bits, which is enough for 2 · 255 · 63 but not for 2 · 255 · 127.
"""

from __future__ import annotations

import ctypes
import warnings
from abc import ABC, abstractmethod
from contextlib import suppress
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from torino.core.errors import MissingPackage, TorinoError
from torino.core.extras import optional_import

MAX_LEVEL = 127  # largest absolute value of a quantized token
ZERO_POINTS = (128, 64)  # of weights with 8 and with 7 bits
CPU = torch.device("cpu")
LANE = 32  # latents that share a scale, and of which the search compares the maximum first
CHUNK = 4096  # latents per product; 9 MiB of int32 scores for an image of 576 patches

Backend = Literal["onnxruntime", "int_mm", "torch"]

_warned: set[str] = set()


def backend_for(device: torch.device) -> Backend | None:
    """Return the fastest backend of a device, or None, with a warning, if there is none."""
    if device.type not in ("cpu", "cuda"):
        return _warn_unavailable(f"there is no exact int8 product for {device.type}")
    backend: Backend = "onnxruntime" if device.type == "cpu" else "int_mm"
    result = _probe(backend, device)
    return backend if isinstance(result, int) else _warn_unavailable(result)


def _warn_unavailable(reason: str) -> None:
    """Warn once per reason that the int8 prefilter is not used."""
    if reason not in _warned:
        _warned.add(reason)
        warnings.warn(
            f"The int8 prefilter is not available: {reason}. Results are the same, but the search is slower.",
            stacklevel=2,
        )


class Int8Product(ABC):
    """Product of quantized tokens with fixed weights.

    Parameters
    ----------
    levels : Tensor of shape (C', D'), uint8
        Quantized weights; C' is a multiple of 32.
    zero_point : int
        The level that represents 0.
    chunk : int
        Number of rows per product.
    """

    def __init__(self, levels: Tensor, zero_point: int, chunk: int = CHUNK) -> None:
        self.rows, self.chunk = len(levels), chunk

    def prepare(self, tokens: Tensor) -> Tensor:
        """Convert tokens of shape (n, D'), int8, to the input format of :meth:`scores`."""
        return tokens

    @abstractmethod
    def scores(self, tokens: Tensor, start: int, out: Tensor) -> Tensor:
        """Return the integers (levels − zero_point) · tokens of the chunk that begins at row ``start``.

        ``out``, of shape (n, rows of the chunk), int32, may be used as memory. The result has shape (n, 32, lanes):
        row 32·j + i of the chunk is at [:, i, j].
        """


class TorchProduct(Int8Product):
    """Product in floating point, which is exact for integers of this size; the reference for other backends."""

    def __init__(self, levels: Tensor, zero_point: int, chunk: int = CHUNK) -> None:
        super().__init__(levels, zero_point, chunk)
        self._levels, self._zero_point = levels, zero_point
        self._dtype = torch.float32 if levels.shape[1] * zero_point * MAX_LEVEL < 2**24 else torch.float64

    def scores(self, tokens: Tensor, start: int, out: Tensor) -> Tensor:
        """Multiply a few lanes at a time, to use little floating-point memory."""
        end = start + out.shape[1]
        pieces = self._levels[start:end].split(8 * LANE)
        for levels, target in zip(pieces, out.split(8 * LANE, 1), strict=True):
            target.copy_(tokens.to(self._dtype) @ (levels.to(self._dtype) - self._zero_point).T)
        return out.unflatten(1, (-1, LANE)).transpose(1, 2)


class IntMMProduct(Int8Product):
    """``torch._int_mm``, for CUDA."""

    def __init__(self, levels: Tensor, zero_point: int, chunk: int = CHUNK) -> None:
        super().__init__(levels, zero_point, chunk)
        self._levels = (levels - zero_point).view(torch.int8)  # uint8 arithmetic wraps around

    def prepare(self, tokens: Tensor) -> Tensor:
        """Pad the tokens: ``_int_mm`` requires more than 16 rows."""
        return torch.nn.functional.pad(tokens, (0, 0, 0, max(0, 24 - len(tokens)))).contiguous()

    def scores(self, tokens: Tensor, start: int, out: Tensor) -> Tensor:
        """Multiply by the transposed rows, the layout that ``_int_mm`` requires."""
        weights = self._levels[start : start + out.shape[1]].T
        product = torch._int_mm(tokens, weights)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
        return product[: len(out)].unflatten(1, (-1, LANE)).transpose(1, 2)


class OnnxruntimeProduct(Int8Product):
    """``MatMulInteger`` of onnxruntime with one thread per call; the search calls it from several threads.

    There is one model per chunk. Its weights are constants, so onnxruntime converts them to its internal layout once
    instead of in every product. Inputs and outputs are bound without copies.
    """

    def __init__(self, levels: Tensor, zero_point: int, chunk: int = CHUNK) -> None:
        super().__init__(levels, zero_point, chunk)
        # columns are sorted by position within the lane, so that the maximum over a lane reads contiguous memory
        parts = (part.view(-1, LANE, part.shape[1]).permute(2, 1, 0).flatten(1) for part in levels.split(chunk))
        self._sessions = [_session((part - zero_point).view(torch.int8)) for part in parts]  # uint8 wraps around
        _trim_memory()

    def prepare(self, tokens: Tensor) -> Tensor:
        """Convert tokens to uint8 with zero point 128."""
        return (tokens.contiguous().view(torch.uint8) + 128).contiguous()  # uint8 arithmetic wraps around

    def scores(self, tokens: Tensor, start: int, out: Tensor) -> Tensor:
        """Multiply, reading ``tokens`` and writing ``out`` in place."""
        session = self._sessions[start // self.chunk]
        binding = session.io_binding()
        binding.bind_input("tokens", "cpu", 0, np.uint8, tuple(tokens.shape), tokens.data_ptr())
        binding.bind_output("scores", "cpu", 0, np.int32, tuple(out.shape), out.data_ptr())
        session.run_with_iobinding(binding)
        return out.unflatten(1, (LANE, -1))


_products: dict[Backend, type[Int8Product]] = {
    "onnxruntime": OnnxruntimeProduct,
    "int_mm": IntMMProduct,
    "torch": TorchProduct,
}


def make_product(backend: Backend, levels: Tensor, zero_point: int, chunk: int = CHUNK) -> Int8Product:
    """Create the product of a backend for the given weights; see :class:`Int8Product`."""
    return _products[backend](levels, zero_point, chunk)


def zero_point_for(backend: Backend, device: torch.device = CPU) -> int:
    """Return the zero point of the weights: 128 if products with 8 bits are exact, otherwise 64."""
    result = _probe(backend, device)
    if not isinstance(result, int):
        raise TorinoError(f"There is no int8 product: {result}.")
    return result


@lru_cache(8)
def _probe(backend: Backend, device: torch.device) -> int | str:
    """Return the zero point of a backend, or the reason why it cannot be used."""
    try:
        with CPU:
            return _largest_exact_zero_point(backend, device)
    except MissingPackage as error:
        return str(error).removesuffix(".")
    except Exception as error:  # backends raise many error types on unsupported machines
        return f"{backend} does not work on this machine ({type(error).__name__}: {error})"


def _largest_exact_zero_point(backend: Backend, device: torch.device) -> int:
    for zero_point in ZERO_POINTS:
        # the largest values, of equal and of mixed signs, where 16-bit sums would overflow; and values of all sizes
        index = torch.arange(512)
        signs = (index[:, None] // (1 + index[:40]) % 2) * 2 - 1
        largest = zero_point - 1
        tokens = torch.cat(
            [MAX_LEVEL * signs, torch.full((512, 4), MAX_LEVEL), (index % 255 - MAX_LEVEL)[:, None]], 1
        ).T
        weights = torch.cat([largest * signs, torch.full((512, 55), largest), (index % zero_point)[:, None]], 1).T
        product = make_product(backend, (weights + zero_point).byte().to(device), zero_point)
        out = torch.empty(len(tokens), len(weights), dtype=torch.int32, device=device)
        scores = product.scores(product.prepare(tokens.char().to(device)), 0, out).transpose(1, 2).flatten(1)
        if torch.equal(scores.long().cpu(), tokens @ weights.T):
            return zero_point
    raise ArithmeticError("its products of 8-bit integers are not exact")


# ---------------------------------------------------------------------- onnxruntime


def _session(weights: Tensor) -> Any:
    """Create a session that multiplies by weights of shape (D', c), int8."""
    with optional_import("on a CPU it needs", "torino[fast]"):
        import onnxruntime
    with suppress(AttributeError):  # not available in all versions
        onnxruntime.disable_telemetry_events()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.enable_cpu_mem_arena = options.enable_mem_pattern = False
    options.log_severity_level = 3
    session: Any = onnxruntime.InferenceSession(_build_model(weights), options, providers=["CPUExecutionProvider"])
    session._model_bytes = None  # a copy of the weights, kept to recreate the session after a failure
    return session


def _build_model(weights: Tensor) -> bytes:
    """Return a serialized ONNX model of one ``MatMulInteger`` with constant weights."""
    with optional_import("on a CPU it needs", "torino[fast]"):
        from onnx import TensorProto, helper, numpy_helper
    graph = helper.make_graph(
        nodes=[helper.make_node("MatMulInteger", ["tokens", "weights", "zero_point"], ["scores"])],
        name="prefilter",
        inputs=[helper.make_tensor_value_info("tokens", TensorProto.UINT8, ["n", "d"])],
        outputs=[helper.make_tensor_value_info("scores", TensorProto.INT32, ["n", "c"])],
        initializer=[
            numpy_helper.from_array(weights.contiguous().numpy(), "weights"),
            helper.make_tensor("zero_point", TensorProto.UINT8, [], [128]),
        ],
    )
    model = helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 13)])
    return model.SerializeToString()


def _trim_memory() -> None:
    """Return free memory to the operating system: building the sessions needs several copies of the weights."""
    with suppress(OSError, AttributeError):  # glibc only
        ctypes.CDLL(None).malloc_trim(0)
