"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: images of any shape, merged patches, positions in three dimensions."""

from __future__ import annotations

import re
import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from torino.core.errors import BadParameter, MissingSignal
from torino.core.reduction import ReductionBatch
from torino.core.timing import stage
from torino.core.tokens import Origin, VisualTokens
from torino.reducers import PositionMode
from torino.vlm.adapters.base import Adapter, EncodedImages, ImageEmbeds
from torino.vlm.insertion import ShortenedPrompt

# Where queries and keys stand in the output of the fused projection of a block.
FUSED = {"queries": 0, "keys": 1}
# PyTorch numbers hooks by a counter that two threads could read at once; the second hook would replace the first.
_placing = threading.Lock()


@dataclass(frozen=True)
class DeepImageEmbeds(ImageEmbeds):
    """A splice with what Qwen3-VL adds to its tokens in the first layers of the language model.

    Attributes
    ----------
    deepstack : tuple of Tensor of shape (n, E)
        One for each deepstack layer; empty for families without.
    """

    deepstack: tuple[Tensor, ...] = ()


class Qwen(Adapter):
    """Qwen2-VL, Qwen2.5-VL, Qwen3-VL: each image is one unit, tapped and reduced after the merger.

    The tokens are what the language model would read: 2x2 patches merged into one, in raster order on a grid of half
    the height and width. The merger reads four neighbours at once, so there is no place before it where a token could
    be left out. ``origin.block`` is the number of blocks, one more than any block has: after the merger.

    *Positions.* Every token keeps the three coordinates (time, row, column) it has in the full prompt, and so does the
    text; new text goes on where it would have gone on in the full prompt. An image takes only max(rows, columns)
    numbers of its 3-D positions however many tokens it has, so there is no gap worth closing: ``"compact"`` and
    ``"original"`` mean the same here.

    *Merging.* A merged token takes the coordinates of its anchor; one of no place takes those of the last patch. What
    Qwen3-VL adds to its visual tokens in the first layers of the language model (deepstack) is merged by the same
    matrix. This is torino's choice; the models were trained with whole grids.

    *Signals.* These towers have no CLS token. Keys and queries of a block, before their rotation, are the mean over the
    four patches of a token; without ``@`` they are those of the last block.

    *Videos* are not reduced: a call with videos alone is left to the model, one with both is refused.
    """

    families: ClassVar[tuple[str, ...]] = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
    merges: ClassVar[bool] = True
    closed: ClassVar[str] = (
        "its tower merges 2x2 patches into a token at its end, which must all come out of its blocks"
    )

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._deltas: tuple[Tensor | None, Tensor] | None = None

    @property
    def inner(self) -> Any:
        """The model without its head."""
        return self.model.base_model

    @property
    def pixel_names(self) -> tuple[str, ...]:
        """Inputs that belong to the pixels; the grid goes too, because it is that of the full image."""
        return ("pixel_values", "image_grid_thw")

    def look(self, inputs: Mapping[str, Any], needs: frozenset[str]) -> EncodedImages:
        """Run the whole tower and its merger, once for all images."""
        self._check(inputs)
        tower = self.inner.visual
        sites = {name: self._site(name, len(tower.blocks)) for name in sorted(needs)}
        grids: Tensor = inputs["image_grid_thw"]
        with _fused(tower.blocks, {site for _, site in sites.values()}) as caught:
            seen = self.inner.get_image_features(inputs["pixel_values"], grids, return_dict=True)
        with stage("signals"):
            signals = {name: self._per_token(caught[site], kind, grids) for name, (kind, site) in sites.items()}
        side = int(tower.spatial_merge_size)
        origin = Origin(self._name(), len(tower.blocks))
        tokens: list[VisualTokens] = []
        for i, (features, (times, rows, columns)) in enumerate(zip(seen.pooler_output, grids.tolist(), strict=True)):
            mine = {name: values[i] for name, values in signals.items()}
            tokens.append(
                VisualTokens(
                    patches=features,
                    grid=(times * rows // side, columns // side),
                    origin=origin,
                    keys=mine.pop("keys", None),
                    signals=mine,
                )
            )
        return EncodedImages(tuple(tokens), tuple(len(image) for image in tokens), seen)

    def splice(self, sight: EncodedImages, plans: ReductionBatch) -> list[ImageEmbeds]:
        """Reduce the features, and those of every deepstack layer by the same plan."""
        reduced = plans.apply(list(sight.extra.pooler_output))
        layers = [plans.apply(list(layer)) for layer in getattr(sight.extra, "deepstack_features", None) or ()]
        return [
            DeepImageEmbeds(
                features=reduced[i],
                slots=torch.where(plan.anchor < 0, plan.patches - 1, plan.anchor),
                deepstack=tuple(layer[i] for layer in layers),
            )
            for i, plan in enumerate(plans)
        ]

    def outputs(self, sight: EncodedImages, splices: Sequence[ImageEmbeds]) -> Any:
        """Wrap the features as the model's own ``get_image_features`` does, in the same class."""
        found: dict[str, Any] = {"pooler_output": [splice.features for splice in splices]}
        if hasattr(sight.extra, "deepstack_features"):
            deep = [splice.deepstack for splice in splices if isinstance(splice, DeepImageEmbeds)]
            found["deepstack_features"] = [list(layer) for layer in zip(*deep, strict=True)]
        return type(sight.extra)(**found)

    def positions(self, inputs: Mapping[str, Any], done: ShortenedPrompt, positions: PositionMode) -> dict[str, Any]:
        """Positions of the full prompt, as the model itself counts them, of what is left; the same for both settings.

        Returns ``position_ids`` of shape (4, rows, length): the plain count, which the model reads its mask from, then
        time, row and column. ``rope_deltas`` on the model is set too: ``generate`` does without, but those who go on
        step by step with ``forward`` get the positions of the new tokens from it.
        """
        ids, mask = inputs["input_ids"], inputs.get("attention_mask")
        full, deltas = self.inner.get_rope_index(
            ids,
            mm_token_type_ids=inputs["mm_token_type_ids"],
            image_grid_thw=inputs["image_grid_thw"],
            attention_mask=mask,
        )
        position_mode = done.spread([full[:, row, at] for row, at in enumerate(done.kept)], 0).transpose(0, 1)
        real = done.inputs["attention_mask"].long()
        count = (real.cumsum(1) - 1).masked_fill(real == 0, 0)
        before = torch.ones_like(ids) if mask is None else mask.long()
        # the model adds the delta to the length so far: the shorter the prompt, the larger it must be
        self._set_deltas(deltas + before.sum(1, keepdim=True) - real.sum(1, keepdim=True))
        return {"position_ids": torch.cat([count[None], position_mode])}

    def close(self) -> None:
        """Give the model back the ``rope_deltas`` it had, unless someone else has set others since."""
        if self._deltas is not None and self.inner.rope_deltas is self._deltas[1]:
            self.inner.rope_deltas = self._deltas[0]
        self._deltas = None

    def _set_deltas(self, deltas: Tensor) -> None:
        first = self.inner.rope_deltas if self._deltas is None else self._deltas[0]
        self._deltas = (first, deltas)
        self.inner.rope_deltas = deltas

    # ------------------------------------------------------------------ what is refused

    def _check(self, inputs: Mapping[str, Any]) -> None:
        """Refuse what would be answered wrongly, before the tower is run."""
        name = type(self.model).__name__
        for wanted in ("image_grid_thw", "mm_token_type_ids"):
            if inputs.get(wanted) is None:
                raise BadParameter(
                    f"{name} cannot place the tokens of an image without {wanted}, which its processor returns beside "
                    "pixel_values. Pass on everything the processor returns."
                )
        if any(inputs.get(given) is not None for given in ("pixel_values_videos", "video_grid_thw")):
            raise BadParameter(
                f"This call gives {name} both images and videos, and torino reduces images only. "
                "Ask about them one at a time, or ask outside the reduced block."
            )
        if inputs.get("position_ids") is not None:
            raise BadParameter(
                f"position_ids were given, and torino works out those of the reduced prompt as {name} itself does. "
                "Leave them out."
            )

    def _site(self, name: str, blocks: int) -> tuple[str, int]:
        """What a signal asks for: queries or keys, and of which block."""
        kind, at, where = name.partition("@")
        if kind in ("cls", "cls_attention"):
            raise MissingSignal(
                f"{name} comes from a CLS token, and the vision tower of {type(self.model).__name__} has none. "
                "Choose a reducer that does without, such as torino-m."
            )
        if kind not in FUSED:
            raise MissingSignal(
                f"No signal is called {name!r}. Known here: keys, queries; also of another block, as keys@-1 or keys@8."
            )
        if at and not re.fullmatch(r"[+-]?\d+", where):
            raise MissingSignal(
                f"{name!r} names no block. Write {kind}@8 for block 8, or {kind}@-1 for the last but one."
            )
        last = blocks - 1
        site = last + int(where) if where[:1] in ("+", "-") else int(where) if where else last
        if not 0 <= site < blocks:
            raise MissingSignal(f"{name} asks for block {site}, and the tower has blocks 0 to {last}.")
        return kind, site

    # ------------------------------------------------------------------ parts

    def _name(self) -> str:
        vision = getattr(self.config.vision_config, "_name_or_path", "")
        return str(vision or getattr(self.config, "_name_or_path", "") or "")

    def _per_token(self, fused: Tensor, kind: str, grids: Tensor) -> tuple[Tensor, ...]:
        """Queries or keys of patches, all images end to end, as means over the patches of each token."""
        tower = self.inner.visual
        unit = int(tower.spatial_merge_size) ** 2
        patches = fused.detach().unflatten(-1, (3, -1))[:, FUSED[kind]].float()
        tokens = patches.unflatten(0, (-1, unit)).mean(1)
        if hasattr(tower, "window_size"):  # Qwen2.5-VL works window by window and undoes that after its merger
            from transformers.vision_utils import get_vision_window_index

            order, _ = get_vision_window_index(grids, tower.spatial_merge_size, tower.window_size, tower.patch_size)
            tokens = tokens[order.argsort().to(tokens.device)]
        return tokens.split((grids.prod(-1) // unit).tolist())


@contextmanager
def _fused(blocks: nn.ModuleList, sites: set[int]) -> Generator[dict[int, Tensor]]:
    """Catch what the fused projections of some blocks give, in this thread alone."""
    caught: dict[int, Tensor] = {}
    thread = threading.get_ident()

    def catch(site: int) -> Any:
        def take(module: nn.Module, arguments: Any, output: Tensor) -> None:
            if threading.get_ident() == thread:
                caught[site] = output

        return take

    with ExitStack() as hooks:
        for site in sites:
            with _placing:
                handle = blocks[site].get_submodule("attn.qkv").register_forward_hook(catch(site))
            hooks.callback(handle.remove)
        yield caught
