"""Settings of the vLLM plug-in: how images are reduced, and where."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from torino.core.checks import check_choice, check_type
from torino.core.errors import BadParameter
from torino.serving.settings import ReductionSettings
from torino.serving.vllm.names import VARIABLE

Placement = Literal["processor", "engine"]


@dataclass(frozen=True)
class PluginSettings:
    """How vLLM reduces images.

    Parameters
    ----------
    reduction : ReductionSettings
    placement : {"processor", "engine"}
        Where tower and reducer run: in vLLM's multimodal processor, where each image decides its number of tokens, or
        in the worker, with an exact budget.
    device : str
        Device of tower and reducer in the processor. In the engine they run on the worker's device.

    Examples
    --------
    >>> settings = PluginSettings.from_dict({"method": "random", "budget": 64, "placement": "engine"})
    >>> settings.placement, settings.reduction.budget
    ('engine', 64)
    """

    reduction: ReductionSettings
    placement: Placement = "processor"
    device: str = "cpu"

    def __post_init__(self) -> None:
        """Raise BadParameter for an unknown placement or device."""
        check_choice("placement", self.placement, Placement)
        check_type("device", self.device, str, "a device such as 'cpu' or 'cuda:0'")
        if self.placement == "engine" and self.device != "cpu":
            raise BadParameter(
                f"device={self.device!r} has no effect with placement='engine', where the tower runs on the device of "
                "vLLM's worker. Omit it."
            )

    @classmethod
    def from_dict(cls, value: object) -> PluginSettings:
        """Build settings from parsed JSON: the fields of ReductionSettings, ``placement`` and ``device``."""
        if not isinstance(value, Mapping):
            raise BadParameter(f"The settings of torino must be an object with named fields, got {value!r}.")
        given = dict(cast(Mapping[str, Any], value))
        own = {name: given.pop(name) for name in ("placement", "device") if name in given}
        return cls(ReductionSettings.from_dict(given), **own)

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as JSON values; the inverse of :meth:`from_dict`."""
        return {**self.reduction.to_dict(), "placement": self.placement, "device": self.device}


def read_settings(override: object, environ: Mapping[str, str] | None = None) -> PluginSettings | None:
    """Return the settings of a server, or None if there are none and vLLM is to run unchanged.

    Parameters
    ----------
    override : object
        ``torino`` of ``--hf-overrides``; None if it was not given.
    environ : mapping, optional
        Environment variables; those of the process by default.

    Raises
    ------
    BadParameter
        If the settings are wrong, or if both sources give different settings.
    """
    text = (os.environ if environ is None else environ).get(VARIABLE, "").strip()
    sources: list[PluginSettings] = []
    if override is not None:
        sources.append(PluginSettings.from_dict(override))
    if text:
        try:
            value = json.loads(text)
        except ValueError as error:
            raise BadParameter(
                f"The environment variable {VARIABLE} must be JSON such as "
                f'{{"method": "torino-m", "sae": "lab"}}, got {text[:80]!r} ({error}).'
            ) from error
        sources.append(PluginSettings.from_dict(value))
    if len(sources) == 2 and sources[0] != sources[1]:
        raise BadParameter(
            f"--hf-overrides and the environment variable {VARIABLE} give different settings of torino. Give one of "
            "them."
        )
    return sources[0] if sources else None
