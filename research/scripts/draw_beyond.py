"""Draw research/images/beyond-lengths.png: how the length of TORINO-X follows its one threshold, and the picture.

Left: the average number of tokens over pictures made of dev photos, by ``min_gain``, and the band in which eight of ten
pictures lie; beside it the averages that the paper's grid of (k, δ) can give. Right: what each sort of picture keeps
with the threshold that leaves 128 tokens on average, fitted on other pictures.

python research/scripts/draw_beyond.py --photos dev.parquet
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import torch
from torino_lab.corpus import MIXTURE, Corpus, read_photos
from torino_lab.shipped import lab_sae
from torino_lab.tower import BLOCK

from torino import VisualTokens
from torino.evaluation.reporting.figures.style import (
    BLUE,
    INK,
    MUTED,
    PAGE_WIDTH,
    RED,
    figure_style,
    new_figure,
    save_figure,
)
from torino.reducers.calibration import calibrate, calibrate_cover
from torino.reducers.torino_x import TIE, TorinoX

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "lab" / "scripts"))

from train_lab import look, shards  # noqa: E402

TARGET = 128
PAPER, NEAR = "what the paper's (k, δ) can give", 15.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--photos", type=Path, required=True, help="photos with captions, not trained on: a parquet file")
    add("--work", type=Path, default=ROOT / "build/lab", help="folder for what the tower saw (default: %(default)s)")
    add("--pictures", type=int, default=300)
    add("--fit", type=int, default=40, help="further pictures, for the threshold (default: %(default)s)")
    add("--output", type=Path, default=ROOT / "research/images/beyond-lengths.png")
    args = parser.parse_args()
    look(Corpus(read_photos([args.photos]), seed=1, length=args.pictures + args.fit), args.work / "dev", BLOCK)
    files = shards(args.work / "dev")
    tokens = [torch.from_numpy(np.array(one)).float() for file in files for one in np.load(file, mmap_mode="r")]
    images = [VisualTokens(one, (24, 24)) for one in tokens[: args.pictures + args.fit]]
    told = [one["name"] for file in files for one in json.loads(file.with_suffix(".json").read_text())["pictures"]]
    sorts = np.array([name.partition("-")[0] for name in told[: args.pictures]])
    tried, others = images[: args.pictures], images[args.pictures :]
    reducer = TorinoX(lab_sae(decoder=False))
    gains = np.stack(reducer.gains(tried))  # (pictures, 576), falling
    levels = np.geomspace(0.02, 8.0, 160)
    lengths = 1 + (gains[:, 1:, None] >= levels - TIE).sum(1)  # (pictures, levels)
    fitted = calibrate_cover(others, TARGET, reducer=reducer).min_gain
    got = 1 + (gains[:, 1:] >= fitted - TIE).sum(1)
    grid = calibrate(tried, target=TARGET, sae=lab_sae(decoder=False), max_k=3).table
    with figure_style():
        figure = new_figure(PAGE_WIDTH, 2.6)
        left, right = figure.subplots(1, 2, width_ratios=(1.25, 1))
        low, high = np.quantile(lengths, (0.1, 0.9), axis=0)
        left.fill_between(levels, low, high, color=RED, alpha=0.15, linewidth=0)
        left.plot(levels, lengths.mean(0), color=RED, label="TORINO-X, mean and eight of ten pictures")
        means = sorted((float(counts.double().mean()), key) for key, counts in grid.items())
        left.plot([10.5] * len(means), [mean for mean, _ in means], "o", color=BLUE, clip_on=False, label=PAPER)
        near: list[list[tuple[float, tuple[int, int]]]] = []
        for one in means:  # labels that would lie on one another become one
            if near and one[0] - near[-1][-1][0] < NEAR:
                near[-1].append(one)
            else:
                near.append([one])
        for some in near:
            text, mean = ", ".join(f"({k}, {delta})" for _, (k, delta) in some), np.mean([mean for mean, _ in some])
            left.annotate(text, (12.5, float(mean)), fontsize=6.5, va="center", annotation_clip=False)
        left.set_xscale("log")
        left.set(xlim=(0.02, 10.5), ylim=(0, 576), xlabel="min_gain: minimal gain of a token, in patches")
        left.set_ylabel("tokens of 576")
        left.set_yticks([0, 100, 200, 300, 400, 500, 576])
        left.set_xticks([0.02, 0.1, 0.5, 2, 8], ["0.02", "0.1", "0.5", "2", "8"])
        left.grid(axis="y")
        left.legend(loc="upper right")
        names = [name for name in MIXTURE if (sorts == name).any()]
        names.sort(key=lambda name: -float(got[sorts == name].mean()))
        draw = np.random.default_rng(0)
        for place, name in enumerate(names):
            mine = got[sorts == name]
            right.scatter(place + draw.uniform(-0.22, 0.22, len(mine)), mine, s=5, color=RED, alpha=0.35, linewidths=0)
            right.plot([place - 0.32, place + 0.32], [mine.mean()] * 2, color=INK, linewidth=1.4)
        right.axhline(got.mean(), color=MUTED, linestyle=":", linewidth=0.9, label=f"mean {got.mean():.0f}")
        right.set_xticks(range(len(names)), names, rotation=25)
        right.set(ylabel=f"tokens, min_gain = {fitted:.2f}", ylim=(0, None))
        right.legend(loc="lower left")
        save_figure(figure, args.output.parent, args.output.stem, ("png",))
    spread = np.quantile(got, (0.1, 0.9))
    print(
        f"min_gain = {fitted:.3f}: {got.mean():.1f} tokens on average, eight of ten in {spread[0]:.0f} to {spread[1]:.0f}"
    )
    for name in names:
        print(f"  {name:8s} {got[sorts == name].mean():6.1f}  ({(sorts == name).sum()} pictures)")
    print("  (k, δ): " + ", ".join(f"{key} {float(one.double().mean()):.0f}" for key, one in sorted(grid.items())))


if __name__ == "__main__":
    main()
