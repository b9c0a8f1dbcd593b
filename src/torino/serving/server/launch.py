"""Start a server: load the model, choose the engine, listen."""

from __future__ import annotations

import secrets

import torch

from torino.core.device import resolve_device
from torino.reducers import Reducer
from torino.serving.server.app import build_app
from torino.serving.server.engine import ChatEngine
from torino.serving.server.engine_process import engine_settings
from torino.serving.server.front import FrontEngine
from torino.serving.server.gate import ServerState
from torino.serving.server.halves import check_front
from torino.serving.server.http import open_socket, run_app
from torino.serving.server.local import LocalEngine
from torino.serving.server.metrics import ServerMetrics
from torino.serving.server.plan import ServerPlan
from torino.serving.server.supervisor import EngineLauncher, EngineSupervisor, TorinoLauncher
from torino.serving.server.vllm import VllmLauncher, check_plain
from torino.serving.settings import check_servable, open_vlm
from torino.vlm.loading import quiet_loading
from torino.vlm.session import VLM


def serve(plan: ServerPlan) -> int | None:
    """Run a server until a signal; return the signal, or None.

    Raises
    ------
    TorinoError
        If the model, the SAE or the method cannot be used, the address is taken, or the engine does not start.
    """
    device = resolve_device(plan.device)
    reducer = plan.settings.build(device)
    check_servable(reducer)
    listener = open_socket(plan.host, plan.port)  # before minutes of loading
    metrics, state = ServerMetrics(), ServerState()
    with quiet_loading():
        vlm = open_vlm(plan.model, plan.settings, str(device), plan.dtype)
        engine = _build_engine(plan, vlm, reducer, metrics, device)
        app = build_app(engine, plan.options, metrics, state)
        stopped_by = run_app(app, listener, plan.options, state)
    if state.failure is not None:
        raise state.failure
    return stopped_by


def _build_engine(
    plan: ServerPlan, vlm: VLM, reducer: Reducer | None, metrics: ServerMetrics, device: torch.device
) -> ChatEngine:
    salt = plan.settings.hash(plan.model, str(vlm.dtype))
    if not plan.front:
        return LocalEngine(vlm, reducer, plan.options, metrics, salt)
    check_front(vlm)
    secret = secrets.token_urlsafe(32)
    launcher: EngineLauncher
    if plan.vllm is not None:
        check_plain(vlm, reducer)
        launcher = VllmLauncher(plan.model, vlm, plan.options, plan.vllm, secret)
    else:
        settings = engine_settings(
            plan.model,
            plan.settings,
            plan.options,
            secret,
            device=str(device),
            dtype=plan.dtype,
            log_format=plan.log_format,
        )
        launcher = TorinoLauncher(settings)
    return FrontEngine(vlm, reducer, plan.options, metrics, EngineSupervisor(launcher), salt)
