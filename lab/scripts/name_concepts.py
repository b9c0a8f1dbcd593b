r"""Name the concepts of an SAE on CLIP's features by what they fire on, and write ``names.json`` beside it.

Reads the features that ``python -m torino_lab.training`` cached, and computes missing ones. Uses training photos only.

Examples
--------
::

    python lab/scripts/name_concepts.py --data DATA --work build/train --sae lab/src/torino_lab/data/lab/sae
    python lab/scripts/name_concepts.py --data DATA --work build/train --sae build/train/saes/all/x4 --photos 2000
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from collections import Counter
from pathlib import Path

import torch
from torino_lab.corpus import Corpus, read_photos
from torino_lab.naming import (
    MIN_CONFIDENCE,
    FeaturePhotos,
    collect_collages,
    fit_words,
    max_activations,
    name_latents,
    names_nothing,
    pick_photos,
)
from torino_lab.prototypes import JointSpace, Prototypes
from torino_lab.training.__main__ import CAPTIONED, LAYER, SIZE, TOWER
from torino_lab.training.features import Features, clip_encoder
from torino_lab.weights import clip_folder

from torino import SAE
from torino.sae.formats.native import read_digest, write_names

SOURCES = [*CAPTIONED, "cocovqa-train"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", type=Path, required=True, help="folder with the parquet files")
    add("--work", type=Path, required=True, help="folder of python -m torino_lab.training")
    add("--sae", type=Path, required=True, help="folder of the SAE; names.json is written there")
    add("--sources", nargs="+", default=SOURCES, help="parquet files of training photos, without their ending")
    add("--photos", type=int, default=6000, help="photos to collect word evidence from (default: %(default)s)")
    add("--word-photos", type=int, default=12000, help="photos to learn words from (default: %(default)s)")
    add("--collages", type=int, default=800, help="collages (default: %(default)s)")
    add("--min-confidence", type=float, default=MIN_CONFIDENCE, help="of a name (default: %(default)s)")
    add("--seed", type=int, default=0)
    add("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    begun = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - begun:6.0f} s  {text}", file=sys.stderr, flush=True)

    sae = SAE.load(args.sae)
    folder = clip_folder(args.work / "weights")
    encode = clip_encoder(folder, LAYER, SIZE)
    files = [args.data / f"{name}.parquet" for name in args.sources]
    sources = [Features(args.work / "features", file, (197, 768), TOWER, encode) for file in files]
    space = JointSpace(folder)
    key = hashlib.sha256(" ".join([*args.sources, str(args.seed), str(args.word_photos)]).encode()).hexdigest()[:12]
    path = args.work / f"words-{key}.safetensors"
    if path.exists():
        prototypes = Prototypes.load(path, space).without(names_nothing)
    else:
        prototypes = fit_words(space, FeaturePhotos(sources, pick_photos(sources, args.word_photos, args.seed)))
        prototypes.save(path)
    say(f"{len(prototypes.words)} words")
    photos = FeaturePhotos(sources, pick_photos(sources, args.photos, args.seed + 1))
    largest = max_activations(sae, photos)
    captioned = [file for name, file in zip(args.sources, files, strict=True) if name in CAPTIONED]
    corpus = Corpus(read_photos(captioned))
    collages = collect_collages(sae, corpus, encode, largest, count=args.collages, seed=args.seed)
    say(f"{args.collages} collages with {len(collages.labels)} labels")
    names, _ = name_latents(sae, photos, prototypes, collages, largest, min_confidence=args.min_confidence)
    entries = {latent: name.entry() for latent, name in names.items()}
    write_names(args.sae, entries, sae.latents, digest=read_digest(args.sae), **photos.metadata)
    kinds = Counter(name.kind for name in names.values())
    say(f"{len(names)} of {sae.latents} latents named: {dict(kinds)}")
    common = Counter(name.name for name in names.values()).most_common(40)
    say(", ".join(f"{name} {count}" for name, count in common))


if __name__ == "__main__":
    main()
