"""The entry point of vLLM: register the models, and a hook that reads the settings of torino.

vLLM calls :func:`register` in every process. It imports no model and not torino's own packages; a server without
settings of torino runs vLLM's own models.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from torino.serving.vllm.names import ARCHITECTURES, CLASSES, RESOLVED, SETTINGS, VARIABLE


def register() -> None:
    """Register torino's models and configuration hooks in vLLM; called more than once, it has no further effect."""
    try:
        from vllm.model_executor.models import ModelRegistry  # pyright: ignore[reportMissingImports]
        from vllm.model_executor.models.config import MODELS_CONFIG_MAP  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        _refuse_release(error)
        return
    hooks: dict[str, Any] = MODELS_CONFIG_MAP
    known: set[str] = set(ModelRegistry.get_supported_archs())
    for name, reference in CLASSES.items():
        if name not in known:
            ModelRegistry.register_model(name, reference)
    for name in sorted(known):
        # Every model has the hook, so that settings are never ignored: it refuses models that are not supported.
        if not isinstance(hooks.get(name), ConfigHook):
            hooks[name] = ConfigHook(hooks.get(name))
    for stock, reduced in ARCHITECTURES.values():
        hooks[reduced] = hooks[stock]


def _refuse_release(error: ImportError) -> None:
    """Warn that the plug-in does not fit this release of vLLM; raise if the environment has settings for it.

    Servers without settings of torino must start with any release.
    """
    message = (
        f"The plug-in of torino does not fit this release of vLLM ({error}), so settings of torino have no effect. "
        'Install the release that it was tested with: pip install "torino[vllm]".'
    )
    if os.environ.get(VARIABLE, "").strip():
        from torino.core.errors import TorinoError

        raise TorinoError(message)
    logging.getLogger(__name__).warning(message)


class ConfigHook:
    """Read the settings of torino when vLLM has read the config of a model; without settings, do nothing.

    Parameters
    ----------
    inner : class, optional
        The hook that vLLM itself has for the model.
    """

    def __init__(self, inner: Any = None) -> None:
        self.inner = inner

    def verify_and_update_model_config(self, model_config: Any) -> None:
        """Resolve the settings, and select torino's class for the model."""
        if self.inner is not None:
            self.inner.verify_and_update_model_config(model_config)
        config = model_config.hf_config
        if getattr(config, SETTINGS, None) is None and not os.environ.get(VARIABLE, "").strip():
            return
        from torino.serving.vllm.hook import update_model_config

        update_model_config(model_config)

    def verify_and_update_config(self, vllm_config: Any) -> None:
        """Refuse options of the server that torino does not support."""
        if self.inner is not None:
            self.inner.verify_and_update_config(vllm_config)
        if getattr(vllm_config.model_config.hf_config, RESOLVED, None) is None:
            return
        from torino.serving.vllm.hook import check_vllm_config

        check_vllm_config(vllm_config)
