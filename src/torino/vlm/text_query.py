"""Encode the question with a CLIP text tower, for reducers that choose patches by it.

A vision-language model contains only the vision tower of a CLIP. :class:`ClipText` holds its text tower and its
projections, and provides two signals:

``text`` of shape (m, d)
    The embedded question. CLIP reads 77 tokens at a time, so a longer question has m segments.
``joint`` of shape (N, d)
    The patches at the feature layer, after CLIP's final norm and its visual projection. CLIP was trained to do this
    only for the CLS token of the last block. CDPruner does it for the patches that the vision-language model reads
    (LLaVA-1.5: block 22).

::

    clip = load_clip_text("openai/clip-vit-large-patch14-336")
    reducer = make("cdpruner", budget=64)
    with reduced(model, reducer, text_query=clip.query("What is on the table?")):
        model.generate(**inputs)
    inputs = ReducingProcessor(processor, model, reducer, text_query=clip)(images=photo, text=prompt)

**The question** is the first of these that is available: ``question=`` in a call of
:class:`~torino.vlm.ReducingProcessor`; the argument of :meth:`ClipText.query`; the text of the user's last turn, for
``apply_chat_template`` of a ``ReducingProcessor``; all words of the prompt without placeholders and special tokens, if
a tokenizer can decode them (role names such as "USER:" are then included).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, linear

from torino.core.device import resolve_device, resolve_dtype
from torino.core.errors import BadFile, BadParameter, BadTokens, MissingSignal, TorinoError
from torino.core.tokens import VisualTokens
from torino.reducers._checks import check_choice
from torino.vlm.adapters.base import Adapter, EncodedImages
from torino.vlm.loading import fetch, local_name, transformers
from torino.vlm.towers import load_partial

# Questions about any image. Their words show what a patch has in common with all questions: see torino-q.
GENERIC_QUESTIONS = (
    "What is in the image?",
    "What is this?",
    "Describe the image in detail.",
    "How many are there?",
    "What color is it?",
    "Where is it?",
    "Is there anything on the left of the picture?",
    "What is on the right?",
    "What is he doing?",
    "Who is in the photo?",
    "What does it say?",
    "Which one is bigger?",
    "Can you see a small one, or some of them?",
    "Are they the same?",
    "What kind of place does the picture show?",
    "Is it day or night?",
    "Why is she there?",
    "Answer the question with one word or yes or no.",
    "What is above it, and what is behind it?",
    "Does it look old or new?",
    "What are they for?",
    "Is this indoors or outdoors?",
    "What is in front of it?",
    "What is next to it?",
    "Has it been used?",
    "What shape does it have?",
    "how many, what, where, which, who, is there, are there, does, do, was, were",
    "Choose one: A, B, C, D.",
)

Segments = Literal["released", "closed"]
Question = str | Sequence[str]
# Config values that identify a CLIP tower; towers of equal shape from different trainings cannot be told apart.
SHAPE = ("hidden_size", "num_hidden_layers", "patch_size", "image_size")


def load_clip_text(
    name_or_path: str | os.PathLike[str],
    *,
    segments: Segments = "released",
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype | None = None,
) -> ClipText:
    """Load the text tower of a CLIP model with its tokenizer and projections, by hub name or folder.

    Parameters
    ----------
    name_or_path : str or path
        The CLIP whose vision tower the model uses: ``openai/clip-vit-large-patch14-336`` for LLaVA-1.5 and LLaVA-NeXT.
        The blocks of its vision tower are not loaded.
    segments
        As for :class:`ClipText`.
    device, dtype
        As for :func:`torino.vlm.towers.load_tower`.

    Raises
    ------
    Unreachable, BadFile, TorinoError
        If it cannot be downloaded, if something is missing, or if it is not a CLIP.
    """
    library, name, target = transformers(), local_name(name_or_path), resolve_device(device)
    config = fetch(library.AutoConfig.from_pretrained, name, "config.json")
    if config.model_type != "clip":
        raise TorinoError(
            f"{name} ({config.model_type}) is not a CLIP with a text tower. Give the CLIP whose vision tower the model "
            "uses, such as openai/clip-vit-large-patch14-336 for LLaVA-1.5."
        )
    shape = {key: getattr(config.vision_config, key) for key in SHAPE}
    config.vision_config.num_hidden_layers = 0  # the vision-language model has these blocks
    tokenizer = fetch(library.AutoTokenizer.from_pretrained, name, "tokenizer")
    model, missing = load_partial(
        library.CLIPModel.from_pretrained, name, config=config, dtype=resolve_dtype(dtype, target)
    )
    if missing:
        raise BadFile(
            f"{name} has no weights for {len(missing)} tensors of CLIP, such as {missing[0]}. The checkpoint is "
            "incomplete: download it again, or give a complete CLIP."
        )
    return ClipText(model.to(target).eval(), tokenizer, segments=segments, vision=shape)


class ClipText:
    """The text tower of a CLIP, and the projection of patches to the joint space of images and text.

    Parameters
    ----------
    model : CLIPModel
        A loaded model, which is not changed; see :func:`load_clip_text`. Its vision blocks are not used.
    tokenizer : tokenizer of CLIP, or a processor that has one
    segments : {"released", "closed"}
        How to split a question of more than 77 tokens. The released code of CDPruner (``"released"``) cuts the token
        sequence, including start and end token, into runs of 77 and embeds each as a text. CLIP's output is read at the
        end token, which only the last run has; in the first run it is read at the start token, so it depends on no
        word. ``"closed"`` gives each run of 75 words its own start and end token. Shorter questions are the same in
        both.
    vision : mapping, optional
        Config values of the tower that differ from this CLIP's config, such as ``{"image_size": 448}`` for a tower that
        was fine-tuned on larger images.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        *,
        segments: Segments = "released",
        vision: Mapping[str, int] | None = None,
    ) -> None:
        check_choice("segments", segments, Segments)
        if not all(hasattr(model, part) for part in ("text_model", "visual_projection", "vision_model")):
            raise BadParameter(
                f"ClipText needs a CLIPModel, with both towers and their projections, got {type(model).__name__}. "
                "Load one with load_clip_text(name)."
            )
        self.model: Any = model
        self.tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
        self.segments: Segments = segments
        config = self.model.config.vision_config
        self.vision = {key: getattr(config, key) for key in SHAPE} | dict(vision or {})
        vocabulary, known = int(self.model.config.text_config.vocab_size), len(self.tokenizer)
        if not vocabulary // 2 < known <= vocabulary:  # transformers silently creates an empty tokenizer without files
            raise BadFile(
                f"The tokenizer has {known} tokens, and this CLIP has {vocabulary}, so it is not the tokenizer of this "
                "CLIP. Download tokenizer.json, or vocab.json and merges.txt, beside the weights."
            )
        self.max_length = int(self.model.config.text_config.max_position_embeddings)

    def __repr__(self) -> str:
        """Return the widths of patches and of the joint space."""
        width = self.model.visual_projection.out_features
        return f"ClipText(patches of width {self.vision['hidden_size']} and questions, both to width {width})"

    # ------------------------------------------------------------------ the two signals

    @torch.no_grad()
    def text(self, question: str) -> Tensor:
        """Embed a question: (m, d) float32, one row for each segment."""
        if not question.strip():
            raise MissingSignal("The question is empty, and patches are chosen by it. Give a question.")
        ids: list[int] = self.tokenizer(question, verbose=False)["input_ids"]
        rows = self._split(ids)
        # Padding follows the end token, and CLIP's text tower is causal, so padding has no effect.
        length = max(map(len, rows))
        padded = torch.tensor([[*row, *[0] * (length - len(row))] for row in rows])
        output = self.model.get_text_features(input_ids=padded.to(self.model.visual_projection.weight.device))
        return cast(Tensor, getattr(output, "pooler_output", output)).float()

    def _split(self, ids: Sequence[int]) -> list[list[int]]:
        """Split token ids into segments."""
        size = self.max_length
        if len(ids) <= size or self.segments == "released":
            return [list(ids[start : start + size]) for start in range(0, len(ids), size)]
        first, *words, last = ids
        return [[first, *words[start : start + size - 2], last] for start in range(0, len(words), size - 2)]

    @torch.no_grad()
    def joint(self, patches: Tensor) -> Tensor:
        """Project patches (N, D) of CLIP's tower to the joint space: (N, d) float32."""
        norm, projection = self.model.vision_model.post_layernorm, self.model.visual_projection
        if patches.ndim != 2 or patches.shape[1] != projection.in_features:
            raise BadTokens(
                f"patches must have shape (N, {projection.in_features}), got {tuple(patches.shape)}. Give tokens of "
                "this CLIP's own vision tower."
            )
        values = patches.detach().to(projection.weight.device).float()
        normed = layer_norm(values, norm.normalized_shape, norm.weight.float(), norm.bias.float(), norm.eps)
        return linear(normed, projection.weight.float())

    def signals(self, tokens: VisualTokens, question: str) -> VisualTokens:
        """Return tokens of CLIP's tower with both signals."""
        return _with_signals(tokens, self.joint(tokens.patches), self.text(question))

    # ------------------------------------------------------------------ use in a model

    def check(self, adapter: Adapter) -> None:
        """Refuse a model whose vision tower does not belong to this CLIP."""
        config, shape = getattr(adapter.config, "vision_config", None), self.vision
        kind = str(getattr(config, "model_type", "none"))
        if not kind.startswith("clip"):
            raise MissingSignal(
                f"The vision tower of {type(adapter.model).__name__} ({kind}) is not a CLIP tower, so its patches "
                "cannot be compared with a question. Choose a reducer that does not read the question."
            )
        different = [key for key in SHAPE if getattr(config, key) != shape[key]]
        if different:
            key = different[0]
            raise BadParameter(
                f"This CLIP does not match the model's vision tower: its {key} is {shape[key]}, and the model's is "
                f"{getattr(config, key)}. LLaVA-1.5 uses openai/clip-vit-large-patch14-336. If it is the right CLIP "
                f"nevertheless, pass ClipText(..., vision={{{key!r}: {getattr(config, key)}}})."
            )

    def embed(self, adapter: Adapter, question: str) -> Tensor:
        """Embed a question for a model; see :meth:`text`."""
        return self.text(question)

    def add(self, tokens: VisualTokens, text: Tensor) -> VisualTokens:
        """Add both signals to the tokens of one unit."""
        return _with_signals(tokens, self.joint(tokens.patches), text)

    def query(self, question: Question | None = None, *, prompts: Any = None) -> TextQuery:
        """Return the question for ``reduced(model, reducer, text_query=...)``.

        Parameters
        ----------
        question : str or sequence of str, optional
            One for all prompts, or one for each prompt of every call. All images of a prompt share its question.
        prompts : tokenizer or processor of the model, optional
            Decodes the prompts if no question is given; the question is then all words of the prompt, without
            placeholders and special tokens.
        """
        return TextQuery(self, question, prompts)


class WordText:
    """The input embeddings of the language model for the words of a question: the signal ``words``, (m, E).

    Special tokens are left out. Patches are compared with them after the projector, so every model can be used.

    Parameters
    ----------
    tokenizer : tokenizer of the model, or a processor that has one

    Examples
    --------
    ::

        with reduced(model, make("mmtok", budget=64), text_query=WordText(processor).query("What is it?")):
            model.generate(**inputs)
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
        self._generic: list[int] | None = None
        if not callable(self.tokenizer):
            raise BadParameter(
                f"WordText needs the tokenizer or the processor of the model, got {type(tokenizer).__name__}."
            )

    def query(self, question: Question | None = None, *, prompts: Any = None) -> TextQuery:
        """Return the question for ``reduced(model, reducer, text_query=...)``; as :meth:`ClipText.query`."""
        return TextQuery(self, question, self.tokenizer if prompts is None else prompts)

    def check(self, adapter: Adapter) -> None:
        """Accept every model."""

    @torch.no_grad()
    def embed(self, adapter: Adapter, question: str) -> Tensor:
        """Return the input embedding of each token of a question."""
        ids = self._ids(question)
        if not ids:
            raise MissingSignal("The question is empty, and patches are chosen by it. Give a question.")
        table: nn.Module = cast(Any, adapter.model).get_input_embeddings()
        return table(torch.tensor(ids, device=next(table.parameters()).device)).float()

    def add(self, tokens: VisualTokens, text: Tensor) -> VisualTokens:
        """Add the signal to the tokens of one unit."""
        return tokens.with_(signals={**tokens.signals, "words": text.to(tokens.patches.device)})

    def add_generic(self, tokens: VisualTokens, question: str, adapter: Adapter) -> VisualTokens:
        """Add the signal ``generic_words``, the words of questions about any image, and the words as text."""
        table: nn.Module = cast(Any, adapter.model).get_input_embeddings()
        if self._generic is None:
            self._generic = sorted({token for text in GENERIC_QUESTIONS for token in self._ids(text)})
        generic = table(torch.tensor(self._generic, device=next(table.parameters()).device)).float()
        signals = {**tokens.signals, "generic_words": generic.to(tokens.patches.device)}
        return tokens.with_(signals=signals, question_words=self.words(question))

    def words(self, question: str) -> tuple[str, ...]:
        """Return the word that each token of a question belongs to."""
        if not getattr(self.tokenizer, "is_fast", False):
            decode = getattr(self.tokenizer, "decode", str)
            return tuple(str(decode([token])).strip() for token in self._ids(question))
        spans = self.tokenizer(question, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        matches = [(match.start(), match.end(), match.group()) for match in re.finditer(r"\w+|[^\w\s]+", question)]
        return tuple(
            next((word for begin, end, word in matches if first < end and begin < last), question[first:last].strip())
            for first, last in spans
        )

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]


@dataclass(frozen=True)
class TextQuery:
    """A question, or a decoder of prompts to read it from, and what reads it. See :meth:`ClipText.query`."""

    reader: ClipText | WordText
    question: Question | None = None
    prompts: Any = None

    def __post_init__(self) -> None:
        """Refuse questions that are not text."""
        question: Any = self.question
        is_list = isinstance(question, list | tuple) and all(isinstance(q, str) for q in cast(list[Any], question))
        if question is not None and not isinstance(question, str) and not is_list:
            raise BadParameter(f"question must be a string, or a list with one for each prompt, got {question!r:.60}.")

    def with_prompts(self, processor: Any, question: Question | None = None) -> TextQuery:
        """Return a query with the question of one call, and with a processor that decodes prompts if there is none."""
        return replace(
            self,
            question=self.question if question is None else question,
            prompts=processor if self.prompts is None else self.prompts,
        )

    @torch.no_grad()
    def add(
        self, adapter: Adapter, encoded: EncodedImages, inputs: Mapping[str, Any], needs: frozenset[str]
    ) -> EncodedImages:
        """Add the signals of the question that are needed to every unit, each with the question of its prompt."""
        self.reader.check(adapter)
        questions = self._questions(inputs, adapter.placeholder(inputs))
        rows = _image_rows(inputs["input_ids"], adapter.placeholder(inputs), encoded.full)
        # Each question is embedded separately, so that its embedding does not depend on the others in the batch.
        texts = {
            question: self.reader.embed(adapter, question) for question in sorted({questions[row] for row in rows})
        }
        per_unit = [questions[row] for row, units in zip(rows, encoded.units, strict=True) for _ in range(units)]
        tokens = [self.reader.add(unit, texts[asked]) for unit, asked in zip(encoded.tokens, per_unit, strict=True)]
        if "generic_words" in needs and isinstance(self.reader, WordText):
            pairs = zip(tokens, per_unit, strict=True)
            tokens = [self.reader.add_generic(unit, asked, adapter) for unit, asked in pairs]
        return replace(encoded, tokens=tuple(tokens))

    def _questions(self, inputs: Mapping[str, Any], image_token: int) -> list[str]:
        """Return the question of each prompt."""
        ids: Tensor = inputs["input_ids"]
        if isinstance(self.question, str):
            return [self.question] * len(ids)
        if self.question is not None:
            if len(self.question) != len(ids):
                raise BadParameter(
                    f"{len(self.question)} questions were given for {len(ids)} prompts. Give one question for each "
                    "prompt, or a single one for all."
                )
            return list(self.question)
        decoder = getattr(self.prompts, "tokenizer", self.prompts)
        if decoder is None:
            raise MissingSignal(
                "Patches are chosen by the question, and none was given. Use text_query=clip.query(question), or "
                "text_query=clip.query(prompts=processor) to read it from the prompts."
            )
        mask = inputs.get("attention_mask")
        is_text = ids != image_token if mask is None else (ids != image_token) & mask.bool()
        return [
            str(decoder.decode(row[is_word].tolist(), skip_special_tokens=True)).strip()
            for row, is_word in zip(ids, is_text, strict=True)
        ]


def last_user_messages(conversation: Any) -> list[str] | None:
    """Return the user's last message in a conversation, or in each of several; None if there is none.

    Examples
    --------
    >>> turn = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is this?"}]}
    >>> last_user_messages([turn]), last_user_messages([[turn], [{"role": "user", "content": "And that?"}]])
    (['What is this?'], ['What is this?', 'And that?'])
    """
    if not isinstance(conversation, Sequence) or isinstance(conversation, str) or not len(conversation):
        return None
    turns = cast(Sequence[Any], conversation)
    if not isinstance(turns[0], Mapping):
        messages = [last_user_messages(turn) for turn in turns]
        return [message[0] for message in messages if message] if all(messages) else None
    by_user = [turn for turn in turns if isinstance(turn, Mapping) and turn.get("role") == "user"]
    content: Any = by_user[-1].get("content") if by_user else None
    if isinstance(content, str):
        return [content]
    parts = cast(Sequence[Any], content or ())
    texts = [str(part["text"]) for part in parts if isinstance(part, Mapping) and part.get("type") == "text"]
    return [" ".join(texts)] if texts else None


def _with_signals(tokens: VisualTokens, joint: Tensor, text: Tensor) -> VisualTokens:
    device = tokens.patches.device
    return tokens.with_(signals={**tokens.signals, "joint": joint.to(device), "text": text.to(device)})


def _image_rows(ids: Tensor, image_token: int, full: Sequence[int]) -> list[int]:
    """Return the prompt of each image; prompts with a wrong number of placeholders are refused later."""
    rows = (ids == image_token).nonzero()[:, 0].tolist() or [0]
    ends = torch.tensor(full).cumsum(0)
    return [rows[min(int(end) - 1, len(rows) - 1)] for end in ends]
