"""ToMe at the tap layer: merge the most similar pairs, a few at a time; and one step of it, for use inside a tower.

Bolya et al., Token Merging: Your ViT But Faster, ICLR 2023 (arXiv 2210.09461).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from torino.core.errors import BadTokens
from torino.core.reduction import Reduction
from torino.core.tokens import VisualTokens
from torino.reducers._checks import check_choice, check_count, check_flag, read_signal
from torino.reducers._matching import Order, averaged, fold
from torino.reducers.base import Reducer, register
from torino.reducers.folder import folds


@register("tome")
@dataclass(frozen=True)
class ToMe(Reducer):
    """Merge the most similar pairs of patches, a few a step, by their attention keys (ToMe, at the tap layer).

    One step deals the tokens alternately into sources and targets, a CLS token in front, gives each source its most
    similar target by the cosine of keys averaged over heads, and merges the r sources of highest similarity into
    theirs (see :mod:`torino.reducers._matching`). A merged token is the mean of its patches, without any rescale, and
    takes the place of the target. ToMe removes r tokens in each block; here the steps follow one another at the
    tap, and 384 of 576 go in 23 of them, as many as the blocks up to LLaVA's layer: 7 × 16, then 16 × 17.

    Deviations: ToMe is not a selector on finished features. In a tower the later blocks see merged tokens, compute
    new keys from them and add ln(size) to the attention logits of keys, which is ``tome-tower``; here the keys of a
    merged token are the mean of its patches' keys. Nobody states which schedule gave the ToMe rows of LLaVA tables.
    With ``steps=None, between="raster", class_token=False`` it is ``folder(metric="head_keys",
    log_size_scale="never")``. Not permutation equivariant.

    Parameters
    ----------
    budget : int
        Exactly this many tokens, at most N; no CLS token among them.
    steps : int or None
        The removals are spread evenly over so many steps, smaller ones first; if one cannot take its share,
        half of the patches being the most, what is left goes in further steps. None: as few steps as can be.
    between : {"native", "raster"}
        Order of the sequence from one step to the next, which decides what is a source: as released, sources left
        and then targets, or by place, as in FOLDER.
    class_token : bool
        Whether a CLS token stands in front and is protected, as in a ViT. It need not be given. Without one, the
        release leaves the sources by falling similarity instead of by place.
    order : {"raster", "native"}
        Output by place of the target; or as the last step leaves the sequence.
    """

    budget: int
    steps: int | None = 23
    between: Order = "native"
    class_token: bool = True
    order: Order = "raster"

    needs: ClassVar[frozenset[str]] = frozenset({"head_keys"})
    merges: ClassVar[bool] = True
    cost: ClassVar[str] = "O(steps·N²·D/H)"
    paper: ClassVar[str] = "Bolya et al., ToMe, ICLR 2023, arXiv 2210.09461"
    original_licence: ClassVar[str] = "CC BY-NC 4.0"

    def __post_init__(self) -> None:
        """Refuse hyperparameters out of range."""
        check_count("budget", self.budget)
        check_count("steps", 1 if self.steps is None else self.steps)
        check_choice("between", self.between, Order)
        check_flag("class_token", self.class_token)
        check_choice("order", self.order, Order)

    def plan(self, tokens: VisualTokens) -> Reduction:
        """Plan one image."""
        keys = read_signal(tokens, "head_keys", self.name, (len(tokens), None))
        steps = folds(self.name, len(tokens), self.budget, cls_first=self.class_token, steps=self.steps)
        folded = fold(keys, steps, cls_first=self.class_token, between=self.between)
        return averaged(folded, tokens.grid, self.spec, order=self.order)


def tome_step(
    keys: Tensor, sizes: Tensor, r: int, *, class_token: bool = True, order: Order = "native", by: str = "tome-step"
) -> Reduction:
    """One block's merge, between its attention and its MLP: a matrix for the patches that this block holds.

    One keeps the CLS token aside, starts with ``done = Reduction.identity(grid)`` and ``sizes`` of ones, and in
    each block takes ``step = tome_step(keys, sizes, r)``, ``states = step.apply(states)``,
    ``sizes = merged_sizes(step, sizes)`` and ``done = done.then(step)``. From then on ln(sizes) belongs on
    the key side of the attention logits (proportional attention). ``done`` tells what each token is made of.
    ``tome-tower`` does this.

    Parameters
    ----------
    keys : Tensor of shape (T, d)
        Keys of the patches in this block, averaged over heads.
    sizes : Tensor of shape (T,)
        How many patches of the image each one stands for.
    r : int
        How many to remove; no more than T//2 are, or (T − 1)//2 without a CLS token.
    class_token : bool
        Whether the sequence has a CLS token in front.
    order : {"native", "raster"}
        Sources left and then targets, as released, or by place.

    Returns
    -------
    Reduction
        On a grid of (1, T).

    Examples
    --------
    >>> step = tome_step(torch.tensor([[1.0, 0], [1, 0], [0, 1], [1, 1]]), torch.tensor([1.0, 3, 1, 1]), 1)
    >>> step.anchor, step.apply(torch.tensor([8.0, 0, 5, 6]))  # the second, of size 3, into the first
    (tensor([3, 0, 2]), tensor([6., 2., 5.]))
    """
    check_count("r", r, 0)
    if keys.ndim != 2 or sizes.shape != keys.shape[:1]:
        raise BadTokens(
            f"tome_step takes keys of shape (T, d) and sizes of shape (T,), got {tuple(keys.shape)} and "
            f"{tuple(sizes.shape)}. Give one image at a time."
        )
    r = min(r, (len(keys) + class_token - 1) // 2)
    folded = fold(keys, [r], cls_first=class_token, between=order)
    return averaged(folded, (1, len(keys)), by, order=order, sizes=sizes)


def merged_sizes(step: Reduction, sizes: Tensor) -> Tensor:
    """How many patches each token stands for after a step that merged tokens of these sizes."""
    return torch.zeros(len(step), dtype=sizes.dtype, device=sizes.device).index_add(
        0, step.assigned.to(sizes.device), sizes
    )
