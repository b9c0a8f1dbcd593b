"""The single path from images and a question to an answer: :class:`VLM`.

``torino ask``, ``compare``, ``eval``, ``bench`` and the integrations all use it, so an option of the session works in
all of them. Its answer equals ``with reduced(model, reducer): model.generate(...)`` token for token.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast, overload

import torch
from torch import Tensor, nn

from torino.core.checks import check_choice, check_type
from torino.core.concepts import CachedEncoder
from torino.core.errors import BadParameter, MissingSignal, TorinoError
from torino.core.reduction import Reduction, ReductionBatch
from torino.core.timing import recording, stage, synchronize
from torino.datasets.images import Padding, Picture, as_seen, mean_color, open_image, prepare
from torino.datasets.video import Video
from torino.reducers import Reducer, split_reducer
from torino.vlm import limits
from torino.vlm.adapters.base import (
    CLIP_SIGNALS,
    QUERY_SIGNALS,
    EncodedImages,
    Positions,
    adapter_for,
    position_choice,
    position_mode,
    token_sizes,
)
from torino.vlm.attention import Attention, AttentionBias, attention_mode, make_bias
from torino.vlm.clips import processor_options, show_frames, visual_parts
from torino.vlm.early_exit import measure_early_exit
from torino.vlm.encode_once import Encoded
from torino.vlm.generate import FirstTokenClock, GenerateCall, run_generate
from torino.vlm.inputs import Inputs, ReducedImages, finish_plans
from torino.vlm.inside import InsideRun, plan_inside
from torino.vlm.loading import ModelPackage, load_model, model_package
from torino.vlm.prefix import PrefixCache
from torino.vlm.prompt import (
    Turn,
    check_question,
    last_question,
    special_token_options,
    turn_images,
    user_turn,
    write_prompt,
)
from torino.vlm.text_query import ClipText, TextQuery, WordText
from torino.vlm.trace import Answer, Generated, ReducedCall, Trace

if TYPE_CHECKING:
    from PIL import Image


class VLM:
    """A vision-language model, its processor, and how reduced tokens are presented to it.

    Parameters
    ----------
    model, processor
        Stock Hugging Face objects; neither is changed.
    padding : {"crop", "square"}
        See :func:`torino.datasets.images.prepare`.
    positions : {"auto", "compact", "original", "median"}
    attention : {"auto", "plain", "proportional", "restore"}
        See :func:`torino.vlm.reduced`.
    text_query : ClipText, optional
        Reads the question for reducers that choose patches by it, such as ``cdpruner``.
    package : ModelPackage, optional

    Examples
    --------
    >>> vlm = load_vlm("lab")  # doctest: +SKIP
    >>> vlm.answer(vlm.inputs("photo.jpg", "What is it?"), reducer).text  # doctest: +SKIP
    """

    def __init__(
        self,
        model: nn.Module,
        processor: Any,
        *,
        padding: Padding = "crop",
        positions: Positions = "auto",
        attention: Attention = "auto",
        text_query: ClipText | None = None,
        package: ModelPackage | None = None,
    ) -> None:
        check_choice("padding", padding, Padding, "crop or square")
        if text_query is not None and not callable(getattr(text_query, "query", None)):
            check_type("text_query", text_query, ClipText, "a ClipText: load_clip_text(name)")
        limits.check_processor(processor)
        self.model, self.processor, self.package = model, processor, package
        self.adapter = adapter_for(model)
        self.padding: Padding = padding
        self.positions: Positions = positions
        self.attention: Attention = attention
        self.text_query = text_query
        position_mode(positions, None)  # refuses an unknown option
        attention_mode(attention, None, self.adapter)  # refuses an unknown or unsupported option
        self._color = mean_color(processor)
        self._words: WordText | None = None
        weight = next(p for p in model.parameters() if p.is_floating_point())
        self.device, self.dtype = weight.device, weight.dtype

    @property
    def family(self) -> str:
        """``model_type`` of the model."""
        return str(cast(Any, self.model).config.model_type)

    # ------------------------------------------------------------------ inputs

    def inputs(self, images: Picture | Video | Sequence[Picture | Video], question: str) -> Inputs:
        """Build the inputs of one question about an image or a video, or about several together.

        :func:`~torino.datasets.video.open_video` opens videos. A model that takes no videos is shown their frames as
        several images.
        """
        check_question(question, self.processor)
        return self.chat_inputs([[user_turn(limits.to_pictures(images), question)]])

    def chat_inputs(self, conversations: Sequence[Sequence[Turn]]) -> Inputs:
        """Build the inputs of several conversations, padded on the left.

        Either all conversations have images, or none has.
        """
        begin = time.perf_counter()
        limits.check_conversations(conversations)
        shown = [video for conversation in conversations for video in visual_parts(conversation)]
        videos = [video for video in shown if video is not None]
        given = conversations
        if videos and not self.adapter.takes_videos:
            conversations = [show_frames(conversation) for conversation in conversations]
        elif videos and len(videos) < len(shown):
            raise BadParameter(
                "A prompt has images and videos, and torino reduces one of them in a call. Ask separately."
            )
        prompts = [write_prompt(conversation, self.processor, self.adapter) for conversation in conversations]
        limits.check_characters(prompts, self.adapter.config)
        images = [[self.open(image) for image in turn_images(conversation)] for conversation in conversations]
        options: dict[str, Any] = special_token_options(prompts[0], self.processor)
        if videos and self.adapter.takes_videos:
            videos = [replace(video, frames=tuple(self.open(frame) for frame in video.frames)) for video in videos]
            options |= processor_options(videos)
            images = [[frame for video in videos for frame in video.frames]]
        elif any(images):
            options["images"] = images[0] if len(images) == 1 else images
        if len(prompts) > 1:
            options |= {"padding": True, "padding_side": "left"}
        text = prompts[0] if len(prompts) == 1 else prompts
        try:
            processed = self.processor(text=text, return_tensors="pt", **options)
        except (ValueError, TypeError) as error:
            raise TorinoError(f"{type(self.processor).__name__} refused an image or the question: {error}") from error
        seconds = processed.get("second_per_grid_ts")
        tensors = dict(processed.to(self.device, dtype=self.dtype))  # integer tensors keep their type
        if seconds is not None:  # in bfloat16 they would move the frames
            tensors["second_per_grid_ts"] = seconds
        limits.check_tokens(tensors["input_ids"], self.adapter.placeholders, self.adapter.config)
        return Inputs(
            tensors,
            tuple(prompts),
            tuple(given),
            tuple(image for row in images for image in row),
            time.perf_counter() - begin,
            tuple(shown) if videos else (),
        )

    @overload
    def open(self, image: Picture) -> Image.Image: ...
    @overload
    def open(self, image: Video) -> Video: ...
    def open(self, image: Picture | Video) -> Image.Image | Video:
        """Open an image and pad it as the session does; an image or video that was opened before stays as it is."""
        if isinstance(image, Video):
            return image
        return prepare(open_image(image), self.padding, self._color)

    def query_for(self, inputs: Inputs, reducer: Reducer | None) -> TextQuery | None:
        """Return the text query of some inputs, if the reducer reads it.

        Raises
        ------
        MissingSignal
            If the reducer reads the question and the session has no text tower.
        """
        limits.check_reducer(reducer)
        if reducer is None or not self.adapter.needs(reducer) & QUERY_SIGNALS:
            return None
        questions = [last_question(conversation) for conversation in inputs.conversations]
        if not self.adapter.needs(reducer) & CLIP_SIGNALS:
            if self._words is None:
                self._words = WordText(self.processor)
            return self._words.query(questions)
        if self.text_query is None:
            raise MissingSignal(
                f"{reducer.spec} chooses patches by the question, which the text tower of a CLIP must read. Give it "
                "(--clip NAME, or text_query=load_clip_text(NAME)), or choose another method."
            )
        return self.text_query.query(questions)

    # ------------------------------------------------------------------ encode, reduce, generate

    def encode(
        self,
        source: Inputs | Picture | Video | Sequence[Picture | Video],
        reducers: Iterable[Reducer | None] = (),
        question: str = "?",
    ) -> Encoded:
        """Prepare images for any number of reducers; the tower runs once, on first use."""
        return Encoded(self, source if isinstance(source, Inputs) else self.inputs(source, question), reducers)

    @torch.no_grad()
    def reduce(self, encoded: Encoded, reducer: Reducer | None) -> ReducedImages:
        """Plan, reduce and project; None keeps all tokens."""
        check_type("encoded", encoded, Encoded, "the Encoded images of VLM.encode()")
        images, plans, seconds = encoded.run(reducer)
        first, inside = (None, None) if reducer is None else split_reducer(reducer)
        cache = getattr(first, "sae", None)
        before = cache.saved_seconds if isinstance(cache, CachedEncoder) else 0.0
        with recording() as planning:
            if reducer is None:
                plans = ReductionBatch.of([Reduction.identity(**unit.layout) for unit in images.tokens])
            elif plans is None:
                with stage("plan"):
                    plans = self.adapter.plan(reducer, images)
            else:
                self.adapter.check_plans(reducer, plans)
            images, plans = self.adapter.place(images, plans, position_choice(self.positions, reducer))
            with stage("projector"):
                embeds = self.adapter.embed(images, plans)
        if isinstance(cache, CachedEncoder):  # count what another reducer has already paid for
            planning["plan"] = planning.get("plan", 0.0) + cache.saved_seconds - before
        mode = attention_mode(self.attention, reducer, self.adapter)
        return ReducedImages(
            plans,
            images,
            embeds,
            {**seconds, **planning},
            position_mode(self.positions, reducer),
            proportional=mode != "plain",
            restore=mode == "restore",
            inside=plan_inside(self.adapter, inside, token_sizes(embeds, plans)[0]),
            by="" if reducer is None else reducer.spec,
        )

    @torch.no_grad()
    def generate(
        self,
        inputs: Inputs,
        reductions: Sequence[ReducedImages],
        *,
        prefix: PrefixCache | None = None,
        **generation: Any,
    ) -> Generated:
        """Generate the answers for one or several reductions of the same images, in one batch.

        Parameters
        ----------
        inputs : Inputs
        reductions : sequence of ReducedImages
            They must agree in ``positions`` and ``attention``. Several reductions in one call are possible where
            ``adapter.batches_reductions`` is True.
        prefix : PrefixCache, optional
            Shares the prompt up to the end of its images among several questions, where the family allows it. Methods
            inside the language model read the question first, so they do not use it.
        **generation
            Passed to ``model.generate``.
        """
        check_type("inputs", inputs, Inputs, "the Inputs of VLM.inputs()")
        reductions = limits.check_reductions(reductions, ReducedImages)
        count, first = len(reductions), reductions[0]
        rows = {
            name: value.repeat(count, *[1] * (value.ndim - 1)) if isinstance(value, Tensor) and count > 1 else value
            for name, value in inputs.tensors.items()
            if count == 1 or name not in self.adapter.pixel_names
        }
        clock, call = FirstTokenClock(), GenerateCall(self.model, {**rows, "do_sample": False, **generation})
        call.check()
        encoded = first.encoded
        if count > 1:
            full = tuple(number for reduction in reductions for number in reduction.encoded.full)
            encoded = EncodedImages((), full, modality=encoded.modality)
        embeds = [item for reduction in reductions for item in reduction.embeds]
        short, _ = self.adapter.insert(call.inputs, encoded, embeds, first.positions, "left")
        sizes = [size for reduction in reductions for size in reduction.sizes]
        patches = [number for reduction in reductions for number in reduction.patches]
        bias = make_bias(first.attention, self.adapter, short, sizes, patches)
        inside = self._inside(reductions, call)
        begin = time.perf_counter()
        output, run = run_generate(
            call,
            cast(Any, self.model).generate,
            short,
            bias,
            first.positions,
            prefix=prefix,
            clock=clock,
            inside=inside,
        )
        generated = self._generated(output, rows["input_ids"].shape[1], clock, begin)
        return replace(generated, plans=finish_plans(reductions, run))

    def _inside(
        self, reductions: Sequence[ReducedImages], call: GenerateCall
    ) -> Callable[[Mapping[str, Any], AttentionBias | None], InsideRun] | None:
        """Return a function that creates the run inside the language model, if a reducer works there."""
        if not any(reduction.inside for reduction in reductions):
            return None
        images = [image for item in reductions for image in item.inside or [None] * len(item.embeds)]
        counts = [len(item.slots) for reduction in reductions for item in reduction.embeds]
        call.check_inside(images)
        return lambda inputs, bias: InsideRun(self.adapter, inputs, images, counts, bias)

    def _generated(self, output: Any, length: int, clock: FirstTokenClock, begin: float) -> Generated:
        synchronize()
        end = time.perf_counter()
        ids = (output if isinstance(output, Tensor) else output.sequences)[:, length:]
        texts = self.processor.batch_decode(ids, skip_special_tokens=True)
        first_token = clock.first or end
        return Generated([str(text) for text in texts], ids, first_token - begin, end - first_token)

    @torch.no_grad()
    def generate_text(self, inputs: Inputs, **generation: Any) -> Generated:
        """Generate the answers to prompts without images, with the stock model."""
        check_type("inputs", inputs, Inputs, "the Inputs of VLM.chat_inputs()")
        begin, clock = time.perf_counter(), FirstTokenClock()
        criteria = [*(generation.get("stopping_criteria") or ()), clock]
        options = {"do_sample": False, **generation, "stopping_criteria": criteria}
        output = cast(Any, self.model).generate(**inputs.tensors, **options)
        return self._generated(output, inputs.tensors["input_ids"].shape[1], clock, begin)

    # ------------------------------------------------------------------ answers

    def answer(
        self,
        source: Inputs | Encoded,
        reducer: Reducer | None = None,
        *,
        max_new_tokens: int = 64,
        **generation: Any,
    ) -> Answer:
        """Answer one question, with all visual tokens or with those that a reducer keeps.

        Parameters
        ----------
        source : Inputs or Encoded
            From :meth:`inputs`, or from :meth:`encode` to use the tower's output again.
        reducer : Reducer, optional
            Without one, all tokens are kept.
        max_new_tokens : int
        **generation
            Passed to ``model.generate``. Decoding is greedy by default.
        """
        max_new_tokens = limits.check_new_tokens(max_new_tokens, self.adapter.config)
        encoded = source if isinstance(source, Encoded) else Encoded(self, source, [reducer])
        inputs = encoded.inputs
        if len(inputs.prompts) != 1:
            raise BadParameter(f"answer() takes one prompt, got {len(inputs.prompts)}. Use generate() for a batch.")
        reduction = self.reduce(encoded, reducer)
        output = self.generate(inputs, [reduction], max_new_tokens=max_new_tokens, **generation)
        before, seconds = sum(reduction.encoded.full), reduction.seconds
        vision = sum(seconds.get(name, 0.0) for name in ("tower", "question", "plan", "projector"))
        total = inputs.seconds + vision + output.prefill + output.decode
        trace = None
        if reducer is not None:
            after = tuple(len(item.slots) for item in reduction.embeds)
            kept = reduction.layers or (sum(after),)
            saved = self.adapter.cache_bytes(len(kept) * before - sum(kept)) // len(kept)
            call = ReducedCall(output.plans[0], reduction.encoded.full, after, seconds, saved, self.padding)
            trace = Trace([replace(call, inside=reduction.inside)])
        return Answer(
            text=output.texts[0],
            prompt=inputs.prompts[0],
            before=before,
            after=reduction.tokens,
            new_tokens=output.ids.shape[1],
            seconds={"processor": inputs.seconds, **seconds}
            | {"prefill": output.prefill, "decode": output.decode, "total": total},
            padding=self.padding,
            trace=trace,
            layers=reduction.layers,
            seen=tuple(as_seen(inputs.tensors, self.processor, inputs.images)),
        )


def load_vlm(
    name_or_path: str | os.PathLike[str],
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype | None = None,
    *,
    padding: Padding = "crop",
    positions: Positions = "auto",
    attention: Attention = "auto",
    text_query: ClipText | None = None,
) -> VLM:
    """Load a model and its processor as a :class:`VLM`.

    Parameters
    ----------
    name_or_path, device, dtype
        As for :func:`torino.vlm.loading.load_model`: a hub name, a folder, or an installed model package (``lab``).
    padding, positions, attention, text_query
        As for :class:`VLM`.
    """
    model, processor = load_model(name_or_path, device, dtype)
    package = model_package(name_or_path)
    options: Mapping[str, Any] = {"padding": padding, "positions": positions, "attention": attention}
    return VLM(model, processor, text_query=text_query, package=package, **options)


def ask(
    image: Picture | Video | Sequence[Picture | Video],
    question: str,
    *,
    model: VLM | str | os.PathLike[str] = "lab",
    reducer: Reducer | None = None,
    max_new_tokens: int = 64,
    baseline: bool = False,
    **generation: Any,
) -> Answer:
    """Ask a model about an image or a video (or several), with fewer visual tokens if a reducer is given.

    Parameters
    ----------
    image : path, bytes, PIL image, Video, or a sequence of them
    question : str
    model : VLM, or what :func:`load_vlm` takes
    reducer : Reducer, optional
        Without one, the model receives all tokens.
    max_new_tokens : int
        Longest answer.
    baseline : bool
        Also answer with all tokens, and measure what stopping the tower saves (:attr:`Answer.speedup`). The model
        then generates one token first, so that neither answer includes start-up time.
    **generation
        Passed to ``model.generate``. Decoding is greedy by default.
    """
    check_type("baseline", baseline, bool, "True or False")
    if baseline and reducer is None:
        raise BadParameter("baseline=True compares a reducer with all tokens. Give reducer=..., or omit baseline.")
    vlm = model if isinstance(model, VLM) else load_vlm(model)
    options = {"max_new_tokens": max_new_tokens, **generation}
    if baseline:  # neither answer should include start-up time
        vlm.answer(vlm.inputs(image, question), reducer, **{**options, "max_new_tokens": 1})
    answer = vlm.answer(vlm.inputs(image, question), reducer, **options)
    if not baseline:
        return answer
    inputs = vlm.inputs(image, question)
    full = vlm.answer(inputs, None, **options)
    return replace(answer, baseline=full, early_exit=measure_early_exit(vlm, inputs))
