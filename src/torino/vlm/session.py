"""Ask: an image and a question become an answer, with what became of the image's tokens and how long each part took."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields, is_dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import torch
from PIL import Image
from torch import Tensor, nn
from torino_lab.model import lab_folder, lab_source

from torino.core.errors import BadFile, BadParameter, TorinoError
from torino.core.reduction import Reduction, ReductionBatch
from torino.core.tokens import VisualTokens
from torino.datasets.images import Padding, Picture, as_seen, mean_colour, open_image, prepare
from torino.reducers import PositionMode, Reducer, TowerState
from torino.vlm import ClipText, TextQuery, Trace, adapter_for, families, reduced
from torino.vlm.adapters.base import Positions
from torino.vlm.towers import device_of, dtype_of, fetch, local_name, transformers

# Prompts of families whose processors may come without a chat template.
PROMPTS = {"llava": "USER: {images}{question} ASSISTANT:", "paligemma": "{images}{question}"}
# Where stock models keep what the stages of a reduced one are compared with.
PARTS = {
    "tower": ("vision_tower", "visual", "vision_model"),
    "projector": ("multi_modal_projector", "connector"),
}


@dataclass(frozen=True)
class Answer:
    """What a model said, and how it came to say it.

    Attributes
    ----------
    text : str
        What ``model.generate`` gives for the same inputs, decoded without special tokens.
    prompt : str
        The text the model was given, with one placeholder for each image.
    before, after : int
        Image tokens of the prompt, and those that the language model got.
    new_tokens : int
        Length of the answer.
    seconds : dict
        ``processor`` (pixels and text), ``tower``, ``question`` (read to choose patches by, where a method does),
        ``plan`` (all of the reducer; ``sae`` and ``grouping`` are part of it), ``projector``, ``prefill`` (the prompt
        up to the first token), ``decode`` (the other tokens), ``total``. Of one run: a first run also pays for
        starting up, unless ``baseline`` was asked for.
    padding : {"crop", "square"}
    trace : Trace or None
        What became of each image; None where all tokens were kept.
    seen : tuple of PIL images
        The images as the tower saw them, one for each reduction.
    baseline : Answer or None
        The answer with all tokens, if it was asked for.
    """

    text: str
    prompt: str
    before: int
    after: int
    new_tokens: int
    seconds: dict[str, float]
    padding: Padding
    trace: Trace | None = None
    seen: tuple[Image.Image, ...] = field(default=(), repr=False)
    baseline: Answer | None = None

    def __str__(self) -> str:
        """Return the text."""
        return self.text

    @property
    def reductions(self) -> tuple[Reduction, ...]:
        """The reduction of each image (or tile of one); none where all tokens were kept."""
        return () if self.trace is None else tuple(self.trace)

    @property
    def reduction(self) -> Reduction:
        """The reduction of the first image."""
        if not self.reductions:
            raise BadParameter("All tokens were kept, so there is no reduction. Ask with reducer=...")
        return self.reductions[0]

    @property
    def first_token(self) -> float:
        """Seconds until the first token."""
        return self.seconds["total"] - self.seconds["decode"]

    @property
    def speedup(self) -> dict[str, float]:
        """How many times faster than the baseline: ``first_token``, and ``total`` (answers may differ in length)."""
        full = self.baseline
        if full is None:
            return {}
        times = {"first_token": (full.first_token, self.first_token)}
        times["total"] = (full.seconds["total"], self.seconds["total"])
        return {name: slow / max(fast, 1e-9) for name, (slow, fast) in times.items()}

    def facts(self) -> dict[str, Any]:
        """Everything that goes into JSON."""
        told: dict[str, Any] = {
            "answer": self.text.strip(),
            "reducer": self.reductions[0].by if self.reductions else None,
            "padding": self.padding,
            "image_tokens": {"before": self.before, "after": self.after},
            "new_tokens": self.new_tokens,
            "seconds": {name: round(value, 6) for name, value in self.seconds.items()},
        }
        if self.baseline is not None:
            told["baseline"] = self.baseline.facts()
            told["speedup"] = {name: round(value, 3) for name, value in self.speedup.items()}
        return told


def load_vlm(
    name_or_path: str | os.PathLike[str], device: str | torch.device = "cpu", dtype: str | torch.dtype | None = None
) -> tuple[Any, Any]:
    """Open a vision-language model and its processor, by hub name or folder.

    Parameters
    ----------
    name_or_path, device, dtype
        As for :func:`torino.vlm.towers.load_tower`. ``"lab"`` is the small model that comes with torino, see
        :func:`torino_lab.model.lab_folder`; write ``./lab`` for a folder of that name. A folder that
        ``scripts/train_lab.py`` wrote is put together in the same way.

    Returns
    -------
    model, processor
        Of transformers, unchanged, in evaluation mode.

    Raises
    ------
    Unreachable, BadFile, TorinoError
        If the hub does not give it, if something is missing in it, or if torino does not serve its family.
    """
    library, place = transformers(), device_of(device)
    trained = lab_source(name_or_path)
    name = local_name(name_or_path if trained is None else lab_folder(trained))
    config = fetch(library.AutoConfig.from_pretrained, name, "config.json")
    if config.model_type not in families():
        adapter_for(cast(nn.Module, SimpleNamespace(config=config)))  # says so, before gigabytes are fetched
    processor = fetch(library.AutoProcessor.from_pretrained, name, "processor")
    if not hasattr(processor, "image_processor") or not hasattr(processor, "tokenizer"):
        raise BadFile(
            f"{name} has no processor for both images and text: its files give a {type(processor).__name__}. "
            "Fetch processor_config.json or preprocessor_config.json and the tokenizer beside the weights."
        )
    if getattr(processor, "patch_size", 0) is None and hasattr(config, "vision_feature_select_strategy"):
        # older processors left it to the model to count their placeholders
        processor.patch_size = config.vision_config.patch_size
        processor.vision_feature_select_strategy = config.vision_feature_select_strategy
        processor.num_additional_image_tokens = int(config.vision_feature_select_strategy == "default")
    load = library.AutoModelForImageTextToText.from_pretrained
    model, told = fetch(load, name, "weights", dtype=dtype_of(dtype, place), output_loading_info=True)
    if told["missing_keys"]:
        raise BadFile(
            f"{name} holds no weights for {len(told['missing_keys'])} parts of the model, such as "
            f"{sorted(told['missing_keys'])[0]}. The checkpoint is incomplete: fetch it anew."
        )
    return model.to(place).eval(), processor


def check_vlm(name_or_path: str | os.PathLike[str]) -> None:
    """Say at once what :func:`load_vlm` would say of the name alone."""
    if lab_source(name_or_path) is None:
        local_name(name_or_path)


def ask(
    image: Picture | Sequence[Picture],
    question: str,
    *,
    model: nn.Module,
    processor: Any,
    reducer: Reducer | None = None,
    padding: Padding = "crop",
    max_new_tokens: int = 64,
    baseline: bool = False,
    positions: Positions = "own",
    mass: bool | None = None,
    asking: ClipText | None = None,
    **generation: Any,
) -> Answer:
    """Ask a model about an image (or several), with fewer visual tokens where a reducer is given.

    Parameters
    ----------
    image : path, bytes, PIL image, or a sequence of them
    question : str
    model, processor
        As :func:`load_vlm` gives them, or loaded by hand. Nothing of them is changed.
    reducer : Reducer, optional
        Without one the model gets all tokens.
    padding : {"crop", "square"}
        See :func:`torino.datasets.images.prepare`.
    max_new_tokens : int
        Longest answer.
    baseline : bool
        Also ask with all tokens, to compare. Then the model first runs once for a single token, so that neither
        answer pays for starting up.
    positions : {"own", "compact", "original"}
    mass : bool, optional
        See :func:`torino.vlm.reduced`, as for positions.
    asking : ClipText, optional
        Reads the question for reducers that choose patches by it, such as ``cdpruner``; by the bare question, without
        the words that the prompt puts around it. See :func:`torino.vlm.load_clip_text`.
    **generation
        Passed to ``model.generate``. By default answers are greedy (``do_sample=False``): the same each time.
    """
    if max_new_tokens < 1:
        raise BadParameter(f"max_new_tokens must be at least 1, got {max_new_tokens}.")
    if baseline and reducer is None:
        raise BadParameter("baseline=True compares a reducer with the full tokens. Give reducer=..., or leave it out.")
    single = isinstance(image, str | bytes) or not isinstance(image, Sequence)
    sources = cast(Sequence[Picture], [image] if single else image)
    if not sources:
        raise BadParameter("No image was given. Give at least one.")
    colour = mean_colour(processor)
    images = [prepare(open_image(source), padding, colour) for source in sources]
    prompt = write_prompt(model, processor, question, len(images))
    about = None if asking is None else asking.about(question)
    asked = _Asked(model, processor, images, prompt, padding, {"do_sample": False, **generation}, about, mass)
    if reducer is None:
        return asked.answer(max_new_tokens)
    if baseline:
        asked.answer(1, reducer, positions)
    answer = asked.answer(max_new_tokens, reducer, positions)
    return replace(answer, baseline=asked.answer(max_new_tokens)) if baseline else answer


@dataclass(frozen=True)
class KeepShare(Reducer):
    """Another reducer, with a budget that is a share of the patches of each image.

    Parameters
    ----------
    inner : Reducer
        One that takes a ``budget``.
    share : float
        Above 0, at most 1.
    """

    inner: Reducer
    share: float
    name = "keep-share"

    def __post_init__(self) -> None:
        """Refuse what has no budget, and shares out of range."""
        if not is_dataclass(self.inner) or "budget" not in {field.name for field in fields(self.inner)}:
            raise BadParameter(f"{self.inner.name} takes no budget, so it cannot keep a share of the tokens.")
        if not 0 < self.share <= 1:
            raise BadParameter(f"share must be above 0 and at most 1, got {self.share}.")

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        """What the reducer needs."""
        return self.inner.needs

    @property
    def view_needs(self) -> frozenset[str]:  # type: ignore[override]
        """What it needs besides where there are tiles."""
        return self.inner.view_needs

    @property
    def shares_views(self) -> bool:  # type: ignore[override]
        """Whether its budget is one for all views of an image."""
        return self.inner.shares_views

    @property
    def position_mode(self) -> PositionMode:
        """How its tokens are numbered."""
        return self.inner.position_mode

    @property
    def proportional_attention(self) -> bool:
        """Whether its tokens are attended to as all the patches they stand for: as the other has it."""
        return self.inner.proportional_attention

    @property
    def shares_batch(self) -> bool:
        """Whether images that are planned together share a budget."""
        return self.inner.shares_batch

    @property
    def inside(self) -> bool:  # type: ignore[override]
        """Whether the reducer works inside a tower."""
        return self.inner.inside

    def begin(self, patches: Tensor, grid: tuple[int, int], blocks: int, has_cls: bool) -> TowerState:
        """Take up one image inside a tower."""
        budget = max(1, round(self.share * len(patches)))
        return replace(cast(Any, self.inner), budget=budget).begin(patches, grid, blocks, has_cls)

    def plan(self, tokens: VisualTokens) -> Reduction:
        """Plan one image."""
        return self.plan_batch([tokens])[0]

    def plan_batch(self, images: Sequence[VisualTokens]) -> ReductionBatch:
        """Plan all images at once where they are of one size, or share a budget."""
        if len({len(image) for image in images}) > 1 and not self.shares_batch:
            return ReductionBatch.of([self.plan(image) for image in images])
        budget = max(1, round(self.share * sum(len(image) for image in images) / len(images)))
        return replace(cast(Any, self.inner), budget=budget).plan_batch(images)

    def plan_views(
        self, base: VisualTokens, tiles: Sequence[VisualTokens | None], layout: tuple[int, int]
    ) -> ReductionBatch:
        """Plan the views of one image under a budget that is a share of all their patches."""
        if not self.shares_views:
            return super().plan_views(base, tiles, layout)
        patches = len(base) + sum(len(tile) for tile in tiles if tile is not None)
        budget = max(1, round(self.share * patches))
        return replace(cast(Any, self.inner), budget=budget).plan_views(base, tiles, layout)


@dataclass(frozen=True)
class _Asked:
    """One question, to be answered once or more."""

    model: nn.Module
    processor: Any
    images: Sequence[Image.Image]
    prompt: str
    padding: Padding
    generation: dict[str, Any]
    about: TextQuery | None = None
    mass: bool | None = None

    def answer(self, length: int, reducer: Reducer | None = None, positions: Positions = "own") -> Answer:
        begin = time.perf_counter()
        inputs = self._process()
        processed = time.perf_counter()
        clock = _Clock()
        given: Sequence[Any] = self.generation.get("stopping_criteria") or ()
        criteria = transformers().StoppingCriteriaList([*given, clock])
        generation = {**self.generation, "max_new_tokens": length, "stopping_criteria": criteria}
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            trace, seconds = None, dict[str, float]()
            if reducer is None:
                _watch(self.model, seconds, stack)
            else:
                how = reduced(self.model, reducer, positions=positions, asking=self.about, mass=self.mass)
                trace = stack.enter_context(how)
            out = cast(Any, self.model).generate(**inputs, **generation)
        _settle()
        end = time.perf_counter()
        if trace is not None:
            seconds = trace.seconds
            trace.looks[:] = [replace(look, padding=self.padding) for look in trace.looks]
        ids: Tensor = inputs["input_ids"]
        new = (out if isinstance(out, Tensor) else out.sequences)[0, ids.shape[1] :]
        first = clock.first or end
        vision = sum(seconds.get(stage, 0.0) for stage in ("tower", "question", "plan", "projector"))
        before = int((ids == cast(Any, self.model).config.image_token_id).sum()) if trace is None else trace.before
        return Answer(
            text=str(self.processor.decode(new, skip_special_tokens=True)),
            prompt=self.prompt,
            before=before,
            after=before if trace is None else trace.after,
            new_tokens=len(new),
            seconds={
                "processor": processed - begin,
                **seconds,
                "prefill": max(first - processed - vision, 0.0),
                "decode": end - first,
                "total": end - begin,
            },
            padding=self.padding,
            trace=trace,
            seen=tuple(as_seen(inputs, self.processor, self.images)),
        )

    def _process(self) -> Any:
        tokenizer = getattr(self.processor, "tokenizer", None)
        start = getattr(tokenizer, "bos_token", None)
        # a template that writes the first token itself must not get another
        options = {"add_special_tokens": False} if start and self.prompt.startswith(start) else {}
        try:
            inputs = self.processor(images=list(self.images), text=self.prompt, return_tensors="pt", **options)
        except (ValueError, TypeError) as error:
            raise TorinoError(f"{type(self.processor).__name__} refused the image or the question: {error}") from error
        weight = next(one for one in self.model.parameters() if one.is_floating_point())
        return inputs.to(weight.device, dtype=weight.dtype)  # whole numbers stay what they are


def write_prompt(model: nn.Module, processor: Any, question: str, images: int) -> str:
    """The question as the model was trained to be asked."""
    family = str(cast(Any, model).config.model_type)
    mark = str(getattr(processor, "image_token", None) or "<image>")
    if not question.strip():
        raise BadParameter("The question is empty. Ask something, such as 'What is in this picture?'.")
    if mark in question:
        raise BadParameter(
            f"The question holds {mark!r}, which stands for an image. Leave it out; images go in by themselves."
        )
    template = getattr(processor, "chat_template", None) or getattr(processor.tokenizer, "chat_template", None)
    if template is None:
        if family not in PROMPTS:
            raise TorinoError(
                f"The processor of this {family} model has no chat template, so torino cannot tell how it wants to be "
                "asked. Set processor.chat_template, or fetch chat_template.jinja beside the weights."
            )
        lines = "\n" if family == "llava" else ""
        return PROMPTS[family].format(images=f"{mark}{lines}" * images, question=question)
    content = [*[{"type": "image"}] * images, {"type": "text", "text": question}]
    try:
        return processor.apply_chat_template(
            [{"role": "user", "content": content}], chat_template=template, add_generation_prompt=True
        )
    except Exception as error:  # a template is a program
        raise TorinoError(f"The chat template of this {family} model failed: {error}") from error


class _Clock:
    """A stopping criterion that stops nothing, and notes when the first token is there."""

    def __init__(self) -> None:
        self.first = 0.0

    def __call__(self, input_ids: Tensor, scores: Any, **others: Any) -> Tensor:
        if not self.first:
            _settle()
            self.first = time.perf_counter()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def _watch(model: nn.Module, seconds: dict[str, float], stack: ExitStack) -> None:
    """Time the vision parts of a stock model as they run, until the stack is closed."""
    inner = getattr(model, "model", model)

    def count(stage: str, sign: int) -> Callable[..., None]:
        def note(*_: object) -> None:
            _settle()
            seconds[stage] = seconds.get(stage, 0.0) + sign * time.perf_counter()

        return note

    for stage, names in PARTS.items():
        module = next((part for name in names if (part := getattr(inner, name, None)) is not None), None)
        if module is not None:
            stack.callback(module.register_forward_pre_hook(count(stage, -1)).remove)
            stack.callback(module.register_forward_hook(count(stage, 1)).remove)


def _settle() -> None:
    """Wait for the GPU, if one is in use."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
