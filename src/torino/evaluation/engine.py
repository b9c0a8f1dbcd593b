"""The engine: one picture is seen once, reduced by every method, and each question about it is answered by all."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from torino.core.concepts import CachedEncoder
from torino.core.errors import BadParameter, TorinoError
from torino.core.reduction import Reduction, ReductionBatch
from torino.datasets.images import Padding, as_seen, mean_colour, open_image, prepare
from torino.evaluation.examples import ExampleWriter
from torino.reducers import PositionMode, Reducer, as_in_tower
from torino.vlm.adapters.base import ASKED, Adapter, EncodedImages, ImageEmbeds, Positions, adapter_for, place
from torino.vlm.attention import added_by_mass, attending, weigh
from torino.vlm.session import write_prompt
from torino.vlm.text_query import ClipText

OnError = Literal["skip", "stop"]
BATCHING = 2  # of what is answered together: raised when that changes, since a near tie may then fall the other way


@dataclass(frozen=True)
class Asked:
    """A question as the engine gets it.

    Attributes
    ----------
    key : object
        Whatever the caller knows it by.
    text : str
        The question with its instruction, without the words a model wants around it.
    length : int
        Longest answer, in tokens.
    """

    key: Any
    text: str
    length: int


@dataclass(frozen=True)
class Answered:
    """One answer, or the error in its place.

    Attributes
    ----------
    key : object
    setting : str
    text : str or None
    tokens, before : int
        Visual tokens that the language model got, and those of the full prompt.
    seconds : dict
        ``tower``, ``plan``, ``projector``, and ``answer`` of the ``batch`` of answers made together. Where several
        questions are about one picture, ``answer`` of the first one has the reading of the picture in it.
    error : str
    """

    key: Any
    setting: str
    text: str | None
    tokens: int
    before: int
    seconds: dict[str, float]
    error: str = ""


@dataclass(frozen=True)
class _Part:
    """What one setting made of a picture."""

    setting: str
    sight: EncodedImages
    plans: ReductionBatch
    splices: list[ImageEmbeds]
    tokens: int
    seconds: dict[str, float]
    position_mode: PositionMode


class _Lead:
    """The prompt up to the end of its pictures, which the language model reads once for all questions about them."""

    def __init__(self) -> None:
        self._ids: Tensor | None = None
        self._cache: Any = None

    def go_on(self, model: Any, shrunk: Mapping[str, Any], image_token: int) -> dict[str, Any]:
        """The inputs of a whole prompt, so that only what follows the pictures is still to be read."""
        ids, mask = shrunk["input_ids"], shrunk["attention_mask"]
        end = 1 + int((ids == image_token).any(0).nonzero().max())
        if self._ids is None or not torch.equal(self._ids, ids[:, :end]):
            given = shrunk.get("position_ids")  # there where positions are not simply counted
            places = (mask.long().cumsum(1) - 1).clamp(min=0) if given is None else given
            seen = {"input_ids": ids[:, :end], "attention_mask": mask[:, :end], "position_ids": places[:, :end]}
            self._cache = model(**{**shrunk, **seen}, use_cache=True, logits_to_keep=1).past_key_values
            self._ids = ids[:, :end]
        rest = {name: value for name, value in shrunk.items() if name != "mm_encoder_outputs"}
        return rest | {"past_key_values": copy.deepcopy(self._cache)}  # answering writes into it


class Engine:
    """Answers questions about pictures under many settings; the tower looks at each picture once for all of them.

    The language model, too, reads a picture once for all questions about it, where the model's family allows it.
    Methods that work inside the tower, or choose by the question, see it anew, as they must. Which settings are
    answered in one batch depends on the settings alone, so a run that is taken up again gives the same answers, and
    where it lacks those of few settings, the other batches are not even planned.

    Parameters
    ----------
    model, processor
        As :func:`torino.vlm.session.load_vlm` gives them.
    reducers : mapping of setting to Reducer or None
        None keeps all tokens.
    padding : {"crop", "square"}
    positions : {"own", "compact", "original"}
    mass : bool, optional
        Attend to each token as to all the patches it stands for, see :mod:`torino.vlm.attention`; by default as each
        method has it.
    batch : int
        Settings whose answers to one question are made together, where the model's family allows it.
    tiers : mapping of setting to str, optional
        Settings of one tier are batched together: they should leave about as many tokens.
    on_error : {"skip", "stop"}
        Whether a picture or question at which the model fails is noted and passed over.
    asking : ClipText, optional
        Reads questions for methods that choose by them.
    """

    def __init__(
        self,
        model: nn.Module,
        processor: Any,
        reducers: Mapping[str, Reducer | None],
        *,
        padding: Padding = "crop",
        positions: Positions = "own",
        mass: bool | None = None,
        batch: int = 8,
        tiers: Mapping[str, str] | None = None,
        on_error: OnError = "skip",
        asking: ClipText | None = None,
    ) -> None:
        if batch < 1:
            raise BadParameter(f"batch must be at least 1, got {batch}.")
        self.model, self.processor, self.reducers = model, processor, dict(reducers)
        self.host = adapter_for(model)
        self.padding: Padding = padding
        self.positions: Positions = positions
        self._weighs = {name: weigh(mass, reducer, self.host) for name, reducer in self.reducers.items()}
        self.on_error, self.asking = on_error, asking
        # families that lay out positions or outputs by image are asked one by one
        plain = type(self.host).outputs is Adapter.outputs and type(self.host).positions is Adapter.positions
        batch = batch if plain else 1
        self._resumes = plain and self.host.resumes
        self._colour = mean_colour(processor)
        self._weight = next(one for one in model.parameters() if one.is_floating_point())
        for setting, reducer in self.reducers.items():
            if reducer is not None and reducer.needs & ASKED and asking is None:
                raise BadParameter(
                    f"{setting} chooses patches by the question, and nothing here reads it. Give the text half of the "
                    "model's CLIP (--clip), or leave the method out."
                )
            if reducer is not None and reducer.shares_batch:
                raise BadParameter(
                    f"{setting} shares a budget among images that are planned together, and here each picture is "
                    "planned alone. Take a threshold instead: torino calibrate --method torino-x finds it."
                )
        by_question = {name for name, one in self.reducers.items() if one is not None and one.needs & ASKED}
        self._at_once = self._batches([name for name in self.reducers if name not in by_question], batch, tiers or {})
        self._by_question = self._batches(sorted(by_question), batch, tiers or {})

    @torch.no_grad()
    def answers(
        self,
        pictures: Sequence[bytes],
        asked: Sequence[Asked],
        wanted: Callable[[Any, str], bool],
        keep: ExampleWriter | None = None,
    ) -> Iterator[list[Answered]]:
        """Answer questions about one picture (or several that go together).

        Parameters
        ----------
        pictures : sequence of bytes
        asked : sequence of Asked
        wanted : callable
            Says of (key, setting) whether that answer is still missing.
        keep : ExampleWriter, optional
            Keeps the picture and its Reductions, where it is one picture of one tile.

        Yields
        ------
        list of Answered
            Those of a batch that were wanted.
        """
        open_ = [question for question in asked if any(wanted(question.key, name) for name in self.reducers)]
        if not open_:
            return
        at_once = [
            names for names in self._at_once if any(wanted(question.key, name) for question in open_ for name in names)
        ]
        try:
            images = [prepare(open_image(picture), self.padding, self._colour) for picture in pictures]
            inputs = self._inputs(images, open_[0])
            sight, seen = self._look(inputs, [name for names in at_once for name in names]) if at_once else (None, 0.0)
        except Exception as error:
            self._stop_at(error)
            yield [
                _failed(question.key, name, error)
                for question in open_
                for name in self.reducers
                if wanted(question.key, name)
            ]
            return
        for names in at_once:
            assert sight is not None
            parts, failed = self._parts(names, sight, inputs, seen)
            if keep is not None:
                self._keep(keep, images, inputs, parts)
            # by the questions there are, not by those still open: a run that goes on gives the same answers
            lead = _Lead() if self._resumes and len(asked) > 1 else None
            for question in open_:
                if any(wanted(question.key, name) for name in names):
                    done = self._answer(images, question, parts, lead)
                    done += [_failed(question.key, name, error) for name, error in failed.items()]
                    yield [answer for answer in done if wanted(answer.key, answer.setting)]
        for question in open_:
            for names in self._by_question:
                if any(wanted(question.key, name) for name in names):
                    parts, failed = self._asked_parts(names, images, question)
                    done = self._answer(images, question, parts)
                    done += [_failed(question.key, name, error) for name, error in failed.items()]
                    yield [answer for answer in done if wanted(answer.key, answer.setting)]

    def _batches(self, names: Sequence[str], batch: int, tiers: Mapping[str, str]) -> list[list[str]]:
        """Settings that are answered together: of one tier, tokens numbered and weighed alike, at most ``batch``.

        All tokens of a picture are so many more than what methods leave of them that they are a tier of their own.
        """
        order = list(dict.fromkeys(tiers.values()))

        def key(name: str) -> tuple[bool, str, bool, int]:
            reducer = self.reducers[name]
            tier = order.index(tiers[name]) if name in tiers else -1
            return reducer is None, place(self.positions, reducer), self._weighs[name], tier

        made: list[list[str]] = []
        for _, alike in groupby(sorted(names, key=lambda name: (key(name), name)), key=key):
            some = list(alike)
            pieces = -(-len(some) // batch)
            made += [some[len(some) * i // pieces : len(some) * (i + 1) // pieces] for i in range(pieces)]
        return made

    def _stop_at(self, error: Exception) -> None:
        """Raise what went wrong, as a sentence, where that is asked for."""
        if self.on_error == "skip":
            return
        if isinstance(error, TorinoError):
            raise error
        raise TorinoError(
            f"The model failed with {type(error).__name__}: {error}. What was answered before is kept. To note such a "
            "failure and go on, skip errors instead of stopping at them."
        ) from error

    # ------------------------------------------------------------------ seeing

    def _look(self, inputs: Mapping[str, Any], names: Sequence[str]) -> tuple[EncodedImages, float]:
        """What the tower shows to all settings that do not work inside it, and how long that took."""
        common = frozenset[str]()
        for reducer in (self.reducers[name] for name in names):
            if reducer is not None and as_in_tower(reducer) is None:
                common |= reducer.needs | (reducer.view_needs if self.host.tiles else frozenset())
        begin = time.perf_counter()
        sight = self.host.look(inputs, common)
        return sight, time.perf_counter() - begin

    def _parts(
        self, names: Sequence[str], sight: EncodedImages, inputs: Mapping[str, Any], seen: float
    ) -> tuple[list[_Part], dict[str, Exception]]:
        """What each setting makes of the picture, and the settings that fail at it."""
        parts: list[_Part] = []
        failed: dict[str, Exception] = {}
        for name in names:
            try:
                parts.append(self._part(name, self.reducers[name], sight, inputs, seen))
            except Exception as error:
                self._stop_at(error)
                failed[name] = error
        return parts, failed

    def _part(
        self, name: str, reducer: Reducer | None, sight: EncodedImages, inputs: Mapping[str, Any], seen: float
    ) -> _Part:
        begin, memory = time.perf_counter(), getattr(reducer, "sae", None)
        saved = memory.saved if isinstance(memory, CachedEncoder) else 0.0
        inside = None if reducer is None else as_in_tower(reducer)
        if reducer is None:
            plans = ReductionBatch.of([Reduction.identity(unit.grid) for unit in sight.tokens])
        elif inside is None:
            plans = self.host.plan(reducer, sight)
        else:
            sight, plans = self.host.encode_in_tower(inputs, inside)
            seen, begin = time.perf_counter() - begin, time.perf_counter()
        planned = time.perf_counter()
        if isinstance(memory, CachedEncoder):  # what another setting has paid for counts for this one all the same
            begin -= memory.saved - saved
        splices = self.host.splice(sight, plans)
        seconds = {"tower": seen, "plan": planned - begin, "projector": time.perf_counter() - planned}
        tokens = sum(len(splice.slots) for splice in splices)
        return _Part(name, sight, plans, splices, tokens, seconds, place(self.positions, reducer))

    def _keep(
        self, keep: ExampleWriter, images: Sequence[Any], inputs: Mapping[str, Any], parts: Sequence[_Part]
    ) -> None:
        seen = as_seen(inputs, self.processor, images)
        if len(seen) != 1 or any(len(part.plans) != 1 for part in parts):
            return
        keep.photo(seen[0])
        for part in parts:
            if self.reducers[part.setting] is not None:
                keep.plan(part.setting, part.plans[0])

    def _asked_parts(
        self, names: Sequence[str], images: Sequence[Any], question: Asked
    ) -> tuple[list[_Part], dict[str, Exception]]:
        """What settings that choose by the question make of the picture, which they see for this one alone."""
        parts: list[_Part] = []
        failed: dict[str, Exception] = {}
        for name in names:
            reducer = self.reducers[name]
            assert reducer is not None
            assert self.asking is not None  # an engine without it is refused
            try:
                inputs = self._inputs(images, question)
                begin = time.perf_counter()
                sight = self.host.look(inputs, reducer.needs - ASKED)
                sight = self.asking.about(question.text).add(self.host, sight, inputs)
                parts.append(self._part(name, reducer, sight, inputs, time.perf_counter() - begin))
            except Exception as error:
                self._stop_at(error)
                failed[name] = error
        return parts, failed

    # ------------------------------------------------------------------ answering

    def _answer(
        self, images: Sequence[Any], question: Asked, group: Sequence[_Part], lead: _Lead | None = None
    ) -> list[Answered]:
        if not group:
            return []
        try:
            return self._generate(images, question, group, lead)
        except Exception as error:
            self._stop_at(error)
            if len(group) == 1:
                return [_failed(question.key, group[0].setting, error)]
            return [answer for part in group for answer in self._answer(images, question, [part])]

    def _generate(
        self, images: Sequence[Any], question: Asked, group: Sequence[_Part], lead: _Lead | None
    ) -> list[Answered]:
        full = self._inputs(images, question)
        before = int((full["input_ids"] == self.host.image_token).sum())
        count = len(group)
        rows = {
            name: value.repeat(count, *[1] * (value.ndim - 1)) if isinstance(value, Tensor) else value
            for name, value in full.items()
            if name not in self.host.pixel_names
        }
        sight = group[0].sight if count == 1 else EncodedImages((), group[0].sight.full * count)
        splices = [splice for part in group for splice in part.splices]
        shrunk, _ = self.host.fill(rows, sight, splices, group[0].position_mode, "left")
        begin = time.perf_counter()
        length = shrunk["input_ids"].shape[1]
        with ExitStack() as stack:
            if self._weighs[group[0].setting]:  # and so for all of the group
                plans = [plan for part in group for plan in part.plans]
                counts = [len(splice.slots) for splice in splices]
                added = added_by_mass(shrunk, self.host.image_token, plans, counts)
                stack.enter_context(attending(self.model, added))
            if lead is not None:
                shrunk = lead.go_on(self.model, shrunk, self.host.image_token)
            out = cast(Any, self.model).generate(**shrunk, max_new_tokens=question.length, do_sample=False)
        took = time.perf_counter() - begin
        texts = self.processor.batch_decode(out[:, length:], skip_special_tokens=True)
        return [
            Answered(
                question.key,
                part.setting,
                text.strip(),
                part.tokens,
                before,
                {**part.seconds, "answer": took, "batch": count},
            )
            for part, text in zip(group, texts, strict=True)
        ]

    def _inputs(self, images: Sequence[Any], question: Asked) -> dict[str, Any]:
        prompt = write_prompt(self.model, self.processor, question.text, len(images))
        start = getattr(getattr(self.processor, "tokenizer", None), "bos_token", None)
        options = {"add_special_tokens": False} if start and prompt.startswith(start) else {}
        try:
            inputs = self.processor(images=list(images), text=prompt, return_tensors="pt", **options)
        except (ValueError, TypeError) as error:
            raise TorinoError(f"{type(self.processor).__name__} refused the image or the question: {error}") from error
        return dict(inputs.to(self._weight.device, dtype=self._weight.dtype))


def _failed(key: Any, setting: str, error: Exception) -> Answered:
    return Answered(key, setting, None, 0, 0, {}, f"{type(error).__name__}: {error}")
