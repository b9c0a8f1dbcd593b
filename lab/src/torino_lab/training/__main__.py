"""Train the miniature LLaVA on two cores; killed runs continue from their last checkpoint.

Example::

    python -m torino_lab.training --data DATA --work build/train

    # continue from exported weights, which have no state of the optimiser
    python -m torino_lab.training --data DATA --work build/train --start lab/interim --first-step 375
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

import torch

from torino_lab.corpus import read_photos as read_captioned
from torino_lab.training.features import Features, clip_encoder, fill_all
from torino_lab.training.generated import write_generated
from torino_lab.training.precision import best_dtype
from torino_lab.training.questions import Photo, add_presence, read_photos
from torino_lab.training.trainer import Reader, Stage, Trainer
from torino_lab.weights import clip_folder, read_smollm2

CAPTIONED = ["flickr8k-train-0", "flickr8k-train-1", "flickr8k-train-2", "cococap-train"]
GENERATED = "generated-train"
TRAIN = [*CAPTIONED, "cocovqa-train", "daquar-train", "scenetext-train", GENERATED]
WATCH = {"cocovqa-dev": 96, "flickr8k-dev": 48, "daquar-dev": 24, "scenetext-dev": 16}
SHARE = {"flickr8k": 0.6, "scenetext": 0.3}
TOWER = "clip-vit-base-patch16:224:-2"
SIZE, LAYER = 224, -2


def main() -> None:
    """Run all stages that are not done yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with the parquet files")
    parser.add_argument("--work", type=Path, required=True, help="folder for features, checkpoints and the log")
    parser.add_argument("--cache", type=Path, help="folder for converted weights (default: WORK/weights)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rank", type=int, default=32, help="rank of the updates of the language model")
    parser.add_argument("--caption-steps", type=int, default=500)
    parser.add_argument("--tune-steps", type=int, default=4000)
    parser.add_argument("--decay-steps", type=int, default=800, help="steps at the end with a falling learning rate")
    parser.add_argument("--start", type=Path, help="folder with exported weights: skip the first two stages")
    parser.add_argument("--first-step", type=int, default=0, help="with --start: number of the first step")
    parser.add_argument("--rope-theta", type=float, help="base of the rotary position embeddings (default: SmolLM2's)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only-features", action="store_true", help="compute the tower's features and stop")
    args = parser.parse_args()
    if args.first_step and not args.start:
        parser.error("--first-step continues from exported weights: give --start, or omit it.")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(args.threads)
    cache = args.cache or args.work / "weights"
    names = [*TRAIN, *WATCH]
    files = {name: args.data / f"{name}.parquet" for name in names}
    files[GENERATED] = args.work / f"{GENERATED}.parquet"
    if not files[GENERATED].exists():
        logging.info("Drawing images …")
        write_generated(read_captioned([files[name] for name in CAPTIONED]), files[GENERATED], args.seed)
    encode = clip_encoder(clip_folder(cache), LAYER, SIZE)
    folder = args.work / "features"
    features = {name: Features(folder, file, (197, 768), TOWER, encode) for name, file in files.items()}
    if args.only_features:
        fill_all([*features.values()], encode, logging.info)
        return
    photos = add_presence(read_photos([files[name] for name in TRAIN]), args.seed)
    held_out: list[Photo] = []
    for name, count in WATCH.items():
        held_out += add_presence(read_photos([files[name]]), 0)[:count]

    language, tokenizer = read_smollm2(args.rope_theta)
    torch.manual_seed(args.seed)
    reader = Reader(language, best_dtype(), args.rank)
    trainer = Trainer(args.work, reader, tokenizer, photos, features, SHARE, held_out, args.seed)
    tune = Stage(
        "tune", args.tune_steps, projector_rate=2e-4, lora_rate=3e-4, decay=args.decay_steps, first=args.first_step
    )
    if args.start:
        trainer.start_from(args.start)
    else:
        trainer.align()
        trainer.run(Stage("captions", args.caption_steps, questions=2, projector_rate=1e-3))
    trainer.run(tune)


if __name__ == "__main__":
    main()
