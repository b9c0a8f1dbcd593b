"""Training of the miniature LLaVA: packed questions, rebalanced data, resumable stages."""

from __future__ import annotations

import io
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torino_lab.training.attention import grouped_attention
from torino_lab.training.features import Features
from torino_lab.training.packing import encode_question, pack
from torino_lab.training.questions import (
    Photo,
    Question,
    add_presence,
    draw,
    keep_weights,
    mentioned,
    phrase,
    read_photos,
    tidy,
)
from torino_lab.training.trainer import ROPE_THETA, VISUAL, WIDTH, Reader, Stage, Trainer
from transformers import LlamaConfig, LlamaForCausalLM

HIDDEN = 32


class CharTokenizer:
    """One token per character; the special tokens of the chat format are single tokens."""

    pad_token_id = 0
    special = ("<|im_start|>", "<|im_end|>")

    def __call__(self, text: str, add_special_tokens: bool = False) -> dict[str, list[int]]:
        ids: list[int] = []
        while text:
            mark = next((i for i, word in enumerate(self.special) if text.startswith(word)), None)
            ids.append(1 + mark if mark is not None else 3 + ord(text[0]) % 120)
            text = text[len(self.special[mark]) :] if mark is not None else text[1:]
        return {"input_ids": ids}

    def decode(self, ids: list[int]) -> str:
        return " abc"


def reader(seed: int = 0) -> Reader:
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
    )
    return Reader(LlamaForCausalLM(config), torch.float32, rank=2)


def test_packed_questions_cost_what_they_cost_alone() -> None:
    model, tokenizer = reader().eval(), CharTokenizer()
    asked = [("yesno", "Is it?", "yes"), ("open", "What is it?", "a dog"), ("caption", "Describe.", "A dog runs.")]
    segments = [encode_question(tokenizer, *question) for question in asked]
    patches = torch.randn(2, 9, WIDTH)
    head = torch.tensor([[1, 5, 6]])
    together = pack([segments, segments[:1]], 3, 9, 0, 1000)
    with torch.no_grad():
        packed = cross_entropy(model(patches, head, together), together.targets, reduction="none")
        for number, (row, segment) in enumerate(
            [(0, segments[0]), (0, segments[1]), (0, segments[2]), (1, segments[0])]
        ):
            alone = pack([[segment]], 3, 9, 0, 1000)
            expected = cross_entropy(model(patches[row : row + 1], head, alone), alone.targets, reduction="none")
            assert torch.allclose(packed[together.segment == number], expected, atol=1e-5)


def test_questions_that_do_not_fit_are_left_out() -> None:
    segments = [
        encode_question(CharTokenizer(), "open", "x" * 50, "y"),
        encode_question(CharTokenizer(), "open", "a", "b"),
    ]
    batch = pack([segments], 3, 9, 0, len(segments[0].ids) + 1)
    assert batch.segment.unique().tolist() == [0]
    assert batch.text.shape[1] % 16 == 0


def test_grouped_attention_equals_the_fused_kernel() -> None:
    torch.manual_seed(0)
    query, (key, value) = torch.randn(2, 6, 5, 8), (torch.randn(2, 2, 7, 8) for _ in range(2))
    mask = torch.zeros(2, 1, 5, 7).masked_fill_(torch.rand(2, 1, 5, 7) < 0.4, float("-inf"))
    mask[..., 0] = 0
    seen, _ = grouped_attention(None, query, key, value, mask, 8**-0.5)
    expected = scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
    assert torch.allclose(seen, expected.transpose(1, 2), atol=1e-6)


def test_captions_and_presence() -> None:
    assert tidy("a dog runs , fast .") == "A dog runs, fast."
    assert mentioned(["Two dogs and a man on skis"]) == {"dog", "man", "skis", "person"}
    captions = [("a dog in the snow",), ("a man on a bench",), ("a cat and a dog",), ("a woman with a dog",)]
    photos = [Photo("x", i, (Question("caption", "", text, "x"),)) for i, text in enumerate(captions * 5)]
    asked = add_presence(photos, 0)
    answers = Counter(q.answers[0] for photo in asked for q in photo.questions if q.kind == "presence")
    assert 0.7 * answers["yes"] <= answers["no"] <= answers["yes"]
    for photo, text in zip(asked, captions * 5, strict=True):
        present = mentioned(text)
        for question in (q for q in photo.questions if q.kind == "presence"):
            named = any(f" {thing.replace('-', ' ')} " in question.text for thing in present)
            assert named == (question.answers[0] == "yes")
    assert add_presence(photos, 0) == asked


def test_yes_and_no_are_evened_out() -> None:
    questions = [Question("yesno", "q", (answer,), "x") for answer in ["no"] * 30 + ["yes"] * 10]
    photos = [Photo("x", i, (question,) * 3) for i, question in enumerate(questions)]
    weights = keep_weights(photos)
    rng, count = Random(0), Counter[str]()
    for _ in range(40):
        for photo in photos:
            kept = draw(photo, 3, rng, weights)
            count.update(answer for _, _, answer in kept) if len(kept) > 1 else None
    assert weights["yesno", "yes"] == 1.0
    assert weights["yesno", "no"] == pytest.approx(1 / 3)
    assert {phrase(questions[0], Random(n))[1] for n in range(9)} == {
        "q",
        "q\nAnswer the question using a single word or phrase.",
    }


def write_source(folder: Path, rows: int = 6) -> Path:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), (200, 10, 10)).save(buffer, "JPEG")
    table = {
        "image": [buffer.getvalue()] * rows,
        "captions": [["a red square .", "red"]] * rows,
        "questions": [["Is it red?", "What is it?"]] * rows,
        "answers": [[["yes", "yes", "no"], ["square"]]] * rows,
        "sources": [["vqa2", "vqa2"]] * rows,
    }
    pq.write_table(pa.table(table), folder / "toy-train.parquet")
    return folder / "toy-train.parquet"


def make_trainer(folder: Path, source: Path, work: str) -> Trainer:
    features = Features(folder / "features", source, (1 + VISUAL, WIDTH), "toy")
    torch.manual_seed(0)
    list(features.fill(lambda images: torch.randn(len(images), 1 + VISUAL, WIDTH)))
    photos = read_photos([source])
    return Trainer(folder / work, reader(), CharTokenizer(), photos, {source.stem: features}, {}, photos[:2])


def test_a_stopped_stage_resumes_to_the_same_weights(tmp_path: Path) -> None:
    source = write_source(tmp_path)
    stage = Stage("tune", 6, batch=2, questions=2, tokens=200, lora_rate=1e-2, warmup=1, decay=2)
    whole = make_trainer(tmp_path, source, "whole")
    assert whole.run(stage)
    stopped = make_trainer(tmp_path, source, "stopped")
    steps = iter([False] * 6 + [True] * 2)
    assert not stopped.run(stage, lambda: next(steps))
    resumed = make_trainer(tmp_path, source, "stopped")
    assert resumed.run(stage)
    for name, value in whole.reader.trained().items():
        assert torch.equal(value, resumed.reader.trained()[name]), name


def test_parts_of_a_step_add_up(tmp_path: Path) -> None:
    source = write_source(tmp_path)
    stages = [Stage("tune", 2, batch=4, part=n, questions=2, tokens=200, lora_rate=1e-3, warmup=1) for n in (4, 1, 3)]
    whole, *others = (make_trainer(tmp_path, source, f"part-{stage.part}") for stage in stages)
    for trainer, stage in zip([whole, *others], stages, strict=True):
        assert trainer.run(stage)
    for other in others:
        for name, value in whole.reader.trained().items():
            assert torch.allclose(value, other.reader.trained()[name], atol=2e-4), name


def test_features_resume_and_refuse_another_tower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torino_lab.training.features.FLUSH", 1)
    source = write_source(tmp_path, rows=20)
    calls: list[int] = []

    def encode(images: Any) -> torch.Tensor:
        calls.append(len(images))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return torch.ones(len(images), 3, 4)

    cache = Features(tmp_path / "f", source, (3, 4), "one")
    with pytest.raises(KeyboardInterrupt):
        list(cache.fill(encode))
    again = Features(tmp_path / "f", source, (3, 4), "one")
    assert len(again.missing()) == 12
    list(again.fill(encode))
    assert not again.missing()
    assert bool((again[list(range(20))] == 1).all())
    with pytest.raises(ValueError, match="other features"):
        Features(tmp_path / "f", source, (3, 4), "two")
