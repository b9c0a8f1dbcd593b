"""A model for VLMEvalKit with any reducer.

VLMEvalKit lists its models in ``supported_VLM``; :func:`register_model` adds to it before ``run.py`` starts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from string import ascii_uppercase
from typing import Any, ClassVar

from torino.core.defaults import DEFAULT_METHOD
from torino.core.errors import BadParameter, TorinoError
from torino.evaluation.benchmarks import LETTER, LETTER_CHINESE
from torino.integrations.chat import ChatModel, base_class
from torino.vlm.prompt import Turn

PROMPTS = ("auto", "kit", "llava")
LLAVA = ("llava", "llava_next")
LONGEST = 512  # default length of an answer, as for the kit's own LLaVA
DIRECTLY, DIRECTLY_CHINESE = "Answer the question directly.", "请直接回答问题。"


Base: Any = base_class("vlmeval.vlm.base", "BaseModel")


class TorinoVLMEval(Base):
    """Answer messages of VLMEvalKit.

    Parameters
    ----------
    model_path : str
        Hub name or folder of the vision-language model.
    padding : {"auto", "crop", "square"}
        ``"auto"`` pads to a square for LLaVA-1.5, like the kit's own model; other families use their processors.
    prompts : {"auto", "kit", "llava"}
        How multiple-choice questions are written: by the dataset (``"kit"``) or by the rule of the kit's LLaVA models
        (``"llava"``), which ``"auto"`` uses for these families. Other questions are written by the dataset.
    max_new_tokens : int
    reducer, sae, budget, clip, positions, attention, device, dtype
        As for :class:`torino.integrations.ChatModel`.
    **generation
        ``temperature``, ``num_beams`` and so on; greedy by default.
    """

    INSTALL_REQ: ClassVar[bool] = False
    INTERLEAVE: ClassVar[bool] = True

    def __init__(
        self,
        model_path: str,
        *,
        reducer: str = DEFAULT_METHOD,
        sae: str | None = None,
        budget: int | None = None,
        clip: str | None = None,
        padding: str = "auto",
        positions: Any = "auto",
        attention: Any = "auto",
        device: str = "auto",
        dtype: str | None = None,
        prompts: str = "auto",
        max_new_tokens: int = LONGEST,
        **generation: Any,
    ) -> None:
        if Base is object:
            raise TorinoError(
                "VLMEvalKit is not installed. Install it from its repository, or evaluate with torino eval, which "
                "reads the same TSV files."
            )
        if prompts not in PROMPTS:
            raise BadParameter(f"prompts must be {', '.join(PROMPTS)}, got {prompts!r}.")
        if padding not in ("auto", "crop", "square"):
            raise BadParameter(f"padding must be auto, crop or square, got {padding!r}.")
        super().__init__()
        self.chat = ChatModel(
            model_path,
            reducer=reducer,
            sae=sae,
            budget=budget,
            clip=clip,
            padding="square" if padding == "square" else "crop",
            positions=positions,
            attention=attention,
            device=device,
            dtype=dtype,
        )
        if padding == "auto" and self.chat.family == "llava":
            self.chat.vlm.padding = "square"
        self.prompts, self.max_new_tokens, self.generation = prompts, max_new_tokens, generation

    def generate_inner(self, message: Sequence[Mapping[str, Any]], dataset: str | None = None) -> str:
        """Answer one message: parts with ``type`` (``text`` or ``image``) and ``value``."""
        return self.chat.answer([_conversation(message)], self.max_new_tokens, **self.generation)[0]

    def use_custom_prompt(self, dataset: str | None) -> bool:
        """Return whether :meth:`build_prompt` writes the questions of this dataset."""
        if dataset is None or self.prompts == "kit" or (self.prompts == "auto" and self.chat.family not in LLAVA):
            return False
        return import_module("vlmeval.dataset").DATASET_TYPE(dataset) == "MCQ"

    def build_prompt(self, line: Mapping[str, Any], dataset: str | None = None) -> list[dict[str, str]]:
        """Write a multiple-choice question as the kit's LLaVA models do."""
        paths: list[str] = self.dump_image(line, dataset)
        return [*({"type": "image", "value": path} for path in paths), {"type": "text", "value": write_question(line)}]


def write_question(line: Mapping[str, Any]) -> str:
    """Write hint, question, options and the instruction to answer with a letter, in the question's language.

    Examples
    --------
    >>> print(write_question({"question": "Which is red?", "A": "sky", "B": "rose", "C": float("nan")}))
    Which is red?
    A. sky
    B. rose
    Answer with the option's letter from the given choices directly.
    """
    hint = [str(line["hint"])] if _is_given(line.get("hint")) else []
    options = [f"{letter}. {line[letter]}" for letter in ascii_uppercase if _is_given(line.get(letter))]
    text = "\n".join([*hint, str(line["question"]), *options])
    chinese = re.search("[\u4e00-\u9fff]", text) is not None
    if options:
        return f"{text}\n{LETTER_CHINESE if chinese else LETTER}"
    return f"{text}\n{DIRECTLY_CHINESE if chinese else DIRECTLY}"


def register_model(name: str, model_path: str, **options: Any) -> None:
    """Add a model to VLMEvalKit under a name, for ``run.py --model NAME``; it is loaded when the kit uses it.

    Parameters
    ----------
    name : str
    model_path, **options
        As for :class:`TorinoVLMEval`.
    """
    try:
        table: dict[str, Any] = import_module("vlmeval.config").supported_VLM
    except ImportError as error:
        raise TorinoError(f"VLMEvalKit cannot be imported ({error}). Install it from its repository.") from error
    if name in table:
        raise BadParameter(f"VLMEvalKit already has a model called {name!r}. Choose another name.")
    table[name] = partial(TorinoVLMEval, model_path=model_path, **options)


def _is_given(value: Any) -> bool:
    """Return whether a table cell has a value; empty cells are NaN, which is not equal to itself."""
    return value is not None and value == value


def _conversation(message: Sequence[Mapping[str, Any]]) -> list[Turn]:
    parts: list[dict[str, Any]] = []
    for part in message:
        kind = str(part["type"])
        parts.append({"type": kind, ("text" if kind == "text" else "image"): part["value"]})
    return [{"role": "user", "content": parts}]
