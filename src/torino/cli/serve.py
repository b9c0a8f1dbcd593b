"""``torino serve``: answer OpenAI's chat completions with fewer visual tokens."""

from __future__ import annotations

import shlex
import signal
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.markup import escape

from torino.cli._common import (
    LAB,
    AttentionOption,
    BudgetOption,
    DeviceOption,
    DtypeOption,
    KeepOption,
    PaddingOption,
    PositionsOption,
    SaeOption,
    errors,
    examples,
    memory_errors,
    parse_share,
)
from torino.cli._stop import on_stop
from torino.core.defaults import DEFAULT_METHOD, KD_METHOD
from torino.core.errors import BadParameter

if TYPE_CHECKING:
    from torino.serving.server.plan import ServerPlan

EngineChoice = Literal["transformers", "vllm"]
PlacementChoice = Literal["processor", "engine", "front"]
LogChoice = Literal["json", "text"]

EPILOG = examples(
    "torino serve",
    "torino serve llava-hf/llava-1.5-7b-hf --sae ./my-sae --budget 128 --device cuda",
    "torino serve llava-hf/llava-1.5-7b-hf --method visionzip --keep 25% --engine vllm",
    "torino serve ./llava --sae none --placement front --host 0.0.0.0 --allow-host images.example.org",
    "# then, from any OpenAI client:",
    "curl localhost:8000/v1/models",
)
LIMITS, NETWORK = "Limits", "Network"


def serve(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Hub name, folder, or installed model package.")] = LAB,
    sae: SaeOption = None,
    method: Annotated[
        str | None,
        typer.Option(
            help="Method by name or with options in brackets (torino list); 'none' keeps all tokens. Default: "
            f"{DEFAULT_METHOD}, or {KD_METHOD} with a front before vLLM, which places tokens one after the other."
        ),
    ] = None,
    budget: BudgetOption = None,
    keep: KeepOption = None,
    engine: Annotated[
        EngineChoice | None, typer.Option(help="What runs the model (default: vllm if installed, else transformers).")
    ] = None,
    placement: Annotated[
        PlacementChoice | None,
        typer.Option(
            help="Where images are reduced. vLLM: processor (default) or engine; front: in a process before the engine."
        ),
    ] = None,
    vllm: Annotated[str, typer.Option(help="More options of vLLM in quotes, such as '--max-model-len 4096'.")] = "",
    name: Annotated[str | None, typer.Option(help="Name of the model in requests (default: MODEL).")] = None,
    padding: PaddingOption = "crop",
    positions: PositionsOption = "auto",
    attention: AttentionOption = "auto",
    device: DeviceOption = "auto",
    dtype: DtypeOption = None,
    host: Annotated[str, typer.Option(help="Address to listen on.", rich_help_panel=NETWORK)] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free port.", rich_help_panel=NETWORK)] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            help="Require one of these keys (repeatable); better in the environment variable TORINO_API_KEY.",
            rich_help_panel=NETWORK,
        ),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            help="Fetch images from this host (repeatable); by default only data: URLs.", rich_help_panel=NETWORK
        ),
    ] = None,
    log_format: Annotated[LogChoice, typer.Option(help="Format of the log lines.", rich_help_panel=NETWORK)] = "json",
    batch: Annotated[
        int | None,
        typer.Option(min=1, help="Requests answered together (default: 8; vLLM: 256).", rich_help_panel=LIMITS),
    ] = None,
    queue: Annotated[
        int, typer.Option(min=0, help="Requests that may wait; more get 429.", rich_help_panel=LIMITS)
    ] = 64,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.", rich_help_panel=LIMITS)] = 512,
    max_images: Annotated[int, typer.Option(min=1, help="Images of a request.", rich_help_panel=LIMITS)] = 8,
    max_megabytes: Annotated[int, typer.Option(min=1, help="Size of a request.", rich_help_panel=LIMITS)] = 32,
    max_pixels: Annotated[int, typer.Option(min=1, help="Pixels of an image.", rich_help_panel=LIMITS)] = 1 << 25,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds for a request.", rich_help_panel=LIMITS)] = 300.0,
    cache_megabytes: Annotated[
        int | None,
        typer.Option(
            min=0, help="Cache of reduced images (default: 256; vLLM: 4096); 0: none.", rich_help_panel=LIMITS
        ),
    ] = None,
    grace: Annotated[
        float, typer.Option(min=0, help="Seconds to finish requests when stopped.", rich_help_panel=LIMITS)
    ] = 30.0,
) -> None:
    """Serve a vision-language model with fewer visual tokens, for any OpenAI client."""
    on_stop("Nothing was being answered.")
    share = None if keep is None else parse_share(keep)
    words = _split(vllm)
    with errors.status("Starting …"):
        from importlib.util import find_spec

        chosen: EngineChoice = engine or ("vllm" if find_spec("vllm") is not None else "transformers")
        _check_engine(chosen, placement, words)
        own = chosen == "vllm" and placement != "front"  # vLLM's own server
        if method is None:
            method = DEFAULT_METHOD if own or chosen == "transformers" else KD_METHOD
        from torino.core.extras import optional_import

        with optional_import("torino serve needs", "torino[serve]"):
            import fastapi  # noqa: F401  # pyright: ignore[reportUnusedImport]
            import httpx2  # noqa: F401  # pyright: ignore[reportUnusedImport]
            import prometheus_client  # noqa: F401  # pyright: ignore[reportUnusedImport]
            import uvicorn  # noqa: F401  # pyright: ignore[reportUnusedImport]
        from torino.serving.server.logs import set_up_logs
        from torino.serving.server.options import MEGABYTE, ServerOptions, api_keys
        from torino.serving.settings import ReductionSettings, default_sae
        from torino.vlm.loading import check_model

        check_model(model)
        if sae is None:
            sae = default_sae(method, model)
        if batch is None:
            batch = 256 if own else 8
        if cache_megabytes is None:
            cache_megabytes = 4096 if own else 256
        settings = ReductionSettings(method, sae, budget, share, positions, attention, padding)
        options = ServerOptions(
            name=name or model,
            api_keys=api_keys(tuple(api_key or ())),
            batch=batch,
            queue=queue,
            max_tokens=max_tokens,
            max_images=max_images,
            max_bytes=max_megabytes * MEGABYTE,
            max_pixels=max_pixels,
            timeout=timeout,
            allowed_hosts=tuple(allow_host or ()),
            cache_bytes=cache_megabytes * MEGABYTE,
            grace=grace,
        )
    set_up_logs(log_format)
    from torino.serving.server.plan import ServerPlan

    plan = ServerPlan(
        model,
        settings,
        options,
        host,
        port,
        device,
        dtype,
        front=placement == "front",
        vllm=words if chosen == "vllm" else None,
        log_format=log_format,
    )
    if chosen == "vllm" and not plan.front:
        raise typer.Exit(_run_vllm(plan, placement or "processor"))
    from torino.serving.server.launch import serve

    errors.print(f"Loading {escape(model)} …", highlight=False)
    with memory_errors(model, device):
        stopped_by = serve(plan)
    if stopped_by is not None:
        on_stop("Running requests were finished.")
        signal.raise_signal(stopped_by)


def _split(text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise BadParameter(f"--vllm cannot be split into words ({error}), got {text!r}.") from error


def _check_engine(engine: EngineChoice, placement: PlacementChoice | None, words: tuple[str, ...]) -> None:
    if engine == "transformers" and placement in ("processor", "engine"):
        raise BadParameter(
            f"--placement {placement} says where vLLM reduces images, and --engine is transformers. Omit --placement, "
            "use --placement front, or use --engine vllm."
        )
    if engine == "transformers" and words:
        raise BadParameter("--vllm has options of vLLM, and --engine is transformers. Omit it, or use --engine vllm.")
    if engine == "vllm":
        from torino.serving.server.vllm import check_installed

        check_installed()


def _run_vllm(plan: ServerPlan, placement: PlacementChoice) -> int:
    """Run vLLM's own server with the plug-in of torino; options that only torino's server has are refused."""
    from torino.serving.server.vllm import run_plugin

    return run_plugin(plan, "engine" if placement == "engine" else "processor")
