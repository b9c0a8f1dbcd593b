"""Measure what methods cost, side by side in one run.

All methods take turns on each image before the next one, in an order that shifts by one each time, so that a slow
moment of the machine affects all of them alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import torch

from torino.core.errors import BadParameter, TorinoError
from torino.core.reduction import ReductionBatch
from torino.core.timing import recording
from torino.core.tokens import VisualTokens
from torino.evaluation.latency.probes import (
    apply_plans,
    count_survivors,
    machine,
    missing_signals,
    now,
    peak_memory,
    time_gather,
    versions,
    with_signals,
)
from torino.evaluation.latency.rows import BenchPlan, BenchRow
from torino.evaluation.protocol import Setting
from torino.reducers import Reducer, as_in_tower, split_reducer
from torino.sae import SAE

if TYPE_CHECKING:  # Pillow and transformers are only needed to measure a model
    from torino.datasets.images import Picture
    from torino.vlm.session import VLM, Encoded

FORMAT = "torino-bench/1"
QUESTION = "Describe what you see."
CONCEPTS = 3  # concepts per token for which the survivors of the prefilter are counted; the paper's largest k
Progress = Callable[[str, int, int], None]


class Bench:
    """Measure several methods; :meth:`on_tokens` or :meth:`on_model` measures, :meth:`document` returns the results.

    Parameters
    ----------
    settings : sequence of Setting
        See :mod:`torino.evaluation.protocol`; the one that keeps all tokens is measured for its answers only.
    saes : mapping of str to concept encoder
    plan : BenchPlan
    progress : callable, optional
        Called with a phase, how much of it is done, and how much there is.

    Attributes
    ----------
    rows : list of BenchRow
    notes : list of str
        Methods that were left out and why, and other remarks for the reader.
    left_out : list of (Setting, str)
        The settings that could not be measured, and why.
    survivors : dict of str to dict
        For each SAE with ``prefilter = "int8"``: the latents per token that the prefilter could not exclude.
    """

    def __init__(
        self, settings: Sequence[Setting], saes: Mapping[str, Any], plan: BenchPlan, progress: Progress | None = None
    ) -> None:
        self.plan = plan
        self.rows = [BenchRow(setting, setting.reducer(saes)) for setting in settings]
        self.notes: list[str] = []
        self.left_out: list[tuple[Setting, str]] = []
        self.about: dict[str, Any] = {}
        self.survivors: dict[str, dict[str, float]] = {}
        self._filtered = {name: sae for name, sae in saes.items() if isinstance(sae, SAE) and sae.prefilter == "int8"}
        self._progress: Progress = progress or (lambda phase, done, total: None)

    # ------------------------------------------------------------------ tokens alone

    @torch.no_grad()
    def on_tokens(
        self, images: Sequence[VisualTokens], device: torch.device | str = "cpu", source: str = "tokens"
    ) -> None:
        """Time the reducers alone on given tokens; signals that they lack are random, with the shapes of CLIP's.

        Parameters
        ----------
        images : sequence of VisualTokens
        device : torch.device or str
        source : str
            Description of the tokens.
        """
        self.rows = [row for row in self.rows if row.reducer is not None]
        for row in [row for row in self.rows if row.reducer is not None and as_in_tower(row.reducer) is not None]:
            self._leave_out(row, "it runs inside a vision tower, so it cannot be timed on tokens alone")
        for row in [row for row in self.rows if row.reducer is not None and split_reducer(row.reducer)[1] is not None]:
            self._leave_out(row, "it runs inside the language model, so it cannot be timed on tokens alone")
        missing = {id(row): missing_signals(row.reducer, images[0]) for row in self.rows if row.reducer is not None}
        names = frozenset[str]().union(*missing.values())
        ready = [with_signals(image, names, i, device) for i, image in enumerate(images)]
        for row in self.rows:
            row.made = tuple(sorted(missing[id(row)]))
        if names:
            self.notes.append("Signals that the tokens lack, such as attention, are random: right in size only.")
        picked = self.plan.pick(len(ready))

        def module(row: BenchRow, index: int, keep: bool) -> None:
            tokens, reducer = [ready[index]], _reducer(row)
            self._time(row, tokens, lambda: reducer.plan_batch(tokens), keep)

        self._try(lambda row: module(row, picked[0], False))
        self._rounds(picked, lambda index: index, module)
        for row in self.rows:
            row.peak = peak_memory(lambda row=row: module(row, picked[0], False), device)
        self._count_survivors(lambda _: [ready[index] for index in dict.fromkeys(picked[:8])])
        self.about = {"source": source, "distinct_images": min(len(images), self.plan.images), "memory": "module"}
        self.about["device"] = torch.device(device).type

    # ------------------------------------------------------------------ a model

    @torch.no_grad()
    def on_model(
        self,
        vlm: VLM,
        images: Sequence[Picture],
        *,
        question: str = QUESTION,
        name: str = "",
        source: str = "images",
    ) -> None:
        """Time the reducers on the tower's output, then the first token and the whole answer.

        Parameters
        ----------
        vlm : VLM
        images : sequence of path, bytes or PIL image
            Opened when their turn comes.
        question : str
        name, source : str
            Descriptions of the model and the images.
        """
        from torino.vlm.early_exit import measure_early_exit

        picked = self.plan.pick(len(images))
        reducers = [row.reducer for row in self.rows]

        def encode(index: int) -> Encoded:
            return vlm.encode(vlm.inputs(images[index], question), reducers)

        def module(row: BenchRow, encoded: Encoded, keep: bool) -> None:
            if row.reducer is not None:
                self._time_reducer(row, row.reducer, encoded, keep)

        first = encode(picked[0])
        self._try(lambda row: module(row, first, False))
        self._rounds(picked, encode, module)
        self._count_survivors(lambda reducer: first.run(reducer)[0].tokens)
        exit_ = None
        if self.plan.answers:
            self._time_answers(vlm, [images[index] for index in picked], question)
            exit_ = measure_early_exit(vlm, first.inputs, self.plan.answers)
        else:
            self.rows = [row for row in self.rows if row.reducer is not None]
        self.about = {
            "model": name,
            "family": vlm.family,
            "dtype": str(vlm.dtype).removeprefix("torch."),
            "device": vlm.device.type,
            "padding": vlm.padding,
            "positions": vlm.positions,
            "attention": vlm.attention,
            "question": question,
            "source": source,
            "distinct_images": min(len(images), self.plan.images),
            "answers": self.plan.answers,
            "answer_tokens": self.plan.length,
            "memory": "answer" if self.plan.answers else None,
            "early_exit": None if exit_ is None else exit_.to_dict(),
        }

    def _time_reducer(self, row: BenchRow, reducer: Reducer, encoded: Encoded, keep: bool) -> None:
        adapter = encoded.vlm.adapter
        first, inside = split_reducer(reducer)  # what happens in the language model is part of the answer
        in_tower = None if first is None else as_in_tower(first)
        processed = encoded.vlm.reduce(encoded, reducer).tokens if inside is not None else None
        if in_tower is None:
            images = encoded.run(reducer)[0]
            self._time(row, images.tokens, lambda: adapter.plan(reducer, images), keep, processed)
            return
        tokens = encoded.run(None)[0].tokens
        with recording() as seconds:  # the steps between the blocks are all there is of the reducer
            _, plans = adapter.encode_in_tower(encoded.inputs.tensors, in_tower)
        self._note(row, seconds.get("steps", 0.0), tokens, [len(plan) for plan in plans], keep, processed)

    def _time_answers(self, vlm: VLM, images: Sequence[Picture], question: str) -> None:
        """Time whole answers after one untimed answer of each method; then measure memory, which disturbs the clock."""
        length = {"max_new_tokens": self.plan.length, "min_new_tokens": self.plan.length}

        def answer(row: BenchRow, image: Any) -> Any:
            return vlm.answer(vlm.inputs(image, question), row.reducer, **length)

        turns = [images[i % len(images)] for i in range(self.plan.answers)]
        for turn, image in enumerate([turns[0], *turns]):
            opened = vlm.open(image)
            for row in self._in_turn(turn):
                result = answer(row, opened)
                if turn:
                    row.first.append(result.first_token)
                    row.answer.append(result.seconds["total"])
                    if row.reducer is None:
                        row.tokens.append(result.after)
            self._progress("answers", turn + 1, len(turns) + 1)
        opened = vlm.open(images[0])
        for count, row in enumerate(self.rows):
            row.peak = peak_memory(lambda row=row: answer(row, opened), vlm.device)
            self._progress("memory", count + 1, len(self.rows))

    # ------------------------------------------------------------------ shared by both

    def _rounds(
        self, picked: Sequence[int], ready: Callable[[int], Any], module: Callable[[BenchRow, Any, bool], None]
    ) -> None:
        """Run the warm-ups, then every image, each with all rows."""
        turns = [*(picked[i % len(picked)] for i in range(self.plan.warmups)), *picked]
        for turn, index in enumerate(turns):
            image = ready(index)
            for row in self._in_turn(turn):
                try:
                    module(row, image, turn >= self.plan.warmups)
                except TorinoError as error:  # for example a budget that this image cannot meet
                    self._leave_out(row, str(error))
            self._progress("module alone", turn + 1, len(turns))

    def _time(
        self,
        row: BenchRow,
        tokens: Sequence[VisualTokens],
        plan: Callable[[], ReductionBatch],
        keep: bool,
        processed: int | None = None,
    ) -> None:
        begin = now()
        lengths = apply_plans(tokens, plan())
        self._note(row, now() - begin, tokens, lengths, keep, processed)

    def _note(
        self,
        row: BenchRow,
        took: float,
        tokens: Sequence[VisualTokens],
        lengths: Sequence[int],
        keep: bool,
        processed: int | None = None,
    ) -> None:
        """Record a measurement; ``processed`` tokens if the language model drops some of them."""
        floor = time_gather(tokens, lengths)
        if keep:
            row.module.append(took)
            row.floor.append(floor)
            row.tokens.append(sum(lengths) if processed is None else processed)

    def _count_survivors(self, tokens_for: Callable[[Reducer], Sequence[VisualTokens]]) -> None:
        """Count what the prefilter of each measured SAE lets through, on the tokens of its first row."""
        for row in self.rows:
            name = row.setting.sae
            if row.reducer is not None and name in self._filtered and name not in self.survivors:
                counts = count_survivors(self._filtered[name], tokens_for(row.reducer), CONCEPTS)
                if counts is not None:
                    self.survivors[name] = counts

    def _in_turn(self, turn: int) -> list[BenchRow]:
        """Return all rows, starting with another one each time."""
        start = turn % max(len(self.rows), 1)
        return self.rows[start:] + self.rows[:start]

    def _try(self, run: Callable[[BenchRow], None]) -> None:
        """Leave out what cannot run at all, before anything is timed."""
        for row in [row for row in self.rows if row.reducer is not None]:
            try:
                run(row)
            except TorinoError as error:
                self._leave_out(row, str(error))
        if not any(row.reducer is not None for row in self.rows):
            raise BadParameter("No method can be measured here. " + " ".join(why for _, why in self.left_out[:2]))

    def _leave_out(self, row: BenchRow, why: str) -> None:
        self.rows = [other for other in self.rows if other is not row]
        self.left_out.append((row.setting, f"{row.setting.spec} was left out: {why.rstrip('.')}."))
        self.notes.append(self.left_out[-1][1])

    def document(self) -> dict[str, Any]:
        """Return all measurements for JSON."""
        return {
            "format": FORMAT,
            "machine": machine(),
            "versions": versions(),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "protocol": {
                "images": self.plan.images,
                "warmups": self.plan.warmups,
                "seed": self.plan.seed,
                "order": "every method on each image before the next, starting with another one each time",
                "module": "from the tower's tokens and signals to the reduced tokens, one image at a time",
                "floor": "gathering as many tokens",
                **self.about,
            },
            "notes": self.notes,
            "survivors": self.survivors,
            "rows": [row.facts() for row in self.rows],
        }


def _reducer(row: BenchRow) -> Reducer:
    if row.reducer is None:
        raise BadParameter("Keeping all tokens has no module that could be timed.")
    return row.reducer
