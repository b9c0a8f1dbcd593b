"""Images and videos that the tower encodes once for any number of reducers and questions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from torino.core.checks import check_type
from torino.core.errors import MissingSignal
from torino.core.reduction import ReductionBatch
from torino.core.timing import recording, stage
from torino.reducers import InTowerReducer, Reducer, as_in_tower, split_reducer
from torino.vlm import limits
from torino.vlm.adapters.base import QUERY_SIGNALS, EncodedImages
from torino.vlm.clips import add_times, join_frames, plans_together
from torino.vlm.inputs import Inputs
from torino.vlm.prompt import turn_visuals

if TYPE_CHECKING:
    from torino.vlm.session import VLM


class Encoded:
    """Images that the tower encodes once for any number of reducers and questions.

    The tower runs on first use, for the union of the signals that the given reducers read. If the tower lacks one of
    them, it runs again for each set of signals, and only the reducers that need the missing one fail.
    """

    def __init__(self, vlm: VLM, inputs: Inputs, reducers: Iterable[Reducer | None]) -> None:
        check_type("inputs", inputs, Inputs, "the Inputs of VLM.inputs()")
        self.vlm, self.inputs = vlm, inputs
        before = [split_reducer(reducer)[0] for reducer in limits.check_reducers(reducers) if reducer is not None]
        self._runs: dict[frozenset[str], tuple[EncodedImages, dict[str, float]]] = {}
        needs = [vlm.adapter.needs(reducer) for reducer in before if reducer is not None and not reducer.in_tower]
        self._union = frozenset[str]().union(*needs) - QUERY_SIGNALS

    def with_question(self, question: str) -> Encoded:
        """Return the same images with another question; the tower does not run again."""
        other = Encoded.__new__(Encoded)
        other.vlm, other._runs, other._union = self.vlm, self._runs, self._union
        images = turn_visuals(self.inputs.conversations[0]) if self.inputs.shown else self.inputs.images
        inputs, pixels = self.vlm.inputs(images, question), self.vlm.adapter.pixel_names
        shared = {name: value for name, value in self.inputs.tensors.items() if name in pixels}
        other.inputs = replace(inputs, tensors={**inputs.tensors, **shared})  # one copy of the pixels in memory
        return other

    def run(self, reducer: Reducer | None) -> tuple[EncodedImages, ReductionBatch | None, dict[str, float]]:
        """Return the encoded images for a reducer, its plans if it runs inside the tower, and the time it took."""
        limits.check_reducer(reducer)
        reducer = None if reducer is None else split_reducer(reducer)[0]
        adapter = self.vlm.adapter
        if reducer is not None and reducer.in_tower:
            with recording() as seconds, stage("tower"):
                in_tower = cast(InTowerReducer, as_in_tower(reducer))
                images, plans = adapter.encode_in_tower(self.inputs.tensors, in_tower)
            return images, plans, dict(seconds)
        needs = frozenset[str]() if reducer is None else adapter.needs(reducer)
        images, seconds = self._encode(needs - QUERY_SIGNALS)
        if reducer is not None and needs & QUERY_SIGNALS:
            query = self.vlm.query_for(self.inputs, reducer)
            with recording() as query_seconds:
                images = adapter.add_text_query(images, self.inputs.tensors, reducer, query)
            seconds = {**seconds, **query_seconds}
        if self.inputs.shown and images.modality == "image" and plans_together(adapter, reducer):
            images = join_frames(images, self.inputs.shown)
        return images, None, seconds

    def _encode(self, needs: frozenset[str]) -> tuple[EncodedImages, dict[str, float]]:
        signals = self._union if needs <= self._union else needs
        if signals not in self._runs:
            try:
                with recording() as seconds, stage("tower"):
                    images = self.vlm.adapter.encode(self.inputs.tensors, signals)
            except MissingSignal:
                if signals == needs:
                    raise
                self._union = needs  # the tower lacks a signal of another reducer
                return self._encode(needs)
            self._runs[signals] = add_times(images, self.inputs.videos), dict(seconds)
        return self._runs[signals]
