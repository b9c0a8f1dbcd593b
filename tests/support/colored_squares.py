"""Photos of colored squares, a tiny tower whose tokens are the patch colors, and an SAE with latents for colors."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image

from torino import SAE, VisualTokens
from torino.sae import SAECard

if TYPE_CHECKING:  # tests of tokens alone do not need transformers
    from transformers import BitImageProcessor, Dinov2Model

    from torino.vlm.towers import Tower

PATCH, SIDE, WIDTH = 14, 4, 8
COLORS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255)}
GRAY = (128, 128, 128)
LATENTS = {"red": 0, "green": 2, "blue": 3}  # latent 1 is never active, latent 4 on gray patches
TOWER_NAME = "tiny-colors"


@dataclass(frozen=True)
class MemoryPhoto:
    name: str
    data: Any
    texts: tuple[str, ...] = ()


class MemoryPhotos:
    """Photos in memory, with the attributes of a photo source."""

    fingerprint, describe = "squares", "colored squares"

    def __init__(self, photos: list[MemoryPhoto]) -> None:
        self.photos = photos

    def __len__(self) -> int:
        return len(self.photos)

    def __getitem__(self, index: int) -> MemoryPhoto:
        return self.photos[index]


def paint_photo(patches: dict[int, tuple[int, int, int]]) -> bytes:
    """A gray PNG file of 4 x 4 patches with some colored ones."""
    image = Image.new("RGB", (SIDE * PATCH, SIDE * PATCH), GRAY)
    for patch, color in patches.items():
        row, column = divmod(patch, SIDE)
        image.paste(color, (column * PATCH, row * PATCH, (column + 1) * PATCH, (row + 1) * PATCH))
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def make_photos(count: int = 24, *, texts: bool = True) -> MemoryPhotos:
    """Photo i has i % 3 + 1 patches of color i % 3, starting at patch i % 16, and captions with the color."""
    photos: list[MemoryPhoto] = []
    for number in range(count):
        color = list(COLORS)[number % 3]
        patches = [(number + step) % SIDE**2 for step in range(number % 3 + 1)]
        captions = (f"Two {color} squares on a wall .", f"A {color} square, and a wall.") if texts else ()
        photos.append(MemoryPhoto(f"photo {number}", paint_photo(dict.fromkeys(patches, COLORS[color])), captions))
    return MemoryPhotos(photos)


def make_model(blocks: int = 2) -> Dinov2Model:
    """A DINOv2 of few blocks; the input of its first block is the mean color of each patch, in 0 to 1."""
    from transformers import Dinov2Config, Dinov2Model

    config = Dinov2Config(
        hidden_size=WIDTH, num_hidden_layers=blocks, num_attention_heads=2, image_size=SIDE * PATCH, patch_size=PATCH
    )
    torch.manual_seed(0)
    model = Dinov2Model(config).eval()
    with torch.no_grad():
        projection = model.embeddings.patch_embeddings.projection
        projection.weight.zero_()
        projection.bias.zero_()
        for channel in range(3):
            projection.weight[channel, channel] = 1 / PATCH**2
        model.embeddings.position_embeddings.zero_()
        model.embeddings.cls_token.fill_(1.0)
        for parameter in model.encoder.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.5)
    return model


def make_processor() -> BitImageProcessor:
    from transformers import BitImageProcessor

    side = SIDE * PATCH
    return BitImageProcessor(
        size={"shortest_edge": side},
        crop_size={"height": side, "width": side},
        image_mean=[0.0] * 3,
        image_std=[1.0] * 3,
        do_convert_rgb=True,
    )


def make_tower(block: int = -1) -> Tower:
    from torino.vlm.towers import Tower

    return Tower(make_model(), make_processor(), block, encoder=TOWER_NAME)


def write_tower(folder: Path, name: str = TOWER_NAME, blocks: int = 2) -> Path:
    """Write the tower to a folder that load_tower opens."""
    make_model(blocks).save_pretrained(folder / name)
    make_processor().save_pretrained(folder / name)
    return folder / name


def make_sae() -> SAE:
    """Latents 0, 2 and 3 detect red, green and blue; latent 1 is never active; latent 4 on all that is not dark."""
    W = torch.zeros(5, WIDTH)
    for color, latent in LATENTS.items():
        W[latent, :3] = -1.0
        W[latent, list(COLORS).index(color)] = 1.0
    W[4, :3] = 1.0
    b = torch.tensor([0.0, -1.0, 0.0, 0.0, -1.2])
    threshold = torch.full((5,), 0.1)
    return SAE(W, b, W.clone(), kind="jumprelu", threshold=threshold, card=SAECard("squares", TOWER_NAME, -1))


# ---------------------------------------------------------------------- tokens without a tower


def make_tied_tokens(photos: int = 21, patches: int = 6, width: int = 5, seed: int = 0) -> list[VisualTokens]:
    """Tokens with few different values, so that activations tie."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-2, 3, (photos, patches, width), generator=generator).float()
    cls = torch.randn(photos, width, generator=generator)
    return [VisualTokens(values[i], (2, 3), cls=cls[i]) for i in range(photos)]


def make_tied_sae(latents: int = 9, width: int = 5, **options: Any) -> SAE:
    """An SAE with few different weights; latent 4 is never active."""
    generator = torch.Generator().manual_seed(1)
    weights = torch.randint(-1, 2, (latents, width), generator=generator).float()
    weights[4] = 0
    return SAE(weights, torch.full((latents,), -1.0), weights, **options)
