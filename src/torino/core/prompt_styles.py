"""Names of prompt styles: how the question of a task is written for a model."""

from __future__ import annotations

from typing import Literal

PromptStyle = Literal["plain", "standard", "vlmevalkit", "llava"]
"""``plain`` is the question as it is; the others add a line that asks for a short answer, see
:func:`torino.evaluation.benchmarks.answer_instruction`."""
