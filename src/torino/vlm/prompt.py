"""Write questions and conversations the way a model was trained to read them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torino.core.checks import check_type
from torino.core.errors import BadParameter, TorinoError
from torino.datasets.video import Video
from torino.vlm.adapters.base import Adapter

Turn = Mapping[str, Any]
"""A turn of a conversation: ``role``, and ``content``, a list of parts ``{"type": "text", "text": …}``,
``{"type": "image", "image": …}`` and ``{"type": "video", "video": Video}``."""

DEFAULT_MARKER = "<image>"


def user_turn(images: Sequence[Any], question: str) -> Turn:
    """Return the turn of a user who shows images or videos and then asks a question."""
    shown = [
        {"type": "video", "video": image} if isinstance(image, Video) else {"type": "image", "image": image}
        for image in images
    ]
    return {"role": "user", "content": [*shown, {"type": "text", "text": question}]}


def check_question(question: str, processor: Any) -> None:
    """Refuse an empty question, and one that contains the image marker."""
    check_type("question", question, str, "text")
    if not question.strip():
        raise BadParameter("The question is empty. Ask something, such as 'What is in this image?'.")
    for kind, marker in markers(processor).items():
        if marker in question:
            what = f"{'an' if kind == 'image' else 'a'} {kind}"
            raise BadParameter(f"The question contains {marker!r}, which marks {what}. Remove it; {kind}s are added.")


def turn_images(conversation: Sequence[Turn]) -> list[Any]:
    """Return the images of a conversation, in order."""
    return [part["image"] for turn in conversation for part in turn["content"] if part["type"] == "image"]


def turn_visuals(conversation: Sequence[Turn]) -> list[Any]:
    """Return the images and videos of a conversation, in order."""
    parts = [part for turn in conversation for part in turn["content"]]
    return [part[part["type"]] for part in parts if part["type"] in ("image", "video")]


def last_question(conversation: Sequence[Turn]) -> str:
    """Return the text of the user's last turn."""
    last = [turn for turn in conversation if turn["role"] == "user"][-1:]
    return " ".join(str(part["text"]) for turn in last for part in turn["content"] if part["type"] == "text")


def write_prompt(conversation: Sequence[Turn], processor: Any, adapter: Adapter) -> str:
    """Write a conversation with the model's chat template, with one marker for each image.

    A single question to a model without one is written with the adapter's own template, if it has one.

    Raises
    ------
    TorinoError
        If the model has no chat template and none is known for its family, or if its template fails.
    """
    marker = image_marker(processor)
    family = str(adapter.config.model_type)
    known = markers(processor).values()
    turns: list[dict[str, Any]] = [
        {"role": str(turn["role"]), "content": [_part(part, known) for part in turn["content"]]}
        for turn in conversation
    ]
    template = getattr(processor, "chat_template", None) or getattr(processor.tokenizer, "chat_template", None)
    if template is not None:
        try:
            return processor.apply_chat_template(turns, chat_template=template, add_generation_prompt=True)
        except Exception as error:  # a template is a program and may raise anything
            raise TorinoError(f"The chat template of this {family} model failed: {error}") from error
    if not adapter.prompt_template or len(turns) > 1:
        what = "a conversation" if len(turns) > 1 else "a question"
        raise TorinoError(
            f"The processor of this {family} model has no chat template, so torino does not know how to write {what}. "
            "Set processor.chat_template, or download chat_template.jinja beside the weights."
        )
    parts = turns[0]["content"]
    images = f"{marker}{adapter.image_suffix}" * sum(part["type"] == "image" for part in parts)
    question = "\n".join(part["text"] for part in parts if part["type"] == "text")
    return adapter.prompt_template.format(images=images, question=question)


def image_marker(processor: Any) -> str:
    """Return the text that stands for an image in a prompt."""
    return str(getattr(processor, "image_token", None) or DEFAULT_MARKER)


def markers(processor: Any) -> dict[str, str]:
    """Return the texts that stand for an image and, where the processor has one, for a video."""
    video = getattr(processor, "video_token", None)
    return {"image": image_marker(processor)} | ({"video": str(video)} if video else {})


def special_token_options(prompt: str, processor: Any) -> dict[str, Any]:
    """Return the tokenizer options for a written prompt: no second start token if the template has written one."""
    start = getattr(getattr(processor, "tokenizer", None), "bos_token", None)
    return {"add_special_tokens": False} if start and prompt.startswith(start) else {}


def _part(part: Mapping[str, Any], known: Iterable[str]) -> dict[str, Any]:
    if part["type"] == "text":
        text = str(part["text"])
        for marker in known:  # a marker inside the text would stand for an image that is not given
            text = text.replace(marker, "").strip() if marker in text else text
        return {"type": "text", "text": text}
    if part["type"] not in ("image", "video"):
        raise TorinoError(f"The conversation contains a {part['type']}; torino reduces images and videos only.")
    return {"type": part["type"]}
