"""What the page receives about photos and reductions: plain JSON values, small enough for every move of a slider."""

from __future__ import annotations

from collections.abc import Mapping
from math import isnan

from typing_extensions import TypedDict

from torino.core.reduction import Reduction
from torino.explorer.model import InspectedPhoto


class PhotoView(TypedDict):
    """A photo after the tower and the SAE."""

    id: str
    name: str
    texts: list[str]
    notes: list[str]
    grid: list[int]
    width: int
    height: int
    seconds: float
    stored: bool
    k: int
    indices: list[int]
    values: list[float]
    names: dict[str, str]


class ReductionView(TypedDict):
    """A reduction: one entry for each output token, and one for each patch in ``assigned``."""

    by: str
    spec: str
    before: int
    after: int
    milliseconds: float
    assigned: list[int]
    anchor: list[int]
    concept: list[int]
    size: list[int]
    role: list[str]
    score: list[float | None]
    pruning: bool


class TokenView(TypedDict):
    """One output token with its sources and explanation."""

    token: int
    anchor: int
    role: str
    concept: int | None
    name: str | None
    score: float | None
    sources: list[int]
    weights: list[float]
    stands_for: list[int]
    explanation: str


def view_photo(photo: InspectedPhoto, names: Mapping[int, str], stored: bool) -> PhotoView:
    """Describe a photo and the concepts of its patches: ``k`` entries for each patch, −1 where it has fewer."""
    indices, values = photo.concepts.indices, photo.concepts.values
    most = max(1, int(photo.concepts.active.max()))  # no column that is silent everywhere
    used = set(indices[:, :most].unique().tolist())
    return {
        "id": photo.photo.id,
        "name": photo.photo.name,
        "texts": list(photo.photo.texts),
        "notes": list(photo.photo.notes),
        "grid": list(photo.grid),
        "width": photo.seen.width,
        "height": photo.seen.height,
        "seconds": round(photo.seconds, 4),
        "stored": stored,
        "k": most,
        "indices": indices[:, :most].reshape(-1).tolist(),
        "values": [round(value, 3) for value in values[:, :most].reshape(-1).tolist()],
        "names": {str(latent): names[latent] for latent in sorted(used) if latent in names},
    }


def view_reduction(reduction: Reduction, spec: str, seconds: float) -> ReductionView:
    """Describe a reduction."""
    return {
        "by": reduction.by,
        "spec": spec,
        "before": reduction.patches,
        "after": len(reduction),
        "milliseconds": round(1e3 * seconds, 2),
        "assigned": reduction.assigned.tolist(),
        "anchor": reduction.anchor.tolist(),
        "concept": reduction.concept.tolist(),
        "size": reduction.assigned[reduction.assigned >= 0].bincount(minlength=len(reduction)).tolist(),
        "role": list(reduction.role),
        "score": [None if isnan(score) else round(score, 4) for score in reduction.score.tolist()],
        "pruning": reduction.is_pruning,
    }


def view_token(reduction: Reduction, token: int, names: Mapping[int, str]) -> TokenView:
    """Describe one output token."""
    told = reduction.explain(token, names)
    return {
        "token": told.token,
        "anchor": told.anchor,
        "role": told.role,
        "concept": told.concept,
        "name": told.name,
        "score": None if isnan(told.score) else round(told.score, 4),
        "sources": list(told.sources),
        "weights": [round(weight, 5) for weight in told.weights],
        "stands_for": list(told.stands_for),
        "explanation": str(told),
    }
