"""SAE card: what an SAE was trained on."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from torino.core.checks import check_type, to_integer


@dataclass(frozen=True)
class SAECard:
    """Origin of an SAE. Empty fields are unknown and never cause an error.

    Attributes
    ----------
    name : str
        A short name.
    encoder, block : str, int or None
        Vision encoder and zero-based block whose output the SAE reads.
    token_kind : str
        ``"cls"``, ``"patch"``, or a longer description such as ``"2 random tokens per image"``.
    data, license, notes : str
        Training data, license of the weights, and other remarks.
    """

    name: str = ""
    encoder: str = ""
    block: int | None = None
    token_kind: str = ""
    data: str = ""
    license: str = ""
    notes: str = ""

    def __post_init__(self) -> None:
        """Check the types."""
        for item in fields(self):
            if item.name != "block":
                check_type(item.name, getattr(self, item.name), str, "text")
        if self.block is not None:
            object.__setattr__(self, "block", to_integer("block", self.block))

    @classmethod
    def of(cls, values: dict[str, Any]) -> SAECard:
        """Create a card from a JSON object; unknown fields are ignored."""
        check_type("values", values, dict, "a JSON object")
        known = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in known})
