"""Everything that ``torino serve`` was asked for."""

from __future__ import annotations

from dataclasses import dataclass

from torino.serving.server.logs import LogFormat
from torino.serving.server.options import ServerOptions
from torino.serving.settings import ReductionSettings


@dataclass(frozen=True)
class ServerPlan:
    """Everything that determines a server of torino itself.

    Attributes
    ----------
    model : str
        Hub name, folder, or installed model package.
    settings : ReductionSettings
    options : ServerOptions
    host, port
        Where it listens; port 0 is any free one.
    device, dtype
        As for :func:`torino.vlm.load_vlm`.
    front : bool
        Whether the language model runs in a process of its own.
    vllm : tuple of str, optional
        Options of vLLM, which then is the engine behind the front.
    log_format : {"json", "text"}
    """

    model: str
    settings: ReductionSettings
    options: ServerOptions
    host: str = "127.0.0.1"
    port: int = 8000
    device: str = "auto"
    dtype: str | None = None
    front: bool = False
    vllm: tuple[str, ...] | None = None
    log_format: LogFormat = "json"
