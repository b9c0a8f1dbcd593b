"""Load the SAE that is part of the package."""

from __future__ import annotations

from pathlib import Path

from torino.core.errors import BadFile
from torino.sae import SAE
from torino_lab.assembly import SHIPPED


def lab_sae(folder: Path | None = None, *, decoder: bool = True) -> SAE:
    """Load the SAE of the lab's model, whose concepts have names.

    Parameters
    ----------
    folder : Path, optional
        By default the SAE of the package, which reads the penultimate block of CLIP ViT-B/16.
    decoder : bool
        Whether to load the decoder. Concepts do not need it, and without it the SAE takes half the memory.
    """
    folder = SHIPPED / "sae" if folder is None else folder
    if not (folder / "card.json").is_file():
        raise BadFile(f"There is no SAE in {folder}. Install torino-lab again, or give the folder of another SAE.")
    return SAE.load(folder, decoder=decoder)
