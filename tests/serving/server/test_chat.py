"""Chat completions: answers equal those of the session, alone and in batches, whole and streamed."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
import torch

from tests.support.serving import (
    CommandServer,
    app_server,
    chat_body,
    content_of,
    image_part,
    run_async,
    stream_text,
    text_part,
)
from tests.support.tiny_vlm import QUESTION, photo
from torino.core.errors import BadTokens
from torino.reducers import Reducer
from torino.serving.server import vision
from torino.vlm import VLM


def expected(vlm: VLM, reducer: Reducer | None, *seeds: int, length: int = 7) -> str:
    return vlm.answer(vlm.inputs([photo(seed=s) for s in seeds], QUESTION), reducer, max_new_tokens=length).text


@pytest.mark.parametrize("reduces", [True, False])
def test_an_answer_is_that_of_the_session(vlm: VLM, reducer: Reducer, reduces: bool) -> None:
    chosen = reducer if reduces else None

    async def run() -> None:
        async with app_server(vlm, chosen) as server:
            for seeds in ((0,), (1, 2), (3, 1, 3)):
                response = await server.chat(chat_body(*seeds))
                assert content_of(response) == expected(vlm, chosen, *seeds)
                body = response.json()
                assert body["object"] == "chat.completion"
                assert body["model"] == "tiny"
                assert body["choices"][0]["finish_reason"] == "length"
                assert body["usage"]["completion_tokens"] == 7
                assert body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] + 7
                assert "torino" not in body

    run_async(run())


def test_requests_at_once_are_answered_in_one_batch_as_if_alone(vlm: VLM, reducer: Reducer) -> None:
    bodies = [chat_body(1), chat_body(2, 3, max_tokens=12), chat_body(text="how many ?"), chat_body(4, max_tokens=3)]
    bodies.append(chat_body(5, temperature=1.5, seed=7, top_p=0.9))
    bodies.append(chat_body(5, stop=["word"], max_tokens=20))

    async def run() -> None:
        async with app_server(vlm, reducer, window=0.5, cache_bytes=0) as server:
            alone = [content_of(await server.chat(body)) for body in bodies]
            together = await asyncio.gather(*[server.chat(body) for body in bodies])
            assert [content_of(response) for response in together] == alone
            assert len(set(alone)) == len(bodies)
            assert await server.metric("torino_batch_requests_count") == len(bodies) + 1
            assert await server.metric("torino_batch_requests_sum") == 2 * len(bodies)

    run_async(run())


def test_sampling_follows_the_seed(vlm: VLM, reducer: Reducer) -> None:
    async def run() -> None:
        async with app_server(vlm, reducer) as server:
            hot = {"temperature": 2.0, "max_tokens": 12}
            first, again, other = [content_of(await server.chat(chat_body(1, seed=s, **hot))) for s in (1, 1, 2)]
            assert first == again != other
            free = {content_of(await server.chat(chat_body(1, **hot))) for _ in range(5)}
            assert len(free) > 1
            narrow = content_of(await server.chat(chat_body(1, seed=1, top_p=1e-6, **hot)))
            assert narrow == expected(vlm, reducer, 1, length=12), "the most probable token alone is greedy decoding"

    run_async(run())


def test_an_answer_ends_before_a_stop(vlm: VLM, reducer: Reducer) -> None:
    whole = expected(vlm, reducer, 1, length=20)
    words = whole.split()
    stop = next(word for word in words[3:] if word not in words[:3])

    async def run() -> None:
        async with app_server(vlm, reducer) as server:
            for text in (stop, stop[1:], f" {stop}"):
                body = chat_body(1, max_tokens=20, stop=[text, "never"])
                response = await server.chat(body)
                assert content_of(response) == whole.partition(text)[0]
                assert response.json()["choices"][0]["finish_reason"] == "stop"
                streamed = await server.chat({**body, "stream": True})
                assert stream_text(streamed.text.splitlines())[0] == whole.partition(text)[0]

    run_async(run())


def test_an_end_token_ends_an_answer(vlm: VLM, reducer: Reducer, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = expected(vlm, reducer, 1, length=12)
    ids = vlm.processor.tokenizer(whole, add_special_tokens=False)["input_ids"]
    end = next(token for token in ids[2:] if token not in ids[:2])
    monkeypatch.setattr(vlm.model.generation_config, "eos_token_id", end)
    monkeypatch.setattr(vlm.model.generation_config, "pad_token_id", 0)

    async def run() -> None:
        async with app_server(vlm, reducer) as server:
            long, short = await asyncio.gather(server.chat(chat_body(2, max_tokens=12)), server.chat(chat_body(1)))
            assert short.json()["choices"][0]["finish_reason"] == "stop"
            assert short.json()["usage"]["completion_tokens"] == ids.index(end) + 1
            assert content_of(long)

    run_async(run())


def test_conversations_keep_their_turns(vlm: VLM, reducer: Reducer) -> None:
    turns: list[dict[str, Any]] = [
        {"role": "system", "content": "word1"},
        {"role": "user", "content": [image_part(1), text_part("what is this ?")]},
        {"role": "assistant", "content": "word2"},
        {"role": "user", "content": [text_part("how many ?"), image_part(2)]},
    ]
    prompt = "<s> USER: word1 USER: <image> what is this ? ASSISTANT: word2 USER: how many ? <image> ASSISTANT:"
    conversation = [
        {
            "role": turn["role"],
            "content": [
                {"type": "image", "image": photo(seed=1 + index // 2)} if part["type"] == "image_url" else part
                for part in (turn["content"] if isinstance(turn["content"], list) else [text_part(turn["content"])])
            ],
        }
        for index, turn in enumerate(turns)
    ]
    inputs = vlm.chat_inputs([conversation])
    assert inputs.prompts[0].split() == prompt.split()
    answer = vlm.answer(inputs, reducer, max_new_tokens=7).text

    async def run() -> None:
        async with app_server(vlm, reducer) as server:
            assert content_of(await server.chat({"messages": turns, "max_tokens": 7})) == answer
            for dropped in (0, 2):
                fewer = [turn for index, turn in enumerate(turns) if index != dropped]
                assert content_of(await server.chat({"messages": fewer, "max_tokens": 7})) != answer

    run_async(run())


def test_openai_client(server: CommandServer, vlm: VLM, reducer: Reducer) -> None:
    client = openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0)
    assert [model.id for model in client.models.list()] == ["tiny"]
    messages: Any = chat_body(1, 2)["messages"]
    whole = client.chat.completions.create(model="tiny", messages=messages, max_tokens=9)
    assert whole.choices[0].message.content == expected(vlm, reducer, 1, 2, length=9)
    stream = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=9, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == whole.choices[0].message.content
    assert len([piece for piece in pieces if piece]) == 9, "each token is sent when it is generated"
    assert chunks[-1].usage == whole.usage
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    with pytest.raises(openai.NotFoundError, match="no model 'other'"):
        client.chat.completions.create(model="other", messages=messages)
    with pytest.raises(openai.BadRequestError, match="n is wrong"):
        client.chat.completions.create(model="tiny", messages=messages, n=2)


def test_an_explanation_is_given_on_request(vlm: VLM, reducer: Reducer) -> None:
    answer = vlm.answer(vlm.inputs([photo(seed=1), photo(seed=2)], QUESTION), reducer, max_new_tokens=7)

    async def run() -> None:
        async with app_server(vlm, reducer) as server:
            server.engine.names = {int(answer.reduction.concept[0]): "stripes"}
            body = chat_body(1, 2, torino={"explain": True})
            told = (await server.chat(body)).json()["torino"]
            assert told["tokens"] == {"before": 32, "after": answer.after}
            assert [image["tokens"]["after"] for image in told["images"]] == [len(plan) for plan in answer.reductions]
            for image, plan in zip(told["images"], answer.reductions, strict=True):
                (unit,) = image["units"]
                assert unit["grid"] == [4, 4]
                assert [group["patches"] for group in unit["groups"]] == [
                    (plan.assigned == token).nonzero()[:, 0].tolist() for token in range(len(plan))
                ]
                assert image["method"] == plan.by
                assert sum(concept["patches"] for concept in image["concepts"]) <= 16
            assert told["images"][0]["units"][0]["groups"][0]["concept"]["name"] == "stripes"
            assert not told["images"][0]["cached"]
            streamed = await server.chat({**body, "stream": True})
            again = next(e["torino"] for e in stream_text(streamed.text.splitlines())[1] if "torino" in e)
            assert again["images"][0].pop("cached")
            assert not told["images"][0].pop("cached")
            assert again["images"][0] == told["images"][0]
            json.dumps(told)

    run_async(run())


def test_a_known_image_is_not_encoded_again(vlm: VLM, reducer: Reducer) -> None:
    runs: list[int] = []

    async def run() -> None:
        async with app_server(vlm, reducer) as server:
            hook = vlm.model.model.vision_tower.register_forward_pre_hook(lambda *_: runs.append(1))
            try:
                first = await server.chat(chat_body(1))
                assert len(runs) == 1
                assert content_of(await server.chat(chat_body(1))) == content_of(first)
                other = content_of(await server.chat(chat_body(1, text="how many ?")))
                assert len(runs) == 1
            finally:
                hook.remove()
            inputs = vlm.inputs(photo(seed=1), "how many ?")
            assert other == vlm.answer(inputs, reducer, max_new_tokens=7).text
            assert await server.metric("torino_image_cache_hits_total") == 2
            assert await server.metric("torino_image_cache_misses_total") == 1
            assert await server.metric("torino_image_cache_bytes") > 0

    run_async(run())


def test_the_cache_is_bounded(vlm: VLM, reducer: Reducer) -> None:
    async def run() -> None:
        async with app_server(vlm, reducer) as server:
            await server.chat(chat_body(0))
            size = server.engine.vision.cache.bytes
        async with app_server(vlm, reducer, cache_bytes=2 * size + 200) as server:
            for seed in range(6):
                await server.chat(chat_body(seed))
                assert server.engine.vision.cache.bytes <= 2 * size + 200
            assert 0 < len(server.engine.vision.cache) < 6
        async with app_server(vlm, reducer, cache_bytes=0) as server:
            for _ in range(2):
                await server.chat(chat_body(0))
            assert len(server.engine.vision.cache) == 0

    run_async(run())


def test_models_that_need_images_with_their_prompt_are_served(
    vlm: VLM, reducer: Reducer, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [expected(vlm, reducer, *seeds) for seeds in ((1,), (2, 3))]
    monkeypatch.setattr(type(vlm.adapter), "separates_images", False)

    async def run() -> None:
        async with app_server(vlm, reducer, window=0.3) as server:
            bodies = [chat_body(1, torino={"explain": True}), chat_body(2, 3), chat_body(text="how many ?")]
            responses = await asyncio.gather(*[server.chat(body) for body in bodies])
            assert [content_of(response) for response in responses[:2]] == answers
            assert responses[0].json()["torino"]["images"][0]["tokens"]["before"] == 16
            assert content_of(responses[2])
            long = await server.chat(chat_body(1, text="what " * 5000))
            assert long.status_code == 400

    run_async(run())


@pytest.mark.parametrize("error", [BadTokens, RuntimeError])
def test_one_failing_request_does_not_fail_the_others(
    vlm: VLM, reducer: Reducer, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = vision.process_image(vlm, photo(seed=9))["pixel_values"]
    real = vision.reduce_pixels

    def reduce_pixels(session: VLM, pixels: Any, method: Reducer) -> Any:
        if any(torch.equal(item["pixel_values"], bad) for item in pixels):
            raise error("The image is unlucky.")
        return real(session, pixels, method)

    monkeypatch.setattr(vision, "reduce_pixels", reduce_pixels)

    async def run() -> None:
        async with app_server(vlm, reducer, window=0.5) as server:
            bodies = [chat_body(1), chat_body(2, 9), chat_body(3), chat_body(4, text="what " * 3000)]
            for body in bodies:
                body["max_tokens"] = 5
            responses = await asyncio.gather(*[server.chat(body) for body in bodies])
            status = 400 if error is BadTokens else 500
            assert [response.status_code for response in responses] == [200, status, 200, 400]
            assert "3,0" in responses[3].json()["error"]["message"]
            assert content_of(responses[2]) == expected(vlm, reducer, 3, length=5)
            assert content_of(await server.chat(chat_body(1))), "the worker goes on"

    run_async(run())


def test_a_prompt_with_its_answer_must_fit(vlm: VLM, reducer: Reducer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vlm.adapter.config.get_text_config(), "max_position_embeddings", 40)
    original = VLM(vlm.model, vlm.processor, positions="original")

    async def run() -> None:
        for session, images in ((vlm, 2), (original, 1)):
            async with app_server(session, reducer, max_tokens=30) as server:
                for count in (1, 2, 3):
                    response = await server.chat(chat_body(*range(count), max_tokens=16))
                    assert response.status_code == (200 if count <= images else 400), response.text
                assert "and this model has 40" in response.json()["error"]["message"]
                rest = await server.chat({**chat_body(0), "max_tokens": None})
                left = 40 - (rest.json()["usage"]["prompt_tokens"] if session is vlm else 16 + 7)
                assert rest.json()["usage"]["completion_tokens"] == left < 30

    run_async(run())
