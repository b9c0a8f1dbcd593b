"""A model for VLMEvalKit that runs any reducer.

VLMEvalKit finds models in a table of its own, ``supported_VLM``, which :func:`register` adds to; ``docs/guests.md`` has
the few lines that do so before the kit's ``run.py`` starts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from string import ascii_uppercase
from typing import Any, ClassVar

from torino.core.errors import BadParameter, TorinoError
from torino.evaluation.benchmarks import LETTER, LETTER_CHINESE
from torino.integrations.chat import ChatModel, Turn, base_of

PROMPTS = ("auto", "kit", "llava")
LLAVA = ("llava", "llava_next")
LONGEST = 512  # tokens of an answer, as for the kit's own LLaVA
DIRECTLY, DIRECTLY_CHINESE = "Answer the question directly.", "请直接回答问题。"


Base: Any = base_of("vlmeval.vlm.base", "BaseModel")


class TorinoVLMEval(Base):
    """Answers messages of VLMEvalKit.

    Parameters
    ----------
    model_path : str
        Hub name or folder of the vision-language model.
    padding : {"auto", "crop", "square"}
        ``"auto"`` pads to a square for LLaVA-1.5, as the kit's own does, and leaves other families to their processors.
    prompts : {"auto", "kit", "llava"}
        Who words questions with options: the dataset (``"kit"``), or the rule of the kit's LLaVA models
        (``"llava"``), which ``"auto"`` takes for these families. Other questions are worded by the dataset.
    max_new_tokens : int
    reducer, sae, budget, clip, positions, device, dtype
        As for :class:`torino.integrations.ChatModel`.
    **generation
        ``temperature``, ``num_beams`` and the like; greedy without them.
    """

    INSTALL_REQ: ClassVar[bool] = False
    INTERLEAVE: ClassVar[bool] = True

    def __init__(
        self,
        model_path: str,
        *,
        reducer: str = "torino-m",
        sae: str | None = None,
        budget: int | None = None,
        clip: str | None = None,
        padding: str = "auto",
        positions: Any = "own",
        device: str = "auto",
        dtype: str | None = None,
        prompts: str = "auto",
        max_new_tokens: int = LONGEST,
        **generation: Any,
    ) -> None:
        if Base is object:
            raise TorinoError(
                "This model is a guest of VLMEvalKit, which is not installed. Install it from its repository, or "
                "evaluate with torino eval, which reads the same TSVs."
            )
        if prompts not in PROMPTS:
            raise BadParameter(f"prompts must be {', '.join(PROMPTS)}, got {prompts!r}.")
        if padding not in ("auto", "crop", "square"):
            raise BadParameter(f"padding must be auto, crop or square, got {padding!r}.")
        super().__init__()
        self.guest = ChatModel(
            model_path,
            reducer=reducer,
            sae=sae,
            budget=budget,
            clip=clip,
            padding="square" if padding == "square" else "crop",
            positions=positions,
            device=device,
            dtype=dtype,
        )
        if padding == "auto" and self.guest.family == "llava":
            self.guest.padding = "square"
        self.prompts, self.max_new_tokens, self.generation = prompts, max_new_tokens, generation

    def generate_inner(self, message: Sequence[Mapping[str, Any]], dataset: str | None = None) -> str:
        """Answer one message: parts with ``type`` (``text`` or ``image``) and ``value``."""
        return self.guest.answer([_talk(message)], self.max_new_tokens, **self.generation)[0]

    def use_custom_prompt(self, dataset: str | None) -> bool:
        """Whether questions of this dataset are worded by :meth:`build_prompt`."""
        if dataset is None or self.prompts == "kit" or (self.prompts == "auto" and self.guest.family not in LLAVA):
            return False
        return import_module("vlmeval.dataset").DATASET_TYPE(dataset) == "MCQ"

    def build_prompt(self, line: Mapping[str, Any], dataset: str | None = None) -> list[dict[str, str]]:
        """Word a question with options as the kit's LLaVA models do."""
        paths: list[str] = self.dump_image(line, dataset)
        return [*({"type": "image", "value": path} for path in paths), {"type": "text", "value": worded(line)}]


def worded(line: Mapping[str, Any]) -> str:
    """Hint, question, options, and the line that asks for a letter; in Chinese where the question is.

    Examples
    --------
    >>> print(worded({"question": "Which is red?", "A": "sky", "B": "rose", "C": float("nan")}))
    Which is red?
    A. sky
    B. rose
    Answer with the option's letter from the given choices directly.
    """
    hint = [str(line["hint"])] if _there(line.get("hint")) else []
    options = [f"{letter}. {line[letter]}" for letter in ascii_uppercase if _there(line.get(letter))]
    text = "\n".join([*hint, str(line["question"]), *options])
    chinese = re.search("[\u4e00-\u9fff]", text) is not None
    if options:
        return f"{text}\n{LETTER_CHINESE if chinese else LETTER}"
    return f"{text}\n{DIRECTLY_CHINESE if chinese else DIRECTLY}"


def register(name: str, model_path: str, **options: Any) -> None:
    """Make a model known to VLMEvalKit under a name, for ``run.py --model NAME``; it is opened when the kit runs it.

    Parameters
    ----------
    name : str
    model_path, **options
        As for :class:`Torino`.
    """
    try:
        table: dict[str, Any] = import_module("vlmeval.config").supported_VLM
    except ImportError as error:
        raise TorinoError(f"VLMEvalKit cannot be imported here ({error}). Install it from its repository.") from error
    if name in table:
        raise BadParameter(f"VLMEvalKit has a model called {name!r} already. Choose another name.")
    table[name] = partial(TorinoVLMEval, model_path=model_path, **options)


def _there(value: Any) -> bool:
    """Whether a cell of a table holds anything; empty ones are not a number, which is not equal to itself."""
    return value is not None and value == value


def _talk(message: Sequence[Mapping[str, Any]]) -> list[Turn]:
    parts: list[dict[str, Any]] = []
    for part in message:
        kind = str(part["type"])
        parts.append({"type": kind, ("text" if kind == "text" else "image"): part["value"]})
    return [{"role": "user", "content": parts}]
