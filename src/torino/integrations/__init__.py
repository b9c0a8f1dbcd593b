"""Guests: torino's reducers inside other evaluation kits, which keep their tasks, prompts and scores.

``lmms_eval`` is a model of lmms-eval, found through its entry points; ``vlmevalkit`` is one for VLMEvalKit. Both answer
through :class:`Guest`, which knows neither kit. How to run them: ``docs/guests.md``.
"""

from torino.integrations.chat import Guest, read_spec

__all__ = ["Guest", "read_spec"]
