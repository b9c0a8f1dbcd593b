"""The bundled example: four public-domain photos as DINOv2 tokens, and a small SAE trained on such tokens.

What is in it, where it comes from and how it is made again: ``data/example/README.md``.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from torino.core.tokens import VisualTokens, load_tokens
from torino.sae.model import SAE

PHOTOS: tuple[str, ...] = ("astronaut", "coffee", "chelsea", "rocket")


def example_folder() -> Path:
    """Folder of the bundled files."""
    return Path(str(files("torino"))) / "data" / "example"


def example_tokens() -> list[VisualTokens]:
    """The patch tokens of the four photos, in the order of ``PHOTOS``: 576 each, 384 wide."""
    return load_tokens(example_folder() / "tokens.safetensors")


def example_sae() -> SAE:
    """The SAE that reads them: Matryoshka BatchTopK, 1,536 latents."""
    return SAE.load(example_folder() / "sae")
