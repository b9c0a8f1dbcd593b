"""Photos of coloured squares, a real tiny tower whose tokens are their colours, and an SAE that knows four colours."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image

from torino import SAE, SAECard, VisualTokens

if TYPE_CHECKING:  # not needed for tokens alone
    from transformers import BitImageProcessor, Dinov2Model

    from torino.vlm.towers import Tower

PATCH, SIDE, WIDTH = 14, 4, 8
COLOURS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255)}
GREY = (128, 128, 128)
LATENTS = {"red": 0, "green": 2, "blue": 3}  # 1 never fires, 4 fires on grey
NAME = "tiny-colours"


@dataclass(frozen=True)
class Photo:
    name: str
    data: Any
    texts: tuple[str, ...] = ()


class Photos:
    """Photos in memory, with what a collection has to say of itself."""

    fingerprint, describe = "squares", "coloured squares"

    def __init__(self, photos: list[Photo]) -> None:
        self.photos = photos

    def __len__(self) -> int:
        return len(self.photos)

    def __getitem__(self, index: int) -> Photo:
        return self.photos[index]


def painted(squares: dict[int, tuple[int, int, int]]) -> bytes:
    """A grey picture of 4 x 4 patches, some of them coloured, as a PNG file."""
    image = Image.new("RGB", (SIDE * PATCH, SIDE * PATCH), GREY)
    for patch, colour in squares.items():
        row, column = divmod(patch, SIDE)
        image.paste(colour, (column * PATCH, row * PATCH, (column + 1) * PATCH, (row + 1) * PATCH))
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def squares(count: int = 24, *, texts: bool = True) -> Photos:
    """Photo i has i % 3 + 1 patches of colour i % 3, from patch i % 16 on, and captions that say so."""
    made: list[Photo] = []
    for number in range(count):
        colour = list(COLOURS)[number % 3]
        patches = [(number + step) % SIDE**2 for step in range(number % 3 + 1)]
        said = (f"Two {colour} squares on a wall .", f"A {colour} square, and a wall.") if texts else ()
        made.append(Photo(f"photo {number}", painted(dict.fromkeys(patches, COLOURS[colour])), said))
    return Photos(made)


def model() -> Dinov2Model:
    """A DINOv2 of two blocks; what enters its first block is the mean colour of each patch, in 0 to 1."""
    from transformers import Dinov2Config, Dinov2Model

    config = Dinov2Config(
        hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=2, image_size=SIDE * PATCH, patch_size=PATCH
    )
    torch.manual_seed(0)
    made = Dinov2Model(config).eval()
    with torch.no_grad():
        projection = made.embeddings.patch_embeddings.projection
        projection.weight.zero_()
        projection.bias.zero_()
        for channel in range(3):
            projection.weight[channel, channel] = 1 / PATCH**2
        made.embeddings.position_embeddings.zero_()
        made.embeddings.cls_token.fill_(1.0)
        for parameter in made.encoder.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.5)
    return made


def processor() -> BitImageProcessor:
    from transformers import BitImageProcessor

    side = SIDE * PATCH
    return BitImageProcessor(
        size={"shortest_edge": side},
        crop_size={"height": side, "width": side},
        image_mean=[0.0] * 3,
        image_std=[1.0] * 3,
        do_convert_rgb=True,
    )


def tower(block: int = -1) -> Tower:
    from torino.vlm.towers import Tower

    return Tower(model(), processor(), block, encoder=NAME)


def saved_tower(folder: Path) -> Path:
    """The tower as a folder that opens by its path."""
    model().save_pretrained(folder / NAME)
    processor().save_pretrained(folder / NAME)
    return folder / NAME


def sae() -> SAE:
    """Latents 0, 2 and 3 fire on red, green and blue by how far it stands out; 1 never; 4 on all that is not dark."""
    W = torch.zeros(5, WIDTH)
    for colour, latent in LATENTS.items():
        W[latent, :3] = -1.0
        W[latent, list(COLOURS).index(colour)] = 1.0
    W[4, :3] = 1.0
    b = torch.tensor([0.0, -1.0, 0.0, 0.0, -1.2])
    return SAE(W, b, W.clone(), kind="jumprelu", threshold=torch.full((5,), 0.1), card=SAECard("squares", NAME, -1))


# ---------------------------------------------------------------------- tokens alone


def tokens(photos: int = 21, patches: int = 6, width: int = 5, seed: int = 0) -> list[VisualTokens]:
    """Tokens of few different values, so that activations tie."""
    source = torch.Generator().manual_seed(seed)
    values = torch.randint(-2, 3, (photos, patches, width), generator=source).float()
    cls = torch.randn(photos, width, generator=source)
    return [VisualTokens(values[i], (2, 3), cls=cls[i]) for i in range(photos)]


def reader(latents: int = 9, width: int = 5, **others: Any) -> SAE:
    source = torch.Generator().manual_seed(1)
    weights = torch.randint(-1, 2, (latents, width), generator=source).float()
    weights[4] = 0  # never fires
    return SAE(weights, torch.full((latents,), -1.0), weights, **others)
