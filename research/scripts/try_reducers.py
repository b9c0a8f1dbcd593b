r"""Try reducers on the lab's reader, quickly: all questions about a picture in one pass, on kept features.

The pictures are made of dev photos. For choosing, not for reporting: an answer counts where the model would write each
of its tokens after the right ones before, and beside it stands the surprise, how many nats the right answer costs,
which moves with less noise. Questions come in three families, about whole photos, about cells of collages, about
small and drawn things; what the lab's model has not learned is left out. Means are over questions, then over
families; then comes the difference to ``--against`` with its 95 % interval, pictures drawn anew together for both; a *
stands where the interval of a family's own leaves 0 out. What is reported as a result comes from ``torino eval``. The
tower looks at the pictures once; what it saw is kept in ``--work``.

Examples
--------
::

    python research/scripts/try_reducers.py --photos dev.parquet --budgets 192,64 divprune torino-x 'torino-x(mode="prune")'
    python research/scripts/try_reducers.py --photos dev.parquet 'torino-m(k=2, delta=2)' 'torino-x(min_gain=0.3)' --output try.json
    python research/scripts/try_reducers.py --photos dev.parquet --budgets 64 torino-x 'torino-x(pooled=True)' --fit 40
    python research/scripts/try_reducers.py --photos dev.parquet --budgets 192,64 torino-x --mass
    python research/scripts/try_reducers.py --photos dev.parquet --work build/lab2 --model build/lab2/model torino-x
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np
import torch
from tokenizers import Tokenizer
from torino_lab.corpus import Corpus, read_photos
from torino_lab.model import SHIPPED

from torino import SAE, RawEmbedding, VisualTokens, make
from torino.core.errors import TorinoError
from torino.core.io import write_json
from torino.core.reduction import Reduction
from torino.evaluation.protocol import has_parameter
from torino.reducers import Reducer
from torino.reducers.calibration import calibrate_cover
from torino.reducers.torino_x import TorinoX
from torino.vlm.adapters.base import Positions, position_mode

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "lab" / "scripts"), str(ROOT / "research" / "reducers")]

from lab_reader import read_reader  # noqa: E402
from train_lab import judge, look, questions, shards  # noqa: E402

FAMILIES = {
    "photo": "action choice choice-zh colour count doing kind presence quality scene who",
    "cell": "cell cell-colour cell-presence cell-scene photos photos-of which-cell",
    "small": "shape shape-colour shape-count shape-presence sign-colour sign-count sign-kind sign-place size small "
    "small-count",
}
FAMILY = {kind: family for family, kinds in FAMILIES.items() for kind in kinds.split()}
DRAWS = 1000
FITTED, MASS = " fitted", " with mass"


class Bench:
    """The reader, pictures and questions: what reducers are tried on.

    Parameters
    ----------
    model : Path
        Folder that the stage save of ``lab/scripts/train_lab.py`` wrote, or what ships with torino.
    photos : Path
        Photos with captions, not trained on; read where ``work`` lacks pictures.
    work : Path
        Folder for what the tower saw, the one of ``lab/scripts/train_lab.py`` or another.
    pictures, more : int
        To be asked about, and further ones that lengths are fitted on.
    """

    def __init__(self, model: Path, photos: Path, work: Path, pictures: int, more: int = 0) -> None:
        self.model, facts = read_reader(model)
        self.tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self.step = int(facts["step"])
        corpus = Corpus(read_photos([photos]), seed=int(facts.get("seed", 0)) + 1, length=pictures + more)
        look(corpus, work / "dev", int(facts["block"]))
        self.fingerprint = f"{_hash(model / 'reader.safetensors')} on {corpus.fingerprint}"
        seen = [np.load(file, mmap_mode="r") for file in shards(work / "dev")]
        every = [torch.from_numpy(np.array(one)).float() for part in seen for one in part]
        self.pictures, self.others = every[:pictures], every[pictures : pictures + more]
        self.images = [VisualTokens(one, (24, 24)) for one in self.pictures]
        self.asked = [sets[0] for sets in questions(work / "dev")][:pictures]
        self.asked = [[one for one in some if one["kind"] in FAMILY] for some in self.asked]

    def fitted(self, reducer: TorinoX) -> TorinoX:
        """The reducer with the threshold that leaves its budget on average, on pictures that nothing is asked about."""
        assert reducer.budget is not None
        others = [VisualTokens(one, (24, 24)) for one in self.others]
        found = calibrate_cover(others, reducer.budget, reducer=reducer)
        return replace(reducer, budget=None, min_gain=found.min_gain)

    def run(self, plans: Sequence[Reduction] | None, original: bool = False, mass: bool = False) -> dict[str, Any]:
        """Ask all questions; right or wrong, and surprise, in one order for all."""
        begin = time.monotonic()
        found = judge(self.model, self.tokenizer, self.pictures, self.asked, plans, original, mass)
        return {
            "tokens": 576.0 if plans is None else float(np.mean([len(plan.anchor) for plan in plans])),
            "seconds": round(time.monotonic() - begin, 1),
            "right": [int(one.right) for one in found],
            "surprise": [round(min(one.surprise, 20.0), 5) for one in found],
        }

    def order(self) -> tuple[np.ndarray, np.ndarray]:
        """Picture and family, as a number, of each question."""
        told = [(i, list(FAMILIES).index(FAMILY[one["kind"]])) for i, some in enumerate(self.asked) for one in some]
        return np.array([i for i, _ in told]), np.array([family for _, family in told])


class Table:
    """Prints one line for each, with the difference to a first one."""

    def __init__(self, bench: Bench) -> None:
        self.picture, self.family = bench.order()
        draws = np.random.default_rng(0).integers(0, len(bench.pictures), (DRAWS, len(bench.pictures)))
        self.weight = np.stack([np.bincount(one, minlength=len(bench.pictures)) for one in draws])[:, self.picture]

    def means(self, value: np.ndarray, weight: np.ndarray) -> np.ndarray:
        """Weighted means over questions, by family, shape (draws, families)."""
        parts = [self.family == one for one in range(len(FAMILIES))]
        return np.stack([weight[:, at] @ value[at] / np.maximum(weight[:, at].sum(1), 1) for at in parts], 1)

    def line(self, label: str, one: dict[str, Any], first: dict[str, Any] | None) -> str:
        """Tokens, share right, surprise with its difference, and by family, * where it differs by more than chance."""
        once = np.ones((1, len(self.picture)))
        right, surprise = np.array(one["right"], float), np.array(one["surprise"])
        by_family = self.means(surprise, once)[0]
        apart, marks = " " * 23, [" "] * len(FAMILIES)
        if first is not None and first is not one:
            change = surprise - np.array(first["surprise"])
            drawn = self.means(change, self.weight)
            low, high = np.quantile(drawn.mean(1), (0.025, 0.975))
            apart = f"{self.means(change, once).mean():+.3f} [{low:+.3f}, {high:+.3f}]"
            lows, highs = np.quantile(drawn, (0.025, 0.975), axis=0)
            marks = np.where((lows > 0) | (highs < 0), "*", " ").tolist()
        told = zip(FAMILIES, by_family, marks, strict=True)
        parts = " ".join(f"{name} {value:.3f}{mark}" for name, value, mark in told)
        return (
            f"{one['tokens']:6.1f}  right {100 * self.means(right, once).mean():5.1f}  surprise {by_family.mean():.3f} "
            f" {apart} {parts}  {label}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("specs", nargs="+", help="reducers; with --budgets those without a budget of their own get each of them")
    add("--photos", type=Path, required=True, help="photos with captions, not trained on: a parquet file")
    add(
        "--model",
        type=Path,
        default=SHIPPED,
        help="folder that lab/scripts/train_lab.py saved to (default: what ships)",
    )
    add("--work", type=Path, default=ROOT / "build/lab", help="folder for what the tower saw (default: %(default)s)")
    add("--sae", type=Path, help="of those that read concepts; or 'raw' (default: the model's own)")
    add("--levels", type=int, help="take only the first nested groups of a Matryoshka SAE, the coarse concepts")
    add("--budgets", default="", help="separated by commas")
    add("--against", help="spec that the others are compared with, budget by budget; by default the first")
    add(
        "--positions",
        choices=get_args(Positions),
        default="auto",
        help="how what is left is numbered (default: %(default)s)",
    )
    add("--mass", action="store_true", help="also each as if a token stood there once for each of its patches")
    add("--pictures", type=int, default=300)
    add("--fit", type=int, default=0, help="torino-x also with lengths of its own, fitted on so many other pictures")
    add("--threads", type=int, default=2)
    add("--output", type=Path, help="JSON, added to; what is in it, by the same code, is not tried again")
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT / "research/reducers"))
    import torino_steps  # noqa: F401 (registers an ablation)
    import torino_x_ablations  # noqa: F401 (registers an ablation)

    if args.fit and not args.budgets:
        parser.error("--fit needs --budgets: lengths are fitted to them")
    torch.set_num_threads(args.threads)
    args.sae = args.model / "sae" if args.sae is None else args.sae
    bench = Bench(args.model, args.photos, args.work, args.pictures, args.fit)
    sae = RawEmbedding() if str(args.sae) == "raw" else SAE.load(args.sae, levels=args.levels)
    named = f"{args.sae.name} {'' if str(args.sae) == 'raw' else sae_hash(args.sae)}" + (
        f", {args.levels} levels" if args.levels else ""
    )
    held: dict[str, Any] = json.loads(args.output.read_text()) if args.output and args.output.exists() else {}
    table = Table(bench)
    budgets = [int(one) for one in args.budgets.split(",") if one] or [None]
    for budget in budgets:
        first: dict[str, Any] | None = None
        specs = list(args.specs) if args.against is None else [args.against, *args.specs]
        if args.fit and budget is not None:
            own = ("pooled=", "min_gain=", "budget=")
            specs += [
                f"{spec}{FITTED}" for spec in specs if spec.startswith("torino-x") and not any(map(spec.count, own))
            ]
        specs = [spec + how for spec in specs for how in (("", MASS) if args.mass else ("",))]
        for given in dict.fromkeys(["full", *specs] if budget == budgets[0] else specs):
            spec, mass = given.removesuffix(MASS), given.endswith(MASS)
            reducer = None if spec == "full" else _made(spec.removesuffix(FITTED), sae, budget)
            if spec.endswith(FITTED):
                reducer = bench.fitted(cast(TorinoX, reducer))
            label = "full" if reducer is None else reducer.spec + MASS * mass
            mode = position_mode(args.positions, reducer)
            code = "" if reducer is None else f", code {_hash(Path(inspect.getfile(type(reducer))))}"
            key = f"{label} @ {bench.step}, {args.pictures} pictures, {named}, {mode}, {bench.fingerprint}{code}"
            if key not in held:
                try:
                    plans = None if reducer is None else reducer.plan_batch(bench.images)
                except TorinoError as error:
                    print(f"{label}: {error}", file=sys.stderr)
                    if first is None:
                        sys.exit("The others are compared with it: give another one first, or with --against.")
                    continue
                held[key] = bench.run(plans, mode == "original", mass)
                if args.output:
                    write_json(args.output, held)
            if reducer is not None and first is None:
                first = held[key]
            print(table.line(label, held[key], first), flush=True)


def _hash(file: Path) -> str:
    return blake2b(file.read_bytes(), digest_size=8).hexdigest()


def sae_hash(folder: Path) -> str:
    """Of the weights in a folder."""
    return _hash(next(iter(sorted(folder.glob("*.safetensors")))) if folder.is_dir() else folder)


def _made(spec: str, sae: SAE | RawEmbedding, budget: int | None) -> Reducer:
    own: dict[str, Any] = {"sae": sae} if has_parameter(spec.partition("(")[0], "sae") else {}
    fixed = budget is None or "budget=" in spec or "min_gain=" in spec
    return make(spec, **own, **({} if fixed else {"budget": budget}))


if __name__ == "__main__":
    main()
