"""Train the miniature LLaVA: projector and low-rank updates of the language model, on full tokens only.

Three stages, each resumable; one that is done is skipped.

1. ``align``: the projector alone, without the language model. Projected patches come near the embeddings of the words
   for what they show. Minutes; it replaces the slow start of stage 1 and is not part of LLaVA's recipe.
2. ``captions``: LLaVA's stage 1. The projector on captions, the language model frozen.
3. ``tune``: LLaVA's stage 2. Projector and low-rank updates on questions and captions.
"""

from __future__ import annotations

import json
import logging
import math
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from torino.core.extras import optional_import
from torino_lab.assembly import ADAPTER, PROJECTOR
from torino_lab.training.attention import register
from torino_lab.training.checkpoints import load_optimiser, optimiser_state, save_tensors
from torino_lab.training.features import Features
from torino_lab.training.packing import HEAD, Batch, Segment, encode_question, pack
from torino_lab.training.questions import Photo, draw, keep_weights, phrase

logger = logging.getLogger(__name__)

VISUAL, WIDTH = 196, 768
ROPE_THETA = 100_000.0  # SmolLM2's own
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CHECKPOINT_SECONDS = 300
WATCH_STEPS = 250
STOP_WORDS = re.compile("a|an|the|and|in|on|of|at|with|is|are|to|no|yes|by|as|for|from|it|its|his|her|their")


@dataclass(frozen=True)
class Stage:
    """Settings of one training stage.

    Parameters
    ----------
    name : str
    steps : int
        Length, with ``decay`` steps at the end in which the learning rate falls linearly to zero.
    batch : int
        Photos a step.
    part : int
        Photos that are in memory together; gradients of a step's parts are added.
    questions : int
        At most so many about one photo.
    tokens : int
        At most so many text tokens after one photo.
    projector_rate, lora_rate : float
        Learning rates; 0 freezes the part.
    first : int
        Number of the first step, if the stage continues from weights without a state of the optimiser.
    """

    name: str
    steps: int
    batch: int = 16
    part: int = 8
    questions: int = 6
    tokens: int = 150
    projector_rate: float = 1e-3
    lora_rate: float = 0.0
    warmup: int = 30
    decay: int = 100
    first: int = 0


class Projector(nn.Module):
    """LLaVA's two-layer projector behind a fixed standardisation of its input, which folds into the first layer."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(WIDTH, hidden)
        self.linear_2 = nn.Linear(hidden, hidden)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("std", torch.ones(WIDTH))

    def forward(self, patches: Tensor) -> Tensor:
        """Map patches (…, 768) into the language model's input space."""
        return self.linear_2(functional.gelu(self.linear_1((patches.float() - self.mean) / self.std)))

    def folded(self) -> dict[str, Tensor]:
        """Weights of the stock projector that does the same without standardised input."""
        weight = self.linear_1.weight / self.std
        return {
            "linear_1.weight": weight,
            "linear_1.bias": self.linear_1.bias - weight @ self.mean,
            "linear_2.weight": self.linear_2.weight,
            "linear_2.bias": self.linear_2.bias,
        }

    @torch.no_grad()
    def unfold(self, weights: dict[str, Tensor]) -> None:
        """Load what :meth:`folded` gave, with the present mean and standard deviation."""
        stock = {name: value.float() for name, value in weights.items()}
        self.linear_1.weight.copy_(stock["linear_1.weight"] * self.std)
        self.linear_1.bias.copy_(stock["linear_1.bias"] + stock["linear_1.weight"] @ self.mean)
        self.linear_2.load_state_dict({name: stock[f"linear_2.{name}"] for name in ("weight", "bias")})


def lora_config(rank: int) -> Any:
    """Return the settings of the low-rank updates."""
    with optional_import("Training the lab's model needs", "torino[lab]"):
        from peft import LoraConfig

    return LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=TARGETS, lora_dropout=0.0, bias="none")


class Reader(nn.Module):
    """Projector and language model, as they are trained."""

    def __init__(self, language: Any, dtype: torch.dtype, rank: int) -> None:
        super().__init__()
        with optional_import("Training the lab's model needs", "torino[lab]"):
            from peft import get_peft_model

        self.projector = Projector(language.config.hidden_size)
        language.to(dtype)
        language.set_attn_implementation(register())
        self.language = get_peft_model(
            language, lora_config(rank)
        )  # the updates start at zero: no change until trained
        self.dtype = dtype

    @property
    def rope_theta(self) -> float:
        """Base of the rotary position embeddings."""
        return float(self.language.config.rope_parameters["rope_theta"])

    @property
    def llama(self) -> Any:
        """The stock ``LlamaModel`` with its updates in place."""
        return self.language.base_model.model.model

    @property
    def embeddings(self) -> Tensor:
        """Input embeddings, which are the output weights as well."""
        return self.llama.embed_tokens.weight

    def forward(self, patches: Tensor, head: Tensor, batch: Batch) -> Tensor:
        """Return the logits at the batch's targets."""
        visual = self.projector(patches)
        with torch.autocast("cpu", dtype=self.dtype, enabled=self.dtype != torch.float32):
            start = functional.embedding(head, self.embeddings).expand(len(patches), -1, -1)
            text = functional.embedding(batch.text, self.embeddings)
            embeds = torch.cat([start, visual.to(start.dtype), text], 1)
            mask = torch.zeros(batch.mask.shape, dtype=embeds.dtype).masked_fill(~batch.mask, float("-inf"))
            hidden = self.llama(inputs_embeds=embeds, attention_mask=mask, position_ids=batch.positions)
            front = head.shape[1] + visual.shape[1]
            picked = hidden.last_hidden_state[batch.rows, front + batch.columns]
            return functional.linear(picked, self.embeddings).float()

    def trained(self) -> dict[str, Tensor]:
        """Everything that training changes, and the base of the rotary embeddings it was trained with."""
        lora = {f"language.{n}": p for n, p in self.language.named_parameters() if "lora_" in n}
        theta = {"rope_theta": torch.tensor(self.rope_theta)}
        return {**{f"projector.{n}": p for n, p in self.projector.state_dict().items()}, **lora, **theta}

    def load_trained(self, tensors: dict[str, Tensor]) -> None:
        """Load what :meth:`trained` gave."""
        tensors = {"rope_theta": torch.tensor(ROPE_THETA), **tensors}  # checkpoints without it used SmolLM2's own
        missing = set(self.trained()) - set(tensors)
        if missing:
            raise ValueError(f"The checkpoint lacks {len(missing)} tensors, such as {sorted(missing)[0]}.")
        if (theta := float(tensors.pop("rope_theta"))) != self.rope_theta:
            raise ValueError(
                f"The checkpoint has rope_theta {theta:g}, the model {self.rope_theta:g}. Use another folder."
            )
        self.load_state_dict(tensors, strict=False)


class Trainer:
    """Run the stages.

    Parameters
    ----------
    work : Path
        Checkpoints and logs.
    reader : Reader
    tokenizer : PreTrainedTokenizer
    photos : sequence of Photo
        The training photos.
    features : dict of Features
        By name of the source.
    share : dict of float
        How often photos of a source are drawn in stage ``tune``, relative to the others; 1 where not named.
    held_out : sequence of Photo
        Photos to watch progress on; never trained on.
    """

    def __init__(
        self,
        work: Path,
        reader: Reader,
        tokenizer: Any,
        photos: Sequence[Photo],
        features: dict[str, Features],
        share: dict[str, float],
        held_out: Sequence[Photo],
        seed: int = 0,
    ) -> None:
        self.work, self.reader, self.tokenizer = work, reader, tokenizer
        self.photos = [photo for photo in photos if photo.questions]
        self.features, self.share, self.held_out, self.seed = features, share, held_out, seed
        self.weights = keep_weights(self.photos)
        self.head = torch.tensor([tokenizer(HEAD, add_special_tokens=False)["input_ids"]])
        self.pad = int(tokenizer.pad_token_id)
        work.mkdir(parents=True, exist_ok=True)

    def log(self, **values: object) -> None:
        """Append a line to the log and print it."""
        line = json.dumps({"time": time.strftime("%Y-%m-%d %H:%M:%S"), **values})
        with (self.work / "log.jsonl").open("a") as file:
            file.write(line + "\n")
        logger.info(line)

    def patches(self, photos: Sequence[Photo]) -> Tensor:
        """Features of photos without CLS, (B, 196, 768)."""
        result = torch.empty(len(photos), VISUAL, WIDTH, dtype=torch.float16)
        for source in {photo.source for photo in photos}:
            places = [place for place, photo in enumerate(photos) if photo.source == source]
            result[places] = self.features[source][[photos[place].row for place in places]][:, 1:]
        return result

    def _captioned(self) -> list[Photo]:
        return [photo for photo in self.photos if any(q.kind == "caption" for q in photo.questions)]

    def _standardise(self, captioned: Sequence[Photo]) -> None:
        """Measure mean and standard deviation of the features on some 400 photos."""
        sample = captioned[:: max(1, len(captioned) // 400)]
        values = self.patches(sample).float().flatten(0, 1)
        projector = self.reader.projector
        projector.mean, projector.std = values.mean(0), values.std(0).clamp_min(1e-3)

    def start_from(self, folder: Path) -> None:
        """Start from exported weights (:mod:`torino_lab.training.export`) in place of the first two stages."""
        self._standardise(self._captioned())
        self.reader.projector.unfold(load_file(folder / PROJECTOR))
        updates = {
            re.sub(r"\.(lora_[AB])\.", r".\1.default.", f"language.{name}"): value.float()
            for name, value in load_file(folder / ADAPTER).items()
        }
        projector = {f"projector.{name}": value for name, value in self.reader.projector.state_dict().items()}
        theta = {"rope_theta": torch.tensor(self.reader.rope_theta)}  # training may go on with another one
        self.reader.load_trained({**projector, **updates, **theta})

    # ------------------------------------------------------------------ stage 0

    def align(self, steps: int = 1500, batch: int = 16) -> None:
        """Bring projected patches near the embeddings of the words that captions and answers use."""
        done = self.work / "align.safetensors"
        projector = self.reader.projector
        if done.exists():
            projector.load_state_dict(load_file(done))
            return
        torch.manual_seed(self.seed)
        captioned = self._captioned()
        self._standardise(captioned)
        words, table = self._words(captioned)
        vectors = functional.normalize(self.reader.embeddings.detach().float()[words], dim=-1)
        centre = vectors.mean(0)
        vectors = functional.normalize(vectors - centre, dim=-1)
        often = table.mean(0).clamp(1e-4, 0.9)
        bias = nn.Parameter((often / (1 - often)).log() - 2)
        gain = nn.Parameter(torch.tensor(2.3))
        optimiser = torch.optim.AdamW([*projector.parameters(), bias, gain], lr=1e-3, weight_decay=0.01)
        rng = Random(f"{self.seed}:align")
        usable = torch.nonzero(table.sum(1) > 0).flatten().tolist()
        losses: list[float] = []
        for step in range(steps):
            rate = min(1.0, (step + 1) / 50) * (0.03 + 0.97 * 0.5 * (1 + math.cos(math.pi * step / steps)))
            for group in optimiser.param_groups:
                group["lr"] = 1e-3 * rate
            chosen = rng.sample(usable, batch)
            seen = projector(self.patches([captioned[n] for n in chosen]))
            near = functional.normalize(seen, dim=-1) @ vectors.T * gain.exp()
            holds = near.logsumexp(1) - math.log(near.shape[1]) + bias
            loss = functional.binary_cross_entropy_with_logits(holds, table[chosen], reduction="sum") / batch
            loss.backward()
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
            losses.append(float(loss.detach()))
            if (step + 1) % 100 == 0:
                self.log(stage="align", step=step + 1, loss=round(sum(losses) / len(losses), 3), words=len(words))
                losses = []
        with torch.no_grad():  # patches as long as words
            length = float(seen.norm(dim=-1).mean())
            wanted = float(self.reader.embeddings.detach().float().norm(dim=-1).mean())
            projector.linear_2.weight *= wanted / length
            projector.linear_2.bias *= wanted / length
        save_tensors(done, projector.state_dict())

    def _words(self, photos: Sequence[Photo]) -> tuple[list[int], Tensor]:
        """Whole-word tokens that at least 15 photos mention, and which photo mentions which."""
        held: list[set[int]] = []
        for photo in photos:
            texts: list[str] = []
            for question in photo.questions:
                if question.kind == "caption":
                    texts += question.answers
                elif question.kind == "open":
                    texts.append(question.answers[0])
            words = " ".join(re.findall(r"[a-z]+", " ".join(texts).lower()))
            held.append(set(self.tokenizer(" " + words, add_special_tokens=False)["input_ids"]) if words else set())
        count = Counter(token for tokens in held for token in tokens)
        names = {token: self.tokenizer.decode([token]) for token in count}
        whole = [
            t
            for t, n in count.items()
            if n >= 15 and re.fullmatch(r" [a-z]{3,}", names[t]) and not STOP_WORDS.fullmatch(names[t].strip())
        ]
        place = {token: number for number, token in enumerate(sorted(whole))}
        table = torch.zeros(len(held), len(place))
        for row, tokens in enumerate(held):
            table[row, [place[token] for token in tokens if token in place]] = 1
        return sorted(whole), table

    # ------------------------------------------------------------------ stages 1 and 2

    def run(self, stage: Stage, stop: Callable[[], bool] = lambda: False) -> bool:
        """Train one stage; returns whether it is complete."""
        name, reader = stage.name, self.reader
        final, partial = self.work / f"{name}.safetensors", self.work / f"{name}-partial.safetensors"
        if final.exists():
            reader.load_trained(load_file(final))
            return True
        lora = [p for n, p in reader.named_parameters() if "lora_" in n]
        groups = [
            {"params": list(reader.projector.parameters()), "peak": stage.projector_rate},
            {"params": lora, "peak": stage.lora_rate},
        ]
        for group in groups:
            for parameter in group["params"]:
                parameter.requires_grad_(group["peak"] > 0)
        groups = [group for group in groups if group["peak"] > 0]
        optimiser = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.98), weight_decay=0.0)
        step = stage.first
        if partial.exists():
            tensors = load_file(partial)
            step = int(tensors.pop("step"))
            state = {k: tensors.pop(k) for k in list(tensors) if k.startswith("optimiser.")}
            reader.load_trained(tensors)
            load_optimiser(optimiser, state)
            self.log(stage=name, resumed=step)
        else:
            self.log(stage=name, settings=asdict(stage), dtype=str(reader.dtype), photos=len(self.photos))
            self.watch(name, step)
        pool = self._pool(captions_only=stage.lora_rate == 0)
        began, saved, seen, losses = time.monotonic(), time.monotonic(), 0, defaultdict[str, list[float]](list)
        while step < stage.steps:
            scale = min(1.0, (step + 1 - stage.first) / stage.warmup, (stage.steps - step) / stage.decay)
            for group in optimiser.param_groups:
                group["lr"] = group["peak"] * scale
            parts = self._batch(stage, step, pool)
            total = sum(float(batch.weights.sum()) for _, batch, _ in parts)
            for photos, batch, kinds in parts:
                logits = reader(self.patches(photos), self.head, batch)
                each = functional.cross_entropy(logits, batch.targets, reduction="none")
                ((each * batch.weights).sum() / total).backward()
                _collect(losses, each.detach(), batch.segment, kinds)
            norm = nn.utils.clip_grad_norm_([p for g in optimiser.param_groups for p in g["params"]], 1.0)
            if not torch.isfinite(norm):
                raise RuntimeError(f"The gradient is not finite at step {step} of {name}.")
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
            step, seen = step + 1, seen + stage.batch
            if step % 25 == 0:
                means = {kind: round(sum(v) / len(v), 3) for kind, v in sorted(losses.items())}
                pace = (time.monotonic() - began) / seen
                self.log(stage=name, step=step, loss=means, norm=round(float(norm), 2), seconds_a_photo=round(pace, 3))
                losses.clear()
            if step % WATCH_STEPS == 0:
                self.watch(name, step)
            if time.monotonic() - saved > CHECKPOINT_SECONDS or stop():
                save_tensors(partial, {**reader.trained(), **optimiser_state(optimiser), "step": torch.tensor(step)})
                saved = time.monotonic()
            if stop():
                return False
        self.watch(name, step)
        save_tensors(final, reader.trained())
        partial.unlink(missing_ok=True)
        return True

    def _pool(self, captions_only: bool) -> list[int]:
        """Photos to draw from, as often as their source's share says."""
        if captions_only:
            return [n for n, photo in enumerate(self.photos) if any(q.kind == "caption" for q in photo.questions)]
        rng = Random(f"{self.seed}:pool")
        pool: list[int] = []
        for number, photo in enumerate(self.photos):
            share = self.share.get(photo.source.split("-")[0], 1.0)
            pool += [number] * (int(share) + (rng.random() < share % 1))
        return pool

    def _batch(self, stage: Stage, step: int, pool: list[int]) -> list[tuple[list[Photo], Batch, list[str]]]:
        """Return the photos and questions of a step in parts; they depend on the seed and the step only."""
        rng = Random(f"{self.seed}:{stage.name}:{step}")
        numbers = [
            pool[_permuted(step * stage.batch + i, len(pool), f"{self.seed}:{stage.name}")] for i in range(stage.batch)
        ]
        photos = [self.photos[n] for n in numbers]
        rows: list[list[Segment]] = []
        kinds: list[list[str]] = []
        for photo in photos:
            if stage.lora_rate == 0:
                captions = next(q for q in photo.questions if q.kind == "caption")
                asked = [phrase(captions, rng) for _ in range(min(stage.questions, len(captions.answers)))]
            else:
                asked = draw(photo, stage.questions, rng, self.weights)
            row: list[Segment] = []
            kinds.append([])
            length = 0
            for kind, question, answer in asked:
                segment = encode_question(self.tokenizer, kind, question, answer)
                if length + len(segment.ids) <= stage.tokens:
                    row.append(segment)
                    kinds[-1].append(kind)
                    length += len(segment.ids)
            rows.append(row)
        parts: list[tuple[list[Photo], Batch, list[str]]] = []
        for start in range(0, stage.batch, stage.part):
            some = slice(start, start + stage.part)
            batch = pack(rows[some], self.head.shape[1], VISUAL, self.pad, stage.tokens)
            parts.append((photos[some], batch, [kind for row in kinds[some] for kind in row]))
        return parts

    @torch.no_grad()
    def watch(self, stage: str, step: int) -> None:
        """Log loss and accuracy on held-out photos, with the right photo, another one and none."""
        rng = Random("watch")
        loss: dict[str, dict[str, list[float]]] = {}
        right: dict[str, dict[str, list[float]]] = {}
        count = len(self.held_out)
        for start in range(0, count, 16):
            photos = self.held_out[start : start + 16]
            rows, kinds = [], []
            for photo in photos:
                asked = draw(photo, 4, rng, self.weights)
                rows.append([encode_question(self.tokenizer, *one) for one in asked])
                kinds += [one[0] for one in asked]
            batch = pack(rows, self.head.shape[1], VISUAL, self.pad, 10_000)
            own = self.patches(photos)
            other = self.patches([self.held_out[(start + i + count // 2) % count] for i in range(len(photos))])
            blank = self.reader.projector.mean.expand_as(own)
            for name, patches in {"own": own, "other": other, "none": blank}.items():
                logits = self.reader(patches, self.head, batch)
                each = functional.cross_entropy(logits, batch.targets, reduction="none")
                hit = (logits.argmax(-1) == batch.targets).float()
                _collect(loss.setdefault(name, defaultdict(list)), each, batch.segment, kinds)
                _collect(right.setdefault(name, defaultdict(list)), hit, batch.segment, kinds, torch.min)
        kinds = sorted(loss["own"])
        mean = {k: {n: round(sum(loss[n][k]) / len(loss[n][k]), 3) for n in loss} for k in kinds}
        accuracy = {k: {n: round(sum(right[n][k]) / len(right[n][k]), 3) for n in right} for k in kinds}
        self.log(watch=stage, step=step, nats=mean, exact=accuracy, count={k: len(loss["own"][k]) for k in kinds})


def _collect(
    table: dict[str, list[float]],
    values: Tensor,
    segment: Tensor,
    kinds: Sequence[str],
    reduce: Callable[[Tensor], Tensor] = torch.mean,
) -> None:
    for number, kind in enumerate(kinds):
        of_segment = values[segment == number]
        if len(of_segment):
            table[kind].append(float(reduce(of_segment)))


def _permuted(index: int, length: int, seed: str) -> int:
    """Return the ``index``-th number of an endless series of permutations of ``range(length)``."""
    epoch, place = divmod(index, length)
    key = (epoch, length, seed)
    if key not in _orders:
        _orders.clear()
        order = list(range(length))
        Random(f"{seed}:{epoch}").shuffle(order)
        _orders[key] = order
    return _orders[key][place]


_orders: dict[tuple[int, int, str], list[int]] = {}
