"""LLaVA-1.5 through both doors, on a tiny model: what must be equal to the stock model is, to the last bit."""

from __future__ import annotations

import contextvars
import copy
import gc
import inspect
import pickle
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pytest
import tiny
import torch
from tiny import Fixed, Identity, Needy, Ragged
from torch import Tensor, nn
from transformers import DynamicCache, GenerationConfig, StoppingCriteria, StoppingCriteriaList
from transformers.generation import LogitsProcessor, LogitsProcessorList, MaxLengthCriteria

from torino import BadParameter, BadTokens, MissingSignal, RawEmbedding, Reduction, SAEMismatch, TorinoError, make
from torino.reducers import Reducer
from torino.vlm import ReducedInputs, ReducingProcessor, Trace, apply, reduced, remove
from torino.vlm.adapters.base import adapter_for

ROWS = ("ab#cd", "#e#fgh", "klm", "z#")
NEW = 5


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    """One model for all tests: each must leave it as it was."""
    made = tiny.llava()
    weights = {name: value.clone() for name, value in made.state_dict().items()}
    yield made
    assert not {"generate", "forward", "_torino_door"} & set(made.__dict__)
    assert all(torch.equal(value, weights[name]) for name, value in made.state_dict().items())


@pytest.fixture(scope="module")
def inputs() -> dict[str, Any]:
    return tiny.prompt(*ROWS)


def ask(model: Any, inputs: Mapping[str, Any], reducer: Reducer | None = None, **options: Any) -> Any:
    """Generate, stock or reduced; sampling starts from the same seed each time."""
    positions = options.pop("positions", "compact")
    options = {"max_new_tokens": NEW, "return_dict_in_generate": True, "output_logits": True} | options
    torch.manual_seed(0)
    if reducer is None:
        return model.generate(**inputs, **options)
    with reduced(model, reducer, positions=positions):
        return model.generate(**inputs, **options)


def same(one: Any, other: Any) -> bool:
    """Whether two answers are equal in every token and every bit of every step's logits."""
    return torch.equal(one.sequences, other.sequences) and equal(one.logits, other.logits)


def equal(ones: Iterable[Tensor], others: Iterable[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(ones, others, strict=True))


def of_torino(name: str = "torino-m", **options: Any) -> Reducer:
    return make(name, sae=tiny.sae(), **options)


MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "temperature": 1.5},
    "samples": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "beam sampling": {"num_beams": 2, "do_sample": True},
    "static cache": {"cache_implementation": "static"},
    "no cache": {"use_cache": False},
}


# ---------------------------------------------------------------------- keeping everything is the stock model


@pytest.mark.parametrize("mode", MODES)
def test_keeping_everything_is_the_stock_model(model: Any, inputs: dict[str, Any], mode: str) -> None:
    stock = ask(model, inputs, **MODES[mode])
    assert same(ask(model, inputs, Identity(), **MODES[mode]), stock)
    assert same(ask(model, inputs, Identity(), positions="original", **MODES[mode]), stock)


def test_keeping_everything_with_eager_attention(inputs: dict[str, Any]) -> None:
    model = tiny.llava(attention="eager")
    assert model.model.language_model.config._attn_implementation == "eager"
    assert same(ask(model, inputs, Identity()), ask(model, inputs))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(inputs: dict[str, Any], dtype: torch.dtype) -> None:
    model = tiny.llava().to(dtype)
    assert same(ask(model, inputs, Identity()), ask(model, inputs))  # pixels in float32, as processors give them
    reducer = of_torino()
    read: list[torch.dtype] = []
    top = reducer.sae.top  # type: ignore[attr-defined]
    reducer.sae.top = lambda x, k, **others: read.append(x.dtype) or top(x, k, **others)  # type: ignore[attr-defined]
    with reduced(model, reducer) as half:
        model.generate(**inputs, max_new_tokens=2)
    assert read == [dtype]  # it casts what it reads to its own float32
    assert reducer.sae.W_enc.dtype == torch.float32  # type: ignore[attr-defined]
    assert half.after < half.before
    whole = tiny.llava()
    with reduced(whole, Fixed(half[0])) as trace:
        whole.generate(**inputs, max_new_tokens=2)
    with reduced(model, Fixed(half[0])) as half:
        model.generate(**inputs, max_new_tokens=2)
    assert half.bytes_saved * 2 == trace.bytes_saved > 0


def test_autocast_and_inference_mode(model: Any, inputs: dict[str, Any]) -> None:
    with torch.inference_mode():
        assert same(ask(model, inputs, Identity()), ask(model, inputs))
        ask(model, inputs, of_torino())
    with torch.autocast("cpu", torch.bfloat16):
        assert same(ask(model, inputs, Identity(), max_new_tokens=2), ask(model, inputs, max_new_tokens=2))
        ask(model, inputs, of_torino(), max_new_tokens=2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_pixels_of_another_type(model: Any, dtype: torch.dtype) -> None:
    inputs = tiny.prompt("a#b")
    inputs["pixel_values"] = inputs["pixel_values"].bfloat16().float()  # exact in all of them
    cast = inputs | {"pixel_values": inputs["pixel_values"].to(dtype)}
    assert same(ask(model, cast, Ragged()), ask(model, inputs, Ragged()))


# ---------------------------------------------------------------------- a batch is its rows


@pytest.mark.parametrize("positions", ["compact", "original"])
@pytest.mark.parametrize(
    "reducer", [Ragged(), of_torino(), of_torino("torino-p"), of_torino(budget=20)], ids=lambda one: one.spec
)
def test_a_ragged_batch_equals_its_rows(model: Any, inputs: dict[str, Any], reducer: Reducer, positions: str) -> None:
    batch = ask(model, inputs, reducer, positions=positions)
    for i, single in enumerate(tiny.one_by_one(ROWS, inputs)):
        alone = ask(model, single, reducer, positions=positions)
        assert torch.equal(alone.sequences[0, -NEW:], batch.sequences[i, -NEW:])
        assert all(torch.allclose(a[0], b[i], atol=1e-4) for a, b in zip(alone.logits, batch.logits, strict=True))


@pytest.mark.parametrize("mode", ["beams", "static cache", "no cache"])
def test_a_ragged_batch_equals_its_rows_in_every_mode(model: Any, inputs: dict[str, Any], mode: str) -> None:
    copies = MODES[mode].get("num_return_sequences", 1)
    batch = ask(model, inputs, Ragged(), **MODES[mode]).sequences[:, -NEW:].view(len(ROWS), copies, NEW)
    for i, single in enumerate(tiny.one_by_one(ROWS, inputs)):
        assert torch.equal(ask(model, single, Ragged(), **MODES[mode]).sequences[:, -NEW:], batch[i])


def test_answers_hang_on_the_reducer(model: Any, inputs: dict[str, Any]) -> None:
    """Otherwise the tests above would show nothing."""
    answers = [ask(model, inputs, reducer).sequences for reducer in (None, Ragged(), Ragged(1), of_torino())]
    assert len({str(answer[:2].tolist()) for answer in answers}) == 4
    assert all(torch.equal(answer[2], answers[0][2]) for answer in answers)  # the row of text alone


def test_caches_and_modes_agree(model: Any, inputs: dict[str, Any]) -> None:
    greedy = ask(model, inputs, Ragged()).sequences
    assert torch.equal(ask(model, inputs, Ragged(), cache_implementation="static").sequences, greedy)
    assert torch.equal(ask(model, inputs, Ragged(), use_cache=False).sequences, greedy)
    assert torch.equal(ask(model, inputs, Ragged(), past_key_values=DynamicCache()).sequences, greedy)
    single = tiny.prompt("ab#cd#e")
    greedy = ask(model, single, Ragged()).sequences
    assert torch.equal(ask(model, single, Ragged(), prompt_lookup_num_tokens=3).sequences, greedy)
    assert torch.equal(ask(model, single, Ragged(), assistant_model=tiny.llava(seed=1)).sequences, greedy)


def test_rows_of_text_alone_are_stock(model: Any) -> None:
    text = tiny.prompt("abc", "d")
    with reduced(model, Ragged()) as trace:
        assert torch.equal(model.generate(**text, max_new_tokens=NEW), ask(model, text).sequences)
        assert torch.equal(model(**text).logits, model(**text).logits)
    assert len(trace) == 0
    assert trace.summary() == "No image was seen."


def test_padding_on_the_right_is_put_on_the_left(model: Any) -> None:
    left, right = tiny.prompt(*ROWS), tiny.prompt(*ROWS, side="right")
    assert not torch.equal(left["input_ids"], right["input_ids"])
    answer, moved = ask(model, left, Ragged()), ask(model, right, Ragged())
    assert torch.equal(moved.sequences[:, -NEW:], answer.sequences[:, -NEW:])
    assert torch.equal(moved.sequences[:, :-NEW], right["input_ids"])  # the caller's own prompt, as he gave it


def test_without_a_mask_padding_is_what_generate_takes_for_it(model: Any, inputs: dict[str, Any]) -> None:
    bare = {name: value for name, value in inputs.items() if name != "attention_mask"}
    assert same(ask(model, bare, Identity()), ask(model, bare))
    assert same(ask(model, bare, Ragged()), ask(model, inputs, Ragged()))
    # with the padding token also the end, generate takes padding for text
    stock = ask(model, bare, eos_token_id=[tiny.PAD])
    assert same(ask(model, bare, Identity(), eos_token_id=[tiny.PAD]), stock)
    assert not same(stock, ask(model, inputs, eos_token_id=[tiny.PAD]))


# ---------------------------------------------------------------------- what the caller says of his prompt


@pytest.mark.parametrize("reducer", [Ragged(), of_torino(budget=20)], ids=["fewer", "more"])
def test_the_prompt_is_the_callers_own(model: Any, inputs: dict[str, Any], reducer: Reducer) -> None:
    ids = inputs["input_ids"]
    for options in MODES.values():
        answer = ask(model, inputs, reducer, **options)
        copies = options.get("num_return_sequences", 1)
        assert torch.equal(answer.sequences[:, : ids.shape[1]], ids.repeat_interleave(copies, 0))
        assert answer.sequences.shape == (len(ROWS) * copies, ids.shape[1] + NEW)
    with reduced(model, reducer):
        plain = model.generate(**inputs, max_new_tokens=NEW)
    assert torch.equal(plain, ask(model, inputs, reducer).sequences)


@pytest.mark.filterwarnings("ignore:Using the model-agnostic default")
def test_lengths_count_the_callers_prompt(model: Any, inputs: dict[str, Any]) -> None:
    length = inputs["input_ids"].shape[1]

    def new(**options: Any) -> int:
        with reduced(model, Ragged()):
            return model.generate(**inputs, **options).shape[1] - length

    assert new(max_length=length + 3) == 3
    assert new(max_length=length + 3, max_new_tokens=None) == 3
    assert new(max_length=length + 3, max_new_tokens=2) == 2  # new tokens go before, as in transformers
    assert new(max_length=5, max_new_tokens=2) == 2
    assert new(generation_config=GenerationConfig(max_new_tokens=4)) == 4
    assert new() == model.generate(**inputs).shape[1] - length == 20
    config = GenerationConfig(max_length=length + 6, num_beams=2)
    assert new(generation_config=config) == 6
    assert new(generation_config=config, max_length=length + 2) == 2
    assert config.max_length == length + 6  # the caller's own
    with reduced(model, Ragged()):
        assert model.generate(inputs["input_ids"], config, **_without(inputs, "input_ids")).shape[1] - length == 6


def test_lengths_of_the_models_own_config(inputs: dict[str, Any]) -> None:
    model, length = tiny.llava(), inputs["input_ids"].shape[1]
    model.generation_config.max_length = length + 4
    with reduced(model, Ragged()):
        assert model.generate(**inputs).shape[1] == length + 4
        assert model.generate(**inputs, max_length=length + 2).shape[1] == length + 2
        assert model.generate(**inputs, generation_config=GenerationConfig(do_sample=False)).shape[1] == length + 4
    assert model.generation_config.max_length == length + 4


def test_least_lengths_count_the_callers_prompt(model: Any) -> None:
    inputs = tiny.prompt("ab#cd")
    length = inputs["input_ids"].shape[1]
    end = int(ask(model, inputs, Ragged()).sequences[0, length + 1])  # what comes second ends the answer

    def new(**options: Any) -> list[int]:
        answer = ask(model, inputs, Ragged(), max_new_tokens=8, eos_token_id=end, **options)
        return answer.sequences[0, length:].tolist()

    free = new()
    assert free[-1] == end
    assert new(min_length=length) == new(min_length=1) == new(min_length=0) == free
    least = new(min_new_tokens=6)
    assert len(least) >= 6
    assert new(min_length=length + 6) == least
    assert new(generation_config=GenerationConfig(min_length=length + 6)) == least


def test_a_length_that_leaves_no_room(model: Any, inputs: dict[str, Any]) -> None:
    length = inputs["input_ids"].shape[1]
    with reduced(model, Ragged()), pytest.raises(BadParameter, match=f"prompt is {length} tokens long, and max_length"):
        model.generate(**inputs, max_length=length)
    with pytest.raises(ValueError, match="max_length"):  # as the stock model does
        model.generate(**inputs, max_length=length)


class Watcher(StoppingCriteria, LogitsProcessor):
    """Looks at what is shown to stopping criteria, logits processors, constraints and streamers."""

    def __init__(self, most: int = 10**6) -> None:
        self.most, self.seen = most, list[Tensor]()

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Any:
        self.seen.append(input_ids)
        if self.most < 10**6:
            return torch.full((len(input_ids),), input_ids.shape[1] >= self.most)
        return scores

    def allowed(self, row: int, ids: Tensor) -> list[int]:
        self.seen.append(torch.cat([torch.tensor([row]), ids]))
        return list(range(100))

    def put(self, value: Tensor) -> None:
        self.seen.append(value)

    def end(self) -> None:
        self.seen.append(torch.tensor([-1]))


def test_who_looks_at_the_prompt_sees_the_callers(model: Any, inputs: dict[str, Any]) -> None:
    ids = inputs["input_ids"]
    length = ids.shape[1]
    stop, process, allow = Watcher(length + 3), Watcher(), Watcher()
    answer = ask(
        model,
        inputs,
        Ragged(),
        stopping_criteria=StoppingCriteriaList([stop]),
        logits_processor=LogitsProcessorList([process]),
        prefix_allowed_tokens_fn=allow.allowed,
        num_beams=2,
    ).sequences
    assert answer.shape[1] == length + 3
    for watcher in (stop, process):
        for seen in watcher.seen:
            copies = len(seen) // len(ids)  # two beams, or the four continuations that two are chosen from
            assert copies in (2, 4)
            assert torch.equal(seen[:, :length], ids.repeat_interleave(copies, 0))
    assert all(torch.equal(seen[1 : 1 + length], ids[int(seen[0])]) for seen in allow.seen)
    most = StoppingCriteriaList([MaxLengthCriteria(length + 2)])
    assert ask(model, inputs, Ragged(), stopping_criteria=most).sequences.shape[1] == length + 2
    assert most[0].max_length == length + 2
    allow.seen.clear()
    ask(model, inputs, Ragged(), prefix_allowed_tokens_fn=allow.allowed, do_sample=True, num_return_sequences=2)
    assert all(torch.equal(seen[1 : 1 + length], ids[int(seen[0]) // 2]) for seen in allow.seen)


def test_streamers_get_the_callers_prompt_and_every_token(model: Any) -> None:
    inputs = tiny.prompt("ab#cd")
    watcher = Watcher()
    answer = ask(model, inputs, Ragged(), streamer=watcher).sequences[0]
    assert torch.equal(watcher.seen[0], inputs["input_ids"])
    assert torch.equal(torch.cat([watcher.seen[0][0], *watcher.seen[1:-1]]), answer)
    assert watcher.seen[-1].tolist() == [-1]


def test_what_else_generate_gives(model: Any, inputs: dict[str, Any]) -> None:
    options = {"output_scores": True, "output_hidden_states": True, "output_attentions": True}
    answer = ask(tiny.llava(attention="eager"), inputs, Ragged(), **options)
    assert len(answer.scores) == len(answer.hidden_states) == len(answer.attentions) == NEW
    assert answer.hidden_states[0][0].shape[1] < inputs["input_ids"].shape[1]
    beams = ask(model, inputs, Ragged(), num_beams=3, num_return_sequences=2, output_scores=True)
    steps = model.compute_transition_scores(beams.sequences, beams.scores, beams.beam_indices, normalize_logits=False)
    assert torch.allclose(steps.sum(1) / NEW, beams.sequences_scores, atol=1e-4)


def test_arguments_by_place(model: Any, inputs: dict[str, Any]) -> None:
    ids, rest = inputs["input_ids"], _without(inputs, "input_ids")
    answer = ask(model, inputs, Ragged()).sequences
    with reduced(model, Ragged()):
        assert torch.equal(model.generate(ids, max_new_tokens=NEW, **rest), answer)
        assert torch.equal(model.generate(inputs=ids, max_new_tokens=NEW, **rest), answer)
        logits = model(**inputs).logits
        assert torch.equal(model(ids, **rest).logits, logits)
        assert torch.equal(model(ids, inputs["pixel_values"], inputs["attention_mask"]).logits, logits)
        with pytest.raises(ValueError, match="not allowed"):  # transformers' own words
            model.generate(ids, **inputs)
        with pytest.raises(BadParameter, match="1 arguments were given by place, which forward takes as input_ids"):
            model(ids, **inputs)


def _without(inputs: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in inputs.items() if name not in names}


# ---------------------------------------------------------------------- forward


def labels_of(inputs: Mapping[str, Any]) -> Tensor:
    """Every token of text is to be guessed."""
    text = (inputs["input_ids"] != tiny.IMAGE) & inputs["attention_mask"].bool()
    return inputs["input_ids"].masked_fill(~text, -100)


@pytest.mark.parametrize("side", ["left", "right"])
def test_forward_keeps_everything(model: Any, side: str) -> None:
    inputs = tiny.prompt(*ROWS, side=side)
    real = inputs["attention_mask"].bool()
    inputs["labels"] = labels_of(inputs)
    stock = model(**inputs)
    with reduced(model, Identity()):
        kept = model(**inputs)
    assert torch.equal(kept.logits[real], stock.logits[real])
    assert torch.equal(kept.loss, stock.loss)
    with reduced(model, Identity(), positions="original"):
        kept = model(**inputs)
    assert torch.allclose(kept.logits[real], stock.logits[real], atol=1e-4)
    assert torch.allclose(kept.loss, stock.loss)
    if side == "right":
        assert torch.equal(kept.logits[real], stock.logits[real])


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("positions", ["compact", "original"])
def test_forward_of_a_ragged_batch_equals_its_rows(model: Any, side: str, positions: Any) -> None:
    inputs = tiny.prompt(*ROWS, side=side)
    with reduced(model, Ragged(), positions=positions):
        batch = model(**inputs).logits
        for i, single in enumerate(tiny.one_by_one(ROWS, inputs)):
            alone = model(**single).logits[0]
            mine = batch[i, -len(alone) :] if side == "left" else batch[i, : len(alone)]
            assert torch.allclose(mine, alone, atol=1e-4)


def test_forward_with_labels(model: Any, inputs: dict[str, Any]) -> None:
    labels = labels_of(inputs)
    with reduced(model, Ragged()) as trace:
        out = model(**inputs, labels=labels)
        again = model(**inputs, labels=labels, return_dict=False)
    assert bool(torch.isfinite(out.loss))
    assert isinstance(again, tuple)
    assert torch.equal(again[0], out.loss)
    assert torch.equal(again[1], out.logits)
    assert out.logits.shape[:2] == (len(ROWS), max(_lengths(trace[: len(trace) // 2])))
    assert out.image_hidden_states.shape == (sum(len(plan) for plan in trace) // 2, 64)


def _lengths(plans: list[Reduction]) -> list[int]:
    """Length of each row of ROWS once its images are reduced."""
    left = iter(plans)
    return [sum(len(next(left)) if one == "#" else 1 for one in row) for row in ROWS]


def test_gradients_reach_projector_and_tower(inputs: dict[str, Any]) -> None:
    def gradients(reducer: Reducer | None) -> dict[str, Tensor]:
        model = tiny.llava().train()
        labels = labels_of(inputs)
        if reducer is None:
            model(**inputs, labels=labels).loss.backward()
        else:
            with reduced(model, reducer):
                model(**inputs, labels=labels).loss.backward()
        return {name: value.grad for name, value in model.named_parameters() if value.grad is not None}

    stock, kept = gradients(None), gradients(Identity())
    assert stock.keys() == kept.keys()
    assert all(torch.allclose(kept[name], stock[name], atol=1e-5) for name in stock)
    for reducer in (Ragged(), of_torino(), make("torino-m", sae=RawEmbedding())):
        found = gradients(reducer)
        assert found["model.multi_modal_projector.linear_1.weight"].abs().sum() > 0
        assert found["model.vision_tower.encoder.layers.0.mlp.fc1.weight"].abs().sum() > 0


def test_reducers_need_not_mind_gradients(inputs: dict[str, Any]) -> None:
    class Careless(Ragged):
        def plan(self, tokens: Any) -> Reduction:
            assert not torch.is_grad_enabled()
            assert tokens.patches.numpy().shape == (16, 64)
            assert tokens.cls.numpy().shape == (64,)
            return super().plan(tokens)

    model = tiny.llava().train()
    with reduced(model, Careless()):
        assert model(**inputs).logits.requires_grad


def test_outputs_of_other_encoders_stay(model: Any, inputs: dict[str, Any]) -> None:
    video = object()
    given = inputs | {"mm_encoder_outputs": {"video": video, "image": None}}
    shrunk, _ = adapter_for(model).shrink(given, Ragged(), "compact")
    assert set(shrunk["mm_encoder_outputs"]) == {"image", "video"}
    assert shrunk["mm_encoder_outputs"]["video"] is video
    assert given["mm_encoder_outputs"]["image"] is None


def test_generate_keeps_no_graph(model: Any, inputs: dict[str, Any]) -> None:
    graphs: list[bool] = []
    hook = model.model.multi_modal_projector.register_forward_hook(lambda _, a, out: graphs.append(out.requires_grad))
    ask(model, inputs, Ragged(), max_new_tokens=1)
    hook.remove()
    assert graphs == [False]


def test_the_headless_model_forwards_too(model: Any, inputs: dict[str, Any]) -> None:
    with reduced(model.model, Ragged()) as trace:
        states = model.model(**inputs).last_hidden_state
    assert states.shape[1] == max(_lengths(list(trace)))


# ---------------------------------------------------------------------- positions


def positions_seen(model: Any, inputs: dict[str, Any], reducer: Reducer | None, **options: Any) -> list[Tensor]:
    seen: list[Tensor] = []
    hook = model.model.language_model.register_forward_pre_hook(
        lambda _, a, given: seen.append(given["position_ids"]), with_kwargs=True
    )
    ask(model, inputs, reducer, **options)
    hook.remove()
    return seen


def test_positions_that_reach_the_language_model(model: Any) -> None:
    inputs = tiny.prompt("ab#cd", "#")
    kept = Fixed(Reduction.pick(torch.tensor([0, 3, 15]), (4, 4), "by hand"))
    first, *later = positions_seen(model, inputs, kept)
    assert first.tolist() == [[0, 1, 2, 3, 4, 5, 6], [0, 0, 0, 0, 0, 1, 2]]
    assert [step.tolist() for step in later] == [[[7 + i], [3 + i]] for i in range(NEW - 1)]
    first, *later = positions_seen(model, inputs, kept, positions="original")
    assert first.tolist() == [[0, 1, 2, 5, 17, 18, 19], [0, 0, 0, 0, 0, 3, 15]]
    assert [step.tolist() for step in later] == [[[20 + i], [16 + i]] for i in range(NEW - 1)]
    for mode in ("compact", "original"):
        stock = positions_seen(model, inputs, None)
        assert equal(positions_seen(model, inputs, Identity(), positions=mode), stock)


def test_positions_of_the_callers_own(model: Any) -> None:
    inputs = tiny.prompt("ab#cd")
    own = torch.arange(20)[None]
    kept = Fixed(Reduction.pick(torch.tensor([0, 3, 15]), (4, 4), "by hand"))
    plain = ask(model, inputs, kept)
    assert same(ask(model, inputs | {"position_ids": own}, kept), plain)
    with reduced(model, kept), pytest.raises(BadParameter, match="do not simply count the tokens"):
        model(**inputs, position_ids=own * 2)
    first, *_ = positions_seen(model, inputs | {"position_ids": own * 2}, kept, positions="original")
    assert first.tolist() == [[0, 2, 4, 10, 34, 36, 38]]


# ---------------------------------------------------------------------- tokens of other kinds


def test_cls_tokens_global_tokens_and_tokens_twice(model: Any) -> None:
    """The features that the language model gets, worked out by hand from the stock tower."""
    inputs = tiny.prompt("a#b")
    whole = Reduction.of([{16: 1.0}, {1: 0.5, 6: 0.25}, {6: 1.0}, {6: 1.0}], (4, 4))
    everything = Reduction.of([dict.fromkeys(range(16), 1 / 16)], (4, 4))
    mean = copy.copy(everything)
    object.__setattr__(mean, "anchor", torch.tensor([-1]))
    states = model.model.vision_tower(inputs["pixel_values"], output_hidden_states=True).hidden_states[-2][0]
    wanted: dict[Reduction, list[Tensor]] = {
        whole: [states[0], 0.5 * states[2] + 0.25 * states[7], states[7], states[7]],
        mean: [states[1:].mean(0)],
        Reduction.of([{3: 1.0}, {16: 1.0}], (4, 4)): [states[4], states[0]],
    }
    for plan, rows in wanted.items():
        with reduced(model, Fixed(plan)):
            out = model(**inputs)
        assert torch.allclose(out.image_hidden_states, model.model.multi_modal_projector(torch.stack(rows)), atol=1e-4)
        assert out.logits.shape[1] == 2 + len(rows)
        for mode in ("compact", "original"):
            assert len(ask(model, inputs, Fixed(plan), positions=mode, num_beams=2).sequences) == 1
    atop = Reduction.of([{16: 1.0}], (4, 4))
    object.__setattr__(atop, "anchor", torch.tensor([16]))  # where CLS is; allowed, and no place either
    for plan in (atop, mean):
        assert positions_seen(model, inputs, Fixed(plan), positions="original")[0].tolist() == [[0, 16, 17]]
    first, *_ = positions_seen(model, inputs, Fixed(whole), positions="original")
    assert first.tolist() == [[0, 16, 2, 7, 7, 17]]  # a token of no place takes the last of its image


def test_a_budget_of_more_tokens_than_patches(model: Any, inputs: dict[str, Any]) -> None:
    with reduced(model, of_torino(budget=20)) as trace:
        model.generate(**inputs, max_new_tokens=1)
    assert trace.looks[0].after == (20,) * 4
    assert trace.bytes_saved < 0


def test_signals_are_handed_to_the_reducer(model: Any, inputs: dict[str, Any]) -> None:
    reducer = Needy.of("cls", "cls_attention", "keys", "queries", "keys@+1", "cls_attention@0")
    calls: list[int] = []
    hooks = [
        block.register_forward_hook(lambda _, a, o, number=number: calls.append(number))
        for number, block in enumerate(model.model.vision_tower.encoder.layers)
    ]
    with reduced(model, reducer) as trace:
        model(**inputs)
    [hook.remove() for hook in hooks]
    assert calls == [0, 1, 2]  # of 4 blocks; the last is entered for its keys, and stock runs it to the end
    image = reducer.shown[0]
    assert image.origin.block == 2
    assert image.origin.encoder == tiny.NAME
    for name in ("cls", "cls_attention", "keys", "queries", "keys@+1", "cls_attention@0"):
        assert image.signal(name, "this test") is not None
    assert set(image.signals) == {"queries", "keys@+1", "cls_attention@0"}
    assert set(trace.seconds) == {"tower", "signals", "plan", "projector"}
    plain = Needy.of()
    with reduced(model, plain):
        model(**inputs)
    assert plain.shown[0].keys is None
    assert plain.shown[0].cls_attention is None


@pytest.mark.parametrize("layer", [-1, -2, 1, 0])
def test_other_layers(layer: int) -> None:
    model, inputs = tiny.llava(vision_feature_layer=layer), tiny.prompt("a#b")
    stock = tiny.llava(vision_feature_layer=layer or -5)  # transformers 5.23 takes 0 for a flag that is not set
    assert same(ask(model, inputs, Identity()), ask(stock, inputs))
    reducer = Needy.of()
    with reduced(model, reducer):
        model(**inputs)
        model(**inputs, vision_feature_layer=-3)
    assert [image.origin.block for image in reducer.shown] == [layer % 5 - 1, 1]


# ---------------------------------------------------------------------- other towers


@pytest.mark.parametrize(("tower", "per_image"), [("siglip", 16), ("dinov2", 16), ("registers", 16 + tiny.REGISTERS)])
def test_other_towers(tower: str, per_image: int) -> None:
    model = tiny.llava(tower)
    inputs = tiny.prompt("ab#cd", "#e#f", "k", per_image=per_image)
    assert same(ask(model, inputs, Identity()), ask(model, inputs))
    assert same(ask(model, inputs, Identity(), num_beams=2), ask(model, inputs, num_beams=2))
    with reduced(model, of_torino()) as trace:
        model.generate(**inputs, max_new_tokens=2)
        logits = model(**inputs).logits
    extra = per_image - 16
    assert [len(plan) + extra for plan in trace][:3] == list(trace.looks[0].after)
    assert trace.looks[0].before == (per_image,) * 3
    assert logits.shape[1] == 2 + sum(trace.looks[0].after[1:])  # row "#e#f"
    if tower == "registers":
        seen = positions_seen(model, inputs, Fixed(Reduction.pick(torch.tensor([5]), (4, 4), "")), positions="original")
        assert seen[0][0, -7:].tolist() == [0, 1, 2, 3, 2 + 2 + 5, 20, 21]  # the registers stay, before the patches


@pytest.mark.parametrize("need", ["cls", "cls_attention"])
def test_a_tower_without_a_cls_token(need: str) -> None:
    model, inputs = tiny.llava("siglip"), tiny.prompt("a#")
    with reduced(model, Needy.of(need)), pytest.raises(MissingSignal, match="tower of this model has none"):
        model.generate(**inputs)
    vip = Fixed(Reduction.of([{16: 1.0}], (4, 4), "vip"))
    with (
        reduced(model, vip),
        pytest.raises(MissingSignal, match=r"vip keeps the CLS token, and the tower Siglip.* none"),
    ):
        model.generate(**inputs)


# ---------------------------------------------------------------------- sentences


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"vision_feature_select_strategy": "full"}, "feeds the CLS token to its language model"),
        ({"vision_feature_layer": (-2, -1)}, r"reads several tower layers at once \(\[-2, -1\]\)"),
        ({"vision_feature_layer": 7}, "vision_feature_layer is 7, and the tower has hidden states -5 to 4"),
    ],
)
def test_models_that_are_not_reduced(change: dict[str, Any], words: str) -> None:
    model = tiny.llava(**change)
    with reduced(model, Ragged()), pytest.raises(TorinoError, match=words):
        model.generate(**tiny.prompt("a#"))


def test_a_patch_taken_for_a_cls_token() -> None:
    model = tiny.llava("siglip", vision_feature_select_strategy="default")
    with reduced(model, Ragged()), pytest.raises(TorinoError, match=r"a patch in SiglipVisionModel. Use .full."):
        model(**tiny.prompt("a#", per_image=15))


def hooks_on(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


@pytest.mark.parametrize("method", ["__call__", "generate"])
def test_calls_that_do_not_fit_together(model: Any, method: str) -> None:
    inputs, hooks = tiny.prompt("ab#cd", "#e"), hooks_on(model)
    images = inputs["pixel_values"]
    wrong: list[tuple[dict[str, Any], type[Exception], str]] = [
        (
            {"pixel_values": images[:1]},
            BadTokens,
            r"1 image was given \(16 placeholders\), and row 1 of the prompt has 16",
        ),
        (
            {"pixel_values": torch.cat([images, images])},
            BadTokens,
            "4 images were given, and the prompt has places for 2",
        ),
        (
            {n: v[:, :-8] for n, v in inputs.items() if v.ndim == 2},
            BadTokens,
            "not what its images take .*cut by the tok",
        ),
        ({"inputs_embeds": torch.zeros(2, 20, 64)}, BadParameter, "embeddings cannot be shrunk"),
        ({"input_ids": None}, BadParameter, "Reduction needs input_ids with image placeholders"),
        ({"attention_mask": torch.ones(2, 25)}, BadParameter, "attention_mask must have the shape of input_ids"),
        ({"mm_encoder_outputs": {"image": object()}}, BadParameter, "Both pixel values and mm_encoder_outputs"),
        ({"past_key_values": _cache(model)}, BadParameter, "past_key_values holds 3 tokens already"),
    ]
    for change, error, words in wrong:
        with reduced(model, Ragged()) as trace, pytest.raises(error, match=words):
            getattr(model, method)(**(inputs | change))
        assert len(trace) == 0
    assert hooks_on(model) == hooks


def test_a_tower_that_fails_leaves_no_hooks(model: Any) -> None:
    inputs, before = tiny.prompt("a#"), hooks_on(model)

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    handle = model.model.vision_tower.encoder.layers[1].register_forward_hook(fail)
    with reduced(model, Needy.of("cls_attention")) as trace, pytest.raises(RuntimeError, match="out of memory"):
        model.generate(**inputs)
    handle.remove()
    assert hooks_on(model) == before
    assert len(trace) == 0


def _cache(model: Any) -> DynamicCache:
    return model(input_ids=torch.tensor([[4, 5, 6], [4, 5, 6]]), use_cache=True).past_key_values


def test_going_on_from_a_reduced_cache_is_refused_where_it_would_go_wrong(model: Any) -> None:
    inputs = tiny.prompt("ab#cd")
    with reduced(model, Ragged()):
        answer = model.generate(**inputs, max_new_tokens=3, return_dict_in_generate=True)
        longer = torch.cat([answer.sequences, torch.tensor([[5, 6]])], 1)
        with pytest.raises(BadParameter, match="let ReducingProcessor write the prompt"):
            model.generate(input_ids=longer, past_key_values=answer.past_key_values)
    with reduced(model, Ragged()), pytest.raises(BadParameter, match="prefill_chunk_size is set"):
        model.generate(**inputs, prefill_chunk_size=4)


def test_several_turns_by_the_other_door(model: Any) -> None:
    """The same tokens with and without a cache, which shows that the lengths are right."""
    first = ReducingProcessor(tiny.TinyProcessor(), model, Ragged())(images=tiny.pictures(1), text="ab#cd")
    answer = model.generate(**first, max_new_tokens=3, return_dict_in_generate=True)
    longer = torch.cat([answer.sequences, torch.tensor([[5, 6]])], 1)
    cached = model.generate(input_ids=longer, past_key_values=answer.past_key_values, max_new_tokens=3)
    encoded = first["mm_encoder_outputs"]
    assert torch.equal(cached, model.generate(input_ids=longer, mm_encoder_outputs=encoded, max_new_tokens=3))


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (
            lambda: tiny.sae(32),
            "This SAE reads 32-wide tokens of an unnamed encoder.*64-wide tokens of tiny/clip, block 2",
        ),
        (lambda: tiny.sae(block=1), "an unnamed encoder, block 1; these are .* block 2. Pick an SAE"),
        (lambda: tiny.sae(encoder="openai/clip-vit-large-patch14-336"), "clip-vit-large-patch14-336, block unknown"),
    ],
)
def test_an_sae_for_other_tokens(model: Any, made: Any, words: str) -> None:
    with reduced(model, make("torino-m", sae=made())), pytest.raises(SAEMismatch, match=words):
        model.generate(**tiny.prompt("a#"))
    with reduced(model, make("torino-m", sae=tiny.sae(encoder="other/CLIP", block=2))):
        model.generate(**tiny.prompt("a#"), max_new_tokens=1)


def test_what_is_no_reducer_no_model_no_position(model: Any) -> None:
    with pytest.raises(BadParameter, match=r"reducer must be a Reducer, such as .* got str"):
        apply(model, "torino-m")  # type: ignore[arg-type]
    with pytest.raises(BadParameter, match="positions must be own, compact or original"):
        apply(model, Ragged(), positions="both")  # type: ignore[arg-type]
    with pytest.raises(TorinoError, match="No host family is called 'llama'"):
        adapter_for(model.model.language_model)
    with pytest.raises(TorinoError, match="No host family is called 'Linear'"):
        adapter_for(nn.Linear(1, 1))


# ---------------------------------------------------------------------- leaving no trace


def test_the_model_is_as_before(model: Any, inputs: dict[str, Any]) -> None:
    before, names = ask(model, inputs), dict(model.__dict__)
    with reduced(model, Ragged()):
        assert not same(ask(model, inputs), before)
    assert same(ask(model, inputs), before)
    assert model.__dict__.keys() == names.keys()
    assert model.generate.__func__ is type(model).generate
    with pytest.raises(ZeroDivisionError), reduced(model, Ragged()):
        raise ZeroDivisionError
    assert model.__dict__.keys() == names.keys()
    with pytest.raises(BadTokens), reduced(model, Ragged()):
        model.generate(**_without(inputs, "pixel_values"), pixel_values=inputs["pixel_values"][:1])
    assert same(ask(model, inputs), before)
    assert model.__dict__.keys() == names.keys()


def test_blocks_within_blocks(model: Any, inputs: dict[str, Any]) -> None:
    stock, one, other = (ask(model, inputs, reducer) for reducer in (None, Ragged(), Ragged(1)))
    with reduced(model, Ragged()) as outer:
        assert same(ask(model, inputs), one)
        with reduced(model, Ragged(1)) as inner:
            assert same(ask(model, inputs), other)
        assert same(ask(model, inputs), one)
    assert same(ask(model, inputs), stock)
    assert (len(outer), len(inner)) == (8, 4)


def test_apply_and_remove(model: Any, inputs: dict[str, Any]) -> None:
    stock, one, other = (ask(model, inputs, reducer) for reducer in (None, Ragged(), Ragged(1)))
    trace = apply(model, Ragged())
    try:
        assert same(ask(model, inputs), one)
        assert len(trace) == 4
        with reduced(model, Ragged(1)):
            assert same(ask(model, inputs), other)
        assert same(ask(model, inputs), one)
        apply(model, Ragged(1))
        assert same(ask(model, inputs), other)
    finally:
        remove(model)
    assert same(ask(model, inputs), stock)
    remove(model)  # once more is no harm
    with reduced(model, Ragged()):
        apply(model, Ragged(1))
    assert same(ask(model, inputs), other)
    remove(model)
    assert "_torino_door" not in model.__dict__


def test_a_model_that_is_applied_to_can_be_forgotten() -> None:
    model = tiny.llava()
    apply(model, Ragged())
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_methods_that_others_put_there_stay() -> None:
    """As accelerate and model.forward = torch.compile(model.forward) do."""
    model, inputs = tiny.llava(), tiny.prompt("a#b")
    calls: list[str] = []

    def around(inner: Any, name: str) -> Any:
        def forward(*args: Any, **given: Any) -> Any:
            calls.append(name)
            return inner(*args, **given)

        return forward

    model.forward = around(model.forward, "before")
    mine = model.forward
    with reduced(model, Ragged()) as trace:
        model(**inputs)
        assert (calls, len(trace)) == (["before"], 1)
        model.forward = around(model.forward, "during")
        model(**inputs)
        assert (calls, len(trace)) == (["before", "during", "before"], 2)
    model(**inputs)  # reduced no more, through everything that was put there
    assert calls[3:] == ["during", "before"]
    assert len(trace) == 2
    model.forward = mine
    with reduced(model, Ragged()):
        pass
    assert model.forward is mine


def test_copies_are_not_reduced(inputs: dict[str, Any]) -> None:
    model = tiny.llava()
    with reduced(model, Ragged()):
        reduced_answer = ask(model, inputs)
        copied, pickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        with torch.no_grad():
            model.lm_head.weight.zero_()  # a copy that ran the original would show it
        answers = [ask(one, inputs) for one in (copied, pickled)]
    stock = ask(tiny.llava(), inputs)
    assert not same(reduced_answer, stock)
    for one, answer in zip((copied, pickled), answers, strict=True):
        assert same(answer, stock)
        assert same(ask(one, inputs), stock)
        assert same(ask(one, inputs, Ragged()), reduced_answer)


# ---------------------------------------------------------------------- threads


def run_in(*works: Any) -> None:
    errors: list[BaseException] = []

    def guarded(work: Any) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    if errors:
        raise errors[0]


def test_threads_do_not_mix(model: Any, inputs: dict[str, Any]) -> None:
    reducers = (Ragged(), Ragged(1), None)
    wanted = [ask(model, inputs, reducer).sequences for reducer in reducers]
    gate = threading.Barrier(len(reducers))

    def work(number: int) -> None:
        reducer, options = reducers[number], {"max_new_tokens": NEW}
        for _ in range(3):
            if reducer is None:
                gate.wait()
                found = model.generate(**inputs, **options)
            else:
                with reduced(model, reducer) as trace:
                    gate.wait()
                    found = model.generate(**inputs, **options)
                assert len(trace) == 4
            assert torch.equal(found, wanted[number])

    run_in(*[lambda number=number: work(number) for number in range(len(reducers))])
    assert "_torino_door" not in model.__dict__


def test_threads_started_inside_a_block(model: Any, inputs: dict[str, Any]) -> None:
    stock, one = (ask(model, inputs, reducer).sequences for reducer in (None, Ragged()))
    found: dict[str, Tensor] = {}

    def work(name: str) -> None:
        found[name] = model.generate(**inputs, max_new_tokens=NEW)

    with reduced(model, Ragged()):
        context = contextvars.copy_context()
        run_in(lambda: work("other"), lambda: context.run(work, "mine"))
    assert torch.equal(found["other"], stock)
    assert torch.equal(found["mine"], one)
    apply(model, Ragged())
    run_in(lambda: work("all"))
    remove(model)
    assert torch.equal(found["all"], one)
    with reduced(model, Ragged(1)):  # the context outlived its block, and must not pick that up again
        run_in(lambda: context.run(work, "late"))
    assert torch.equal(found["late"], stock)


def test_signatures_are_those_of_the_model(model: Any) -> None:
    """Transformers asks them what may be given; a trainer, which columns to keep."""
    stock = [inspect.signature(method) for method in (model.forward, model.generate)]
    with reduced(model, Ragged()):
        assert [inspect.signature(method) for method in (model.forward, model.generate)] == stock
        assert model.forward.__name__ == "forward"


def test_a_block_in_a_generator_closed_elsewhere(model: Any, inputs: dict[str, Any]) -> None:
    def answers() -> Iterator[Any]:
        with reduced(model, Ragged()):
            yield ask(model, inputs)

    stock, one = ask(model, inputs), ask(model, inputs, Ragged())
    generator = answers()
    assert same(contextvars.copy_context().run(next, generator), one)
    generator.close()
    assert same(ask(model, inputs), stock)
    assert "_torino_door" not in model.__dict__


# ---------------------------------------------------------------------- the other door


@pytest.mark.parametrize("positions", ["compact", "original"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_the_processor_equals_the_block(model: Any, side: str, positions: Any) -> None:
    processor = ReducingProcessor(tiny.TinyProcessor(side), model, Ragged(), positions=positions)
    given = processor(images=tiny.pictures(4), text=list(ROWS))
    assert "pixel_values" not in given
    length = given.input_ids.shape[1]
    for options in (MODES["beams"], MODES["greedy"], MODES["beams"], MODES["sampling"]):  # beams twice: inputs last
        wanted = ask(model, tiny.prompt(*ROWS), Ragged(), positions=positions, **options)
        found = ask(model, given, **options)
        assert torch.equal(found.sequences[:, length:], wanted.sequences[:, -NEW:])
        assert equal(found.logits, wanted.logits)
    assert torch.equal(found.sequences[:, :length], given["input_ids"])
    with reduced(model, Ragged(1)) as trace:  # a prompt of its final length is left alone
        assert same(ask(model, given, **MODES["sampling"]), found)
    assert len(trace) == 0
    assert processor.trace.after == sum(map(len, processor.trace))


def test_the_processor_otherwise(model: Any) -> None:
    inner = tiny.TinyProcessor()
    processor = ReducingProcessor(inner, model, Identity())
    text = processor(text=["ab", "c"])
    assert set(text) == {"input_ids", "attention_mask"}
    assert len(processor.trace) == 0
    assert processor.batch_decode(torch.tensor([[4, 5]])) == ["ab"]
    assert processor.side == "left"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = processor.nothing
    given = processor(images=tiny.pictures(1), text="a#")
    assert not any(value.requires_grad for value in given["mm_encoder_outputs"]["image"].pooler_output)
    assert torch.equal(model(**given).logits, model(**tiny.prompt("a#")).logits)
    assert given["mm_encoder_outputs"]["image"] is not given["mm_encoder_outputs"]["image"]
    assert isinstance(copy.deepcopy(given), ReducedInputs)
    moved = given.to("cpu", torch.bfloat16).to(dtype=torch.float16).to(device="cpu")
    assert moved.input_ids.dtype == torch.int64
    assert torch.equal(moved.input_ids, given.input_ids)
    with pytest.raises(AttributeError):
        _ = given.pixel_values


def test_the_processor_writes_conversations(model: Any) -> None:
    processor = ReducingProcessor(tiny.TinyProcessor(), model, Ragged())
    said = ["ab#cd"]
    assert processor.apply_chat_template(said) == "ab#cd"
    given = processor.apply_chat_template(said, images=tiny.pictures(1), return_dict=True)
    assert isinstance(given, ReducedInputs)
    direct = processor(images=tiny.pictures(1), text="ab#cd")
    assert torch.equal(ask(model, given).sequences, ask(model, direct).sequences)
    with pytest.raises(
        BadParameter, match=r"gave input_ids as list, and reduction needs tensors. Give return_tensors="
    ):
        processor.apply_chat_template(said, images=tiny.pictures(1), return_dict=True, return_tensors=None)


@pytest.mark.parametrize("square", [False, True])
def test_transformers_own_processor(model: Any, square: bool) -> None:
    processor = tiny.processor(square)
    images = tiny.photos(3)
    text = ["<image> a b", "c <image> <image> d e"]
    whole = processor(images=images, text=text, padding=True, return_tensors="pt")
    assert (whole["input_ids"] == tiny.IMAGE).sum() == 3 * tiny.PATCHES
    wrapped = ReducingProcessor(processor, model, Ragged())
    given = wrapped(images=images, text=text, padding=True)
    wanted, found = ask(model, whole, Ragged()), ask(model, given)
    assert torch.equal(found.sequences[:, -NEW:], wanted.sequences[:, -NEW:])
    assert same(ask(model, whole, Identity()), ask(model, whole))
    assert wrapped.trace.looks[0].padding == ("square" if square else "crop")
    content = [{"type": "image", "image": images[0]}, {"type": "text", "text": "a"}]
    written = wrapped.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=True, return_dict=True, add_generation_prompt=True
    )
    assert isinstance(written, ReducedInputs)
    assert written.input_ids.shape[1] == 2 + len(wrapped.trace[-1])
    assert len(processor.batch_decode(ask(model, written).sequences)) == 1


def test_how_images_were_brought_to_shape(model: Any) -> None:
    inner = tiny.TinyProcessor()
    processor = ReducingProcessor(inner, model, Identity())
    inner.image_processor = type("LlavaImageProcessorPil", (), {"do_pad": True, "do_center_crop": True})()  # type: ignore[attr-defined]
    processor(images=tiny.pictures(1), text="a#")
    inner.image_processor = type("CLIPImageProcessor", (), {"do_center_crop": True})()  # type: ignore[attr-defined]
    processor(images=tiny.pictures(1), text="a#")
    inner.image_processor = None  # type: ignore[attr-defined]
    processor(images=tiny.pictures(1), text="a#")
    assert [look.padding for look in processor.trace.looks] == ["square", "crop", ""]


# ---------------------------------------------------------------------- the trace


def test_the_trace(model: Any, inputs: dict[str, Any]) -> None:
    with reduced(model, of_torino()) as trace:
        model.generate(**inputs, max_new_tokens=2)
        model(**tiny.prompt("a#"))
    assert len(trace) == 5
    assert [len(look.reductions) for look in trace.looks] == [4, 1]
    assert trace.before == 5 * 16
    assert trace.after == sum(len(plan) for plan in trace) == sum(sum(look.after) for look in trace.looks)
    assert trace[0].by == "torino-m(k=2, delta=2)"
    assert trace[-1] is trace.looks[1].reductions[0]
    seconds = trace.seconds
    assert list(seconds) == ["tower", "plan", "sae", "grouping", "projector"]
    assert all(value > 0 for value in seconds.values())
    assert seconds["sae"] + seconds["grouping"] <= seconds["plan"]
    lines = trace.summary().splitlines()
    assert len(lines) == 4
    assert lines[0].split() == ["call", "images", "tokens", "removed", "cache", "saved", "reducer"]
    after = sum(trace.looks[0].after)
    assert lines[1].split()[:6] == ["0", "4", "64", "->", str(after), f"{1 - after / 64:.1%}"]
    assert lines[1].endswith("torino-m(k=2, delta=2)")
    assert lines[3].startswith("time: tower ")
    assert "(sae " in lines[3]
    copied = pickle.loads(pickle.dumps(trace))
    assert isinstance(copied, Trace)
    assert copied.summary() == trace.summary()
    for one in (copied, copy.copy(trace), copy.deepcopy(trace)):
        one.add(trace.looks[0])
        assert (len(one), len(trace)) == (9, 5)


@pytest.mark.parametrize("rows", [("ab#cd",), ROWS], ids=["one row", "padded rows"])
def test_bytes_saved_are_those_of_the_caches(model: Any, rows: tuple[str, ...]) -> None:
    inputs = tiny.prompt(*rows)

    def size(cache: DynamicCache) -> int:
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)

    whole = size(model(**inputs, use_cache=True).past_key_values)
    with reduced(model, Ragged()) as trace:
        less = size(model(**inputs, use_cache=True).past_key_values)
    assert trace.bytes_saved == trace.looks[0].bytes_saved == whole - less > 0


# ---------------------------------------------------------------------- torch.compile


def test_a_compiled_language_model(model: Any) -> None:
    """Graphs are captured and not lowered: that lengths may vary is shown by their number, which stops rising."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    compiled, counter = tiny.llava(), CompileCounterWithBackend("eager")
    compiled.model.language_model.compile(dynamic=True, backend=counter)
    counts: list[int] = []
    for number in range(4):
        inputs = tiny.prompt("ab#cd", "#e#f", seed=number)
        reducer = Ragged(number)
        found, wanted = (ask(one, inputs, reducer, max_new_tokens=3) for one in (compiled, model))
        assert torch.equal(found.sequences, wanted.sequences)
        counts.append(counter.frame_count)
    assert counts[0] == counts[-1] <= 4
    torch._dynamo.reset()


def test_a_compiled_model(model: Any) -> None:
    """Steps without images are one graph, as they are outside a block; images are seen out of the compiler's sight."""
    torch._dynamo.reset()
    step = tiny.prompt("abc")
    wanted = model(**step).logits
    inputs = tiny.prompt("ab#")
    with reduced(model, Ragged()) as trace:
        whole = torch.compile(model.__call__, backend="eager", fullgraph=True)
        assert torch.allclose(whole(**step, use_cache=False).logits, wanted, atol=1e-5)
        parts = torch.compile(model.__call__, backend="eager")
        assert torch.allclose(parts(**inputs).logits, model(**inputs).logits, atol=1e-5)
    assert len(trace) == 2
    torch._dynamo.reset()


def test_original_positions_without_a_cache_and_without_padding() -> None:
    """transformers would take the gaps for seams of packed prompts, and mask across them."""
    model, reducer = tiny.llava(), make("torino-p(k=1, delta=1, budget=4)", sae=RawEmbedding())
    ids = torch.tensor([[1, 5, *[model.config.image_token_id] * 16, 7, 8]])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": tiny.pictures(1)}
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False}
    options |= {"output_logits": True, "return_dict_in_generate": True}
    with reduced(model, reducer, positions="original"):
        cached, plain = (model.generate(**inputs, **options, use_cache=cache) for cache in (True, False))
    assert torch.equal(cached.sequences, plain.sequences)
    for one, other in zip(cached.logits, plain.logits, strict=True):
        assert torch.allclose(one, other, atol=1e-4)
