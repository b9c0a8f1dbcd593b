"""Sparse autoencoder (SAE) for inference."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from torino.core.checks import check_choice, check_fields, check_tensor, check_type, to_integer, to_number
from torino.core.concepts import Concepts, Rank
from torino.core.device import resolve_device
from torino.core.errors import BadFile, BadParameter, BadTokens, SAEMismatch
from torino.core.tokens import Origin, check_matrix
from torino.core.topk.device import device_topk
from torino.core.topk.exact import SILENT, exact_topk, largest_row_norm, stable_topk
from torino.core.topk.half import HalfEncoder, can_use_half, round_encoder, use_half
from torino.core.topk.prefilter import Prefilter, PrefilterCache, SearchStats, delete_cached, prefiltered_topk
from torino.sae.card import SAECard
from torino.sae.weights import check_weights, freeze, to_vector, validate_k

Kind = Literal["relu", "topk", "batchtopk", "matryoshka", "jumprelu"]
Normalize = Literal["none", "layer_norm", "constant_norm"]


class SAE(nn.Module):
    """A frozen sparse autoencoder. It stays in float32 when the surrounding model is cast to another precision.

    With ``v`` the token after the normalization and centering that the SAE was trained with,

    =============  ==========================================================================
    kind           latents
    =============  ==========================================================================
    ``relu``       z = max(0, W v + b)
    ``topk``       the ``k`` largest of max(0, W v + b), the rest 0 (ties to the lowest index)
    others         max(0, W v + b) where it exceeds ``threshold``, else 0
    =============  ==========================================================================

    ``batchtopk`` and ``matryoshka`` have one learned threshold, ``jumprelu`` one per latent. The encoder bias
    ``b`` is separate from the decoder bias, as in published SAEs; the paper's formula is the case b = 0.

    Parameters
    ----------
    W_enc, W_dec : Tensor of shape (C, D)
        One row per latent. ``W_dec`` is needed only for decoding.
    b_enc : Tensor of shape (C,), optional
    b_dec : Tensor of shape (D,), optional
        Added on decoding, and subtracted from the token before encoding if ``center``.
    kind, k, threshold
        The activation, see above. A negative threshold means "never estimated": then every positive activation
        counts, as in the library that writes such files, and a warning is issued.
    groups : sequence of int, optional
        Sizes of the nested Matryoshka groups, in order; their sum is C.
    normalize : {"none", "layer_norm", "constant_norm"}
        Applied to each token before centering; :meth:`reconstruct` reverses it.
    card : SAECard, optional
        What the SAE was trained on.

    Attributes
    ----------
    names : dict of int to str
        Names of latents, as written by ``torino concepts`` to ``names.json`` in the folder of the weights.
    prefilter : {"auto", "int8", "bf16", "off"}
        Default of :meth:`top`: select candidates by the fastest product, by an int8 or bfloat16 product, or by the
        float32 product. The result is the same.
    folder : Path or None
        The folder that the SAE was loaded from; the quantized encoder of the prefilter is cached there.
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
        check_weights("W_enc", W_enc)
        latents, width = W_enc.shape
        self.kind: Kind = check_choice("kind", kind, Kind)
        self.normalize: Normalize = check_choice("normalize", normalize, Normalize)
        check_type("center", center, bool, "True or False")
        check_type("card", card, (SAECard, type(None)), "an SAECard")
        self.k, self.center, self.card = validate_k(k, latents), center, card or SAECard()
        self.names: dict[int, str] = {}
        check_type("groups", groups, (tuple, list, type(None)), "a list of integers")
        self.groups = tuple(to_integer("groups", size) for size in groups) if groups is not None else (latents,)
        if sum(self.groups) != latents or min(self.groups) < 1:
            raise BadParameter(
                f"groups must be positive and add up to {latents}, the number of latents; got {self.groups}."
            )
        if kind == "topk" and k is None:
            raise BadParameter(f"A topk SAE needs k between 1 and {latents}, the number of latents; got None.")
        self.register_buffer("W_enc", freeze(W_enc))
        self.register_buffer("b_enc", to_vector("b_enc", b_enc, latents, W_enc))
        self.register_buffer("b_dec", to_vector("b_dec", b_dec, width, W_enc))
        if W_dec is not None and check_tensor("W_dec", W_dec, BadParameter).shape != W_enc.shape:
            raise BadParameter(f"W_dec must have the shape of W_enc, {tuple(W_enc.shape)}, got {tuple(W_dec.shape)}.")
        if W_dec is not None:
            check_weights("W_dec", W_dec)
        self.register_buffer("W_dec", None if W_dec is None else freeze(W_dec))
        self.register_buffer("threshold", self._check_threshold(threshold))
        self._norm: tuple[weakref.ref[Tensor], tuple[int, int, float], float] | None = None
        self._half: HalfEncoder | None = None
        self.prefilter: Prefilter = "auto"
        self.folder: Path | None = None
        self._prefilter_cache = PrefilterCache()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the cached norm, which refers to the weight tensor of this object."""
        return {**self.__dict__, "_norm": None, "_half": None}

    def _check_threshold(self, threshold: float | Tensor | None) -> Tensor | None:
        if self.kind == "relu" and threshold is not None:
            raise BadParameter(
                "A relu SAE has no threshold, but one was given. Leave it out, or use kind='jumprelu', whose latents "
                "are 0 up to their threshold."
            )
        if self.kind in ("relu", "topk"):
            return None  # files of topk SAEs contain one for another encoding, which is batchtopk
        if not isinstance(threshold, Tensor):
            threshold = to_number("threshold", -1.0 if threshold is None else threshold)
        value = torch.as_tensor(threshold)
        if check_tensor("threshold", value, BadParameter).is_complex():
            raise BadParameter(f"threshold must be real, got {value.dtype}.")
        value = value.detach().float().to(self.W_enc.device)
        if value.numel() == 1:
            value = value.reshape(())
        elif value.shape != (self.latents,):
            raise BadParameter(
                f"threshold must be one number or one per latent ({self.latents}), got {tuple(value.shape)}."
            )
        if not bool(torch.isfinite(value).all()):
            raise BadFile("threshold contains NaN or infinite values: the checkpoint is damaged.")
        if value.ndim == 0 and float(value) < 0:
            warnings.warn(
                f"The threshold of this {self.kind} SAE was never estimated ({float(value):g}): every positive "
                "activation counts as active. Give threshold=..., or use an SAE that was saved at the end of training.",
                stacklevel=4,
            )
            return None
        return value

    @property
    def width(self) -> int:
        """Token width D."""
        return self.W_enc.shape[1]

    @property
    def latents(self) -> int:
        """Number C of latents."""
        return self.W_enc.shape[0]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> SAE:
        """Move the SAE with the model but keep float32: half precision would change near-ties, which decide groups."""

        def keep(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)  # without rounding

        return super()._apply(keep, recurse)

    def extra_repr(self) -> str:
        """Return name, kind and sizes for ``print``."""
        parts = [self.card.name, self.kind, f"{self.width} wide, {self.latents} latents"]
        parts += [f"k={self.k}"] if self.k else []
        parts += [f"groups={self.groups}"] if len(self.groups) > 1 else []
        return ", ".join(part for part in parts if part)

    # ------------------------------------------------------------------ encoding and decoding

    def encode(self, x: Tensor) -> Tensor:
        """Return all latents, shape (..., C). For the top k only, :meth:`top` needs far less memory."""
        self._check_input("x", x, self.width)
        with torch.autocast(x.device.type, enabled=False):  # rounding could change which latents are active
            v, _, _ = self._preprocess(x)
            z = torch.relu(v @ self.W_enc.T + self.b_enc)
        if self.kind == "topk":
            assert self.k is not None
            index, value = stable_topk(z, self.k)
            return torch.zeros_like(z).scatter(-1, index, value)
        return z if self.threshold is None else z * (z > self.threshold)

    def decode(self, z: Tensor) -> Tensor:
        """Return the tokens decoded from latents ``z`` of shape (..., C), in the space after ``normalize``."""
        self._check_input("z", z, self.latents)
        with torch.autocast(z.device.type, enabled=False):
            return z @ self._decoder() + self.b_dec

    def decoder_projection(self, x: Tensor, latent: int) -> Tensor:
        """Return the inner products of tokens (..., D) with the decoder row of a latent, after ``normalize``."""
        self._check_input("x", x, self.width)
        latent = to_integer("latent", latent, 0, self.latents - 1)
        with torch.autocast(x.device.type, enabled=False):
            v, _, _ = self._preprocess(x)
            return (v if self.center else v - self.b_dec) @ self._decoder()[latent]

    def reconstruct(self, x: Tensor) -> Tensor:
        """Encode, decode and reverse the normalization, shape (..., D)."""
        self._check_input("x", x, self.width)
        _, shift, scale = self._preprocess(x)
        return self.decode(self.encode(x)) * scale + shift

    def ablate(self, x: Tensor, latents: Sequence[int]) -> Tensor:
        """Return tokens (..., D) without what some latents contribute to their reconstruction."""
        self._check_input("x", x, self.width)
        chosen = [to_integer("latent", latent, 0, self.latents - 1) for latent in latents]
        _, _, scale = self._preprocess(x)
        with torch.autocast(x.device.type, enabled=False):
            removed = self.encode(x)[..., chosen] @ self._decoder()[chosen] * scale
        return (x.float() - removed).to(x.dtype)

    @torch.no_grad()
    def top(
        self,
        x: Tensor,
        k: int,
        *,
        rank: Rank = "activation",
        prefilter: Prefilter | None = None,
        chunk: int | None = None,
        stats: list[SearchStats] | None = None,
    ) -> Concepts:
        """Return the exact top-k latents of each token and its peak activation, with little memory.

        Parameters
        ----------
        x : Tensor of shape (N, D)
        k : int
            From 1 to C. If a token has fewer active latents, the remaining slots are silent (index −1).
        rank : {"activation", "pre-threshold"}
            Values to rank: the latents as returned by :meth:`encode`, or max(0, W v + b) before the threshold or the
            top-k activation of the SAE.
        prefilter : {"auto", "int8", "bf16", "off"}, optional
            Product that selects candidates; default: :attr:`prefilter`. Affects speed and memory, never the result.
            ``"int8"`` is for large encoders and on a CPU requires ``pip install "torino[fast]"``; see
            ``research/reports/fast.md``. ``"bf16"`` is for CPUs with bfloat16 instructions and encoders of up to 2^24
            weights. ``"off"`` uses the float32 product.
        chunk : int, optional
            Latents per chunk. Affects speed and memory, never the result.
        stats : list of SearchStats, optional
            Statistics of the prefilter are appended; nothing is appended if it is not used.
        """
        check_choice("rank", rank, Rank)
        mode: Prefilter = check_choice("prefilter", self.prefilter if prefilter is None else prefilter, Prefilter)
        k = to_integer("k", k, 1, self.latents, ", the number of latents")
        chunk = None if chunk is None else to_integer("chunk", chunk, 1)
        check_type("stats", stats, (list, type(None)), "a list to append to")
        check_matrix(x, "tokens")
        self._check_device("tokens", x)
        keep, floor = self._search_settings(k, rank)
        with torch.autocast(x.device.type, enabled=False):
            v, _, _ = self._preprocess(x)
            search = (v, self.W_enc, self.b_enc, keep, floor)
            state = self._weights_state()
            wanted = mode == "bf16" and can_use_half(self.W_enc)
            use_bfloat16 = wanted or (mode == "auto" and use_half(self.W_enc, len(v)))
            cached = None
            if not use_bfloat16:
                cached = self._prefilter_cache.get(self.W_enc, self.b_enc, state, mode, len(v), self.folder)
            if cached is not None:
                indices, values = prefiltered_topk(*search, *cached, chunk=chunk, stats=stats)
            else:
                norm, half = self._bounds(state, use_bfloat16)
                indices, values = exact_topk(*search, largest_norm=norm, half=half, chunk=chunk)
        if keep < k:
            indices, values = self._pad(indices, values, k)
        return Concepts(indices, values, values[:, 0])

    def device_search(self, k: int, *, rank: Rank = "activation") -> Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]:
        """Return a search without host synchronization: tokens to indices, values and which tokens are proven.

        See :func:`torino.core.topk.device.device_topk`. It does not notice later changes of the weights.
        """
        keep, floor = self._search_settings(to_integer("k", k, 1, self.latents, ", the number of latents"), rank)
        norm, _ = self._bounds(self._weights_state(), False)

        def search(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            with torch.autocast(x.device.type, enabled=False):
                v, _, _ = self._preprocess(x)
                indices, values, proven = device_topk(v, self.W_enc, self.b_enc, keep, floor, norm)
            return *self._pad(indices, values, k), proven

        return search

    def _search_settings(self, k: int, rank: Rank) -> tuple[int, Tensor]:
        """Return the number of latents to search and the floor above which they are active."""
        gated = rank == "activation"
        keep = min(k, self.k) if gated and self.kind == "topk" and self.k else k
        floor = self.threshold if gated and self.threshold is not None else self.W_enc.new_zeros(())
        return keep, floor.clamp(min=0)

    @staticmethod
    def _pad(indices: Tensor, values: Tensor, k: int) -> tuple[Tensor, Tensor]:
        missing = (0, k - indices.shape[1])
        return nn.functional.pad(indices, missing, value=SILENT), nn.functional.pad(values, missing)

    def _check_input(self, name: str, x: Tensor, width: int) -> None:
        """Raise BadTokens unless ``x`` is a real tensor of shape (..., width) on the device of the SAE."""
        if check_tensor(name, x).ndim < 1 or x.is_complex():
            raise BadTokens(f"{name} must be real, of shape (..., {width}), got {x.dtype} of shape {tuple(x.shape)}.")
        if x.shape[-1] != width and width == self.latents:
            raise BadTokens(f"{name} must have shape (..., {width}), one value per latent, got {tuple(x.shape)}.")
        self._check_device(name, x)

    def _check_device(self, name: str, x: Tensor) -> None:
        if x.device != self.W_enc.device:
            raise BadTokens(
                f"{name} is on {x.device}, and the SAE is on {self.W_enc.device}. Move it with sae.to(...)."
            )

    def _preprocess(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return normalized and centered tokens, and the shift and scale that reverse the normalization."""
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

    def _weights_state(self) -> tuple[int, int, float]:
        """Return a value that changes when the encoder weights change.

        PyTorch counts changes, except those through ``.data``, through a numpy array that shares the memory, or in
        inference mode. Of these exceptions, the checksum below detects changes to one of about 16 rows. A checksum of
        all rows would read the whole encoder in each call, which the prefilter avoids.
        """
        weight = self.W_enc
        sample = weight[:: max(1, len(weight) // 16)].reshape(-1).double()
        index = torch.arange(1, len(sample) + 1, dtype=torch.float64, device=weight.device)
        checksum = float(sample @ (index * 0.6180339887498949 % 1 + 0.5))  # depends on signs and positions
        return -1 if weight.is_inference() else weight._version, weight.data_ptr(), checksum

    def _bounds(self, state: tuple[int, int, float], with_half: bool) -> tuple[float, HalfEncoder | None]:
        """Return the largest norm of an encoder row and the rounded encoder; recomputed if the weights have changed."""
        weight = self.W_enc
        if self._norm is None or self._norm[0]() is not weight or self._norm[1] != state:
            self._norm, self._half = (weakref.ref(weight), state, largest_row_norm(weight)), None
        if with_half and self._half is None:
            self._half = round_encoder(weight, self.b_enc, self._norm[2])
        return self._norm[2], self._half if with_half else None

    def _decoder(self) -> Tensor:
        if self.W_dec is None:
            raise BadParameter("This SAE was loaded without its decoder. Load it with decoder=True to decode.")
        return self.W_dec

    # ------------------------------------------------------------------ levels and origin

    def first(self, levels: int) -> SAE:
        """Return an SAE of the first ``levels`` Matryoshka groups: a smaller, coarser dictionary that shares memory."""
        levels = to_integer("levels", levels, 1, len(self.groups), f", the number of nested groups {self.groups}")
        groups = self.groups[:levels]
        size = sum(groups)
        threshold = self.threshold
        if threshold is not None and threshold.ndim == 1:
            threshold = threshold[:size]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a missing threshold was reported when this SAE was created
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
        smaller.prefilter, smaller.folder = self.prefilter, self.folder
        return smaller

    def check_origin(self, origin: Origin, width: int) -> None:
        """Raise :class:`SAEMismatch` unless this SAE fits tokens of this origin and width.

        Encoder names are compared without publisher (``openai/``) and case. Unknown values fit anything.
        """
        check_type("origin", origin, Origin, "an Origin(encoder, block)")
        wrong_width = to_integer("width", width) != self.width
        expected_encoder, encoder = (name.rsplit("/", 1)[-1].lower() for name in (self.card.encoder, origin.encoder))
        wrong_encoder = bool(expected_encoder) and bool(encoder) and expected_encoder != encoder
        wrong_block = None not in (self.card.block, origin.block) and self.card.block != origin.block
        if wrong_width or wrong_encoder or wrong_block:
            expected = Origin(self.card.encoder, self.card.block)
            raise SAEMismatch(
                f"This SAE reads tokens of width {self.width} from {expected}, but the tokens have width {width} "
                f"and come from {origin}. Choose an SAE trained on that encoder and block, or train one."
            )

    # ------------------------------------------------------------------ files

    @classmethod
    def load(
        cls,
        source: str | Path,
        *,
        levels: int | None = None,
        kind: Kind | None = None,
        k: int | None = None,
        threshold: float | None = None,
        decoder: bool = True,
        device: str | torch.device = "cpu",
    ) -> SAE:
        """Read an SAE from a folder, a file, or a hub repository, in any supported layout.

        Parameters
        ----------
        source : str or Path
            A local folder or file, or ``owner/repository`` on the hub, optionally ``owner/repository/sub/folder``.
            Layouts: torino, dictionary_learning, SAELens, sparsify, saev, Prisma, overcomplete and Qwen-Scope;
            recognized by the names of their tensors.
        levels : int, optional
            Keep only the first Matryoshka groups, see :meth:`first`.
        kind, k, threshold : str, int, float, optional
            Override the settings in the file, or replace missing ones: a dictionary_learning file without its config,
            an overcomplete file, which contains none of them, or a renamed Qwen-Scope file, which contains no k.
        decoder : bool
            Whether to load the decoder. Without it the SAE needs half of the memory but cannot decode.
        device : str or torch.device
        """
        from torino.sae.formats import read_sae

        check_type("decoder", decoder, bool, "True or False")
        target = resolve_device(device)
        sae = read_sae(source, kind=kind, k=k, threshold=threshold, decoder=decoder)
        sae = sae.first(levels) if levels is not None else sae
        return sae.to(target)

    def save(self, folder: str | Path, *, dtype: torch.dtype = torch.float32) -> Path:
        """Write ``sae.safetensors``, ``card.json`` and, if there are names, ``names.json`` into ``folder``.

        ``dtype`` is the type of the two matrices in the file; biases and threshold are written in float32.
        """
        from torino.sae.formats import write_sae

        written = write_sae(self, folder, "torino", dtype=dtype)
        delete_cached(written)  # files of the SAE that was here before
        return written

    def export(self, folder: str | Path, layout: str) -> Path:
        """Write the layout of another library: ``"dictionary_learning"`` or ``"saelens"``."""
        from torino.sae.formats import write_sae

        return write_sae(self, folder, layout)

    def update_card(self, **changes: Any) -> SAE:
        """Change fields of the card in place and return the SAE."""
        check_fields("The card", changes, vars(self.card))
        self.card = replace(self.card, **changes)
        return self

    def facts(self) -> dict[str, Any]:
        """Return the content of the card file."""
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
