r"""Test concept names on dev photos: choose between two names for patches that are shown.

``sheets`` draws trials on contact sheets, without the answers, and writes ``trials.json``. Give each trial in it a ``choice``:
``a``, ``b`` or ``?``. ``score`` compares the choices on the sheets and of CLIP on crops with the names, for the names of the SAE
and for names that captions of the top photos give, and writes JSON.

Examples
--------
::

    python lab/scripts/test_names.py sheets --data DATA --work build/train --sae SAE -o build/names
    python lab/scripts/test_names.py score --data DATA --work build/train --sae SAE -o build/names \
        --labels research/results/concept-name-labels.json --write research/results/concept-names.json
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors import safe_open
from torino_lab.name_trials import (
    SHOWN,
    CropJudge,
    Places,
    Trial,
    crop_patch,
    draw_sheet,
    draw_trials,
    embed_crops,
    find_places,
    fit_judge,
    text_judge,
)
from torino_lab.naming import FeaturePhotos, photo_texts, pick_photos
from torino_lab.prototypes import JointSpace
from torino_lab.training.__main__ import CAPTIONED, LAYER, SIZE, TOWER
from torino_lab.training.features import Features, clip_encoder
from torino_lab.weights import clip_folder

from torino import SAE
from torino.core.io import write_json
from torino.evaluation.latency.probes import machine, versions
from torino.interpret.naming import extract_words, name_concepts
from torino.interpret.top_activations import collect_top_activations

DEV = ["flickr8k-dev", "cocovqa-dev", "cococap-dev"]
PATCHES, CAPTIONS = "patches", "captions"
ROWS = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("command", choices=["sheets", "score"])
    add("--data", type=Path, required=True, help="folder with the parquet files")
    add("--work", type=Path, required=True, help="folder of python -m torino_lab.training")
    add("--sae", type=Path, required=True, help="folder of the SAE with names.json")
    add("--output", "-o", type=Path, required=True, help="folder for sheets and intermediate results")
    add("--photos", type=int, default=4000, help="training photos for names from captions (default: %(default)s)")
    add("--concepts", type=int, default=60, help="concepts on the sheets, once per set of names (default: %(default)s)")
    add(
        "--trials",
        type=int,
        default=200,
        help="score: concepts per set of names, judged by CLIP (default: %(default)s)",
    )
    add("--labels", type=Path, help="score: trials with the choices made on the sheets")
    add("--write", type=Path, help="score: JSON file of the result")
    add("--seed", type=int, default=0)
    add("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    begun = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - begun:6.0f} s  {text}", file=sys.stderr, flush=True)

    folder = clip_folder(args.work / "weights")
    encode = clip_encoder(folder, LAYER, SIZE)
    sae = SAE.load(args.sae)
    photos = open_photos(args, DEV, encode, None)
    say(f"{len(photos)} dev photos")
    places = find_places(sae, photos)
    names, similar = read_names(args, sae, encode, say)
    args.output.mkdir(parents=True, exist_ok=True)
    if args.command == "sheets":
        blind = make_blind(names, similar, places, args)
        for start in range(0, len(blind), ROWS):
            rows = [(number, trial.places, shown) for number, (_, trial, shown) in enumerate(blind)][start:][:ROWS]
            draw_sheet(rows, photos).save(args.output / f"sheet-{start // ROWS:02d}.png")
        listed = [
            {"names": kind, "latent": trial.latent, "a": first, "b": second, "right": trial.right, "choice": None}
            for kind, trial, (first, second) in blind
        ]
        write_json(args.output / "trials.json", {"seed": args.seed, "trials": listed})
        say(f"{len(blind)} trials on {-(-len(blind) // ROWS)} sheets")
        return
    space = JointSpace(folder)
    result: dict[str, Any] = {
        "format": "torino-results/1",
        "name": "concept-names",
        "title": "Concept names: choices between two names for patches of dev photos",
        "report": None,
        "notes": ["An undecided trial on the sheets counts half. Shown in docs/lab.md; there is no report."],
        "command": "python lab/scripts/test_names.py score",
        "named": {kind: len(given) for kind, given in names.items()},
        "dev_photos": len(photos),
        "sheets": score_sheets(json.loads(args.labels.read_text())["trials"], names) if args.labels else None,
        "clip": score_clip(args, space, encode, photos, places, names, similar, say),
        "seed": args.seed,
        "machine": machine(),
        "versions": versions(),
        "date": time.strftime("%Y-%m-%d"),
    }
    if args.write:
        write_json(args.write, result)
    print(json.dumps({key: result[key] for key in ("named", "sheets", "clip")}, indent=2))


def open_photos(args: argparse.Namespace, sources: list[str], encode: Any, count: int | None) -> FeaturePhotos:
    files = [args.data / f"{name}.parquet" for name in sources]
    features = [Features(args.work / "features", file, (197, 768), TOWER, encode) for file in files]
    total = sum(source.rows for source in features)
    return FeaturePhotos(features, pick_photos(features, count or total, args.seed))


def read_names(
    args: argparse.Namespace, sae: SAE, encode: Any, say: Any
) -> tuple[dict[str, dict[int, str]], dict[int, set[str]]]:
    """Return the names of things of both kinds, and all words that may name a latent."""
    entries = json.loads((args.sae / "names.json").read_text())["names"]
    things = {int(latent): entry for latent, entry in entries.items() if entry["kind"] == "thing"}
    by_patches = {latent: entry["name"] for latent, entry in things.items()}
    similar = {latent: {word for word, _ in entry["candidates"]} for latent, entry in things.items()}
    train = open_photos(args, CAPTIONED, encode, args.photos)
    top = collect_top_activations(sae, train, output=args.output / "top")
    texts = photo_texts(train.sources)
    by_captions = name_concepts(top, [texts[source][row] for source, row in train.picks])
    say(f"{len(by_patches)} names from patches, {len(by_captions)} from captions")
    for latent, name in by_captions.items():
        similar.setdefault(latent, set()).update(word for word, _ in name.words)
    return {PATCHES: by_patches, CAPTIONS: {latent: name.words[0][0] for latent, name in by_captions.items()}}, similar


Blind = list[tuple[str, Trial, tuple[str, str]]]


def make_blind(
    names: dict[str, dict[int, str]], similar: dict[int, set[str]], places: Places, args: argparse.Namespace
) -> Blind:
    """Choose concepts with both kinds of names, and mix the trials and the order of the two names."""
    rng = Random(f"{args.seed}:sheets")
    both = sorted(set(names[PATCHES]) & set(names[CAPTIONS]))
    trials = {
        kind: {t.latent: t for t in draw_trials(given, similar, places, both, "same photos", args.seed)}
        for kind, given in names.items()
    }
    usable = sorted(set(trials[PATCHES]) & set(trials[CAPTIONS]))
    chosen = rng.sample(usable, min(args.concepts, len(usable)))
    mixed = [(kind, trials[kind][latent]) for kind in trials for latent in chosen]
    rng.shuffle(mixed)
    return [
        (kind, trial, (trial.right, trial.wrong) if rng.random() < 0.5 else (trial.wrong, trial.right))
        for kind, trial in mixed
    ]


def score_sheets(trials: list[dict[str, Any]], names: dict[str, dict[int, str]]) -> dict[str, Any]:
    """Compare the choices on the sheets with the names; an undecided trial counts half.

    Trials of concepts that have another name now, or none, are left out.
    """
    result: dict[str, Any] = {}
    for kind in (PATCHES, CAPTIONS):
        own = [t for t in trials if t["names"] == kind and names[kind].get(t["latent"]) == t["right"]]
        points = [0.5 if t["choice"] == "?" else float(t[t["choice"]] == t["right"]) for t in own]
        result[kind] = {
            "accuracy": sum(points) / len(points),
            "trials": len(points),
            "undecided": sum(point == 0.5 for point in points),
        }
    return result


def score_clip(
    args: argparse.Namespace,
    space: JointSpace,
    encode: Any,
    photos: FeaturePhotos,
    places: Places,
    names: dict[str, dict[int, str]],
    similar: dict[int, set[str]],
    say: Any,
) -> dict[str, Any]:
    """Let CLIP choose between names by crops, with words learned from dev photos and with CLIP's text vectors."""
    rng = Random(f"{args.seed}:clip")
    frequent = {
        kind: [latent for latent in sorted(given) if len(places.by_latent.get(latent, ())) >= SHOWN]
        for kind, given in names.items()
    }
    chosen = {kind: rng.sample(latents, min(args.trials, len(latents))) for kind, latents in frequent.items()}
    trials = {
        (kind, distractor): draw_trials(given, similar, places, chosen[kind], distractor, args.seed)
        for kind, given in names.items()
        for distractor in ("other", "same photos")
    }
    both = [trial for trial in trials[PATCHES, "other"] if trial.latent in names[CAPTIONS]]
    versus = [replace(t, wrong=names[CAPTIONS][t.latent]) for t in both if names[CAPTIONS][t.latent] != t.right]
    shown = sorted({place for some in trials.values() for trial in some for place in trial.places})
    say(f"{len(shown)} crops")
    crops = [crop_patch(photos.images(photo), patch)[0] for photo, patch in shown]
    embeddings = embed_crops(space, encode, crops)
    at = {place: number for number, place in enumerate(shown)}
    texts = photo_texts(photos.sources)
    words = extract_words([texts[source][row] for source, row in photos.picks])
    judges: dict[str, CropJudge] = {"words of dev photos": fit_judge(space, photos, words, embeddings)}
    with safe_open(args.data / "clip-vit-b16-coco80.safetensors", "pt") as file:
        (key,) = file.keys()
        vectors, metadata = file.get_tensor(key).float(), file.metadata()
    judges["text vectors of CLIP"] = text_judge(json.loads(metadata["names"]), vectors, embeddings)
    result: dict[str, Any] = {}
    for judge_name, judge in judges.items():
        for (kind, distractor), some in trials.items():
            choices = [judge.choose(embeddings[[at[p] for p in t.places]], t.right, t.wrong) for t in some]
            known = [choice for choice in choices if choice is not None]
            accuracy = sum(known) / len(known) if known else None
            result.setdefault(judge_name, {"words": len(judge.words)}).setdefault(kind, {})[distractor] = {
                "accuracy": accuracy,
                "trials": len(known),
            }
        choices = [judge.choose(embeddings[[at[p] for p in t.places]], t.right, t.wrong) for t in versus]
        known = [choice for choice in choices if choice is not None]
        result[judge_name]["patches preferred to captions"] = {
            "share": sum(known) / len(known) if known else None,
            "trials": len(known),
        }
    return result


if __name__ == "__main__":
    main()
