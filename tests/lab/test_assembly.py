"""The lab's model, assembled from a vision tower, a language model and trained parts; here with tiny ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torino_lab import assembly
from torino_lab.training import trainer
from torino_lab.training.export import export
from torino_lab.training.packing import HEAD, encode_question, pack
from torino_lab.training.trainer import Reader
from transformers import (
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    CLIPVisionModelWithProjection,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from tests.support.files import flip_byte
from torino.core.errors import BadFile
from torino.vlm import load_vlm

WIDTH, HIDDEN = 24, 32
WORDS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(chr(code) for code in range(32, 127)), "Ċ"]


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORINO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(assembly, "clip_folder", lambda _: write_tower(tmp_path / "clip"))
    monkeypatch.setattr(assembly, "read_smollm2", language)
    monkeypatch.setattr(trainer, "WIDTH", WIDTH)


def write_tower(folder: Path) -> Path:
    if not folder.exists():
        torch.manual_seed(1)
        config = CLIPVisionConfig(
            hidden_size=WIDTH,
            intermediate_size=32,
            num_hidden_layers=3,
            num_attention_heads=2,
            image_size=32,
            patch_size=8,
            projection_dim=8,
        )
        CLIPVisionModelWithProjection(config).save_pretrained(folder)
        size = {"height": 32, "width": 32}
        CLIPImageProcessorPil(size=size, do_center_crop=False).save_pretrained(folder)
    return folder


def language(rope_theta: float | None = None) -> tuple[Any, Any]:
    torch.manual_seed(2)
    tokenizer = Tokenizer(models.BPE(vocab={word: n for n, word in enumerate(WORDS)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
    )
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=len(WORDS),
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        rope_parameters={"rope_type": "default", "rope_theta": rope_theta or trainer.ROPE_THETA},
    )
    return LlamaForCausalLM(config), wrapped


def write_checkpoint(folder: Path, rope_theta: float | None = None) -> tuple[Path, Reader]:
    torch.manual_seed(3)
    reader = Reader(language(rope_theta)[0], torch.float32, rank=4)
    for name, parameter in reader.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    reader.projector.mean, reader.projector.std = torch.randn(WIDTH) * 0.1, torch.rand(WIDTH) + 0.5
    # The package ships half precision: use weights that it represents exactly.
    for parameter in reader.parameters():
        parameter.data = parameter.data.half().float()
    folder.mkdir()
    save_file({n: v.detach().contiguous() for n, v in reader.trained().items()}, folder / "checkpoint.safetensors")
    return folder / "checkpoint.safetensors", reader.eval()


@pytest.mark.parametrize("rope_theta", [None, 10.0])
def test_plain_transformers_answers_as_the_trainer_computed(tmp_path: Path, rope_theta: float | None) -> None:
    checkpoint, reader = write_checkpoint(tmp_path / "work", rope_theta)
    export(checkpoint, tmp_path / "shipped")
    assert (tmp_path / "shipped" / assembly.LANGUAGE).exists() == (rope_theta is not None)
    assert all(value.dtype == torch.float16 for value in load_file(tmp_path / "shipped" / assembly.ADAPTER).values())
    folder = assembly.lab_folder(tmp_path / "shipped")
    assert assembly.lab_folder(tmp_path / "shipped") == folder  # cached
    vlm = load_vlm(folder, "cpu")
    assert vlm.model.config.vision_feature_layer == -2
    image = Image.effect_noise((40, 28), 90).convert("RGB")
    chat = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Who?"}]}]
    text = vlm.processor.apply_chat_template(chat, add_generation_prompt=True)
    assert text == "<|im_start|>user\n<image>\nWho?<|im_end|>\n<|im_start|>assistant\n"
    inputs = vlm.processor(images=image, text=text, return_tensors="pt")
    with torch.inference_mode():
        stock = vlm.model(**inputs).logits[0, -1]
        tower = vlm.model.model.vision_tower(inputs["pixel_values"], output_hidden_states=True)
        tokenizer = language()[1]
        head = torch.tensor([tokenizer(HEAD, add_special_tokens=False)["input_ids"]])
        batch = pack([[encode_question(tokenizer, "open", "Who?", "x")]], head.shape[1], 16, 2, 100)
        trained = reader(tower.hidden_states[-2][:, 1:], head, batch)[0]
    assert torch.allclose(stock[: len(WORDS)], trained, atol=2e-2)  # the folder is in half precision
    assert stock[: len(WORDS)].argmax() == trained.argmax()


def test_a_checkpoint_with_other_rotary_embeddings_is_refused(tmp_path: Path) -> None:
    checkpoint, reader = write_checkpoint(tmp_path / "work", 10.0)
    reader.load_trained(load_file(checkpoint))
    other = Reader(language()[0], torch.float32, rank=4)
    with pytest.raises(ValueError, match="has rope_theta 10, the model 100000"):
        other.load_trained(load_file(checkpoint))


def test_other_trained_parts_are_another_model(tmp_path: Path) -> None:
    checkpoint, _ = write_checkpoint(tmp_path / "work")
    export(checkpoint, tmp_path / "shipped")
    first = assembly.lab_folder(tmp_path / "shipped")
    tensors = load_file(checkpoint)
    save_file({**tensors, "projector.linear_2.bias": tensors["projector.linear_2.bias"] + 1}, checkpoint)
    export(checkpoint, tmp_path / "shipped")
    assert assembly.lab_folder(tmp_path / "shipped") != first


def test_damaged_weights_in_the_cache_are_refused(tmp_path: Path) -> None:
    checkpoint, _ = write_checkpoint(tmp_path / "work")
    export(checkpoint, tmp_path / "shipped")
    folder = assembly.lab_folder(tmp_path / "shipped")
    assert assembly.lab_folder(tmp_path / "shipped") == folder
    flip_byte(folder / "model.safetensors", -1)
    with pytest.raises(BadFile, match=r"model\.safetensors is damaged: .* checksum\. Delete the folder"):
        assembly.lab_folder(tmp_path / "shipped")


def test_missing_parts_and_overflow_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match=r"There is no file .*projector\.safetensors\. Install torino-lab again"):
        assembly.lab_folder(tmp_path)
    checkpoint, _ = write_checkpoint(tmp_path / "work")
    tensors = load_file(checkpoint)
    save_file({**tensors, "projector.linear_2.bias": tensors["projector.linear_2.bias"] + 1e6}, checkpoint)
    with pytest.raises(ValueError, match=r"linear_2\.bias does not fit into half precision"):
        export(checkpoint, tmp_path / "shipped")
