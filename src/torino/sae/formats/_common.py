"""Shared code of the SAE file formats: checkpoint files and the parts of an SAE."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from torino.core.checksum import damaged_file, verify_safetensors, verify_zip
from torino.core.errors import BadFile, PickledObject, TorinoError, pickled_object
from torino.core.filetype import explain, identify
from torino.core.io import hash_tensors, read_checkpoint, read_json, read_json_line, read_rows, read_safetensors
from torino.core.tokens import FLOATS
from torino.core.verified import VerifiedFiles
from torino.sae.card import SAECard
from torino.sae.joint import JointSAE, JointStatistics
from torino.sae.model import SAE, Kind, Normalize
from torino.sae.weights import validate_k

CHECKPOINTS = (".pt", ".pth")
SUFFIXES = (".safetensors", *CHECKPOINTS)
GATED = frozenset({"r_mag", "gate_bias", "mag_bias", "b_gate", "b_mag"})
ACCEPTED = (
    "ReLU, TopK, BatchTopK, Matryoshka and JumpReLU SAEs in the layout of torino, dictionary_learning, SAELens, "
    "sparsify, saev, Prisma, overcomplete or Qwen-Scope"
)
MAX_FLOAT = sys.float_info.max
THRESHOLDED = ("batchtopk", "matryoshka", "jumprelu")
CONVERT = {  # how to convert files in which a library pickles its objects
    "vit_prisma": (
        "In an environment you trust, load it with Prisma as sae, then run torch.save(sae.state_dict(), 'weights.pt') "
        "and sae.cfg.save_config('config.json') in one folder."
    ),
    "overcomplete": (
        "In an environment you trust, load it with overcomplete as sae, then run "
        "torch.save(sae.eval().state_dict(), 'sae.pt')."
    ),
}
DIGEST = "weights_sha256"
"""Field of the header and the card of the torino layout: the hash of the tensors."""


class TensorNames(NamedTuple):
    """Names of the four tensors in a layout, and which matrices are stored transposed, not as (C, D)."""

    W_enc: str = "W_enc"
    b_enc: str = "b_enc"
    W_dec: str = "W_dec"
    b_dec: str = "b_dec"
    transposed_enc: bool = False
    transposed_dec: bool = False


class CheckpointFile:
    """A file of named tensors and the JSON files in its folder; tensors are checked when they are read.

    The content decides how it is read, not the suffix: a safetensors file tensor by tensor, a torch checkpoint at
    once. ``json_header`` is the line of JSON with which files of saev begin.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header: dict[str, str] = {}
        self.json_header: dict[str, Any] | None = None
        self._values: dict[str, Any] | None = None
        if path.suffix not in SUFFIXES:
            raise BadFile(
                f"Cannot read an SAE from {path}: the suffix is {path.suffix!r}. Accepted: {', '.join(SUFFIXES)}. Save "
                "the tensors as safetensors, or as a state dict with torch.save."
            )
        kind = identify(path)
        self.is_checkpoint = kind != "safetensors"
        if kind == "safetensors":
            names: list[str] = []

            def collect_name(name: str) -> bool:
                names.append(name)
                return False

            _, self.header = read_safetensors(path, collect_name)
            self.keys = frozenset(names)
            return
        start = 0
        if kind == "json header":
            self.json_header, start = read_json_line(path)
        elif kind != "torch":
            raise BadFile(f"{path} was not loaded: {explain(kind)}")
        try:
            self._values = read_checkpoint(path, start)
        except PickledObject as error:
            raise pickled_object(path, error.name, CONVERT.get(error.name.split(".")[0], "")) from error
        self.keys = frozenset(str(name) for name in self._values)

    def verify(self) -> None:
        """Raise :class:`BadFile` if the file has a checksum that is wrong; a large file is read only once for this.

        Files of the torino layout have one, as have torch checkpoints and all files that torino exported.
        """
        verified = VerifiedFiles(self.path.parent)
        verified.check(self.path, self._verify)
        verified.save()

    def _verify(self) -> None:
        correct = (verify_safetensors if self.path.suffix == ".safetensors" else verify_zip)(self.path)
        if correct is None and DIGEST in self.header:  # files of earlier versions have only this
            correct = hash_tensors(read_safetensors(self.path)[0]) == self.header[DIGEST]
        if correct is False:
            raise damaged_file(self.path)

    def has(self, name: str) -> bool:
        """Return whether the folder of the weights contains a file of this name."""
        return (self.path.parent / name).is_file()

    def json(self, name: str) -> dict[str, Any] | None:
        """Read the JSON object of this name in the folder of the weights; None if there is no such file."""
        return read_json(self.path.parent / name) if self.has(name) else None

    def error(self, name: str, problem: str) -> BadFile:
        """Build the error for a tensor that cannot be used."""
        return BadFile(
            f"{name!r} in {self.path} {problem} The file is damaged or has an unknown layout: download it again."
        )

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of a tensor of a torch checkpoint without checking its values; None if there is none."""
        value = (self._values or {}).get(name)
        return tuple(value.shape) if isinstance(value, Tensor) else None

    def tensor(self, name: str) -> Tensor:
        """Return a finite floating-point tensor as float32."""
        value = self._read(name)
        if not isinstance(value, Tensor) or value.dtype not in FLOATS:
            actual = str(value.dtype) if isinstance(value, Tensor) else type(value).__name__
            raise self.error(name, f"is {actual}, not a floating-point tensor.")
        self._check_stored(name, value)
        if not bool(torch.isfinite(value).all()):
            raise self.error(name, "contains NaN or infinite values.")
        return value.float()

    def _check_stored(self, name: str, value: Tensor) -> None:
        """Refuse a tensor whose values are not all in the file; one of stride 0 takes its whole size when copied."""
        if value.layout != torch.strided or value.is_meta:
            raise self.error(name, f"is a {'meta' if value.is_meta else 'sparse'} tensor, not a dense one.")
        if value.nbytes > value.untyped_storage().nbytes():
            raise self.error(name, f"has shape {tuple(value.shape)}, but the file has fewer values.")

    def check_finite(self, name: str) -> None:
        """Refuse a tensor with NaN or infinite values; it is read in parts and not kept."""
        if self._values is not None:
            self.tensor(name)
            return
        for part in read_rows(self.path, name):
            if part.is_floating_point() and not bool(torch.isfinite(part).all()):
                raise self.error(name, "contains NaN or infinite values.")

    def tensor_of_shape(self, name: str, shape: tuple[int, ...], reference: str) -> Tensor:
        """Return a tensor whose shape must match that of the tensor ``reference``."""
        value = self.tensor(name)
        if tuple(value.shape) != shape:
            raise self.error(name, f"has shape {tuple(value.shape)}, but {reference!r} requires {shape}.")
        return value

    def number(self, name: str) -> float | int | None:
        """Return a single finite number, or None if there is none of this name."""
        value = self._read(name) if name in self.keys else None
        if isinstance(value, Tensor):
            if value.numel() != 1 or value.is_meta:
                raise self.error(name, f"has shape {tuple(value.shape)}, not a single number.")
            value = value.item()
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not -MAX_FLOAT <= value <= MAX_FLOAT:
            raise self.error(name, f"is {shorten(value)}, not a finite number.")
        return value

    def threshold(self, latents: int) -> Tensor | None:
        """Return the threshold, one number or one per latent; None if there is none."""
        if "threshold" not in self.keys:
            return None
        value = self.tensor("threshold")
        if value.numel() == 1:
            return value.reshape(())
        if tuple(value.shape) != (latents,):
            raise self.error("threshold", f"has shape {tuple(value.shape)}, not one number or {latents} of them.")
        return value

    def integers(self, name: str) -> tuple[int, ...] | None:
        """Return a list of integers, or None if there is no tensor of this name."""
        if name not in self.keys:
            return None
        value = self._read(name)
        if isinstance(value, Tensor):
            self._check_stored(name, value)
            value = value.tolist()
        return check_integers(value, name, self.path)

    def parts(self, names: TensorNames, kind: Kind, decoder: bool) -> SAEParts:
        """Read the four tensors, as (C, D), and check their shapes; ``W_dec`` only if ``decoder``."""
        W_enc = self.tensor(names.W_enc)
        if W_enc.ndim != 2 or 0 in W_enc.shape:
            raise self.error(names.W_enc, f"has shape {tuple(W_enc.shape)}, not that of a matrix.")
        W_enc = W_enc.T if names.transposed_enc else W_enc
        latents, width = W_enc.shape
        b_enc = self.tensor_of_shape(names.b_enc, (latents,), names.W_enc)
        b_dec = self.tensor_of_shape(names.b_dec, (width,), names.W_enc)
        W_dec = None
        shape = (width, latents) if names.transposed_dec else (latents, width)
        if decoder:
            W_dec = self.tensor_of_shape(names.W_dec, shape, names.W_enc)
            W_dec = W_dec.T if names.transposed_dec else W_dec
        elif names.W_dec in self.keys:  # a damaged file is refused, whether its decoder is used or not
            self.check_finite(names.W_dec)
        return SAEParts(W_enc, b_enc, W_dec, b_dec, kind)

    def _read(self, name: str) -> Any:
        if name not in self.keys:
            raise BadFile(
                f"{self.path} has no {name!r}; it has {', '.join(sorted(self.keys)[:12])}. "
                "The file is incomplete: download it again."
            )
        if self._values is not None:
            return self._values[name]
        return read_safetensors(self.path, lambda other: other == name)[0][name]


@dataclass
class SAEParts:
    """Mutable tensors and settings of an SAE before it is built; matrices are (C, D).

    ``kind`` is None if the file does not define it. ``advice`` tells what to do if the file lacks a setting.
    ``inclusive`` is for libraries that keep latents equal to the threshold; torino keeps those above it.
    """

    W_enc: Tensor
    b_enc: Tensor
    W_dec: Tensor | None
    b_dec: Tensor
    kind: Kind | None
    k: int | None = None
    threshold: Tensor | float | None = None
    groups: tuple[int, ...] | None = None
    center: bool = True
    normalize: Normalize = "none"
    card: SAECard = field(default_factory=SAECard)
    advice: str = ""
    inclusive: bool = False
    joint: JointStatistics | None = None

    @classmethod
    def of(cls, sae: SAE) -> SAEParts:
        """Return the parts of an SAE, on the CPU."""
        threshold = None if sae.threshold is None else sae.threshold.cpu()
        W_enc, W_dec = sae.W_enc.cpu(), None if sae.W_dec is None else sae.W_dec.cpu()
        if W_dec is not None and W_dec.data_ptr() == W_enc.data_ptr():
            W_dec = W_dec.clone()  # safetensors rejects tied weights
        tensors = (W_enc, sae.b_enc.cpu(), W_dec, sae.b_dec.cpu())
        return cls(*tensors, sae.kind, sae.k, threshold, sae.groups, sae.center, sae.normalize, sae.card)

    def build(self, path: Path, kind: Kind | None = None, k: int | None = None, threshold: float | None = None) -> SAE:
        """Create the SAE; ``kind``, ``k`` and ``threshold`` override those of the file."""
        options = {name: getattr(self, name) for name in ("k", "threshold", "groups", "center", "normalize", "card")}
        given = {"k": validate_k(k, len(self.W_enc)), "threshold": threshold}
        options |= {name: value for name, value in given.items() if value is not None}
        kind, tensors = kind or self.kind, (self.W_enc, self.b_enc, self.W_dec, self.b_dec)
        if kind is None:
            raise BadFile(f"{path} does not define the kind of the SAE. {self.advice}")
        if self.inclusive and options["threshold"] is not None:
            value = torch.as_tensor(options["threshold"], dtype=torch.float32)
            options["threshold"] = torch.nextafter(value, torch.zeros_like(value))
        if kind == "relu" and threshold is None:
            options["threshold"] = None  # a relu SAE has none, even if the file does
        advice = f" {self.advice}" if self.advice and kind == "topk" and options["k"] is None else ""
        try:
            sae = SAE(*tensors, kind=kind, **options)
            return sae if self.joint is None else JointSAE.of(sae, self.joint)
        except TorinoError as error:
            raise BadFile(f"{path} is not a valid SAE: {error}{advice}") from error

    def set_center(self, center: bool) -> SAEParts:
        """Set ``center`` and adjust the encoder bias so that no latent changes."""
        if center != self.center:
            shift = self.W_enc @ self.b_dec
            self.b_enc = self.b_enc + (shift if center else -shift)
            self.center = center
        return self

    def decoder_norms(self) -> Tensor:
        """Return the norm of each latent's decoder row."""
        if self.W_dec is None:
            raise BadFile("The decoder is needed to fold its norms, but was not read.")
        return self.W_dec.norm(dim=1)

    def fold_decoder_norms(self) -> SAEParts:
        """Normalize the decoder rows and multiply the latents by their norms; the threshold is not changed."""
        norms = self.decoder_norms()
        assert self.W_dec is not None
        # a row of zeros stays zero; 0/0 would turn every decoded token into NaN
        self.W_dec = self.W_dec / norms.clamp(min=torch.finfo(norms.dtype).tiny)[:, None]
        self.W_enc, self.b_enc = self.W_enc * norms[:, None], self.b_enc * norms
        return self


def as_integer(value: object) -> int | None:
    """Return a number without fraction as int, anything else as None, also a number that is not below 2**63."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1 << 63:
        return None
    return int(value) if value == value // 1 else None


def check_integers(value: object, name: str, where: object) -> tuple[int, ...]:
    """Return a list of integers as a tuple; raise :class:`BadFile` for anything else."""
    numbers = [as_integer(item) for item in cast(list[object], value)] if isinstance(value, list | tuple) else [None]
    if None in numbers:
        raise BadFile(f"{where} has {name} = {shorten(value)}. Accepted: a list of integers. Download it again.")
    return cast(tuple[int, ...], tuple(numbers))


def check_k(value: object, latents: int, where: object, *, average: bool = False) -> int | None:
    """Return k, None if it is missing; raise :class:`BadFile` unless it is an integer from 1 to ``latents``.

    ``average``: k is the average of a batch and may have a fraction, which is rounded.
    """
    if value is None:
        return None
    k = max(1, round(value)) if average and isinstance(value, float) and 0 < value < latents else as_integer(value)
    if k is None or not 1 <= k <= latents:
        raise BadFile(
            f"{where} has k = {shorten(value)}. Accepted: an integer from 1 to {latents}, the number of latents. "
            "The file is damaged: download it again, or correct it."
        )
    return k


def check_flag(values: Mapping[str, Any], name: str, default: bool, where: object) -> bool:
    """Return a setting that is true or false; raise :class:`BadFile` for anything else."""
    value = values.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise BadFile(
            f"{where} has {name} = {shorten(value)}. Accepted: true or false. Correct it or download it again."
        )
    return value


def check_size(value: object, expected: int, name: str, where: object) -> None:
    """Raise :class:`BadFile` if a size in a config is not that of the weights; a missing size is not checked."""
    if value is not None and (isinstance(value, bool) or value != expected):
        raise BadFile(
            f"{where} has {name} = {shorten(value)}, but the weights have {expected}. The two do not belong together: "
            "download both again."
        )


def shorten(value: object) -> str:
    """Return a value of a file for an error message, in at most 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:79]}…"


def get_section(values: Mapping[str, Any] | None, name: str) -> dict[str, Any]:
    """Return a JSON object inside another one; an empty one if it is missing or not an object."""
    value = (values or {}).get(name)
    return cast(dict[str, Any], value) if isinstance(value, dict) else {}


def make_card(*sources: Mapping[str, Any]) -> SAECard:
    """Create a card from fields of the right type; later sources override earlier ones."""
    values: dict[str, Any] = {}
    for source in sources:
        for item in fields(SAECard):
            value = source.get(item.name)
            if item.name == "block":
                value = as_integer(value)
            if value is not None and value != "" and isinstance(value, str | int):
                values[item.name] = value if item.name == "block" else str(value)
    return SAECard(**values)


def parse_block(site: str, layer: int | None) -> int | None:
    """Return the block whose output is at a hook site, or None if the site is not the output of a block.

    Examples
    --------
    >>> parse_block("blocks.22.hook_resid_post", None), parse_block("blocks.23.hook_resid_pre", None)
    (22, 22)
    >>> parse_block("blocks.22.hook_mlp_out", 22) is None
    True
    """
    match = re.search(r"(?:blocks?|layers?|h)[._](\d{1,9})(?!\d)", site)
    layer = int(match[1]) if match else layer
    if layer is None or "resid_mid" in site:
        return None
    if "resid_pre" in site:  # the input of a block is the output of the previous one
        layer -= 1
    at_output = not site or "resid" in site or re.search(r"(?:blocks?|layers?|h)[._]\d+$", site)
    return layer if at_output and layer >= 0 else None
