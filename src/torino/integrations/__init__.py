"""Guests: torino's reducers inside other evaluation kits, which keep their tasks, prompts and scores.

``lmms_eval`` is a model of lmms-eval, found through its entry points; ``vlmevalkit`` is one for VLMEvalKit. Both answer
through :class:`ChatModel`, which knows neither kit. How to run them: ``docs/guests.md``.
"""

from torino.integrations.chat import ChatModel, read_spec

__all__ = ["ChatModel", "read_spec"]
