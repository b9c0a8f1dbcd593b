"""The model for VLMEvalKit: in the kit itself if it is installed, otherwise with stand-ins."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.integrations import MERGING, PROMPT, generate, load_integration
from tests.support.tiny_vlm import QUESTION, photo
from torino import TorinoError, make
from torino.core.errors import BadParameter
from torino.datasets.images import mean_color, pad_square
from torino.integrations.vlmevalkit import write_question
from torino.vlm import reduced


class BaseModel:
    """Stand-in for vlmeval.vlm.base.BaseModel."""

    def dump_image(self, line: Any, dataset: str) -> list[str]:
        return [line["image_path"]]


@pytest.fixture
def table() -> dict[str, Any]:
    return {"taken": None}


@pytest.fixture
def kit(monkeypatch: pytest.MonkeyPatch, table: dict[str, Any]) -> Any:
    kinds = {"MMBench_DEV_EN": "MCQ", "POPE": "Y/N"}
    return load_integration(
        monkeypatch,
        "vlmevalkit",
        vlmeval__vlm__base={"BaseModel": BaseModel},
        vlmeval__dataset={"DATASET_TYPE": kinds.__getitem__},
        vlmeval__config={"supported_VLM": table},
    )


def message_about(path: Path) -> list[dict[str, str]]:
    return [{"type": "image", "value": str(path)}, {"type": "text", "value": QUESTION}]


def test_registered_model_answers(kit: Any, table: dict[str, Any], home: Path) -> None:
    kit.register_model("tiny", str(home / "llava"), reducer="random(budget=4)", device="cpu", max_new_tokens=3)
    model = table["tiny"]()
    assert isinstance(model, BaseModel)
    assert model.chat.vlm.padding == "square", "the kit's own LLaVA-1.5 pads to a square"
    answer = model.generate_inner(message_about(home / "0.png"), dataset="POPE")
    assert model.chat.after == 4
    with reduced(model.chat.vlm.model, make("random(budget=4)")):
        padded = pad_square(photo(), mean_color(model.chat.vlm.processor))
        assert answer == generate(model.chat, PROMPT, padded, 3)
    with pytest.raises(BadParameter, match="already"):
        kit.register_model("taken", "x")


def test_prompts_of_multiple_choice_questions(kit: Any, home: Path) -> None:
    model = kit.TorinoVLMEval(str(home / "llava"), reducer="none", device="cpu")
    assert (model.use_custom_prompt("MMBench_DEV_EN"), model.use_custom_prompt("POPE")) == (True, False)
    line = {"question": "which ?", "A": "x", "B": "y", "hint": float("nan"), "image_path": str(home / "0.png")}
    built = model.build_prompt(line, "MMBench_DEV_EN")
    assert [part["type"] for part in built] == ["image", "text"]
    assert built[1]["value"] == write_question(line)
    by_kit = kit.TorinoVLMEval(str(home / "llava"), reducer="none", prompts="kit", padding="crop", device="cpu")
    assert not by_kit.use_custom_prompt("MMBench_DEV_EN")
    assert by_kit.chat.vlm.padding == "crop"


def test_options_reach_the_session(kit: Any, home: Path) -> None:
    options = {"padding": "crop", "positions": "original", "attention": "proportional"}
    model = kit.TorinoVLMEval(
        str(home / "llava"), reducer=MERGING, sae=str(home / "sae"), device="cpu", max_new_tokens=4, **options
    )
    assert {name: getattr(model.chat.vlm, name) for name in options} == options
    answer = model.generate_inner(message_about(home / "0.png"))
    with reduced(model.chat.vlm.model, model.chat.reducer, positions="original", attention="proportional"):
        assert answer == generate(model.chat, PROMPT, photo())


@pytest.mark.parametrize("options", [{"prompts": "mine"}, {"padding": "stretch"}])
def test_wrong_options_give_one_sentence(kit: Any, home: Path, options: dict[str, str]) -> None:
    with pytest.raises(BadParameter, match="must be"):
        kit.TorinoVLMEval(str(home / "llava"), reducer="none", device="cpu", **options)


def test_without_the_kit_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vlmeval.vlm.base", None)
    monkeypatch.setitem(sys.modules, "vlmeval.config", None)
    module = load_integration(monkeypatch, "vlmevalkit")
    with pytest.raises(TorinoError, match="VLMEvalKit is not installed"):
        module.TorinoVLMEval("x")
    with pytest.raises(TorinoError, match="VLMEvalKit cannot be imported"):
        module.register_model("tiny", "x")


def test_questions_are_written_as_for_the_llava_models_of_the_kit() -> None:
    assert write_question({"question": "哪个？", "A": "甲", "B": "乙"}).endswith("\n请直接回答选项字母。")
    hinted = write_question({"question": "Which?", "hint": "Look.", "A": "x", "C": "z"})
    assert hinted.splitlines() == [
        "Look.",
        "Which?",
        "A. x",
        "C. z",
        "Answer with the option's letter from the given choices directly.",
    ]
    assert write_question({"question": "Why?"}) == "Why?\nAnswer the question directly."
    assert write_question({"question": "为什么？"}) == "为什么？\n请直接回答问题。"


def test_in_vlmevalkit_itself(home: Path) -> None:
    pytest.importorskip("vlmeval.vlm.base", reason="VLMEvalKit is not installed")
    from torino.integrations import vlmevalkit as integration

    model = integration.TorinoVLMEval(str(home / "llava"), reducer="random(budget=4)", device="cpu", max_new_tokens=2)
    assert model.generate(message_about(home / "0.png"), dataset="POPE")
    assert model.chat.after == 4
