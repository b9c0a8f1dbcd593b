"""Answer the questions about an image under many settings; the tower encodes each image once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

import torch

from torino.core.errors import BadParameter, TorinoError
from torino.datasets.images import as_seen
from torino.evaluation.examples import ExampleWriter
from torino.reducers import Reducer, split_reducer
from torino.vlm.adapters.base import CLIP_SIGNALS, QUERY_SIGNALS, position_mode
from torino.vlm.attention import attention_mode
from torino.vlm.prefix import PrefixCache
from torino.vlm.session import VLM, Encoded, ReducedImages

OnError = Literal["skip", "stop"]
BATCHING = 2  # version of the batching rule: another batch may decide a near tie differently


@dataclass(frozen=True)
class QuestionToAsk:
    """A question for the engine.

    Attributes
    ----------
    key : object
        Identifies the question for the caller.
    text : str
        The question with its instruction.
    length : int
        Longest answer, in tokens.
    """

    key: Any
    text: str
    length: int


@dataclass(frozen=True)
class EngineAnswer:
    """One answer, or the error in its place.

    Attributes
    ----------
    key : object
    setting : str
    text : str or None
    tokens, before : int
        Visual tokens that the language model processed, and those of the full prompt. If it dropped some, the mean
        over its layers, rounded.
    seconds : dict
        ``tower``, ``plan``, ``projector``, ``question`` if the method reads it, and ``answer`` of the ``batch`` of
        answers that were generated together. Where several questions share an image, ``answer`` of the first includes
        reading the image.
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
    """The images as one setting reduces them."""

    setting: str
    reduction: ReducedImages


def check_reducers(reducers: Mapping[str, Reducer | None], *, has_text_query: bool) -> None:
    """Refuse reducers that cannot be evaluated, by setting; this needs no model."""
    for setting, reducer in reducers.items():
        if reducer is not None and reducer.needs & CLIP_SIGNALS and not has_text_query:
            raise BadParameter(
                f"{setting} chooses patches by the question, which a CLIP text tower must read. Give it (--clip), or "
                "leave the method out."
            )
        if reducer is not None and reducer.shares_batch:
            raise BadParameter(
                f"{setting} shares a budget among images that are planned together, and an evaluation plans each "
                "image alone. Use a threshold instead: torino calibrate --method torino-x finds one."
            )


class Engine:
    """Answer questions about images under many settings.

    The tower encodes each image once, and the language model reads it once for all questions where the family allows
    it. Methods inside the tower, and methods that read the question, encode it again. Which settings share a batch
    depends on the settings only, so a resumed run gives the same answers.

    Parameters
    ----------
    vlm : VLM
    reducers : mapping of setting to Reducer or None
        None keeps all tokens.
    batch : int
        Settings whose answers to one question are generated together, where the family allows it.
    tiers : mapping of setting to str, optional
        Settings of one tier are batched together: they should keep about as many tokens.
    on_error : {"skip", "stop"}
        Whether to record an image or question at which the model fails and continue.
    """

    def __init__(
        self,
        vlm: VLM,
        reducers: Mapping[str, Reducer | None],
        *,
        batch: int = 8,
        tiers: Mapping[str, str] | None = None,
        on_error: OnError = "skip",
    ) -> None:
        if batch < 1:
            raise BadParameter(f"batch must be at least 1, got {batch}.")
        self.vlm, self.reducers, self.on_error = vlm, dict(reducers), on_error
        check_reducers(self.reducers, has_text_query=vlm.text_query is not None)
        reads_question = {name for name, r in self.reducers.items() if r is not None and r.needs & QUERY_SIGNALS}
        adapter = vlm.adapter
        batch = batch if adapter.batches_reductions else 1
        self._shares_prefix = adapter.batches_reductions and adapter.shares_prefix
        self._shared = self._batches([name for name in self.reducers if name not in reads_question], batch, tiers or {})
        self._per_question = self._batches(sorted(reads_question), batch, tiers or {})

    @torch.no_grad()
    def answers(
        self,
        images: Sequence[Any],
        questions: Sequence[QuestionToAsk],
        wanted: Callable[[Any, str], bool],
        writer: ExampleWriter | None = None,
    ) -> Iterator[list[EngineAnswer]]:
        """Answer questions about one image, or about several that belong together.

        Parameters
        ----------
        images : sequence of path, bytes or PIL image
        questions : sequence of QuestionToAsk
        wanted : callable
            Whether the answer of (key, setting) is still missing.
        writer : ExampleWriter, optional
            Saves the image and its reductions, for a single image without tiles; not those of methods inside the
            language model, which depend on the question.

        Yields
        ------
        list of EngineAnswer
            The wanted answers of one batch.
        """
        missing = [question for question in questions if any(wanted(question.key, name) for name in self.reducers)]
        if not missing:
            return
        batches = [names for names in self._shared if any(wanted(q.key, name) for q in missing for name in names)]
        encoded: Encoded | None = None
        asked: list[tuple[QuestionToAsk, Encoded]] = []
        for question in missing:
            try:
                if encoded is None:
                    opened = [self.vlm.open(image) for image in images]
                    reducers = [self.reducers[name] for names in batches for name in names]
                    inputs = self.vlm.inputs(opened, question.text)
                    asked.append((question, self.vlm.encode(inputs, reducers)))
                    encoded = asked[0][1]
                else:
                    asked.append((question, encoded.with_question(question.text)))
            except Exception as error:
                self._stop_at(error)
                yield self._all_failed([question], wanted, error)
        if encoded is None:
            return
        try:
            if batches:
                encoded.run(None)
        except Exception as error:
            self._stop_at(error)
            yield self._all_failed([question for question, _ in asked], wanted, error)
            return
        for names in batches:
            parts, failed = self._parts(names, encoded)
            if writer is not None:
                self._save(writer, encoded, parts)
            # By the number of all questions, not of the missing ones: a resumed run gives the same answers.
            prefix = PrefixCache() if self._shares_prefix and len(questions) > 1 else None
            for question, about in asked:
                if any(wanted(question.key, name) for name in names):
                    answers = self._answer(about, question, parts, prefix)
                    answers += [_failed(question.key, name, error) for name, error in failed.items()]
                    yield [answer for answer in answers if wanted(answer.key, answer.setting)]
        for question, about in asked:
            for names in self._per_question:
                if any(wanted(question.key, name) for name in names):
                    parts, failed = self._parts(names, about)
                    answers = self._answer(about, question, parts)
                    answers += [_failed(question.key, name, error) for name, error in failed.items()]
                    yield [answer for answer in answers if wanted(answer.key, answer.setting)]

    def _all_failed(
        self, questions: Sequence[QuestionToAsk], wanted: Callable[[Any, str], bool], error: Exception
    ) -> list[EngineAnswer]:
        return [
            _failed(question.key, name, error)
            for question in questions
            for name in self.reducers
            if wanted(question.key, name)
        ]

    def _batches(self, names: Sequence[str], batch: int, tiers: Mapping[str, str]) -> list[list[str]]:
        """Group settings that are answered together: same tier, positions and attention, at most ``batch``.

        All tokens are a group of their own: they are far more than any method keeps. So are methods inside the language
        model, whose first layers process all tokens.
        """
        order = list(dict.fromkeys(tiers.values()))

        def key(name: str) -> tuple[bool, str, str, bool, int]:
            reducer = self.reducers[name]
            inside = reducer is not None and split_reducer(reducer)[1] is not None  # reads all tokens first
            tier = order.index(tiers[name]) if name in tiers else -1
            attention = attention_mode(self.vlm.attention, reducer, self.vlm.adapter)
            return reducer is None, position_mode(self.vlm.positions, reducer), attention, inside, tier

        result: list[list[str]] = []
        for _, group in groupby(sorted(names, key=lambda name: (key(name), name)), key=key):
            members = list(group)
            pieces = -(-len(members) // batch)
            result += [members[len(members) * i // pieces : len(members) * (i + 1) // pieces] for i in range(pieces)]
        return result

    def _stop_at(self, error: Exception) -> None:
        """Raise an error as a sentence if the run is to stop at errors."""
        if self.on_error == "skip":
            return
        if isinstance(error, TorinoError):
            raise error
        raise TorinoError(
            f"The model failed with {type(error).__name__}: {error}. Earlier answers are kept. To record such failures "
            "and continue, skip errors instead of stopping at them."
        ) from error

    def _parts(self, names: Sequence[str], encoded: Encoded) -> tuple[list[_Part], dict[str, Exception]]:
        """Reduce the images under each setting; return also the settings that fail."""
        parts: list[_Part] = []
        failed: dict[str, Exception] = {}
        for name in names:
            try:
                parts.append(_Part(name, self.vlm.reduce(encoded, self.reducers[name])))
            except Exception as error:
                self._stop_at(error)
                failed[name] = error
        return parts, failed

    def _save(self, writer: ExampleWriter, encoded: Encoded, parts: Sequence[_Part]) -> None:
        shown = as_seen(encoded.inputs.tensors, self.vlm.processor, encoded.inputs.images)
        if len(shown) != 1 or any(len(part.reduction.plans) != 1 for part in parts):
            return
        writer.save_image(shown[0])
        for part in parts:
            if self.reducers[part.setting] is not None and not part.reduction.inside:
                writer.save_reduction(part.setting, part.reduction.plans[0])

    def _answer(
        self, encoded: Encoded, question: QuestionToAsk, group: Sequence[_Part], prefix: PrefixCache | None = None
    ) -> list[EngineAnswer]:
        if not group:
            return []
        try:
            return self._generate(encoded, question, group, prefix)
        except Exception as error:
            self._stop_at(error)
            if len(group) == 1:
                return [_failed(question.key, group[0].setting, error)]
            return [answer for part in group for answer in self._answer(encoded, question, [part])]

    def _generate(
        self, encoded: Encoded, question: QuestionToAsk, group: Sequence[_Part], prefix: PrefixCache | None
    ) -> list[EngineAnswer]:
        reductions = [part.reduction for part in group]
        output = self.vlm.generate(encoded.inputs, reductions, prefix=prefix, max_new_tokens=question.length)
        timing = {"answer": output.prefill + output.decode, "batch": len(group)}
        return [
            EngineAnswer(
                question.key,
                part.setting,
                text.strip(),
                part.reduction.tokens,
                sum(part.reduction.encoded.full),
                _stages(part.reduction.seconds) | timing,
            )
            for part, text in zip(group, output.texts, strict=True)
        ]


def _stages(seconds: Mapping[str, float]) -> dict[str, float]:
    question = {"question": seconds["question"]} if "question" in seconds else {}
    return {name: seconds.get(name, 0.0) for name in ("tower", "plan", "projector")} | question


def _failed(key: Any, setting: str, error: Exception) -> EngineAnswer:
    return EngineAnswer(key, setting, None, 0, 0, {}, f"{type(error).__name__}: {error}")
