"""Reducers inside other evaluation kits: in the kits themselves where they are installed, else with stand-ins."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from test_ask import PATCHES, QUESTION, TEMPLATE, _build, photo

from torino import SAE, TorinoError, make
from torino.core.errors import BadParameter
from torino.integrations import ChatModel
from torino.integrations.chat import cut, generation_of, interleaved
from torino.integrations.vlmevalkit import worded
from torino.sae import SAECard
from torino.vlm import reduced

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "torino" / "guests"
M = "torino-m(k=1;delta=1)"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("guests")
    _build(folder / "llava")
    (folder / "llava" / "chat_template.jinja").write_text(TEMPLATE.replace("{{ bos_token }} ", ""))
    source = torch.Generator().manual_seed(1)
    SAE(
        torch.randn(24, 32, generator=source),
        W_dec=torch.randn(24, 32, generator=source),
        card=SAECard(encoder="tiny/clip", block=1),
    ).save(folder / "sae")
    for seed in range(3):
        photo(seed=seed).save(folder / f"{seed}.png")
    return folder


@pytest.fixture(scope="module")
def stock(home: Path) -> ChatModel:
    return ChatModel(str(home / "llava"), reducer="none", device="cpu")


@pytest.fixture(scope="module")
def merging(home: Path) -> ChatModel:
    return ChatModel(str(home / "llava"), reducer=M, sae=str(home / "sae"), device="cpu")


def talk(seed: int | None = 0, text: str = QUESTION) -> list[dict[str, Any]]:
    pictures = [] if seed is None else [{"type": "image", "image": photo(seed=seed)}]
    return [{"role": "user", "content": [*pictures, {"type": "text", "text": text}]}]


def by_hand(guest: ChatModel, prompt: str, seed: int | None = 0, length: int = 4) -> str:
    pictures = {} if seed is None else {"images": photo(seed=seed)}
    inputs = guest.processor(text=prompt, return_tensors="pt", **pictures)
    out = guest.model.generate(**inputs, do_sample=False, max_new_tokens=length)
    return guest.processor.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


# ---------------------------------------------------------------------- what both kits share


def test_with_all_tokens_the_answers_are_the_stock_models_own(stock: ChatModel) -> None:
    talks = [talk(0), talk(None, "how many ?"), talk(1), talk(2)]
    asked = [("USER: <image> what is this ? ASSISTANT:", 0), ("USER: how many ? ASSISTANT:", None)]
    asked += [("USER: <image> what is this ? ASSISTANT:", seed) for seed in (1, 2)]
    expected = [by_hand(stock, *one) for one in asked]
    assert len(set(expected)) > 2, "the tiny model does not look at its pictures, so this shows nothing"
    assert stock.answer(talks, 4) == expected
    assert [stock.answer([one], 4)[0] for one in talks] == expected


def test_a_reducer_is_at_work_and_counted(merging: ChatModel, home: Path) -> None:
    reducer = make("torino-m(k=1, delta=1)", sae=SAE.load(home / "sae"))
    expected, lengths = [], []
    for seed in range(3):
        with reduced(merging.model, reducer) as trace:
            expected.append(by_hand(merging, "USER: <image> what is this ? ASSISTANT:", seed))
        lengths.append(trace.after)
    merging.images = merging.before = merging.after = 0
    assert merging.answer([talk(seed) for seed in range(3)], 4) == expected
    assert (merging.images, merging.before, merging.after) == (3, 3 * PATCHES, sum(lengths))
    assert merging.after < merging.before
    assert f"became {sum(lengths) / 3:.1f}, over 3 images" in merging.summary()
    assert "torino-m(k=1, delta=1)" in repr(merging)
    merging.answer([talk(None)], 2)
    assert merging.images == 3, "a question without a picture is answered with the stock model"


def test_the_budget_overrules_the_spec(home: Path) -> None:
    guest = ChatModel(str(home / "llava"), reducer="random(budget=9;seed=3)", budget=5, device="cpu")
    assert guest.reducer is not None
    assert guest.reducer.spec == "random(budget=5, seed=3)"
    guest.answer([talk()], 1)
    assert guest.after == 5
    assert "No image" in ChatModel(str(home / "llava"), reducer="none", device="cpu").summary()


def test_the_loss_of_a_continuation(stock: ChatModel, home: Path) -> None:
    prompt = "USER: <image> what is this ? ASSISTANT:"

    def truth(words: str) -> tuple[float, list[int], list[int]]:
        inputs = stock.processor(images=photo(), text=f"{prompt} {words}", return_tensors="pt")
        with torch.no_grad():
            logits = stock.model(**inputs).logits[0, -3:-1]
        said = inputs["input_ids"][0, -2:]
        return float(torch.nn.functional.cross_entropy(logits, said)), logits.argmax(-1).tolist(), said.tolist()

    loss, likeliest, said = truth("word1 word2")
    assert likeliest != said
    assert stock.loss(talk(), "word1 word2") == (pytest.approx(loss, rel=1e-4), False)
    words = stock.processor.tokenizer.convert_ids_to_tokens(likeliest[:1])[0]
    second = stock.processor.tokenizer.convert_ids_to_tokens(truth(f"{words} word1")[1][1:])[0]
    loss, likeliest, said = truth(f"{words} {second}")
    assert likeliest == said
    assert stock.loss(talk(), f"{words} {second}") == (pytest.approx(loss, rel=1e-4), True)
    whole = ChatModel(str(home / "llava"), reducer="random", budget=PATCHES, device="cpu")
    assert whole.loss(talk(), "word1 word2")[0] == pytest.approx(stock.loss(talk(), "word1 word2")[0], rel=1e-4)
    few = ChatModel(str(home / "llava"), reducer="random", budget=2, device="cpu")
    assert few.loss(talk(), "word1 word2")[0] != pytest.approx(stock.loss(talk(), "word1 word2")[0], rel=1e-4)
    with pytest.raises(BadParameter, match="empty"):
        stock.loss(talk(), " ")


def test_padding_and_places_of_pictures(home: Path, stock: ChatModel) -> None:
    square = ChatModel(str(home / "llava"), reducer="none", padding="square", device="cpu")
    wide = [[{"role": "user", "content": interleaved(QUESTION, [photo(width=192)])}]]
    assert square.answer(wide, 4) != stock.answer(wide, 4)
    both = interleaved("left <image> right <image> what is this ?", [photo(), photo(seed=1)])
    assert [part["type"] for part in both] == ["text", "image", "text", "image", "text"]
    prompt = stock.prompt([{"role": "user", "content": both}])
    assert prompt == "USER: left<image> right<image> what is this ? ASSISTANT:"
    assert interleaved("what <image> ?", []) == [{"type": "text", "text": "what ?"}]
    assert [part["type"] for part in interleaved("what <image> ?", [1, 2])] == ["image", "image", "text"]  # type: ignore[list-item]
    assert stock.prompt(talk(text="what <image> is this ?")).count("<image>") == 1, "one picture, one placeholder"


def test_a_model_without_a_template(home: Path, tmp_path: Path) -> None:
    import shutil

    bare = shutil.copytree(home / "llava", tmp_path / "bare")
    (bare / "chat_template.jinja").unlink()
    guest = ChatModel(str(bare), reducer="none", device="cpu")
    assert guest.prompt(talk()) == f"USER: <image>\n{QUESTION} ASSISTANT:"
    with pytest.raises(TorinoError, match="no chat template"):
        guest.prompt([*talk(), {"role": "assistant", "content": []}, *talk(None)])
    guest.processor.chat_template = "{{ nothing.at.all }}"
    with pytest.raises(TorinoError, match="template of this llava model failed"):
        guest.prompt(talk())


def test_a_reducer_that_reads_the_question(home: Path, tmp_path: Path, stock: ChatModel) -> None:
    clip, tokenizer = tiny.clip(stock.model.model.vision_tower)
    clip.save_pretrained(tmp_path / "clip")
    tokenizer.save_pretrained(tmp_path / "clip")
    guest = ChatModel(str(home / "llava"), reducer="cdpruner(budget=3)", clip=str(tmp_path / "clip"), device="cpu")
    together = guest.answer([talk(0, "what is this ?"), talk(0, "how many cups ?")], 3)
    assert guest.after == 6
    assert together == [guest.answer([talk(0, text)], 3)[0] for text in ("what is this ?", "how many cups ?")]


def test_what_kits_ask_of_generation() -> None:
    assert generation_of({"temperature": 0.5, "top_p": 0.9, "until": ["x"]}) == {
        "temperature": 0.5,
        "top_p": 0.9,
        "do_sample": True,
    }
    assert generation_of({"temperature": 0.5, "do_sample": False}) == {"do_sample": False}
    assert generation_of({}) == {"do_sample": False}
    assert cut("a stop b end", ["end", "stop"]) == "a "
    assert cut("a", "") == "a"


def test_mistakes_get_a_sentence(home: Path) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"reducer": "torino-m"}, "sae=FOLDER"),
        ({"reducer": "random", "sae": "raw"}, "no meaning"),
        ({"reducer": "none", "budget": 3}, "no meaning"),
        ({"reducer": "none", "sae": "raw"}, "no meaning"),
        ({"reducer": "nobody"}, "nobody"),
        ({"reducer": "random(k=2"}, "Cannot read the reducer"),
        ({"reducer": "cdpruner(budget=3)"}, "which CLIP reads it"),
        ({"reducer": "random(budget=3)", "clip": "x"}, "no meaning"),
        ({"reducer": "none", "padding": "stretch"}, "crop or square"),
        ({"reducer": "none", "positions": "odd"}, "compact or original"),
        ({"reducer": "none", "device": "abacus"}, "device"),
    ]
    for options, expected in cases:
        with pytest.raises(TorinoError, match=expected):
            ChatModel(str(home / "llava"), **{"device": "cpu", **options})
    guest = ChatModel(str(home / "llava"), reducer="random", budget=3, device="cpu")
    with pytest.raises(TorinoError, match="shows a video"):
        guest.answer([[{"role": "user", "content": [{"type": "video", "image": "x.mp4"}]}]], 1)


# ---------------------------------------------------------------------- lmms-eval


def load(monkeypatch: pytest.MonkeyPatch, name: str, **stand_ins: Any) -> Any:
    """A module of guests, run anew with stand-ins for what it imports from its kit."""
    for module, contents in stand_ins.items():
        made = ModuleType(module.replace("__", "."))
        made.__dict__.update(contents)
        monkeypatch.setitem(sys.modules, module.replace("__", "."), made)
    spec = importlib.util.spec_from_file_location(f"guest_{name}", SOURCE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Lmms:
    """Stands for lmms_eval.api.model.lmms."""

    is_simple = True

    def __init__(self) -> None:
        self.rank, self.task_dict = 0, dict[str, Any]()


@pytest.fixture
def kit(monkeypatch: pytest.MonkeyPatch) -> Any:
    said: list[str] = []
    module = load(
        monkeypatch,
        "lmms_eval",
        lmms_eval__api__model={"lmms": Lmms},
        loguru={"logger": SimpleNamespace(info=said.append)},
        lmms_eval__models__registry_v2={"ModelManifest": SimpleNamespace},
    )
    module.said = said
    return module


DOCUMENTS = [{"image": photo(seed=seed), "question": QUESTION} for seed in range(3)]


def messages(document: dict[str, Any]) -> list[dict[str, Any]]:
    content = [{"type": "image", "url": document["image"]}, {"type": "text", "text": document["question"]}]
    return [{"role": "user", "content": content}]


def requests(simple: bool, **generation: Any) -> list[Any]:
    def visual_tokens(document: dict[str, Any]) -> list[Any]:
        return [document["image"]]

    asked = {"max_new_tokens": 3, "temperature": 0, **generation}
    if simple:
        return [SimpleNamespace(args=(QUESTION, dict(asked), see, i, "task", "test")) for i in range(3)]
    return [SimpleNamespace(args=(QUESTION, messages, dict(asked), i, "task", "test")) for i in range(3)]


@pytest.mark.parametrize("simple", [False, True])
def test_lmms_eval_asks_in_both_its_ways(kit: Any, home: Path, stock: ChatModel, simple: bool) -> None:
    cls = kit.TorinoSimple if simple else kit.Torino
    assert cls.is_simple is simple
    expected = [by_hand(stock, "USER: <image> what is this ? ASSISTANT:", seed, 3) for seed in range(3)]
    model = cls(pretrained=str(home / "llava"), reducer="none", batch_size="2", device="cpu", max_batch_size=None)
    model.task_dict["task"] = {"test": DOCUMENTS}
    assert model.generate_until(requests(simple)) == expected
    assert "over 3 images" in kit.said[-1]
    first = expected[0].split()[0]
    assert model.generate_until(requests(simple, until=[" "]))[0] == first
    assert str(model.device) == "cpu"
    few = cls(pretrained=str(home / "llava"), reducer="random(budget=2;seed=1)", device="cpu")
    few.task_dict["task"] = {"test": DOCUMENTS}
    assert len(few.generate_until(requests(simple))) == 3
    assert few.guest.after == 6


def test_lmms_eval_likelihoods_and_batches(kit: Any, home: Path, stock: ChatModel) -> None:
    model = kit.TorinoSimple(pretrained=str(home / "llava"), reducer="none", batch_size=4, device="cpu")
    model.task_dict["task"] = {"test": DOCUMENTS}

    def visual_tokens(document: dict[str, Any]) -> list[Any]:
        return [document["image"]]

    targets = ["word1", lambda document: "word2"]
    asked = [SimpleNamespace(args=(QUESTION, target, see, 0, "task", "test")) for target in targets]
    assert model.loglikelihood(asked) == [stock.loss(talk(), "word1"), stock.loss(talk(), "word2")]
    mixed = [*requests(True), *requests(True, max_new_tokens=1)]
    assert [len(batch) for batch in model._batches([one.args for one in mixed])] == [3, 3]
    assert [len(text.split()) for text in model.generate_until(mixed)] == [3, 3, 3, 1, 1, 1]
    with pytest.raises(TorinoError, match="several rounds"):
        model.generate_until_multi_round([])


def test_lmms_eval_arguments(kit: Any, home: Path) -> None:
    told = kit.manifest()
    assert (told.model_id, told.chat_class_path) == ("torino", "guest_lmms_eval.Torino")
    assert told.simple_class_path == "guest_lmms_eval.TorinoSimple"
    for options, expected in (
        ({"pretrained": ""}, "pretrained="),
        ({"delta": "2)", "reducer": "torino-m(k=2"}, "write ; instead of a comma"),
        ({"batch_size": "auto", "reducer": "none"}, "whole number"),
    ):
        with pytest.raises(BadParameter, match=expected):
            kit.Torino(**{"pretrained": str(home / "llava"), **options})


def test_without_the_kits_the_guests_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, kit in (("lmms_eval", "lmms_eval.api.model"), ("vlmevalkit", "vlmeval.vlm.base")):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, kit, None)
            module = load(patch, name)
            with pytest.raises(TorinoError, match="not installed"):
                module.Torino("x")


def test_in_lmms_eval_itself(home: Path) -> None:
    registry = pytest.importorskip("lmms_eval.models.registry_v2", reason="lmms-eval is not installed")
    from torino.integrations import lmms_eval as guest

    table = registry.ModelRegistryV2()
    table.register_manifest(guest.manifest())
    assert table.get_model_class("torino") is guest.Torino
    assert table.get_model_class("torino", force_simple=True) is guest.TorinoSimple
    arguments = f"pretrained={home / 'llava'},reducer={M},sae={home / 'sae'}"
    model = guest.Torino.create_from_arg_string(arguments, {"batch_size": "2", "device": "cpu"})
    model.task_dict["task"] = {"test": DOCUMENTS}
    assert len(model.generate_until(requests(False))) == 3
    assert model.guest.reducer.spec == "torino-m(k=1, delta=1)"


def test_a_local_task_end_to_end(tmp_path: Path) -> None:
    pytest.importorskip("lmms_eval", reason="lmms-eval is not installed")
    if not any(one.name == "torino" for one in entry_points(group="lmms_eval.models")):
        pytest.skip("torino is not installed with its entry points")
    script = ROOT / "examples" / "lmms_eval_local" / "run.py"
    command = [sys.executable, str(script), str(tmp_path / "out"), "--reducers", "none", "random(budget=1)"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "| `none` | 1.000 |" in done.stdout
    assert "64.0 visual tokens an image became 1.0, over 8 images" in done.stdout + done.stderr


# ---------------------------------------------------------------------- VLMEvalKit


class BaseModel:
    """Stands for vlmeval.vlm.base.BaseModel."""

    def dump_image(self, line: Any, dataset: str) -> list[str]:
        return [line["image_path"]]


def test_vlmevalkit(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    table: dict[str, Any] = {"taken": None}
    kinds = {"MMBench_DEV_EN": "MCQ", "POPE": "Y/N"}
    kit = load(
        monkeypatch,
        "vlmevalkit",
        vlmeval__vlm__base={"BaseModel": BaseModel},
        vlmeval__dataset={"DATASET_TYPE": kinds.__getitem__},
        vlmeval__config={"supported_VLM": table},
    )
    kit.register("tiny", str(home / "llava"), reducer="random(budget=4)", device="cpu", max_new_tokens=3)
    model = table["tiny"]()
    assert isinstance(model, BaseModel)
    assert model.guest.padding == "square", "as this kit does it for LLaVA-1.5"
    message = [{"type": "image", "value": str(home / "0.png")}, {"type": "text", "value": QUESTION}]
    said = model.generate_inner(message, dataset="POPE")
    assert model.guest.after == 4
    with reduced(model.guest.model, make("random(budget=4)")):
        from torino.datasets.images import mean_color, pad_square

        padded = pad_square(photo(), mean_color(model.guest.processor))
        inputs = model.guest.processor(
            images=padded, text="USER: <image> what is this ? ASSISTANT:", return_tensors="pt"
        )
        out = model.guest.model.generate(**inputs, do_sample=False, max_new_tokens=3)
    assert said == model.guest.processor.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert (model.use_custom_prompt("MMBench_DEV_EN"), model.use_custom_prompt("POPE")) == (True, False)
    line = {"question": "which ?", "A": "x", "B": "y", "hint": float("nan"), "image_path": str(home / "0.png")}
    built = model.build_prompt(line, "MMBench_DEV_EN")
    assert [part["type"] for part in built] == ["image", "text"]
    assert built[1]["value"] == worded(line)
    own = kit.Torino(str(home / "llava"), reducer="none", prompts="kit", padding="crop", device="cpu")
    assert not own.use_custom_prompt("MMBench_DEV_EN")
    assert own.guest.padding == "crop"
    with pytest.raises(BadParameter, match="already"):
        kit.register("taken", "x")
    for options in ({"prompts": "mine"}, {"padding": "stretch"}):
        with pytest.raises(BadParameter, match="must be"):
            kit.Torino(str(home / "llava"), reducer="none", device="cpu", **options)


def test_questions_are_worded_as_vlmevalkit_words_them_for_llava() -> None:
    assert worded({"question": "哪个？", "A": "甲", "B": "乙"}).endswith("\n请直接回答选项字母。")
    hinted = worded({"question": "Which?", "hint": "ReducedCall.", "A": "x", "C": "z"})
    assert hinted.splitlines() == [
        "ReducedCall.",
        "Which?",
        "A. x",
        "C. z",
        "Answer with the option's letter from the given choices directly.",
    ]
    assert worded({"question": "Why?"}) == "Why?\nAnswer the question directly."
    assert worded({"question": "为什么？"}) == "为什么？\n请直接回答问题。"


def test_in_vlmevalkit_itself(home: Path) -> None:
    pytest.importorskip("vlmeval.vlm.base", reason="VLMEvalKit is not installed")
    from torino.integrations import vlmevalkit as guest

    model = guest.Torino(str(home / "llava"), reducer="random(budget=4)", device="cpu", max_new_tokens=2)
    message = [{"type": "image", "value": str(home / "0.png")}, {"type": "text", "value": QUESTION}]
    assert model.generate(message, dataset="POPE")
    assert model.guest.after == 4
