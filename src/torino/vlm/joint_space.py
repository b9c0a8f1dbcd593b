"""Spaces that image tokens and text tokens share, for joint SAEs: :func:`open_joint_space`."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from torino.core.checks import check_type
from torino.core.errors import BadParameter, MissingSignal
from torino.vlm.session import VLM
from torino.vlm.text_query import WordText

if TYPE_CHECKING:
    from torino.datasets.images import Picture

SPACES = "projected, block:N (N counts the blocks of the language model from 0) or clip"


class JointSpace(ABC):
    """Rows of image tokens and of text tokens in one space.

    Attributes
    ----------
    name : str
        ``projected``, ``block:N`` or ``clip``.
    vlm : VLM
    """

    name: str

    def __init__(self, vlm: VLM) -> None:
        self.vlm = vlm
        self.words = WordText(vlm.processor)

    @abstractmethod
    def image_rows(self, image: Picture) -> Tensor:
        """Return the rows of the patches of an image, (N, E) float32, on the CPU."""

    @abstractmethod
    def text_rows(self, text: str) -> tuple[Tensor, tuple[str, ...]]:
        """Return the rows of the tokens of a text, (m, E) float32, on the CPU, and the word of each row."""

    def _tensors(self, image: Picture) -> dict[str, Any]:
        return self.vlm.inputs(image, "?").tensors


class ProjectedSpace(JointSpace):
    """The input space of the language model: patches after the projector, and input embeddings of words."""

    name = "projected"

    @torch.no_grad()
    def image_rows(self, image: Picture) -> Tensor:
        """Return the projected patches."""
        encoded = self.vlm.adapter.encode(self._tensors(image), frozenset({"projected"}))
        return torch.cat([unit.signals["projected"] for unit in encoded.tokens]).float().cpu()

    @torch.no_grad()
    def text_rows(self, text: str) -> tuple[Tensor, tuple[str, ...]]:
        """Return the input embeddings of the tokens of a text."""
        return self.words.embed(self.vlm.adapter, text).cpu(), self.words.words(text)


class BlockSpace(JointSpace):
    """Hidden states after a block of the language model.

    Image rows are those at the placeholders of a prompt with the image; attention is causal, so the question does not
    matter. Text rows are those of the text alone, after one more token, whose state is an outlier and is left out.
    """

    def __init__(self, vlm: VLM, block: int) -> None:
        super().__init__(vlm)
        self.name, self.block = f"block:{block}", block
        layers = _decoder_layers(vlm.model)
        if block >= len(layers):
            raise BadParameter(
                f"block:{block} does not exist: the language model has the blocks 0 to {len(layers) - 1}."
            )
        self._layer = layers[block]

    def image_rows(self, image: Picture) -> Tensor:
        """Return the hidden states of the image tokens."""
        tensors = self._tensors(image)
        hidden = self._hidden(tensors)
        return hidden[tensors["input_ids"][0] == self.vlm.adapter.image_token]

    def text_rows(self, text: str) -> tuple[Tensor, tuple[str, ...]]:
        """Return the hidden states of the tokens of a text."""
        tokenizer = self.words.tokenizer
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        if not ids:
            raise MissingSignal("The text is empty. Give texts with at least one word.")
        first = getattr(tokenizer, "bos_token_id", None)
        prompt = torch.tensor([[ids[0] if first is None else int(first), *ids]], device=self.vlm.device)
        return self._hidden({"input_ids": prompt, "attention_mask": torch.ones_like(prompt)})[1:], self.words.words(
            text
        )

    @torch.no_grad()
    def _hidden(self, tensors: dict[str, Any]) -> Tensor:
        """Run the model up to the block and return its output, (length, E)."""
        caught: list[Tensor] = []

        def stop(module: nn.Module, inputs: Any, output: Any) -> None:
            caught.append((output[0] if isinstance(output, tuple) else output).detach())
            raise _Stop

        handle = self._layer.register_forward_hook(stop)
        try:
            self.vlm.model(**tensors, use_cache=False)
        except _Stop:
            pass
        finally:
            handle.remove()
        return caught[0][0].float().cpu()


class ClipSpace(JointSpace):
    """CLIP's joint space: projected patches, and one row for each text."""

    name = "clip"

    def __init__(self, vlm: VLM) -> None:
        super().__init__(vlm)
        if vlm.text_query is None:
            raise MissingSignal(
                "The space clip needs the text tower of the CLIP that the model's vision tower belongs to: --clip-text "
                "NAME, or VLM(..., text_query=load_clip_text(NAME)). Without one, use projected."
            )
        self.clip = vlm.text_query
        self.clip.check(vlm.adapter)

    @torch.no_grad()
    def image_rows(self, image: Picture) -> Tensor:
        """Return the patches in the joint space."""
        encoded = self.vlm.adapter.encode(self._tensors(image), frozenset())
        return self.clip.joint(torch.cat([unit.patches for unit in encoded.tokens])).cpu()

    def text_rows(self, text: str) -> tuple[Tensor, tuple[str, ...]]:
        """Return the text in the joint space."""
        rows = self.clip.text(text).cpu()
        return rows, (text,) * len(rows)


class _Stop(Exception):
    """Ends a forward pass at the block whose output is wanted."""


def open_joint_space(space: str, vlm: VLM) -> JointSpace:
    """Open a space that image and text tokens share.

    Parameters
    ----------
    space : str
        ``projected``: the input space of the language model, after the projector. ``block:N``: hidden states after
        block N of the language model. ``clip``: CLIP's joint space, for a session with a text tower.
    vlm : VLM
    """
    check_joint_space(space)
    check_type("vlm", vlm, VLM, "a VLM: load_vlm(name)")
    if space == "projected":
        return ProjectedSpace(vlm)
    return ClipSpace(vlm) if space == "clip" else BlockSpace(vlm, int(space.partition(":")[2]))


def check_joint_space(space: str) -> None:
    """Refuse an unknown space."""
    if not isinstance(space, str) or not re.fullmatch(r"projected|clip|block:\d{1,4}", space):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise BadParameter(f"The joint space must be {SPACES}, got {space!r:.60}.")


def _decoder_layers(model: nn.Module) -> nn.ModuleList:
    decoder: Any = cast(Any, model).get_decoder() if hasattr(model, "get_decoder") else model
    for _ in range(4):
        layers = getattr(decoder, "layers", None)
        if isinstance(layers, nn.ModuleList):
            return layers
        decoder = getattr(decoder, "language_model", getattr(decoder, "model", None))
    raise BadParameter(
        f"The blocks of the language model of {type(model).__name__} were not found. Use the space projected."
    )
