"""Word prototypes in CLIP's joint space, learned from captions, and their scores at patches.

CLIP's text tower is not at hand, but its image side suffices. A linear classifier of a word on image embeddings plays
the part of the word's text vector. It is applied to patches through the value path of the last attention layer, which
projects each patch into the joint space without mixing it with others (as MaskCLIP does), so it finds where in the
photo a word is.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from torino.core.io import write_atomic
from torino.core.tokens import VisualTokens
from torino_lab.training.precision import best_dtype

MIN_PHOTOS = 25  # training photos that a word needs
MIN_AREA = 0.8  # area under the ROC curve on held-out photos that a word needs
RIDGE = 2e-5
STEPS, RATE = 150, 0.3


class JointSpace:
    """Maps from the penultimate block of CLIP into its joint space.

    Parameters
    ----------
    folder : Path
        A ``CLIPVisionModelWithProjection``.
    dtype : torch.dtype, optional
        Precision of matrix products; by default bfloat16 where it is faster, otherwise float32.
    """

    def __init__(self, folder: Path, dtype: torch.dtype | None = None) -> None:
        from transformers import CLIPVisionModelWithProjection

        model: Any = CLIPVisionModelWithProjection.from_pretrained(folder).eval()
        self._last, self._norm = model.vision_model.encoder.layers[-1], model.vision_model.post_layernorm
        self._projection = model.visual_projection
        self._dtype = dtype or best_dtype()

    def _fast(self) -> torch.autocast:
        """Run matrix products in bfloat16 where that is faster."""
        return torch.autocast("cpu", dtype=self._dtype, enabled=self._dtype != torch.float32)

    @torch.inference_mode()
    def patches(self, hidden: Tensor) -> Tensor:
        """Project patches one by one, (…, 768) to (…, 512), of unit length."""
        attention = self._last.self_attn
        with self._fast():
            values = attention.out_proj(attention.v_proj(self._last.layer_norm1(hidden)))
            projected = self._projection(self._norm(values))
        return functional.normalize(projected.float(), dim=-1)

    @torch.inference_mode()
    def image(self, hidden: Tensor) -> Tensor:
        """Return CLIP's image embedding of hidden states with CLS first, (B, 197, 768) to (B, 512), of unit length."""
        with self._fast():
            out = self._last(hidden, None)
            out = out[0] if isinstance(out, tuple) else out
            projected = self._projection(self._norm(out[:, 0]))
        return functional.normalize(projected.float(), dim=-1)


@dataclass(frozen=True, eq=False)
class Prototypes:
    """Word prototypes; implements :class:`torino.interpret.patch_naming.WordScorer` for CLIP's penultimate block.

    Attributes
    ----------
    words : tuple of str
    directions : Tensor of shape (V, 512)
    centre : Tensor of shape (512,)
        Mean projected patch.
    scale : Tensor of shape (V,)
        Standard deviation of each word's score over patches.
    space : JointSpace
    """

    words: tuple[str, ...]
    directions: Tensor
    centre: Tensor
    scale: Tensor
    space: JointSpace

    def score(self, tokens: VisualTokens) -> Tensor:
        """Return the standardised score of each word at each patch."""
        return (self.space.patches(tokens.patches.float()) - self.centre) @ self.directions.T / self.scale

    def without(self, unwanted: Callable[[str], bool]) -> Prototypes:
        """Return the prototypes without some words."""
        kept = [number for number, word in enumerate(self.words) if not unwanted(word)]
        words = tuple(self.words[number] for number in kept)
        return replace(self, words=words, directions=self.directions[kept], scale=self.scale[kept])

    def save(self, path: Path) -> None:
        """Write everything but the tower to a safetensors file."""
        tensors = {"directions": self.directions, "centre": self.centre, "scale": self.scale}
        half = {name: value.half().contiguous() for name, value in tensors.items()}
        write_atomic(path, lambda target: save_file(half, target, {"words": "\n".join(self.words)}))

    @classmethod
    def load(cls, path: Path, space: JointSpace) -> Prototypes:
        """Read a file written by :meth:`save`."""
        with safe_open(path, "pt") as file:
            words = tuple(file.metadata()["words"].split("\n"))
            tensors = {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118
        return cls(words, **tensors, space=space)


def choose_words(texts: Sequence[frozenset[str]], exclude: Iterable[str] = ()) -> list[str]:
    """Return the words that at least 25 photos mention, most frequent first."""
    counts = Counter(word for words in texts for word in words)
    unwanted = set(exclude)
    return [word for word, count in counts.most_common() if count >= MIN_PHOTOS and word not in unwanted]


def label(texts: Sequence[frozenset[str]], words: Sequence[str]) -> Tensor:
    """Return which photo mentions which word, (photos, V)."""
    place = {word: number for number, word in enumerate(words)}
    table = torch.zeros(len(texts), len(words))
    for row, mentioned in enumerate(texts):
        table[row, [place[word] for word in mentioned if word in place]] = 1
    return table


def fit_directions(embeddings: Tensor, labels: Tensor) -> Tensor:
    """Fit a ridge-regularised logistic classifier of each word on image embeddings; returns (V, 512)."""
    centred = embeddings - embeddings.mean(0)
    weights = torch.zeros(labels.shape[1], embeddings.shape[1], requires_grad=True)
    bias = torch.logit(labels.mean(0).clamp(1e-4, 1 - 1e-4)).clone().requires_grad_()
    optimiser = torch.optim.Adam([weights, bias], lr=RATE)
    for step in range(STEPS):
        for group in optimiser.param_groups:
            group["lr"] = RATE * (1 - step / STEPS)
        logits = centred @ weights.T + bias
        loss = functional.binary_cross_entropy_with_logits(logits, labels, reduction="sum") / len(labels)
        optimiser.zero_grad()
        (loss + RIDGE * weights.square().sum()).backward()
        optimiser.step()
    return weights.detach()


def areas(scores: Tensor, labels: Tensor) -> Tensor:
    """Return the area under the ROC curve of each column; NaN where a column has one label only.

    Examples
    --------
    >>> areas(torch.tensor([[0.1], [0.4], [0.35], [0.8]]), torch.tensor([[0.0], [0.0], [1.0], [1.0]])).tolist()
    [0.75]
    """
    ranks = scores.argsort(0).argsort(0).float() + 1
    positive = labels.sum(0)
    negative = len(labels) - positive
    return ((ranks * labels).sum(0) - positive * (positive + 1) / 2) / (positive * negative)


def fit_prototypes(
    space: JointSpace,
    embeddings: Tensor,
    texts: Sequence[frozenset[str]],
    patches: Tensor,
    *,
    heldout: tuple[Tensor, Sequence[frozenset[str]]],
    exclude: Iterable[str] = (),
) -> Prototypes:
    """Fit prototypes of all words that can be recognised.

    Parameters
    ----------
    space : JointSpace
    embeddings : Tensor of shape (photos, 512)
        Image embeddings of training photos.
    texts : sequence of sets of str
        Words that each photo's captions and answers mention.
    patches : Tensor of shape (n, 768)
        Patches of photos, for the scale of the scores.
    heldout : (Tensor, sequence of sets of str)
        Embeddings and words of other training photos; words that are not recognised there are left out.
    exclude : iterable of str
        Words that name nothing visible.
    """
    words = choose_words(texts, exclude)
    directions = fit_directions(embeddings, label(texts, words))
    areas_ = areas(heldout[0] @ directions.T, label(heldout[1], words))
    kept = [number for number, area in enumerate(areas_.tolist()) if area >= MIN_AREA]
    directions = directions[kept]
    projected = space.patches(patches.float())
    centre = projected.mean(0)
    scale = ((projected - centre) @ directions.T).std(0)
    return Prototypes(tuple(words[number] for number in kept), directions, centre, scale, space)


def question_words(questions: Sequence[str], answers: Sequence[Sequence[str]]) -> list[str]:
    """Return questions and first answers as texts about a photo; yes/no questions are left out, since "no" says that
    something is not there.
    """  # noqa: D205
    texts: list[str] = []
    for question, given in zip(questions, answers, strict=True):
        first = given[0].lower() if given else ""
        if first not in {"", "yes", "no"} and not re.match(
            r"(is|are|was|were|does|do|did|can|could|has|have)\b", question.lower()
        ):
            texts.append(f"{question} {first}")
    return texts
