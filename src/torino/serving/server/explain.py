"""What a response says about the reduction of its images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torino.core.reduction import Reduction
from torino.serving.server.jobs import ImageReport


def explain_images(images: Sequence[ImageReport], names: Mapping[int, str]) -> dict[str, Any]:
    """Return tokens, groups and concepts of all images of a request, as JSON values.

    A group lists the patches of the grid, row by row, that its token represents. ``concepts`` sums the patches of
    each concept, the largest first.
    """
    return {
        "tokens": {"before": sum(image.before for image in images), "after": sum(image.after for image in images)},
        "images": [_image(image, names) for image in images],
    }


def _image(image: ImageReport, names: Mapping[int, str]) -> dict[str, Any]:
    patches: dict[int, int] = {}
    for plan in image.plans:
        for concept, size in zip(plan.concept.tolist(), plan.sizes.tolist(), strict=True):
            if concept >= 0:
                patches[concept] = patches.get(concept, 0) + size
    ordered = sorted(patches, key=lambda concept: (-patches[concept], concept))
    return {
        "tokens": {"before": image.before, "after": image.after},
        "cached": image.cached,
        "method": image.plans[0].by if image.plans else None,
        "concepts": [{**_concept(concept, names), "patches": patches[concept]} for concept in ordered],
        "units": [{"grid": list(plan.grid), "groups": _groups(plan, names)} for plan in image.plans],
    }


def _groups(plan: Reduction, names: Mapping[int, str]) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = []
    for token in range(len(plan)):
        explanation = plan.explain(token, names)
        group: dict[str, Any] = {"token": token, "role": explanation.role, "patches": list(explanation.stands_for)}
        if explanation.anchor >= 0:
            group["anchor"] = explanation.anchor
        if explanation.concept is not None:
            group["concept"] = _concept(explanation.concept, names)
        if explanation.words:
            group["words"] = list(explanation.words)
        groups.append(group)
    return groups


def _concept(concept: int, names: Mapping[int, str]) -> dict[str, Any]:
    return {"id": concept, "name": names.get(concept)}
