"""Write the trained parts of a checkpoint as the package ships them: projector and low-rank updates, half precision.

Example::

    python -m torino_lab.training.export build/train/tune.safetensors lab/src/torino_lab/data/lab
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from torino.core.io import write_json
from torino_lab.assembly import ADAPTER, LANGUAGE, PROJECTOR
from torino_lab.training.trainer import ROPE_THETA, Projector, lora_config


def export(checkpoint: Path, folder: Path) -> None:
    """Write ``projector.safetensors`` and a peft adapter.

    Parameters
    ----------
    checkpoint : Path
        A finished stage or a partial checkpoint of the trainer.
    folder : Path
        Where the files go; existing ones are replaced.
    """
    tensors = load_file(checkpoint)
    weights = {
        name.removeprefix("projector."): value for name, value in tensors.items() if name.startswith("projector.")
    }
    projector = Projector(weights["linear_2.weight"].shape[0])
    projector.load_state_dict(weights)
    updates = {
        name.removeprefix("language.").replace(".default.", "."): value
        for name, value in tensors.items()
        if ".lora_" in name and not name.startswith("optimiser.")
    }
    rank = next(len(value) for name, value in updates.items() if "lora_A" in name)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(_half(projector.folded()), folder / PROJECTOR)
    save_file(_half(updates), folder / ADAPTER)
    theta = float(tensors.get("rope_theta", ROPE_THETA))
    if theta == ROPE_THETA:
        (folder / LANGUAGE).unlink(missing_ok=True)
    else:
        write_json(folder / LANGUAGE, {"rope_theta": theta})
    config = lora_config(rank)
    config.base_model_name_or_path = "HuggingFaceTB/SmolLM2-135M-Instruct"
    config.inference_mode = True
    config.save_pretrained(str(folder))


def _half(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    half = {name: value.detach().to(torch.float16).contiguous() for name, value in tensors.items()}
    for name, value in half.items():
        if not value.isfinite().all():
            raise ValueError(f"{name} does not fit into half precision.")
    return half


def main() -> None:
    """Export a checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="a finished stage or a partial checkpoint of the trainer")
    parser.add_argument("folder", type=Path, help="where the files go; existing ones are replaced")
    args = parser.parse_args()
    export(args.checkpoint, args.folder)


if __name__ == "__main__":
    main()
