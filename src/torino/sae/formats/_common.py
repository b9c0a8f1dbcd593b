"""One SAE on disk before its layout is known, and the parts of one once it is."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from torino.core.errors import BadFile, TorinoError
from torino.core.io import read_checkpoint, read_json, read_safetensors
from torino.core.tokens import FLOATS
from torino.sae.model import SAE, Kind, Normalize, SAECard

CHECKPOINTS = (".pt", ".pth")
ENDINGS = (".safetensors", *CHECKPOINTS)
GATED = frozenset({"r_mag", "gate_bias", "mag_bias", "b_gate", "b_mag"})
ACCEPTED = (
    "ReLU, TopK, BatchTopK, Matryoshka and JumpReLU SAEs in the layout of torino, dictionary_learning, SAELens or "
    "sparsify"
)
THRESHOLDED = ("batchtopk", "matryoshka", "jumprelu")


class Names(NamedTuple):
    """What a layout calls the four tensors, and which matrices it stores the other way round than (C, D)."""

    W_enc: str = "W_enc"
    b_enc: str = "b_enc"
    W_dec: str = "W_dec"
    b_dec: str = "b_dec"
    flip_enc: bool = False
    flip_dec: bool = False


class Stored:
    """A file of named tensors and the JSON next to it; tensors are checked as they are taken.

    A safetensors file is read tensor by tensor, a torch checkpoint whole.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header: dict[str, str] = {}
        self._values: dict[str, Any] | None = None
        if path.suffix == ".safetensors":
            names: list[str] = []

            def note(name: str) -> bool:
                names.append(name)
                return False

            _, self.header = read_safetensors(path, note)
            self.keys = frozenset(names)
        elif path.suffix in CHECKPOINTS:
            self._values = read_checkpoint(path)
            self.keys = frozenset(str(name) for name in self._values)
        else:
            raise BadFile(f"Cannot read an SAE from {path}: its ending is {path.suffix!r}. Accepted: {_any(ENDINGS)}.")

    def has(self, name: str) -> bool:
        """Tell whether a file of this name lies next to the weights."""
        return (self.path.parent / name).is_file()

    def json(self, name: str) -> dict[str, Any] | None:
        """Read the JSON object of this name next to the weights, if it is there."""
        return read_json(self.path.parent / name) if self.has(name) else None

    def wrong(self, name: str, problem: str) -> BadFile:
        """Build the error for a tensor that cannot be used."""
        return BadFile(f"{name!r} in {self.path} {problem} The file is damaged or of an unknown layout: fetch it anew.")

    def take(self, name: str) -> Tensor:
        """Return a finite floating-point tensor as float32."""
        value = self._read(name)
        if not isinstance(value, Tensor) or value.dtype not in FLOATS:
            what = str(value.dtype) if isinstance(value, Tensor) else type(value).__name__
            raise self.wrong(name, f"is {what}, not a floating-point tensor.")
        if not bool(torch.isfinite(value).all()):
            raise self.wrong(name, "holds NaN or infinite values.")
        return value.float()

    def shaped(self, name: str, shape: tuple[int, ...], beside: str) -> Tensor:
        """Take a tensor whose shape follows from that of another one."""
        value = self.take(name)
        if tuple(value.shape) != shape:
            raise self.wrong(name, f"has shape {tuple(value.shape)}, but {beside!r} asks for {shape}.")
        return value

    def number(self, name: str) -> float | None:
        """Return a single number, or None if there is none of this name."""
        value = self._read(name) if name in self.keys else None
        if isinstance(value, Tensor):
            if value.numel() != 1:
                raise self.wrong(name, f"has shape {tuple(value.shape)}, not a single number.")
            value = value.item()
        if value is not None and not (isinstance(value, int | float) and isfinite(value)):
            raise self.wrong(name, f"is {value!r}, not a finite number.")
        return None if value is None else float(value)

    def threshold(self, latents: int) -> Tensor | None:
        """Return the threshold, one number or one per latent, or None if there is none."""
        if "threshold" not in self.keys:
            return None
        value = self.take("threshold")
        if value.numel() == 1:
            return value.reshape(())
        if tuple(value.shape) != (latents,):
            raise self.wrong("threshold", f"has shape {tuple(value.shape)}, not one number or {latents} of them.")
        return value

    def integers(self, name: str) -> tuple[int, ...] | None:
        """Return a list of whole numbers, or None if there is none of this name."""
        if name not in self.keys:
            return None
        value = self._read(name)
        return integers(value.tolist() if isinstance(value, Tensor) else value)

    def parts(self, names: Names, kind: Kind, decoder: bool) -> Parts:
        """Take the four tensors, turned to (C, D) and checked against each other; W_dec only if wanted."""
        W_enc = self.take(names.W_enc)
        if W_enc.ndim != 2 or 0 in W_enc.shape:
            raise self.wrong(names.W_enc, f"has shape {tuple(W_enc.shape)}, not that of a matrix.")
        W_enc = W_enc.T if names.flip_enc else W_enc
        latents, width = W_enc.shape
        b_enc = self.shaped(names.b_enc, (latents,), names.W_enc)
        b_dec = self.shaped(names.b_dec, (width,), names.W_enc)
        W_dec = None
        if decoder:
            W_dec = self.shaped(names.W_dec, (width, latents) if names.flip_dec else (latents, width), names.W_enc)
            W_dec = W_dec.T if names.flip_dec else W_dec
        return Parts(W_enc, b_enc, W_dec, b_dec, kind)

    def _read(self, name: str) -> Any:
        if name not in self.keys:
            raise BadFile(
                f"{self.path} has no {name!r}; it has {', '.join(sorted(self.keys)[:12])}. "
                "It is incomplete: fetch the whole file."
            )
        if self._values is not None:
            return self._values[name]
        return read_safetensors(self.path, lambda other: other == name)[0][name]


@dataclass
class Parts:
    """What an SAE is made of, open to change until it is built; matrices are (C, D)."""

    W_enc: Tensor
    b_enc: Tensor
    W_dec: Tensor | None
    b_dec: Tensor
    kind: Kind
    k: int | None = None
    threshold: Tensor | float | None = None
    groups: tuple[int, ...] | None = None
    center: bool = True
    normalize: Normalize = "none"
    card: SAECard = field(default_factory=SAECard)

    @classmethod
    def of(cls, sae: SAE) -> Parts:
        """Take an SAE apart, on the CPU."""
        threshold = None if sae.threshold is None else sae.threshold.cpu()
        W_enc, W_dec = sae.W_enc.cpu(), None if sae.W_dec is None else sae.W_dec.cpu()
        if W_dec is not None and W_dec.data_ptr() == W_enc.data_ptr():
            W_dec = W_dec.clone()  # safetensors refuses tied weights
        tensors = (W_enc, sae.b_enc.cpu(), W_dec, sae.b_dec.cpu())
        return cls(*tensors, sae.kind, sae.k, threshold, sae.groups, sae.center, sae.normalize, sae.card)

    def build(self, path: Path, kind: Kind | None = None) -> SAE:
        """Make the SAE; ``kind`` overrules what the file says."""
        options = {name: getattr(self, name) for name in ("k", "threshold", "groups", "center", "normalize", "card")}
        kind, tensors = kind or self.kind, (self.W_enc, self.b_enc, self.W_dec, self.b_dec)
        if kind == "relu":
            options["threshold"] = None  # asked for without the threshold that its file has
        try:
            return SAE(*tensors, kind=kind, **options)
        except TorinoError as error:
            raise BadFile(f"{path} does not make an SAE: {error}") from error

    def recentre(self, center: bool) -> Parts:
        """Move the decoder bias into or out of the encoder bias, so that ``center`` holds and no latent changes."""
        if center != self.center:
            shift = self.W_enc @ self.b_dec
            self.b_enc = self.b_enc + (shift if center else -shift)
            self.center = center
        return self

    def decoder_norms(self) -> Tensor:
        """Return the norm of each latent's decoder row."""
        if self.W_dec is None:
            raise BadFile("The decoder is needed to fold its norms, and was not read.")
        return self.W_dec.norm(dim=1)

    def fold_decoder_norms(self) -> Parts:
        """Give each decoder row norm 1 and its latent the norm as a factor; the threshold stays as it is."""
        norms = self.decoder_norms()
        assert self.W_dec is not None
        # A row of zeros stays one: its latent writes nothing, and 0/0 would spoil every token.
        self.W_dec = self.W_dec / norms.clamp(min=torch.finfo(norms.dtype).tiny)[:, None]
        self.W_enc, self.b_enc = self.W_enc * norms[:, None], self.b_enc * norms
        return self


def whole(value: object) -> int | None:
    """Return a whole number as int, anything else as None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return int(value) if value == value // 1 else None


def integers(value: object) -> tuple[int, ...] | None:
    """Return a list of whole numbers as a tuple, anything else as None."""
    if not isinstance(value, list | tuple):
        return None
    numbers = [whole(item) for item in cast(list[object], value)]
    return None if None in numbers else cast(tuple[int, ...], tuple(numbers))


def section(values: Mapping[str, Any] | None, name: str) -> dict[str, Any]:
    """Return a JSON object inside another one; an empty one if it is missing or something else."""
    value = (values or {}).get(name)
    return cast(dict[str, Any], value) if isinstance(value, dict) else {}


def card_of(*sources: Mapping[str, Any]) -> SAECard:
    """Make a card of the fields that are there and of the right type; later sources win."""
    values: dict[str, Any] = {}
    for source in sources:
        for item in fields(SAECard):
            value = source.get(item.name)
            if item.name == "block":
                value = whole(value)
            if value is not None and value != "" and isinstance(value, str | int):
                values[item.name] = value if item.name == "block" else str(value)
    return SAECard(**values)


def block_of(site: str, layer: int | None) -> int | None:
    """Return the block whose output a hook site is, or None where it is another place in the model.

    Examples
    --------
    >>> block_of("blocks.22.hook_resid_post", None), block_of("blocks.23.hook_resid_pre", None)
    (22, 22)
    >>> block_of("blocks.22.hook_mlp_out", 22) is None
    True
    """
    found = re.search(r"(?:blocks?|layers?|h)[._](\d+)", site)
    layer = int(found[1]) if found else layer
    if layer is None or "resid_mid" in site:
        return None
    if "resid_pre" in site:  # what enters a block is what the one before it gave
        layer -= 1
    at_output = not site or "resid" in site or re.search(r"(?:blocks?|layers?|h)[._]\d+$", site)
    return layer if at_output and layer >= 0 else None


def _any(names: tuple[str, ...]) -> str:
    return ", ".join(names[:-1]) + " or " + names[-1]
