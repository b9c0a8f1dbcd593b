"""What ships with torino for a first look: the lab's default SAE, and a photo in the public domain."""

from __future__ import annotations

from pathlib import Path

from torino.core.errors import BadFile
from torino.datasets.bundled import example_folder
from torino.sae.model import SAE
from torino_lab.model import SHIPPED

PHOTO = "astronaut"


def lab_sae(folder: Path | None = None, *, decoder: bool = True) -> SAE:
    """The lab's default SAE: it reads the tokens of :func:`torino_lab.tower.lab_tower`, and has words for concepts.

    Parameters
    ----------
    folder : Path, optional
        By default the one that ships with torino.
    decoder : bool
        Without it, half of the memory: enough for concepts, not for decoding.
    """
    folder = SHIPPED / "sae" if folder is None else folder
    if not (folder / "card.json").is_file():
        raise BadFile(
            f"There is no SAE in {folder}, where the lab's own one belongs. Install torino anew, or give another: "
            "--sae FOLDER, --sae owner/repository, or --sae raw for none."
        )
    return SAE.load(folder, decoder=decoder)


def lab_photo() -> Path:
    """A photo in the public domain, for a first look; ``data/example/README.md`` has its credits."""
    return example_folder() / "photos" / f"{PHOTO}.jpg"
