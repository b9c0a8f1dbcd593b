"""The model for lmms-eval: in the kit itself if it is installed, otherwise with stand-ins."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.integrations import MERGING, PROMPT, generate, load_integration, user_asks
from tests.support.tiny_vlm import QUESTION, photo
from torino import TorinoError
from torino.core.errors import BadParameter
from torino.integrations import ChatModel

ROOT = Path(__file__).parents[2]
DOCUMENTS = [{"image": photo(seed=seed), "question": QUESTION} for seed in range(3)]


class Lmms:
    """Stand-in for lmms_eval.api.model.lmms."""

    is_simple = True

    def __init__(self) -> None:
        self.rank, self.task_dict = 0, dict[str, Any]()


@pytest.fixture
def kit(monkeypatch: pytest.MonkeyPatch) -> Any:
    messages: list[str] = []
    module = load_integration(
        monkeypatch,
        "lmms_eval",
        lmms_eval__api__model={"lmms": Lmms},
        loguru={"logger": SimpleNamespace(info=messages.append)},
        lmms_eval__models__registry_v2={"ModelManifest": SimpleNamespace},
    )
    module.messages = messages
    return module


def to_messages(document: dict[str, Any]) -> list[dict[str, Any]]:
    content = [{"type": "image", "url": document["image"]}, {"type": "text", "text": document["question"]}]
    return [{"role": "user", "content": content}]


def to_images(document: dict[str, Any]) -> list[Any]:
    return [document["image"]]


def requests(simple: bool, **generation: Any) -> list[Any]:
    options = {"max_new_tokens": 3, "temperature": 0, **generation}
    if simple:
        return [SimpleNamespace(args=(QUESTION, dict(options), to_images, i, "task", "test")) for i in range(3)]
    return [SimpleNamespace(args=(QUESTION, to_messages, dict(options), i, "task", "test")) for i in range(3)]


@pytest.mark.parametrize("simple", [False, True])
def test_chat_and_simple_requests(kit: Any, home: Path, stock: ChatModel, simple: bool) -> None:
    cls = kit.TorinoSimple if simple else kit.TorinoChat
    assert cls.is_simple is simple
    expected = [generate(stock, PROMPT, photo(seed=seed), 3) for seed in range(3)]
    model = cls(pretrained=str(home / "llava"), reducer="none", batch_size="2", device="cpu", max_batch_size=None)
    model.task_dict["task"] = {"test": DOCUMENTS}
    assert model.generate_until(requests(simple)) == expected
    assert "over 3 images" in kit.messages[-1]
    assert model.generate_until(requests(simple, until=[" "]))[0] == expected[0].split()[0]
    assert str(model.device) == "cpu"
    few = cls(pretrained=str(home / "llava"), reducer="random(budget=2;seed=1)", device="cpu")
    few.task_dict["task"] = {"test": DOCUMENTS}
    assert len(few.generate_until(requests(simple))) == 3
    assert few.chat.after == 6


def test_likelihoods_and_batches(kit: Any, home: Path, stock: ChatModel) -> None:
    model = kit.TorinoSimple(pretrained=str(home / "llava"), reducer="none", batch_size=4, device="cpu")
    model.task_dict["task"] = {"test": DOCUMENTS}
    targets = ["word1", lambda document: "word2"]
    likelihoods = [SimpleNamespace(args=(QUESTION, target, to_images, 0, "task", "test")) for target in targets]
    assert model.loglikelihood(likelihoods) == [stock.loss(user_asks(), "word1"), stock.loss(user_asks(), "word2")]
    mixed = [*requests(True), *requests(True, max_new_tokens=1)]
    assert [len(batch) for batch in model._batches([request.args for request in mixed])] == [3, 3]
    assert [len(text.split()) for text in model.generate_until(mixed)] == [3, 3, 3, 1, 1, 1]
    with pytest.raises(TorinoError, match="several rounds"):
        model.generate_until_multi_round([])


def test_manifest_names_both_classes(kit: Any) -> None:
    manifest = kit.manifest()
    assert (manifest.model_id, manifest.chat_class_path) == ("torino", "integration_lmms_eval.TorinoChat")
    assert manifest.simple_class_path == "integration_lmms_eval.TorinoSimple"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pretrained": ""}, "pretrained="),
        ({"delta": "2)", "reducer": "torino-m(k=2"}, "write ; instead of a comma"),
        ({"batch_size": "auto", "reducer": "none"}, "whole number"),
    ],
)
def test_wrong_arguments_give_one_sentence(kit: Any, home: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadParameter, match=message):
        kit.TorinoChat(**{"pretrained": str(home / "llava"), **options})


def test_options_reach_the_session(kit: Any, home: Path) -> None:
    options = {"padding": "square", "positions": "original", "attention": "proportional"}
    model = kit.TorinoChat(pretrained=str(home / "llava"), reducer=MERGING, sae=str(home / "sae"), **options)
    assert {name: getattr(model.chat.vlm, name) for name in options} == options
    model.task_dict["task"] = {"test": DOCUMENTS}
    expected = ChatModel(str(home / "llava"), reducer=MERGING, sae=str(home / "sae"), **options)
    assert model.generate_until(requests(False)) == expected.answer([user_asks(seed) for seed in range(3)], 3)


def test_without_the_kit_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lmms_eval.api.model", None)
    module = load_integration(monkeypatch, "lmms_eval")
    with pytest.raises(TorinoError, match="lmms-eval is not installed"):
        module.TorinoChat("x")


def test_in_lmms_eval_itself(home: Path) -> None:
    registry = pytest.importorskip("lmms_eval.models.registry_v2", reason="lmms-eval is not installed")
    from torino.integrations import lmms_eval as integration

    table = registry.ModelRegistryV2()
    table.register_manifest(integration.manifest())
    assert table.get_model_class("torino") is integration.TorinoChat
    assert table.get_model_class("torino", force_simple=True) is integration.TorinoSimple
    arguments = f"pretrained={home / 'llava'},reducer={MERGING},sae={home / 'sae'}"
    model = integration.TorinoChat.create_from_arg_string(arguments, {"batch_size": "2", "device": "cpu"})
    model.task_dict["task"] = {"test": DOCUMENTS}
    assert len(model.generate_until(requests(False))) == 3
    assert model.chat.reducer.spec == "torino-m(k=1, delta=1)"


def test_local_task_end_to_end(tmp_path: Path) -> None:
    pytest.importorskip("lmms_eval", reason="lmms-eval is not installed")
    if not any(entry.name == "torino" for entry in entry_points(group="lmms_eval.models")):
        pytest.skip("torino is not installed with its entry points")
    script = ROOT / "examples" / "lmms_eval_local" / "run.py"
    command = [sys.executable, str(script), str(tmp_path / "out"), "--reducers", "none", "random(budget=1)"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "| `none` | 1.000 |" in done.stdout
    assert "64.0 visual tokens per image reduced to 1.0, over 8 images" in done.stdout + done.stderr
