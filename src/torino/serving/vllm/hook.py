"""Apply the settings of torino to vLLM's configuration, which all its processes share."""

from __future__ import annotations

import logging
from importlib import import_module
from typing import Any

from torino.serving.vllm.names import ARCHITECTURES, RESOLVED, SETTINGS
from torino.serving.vllm.settings import PluginSettings, read_settings
from torino.serving.vllm.startup import Resolved, check_server, check_version, resolve

logger = logging.getLogger(__name__)


def update_model_config(model_config: Any) -> None:
    """Store resolved settings in the model's config, and select torino's class for the model.

    Parameters
    ----------
    model_config : vllm.config.ModelConfig
    """
    config = model_config.hf_config
    settings = read_settings(getattr(config, SETTINGS, None))
    if settings is None:
        return
    check_version(import_module("vllm").__version__)
    resolved = resolve(settings, config, str(model_config.model), model_config.revision)
    setattr(config, SETTINGS, settings.to_dict())
    setattr(config, RESOLVED, resolved.to_dict())
    family = str(config.model_type)
    if resolved.positions == "original" and not model_config.uses_mrope:
        config.mrope_section = [1, 1, 1]  # vLLM then asks the model for the positions of each prompt
    multimodal = model_config.multimodal_config
    multimodal.mm_device_do_normalize = False  # some of vLLM's towers normalize pixels themselves
    if settings.placement == "processor":
        # The worker runs no tower, and profiling one would load tower and SAE into the engine's process.
        multimodal.skip_mm_profiling = True
    config.architectures = [ARCHITECTURES[family][1]]
    model_config.model_arch_config = model_config.get_model_arch_config()
    info, architecture = model_config.registry.inspect_model_cls(config.architectures, model_config)
    model_config._model_info, model_config._architecture = info, architecture
    logger.info("torino: %s in the %s, %s positions", settings.reduction.method, settings.placement, resolved.positions)


def check_vllm_config(vllm_config: Any) -> None:
    """Refuse options of a server that torino does not support.

    Parameters
    ----------
    vllm_config : vllm.config.VllmConfig
    """
    check_server(vllm_config, resolved_of(vllm_config.model_config.hf_config))


def settings_of(config: Any) -> PluginSettings:
    """Return the settings that :func:`update_model_config` stored."""
    return PluginSettings.from_dict(getattr(config, SETTINGS))


def resolved_of(config: Any) -> Resolved:
    """Return what :func:`update_model_config` resolved."""
    return Resolved(**getattr(config, RESOLVED))
