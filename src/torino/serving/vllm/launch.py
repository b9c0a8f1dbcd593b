"""Command line and environment of vLLM's OpenAI-compatible server with reduced tokens."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from importlib.util import find_spec

from torino.core.errors import MissingPackage
from torino.core.extras import install_command
from torino.serving.settings import ReductionSettings
from torino.serving.vllm.settings import Placement, PluginSettings
from torino.serving.vllm.startup import resolve
from torino.vlm.loading import fetch, local_name, model_package, transformers

MODULE = "vllm.entrypoints.openai.api_server"
"""Module to run with ``python -m``. The command ``vllm serve`` needs a distribution of exactly that name."""
PLUGIN = "torino"


def engine_arguments(
    model: str,
    settings: ReductionSettings,
    placement: Placement = "processor",
    *,
    device: str = "cpu",
    host: str = "127.0.0.1",
    port: int = 8000,
    extra: Sequence[str] = (),
) -> list[str]:
    """Return the arguments of ``python -m vllm.entrypoints.openai.api_server``.

    Parameters
    ----------
    model : str
        Hub name, folder, or installed model package such as ``lab``. Clients use this name.
    settings : ReductionSettings
    placement : {"processor", "engine"}
    device : str
        Device of tower and reducer in the processor placement.
    host, port
        Address to listen on.
    extra : sequence of str
        Further arguments of vLLM, such as ``["--max-model-len", "4096"]``.

    Raises
    ------
    TorinoError
        If the model or a combination of options is not supported; nothing has been started then.

    Examples
    --------
    >>> engine_arguments("lab", ReductionSettings("random", budget=64))[4:]  # doctest: +ELLIPSIS
    ['--hf-overrides', '{"torino": {..."placement": "processor"...}}', '--host', '127.0.0.1', '--port', '8000']
    """
    given = PluginSettings(settings, placement, device)
    package = model_package(model)
    name = local_name(model if package is None else package.folder())
    config = fetch(transformers().AutoConfig.from_pretrained, name, "config.json")
    resolve(given, config, name)  # refuses what the server would refuse, without its start-up time
    overrides = json.dumps({"torino": given.to_dict()})
    arguments = ["--model", name, "--served-model-name", model, "--hf-overrides", overrides]
    return [*arguments, "--host", host, "--port", str(port), *extra]


def engine_environment(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of the server: that of this process, with the plug-in among those that vLLM may load."""
    variables = dict(os.environ if environ is None else environ)
    allowed = variables.get("VLLM_PLUGINS")
    if allowed is not None and PLUGIN not in allowed.split(","):
        variables["VLLM_PLUGINS"] = ",".join(filter(None, [*allowed.split(","), PLUGIN]))
    return variables


def check_installed() -> None:
    """Raise MissingPackage where vLLM is not installed; vLLM is not imported."""
    if find_spec("vllm") is None:
        raise MissingPackage(
            f"Serving with vLLM needs vllm, which is not installed: {install_command('torino[vllm]')}, or serve with "
            "transformers."
        )
