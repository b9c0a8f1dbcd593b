"""The measuring itself.

All methods take their turn on each image before the next one is opened, in an order that moves on by one each time, so
that a slow moment of the machine falls on all alike.
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
from torino.evaluation.latency.gauges import (
    carry_out,
    furnished,
    gather,
    lacking,
    machine,
    now,
    peak_memory,
    survivors,
    versions,
)
from torino.evaluation.latency.rows import BenchPlan, BenchRow
from torino.evaluation.protocol import Setting
from torino.reducers import Reducer, as_in_tower
from torino.sae.model import SAE

if TYPE_CHECKING:  # Pillow and transformers are only fetched by those who measure a model
    from torino.datasets.images import Padding, Picture
    from torino.evaluation.latency.probe import Eye, Glance
    from torino.vlm import ClipText
    from torino.vlm.adapters.base import Positions

FORMAT = "torino-bench/1"
QUESTION = "Describe what you see."
CONCEPTS = 3  # concepts a token that the screen is asked for when its survivors are counted, the paper's most
Progress = Callable[[str, int, int], None]


class Bench:
    """Methods under measurement; :meth:`on_tokens` or :meth:`on_model` measures, :meth:`document` tells.

    Parameters
    ----------
    settings : sequence of Setting
        See :mod:`torino.evaluation.protocol`; the one that keeps all tokens is asked for its answers only.
    saes : mapping of str to concept encoder
    plan : BenchPlan
    progress : callable, optional
        Called with a phase, how much of it is done, and how much there is.

    Attributes
    ----------
    rows : list of BenchRow
    notes : list of str
        Methods that were left out, and why; and whatever else a reader of the figures must know.
    survivors : dict of str to dict
        Of each SAE with ``screen = "int8"``: how many latents a token its screen could not exclude.
    """

    def __init__(
        self, settings: Sequence[Setting], saes: Mapping[str, Any], plan: BenchPlan, progress: Progress | None = None
    ) -> None:
        self.plan = plan
        self.rows = [BenchRow(setting, setting.reducer(saes)) for setting in settings]
        self.notes: list[str] = []
        self.about: dict[str, Any] = {}
        self.survivors: dict[str, dict[str, float]] = {}
        self._screened = {name: sae for name, sae in saes.items() if isinstance(sae, SAE) and sae.screen == "int8"}
        self._progress: Progress = progress or (lambda phase, done, total: None)

    # ------------------------------------------------------------------ tokens alone

    @torch.no_grad()
    def on_tokens(
        self, images: Sequence[VisualTokens], device: torch.device | str = "cpu", source: str = "tokens"
    ) -> None:
        """Time the module alone on tokens that are there; signals they lack are made up, in shape and size as CLIP's.

        Parameters
        ----------
        images : sequence of VisualTokens
        device : torch.device or str
        source : str
            What they are, in words.
        """
        self.rows = [row for row in self.rows if row.reducer is not None]
        for row in [row for row in self.rows if row.reducer is not None and as_in_tower(row.reducer) is not None]:
            self._leave_out(row, "it works inside a vision tower, so there is no module of its own on tokens alone")
        missing = {id(row): lacking(row.reducer, images[0]) for row in self.rows if row.reducer is not None}
        ready = [
            furnished(image, frozenset[str]().union(*missing.values()), i, device) for i, image in enumerate(images)
        ]
        for row in self.rows:
            row.made = tuple(sorted(missing[id(row)]))
        if any(missing.values()):
            self.notes.append(
                "Signals that the tokens lack, such as attention, are made up: right in size, not in value."
            )
        picked = self.plan.pick(len(ready))

        def module(row: BenchRow, index: int, keep: bool) -> None:
            tokens, reducer = [ready[index]], _reducer(row)
            self._time(row, tokens, lambda: reducer.plan_batch(tokens), keep)

        self._try(lambda row: module(row, picked[0], False))
        self._rounds(picked, lambda index: index, module)
        for row in self.rows:
            row.peak = peak_memory(lambda row=row: module(row, picked[0], False), device)
        self._survive(lambda _: [ready[index] for index in dict.fromkeys(picked[:8])])
        self.about = {"source": source, "distinct_images": min(len(images), self.plan.images), "memory": "module"}
        self.about["device"] = torch.device(device).type

    # ------------------------------------------------------------------ a model

    @torch.no_grad()
    def on_model(
        self,
        model: Any,
        processor: Any,
        pictures: Sequence[Picture],
        *,
        padding: Padding = "crop",
        positions: Positions = "own",
        question: str = QUESTION,
        asking: ClipText | None = None,
        name: str = "",
        source: str = "pictures",
    ) -> None:
        """Time the module on what the model's tower saw, then the first token and the whole answer.

        Parameters
        ----------
        model, processor
            As :func:`torino.vlm.session.load_vlm` gives them.
        pictures : sequence of path, bytes or PIL image
            Opened when their turn comes.
        padding, positions, asking
            As for :func:`torino.vlm.session.ask`.
        question : str
        name, source : str
            The model and the pictures, in words.
        """
        from torino.evaluation.latency.probe import Eye

        eye = Eye(model, processor, padding, question, asking)
        picked = self.plan.pick(len(pictures))

        def module(row: BenchRow, glance: Glance, keep: bool) -> None:
            if row.reducer is not None:
                self._look(row, row.reducer, glance, keep)

        first = eye.glance(pictures[picked[0]])
        self._try(lambda row: module(row, first, False))
        self._rounds(picked, lambda index: eye.glance(pictures[index]), module)
        self._survive(lambda reducer: first.sight(reducer).tokens)
        if self.plan.answers:
            self._answers(model, eye, [pictures[index] for index in picked], positions)
        else:
            self.rows = [row for row in self.rows if row.reducer is not None]
        weight = next(one for one in model.parameters() if one.is_floating_point())
        self.about = {
            "model": name,
            "family": str(model.config.model_type),
            "dtype": str(weight.dtype).removeprefix("torch."),
            "device": weight.device.type,
            "padding": padding,
            "positions": positions,
            "question": question,
            "source": source,
            "distinct_images": min(len(pictures), self.plan.images),
            "answers": self.plan.answers,
            "answer_tokens": self.plan.length,
            "memory": "answer" if self.plan.answers else None,
        }

    def _look(self, row: BenchRow, reducer: Reducer, glance: Glance, keep: bool) -> None:
        host, inside = glance.eye.host, as_in_tower(reducer)
        sight = glance.sight(reducer)
        if inside is None:
            self._time(row, sight.tokens, lambda: host.plan(reducer, sight), keep)
            return
        with recording() as seconds:  # the steps between the blocks are all the module there is
            _, plans = host.encode_in_tower(glance.inputs, inside)
        self._note(row, seconds.get("steps", 0.0), sight.tokens, [len(plan) for plan in plans], keep)

    def _answers(self, model: Any, eye: Eye, pictures: Sequence[Picture], positions: Positions) -> None:
        """Whole answers, after one of each method that is not timed; then memory, which would disturb the clock."""
        from torino.vlm.session import ask

        def answer(row: BenchRow, picture: Picture) -> Any:
            return ask(
                picture,
                eye.question,
                model=model,
                processor=eye.processor,
                reducer=row.reducer,
                positions=positions,
                max_new_tokens=self.plan.length,
                min_new_tokens=self.plan.length,
                asking=eye.asking,
            )

        turns = [pictures[i % len(pictures)] for i in range(self.plan.answers)]
        for turn, picture in enumerate([turns[0], *turns]):
            opened = eye.open(picture)
            for row in self._in_turn(turn):
                told = answer(row, opened)
                if turn:
                    row.first.append(told.first_token)
                    row.answer.append(told.seconds["total"])
                    if row.reducer is None:
                        row.tokens.append(told.after)
            self._progress("answers", turn + 1, len(turns) + 1)
        opened, device = eye.open(pictures[0]), next(model.parameters()).device
        for done, row in enumerate(self.rows):
            row.peak = peak_memory(lambda row=row: answer(row, opened), device)
            self._progress("memory", done + 1, len(self.rows))

    # ------------------------------------------------------------------ what both share

    def _rounds(
        self, picked: Sequence[int], ready: Callable[[int], Any], module: Callable[[BenchRow, Any, bool], None]
    ) -> None:
        """Warm-ups, then every image, each with all rows."""
        turns = [*(picked[i % len(picked)] for i in range(self.plan.warmups)), *picked]
        for turn, index in enumerate(turns):
            image = ready(index)
            for row in self._in_turn(turn):
                try:
                    module(row, image, turn >= self.plan.warmups)
                except TorinoError as error:  # a budget that this image cannot fill, among others
                    self._leave_out(row, str(error))
            self._progress("module alone", turn + 1, len(turns))

    def _time(
        self, row: BenchRow, tokens: Sequence[VisualTokens], plan: Callable[[], ReductionBatch], keep: bool
    ) -> None:
        begin = now()
        lengths = carry_out(tokens, plan())
        self._note(row, now() - begin, tokens, lengths, keep)

    def _note(
        self, row: BenchRow, took: float, tokens: Sequence[VisualTokens], lengths: Sequence[int], keep: bool
    ) -> None:
        floor = gather(tokens, lengths)
        if keep:
            row.module.append(took)
            row.floor.append(floor)
            row.tokens.append(sum(lengths))

    def _survive(self, see: Callable[[Reducer], Sequence[VisualTokens]]) -> None:
        """Count what the screen leaves, of each SAE that was measured, on what its first row saw."""
        for row in self.rows:
            name = row.setting.sae
            if row.reducer is not None and name in self._screened and name not in self.survivors:
                told = survivors(self._screened[name], see(row.reducer), CONCEPTS)
                if told is not None:
                    self.survivors[name] = told

    def _in_turn(self, turn: int) -> list[BenchRow]:
        """All rows, beginning with another one each time."""
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
            reasons = [note for note in self.notes if " was left out: " in note]
            raise BadParameter("No method can be measured here. " + " ".join(reasons[:2]))

    def _leave_out(self, row: BenchRow, why: str) -> None:
        self.rows = [other for other in self.rows if other is not row]
        self.notes.append(f"{row.setting.spec} was left out: {why.rstrip('.')}.")

    def document(self) -> dict[str, Any]:
        """All that was measured, for JSON."""
        return {
            "format": FORMAT,
            "machine": machine(),
            "versions": versions(),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "protocol": {
                "images": self.plan.images,
                "warmups": self.plan.warmups,
                "seed": self.plan.seed,
                "order": "every method on each image before the next, beginning with another one each time",
                "module": "from the tower's tokens and signals to the reduced tokens, one image at a time",
                "floor": "a gather of as many tokens",
                **self.about,
            },
            "notes": self.notes,
            "survivors": self.survivors,
            "rows": [row.facts() for row in self.rows],
        }


def _reducer(row: BenchRow) -> Reducer:
    if row.reducer is None:
        raise BadParameter("Keeping all tokens is no module that could be timed.")
    return row.reducer
