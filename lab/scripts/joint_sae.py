r"""Choose the space of a joint SAE by measurement: train one in each space and compare their shared concepts.

In each space (the input of the language model after the projector, and its blocks) an SAE is trained on the same photos
and captions, and measured on photos that nothing was trained on: reconstruction, latents of both modalities, of one,
and of the same meaning in both, against exchanged captions. The space with the largest share of latents of the same
meaning is chosen. The lab's CLIP has no text tower, so the space ``clip`` is left out. A killed run resumes.

Examples
--------
::

    python lab/scripts/joint_sae.py --data DATA --work build/joint -o research/results/joint-sae.json
    python lab/scripts/joint_sae.py --data DATA --work build/joint --photos 40 --heldout 40 --steps 100 -o build/try.json
"""

from __future__ import annotations

import argparse
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from torino import SAE
from torino.core.io import write_json
from torino.datasets import open_photos
from torino.datasets.images import as_seen
from torino.evaluation.latency.probes import machine, versions
from torino.interpret.shared_concepts import find_shared_concepts
from torino.interpret.shared_sheet import draw_shared_sheet
from torino.sae.joint import JointSAE
from torino.training.config import TrainConfig
from torino.training.joint import JointRows, collect_rows
from torino.training.trainer import train
from torino.viz.draw import save_picture
from torino.vlm import load_vlm
from torino.vlm.joint_space import open_joint_space


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", type=Path, required=True, help="folder with the parquet files")
    add("--work", type=Path, required=True, help="folder for rows, SAEs and sheets")
    add("--model", default="lab")
    add("--spaces", nargs="+", default=["projected", "block:0", "block:2", "block:5", "block:10"])
    add("--train", default="flickr8k-train-0", help="photos and captions to train on (default: %(default)s)")
    add("--test", default="flickr8k-dev", help="photos and captions to measure on (default: %(default)s)")
    add("--photos", type=int, default=2000)
    add("--heldout", type=int, default=500)
    add("--patches", type=int, default=48, help="random patches of each photo (default: %(default)s)")
    add("--expansion", type=float, default=8)
    add("--steps", type=int, default=3000)
    add("--batch", type=int, default=2048)
    add("--seed", type=int, default=0)
    add("-o", "--output", type=Path, required=True, help="JSON file to write")
    args = parser.parse_args()
    vlm = load_vlm(args.model)
    photos = open_photos(args.data / f"{args.train}.parquet", limit=args.photos)
    heldout = open_photos(args.data / f"{args.test}.parquet", limit=args.heldout)
    results: list[dict[str, Any]] = []
    for name in args.spaces:
        space, folder = open_joint_space(name, vlm), args.work / name.replace(":", "-")
        stored = folder / "rows.safetensors"
        if not stored.is_file():
            collect_rows(space, photos, tokens=f"random:{args.patches}", encoder=args.model, seed=args.seed).save(
                stored
            )
        config = TrainConfig(
            kind="matryoshka", expansion=args.expansion, k=20, steps=args.steps, batch=args.batch, seed=args.seed
        )
        trained = train(JointRows.load(stored, seed=args.seed), config, folder / "sae")
        sae = SAE.load(trained.folder)
        assert isinstance(sae, JointSAE)
        found = find_shared_concepts(sae, space, heldout, seed=args.seed)

        def load(number: int, space: Any = space) -> tuple[Any, int]:
            data = heldout[number].data
            inputs = vlm.inputs(data, "?")
            return as_seen(inputs.tensors, vlm.processor, inputs.images)[0], len(space.image_rows(data))

        if found.concepts:
            save_picture(draw_shared_sheet(found.concepts[:24], load, title=name), folder / "shared-concepts.png")
        values = found.to_dict()
        values["concepts"] = values["concepts"][:50]
        results.append({"space": name, "fvu": trained.metrics["fvu"], "dead": trained.metrics["dead"], **values})
        print(f"{name}: FVU {trained.metrics['fvu']:.3f}. {found.summary()}", flush=True)
        best = max(results, key=lambda row: row["same_meaning"] / row["latents"])
        report = {
            "command": "python lab/scripts/joint_sae.py --data DATA --work WORK",
            "settings": {
                key: value for key, value in vars(args).items() if key not in ("data", "work", "output", "spaces")
            },
            "chosen": best["space"],
            "spaces": results,
            "hardware": machine(),
            "versions": versions(),
            "date": datetime.now(UTC).date().isoformat(),
        }
        write_json(args.output, report)
    print(f"Chosen: {report['chosen']}. Wrote {args.output}.")


if __name__ == "__main__":
    main()
