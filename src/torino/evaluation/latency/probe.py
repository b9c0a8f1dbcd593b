"""The eye: what a model's tower saw of one picture, looked at once for all methods that read the same signals."""

from __future__ import annotations

from typing import Any

from torch import nn

from torino.core.errors import TorinoError
from torino.datasets.images import Padding, Picture, mean_colour, open_image, prepare
from torino.reducers import Reducer, as_in_tower
from torino.vlm import ClipText
from torino.vlm.adapters.base import ASKED, EncodedImages, adapter_for
from torino.vlm.session import write_prompt


class Eye:
    """Sees pictures through a model's tower.

    Parameters
    ----------
    model, processor
        As :func:`torino.vlm.session.load_vlm` gives them.
    padding : {"crop", "square"}
    question : str
    asking : ClipText, optional
        Reads the question for methods that choose by it.
    """

    def __init__(
        self, model: nn.Module, processor: Any, padding: Padding, question: str, asking: ClipText | None = None
    ) -> None:
        self.host, self.processor, self.asking = adapter_for(model), processor, asking
        self.padding: Padding = padding
        self.question, self.prompt = question, write_prompt(model, processor, question, 1)
        self._colour = mean_colour(processor)
        self._weight = next(one for one in model.parameters() if one.is_floating_point())

    def open(self, picture: Picture) -> Any:
        """The picture in the shape that the processor is to see."""
        return prepare(open_image(picture), self.padding, self._colour)

    def glance(self, picture: Picture) -> Glance:
        """Open a picture; the tower runs when someone asks what it saw."""
        start = getattr(getattr(self.processor, "tokenizer", None), "bos_token", None)
        # a template that writes the first token itself must not get another
        options = {"add_special_tokens": False} if start and self.prompt.startswith(start) else {}
        try:
            inputs = self.processor(images=[self.open(picture)], text=self.prompt, return_tensors="pt", **options)
        except TypeError as error:
            raise TorinoError(f"{type(self.processor).__name__} refused an image: {error}") from error
        return Glance(self, dict(inputs.to(self._weight.device, dtype=self._weight.dtype)))


class Glance:
    """One picture, and what was seen of it so far."""

    def __init__(self, eye: Eye, inputs: dict[str, Any]) -> None:
        self.eye, self.inputs = eye, inputs
        self._seen: dict[frozenset[str], EncodedImages] = {}

    def sight(self, reducer: Reducer) -> EncodedImages:
        """What the tower saw, with the signals that the reducer reads; for one inside the tower, the plain tokens."""
        host, asking = self.eye.host, self.eye.asking
        needs = reducer.needs | (reducer.view_needs if host.tiles else frozenset[str]())
        if as_in_tower(reducer) is not None:
            needs = frozenset[str]()
        if needs not in self._seen:
            sight = host.look(self.inputs, needs - ASKED)
            if needs & ASKED:
                if asking is None:
                    raise TorinoError(
                        "it chooses patches by the question, and no CLIP was given that reads it (--clip)"
                    )
                sight = asking.about(self.eye.question).add(host, sight, self.inputs)
            self._seen[needs] = sight
        return self._seen[needs]
