"""Exact products of small whole numbers, tokens by encoder rows, by whatever a machine multiplies fastest.

Weights are ``levels`` of shape (C', D'), uint8, in which ``zero`` stands for 0; tokens have whole numbers from −127 to
127. Weights have 8 bits, 128 for 0, where that is exact, and 7 bits, 64 for 0, elsewhere: processors without VNNI add
pairs of products in 16 bits, which 2 · 255 · 63 fits into and 2 · 255 · 127 does not.
"""

from __future__ import annotations

import ctypes
import warnings
from abc import ABC, abstractmethod
from contextlib import suppress
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor

from torino.core.errors import TorinoError

LARGEST = 127  # of a token
ZEROS = (128, 64)  # of weights with 8 and with 7 bits
CPU = torch.device("cpu")
LANE = 32  # latents that share a step, and one maximum in the search
CHUNK = 4096  # latents a product; 9 MiB of whole numbers for an image

Backend = Literal["onnxruntime", "int_mm", "torch"]

_said: set[str] = set()


def backend_for(device: torch.device) -> Backend | None:
    """The fast product of a device; None, and one line that says why, where it has none."""
    if device.type not in ("cpu", "cuda"):
        return _without(f"there is no exact product of 8-bit numbers for {device.type} here")
    backend: Backend = "onnxruntime" if device.type == "cpu" else "int_mm"
    found = _tried(backend, device)
    return backend if isinstance(found, int) else _without(found)


def _without(why: str) -> None:
    """Say once why concepts are found by the plain product."""
    if why not in _said:
        _said.add(why)
        warnings.warn(f"Concepts are found without the int8 screen, the same but slower: {why}.", stacklevel=2)


class Product(ABC):
    """The product with some weights, which it may keep in a form of its own.

    Parameters
    ----------
    levels : Tensor of shape (C', D'), uint8
        C' is a multiple of 32.
    zero : int
        What stands for 0 among them.
    chunk : int
        How many of them are multiplied at once.
    """

    def __init__(self, levels: Tensor, zero: int, chunk: int = CHUNK) -> None:
        self.rows, self.chunk = len(levels), chunk

    def take(self, tokens: Tensor) -> Tensor:
        """Tokens of shape (n, D'), int8, in the form that :meth:`scores` wants."""
        return tokens

    @abstractmethod
    def scores(self, tokens: Tensor, start: int, place: Tensor) -> Tensor:
        """Whole numbers (levels − zero) · tokens of the chunk that begins at row ``start``.

        ``place``, of shape (n, rows of the chunk), int32, may be filled. The answer has the shape (n, 32, lanes): row
        32·j + i of the chunk is at [:, i, j].
        """


class ByTorch(Product):
    """In floating point, which is exact for whole numbers this small; the yardstick of the others."""

    def __init__(self, levels: Tensor, zero: int, chunk: int = CHUNK) -> None:
        super().__init__(levels, zero, chunk)
        self._levels, self._zero = levels, zero
        self._kind = torch.float32 if levels.shape[1] * zero * LARGEST < 2**24 else torch.float64

    def scores(self, tokens: Tensor, start: int, place: Tensor) -> Tensor:
        """Multiply a few lanes at a time, so that there is never much in floating point."""
        end = start + place.shape[1]
        pieces = self._levels[start:end].split(8 * LANE)
        for levels, out in zip(pieces, place.split(8 * LANE, 1), strict=True):
            out.copy_(tokens.to(self._kind) @ (levels.to(self._kind) - self._zero).T)
        return place.unflatten(1, (-1, LANE)).transpose(1, 2)


class ByIntMM(Product):
    """``torch._int_mm``, for CUDA."""

    def __init__(self, levels: Tensor, zero: int, chunk: int = CHUNK) -> None:
        super().__init__(levels, zero, chunk)
        self._levels = (levels - zero).view(torch.int8)  # bytes wrap around

    def take(self, tokens: Tensor) -> Tensor:
        """The library wants more than 16 rows."""
        return torch.nn.functional.pad(tokens, (0, 0, 0, max(0, 24 - len(tokens)))).contiguous()

    def scores(self, tokens: Tensor, start: int, place: Tensor) -> Tensor:
        """Multiply by rows that stand as columns, as the library wants them."""
        weights = self._levels[start : start + place.shape[1]].T
        made = torch._int_mm(tokens, weights)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
        return made[: len(place)].unflatten(1, (-1, LANE)).transpose(1, 2)


class ByOnnxruntime(Product):
    """``MatMulInteger`` of onnxruntime, one thread: callers bring their own.

    The weights are constants of a model for each chunk, so they are laid out for the processor once and not in every
    product. Tokens and answers are used where they are.
    """

    def __init__(self, levels: Tensor, zero: int, chunk: int = CHUNK) -> None:
        super().__init__(levels, zero, chunk)
        # Slot by slot, so that the maximum over a lane is one over rows of neighbours.
        parts = (part.view(-1, LANE, part.shape[1]).permute(2, 1, 0).flatten(1) for part in levels.split(chunk))
        self._sessions = [_session((part - zero).view(torch.int8)) for part in parts]  # bytes wrap around
        _give_back()

    def take(self, tokens: Tensor) -> Tensor:
        """Tokens are the unsigned ones here, 128 for 0."""
        return (tokens.contiguous().view(torch.uint8) + 128).contiguous()  # bytes wrap around

    def scores(self, tokens: Tensor, start: int, place: Tensor) -> Tensor:
        """Multiply on the memory that is there."""
        import numpy as np

        session = self._sessions[start // self.chunk]
        binding = session.io_binding()
        binding.bind_input("tokens", "cpu", 0, np.uint8, tuple(tokens.shape), tokens.data_ptr())
        binding.bind_output("scores", "cpu", 0, np.int32, tuple(place.shape), place.data_ptr())
        session.run_with_iobinding(binding)
        return place.unflatten(1, (LANE, -1))


_products: dict[Backend, type[Product]] = {"onnxruntime": ByOnnxruntime, "int_mm": ByIntMM, "torch": ByTorch}


def product_of(backend: Backend, levels: Tensor, zero: int, chunk: int = CHUNK) -> Product:
    """The product with some weights, by the name of who multiplies."""
    return _products[backend](levels, zero, chunk)


def zero_for(backend: Backend, device: torch.device = CPU) -> int:
    """What stands for 0 among the weights: 128 where products of 8 bits are exact, else 64."""
    found = _tried(backend, device)
    if not isinstance(found, int):
        raise TorinoError(f"There is no int8 product: {found}.")
    return found


@lru_cache(8)
def _tried(backend: Backend, device: torch.device) -> int | str:
    """What stands for 0, or why there is no product; found out once."""
    try:
        with CPU:
            return _try(backend, device)
    except ImportError:
        return "onnxruntime is not installed: pip install torino[fast]"
    except Exception as error:  # whatever a library raises that does not fit the machine
        return f"{backend} does not work here ({type(error).__name__}: {error})"


def _try(backend: Backend, device: torch.device) -> int:
    for zero in ZEROS:
        # the largest numbers, of one sign and of both, where sums in 16 bits would overflow; and numbers of all sizes
        place = torch.arange(512)
        signs = (place[:, None] // (1 + place[:40]) % 2) * 2 - 1
        tokens = torch.cat([LARGEST * signs, torch.full((512, 4), LARGEST), (place % 255 - LARGEST)[:, None]], 1).T
        weights = torch.cat([(zero - 1) * signs, torch.full((512, 55), zero - 1), (place % zero)[:, None]], 1).T
        product = product_of(backend, (weights + zero).byte().to(device), zero)
        made = torch.empty(len(tokens), len(weights), dtype=torch.int32, device=device)
        made = product.scores(product.take(tokens.char().to(device)), 0, made).transpose(1, 2).flatten(1)
        if torch.equal(made.long().cpu(), tokens @ weights.T):
            return zero
    raise ArithmeticError("its products of 8-bit numbers are not exact")


# ---------------------------------------------------------------------- the model, one node of it


def _session(weights: Tensor) -> Any:
    """A session that multiplies by weights of shape (D', c), int8."""
    import onnxruntime

    with suppress(AttributeError):  # not all versions have it
        onnxruntime.disable_telemetry_events()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.enable_cpu_mem_arena = options.enable_mem_pattern = False
    options.log_severity_level = 3
    session: Any = onnxruntime.InferenceSession(_model(weights), options, providers=["CPUExecutionProvider"])
    session._model_bytes = None  # kept to make the session anew after a failure, and as large as the weights
    return session


def _give_back() -> None:
    """Return memory to the system: what lay between the weights in the making is two to three times their size."""
    with suppress(OSError, AttributeError):  # glibc has it; elsewhere it is not needed, or not to be had
        ctypes.CDLL(None).malloc_trim(0)


def _model(weights: Tensor) -> bytes:
    """A model of one ``MatMulInteger``, in the wire format of ONNX: saves the package that would write it."""

    def value(name: str, kind: int, *sizes: str) -> bytes:
        shape = b"".join(_field(1, _field(2, size)) for size in sizes)
        return _field(1, name) + _field(2, _field(1, _field(1, kind) + _field(2, shape)))

    uint8, int8, int32 = 2, 3, 6
    names = b"".join(_field(1, name) for name in ("tokens", "weights", "zero"))
    content = weights.contiguous().view(-1).numpy().data
    tensor = b"".join(_field(1, size) for size in weights.shape) + _field(2, int8) + _field(8, "weights")
    tensor += _head(9, len(content))
    rest = (
        _field(1, names + _field(2, "scores") + _field(4, "MatMulInteger"))
        + _field(2, "screen")
        + _field(5, _field(2, uint8) + _field(8, "zero") + _field(9, bytes([128])))
        + _field(11, value("tokens", uint8, "n", "d"))
        + _field(12, value("scores", int32, "n", "c"))
    )
    tensor = _head(5, len(tensor) + len(content)) + tensor
    graph = _head(7, len(rest) + len(tensor) + len(content))
    # IR version, graph and operator set; the weights, which are large, are copied once
    return b"".join([_field(1, 8), graph, rest, tensor, content, _field(8, _field(2, 13))])


def _field(number: int, value: int | str | bytes) -> bytes:
    """One field of a protocol buffer: a whole number, or bytes with their length."""
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    data = value.encode() if isinstance(value, str) else value
    return _head(number, len(data)) + data


def _head(number: int, length: int) -> bytes:
    """What stands before bytes of that length."""
    return _varint(number << 3 | 2) + _varint(length)


def _varint(value: int) -> bytes:
    """A whole number, seven bits a byte.

    Examples
    --------
    >>> _varint(300).hex()
    'ac02'
    """
    low, high = value & 127, value >> 7
    return bytes([low | 128]) + _varint(high) if high else bytes([low])
