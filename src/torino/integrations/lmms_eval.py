"""A model for lmms-eval (0.7.3) with any reducer: ``lmms-eval --model torino --model_args pretrained=…,reducer=…``.

lmms-eval finds it through the entry point group ``lmms_eval.models``. It splits arguments at commas, so write ``;``
inside the brackets of a reducer: ``reducer=torino-m(k=2;delta=2)``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any, ClassVar

from torino.core.errors import BadParameter, TorinoError
from torino.integrations.chat import ChatModel, base_class, cut_at, interleave
from torino.vlm.prompt import Turn

LONGEST = 1024  # default length of an answer, as for the kit's own LLaVA
ACCEPTED = (
    "pretrained",
    "reducer",
    "sae",
    "budget",
    "clip",
    "padding",
    "positions",
    "attention",
    "device",
    "dtype",
    "batch_size",
)


Base: Any = base_class("lmms_eval.api.model", "lmms")


class TorinoChat(Base):
    """Answer conversations as lmms-eval writes them for chat models.

    Parameters
    ----------
    pretrained : str
        Hub name or folder of the vision-language model.
    batch_size : int or str
        Questions answered together.
    max_batch_size
        Ignored; lmms-eval passes it to every model.
    **options
        ``reducer``, ``sae``, ``budget``, ``clip``, ``padding``, ``positions``, ``attention``, ``device``, ``dtype``,
        as for :class:`torino.integrations.ChatModel`.
    """

    is_simple: ClassVar[bool] = False

    def __init__(
        self, pretrained: str = "", batch_size: int | str = 1, max_batch_size: Any = None, **options: Any
    ) -> None:
        if Base is object:
            raise TorinoError(
                "lmms-eval is not installed. Install it with pip install lmms-eval==0.7.3, or use torino eval instead."
            )
        super().__init__()
        unknown = sorted(set(options) - set(ACCEPTED))
        if unknown:
            raise BadParameter(
                f"The model torino has no argument {unknown[0]!r}. It takes {', '.join(ACCEPTED)}. Inside the brackets "
                "of a reducer write ; instead of a comma: reducer=torino-m(k=2;delta=2)."
            )
        if not pretrained:
            raise BadParameter("No model was given. Use --model_args pretrained=llava-hf/llava-1.5-7b-hf,reducer=…")
        if not re.fullmatch(r"\d{1,9}", str(batch_size)) or int(batch_size) < 1:
            raise BadParameter(f"batch_size must be a whole number of at least 1, got {batch_size!r}.")
        self.batch_size = int(batch_size)
        self.chat = ChatModel(str(pretrained), **options)

    @property
    def device(self) -> Any:
        """Device of the model."""
        return self.chat.device

    # ------------------------------------------------------------------ the interface of lmms-eval

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Answer requests, in their order."""
        progress = import_module("tqdm").tqdm(total=len(requests), disable=self.rank != 0, desc="torino")
        texts: list[str] = []
        for batch in self._batches([request.args for request in requests]):
            conversations = [self._conversation(arguments) for arguments in batch]
            options = self._generation(batch[0])
            length = int(options.get("max_new_tokens") or LONGEST)
            answers = self.chat.answer(conversations, length, **options)
            texts += [cut_at(answer, options.get("until")) for answer in answers]
            progress.update(len(batch))
        progress.close()
        import_module("loguru").logger.info(f"torino: {self.chat.summary()}")
        return texts

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Return the loss of each continuation, as the kit's own models do; tasks choose the smallest."""
        losses: list[tuple[float, bool]] = []
        for request in requests:
            context, target, get_images, number, task, split = request.args
            document = self.task_dict[task][split][number]
            continuation = target if isinstance(target, str) else target(document)
            losses.append(self.chat.loss(_simple(context, get_images(document)), str(continuation)))
        return losses

    def generate_until_multi_round(self, requests: Sequence[Any]) -> list[str]:
        """Refuse tasks of several rounds."""
        raise TorinoError("This task has several rounds; torino supports tasks of one round. Choose another task.")

    # ------------------------------------------------------------------ requests

    def _batches(self, all_: Sequence[Sequence[Any]]) -> Iterator[list[Sequence[Any]]]:
        """Group neighbouring requests with the same generation options, up to the batch size."""
        batch: list[Sequence[Any]] = []
        for arguments in all_:
            if batch and (len(batch) == self.batch_size or self._generation(batch[0]) != self._generation(arguments)):
                yield batch
                batch = []
            batch.append(arguments)
        if batch:
            yield batch

    def _generation(self, arguments: Sequence[Any]) -> dict[str, Any]:
        return dict(arguments[2])

    def _conversation(self, arguments: Sequence[Any]) -> list[Turn]:
        _, messages, _, number, task, split = arguments
        return [_turn(message) for message in messages(self.task_dict[task][split][number])]


class TorinoSimple(TorinoChat):
    """The same for simple models (``--force_simple``): a text, and images at its markers."""

    is_simple: ClassVar[bool] = True

    def _generation(self, arguments: Sequence[Any]) -> dict[str, Any]:
        return dict(arguments[1])

    def _conversation(self, arguments: Sequence[Any]) -> list[Turn]:
        context, _, get_images, number, task, split = arguments
        return _simple(context, get_images(self.task_dict[task][split][number]))


def manifest() -> Any:
    """Return the model ``torino`` for lmms-eval's registry, for conversations and for plain texts."""
    place = f"{__name__}."
    return import_module("lmms_eval.models.registry_v2").ModelManifest(
        model_id="torino", simple_class_path=place + TorinoSimple.__name__, chat_class_path=place + TorinoChat.__name__
    )


def _turn(message: Mapping[str, Any]) -> Turn:
    """Convert a message of lmms-eval, whose images are under ``url``, to a turn."""
    content = message["content"]
    parts: list[Any] = [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
    return {
        "role": message["role"],
        "content": [
            part if part["type"] == "text" else {"type": part["type"], "image": part.get("url")} for part in parts
        ],
    }


def _simple(context: str, images: Sequence[Any] | None) -> list[Turn]:
    return [{"role": "user", "content": interleave(context, list(images or []))}]
