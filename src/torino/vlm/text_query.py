"""Asked: what a CLIP text tower makes of the question, for reducers that choose patches by it.

A vision-language model keeps only the seeing half of CLIP. :class:`ClipText` is the other one, with the step that takes
patches to where both halves meet, and gives two signals that no vision tower has:

``text`` of shape (m, d)
    The question. CLIP reads 77 tokens at a time, so a long one is read in m segments.
``joint`` of shape (N, d)
    The patches at the tap, through CLIP's last norm and its visual projection. CLIP was trained to do this with the CLS
    token of the last block only; CDPruner does it with the patches that the model itself reads (LLaVA-1.5: block 22).

::

    clip = load_clip_text("openai/clip-vit-large-patch14-336")
    reducer = make("cdpruner", budget=64)
    with reduced(model, reducer, asking=clip.about("What is on the table?")):
        model.generate(**inputs)
    inputs = ReducingProcessor(processor, model, reducer, asking=clip)(images=photo, text=prompt)

**What is taken as the question**: ``question=`` of a call of :class:`~torino.vlm.ReducingProcessor`; else what
:meth:`ClipText.about` was given; else the words of the user's last turn, where ``apply_chat_template`` of a
``ReducingProcessor`` sees the conversation; else all words of the prompt without placeholders and special tokens, where
there is something that can decode them, so that names of roles ("USER:") are among them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, linear

from torino.core.errors import BadFile, BadParameter, BadTokens, MissingSignal, TorinoError
from torino.core.tokens import VisualTokens
from torino.reducers._checks import check_choice
from torino.vlm.adapters.base import Adapter, EncodedImages

Segments = Literal["released", "closed"]
Question = str | Sequence[str]
# What towers of CLIP are told apart by; those of one shape from different trainings cannot be.
SHAPE = ("hidden_size", "num_hidden_layers", "patch_size", "image_size")


def load_clip_text(
    name_or_path: str | os.PathLike[str],
    *,
    segments: Segments = "released",
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype | None = None,
) -> ClipText:
    """Open the text half of a CLIP model, its tokenizer and its projections, by hub name or folder.

    Parameters
    ----------
    name_or_path : str or path
        The CLIP whose vision tower the model has: ``openai/clip-vit-large-patch14-336`` for LLaVA-1.5 and LLaVA-NeXT.
        The blocks of its own vision tower are not loaded.
    segments
        As for :class:`ClipText`.
    device, dtype
        As for :func:`torino.vlm.towers.load_tower`.

    Raises
    ------
    Unreachable, BadFile, TorinoError
        If the hub does not give it, if something is missing in it, or if it is no CLIP.
    """
    from torino.vlm.towers import device_of, dtype_of, fetch, local_name, transformers

    library, name, place = transformers(), local_name(name_or_path), device_of(device)
    config = fetch(library.AutoConfig.from_pretrained, name, "config.json")
    if config.model_type != "clip":
        raise TorinoError(
            f"{name} ({config.model_type}) is no CLIP with a text half. Give the CLIP that the model's vision tower "
            "was taken from, such as openai/clip-vit-large-patch14-336 for LLaVA-1.5."
        )
    shape = {key: getattr(config.vision_config, key) for key in SHAPE}
    config.vision_config.num_hidden_layers = 0  # the model that answers has these blocks
    tokenizer = fetch(library.AutoTokenizer.from_pretrained, name, "tokenizer")
    options = {"config": config, "dtype": dtype_of(dtype, place), "output_loading_info": True}
    talk = logging.getLogger("transformers")
    level = talk.level
    try:
        talk.setLevel(logging.ERROR)  # it would list all of those blocks as unexpected
        model, told = fetch(library.CLIPModel.from_pretrained, name, "weights", **options)
    finally:
        talk.setLevel(level)
    lacking = sorted(told["missing_keys"])
    if lacking:
        raise BadFile(
            f"{name} holds no weights for {len(lacking)} parts of CLIP, such as {lacking[0]}. The checkpoint is "
            "incomplete: fetch it anew, or give one of the whole CLIP."
        )
    return ClipText(model.to(place).eval(), tokenizer, segments=segments, vision=shape)


class ClipText:
    """The half of CLIP that reads, and the step that takes patches to the space where both halves meet.

    Parameters
    ----------
    model : CLIPModel
        A loaded one, which is left as it is; see :func:`load_clip_text`. Its vision blocks are not used.
    tokenizer : tokenizer of CLIP, or a processor that has one
    segments : {"released", "closed"}
        How a question of more than 77 tokens is parted. The release of CDPruner cuts start, words and end into runs of
        77 tokens and takes each for a text. CLIP is read off at the end token, which only the last run has; of the
        first, CLIP gives what it makes of the start token, before any word. ``"closed"`` gives each run of 75 words a
        start and an end of its own. Shorter questions are read alike.
    vision : mapping, optional
        Where the tower that patches come from is of another shape than this CLIP's config says, such as
        ``{"image_size": 448}`` for one that was trained on to larger images.
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
                f"ClipText reads with a CLIPModel, which has both halves and their projections, got "
                f"{type(model).__name__}. Open one with load_clip_text(name)."
            )
        self.model: Any = model
        self.tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
        self.segments: Segments = segments
        config = self.model.config.vision_config
        self.vision = {key: getattr(config, key) for key in SHAPE} | dict(vision or {})
        known, read = int(self.model.config.text_config.vocab_size), len(self.tokenizer)
        if not known // 2 < read <= known:  # without its files transformers makes an empty tokenizer and says nothing
            raise BadFile(
                f"The tokenizer knows {read} tokens, and this CLIP reads {known}: it is not the one that CLIP was "
                "trained with. Fetch tokenizer.json, or vocab.json and merges.txt, beside the weights."
            )
        self.longest = int(self.model.config.text_config.max_position_embeddings)

    def __repr__(self) -> str:
        """Tell the two widths."""
        width = self.model.visual_projection.out_features
        return f"ClipText(patches of width {self.vision['hidden_size']} and questions, both to width {width})"

    # ------------------------------------------------------------------ the two signals

    @torch.no_grad()
    def text(self, question: str) -> Tensor:
        """Embed a question: (m, d) float32, a row for each segment."""
        if not question.strip():
            raise MissingSignal("The question is empty, and patches are chosen by it. Give its words.")
        ids: list[int] = self.tokenizer(question, verbose=False)["input_ids"]
        rows = self._parted(ids)
        # a token of padding stands behind the end, and CLIP reads forwards only: it changes nothing
        length = max(map(len, rows))
        padded = torch.tensor([[*row, *[0] * (length - len(row))] for row in rows])
        out = self.model.get_text_features(input_ids=padded.to(self.model.visual_projection.weight.device))
        return cast(Tensor, getattr(out, "pooler_output", out)).float()

    def _parted(self, ids: Sequence[int]) -> list[list[int]]:
        """Token numbers of each segment."""
        most = self.longest
        if len(ids) <= most or self.segments == "released":
            return [list(ids[at : at + most]) for at in range(0, len(ids), most)]
        start, *words, end = ids
        return [[start, *words[at : at + most - 2], end] for at in range(0, len(words), most - 2)]

    @torch.no_grad()
    def joint(self, patches: Tensor) -> Tensor:
        """Take patches (N, D) of CLIP's tower to the joint space: (N, d) float32."""
        norm, projection = self.model.vision_model.post_layernorm, self.model.visual_projection
        if patches.ndim != 2 or patches.shape[1] != projection.in_features:
            raise BadTokens(
                f"CLIP's joint space is reached from patches of shape (N, {projection.in_features}), got "
                f"{tuple(patches.shape)}. Give tokens of this CLIP's own vision tower."
            )
        values = patches.detach().to(projection.weight.device).float()
        normed = layer_norm(values, norm.normalized_shape, norm.weight.float(), norm.bias.float(), norm.eps)
        return linear(normed, projection.weight.float())

    def signals(self, tokens: VisualTokens, question: str) -> VisualTokens:
        """Return tokens of CLIP's tower with both signals."""
        return _with(tokens, self.joint(tokens.patches), self.text(question))

    # ------------------------------------------------------------------ inside a model

    def about(self, question: Question | None = None, *, prompts: Any = None) -> TextQuery:
        """Say what images are asked about, for ``reduced(model, reducer, asking=...)``.

        Parameters
        ----------
        question : str or sequence of str, optional
            One for all prompts, or one for each prompt of every call; all images of a prompt share it.
        prompts : tokenizer or processor of the model, optional
            Where no question is given it is read off each prompt: all words, without placeholders and special tokens.
        """
        return TextQuery(self, question, prompts)


@dataclass(frozen=True)
class TextQuery:
    """A question, or where to read it, and who reads it. See :meth:`ClipText.about`."""

    clip: ClipText
    question: Question | None = None
    prompts: Any = None

    def __post_init__(self) -> None:
        """Refuse what is no text."""
        asked: Any = self.question
        is_list = isinstance(asked, list | tuple) and all(isinstance(one, str) for one in cast(list[Any], asked))
        if asked is not None and not isinstance(asked, str) and not is_list:
            raise BadParameter(f"A question must be a text, or a list with one for each prompt, got {asked!r:.60}.")

    def or_prompts(self, processor: Any, question: Question | None = None) -> TextQuery:
        """The same, with a question of one call, and with a processor that can read prompts if nothing is said."""
        asked = self.question if question is None else question
        return replace(self, question=asked, prompts=processor if self.prompts is None else self.prompts)

    @torch.no_grad()
    def add(self, host: Adapter, sight: EncodedImages, inputs: Mapping[str, Any]) -> EncodedImages:
        """Give every unit the signals of the question that its prompt asks."""
        self._check_tower(host)
        questions = self._questions(inputs, host.image_token)
        rows = _rows_of(inputs["input_ids"], host.image_token, sight.full)
        # each question is read by itself, so that what it becomes does not hang on its neighbours
        texts = {question: self.clip.text(question) for question in {questions[row] for row in rows}}
        asked = [texts[questions[row]] for row, units in zip(rows, sight.units, strict=True) for _ in range(units)]
        units = zip(sight.tokens, asked, strict=True)
        return replace(sight, tokens=tuple(_with(unit, self.clip.joint(unit.patches), text) for unit, text in units))

    def _questions(self, inputs: Mapping[str, Any], image_token: int) -> list[str]:
        """The question of each prompt."""
        ids: Tensor = inputs["input_ids"]
        if isinstance(self.question, str):
            return [self.question] * len(ids)
        if self.question is not None:
            if len(self.question) != len(ids):
                raise BadParameter(
                    f"{len(self.question)} questions were given for {len(ids)} prompts. Give one for each prompt, or a "
                    "single one for all."
                )
            return list(self.question)
        decoder = getattr(self.prompts, "tokenizer", self.prompts)
        if decoder is None:
            raise MissingSignal(
                "Patches are to be chosen for a question, and none was given. Give asking=clip.about(question), or "
                "asking=clip.about(prompts=processor) to have it read off the prompts."
            )
        mask = inputs.get("attention_mask")
        real = ids != image_token if mask is None else (ids != image_token) & mask.bool()
        return [
            str(decoder.decode(row[is_word].tolist(), skip_special_tokens=True)).strip()
            for row, is_word in zip(ids, real, strict=True)
        ]

    def _check_tower(self, host: Adapter) -> None:
        """Refuse a model whose tower this CLIP does not know."""
        theirs, mine = getattr(host.config, "vision_config", None), self.clip.vision
        kind = str(getattr(theirs, "model_type", "none"))
        if not kind.startswith("clip"):
            raise MissingSignal(
                f"The vision tower of {type(host.model).__name__} ({kind}) is none of CLIP, so its patches have no "
                "place beside what CLIP makes of a question. Choose a reducer that does without one."
            )
        odd = [key for key in SHAPE if getattr(theirs, key) != mine[key]]
        if odd:
            key = odd[0]
            raise BadParameter(
                f"This CLIP is not the one that the model's vision tower was taken from: its {key} is {mine[key]}, "
                f"that of the model {getattr(theirs, key)}. LLaVA-1.5 has openai/clip-vit-large-patch14-336. If it is "
                f"the right one all the same, say so: ClipText(..., vision={{{key!r}: {getattr(theirs, key)}}})."
            )


def said(conversation: Any) -> list[str] | None:
    """What the user said last in a conversation, or in each of several; None where that cannot be told.

    Examples
    --------
    >>> turn = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is this?"}]}
    >>> said([turn]), said([[turn], [{"role": "user", "content": "And that?"}]])
    (['What is this?'], ['What is this?', 'And that?'])
    """
    if not isinstance(conversation, Sequence) or isinstance(conversation, str) or not len(conversation):
        return None
    turns = cast(Sequence[Any], conversation)
    if not isinstance(turns[0], Mapping):
        found = [said(turn) for turn in turns]
        return [words[0] for words in found if words] if all(found) else None
    by_user = [turn for turn in turns if isinstance(turn, Mapping) and turn.get("role") == "user"]
    content: Any = by_user[-1].get("content") if by_user else None
    if isinstance(content, str):
        return [content]
    parts = cast(Sequence[Any], content or ())
    words = [str(part["text"]) for part in parts if isinstance(part, Mapping) and part.get("type") == "text"]
    return [" ".join(words)] if words else None


def _with(tokens: VisualTokens, joint: Tensor, text: Tensor) -> VisualTokens:
    where = tokens.patches.device
    return tokens.with_(signals={**tokens.signals, "joint": joint.to(where), "text": text.to(where)})


def _rows_of(ids: Tensor, image_token: int, full: Sequence[int]) -> list[int]:
    """The prompt that each image is in; a prompt of the wrong length is refused later, when it is shrunk."""
    row = (ids == image_token).nonzero()[:, 0].tolist() or [0]
    ends = torch.tensor(full).cumsum(0)
    return [row[min(int(end) - 1, len(row) - 1)] for end in ends]
