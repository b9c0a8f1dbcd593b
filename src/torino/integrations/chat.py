"""A model behind a reducer that answers conversations with images; used by all integrations."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, pad

from torino.core.defaults import DEFAULT_METHOD
from torino.core.device import resolve_device
from torino.core.errors import BadParameter
from torino.datasets.images import Padding, Picture
from torino.reducers import Reducer
from torino.serving.settings import ReductionSettings
from torino.vlm.adapters.base import CLIP_SIGNALS, Positions
from torino.vlm.attention import Attention
from torino.vlm.context import reduced
from torino.vlm.prompt import Turn, turn_images
from torino.vlm.session import Inputs, load_vlm
from torino.vlm.text_query import load_clip_text

# Options of generation that a kit may set; its other options are meant for other models.
GENERATION = (
    "num_beams",
    "repetition_penalty",
    "length_penalty",
    "no_repeat_ngram_size",
    "min_new_tokens",
    "use_cache",
)
SAMPLING = ("temperature", "top_p", "top_k")


def base_class(module: str, name: str) -> Any:
    """Return the class that a kit's models derive from; ``object`` if the kit is not installed."""
    try:
        return getattr(import_module(module), name)
    except ImportError:
        return object


def read_spec(text: str) -> str:
    """Read a reducer as kits allow one to be written: ``;`` instead of a comma, optionally in quotes.

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
    """Build the reducer that the arguments describe, as servers and stores do; None for ``"none"``."""
    return ReductionSettings(read_spec(spec), sae, budget).build(device)


class ChatModel:
    """A vision-language model that answers with fewer visual tokens.

    Parameters
    ----------
    pretrained : str
        Hub name, folder, or an installed model package.
    reducer : str
        Name or spec, see :func:`read_spec`; ``"none"`` keeps all tokens.
    sae : str, optional
        Folder, file, hub repository or model package of the SAE; ``"none"`` is the ablation without one.
    budget : int, optional
        Tokens per image; by default that of the spec, or decided by the image.
    clip : str, optional
        The CLIP that reads the question, for reducers that choose patches by it.
    padding : {"crop", "square"}
    positions : {"auto", "compact", "original", "median"}
    attention : {"auto", "plain", "proportional", "restore"}
    device : str
        ``"auto"`` and ``"cuda"`` select the GPU of this process if a launcher started several.
    dtype : str, optional

    Attributes
    ----------
    images, before, after : int
        Images so far, their visual tokens, and those that the language model received.
    """

    def __init__(
        self,
        pretrained: str,
        *,
        reducer: str = DEFAULT_METHOD,
        sae: str | None = None,
        budget: int | None = None,
        clip: str | None = None,
        padding: Padding = "crop",
        positions: Positions = "auto",
        attention: Attention = "auto",
        device: str = "auto",
        dtype: str | None = None,
    ) -> None:
        self.device = _process_device(device)
        self.reducer = build_reducer(reducer, sae, budget, self.device)
        text_query = None
        if self.reducer is not None and self.reducer.needs & CLIP_SIGNALS:
            if clip is None:
                raise BadParameter(
                    f"{self.reducer.name} chooses patches by the question and needs the CLIP that reads it: "
                    "clip=openai/clip-vit-large-patch14-336 for LLaVA-1.5, or the folder of another."
                )
            text_query = load_clip_text(clip, device=self.device, dtype=dtype)
        elif clip is not None:
            raise BadParameter(f"reducer={reducer} does not read the question, so clip has no effect. Omit it.")
        self.vlm = load_vlm(
            pretrained,
            self.device,
            dtype,
            padding=padding,
            positions=positions,
            attention=attention,
            text_query=text_query,
        )
        self.images = self.before = self.after = 0

    @property
    def family(self) -> str:
        """``model_type`` of the model."""
        return self.vlm.family

    def __repr__(self) -> str:
        """Name the model family and the reducer."""
        return f"ChatModel({self.family} with {self.reducer.spec if self.reducer else 'all tokens'})"

    def summary(self) -> str:
        """Describe the counts so far."""
        if not self.images:
            return "No images yet."
        name = self.reducer.spec if self.reducer else "all tokens"
        return (
            f"{name}: {self.before / self.images:.1f} visual tokens per image reduced to "
            f"{self.after / self.images:.1f}, over {self.images} images (padding {self.vlm.padding}, positions "
            f"{self.vlm.positions}, attention {self.vlm.attention})"
        )

    def answer(self, conversations: Sequence[Sequence[Turn]], length: int, **generation: Any) -> list[str]:
        """Answer several conversations together.

        Parameters
        ----------
        conversations : sequence of conversations
            Those without images are answered by the stock model.
        length : int
            Longest answer, in tokens.
        **generation
            Options of the kit, see :func:`generation_options`.
        """
        texts = [""] * len(conversations)
        has_images = [bool(turn_images(conversation)) for conversation in conversations]
        options: dict[str, Any] = {"max_new_tokens": length, **generation_options(generation)}
        for kind in (True, False):  # processors take images for all prompts of a call, or for none
            rows = [i for i, has in enumerate(has_images) if has is kind]
            if not rows:
                continue
            inputs = self.vlm.chat_inputs([conversations[i] for i in rows])
            if kind:
                reduction = self.vlm.reduce(self.vlm.encode(inputs, [self.reducer]), self.reducer)
                self._count(inputs, reduction.tokens, sum(reduction.encoded.full))
                output = self.vlm.generate(inputs, [reduction], **options)
            else:
                output = self.vlm.generate_text(inputs, **options)
            for i, text in zip(rows, output.texts, strict=True):
                texts[i] = text.strip()
        return texts

    @torch.no_grad()
    def loss(self, conversation: Sequence[Turn], continuation: str) -> tuple[float, bool]:
        """Return the mean negative log-probability of a continuation, and whether greedy decoding would produce it."""
        vlm, reducer = self.vlm, self.reducer
        tokenizer = vlm.processor.tokenizer
        written = tokenizer(continuation, add_special_tokens=False, return_tensors="pt")["input_ids"].to(vlm.device)
        count = written.shape[1]
        if not count:
            raise BadParameter("The continuation is empty, so it has no likelihood.")
        inputs = vlm.chat_inputs([conversation])
        tensors = dict(inputs.tensors)
        tensors["input_ids"] = torch.cat([tensors["input_ids"], written], 1)
        for name in ("attention_mask", "token_type_ids", "mm_token_type_ids"):
            if name in tensors:
                tensors[name] = pad(tensors[name], (0, count), value=int(name == "attention_mask"))
        full = int((inputs.tensors["input_ids"] == vlm.adapter.image_token).sum())
        if reducer is None:
            logits: Tensor = vlm.model(**tensors).logits
            self._count(inputs, full, full)
        else:
            query = vlm.query_for(inputs, reducer)
            options: Mapping[str, Any] = {"positions": vlm.positions, "attention": vlm.attention}
            labels = tensors["input_ids"].clone()
            labels[:, :-count] = -100  # methods inside the language model must not read the continuation
            tensors["labels"] = labels
            with reduced(vlm.model, reducer, text_query=query, **options) as trace:
                logits = vlm.model(**tensors).logits  # of the reduced prompt, which ends alike
            self._count(inputs, full - trace.before + round(trace.layer_averaged), full)
        scores = logits[0, -count - 1 : -1].float()
        return float(cross_entropy(scores, written[0])), bool((scores.argmax(-1) == written[0]).all())

    def _count(self, inputs: Inputs, after: int, before: int) -> None:
        self.images += len(inputs.images)
        self.before += before
        self.after += after


def interleave(text: str, images: Sequence[Picture], marker: str = "<image>") -> list[dict[str, Any]]:
    """Split a question into parts: images at their markers, or before the text unless all are marked.

    Examples
    --------
    >>> [part["type"] for part in interleave("left <image> right <image> which?", ["a.png", "b.png"])]
    ['text', 'image', 'text', 'image', 'text']
    >>> [part["type"] for part in interleave("which?", ["a.png"])]
    ['image', 'text']
    """
    pieces = text.split(marker)
    shown = [{"type": "image", "image": image} for image in images]
    if not images or len(pieces) != len(images) + 1:
        whole = text if len(pieces) == 1 else " ".join(piece.strip() for piece in pieces).strip()
        return [*shown, {"type": "text", "text": whole}]
    parts: list[dict[str, Any]] = []
    for piece, image in zip(pieces, [*shown, None], strict=True):
        if piece.strip():
            parts.append({"type": "text", "text": piece.strip()})
        if image is not None:
            parts.append(image)
    return parts


def generation_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Select the options of ``generate``: greedy unless the temperature is above 0; unknown options are dropped.

    Examples
    --------
    >>> generation_options({"temperature": 0, "top_p": None, "num_beams": 1, "image_aspect_ratio": "original"})
    {'num_beams': 1, 'do_sample': False}
    """
    selected = {name: options[name] for name in GENERATION if options.get(name) is not None}
    samples = options.get("do_sample") is not False and float(options.get("temperature") or 0) > 0
    if samples:
        selected |= {name: options[name] for name in SAMPLING if options.get(name) is not None}
    return {**selected, "do_sample": samples}


def cut_at(text: str, until: Any) -> str:
    r"""Cut an answer at the first of some end markers.

    Examples
    --------
    >>> cut_at("red\n\nThe sky", ["\n\n"]), cut_at("red", None)
    ('red', 'red')
    """
    ends = cast(Sequence[Any], [until] if isinstance(until, str) else until or [])
    for end in ends:
        if isinstance(end, str) and end:
            text = text.partition(end)[0]
    return text


def _process_device(device: str) -> torch.device:
    """Return the device of this process: a launcher may start one process for each GPU."""
    rank = os.environ.get("LOCAL_RANK", "")
    if device in ("auto", "cuda") and rank.isdecimal() and torch.cuda.is_available():
        device = f"cuda:{int(rank) % torch.cuda.device_count()}"
    return resolve_device(device)
