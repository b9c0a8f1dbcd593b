"""``reduced``, ``apply`` and ``remove`` on a tiny LLaVA: forward, nesting, threads, copies and compilation."""

from __future__ import annotations

import contextvars
import copy
import gc
import inspect
import pickle
import threading
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support import tiny
from tests.support.generation import NEW, ROWS, generate, same, torino_reducer, without
from tests.support.tiny import Identity, Ragged
from torino import RawEmbedding, Reduction, TorinoError, make
from torino.core.errors import BadParameter, BadTokens
from torino.reducers import Reducer
from torino.vlm import adapter_for, apply, reduced, remove

# ---------------------------------------------------------------------- forward


def make_labels(inputs: Mapping[str, Any]) -> Tensor:
    """Return labels for every token of text."""
    is_text = (inputs["input_ids"] != tiny.IMAGE) & inputs["attention_mask"].bool()
    return inputs["input_ids"].masked_fill(~is_text, -100)


@pytest.mark.parametrize("side", ["left", "right"])
def test_forward_identity(model: Any, side: str) -> None:
    inputs = tiny.prompt(*ROWS, side=side)
    mask = inputs["attention_mask"].bool()
    inputs["labels"] = make_labels(inputs)
    stock = model(**inputs)
    with reduced(model, Identity()):
        kept = model(**inputs)
    assert torch.equal(kept.logits[mask], stock.logits[mask])
    assert torch.equal(kept.loss, stock.loss)
    with reduced(model, Identity(), positions="original"):
        kept = model(**inputs)
    assert torch.allclose(kept.logits[mask], stock.logits[mask], atol=1e-4)
    assert torch.allclose(kept.loss, stock.loss)
    if side == "right":
        assert torch.equal(kept.logits[mask], stock.logits[mask])


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("positions", ["compact", "original"])
def test_forward_of_a_ragged_batch_equals_its_rows(model: Any, side: str, positions: Any) -> None:
    inputs = tiny.prompt(*ROWS, side=side)
    with reduced(model, Ragged(), positions=positions):
        batch = model(**inputs).logits
        for i, single in enumerate(tiny.one_by_one(ROWS, inputs)):
            alone = model(**single).logits[0]
            row = batch[i, -len(alone) :] if side == "left" else batch[i, : len(alone)]
            assert torch.allclose(row, alone, atol=1e-4)


def test_forward_with_labels(model: Any, inputs: dict[str, Any]) -> None:
    labels = make_labels(inputs)
    with reduced(model, Ragged()) as trace:
        out = model(**inputs, labels=labels)
        again = model(**inputs, labels=labels, return_dict=False)
    assert bool(torch.isfinite(out.loss))
    assert isinstance(again, tuple)
    assert torch.equal(again[0], out.loss)
    assert torch.equal(again[1], out.logits)
    assert out.logits.shape[:2] == (len(ROWS), max(_reduced_lengths(trace[: len(trace) // 2])))
    assert out.image_hidden_states.shape == (sum(len(plan) for plan in trace) // 2, 64)


def _reduced_lengths(plans: list[Reduction]) -> list[int]:
    """Return the length of each row of ROWS after reduction."""
    remaining = iter(plans)
    return [sum(len(next(remaining)) if char == "#" else 1 for char in row) for row in ROWS]


def test_gradients_reach_projector_and_tower(inputs: dict[str, Any]) -> None:
    def gradients(reducer: Reducer | None) -> dict[str, Tensor]:
        model = tiny.llava().train()
        labels = make_labels(inputs)
        if reducer is None:
            model(**inputs, labels=labels).loss.backward()
        else:
            with reduced(model, reducer):
                model(**inputs, labels=labels).loss.backward()
        return {name: value.grad for name, value in model.named_parameters() if value.grad is not None}

    stock, identity = gradients(None), gradients(Identity())
    assert stock.keys() == identity.keys()
    assert all(torch.allclose(identity[name], stock[name], atol=1e-5) for name in stock)
    for reducer in (Ragged(), torino_reducer(), make("torino-m", sae=RawEmbedding())):
        gradient = gradients(reducer)
        assert gradient["model.multi_modal_projector.linear_1.weight"].abs().sum() > 0
        assert gradient["model.vision_tower.encoder.layers.0.mlp.fc1.weight"].abs().sum() > 0


def test_reducers_get_tokens_without_gradients(inputs: dict[str, Any]) -> None:
    class Careless(Ragged):
        def plan(self, tokens: Any) -> Reduction:
            assert not torch.is_grad_enabled()
            assert tokens.patches.numpy().shape == (16, 64)
            assert tokens.cls.numpy().shape == (64,)
            return super().plan(tokens)

    model = tiny.llava().train()
    with reduced(model, Careless()):
        assert model(**inputs).logits.requires_grad


def test_model_without_head(model: Any, inputs: dict[str, Any]) -> None:
    with reduced(model.model, Ragged()) as trace:
        states = model.model(**inputs).last_hidden_state
    assert states.shape[1] == max(_reduced_lengths(list(trace)))


def test_positional_arguments(model: Any, inputs: dict[str, Any]) -> None:
    ids, rest = inputs["input_ids"], without(inputs, "input_ids")
    answer = generate(model, inputs, Ragged()).sequences
    with reduced(model, Ragged()):
        assert torch.equal(model.generate(ids, max_new_tokens=NEW, **rest), answer)
        assert torch.equal(model.generate(inputs=ids, max_new_tokens=NEW, **rest), answer)
        logits = model(**inputs).logits
        assert torch.equal(model(ids, **rest).logits, logits)
        assert torch.equal(model(ids, inputs["pixel_values"], inputs["attention_mask"]).logits, logits)
        with pytest.raises(ValueError, match="not allowed"):  # message of transformers
            model.generate(ids, **inputs)
        with pytest.raises(BadParameter, match="forward got 1 positional arguments, which stand for input_ids"):
            model(ids, **inputs)


# ---------------------------------------------------------------------- the model is unchanged afterwards


def test_model_is_unchanged_after_the_block(model: Any, inputs: dict[str, Any]) -> None:
    before, names = generate(model, inputs), dict(model.__dict__)
    with reduced(model, Ragged()):
        assert not same(generate(model, inputs), before)
    assert same(generate(model, inputs), before)
    assert model.__dict__.keys() == names.keys()
    assert model.generate.__func__ is type(model).generate
    with pytest.raises(ZeroDivisionError), reduced(model, Ragged()):
        raise ZeroDivisionError
    assert model.__dict__.keys() == names.keys()
    with pytest.raises(BadTokens), reduced(model, Ragged()):
        model.generate(**without(inputs, "pixel_values"), pixel_values=inputs["pixel_values"][:1])
    assert same(generate(model, inputs), before)
    assert model.__dict__.keys() == names.keys()


def test_nested_blocks(model: Any, inputs: dict[str, Any]) -> None:
    stock, first, second = (generate(model, inputs, reducer) for reducer in (None, Ragged(), Ragged(1)))
    with reduced(model, Ragged()) as outer:
        assert same(generate(model, inputs), first)
        with reduced(model, Ragged(1)) as inner:
            assert same(generate(model, inputs), second)
        assert same(generate(model, inputs), first)
    assert same(generate(model, inputs), stock)
    assert (len(outer), len(inner)) == (8, 4)


def test_apply_and_remove(model: Any, inputs: dict[str, Any]) -> None:
    stock, first, second = (generate(model, inputs, reducer) for reducer in (None, Ragged(), Ragged(1)))
    trace = apply(model, Ragged())
    try:
        assert same(generate(model, inputs), first)
        assert len(trace) == 4
        with reduced(model, Ragged(1)):
            assert same(generate(model, inputs), second)
        assert same(generate(model, inputs), first)
        apply(model, Ragged(1))
        assert same(generate(model, inputs), second)
    finally:
        remove(model)
    assert same(generate(model, inputs), stock)
    remove(model)  # a second call has no effect
    with reduced(model, Ragged()):
        apply(model, Ragged(1))
    assert same(generate(model, inputs), second)
    remove(model)
    assert "_torino_wrapper" not in model.__dict__


def test_applied_model_can_be_garbage_collected() -> None:
    model = tiny.llava()
    apply(model, Ragged())
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_methods_wrapped_by_others_are_kept() -> None:
    """For example by accelerate, or by model.forward = torch.compile(model.forward)."""
    model, inputs = tiny.llava(), tiny.prompt("a#b")
    calls: list[str] = []

    def around(inner: Any, name: str) -> Any:
        def forward(*args: Any, **named: Any) -> Any:
            calls.append(name)
            return inner(*args, **named)

        return forward

    model.forward = around(model.forward, "before")
    wrapped = model.forward
    with reduced(model, Ragged()) as trace:
        model(**inputs)
        assert (calls, len(trace)) == (["before"], 1)
        model.forward = around(model.forward, "during")
        model(**inputs)
        assert (calls, len(trace)) == (["before", "during", "before"], 2)
    model(**inputs)  # no longer reduced, but still wrapped
    assert calls[3:] == ["during", "before"]
    assert len(trace) == 2
    model.forward = wrapped
    with reduced(model, Ragged()):
        pass
    assert model.forward is wrapped


def test_copies_are_not_reduced(inputs: dict[str, Any]) -> None:
    model = tiny.llava()
    with reduced(model, Ragged()):
        reduced_answer = generate(model, inputs)
        copied, pickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        with torch.no_grad():
            model.lm_head.weight.zero_()  # changes the answers of any copy that runs the original
        answers = [generate(duplicate, inputs) for duplicate in (copied, pickled)]
    stock = generate(tiny.llava(), inputs)
    assert not same(reduced_answer, stock)
    for duplicate, answer in zip((copied, pickled), answers, strict=True):
        assert same(answer, stock)
        assert same(generate(duplicate, inputs), stock)
        assert same(generate(duplicate, inputs, Ragged()), reduced_answer)


def test_signatures_are_unchanged(model: Any) -> None:
    """transformers checks arguments against them, and its trainer selects columns by them."""
    stock = [inspect.signature(method) for method in (model.forward, model.generate)]
    with reduced(model, Ragged()):
        assert [inspect.signature(method) for method in (model.forward, model.generate)] == stock
        assert model.forward.__name__ == "forward"


def test_wrong_arguments_are_refused(model: Any) -> None:
    with pytest.raises(BadParameter, match=r"reducer must be a Reducer, such as .* got str"):
        apply(model, "torino-m")  # type: ignore[arg-type]
    with pytest.raises(BadParameter, match="positions must be auto, compact, original or median"):
        apply(model, Ragged(), positions="both")  # type: ignore[arg-type]
    with pytest.raises(TorinoError, match="No model family is called 'llama'"):
        adapter_for(model.model.language_model)
    with pytest.raises(TorinoError, match="No model family is called 'Linear'"):
        adapter_for(nn.Linear(1, 1))


# ---------------------------------------------------------------------- threads


def run_threads(*works: Any) -> None:
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


def test_threads_are_independent(model: Any, inputs: dict[str, Any]) -> None:
    reducers = (Ragged(), Ragged(1), None)
    expected = [generate(model, inputs, reducer).sequences for reducer in reducers]
    gate = threading.Barrier(len(reducers))

    def work(number: int) -> None:
        reducer, options = reducers[number], {"max_new_tokens": NEW}
        for _ in range(3):
            if reducer is None:
                gate.wait()
                output = model.generate(**inputs, **options)
            else:
                with reduced(model, reducer) as trace:
                    gate.wait()
                    output = model.generate(**inputs, **options)
                assert len(trace) == 4
            assert torch.equal(output, expected[number])

    run_threads(*[lambda number=number: work(number) for number in range(len(reducers))])
    assert "_torino_wrapper" not in model.__dict__


def test_threads_started_inside_a_block(model: Any, inputs: dict[str, Any]) -> None:
    stock, reduced_answer = (generate(model, inputs, reducer).sequences for reducer in (None, Ragged()))
    outputs: dict[str, Tensor] = {}

    def work(name: str) -> None:
        outputs[name] = model.generate(**inputs, max_new_tokens=NEW)

    with reduced(model, Ragged()):
        context = contextvars.copy_context()
        run_threads(lambda: work("new"), lambda: context.run(work, "copied"))
    assert torch.equal(outputs["new"], stock)
    assert torch.equal(outputs["copied"], reduced_answer)
    apply(model, Ragged())
    run_threads(lambda: work("all"))
    remove(model)
    assert torch.equal(outputs["all"], reduced_answer)
    with reduced(model, Ragged(1)):  # the context outlives its block and must not use this one
        run_threads(lambda: context.run(work, "late"))
    assert torch.equal(outputs["late"], stock)


def test_block_in_a_generator_that_is_closed_elsewhere(model: Any, inputs: dict[str, Any]) -> None:
    def answers() -> Iterator[Any]:
        with reduced(model, Ragged()):
            yield generate(model, inputs)

    stock, reduced_answer = generate(model, inputs), generate(model, inputs, Ragged())
    generator = answers()
    assert same(contextvars.copy_context().run(next, generator), reduced_answer)
    generator.close()
    assert same(generate(model, inputs), stock)
    assert "_torino_wrapper" not in model.__dict__


# ---------------------------------------------------------------------- torch.compile


def test_compiled_language_model(model: Any) -> None:
    """Graphs are captured but not lowered. Their number stops rising, so they work for varying lengths."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    compiled, counter = tiny.llava(), CompileCounterWithBackend("eager")
    compiled.model.language_model.compile(dynamic=True, backend=counter)
    counts: list[int] = []
    for number in range(4):
        inputs = tiny.prompt("ab#cd", "#e#f", seed=number)
        reducer = Ragged(number)
        output, expected = (generate(m, inputs, reducer, max_new_tokens=3) for m in (compiled, model))
        assert torch.equal(output.sequences, expected.sequences)
        counts.append(counter.frame_count)
    assert counts[0] == counts[-1] <= 4
    torch._dynamo.reset()


def test_compiled_model(model: Any) -> None:
    """Steps without images are one graph, as outside a block; images are encoded outside the compiler."""
    torch._dynamo.reset()
    step = tiny.prompt("abc")
    expected = model(**step).logits
    inputs = tiny.prompt("ab#")
    with reduced(model, Ragged()) as trace:
        compiled = torch.compile(model.__call__, backend="eager", fullgraph=True)
        assert torch.allclose(compiled(**step, use_cache=False).logits, expected, atol=1e-5)
        with_breaks = torch.compile(model.__call__, backend="eager")
        assert torch.allclose(with_breaks(**inputs).logits, model(**inputs).logits, atol=1e-5)
    assert len(trace) == 2
    torch._dynamo.reset()
