"""Compare CLIP features at several image sizes: how well a linear head finds the words of captions and questions.

For each size, patches of the penultimate block are computed for the same photos. A head scores every word at every
patch and pools the scores over patches (log-sum-exp), so it can find small things. It is trained on captions of
training photos and judged on dev photos by the mean area under the ROC curve over words, for all words and for words
that name small things. Times are of this machine.

Example::

    python lab/scripts/choose_resolution.py --data DATA --sizes 224,336,384 --write research/results/lab-resolution.json
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import time
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import torch
from torch import Tensor, nn
from torch.nn import functional
from torino_lab.training.features import clip_encoder
from torino_lab.training.questions import mentioned
from torino_lab.weights import clip_folder

from torino.datasets.images import open_image

SMALL = {"ball", "hat", "helmet", "cup", "bottle", "frisbee", "skateboard", "sign", "flower", "tie", "phone", "book"}


def read(data: Path, files: list[str], most: int) -> tuple[list[bytes], list[set[str]]]:
    """Photos and the things that their captions mention."""
    images: list[bytes] = []
    found: list[set[str]] = []
    for file in files:
        table = pq.read_table(data / f"{file}.parquet", columns=["image", "captions"]).slice(0, most)
        images += table.column("image").to_pylist()
        found += [mentioned(captions) for captions in table.column("captions").to_pylist()]
    return images, found


def extract(images: list[bytes], folder: Path, size: int) -> tuple[Tensor, float]:
    """Patches of all images in half precision, and seconds per image."""
    encode = clip_encoder(folder, -2, size)
    parts: list[Tensor] = []
    began = time.perf_counter()
    for start in range(0, len(images), 8):
        opened = [open_image(image) for image in images[start : start + 8]]
        parts.append(encode(opened)[:, 1:].half())
    return torch.cat(parts), (time.perf_counter() - began) / len(images)


def labels(found: list[set[str]], words: list[str]) -> Tensor:
    return torch.tensor([[float(word in things) for word in words] for things in found])


def train_head(patches: Tensor, targets: Tensor, steps: int, seed: int) -> nn.Linear:
    """Fit word scores per patch, pooled over patches."""
    torch.manual_seed(seed)
    head = nn.Linear(patches.shape[-1], targets.shape[1])
    optimiser = torch.optim.AdamW(head.parameters(), lr=2e-3, weight_decay=0.05)
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = 2e-3 * min(1.0, (step + 1) / 20) * 0.5 * (1 + math.cos(math.pi * step / steps))
        chosen = torch.randint(len(patches), (32,))
        loss = functional.binary_cross_entropy_with_logits(scores(head, patches[chosen]), targets[chosen])
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
    return head


def scores(head: nn.Linear, patches: Tensor) -> Tensor:
    normal = functional.layer_norm(patches.float(), patches.shape[-1:])
    return head(normal).logsumexp(1) - math.log(patches.shape[1])


def areas(values: Tensor, targets: Tensor) -> list[float]:
    """Area under the ROC curve of each column."""
    ranks = values.argsort(0).argsort(0).float() + 1
    positive = targets.sum(0)
    negative = len(targets) - positive
    return ((ranks * targets).sum(0) - positive * (positive + 1) / 2).div(positive * negative).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with the parquet files")
    parser.add_argument("--cache", type=Path, default=Path("build/train/weights"), help="folder for converted weights")
    parser.add_argument("--sizes", default="224,336,384")
    parser.add_argument("--photos", type=int, default=1500, help="training photos")
    parser.add_argument("--dev", type=int, default=500, help="dev photos")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--write", type=Path, help="JSON file for the result")
    args = parser.parse_args()
    torch.set_num_threads(2)
    train_images, train_found = read(args.data, ["cococap-train", "flickr8k-train-0"], args.photos // 2)
    dev_images, dev_found = read(args.data, ["cococap-dev", "flickr8k-dev"], args.dev)
    often = Counter(word for found in train_found for word in found)
    seen = Counter(word for found in dev_found for word in found)
    words = sorted(word for word in often if often[word] >= 15 and seen[word] >= 5)
    small = [number for number, word in enumerate(words) if word in SMALL]
    targets, wanted = labels(train_found, words), labels(dev_found, words)
    rows = []
    for size in map(int, args.sizes.split(",")):
        patches, seconds = extract([*train_images, *dev_images], clip_folder(args.cache), size)
        train, dev = patches[: len(train_images)], patches[len(train_images) :]
        mean = torch.zeros(len(words))
        for seed in range(3):
            head = train_head(train, targets, args.steps, seed)
            with torch.no_grad():
                values = torch.cat([scores(head, part) for part in dev.split(64)])
            mean += torch.tensor(areas(values, wanted)) / 3
        row = {
            "size": size,
            "tokens": patches.shape[1],
            "auc": round(float(mean.mean()), 4),
            "auc_small": round(float(mean[small].mean()), 4),
            "tower_seconds": round(seconds, 3),
        }
        rows.append(row)
        print(json.dumps(row), flush=True)
    result = {
        "rows": rows,
        "words": len(words),
        "small_words": [words[n] for n in small],
        "train_photos": len(train_images),
        "dev_photos": len(dev_images),
        "seeds": 3,
        "torch": torch.__version__,
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "date": time.strftime("%Y-%m-%d"),
        "script": "lab/scripts/choose_resolution.py",
    }
    if args.write:
        args.write.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
