"""SAE: a sparse autoencoder at inference, and the card that says where it comes from."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from torino.core.concepts import Concepts, Rank
from torino.core.errors import BadFile, BadParameter, SAEMismatch
from torino.core.tokens import Origin, check_matrix
from torino.core.topk.exact import SILENT, exact_topk, largest_row_norm, stable_topk
from torino.core.topk.prefilter import PrefilterCache, Screen, SearchStats, forget, prefiltered_topk

Kind = Literal["relu", "topk", "batchtopk", "matryoshka", "jumprelu"]
Normalize = Literal["none", "layer_norm", "constant_norm"]


@dataclass(frozen=True)
class SAECard:
    """What an SAE was trained on. Fields left empty are unknown and never cause a refusal.

    Attributes
    ----------
    name : str
        A short name for people.
    encoder, block : str, int or None
        Vision encoder and zero-based block whose output the SAE reads.
    token_kind : str
        ``"cls"``, ``"patch"``, or a longer description such as ``"2 random tokens per image"``.
    data, license, notes : str
        Training data, licence of the weights, anything else worth knowing.
    """

    name: str = ""
    encoder: str = ""
    block: int | None = None
    token_kind: str = ""
    data: str = ""
    license: str = ""
    notes: str = ""

    @classmethod
    def of(cls, values: dict[str, Any]) -> SAECard:
        """Take the known fields out of a JSON object."""
        known = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in known})


class SAE(nn.Module):
    """A sparse autoencoder, frozen, in float32 whatever the precision of the model beside it.

    With ``v`` the token after the normalisation and centring that the SAE was trained with,

    =============  ==========================================================================
    kind           latents
    =============  ==========================================================================
    ``relu``       z = max(0, W v + b)
    ``topk``       the ``k`` largest of max(0, W v + b), the rest 0 (ties to the lowest index)
    others         max(0, W v + b) where it exceeds ``threshold``, else 0
    =============  ==========================================================================

    ``batchtopk`` and ``matryoshka`` have one learned threshold, ``jumprelu`` one per latent. The encoder bias
    ``b`` is separate from the decoder bias, as in the public SAEs; the paper's formula is the case b = 0.

    Parameters
    ----------
    W_enc, W_dec : Tensor of shape (C, D)
        One row per latent. ``W_dec`` may be left out where only concepts are wanted.
    b_enc : Tensor of shape (C,), optional
    b_dec : Tensor of shape (D,), optional
        Added on decoding, and subtracted from the token before encoding if ``center``.
    kind, k, threshold
        The activation, see above. A negative threshold means "never estimated": then every positive
        activation counts, as in the library that writes it, and a warning says so.
    groups : sequence of int, optional
        Sizes of the nested Matryoshka groups, in order; they add up to C.
    normalize : {"none", "layer_norm", "constant_norm"}
        Applied to each token before centring; decoding undoes it.
    card : SAECard

    Attributes
    ----------
    names : dict of int to str
        Words for latents, where ``torino concepts`` has found some: read from ``names.json`` beside the weights.
    screen : {"auto", "int8", "off"}
        How :meth:`top` searches where it is not told: by an int8 screen where that is faster, always, or never. The
        answer is the same.
    home : Path or None
        The folder it was read from, where whole numbers for the screen are kept.
    """

    W_enc: Tensor
    b_enc: Tensor
    b_dec: Tensor
    W_dec: Tensor | None
    threshold: Tensor | None

    def __init__(
        self,
        W_enc: Tensor,
        b_enc: Tensor | None = None,
        W_dec: Tensor | None = None,
        b_dec: Tensor | None = None,
        *,
        kind: Kind = "relu",
        k: int | None = None,
        threshold: float | Tensor | None = None,
        groups: tuple[int, ...] | list[int] | None = None,
        center: bool = True,
        normalize: Normalize = "none",
        card: SAECard | None = None,
    ) -> None:
        super().__init__()
        check_matrix(W_enc, "W_enc")
        latents, width = W_enc.shape
        self.kind: Kind = _one_of("kind", kind, Kind)
        self.normalize: Normalize = _one_of("normalize", normalize, Normalize)
        self.k, self.center, self.card = k, center, card or SAECard()
        self.names: dict[int, str] = {}
        self.groups = tuple(int(size) for size in groups) if groups is not None else (latents,)
        if sum(self.groups) != latents or min(self.groups) < 1:
            raise BadParameter(f"groups must be positive and add up to the {latents} latents, got {self.groups}.")
        if kind == "topk" and (k is None or not 1 <= k <= latents):
            raise BadParameter(f"A topk SAE needs k between 1 and its {latents} latents, got {k}.")
        self.register_buffer("W_enc", _frozen(W_enc))
        self.register_buffer("b_enc", _vector("b_enc", b_enc, latents, W_enc))
        self.register_buffer("b_dec", _vector("b_dec", b_dec, width, W_enc))
        if W_dec is not None and W_dec.shape != W_enc.shape:
            raise BadParameter(f"W_dec must have the shape of W_enc, {tuple(W_enc.shape)}, got {tuple(W_dec.shape)}.")
        if W_dec is not None:
            check_matrix(W_dec, "W_dec")
        self.register_buffer("W_dec", None if W_dec is None else _frozen(W_dec))
        self.register_buffer("threshold", self._read_threshold(threshold))
        self._norm: tuple[weakref.ref[Tensor], tuple[int, int, float], float] | None = None
        self.screen: Screen = "auto"
        self.home: Path | None = None
        self._keeper = PrefilterCache()

    def __getstate__(self) -> dict[str, Any]:
        """What is worth keeping: a note about these very weights means nothing for a copy of them."""
        return {**self.__dict__, "_norm": None}

    def _read_threshold(self, threshold: float | Tensor | None) -> Tensor | None:
        if self.kind == "relu" and threshold is not None:
            raise BadParameter(
                "A relu SAE has no threshold, and one was given. Leave it out, or say kind='jumprelu', whose latents "
                "are 0 up to their threshold."
            )
        if self.kind in ("relu", "topk"):
            return None  # files of topk SAEs carry one for another way to encode, which is batchtopk
        value = torch.as_tensor(-1.0 if threshold is None else threshold).detach().float().to(self.W_enc.device)
        if value.numel() == 1:
            value = value.reshape(())
        elif value.shape != (self.latents,):
            raise BadParameter(f"threshold must be one number or {self.latents} of them, got {tuple(value.shape)}.")
        if not bool(torch.isfinite(value).all()):
            raise BadFile("threshold holds NaN or infinite values; the checkpoint is damaged.")
        if value.ndim == 0 and float(value) < 0:
            warnings.warn(
                f"The threshold of this {self.kind} SAE was never estimated ({float(value):g}): every positive "
                "activation counts as active. Give threshold=..., or an SAE saved at the end of its training.",
                stacklevel=4,
            )
            return None
        return value

    @property
    def width(self) -> int:
        """Width D of the tokens it reads."""
        return self.W_enc.shape[1]

    @property
    def latents(self) -> int:
        """Number C of latents."""
        return self.W_enc.shape[0]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> SAE:
        """Move with the model but stay in float32: near-ties decide groups, and half precision would flip them."""

        def keep(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)  # not rounded and widened again

        return super()._apply(keep, recurse)

    def extra_repr(self) -> str:
        """Name, kind and sizes, for ``print``."""
        parts = [self.card.name, self.kind, f"{self.width} wide, {self.latents} latents"]
        parts += [f"k={self.k}"] if self.k else []
        parts += [f"groups={self.groups}"] if len(self.groups) > 1 else []
        return ", ".join(part for part in parts if part)

    # ------------------------------------------------------------------ the four verbs

    def encode(self, x: Tensor) -> Tensor:
        """Return all latents, shape (..., C). For the exact_topk few, :meth:`top` needs far less memory."""
        with torch.autocast(x.device.type, enabled=False):  # near-ties decide what is active
            v, _, _ = self._enter(x)
            z = torch.relu(v @ self.W_enc.T + self.b_enc)
        if self.kind == "topk":
            assert self.k is not None
            index, value = stable_topk(z, self.k)
            return torch.zeros_like(z).scatter(-1, index, value)
        return z if self.threshold is None else z * (z > self.threshold)

    def decode(self, z: Tensor) -> Tensor:
        """Return the token that latents ``z`` of shape (..., C) stand for, in the space after ``normalize``."""
        with torch.autocast(z.device.type, enabled=False):
            return z @ self._decoder() + self.b_dec

    def along(self, x: Tensor, latent: int) -> Tensor:
        """How far tokens (..., D) go along the decoder's direction of a latent, in the space after ``normalize``."""
        with torch.autocast(x.device.type, enabled=False):
            v, _, _ = self._enter(x)
            return (v if self.center else v - self.b_dec) @ self._decoder()[latent]

    def reconstruct(self, x: Tensor) -> Tensor:
        """Encode, decode and undo the normalisation: the SAE's picture of ``x``, shape (..., D)."""
        _, shift, scale = self._enter(x)
        return self.decode(self.encode(x)) * scale + shift

    @torch.no_grad()
    def top(
        self,
        x: Tensor,
        k: int,
        *,
        rank: Rank = "activation",
        screen: Screen | None = None,
        chunk: int | None = None,
        told: list[SearchStats] | None = None,
    ) -> Concepts:
        """Return the ``k`` exact_topk latents of each token and its peak score, exactly, in little memory.

        Parameters
        ----------
        x : Tensor of shape (N, D)
        k : int
            From 1 to C. Slots beyond the active latents of a token are silent (index −1).
        rank : {"activation", "pre-threshold"}
            What is ranked: the latents as :meth:`encode` gives them, or max(0, W v + b) before the threshold
            (or the SAE's own top-k) silences any of it.
        screen : {"auto", "int8", "off"}, optional
            Whether an int8 product screens the latents first; changes speed and memory, never the answer. Without it,
            :attr:`screen`. "int8" and "auto" need ``pip install torino[fast]`` on a CPU; see ``docs/fast.md``.
        chunk : int, optional
            Latents scored at a time; changes memory and speed, never the answer.
        told : list of SearchStats, optional
            Takes what the screen left of each token, for those who measure; stays empty where none was taken.
        """
        _one_of("rank", rank, Rank)
        how: Screen = _one_of("screen", self.screen if screen is None else screen, Screen)
        if not 1 <= k <= self.latents:
            raise BadParameter(f"k must be between 1 and the SAE's {self.latents} latents, got {k}.")
        if chunk is not None and chunk < 1:
            raise BadParameter(f"chunk must be at least 1 latent, got {chunk}.")
        check_matrix(x, "tokens")
        gated = rank == "activation"
        keep = min(k, self.k) if gated and self.kind == "topk" and self.k else k
        floor = self.threshold if gated and self.threshold is not None else self.W_enc.new_zeros(())
        with torch.autocast(x.device.type, enabled=False):
            v, _, _ = self._enter(x)
            encoder = (v, self.W_enc, self.b_enc, keep, floor.clamp(min=0))
            ready = self._keeper.ready(self.W_enc, self.b_enc, self._state(), how, len(v), self.home)
            if ready is not None:
                indices, values = prefiltered_topk(*encoder, *ready, chunk=chunk, told=told)
            else:
                indices, values = exact_topk(*encoder, largest_norm=self._largest_norm(), chunk=chunk)
        if keep < k:
            indices = nn.functional.pad(indices, (0, k - keep), value=SILENT)
            values = nn.functional.pad(values, (0, k - keep))
        return Concepts(indices, values, values[:, 0])

    def _enter(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Normalise and centre tokens; also the shift and scale that undo the normalisation."""
        self.check_origin(Origin(), x.shape[-1])
        v = x.float()
        shift, scale = v.new_zeros(()), v.new_ones(())
        if self.normalize == "layer_norm":
            shift = v.mean(-1, keepdim=True)
            scale = (v - shift).std(-1, keepdim=True)
            v = (v - shift) / (scale + 1e-5)
        elif self.normalize == "constant_norm":
            scale = v.norm(dim=-1, keepdim=True) / self.width**0.5
            v = v / scale.clamp(min=torch.finfo(torch.float32).tiny)
        return (v - self.b_dec if self.center else v), shift, scale

    def _state(self) -> tuple[int, int, float]:
        """Equal to what it was before as long as the weights are.

        PyTorch counts changes, but not those through ``.data``, through a numpy array that shares the memory, or in
        inference mode. Of these the sum below sees what touches one of some 16 rows; a look at all would read, at each
        call, what the screen is there to leave unread.
        """
        weight = self.W_enc
        sample = weight[:: max(1, len(weight) // 16)].reshape(-1).double()
        place = torch.arange(1, len(sample) + 1, dtype=torch.float64, device=weight.device)
        seal = float(sample @ (place * 0.6180339887498949 % 1 + 0.5))  # tells signs and places apart
        return -1 if weight.is_inference() else weight._version, weight.data_ptr(), seal

    def _largest_norm(self) -> float:
        """The largest norm of an encoder row, worked out anew only when the weights have changed."""
        weight, key = self.W_enc, self._state()
        if self._norm is None or self._norm[0]() is not weight or self._norm[1] != key:
            self._norm = (weakref.ref(weight), key, largest_row_norm(weight))
        return self._norm[2]

    def _decoder(self) -> Tensor:
        if self.W_dec is None:
            raise BadParameter("This SAE was loaded without its decoder. Load it with decoder=True to decode.")
        return self.W_dec

    # ------------------------------------------------------------------ choosing and checking

    def first(self, levels: int) -> SAE:
        """Keep the first ``levels`` Matryoshka groups: a smaller, coarser dictionary that shares this memory."""
        if not 1 <= levels <= len(self.groups):
            raise BadParameter(
                f"levels must be between 1 and {len(self.groups)}, the nested groups of this SAE {self.groups}; "
                f"got {levels}."
            )
        groups = self.groups[:levels]
        size = sum(groups)
        threshold = self.threshold
        if threshold is not None and threshold.ndim == 1:
            threshold = threshold[:size]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a missing threshold was reported when this SAE was made
            smaller = SAE(
                self.W_enc[:size],
                self.b_enc[:size],
                None if self.W_dec is None else self.W_dec[:size],
                self.b_dec,
                kind=self.kind,
                k=min(self.k, size) if self.k else self.k,
                threshold=threshold,
                groups=groups,
                center=self.center,
                normalize=self.normalize,
                card=self.card,
            )
        smaller.names = {latent: name for latent, name in self.names.items() if latent < size}
        smaller.screen, smaller.home = self.screen, self.home
        return smaller

    def check_origin(self, origin: Origin, width: int) -> None:
        """Raise :class:`SAEMismatch` unless this SAE fits tokens of that origin and width.

        Names are compared without their publisher (``openai/``) and case; what either side leaves unknown fits.
        """
        wrong_width = width != self.width
        ours, theirs = (name.rsplit("/", 1)[-1].lower() for name in (self.card.encoder, origin.encoder))
        wrong_encoder = bool(ours) and bool(theirs) and ours != theirs
        wrong_block = None not in (self.card.block, origin.block) and self.card.block != origin.block
        if wrong_width or wrong_encoder or wrong_block:
            mine = Origin(self.card.encoder, self.card.block)
            raise SAEMismatch(
                f"This SAE reads {self.width}-wide tokens of {mine}; these are {width}-wide tokens of {origin}. "
                "Pick an SAE trained on that encoder and block, or train one."
            )

    # ------------------------------------------------------------------ on disk

    @classmethod
    def load(
        cls,
        source: str | Path,
        *,
        levels: int | None = None,
        kind: Kind | None = None,
        decoder: bool = True,
        device: str | torch.device = "cpu",
    ) -> SAE:
        """Read an SAE from a folder, a file, or a hub repository, in any layout that torino knows.

        Parameters
        ----------
        source : str or Path
            A local folder or file, or ``owner/repository`` on the hub, optionally ``owner/repository/sub/folder``.
            Layouts: torino's own, dictionary_learning, SAELens, sparsify; told apart by their keys.
        levels : int, optional
            Keep only the first Matryoshka groups, see :meth:`first`.
        kind : str, optional
            Overrules the kind that the file tells, or does not tell (a dictionary_learning file without its config).
        decoder : bool
            Without it, half of the memory: enough for concepts, not for decoding.
        """
        from torino.sae.formats import read_sae

        sae = read_sae(source, kind=kind, decoder=decoder)
        sae = sae.first(levels) if levels is not None else sae
        return sae.to(device)

    def save(self, folder: str | Path, *, dtype: torch.dtype = torch.float32) -> Path:
        """Write torino's own layout, ``sae.safetensors`` and ``card.json`` (and ``names.json``), into ``folder``.

        ``dtype`` is that of the two matrices on disk; biases and threshold stay float32.
        """
        from torino.sae.formats import write_sae

        written = write_sae(self, folder, "torino", dtype=dtype)
        forget(written)  # of another one that was here
        return written

    def export(self, folder: str | Path, layout: str) -> Path:
        """Write another library's layout: ``"dictionary_learning"`` or ``"saelens"``."""
        from torino.sae.formats import write_sae

        return write_sae(self, folder, layout)

    def described(self, **changes: Any) -> SAE:
        """Change fields of the card in place and return the SAE."""
        self.card = replace(self.card, **changes)
        return self

    def facts(self) -> dict[str, Any]:
        """Everything a card file says about this SAE."""
        return {
            "kind": self.kind,
            "width": self.width,
            "latents": self.latents,
            "k": self.k,
            "groups": list(self.groups),
            "center": self.center,
            "normalize": self.normalize,
            **asdict(self.card),
        }


def _frozen(value: Tensor) -> Tensor:
    return value.detach().float().contiguous()


def _vector(name: str, value: Tensor | None, size: int, like: Tensor) -> Tensor:
    if value is None:
        return torch.zeros(size, device=like.device)
    if value.shape != (size,):
        raise BadParameter(f"{name} must have shape ({size},), got {tuple(value.shape)}.")
    if not bool(torch.isfinite(value).all()):
        raise BadFile(f"{name} holds NaN or infinite values; the checkpoint is damaged.")
    return _frozen(value)


def _one_of(name: str, value: Any, choices: Any) -> Any:
    if value not in get_args(choices):
        raise BadParameter(f"{name} must be one of {', '.join(map(repr, get_args(choices)))}, got {value!r}.")
    return value
