"""Reduction inside the language model, against slow transcriptions, masks, singles and the stock model."""

from __future__ import annotations

import copy
import threading
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support import tiny
from tests.support.generation import ROWS, all_equal, same, torino_reducer
from tests.support.generation import generate as ask
from tests.support.reference_inside import RULES, reference_generate
from tests.support.tiny import PATCHES
from tests.vlm.test_families import MODELS, _Decoder
from torino import Reduction, VisualTokens, make
from torino.core.errors import BadParameter, BadTokens, MissingSignal, TorinoError, UnmetBudget
from torino.reducers import Composed, KeepShare, Reducer
from torino.vlm import VLM, ReducingProcessor, reduced
from torino.vlm.prefix import PrefixCache
from torino.vlm.session import Inputs

LAYERS = 8
METHODS = {"fastv": [(1, 5)], "pyramiddrop": [(2, 11), (4, 7), (6, 5)], "dart": [(1, 5)]}
SPECS = ["fastv(budget=5)", "pyramiddrop(budget=5)", "dart(budget=5)", "divprune(budget=9)+fastv(budget=4)"]
QUESTION = "ab#cdefg"


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny.llava(layers=LAYERS)


def input_embeds(model: Any, inputs: dict[str, Any]) -> Tensor:
    """Return the input embeddings of a prompt, with its images."""
    with torch.no_grad():
        return model(**inputs, output_hidden_states=True).hidden_states[0]


def cache_lengths(output: Any) -> list[int]:
    return [layer.get_seq_length() for layer in output.past_key_values.layers]


def cache_bytes(output: Any) -> int:
    return sum(part.nbytes for layer in output.past_key_values.layers for part in (layer.keys, layer.values))


# ---------------------------------------------------------------------- the published rules


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("method", METHODS)
def test_equals_a_slow_transcription(method: str, attention: str) -> None:
    model = tiny.llava(layers=LAYERS, attention=attention)
    for seed in range(3):
        inputs = tiny.prompt(QUESTION, seed=seed)
        image = (inputs["input_ids"][0] == tiny.IMAGE).nonzero()[:, 0].tolist()
        reducer = make(method, budget=5)
        assert reducer.stages(PATCHES, LAYERS) == METHODS[method]  # type: ignore[attr-defined]
        embeds = input_embeds(model, inputs)[0]
        tokens, logits, kept = reference_generate(model, embeds, image, METHODS[method], RULES[method], 5)
        with reduced(model, reducer) as trace:
            output = model.generate(
                **inputs, max_new_tokens=5, do_sample=False, return_dict_in_generate=True, output_logits=True
            )
        assert trace[0].sources.tolist() == [position - image[0] for position in kept]
        assert output.sequences[0, -5:].tolist() == tokens
        assert torch.allclose(torch.cat(output.logits), torch.stack(logits), atol=1e-4)


@pytest.mark.parametrize("blocks", [2, 3])
def test_shallow_models_have_fewer_stages(blocks: int) -> None:
    model = tiny.llava(layers=blocks)
    inputs = tiny.prompt(QUESTION)
    image = (inputs["input_ids"][0] == tiny.IMAGE).nonzero()[:, 0].tolist()
    stages = make("pyramiddrop", budget=5).stages(PATCHES, blocks)  # type: ignore[attr-defined]
    assert [block for block, _ in stages] == list(range(1, blocks))
    assert stages[-1][1] == 5
    embeds = input_embeds(model, inputs)[0]
    tokens, _, _ = reference_generate(model, embeds, image, stages, RULES["pyramiddrop"], 3)
    assert ask(model, inputs, make("pyramiddrop", budget=5), max_new_tokens=3).sequences[0, -3:].tolist() == tokens


# ---------------------------------------------------------------------- dropping equals masking, in every family


@contextmanager
def masked(model: Any, block: int, visible: Tensor) -> Generator[None]:
    """Hide columns of the prompt from the layers after a block; ``visible`` has shape (rows, length)."""

    def hook(module: Any, arguments: Any, given: dict[str, Any]) -> Any:
        mask = given["attention_mask"]
        n = visible.shape[1]
        if mask is None:
            mask = torch.ones(n, n, dtype=torch.bool).tril()[None, None]
        seen = visible[:, None, None]
        hidden = mask & seen if mask.dtype is torch.bool else mask.masked_fill(~seen, torch.finfo(mask.dtype).min)
        return arguments, {**given, "attention_mask": hidden}

    with ExitStack() as stack:
        for layer in model.get_decoder().layers[block:]:
            stack.callback(layer.self_attn.register_forward_pre_hook(hook, with_kwargs=True).remove)
        yield


SUPPORTED = ["llava", "qwen2_vl", "qwen2_5_vl", "internvl", "idefics3", "smolvlm"]


@pytest.mark.parametrize("family", SUPPORTED)
def test_dropping_equals_masking_in_every_supported_family(family: str) -> None:
    model, batches = MODELS[family]()
    image_token = int(model.config.image_token_id)
    for inputs in batches:
        for method in ("fastv", "dart"):
            with reduced(model, make(method, budget=2)) as trace, torch.no_grad():
                logits = model(**inputs).logits
            assert [len(plan) for plan in trace] == [2] * len(trace)
            ids, mask = inputs["input_ids"], inputs["attention_mask"].bool()
            visible = mask.clone()
            visible[ids == image_token] = torch.cat(
                [torch.zeros(plan.patches, dtype=torch.bool).index_fill_(0, plan.sources, True) for plan in trace]
            )
            with masked(model, 1, visible), torch.no_grad():
                expected = model(**inputs).logits
            text = mask & (ids != image_token)
            assert torch.allclose(logits[text], expected[text], atol=1e-4), (family, method)


@pytest.mark.parametrize("family", sorted(set(MODELS) - set(SUPPORTED)))
def test_other_families_are_refused_in_one_sentence(family: str) -> None:
    model, (inputs, _) = MODELS[family]()
    for spec in ("fastv(budget=2)", "random(budget=3)+dart(budget=2)"):
        with (
            reduced(model, make(spec)),
            pytest.raises(BadParameter, match="before the language model, such as torino-x"),
        ):
            model(**inputs)


# ---------------------------------------------------------------------- budgets, caches, batches, beams


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("budget", [1, 2, 7, PATCHES - 1])
def test_budgets_are_exact_and_the_cache_shrinks(model: Any, method: str, budget: int) -> None:
    inputs = tiny.prompt(QUESTION)
    length = inputs["input_ids"].shape[1]
    full = ask(model, inputs)
    with reduced(model, make(method, budget=budget)) as trace:
        output = model.generate(
            **inputs, max_new_tokens=5, return_dict_in_generate=True, output_logits=True, use_cache=True
        )
    assert len(trace[0]) == budget
    assert trace[0].by == f"{method}(budget={budget})"
    layers = trace.calls[0].layers
    assert layers[0] == PATCHES
    assert layers[-1] == budget
    assert len(layers) == LAYERS
    assert cache_lengths(output) == [length - PATCHES + count + 4 for count in layers]
    assert cache_bytes(full) - cache_bytes(output) == trace.bytes_saved > 0
    assert trace.layer_averaged == sum(layers) / LAYERS
    assert f"layer-averaged tokens: 16 -> {trace.layer_averaged:.1f}" in trace.summary()
    assert f"16 -> {budget}" in trace.summary()


@pytest.mark.parametrize("spec", ["fastv(budget=16)", "pyramiddrop(budget=16)", "dart(budget=16)"])
@pytest.mark.parametrize("mode", [{}, {"num_beams": 3}, {"use_cache": False}, {"do_sample": True, "temperature": 1.5}])
def test_all_tokens_are_bitwise_the_stock_model(model: Any, spec: str, mode: dict[str, Any]) -> None:
    for rows in (ROWS, (QUESTION,)):
        inputs = tiny.prompt(*rows)
        assert same(ask(model, inputs, make(spec), **mode), ask(model, inputs, **mode))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("mode", [{}, {"num_beams": 3, "num_return_sequences": 2}, {"use_cache": False}])
def test_rows_of_a_batch_equal_singles(spec: str, mode: dict[str, Any], attention: str) -> None:
    model = tiny.llava(layers=LAYERS, attention=attention)
    inputs = tiny.prompt(*ROWS)
    together = ask(model, inputs, make(spec), **mode)
    copies = mode.get("num_return_sequences", 1)
    for row, single in enumerate(tiny.one_by_one(ROWS, inputs)):
        alone = ask(model, single, make(spec), **mode)
        mine = slice(row * copies, (row + 1) * copies)
        assert torch.equal(together.sequences[mine, -5:], alone.sequences[:, -5:])
        if not mode.get("num_beams"):
            pairs = zip(together.logits, alone.logits, strict=True)
            assert all(torch.allclose(batch[row], one[0], atol=1e-4) for batch, one in pairs)


@pytest.mark.parametrize("spec", SPECS)
def test_kernels_and_caches_agree(spec: str) -> None:
    inputs = tiny.prompt(*ROWS)
    outputs = [
        ask(tiny.llava(layers=LAYERS, attention=attention), inputs, make(spec), **mode)
        for attention in ("sdpa", "eager")
        for mode in ({}, {"use_cache": False})
    ]
    for other in outputs[1:]:
        assert torch.equal(outputs[0].sequences, other.sequences)
        for first, second in zip(outputs[0].logits, other.logits, strict=True):
            assert torch.allclose(first, second, atol=1e-4)


@pytest.mark.parametrize("mode", [{}, {"num_beams": 2}])
def test_different_budgets_share_a_batch(model: Any, mode: dict[str, Any]) -> None:
    """Rows that lose different numbers of tokens, or none, equal single runs."""
    vlm = VLM(model, _Decoder())
    given = Inputs(dict(tiny.prompt(QUESTION)), ("",))
    reducers: list[Reducer | None] = [None, *(make(spec) for spec in [*SPECS, "fastv(budget=1)", "random(budget=3)"])]
    encoded = vlm.encode(given, reducers)
    reductions = [vlm.reduce(encoded, reducer) for reducer in reducers]
    together = vlm.generate(given, reductions, max_new_tokens=5, **mode)
    for number, reduction in enumerate(reductions):
        alone = vlm.generate(given, [reduction], max_new_tokens=5, **mode)
        assert torch.equal(together.ids[number], alone.ids[0])
        assert [plan.sources.tolist() for plan in together.plans[number]] == [
            p.sources.tolist() for p in alone.plans[0]
        ]
        assert reduction.tokens == round(sum(reduction.layers) / LAYERS if reduction.layers else len(alone.plans[0][0]))
    assert [len(plans[0]) for plans in together.plans] == [16, 5, 5, 5, 4, 1, 3]


def test_the_session_answers_like_reduced(model: Any) -> None:
    inputs = tiny.prompt(QUESTION)
    vlm = VLM(model, _Decoder())
    for spec in SPECS:
        answer = vlm.answer(Inputs(dict(inputs), ("",)), make(spec), max_new_tokens=5)
        with reduced(model, make(spec)) as trace:
            expected = model.generate(**inputs, max_new_tokens=5)[:, -5:]
        assert answer.text == _Decoder.batch_decode(expected)[0]
        assert answer.reduction.sources.tolist() == trace[0].sources.tolist()
        assert answer.layers == trace.calls[0].layers
        assert answer.after == round(trace.layer_averaged)
        assert answer.trace is not None
        assert answer.trace.bytes_saved == trace.bytes_saved
        assert answer.to_dict()["image_tokens"]["layer_averaged"] == round(trace.layer_averaged, 3)
        assert answer.to_dict()["reducer"] == spec


def test_a_shared_prefix_is_not_used(model: Any) -> None:
    """The tokens depend on the question, so the prompt is read as a whole."""
    vlm, prefix = VLM(model, _Decoder()), PrefixCache()
    for question in (QUESTION, "ab#zyx"):
        given = Inputs(dict(tiny.prompt(question)), ("",))
        reduction = vlm.reduce(vlm.encode(given), make("fastv", budget=3))
        shared = vlm.generate(given, [reduction], prefix=prefix, max_new_tokens=4)
        assert torch.equal(shared.ids, vlm.generate(given, [reduction], max_new_tokens=4).ids)


# ---------------------------------------------------------------------- forward


@pytest.mark.parametrize("spec", SPECS)
def test_forward_keeps_the_length_of_the_prompt_and_its_padding(model: Any, spec: str) -> None:
    rows = ("ab#cd", "#e#fgh", "klm")
    left, right = (tiny.prompt(*rows, side=side) for side in ("left", "right"))
    results = []
    for inputs in (left, right):
        labels = inputs["input_ids"].masked_fill(inputs["input_ids"] == tiny.IMAGE, -100)
        first = inputs["attention_mask"].cumsum(1) <= 1  # padding, and the first token, which follows it on one side
        labels = labels.masked_fill((inputs["attention_mask"] == 0) | first, -100)
        with reduced(model, make(spec), positions="original") as trace, torch.no_grad():
            output = model(**inputs, labels=labels)
        short = trace.calls[0].after[0] if "+" in spec else PATCHES
        assert output.logits.shape[1] == 2 * short + 4
        short_mask = torch.ones(3, 2 * short + 4, dtype=torch.bool)
        for row, length in enumerate((short + 4, 2 * short + 4, 3)):
            place = slice(None, -length) if inputs is left else slice(length, None)
            short_mask[row, place] = False
        results.append((output.loss, output.logits[short_mask]))
    assert torch.allclose(results[0][0], results[1][0], atol=1e-5)
    text = results[0][1].abs().sum(1) > 0
    assert torch.allclose(results[0][1][text], results[1][1][text], atol=1e-4)


@pytest.mark.parametrize("spec", [*SPECS, "random(budget=9)+dart(budget=4)"])
def test_labels_show_where_the_answer_begins(model: Any, spec: str) -> None:
    """The logits of a given answer are those of generating it: the answer is not read to choose tokens."""
    for question in (QUESTION, "ab#"):
        inputs = tiny.prompt(question)
        generated = ask(model, inputs, make(spec), suppress_tokens=[tiny.IMAGE])
        whole = tiny.padded([generated.sequences[0].tolist()])
        whole["pixel_values"] = inputs["pixel_values"]
        labels = whole["input_ids"].clone()
        labels[:, :-5] = -100
        with reduced(model, make(spec)) as trace, torch.no_grad():
            logits = model(**whole, labels=labels).logits[0, -6:-1]
        with reduced(model, make(spec)) as expected:
            model.generate(**inputs, max_new_tokens=1)
        assert trace[0].sources.tolist() == expected[0].sources.tolist()
        assert torch.allclose(logits, torch.cat(generated.logits), atol=1e-4)


def test_gradients_reach_the_projector() -> None:
    model = tiny.llava(layers=4)
    with reduced(model, make("fastv", budget=3)):
        model(**tiny.prompt(QUESTION)).logits[:, -1].sum().backward()
    gradient = model.model.multi_modal_projector.linear_1.weight.grad
    assert gradient is not None
    assert float(gradient.abs().sum()) > 0


# ---------------------------------------------------------------------- composition


def test_composed_reductions_go_back_to_the_patches(model: Any) -> None:
    inputs = tiny.prompt(QUESTION)
    first = torino_reducer("torino-m", budget=8)
    reducer = Composed(first, make("fastv", budget=3))
    assert reducer.spec == f"{first.spec}+fastv(budget=3)"
    with reduced(model, first) as before:
        model.generate(**inputs, max_new_tokens=1)
    with reduced(model, reducer) as trace:
        output = model.generate(**inputs, max_new_tokens=2, return_dict_in_generate=True, output_logits=True)
    plan, whole = before[0], trace[0]
    assert (len(plan), len(whole)) == (8, 3)
    assert whole.grid == plan.grid
    assert whole.by == reducer.spec
    assert cache_lengths(output) == [7 + 8 + 1] + [7 + 3 + 1] * (LAYERS - 1)
    assert trace.before == PATCHES
    assert trace.layer_averaged == (8 + 3 * (LAYERS - 1)) / LAYERS
    rows = {tuple(zip(*row, strict=True)): token for token, row in enumerate(_entries(plan))}
    kept = [rows[tuple(zip(*row, strict=True))] for row in _entries(whole)]  # every token is one of the first plan's
    assert kept == sorted(kept)
    assert whole.anchor.tolist() == plan.anchor[kept].tolist()
    assert whole.concept.tolist() == plan.concept[kept].tolist()
    assert whole.role == tuple(plan.role[token] for token in kept)
    represented = plan.assigned >= 0
    assert bool((whole.assigned[represented] >= 0).all())  # dropped tokens pass their patches on
    for token, inner in enumerate(kept):
        assert bool((whole.assigned[plan.assigned == inner] == token).all())
    assert int(whole.sizes.sum()) == int(represented.sum())


def _entries(plan: Reduction) -> list[tuple[list[int], list[float]]]:
    parts = [slice(int(a), int(b)) for a, b in zip(plan.offsets[:-1], plan.offsets[1:], strict=True)]
    return [(plan.sources[part].tolist(), plan.weights[part].tolist()) for part in parts]


@pytest.mark.parametrize("attention", ["proportional", "restore"])
@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
def test_attention_modes_combine_with_dropping(attention: str, kernel: str) -> None:
    """Dropping equals hiding under calibrated attention too, and the scores include what is added to the logits."""
    model = tiny.llava(layers=4, attention=kernel)
    first = make("divprune", budget=8)
    options: dict[str, Any] = {"positions": "original", "attention": attention}
    inputs = tiny.prompt(QUESTION)
    with reduced(model, Composed(first, make("fastv", budget=3)), **options) as trace, torch.no_grad():
        logits = model(**inputs).logits[:, -1]
    with reduced(model, first, **options) as before, torch.no_grad():
        weights = model(**inputs, output_attentions=kernel == "eager").attentions
    kept = [before[0].anchor.tolist().index(anchor) for anchor in trace[0].anchor.tolist()]
    if weights is not None:
        score = weights[0][0, :, -1, 2:10].mean(0)
        assert sorted(score.argsort(descending=True)[:3].tolist()) == kept
        assert torch.allclose(trace[0].score, score[kept], atol=1e-5)
    visible = torch.ones(1, 7 + 8, dtype=torch.bool)
    visible[0, 2:10] = torch.zeros(8, dtype=torch.bool).index_fill_(0, torch.tensor(kept), True)
    with reduced(model, first, **options), masked(model, 1, visible), torch.no_grad():
        expected = model(**inputs).logits[:, -1]
    assert torch.allclose(logits, expected, atol=1e-4)
    options["suppress_tokens"] = [tiny.IMAGE]
    outputs = [
        ask(model, tiny.prompt(*ROWS), Composed(first, make("dart", budget=3)), use_cache=use_cache, **options)
        for use_cache in (True, False)
    ]
    assert torch.equal(outputs[0].sequences, outputs[1].sequences)


# ---------------------------------------------------------------------- degenerate inputs


@pytest.mark.parametrize("method", METHODS)
def test_ties_go_to_the_first_tokens(method: str) -> None:
    model = tiny.llava(layers=4)
    inputs = tiny.prompt("ab#c")
    inputs["pixel_values"] = torch.zeros_like(inputs["pixel_values"])
    with torch.no_grad():
        for parameter in model.model.multi_modal_projector.parameters():
            parameter.zero_()  # all image tokens are equal
        for layer in model.get_decoder().layers:
            layer.self_attn.k_proj.weight.zero_()  # and attended to equally
            layer.self_attn.v_proj.weight.zero_()  # and stay equal
    with reduced(model, make(method, budget=5)) as trace:
        model.generate(**inputs, max_new_tokens=2)
    assert trace[0].sources.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("method", METHODS)
def test_the_last_token_of_a_prompt_stays(model: Any, method: str) -> None:
    """A prompt may end with an image; the answer continues from its last token."""
    inputs = tiny.prompt("z#")
    with reduced(model, make(method, budget=3)) as trace:
        output = ask(model, inputs, make(method, budget=3))
        model.generate(**inputs, max_new_tokens=2)
    assert len(trace[0]) == 3
    assert int(trace[0].sources[-1]) == PATCHES - 1
    uncached = ask(model, inputs, make(method, budget=3), use_cache=False)
    assert torch.equal(output.sequences, uncached.sequences)


@pytest.mark.parametrize("method", METHODS)
def test_values_that_are_not_finite_are_refused(method: str) -> None:
    model = tiny.llava(layers=4)
    with torch.no_grad():
        model.get_decoder().layers[0].self_attn.k_proj.weight.fill_(torch.nan)
    with reduced(model, make(method, budget=3)), pytest.raises(BadTokens, match="NaN or infinite"):
        model.generate(**tiny.prompt(QUESTION), max_new_tokens=2)


def test_registers_are_kept() -> None:
    model = tiny.llava("registers", layers=4)
    per_image = PATCHES + tiny.REGISTERS
    inputs = tiny.prompt(QUESTION, per_image=per_image)
    with reduced(model, make("fastv", budget=3)) as trace:
        output = model.generate(**inputs, max_new_tokens=2, return_dict_in_generate=True, output_logits=True)
    assert trace[0].patches == PATCHES
    assert len(trace[0]) == 3
    assert cache_lengths(output) == [7 + per_image + 1] + [7 + tiny.REGISTERS + 3 + 1] * 3


def test_a_share_of_the_patches(model: Any) -> None:
    with reduced(model, KeepShare(make("fastv", budget=1), 0.25)) as trace:
        model.generate(**tiny.prompt(*ROWS), max_new_tokens=2)
    assert [len(plan) for plan in trace] == [4] * 4
    assert trace[0].by == "fastv with a budget of 25% of the patches"


# ---------------------------------------------------------------------- the model stays as it was


def test_no_hook_remains_even_after_an_error(model: Any) -> None:
    for budget in (3, PATCHES + 1):
        with reduced(model, make("fastv", budget=budget)):
            try:
                model.generate(**tiny.prompt(QUESTION), max_new_tokens=2)
            except UnmetBudget:
                assert budget > PATCHES
    layers = model.get_decoder().layers
    assert not any(layer._forward_pre_hooks or layer._forward_hooks for layer in layers)


def test_a_model_that_ignores_hooks_is_refused(model: Any) -> None:
    """Compiled models do; without this check the answer would be that of all tokens."""
    layers = model.get_decoder().layers
    for layer in layers:
        layer._call_impl = layer.forward  # what a compiler calls
    try:
        with reduced(model, make("fastv", budget=3)), pytest.raises(TorinoError, match=r"before torch\.compile"):
            model.generate(**tiny.prompt(QUESTION), max_new_tokens=2)
    finally:
        for layer in layers:
            del layer._call_impl


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("spec", SPECS)
def test_half_precision(spec: str, dtype: torch.dtype) -> None:
    for attention in ("sdpa", "eager"):
        model = tiny.llava(layers=4, attention=attention).to(dtype)
        inputs = tiny.prompt(*ROWS)
        inputs["pixel_values"] = inputs["pixel_values"].to(dtype)
        with reduced(model, make(spec)) as trace:
            output = model.generate(**inputs, max_new_tokens=3, return_dict_in_generate=True, output_logits=True)
        assert all(bool(logits.isfinite().all()) for logits in output.logits)
        assert {len(plan) for plan in trace} == {4 if "+" in spec else 5}


def test_other_threads_use_the_stock_model(model: Any) -> None:
    inputs = tiny.prompt(QUESTION)
    stock = ask(model, inputs)
    seen: list[Any] = []
    original = type(model.get_decoder()).forward

    def forward(self: Any, *arguments: Any, **named: Any) -> Any:
        if not seen and threading.current_thread() is threading.main_thread():
            seen.append(None)
            thread = threading.Thread(target=lambda: seen.append(ask(model, inputs)))
            thread.start()
            thread.join()
        return original(self, *arguments, **named)

    decoder = model.get_decoder()
    decoder.forward = forward.__get__(decoder)
    try:
        with reduced(model, make("fastv", budget=3)) as trace:
            model.generate(**inputs, max_new_tokens=2)
    finally:
        del decoder.forward
    assert len(trace[0]) == 3
    assert torch.equal(seen[1].sequences, stock.sequences)
    assert all_equal(seen[1].logits, stock.logits)


# ---------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache_implementation": "static"}, "cache_implementation='static' is set, and fastv.* needs a dynamic cache"),
        ({"prompt_lookup_num_tokens": 2}, "assisted generation is not supported by fastv"),
        ({"assistant_model": tiny.llava()}, "assisted generation is not supported by fastv"),
    ],
)
def test_options_of_generate_are_refused(model: Any, options: dict[str, Any], message: str) -> None:
    inputs = tiny.prompt(QUESTION)
    with reduced(model, make("fastv", budget=3)), pytest.raises(BadParameter, match=message):
        model.generate(**inputs, max_new_tokens=2, **options)
    vlm = VLM(model, _Decoder())
    with pytest.raises(BadParameter, match=message):
        vlm.answer(Inputs(dict(inputs), ("",)), make("fastv", budget=3), max_new_tokens=2, **options)


def test_a_static_cache_is_refused_in_forward(model: Any) -> None:
    from transformers import StaticCache

    cache = StaticCache(config=model.config.get_text_config(), max_cache_len=64)
    with reduced(model, make("fastv", budget=3)), pytest.raises(BadParameter, match="needs a dynamic cache"):
        model(**tiny.prompt(QUESTION), past_key_values=cache, use_cache=True)


def test_continuing_from_an_uneven_cache_is_refused(model: Any) -> None:
    inputs = tiny.prompt(QUESTION)
    with reduced(model, make("fastv", budget=3)):
        output = model.generate(**inputs, max_new_tokens=2, return_dict_in_generate=True)
        text = tiny.prompt("ab")
        for call in (model, model.generate):
            with pytest.raises(BadParameter, match="hold different numbers of tokens"):
                call(**text, past_key_values=copy.deepcopy(output.past_key_values))


def test_attention_without_masks_is_refused() -> None:
    model = tiny.llava(layers=4)
    model.config.text_config._attn_implementation = "flash_attention_2"
    vlm = VLM(model, _Decoder())
    given = Inputs(dict(tiny.prompt(QUESTION)), ("",))
    with pytest.raises(BadParameter, match='attn_implementation="sdpa"'):
        vlm.reduce(vlm.encode(given), make("fastv", budget=3))


def test_sliding_windows_are_refused() -> None:
    model = tiny.llava(layers=4)
    model.config.text_config.sliding_window = 8
    with reduced(model, make("dart", budget=3)), pytest.raises(BadParameter, match="sliding window"):
        model(**tiny.prompt(QUESTION))


def test_budgets_and_blocks_are_checked(model: Any) -> None:
    inputs = tiny.prompt(QUESTION)
    for method in METHODS:
        with reduced(model, make(method, budget=17)), pytest.raises(UnmetBudget, match="only 16 tokens"):
            model(**inputs)
    with reduced(model, make("random(budget=3)+fastv(budget=4)")), pytest.raises(UnmetBudget, match="only 3 tokens"):
        model(**inputs)
    for method in ("fastv", "dart"):
        with reduced(model, make(method, budget=3, block=8)), pytest.raises(BadParameter, match="block=8 leaves no"):
            model(**inputs)
        with reduced(model, make(method, budget=3, block=7)) as trace, torch.no_grad():
            model(**inputs)
        assert trace.calls[0].layers == (16,) * 7 + (3,)
    shallow = tiny.llava(layers=1)
    with (
        reduced(shallow, make("fastv", budget=3)),
        pytest.raises(BadParameter, match="this one has 1, so it leaves no block"),
    ):
        shallow(**inputs)


def test_where_no_language_model_runs(model: Any) -> None:
    for spec in ("fastv(budget=2)", "random(budget=3)+dart(budget=2)"):
        with pytest.raises(MissingSignal, match="inside the language model, which does not run here"):
            make(spec).plan(VisualTokens(torch.randn(4, 8), grid=(2, 2)))
        with pytest.raises(BadParameter, match="ReducingProcessor"):
            ReducingProcessor(_Decoder(), model, make(spec))
