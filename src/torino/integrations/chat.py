"""What both kits need: a model behind a reducer that answers conversations with pictures in them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from importlib import import_module
from typing import Any, cast, get_args

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from torino.core.concepts import RawEmbedding
from torino.core.errors import BadParameter, TorinoError
from torino.datasets.images import Padding, Picture, mean_colour, open_image, prepare
from torino.evaluation.protocol import takes
from torino.reducers import Reducer, make
from torino.sae.model import SAE
from torino.vlm import Trace, load_clip_text, reduced
from torino.vlm.adapters.base import ASKED, Positions
from torino.vlm.session import PROMPTS, load_vlm
from torino.vlm.towers import device_of

Turn = Mapping[str, Any]
"""``role``, and ``content``: parts ``{"type": "text", "text": …}`` and ``{"type": "image", "image": …}``."""

# What a kit may ask of the generation; whatever else it says is meant for other models.
ASKED_OF_GENERATION = (
    "num_beams",
    "repetition_penalty",
    "length_penalty",
    "no_repeat_ngram_size",
    "min_new_tokens",
    "use_cache",
)
SAMPLING = ("temperature", "top_p", "top_k")


def base_of(module: str, name: str) -> Any:
    """The class that a kit's models derive from; without the kit a plain one, so that the guest can still be tried."""
    try:
        return getattr(import_module(module), name)
    except ImportError:
        return object


def read_spec(text: str) -> str:
    """A reducer as kits let one write it: ``;`` for a comma, which divides their arguments, and quotes around it.

    Examples
    --------
    >>> read_spec("torino-m(k=2;delta=2)"), read_spec("'random(budget=64)'")
    ('torino-m(k=2,delta=2)', 'random(budget=64)')
    """
    text = text.strip()
    if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'":
        text = text[1:-1]
    return text.replace(";", ",")


def build_reducer(spec: str, sae: str | None, budget: int | None, device: torch.device) -> Reducer | None:
    """Build the reducer that the arguments describe; None for ``"none"``, which keeps all tokens."""
    spec = read_spec(spec)
    if spec == "none":
        told = "sae" if sae is not None else "budget" if budget is not None else None
        if told:
            raise BadParameter(f"reducer=none keeps all tokens, so {told} has no meaning. Leave one out.")
        return None
    method = spec.partition("(")[0].strip()
    given: dict[str, Any] = {} if budget is None else {"budget": budget}
    if takes(method, "sae"):
        if sae is None:
            raise BadParameter(
                f"{method} groups patches by concepts, so say which SAE reads them: sae=FOLDER, sae=owner/repository, "
                "or sae=raw for none."
            )
        given["sae"] = RawEmbedding() if sae == "raw" else SAE.load(sae, decoder=False).to(device)
    elif sae is not None:
        raise BadParameter(f"{method} reads no concepts, so sae has no meaning for it. Leave it out.")
    return make(spec, **given)


class ChatModel:
    """A vision-language model that answers with fewer visual tokens.

    Parameters
    ----------
    pretrained : str
        Hub name or folder.
    reducer : str
        Name or spec, as :func:`read_spec` takes it; ``"none"`` keeps all tokens.
    sae : str, optional
        Folder, file or hub repository of the SAE; ``"raw"`` is the ablation without one.
    budget : int, optional
        Tokens left of an image; without it, what the spec says, or the image decides.
    clip : str, optional
        The CLIP that reads the question, for reducers that choose by it.
    padding : {"crop", "square"}
    positions : {"own", "compact", "original"}
    device : str
        ``"auto"`` and ``"cuda"`` take the GPU of this process where a launcher started several.
    dtype : str, optional

    Attributes
    ----------
    images, before, after : int
        Pictures seen so far, the visual tokens they had, and those that the language model got.
    """

    def __init__(
        self,
        pretrained: str,
        *,
        reducer: str = "torino-m",
        sae: str | None = None,
        budget: int | None = None,
        clip: str | None = None,
        padding: Padding = "crop",
        positions: Positions = "own",
        device: str = "auto",
        dtype: str | None = None,
    ) -> None:
        if padding not in ("crop", "square"):
            raise BadParameter(f"padding must be crop or square, got {padding!r}.")
        if positions not in get_args(Positions):
            raise BadParameter(f"positions must be own, compact or original, got {positions!r}.")
        self.device = _own_device(device)
        self.reducer = build_reducer(reducer, sae, budget, self.device)
        self.asking = None
        if self.reducer is not None and self.reducer.needs & ASKED:
            if clip is None:
                raise BadParameter(
                    f"{self.reducer.name} chooses patches by the question, so say which CLIP reads it: "
                    "clip=openai/clip-vit-large-patch14-336, which is that of LLaVA-1.5, or the folder of another."
                )
            self.asking = load_clip_text(clip, device=self.device, dtype=dtype)
        elif clip is not None:
            raise BadParameter(f"reducer={reducer} reads no question, so clip has no meaning for it. Leave it out.")
        self.model, self.processor = load_vlm(pretrained, self.device, dtype)
        self.processor.tokenizer.padding_side = "left"  # answers go on where the prompts end
        self.padding: Padding = padding
        self.positions: Positions = positions
        self.images = self.before = self.after = 0
        self._colour = mean_colour(self.processor)
        self._mark = str(getattr(self.processor, "image_token", None) or "<image>")

    @property
    def family(self) -> str:
        """``model_type`` of the model."""
        return str(self.model.config.model_type)

    def __repr__(self) -> str:
        """Tell what answers, and behind what."""
        return f"ChatModel({self.family} behind {self.reducer.spec if self.reducer else 'no reducer'})"

    def summary(self) -> str:
        """Counts so far, in words."""
        if not self.images:
            return "No image was seen."
        by = self.reducer.spec if self.reducer else "no reducer"
        return (
            f"{by}: {self.before / self.images:.1f} visual tokens an image became {self.after / self.images:.1f}, "
            f"over {self.images} images (padding {self.padding}, positions {self.positions})"
        )

    # ------------------------------------------------------------------ answering

    @torch.no_grad()
    def answer(self, talks: Sequence[Sequence[Turn]], length: int, **generation: Any) -> list[str]:
        """Answer some conversations together.

        Parameters
        ----------
        talks : sequence of conversations
            Those without pictures are answered with the stock model.
        length : int
            Longest answer, in tokens.
        **generation
            What a kit asks for; see :func:`generation_of`.
        """
        texts = [""] * len(talks)
        seeing = [bool(_pictures(talk)) for talk in talks]
        for which in (True, False):  # processors take pictures for all prompts of a call, or for none
            rows = [i for i, sees in enumerate(seeing) if sees is which]
            if rows:
                for i, text in zip(rows, self._answer([talks[i] for i in rows], length, generation), strict=True):
                    texts[i] = text
        return texts

    def _answer(self, talks: Sequence[Sequence[Turn]], length: int, generation: Mapping[str, Any]) -> list[str]:
        inputs = self._inputs(talks)
        with self._reduced(talks) as trace:
            out = self.model.generate(**inputs, max_new_tokens=length, **generation_of(generation))
        self._count(inputs, talks, trace)
        new = out[:, inputs["input_ids"].shape[1] :]
        return [str(text).strip() for text in self.processor.batch_decode(new, skip_special_tokens=True)]

    @torch.no_grad()
    def loss(self, talk: Sequence[Turn], continuation: str) -> tuple[float, bool]:
        """How far a continuation is from what the model would say.

        Returns
        -------
        loss : float
            Mean negative log-probability of its tokens, as lmms-eval's own models give it.
        greedy : bool
            Whether the model would say just this.
        """
        tokenizer = self.processor.tokenizer
        written = tokenizer(continuation, add_special_tokens=False, return_tensors="pt")["input_ids"].to(self.device)
        if not written.numel():
            raise BadParameter("A choice of this task is empty, so it has no likelihood.")
        inputs = self._inputs([talk])
        count = written.shape[1]
        inputs["input_ids"] = torch.cat([inputs["input_ids"], written], 1)
        for name in ("attention_mask", "token_type_ids", "mm_token_type_ids"):
            if name in inputs:
                fill = int(name == "attention_mask")
                inputs[name] = torch.nn.functional.pad(inputs[name], (0, count), value=fill)
        with self._reduced([talk]) as trace:
            logits: Tensor = self.model(**inputs).logits  # of the shorter prompt, whose end is the same
        self._count(inputs, [talk], trace)
        said = logits[0, -count - 1 : -1].float()
        return float(cross_entropy(said, written[0])), bool((said.argmax(-1) == written[0]).all())

    def _reduced(self, talks: Sequence[Sequence[Turn]]) -> Any:
        if self.reducer is None:
            return nullcontext()
        about = None if self.asking is None else self.asking.about([_question(talk) for talk in talks])
        return reduced(self.model, self.reducer, positions=self.positions, asking=about)

    def _count(self, inputs: Mapping[str, Any], talks: Sequence[Sequence[Turn]], trace: Trace | None) -> None:
        full = int((inputs["input_ids"] == self.model.config.image_token_id).sum())
        self.images += sum(len(_pictures(talk)) for talk in talks)
        self.before += full
        self.after += full if trace is None else full - trace.before + trace.after

    # ------------------------------------------------------------------ prompts

    def _inputs(self, talks: Sequence[Sequence[Turn]]) -> dict[str, Any]:
        prompts = [self.prompt(talk) for talk in talks]
        pictures = [[self._open(picture) for picture in _pictures(talk)] for talk in talks]
        start = getattr(self.processor.tokenizer, "bos_token", None)
        # a template that writes the first token itself must not get another
        options: dict[str, Any] = {"add_special_tokens": False} if start and prompts[0].startswith(start) else {}
        if any(pictures):
            options["images"] = pictures
        if len(prompts) > 1:
            options["padding"] = True
        try:
            inputs = self.processor(text=prompts, return_tensors="pt", **options)
        except (ValueError, TypeError) as error:
            raise TorinoError(f"{type(self.processor).__name__} refused a picture or a question: {error}") from error
        weight = next(one for one in self.model.parameters() if one.is_floating_point())
        return dict(inputs.to(weight.device, dtype=weight.dtype))

    def prompt(self, talk: Sequence[Turn]) -> str:
        """A conversation as the model was trained to have one, with one placeholder for each picture."""
        turns: list[dict[str, Any]] = [
            {"role": str(turn["role"]), "content": [self._part(part) for part in turn["content"]]} for turn in talk
        ]
        template = getattr(self.processor, "chat_template", None) or getattr(
            self.processor.tokenizer, "chat_template", None
        )
        if template is not None:
            try:
                return self.processor.apply_chat_template(turns, chat_template=template, add_generation_prompt=True)
            except Exception as error:  # a template is a program
                raise TorinoError(f"The chat template of this {self.family} model failed: {error}") from error
        if self.family not in PROMPTS or len(turns) > 1:
            raise TorinoError(
                f"The processor of this {self.family} model has no chat template, so torino cannot tell how it wants a "
                "conversation written. Fetch chat_template.jinja beside the weights."
            )
        parts: list[dict[str, str]] = turns[0]["content"]
        mark = f"{self._mark}\n" if self.family == "llava" else self._mark
        question = "\n".join(part["text"] for part in parts if part["type"] == "text")
        images = mark * sum(part["type"] == "image" for part in parts)
        return PROMPTS[self.family].format(images=images, question=question)

    def _part(self, part: Mapping[str, Any]) -> dict[str, Any]:
        if part["type"] == "text":
            text = str(part["text"])
            # a placeholder in the text would stand for a picture that is not there
            return {"type": "text", "text": text.replace(self._mark, "").strip() if self._mark in text else text}
        if part["type"] != "image":
            raise TorinoError(f"This task shows a {part['type']}, and torino reduces images. Choose a task on images.")
        return {"type": "image"}

    def _open(self, picture: Picture) -> Any:
        return prepare(open_image(picture), self.padding, self._colour)


def interleaved(text: str, pictures: Sequence[Picture], mark: str = "<image>") -> list[dict[str, Any]]:
    """A question as parts: pictures where it marks their places, or before it where it does not mark all of them.

    Examples
    --------
    >>> [part["type"] for part in interleaved("left <image> right <image> which?", ["a.png", "b.png"])]
    ['text', 'image', 'text', 'image', 'text']
    >>> [part["type"] for part in interleaved("which?", ["a.png"])]
    ['image', 'text']
    """
    pieces = text.split(mark)
    shown = [{"type": "image", "image": picture} for picture in pictures]
    if not pictures or len(pieces) != len(pictures) + 1:
        whole = text if len(pieces) == 1 else " ".join(piece.strip() for piece in pieces).strip()
        return [*shown, {"type": "text", "text": whole}]
    parts: list[dict[str, Any]] = []
    for piece, picture in zip(pieces, [*shown, None], strict=True):
        if piece.strip():
            parts.append({"type": "text", "text": piece.strip()})
        if picture is not None:
            parts.append(picture)
    return parts


def generation_of(asked: Mapping[str, Any]) -> dict[str, Any]:
    """What goes to ``generate``: greedy unless a temperature above 0 is asked for; what is not ours is left out.

    Examples
    --------
    >>> generation_of({"temperature": 0, "top_p": None, "num_beams": 1, "image_aspect_ratio": "original"})
    {'num_beams': 1, 'do_sample': False}
    """
    told = {name: asked[name] for name in ASKED_OF_GENERATION if asked.get(name) is not None}
    samples = asked.get("do_sample") is not False and float(asked.get("temperature") or 0) > 0
    if samples:
        told |= {name: asked[name] for name in SAMPLING if asked.get(name) is not None}
    return {**told, "do_sample": samples}


def cut(text: str, until: Any) -> str:
    r"""The answer up to the first of some texts that end it.

    Examples
    --------
    >>> cut("red\n\nThe sky", ["\n\n"]), cut("red", None)
    ('red', 'red')
    """
    ends = cast(Sequence[Any], [until] if isinstance(until, str) else until or [])
    for end in ends:
        if isinstance(end, str) and end:
            text = text.partition(end)[0]
    return text


def _pictures(talk: Sequence[Turn]) -> list[Any]:
    return [part["image"] for turn in talk for part in turn["content"] if part["type"] == "image"]


def _question(talk: Sequence[Turn]) -> str:
    """What the user said last."""
    last = [turn for turn in talk if turn["role"] == "user"][-1:]
    return " ".join(str(part["text"]) for turn in last for part in turn["content"] if part["type"] == "text")


def _own_device(device: str) -> torch.device:
    """The device of this process: where a launcher started one for each GPU, each takes its own."""
    rank = os.environ.get("LOCAL_RANK", "")
    if device in ("auto", "cuda") and rank.isdecimal() and torch.cuda.is_available():
        device = f"cuda:{int(rank) % torch.cuda.device_count()}"
    return device_of(device)
