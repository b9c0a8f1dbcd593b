"""ToMe on output tokens: merge the most similar pairs in several steps. ``tome_step`` is one step.

Bolya et al., Token Merging: Your ViT But Faster, ICLR 2023 (arXiv 2210.09461).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from torino.core.errors import BadTokens
from torino.core.frames import sequence_layout
from torino.core.reduction import Reduction
from torino.core.tokens import VisualTokens
from torino.reducers._checks import check_choice, check_count, check_flag, read_signal
from torino.reducers._matching import mean_reduction, merge_in_steps
from torino.reducers.base import Order, Reducer, register
from torino.reducers.folder import plan_removals


@register("tome")
@dataclass(frozen=True)
class ToMe(Reducer):
    """Merge the most similar pairs of patches by attention keys, in several small steps (ToMe).

    Each step splits the tokens alternately into sources and targets, with a CLS token in front. Each source is matched
    with its most similar target by the cosine of the keys, averaged over heads, and the r sources of highest similarity
    are merged into their targets (see :mod:`torino.reducers._matching`). A merged token is the mean of its patches,
    without rescaling, and has the position of the target. The original removes r tokens in each block of a tower; here
    all steps run on the output tokens. To keep 192 of 576 tokens, 384 are removed in 23 steps, the number of blocks up
    to the feature layer of LLaVA: 7 × 16, then 16 × 17.

    Deviations: the original does not work on output tokens. In a tower, later blocks process merged tokens, compute
    new keys from them and add ln(size) to the attention logits of the keys; that is ``tome-tower``. Here the key of a
    merged token is the mean of the keys of its patches. No publication states the schedule of the ToMe rows in LLaVA
    tables. With ``steps=None, step_order="raster", class_token=False`` the method equals
    ``folder(metric="head_keys", log_size_scale="never")``. It is not permutation equivariant.

    Parameters
    ----------
    budget : int
        Exact number of tokens, at most N, without the CLS token.
    steps : int or None
        Number of steps over which the removals are distributed evenly, smaller ones first. A step can merge at most
        half of the patches; if a step cannot remove its share, additional steps follow. None: as few steps as possible.
    step_order : {"native", "raster"}
        Order of the sequence between two steps, which determines the sources: sources then targets as released, or by
        position as in FOLDER.
    class_token : bool
        Whether a CLS token precedes the patches and is protected, as in a ViT. It need not be given. Without one, the
        release orders the sources by descending similarity instead of by position.
    order : {"raster", "native"}
        Output by position of the target, or as the last step leaves the sequence.
    """

    budget: int
    steps: int | None = 23
    step_order: Order = "native"
    class_token: bool = True
    order: Order = "raster"

    needs: ClassVar[frozenset[str]] = frozenset({"head_keys"})
    merges: ClassVar[bool] = True
    cost: ClassVar[str] = "O(steps·N²·D/H)"
    takes_frames: ClassVar[bool] = True
    paper: ClassVar[str] = "Bolya et al., ToMe, ICLR 2023, arXiv 2210.09461"
    original_license: ClassVar[str] = "CC BY-NC 4.0"

    def __post_init__(self) -> None:
        """Validate the hyperparameters."""
        check_count("budget", self.budget)
        check_count("steps", 1 if self.steps is None else self.steps)
        check_choice("step_order", self.step_order, Order)
        check_flag("class_token", self.class_token)
        check_choice("order", self.order, Order)

    def plan(self, tokens: VisualTokens) -> Reduction:
        """Plan one image."""
        keys = read_signal(tokens, "head_keys", self.name, (len(tokens), None))
        removals = plan_removals(self.name, len(tokens), self.budget, cls_first=self.class_token, steps=self.steps)
        merged = merge_in_steps(keys, removals, cls_first=self.class_token, step_order=self.step_order)
        return mean_reduction(merged, tokens.layout, self.spec, order=self.order)


def tome_step(
    keys: Tensor, sizes: Tensor, r: int, *, class_token: bool = True, order: Order = "native", by: str = "tome-step"
) -> Reduction:
    """Return the reduction of one block, to be applied to its patches between attention and MLP.

    To run ToMe inside a tower, keep the CLS token separate and start with ``total = Reduction.identity(grid)`` and
    ``sizes`` of ones. In each block compute ``step = tome_step(keys, sizes, r)``, then ``states = step.apply(states)``,
    ``sizes = merged_sizes(step, sizes)`` and ``total = total.then(step)``. From then on add ln(sizes) to the attention
    logits of the keys (proportional attention). ``total`` holds the patches of each token. ``tome-tower`` does this.

    Parameters
    ----------
    keys : Tensor of shape (T, d)
        Keys of the patches in this block, averaged over heads.
    sizes : Tensor of shape (T,)
        Number of patches of the image that each token stands for.
    r : int
        Number of tokens to remove. At most T//2 are removed, or (T − 1)//2 without a CLS token.
    class_token : bool
        Whether a CLS token precedes the sequence.
    order : {"native", "raster"}
        Sources then targets as released, or by position.

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
    merged = merge_in_steps(keys, [r], cls_first=class_token, step_order=order)
    return mean_reduction(merged, sequence_layout(len(keys)), by, order=order, sizes=sizes)


def merged_sizes(step: Reduction, sizes: Tensor) -> Tensor:
    """Return how many patches each token stands for after a step that merged tokens of the given sizes."""
    return torch.zeros(len(step), dtype=sizes.dtype, device=sizes.device).index_add(
        0, step.assigned.to(sizes.device), sizes
    )
