"""Draw docs/images/groups.jpg: the bundled photos and their concept groups at the paper's three settings.

python scripts/draw_readme.py
"""

from __future__ import annotations

from pathlib import Path

from torino import make
from torino.datasets.bundled import PHOTOS, example_folder, example_sae, example_tokens
from torino.datasets.images import open_image
from torino.viz.draw import draw_sheet, save_picture


def main() -> None:
    sae, images = example_sae(), example_tokens()
    settings = [(k, f"(k, delta) = ({k}, {k})") for k in (3, 2, 1)]
    rows = {}
    for name, tokens in zip(PHOTOS, images, strict=True):
        plans = [(heading, make("torino-m", sae=sae, k=k, delta=k).plan(tokens)) for k, heading in settings]
        rows[name] = (open_image(example_folder() / "photos" / f"{name}.jpg"), plans)
    target = Path(__file__).parents[1] / "docs" / "images" / "groups.jpg"
    save_picture(draw_sheet(rows), target)
    print(f"Drew {target.name}.")


if __name__ == "__main__":
    main()
