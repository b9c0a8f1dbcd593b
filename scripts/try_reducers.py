r"""Try reducers on the lab's reader, quickly: all questions about a picture in one pass, on kept features.

The pictures are made of dev photos. For choosing, not for reporting: an answer counts where the model would write each
of its tokens after the right ones before, and beside it stands how surprised it is by the right answer, which moves
with less noise. What is reported comes from ``torino eval``.

Examples
--------
::

    python scripts/try_reducers.py --work build/lab --sae build/lab/saes/all/x16 \
        'torino-m(k=2, delta=2)' 'torino-x(least=0.3)' --budgets 192,64 divprune torino-x
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
from lab_reader import Reader
from train_lab import judge, make_tokenizer, questions, shards

from torino import SAE, RawEmbedding, VisualTokens, make
from torino.errors import TorinoError
from torino.evaluate.settings import takes
from torino.files import write_json
from torino.reducers import Reducer

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("specs", nargs="+", help="reducers; with --budgets those without a budget of their own get each of them")
    add("--work", type=Path, required=True, help="folder of scripts/train_lab.py, with dev features of its stage check")
    add("--sae", type=Path, help="SAE of those that read concepts")
    add("--budgets", default="", help="separated by commas")
    add("--pictures", type=int, default=150)
    add("--width", type=int, default=256)
    add("--layers", type=int, default=6)
    add("--output", type=Path, help="JSON, added to")
    args = parser.parse_args()
    args.vocabulary = 0
    tokenizer = make_tokenizer(args)
    model = Reader(tokenizer.get_vocab_size(), args).eval()
    held = torch.load(args.work / "checkpoint.pt", weights_only=True)
    model.load_state_dict(held["model"])
    dev = args.work / "dev"
    pictures = [torch.from_numpy(np.array(one)).float() for file in shards(dev) for one in np.load(file, mmap_mode="r")]
    pictures = pictures[: args.pictures]
    asked = [sets[0] for sets in questions(dev)][: args.pictures]
    images = [VisualTokens(one, (24, 24)) for one in pictures]
    sae = SAE.load(args.sae) if args.sae else RawEmbedding()
    if isinstance(sae, SAE):
        sae.screen = "off"
    told = json.loads(args.output.read_text()) if args.output and args.output.exists() else {}
    wanted: list[tuple[str, Reducer | None]] = [("full", None)]
    budgets = [int(one) for one in args.budgets.split(",") if one]
    for spec in args.specs:
        name = spec.partition("(")[0]
        own = {"sae": sae} if takes(name, "sae") else {}
        for budget in [None] if "budget=" in spec or not budgets or "least=" in spec else budgets:
            extra = {} if budget is None else {"budget": budget}
            reducer = make(spec, **own, **extra)
            wanted.append((reducer.spec, reducer))
    kinds: list[str] = []
    for label, reducer in wanted:
        key = f"{label} @ {held['step']}"
        if key not in told:
            begin = time.monotonic()
            try:
                plans = None if reducer is None else reducer.plan_batch(images)
            except TorinoError as error:
                print(f"{label}: {error}", file=sys.stderr)
                continue
            found = judge(model, tokenizer, pictures, asked, plans)
            told[key] = {
                "tokens": 576 if plans is None else float(plans.lengths.float().mean()),
                "seconds": round(time.monotonic() - begin, 1),
                "kinds": {
                    kind: [float(np.mean([g for g, _ in v])), float(np.mean([s for _, s in v])), len(v)]
                    for kind, v in sorted(found.items())
                },
            }
            if args.output:
                write_json(args.output, told)
        one = told[key]
        kinds = kinds or list(one["kinds"])
        right = np.mean([one["kinds"][kind][0] for kind in kinds])
        surprise = np.mean([min(one["kinds"][kind][1], 20) for kind in kinds])
        print(f"{one['tokens']:7.1f}  right {100 * right:5.1f}  surprise {surprise:6.3f}  {label}", flush=True)


if __name__ == "__main__":
    main()
