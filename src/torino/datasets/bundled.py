"""Bundled example: DINOv2 tokens of four public-domain photos and a small SAE trained on such tokens.

``data/example/README.md`` describes the files, their sources and how to make them again.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from torino.core.tokens import VisualTokens, load_tokens
from torino.sae.model import SAE

PHOTOS: tuple[str, ...] = ("astronaut", "coffee", "chelsea", "rocket")


def example_folder() -> Path:
    """Return the folder of the bundled files."""
    return Path(str(files("torino"))) / "data" / "example"


def example_tokens() -> list[VisualTokens]:
    """Return the patch tokens of the four photos in the order of ``PHOTOS``: 576 tokens of width 384 each."""
    return load_tokens(example_folder() / "tokens.safetensors")


def example_sae() -> SAE:
    """Return the SAE for these tokens: Matryoshka BatchTopK with 1,536 latents."""
    return SAE.load(example_folder() / "sae")
