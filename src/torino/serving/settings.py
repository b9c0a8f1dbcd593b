"""How a server or a store reduces images: one object that can be sent as JSON and has a hash.

The vLLM plug-in, the server and the stores of ``torino reduce`` all use :class:`ReductionSettings`, so the same options
give the same tokens everywhere.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, cast

import torch

from torino.core.checks import check_choice, check_fields, to_integer, to_number
from torino.core.concepts import ConceptEncoder
from torino.core.defaults import DEFAULT_METHOD
from torino.core.errors import BadParameter
from torino.core.schema import check_schema
from torino.datasets.images import Padding
from torino.reducers import KeepShare, Reducer, get, make, split_reducer
from torino.reducers.base import method_name
from torino.sae import SAE
from torino.sae.identity import hash_sae
from torino.version import __version__
from torino.vlm.adapters.base import QUERY_SIGNALS
from torino.vlm.saes import find_package, load_encoder

if TYPE_CHECKING:
    from torino.vlm import VLM

ALL_TOKENS = "none"
PLACEHOLDER_BUDGET = 1 << 20  # of a reducer whose budget KeepShare sets for each image

PositionsOption = Literal["auto", "compact", "original", "median"]
AttentionOption = Literal["auto", "plain", "proportional", "restore"]


@dataclass(frozen=True)
class ReductionSettings:
    """Describe how images are reduced and how reduced tokens are presented to the model.

    Parameters
    ----------
    method : str
        Name or spec of a reducer, such as ``"torino-m"`` or ``"torino-x(k=3)"``; ``"none"`` keeps all tokens.
    sae : str, optional
        Folder, file, hub repository or installed model package; ``"none"`` for no SAE. Only for methods that read
        concepts.
    budget : int, optional
        Tokens per image. By default that of the method, or decided by the image.
    keep : float, optional
        Share of the tokens to keep, instead of ``budget``.
    positions : {"auto", "compact", "original", "median"}
    attention : {"auto", "plain", "proportional"}
        ``"restore"`` depends on distances in the prompt, which are not known when images are reduced, and is refused.
    padding : {"crop", "square"}
        See :class:`torino.vlm.VLM`.

    Examples
    --------
    >>> settings = ReductionSettings("torino-m", sae="none", budget=64)
    >>> ReductionSettings.from_dict(settings.to_dict()) == settings
    True
    >>> settings.build()
    torino-m(k=2, delta=2, budget=64)
    """

    method: str = DEFAULT_METHOD
    sae: str | None = None
    budget: int | None = None
    keep: float | None = None
    positions: PositionsOption = "auto"
    attention: AttentionOption = "auto"
    padding: Padding = "crop"

    def __post_init__(self) -> None:
        """Raise BadParameter if options are wrong or contradict each other; no file is read."""
        check_choice("positions", self.positions, PositionsOption)
        check_choice("attention", self.attention, AttentionOption)
        if self.attention == "restore":
            raise _no_calibration("attention='restore'")
        check_choice("padding", self.padding, Padding)
        if self.budget is not None:
            to_integer("budget", self.budget, 1)
        if self.keep is not None and not 0 < to_number("keep", self.keep) <= 1:
            raise BadParameter(f"keep must be above 0 and at most 1, got {self.keep}.")
        if self.budget is not None and self.keep is not None:
            raise BadParameter("budget and keep exclude each other. Give one of them.")
        if self.method == ALL_TOKENS:
            given = [name for name in ("sae", "budget", "keep") if getattr(self, name) is not None]
            if given:
                raise BadParameter(f"method none keeps all tokens, so {given[0]} has no effect. Omit it.")
            return
        reads = self.reads_concepts
        if reads and not (self.sae or "").strip():
            raise BadParameter(
                f"{self.method} reads concepts and needs an SAE: a folder, a hub repository, or 'none' to "
                "run without one."
            )
        if not reads and self.sae is not None:
            raise BadParameter(f"{self.method} reads no concepts, so sae has no effect. Omit it.")

    @classmethod
    def from_dict(cls, value: object) -> ReductionSettings:
        """Build settings from parsed JSON; unknown and wrong fields are refused."""
        if not isinstance(value, Mapping):
            raise BadParameter(f"The settings of torino must be an object with named fields, got {value!r}.")
        given = dict(cast(Mapping[str, Any], value))
        check_fields("The settings of torino", given, [field.name for field in fields(cls)])
        try:
            check_schema(given, cls)
        except ValueError as error:
            raise BadParameter(f"The settings of torino are wrong: {error}.") from error
        return cls(**given)

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as JSON values, without those that are not set."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @property
    def reads_concepts(self) -> bool:
        """Whether the method reads concepts of an SAE."""
        return self.method != ALL_TOKENS and "sae" in _parameters(self.method)

    @cached_property
    def _encoder(self) -> ConceptEncoder | None:
        return None if self.sae is None else load_encoder(self.sae)

    def build(self, device: str | torch.device = "cpu") -> Reducer | None:
        """Build the reducer; None keeps all tokens."""
        if self.method == ALL_TOKENS:
            return None
        options: dict[str, Any] = {}
        if self._encoder is not None:
            options["sae"] = self._encoder.to(device) if isinstance(self._encoder, SAE) else self._encoder
        takes_budget = "budget" in _parameters(self.method)
        if self.budget is not None:
            options["budget"] = self.budget
        elif self.keep is not None and takes_budget:
            options["budget"] = PLACEHOLDER_BUDGET
        reducer = make(self.method, **options)
        if self.attention == "auto" and reducer.attention_mode == "restore":
            raise _no_calibration(reducer.spec)
        return reducer if self.keep is None else KeepShare(reducer, self.keep)

    def hash(self, *more: str) -> str:
        """Return a hash of everything that determines the tokens: settings, content of the SAE, version, and ``more``.

        Give what else matters, such as the model's content or revision.
        """
        encoder = self._encoder
        content = hash_sae(encoder) if isinstance(encoder, SAE) else ""
        settings = {**self.to_dict(), "sae": content}
        text = json.dumps([__version__, settings, *more], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]


def _no_calibration(what: str) -> BadParameter:
    return BadParameter(
        f"{what} calibrates attention by distance, which servers and token stores do not support. Set attention to "
        "proportional or plain."
    )


def check_servable(reducer: Reducer | None) -> None:
    """Refuse a reducer whose tokens depend on other images or on the question, which a cache cannot serve."""
    if reducer is None:
        return
    if split_reducer(reducer)[1] is not None:
        raise BadParameter(
            f"{reducer.spec} drops tokens inside the language model, by the question, and servers and token stores "
            "hold what the language model receives. Choose a method that works before it, such as torino-x."
        )
    if reducer.shares_batch:
        raise BadParameter(
            f"{reducer.spec} plans several images together, so the tokens of an image depend on the other requests. "
            "Choose a method that plans each image by itself."
        )
    if reducer.needs & QUERY_SIGNALS:
        raise BadParameter(
            f"{reducer.spec} chooses patches by the question, and the images are reduced before the question is known. "
            "Choose another method."
        )


def open_vlm(model: str, settings: ReductionSettings, device: str = "cpu", dtype: str | None = None) -> VLM:
    """Load a model with the host options of the settings."""
    from torino.vlm import load_vlm

    return load_vlm(
        model,
        device,
        dtype,
        padding=settings.padding,
        positions=settings.positions,
        attention=settings.attention,
    )


def default_sae(method: str, model: str) -> str | None:
    """Return the SAE of a model package for a method that reads concepts, if there is one."""
    if method == ALL_TOKENS or "sae" not in _parameters(method):
        return None
    package = find_package(model)
    return model if package is not None and package.sae is not None else None


def _parameters(method: str) -> set[str]:
    return {field.name for field in fields(cast(Any, get(method_name(method))))}
