"""The model behind the explorer: encode a photo once, regroup it for any setting, and answer questions about it."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torino.core.concepts import CachedEncoder, ConceptEncoder, Concepts
from torino.core.errors import BadParameter, TorinoError
from torino.core.reduction import Reduction, ReductionBatch
from torino.core.tokens import VisualTokens
from torino.datasets.images import as_seen
from torino.evaluation.protocol import LABELS, default_methods, has_parameter
from torino.explorer.photos import LibraryPhoto
from torino.reducers import Reducer, get, make
from torino.reducers.base import describe, parse_spec
from torino.sae import SAE
from torino.serving.server.errors import overloaded
from torino.vlm.adapters.base import QUERY_SIGNALS, EncodedImages
from torino.vlm.loading import transformers
from torino.vlm.session import VLM, Encoded

if TYPE_CHECKING:
    from PIL import Image

ALL_TOKENS = "none"
CONCEPTS = 32  # concepts of a patch that are searched and shown
MAX_SPEC = 200  # characters
PLANS = 256  # reductions of a photo that are kept


@dataclass(eq=False)
class InspectedPhoto:
    """A photo after the tower and the SAE.

    Attributes
    ----------
    photo : LibraryPhoto
    encoded : Encoded
    seen : PIL.Image.Image
        The photo as the tower sees it.
    tokens : VisualTokens
    encoder : CachedEncoder
        The SAE, which remembers the concepts of this photo.
    concepts : Concepts
        The strongest concepts of each patch.
    seconds : float
        Time that processor, tower and SAE took.
    plans : dict
        Reductions so far, with their times.
    """

    photo: LibraryPhoto
    encoded: Encoded
    seen: Image.Image
    tokens: VisualTokens
    encoder: CachedEncoder
    concepts: Concepts
    seconds: float
    plans: OrderedDict[str, tuple[Reduction, float]] = field(default_factory=OrderedDict[str, tuple[Reduction, float]])

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        return self.tokens.grid


@dataclass(frozen=True, eq=False)
class ExplorerAnswer:
    """An answer, what the language model received for it, and how long the parts took."""

    text: str
    tokens: int
    before: int
    new_tokens: int
    seconds: dict[str, float]


class AblatedImages(Encoded):
    """Encoded images from whose tokens the contribution of some concepts is removed."""

    def __init__(self, source: Encoded, sae: SAE, latents: Sequence[int]) -> None:
        super().__init__(source.vlm, source.inputs, ())
        self._source, self._sae, self._latents = source, sae, tuple(latents)

    def run(self, reducer: Reducer | None) -> tuple[EncodedImages, ReductionBatch | None, dict[str, float]]:
        """Return the encoded images without the concepts."""
        if reducer is not None and reducer.in_tower:
            raise BadParameter(
                f"{reducer.spec} works inside the tower, before concepts can be removed. Choose another."
            )
        images, plans, seconds = self._source.run(reducer)
        tokens = tuple(unit.with_(patches=self._sae.ablate(unit.patches, self._latents)) for unit in images.tokens)
        return replace(images, tokens=tokens), plans, seconds


class ExplorerModel:
    """A VLM with its SAE, and the photos that it has seen last. Threads share it; the model answers one at a time.

    Parameters
    ----------
    vlm : VLM
    encoder : ConceptEncoder
        An SAE, or raw tokens if there is none.
    name : str
        Name of the model, for the page.
    photos : int
        Photos to keep.
    waiting : int
        Most requests that wait for the model.
    """

    def __init__(self, vlm: VLM, encoder: ConceptEncoder, name: str, photos: int = 12, waiting: int = 64) -> None:
        self.vlm, self.encoder, self.name, self.waiting = vlm, encoder, name, waiting
        self.sae = encoder if isinstance(encoder, SAE) else None
        self.lock = threading.RLock()
        self._queue = 0
        self._photos: OrderedDict[str, InspectedPhoto] = OrderedDict()
        self._limit = photos
        self._guard = threading.Lock()

    @property
    def names(self) -> Mapping[int, str]:
        """Names of concepts."""
        return {} if self.sae is None else self.sae.names

    @contextmanager
    def busy(self) -> Generator[None]:
        """Hold the model; refuse if too many wait for it."""
        with self._guard:
            if self._queue >= self.waiting:
                raise overloaded(self._queue)
            self._queue += 1
        try:
            with self.lock:
                yield
        finally:
            with self._guard:
                self._queue -= 1

    def methods(self) -> list[dict[str, Any]]:
        """Return all methods that can run here, those of TORINO first, with what the page needs to know of them."""
        names = default_methods(text_query=self.vlm.text_query is not None)
        names = [name for name in names if not get(name).in_language_model]
        names.sort(key=lambda name: (not name.startswith("torino-"), name))
        return [
            {
                "name": name,
                "label": LABELS.get(name, name),
                "summary": describe(name)["summary"],
                "concepts": has_parameter(name, "sae"),
                "kd": has_parameter(name, "k") and has_parameter(name, "delta"),
                "budget": has_parameter(name, "budget"),
                "adaptive": self._is_adaptive(name),
                "in_tower": get(name).in_tower,
                "merges": get(name).merges,
            }
            for name in names
        ]

    def _is_adaptive(self, name: str) -> bool:
        """Return whether a method works without a budget."""
        try:
            self.reducer(name, self.encoder)
        except TorinoError:
            return False
        return True

    # ------------------------------------------------------------------ photos and plans

    def find(self, photo: str) -> InspectedPhoto | None:
        """Return a photo that is already encoded."""
        with self._guard:
            found = self._photos.get(photo)
            if found is not None:
                self._photos.move_to_end(photo)
            return found

    def encode(self, photo: str, opened: Callable[[str], LibraryPhoto]) -> InspectedPhoto:
        """Return a photo after tower and SAE; both run once."""
        found = self.find(photo)
        if found is not None:
            return found
        source = opened(photo)
        with self.busy():
            found = self.find(photo)  # another request may have encoded it meanwhile
            if found is None:
                found = self._encode(source)
                with self._guard:
                    self._photos[photo] = found
                    while len(self._photos) > self._limit:
                        self._photos.popitem(last=False)
        return found

    @torch.no_grad()
    def _encode(self, photo: LibraryPhoto) -> InspectedPhoto:
        begin = time.perf_counter()
        encoded = self.vlm.encode(photo.image, (), question="?")
        images, _, _ = encoded.run(None)
        if len(images.tokens) != 1:
            raise BadParameter(
                f"{self.name} splits this photo into {len(images.tokens)} tiles, and the explorer shows one grid of "
                "patches. Choose a model that encodes photos whole."
            )
        (tokens,) = images.tokens
        cached = CachedEncoder(self.encoder)
        cached.check_origin(tokens.origin, tokens.width)
        most = tokens.width if self.sae is None else self.sae.latents
        concepts = cached.top(tokens.patches, min(CONCEPTS, most))
        concepts = Concepts(concepts.indices.cpu(), concepts.values.cpu(), concepts.peak.cpu())
        seen = as_seen(encoded.inputs.tensors, self.vlm.processor, encoded.inputs.images)[0]
        return InspectedPhoto(photo, encoded, seen, tokens, cached, concepts, time.perf_counter() - begin)

    def forget(self, photo: str) -> None:
        """Drop a photo."""
        with self._guard:
            self._photos.pop(photo, None)

    def reducer(self, spec: str, encoder: ConceptEncoder) -> Reducer | None:
        """Build the reducer of a spec such as ``torino-m(k=2, delta=2)``; None for ``none``."""
        if len(spec) > MAX_SPEC:
            raise BadParameter(f"The method has {len(spec)} characters, at most {MAX_SPEC} are accepted.")
        if spec == ALL_TOKENS:
            return None
        name, parameters = parse_spec(spec)
        if get(name).in_language_model:
            raise BadParameter(
                f"{spec} drops tokens inside the language model, by the question, and the explorer shows reductions of "
                "the photo alone. Use torino ask or compare with it."
            )
        if has_parameter(name, "sae"):
            parameters["sae"] = encoder
        return make(name, **parameters)

    @torch.no_grad()
    def plan(self, photo: InspectedPhoto, spec: str) -> tuple[Reduction, float]:
        """Return the reduction of a photo under a spec, and the seconds it took when it was computed."""
        with self._guard:
            if spec in photo.plans:
                photo.plans.move_to_end(spec)
                return photo.plans[spec]
        reducer = self.reducer(spec, photo.encoder)
        if reducer is None:
            return Reduction.identity(photo.grid, "all tokens"), 0.0
        if reducer.needs & QUERY_SIGNALS:
            raise BadParameter(f"{reducer.spec} chooses patches by the question. Use it in Compare.")
        if reducer.in_tower or reducer.needs:  # the tower runs, once for each set of signals
            with self.busy():
                planned = self._plan(photo, reducer)
        else:
            planned = self._plan(photo, reducer)
        with self._guard:
            photo.plans[spec] = planned
            while len(photo.plans) > PLANS:
                photo.plans.popitem(last=False)
        return planned

    def _plan(self, photo: InspectedPhoto, reducer: Reducer) -> tuple[Reduction, float]:
        begin = time.perf_counter()
        images, plans, _ = photo.encoded.run(reducer)
        if plans is None:
            begin = time.perf_counter()
            plans = self.vlm.adapter.plan(reducer, images)
        return plans[0], time.perf_counter() - begin

    # ------------------------------------------------------------------ answers

    def answer(
        self,
        photo: InspectedPhoto,
        question: str,
        spec: str,
        *,
        ablate: Sequence[int] = (),
        max_tokens: int = 64,
        on_plan: Callable[[Reduction, float], None],
        on_text: Callable[[str], None],
        cancelled: Callable[[], bool],
    ) -> ExplorerAnswer:
        """Answer a question with the tokens of a reducer, without some concepts if ``ablate`` names any.

        Parameters
        ----------
        on_plan, on_text : callable
            Receive the reduction with its time, and the text as it is generated.
        cancelled : callable
            Whether nobody waits for the answer any more.
        """
        with self.busy():
            if cancelled():
                return ExplorerAnswer("", 0, 0, 0, {})
            encoded = photo.encoded.with_question(question)
            encoder: ConceptEncoder = photo.encoder
            if ablate:
                if self.sae is None:
                    raise BadParameter(
                        "Concepts can be removed only with an SAE. Start the explorer with --sae FOLDER."
                    )
                encoded, encoder = AblatedImages(encoded, self.sae, ablate), self.sae
            reducer = self.reducer(spec, encoder)
            reduction = self.vlm.reduce(encoded, reducer)
            seconds = reduction.seconds
            spent = 0.0 if reducer is None else seconds["tower" if reducer.in_tower else "plan"]
            on_plan(reduction.plans[0], spent)
            streamer = _text_streamer(self.vlm.processor, on_text)
            output = self.vlm.generate(
                encoded.inputs,
                [reduction],
                max_new_tokens=max_tokens,
                streamer=streamer,
                stopping_criteria=[_StopIf(cancelled)],
            )
        return ExplorerAnswer(
            output.texts[0].strip(),
            reduction.tokens,
            sum(reduction.encoded.full),
            int(output.ids.shape[1]),
            {**seconds, "prefill": output.prefill, "decode": output.decode},
        )


@dataclass(frozen=True)
class _StopIf:
    """A stopping criterion that ends generation when nobody waits for it any more."""

    cancelled: Callable[[], bool]

    def __call__(self, input_ids: Tensor, scores: Any, **others: Any) -> Tensor:
        return torch.full((len(input_ids),), self.cancelled(), device=input_ids.device)


def _text_streamer(processor: Any, on_text: Callable[[str], None]) -> Any:
    """Return a streamer of transformers that passes on text without the prompt and special tokens."""
    base = transformers().TextStreamer

    def finalize(self: Any, text: str, stream_end: bool = False) -> None:
        if text:
            on_text(text)

    kind = type("CallbackStreamer", (base,), {"on_finalized_text": finalize})
    return kind(processor.tokenizer, skip_prompt=True, skip_special_tokens=True)
