r"""Train the lab's projector and language model on cached features of its tower, with all visual tokens.

Stages; each resumes after a kill, and finished stages are skipped:

1. ``features``: encode the images of the corpus once; cache the tokens of the feature layer and several sets of
   questions per image, so that later epochs ask different questions.
2. ``tokenizer``: learn a small BPE from the questions and answers.
3. ``align``: train the projector and word vectors, so that patches are close to the words for what they show.
4. ``train``: train projector and Llama; several questions follow one image and do not attend to each other.
5. ``check``: measure accuracy on dev photos by kind of question, at the last checkpoint; may run during training.
6. ``save``: write the trained weights to the package in half precision.

Examples
--------
::

    python lab/scripts/train_lab.py --photos 'train-*.parquet' --work build/lab
    python lab/scripts/train_lab.py ... --length 200 --steps 50 --work build/quick --output build/quick/model
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from lab_align import align_words
from lab_reader import PATCHES, WIDTH, Muon, Reader, llama_config
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torino_lab.corpus import Corpus, check_disjoint, read_photos
from torino_lab.tower import BLOCK, lab_tower

from torino.core.io import read_json, write_atomic, write_json
from torino.core.reduction import Reduction

ROOT = Path(__file__).resolve().parents[2]
SHARD = 100  # pictures a file of features
SETS, TOGETHER = 4, 2  # sets of questions about a picture, and how many are asked in one pass
MOST = 1000  # more questions than any picture has
PREFIX = "USER: "  # then the picture, then a new line and the question
SPECIAL = ["<unk>", "<s>", "</s>", "<pad>", "<image>"]


def say(text: str, end: str = "\n") -> None:
    print(text, end=end, file=sys.stderr, flush=True)


# ---------------------------------------------------------------------- 1. features


def features(args: argparse.Namespace) -> None:
    """Compute the features of the training images."""
    look(Corpus(read_photos([args.photos]), seed=args.seed, length=args.length), args.work, args.block)


def look(corpus: Corpus, work: Path, block: int) -> None:
    """Cache the tokens of every image as float16 shards of shape (100, 576, 384), with its questions.

    CLS tokens, which only SAEs are trained on, have their own folder. A folder belongs to one corpus and one block, and
    is refused for others.
    """
    description = {"block": block, "seed": corpus.seed, "photos": corpus.fingerprint}
    record = work / "features" / "corpus.json"
    if shards(work) and (not record.exists() or read_json(record) != description):
        raise SystemExit(
            f"{work / 'features'} contains features of other images or of another block than {description}. Give another "
            "--work, or delete that folder to compute them again."
        )
    write_json(record, description)
    tower = lab_tower(block)
    begun, did = time.monotonic(), 0
    for start in range(0, len(corpus), SHARD):
        file = work / "features" / f"{start:06d}.npy"
        numbers = range(start, min(start + SHARD, len(corpus)))
        there = file.exists() and file.with_suffix(".json").exists()
        # the last shard of a shorter run is incomplete
        if there and len(np.load(file, mmap_mode="r")) >= len(numbers):
            continue
        tokens = np.empty((len(numbers), PATCHES, WIDTH), dtype=np.float16)
        cls = np.empty((len(numbers), WIDTH), dtype=np.float16)
        asked: list[object] = []
        with ThreadPoolExecutor(1) as ahead:
            coming = [ahead.submit(corpus.ask_repeatedly, number, SETS) for number in numbers]
            for first in range(0, len(numbers), 4):
                examples = [later.result() for later in coming[first : first + 4]]
                for place, seen in enumerate(tower.encode([turns[0].image for turns in examples]), first):
                    assert seen.cls is not None
                    tokens[place], cls[place] = seen.patches.half().numpy(), seen.cls.half().numpy()
                asked += [
                    {"name": turns[0].name, "sets": [[asdict(one) for one in turn.questions] for turn in turns]}
                    for turns in examples
                ]
        write_atomic(work / "cls" / file.name, lambda target, cls=cls: _save_array(target, cls))
        write_atomic(file, lambda target, tokens=tokens: _save_array(target, tokens))
        write_json(file.with_suffix(".json"), {"pictures": asked})
        did += len(numbers)
        left = (len(corpus) - numbers.stop) * (time.monotonic() - begun) / did
        say(f"\rfeatures {numbers.stop}/{len(corpus)}, {left / 60:.0f} minutes left ", end="")
    say("")


def _save_array(target: Path, array: np.ndarray) -> None:
    with target.open("wb") as file:
        np.save(file, array)


def shards(work: Path) -> list[Path]:
    return sorted((work / "features").glob("*.npy"))


def questions(work: Path) -> list[list[list[dict[str, str]]]]:
    """Sets of questions of all pictures whose features are there, in order."""
    return [
        picture["sets"]
        for file in shards(work)
        for picture in json.loads(file.with_suffix(".json").read_text(encoding="utf-8"))["pictures"]
    ]


# ---------------------------------------------------------------------- 2. tokenizer


def make_tokenizer(args: argparse.Namespace) -> Tokenizer:
    """BPE with a space in front of words, as Llama's; every character of the corpus has a token."""
    file = args.work / "tokenizer.json"
    if file.exists():
        return Tokenizer.from_file(str(file))
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=False, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Metaspace(prepend_scheme="never"),
            pre_tokenizers.Split("\n", "isolated"),
            pre_tokenizers.Punctuation("isolated"),
            pre_tokenizers.Digits(individual_digits=True),
        ]
    )
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="never")
    texts = [
        f"USER: \n{q['text']} ASSISTANT: {q['answer']}"
        for picture in questions(args.work)
        for asked in picture
        for q in asked
    ]
    trainer = trainers.BpeTrainer(
        vocab_size=args.vocabulary, special_tokens=SPECIAL, min_frequency=3, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", SPECIAL.index("<s>"))]
    )
    write_atomic(file, lambda target: tokenizer.save(str(target)))
    say(f"tokenizer: {tokenizer.get_vocab_size()} tokens")
    return tokenizer


# ---------------------------------------------------------------------- 3. words and patches


def open_features(work: Path) -> tuple[list[np.ndarray], list[tuple[int, int]]]:
    """Kept tokens, shard by shard, and in which shard and place every picture is."""
    arrays = [np.load(file, mmap_mode="r") for file in shards(work)]
    return arrays, [(number, place) for number, array in enumerate(arrays) for place in range(len(array))]


def spread_of(arrays: list[np.ndarray]) -> tuple[Tensor, Tensor]:
    """Mean and deviation of every channel, from four pictures a shard."""
    some = np.concatenate([array[:4].astype(np.float32).reshape(-1, WIDTH) for array in arrays])
    return torch.from_numpy(some.mean(0)), torch.from_numpy(some.std(0))


def align(args: argparse.Namespace) -> None:
    file = args.work / "aligned.safetensors"
    if file.exists():
        return
    arrays, where = open_features(args.work)

    def tokens(chosen: Sequence[int]) -> Tensor:
        return torch.from_numpy(np.stack([arrays[where[n][0]][where[n][1]] for n in chosen])).float()

    found = align_words(
        make_tokenizer(args),
        questions(args.work),
        tokens,
        spread_of(arrays),
        width=args.width,
        passes=args.passes,
        seed=args.seed,
        say=say,
    )
    write_atomic(file, lambda target: save_file(found, target))


# ---------------------------------------------------------------------- 4. training


def encode(tokenizer: Tokenizer, question: dict[str, str]) -> tuple[list[int], int]:
    """Tokens of a question and its answer, and where the answer begins."""
    asked = tokenizer.encode(f"\n{question['text']} ASSISTANT:", add_special_tokens=False).ids
    said = tokenizer.encode(f" {question['answer']}", add_special_tokens=False).ids
    return [*asked, *said, SPECIAL.index("</s>")], len(asked)


def merged(picture: list[list[dict[str, str]]], turn: int) -> list[dict[str, str]]:
    """Questions of one pass over a picture: those of some sets, none of them twice."""
    sets = picture[turn * TOGETHER : (turn + 1) * TOGETHER]
    return list({(one["text"], one["answer"]): one for asked in sets for one in asked}.values())


def weights_of(asked: list[list[list[dict[str, str]]]]) -> dict[str, float]:
    """How much a question of each kind counts: rare kinds more, by the root of how rare they are, within limits."""
    count = Counter(one["kind"] for picture in asked for turn in picture for one in turn)
    usual = count.total() / len(count)
    weight = {kind: min(max((usual / n) ** 0.5, 0.5), 3.0) for kind, n in count.items()}
    mean = sum(weight[kind] * n for kind, n in count.items()) / count.total()
    return {kind: value / mean for kind, value in weight.items()}


def pack(picture: list[tuple[list[int], int]], max_tokens: int, order: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Concatenate questions up to ``max_tokens`` tokens.

    Returns
    -------
    text, segment, place, target : Tensor of shape (max_tokens,)
        Tokens; the question each belongs to (−1: padding); its place in that question; the token that should follow
        it, −100 where nothing is asked of the model.
    """
    text, segment = torch.full((max_tokens,), SPECIAL.index("<pad>")), torch.full((max_tokens,), -1)
    place, target = torch.zeros(max_tokens, dtype=torch.int64), torch.full((max_tokens,), -100)
    at = 0
    for number in order.tolist():
        tokens, answer = picture[number]
        if at + len(tokens) > max_tokens:
            continue
        here = slice(at, at + len(tokens))
        text[here], segment[here] = torch.tensor(tokens), number
        place[here] = torch.arange(len(tokens))
        target[at + answer - 1 : at + len(tokens) - 1] = torch.tensor(tokens[answer:])
        at += len(tokens)
    return text, segment, place, target


def collate(
    rows: list[tuple[Tensor, Tensor, Tensor, Tensor]], head: int, patches: int = PATCHES, places: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Batch packed questions; each sees the picture and itself, and stands where it would stand alone.

    With ``places`` the tokens of the picture keep the positions that these patches of the whole one had.
    """
    text, segment, place, target = (torch.stack(part) for part in zip(*rows, strict=True))
    longest = int((segment >= 0).sum(1).max())
    text, segment, place, target = (part[:, :longest] for part in (text, segment, place, target))
    front = head + patches
    seen = torch.ones(len(text), 1, longest, front + longest, dtype=torch.bool)
    seen[:, 0, :, front:] = (segment[:, :, None] == segment[:, None, :]).tril()
    before = torch.arange(front) if places is None else torch.cat([torch.arange(head), head + places])
    after = front if places is None else head + PATCHES
    positions = torch.cat([before.expand(len(text), -1), after + place], 1)
    segment = segment + MOST * torch.arange(len(text))[:, None]
    return text, positions, seen, target, segment


def loss_of(logits: Tensor, target: Tensor, segment: Tensor, weight: Tensor) -> Tensor:
    """Answers count by the weight of their kind and not by their length: a yes as much as a caption of a dozen words.

    ``weight`` has one entry a segment number.
    """
    each = cross_entropy(logits, target, reduction="none")
    _, place, count = segment.unique(return_inverse=True, return_counts=True)
    return (each * weight[segment] / count[place]).sum() / len(count)


def train(args: argparse.Namespace) -> None:
    tokenizer = make_tokenizer(args)
    arrays, where = open_features(args.work)
    asked = [[merged(picture, turn) for turn in range(SETS // TOGETHER)] for picture in questions(args.work)]
    counts = weights_of(asked)
    coded = [
        [[(*encode(tokenizer, one), counts[one["kind"]]) for one in turn] for turn in picture] for picture in asked
    ]
    torch.manual_seed(args.seed)
    model = Reader(tokenizer.get_vocab_size(), args)
    model.mean, model.deviation = spread_of(arrays)
    model.begin(load_file(args.work / "aligned.safetensors"))
    # the matrices between layers learn faster with Muon; embeddings, norms and the projector stay with Adam
    inner = [p for p in model.llama.model.layers.parameters() if p.ndim == 2]
    known = {id(p) for p in inner}
    outer = [p for p in model.parameters() if id(p) not in known]
    optimisers = [
        Muon(inner, lr=args.rate, decay=0.05),
        torch.optim.AdamW(outer, lr=args.rate, betas=(0.9, 0.98), weight_decay=0.0, fused=True),
    ]
    head = torch.tensor([tokenizer.encode(PREFIX).ids])
    say(
        f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters, {len(where)} pictures, "
        f"{args.steps} steps"
    )
    checkpoint, log = args.work / "checkpoint.pt", args.work / "train.jsonl"
    step = 0
    if checkpoint.exists():
        held = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(held["model"])
        for optimiser, state in zip(optimisers, held["optimisers"], strict=True):
            optimiser.load_state_dict(state)
        step = held["step"]
        say(f"resuming from step {step}")
    model.train()
    begun, first, saved = time.monotonic(), step, time.monotonic()
    running, count = 0.0, 0
    while step < args.steps:
        chosen = batch_numbers(step, args.batch, len(where), args.seed)
        generator = torch.Generator().manual_seed(args.seed * 7_919 + step)
        turn = step * args.batch // len(where) % (SETS // TOGETHER)
        here = [coded[n][turn] for n in chosen]
        rows = [
            pack([one[:2] for one in some], args.max_tokens, torch.randperm(len(some), generator=generator))
            for some in here
        ]
        weight = torch.zeros(len(here) * MOST)
        for place, some in enumerate(here):
            weight[place * MOST : place * MOST + len(some)] = torch.tensor(
                [1.0 if step < args.alike else one[2] for one in some]
            )
        pictures = torch.from_numpy(np.stack([arrays[where[n][0]][where[n][1]] for n in chosen])).float()
        text, positions, mask, target, segment = collate(rows, head.shape[1])
        for optimiser in optimisers:
            for group in optimiser.param_groups:
                group["lr"] = args.rate * pace(step, args.steps)
        states = model(pictures, head, text, positions, mask)
        wanted = target >= 0
        loss = loss_of(model.llama.lm_head(states[wanted]), target[wanted], segment[wanted], weight)
        value = float(loss.detach())
        if not math.isfinite(value):
            raise SystemExit(f"The loss is {value} at step {step}. Lower --rate and resume from the checkpoint.")
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimiser in optimisers:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        step += 1
        running, count = running + value, count + 1
        if step % 25 == 0 or step == args.steps:
            seconds = (time.monotonic() - begun) / (step - first)
            with log.open("a", encoding="utf-8") as file:
                line = {"step": step, "loss": round(running / count, 4), "norm": round(float(norm), 3)}
                file.write(json.dumps(line | {"seconds": round(seconds, 2)}) + "\n")
            minutes = (args.steps - step) * seconds / 60
            say(
                f"\rstep {step}/{args.steps}, loss {running / count:.3f}, {seconds:.2f} s a step, "
                f"{minutes:.0f} min left  ",
                end="",
            )
            running, count = 0.0, 0
        if step == args.steps or time.monotonic() - saved > 300:
            states = [optimiser.state_dict() for optimiser in optimisers]
            state = {"model": model.state_dict(), "optimisers": states, "step": step}
            write_atomic(checkpoint, lambda target, state=state: torch.save(state, target))
            saved = time.monotonic()
    say("")


def batch_numbers(step: int, size: int, total: int, seed: int) -> list[int]:
    """Pictures of a step: each once before any comes twice, in a new random order for every epoch."""
    numbers = []
    for place in range(step * size, (step + 1) * size):
        generator = torch.Generator().manual_seed(seed * 1_000_003 + place // total)
        if not numbers or place % total == 0:
            order = torch.randperm(total, generator=generator)
        numbers.append(int(order[place % total]))
    return numbers


def pace(step: int, steps: int) -> float:
    """Learning rate: rises over 200 steps, then falls along a cosine to a twentieth."""
    warm = min(1.0, (step + 1) / 200)
    return warm * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / steps)))


# ---------------------------------------------------------------------- 5. checking


class Judged(NamedTuple):
    """What became of one question: the picture it is about, its kind, whether it was answered, and how surprising."""

    picture: int
    kind: str
    right: bool
    surprise: float


def weighed(mask: Tensor, head: int, plan: Reduction) -> Tensor:
    """A mask that adds ln n to what a token of n patches is attended with, as if it stood there n times."""
    added = torch.zeros(mask.shape).masked_fill_(~mask, -torch.inf)
    added[..., head : head + len(plan)] += plan.sizes.float().log()
    return added


@torch.no_grad()
def judge(
    model: Reader,
    tokenizer: Tokenizer,
    pictures: Sequence[Tensor],
    asked: Sequence[list[dict[str, str]]],
    plans: Sequence[Reduction] | None = None,
    original: bool = False,
    mass: bool = False,
) -> list[Judged]:
    """Of every question: whether each token of the answer would be written, and the nats it costs.

    With ``plans`` the pictures, tokens (576, 384) each, are reduced first; where ``original``, what is left keeps the
    positions of the whole prompt; with ``mass`` the text attends to a token as to all patches that it stands for.
    """
    head = torch.tensor([tokenizer.encode(PREFIX).ids])
    found: list[Judged] = []
    for number, (picture, some) in enumerate(zip(pictures, asked, strict=True)):
        seen = picture if plans is None else plans[number].apply(picture)
        coded = [encode(tokenizer, question) for question in some]
        row = pack(coded, sum(len(tokens) for tokens, _ in coded), torch.arange(len(coded)))
        places = plans[number].anchor if original and plans is not None else None
        text, positions, mask, target, _ = collate([row], head.shape[1], len(seen), places)
        if mass and plans is not None:
            mask = weighed(mask, head.shape[1], plans[number])
        logits = model.llama.lm_head(model(seen[None], head, text, positions, mask))[0]
        surprise = cross_entropy(logits, target[0], reduction="none", ignore_index=-100)
        good = (logits.argmax(-1) == target[0]) | (target[0] < 0)
        for place, question in enumerate(some):
            mine = row[1][: text.shape[1]] == place
            found.append(Judged(number, question["kind"], bool(good[mine].all()), float(surprise[mine].sum())))
    return found


def check(args: argparse.Namespace) -> None:
    """Share of questions of each kind whose whole answer the model would write, about pictures made of dev photos."""
    if args.dev is None:
        raise SystemExit("The stage check needs --dev: photos that were not trained on.")
    work = args.work / "dev"
    dev = read_photos([args.dev])
    check_disjoint(read_photos([args.photos]), dev)
    look(Corpus(dev, seed=args.seed + 1, length=args.checked), work, args.block)
    tokenizer = make_tokenizer(args)
    model = Reader(tokenizer.get_vocab_size(), args).eval()
    held = torch.load(args.work / "checkpoint.pt", weights_only=True)
    model.load_state_dict(held["model"])
    pictures = [
        torch.from_numpy(np.array(one)).float() for file in shards(work) for one in np.load(file, mmap_mode="r")
    ]
    found = judge(model, tokenizer, pictures, [sets[0] for sets in questions(work)])
    by_kind: dict[str, list[bool]] = {}
    for one in found:
        by_kind.setdefault(one.kind, []).append(one.right)
    summary = {kind: {"right": sum(right) / len(right), "of": len(right)} for kind, right in sorted(by_kind.items())}
    write_json(args.work / f"check-{held['step']}.json", {"step": held["step"], "kinds": summary})
    say(
        f"step {held['step']}, dev pictures: "
        + ", ".join(f"{k} {v['right']:.2f} of {v['of']}" for k, v in summary.items())
    )


# ---------------------------------------------------------------------- 6. saving


def save(args: argparse.Namespace) -> None:
    """Write projector and language model in half precision, under the names they have in a stock LLaVA."""
    tokenizer = make_tokenizer(args)
    held = torch.load(args.work / "checkpoint.pt", weights_only=True)
    parts = {"linear_1": "multi_modal_projector.linear_1", "linear_2": "multi_modal_projector.linear_2"}
    state: dict[str, Tensor] = {}
    trained = dict(held["model"])
    mean, deviation = trained.pop("mean"), trained.pop("deviation")
    trained["linear_1.weight"] = trained["linear_1.weight"] / deviation
    trained["linear_1.bias"] = trained["linear_1.bias"] - trained["linear_1.weight"] @ mean
    for name, value in trained.items():
        first, _, rest = name.partition(".")
        if first in parts:
            state[f"{parts[first]}.{rest}"] = value.half()
        elif rest.startswith("model."):
            state["language_model." + rest.removeprefix("model.")] = value.half()
    args.output.mkdir(parents=True, exist_ok=True)
    write_atomic(args.output / "reader.safetensors", lambda target: save_file(state, target))
    write_atomic(args.output / "tokenizer.json", lambda target: tokenizer.save(str(target)))
    language = llama_config(tokenizer.get_vocab_size(), args).to_diff_dict()
    write_json(
        args.output / "reader.json",
        {"block": args.block, "seed": args.seed, "step": held["step"], "language": language},
    )
    say(
        f"saved {sum(v.numel() for v in state.values()) / 1e6:.2f} M parameters of step {held['step']} to {args.output}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--photos", required=True, help="photos with captions: a parquet file or a quoted pattern of several")
    add("--dev", help="photos with captions that are not trained on, for the stage check")
    add("--checked", type=int, default=300, help="pictures made of them (default: %(default)s)")
    add("--work", type=Path, default=ROOT / "build/lab", help="folder for features and checkpoints")
    add("--output", type=Path, default=ROOT / "lab/src/torino_lab/data/lab", help="folder to save to")
    add("--stages", default="features,tokenizer,align,train,save", help="comma-separated (default: %(default)s)")
    add("--length", type=int, default=10_000, help="pictures in the corpus (default: %(default)s)")
    add("--block", type=int, default=BLOCK, help="zero-based block of the tower that is read (default: %(default)s)")
    add("--vocabulary", type=int, default=2048, help="largest number of tokens (default: %(default)s)")
    add("--width", type=int, default=256, help="of the language model (default: %(default)s)")
    add("--layers", type=int, default=6, help="of the language model (default: %(default)s)")
    add("--max-tokens", type=int, default=340, help="tokens of questions and answers a picture (default: %(default)s)")
    add("--passes", type=int, default=3, help="over the pictures, of the stage align (default: %(default)s)")
    add("--steps", type=int, default=4500, help="of training (default: %(default)s)")
    add("--alike", type=int, default=1157, help="first steps, in which no kind of question counts more (%(default)s)")
    add("--batch", type=int, default=4, help="pictures a step (default: %(default)s)")
    add("--rate", type=float, default=1e-3, help="peak learning rate (default: %(default)s)")
    add("--seed", type=int, default=0, help="of corpus, weights and order (default: %(default)s)")
    add("--threads", type=int, default=2, help="CPU cores (default: %(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.work.mkdir(parents=True, exist_ok=True)
    run = {
        "features": features,
        "tokenizer": make_tokenizer,
        "align": align,
        "train": train,
        "check": check,
        "save": save,
    }
    for stage in args.stages.split(","):
        if stage not in run:
            parser.error(f"no stage is called {stage!r}; there are {', '.join(run)}")
        run[stage](args)


if __name__ == "__main__":
    main()
