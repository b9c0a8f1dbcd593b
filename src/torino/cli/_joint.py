"""Joint SAEs on the command line: the rows of ``torino train --joint``, and their shared concepts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from torino.cli._common import errors, out, quiet_transformers
from torino.cli._progress import progress
from torino.core.errors import BadParameter

if TYPE_CHECKING:  # these import torch, which slows down the start
    from PIL.Image import Image

    from torino.sae.joint import JointSAE
    from torino.training.joint import JointRows

SHARED_NUMBERS, SHARED_SHEET = "shared-concepts.json", "shared-concepts.png"


@dataclass(frozen=True)
class JointSource:
    """Where the image and text rows come from, as given on the command line."""

    space: str
    model: str | None
    images: str | None
    texts: str | None
    rows: Path | None
    clip: str | None
    tokens: str | None
    limit: int | None
    seed: int
    allow_outside: bool

    def check(self, others: Mapping[str, Any]) -> None:
        """Refuse options that are missing or have no effect, before anything is loaded."""
        for option, value in others.items():
            if value:
                raise BadParameter(f"{option} cannot be combined with --joint. Leave one of them out.")
        if self.rows is not None and self.rows.suffix != ".safetensors":
            raise BadParameter(f"--rows must end in .safetensors, got {self.rows}.")
        if self._cached:
            return
        if self.model is None or self.images is None:
            raise BadParameter("--joint needs --model and --images, or --rows with a file that exists.")
        if self.space == "clip" and self.clip is None:
            raise BadParameter("--joint clip needs the CLIP of the model's vision tower: --clip-text NAME.")
        if self.space != "clip" and self.clip is not None:
            raise BadParameter(f"--clip-text has no effect with --joint {self.space}. Leave it out.")

    @property
    def _cached(self) -> bool:
        return self.rows is not None and self.rows.is_file()

    def open(self, device: Any) -> JointRows:
        """Read the rows, or run the model to get them."""
        from torino.datasets import open_photos
        from torino.datasets.texts import read_texts
        from torino.training.joint import JointRows, collect_rows
        from torino.vlm import load_clip_text, load_vlm
        from torino.vlm.joint_space import check_joint_space, open_joint_space

        check_joint_space(self.space)
        if self.rows is not None and self._cached:
            cached = JointRows.load(self.rows, seed=self.seed)
            if cached.space != self.space:
                raise BadParameter(
                    f"{self.rows} holds rows of the space {cached.space}, got --joint {self.space}. Use another file."
                )
            return cached
        assert self.model is not None
        assert self.images is not None
        sentences = None if self.texts is None else read_texts(self.texts)
        photos = open_photos(self.images, limit=self.limit, allow_outside=self.allow_outside)
        with errors.status(f"Loading {escape(self.model)} …"), quiet_transformers():
            clip = None if self.clip is None else load_clip_text(self.clip, device=device)
            space = open_joint_space(self.space, load_vlm(self.model, device, text_query=clip))
        with progress(errors, {"photos": len(photos)}) as update:
            found = collect_rows(
                space,
                photos,
                sentences,
                tokens=self.tokens or "all",
                encoder=Path(self.model).name if Path(self.model).exists() else self.model,
                seed=self.seed,
                progress=lambda done: update("photos", done),
            )
        if self.rows is not None:
            found.save(self.rows)
        return found


def write_shared_concepts(
    sae: JointSAE,
    model: str,
    images: str,
    target: Path,
    top: int,
    limit: int | None,
    device: str,
    allow_outside: bool,
    clip: str | None,
) -> None:
    """Compare words and photos of the latents of a joint SAE; write numbers and a sheet."""
    from torino.core.io import write_json
    from torino.datasets import open_photos
    from torino.datasets.images import as_seen
    from torino.interpret.shared_concepts import find_shared_concepts
    from torino.interpret.shared_sheet import draw_shared_sheet
    from torino.viz.draw import save_picture
    from torino.vlm import load_clip_text, load_vlm
    from torino.vlm.joint_space import open_joint_space

    photos = open_photos(images, limit=limit, allow_outside=allow_outside)
    with errors.status(f"Loading {escape(model)} …"), quiet_transformers():
        text = None if clip is None else load_clip_text(clip, device=device)
        vlm = load_vlm(model, device, text_query=text)
        space = open_joint_space(sae.space, vlm)
    with progress(errors, {"photos": len(photos)}) as update:
        found = find_shared_concepts(sae, space, photos, progress=lambda done: update("photos", done))

    def load(number: int) -> tuple[Image, int]:
        data = photos[number].data
        inputs = vlm.inputs(data, "?")
        return as_seen(inputs.tensors, vlm.processor, inputs.images)[0], len(space.image_rows(data))

    written = [write_json(target / SHARED_NUMBERS, found.to_dict())]
    if found.concepts:
        with errors.status("Drawing …"):
            sheet = draw_shared_sheet(found.concepts[:top], load, title=f"Shared concepts of {sae.card.name or model}")
            written.append(save_picture(sheet, target / SHARED_SHEET))
    out.print(found.summary(), highlight=False, soft_wrap=True)
    for file in written:
        out.print(f"Wrote {escape(str(file))}", highlight=False, soft_wrap=True)
