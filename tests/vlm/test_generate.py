"""``generate`` of a reduced tiny LLaVA: equal to the stock model where nothing is removed, in the caller's terms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, StoppingCriteria, StoppingCriteriaList
from transformers.generation import LogitsProcessor, LogitsProcessorList, MaxLengthCriteria

from tests.support import tiny
from tests.support.generation import MODES, NEW, ROWS, generate, same, torino_reducer, without
from tests.support.tiny import Fixed, Identity, Ragged
from torino import RawEmbedding, make
from torino.core.errors import BadParameter
from torino.reducers import Reducer
from torino.vlm import reduced

# ---------------------------------------------------------------------- identity


@pytest.mark.parametrize("mode", MODES)
def test_identity_equals_the_stock_model(model: Any, inputs: dict[str, Any], mode: str) -> None:
    stock = generate(model, inputs, **MODES[mode])
    assert same(generate(model, inputs, Identity(), **MODES[mode]), stock)
    assert same(generate(model, inputs, Identity(), positions="original", **MODES[mode]), stock)


def test_identity_with_eager_attention(inputs: dict[str, Any]) -> None:
    model = tiny.llava(attention="eager")
    assert model.model.language_model.config._attn_implementation == "eager"
    assert same(generate(model, inputs, Identity()), generate(model, inputs))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(inputs: dict[str, Any], dtype: torch.dtype) -> None:
    model = tiny.llava().to(dtype)
    # Pixels are float32, as processors return them.
    assert same(generate(model, inputs, Identity()), generate(model, inputs))
    reducer = torino_reducer()
    read: list[torch.dtype] = []
    top = reducer.sae.top  # type: ignore[attr-defined]
    reducer.sae.top = lambda x, k, **others: read.append(x.dtype) or top(x, k, **others)  # type: ignore[attr-defined]
    with reduced(model, reducer) as half:
        model.generate(**inputs, max_new_tokens=2)
    assert read == [dtype]  # the SAE converts its input to float32
    assert reducer.sae.W_enc.dtype == torch.float32  # type: ignore[attr-defined]
    assert half.after < half.before
    full_precision = tiny.llava()
    with reduced(full_precision, Fixed(half[0])) as trace:
        full_precision.generate(**inputs, max_new_tokens=2)
    with reduced(model, Fixed(half[0])) as half:
        model.generate(**inputs, max_new_tokens=2)
    assert half.bytes_saved * 2 == trace.bytes_saved > 0


def test_autocast_and_inference_mode(model: Any, inputs: dict[str, Any]) -> None:
    with torch.inference_mode():
        assert same(generate(model, inputs, Identity()), generate(model, inputs))
        generate(model, inputs, torino_reducer())
    with torch.autocast("cpu", torch.bfloat16):
        assert same(generate(model, inputs, Identity(), max_new_tokens=2), generate(model, inputs, max_new_tokens=2))
        generate(model, inputs, torino_reducer(), max_new_tokens=2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_pixels_of_another_dtype(model: Any, dtype: torch.dtype) -> None:
    inputs = tiny.prompt("a#b")
    inputs["pixel_values"] = inputs["pixel_values"].bfloat16().float()  # exact in all of them
    cast = inputs | {"pixel_values": inputs["pixel_values"].to(dtype)}
    assert same(generate(model, cast, Ragged()), generate(model, inputs, Ragged()))


# ---------------------------------------------------------------------- batches


@pytest.mark.parametrize("positions", ["compact", "original"])
@pytest.mark.parametrize(
    "reducer",
    [Ragged(), torino_reducer(), torino_reducer("torino-p"), torino_reducer(budget=20)],
    ids=lambda r: r.spec,
)
def test_a_ragged_batch_equals_its_rows(model: Any, inputs: dict[str, Any], reducer: Reducer, positions: str) -> None:
    batch = generate(model, inputs, reducer, positions=positions)
    for i, single in enumerate(tiny.one_by_one(ROWS, inputs)):
        alone = generate(model, single, reducer, positions=positions)
        assert torch.equal(alone.sequences[0, -NEW:], batch.sequences[i, -NEW:])
        assert all(torch.allclose(a[0], b[i], atol=1e-4) for a, b in zip(alone.logits, batch.logits, strict=True))


@pytest.mark.parametrize("mode", ["beams", "static cache", "no cache"])
def test_a_ragged_batch_equals_its_rows_in_every_mode(model: Any, inputs: dict[str, Any], mode: str) -> None:
    copies = MODES[mode].get("num_return_sequences", 1)
    batch = generate(model, inputs, Ragged(), **MODES[mode]).sequences[:, -NEW:].view(len(ROWS), copies, NEW)
    for i, single in enumerate(tiny.one_by_one(ROWS, inputs)):
        assert torch.equal(generate(model, single, Ragged(), **MODES[mode]).sequences[:, -NEW:], batch[i])


def test_answers_depend_on_the_reducer(model: Any, inputs: dict[str, Any]) -> None:
    """Otherwise the tests above would prove nothing."""
    answers = [generate(model, inputs, reducer).sequences for reducer in (None, Ragged(), Ragged(1), torino_reducer())]
    assert len({str(answer[:2].tolist()) for answer in answers}) == 4
    assert all(torch.equal(answer[2], answers[0][2]) for answer in answers)  # the row of text alone


def test_caches_and_modes_agree(model: Any, inputs: dict[str, Any]) -> None:
    greedy = generate(model, inputs, Ragged()).sequences
    assert torch.equal(generate(model, inputs, Ragged(), cache_implementation="static").sequences, greedy)
    assert torch.equal(generate(model, inputs, Ragged(), use_cache=False).sequences, greedy)
    assert torch.equal(generate(model, inputs, Ragged(), past_key_values=DynamicCache()).sequences, greedy)
    single = tiny.prompt("ab#cd#e")
    greedy = generate(model, single, Ragged()).sequences
    assert torch.equal(generate(model, single, Ragged(), prompt_lookup_num_tokens=3).sequences, greedy)
    assert torch.equal(generate(model, single, Ragged(), assistant_model=tiny.llava(seed=1)).sequences, greedy)


def test_text_only_rows_are_unchanged(model: Any) -> None:
    text = tiny.prompt("abc", "d")
    with reduced(model, Ragged()) as trace:
        assert torch.equal(model.generate(**text, max_new_tokens=NEW), generate(model, text).sequences)
        assert torch.equal(model(**text).logits, model(**text).logits)
    assert len(trace) == 0
    assert trace.summary() == "No image was reduced."


def test_right_padding_is_moved_to_the_left(model: Any) -> None:
    left, right = tiny.prompt(*ROWS), tiny.prompt(*ROWS, side="right")
    assert not torch.equal(left["input_ids"], right["input_ids"])
    answer, moved = generate(model, left, Ragged()), generate(model, right, Ragged())
    assert torch.equal(moved.sequences[:, -NEW:], answer.sequences[:, -NEW:])
    assert torch.equal(moved.sequences[:, :-NEW], right["input_ids"])  # the prompt as it was given


def test_missing_mask_is_inferred_as_generate_does(model: Any, inputs: dict[str, Any]) -> None:
    bare = {name: value for name, value in inputs.items() if name != "attention_mask"}
    assert same(generate(model, bare, Identity()), generate(model, bare))
    assert same(generate(model, bare, Ragged()), generate(model, inputs, Ragged()))
    # if the padding token is also an end token, generate treats padding as text
    stock = generate(model, bare, eos_token_id=[tiny.PAD])
    assert same(generate(model, bare, Identity(), eos_token_id=[tiny.PAD]), stock)
    assert not same(stock, generate(model, inputs, eos_token_id=[tiny.PAD]))


def test_original_positions_without_a_cache_and_without_padding() -> None:
    """transformers would interpret the gaps as boundaries of packed prompts and mask across them."""
    model, reducer = tiny.llava(), make("torino-p(k=1, delta=1, budget=4)", sae=RawEmbedding())
    ids = torch.tensor([[1, 5, *[model.config.image_token_id] * 16, 7, 8]])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": tiny.pixels(1)}
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False}
    options |= {"output_logits": True, "return_dict_in_generate": True}
    with reduced(model, reducer, positions="original"):
        cached, plain = (model.generate(**inputs, **options, use_cache=cache) for cache in (True, False))
    assert torch.equal(cached.sequences, plain.sequences)
    for a, b in zip(cached.logits, plain.logits, strict=True):
        assert torch.allclose(a, b, atol=1e-4)


# ---------------------------------------------------------------------- options that refer to the full prompt


@pytest.mark.parametrize("reducer", [Ragged(), torino_reducer(budget=20)], ids=["fewer", "more"])
def test_sequences_start_with_the_full_prompt(model: Any, inputs: dict[str, Any], reducer: Reducer) -> None:
    ids = inputs["input_ids"]
    for options in MODES.values():
        answer = generate(model, inputs, reducer, **options)
        copies = options.get("num_return_sequences", 1)
        assert torch.equal(answer.sequences[:, : ids.shape[1]], ids.repeat_interleave(copies, 0))
        assert answer.sequences.shape == (len(ROWS) * copies, ids.shape[1] + NEW)
    with reduced(model, reducer):
        plain = model.generate(**inputs, max_new_tokens=NEW)
    assert torch.equal(plain, generate(model, inputs, reducer).sequences)


@pytest.mark.filterwarnings("ignore:Using the model-agnostic default")
def test_max_length_counts_the_full_prompt(model: Any, inputs: dict[str, Any]) -> None:
    length = inputs["input_ids"].shape[1]

    def count_new(**options: Any) -> int:
        with reduced(model, Ragged()):
            return model.generate(**inputs, **options).shape[1] - length

    assert count_new(max_length=length + 3) == 3
    assert count_new(max_length=length + 3, max_new_tokens=None) == 3
    # max_new_tokens takes precedence, as in transformers
    assert count_new(max_length=length + 3, max_new_tokens=2) == 2
    assert count_new(max_length=5, max_new_tokens=2) == 2
    assert count_new(generation_config=GenerationConfig(max_new_tokens=4)) == 4
    assert count_new() == model.generate(**inputs).shape[1] - length == 20
    config = GenerationConfig(max_length=length + 6, num_beams=2)
    assert count_new(generation_config=config) == 6
    assert count_new(generation_config=config, max_length=length + 2) == 2
    assert config.max_length == length + 6  # unchanged
    with reduced(model, Ragged()):
        assert model.generate(inputs["input_ids"], config, **without(inputs, "input_ids")).shape[1] - length == 6


def test_max_length_of_the_model_config(inputs: dict[str, Any]) -> None:
    model, length = tiny.llava(), inputs["input_ids"].shape[1]
    model.generation_config.max_length = length + 4
    with reduced(model, Ragged()):
        assert model.generate(**inputs).shape[1] == length + 4
        assert model.generate(**inputs, max_length=length + 2).shape[1] == length + 2
        assert model.generate(**inputs, generation_config=GenerationConfig(do_sample=False)).shape[1] == length + 4
    assert model.generation_config.max_length == length + 4


def test_min_length_counts_the_full_prompt(model: Any) -> None:
    inputs = tiny.prompt("ab#cd")
    length = inputs["input_ids"].shape[1]
    end = int(generate(model, inputs, Ragged()).sequences[0, length + 1])  # the second token ends the answer

    def new(**options: Any) -> list[int]:
        answer = generate(model, inputs, Ragged(), max_new_tokens=8, eos_token_id=end, **options)
        return answer.sequences[0, length:].tolist()

    free = new()
    assert free[-1] == end
    assert new(min_length=length) == new(min_length=1) == new(min_length=0) == free
    minimal = new(min_new_tokens=6)
    assert len(minimal) >= 6
    assert new(min_length=length + 6) == minimal
    assert new(generation_config=GenerationConfig(min_length=length + 6)) == minimal


def test_max_length_without_room_is_refused(model: Any, inputs: dict[str, Any]) -> None:
    length = inputs["input_ids"].shape[1]
    with (
        reduced(model, Ragged()),
        pytest.raises(BadParameter, match=f"prompt has {length} tokens and max_length is {length}"),
    ):
        model.generate(**inputs, max_length=length)
    with pytest.raises(ValueError, match="max_length"):  # as in the stock model
        model.generate(**inputs, max_length=length)


class RecordingCallback(StoppingCriteria, LogitsProcessor):
    """Record the arguments of stopping criteria, logits processors, constraints and streamers."""

    def __init__(self, max_length: int | None = None) -> None:
        self.max_length, self.calls = max_length, list[Tensor]()

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Any:
        self.calls.append(input_ids)
        if self.max_length is not None:
            return torch.full((len(input_ids),), input_ids.shape[1] >= self.max_length)
        return scores

    def allowed(self, row: int, ids: Tensor) -> list[int]:
        self.calls.append(torch.cat([torch.tensor([row]), ids]))
        return list(range(100))

    def put(self, value: Tensor) -> None:
        self.calls.append(value)

    def end(self) -> None:
        self.calls.append(torch.tensor([-1]))


def test_callbacks_see_the_full_prompt(model: Any, inputs: dict[str, Any]) -> None:
    ids = inputs["input_ids"]
    length = ids.shape[1]
    stop, process, allow = RecordingCallback(length + 3), RecordingCallback(), RecordingCallback()
    answer = generate(
        model,
        inputs,
        Ragged(),
        stopping_criteria=StoppingCriteriaList([stop]),
        logits_processor=LogitsProcessorList([process]),
        prefix_allowed_tokens_fn=allow.allowed,
        num_beams=2,
    ).sequences
    assert answer.shape[1] == length + 3
    for callback in (stop, process):
        for call in callback.calls:
            copies = len(call) // len(ids)  # two beams, or the four continuations that two are chosen from
            assert copies in (2, 4)
            assert torch.equal(call[:, :length], ids.repeat_interleave(copies, 0))
    assert all(torch.equal(call[1 : 1 + length], ids[int(call[0])]) for call in allow.calls)
    limit = StoppingCriteriaList([MaxLengthCriteria(length + 2)])
    assert generate(model, inputs, Ragged(), stopping_criteria=limit).sequences.shape[1] == length + 2
    assert limit[0].max_length == length + 2
    allow.calls.clear()
    generate(model, inputs, Ragged(), prefix_allowed_tokens_fn=allow.allowed, do_sample=True, num_return_sequences=2)
    assert all(torch.equal(call[1 : 1 + length], ids[int(call[0]) // 2]) for call in allow.calls)


def test_streamers_get_the_full_prompt_and_every_token(model: Any) -> None:
    inputs = tiny.prompt("ab#cd")
    callback = RecordingCallback()
    answer = generate(model, inputs, Ragged(), streamer=callback).sequences[0]
    assert torch.equal(callback.calls[0], inputs["input_ids"])
    assert torch.equal(torch.cat([callback.calls[0][0], *callback.calls[1:-1]]), answer)
    assert callback.calls[-1].tolist() == [-1]


def test_other_outputs_of_generate(model: Any, inputs: dict[str, Any]) -> None:
    options = {"output_scores": True, "output_hidden_states": True, "output_attentions": True}
    answer = generate(tiny.llava(attention="eager"), inputs, Ragged(), **options)
    assert len(answer.scores) == len(answer.hidden_states) == len(answer.attentions) == NEW
    assert answer.hidden_states[0][0].shape[1] < inputs["input_ids"].shape[1]
    beams = generate(model, inputs, Ragged(), num_beams=3, num_return_sequences=2, output_scores=True)
    steps = model.compute_transition_scores(beams.sequences, beams.scores, beams.beam_indices, normalize_logits=False)
    assert torch.allclose(steps.sum(1) / NEW, beams.sequences_scores, atol=1e-4)


def test_generate_builds_no_graph(model: Any, inputs: dict[str, Any]) -> None:
    graphs: list[bool] = []
    hook = model.model.multi_modal_projector.register_forward_hook(lambda _, a, out: graphs.append(out.requires_grad))
    generate(model, inputs, Ragged(), max_new_tokens=1)
    hook.remove()
    assert graphs == [False]


def test_continuing_from_a_reduced_cache_is_refused(model: Any) -> None:
    inputs = tiny.prompt("ab#cd")
    with reduced(model, Ragged()):
        answer = model.generate(**inputs, max_new_tokens=3, return_dict_in_generate=True)
        longer = torch.cat([answer.sequences, torch.tensor([[5, 6]])], 1)
        with pytest.raises(BadParameter, match="write the prompts with ReducingProcessor"):
            model.generate(input_ids=longer, past_key_values=answer.past_key_values)
    with reduced(model, Ragged()), pytest.raises(BadParameter, match="prefill_chunk_size is set"):
        model.generate(**inputs, prefill_chunk_size=4)
