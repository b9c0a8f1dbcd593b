"""Use torino's reducers inside other evaluation kits, which keep their tasks, prompts and scores.

``lmms_eval`` is a model for lmms-eval, found through its entry points; ``vlmevalkit`` is a model for VLMEvalKit. Both
answer through :class:`ChatModel`.
"""

from torino.integrations.chat import ChatModel, read_spec

__all__ = ["ChatModel", "read_spec"]
