"""vLLM as the engine: behind a front of torino, or as the server itself with the plug-in of torino."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import numpy as np

from torino.core.errors import BadParameter, MissingPackage
from torino.core.extras import install_command, optional_import
from torino.reducers import Reducer
from torino.serving.server.errors import ApiError
from torino.serving.server.jobs import AnswerEvent, FinishedAnswer, FinishReason, TextPiece
from torino.serving.server.logs import log
from torino.serving.server.options import ServerOptions
from torino.serving.server.plan import ServerPlan
from torino.serving.server.schema import Sampling
from torino.serving.server.supervisor import (
    EngineClient,
    EngineFailed,
    EngineLauncher,
    end_process,
    end_with_parent,
    lost_engine,
)
from torino.vlm.adapters.base import position_mode
from torino.vlm.attention import uses_proportional
from torino.vlm.loading import local_name, model_package
from torino.vlm.prompt import Turn, image_marker, special_token_options, write_prompt
from torino.vlm.session import VLM, ReducedImages

with optional_import("torino serve needs", "torino[serve]"):
    import httpx2

MODULE = "vllm.entrypoints.openai.api_server"
NAME = "engine"
NO_HOST = "none.invalid"
PLUGIN_VARIABLE = "TORINO_VLLM"  # settings of the plug-in
# The front writes the prompt; vLLM receives it in pieces and only puts the images between them.
TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% else %}MARKER{% endif %}"
    "{% endfor %}{% endfor %}"
)


def check_installed() -> None:
    """Refuse to go on without vLLM."""
    if find_spec("vllm") is None:
        raise MissingPackage(
            f"--engine vllm needs vLLM, which is not installed: {install_command('torino[vllm]')}. Or use --engine "
            "transformers."
        )


def check_plain(vlm: VLM, reducer: Reducer | None) -> None:
    """Refuse methods whose tokens need more than embeddings: a front sends nothing else to an unchanged vLLM."""
    original = position_mode(vlm.positions, reducer) == "original"
    if original or uses_proportional(vlm.attention, reducer, vlm.adapter):
        what = "original positions" if original else "proportional attention"
        raise BadParameter(
            f"--placement front with vLLM sends embeddings to an unchanged vLLM, which has no {what}. Use --placement "
            "processor, another method, or --positions compact --attention plain."
        )


def model_folder(model: str) -> str:
    """Return what vLLM loads: the folder of a model package, a folder, or a hub name."""
    package = model_package(model)
    return local_name(model if package is None else package.folder())


# ---------------------------------------------------------------------- behind a front


class VllmClient(EngineClient):
    """vLLM's OpenAI server with ``--enable-mm-embeds``, on loopback.

    Parameters
    ----------
    address, secret : str
    vlm : VLM
        Writes the prompts.
    """

    def __init__(self, address: str, secret: str, vlm: VLM) -> None:
        super().__init__(address, secret)
        self.vlm = vlm

    async def generate(
        self, conversation: Sequence[Turn], images: Sequence[ReducedImages], sampling: Sampling
    ) -> AsyncGenerator[AnswerEvent, None]:
        """Yield the events of an answer."""
        body = await asyncio.to_thread(self._body, conversation, images, sampling)
        pieces: list[str] = []
        reason: FinishReason = "stop"
        try:
            async with self.http.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    raise _refusal(response.status_code, await response.aread())
                async for line in response.aiter_lines():
                    data = line.removeprefix("data:").strip()
                    if not data or data == "[DONE]":
                        continue
                    value: dict[str, Any] = json.loads(data)
                    if "error" in value:
                        raise _refusal(500, data.encode())
                    for choice in value.get("choices", []):
                        text = choice.get("delta", {}).get("content") or ""
                        reason = "length" if choice.get("finish_reason") == "length" else reason
                        if text:
                            pieces.append(text)
                            yield TextPiece(text)
                    usage: Mapping[str, int] | None = value.get("usage")
                    if usage and not value.get("choices"):
                        yield FinishedAnswer(
                            "".join(pieces), reason, usage["prompt_tokens"], usage.get("completion_tokens", 0)
                        )
                        return
        except (httpx2.HTTPError, json.JSONDecodeError) as error:
            raise lost_engine() from error
        raise lost_engine()

    def _body(
        self, conversation: Sequence[Turn], images: Sequence[ReducedImages], sampling: Sampling
    ) -> dict[str, Any]:
        prompt = write_prompt(conversation, self.vlm.processor, self.vlm.adapter)
        pieces = prompt.split(image_marker(self.vlm.processor))
        if len(pieces) != len(images) + 1:
            raise BadParameter(f"The prompt shows {len(pieces) - 1} images, and {len(images)} were given.")
        parts: list[dict[str, Any]] = []
        for index, piece in enumerate(pieces):
            if index:
                parts.append({"type": "image_embeds", "image_embeds": encode_embeds(images[index - 1])})
            if piece:
                parts.append({"type": "text", "text": piece})
        special = special_token_options(prompt, self.vlm.processor)
        body: dict[str, Any] = {
            "model": NAME,
            "messages": [{"role": "user", "content": parts}],
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "stop": list(sampling.stop),
            "stream": True,
            "stream_options": {"include_usage": True},
            "add_generation_prompt": False,
            "add_special_tokens": special.get("add_special_tokens", True),
        }
        return body if sampling.seed is None else {**body, "seed": sampling.seed}


def encode_embeds(image: ReducedImages) -> str:
    """Return the tokens of an image as a ``.npy`` file in base64, which vLLM reads without unpickling."""
    file = io.BytesIO()
    np.save(file, image.embeds[0].features.detach().float().cpu().numpy(), allow_pickle=False)
    return base64.b64encode(file.getvalue()).decode()


def _refusal(status: int, body: bytes) -> ApiError:
    message = "The engine refused the request."
    with suppress(ValueError, AttributeError):
        value = json.loads(body)
        message = str((value.get("error") or value).get("message") or message)
    if status in (400, 404, 413, 422):
        return ApiError(400, message, "engine")
    return ApiError(503 if status in (429, 503) else 500, message, "engine", None, 2 if status in (429, 503) else None)


class VllmLauncher(EngineLauncher):
    """Start vLLM's OpenAI server on loopback, with a secret, for the embeddings of the front only.

    Parameters
    ----------
    model : str
    vlm : VLM
    options : ServerOptions
    extra : sequence of str
        More options of vLLM.
    secret : str
    """

    def __init__(self, model: str, vlm: VLM, options: ServerOptions, extra: Sequence[str], secret: str) -> None:
        check_installed()
        self.vlm, self.secret = vlm, secret
        folder = Path(tempfile.mkdtemp(prefix="torino-vllm-"))
        template = folder / "template.jinja"
        template.write_text(TEMPLATE.replace("MARKER", image_marker(vlm.processor)), encoding="utf-8")
        self.arguments = [
            *("--model", model_folder(model), "--served-model-name", NAME, "--host", "127.0.0.1"),
            *("--chat-template", str(template), "--chat-template-content-format", "openai", "--enable-mm-embeds"),
            *("--limit-mm-per-prompt", json.dumps({"image": options.max_images}), *extra),
        ]

    async def launch(self) -> tuple[asyncio.subprocess.Process, EngineClient]:
        """Start vLLM and wait until it answers."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = int(free.getsockname()[1])
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", MODULE, *self.arguments, "--port", str(port)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=sys.stderr,
            env=_plain_environment() | {"VLLM_API_KEY": self.secret},
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
        client = VllmClient(f"http://127.0.0.1:{port}", self.secret, self.vlm)
        try:
            while not await client.is_healthy():
                if process.returncode is not None:
                    raise EngineFailed(f"vLLM ended with code {process.returncode} before it was ready; see its log.")
                await asyncio.sleep(0.5)
        except BaseException:
            await client.http.aclose()
            await end_process(process)
            raise
        return process, client


def _plain_environment() -> dict[str, str]:
    """Return the environment without settings of the plug-in: behind a front, vLLM reduces nothing."""
    return {name: value for name, value in os.environ.items() if name != PLUGIN_VARIABLE}


# ---------------------------------------------------------------------- as the server


def run_plugin(plan: ServerPlan, placement: Literal["processor", "engine"]) -> int:
    """Run vLLM's own server with the plug-in of torino; return its exit code.

    Raises
    ------
    TorinoError
        If vLLM is missing, or the plug-in does not support the model or the options.
    """
    check_installed()
    from torino.serving.vllm.launch import engine_arguments, engine_environment
    from torino.serving.vllm.limits import MIDDLEWARE, write_limits
    from torino.serving.vllm.limits import VARIABLE as LIMITS

    # the middleware gives vLLM only data: URLs; a name that does not exist keeps it from fetching any other
    options = plan.options
    words = ["--middleware", MIDDLEWARE, "--allowed-media-domains", NO_HOST]
    words += ["--limit-mm-per-prompt", json.dumps({"image": options.max_images})]
    words += ["--max-num-seqs", str(options.batch), "--shutdown-timeout", str(round(options.grace))]
    words += ["--override-generation-config", json.dumps({"max_new_tokens": options.max_tokens})]
    words += ["--mm-processor-cache-gb", f"{options.cache_bytes / 2**30:g}"]
    if options.name != plan.model:
        words += ["--served-model-name", options.name]
    if plan.dtype is not None:
        words += ["--dtype", plan.dtype]
    device = "cpu" if plan.device == "auto" or placement == "engine" else plan.device
    arguments = engine_arguments(
        plan.model,
        plan.settings,
        placement,
        device=device,
        host=plan.host,
        port=plan.port,
        extra=[*words, *(plan.vllm or ())],
    )
    environment = engine_environment() | {LIMITS: write_limits(options, plan.log_format)}
    return run_vllm(arguments, environment)


def run_vllm(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run vLLM's own OpenAI server; pass signals on, and return its exit code.

    Parameters
    ----------
    arguments : sequence of str
        Options of ``vllm.entrypoints.openai.api_server``.
    environment : mapping
        Its environment; keys belong there, because others can read the command line.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", MODULE, *arguments],
        env=dict(environment),
        start_new_session=True,
        preexec_fn=end_with_parent,
    )
    log("vllm started", pid=process.pid)
    stops = 0

    def pass_on(number: int, _: FrameType | None) -> None:
        nonlocal stops
        stops += 1
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number if stops < 3 else signal.SIGKILL)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        code = process.wait()
        log("vllm ended", code=code)
        return code if code >= 0 else 128 - code
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # workers that vLLM left behind
