"""Requests of OpenAI's chat completions, as far as they are supported, and the words for what is not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, cast

from torino.core.extras import optional_import
from torino.serving.server.errors import ApiError, bad_request
from torino.vlm.prompt import Turn

with optional_import("torino serve needs", "torino[serve]"):
    from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

MAX_MESSAGES, MAX_PARTS, MAX_STOPS, MAX_STOP_LENGTH = 256, 256, 4, 256
BRANCHES = ("str", "ImageLocation")  # names of alternatives in the place of an error
EMBEDS = "Embeddings are not accepted from clients. Send the image as an image_url part with a data: URL."


class RequestModel(BaseModel):
    """Base of all parts of a request: unknown fields and wrong types are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class TextPart(RequestModel):
    """Text of a message."""

    type: Literal["text"]
    text: str


class ImageLocation(RequestModel):
    """Where an image is; ``detail`` has no effect, because the method decides how many tokens an image has."""

    url: str
    detail: Literal["auto", "low", "high"] = "auto"


class ImagePart(RequestModel):
    """An image of a message."""

    type: Literal["image_url"]
    image_url: ImageLocation | str

    @property
    def url(self) -> str:
        """The URL of the image."""
        return self.image_url if isinstance(self.image_url, str) else self.image_url.url


class ChatMessage(RequestModel):
    """One turn: text, or text and images."""

    role: Literal["system", "developer", "user", "assistant"]
    content: (
        str | Annotated[list[Annotated[TextPart | ImagePart, Field(discriminator="type")]], Field(max_length=MAX_PARTS)]
    )
    name: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_embeds(cls, given: Any) -> Any:
        content = cast(dict[str, Any], given).get("content") if isinstance(given, dict) else None
        for part in cast(list[Any], content) if isinstance(content, list) else []:
            kind = cast(dict[str, Any], part).get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and kind.endswith("_embeds"):
                raise ValueError(EMBEDS)
        return given

    @model_validator(mode="after")
    def _check_images(self) -> ChatMessage:
        if self.role != "user" and any(isinstance(part, ImagePart) for part in self.parts):
            raise ValueError(f"images belong in messages of the user, not of the {self.role}")
        if not self.parts:
            raise ValueError("the content of a message is empty")
        return self

    @property
    def parts(self) -> Sequence[TextPart | ImagePart]:
        """The parts of the message."""
        return [TextPart(type="text", text=self.content)] if isinstance(self.content, str) else self.content


class StreamOptions(RequestModel):
    """Options of a streamed answer."""

    include_usage: bool = False
    include_obfuscation: bool = False


class ResponseFormat(RequestModel):
    """The format of an answer; only text."""

    type: Literal["text"]


class TorinoRequest(RequestModel):
    """What a request may ask of torino."""

    explain: bool = False


class ChatRequest(RequestModel):
    """A request of ``/v1/chat/completions``."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    model: str | None = None
    max_tokens: Annotated[int | None, Field(ge=1)] = None
    max_completion_tokens: Annotated[int | None, Field(ge=1)] = None
    temperature: Annotated[float | None, Field(ge=0, le=2, allow_inf_nan=False)] = None
    top_p: Annotated[float | None, Field(gt=0, le=1, allow_inf_nan=False)] = None
    stop: str | Annotated[list[str], Field(max_length=MAX_STOPS)] | None = None
    seed: Annotated[int | None, Field(ge=-(2**63), le=2**63 - 1)] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    torino: TorinoRequest = TorinoRequest()
    # accepted because clients send them; other values than these would change the answer
    n: Literal[1] | None = None
    logprobs: Literal[False] | None = None
    frequency_penalty: Literal[0] | None = None
    presence_penalty: Literal[0] | None = None
    response_format: ResponseFormat | None = None
    # without effect on the answer
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @field_validator("frequency_penalty", "presence_penalty", mode="before")
    @classmethod
    def _to_int(cls, value: Any) -> Any:
        return int(value) if isinstance(value, float) and value.is_integer() else value

    @field_validator("stop")
    @classmethod
    def _check_stop(cls, value: str | list[str] | None) -> str | list[str] | None:
        texts = [value] if isinstance(value, str) else value or []
        if any(not text or len(text) > MAX_STOP_LENGTH for text in texts):
            raise ValueError(f"each text must have 1 to {MAX_STOP_LENGTH} characters")
        return value

    @model_validator(mode="after")
    def _check_user(self) -> ChatRequest:
        if not any(message.role == "user" for message in self.messages):
            raise ValueError("messages must contain a message of the user")
        return self


@dataclass(frozen=True)
class Sampling:
    """How an answer is generated.

    Attributes
    ----------
    max_tokens : int
        Most generated tokens.
    temperature : float
        0 is greedy decoding.
    top_p : float
    stop : tuple of str
        The answer ends before the first of these texts.
    seed : int, optional
    stream : bool
        Whether text is wanted before the answer is complete.
    at_most : bool
        Whether ``max_tokens`` is only the server's limit, so that a long prompt may leave less.
    """

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    seed: int | None = None
    stream: bool = False
    at_most: bool = False


def parse_request(body: bytes) -> ChatRequest:
    """Parse and check a request.

    Raises
    ------
    ApiError
        With status 400 and one sentence about the first error.
    """
    try:
        return ChatRequest.model_validate_json(body)
    except ValidationError as error:
        raise describe_error(error) from None


def describe_error(error: ValidationError) -> ApiError:
    """Return the first error of a validation as one sentence."""
    # of the alternatives of a field, the one that went furthest is the one that was meant
    first = max(error.errors(include_url=False), key=lambda item: len(item["loc"]))
    kind, message = first["type"], first["msg"]
    path: list[str] = []
    for step in map(str, first["loc"]):
        if step not in BRANCHES and "[" not in step and path[-1:] != [step]:
            path.append(step)
    where = ".".join(path)
    if kind == "json_invalid":
        return bad_request(f"The body is not valid JSON: {message.removeprefix('Invalid JSON: ')}.")
    if not path:
        return bad_request(f"The request is wrong: {message.removeprefix('Value error, ')}.")
    if kind == "extra_forbidden":
        return bad_request(f"{where} is not supported by this server. Omit it.", where)
    if kind == "missing":
        return bad_request(f"{where} is missing.", where)
    if kind == "value_error":
        text = message.removeprefix("Value error, ")
        return bad_request(text if text == EMBEDS else f"{where} is wrong: {text}.", where)
    got = repr(first.get("input"))
    got = got if len(got) <= 60 else got[:57] + "…"
    return bad_request(f"{where} is wrong: {message[:1].lower()}{message[1:]}, got {got}.", where)


def sampling_of(request: ChatRequest, longest: int) -> Sampling:
    """Return how to generate the answer; ``longest`` is the server's limit, and the default."""
    wanted = request.max_completion_tokens or request.max_tokens
    if wanted is not None and wanted > longest:
        raise bad_request(f"max_tokens must be at most {longest} on this server, got {wanted}.", "max_tokens")
    stop = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())
    return Sampling(
        max_tokens=wanted or longest,
        temperature=request.temperature or 0.0,
        top_p=request.top_p or 1.0,
        stop=stop,
        seed=request.seed,
        stream=bool(request.stream),
        at_most=wanted is None,
    )


def conversation_of(request: ChatRequest) -> tuple[list[Turn], list[str]]:
    """Return the conversation, whose image parts have no image yet, and the URLs of its images, in order."""
    turns: list[Turn] = []
    urls: list[str] = []
    for message in request.messages:
        content: list[dict[str, Any]] = []
        for part in message.parts:
            if isinstance(part, TextPart):
                content.append({"type": "text", "text": part.text})
            else:
                urls.append(part.url)
                content.append({"type": "image"})
        turns.append({"role": "system" if message.role == "developer" else message.role, "content": content})
    return turns, urls
