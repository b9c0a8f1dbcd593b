"""The rows of ``torino train --joint``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from torino.cli._common import errors, quiet_transformers
from torino.cli._progress import progress
from torino.core.errors import BadParameter

if TYPE_CHECKING:  # these import torch, which slows down the start
    from torino.training.joint import JointRows


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
