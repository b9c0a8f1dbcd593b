"""The chat model that all integrations share."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import tiny
from tests.support.integrations import MERGING, PROMPT, generate, user_asks
from tests.support.tiny_vlm import PATCHES, QUESTION, photo
from torino import SAE, TorinoError, make
from torino.core.errors import BadParameter
from torino.datasets.images import mean_color, pad_square
from torino.integrations import ChatModel
from torino.integrations.chat import cut_at, generation_options, interleave
from torino.vlm import reduced


@pytest.fixture(scope="module")
def merging(home: Path) -> ChatModel:
    return ChatModel(str(home / "llava"), reducer=MERGING, sae=str(home / "sae"), device="cpu")


def prompt_for(chat: ChatModel, conversation: list[dict[str, Any]]) -> str:
    return chat.vlm.chat_inputs([conversation]).prompts[0]


def test_answers_with_all_tokens_equal_the_stock_model(stock: ChatModel) -> None:
    conversations = [user_asks(0), user_asks(None, "how many ?"), user_asks(1), user_asks(2)]
    expected = [generate(stock, PROMPT, photo()), generate(stock, "USER: how many ? ASSISTANT:")]
    expected += [generate(stock, PROMPT, photo(seed=seed)) for seed in (1, 2)]
    assert len(set(expected)) > 2, "the answers do not depend on the image, so this test is void"
    assert stock.answer(conversations, 4) == expected
    assert [stock.answer([conversation], 4)[0] for conversation in conversations] == expected


def test_reducer_is_applied_and_counted(merging: ChatModel, home: Path) -> None:
    reducer = make("torino-m(k=1, delta=1)", sae=SAE.load(home / "sae"))
    expected, lengths = [], []
    for seed in range(3):
        with reduced(merging.vlm.model, reducer) as trace:
            expected.append(generate(merging, PROMPT, photo(seed=seed)))
        lengths.append(trace.after)
    merging.images = merging.before = merging.after = 0
    assert merging.answer([user_asks(seed) for seed in range(3)], 4) == expected
    assert (merging.images, merging.before, merging.after) == (3, 3 * PATCHES, sum(lengths))
    assert merging.after < merging.before
    assert f"reduced to {sum(lengths) / 3:.1f}, over 3 images" in merging.summary()
    assert "torino-m(k=1, delta=1)" in repr(merging)
    merging.answer([user_asks(None)], 2)
    assert merging.images == 3, "the stock model answers questions without images"


def test_budget_overrides_the_spec(home: Path) -> None:
    chat = ChatModel(str(home / "llava"), reducer="random(budget=9;seed=3)", budget=5, device="cpu")
    assert chat.reducer is not None
    assert chat.reducer.spec == "random(budget=5, seed=3)"
    chat.answer([user_asks()], 1)
    assert chat.after == 5
    assert "No image" in ChatModel(str(home / "llava"), reducer="none", device="cpu").summary()


def test_loss_of_a_continuation(stock: ChatModel, home: Path) -> None:
    processor = stock.vlm.processor

    def compute(words: str) -> tuple[float, list[int], list[int]]:
        inputs = processor(images=photo(), text=f"{PROMPT} {words}", return_tensors="pt")
        with torch.no_grad():
            logits = stock.vlm.model(**inputs).logits[0, -3:-1]
        target = inputs["input_ids"][0, -2:]
        return float(torch.nn.functional.cross_entropy(logits, target)), logits.argmax(-1).tolist(), target.tolist()

    loss, likeliest, target = compute("word1 word2")
    assert likeliest != target
    assert stock.loss(user_asks(), "word1 word2") == (pytest.approx(loss, rel=1e-4), False)
    first = processor.tokenizer.convert_ids_to_tokens(likeliest[:1])[0]
    second = processor.tokenizer.convert_ids_to_tokens(compute(f"{first} word1")[1][1:])[0]
    loss, likeliest, target = compute(f"{first} {second}")
    assert likeliest == target
    assert stock.loss(user_asks(), f"{first} {second}") == (pytest.approx(loss, rel=1e-4), True)
    complete = ChatModel(str(home / "llava"), reducer="random", budget=PATCHES, device="cpu")
    full_loss = stock.loss(user_asks(), "word1 word2")[0]
    assert complete.loss(user_asks(), "word1 word2")[0] == pytest.approx(full_loss, rel=1e-4)
    few = ChatModel(str(home / "llava"), reducer="random", budget=2, device="cpu")
    assert few.loss(user_asks(), "word1 word2")[0] != pytest.approx(full_loss, rel=1e-4)
    assert (few.images, few.before, few.after) == (1, PATCHES, 2)
    with pytest.raises(BadParameter, match="empty"):
        stock.loss(user_asks(), " ")


# ---------------------------------------------------------------------- options of the session


@contextmanager
def record_calls(chat: ChatModel) -> Iterator[dict[str, list[Any]]]:
    """Record what the tower, the language model and its attention receive."""
    calls: dict[str, list[Any]] = {"pixels": [], "positions": [], "masks": []}
    inner = chat.vlm.model.model

    def record_pixels(_: Any, given: Any, options: Any) -> None:
        calls["pixels"].append(options["pixel_values"] if "pixel_values" in options else given[0])

    def record_positions(_: Any, given: Any, options: Any) -> None:
        calls["positions"].append(options["position_ids"].flatten().tolist())

    def record_mask(_: Any, given: Any, options: Any, output: Any) -> None:  # after all hooks that rewrite the mask
        calls["masks"].append(options.get("attention_mask"))

    handles = [
        inner.vision_tower.register_forward_pre_hook(record_pixels, with_kwargs=True),
        inner.language_model.layers[0].register_forward_pre_hook(record_positions, with_kwargs=True),
        inner.language_model.layers[0].self_attn.register_forward_hook(record_mask, with_kwargs=True),
    ]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("use", ["answer", "loss"])
def test_positions_reach_the_model(home: Path, use: str) -> None:
    first: dict[str, list[int]] = {}
    for positions in ("auto", "compact", "original"):
        chat = ChatModel(str(home / "llava"), reducer=MERGING, sae=str(home / "sae"), positions=positions, device="cpu")
        with record_calls(chat) as calls:
            chat.answer([user_asks()], 1) if use == "answer" else chat.loss(user_asks(), "word1 word2")
        first[positions], kept = calls["positions"][0], chat.after
        assert f"positions {positions}" in chat.summary()
        if use == "answer":
            answer = chat.answer([user_asks()], 4)
            with reduced(chat.vlm.model, chat.reducer, positions=positions):
                assert answer == [generate(chat, PROMPT, photo())]
    length = len(first["compact"])
    assert first["auto"] == first["compact"] == list(range(length))
    assert len(first["original"]) == length
    assert first["original"] != first["compact"]
    assert first["original"][-1] == length - 1 + PATCHES - kept, "text after the image keeps its position"


@pytest.mark.parametrize("use", ["answer", "loss"])
def test_attention_reaches_the_model(home: Path, use: str) -> None:
    masks: dict[str, Any] = {}
    for attention in ("auto", "plain", "proportional"):
        chat = ChatModel(str(home / "llava"), reducer=MERGING, sae=str(home / "sae"), attention=attention, device="cpu")
        with record_calls(chat) as calls:
            chat.answer([user_asks()], 1) if use == "answer" else chat.loss(user_asks(), "word1 word2")
        masks[attention] = calls["masks"][0]
        assert f"attention {attention}" in chat.summary()
        if use == "answer":
            answer = chat.answer([user_asks()], 4)
            with reduced(chat.vlm.model, chat.reducer, attention=attention):
                assert answer == [generate(chat, PROMPT, photo())]
    for attention in ("auto", "plain"):
        mask = masks[attention]
        assert mask is None or mask.dtype == torch.bool or not mask[mask > torch.finfo(mask.dtype).min].any()
    reduction = chat.vlm.reduce(chat.vlm.encode(photo(), [chat.reducer]), chat.reducer)
    (plan,) = reduction.plans
    assert int(plan.sizes.max()) > 1
    last_row = masks["proportional"][0, 0, -1]
    start = int((last_row > 0).nonzero()[0]) - int((plan.sizes > 1).nonzero()[0])
    assert torch.allclose(last_row[start : start + len(plan)], plan.sizes.float().log(), atol=1e-6)
    assert int((last_row > 0).sum()) == int((plan.sizes > 1).sum())


def test_attention_changes_the_loss(home: Path) -> None:
    losses = [
        ChatModel(str(home / "llava"), reducer=MERGING, sae=str(home / "sae"), attention=attention, device="cpu").loss(
            user_asks(), "word1 word2"
        )[0]
        for attention in ("plain", "proportional")
    ]
    assert losses[0] != pytest.approx(losses[1], rel=1e-4)


@pytest.mark.parametrize("use", ["answer", "loss"])
@pytest.mark.parametrize("reducer", ["none", "random(budget=5)"])
def test_padding_reaches_the_model(home: Path, reducer: str, use: str) -> None:
    wide = photo(width=192)
    conversation = [{"role": "user", "content": interleave(QUESTION, [wide])}]
    for padding in ("crop", "square"):
        chat = ChatModel(str(home / "llava"), reducer=reducer, padding=padding, device="cpu")
        with record_calls(chat) as calls:
            chat.answer([conversation], 1) if use == "answer" else chat.loss(conversation, "word1")
        processor = chat.vlm.processor
        expected = pad_square(wide, mean_color(processor)) if padding == "square" else wide
        pixels = processor.image_processor(expected, return_tensors="pt")["pixel_values"]
        assert calls["pixels"]
        assert all(torch.equal(received, pixels) for received in calls["pixels"])
        assert f"padding {padding}" in chat.summary()


def test_padding_changes_the_answer(home: Path, stock: ChatModel) -> None:
    square = ChatModel(str(home / "llava"), reducer="none", padding="square", device="cpu")
    conversation = [{"role": "user", "content": interleave(QUESTION, [photo(width=192)])}]
    assert square.answer([conversation], 4) != stock.answer([conversation], 4)


# ---------------------------------------------------------------------- prompts


def test_images_are_placed_at_their_markers(stock: ChatModel) -> None:
    both = interleave("left <image> right <image> what is this ?", [photo(), photo(seed=1)])
    assert [part["type"] for part in both] == ["text", "image", "text", "image", "text"]
    prompt = prompt_for(stock, [{"role": "user", "content": both}])
    assert prompt == "USER: left<image> right<image> what is this ? ASSISTANT:"
    assert interleave("what <image> ?", []) == [{"type": "text", "text": "what ?"}]
    assert [part["type"] for part in interleave("what <image> ?", ["1.png", "2.png"])] == ["image", "image", "text"]
    assert prompt_for(stock, user_asks(text="what <image> is this ?")).count("<image>") == 1


def test_model_without_a_chat_template(home: Path, tmp_path: Path) -> None:
    bare = shutil.copytree(home / "llava", tmp_path / "bare")
    (bare / "chat_template.jinja").unlink()
    chat = ChatModel(str(bare), reducer="none", device="cpu")
    assert prompt_for(chat, user_asks()) == f"USER: <image>\n{QUESTION} ASSISTANT:"
    with pytest.raises(TorinoError, match="no chat template"):
        prompt_for(chat, [*user_asks(), {"role": "assistant", "content": []}, *user_asks(None)])
    chat.vlm.processor.chat_template = "{{ nothing.at.all }}"
    with pytest.raises(TorinoError, match="template of this llava model failed"):
        prompt_for(chat, user_asks())


def test_reducer_that_reads_the_question(home: Path, tmp_path: Path, stock: ChatModel) -> None:
    clip, tokenizer = tiny.clip(stock.vlm.model.model.vision_tower)
    clip.save_pretrained(tmp_path / "clip")
    tokenizer.save_pretrained(tmp_path / "clip")
    chat = ChatModel(str(home / "llava"), reducer="cdpruner(budget=3)", clip=str(tmp_path / "clip"), device="cpu")
    together = chat.answer([user_asks(0, "what is this ?"), user_asks(0, "how many cups ?")], 3)
    assert chat.after == 6
    assert together == [chat.answer([user_asks(0, text)], 3)[0] for text in ("what is this ?", "how many cups ?")]


# ---------------------------------------------------------------------- options of the kits


def test_generation_options_of_kits() -> None:
    assert generation_options({"temperature": 0.5, "top_p": 0.9, "until": ["x"]}) == {
        "temperature": 0.5,
        "top_p": 0.9,
        "do_sample": True,
    }
    assert generation_options({"temperature": 0.5, "do_sample": False}) == {"do_sample": False}
    assert generation_options({}) == {"do_sample": False}
    assert cut_at("a stop b end", ["end", "stop"]) == "a "
    assert cut_at("a", "") == "a"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reducer": "torino-m"}, "needs an SAE: a folder"),
        ({"reducer": "random", "sae": "none"}, "no effect"),
        ({"reducer": "none", "budget": 3}, "no effect"),
        ({"reducer": "none", "sae": "none"}, "no effect"),
        ({"reducer": "nobody"}, "nobody"),
        ({"reducer": "random(k=2"}, "Cannot read the reducer"),
        ({"reducer": "cdpruner(budget=3)"}, "needs the CLIP that reads it"),
        ({"reducer": "random(budget=3)", "clip": "x"}, "no effect"),
        ({"reducer": "none", "padding": "stretch"}, "crop or square"),
        ({"reducer": "none", "positions": "odd"}, "compact, original or median"),
        ({"reducer": "none", "attention": "odd"}, "plain, proportional or restore"),
        ({"reducer": "none", "device": "abacus"}, "device"),
    ],
)
def test_wrong_options_give_one_sentence(home: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(TorinoError, match=message):
        ChatModel(str(home / "llava"), **{"device": "cpu", **options})


def test_videos_are_refused(home: Path) -> None:
    chat = ChatModel(str(home / "llava"), reducer="random", budget=3, device="cpu")
    with pytest.raises(TorinoError, match="contains a video"):
        chat.answer([[{"role": "user", "content": [{"type": "video", "image": "x.mp4"}]}]], 1)
