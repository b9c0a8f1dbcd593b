"""SAEs of a space that images and text share, with a center and a scale of their own for each modality."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor

from torino.core.checks import check_choice, check_tensor, check_type, to_number
from torino.core.errors import BadParameter
from torino.sae.model import SAE

Modality = Literal["image", "text"]
MODALITIES: tuple[Modality, ...] = ("image", "text")


@dataclass(frozen=True, eq=False)
class JointStatistics:
    """Center and scale of the rows of each modality.

    Attributes
    ----------
    space : str
        The space that images and text share: ``projected``, ``block:N`` or ``clip``.
    image_center, text_center : Tensor of shape (D,)
        Mean row.
    image_scale, text_scale : float
        Root mean square distance from the mean row.
    """

    space: str
    image_center: Tensor
    text_center: Tensor
    image_scale: float
    text_scale: float

    def __post_init__(self) -> None:
        """Check the values."""
        check_type("space", self.space, str, "the name of a space")
        for name in ("image_center", "text_center"):
            value = check_tensor(name, getattr(self, name), BadParameter)
            if value.ndim != 1 or not value.is_floating_point() or not bool(torch.isfinite(value).all()):
                raise BadParameter(f"{name} must be one finite row, got {value.dtype} of shape {tuple(value.shape)}.")
            object.__setattr__(self, name, value.detach().float())
        for name in ("image_scale", "text_scale"):
            object.__setattr__(self, name, to_number(name, getattr(self, name), 0.0))
            if getattr(self, name) == 0:
                raise BadParameter(f"{name} must be above 0, got 0: all rows of a modality are equal.")


class JointSAE(SAE):
    """An SAE of image and text tokens of one space.

    It was trained on rows of both modalities, each centered and scaled by its own statistics. Everything it inherits
    reads image rows. :meth:`align` brings text rows to the center and scale of images, after which the same latents can
    be compared: ``sae.encode(sae.align(rows, "text"))``.
    """

    image_center: Tensor
    text_center: Tensor

    def __init__(self, *tensors: Any, statistics: JointStatistics, **options: Any) -> None:
        super().__init__(*tensors, **options)
        check_type("statistics", statistics, JointStatistics, "the JointStatistics of the training rows")
        if not self.center or self.normalize != "none":
            raise BadParameter(
                f"A joint SAE subtracts its decoder bias and normalizes by modality, got center={self.center} and "
                f"normalize={self.normalize!r}."
            )
        for name in ("image_center", "text_center"):
            value: Tensor = getattr(statistics, name)
            if value.shape != (self.width,):
                raise BadParameter(f"{name} must have shape ({self.width},), got {tuple(value.shape)}.")
            self.register_buffer(name, value.to(self.W_enc.device))
        self.space, self.image_scale, self.text_scale = (
            statistics.space,
            statistics.image_scale,
            statistics.text_scale,
        )

    @classmethod
    def of(cls, sae: SAE, statistics: JointStatistics) -> JointSAE:
        """Add statistics to an SAE that reads image rows."""
        joint = cls(
            sae.W_enc,
            sae.b_enc,
            sae.W_dec,
            sae.b_dec,
            kind=sae.kind,
            k=sae.k,
            threshold=sae.threshold,
            groups=sae.groups,
            center=sae.center,
            normalize=sae.normalize,
            card=sae.card,
            statistics=statistics,
        )
        joint.names, joint.prefilter, joint.folder = dict(sae.names), sae.prefilter, sae.folder
        return joint

    @property
    def statistics(self) -> JointStatistics:
        """Center and scale of the rows of each modality."""
        return JointStatistics(self.space, self.image_center, self.text_center, self.image_scale, self.text_scale)

    def align(self, x: Tensor, modality: Modality) -> Tensor:
        """Bring rows (..., D) of a modality to the center and scale of images; image rows are returned unchanged."""
        check_choice("modality", modality, Modality)
        self._check_input("x", x, self.width)
        if modality == "image":
            return x
        return (x.float() - self.text_center) * (self.image_scale / self.text_scale) + self.image_center

    def modality(self, modality: Modality) -> SAE:
        """Return a plain SAE that reads raw rows of one modality; its activations are in the scale of these rows."""
        check_choice("modality", modality, Modality)
        ratio = self.image_scale / self.text_scale if modality == "text" else 1.0
        shift = self.image_center - ratio * self.text_center if modality == "text" else torch.zeros_like(self.b_dec)
        plain = SAE(
            self.W_enc,
            self.b_enc / ratio,
            self.W_dec,
            (self.b_dec - shift) / ratio,
            kind=self.kind,
            k=self.k,
            threshold=None if self.threshold is None else self.threshold / ratio,
            groups=self.groups,
            card=self.card,
        )
        plain.names = dict(self.names)
        return plain

    def first(self, levels: int) -> SAE:
        """Return a joint SAE of the first ``levels`` Matryoshka groups; see :meth:`SAE.first`."""
        return JointSAE.of(super().first(levels), self.statistics)

    def facts(self) -> dict[str, Any]:
        """Return the content of the card file, with the scales; the centers are tensors of the weights file."""
        scales = {f"{name}_scale": cast(float, getattr(self, f"{name}_scale")) for name in MODALITIES}
        return {**super().facts(), "joint": {"space": self.space, **scales}}
