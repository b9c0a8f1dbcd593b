"""A model of lmms-eval (0.7.3) that runs any reducer: ``lmms-eval --model torino --model_args pretrained=…,reducer=…``.

The kit finds it through the entry point group ``lmms_eval.models``. It reads its arguments divided by commas, so inside
the brackets of a reducer stands ``;``: ``reducer=torino-m(k=2;delta=2)``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any, ClassVar

from torino.core.errors import BadParameter, TorinoError
from torino.integrations.chat import ChatModel, Turn, base_of, cut, interleaved

LONGEST = 1024  # tokens of an answer where a task says nothing, as for the kit's own LLaVA
ACCEPTED = (
    "pretrained",
    "reducer",
    "sae",
    "budget",
    "clip",
    "padding",
    "positions",
    "device",
    "dtype",
    "batch_size",
)


Base: Any = base_of("lmms_eval.api.model", "lmms")


class TorinoChat(Base):
    """Answers conversations, as lmms-eval writes them for chat models.

    Parameters
    ----------
    pretrained : str
        Hub name or folder of the vision-language model.
    batch_size : int or str
        Questions answered together.
    max_batch_size
        Not used; the kit hands it to every model.
    **options
        ``reducer``, ``sae``, ``budget``, ``clip``, ``padding``, ``positions``, ``device``, ``dtype``, as for
        :class:`torino.integrations.ChatModel`.
    """

    is_simple: ClassVar[bool] = False

    def __init__(
        self, pretrained: str = "", batch_size: int | str = 1, max_batch_size: Any = None, **options: Any
    ) -> None:
        if Base is object:
            raise TorinoError(
                "This model is a guest of lmms-eval, which is not installed. pip install lmms-eval==0.7.3, or evaluate "
                "with torino eval."
            )
        super().__init__()
        strange = sorted(set(options) - set(ACCEPTED))
        if strange:
            raise BadParameter(
                f"The model torino has no argument {strange[0]!r}. It takes {', '.join(ACCEPTED)}. Inside the brackets "
                "of a reducer write ; instead of a comma: reducer=torino-m(k=2;delta=2)."
            )
        if not pretrained:
            raise BadParameter("Say which model answers: --model_args pretrained=llava-hf/llava-1.5-7b-hf,reducer=…")
        if not str(batch_size).isdecimal() or int(batch_size) < 1:
            raise BadParameter(f"batch_size must be a whole number of at least 1, got {batch_size!r}.")
        self.batch_size = int(batch_size)
        self.guest = ChatModel(str(pretrained), **options)

    @property
    def device(self) -> Any:
        """Where the model is."""
        return self.guest.device

    # ------------------------------------------------------------------ what the kit asks for

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Answer requests, in their order."""
        progress = import_module("tqdm").tqdm(total=len(requests), disable=self.rank != 0, desc="torino")
        texts: list[str] = []
        for batch in self._batches([request.args for request in requests]):
            talks = [self._talk(arguments) for arguments in batch]
            asked = self._generation(batch[0])
            length = int(asked.get("max_new_tokens") or LONGEST)
            answers = self.guest.answer(talks, length, **asked)
            texts += [cut(answer, asked.get("until")) for answer in answers]
            progress.update(len(batch))
        progress.close()
        import_module("loguru").logger.info(f"torino: {self.guest.summary()}")
        return texts

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """The loss of each continuation: what this kit's models return here, and its tasks take the least of."""
        found: list[tuple[float, bool]] = []
        for request in requests:
            context, target, see, number, task, split = request.args
            document = self.task_dict[task][split][number]
            said = target if isinstance(target, str) else target(document)
            found.append(self.guest.loss(_simple(context, see(document)), str(said)))
        return found

    def generate_until_multi_round(self, requests: Sequence[Any]) -> list[str]:
        """Refuse: reduced prompts of one round are not those of the next."""
        raise TorinoError("This task goes over several rounds, and torino answers those of one. Choose another task.")

    # ------------------------------------------------------------------ requests

    def _batches(self, all_: Sequence[Sequence[Any]]) -> Iterator[list[Sequence[Any]]]:
        """Neighbours that are asked in the same way, up to the batch size."""
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

    def _talk(self, arguments: Sequence[Any]) -> list[Turn]:
        _, messages, _, number, task, split = arguments
        return [_turn(message) for message in messages(self.task_dict[task][split][number])]


class TorinoSimple(TorinoChat):
    """The same for the kit's simple models (``--force_simple``): a text, and pictures where it marks their places."""

    is_simple: ClassVar[bool] = True

    def _generation(self, arguments: Sequence[Any]) -> dict[str, Any]:
        return dict(arguments[1])

    def _talk(self, arguments: Sequence[Any]) -> list[Turn]:
        context, _, see, number, task, split = arguments
        return _simple(context, see(self.task_dict[task][split][number]))


def manifest() -> Any:
    """What the entry point gives lmms-eval: a model called ``torino``, for conversations and for plain texts."""
    place = f"{__name__}."
    return import_module("lmms_eval.models.registry_v2").ModelManifest(
        model_id="torino", simple_class_path=place + TorinoSimple.__name__, chat_class_path=place + TorinoChat.__name__
    )


def _turn(message: Mapping[str, Any]) -> Turn:
    """A message of the kit, whose pictures are under ``url``, as a turn."""
    content = message["content"]
    parts: list[Any] = [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
    return {
        "role": message["role"],
        "content": [
            part if part["type"] == "text" else {"type": part["type"], "image": part.get("url")} for part in parts
        ],
    }


def _simple(context: str, pictures: Sequence[Any] | None) -> list[Turn]:
    return [{"role": "user", "content": interleaved(context, list(pictures or []))}]
