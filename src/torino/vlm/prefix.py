"""Read the prompt up to the end of its images once for several questions."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class PrefixCache:
    """The key-value cache of a prompt up to the end of its images."""

    def __init__(self) -> None:
        self._ids: Tensor | None = None
        self._cache: Any = None

    def resume(self, model: Any, inputs: Mapping[str, Any], image_token: int) -> dict[str, Any]:
        """Return the inputs of a whole prompt with the cache of its prefix, which is computed on first use."""
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        end = 1 + int((ids == image_token).any(0).nonzero().max())
        if self._ids is None or not torch.equal(self._ids, ids[:, :end]):
            given = inputs.get("position_ids")  # given where positions do not simply count
            positions = (mask.long().cumsum(1) - 1).clamp(min=0) if given is None else given
            prefix = {"input_ids": ids[:, :end], "attention_mask": mask[:, :end], "position_ids": positions[:, :end]}
            features = {"mm_encoder_outputs": inputs["mm_encoder_outputs"]}
            self._cache = model(**prefix, **features, use_cache=True, logits_to_keep=1).past_key_values
            self._ids = ids[:, :end]
        rest = {name: value for name, value in inputs.items() if name != "mm_encoder_outputs"}
        return rest | {"past_key_values": copy.deepcopy(self._cache)}  # generation writes into it
